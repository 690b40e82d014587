// The arithmetics that products may have, spelled out one number at a time: what a processor's instructions are held to.
//
// Slow, and independent of how the kernels cut their work. A processor whose products equal one of them gives every row
// the same bits however it is batched, since nothing here knows of other rows.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "plan.h"

// Mirrored in blockyard_kernels/cpu/self_test.py.
enum Arithmetic : int32_t {
    FUSED,              // each product added to the sum with one rounding, in order
    PAIRS_ODD_FIRST,    // VDPBF16PS in Intel's manual: of each pair the odd one first; denormals are zeros
    PAIRS_EVEN_FIRST,   // the same, the even one first
    TILES,              // TDPBF16PS in Intel's manual: see add_piece_of_tiles
    WHOLE_NUMBERS,      // int8.h: rows and weights quantized, their products summed as integers
};

// A product of rows [R, K] and a weight [N, K], both of a type, summed over leaves -> [R, N], before any rounding to it.
struct SpelledProduct {
    int32_t arithmetic, type;
    int64_t num_rows, in_features, out_features, leaves;
    const void* rows;
    const void* weight;
    float* output;
};

namespace spelled {

// Values of one instruction on a tile.
constexpr int64_t PIECE = 32;

inline float value_of(const void* values, int64_t index, int32_t type) {
    float value;
    if (type == FLOAT32) {
        memcpy(&value, (const char*)values + 4 * index, 4);
    } else {
        uint16_t upper;
        memcpy(&upper, (const char*)values + 2 * index, 2);
        const uint32_t bits = (uint32_t)upper << 16;
        memcpy(&value, &bits, 4);
    }
    return value;
}

// Has the thread take denormals for zeros and write zeros for them, while it lives: as instructions for bfloat16 do,
// whatever the thread's own setting. What is denormal before it is rounded counts, so zeroing results would not do.
class FlushDenormals {
   public:
    FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(0x9fc0); }
    ~FlushDenormals() { _mm_setcsr(before_); }

   private:
    const unsigned before_;
};

// Even and odd products are summed apart, each from zero; both sums are added, and that to the sum before.
inline float add_piece_of_tiles(float sum, const float* a, const float* b, int64_t count) {
    float even = 0, odd = 0;
    for (int64_t k = 0; k < count; k += 2) {
        even = std::fma(a[k], b[k], even);
        odd = std::fma(a[k + 1], b[k + 1], odd);
    }
    return sum + (even + odd);
}

// Not inline: nothing of it may move to where another setting of denormals holds.
__attribute__((noinline)) inline float sum_as_set(Arithmetic arithmetic, const float* a, const float* b, int64_t count) {
    float sum = 0;
    switch (arithmetic) {
        case TILES:
            for (int64_t k = 0; k < count; k += PIECE) sum = add_piece_of_tiles(sum, a + k, b + k, std::min(PIECE, count - k));
            break;
        case PAIRS_ODD_FIRST:
        case PAIRS_EVEN_FIRST:
            for (int64_t k = 0; k < count; k += 2) {
                const int first = arithmetic == PAIRS_ODD_FIRST;
                sum = std::fma(a[k + first], b[k + first], sum);
                sum = std::fma(a[k + 1 - first], b[k + 1 - first], sum);
            }
            break;
        default:
            for (int64_t k = 0; k < count; k++) sum = std::fma(a[k], b[k], sum);
    }
    return sum;
}

inline float sum_of_leaf(Arithmetic arithmetic, const float* a, const float* b, int64_t count) {
    if (arithmetic == FUSED) return sum_as_set(arithmetic, a, b, count);
    const FlushDenormals flushing;
    return sum_as_set(arithmetic, a, b, count);
}

// Replaces values by whole numbers to 127, and gives what 1 is worth. Of finite values only.
inline float quantize(float* values, int64_t count) {
    float largest = 0;
    for (int64_t k = 0; k < count; k++) largest = std::max(largest, std::fabs(values[k]));
    const float inverse = largest < 1e-30f ? 0.0f : 127.0f / largest;
    for (int64_t k = 0; k < count; k++) values[k] = std::nearbyint(values[k] * inverse);
    return largest / 127.0f;
}

inline float sum_of_whole_numbers(float* a, float* b, int64_t count) {
    const float row_scale = quantize(a, count), scale = quantize(b, count);
    int32_t sum = 0;
    for (int64_t k = 0; k < count; k++) sum += (int32_t)a[k] * (int32_t)b[k];
    return (float)sum * row_scale * scale;
}

}  // namespace spelled

inline void spell_out(const SpelledProduct& product) {
    const int64_t width = product.in_features / product.leaves;
    std::vector<float> a(width), b(width), sums(product.leaves);
    for (int64_t row = 0; row < product.num_rows; row++) {
        for (int64_t column = 0; column < product.out_features; column++) {
            for (int64_t leaf = 0; leaf < product.leaves; leaf++) {
                for (int64_t k = 0; k < width; k++) {
                    const int64_t place = leaf * width + k;
                    a[k] = spelled::value_of(product.rows, row * product.in_features + place, product.type);
                    b[k] = spelled::value_of(product.weight, column * product.in_features + place, product.type);
                }
                sums[leaf] = product.arithmetic == WHOLE_NUMBERS
                                 ? spelled::sum_of_whole_numbers(a.data(), b.data(), width)
                                 : spelled::sum_of_leaf((Arithmetic)product.arithmetic, a.data(), b.data(), width);
            }
            for (int64_t count = product.leaves; count > 1; count /= 2)
                for (int64_t i = 0; i < count / 2; i++) sums[i] = sums[2 * i] + sums[2 * i + 1];
            product.output[row * product.out_features + column] = sums[0];
        }
    }
}
