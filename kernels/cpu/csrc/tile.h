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

// Where the words of a tile's right side lie: word k of column c at first[k * stride + c] for the first VL columns, at
// second[...] for the others.
struct Right {
    const uint32_t* first;
    const uint32_t* second;
    int64_t stride;
};

// What a tile fetches into the cache on its way: nothing; its own right side, some words ahead; or a line a word of
// memory that will be needed soon, so that it streams in while the sums are what takes time.
enum class Fetch { NOTHING, AHEAD, STREAM };

constexpr int64_t LINE_BYTES = 64;


template <class E, int R, Fetch FETCH>
INLINE void multiply(
    Floats (&sums)[R][2], const uint32_t* left, int64_t left_stride, Right right, int64_t num_words,
    const char* stream = nullptr) {
    // Far enough ahead of the loads to hide the memory's latency, and within a few pages.
    constexpr int64_t AHEAD = 48;
    for (int64_t k = 0; k < num_words; k++) {
        Words b0 = load_words(right.first + k * right.stride);
        Words b1 = load_words(right.second + k * right.stride);
        if constexpr (FETCH == Fetch::AHEAD) {
            _mm_prefetch((const char*)(right.first + (k + AHEAD) * right.stride), _MM_HINT_T0);
            if (VL == 16) _mm_prefetch((const char*)(right.second + (k + AHEAD) * right.stride), _MM_HINT_T0);
        }
        if constexpr (FETCH == Fetch::STREAM) _mm_prefetch(stream + k * LINE_BYTES, _MM_HINT_T1);
        UNROLL for (int r = 0; r < R; r++) {
            Words a = broadcast_word(left[r * left_stride + k]);
            sums[r][0] = dot<E>(sums[r][0], a, b0);
            sums[r][1] = dot<E>(sums[r][1], a, b1);
        }
    }
}
