// Keys and values in int8: attention's products of whole numbers.
//
// A pool holds signed bytes, four to a word, and behind those of a (block, layer, head) a float32 scale for each slot. What
// they are multiplied by is split into two digits of a byte each, so that both products are sums of unsigned by signed
// bytes, as int8.h has them, which are exact in any order. A row's digits depend on that row and on what it sees alone.
#pragma once

#include "int8.h"

// A query's numbers lie in [-16383, 16383] by a scale of their own, and are shifted: a digit is not negative.
constexpr int QUERY_LEVELS = 16383, QUERY_SHIFT = 64 * 256;
// Weights are not negative. 256 keys of 127 by so much are less than 2^31.
constexpr int WEIGHT_LEVELS = 65535;

#if defined(__AVX512F__)
INLINE Words nearest_words(Floats x) { return _mm512_cvtps_epi32(x); }
INLINE void store_digits(uint8_t* upper, uint8_t* lower, Words x) {
    _mm_storeu_si128((__m128i*)upper, _mm512_cvtepi32_epi8(_mm512_srli_epi32(x, 8)));
    _mm_storeu_si128((__m128i*)lower, _mm512_cvtepi32_epi8(x));
}
// Sums by upper digits, less 64 for each of `ones`, times 256, and sums by lower digits: as floats.
INLINE Floats join_digits(Floats upper, Floats lower, Floats ones) {
    const Words shifted = _mm512_sub_epi32(_mm512_castps_si512(upper), _mm512_slli_epi32(_mm512_castps_si512(ones), 6));
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(shifted, 8), _mm512_castps_si512(lower)));
}
#else
INLINE Words nearest_words(Floats x) { return _mm256_cvtps_epi32(x); }
INLINE void store_low_bytes(uint8_t* p, Words x) {
    const Words low = _mm256_and_si256(x, _mm256_set1_epi32(0xff));
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(halves, halves));
}
INLINE void store_digits(uint8_t* upper, uint8_t* lower, Words x) {
    store_low_bytes(upper, _mm256_srli_epi32(x, 8));
    store_low_bytes(lower, x);
}
INLINE Floats join_digits(Floats upper, Floats lower, Floats ones) {
    const Words shifted = _mm256_sub_epi32(_mm256_castps_si256(upper), _mm256_slli_epi32(_mm256_castps_si256(ones), 6));
    return _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(shifted, 8), _mm256_castps_si256(lower)));
}
#endif

// The largest magnitude of what it is shown: not a number once one of these is not finite.
class Largest {
   public:
    INLINE void see(Floats x) {
        most_ = max(most_, max(x, sub(zero(), x)));
        strange_ = either(strange_, not_finite(x));
    }
    float value() const { return any(strange_) ? std::numeric_limits<float>::quiet_NaN() : max_lanes(most_); }

   private:
    Floats most_ = zero();
    Mask strange_ = not_finite(zero());
};

// Writes the digits of a row's whole numbers, up to the next whole vector, and gives what 1 is worth. `largest`: of the row.
template <class T>
float split_row(const T* row, int64_t width, float largest, int levels, int shift, uint8_t* upper, uint8_t* lower) {
    const Floats inverse = broadcast(largest < SMALLEST_MAGNITUDE ? 0.0f : (float)levels / largest);
    const Words added = broadcast_word((uint32_t)shift);
    visit_vectors(row, width, [&](int64_t i, Floats x) {
        store_digits(upper + i, lower + i, add_words(nearest_words(mul(x, inverse)), added));
    });
    return largest / (float)levels;
}

// Lines of memory that will be read soon: they come to the second cache a few at a time, while something is computed.
class LinesAhead {
   public:
    void begin(int64_t tile_bytes) {
        tile_bytes_ = tile_bytes;
        num_tiles_ = next_ = 0;
        line_ = end_ = nullptr;
    }
    void add(const void* tile) { tiles_[num_tiles_++] = (const char*)tile; }
    int64_t size() const { return num_tiles_ * (tile_bytes_ / LINE_BYTES); }

    INLINE void fetch(int64_t count) {
        for (; count > 0; count--, line_ += LINE_BYTES) {
            if (line_ >= end_) {
                if (next_ == num_tiles_) return;
                line_ = tiles_[next_++];
                end_ = line_ + tile_bytes_;
            }
            _mm_prefetch(line_, _MM_HINT_T1);
        }
    }

   private:
    const char* tiles_[2 * CUT / 8];
    const char *line_ = nullptr, *end_ = nullptr;
    int64_t tile_bytes_ = 0;
    int num_tiles_ = 0, next_ = 0;
};

// One thread's digits of a tile's rows, an upper row before each lower one, and the products that are made of them. A
// last row of the queries is ones: it adds up the bytes of each key.
struct DigitScratch {
    static constexpr int MAX_FACTORS = 2 * MAX_ATTENTION_ROWS + 1;

    void reserve(int64_t dim, int64_t padded) {
        // Whole vectors, and words of which a tile has whole lines.
        query_stride = (dim + 63) / 64 * 64;
        queries.resize(MAX_FACTORS * query_stride);
        weights.resize(MAX_FACTORS * CUT);
        scores.resize(MAX_FACTORS * CUT);
        products.resize(MAX_FACTORS * padded);
    }

    int64_t query_stride = 0;
    std::vector<uint8_t> queries, weights;
    std::vector<float> scores, products;  // sums of integers, until they are joined
    float query_scales[MAX_ATTENTION_ROWS], weight_scales[MAX_ATTENTION_ROWS];
    float key_scales[CUT] = {}, value_scales[CUT] = {};
};
