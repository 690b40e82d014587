// Walks through the ops of a plan with a team of threads. Owns the scratch memory of threads, which grows and stays.
#pragma once

#include <chrono>
#include <memory>

#include "attention_units.h"
#include "elementwise.h"
#include "experts.h"
#include "int4.h"
#include "lora.h"
#include "recurrent.h"
#include "team.h"

class Executor : public Work {
   public:
    explicit Executor(int num_threads) : team_(num_threads), scratch_(num_threads), attention_(num_threads) {}

    int num_threads() const { return team_.num_threads(); }

    // Bytes of what attention keeps between units of work, at most.
    int64_t attention_bytes() const { return attention_.num_bytes(); }

    // For work that is no step. Not while one runs.
    Team& team() { return team_; }

    // Runs ops in order over one step.
    void run(const Op* ops, int num_ops, const Inputs& inputs) {
        ops_ = ops;
        num_ops_ = num_ops;
        prepare_step(inputs);
        phases_.clear();
        for (auto& scratch : scratch_) scratch.ahead = {}, scratch.quantized_for = nullptr;
        // Brief ops are done before the phase that comes next, if there is one.
        int first = 0;
        for (int op = 0; op < num_ops; op++) {
            if (is_idle(ops[op]) || is_brief(ops[op])) continue;
            if (ops[op].scheme != UNQUANTIZED && !quantizes_alone(ops[op])) add_phase(op, QUANTIZE, first);
            add_phase(op, COMPUTE, first);
            if (ops[op].kind == HEAD) add_phase(op, MERGE, first);
        }
        for (int op = first; op < num_ops; op++)
            if (is_brief(ops[op])) add_phase(op, COMPUTE, first = op);
        began_.resize(phases_.size() + 1);
        if (phases_.empty()) return;
        team_.run(*this);
        began_.back() = Clock::now();
    }

    // How long the phases of the last run took, in seconds, as many as fit; gives how many there were.
    int phase_times(int32_t* ops, double* seconds, int size) const {
        for (int phase = 0; phase < std::min(num_phases(), size); phase++) {
            ops[phase] = phases_[phase].op;
            seconds[phase] = std::chrono::duration<double>(began_[phase + 1] - began_[phase]).count();
        }
        return num_phases();
    }

    int num_phases() const override { return (int)phases_.size(); }

    int64_t num_units(int phase) override {
        began_[phase] = Clock::now();
        const Op& op = ops_[phases_[phase].op];
        for (int brief = phases_[phase].first; brief < phases_[phase].op; brief++)
            if (is_brief(ops_[brief])) run_alone(ops_[brief]);
        if (phase && ops_[phases_[phase - 1].op].kind == ATTENTION) look_ahead(phases_[phase].op);
        const int64_t rows = step_.num_rows(op.rows);
        if (phases_[phase].stage == MERGE) return rows;
        if (phases_[phase].stage == QUANTIZE) {
            shared_.reserve(op, num_input_rows(op));
            return num_input_rows(op);
        }
        switch (op.kind) {
            case LINEAR:
            case LINEAR_GATED: return num_panels(op.out_features) * row_cuts(rows);
            case HEAD:
                for (auto& scratch : scratch_) scratch.forget_best(rows);
                return num_panels(op.out_features) * row_cuts(rows);
            case LORA_SHRINK:
            case LORA_EXPAND: return (int64_t)step_.lora_runs(op.rows).size() * num_panels(op.out_features);
            case ATTENTION: attention_.divide(op, step_); return attention_.size();
            case ROTARY_AND_CACHE: return (int64_t)step_.runs.size();
            case CONVOLVE: return step_.inputs().num_sequences * channel_groups(op);
            case MIX: return step_.inputs().num_sequences * op.num_heads;
            case EXPERTS_GATHER: experts_.place(op, rows); return rows;
            case EXPERTS_GATE_UP:
            case EXPERTS_DOWN:
                experts_.cut(op, rows);
                return (int64_t)experts_.runs().size() * num_panels(op.out_features);
            default: return rows;
        }
    }

    int64_t units_at_once(int phase) override {
        const Op& op = ops_[phases_[phase].op];
        if (phases_[phase].stage != COMPUTE) return 4;
        switch (op.kind) {
            case LINEAR:
            case LINEAR_GATED:
            case HEAD: return panels_at_once(op, std::min(step_.num_rows(op.rows), UNIT_ROWS));
            case EXPERTS_GATE_UP:
            case EXPERTS_DOWN: return panels_at_once(op, num_input_rows(op) / std::max<int64_t>(experts_.runs().size(), 1));
            case ATTENTION:
            case LORA_SHRINK:
            case MIX:
            case ROTARY_AND_CACHE: return 1;
            default: return 4;
        }
    }

    void run(int phase, int64_t begin, int64_t end, int thread) override {
        const Op& op = ops_[phases_[phase].op];
        if (op.type == BFLOAT16)
            run_stage<bf16>(op, phases_[phase].stage, begin, end, thread);
        else
            run_stage<float>(op, phases_[phase].stage, begin, end, thread);
    }

   private:
    using Clock = std::chrono::steady_clock;

    // The part of an op that a phase executes. A product quantizes its rows first if they are many; the head merges the
    // best tokens of its threads last.
    enum Stage { QUANTIZE, COMPUTE, MERGE };

    struct Phase {
        int op;
        Stage stage;
        int first;  // from here on brief ops are done before it
    };

    struct alignas(64) Scratch {
        std::unique_ptr<AttentionScratch<float>> attention32;
        std::unique_ptr<AttentionScratch<bf16>> attention16;
        std::vector<Best> best;
        ProductRows quantized;
        Deltas deltas;
        std::vector<char> low_rank;
        MixScratch mix;
        const Op* quantized_for = nullptr;
        Cursor ahead;

        template <class E>
        AttentionScratch<E>& attention(int64_t dim) {
            auto& mine = of((E*)nullptr);
            if (!mine || mine->dim != dim) mine = std::make_unique<AttentionScratch<E>>(dim);
            return *mine;
        }

        void forget_best(int64_t rows) {
            Best none;
            std::fill_n(none.value, VL, -std::numeric_limits<float>::infinity());
            std::fill_n(none.id, VL, std::numeric_limits<int32_t>::max());
            none.not_finite = 0;
            best.assign(rows, none);
        }

       private:
        std::unique_ptr<AttentionScratch<float>>& of(float*) { return attention32; }
        std::unique_ptr<AttentionScratch<bf16>>& of(bf16*) { return attention16; }
    };

    // Has each thread fetch, while it multiplies, the keys and values of the attention that comes after an op.
    void look_ahead(int op) {
        while (op < num_ops_ && ops_[op].kind != ATTENTION) op++;
        for (size_t thread = 0; thread < scratch_.size(); thread++) {
            scratch_[thread].ahead = {};
            if (op == num_ops_) continue;
            const Op& next = ops_[op];
            const auto& blocks = step_.blocks[next.kv_group];
            const int64_t size = next.kv_scheme == INT8 ? 1 : next.type == BFLOAT16 ? 2 : 4;
            const int64_t lines = 2 * next.num_kv_heads * pool_shape(next).tile * size / LINE_BYTES;
            scratch_[thread].ahead = {
                (const char*)next.pool + next.layer_offset * size, next.block_stride * size, lines,
                blocks.data() + blocks.size() * thread / scratch_.size(),
                blocks.data() + blocks.size() * (thread + 1) / scratch_.size()};
        }
    }

    // Whether an op does nothing, because no row of the step has an adapter.
    bool is_idle(const Op& op) const {
        return (op.kind == LORA_SHRINK || op.kind == LORA_EXPAND) && step_.lora_runs(op.rows).empty();
    }

    // Whether one thread executes an op sooner than several would have met.
    bool is_brief(const Op& op) const {
        constexpr int64_t FEW_ROWS = 4;
        const bool is_routing = op.kind == ROUTE || op.kind == EXPERTS_GATHER || op.kind == EXPERTS_COMBINE;
        return is_routing && step_.num_rows(op.rows) <= FEW_ROWS;
    }

    void run_alone(const Op& op) {
        const int64_t rows = step_.num_rows(op.rows);
        if (op.kind == EXPERTS_GATHER) experts_.place(op, rows);
        if (op.type == BFLOAT16)
            compute<bf16>(op, 0, rows, 0);
        else
            compute<float>(op, 0, rows, 0);
    }

    void add_phase(int op, Stage stage, int& first) {
        phases_.push_back({op, stage, first});
        first = op + 1;
    }

    // Rows that a product reads.
    int64_t num_input_rows(const Op& op) const {
        const bool is_of_experts = op.kind == EXPERTS_GATE_UP || op.kind == EXPERTS_DOWN;
        return step_.num_rows(op.rows) * (is_of_experts ? op.top_k : 1);
    }

    // Some microseconds of work, so that taking a piece costs nothing beside it.
    static int64_t panels_at_once(const Op& op, int64_t num_rows) {
        return std::max<int64_t>(1, 4096 / std::max<int64_t>(op.in_features / 2 * num_rows, 1));
    }

    static int64_t channel_groups(const Op& op) { return (op.out_features + CONV_CHANNELS - 1) / CONV_CHANNELS; }

    static int64_t row_cuts(int64_t rows) { return (rows + UNIT_ROWS - 1) / UNIT_ROWS; }

    void prepare_step(const Inputs& inputs) {
        int64_t block_size = 0, group = 1;
        for (int op = 0; op < num_ops_ && !block_size; op++)
            if (ops_[op].block_size) block_size = ops_[op].block_size, group = ops_[op].num_heads / ops_[op].num_kv_heads;
        find_windows();
        step_.prepare(inputs, block_size, group, windows_);
    }

    // Finds the widest window among the layers of each KV group.
    void find_windows() {
        windows_.clear();
        for (int i = 0; i < num_ops_; i++) {
            const Op& op = ops_[i];
            if (op.kind != ATTENTION) continue;
            const int64_t none = -1;
            if (op.kv_group >= (int64_t)windows_.size()) windows_.resize(op.kv_group + 1, none);
            int64_t& window = windows_[op.kv_group];
            window = window == 0 || op.window == 0 ? 0 : std::max(window, op.window);
        }
        for (int64_t& window : windows_) window = std::max<int64_t>(window, 0);
    }

    template <class E>
    void run_stage(const Op& op, Stage stage, int64_t begin, int64_t end, int thread) {
        if (stage == COMPUTE) return compute<E>(op, begin, end, thread);
        for (int64_t i = begin; i < end; i++) {
            if (stage == MERGE)
                merge_best(i);
            else
                shared_.template quantize<E>(op, i);
        }
    }

    // Whether each thread quantizes all rows for itself: of few elements that costs less than a wait for the others.
    bool quantizes_alone(const Op& op) const {
        constexpr int64_t FEW_ELEMENTS = 1 << 14;
        return num_input_rows(op) * op.in_features <= FEW_ELEMENTS;
    }

    template <class E>
    const ProductRows& quantized_rows(const Op& op, Scratch& mine) {
        if (!quantizes_alone(op)) return shared_;
        if (mine.quantized_for != &op) {
            const int64_t rows = num_input_rows(op);
            mine.quantized.reserve(op, rows);
            for (int64_t i = 0; i < rows; i++) mine.quantized.template quantize<E>(op, i);
            mine.quantized_for = &op;
        }
        return mine.quantized;
    }

    template <class E>
    void compute(const Op& op, int64_t begin, int64_t end, int thread) {
        switch (op.kind) {
            case EMBEDDING:
                for (int64_t i = begin; i < end; i++)
                    embed_row(op, index_of(op, i), (E*)op.output + i * op.out_features, [&](int64_t row, E* output) {
                        copy_row((const E*)op.weight, row, op.out_features, output);
                    });
                break;
            case EMBEDDING_PACKED:
                for (int64_t i = begin; i < end; i++)
                    embed_row(op, index_of(op, i), (E*)op.output + i * op.out_features, [&](int64_t row, E* output) {
                        unpack_row((const E*)op.weight, row, op.out_features, output);
                    });
                break;
            case ROUND:
                for (int64_t i = begin; i < end; i++)
                    round_row(
                        (const float*)op.input + i * op.input_stride, (const E*)op.bias, op.out_features,
                        (E*)op.output + i * op.out_features);
                break;
            case RMS_NORM:
            case LAYER_NORM:
                for (int64_t i = begin; i < end; i++) norm_row<E>(op, i);
                break;
            case ADD_NORMED:
            case ADD:
                for (int64_t i = begin; i < end; i++) add_to_row<E>(op, i);
                break;
            case LINEAR:
                if (op.wide)
                    run_linear<E>(op, begin, end, thread, StoreLogits<E>{(float*)op.output, op.out_features, logits_of<E>(op)});
                else
                    run_linear<E>(
                        op, begin, end, thread,
                        StoreRows<E, E>{
                            (E*)op.output, (const E*)op.bias, op.out_features, deltas_of(op, thread), op.activation});
                break;
            case LINEAR_GATED:
                run_linear<E>(
                    op, begin, end, thread,
                    StoreGated<E>{
                        (E*)op.output, (const E*)op.bias, op.out_features / 2, deltas_of(op, thread), op.activation, op.limit});
                break;
            case ROUTE:
                for (int64_t i = begin; i < end; i++) route_row(op, i);
                break;
            case EXPERTS_GATHER:
                for (int64_t i = begin; i < end; i++) gather_row<E>(op, i);
                break;
            case EXPERTS_GATE_UP:
                run_experts<E>(op, begin, end, thread, [&](int64_t first_byte) {
                    const E* bias = op.bias ? (const E*)((const char*)op.bias + first_byte) : nullptr;
                    return StoreGated<E>{(E*)op.output, bias, op.out_features / 2, nullptr, op.activation, op.limit};
                });
                break;
            case EXPERTS_DOWN:
                run_experts<E>(op, begin, end, thread, [&](int64_t) {
                    return StoreLogits<E>{(float*)op.output, op.out_features, Logits<E>{nullptr, 1, 0}};
                });
                break;
            case EXPERTS_COMBINE:
                for (int64_t i = begin; i < end; i++) combine_row<E>(op, i);
                break;
            case LORA_SHRINK:
                if (op.wide)
                    lora_shrink<E>(op, step_, begin, end, (float*)op.output + step_.num_rows(op.rows) * op.low_rank_offset);
                else
                    lora_shrink<E>(op, step_, begin, end, (E*)op.output);
                break;
            case LORA_EXPAND: lora_expand<E>(op, step_, begin, end, scratch_[thread].deltas, scratch_[thread].low_rank); break;
            case SILU_AND_MUL:
                for (int64_t i = begin; i < end; i++)
                    silu_and_mul_row(
                        (const E*)op.input + i * op.input_stride, op.out_features, (E*)op.output + i * op.out_features);
                break;
            case ROTARY_AND_CACHE:
                for (int64_t i = begin; i < end; i++) {
                    const Run& run = step_.runs[i];
                    rotary_and_cache_run<E>(op, run, step_.blocks_of(run.sequence, op.kv_group)[run.place]);
                }
                break;
            case ATTENTION: {
                auto& scratch = scratch_[thread].template attention<E>(op.head_dim);
                const auto run = [&](auto runner) { attention_.run(runner, begin, end); };
                if (op.kv_scheme == INT8)
                    with_bytes([&](auto byte) { run(AttentionRunner<E, decltype(byte)>(op, step_, scratch)); });
                else
                    run(AttentionRunner<E>(op, step_, scratch));
                break;
            }
            case GATE:
                for (int64_t i = begin; i < end; i++) gate_row<E>(op, i);
                break;
            case CONVOLVE:
                for (int64_t i = begin; i < end; i++)
                    convolve<E>(op, step_, i / channel_groups(op), i % channel_groups(op) * CONV_CHANNELS);
                break;
            case MIX:
                for (int64_t i = begin; i < end; i++) {
                    const auto mix = op.skip ? scan_head<E> : mix_head<E>;
                    mix(op, step_, i / op.num_heads, i % op.num_heads, scratch_[thread].mix);
                }
                break;
            case GATED_NORM:
                for (int64_t i = begin; i < end; i++) gated_norm_row<E>(op, i);
                break;
            case HEAD:
                run_linear<E>(
                    op, begin, end, thread,
                    KeepBest<E>{step_.inputs().logits, scratch_[thread].best.data(), op.out_features, logits_of<E>(op)});
                break;
        }
    }

    int64_t index_of(const Op& op, int64_t i) const { return op.indices ? op.indices[i] : step_.inputs().chosen[i]; }

    template <class E>
    static Logits<E> logits_of(const Op& op) {
        return {(const E*)op.bias, op.scale, op.softcap};
    }

    template <class E>
    void norm_row(const Op& op, int64_t i) {
        const int64_t width = op.in_features;
        const E* row = (const E*)op.input + i * width;
        if (op.residual) {
            E* total = (E*)op.total + i * width;
            add_row(row, (const E*)op.residual + i * width, width, op.scale, total);
            row = total;
        }
        E* output = (E*)op.output + i * width;
        if (op.kind == LAYER_NORM)
            layer_norm_row(row, (const float*)op.weight, (const float*)op.bias, width, op.epsilon, output);
        else
            rms_norm_row(row, NormWeight<E>(op, op.weight), width, op.epsilon, output);
    }

    template <class E>
    void add_to_row(const Op& op, int64_t i) {
        const int64_t width = op.in_features;
        const E* row = (const E*)op.input + i * width;
        E* output = (E*)op.output + i * width;
        if (op.kind == ADD_NORMED) {
            rms_norm_row(row, NormWeight<E>(op, op.weight), width, op.epsilon, output);
            row = output;
        }
        add_row(row, (const E*)op.residual + i * width, width, op.scale, output);
    }

    template <class E, class Epilogue>
    void run_linear(const Op& op, int64_t begin, int64_t end, int thread, Epilogue epilogue) {
        with_runner<E>(op, 0, thread, epilogue, [&](auto& runner) { run_units<E>(op, begin, end, runner, thread); });
    }

    // Units are ordered by runs, then by panels. What is held of an expert begins so many bytes behind that of the first.
    template <class E, class MakeEpilogue>
    void run_experts(const Op& op, int64_t begin, int64_t end, int thread, MakeEpilogue epilogue_of) {
        const int64_t panels = num_panels(op.out_features);
        while (begin < end) {
            const ExpertRun& run = experts_.runs()[begin / panels];
            const int64_t first_byte = run.expert * op.expert_stride, last = std::min(end, (begin / panels + 1) * panels);
            with_runner<E>(op, first_byte, thread, epilogue_of(first_byte), [&](auto& runner) {
                for (; begin < last; begin++) runner.run(begin % panels, run.first, run.end);
            });
        }
    }

    // Calls with what multiplies by the weight that begins so many bytes behind the op's.
    template <class E, class Epilogue, class Visit>
    void with_runner(const Op& op, int64_t first_byte, int thread, Epilogue epilogue, Visit visit) {
        const uint32_t* weight = (const uint32_t*)((const char*)op.weight + first_byte);
        Cursor& ahead = scratch_[thread].ahead;
        if (op.scheme == INT8) {
            const QuantizedRows& rows = quantized_rows<E>(op, scratch_[thread]).whole;
            const Factors factors{rows.words(), rows.stride_words(), weight, words_of<int8_t>(op.in_features), op.leaves};
            const int64_t columns = num_panels(op.out_features) * TILE_COLUMNS;
            const float* scales = (const float*)((const char*)op.scales + first_byte);
            const int32_t* sums = (const int32_t*)((const char*)op.sums + first_byte);
            const Dequantize dequantize{rows.scales(), scales, sums, op.leaves, columns};
            with_bytes([&](auto byte) {
                LinearRunner<decltype(byte), Dequantize, Epilogue> runner(factors, dequantize, epilogue, ahead);
                visit(runner);
            });
        } else if (op.scheme == INT4) {
            const GroupedRows& rows = quantized_rows<E>(op, scratch_[thread]).grouped;
            with_bytes([&](auto byte) {
                GroupedRunner<decltype(byte), Epilogue> runner(rows, weight, op.group, op.leaves, epilogue, ahead);
                visit(runner);
            });
        } else {
            const Factors factors{
                (const uint32_t*)op.input, op.input_stride / PER_WORD<E>, weight, words_of<E>(op.in_features), op.leaves};
            LinearRunner<E, AsSummed, Epilogue> runner(factors, AsSummed{}, epilogue, ahead);
            visit(runner);
        }
    }

    // Units are ordered by panels, then by runs of rows: a panel stays in the cache while all rows pass.
    template <class E, class Runner>
    void run_units(const Op& op, int64_t begin, int64_t end, Runner& runner, int thread) {
        const int64_t rows = step_.num_rows(op.rows), cuts = row_cuts(rows);
        const Deltas* deltas = deltas_of(op, thread);
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t cut = unit % cuts, first = rows * cut / cuts, last = rows * (cut + 1) / cuts;
            if (deltas) find_deltas<E>(op, step_, unit / cuts, first, last, scratch_[thread].deltas);
            runner.run(unit / cuts, first, last);
        }
    }

    // Null: no row of the product has an adapter.
    const Deltas* deltas_of(const Op& op, int thread) const {
        return op.lora && !op.wide && !step_.lora_runs(op.rows).empty() ? &scratch_[thread].deltas : nullptr;
    }

    void merge_best(int64_t row) {
        float value = -std::numeric_limits<float>::infinity();
        int32_t id = std::numeric_limits<int32_t>::max();
        bool finite = true;
        for (const auto& scratch : scratch_) {
            const Best& best = scratch.best[row];
            finite = finite && !best.not_finite;
            for (int lane = 0; lane < VL; lane++)
                if (best.value[lane] > value || (best.value[lane] == value && best.id[lane] < id))
                    value = best.value[lane], id = best.id[lane];
        }
        step_.inputs().best[row] = id == std::numeric_limits<int32_t>::max() ? 0 : id;
        if (step_.inputs().best_values) step_.inputs().best_values[row] = value;
        step_.inputs().finite[row] = finite;
    }

    Team team_;
    std::vector<Scratch> scratch_;
    Step step_;
    AttentionUnits attention_;
    ExpertRows experts_;
    ProductRows shared_;
    std::vector<int64_t> windows_;
    const Op* ops_ = nullptr;
    int num_ops_ = 0;
    std::vector<Phase> phases_;
    std::vector<Clock::time_point> began_;
};
