// The ops without a product: each computes a row from that row alone, in one fixed order.
#pragma once

#include <cmath>

#include "attention.h"

template <class E>
void copy_row(const E* table, int64_t index, int64_t width, E* output) {
    memcpy(output, table + index * width, sizeof(E) * width);
}

// Reads row `index` of a table that has some rows of a larger one: zeros where it has not that one. Virtual rows are
// behind all tables.
template <class E, class Read>
void embed_row(const Op& op, int64_t index, E* output, Read read) {
    const int64_t row = index - op.first_row;
    if (op.virtual_rows && index >= op.first_virtual)
        copy_row((const E*)op.virtual_rows, index - op.first_virtual, op.out_features, output);
    else if (op.num_rows && (uint64_t)row >= (uint64_t)op.num_rows)
        memset((void*)output, 0, sizeof(E) * op.out_features);
    else
        read(row, output);
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

// total = input + residual, rounded; output = the normed total times the weight. Null `residual`: the input is the total.
template <class E>
void rms_norm_row(const E* input, const E* residual, const E* weight, int64_t width, float epsilon, E* output, E* total) {
    const E* row = input;
    if (residual) {
        for (int64_t i = 0; i < width; i += VL) {
            const int n = (int)std::min<int64_t>(VL, width - i);
            store(total + i, add(load(input + i, n), load(residual + i, n)), n);
        }
        row = total;
    }
    const Floats scale = broadcast(inverse_root_mean_square(row, width, epsilon));
    for (int64_t i = 0; i < width; i += VL) {
        const int n = (int)std::min<int64_t>(VL, width - i);
        store(output + i, mul(mul(load(row + i, n), scale), load(weight + i, n)), n);
    }
}

template <class E>
void silu_and_mul_row(const E* input, int64_t width, E* output) {
    for (int64_t i = 0; i < width; i += VL) {
        const int n = (int)std::min<int64_t>(VL, width - i);
        store(output + i, mul(silu<E>(load(input + i, n)), load(input + width + i, n)), n);
    }
}

// Norms a head (where there is a weight) and rotates its pairs (i, i + D / 2), in place, rounded once.
template <class E>
void rotate_head(E* head, const E* rotary, const E* norm, int64_t dim, float epsilon) {
    const int64_t half = dim / 2;
    const Floats scale = broadcast(norm ? inverse_root_mean_square(head, dim, epsilon) : 1.0f);
    for (int64_t i = 0; i < half; i += VL) {
        const int n = (int)std::min<int64_t>(VL, half - i);
        Floats x = load(head + i, n), y = load(head + half + i, n);
        if (norm) {
            x = mul(mul(x, scale), load(norm + i, n));
            y = mul(mul(y, scale), load(norm + half + i, n));
        }
        store(head + i, fma(y, load(rotary + dim + i, n), mul(x, load(rotary + i, n))), n);
        store(head + half + i, fma(x, load(rotary + dim + half + i, n), mul(y, load(rotary + half + i, n))), n);
    }
}

// Writes a head's key or value to its slot. Keys: [D words][block_size]; values: [block_size words][D].
template <class E>
INLINE void write_key(const E* key, E* block, int64_t slot, int64_t dim, int64_t block_size) {
    constexpr int P = PER_WORD<E>;
    for (int64_t word = 0; word < dim / P; word++) memcpy(block + (word * block_size + slot) * P, key + word * P, 4);
}

template <class E>
INLINE void write_value(const E* value, E* block, int64_t slot, int64_t dim) {
    constexpr int P = PER_WORD<E>;
    E* place = block + slot / P * dim * P + slot % P;
    for (int64_t d = 0; d < dim; d++) place[d * P] = value[d];
}

// Rotates the queries and keys of a run's rows, and writes its keys and values.
template <class E>
void rotary_and_cache_run(const Op& op, const Run& run) {
    const PoolShape shape = pool_shape(op);
    const int64_t dim = op.head_dim, block_elements = op.block_size * dim;
    if (run.fresh)
        for (int64_t head = 0; head < 2 * op.num_kv_heads; head++)
            memset((void*)shape.keys<E>(op.pool, run.block, head), 0, sizeof(E) * block_elements);
    E* keys = (E*)shape.keys<E>(op.pool, run.block, 0);
    E* values = (E*)shape.values<E>(op.pool, run.block, 0);
    for (int64_t i = 0; i < run.num_rows; i++) {
        E* row = (E*)op.input + (run.first_row + i) * op.input_stride;
        const E* rotary = (const E*)op.residual + (run.first_row + i) * 2 * dim;
        for (int64_t head = 0; head < op.num_heads; head++)
            rotate_head(row + head * dim, rotary, (const E*)op.query_norm, dim, op.epsilon);
        E* key = row + op.num_heads * dim;
        for (int64_t head = 0; head < op.num_kv_heads; head++) {
            rotate_head(key + head * dim, rotary, (const E*)op.key_norm, dim, op.epsilon);
            write_key(key + head * dim, keys + head * block_elements, run.first_slot + i, dim, op.block_size);
            const E* value = key + (op.num_kv_heads + head) * dim;
            write_value(value, values + head * block_elements, run.first_slot + i, dim);
        }
    }
}
