// Products in int8: weights quantized when they are packed, rows when they are read, through the one tile.
//
// An output's weights lie in [-127, 127] by a scale of their own in each leaf, in panels as in linear.h with four signed
// bytes to a word. A row of activations likewise, shifted by 128 since one side of the instruction is unsigned; 128 times
// the sum of an output's weights takes the shift back. A sum of integers has no order: every instruction set gives the
// same one.
#pragma once

#include "linear.h"

// Rows whose largest magnitude is below count as zeros: one over it need not be a number.
constexpr float SMALLEST_MAGNITUDE = 1e-30f;
constexpr int SHIFT = 128;

#if defined(__AVX512F__)
// Bytes for processors that multiply and add four of them at once: most that have AVX512, not all.
struct vnni8 {
    int8_t byte;
};

template <>
INLINE Floats dot<vnni8>(Floats sum, Words a, Words b) {
    // GCC 12 moves the accumulators to the stack and back around the intrinsic.
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
#endif

// Adds the products of four unsigned by four signed bytes in each lane; `sum` holds integers.
template <>
INLINE Floats dot<int8_t>(Floats sum, Words a, Words b) {
#if defined(__AVX512F__)
    const Words low = _mm512_set1_epi16(0xff);
    Words even = _mm512_madd_epi16(_mm512_and_si512(a, low), _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8));
    Words odd = _mm512_madd_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(b, 8));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(sum), _mm512_add_epi32(even, odd)));
#else
    const Words low = _mm256_set1_epi16(0xff);
    Words even = _mm256_madd_epi16(_mm256_and_si256(a, low), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    Words odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(sum), _mm256_add_epi32(even, odd)));
#endif
}

// Calls with a byte of the type whose dot product this processor has.
template <class Visit>
INLINE void with_bytes(Visit visit) {
#if defined(HAS_TILES) || !defined(__AVX512F__)
    visit(int8_t{});
#elif defined(__AVX512VNNI__)
    visit(vnni8{});
#else
    if (__builtin_cpu_supports("avx512vnni"))
        visit(vnni8{});
    else
        visit(int8_t{});
#endif
}

#if defined(__AVX512F__)
// The sums less `shift`, as floats.
INLINE Floats unshift(Floats sums, Words shift) {
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_castps_si512(sums), shift));
}
// Rounds to the nearest whole numbers, adds 128, and writes VL bytes.
INLINE void store_bytes(uint8_t* p, Floats x) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(SHIFT))));
}
#else
INLINE Floats unshift(Floats sums, Words shift) {
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_castps_si256(sums), shift));
}
INLINE void store_bytes(uint8_t* p, Floats x) {
    __m256i shifted = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(SHIFT));
    __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(shifted), _mm256_extracti128_si256(shifted, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(halves, halves));
}
#endif

template <class E, class Visit>
INLINE void visit_vectors(const E* row, int64_t width, Visit visit) {
    int64_t i = 0;
    for (; i + VL <= width; i += VL) visit(i, load(row + i));
    if (i < width) visit(i, load(row + i, (int)(width - i)));
}

// Writes a row as bytes, 128 where it is zero and up to the next whole vector, and gives what one of them is worth: not
// a number where the row holds one that is not finite.
template <class E>
float quantize_row(const E* row, int64_t width, uint8_t* bytes) {
    Floats most = zero();
    Mask strange = not_finite(most);
    visit_vectors(row, width, [&](int64_t, Floats x) {
        most = max(most, max(x, sub(zero(), x)));
        strange = either(strange, not_finite(x));
    });
    const float largest = max_lanes(most);
    const Floats inverse = broadcast(largest < SMALLEST_MAGNITUDE ? 0.0f : 127.0f / largest);
    visit_vectors(row, width, [&](int64_t i, Floats x) { store_bytes(bytes + i, mul(x, inverse)); });
    return any(strange) ? std::numeric_limits<float>::quiet_NaN() : largest / 127.0f;
}

// Rows of activations or of a weight, quantized leaf by leaf.
class QuantizedRows {
   public:
    // Makes room. Keeps nothing.
    void reserve(int64_t num_rows, int64_t width, int leaves) {
        // An odd number of cache lines: rows of a tile do not compete for the same places in the cache.
        stride_ = (width + 63) / 64 * 64 | 64;
        width_ = width;
        leaves_ = leaves;
        if ((int64_t)bytes_.size() < num_rows * stride_) bytes_.resize(num_rows * stride_);
        if ((int64_t)scales_.size() < num_rows * leaves) scales_.resize(num_rows * leaves);
    }

    template <class E>
    void quantize(int64_t row, const E* values) {
        const int64_t width = width_ / leaves_;
        for (int leaf = 0; leaf < leaves_; leaf++)
            scales_[row * leaves_ + leaf] = quantize_row(values + leaf * width, width, bytes(row) + leaf * width);
    }

    const uint32_t* words() const { return (const uint32_t*)bytes_.data(); }
    uint8_t* bytes(int64_t row) { return bytes_.data() + row * stride_; }
    int64_t stride_words() const { return stride_ / 4; }
    // The worth of a digit: [rows][leaves].
    const float* scales() const { return scales_.data(); }

   private:
    int64_t stride_ = 0, width_ = 0;
    int leaves_ = 1;
    std::vector<uint8_t> bytes_;
    std::vector<float> scales_;
};

// Turns a leaf's sums of integers into what they are worth.
struct Dequantize {
    const float* row_scales;  // [rows][leaves]
    const float* scales;      // [leaves][columns]
    const int32_t* sums;      // [leaves][columns]
    int64_t leaves, columns;

    INLINE Floats operator()(int leaf, int64_t row, int64_t column, Floats total) const {
        const int64_t place = leaf * columns + column;
        const Floats by_row = mul(unshift(total, load_words(sums + place)), broadcast(row_scales[row * leaves + leaf]));
        return mul(by_row, load(scales + place));
    }
};
