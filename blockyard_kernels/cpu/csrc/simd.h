// Vectors of floats and the dot product of packed words, for the instruction set that this file is compiled for.
//
// Owns all intrinsics but those of the int8 tile: everything else is written once against these names. A word is 32
// bits: one float, or two neighbouring bfloat16 values. Every function gives a lane the same bits wherever it stands.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

struct bf16 {
    uint16_t bits;
};

// Values of a type in one word.
template <class E>
constexpr int PER_WORD = 4 / sizeof(E);

#if defined(__AVX512F__)

constexpr int VL = 16;
using Floats = __m512;
using Words = __m512i;
using Mask = __mmask16;

INLINE Floats zero() { return _mm512_setzero_ps(); }
INLINE Floats broadcast(float x) { return _mm512_set1_ps(x); }
INLINE Words broadcast_word(uint32_t x) { return _mm512_set1_epi32((int)x); }
INLINE Floats load(const float* p) { return _mm512_loadu_ps(p); }
INLINE Words load_words(const void* p) { return _mm512_loadu_si512(p); }
INLINE void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
INLINE void store_words(void* p, Words x) { _mm512_storeu_si512(p, x); }
INLINE Mask first_lanes(int n) { return n >= VL ? (Mask)0xffff : (Mask)((1u << n) - 1); }
INLINE Floats load(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
INLINE void store(float* p, Floats x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
INLINE Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
INLINE Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
// If either number is NaN, the result is the second.
INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
INLINE Mask greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INLINE Mask at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
INLINE Mask equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
// True where one of both is not a number, too.
INLINE Mask not_less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }
INLINE Mask less(Words a, Words b) { return _mm512_cmplt_epi32_mask(a, b); }
INLINE Mask both(Mask a, Mask b) { return a & b; }
INLINE Mask either(Mask a, Mask b) { return a | b; }
// Where the mask is set the second, else the first.
INLINE Floats select(Mask m, Floats no, Floats yes) { return _mm512_mask_blend_ps(m, no, yes); }
INLINE Words select(Mask m, Words no, Words yes) { return _mm512_mask_blend_epi32(m, no, yes); }
INLINE Words add_words(Words a, Words b) { return _mm512_add_epi32(a, b); }
INLINE Words lane_numbers() {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
// Lanes that are infinite or not a number.
INLINE Mask not_finite(Floats x) { return _mm512_fpclass_ps_mask(x, 0x99); }
INLINE bool any(Mask m) { return m != 0; }
// One bit for each lane.
INLINE uint32_t lane_bits(Mask m) { return m; }
INLINE Floats nearest(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x times two to the power of n, a whole number from -126 to 127.
INLINE Floats scale_by_power(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }
INLINE float add_lanes(Floats x) {
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
INLINE float max_lanes(Floats x) { return _mm512_reduce_max_ps(x); }

INLINE Floats widen(__m256i halves) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)); }
INLINE __m256i narrow(Floats x) {
#if defined(__AVX512BF16__)
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
#endif
}
INLINE Floats load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
INLINE Floats load(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
INLINE void store(bf16* p, Floats x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
INLINE void store(bf16* p, Floats x, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(x)); }

// Numbers from 0 in lanes of 64 bits.
INLINE Words wide_lane_numbers() { return _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7); }
// Products, of 64 bits, of the lower halves of lanes of 64 bits.
INLINE Words multiply_wide(Words a, Words b) { return _mm512_mul_epu32(a, b); }
INLINE Words upper_half(Words a) { return _mm512_srli_epi64(a, 32); }
INLINE Words xor_words(Words a, Words b, Words c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }
INLINE Words min_unsigned(Words a, Words b) { return _mm512_min_epu32(a, b); }
// Whether the lower half of some lane of 64 bits is at most the bound.
INLINE bool any_lower_half_at_most(Words a, Words bound) { return _mm512_mask_cmple_epu32_mask(0x5555, a, bound) != 0; }
INLINE Floats unsigned_to_floats(Words a) { return _mm512_cvtepu32_ps(a); }
// A positive normal number as m * 2^e, m from half the root of two to the root of two: gives m, sets e.
INLINE Floats split_exponent(Floats x, Floats& exponent) {
    const Words bits = _mm512_castps_si512(x), half_root = _mm512_set1_epi32(0x3f3504f3);
    const Words from = _mm512_sub_epi32(bits, half_root);
    exponent = _mm512_cvtepi32_ps(_mm512_srai_epi32(from, 23));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_and_si512(from, _mm512_set1_epi32(0x7fffff)), half_root));
}

template <class E>
INLINE Floats dot(Floats sum, Words a, Words b);
template <>
INLINE Floats dot<float>(Floats sum, Words a, Words b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}
template <>
INLINE Floats dot<bf16>(Floats sum, Words a, Words b) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), sum);
    return _mm512_fmadd_ps(
        _mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)), sum);
#endif
}

#else  // AVX2 and FMA

constexpr int VL = 8;
using Floats = __m256;
using Words = __m256i;
using Mask = __m256;

INLINE Floats zero() { return _mm256_setzero_ps(); }
INLINE Floats broadcast(float x) { return _mm256_set1_ps(x); }
INLINE Words broadcast_word(uint32_t x) { return _mm256_set1_epi32((int)x); }
INLINE Floats load(const float* p) { return _mm256_loadu_ps(p); }
INLINE Words load_words(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
INLINE void store_words(void* p, Words x) { _mm256_storeu_si256((__m256i*)p, x); }
INLINE Words lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
INLINE Words first_words(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane_numbers()); }
INLINE Mask first_lanes(int n) { return _mm256_castsi256_ps(first_words(n)); }
INLINE Floats load(const float* p, int n) { return _mm256_maskload_ps(p, first_words(n)); }
INLINE void store(float* p, Floats x, int n) { _mm256_maskstore_ps(p, first_words(n), x); }
INLINE Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
INLINE Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
INLINE Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
INLINE Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
INLINE Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
INLINE Mask greater(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
INLINE Mask at_least(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
INLINE Mask equal(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
INLINE Mask not_less(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_NLT_UQ); }
INLINE Mask less(Words a, Words b) { return _mm256_castsi256_ps(_mm256_cmpgt_epi32(b, a)); }
INLINE Mask both(Mask a, Mask b) { return _mm256_and_ps(a, b); }
INLINE Mask either(Mask a, Mask b) { return _mm256_or_ps(a, b); }
INLINE Floats select(Mask m, Floats no, Floats yes) { return _mm256_blendv_ps(no, yes, m); }
INLINE Words select(Mask m, Words no, Words yes) { return _mm256_blendv_epi8(no, yes, _mm256_castps_si256(m)); }
INLINE Words add_words(Words a, Words b) { return _mm256_add_epi32(a, b); }
INLINE Mask not_finite(Floats x) {
    Words exponent = _mm256_set1_epi32(0x7f800000);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_castps_si256(x), exponent), exponent));
}
INLINE bool any(Mask m) { return _mm256_movemask_ps(m) != 0; }
INLINE uint32_t lane_bits(Mask m) { return (uint32_t)_mm256_movemask_ps(m); }
INLINE Floats nearest(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Floats scale_by_power(Floats x, Floats n) {
    return mul(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23)));
}
INLINE float add_lanes(Floats a) {
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
INLINE float max_lanes(Floats a) {
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

INLINE Floats widen(__m128i halves) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)); }
INLINE __m128i narrow(Floats x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    return _mm256_castsi256_si128(packed);
}
INLINE Floats load(const bf16* p) { return widen(_mm_loadu_si128((const __m128i*)p)); }
INLINE Floats load(const bf16* p, int n) {
    alignas(16) bf16 part[VL] = {};
    memcpy(part, p, sizeof(bf16) * (n < VL ? n : VL));
    return load(part);
}
INLINE void store(bf16* p, Floats x) { _mm_storeu_si128((__m128i*)p, narrow(x)); }
INLINE void store(bf16* p, Floats x, int n) {
    alignas(16) bf16 part[VL];
    store(part, x);
    memcpy(p, part, sizeof(bf16) * (n < VL ? n : VL));
}

INLINE Words wide_lane_numbers() { return _mm256_setr_epi64x(0, 1, 2, 3); }
INLINE Words multiply_wide(Words a, Words b) { return _mm256_mul_epu32(a, b); }
INLINE Words upper_half(Words a) { return _mm256_srli_epi64(a, 32); }
INLINE Words xor_words(Words a, Words b, Words c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
INLINE Words min_unsigned(Words a, Words b) { return _mm256_min_epu32(a, b); }
INLINE bool any_lower_half_at_most(Words a, Words bound) {
    const Words at_most = _mm256_cmpeq_epi32(_mm256_min_epu32(a, bound), a);
    return (_mm256_movemask_ps(_mm256_castsi256_ps(at_most)) & 0x55) != 0;
}
INLINE Floats unsigned_to_floats(Words a) {
    // Both halves are exact, so that it is rounded once.
    const Floats high = _mm256_cvtepi32_ps(_mm256_srli_epi32(a, 16));
    const Floats low = _mm256_cvtepi32_ps(_mm256_and_si256(a, _mm256_set1_epi32(0xffff)));
    return _mm256_fmadd_ps(high, _mm256_set1_ps(65536.0f), low);
}
INLINE Floats split_exponent(Floats x, Floats& exponent) {
    const Words bits = _mm256_castps_si256(x), half_root = _mm256_set1_epi32(0x3f3504f3);
    const Words from = _mm256_sub_epi32(bits, half_root);
    exponent = _mm256_cvtepi32_ps(_mm256_srai_epi32(from, 23));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_and_si256(from, _mm256_set1_epi32(0x7fffff)), half_root));
}

template <class E>
INLINE Floats dot(Floats sum, Words a, Words b);
template <>
INLINE Floats dot<float>(Floats sum, Words a, Words b) {
    return _mm256_fmadd_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), sum);
}
template <>
INLINE Floats dot<bf16>(Floats sum, Words a, Words b) {
    const __m256i high = _mm256_set1_epi32((int)0xffff0000);
    sum = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)), sum);
    return _mm256_fmadd_ps(
        _mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high)), sum);
}

#endif

// 2 to the power of an x below 127, not a number where x is none; about 0 below -126. With bfloat16 in mind within 2^-18 of the
// result, a hundredth of what rounding takes away; else within 2 ulp (Cephes' polynomial).
template <class E>
INLINE Floats power_of_two(Floats x) {
#if defined(__AVX512F__)
    const Floats clipped = max(broadcast(-256.0f), x);  // scaling underflows by itself, but of what is finite
#else
    const Floats lowest = broadcast(-126.0f), clipped = max(lowest, x);
#endif
    const Floats n = nearest(clipped), r = sub(clipped, n);
    Floats p;
    if (sizeof(E) == 2) {
        p = broadcast(0.00958283618f);
        p = fma(p, r, broadcast(0.0559064262f));
        p = fma(p, r, broadcast(0.240240991f));
        p = fma(p, r, broadcast(0.693124175f));
    } else {
        p = broadcast(1.535336188319500e-4f);
        p = fma(p, r, broadcast(1.339887440266574e-3f));
        p = fma(p, r, broadcast(9.618437357674640e-3f));
        p = fma(p, r, broadcast(5.550332471162809e-2f));
        p = fma(p, r, broadcast(2.402264791363012e-1f));
        p = fma(p, r, broadcast(6.931472028550421e-1f));
    }
    p = scale_by_power(fma(p, r, broadcast(1.0f)), n);
#if !defined(__AVX512F__)
    p = select(greater(lowest, x), p, zero());
#endif
    return p;
}

// The natural logarithm of positive normal numbers, within 1 ulp or 1e-7. Cephes' polynomial.
INLINE Floats logarithm(Floats x) {
    Floats e, m = split_exponent(x, e), r = sub(m, broadcast(1.0f)), square = mul(r, r);
    Floats p = broadcast(7.0376836292e-2f);
    p = fma(p, r, broadcast(-1.1514610310e-1f));
    p = fma(p, r, broadcast(1.1676998740e-1f));
    p = fma(p, r, broadcast(-1.2420140846e-1f));
    p = fma(p, r, broadcast(1.4249322787e-1f));
    p = fma(p, r, broadcast(-1.6668057665e-1f));
    p = fma(p, r, broadcast(2.0000714765e-1f));
    p = fma(p, r, broadcast(-2.4999993993e-1f));
    p = fma(p, r, broadcast(3.3333331174e-1f));
    p = fma(mul(p, r), square, mul(e, broadcast(-2.12194440e-4f)));
    p = fma(square, broadcast(-0.5f), p);
    return fma(e, broadcast(0.693359375f), add(r, p));
}

INLINE float widen(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
INLINE float widen(float x) { return x; }
