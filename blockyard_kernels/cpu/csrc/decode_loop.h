// Decodes step after step without Python: rows in their arrays, the plan, the choice, the checks of drafts.
//
// Does for steady steps what worker_service does for all steps, on the same arrays, and to the last byte the same.
// A step that is not steady, must be refused or makes numbers that are not finite is left, as if it had never begun.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>

#include "drafting.h"
#include "executor.h"
#include "sampling.h"
#include "step_queue.h"

// The progress of one row. Mirrored in worker_service/batch/rows.py, as its dtype.
struct Progress {
    int64_t num_tokens, num_computed_tokens, num_blocks;
    bool ended;
};

// The sequences [n] of steady steps, the arrays of all rows, and the plan. Mirrored in blockyard_kernels/cpu/decode_loop.py.
struct DecodeRows {
    const Op* ops;
    int64_t num_ops;
    int64_t* plan_token_ids;    // of the plan's inputs
    int64_t* plan_positions;
    int64_t max_plan_tokens;
    int64_t head_size;          // logits of a row
    // Limits
    int64_t vocab_size;
    int64_t block_size;
    int64_t num_kv_groups;
    int64_t max_model_len;
    int64_t max_num_blocks;
    int64_t num_device_blocks;
    int64_t max_num_batched_tokens;
    int64_t max_draft_tokens;
    int64_t max_draft_rows;
    // All rows
    Progress* progress;
    int32_t* token_ids;
    int64_t token_stride;
    int32_t* block_tables;
    int64_t table_stride;
    // Of each sequence
    int64_t num_sequences;
    const int64_t* rows;
    const int64_t* prompt_lengths;
    const int64_t* max_lengths;
    const int64_t* least_tokens;    // tokens before which a stop token does not end it
    const int64_t* stop_token_ids;  // [n, stop_width], -1: none
    int64_t stop_width;
    const uint8_t* waits;           // whether its logits are edited until it has the least tokens
    const uint8_t* may_draft;
    const float* temperatures;
    const int64_t* top_k;
    const float* top_p;
    const float* min_p;
    const int64_t* seeds;
    const int64_t* sequence_indexes;
    // Drafts: see worker_service/drafting/drafter.py. Without a drafter `tried` is null.
    const uint8_t* refuses_drafts;
    const int32_t* const* predicted;
    const int64_t* num_predicted;
    uint8_t* starts_over;           // of all rows
    double* tried;                  // [all rows, kinds, places]
    double* right;
    const double* prior;            // [kinds, places]
    const int64_t* kind_bounds;     // [kinds - 2]
    int64_t num_kinds;
    int64_t num_places;
    double prior_weight;
    double decay;
    double price_unit;
};

// A record's words: these, then places and blocks that are appended, drafts that are allowed of each sequence, prices.
enum RecordWord { NUMBER, STEP_ID, ARRIVAL, NUM_APPENDED, NUM_ALLOWED, NUM_PRICES, RECORD_WORDS };

// An answer's words: these, then of each sequence how many tokens it has, -1: it had ended before, then the tokens. Then
// of each sequence whose drafts its request predicts: its place, the drafts, and how many of them were right.
enum AnswerWord {
    ANSWERED, QUEUE_SECONDS, BEGUN_AT, FORWARD_SECONDS, SAMPLE_SECONDS, NUM_DRAFTS, NUM_SEQUENCES, ANSWER_WORDS
};

inline int64_t word_of(double number) {
    int64_t word;
    std::memcpy(&word, &number, sizeof word);
    return word;
}

inline double number_of(int64_t word) {
    double number;
    std::memcpy(&number, &word, sizeof number);
    return number;
}

// Seconds of the clock that Python calls perf_counter.
inline double now_in_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class DecodeLoop {
   public:
    explicit DecodeLoop(int event) : queue(event) {}

    StepQueue queue;

    // Sets the sequences of the steps from now on. While it does not run.
    void set_rows(Executor* executor, const DecodeRows& rows, int64_t last_step_id) {
        executor_ = executor;
        rows_ = rows;
        last_step_id_ = last_step_id;
    }

    // Runs steps until the queue ends or one is left. Returns the last one's id.
    int64_t run() {
        while (const StepWords* record = queue.next()) {
            if (!run_step(*record)) break;
            last_step_id_++;
            queue.answer(answer_);
        }
        logits_.reset(), num_logits_ = 0;
        return last_step_id_;
    }

   private:
    // One sequence of the step that computes.
    struct Decode {
        int64_t place, row, length, num_drafts, first, num_accepted;
        bool is_predicted;
    };

    struct Draft {
        double chance;
        int64_t run;
    };

    bool run_step(const StepWords& record) {
        const double begin = now_in_seconds();
        if (record[STEP_ID] != last_step_id_ + 1 || rows_.num_sequences > rows_.max_plan_tokens) return false;
        undone_.clear(), overwritten_.clear(), proposed_.clear();
        const int64_t* appended = record.data() + RECORD_WORDS;
        const int64_t* allowed = appended + 2 * record[NUM_APPENDED];
        const int64_t num_appended = append_blocks(appended, record[NUM_APPENDED]);
        const bool drafts = record[NUM_ALLOWED] > 0;
        if (num_appended == record[NUM_APPENDED] && find_runs() &&
            (drafts ? draft(record, allowed) : record[NUM_PRICES] == 0) && fits()) {
            compute();
            const double computed = now_in_seconds();
            if (std::all_of(finite_.begin(), finite_.end(), [](uint8_t is) { return is; }) && choose_tokens()) {
                accept();
                write_answer(record, begin, computed);
                return true;
            }
        }
        for (int64_t row : undone_) rows_.starts_over[row] = 1;
        for (int64_t i = num_appended; i--;)
            table_of(rows_.rows[appended[i]])[--progress_of(appended[i]).num_blocks] = overwritten_[i];
        return false;
    }

    Progress& progress_of(int64_t place) { return rows_.progress[rows_.rows[place]]; }
    int32_t* table_of(int64_t row) { return rows_.block_tables + row * rows_.table_stride; }
    int32_t* token_ids_of(int64_t row) { return rows_.token_ids + row * rows_.token_stride; }

    // Appends as many blocks as may be, and returns how many.
    int64_t append_blocks(const int64_t* appended, int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            const int64_t place = appended[i], block = appended[count + i];
            int64_t& num_blocks = progress_of(place).num_blocks;
            if (block < 1 || block >= rows_.num_device_blocks || num_blocks >= rows_.max_num_blocks) return i;
            int32_t& entry = table_of(rows_.rows[place])[num_blocks++];
            overwritten_.push_back(entry);
            entry = (int32_t)block;
        }
        return count;
    }

    int64_t room_of(const Progress& progress) const {
        return progress.num_blocks / rows_.num_kv_groups * rows_.block_size;
    }

    // Finds the sequences that compute; false: the step is not steady.
    bool find_runs() {
        runs_.clear();
        for (int64_t place = 0; place < rows_.num_sequences; place++) {
            const Progress& progress = progress_of(place);
            if (progress.ended) continue;
            const int64_t length = progress.num_tokens;
            if (progress.num_computed_tokens + 1 != length || length > rows_.max_model_len || length > room_of(progress))
                return false;
            if (rows_.waits[place] && length < rows_.least_tokens[place]) return false;
            runs_.push_back({place, rows_.rows[place], length, 0, 0, 0, false});
        }
        return !runs_.empty();
    }

    bool fits() {
        num_tokens_ = 0;
        for (Decode& run : runs_) {
            run.first = num_tokens_;
            num_tokens_ += 1 + run.num_drafts;
        }
        return num_tokens_ <= rows_.max_plan_tokens;
    }

    // Writes the drafts that are worth their price; false: the step must be refused.
    bool draft(const StepWords& record, const int64_t* allowed) {
        const int64_t* prices = allowed + record[NUM_ALLOWED];
        const int64_t num_prices = record[NUM_PRICES];
        if (!may_draft(allowed, num_prices)) return false;
        if (!rows_.tried) return true;
        for (auto& column : wanted_) column.clear();
        std::vector<int64_t> wanting;
        texts_.clear();
        size_t next = 0;
        for (int64_t place = 0; place < rows_.num_sequences; place++) {
            const bool computes = next < runs_.size() && runs_[next].place == place;
            const int64_t row = rows_.rows[place], run = (int64_t)next;
            next += computes;
            int64_t most = computes ? std::min(allowed[place], rows_.max_lengths[place] - 1 - runs_[run].length) : 0;
            if (rows_.starts_over[row]) {
                undone_.push_back(row);
                rows_.starts_over[row] = 0, most = 0;
            }
            if (most <= 0 || rows_.refuses_drafts[place]) continue;
            wanting.push_back(run);
            texts_.push_back(rows_.predicted[place]);
            const int64_t values[] = {row, runs_[run].length, most, rows_.num_predicted[place], 0, 0};
            for (int i = 0; i < 6; i++) wanted_[i].push_back(values[i]);
        }
        if (wanting.empty()) return true;
        find_drafts(
            {(int64_t)wanting.size(), rows_.vocab_size, rows_.token_ids, rows_.token_stride, wanted_[0].data(),
             wanted_[1].data(), wanted_[2].data(), texts_.data(), wanted_[3].data(), wanted_[4].data(),
             wanted_[5].data()});
        keep_drafts(wanting, prices, num_prices);
        for (size_t i = 0; i < wanting.size(); i++)
            runs_[wanting[i]].is_predicted = is_predicted(runs_[wanting[i]], texts_[i], wanted_[3][i]);
        return true;
    }

    // Whether the drafts of a run stand in a text, behind the ids that they follow: there or elsewhere too.
    bool is_predicted(const Decode& run, const int32_t* text, int64_t length) {
        if (!text || !run.num_drafts) return false;
        const int32_t* drafts = token_ids_of(run.row) + run.length;
        return std::search(text, text + length, drafts - LEAST_MATCH, drafts + run.num_drafts) != text + length;
    }

    // Whether the allowances are legal.
    bool may_draft(const int64_t* allowed, int64_t num_prices) {
        const int64_t num_allowed = std::accumulate(allowed, allowed + rows_.num_sequences, int64_t{0});
        if (num_prices > rows_.max_draft_rows || num_allowed > rows_.max_draft_rows ||
            rows_.num_sequences + num_allowed > rows_.max_num_batched_tokens)
            return false;
        if (*std::max_element(allowed, allowed + rows_.num_sequences) > rows_.max_draft_tokens) return false;
        for (const Decode& run : runs_) {
            const int64_t end = run.length + allowed[run.place];
            if (allowed[run.place] &&
                (!rows_.may_draft[run.place] || end > room_of(progress_of(run.place)) || end > rows_.max_model_len))
                return false;
        }
        return true;
    }

    int64_t kind_of(int64_t num_matched) const {
        const int64_t* end = rows_.kind_bounds + rows_.num_kinds - 2;
        return std::upper_bound(rows_.kind_bounds, end, num_matched) - rows_.kind_bounds;
    }

    // Where a row's drafts of a kind are counted: by places, later ones sharing the last.
    int64_t counts_of(int64_t row, int64_t kind) const { return (row * rows_.num_kinds + kind) * rows_.num_places; }

    // Keeps the drafts that gain most over their prices together; without prices all.
    void keep_drafts(const std::vector<int64_t>& wanting, const int64_t* prices, int64_t num_prices) {
        drafts_.clear();
        for (size_t i = 0; i < wanting.size(); i++) {
            Decode& run = runs_[wanting[i]];
            if (!num_prices) run.num_drafts = wanted_[4][i];
            const int64_t kind = kind_of(wanted_[5][i]), counts = counts_of(run.row, kind);
            double chance = 1;
            for (int64_t step = 0; num_prices && step < wanted_[4][i]; step++) {
                const int64_t place = std::min(step, rows_.num_places - 1);
                const double right =
                    rows_.right[counts + place] + rows_.prior_weight * rows_.prior[kind * rows_.num_places + place];
                chance *= right / (rows_.tried[counts + place] + rows_.prior_weight);
                drafts_.push_back({chance, wanting[i]});
            }
        }
        const auto is_likelier = [](const Draft& one, const Draft& other) { return one.chance > other.chance; };
        std::stable_sort(drafts_.begin(), drafts_.end(), is_likelier);
        double gain = 0, most = 0;
        size_t num_kept = 0;
        for (size_t i = 0; i < std::min(drafts_.size(), (size_t)num_prices); i++) {
            gain += drafts_[i].chance - (double)prices[i] / rows_.price_unit;
            if (gain > most) most = gain, num_kept = i + 1;
        }
        for (size_t i = 0; i < num_kept; i++) runs_[drafts_[i].run].num_drafts++;
        for (size_t i = 0; i < wanting.size(); i++)
            if (runs_[wanting[i]].num_drafts) proposed_.push_back({wanting[i], kind_of(wanted_[5][i])});
    }

    void compute() {
        const int64_t num_runs = (int64_t)runs_.size();
        counts_.resize(num_runs), lengths_.resize(num_runs), chosen_.resize(num_tokens_);
        int64_t longest = 0;
        for (int64_t i = 0; i < num_runs; i++) {
            const Decode& run = runs_[i];
            counts_[i] = 1 + run.num_drafts, lengths_[i] = run.length + run.num_drafts;
            longest = std::max(longest, lengths_[i]);
            const int32_t* ids = token_ids_of(run.row) + run.length - 1;
            std::copy_n(ids, counts_[i], rows_.plan_token_ids + run.first);
        }
        std::iota(chosen_.begin(), chosen_.end(), int64_t{0});
        const int64_t widest = (longest + rows_.block_size - 1) / rows_.block_size, groups = rows_.num_kv_groups;
        tables_.resize(groups * num_runs * widest);
        for (int64_t i = 0; i < num_runs; i++) {
            const int32_t* table = table_of(runs_[i].row);
            for (int64_t group = 0; group < groups; group++)
                for (int64_t k = 0; k < widest; k++)
                    tables_[(group * num_runs + i) * widest + k] = table[k * groups + group];
        }
        is_plain_ = std::all_of(
            runs_.begin(), runs_.end(), [this](const Decode& run) { return rows_.temperatures[run.place] == 0; });
        best_.resize(num_tokens_), best_values_.resize(num_tokens_), finite_.resize(num_tokens_);
        if (!is_plain_) reserve_logits(num_tokens_ * rows_.head_size);
        const Inputs inputs{
            num_runs, counts_.data(), lengths_.data(), tables_.data(), widest, num_tokens_, chosen_.data(),
            is_plain_ ? nullptr : logits_.get(), best_.data(), best_values_.data(), finite_.data(),
            rows_.plan_positions, nullptr, nullptr, 0};
        executor_->run(rows_.ops, (int)rows_.num_ops, inputs);
    }

    void reserve_logits(int64_t size) {
        if (size <= num_logits_) return;
        const int64_t num_lines = (size * (int64_t)sizeof(float) + LINE_BYTES - 1) / LINE_BYTES;
        logits_.reset((float*)std::aligned_alloc(LINE_BYTES, num_lines * LINE_BYTES));
        num_logits_ = size;
    }

    // Chooses the token of each row, as if all drafts before it were right; false: some row has none.
    bool choose_tokens() {
        if (is_plain_) return true;
        for (auto& column : columns_) column.clear();
        floats_.clear();
        for (const Decode& run : runs_)
            for (int64_t offset = 0; offset <= run.num_drafts; offset++) {
                const int64_t place = run.place, position = run.length - rows_.prompt_lengths[place] + offset;
                const int64_t values[] = {rows_.top_k[place], rows_.seeds[place], position, rows_.sequence_indexes[place]};
                for (int i = 0; i < 4; i++) columns_[i].push_back(values[i]);
                floats_.push_back(rows_.temperatures[place]);
            }
        const size_t num_tokens = floats_.size();
        for (const float* column : {rows_.top_p, rows_.min_p})
            for (const Decode& run : runs_) floats_.insert(floats_.end(), 1 + run.num_drafts, column[run.place]);
        choose(
            executor_->team(), {logits_.get(), num_tokens_, rows_.head_size, floats_.data(), columns_[0].data(),
                                floats_.data() + num_tokens, floats_.data() + 2 * num_tokens, columns_[1].data(),
                                columns_[2].data(), columns_[3].data(), best_.data()});
        return std::all_of(best_.begin(), best_.end(), [](int64_t id) { return id >= 0; });
    }

    // Whether a sequence ends with this token behind so many.
    bool is_last(int64_t place, int64_t token_id, int64_t num_tokens) const {
        const int64_t* stops = rows_.stop_token_ids + place * rows_.stop_width;
        const bool is_stop = std::find(stops, stops + rows_.stop_width, token_id) != stops + rows_.stop_width;
        return (is_stop && num_tokens >= rows_.least_tokens[place]) || num_tokens + 1 >= rows_.max_lengths[place];
    }

    // Takes the tokens of each run as far as its drafts were right.
    void accept() {
        for (Decode& run : runs_) {
            Progress& progress = rows_.progress[run.row];
            int32_t* behind = token_ids_of(run.row) + run.length;
            const int64_t* chosen = best_.data() + run.first;
            int64_t last = 0;
            while (last < run.num_drafts && chosen[last] == behind[last] && behind[last] >= 0 &&
                   !is_last(run.place, chosen[last], run.length + last))
                last++;
            std::copy_n(chosen, last + 1, behind);
            run.num_accepted = last;
            progress.num_computed_tokens = run.length + last;
            progress.num_tokens = run.length + last + 1;
            progress.ended = is_last(run.place, chosen[last], run.length + last);
        }
        learn();
    }

    // Counts which drafts were right.
    void learn() {
        const int64_t size = rows_.num_kinds * rows_.num_places;
        for (const Proposed& each : proposed_) {
            const Decode& run = runs_[each.run];
            const int64_t of_row = run.row * size, counts = counts_of(run.row, each.kind);
            for (int64_t i = of_row; i < of_row + size; i++) rows_.tried[i] *= rows_.decay, rows_.right[i] *= rows_.decay;
            for (int64_t step = 0; step < std::min(run.num_drafts, run.num_accepted + 1); step++) {
                const int64_t place = std::min(step, rows_.num_places - 1);
                rows_.tried[counts + place] += 1;
                if (step < run.num_accepted) rows_.right[counts + place] += 1;
            }
        }
    }

    void write_answer(const StepWords& record, double begin, double computed) {
        const double end = now_in_seconds();
        answer_.assign(ANSWER_WORDS + rows_.num_sequences, -1);
        answer_[ANSWERED] = record[NUMBER];
        answer_[QUEUE_SECONDS] = word_of(begin - number_of(record[ARRIVAL]));
        answer_[BEGUN_AT] = word_of(begin);
        answer_[FORWARD_SECONDS] = word_of(computed - begin);
        answer_[SAMPLE_SECONDS] = word_of(end - computed);
        answer_[NUM_DRAFTS] = num_tokens_ - (int64_t)runs_.size();
        answer_[NUM_SEQUENCES] = rows_.num_sequences;
        for (const Decode& run : runs_) {
            answer_[ANSWER_WORDS + run.place] = 1 + run.num_accepted;
            const int64_t* chosen = best_.data() + run.first;
            answer_.insert(answer_.end(), chosen, chosen + 1 + run.num_accepted);
        }
        for (const Decode& run : runs_)
            if (run.is_predicted) answer_.insert(answer_.end(), {run.place, run.num_drafts, run.num_accepted});
    }

    struct Proposed {
        int64_t run, kind;
    };

    Executor* executor_ = nullptr;
    DecodeRows rows_ = {};
    int64_t last_step_id_ = 0, num_tokens_ = 0;
    bool is_plain_ = false;
    std::vector<Decode> runs_;
    std::vector<Draft> drafts_;
    std::vector<Proposed> proposed_;
    // Rows that were to start over before this step.
    std::vector<int64_t> undone_;
    // The blocks that the appended ones overwrote.
    std::vector<int32_t> overwritten_;
    std::vector<int64_t> wanted_[6], columns_[4];
    std::vector<const int32_t*> texts_;
    std::vector<int64_t> counts_, lengths_, chosen_, best_;
    std::vector<int32_t> tables_;
    std::vector<float> best_values_, floats_;
    // Only while it runs: steps of Python have their own.
    std::unique_ptr<float, decltype(&std::free)> logits_{nullptr, &std::free};
    int64_t num_logits_ = 0;
    std::vector<uint8_t> finite_;
    StepWords answer_;
};
