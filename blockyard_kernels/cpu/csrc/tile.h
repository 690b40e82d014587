// The one matrix product: a tile of up to 12 rows by two vectors of columns, summed over words in order.
//
// A row's sums are the same bits whatever the number of rows, the place of the row in a tile or of the tile in a matrix:
// each output is one accumulator that walks over the inner dimension from its beginning. Linear layers and both products
// of attention use it; what differs is where the words of the right side lie.
#pragma once

#include "simd.h"

// 12 x 2 accumulators, two vectors of the right side and one broadcast fit into 32 registers; 4 x 2 into 16.
#if defined(__AVX512F__)
constexpr int MAX_TILE_ROWS = 12;
#else
constexpr int MAX_TILE_ROWS = 4;
#endif
constexpr int TILE_COLUMNS = 2 * VL;

// The place of a tile's right side: word k of column c at first[k * stride + c] for the first VL columns, at
// second[...] for the others.
struct Right {
    const uint32_t* first;
    const uint32_t* second;
    int64_t stride;
};

constexpr int64_t LINE_BYTES = 64;

// How many lines a word a tile fetches into the cache on its way, of memory that will be needed soon, so that it streams
// in while the sums are what takes time: none, one, or as many as the word itself has. It does not fetch its own right
// side: the processor sees for itself that this is read in order, and told so as well took 4 % longer for one row.
constexpr int NO_LINES = 0, ONE_LINE = 1, SAME_LINES = TILE_COLUMNS * 4 / LINE_BYTES;

// From how many rows on a tile that is alone fetches the next panel while it multiplies. Intel's processors wait for
// memory at each panel's beginning otherwise: on a Xeon of the fourth generation products of 1, 4, 8 and 12 rows took 27,
// 45, 40 and 25 % less time with it. Zen 4 fetches panels by itself while a tile has few rows: 8 and 12 rows took 7 and
// 17 % less, 6 and fewer took longer.
#if defined(__AVX512BF16__)
constexpr int FETCHING_ROWS = 7;
#elif defined(__AVX512F__)
constexpr int FETCHING_ROWS = 1;
#else
constexpr int FETCHING_ROWS = MAX_TILE_ROWS + 1;
#endif

template <class E, int R, int LINES>
INLINE void multiply(
    Floats (&sums)[R][2], const uint32_t* left, int64_t left_stride, Right right, int64_t num_words,
    const char* stream = nullptr) {
    for (int64_t k = 0; k < num_words; k++) {
        Words b0 = load_words(right.first + k * right.stride);
        Words b1 = load_words(right.second + k * right.stride);
        UNROLL for (int line = 0; line < LINES; line++) _mm_prefetch(stream + (k * LINES + line) * LINE_BYTES, _MM_HINT_T1);
        UNROLL for (int r = 0; r < R; r++) {
            Words a = broadcast_word(left[r * left_stride + k]);
            sums[r][0] = dot<E>(sums[r][0], a, b0);
            sums[r][1] = dot<E>(sums[r][1], a, b1);
        }
    }
}
