// Every kind of op over shapes with tails, on one thread and on several, which must agree to the bit.
//
// Compiled with sanitizers, with the kernels in it. Whether results are right is tested elsewhere.
#include "library.cpp"
#include "operands.h"

namespace {

// The same ops on executors of different sizes, each with outputs of its own.
constexpr int TEAMS[] = {1, 3};
constexpr int NUM_TEAMS = 2;
void* executors[NUM_TEAMS];

template <class E>
constexpr int32_t TYPE = sizeof(E) == 2 ? BFLOAT16 : FLOAT32;

template <class E>
Op op_of(Kind kind) {
    Op op = {};
    op.kind = kind;
    op.type = TYPE<E>;
    op.rows = CHOSEN;
    op.epsilon = 1e-5f;
    op.scale = 1;
    return op;
}

Inputs rows_alone(int64_t count) {
    Inputs inputs = {};
    inputs.num_chosen = count;
    return inputs;
}

// Runs an op for each team, with an output of so many elements, and compares them.
template <class Out>
void run_for_all(Op op, const Inputs& inputs, int64_t count) {
    std::unique_ptr<Fenced<Out>> outputs[NUM_TEAMS];
    for (int team = 0; team < NUM_TEAMS; team++) {
        outputs[team] = std::make_unique<Fenced<Out>>(count);
        op.output = outputs[team]->data();
        blockyard_run(executors[team], &op, 1, &inputs);
        CHECK(outputs[team]->equals(*outputs[0]));
    }
}

// Addresses of a dense weight's rows in the order of panels: gates and ups side by side, null past the last.
template <class E>
std::vector<const void*> columns_of(Fenced<E>& dense, int64_t num_rows, int64_t width, bool gated) {
    const int64_t lanes = gated ? VL : TILE_COLUMNS, half = gated ? num_rows / 2 : num_rows;
    std::vector<const void*> columns;
    for (int64_t first = 0; first < half; first += lanes)
        for (int side = 0; side < (gated ? 2 : 1); side++)
            for (int64_t row = first; row < first + lanes; row++)
                columns.push_back(row < half ? dense.data() + (side * half + row) * width : nullptr);
    return columns;
}

// A weight in panels, or in panels of bytes.
template <class E>
struct Packed {
    Packed(int64_t num_rows, int64_t width, bool gated, Scheme scheme, int leaves) {
        auto dense = random_values<E>(num_rows * width);
        const auto columns = columns_of(*dense, num_rows, width, gated);
        const int64_t num_panels = columns.size() / TILE_COLUMNS;
        const int64_t num_words = scheme == INT8 ? (width + 3) / 4 : width / PER_WORD<E>;
        words = std::make_unique<Fenced<uint32_t>>(columns.size() * num_words);
        scales = std::make_unique<Fenced<float>>(leaves * columns.size());
        sums = std::make_unique<Fenced<int32_t>>(leaves * columns.size());
        void* executor = executors[NUM_TEAMS - 1];
        if (scheme == INT8)
            blockyard_pack_int8(
                executor, columns.data(), num_panels, width, TYPE<E>, leaves, words->data(), scales->data(),
                sums->data());
        else
            blockyard_pack(executor, columns.data(), num_panels, num_words, words->data());
    }

    std::unique_ptr<Fenced<uint32_t>> words;
    std::unique_ptr<Fenced<float>> scales;
    std::unique_ptr<Fenced<int32_t>> sums;
};

template <class E>
void run_head(Op op, int64_t num_rows) {
    std::unique_ptr<Fenced<float>> logits[NUM_TEAMS];
    std::unique_ptr<Fenced<int64_t>> best[NUM_TEAMS];
    for (int team = 0; team < NUM_TEAMS; team++)
        for (bool with_logits : {true, false}) {
            logits[team] = std::make_unique<Fenced<float>>(with_logits ? num_rows * op.out_features : 0);
            best[team] = std::make_unique<Fenced<int64_t>>(num_rows);
            Fenced<uint8_t> finite(num_rows);
            Inputs inputs = rows_alone(num_rows);
            inputs.logits = with_logits ? logits[team]->data() : nullptr;
            inputs.best = best[team]->data();
            inputs.finite = finite.data();
            blockyard_run(executors[team], &op, 1, &inputs);
            CHECK(best[team]->equals(*best[0]));
            for (int64_t row = 0; row < num_rows; row++) CHECK(finite[row] == 1);
        }
}

// A weight of four bits, whose levels, scales and zero points are any.
struct Grouped {
    Grouped(int64_t num_panels, int64_t width, int64_t group)
        : bytes(num_panels * (width / group) * group_bytes(group)), order(width) {
        auto* next = (uint8_t*)bytes.data();
        for (int64_t i = 0; i < num_panels * (width / group); i++) {
            for (int64_t k = 0; k < group / 2 * TILE_COLUMNS; k++) *next++ = random_byte();
            for (int c = 0; c < TILE_COLUMNS; c++, next += 4) *(float*)next = 0.01f * (1 + c);
            for (int c = 0; c < TILE_COLUMNS; c++, next += 2) set(*(bf16*)next, random_byte() & 15);
        }
        for (int64_t i = 0; i < width; i++) order[i] = (int32_t)(width - 1 - i);
    }

    Fenced<uint8_t> bytes;
    Fenced<int32_t> order;
};

// `hold`: gives an operation its weight.
template <class E, class Hold>
void run_products(int64_t num_rows, int64_t width, int64_t count, bool gated, int leaves, Hold hold) {
    const int64_t stride = width + 2 * PER_WORD<E>;
    auto input = random_values<E>(count ? (count - 1) * stride + width : 0), bias = random_values<E>(num_rows);
    Op op = op_of<E>(gated ? LINEAR_GATED : LINEAR);
    op.input = input->data(), op.input_stride = stride;
    op.in_features = width, op.out_features = num_rows, op.leaves = leaves;
    hold(op);
    const int64_t num_outputs = count * (gated ? num_rows / 2 : num_rows);
    for (const void* added : {(const void*)nullptr, (const void*)bias->data()}) {
        op.bias = added;
        op.activation = gated ? SILU : AS_IT_IS;
        run_for_all<E>(op, rows_alone(count), num_outputs);
        // All in turn: they differ in nothing but their arithmetic.
        op.activation = GELU_TANH + (num_rows + count) % 4;
        run_for_all<E>(op, rows_alone(count), num_outputs);
    }
    if (gated) return;
    op.wide = 1;
    run_for_all<float>(op, rows_alone(count), num_outputs);
    op.scale = 0.5f, op.softcap = 3;
    run_for_all<float>(op, rows_alone(count), num_outputs);
    op.kind = HEAD;
    run_head<E>(op, count);
    op.bias = nullptr, op.scale = 1, op.softcap = 0;
    run_head<E>(op, count);
}

template <class E>
void products(int64_t num_rows, int64_t width, int64_t count, Scheme scheme, int leaves = 1) {
    for (bool gated : {false, true}) {
        if (gated && num_rows % 2) continue;
        Packed<E> packed(num_rows, width, gated, scheme, leaves);
        run_products<E>(num_rows, width, count, gated, leaves, [&](Op& op) {
            op.weight = packed.words->data(), op.scheme = scheme;
            op.scales = packed.scales->data(), op.sums = packed.sums->data();
        });
    }
}

template <class E>
void grouped_products(int64_t num_rows, int64_t num_groups, int64_t group, int64_t count, int leaves = 1) {
    const int64_t width = num_groups * group;
    auto dense = random_values<E>(num_rows * width);
    for (bool gated : {false, true}) {
        if (gated && num_rows % 2) continue;
        const int64_t num_panels = columns_of(*dense, num_rows, width, gated).size() / TILE_COLUMNS;
        Grouped grouped(num_panels, width, group);
        for (const int32_t* order : {(const int32_t*)nullptr, (const int32_t*)grouped.order.data()})
            run_products<E>(num_rows, width, count, gated, leaves, [&](Op& op) {
                op.weight = grouped.bytes.data(), op.scheme = INT4, op.group = group, op.order = order;
            });
    }
}

// Adapters of three slots: one, one that leaves this weight as it is, and a wider one; rows without any among them.
template <class E>
void adapters(int64_t num_rows, int64_t width, int64_t count, Scheme scheme, int leaves) {
    constexpr int64_t WIDEST = 70;
    auto input = random_values<E>(count * width), bias = random_values<E>(num_rows);
    std::vector<int64_t> slots;
    for (int64_t row = 0; row < count; row++) slots.push_back((int64_t)(row / 3 * 7 % 4) - 1);
    auto lora_slots = list<int32_t>(slots);
    Inputs inputs = rows_alone(count);
    inputs.lora_slots = lora_slots->data();
    for (bool gated : {false, true}) {
        Packed<E> packed(num_rows, width, gated, scheme, leaves);
        std::vector<Packed<E>> shrink, expand;
        std::vector<LoraFactors> factors;
        for (int64_t rank : {(int64_t)6, (int64_t)0, WIDEST}) {
            shrink.emplace_back(rank, width, false, UNQUANTIZED, 1);
            expand.emplace_back(num_rows, rank, gated, UNQUANTIZED, 1);
            factors.push_back({shrink.back().words->data(), expand.back().words->data(), rank});
        }
        Op op = op_of<E>(gated ? LINEAR_GATED : LINEAR), first = op_of<E>(LORA_SHRINK), last = op_of<E>(LORA_EXPAND);
        op.input = first.input = input->data(), op.input_stride = first.input_stride = width;
        op.in_features = first.in_features = width, op.leaves = first.leaves = leaves;
        op.weight = packed.words->data(), op.bias = bias->data();
        op.scheme = scheme, op.scales = packed.scales->data(), op.sums = packed.sums->data();
        op.out_features = last.out_features = num_rows;
        op.lora = first.lora = last.lora = factors.data();
        op.low_rank_stride = last.low_rank_stride = first.out_features = WIDEST;
        const int64_t num_outputs = count * (gated ? num_rows / 2 : num_rows);
        std::unique_ptr<Fenced<E>> outputs[NUM_TEAMS], whole[NUM_TEAMS];
        for (int team = 0; team < NUM_TEAMS; team++) {
            Fenced<E> low_rank(count * WIDEST);
            outputs[team] = std::make_unique<Fenced<E>>(num_outputs);
            first.output = low_rank.data(), op.low_rank = low_rank.data(), op.output = outputs[team]->data();
            const Op ops[2] = {first, op};
            blockyard_run(executors[team], ops, 2, &inputs);
            CHECK(outputs[team]->equals(*outputs[0]));
            if (gated) continue;
            // As ranks do that add their sums.
            Fenced<float> sums(count * (num_rows + WIDEST));
            whole[team] = std::make_unique<Fenced<E>>(num_outputs);
            Op sum = op, shrunk = first, round = op_of<E>(ROUND);
            sum.wide = shrunk.wide = 1, sum.bias = nullptr;
            shrunk.low_rank_offset = last.low_rank_offset = num_rows;
            round.input = last.input = last.low_rank = shrunk.output = sum.output = sums.data();
            round.bias = last.bias = bias->data(), round.input_stride = round.out_features = num_rows;
            round.output = last.output = whole[team]->data();
            const Op parts[4] = {sum, shrunk, round, last};
            blockyard_run(executors[team], parts, 4, &inputs);
            CHECK(whole[team]->equals(*outputs[0]));
        }
    }
}

template <class E>
void rows_of_a_table(int64_t num_rows, int64_t width) {
    auto indices = list<int64_t>({num_rows - 1, 0, num_rows / 2, num_rows - 1});
    auto table = random_values<E>(num_rows * width);
    Op op = op_of<E>(EMBEDDING);
    op.weight = table->data(), op.out_features = width, op.indices = indices->data();
    run_for_all<E>(op, rows_alone(4), 4 * width);
    op.scale = 3;
    run_for_all<E>(op, rows_alone(4), 4 * width);
    // Without indices: the chosen rows.
    Inputs inputs = rows_alone(4);
    inputs.chosen = indices->data();
    op.indices = nullptr;
    run_for_all<E>(op, inputs, 4 * width);
    if (width % PER_WORD<E>) return;
    Packed<E> packed(num_rows, width, false, UNQUANTIZED, 1);
    op = op_of<E>(EMBEDDING_PACKED);
    op.weight = packed.words->data(), op.out_features = width, op.indices = indices->data();
    run_for_all<E>(op, rows_alone(4), 4 * width);
}

template <class E>
void elementwise(int64_t width, int64_t count) {
    auto input = random_values<E>(count * width), residual = random_values<E>(count * width);
    auto weight = random_values<E>(width), pairs = random_values<E>(2 * count * width);
    auto total = std::make_unique<Fenced<E>>(count * width);
    Op op = op_of<E>(RMS_NORM);
    op.input = input->data(), op.weight = weight->data(), op.in_features = width;
    run_for_all<E>(op, rows_alone(count), count * width);
    op.residual = residual->data(), op.total = total->data();
    run_for_all<E>(op, rows_alone(count), count * width);
    auto wide_weight = random_values<float>(width), bias = random_values<float>(width);
    for (const void* each : {(const void*)nullptr, (const void*)wide_weight->data()}) {
        op.kind = RMS_NORM, op.weight = each, op.has_wide_norms = 1;
        run_for_all<E>(op, rows_alone(count), count * width);
        op.kind = ADD_NORMED;
        run_for_all<E>(op, rows_alone(count), count * width);
        op.kind = LAYER_NORM, op.bias = bias->data();
        run_for_all<E>(op, rows_alone(count), count * width);
    }
    op.kind = ADD, op.scale = 0.5f;
    run_for_all<E>(op, rows_alone(count), count * width);
    op = op_of<E>(SILU_AND_MUL);
    op.input = pairs->data(), op.input_stride = 2 * width, op.out_features = width;
    run_for_all<E>(op, rows_alone(count), count * width);
}

struct Heads {
    int64_t num_heads, num_kv_heads, head_dim, block_size, window;
    bool normed;
    // Numbers that are not rotated; with them come norms of whole rows, wide weights, capped scores and sinks.
    int64_t passing = 0;
};

// Sequences in the middle of blocks and at their ends, one that computes nothing, and cuts of 256 keys that are crossed.
struct Sequences {
    explicit Sequences(int64_t block_size) {
        const std::vector<int64_t> counts = {1, 37, 0, 5, 1}, lengths = {300, 37, 9, 2 * block_size + 1, block_size};
        num_blocks = 0;
        int64_t widest = 0;
        for (int64_t length : lengths) widest = std::max(widest, (length + block_size - 1) / block_size);
        std::vector<int64_t> table(lengths.size() * widest, -1);
        for (size_t s = 0; s < lengths.size(); s++)
            for (int64_t block = 0; block * block_size < lengths[s]; block++) table[s * widest + block] = num_blocks++;
        for (int64_t count : counts) num_tokens += count;
        num_new_tokens = list<int64_t>(counts);
        seq_lens = list<int64_t>(lengths);
        tables = list<int32_t>(table);
        positions = std::make_unique<Fenced<int64_t>>(num_tokens);
        inputs.num_sequences = counts.size();
        inputs.num_new_tokens = num_new_tokens->data();
        inputs.seq_lens = seq_lens->data();
        inputs.block_tables = tables->data();
        inputs.table_stride = widest;
        inputs.positions = positions->data();
    }

    int64_t num_tokens = 0, num_blocks;
    std::unique_ptr<Fenced<int64_t>> num_new_tokens, seq_lens, positions;
    std::unique_ptr<Fenced<int32_t>> tables;
    Inputs inputs = {};
};

// `S`: what the pool holds, bytes where it is quantized.
template <class E, class S = E>
void attention(const Heads& heads) {
    constexpr bool IS_QUANTIZED = !std::is_same_v<E, S>;
    Sequences sequences(heads.block_size);
    const int64_t dim = heads.head_dim, width = (heads.num_heads + 2 * heads.num_kv_heads) * dim;
    const int64_t num_layers = 2, stored = IS_QUANTIZED ? dim + sizeof(float) : dim;
    const int64_t layer = 2 * heads.num_kv_heads * heads.block_size * stored;
    const int64_t rotated = dim - heads.passing;
    auto rotary = random_values<E>(sequences.num_tokens * 2 * rotated);
    auto query_norms = random_values<float>(heads.num_heads * dim), key_norms = random_values<float>(heads.num_kv_heads * dim);
    auto sinks = random_values<float>(heads.num_heads);
    auto query_norm = random_values<E>(dim), key_norm = random_values<E>(dim);
    auto rows = random_values<E>(sequences.num_tokens * width);
    auto pool = std::make_unique<Fenced<S>>(sequences.num_blocks * num_layers * layer);
    if constexpr (IS_QUANTIZED)
        memset(pool->data(), 0x3c, pool->size());  // A scale of 0.01.
    else
        pool = random_values<E>(pool->size());
    std::unique_ptr<Fenced<S>> pools[NUM_TEAMS];
    std::unique_ptr<Fenced<E>> outputs[NUM_TEAMS];
    for (int team = 0; team < NUM_TEAMS; team++) {
        pools[team] = std::make_unique<Fenced<S>>(pool->size());
        memcpy(pools[team]->data(), pool->data(), pool->size() * sizeof(S));
        Fenced<E> qkv(rows->size());
        memcpy(qkv.data(), rows->data(), rows->size() * sizeof(E));
        outputs[team] = std::make_unique<Fenced<E>>(sequences.num_tokens * heads.num_heads * dim);
        Op ops[2] = {op_of<E>(ROTARY_AND_CACHE), op_of<E>(ATTENTION)};
        for (Op& op : ops) {
            op.rows = TOKENS;
            op.input = qkv.data(), op.input_stride = width;
            op.pool = pools[team]->data(), op.block_stride = num_layers * layer, op.layer_offset = layer;
            op.num_heads = heads.num_heads, op.num_kv_heads = heads.num_kv_heads, op.head_dim = dim;
            op.block_size = heads.block_size, op.window = heads.window, op.scale = 0.2f;
            op.kv_scheme = IS_QUANTIZED ? INT8 : UNQUANTIZED;
        }
        ops[0].residual = rotary->data(), ops[0].rotary_size = rotated, ops[0].rotary_stride = 2 * rotated;
        if (heads.normed) ops[0].query_norm = query_norm->data(), ops[0].key_norm = key_norm->data();
        if (heads.passing) {
            ops[0].query_norm = query_norms->data(), ops[0].key_norm = key_norms->data();
            ops[0].norms_whole_rows = ops[0].has_wide_norms = 1;
            ops[1].sinks = sinks->data(), ops[1].softcap = 2;
        }
        ops[1].output = outputs[team]->data();
        blockyard_run(executors[team], ops, 2, &sequences.inputs);
        CHECK(outputs[team]->equals(*outputs[0]));
        CHECK(pools[team]->equals(*pools[0]));
    }
}

// Experts of which some get no row, one by one as a plan has them, and together, where few rows need no phases.
template <class E>
void experts(int64_t width, int64_t inner, int64_t count, Scheme scheme, float limit) {
    constexpr int64_t NUM = 5, TOP_K = 3;
    auto logits = random_values<float>(count * NUM), weights = random_values<float>(count * TOP_K);
    auto rows = random_values<E>(count * width), biases = random_values<E>(NUM * 2 * inner), added = random_values<E>(NUM * width);
    for (int64_t i = 0; i < count; i++) (*logits)[i * NUM + 3] = -9;
    Packed<E> first(NUM * 2 * inner, width, false, scheme, 1), second(NUM * width, inner, false, scheme, 1);
    auto ids = list<int32_t>(std::vector<int64_t>(count * TOP_K)), places = list<int32_t>(std::vector<int64_t>(count * TOP_K));
    Fenced<E> copies(count * TOP_K * width), inners(count * TOP_K * inner);
    Fenced<float> sums(count * TOP_K * width);
    Op ops[5] = {
        op_of<E>(ROUTE), op_of<E>(EXPERTS_GATHER), op_of<E>(EXPERTS_GATE_UP), op_of<E>(EXPERTS_DOWN), op_of<E>(EXPERTS_COMBINE)};
    for (Op& op : ops) {
        op.expert_ids = ids->data(), op.expert_weights = weights->data(), op.expert_places = places->data();
        op.num_experts = NUM, op.top_k = TOP_K, op.leaves = 1, op.scheme = scheme, op.limit = limit, op.activation = SILU;
    }
    ops[0].input = logits->data(), ops[0].renormalises = count % 2;
    ops[1].input = rows->data(), ops[1].input_stride = ops[1].in_features = width, ops[1].output = copies.data();
    ops[2].input = copies.data(), ops[2].input_stride = ops[2].in_features = width, ops[2].output = inners.data();
    ops[2].out_features = 2 * inner, ops[2].bias = biases->data(), ops[2].weight = first.words->data();
    ops[2].scales = first.scales->data(), ops[2].sums = first.sums->data();
    ops[3].input = inners.data(), ops[3].input_stride = ops[3].in_features = inner, ops[3].output = sums.data();
    ops[3].out_features = width, ops[3].weight = second.words->data();
    ops[3].scales = second.scales->data(), ops[3].sums = second.sums->data();
    ops[4].input = sums.data(), ops[4].bias = added->data(), ops[4].out_features = width;
    // All have the first one's weight: the distance of one from the next is that of packed ranges, tried elsewhere.
    std::unique_ptr<Fenced<E>> outputs[NUM_TEAMS][2];
    const Inputs inputs = rows_alone(count);
    for (int team = 0; team < NUM_TEAMS; team++)
        for (bool together : {false, true}) {
            outputs[team][together] = std::make_unique<Fenced<E>>(count * width);
            ops[4].output = outputs[team][together]->data();
            for (int op = 0; op < 5 && !together; op++) blockyard_run(executors[team], ops + op, 1, &inputs);
            if (together) blockyard_run(executors[team], ops, 5, &inputs);
            CHECK(outputs[team][together]->equals(*outputs[0][0]));
        }
}

template <class E>
void run_all(bool all_sizes) {
    for (int64_t width : {1, 7, 16, 33, 130}) {
        elementwise<E>(width, 5);
        rows_of_a_table<E>(35, width);
    }
    for (int64_t num_rows : {1, 25, 32, 49, 70})
        for (int64_t width : {2, 34, 160})
            for (int64_t count : {0, 1, 5, 13, 25})
                for (Scheme scheme : {UNQUANTIZED, INT8}) products<E>(num_rows, width, count, scheme);
    for (int leaves : {2, 8})
        for (int64_t count : {1, 13, 40})
            for (Scheme scheme : {UNQUANTIZED, INT8}) products<E>(50, 160, count, scheme, leaves);
    for (int64_t num_rows : {2, 50, 70})
        for (int64_t count : {1, 13, 40})
            for (Scheme scheme : {UNQUANTIZED, INT8}) adapters<E>(num_rows, 160, count, scheme, num_rows == 50 ? 8 : 1);
    for (int64_t count : {0, 1, 4, 5, 40, 250})
        for (Scheme scheme : {UNQUANTIZED, INT8}) experts<E>(34, 18, count, scheme, count % 2 ? 0.5f : 0);
    products<E>(34, 6, 200, UNQUANTIZED);
    products<E>(34, 6, 200, INT8);
    // So many elements that the threads quantize them together.
    products<E>(34, 1000, 20, INT8);
    for (int64_t group : {32, 64, 128})
        for (int64_t count : {0, 1, 13, 25}) grouped_products<E>(50, 4, group, count, group == 64 ? 4 : 1);
    grouped_products<E>(25, 3, 32, 40);
    // Rows that a sum of bytes ends in the middle of.
    for (int64_t width : {33, 35})
        if (width % PER_WORD<E> == 0) products<E>(17, width, 3, INT8);
    for (int64_t block_size : {8, 16, 32, 64, 128, 256})
        for (const Heads& heads : {
                 Heads{4, 4, 8, block_size, 0, false},
                 Heads{7, 1, 16, block_size, 100, true},
                 Heads{6, 2, 80, block_size, 0, true},
                 Heads{64, 1, 8, block_size, 0, false},
                 Heads{2, 1, 20, block_size, 40, true},
                 Heads{4, 2, 20, block_size, 40, true, 12},
                 Heads{50, 1, 8, block_size, 0, true, 8},
                 Heads{3, 1, 96, block_size, 1, false},
                 Heads{8, 1, 128, block_size, 300, true},
             })
            if (all_sizes || heads.head_dim < 80 || block_size < 32) attention<E>(heads), attention<E, int8_t>(heads);
}

}  // namespace

// An argument: all sizes.
int main(int count, char**) {
    for (int team = 0; team < NUM_TEAMS; team++) executors[team] = blockyard_create(TEAMS[team]);
    run_all<float>(count > 1);
    run_all<bf16>(count > 1);
    double seconds[2];
    int32_t ops[2];
    CHECK(blockyard_phase_times(executors[0], ops, seconds, 2) > 0);
    for (void* executor : executors) blockyard_destroy(executor);
    puts("clean");
}
