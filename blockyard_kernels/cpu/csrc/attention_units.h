// Divides attention among threads: each tile and head is a unit of work, or each cut of its keys where these are few.
//
// Owns the results of cuts that are computed alone. They are merged in order, by the thread that computes the last one of
// a tile and head, so that a row has the same bits however its cuts were divided.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>

#include "attention.h"

class AttentionUnits {
   public:
    explicit AttentionUnits(int num_threads)
        : num_threads_(num_threads), results_(new float[num_floats()]), num_left_(new std::atomic<int64_t>[2 * num_threads]) {}

    // Bytes of results. The system gives them as they are first written.
    int64_t num_bytes() const { return num_floats() * (int64_t)sizeof(float); }

    // Divides an op of a step. Not while units run.
    void divide(const Op& op, const Step& step) {
        op_ = &op;
        step_ = &step;
        num_units_ = (int64_t)step.tiles.size() * op.num_kv_heads;
        // As many units as threads are equal shares, and of twice as many threads take from each other.
        const bool are_few = num_units_ < 2 * num_threads_ && num_units_ % num_threads_;
        are_cuts_ = num_threads_ > 1 && are_few && find_cuts();
    }

    int64_t size() const { return num_units_; }

    template <class Runner>
    void run(Runner& runner, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const AttentionUnit next = i + 1 < num_units_ ? unit(i + 1) : AttentionUnit{};
            if (are_cuts_)
                run_cut(runner, i, next);
            else
                runner.run(unit(i), next);
        }
    }

   private:
    // The cuts of a tile, whose units are ordered by cut, then by head.
    struct TileCuts {
        int64_t first_unit, num_cuts;
        int64_t place, num_floats;  // of its results, head after head; of those of one cut
    };

    // The results of 16 rows of 128 numbers at 128,000 keys fit.
    static constexpr int64_t FLOATS_OF_A_THREAD = 1 << 20;

    int64_t num_floats() const { return num_threads_ > 1 ? num_threads_ * FLOATS_OF_A_THREAD : 0; }

    VisibleKeys visible() const { return {op_, step_}; }

    // Makes units of cuts. Returns whether there are more of them than of tiles and heads, and room for their results.
    bool find_cuts() {
        const int64_t num_heads = op_->num_kv_heads, padded = padded_dim(op_->head_dim);
        int64_t num_units = 0, place = 0;
        cuts_.clear();
        for (const AttentionTile& tile : step_->tiles) {
            const int64_t num_keys = visible().end(tile) - visible().first_cut(tile), num_cuts = (num_keys + CUT - 1) / CUT;
            const int64_t num_floats = CutResults::num_floats(tile.num_tokens * op_->num_heads / num_heads, padded);
            for (int64_t head = 0; head < num_heads; head++) num_left_[cuts_.size() * num_heads + head] = num_cuts;
            cuts_.push_back({num_units, num_cuts, place, num_floats});
            num_units += num_cuts * num_heads;
            place += num_cuts * num_heads * num_floats;
        }
        if (num_units == num_units_ || place > num_floats()) return false;
        num_units_ = num_units;
        return true;
    }

    int64_t tile_of(int64_t i) const {
        if (!are_cuts_) return i / op_->num_kv_heads;
        int64_t tile = 0;
        while (tile + 1 < (int64_t)cuts_.size() && cuts_[tile + 1].first_unit <= i) tile++;
        return tile;
    }

    AttentionUnit unit(int64_t i) const {
        const int64_t tile = tile_of(i), place = i - (are_cuts_ ? cuts_[tile].first_unit : tile * op_->num_kv_heads);
        const AttentionTile& rows = step_->tiles[tile];
        const int64_t head = place % op_->num_kv_heads, cut = place / op_->num_kv_heads;
        return {&rows, head, visible().first_cut(rows) + cut * CUT};
    }

    template <class Runner>
    void run_cut(Runner& runner, int64_t i, const AttentionUnit& next) {
        const int64_t tile = tile_of(i);
        const TileCuts& cuts = cuts_[tile];
        const AttentionUnit here = unit(i);
        float* results = results_.get() + cuts.place + here.head * cuts.num_cuts * cuts.num_floats;
        runner.run_alone(here, next, results + (i - cuts.first_unit) / op_->num_kv_heads * cuts.num_floats);
        std::atomic<int64_t>& num_left = num_left_[tile * op_->num_kv_heads + here.head];
        if (num_left.fetch_sub(1, std::memory_order_acq_rel) == 1) runner.merge_all(here, results, cuts.num_cuts);
    }

    const int num_threads_;
    const std::unique_ptr<float[]> results_;
    // The number of cuts that are still to be computed, by tile and head.
    const std::unique_ptr<std::atomic<int64_t>[]> num_left_;
    const Op* op_ = nullptr;
    const Step* step_ = nullptr;
    int64_t num_units_ = 0;
    bool are_cuts_ = false;
    std::vector<TileCuts> cuts_;
};
