// A step that runs: the rows of all sequences, where their keys and values go, and the tiles that attention walks.
//
// Made once from the inputs, read by all layers. Knows no op.
#pragma once

#include <algorithm>
#include <vector>

#include "plan.h"

// Neighbouring rows of one sequence that lie in one block: that of this place in each group's table.
struct Run {
    int64_t first_row;
    int32_t num_rows;
    int32_t sequence;
    int32_t place;
    int32_t first_slot;
    // The block's slots past the run hold what another sequence left there.
    bool fresh;
};

// Neighbouring new tokens of one sequence, whose heads of one group attend together.
struct AttentionTile {
    int64_t first_row;
    int64_t first_position;
    int32_t num_tokens;
    int32_t sequence;
};

constexpr int MAX_ATTENTION_ROWS = 48;

// Keys that attention takes together: see attention.h.
constexpr int CUT = 256;

// A decode's token and drafts: so few rows wait for memory, so what they read is fetched ahead.
constexpr int64_t MAX_DECODED_ROWS = 12;

// Neighbouring rows that have the same adapter.
struct LoraRun {
    int64_t first_row;
    int64_t end;
    int32_t slot;
};

// Rows of one product's unit: their inputs stay in a core's caches while a panel is walked.
constexpr int64_t UNIT_ROWS = 192;

class Step {
   public:
    // `windows`: of each KV group the keys that a query of it sees at most; 0: all.
    void prepare(const Inputs& inputs, int64_t block_size, int64_t group, const std::vector<int64_t>& windows) {
        inputs_ = &inputs;
        num_tokens_ = 0;
        runs.clear();
        blocks.resize(windows.size());
        for (auto& some : blocks) some.clear();
        tiles.clear();
        first_rows.clear();
        const int64_t tile_tokens = std::max<int64_t>(1, MAX_ATTENTION_ROWS / std::max<int64_t>(group, 1));
        for (int64_t s = 0; s < inputs.num_sequences; s++) {
            const int64_t count = inputs.num_new_tokens[s], end = inputs.seq_lens[s], begin = end - count;
            for (int64_t i = 0; i < count; i++) inputs.positions[num_tokens_ + i] = begin + i;
            first_rows.push_back(num_tokens_);
            if (block_size) {
                add_runs(s, begin, end, block_size);
                if (count <= MAX_DECODED_ROWS) add_blocks(s, begin + 1, end, block_size, windows);
                for (int64_t i = 0; i < count; i += tile_tokens)
                    tiles.push_back({num_tokens_ + i, begin + i, (int32_t)std::min(tile_tokens, count - i), (int32_t)s});
            }
            num_tokens_ += count;
        }
        for (auto& runs : lora_runs_) runs.clear();
        if (!inputs.lora_slots) return;
        find_lora_runs(TOKENS, [&](int64_t i) { return inputs.lora_slots[i]; });
        find_lora_runs(CHOSEN, [&](int64_t i) { return inputs.lora_slots[inputs.chosen ? inputs.chosen[i] : i]; });
    }

    const Inputs& inputs() const { return *inputs_; }
    const int32_t* blocks_of(int64_t sequence, int64_t kv_group) const {
        return inputs_->block_tables + (kv_group * inputs_->num_sequences + sequence) * inputs_->table_stride;
    }
    int64_t num_rows(int32_t rows) const { return rows == CHOSEN ? inputs_->num_chosen : num_tokens_; }

    // In order, none longer than a unit.
    const std::vector<LoraRun>& lora_runs(int32_t rows) const { return lora_runs_[rows]; }

    std::vector<int64_t> first_rows;  // of each sequence
    std::vector<Run> runs;
    std::vector<AttentionTile> tiles;
    // The blocks that decoding sequences read, by KV group.
    std::vector<std::vector<int32_t>> blocks;

   private:
    void add_runs(int64_t sequence, int64_t begin, int64_t end, int64_t block_size) {
        for (int64_t position = begin; position < end;) {
            const int64_t slot = position % block_size, count = std::min(block_size - slot, end - position);
            runs.push_back({num_tokens_ + position - begin, (int32_t)count, (int32_t)sequence,
                            (int32_t)(position / block_size), (int32_t)slot, slot == 0 && count < block_size});
            position += count;
        }
    }

    // The first row sees `length` tokens.
    void add_blocks(
        int64_t sequence, int64_t length, int64_t end, int64_t block_size, const std::vector<int64_t>& windows) {
        for (size_t group = 0; group < windows.size(); group++) {
            const int32_t* table = blocks_of(sequence, group);
            const int64_t first = windows[group] ? std::max<int64_t>(0, length - windows[group]) / block_size : 0;
            blocks[group].insert(blocks[group].end(), table + first, table + (end + block_size - 1) / block_size);
        }
    }

    template <class SlotOf>
    void find_lora_runs(int32_t rows, SlotOf slot_of) {
        auto& runs = lora_runs_[rows];
        for (int64_t i = 0; i < num_rows(rows); i++) {
            const int32_t slot = slot_of(i);
            if (slot < 0) continue;
            if (runs.empty() || runs.back().end != i || runs.back().slot != slot || i - runs.back().first_row == UNIT_ROWS)
                runs.push_back({i, i, slot});
            runs.back().end = i + 1;
        }
    }

    std::vector<LoraRun> lora_runs_[2];
    const Inputs* inputs_ = nullptr;
    int64_t num_tokens_ = 0;
};
