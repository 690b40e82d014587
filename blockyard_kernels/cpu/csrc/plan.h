// What crosses the border to Python: the descriptors of ops, the inputs of a step, and nothing with a vector in it.
//
// Mirrored field by field in blockyard_kernels/cpu/library.py. All pointers are to memory that the caller owns and keeps.
#pragma once

#include <cstdint>

enum Kind : int32_t {
    EMBEDDING,          // output[i] = scale * row indices[i] of the table
    EMBEDDING_PACKED,   // the same from a packed weight
    RMS_NORM,           // total = scale * input + residual; output = norm of total
    LINEAR,             // output = activation of input x weight (+ bias); if wide: as logits are
    LINEAR_GATED,       // output = activation(gate) * up, of a weight whose gate and up rows were interleaved
    SILU_AND_MUL,       // output = silu(first half of input) * second half
    ROTARY_AND_CACHE,   // rotates queries and keys of input in place, writes keys and values to the pool
    ATTENTION,          // output = attention of the queries in input
    HEAD,               // logits = input x weight (+ bias), scaled and capped, and the best of each row
    ROUND,              // output = input, which is float32, (+ bias) in the op's type
    LORA_SHRINK,        // of rows that have an adapter: output = input x its first factor
    LORA_EXPAND,        // of these rows: output = input, which is float32, (+ bias) + low_rank x its second factor
    LAYER_NORM,         // total as of RMS_NORM; output = total, centred and of unit variance, times the weight (+ bias)
    ADD_NORMED,         // output = scale * norm of input + residual
    ADD,                // output = scale * input + residual
    ROUTE,              // chooses and weighs the experts of each row of input, which are logits in float32
    EXPERTS_GATHER,     // output = rows of input, once for each of their experts, those of one expert together
    EXPERTS_GATE_UP,    // LINEAR_GATED of such rows, each by its expert's weight
    EXPERTS_DOWN,       // wide LINEAR of such rows, without a bias
    EXPERTS_COMBINE,    // output = of each row the sum of what its experts gave (+ bias), times their weights
    GATE,               // output = input * sigmoid(gates of residual), of which a row has out_features: as many, or one
    CONVOLVE,           // output = the convolution of a sequence's rows: see recurrent.h
    MIX,                // output = the gated delta rule, or Mamba 2, over what CONVOLVE made
    GATED_NORM,         // output = norm of input, which is float32, * silu(gates of residual), in num_heads groups of a row
    NUM_KINDS
};

enum Type : int32_t { FLOAT32, BFLOAT16 };

// The function that a product, or a gate, passes through.
enum Activation : int32_t { AS_IT_IS, SILU, GELU_TANH, GELU_ERF, RELU, RELU2, TANH };

// Which rows an op works on: all tokens of the step, or the chosen ones.
enum Rows : int32_t { TOKENS, CHOSEN };

// The format of a weight: the op's type, or that of int8.h or int4.h.
enum Scheme : int32_t { UNQUANTIZED, INT8, INT4 };

// An adapter's two factors of a weight, packed as weights are: [rank, in_features], and [out_features, rank].
struct LoraFactors {
    const void* shrink;
    const void* expand;
    int64_t rank;       // 0: the adapter leaves this weight as it is
};

// One op. Fields that a kind does not name are not read.
struct Op {
    int32_t kind;
    int32_t type;       // of all rows, weights and pools
    int32_t rows;
    int32_t wide;       // LINEAR, LORA_SHRINK: the output is float32; LORA_EXPAND: low_rank is
    const void* input;
    const void* residual;
    void* output;
    void* total;
    const void* weight; // packed, or a table, or a norm's: or null; of LAYER_NORM float32
    const void* bias;   // [out_features], in the packed order, or null; LAYER_NORM: [in_features] float32, or null
    const void* query_norm; // or null, as is key_norm: no norms
    const void* key_norm;
    const int64_t* indices; // null: the chosen rows
    void* pool;             // of bytes, where it is quantized
    int64_t in_features;
    int64_t out_features;
    int64_t input_stride;   // elements from one row of the input to the next
    int64_t block_stride;   // elements of a block of the pool, over all layers; CONVOLVE, MIX: its bytes
    int64_t layer_offset;   // elements from a block's beginning to this layer's keys
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t block_size;
    int64_t window;         // keys that a query sees; 0: all
    int64_t first_row;      // EMBEDDING: what the table's first row is the embedding of
    int64_t num_rows;       // EMBEDDING: of the table, others being zeros; 0: it has all that indices name
    float epsilon;
    float scale;            // a factor: of what is read or added; of scores; of logits, and of other wide results
    int32_t scheme;         // of the weight of a product
    int32_t leaves;         // LINEAR, LINEAR_GATED, HEAD: slices of in_features that are summed apart; a power of two to 8
    const float* scales;    // of a quantized weight: see int8.h
    const int32_t* sums;
    const LoraFactors* lora;    // the adapter of each slot, of this weight; LINEAR, LINEAR_GATED: or null
    const void* low_rank;       // what LORA_SHRINK made: [rows, low_rank_stride]
    int64_t low_rank_stride;
    int64_t low_rank_offset;    // features of each row that stand before all of low_rank, in its buffer
    const void* virtual_rows;   // EMBEDDING: of ids from first_virtual on, plain rows; or null
    int64_t first_virtual;
    const float* sinks;         // ATTENTION: [num_heads], or null
    int64_t rotary_size;        // ROTARY_AND_CACHE: numbers of a head that are rotated, from its first on
    int32_t activation;         // LINEAR, LINEAR_GATED
    float softcap;              // of scores, logits and other wide results; 0: none
    int32_t has_wide_norms;     // whether the weights of RMS norms are float32
    int32_t norms_whole_rows;   // ROTARY_AND_CACHE: all queries of a row are normed together, and all keys
    // ROUTE and EXPERTS_…: of each row, in order of rank, [rows, top_k]
    int32_t* expert_ids;
    float* expert_weights;
    int32_t* expert_places;     // where its copies stand among those of all rows
    int64_t num_experts;
    int64_t top_k;
    int64_t expert_stride;      // bytes from what is held of one expert to that of the next
    int32_t renormalises;       // ROUTE: weights of a row add up to `scale`; else so do those of all experts
    float limit;                // LINEAR_GATED, EXPERTS_GATE_UP: what gates and ups are cut at: see linear.h; 0: they are not
    int32_t sees_later;         // ATTENTION: a row sees the keys behind its own too, by a window as many as before it
    const int32_t* order;       // of a weight in groups: [in_features], each input's place in a row; or null
    int64_t group;              // its inputs in a group: a multiple of 32, at most 128
    int32_t norms_follow;       // ROTARY_AND_CACHE: heads are normed when they are rotated
    int32_t kv_scheme;          // ROTARY_AND_CACHE, ATTENTION: of the pool; INT8: see kv_int8.h
    int64_t rotary_stride;      // ROTARY_AND_CACHE: from one row's numbers to the next row's; the queries' are its last
    int64_t kv_group;           // ROTARY_AND_CACHE, ATTENTION: whose block tables count
    int64_t has_gates;          // ROTARY_AND_CACHE: whether the input has a gate for each number of the queries behind them
    // CONVOLVE, MIX; `group` is the convolution's width, `wide` whether its rows are gated
    const int64_t* places;      // bytes in a sequence's fixed blocks: of the tail, then of each head
    const float* decay_log;     // [num_heads]
    const float* step_bias;     // [num_heads]
    const float* skip;          // [num_heads]: MIX is Mamba 2, whose results in float32 have their values times this; or null
    int64_t key_dim;
    int32_t is_sigmoid;         // ROUTE: scores are sigmoids, which `bias` (float32) changes for the choice; else a softmax
};

// The inputs of a step. Positions, slots and work lists are made from them.
struct Inputs {
    int64_t num_sequences;
    const int64_t* num_new_tokens;  // [S]
    const int64_t* seq_lens;        // [S]
    const int32_t* block_tables;    // [KV groups, S, table_stride]
    int64_t table_stride;
    int64_t num_chosen;
    const int64_t* chosen;          // [R]: rows of which logits are made
    float* logits;                  // [R, vocabulary], or null: only the best are wanted
    int64_t* best;                  // [R]: the likeliest token, the lowest id on ties
    float* best_values;             // [R]: its logit, or null
    uint8_t* finite;                // [R]: 1 where all logits are finite
    int64_t* positions;             // [T]: written, each row's position
    const int32_t* lora_slots;      // [T]: the slot of each row's adapter, below 0: none; or null: none has one
    const int32_t* fixed_tables;    // [S, fixed_stride]: the blocks of each sequence's state; or null: none has one
    int64_t fixed_stride;
};
