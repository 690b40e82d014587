// Linear layers over packed weights, with what follows a product in its epilogue.
//
// A weight [N, K] is packed in panels of TILE_COLUMNS outputs, [N / C][K words][C] words; outputs past N are zero. A
// gated weight has its gate and up rows interleaved in runs of VL, so that a tile's first vector is gates and its
// second ups. A unit of work is one panel by a run of rows; how rows are cut changes no bit.
#pragma once

#include "amx.h"
#include "step.h"
#include "tile.h"

// Rows of one unit: their inputs stay in a core's caches while a panel is walked.
constexpr int64_t UNIT_ROWS = 192;

template <class E>
INLINE int64_t words_of(int64_t count) {
    return (count + PER_WORD<E> - 1) / PER_WORD<E>;
}

// What a thread knows of the best token of each row so far.
struct Best {
    float value[VL];
    int32_t id[VL];
    uint32_t not_finite;
};

inline int64_t num_panels(int64_t out_features) { return (out_features + TILE_COLUMNS - 1) / TILE_COLUMNS; }

// Reads row n of a packed weight that is not gated.
template <class E>
void unpack_row(const E* packed, int64_t n, int64_t k, E* row) {
    const int64_t words = words_of<E>(k);
    const E* column = packed + (n / TILE_COLUMNS * words * TILE_COLUMNS + n % TILE_COLUMNS) * PER_WORD<E>;
    for (int64_t word = 0; word < words; word++, column += TILE_COLUMNS * PER_WORD<E>)
        for (int i = 0; i < PER_WORD<E>; i++)
            if (word * PER_WORD<E> + i < k) row[word * PER_WORD<E> + i] = column[i];
}

// Neighbouring cache lines.
struct Lines {
    const char* first = nullptr;
    int64_t count = 0;
};

// Walks through the blocks that a thread will read in the next attention, of one layer: a range of lines each.
class Cursor {
   public:
    Cursor() = default;
    Cursor(const char* layer, int64_t block_bytes, int64_t lines, const int32_t* begin, const int32_t* end)
        : layer_(layer), block_bytes_(block_bytes), lines_(lines), next_(begin), end_(end) {}

    Lines take() {
        if (next_ == end_) return {};
        return {layer_ + *next_++ * block_bytes_, lines_};
    }

   private:
    const char* layer_ = nullptr;
    int64_t block_bytes_ = 0, lines_ = 0;
    const int32_t *next_ = nullptr, *end_ = nullptr;
};

template <class E, class Epilogue>
class LinearRunner {
   public:
    LinearRunner(
        const uint32_t* input, int64_t stride, const uint32_t* weight, int64_t words, Epilogue epilogue, Cursor& ahead)
        : input_(input), stride_(stride), weight_(weight), words_(words), epilogue_(epilogue), ahead_(ahead) {}

    // Computes rows [begin, end) of one panel.
    void run(int64_t panel, int64_t begin, int64_t end) {
        const uint32_t* right = weight_ + panel * words_ * TILE_COLUMNS;
#if defined(HAS_TILES)
        if constexpr (ON_TILES<E>) return run_on_tiles(panel, begin, end, right);
#endif
        const int64_t count = end - begin, num_tiles = (count + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
        if (num_tiles == 1) return choose<NO_LINES, MAX_TILE_ROWS>(count, panel, begin, right, {});
        // The first tiles fetch the next panel, which memory gives more slowly than one tile multiplies; the others what
        // the next attention reads.
        const char* next = (const char*)(right + words_ * TILE_COLUMNS);
        const char* end_of_next = next + words_ * TILE_COLUMNS * 4;
        for (int64_t tile = 0; tile < num_tiles; tile++, next += words_ * LINE_BYTES) {
            const int64_t first = begin + count * tile / num_tiles, last = begin + count * (tile + 1) / num_tiles;
            const Lines lines = next < end_of_next ? Lines{next, words_} : ahead_.take();
            if (lines.count)
                choose<ONE_LINE, MAX_TILE_ROWS>(last - first, panel, first, right, lines);
            else
                choose<NO_LINES, MAX_TILE_ROWS>(last - first, panel, first, right, {});
        }
    }

   private:
    template <int LINES, int R>
    INLINE void choose(int64_t num_rows, int64_t panel, int64_t row, const uint32_t* right, Lines stream) {
        if constexpr (R > 0) {
            if (num_rows == R)
                compute<LINES, R>(panel, row, right, stream);
            else
                choose<LINES, R - 1>(num_rows, panel, row, right, stream);
        }
    }

    template <int LINES, int R>
    __attribute__((noinline)) void compute(int64_t panel, int64_t row, const uint32_t* right, Lines stream) {
        Floats sums[R][2];
        UNROLL for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = zero();
        const uint32_t* left = input_ + row * stride_;
        const int64_t some = LINES > 0 ? std::min(stream.count, words_) : words_;
        multiply<E, R, LINES>(sums, left, stride_, {right, right + VL, TILE_COLUMNS}, some, stream.first);
        if (some < words_) {
            right += some * TILE_COLUMNS;
            multiply<E, R, NO_LINES>(sums, left + some, stride_, {right, right + VL, TILE_COLUMNS}, words_ - some);
        }
        UNROLL for (int r = 0; r < R; r++) epilogue_(panel, row + r, sums[r][0], sums[r][1]);
    }

#if defined(HAS_TILES)
    void run_on_tiles(int64_t panel, int64_t begin, int64_t end, const uint32_t* right) {
        const int64_t count = end - begin, num_blocks = (count + BLOCK_ROWS - 1) / BLOCK_ROWS;
        for (int64_t block = 0; block < num_blocks; block++) {
            const int64_t first = begin + count * block / num_blocks, last = begin + count * (block + 1) / num_blocks;
            alignas(64) uint32_t sums[BLOCK_ROWS][TILE_COLUMNS];
            product_.template compute<E>(input_ + first * stride_, stride_, (int)(last - first), right, words_, sums[0]);
            for (int64_t row = first; row < last; row++) {
                const float* of_row = (const float*)sums[row - first];
                epilogue_(panel, row, load(of_row), load(of_row + VL));
            }
        }
    }

    TileProduct<> product_;
#endif

    const uint32_t* input_;
    int64_t stride_;
    const uint32_t* weight_;
    int64_t words_;
    Epilogue epilogue_;
    Cursor& ahead_;
};

// Adds the bias and rounds to the output's type.
template <class E, class Out>
struct StoreRows {
    Out* output;
    const E* bias;
    int64_t out_features;

    INLINE void operator()(int64_t panel, int64_t row, Floats left, Floats right) const {
        const int64_t column = panel * TILE_COLUMNS, rest = out_features - column;
        Out* place = output + row * out_features + column;
        if (rest >= TILE_COLUMNS) {
            if (bias) left = add(left, load(bias + column)), right = add(right, load(bias + column + VL));
            store(place, left);
            store(place + VL, right);
            return;
        }
        const int first = (int)std::min<int64_t>(rest, VL), second = (int)rest - first;
        if (bias) left = add(left, load(bias + column, first));
        store(place, left, first);
        if (second > 0) {
            if (bias) right = add(right, load(bias + column + VL, second));
            store(place + VL, right, second);
        }
    }
};

// silu(gate) * up.
template <class E>
struct StoreGated {
    E* output;
    const E* bias;  // [gates, ups] as given
    int64_t num_outputs;

    INLINE void operator()(int64_t panel, int64_t row, Floats gate, Floats up) const {
        const int64_t column = panel * VL;
        const int count = (int)std::min<int64_t>(num_outputs - column, VL);
        if (bias) {
            gate = add(gate, load(bias + column, count));
            up = add(up, load(bias + num_outputs + column, count));
        }
        store(output + row * num_outputs + column, mul(silu<E>(gate), up), count);
    }
};

// Keeps the best of each row, and the logits where they are wanted.
template <class E>
struct KeepBest {
    float* logits;
    Best* best;
    int64_t out_features;

    INLINE void operator()(int64_t panel, int64_t row, Floats left, Floats right) const {
        const int64_t column = panel * TILE_COLUMNS;
        keep(row, column, left);
        if (column + VL < out_features) keep(row, column + VL, right);
    }

    INLINE void keep(int64_t row, int64_t column, Floats values) const {
        const int count = (int)std::min<int64_t>(out_features - column, VL);
        if (logits) store(logits + row * out_features + column, values, count);
        Best& mine = best[row];
        const Floats before = load(mine.value);
        // Most often no column is better than what was seen.
        if (!any(either(not_less(values, before), not_finite(values)))) return;
        mine.not_finite |= any(not_finite(values));
        if (count < VL) values = select(first_lanes(count), broadcast(-std::numeric_limits<float>::infinity()), values);
        const Words ids = add_words(broadcast_word((uint32_t)column), lane_numbers()), ids_before = load_words(mine.id);
        // Panels that were taken from another thread may come before those of this one.
        const Mask wins = either(greater(values, before), both(equal(values, before), less(ids, ids_before)));
        store(mine.value, select(wins, before, values));
        store_words(mine.id, select(wins, ids_before, ids));
    }
};
