// Products of weights of four bits: groups of neighbouring inputs have a scale and a zero point for each output.
//
// A panel is its groups one after another: [G / 8 words][C], of each word's bytes the lower halves inputs 0-3 and the
// upper ones inputs 4-7; then scales [C] float32 and zero points [C] bfloat16. Rows are quantized group by group, signed.
// A group's sum of integers is exact, and below 2^24 with its zero point taken out, so it is exact as a float; groups are
// added in order, leaves as in linear.h: no instruction set and no cut of the rows changes a bit.
#pragma once

#include "int8.h"

constexpr int64_t MAX_GROUP = 128;
constexpr int64_t INPUTS_PER_WORD = 8;
constexpr int64_t BYTES_AHEAD = 4096;

inline int64_t group_bytes(int64_t group) { return TILE_COLUMNS * (group / 2 + 6); }

// Adds the products of four unsigned bytes below 16 by four signed ones in each lane; `sum` holds integers.
template <class Byte>
INLINE Floats dot_halves(Floats sum, Words halves, Words bytes) {
#if defined(__AVX512F__)
    Words pairs = _mm512_madd_epi16(_mm512_maddubs_epi16(halves, bytes), _mm512_set1_epi16(1));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(sum), pairs));
#else
    Words pairs = _mm256_madd_epi16(_mm256_maddubs_epi16(halves, bytes), _mm256_set1_epi16(1));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(sum), pairs));
#endif
}

#if defined(__AVX512F__)
template <>
INLINE Floats dot_halves<vnni8>(Floats sum, Words halves, Words bytes) {
    return dot<vnni8>(sum, halves, bytes);
}
INLINE Words lower_halves(Words words) { return _mm512_and_si512(words, _mm512_set1_epi8(15)); }
INLINE Words upper_halves(Words words) { return lower_halves(_mm512_srli_epi16(words, 4)); }
INLINE Floats add_integers(Floats a, Floats b) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
INLINE Floats from_integers(Floats sums) { return _mm512_cvtepi32_ps(_mm512_castps_si512(sums)); }
#else
INLINE Words lower_halves(Words words) { return _mm256_and_si256(words, _mm256_set1_epi8(15)); }
INLINE Words upper_halves(Words words) { return lower_halves(_mm256_srli_epi16(words, 4)); }
INLINE Floats add_integers(Floats a, Floats b) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
INLINE Floats from_integers(Floats sums) { return _mm256_cvtepi32_ps(_mm256_castps_si256(sums)); }
#endif

// Rows of activations, quantized group by group.
class GroupedRows {
   public:
    // Makes room. Keeps nothing.
    void reserve(int64_t num_rows, int64_t width, int64_t group) {
        stride_ = (width + 63) / 64 * 64 | 64;
        group_ = group;
        num_groups_ = width / group;
        if ((int64_t)bytes_.size() < num_rows * stride_) bytes_.resize(num_rows * stride_);
        if ((int64_t)worth_.size() < num_rows * num_groups_) worth_.resize(num_rows * num_groups_);
    }

    // `order`: for each input its place among the values, or null.
    template <class E>
    void quantize(int64_t row, const E* values, const int32_t* order) {
        alignas(64) E gathered[MAX_GROUP];
        alignas(64) uint8_t shifted[MAX_GROUP];
        int8_t* bytes = bytes_.data() + row * stride_;
        for (int64_t group = 0; group < num_groups_; group++, bytes += group_) {
            const E* source = values + group * group_;
            if (order) {
                for (int64_t i = 0; i < group_; i++) gathered[i] = values[order[group * group_ + i]];
                source = gathered;
            }
            const float scale = quantize_row(source, group_, shifted);
            int32_t sum = 0;
            for (int64_t i = 0; i < group_; i++) {
                bytes[i] = (int8_t)(shifted[i] ^ SHIFT);
                sum += bytes[i];
            }
            worth_[row * num_groups_ + group] = {scale, (float)sum};
        }
    }

    struct Worth {
        float scale;  // what 1 is worth
        float sum;    // of the group's bytes
    };

    const uint32_t* words() const { return (const uint32_t*)bytes_.data(); }
    int64_t stride_words() const { return stride_ / 4; }
    // [rows][groups].
    const Worth* worth() const { return worth_.data(); }
    int64_t num_groups() const { return num_groups_; }

   private:
    int64_t stride_ = 0, group_ = MAX_GROUP, num_groups_ = 0;
    std::vector<int8_t> bytes_;
    std::vector<Worth> worth_;
};

// The rows of one product, as its scheme has them.
class ProductRows {
   public:
    void reserve(const Op& op, int64_t num_rows) {
        if (op.scheme == INT4)
            grouped.reserve(num_rows, op.in_features, op.group);
        else
            whole.reserve(num_rows, op.in_features, op.leaves);
    }

    template <class E>
    void quantize(const Op& op, int64_t row) {
        const E* values = (const E*)op.input + row * op.input_stride;
        if (op.scheme == INT4)
            grouped.quantize(row, values, op.order);
        else
            whole.quantize(row, values);
    }

    QuantizedRows whole;
    GroupedRows grouped;
};

// Sums a tile of up to MAX_TILE_ROWS rows by one panel. Knows nothing of what follows: that would multiply its code.
template <class Byte>
class GroupedTile {
   public:
    GroupedTile(const GroupedRows& rows, int64_t group, int leaves)
        : rows_(rows), group_words_(group / INPUTS_PER_WORD), leaves_(leaves), leaf_groups_(rows.num_groups() / leaves) {}

    bool has_large_groups() const { return group_words_ * INPUTS_PER_WORD > MAX_GROUP / 4; }
    int64_t num_words() const { return rows_.num_groups() * group_words_; }

    // Fetches the lines of `stream` on its way.
    void compute(int64_t row, int64_t num_rows, const char* right, Lines stream, float (*sums)[TILE_COLUMNS]) const {
        choose<MAX_TILE_ROWS>(row, num_rows, right, stream, sums);
    }

   private:
    template <int R>
    INLINE void choose(
        int64_t row, int64_t num_rows, const char* right, Lines stream, float (*sums)[TILE_COLUMNS]) const {
        if constexpr (R > 0) {
            if (num_rows == R)
                add_leaves<R>(row, right, stream, sums);
            else
                choose<R - 1>(row, num_rows, right, stream, sums);
        }
    }

    template <int R>
    __attribute__((noinline)) void add_leaves(
        int64_t row, const char* right, Lines stream, float (*sums)[TILE_COLUMNS]) const {
        alignas(64) float waiting[MAX_LEVELS][R][TILE_COLUMNS];
        for (int leaf = 0; leaf < leaves_; leaf++) {
            for (int r = 0; r < R; r++) store(sums[r], zero()), store(sums[r] + VL, zero());
            for (int64_t group = leaf * leaf_groups_; group < (leaf + 1) * leaf_groups_; group++)
                right = add_group<R>(row, group, right, stream, sums);
            int level = 0;
            for (; leaf >> level & 1; level++)
                for (int r = 0; r < R; r++)
                    for (int c = 0; c < TILE_COLUMNS; c += VL)
                        store(sums[r] + c, add(load(waiting[level][r] + c), load(sums[r] + c)));
            if (leaf + 1 < leaves_) memcpy(waiting[level], sums, sizeof waiting[level]);
        }
    }

    // Gives where the next group lies.
    template <int R>
    INLINE const char* add_group(
        int64_t row, int64_t group, const char* right, Lines& stream, float (*totals)[TILE_COLUMNS]) const {
        // Few rows have two sums each of both halves, lest an instruction wait for the one before.
        constexpr int CHAINS = R <= MAX_TILE_ROWS / 3 ? 2 : 1;
        Floats sums[CHAINS][R][2];
        UNROLL for (int chain = 0; chain < CHAINS; chain++)
            UNROLL for (int r = 0; r < R; r++) sums[chain][r][0] = sums[chain][r][1] = zero();
        const int64_t stride = rows_.stride_words();
        const uint32_t* left = rows_.words() + row * stride + 2 * group * group_words_;
        for (int64_t k = 0; k < group_words_; k++, left += 2, right += TILE_COLUMNS * 4) {
            const Words first = load_words(right), second = load_words(right + VL * 4);
            const Words low0 = lower_halves(first), low1 = lower_halves(second);
            const Words high0 = upper_halves(first), high1 = upper_halves(second);
            if (stream.count > 0) {
                UNROLL for (int line = 0; line < SAME_LINES; line++)
                    _mm_prefetch(stream.first + line * LINE_BYTES, _MM_HINT_T1);
                stream.first += SAME_LINES * LINE_BYTES, stream.count -= SAME_LINES;
            }
            UNROLL for (int r = 0; r < R; r++) {
                const Words a = broadcast_word(left[r * stride]), b = broadcast_word(left[r * stride + 1]);
                sums[0][r][0] = dot_halves<Byte>(sums[0][r][0], low0, a);
                sums[0][r][1] = dot_halves<Byte>(sums[0][r][1], low1, a);
                sums[CHAINS - 1][r][0] = dot_halves<Byte>(sums[CHAINS - 1][r][0], high0, b);
                sums[CHAINS - 1][r][1] = dot_halves<Byte>(sums[CHAINS - 1][r][1], high1, b);
            }
        }
        const auto* scales = (const float*)right;
        const auto* zeros = (const bf16*)(scales + TILE_COLUMNS);
        UNROLL for (int half = 0; half < 2; half++) {
            const Floats scale = load(scales + half * VL), zero_point = load(zeros + half * VL);
            UNROLL for (int r = 0; r < R; r++) {
                const auto& worth = rows_.worth()[(row + r) * rows_.num_groups() + group];
                Floats sum = sums[0][r][half];
                if (CHAINS > 1) sum = add_integers(sum, sums[CHAINS - 1][r][half]);
                const Floats exact = sub(from_integers(sum), mul(zero_point, broadcast(worth.sum)));
                float* total = totals[r] + half * VL;
                store(total, add(load(total), mul(exact, mul(scale, broadcast(worth.scale)))));
            }
        }
        return (const char*)(zeros + TILE_COLUMNS);
    }

    const GroupedRows& rows_;
    int64_t group_words_;
    int leaves_;
    int64_t leaf_groups_;
};

// As LinearRunner, of such weights.
template <class Byte, class Epilogue>
class GroupedRunner {
   public:
    GroupedRunner(const GroupedRows& rows, const void* weight, int64_t group, int leaves, Epilogue epilogue, Cursor& ahead)
        : tile_(rows, group, leaves), weight_((const char*)weight), panel_bytes_(rows.num_groups() * group_bytes(group)),
          epilogue_(epilogue), ahead_(ahead) {}

    // Computes rows [begin, end) of one panel.
    void run(int64_t panel, int64_t begin, int64_t end) {
        const char* right = weight_ + panel * panel_bytes_;
        const int64_t count = end - begin, num_tiles = (count + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
        const int64_t num_lines = tile_.num_words() * SAME_LINES;
        // One tile alone fetches what it reads itself a little later, which took a tenth off one row and a third off eight;
        // small groups have too much else to do. The first of several tiles fetches the next panel.
        const char *next = right + (num_tiles > 1 ? panel_bytes_ : BYTES_AHEAD), *end_of_next = right + 2 * panel_bytes_;
        const bool fetches = num_tiles > 1 || tile_.has_large_groups();
        for (int64_t tile = 0; tile < num_tiles; tile++, next += num_lines * LINE_BYTES) {
            const int64_t first = begin + count * tile / num_tiles, last = begin + count * (tile + 1) / num_tiles;
            Lines lines;
            if (fetches) lines = next < end_of_next ? Lines{next, num_lines} : ahead_.take();
            alignas(64) float sums[MAX_TILE_ROWS][TILE_COLUMNS];
            tile_.compute(first, last - first, right, lines, sums);
            for (int64_t row = first; row < last; row++) put(panel, row, sums[row - first]);
        }
    }

   private:
    INLINE void put(int64_t panel, int64_t row, const float* sums) {
        if (epilogue_.is_plain())
            epilogue_.template put<true>(panel, row, load(sums), load(sums + VL));
        else
            epilogue_.template put<false>(panel, row, load(sums), load(sums + VL));
    }

    GroupedTile<Byte> tile_;
    const char* weight_;
    int64_t panel_bytes_;
    Epilogue epilogue_;
    Cursor& ahead_;
};
