// Linear layers over packed weights, with what follows a product in its epilogue.
//
// A weight [N, K] is packed in panels of TILE_COLUMNS outputs, [N / C][K words][C] words; outputs past N are zero. A
// gated weight has its gate and up rows interleaved in runs of VL, so that a tile's first vector is gates and its
// second ups. A unit of work is one panel by a run of rows; how rows are cut changes no bit.
//
// K may be cut in leaves: equal slices, each summed from zero, whose sums are added as a binary tree. Processes that hold
// some leaves each then come to the very bits of one that holds all.
#pragma once

#include "activations.h"
#include "amx.h"
#include "step.h"
#include "tile.h"

template <class E>
INLINE int64_t words_of(int64_t count) {
    return (count + PER_WORD<E> - 1) / PER_WORD<E>;
}

// The best token of each row so far, as one thread knows it.
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

constexpr int MAX_LEAVES = 8, MAX_LEVELS = 3;

// Sums of leaves as they are; `Dequantize` (int8.h) is the other kind.
struct AsSummed {
    INLINE Floats operator()(int, int64_t, int64_t, Floats total) const { return total; }
};

// What a product reads: rows of words, and a packed weight.
struct Factors {
    const uint32_t* rows;
    int64_t row_stride;
    const uint32_t* weight;
    int64_t words;
    int leaves;
};

// `Partial` turns what was summed over a leaf into floats; `Epilogue` is given the tree's sum, and tells whether it does
// no more than most networks need: then its code is part of the loops.
template <class E, class Partial, class Epilogue, bool MAY_USE_TILES = true>
class LinearRunner {
   public:
    LinearRunner(const Factors& factors, Partial partial, Epilogue epilogue, Cursor& ahead)
        : input_(factors.rows), stride_(factors.row_stride), weight_(factors.weight), words_(factors.words),
          leaves_(factors.leaves), leaf_words_(factors.words / factors.leaves), partial_(partial), epilogue_(epilogue),
          ahead_(ahead) {}

    // Computes rows [begin, end) of one panel.
    void run(int64_t panel, int64_t begin, int64_t end) {
        const uint32_t* right = weight_ + panel * words_ * TILE_COLUMNS;
#if defined(HAS_TILES)
        if constexpr (MAY_USE_TILES && ON_TILES<E>) return run_on_tiles(panel, begin, end, right);
#endif
        const int64_t count = end - begin, num_tiles = (count + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
        const char* next = (const char*)(right + words_ * TILE_COLUMNS);
        if (num_tiles == 1 && count < FETCHING_ROWS) return choose<NO_LINES, MAX_TILE_ROWS>(count, panel, begin, right, {});
        if (num_tiles == 1)
            return choose<SAME_LINES, MAX_TILE_ROWS, FETCHING_ROWS>(count, panel, begin, right, {next, words_});
        // The first tiles fetch the next panel, which memory gives more slowly than one tile multiplies; the others what
        // the next attention reads.
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
    // Tiles of fewer than `LEAST` rows never come here.
    template <int LINES, int R, int LEAST = 1>
    INLINE void choose(int64_t num_rows, int64_t panel, int64_t row, const uint32_t* right, Lines stream) {
        if constexpr (R >= LEAST) {
            if (num_rows == R)
                compute<LINES, R>(panel, row, right, stream);
            else
                choose<LINES, R - 1, LEAST>(num_rows, panel, row, right, stream);
        }
    }

    template <int LINES, int R>
    __attribute__((noinline)) void compute(int64_t panel, int64_t row, const uint32_t* right, Lines stream) {
        Floats sums[R][2], waiting[MAX_LEVELS][R][2];
        const uint32_t* left = input_ + row * stride_;
        for (int leaf = 0;; leaf++) {
            UNROLL for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = zero();
            const int64_t some = LINES > 0 ? std::clamp<int64_t>(stream.count, 0, leaf_words_) : leaf_words_;
            multiply<E, R, LINES>(sums, left, stride_, {right, right + VL, TILE_COLUMNS}, some, stream.first);
            if (some < leaf_words_) {
                const uint32_t* rest = right + some * TILE_COLUMNS;
                multiply<E, R, NO_LINES>(sums, left + some, stride_, {rest, rest + VL, TILE_COLUMNS}, leaf_words_ - some);
            }
            left += leaf_words_, right += leaf_words_ * TILE_COLUMNS;
            stream = {stream.first + leaf_words_ * LINES * LINE_BYTES, stream.count - leaf_words_};
            const int64_t column = panel * TILE_COLUMNS;
            UNROLL for (int r = 0; r < R; r++) {
                sums[r][0] = partial_(leaf, row + r, column, sums[r][0]);
                sums[r][1] = partial_(leaf, row + r, column + VL, sums[r][1]);
            }
            // A leaf's sum meets that of the one before it, both that of the two before them: as a counter carries.
            int level = 0;
            for (; leaf >> level & 1; level++)
                UNROLL for (int r = 0; r < R; r++) {
                    sums[r][0] = add(waiting[level][r][0], sums[r][0]);
                    sums[r][1] = add(waiting[level][r][1], sums[r][1]);
                }
            if (leaf + 1 == leaves_) break;
            UNROLL for (int r = 0; r < R; r++) waiting[level][r][0] = sums[r][0], waiting[level][r][1] = sums[r][1];
        }
        if (epilogue_.is_plain()) {
            UNROLL for (int r = 0; r < R; r++) epilogue_.template put<true>(panel, row + r, sums[r][0], sums[r][1]);
            return;
        }
        // By way of memory, so that there is one copy of what follows: it is long.
        alignas(64) float kept[R][TILE_COLUMNS];
        UNROLL for (int r = 0; r < R; r++) store(kept[r], sums[r][0]), store(kept[r] + VL, sums[r][1]);
        _Pragma("GCC unroll 1") for (int r = 0; r < R; r++)
            epilogue_.template put<false>(panel, row + r, load(kept[r]), load(kept[r] + VL));
    }

#if defined(HAS_TILES)
    // In blocks of as many rows each, so that tiles are configured once: the last ones may share some rows, which get the
    // same bits twice.
    void run_on_tiles(int64_t panel, int64_t begin, int64_t end, const uint32_t* right) {
        const int64_t count = end - begin, num_blocks = (count + BLOCK_ROWS - 1) / BLOCK_ROWS;
        const int rows = (int)((count + num_blocks - 1) / num_blocks);
        const char* next = (const char*)(right + words_ * TILE_COLUMNS);
        for (int64_t block = 0; block < num_blocks; block++) {
            const int64_t first = std::min(begin + block * rows, end - rows);
            // The first block fetches the next panel while it multiplies.
            product_.fetch(block == 0 ? next : nullptr);
            compute_on_tiles(panel, first, rows, right);
        }
    }

    void compute_on_tiles(int64_t panel, int64_t first, int rows, const uint32_t* right) {
        alignas(64) uint32_t raw[BLOCK_ROWS][TILE_COLUMNS];
        alignas(64) float waiting[MAX_LEVELS][BLOCK_ROWS][TILE_COLUMNS];
        const uint32_t* left = input_ + first * stride_;
        for (int leaf = 0; leaf < leaves_; leaf++, left += leaf_words_, right += leaf_words_ * TILE_COLUMNS) {
            product_.template compute<E>(left, stride_, rows, right, leaf_words_, raw[0]);
            for (int row = 0; row < rows; row++) {
                const float* sums = (const float*)raw[row];
                const int64_t column = panel * TILE_COLUMNS;
                Floats low = partial_(leaf, first + row, column, load(sums));
                Floats high = partial_(leaf, first + row, column + VL, load(sums + VL));
                int level = 0;
                for (; leaf >> level & 1; level++) {
                    low = add(load(waiting[level][row]), low);
                    high = add(load(waiting[level][row] + VL), high);
                }
                if (leaf + 1 < leaves_)
                    store(waiting[level][row], low), store(waiting[level][row] + VL, high);
                else if (epilogue_.is_plain())
                    epilogue_.template put<true>(panel, first + row, low, high);
                else
                    epilogue_.template put<false>(panel, first + row, low, high);
            }
        }
    }

    TileProduct<> product_;
#endif

    const uint32_t* input_;
    int64_t stride_;
    const uint32_t* weight_;
    int64_t words_;
    int leaves_;
    int64_t leaf_words_;
    Partial partial_;
    Epilogue epilogue_;
    Cursor& ahead_;
};

// The sums that adapters add to the products of one unit, for the rows that have an adapter.
struct Deltas {
    int64_t first_row = 0;
    bool has[UNIT_ROWS] = {};
    alignas(64) float sums[UNIT_ROWS][TILE_COLUMNS];

    // Null: this row's products stay as they are.
    INLINE const float* of(int64_t row) const { return has[row - first_row] ? sums[row - first_row] : nullptr; }
};

// Keeps the sums of some rows as deltas of a unit.
struct KeepDeltas {
    Deltas& deltas;

    bool is_plain() const { return true; }

    template <bool PLAIN>
    INLINE void put(int64_t, int64_t row, Floats left, Floats right) const {
        float* place = deltas.sums[row - deltas.first_row];
        store(place, left);
        store(place + VL, right);
        deltas.has[row - deltas.first_row] = true;
    }
};

// Adds the bias, then the row's delta; activates what is to be narrow; and rounds to the output's type.
template <class E, class Out>
struct StoreRows {
    Out* output;
    const E* bias;
    int64_t out_features;
    const Deltas* deltas = nullptr;
    int32_t activation = AS_IT_IS;

    bool is_plain() const { return activation == AS_IT_IS; }

    template <bool PLAIN>
    INLINE void put(int64_t panel, int64_t row, Floats left, Floats right) const {
        const int64_t column = panel * TILE_COLUMNS, rest = out_features - column;
        Out* place = output + row * out_features + column;
        const float* delta = deltas ? deltas->of(row) : nullptr;
        if (rest >= TILE_COLUMNS) {
            if (bias) left = add(left, load(bias + column)), right = add(right, load(bias + column + VL));
            if (delta) left = add(left, load(delta)), right = add(right, load(delta + VL));
            if (!PLAIN) left = activate<E>(activation, left), right = activate<E>(activation, right);
            store(place, left);
            store(place + VL, right);
            return;
        }
        const int first = (int)std::min<int64_t>(rest, VL), second = (int)rest - first;
        if (bias) left = add(left, load(bias + column, first));
        if (delta) left = add(left, load(delta));
        if (!PLAIN) left = activate<E>(activation, left);
        store(place, left, first);
        if (second > 0) {
            if (bias) right = add(right, load(bias + column + VL, second));
            if (delta) right = add(right, load(delta + VL));
            if (!PLAIN) right = activate<E>(activation, right);
            store(place + VL, right, second);
        }
    }
};

// (up + 1) * gate / (1 + exp(-1.702 * gate)), of a gate that is cut above, and an up that is cut on both sides.
template <class E>
__attribute__((noinline)) Floats clamped_swiglu(Floats gate, Floats up, float limit) {
    const Floats most = broadcast(limit);
    // The order of operands keeps what is no number.
    gate = min(most, gate);
    up = max(broadcast(-limit), min(most, up));
    const Floats glu = divide_by_one_and_power<E>(gate, mul(gate, broadcast(-1.702f * LOG2_OF_E)));
    return mul(add(up, broadcast(1.0f)), glu);
}

// activation(gate) * up; or with a limit `clamped_swiglu`.
template <class E>
struct StoreGated {
    E* output;
    const E* bias;  // [gates, ups] as given
    int64_t num_outputs;
    const Deltas* deltas;
    int32_t activation;
    float limit = 0;

    bool is_plain() const { return activation == SILU && limit == 0; }

    template <bool PLAIN>
    INLINE void put(int64_t panel, int64_t row, Floats gate, Floats up) const {
        const int64_t column = panel * VL;
        const int count = (int)std::min<int64_t>(num_outputs - column, VL);
        if (bias) {
            gate = add(gate, load(bias + column, count));
            up = add(up, load(bias + num_outputs + column, count));
        }
        if (const float* delta = deltas ? deltas->of(row) : nullptr) {
            gate = add(gate, load(delta));
            up = add(up, load(delta + VL));
        }
        Floats result;
        if (!PLAIN && limit != 0)
            result = clamped_swiglu<E>(gate, up, limit);
        else
            result = mul(PLAIN ? silu<E>(gate) : activate<E>(activation, gate), up);
        store(output + row * num_outputs + column, result, count);
    }
};

// Makes logits of products: with the bias, scaled and capped.
template <class E>
struct Logits {
    const E* bias;
    float scale, softcap;

    bool is_plain() const { return !bias && scale == 1 && softcap == 0; }

    // Finishes the sums of `count` columns, the first of which is `column`.
    Floats operator()(Floats sums, int64_t column, int count) const {
        if (bias) sums = add(sums, load(bias + column, count));
        return scale == 1 && softcap == 0 ? sums : transform_logits(sums, scale, softcap);
    }
};

// Stores logits as they are.
template <class E>
struct StoreLogits {
    float* output;
    int64_t out_features;
    Logits<E> logits_of;

    bool is_plain() const { return logits_of.is_plain(); }

    template <bool PLAIN>
    INLINE void put(int64_t panel, int64_t row, Floats left, Floats right) const {
        const int64_t column = panel * TILE_COLUMNS;
        put_vector<PLAIN>(row, column, left);
        if (column + VL < out_features) put_vector<PLAIN>(row, column + VL, right);
    }

    template <bool PLAIN>
    INLINE void put_vector(int64_t row, int64_t column, Floats sums) const {
        const int count = (int)std::min<int64_t>(out_features - column, VL);
        store(output + row * out_features + column, PLAIN ? sums : logits_of(sums, column, count), count);
    }
};

// Keeps the best of each row, and the logits where they are wanted.
template <class E>
struct KeepBest {
    float* logits;
    Best* best;
    int64_t out_features;
    Logits<E> logits_of;

    bool is_plain() const { return logits_of.is_plain(); }

    template <bool PLAIN>
    INLINE void put(int64_t panel, int64_t row, Floats left, Floats right) const {
        const int64_t column = panel * TILE_COLUMNS;
        keep<PLAIN>(row, column, left);
        if (column + VL < out_features) keep<PLAIN>(row, column + VL, right);
    }

    template <bool PLAIN>
    INLINE void keep(int64_t row, int64_t column, Floats sums) const {
        const int count = (int)std::min<int64_t>(out_features - column, VL);
        Floats values = PLAIN ? sums : logits_of(sums, column, count);
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
