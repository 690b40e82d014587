// The ops without a product: each computes a row from that row alone, in one fixed order.
#pragma once

#include <cmath>

#include "attention.h"

template <class E>
void copy_row(const E* table, int64_t index, int64_t width, E* output) {
    memcpy(output, table + index * width, sizeof(E) * width);
}

template <class E>
void scale_row(E* row, int64_t width, float scale) {
    for (int64_t i = 0; i < width; i += VL) {
        const int n = (int)std::min<int64_t>(VL, width - i);
        store(row + i, mul(load(row + i, n), broadcast(scale)), n);
    }
}

// Reads row `index` of a table that has some rows of a larger one: zeros where it has not that one. Virtual rows are
// behind all tables, and are not scaled.
template <class E, class Read>
void embed_row(const Op& op, int64_t index, E* output, Read read) {
    const int64_t row = index - op.first_row;
    if (op.virtual_rows && index >= op.first_virtual) {
        copy_row((const E*)op.virtual_rows, index - op.first_virtual, op.out_features, output);
    } else if (op.num_rows && (uint64_t)row >= (uint64_t)op.num_rows) {
        memset((void*)output, 0, sizeof(E) * op.out_features);
    } else {
        read(row, output);
        if (op.scale != 1) scale_row(output, op.out_features, op.scale);
    }
}

template <class E>
void round_row(const float* input, const E* bias, int64_t width, E* output) {
    for (int64_t i = 0; i < width; i += VL) {
        const int n = (int)std::min<int64_t>(VL, width - i);
        const Floats x = load(input + i, n);
        store(output + i, bias ? add(x, load(bias + i, n)) : x, n);
    }
}

// One over the root of the mean square of a row.
template <class E>
float inverse_root_mean_square(const E* row, int64_t width, float epsilon) {
    Floats sum = zero();
    for (int64_t i = 0; i < width; i += VL) {
        const Floats x = load(row + i, (int)std::min<int64_t>(VL, width - i));
        sum = fma(x, x, sum);
    }
    return 1.0f / std::sqrt(add_lanes(sum) / (float)width + epsilon);
}

// The weight of an RMS norm: numbers in the type of its rows or in float32, or none.
template <class E>
class NormWeight {
   public:
    NormWeight(const Op& op, const void* weight)
        : narrow_(op.has_wide_norms ? nullptr : (const E*)weight), wide_(op.has_wide_norms ? (const float*)weight : nullptr) {}

    explicit operator bool() const { return narrow_ || wide_; }

    // The weight from a place on.
    NormWeight from(int64_t place) const {
        NormWeight rest = *this;
        if (narrow_) rest.narrow_ += place;
        if (wide_) rest.wide_ += place;
        return rest;
    }

    // `n` numbers from place i on, times theirs.
    INLINE Floats times(Floats x, int64_t i, int n) const {
        if (narrow_) return mul(x, load(narrow_ + i, n));
        return wide_ ? mul(x, load(wide_ + i, n)) : x;
    }

   private:
    const E* narrow_;
    const float* wide_;
};

// output = residual + scale * input, rounded once. The output may be the input.
template <class E>
void add_row(const E* input, const E* residual, int64_t width, float scale, E* output) {
    const Floats factor = broadcast(scale);
    for (int64_t i = 0; i < width; i += VL) {
        const int n = (int)std::min<int64_t>(VL, width - i);
        store(output + i, add(mul(load(input + i, n), factor), load(residual + i, n)), n);
    }
}

template <class E>
void rms_norm_row(const E* row, NormWeight<E> weight, int64_t width, float epsilon, E* output) {
    const Floats scale = broadcast(inverse_root_mean_square(row, width, epsilon));
    for (int64_t i = 0; i < width; i += VL) {
        const int n = (int)std::min<int64_t>(VL, width - i);
        store(output + i, weight.times(mul(load(row + i, n), scale), i, n), n);
    }
}

// Null `weight`: ones; null `bias`: zeros.
template <class E>
void layer_norm_row(const E* row, const float* weight, const float* bias, int64_t width, float epsilon, E* output) {
    Floats sum = zero(), squares = zero();
    for (int64_t i = 0; i < width; i += VL) sum = add(sum, load(row + i, (int)std::min<int64_t>(VL, width - i)));
    const Floats mean = broadcast(add_lanes(sum) / (float)width);
    for (int64_t i = 0; i < width; i += VL) {
        const int n = (int)std::min<int64_t>(VL, width - i);
        const Floats centred = select(first_lanes(n), zero(), sub(load(row + i, n), mean));
        squares = fma(centred, centred, squares);
    }
    const Floats scale = broadcast(1.0f / std::sqrt(add_lanes(squares) / (float)width + epsilon));
    for (int64_t i = 0; i < width; i += VL) {
        const int n = (int)std::min<int64_t>(VL, width - i);
        Floats x = mul(sub(load(row + i, n), mean), scale);
        if (weight) x = mul(x, load(weight + i, n));
        if (bias) x = add(x, load(bias + i, n));
        store(output + i, x, n);
    }
}

template <class E>
void silu_and_mul_row(const E* input, int64_t width, E* output) {
    for (int64_t i = 0; i < width; i += VL) {
        const int n = (int)std::min<int64_t>(VL, width - i);
        store(output + i, mul(silu<E>(load(input + i, n)), load(input + width + i, n)), n);
    }
}

// Norms a head by a factor (where there is a weight), and rotates the pairs (i, i + size / 2) of its first numbers, in
// place, rounded once.
template <class E>
void rotate_head(E* head, int64_t dim, const E* rotary, int64_t size, NormWeight<E> norm, float factor) {
    const int64_t half = size / 2;
    const Floats scale = broadcast(factor);
    for (int64_t i = 0; i < half; i += VL) {
        const int n = (int)std::min<int64_t>(VL, half - i);
        Floats x = load(head + i, n), y = load(head + half + i, n);
        if (norm) {
            x = norm.times(mul(x, scale), i, n);
            y = norm.times(mul(y, scale), half + i, n);
        }
        store(head + i, fma(y, load(rotary + size + i, n), mul(x, load(rotary + i, n))), n);
        store(head + half + i, fma(x, load(rotary + size + half + i, n), mul(y, load(rotary + half + i, n))), n);
    }
    if (!norm) return;
    for (int64_t i = size; i < dim; i += VL) {
        const int n = (int)std::min<int64_t>(VL, dim - i);
        store(head + i, norm.times(mul(load(head + i, n), scale), i, n), n);
    }
}

// Does so with all queries, or all keys, of a row, normed together or each by itself.
template <class E>
void rotate_heads(const Op& op, E* heads, int64_t num_heads, const E* rotary, const void* weight) {
    const int64_t dim = op.head_dim;
    const NormWeight<E> norm(op, weight);
    const bool together = norm && op.norms_whole_rows;
    float factor = together ? inverse_root_mean_square(heads, num_heads * dim, op.epsilon) : 1.0f;
    for (int64_t head = 0; head < num_heads; head++) {
        E* place = heads + head * dim;
        if (op.norms_follow) {
            rotate_head(place, dim, rotary, op.rotary_size, NormWeight<E>(op, nullptr), 1.0f);
            rms_norm_row(place, norm, dim, op.epsilon, place);
            continue;
        }
        if (norm && !together) factor = inverse_root_mean_square(place, dim, op.epsilon);
        rotate_head(place, dim, rotary, op.rotary_size, together ? norm.from(head * dim) : norm, factor);
    }
}

// Writes a head's key or value to its slot, P numbers to a word. Keys: [D words][block_size]; values: [block_size words][D].
template <int P, class T>
INLINE void write_key(const T* key, T* tile, int64_t slot, int64_t dim, int64_t block_size) {
    for (int64_t word = 0; word < dim / P; word++) memcpy(tile + (word * block_size + slot) * P, key + word * P, P * sizeof(T));
}

template <int P, class T>
INLINE void write_value(const T* value, T* tile, int64_t slot, int64_t dim) {
    T* place = tile + slot / P * dim * P + slot % P;
    for (int64_t d = 0; d < dim; d++) place[d * P] = value[d];
}

// Quantizes a head's key or value as int8.h does rows, writes its scale, and gives the signed bytes.
template <class E>
INLINE const int8_t* quantize_head(const E* head, int8_t* tile, int64_t slot, int64_t dim, int64_t block_size) {
    thread_local std::vector<uint8_t> bytes;
    bytes.resize((dim + VL - 1) / VL * VL);
    const float scale = quantize_row(head, dim, bytes.data());
    for (int64_t d = 0; d < dim; d++) bytes[d] ^= SHIFT;
    memcpy(tile + block_size * dim + slot * (int64_t)sizeof scale, &scale, sizeof scale);
    return (const int8_t*)bytes.data();
}

// Rotates the queries and keys of a run's rows, and writes its keys and values.
template <class E>
void rotary_and_cache_run(const Op& op, const Run& run, int64_t block) {
    constexpr int P = PER_WORD<E>;
    const bool is_quantized = op.kv_scheme == INT8;
    const PoolShape shape = pool_shape(op);
    const int64_t dim = op.head_dim, size = op.block_size, tile_bytes = shape.tile * (is_quantized ? 1 : sizeof(E));
    char* tiles = is_quantized ? (char*)shape.keys<int8_t>(op.pool, block, 0) : (char*)shape.keys<E>(op.pool, block, 0);
    if (run.fresh) memset(tiles, 0, 2 * op.num_kv_heads * tile_bytes);
    for (int64_t i = 0; i < run.num_rows; i++) {
        E* row = (E*)op.input + (run.first_row + i) * op.input_stride;
        const E* rotary = (const E*)op.residual + (run.first_row + i) * op.rotary_stride;
        E* key = row + (1 + op.has_gates) * op.num_heads * dim;
        rotate_heads(op, row, op.num_heads, rotary + (op.rotary_stride - 2 * op.rotary_size), op.query_norm);
        rotate_heads(op, key, op.num_kv_heads, rotary, op.key_norm);
        const int64_t slot = run.first_slot + i;
        for (int64_t head = 0; head < 2 * op.num_kv_heads; head++) {
            char* tile = tiles + head * tile_bytes;
            const E* numbers = key + head * dim;
            const bool is_key = head < op.num_kv_heads;
            if (is_quantized) {
                const int8_t* bytes = quantize_head(numbers, (int8_t*)tile, slot, dim, size);
                is_key ? write_key<4>(bytes, (int8_t*)tile, slot, dim, size) : write_value<4>(bytes, (int8_t*)tile, slot, dim);
            } else {
                is_key ? write_key<P>(numbers, (E*)tile, slot, dim, size) : write_value<P>(numbers, (E*)tile, slot, dim);
            }
        }
    }
}
