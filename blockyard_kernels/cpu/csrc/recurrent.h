// Layers with a state: a convolution over neighbouring tokens of a sequence, and a recurrence over its results, which is
// the gated delta rule or Mamba 2.
//
// A sequence's state lies in its fixed blocks: of each layer the convolution's last inputs, and of each head a matrix
// [value_dim / 32][key_dim][32] in float32. Tokens come one after another, each by the same operations in the same order,
// and the matrix is never rounded: so bits do not depend on how a sequence's tokens are divided into steps.
#pragma once

#include "elementwise.h"

// Neighbouring channels of a convolution that are one unit of work.
constexpr int64_t CONV_CHANNELS = 64;
constexpr int64_t MAX_CONV_WIDTH = 8;

// Columns of a matrix that are stored and updated together: so many chains of sums hide the time of one addition.
constexpr int64_t MIX_COLUMNS = 32;
constexpr int VECTORS = MIX_COLUMNS / VL;

// Tokens whose queries and keys are made ready at once.
constexpr int64_t MIX_TOKENS = 32;

// The tokens of one sequence in a step.
struct StateRows {
    int64_t first_row;
    int64_t count;
    bool is_new;  // its state is still zeros
};

INLINE StateRows state_rows(const Step& step, int64_t sequence) {
    const int64_t count = step.inputs().num_new_tokens[sequence];
    return {step.first_rows[sequence], count, step.inputs().seq_lens[sequence] == count};
}

// A place in a sequence's fixed blocks, in bytes as if they lay one behind the other.
inline char* state_place(const Op& op, const Step& step, int64_t sequence, int64_t place) {
    const int32_t* table = step.inputs().fixed_tables + sequence * step.inputs().fixed_stride;
    return (char*)op.pool + table[place / op.block_stride] * op.block_stride + place % op.block_stride;
}

template <class E>
INLINE float round_to(float x) {
    E kept[VL];
    store(kept, broadcast(x));
    return widen(kept[0]);
}

// Convolves some channels of one sequence's rows. With gates a row is (B, C, x): B * x is convolved, the result times C.
template <class E>
void convolve(const Op& op, const Step& step, int64_t sequence, int64_t channel) {
    const StateRows rows = state_rows(step, sequence);
    if (!rows.count) return;
    const int64_t width = op.group, features = op.out_features, num = std::min(CONV_CHANNELS, features - channel);
    float weights[MAX_CONV_WIDTH][CONV_CHANNELS], window[MAX_CONV_WIDTH][CONV_CHANNELS];
    const E* stored = (const E*)op.weight + channel * width;
    for (int64_t c = 0; c < num; c++)
        for (int64_t j = 0; j < width; j++) weights[j][c] = widen(stored[c * width + j]);
    E* tail = (E*)state_place(op, step, sequence, op.places[0]) + channel;
    for (int64_t j = 0; j + 1 < width; j++)
        for (int64_t c = 0; c < num; c += VL) {
            const int n = (int)std::min<int64_t>(VL, num - c);
            store(window[j] + c, rows.is_new ? zero() : load(tail + j * features + c, n), n);
        }
    // The window goes round: the oldest inputs are overwritten.
    int64_t oldest = 0;
    for (int64_t i = 0; i < rows.count; i++) {
        const E* row = (const E*)op.input + (rows.first_row + i) * op.input_stride + channel;
        E* output = (E*)op.output + (rows.first_row + i) * features + channel;
        const int64_t newest = (oldest + width - 1) % width;
        for (int64_t c = 0; c < num; c += VL) {
            const int n = (int)std::min<int64_t>(VL, num - c);
            Floats x = load(row + c, n);
            if (op.wide) {
                E product[VL];
                store(product, mul(x, load(row + 2 * features + c, n)));
                x = load(product);
            }
            store(window[newest] + c, x, n);
            Floats sum = mul(load(window[oldest] + c, n), load(weights[0] + c, n));
            for (int64_t j = 1; j < width; j++)
                sum = fma(load(window[(oldest + j) % width] + c, n), load(weights[j] + c, n), sum);
            if (op.bias) sum = add(sum, load((const E*)op.bias + channel + c, n));
            if (!op.wide) {
                store(output + c, silu<E>(sum), n);
                continue;
            }
            E mixed[VL];
            store(mixed, sum);
            store(output + c, mul(load(row + features + c, n), load(mixed)), n);
        }
        oldest = (oldest + 1) % width;
    }
    for (int64_t j = 0; j + 1 < width; j++)
        for (int64_t c = 0; c < num; c += VL) {
            const int n = (int)std::min<int64_t>(VL, num - c);
            store(tail + j * features + c, load(window[(oldest + j) % width] + c, n), n);
        }
}

// One thread's prepared inputs of some tokens of a head.
struct MixScratch {
    std::vector<float> queries, keys, results;
    float decays[MIX_TOKENS], updates[MIX_TOKENS];

    void reserve(int64_t key_dim, int64_t value_dim) {
        if ((int64_t)queries.size() >= MIX_TOKENS * key_dim && (int64_t)results.size() >= MIX_TOKENS * value_dim) return;
        queries.resize(MIX_TOKENS * key_dim), keys.resize(MIX_TOKENS * key_dim), results.resize(MIX_TOKENS * value_dim);
    }
};

// x, or the logarithm of 1 + e^x: by Kahan's quotient, which loses nothing where e^x is small.
INLINE float softplus(float x) {
    if (!(x <= 20.0f)) return x;
    const Floats power = power_of_two<float>(broadcast(x * LOG2_OF_E)), sum = add(broadcast(1.0f), power);
    float parts[3][VL];
    store(parts[0], power), store(parts[1], sum), store(parts[2], logarithm(sum));
    return parts[1][0] == 1.0f ? parts[0][0] : parts[2][0] * (parts[0][0] / (parts[1][0] - 1.0f));
}

INLINE float exponential(float x) {
    float kept[VL];
    store(kept, power_of_two<float>(broadcast(x * LOG2_OF_E)));
    return kept[0];
}

// A head's vector divided by its length, times a factor.
template <class E>
void shorten(const E* row, int64_t width, float factor, float* output) {
    constexpr float EPSILON = 1e-6f;
    Floats squares = zero();
    for (int64_t i = 0; i < width; i += VL) {
        const Floats x = load(row + i, (int)std::min<int64_t>(VL, width - i));
        squares = fma(x, x, squares);
    }
    const Floats scale = broadcast(factor / std::sqrt(add_lanes(squares) + EPSILON));
    for (int64_t i = 0; i < width; i += VL) {
        const int n = (int)std::min<int64_t>(VL, width - i);
        store(output + i, mul(load(row + i, n), scale), n);
    }
}

// Some columns of a head's matrix over some tokens: one walk over them for each token, which updates them by this token,
// sums its result, and lets them decay and be remembered for the next one. Only the delta rule subtracts what is
// remembered.
template <bool IS_DELTA>
class ColumnMixer {
   public:
    ColumnMixer(float* matrix, int64_t key_dim, bool is_new) : matrix_(matrix), key_dim_(key_dim) {
        if (is_new) memset(matrix, 0, sizeof(float) * key_dim * MIX_COLUMNS);
    }

    template <class E>
    void run(const MixScratch& mix, int64_t count, const E* values, int64_t stride, float* results, int64_t width) {
        Floats remembered[VECTORS];
        remember(mix.decays[0], mix.keys.data(), remembered);
        for (int64_t t = 0; t < count; t++, values += stride, results += width) {
            Floats change[VECTORS], sums[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++) {
                const Floats value = load(values + v * VL);
                change[v] = mul(IS_DELTA ? sub(value, remembered[v]) : value, broadcast(mix.updates[t]));
                sums[v] = remembered[v] = zero();
            }
            const float *key = mix.keys.data() + t * key_dim_, *query = mix.queries.data() + t * key_dim_;
            if (t + 1 < count)
                walk<true>(key, query, mix.decays[t + 1], key + key_dim_, change, sums, remembered);
            else
                walk<false>(key, query, 1.0f, nullptr, change, sums, remembered);
            UNROLL for (int v = 0; v < VECTORS; v++) store(results + v * VL, sums[v]);
        }
    }

   private:
    INLINE float* place(int64_t k, int v) const {
        return matrix_ + k * MIX_COLUMNS + v * VL;
    }

    void remember(float decay, const float* key, Floats (&remembered)[VECTORS]) {
        UNROLL for (int v = 0; v < VECTORS; v++) remembered[v] = zero();
        for (int64_t k = 0; k < key_dim_; k++)
            UNROLL for (int v = 0; v < VECTORS; v++) {
                const Floats kept = mul(load(place(k, v)), broadcast(decay));
                store(place(k, v), kept);
                if constexpr (IS_DELTA) remembered[v] = fma(kept, broadcast(key[k]), remembered[v]);
            }
    }

    template <bool HAS_NEXT>
    INLINE void walk(
        const float* key, const float* query, float decay, const float* next_key, const Floats (&change)[VECTORS],
        Floats (&sums)[VECTORS], Floats (&remembered)[VECTORS]) {
        for (int64_t k = 0; k < key_dim_; k++)
            UNROLL for (int v = 0; v < VECTORS; v++) {
                Floats kept = fma(broadcast(key[k]), change[v], load(place(k, v)));
                sums[v] = fma(kept, broadcast(query[k]), sums[v]);
                if constexpr (HAS_NEXT) {
                    kept = mul(kept, broadcast(decay));
                    if constexpr (IS_DELTA) remembered[v] = fma(kept, broadcast(next_key[k]), remembered[v]);
                }
                store(place(k, v), kept);
            }
    }

    float* matrix_;
    int64_t key_dim_;
};

// Copies a head's vector as float32.
template <class E>
void widen_row(const E* row, int64_t width, float* output) {
    for (int64_t i = 0; i < width; i += VL) {
        const int n = (int)std::min<int64_t>(VL, width - i);
        store(output + i, load(row + i, n), n);
    }
}

// Mamba 2 of one head over one sequence's rows: values, keys and queries are Mamba's x, B and C. Writes float32.
template <class E>
void scan_head(const Op& op, const Step& step, int64_t sequence, int64_t head, MixScratch& mix) {
    const StateRows rows = state_rows(step, sequence);
    if (!rows.count) return;
    const int64_t key_dim = op.key_dim, dim = op.head_dim, heads = op.num_heads, features = op.input_stride;
    const int64_t key_head = head * op.num_kv_heads / heads, all_keys = op.num_kv_heads * key_dim;
    mix.reserve(key_dim, dim);
    float* matrix = (float*)state_place(op, step, sequence, op.places[1 + head]);
    const float rate = -exponential(op.decay_log[head]);
    const Floats skip = broadcast(op.skip[head]);
    for (int64_t begin = 0; begin < rows.count; begin += MIX_TOKENS) {
        const int64_t count = std::min(MIX_TOKENS, rows.count - begin), first = rows.first_row + begin;
        const E* mixed = (const E*)op.input + first * features;
        const E* gates = (const E*)op.residual + first * op.low_rank_stride + op.low_rank_offset;
        for (int64_t t = 0; t < count; t++) {
            const E* keys = mixed + t * features + heads * dim + key_head * key_dim;
            widen_row(keys, key_dim, mix.keys.data() + t * key_dim);
            widen_row(keys + all_keys, key_dim, mix.queries.data() + t * key_dim);
            const float time = widen(gates[t * op.low_rank_stride + heads * dim + head]);
            mix.updates[t] = softplus(time + op.step_bias[head]);
            mix.decays[t] = exponential(rate * mix.updates[t]);
        }
        const E* values = mixed + head * dim;
        for (int64_t c = 0; c < dim; c += MIX_COLUMNS)
            ColumnMixer<false>(matrix + c * key_dim, key_dim, rows.is_new && !begin)
                .run(mix, count, values + c, features, mix.results.data() + c, dim);
        for (int64_t t = 0; t < count; t++) {
            float *output = (float*)op.output + ((first + t) * heads + head) * dim, *result = mix.results.data() + t * dim;
            for (int64_t c = 0; c < dim; c += VL)
                store(output + c, fma(load(values + t * features + c), skip, load(result + c)));
        }
    }
}

// output = row * silu(gates), in float32, normed by groups, times the weight, rounded once.
template <class E>
void gated_norm_row(const Op& op, int64_t i) {
    const int64_t width = op.in_features, group = width / op.num_heads;
    float* row = (float*)op.input + i * width;
    const E *gates = (const E*)op.residual + i * op.low_rank_stride + op.low_rank_offset, *weight = (const E*)op.query_norm;
    for (int64_t begin = 0; begin < width; begin += group) {
        Floats squares = zero();
        for (int64_t c = begin; c < begin + group; c += VL) {
            const int n = (int)std::min<int64_t>(VL, begin + group - c);
            const Floats x = mul(load(row + c, n), silu<float>(load(gates + c, n)));
            store(row + c, x, n);
            squares = fma(x, x, squares);
        }
        const Floats scale = broadcast(1.0f / std::sqrt(add_lanes(squares) / group + op.epsilon));
        for (int64_t c = begin; c < begin + group; c += VL) {
            const int n = (int)std::min<int64_t>(VL, begin + group - c);
            store((E*)op.output + i * width + c, mul(mul(load(row + c, n), scale), load(weight + c, n)), n);
        }
    }
}

// The gated delta rule of one head over one sequence's rows, with the norm and the gate of its results.
template <class E>
void mix_head(const Op& op, const Step& step, int64_t sequence, int64_t head, MixScratch& mix) {
    const StateRows rows = state_rows(step, sequence);
    if (!rows.count) return;
    const int64_t key_dim = op.key_dim, dim = op.head_dim, heads = op.num_heads, features = op.input_stride;
    const int64_t key_head = head * op.num_kv_heads / heads, all_keys = op.num_kv_heads * key_dim;
    mix.reserve(key_dim, dim);
    float* matrix = (float*)state_place(op, step, sequence, op.places[1 + head]);
    const float rate = -exponential(op.decay_log[head]), query_scale = 1.0f / std::sqrt((float)key_dim);
    for (int64_t begin = 0; begin < rows.count; begin += MIX_TOKENS) {
        const int64_t count = std::min(MIX_TOKENS, rows.count - begin), first = rows.first_row + begin;
        const E* mixed = (const E*)op.input + first * features;
        const E* gates = (const E*)op.residual + first * op.low_rank_stride + op.low_rank_offset;
        for (int64_t t = 0; t < count; t++) {
            const E *row = mixed + t * features + key_head * key_dim, *logits = gates + t * op.low_rank_stride + heads * dim;
            shorten(row, key_dim, query_scale, mix.queries.data() + t * key_dim);
            shorten(row + all_keys, key_dim, 1.0f, mix.keys.data() + t * key_dim);
            mix.updates[t] = sigmoid(widen(logits[head]));
            mix.decays[t] = exponential(rate * softplus(widen(logits[heads + head]) + op.step_bias[head]));
        }
        for (int64_t c = 0; c < dim; c += MIX_COLUMNS)
            ColumnMixer<true>(matrix + c * key_dim, key_dim, rows.is_new && !begin)
                .run(mix, count, mixed + 2 * all_keys + head * dim + c, features, mix.results.data() + c, dim);
        for (int64_t t = 0; t < count; t++) {
            E* output = (E*)op.output + ((first + t) * heads + head) * dim;
            const E* gate = gates + t * op.low_rank_stride + head * dim;
            for (int64_t c = 0; c < dim; c += VL) store(output + c, load(mix.results.data() + t * dim + c));
            rms_norm_row(output, NormWeight<E>(op, op.query_norm), dim, op.epsilon, output);
            for (int64_t c = 0; c < dim; c += VL) store(output + c, mul(load(output + c), silu<E>(load(gate + c))));
        }
    }
}

// output = row * sigmoid(gates), rounded once. One gate is that of all numbers of a row.
template <class E>
void gate_row(const Op& op, int64_t i) {
    const int64_t width = op.in_features;
    const E *row = (const E*)op.input + i * width, *gates = (const E*)op.residual + i * op.low_rank_stride + op.low_rank_offset;
    E* output = (E*)op.output + i * width;
    for (int64_t c = 0; c < width; c += VL) {
        const int n = (int)std::min<int64_t>(VL, width - c);
        const Floats gate = op.out_features == 1 ? broadcast(widen(gates[0])) : load(gates + c, n);
        const Floats exponent = mul(gate, broadcast(-LOG2_OF_E));
        store(output + c, divide_by_one_and_power<E>(load(row + c, n), exponent), n);
    }
}
