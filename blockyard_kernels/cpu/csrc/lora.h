// Low-rank adapters (LoRA): what they add to the products of rows that have one.
//
// A row's input by the first factor gives `rank` numbers, rounded as rows are; these by the second factor its delta,
// which is added to the product before the one rounding. Both products are those of linear.h, of neighbouring rows with
// one adapter at a time: a row's bits are the same whatever stands beside it, and rows without an adapter pass by.
#pragma once

#include "elementwise.h"
#include "linear.h"

// Adds to `deltas` those of rows [begin, end), which have one adapter, in one panel. `low_rank`: of row 0.
template <class E>
void add_deltas(
    const LoraFactors& factors, const E* low_rank, int64_t stride, int64_t panel, int64_t begin, int64_t end,
    Deltas& deltas) {
    if (!factors.rank) return;
    Cursor none;
    // Tiles are set up for the product that this is added to.
    LinearRunner<E, AsSummed, KeepDeltas, false> runner(
        {(const uint32_t*)low_rank, stride / PER_WORD<E>, (const uint32_t*)factors.expand, words_of<E>(factors.rank), 1},
        AsSummed{}, KeepDeltas{deltas}, none);
    runner.run(panel, begin, end);
}

// Finds the deltas of a product's rows [begin, end) in one panel.
template <class E>
void find_deltas(const Op& op, const Step& step, int64_t panel, int64_t begin, int64_t end, Deltas& deltas) {
    deltas.first_row = begin;
    std::fill_n(deltas.has, end - begin, false);
    const auto& runs = step.lora_runs(op.rows);
    auto run = std::partition_point(runs.begin(), runs.end(), [&](const LoraRun& each) { return each.end <= begin; });
    for (; run != runs.end() && run->first_row < end; run++)
        add_deltas<E>(
            op.lora[run->slot], (const E*)op.low_rank, op.low_rank_stride, panel, std::max(begin, run->first_row),
            std::min(end, run->end), deltas);
}

// Multiplies rows by first factors. Units are ordered by runs, then by panels.
template <class E, class Out>
void lora_shrink(const Op& op, const Step& step, int64_t begin, int64_t end, Out* output) {
    const int64_t panels = num_panels(op.out_features);
    Cursor none;
    for (int64_t unit = begin; unit < end; unit++) {
        const LoraRun& run = step.lora_runs(op.rows)[unit / panels];
        const LoraFactors& factors = op.lora[run.slot];
        if (unit % panels >= num_panels(factors.rank)) continue;
        LinearRunner<E, AsSummed, StoreRows<E, Out>> runner(
            {(const uint32_t*)op.input, op.input_stride / PER_WORD<E>, (const uint32_t*)factors.shrink,
             words_of<E>(op.in_features), op.leaves},
            AsSummed{}, StoreRows<E, Out>{output, nullptr, op.out_features}, none);
        runner.run(unit % panels, run.first_row, run.end);
    }
}

// Finishes rows whose products, and what first factors made of them, were summed over ranks. Units as above.
template <class E>
void lora_expand(const Op& op, const Step& step, int64_t begin, int64_t end, Deltas& deltas, std::vector<char>& scratch) {
    const int64_t panels = num_panels(op.out_features), stride = op.low_rank_stride;
    const float* low_rank = (const float*)op.low_rank + step.num_rows(op.rows) * op.low_rank_offset;
    const StoreRows<E, E> finish{(E*)op.output, (const E*)op.bias, op.out_features, &deltas};
    scratch.resize(UNIT_ROWS * stride * sizeof(E));
    E* rounded = (E*)scratch.data();
    for (int64_t unit = begin; unit < end; unit++) {
        const LoraRun& run = step.lora_runs(op.rows)[unit / panels];
        const LoraFactors& factors = op.lora[run.slot];
        if (!factors.rank) continue;
        for (int64_t row = run.first_row; row < run.end; row++)
            round_row(low_rank + row * stride, (const E*)nullptr, factors.rank, rounded + (row - run.first_row) * stride);
        const int64_t panel = unit % panels, column = panel * TILE_COLUMNS;
        deltas.first_row = run.first_row;
        add_deltas<E>(factors, rounded - run.first_row * stride, stride, panel, run.first_row, run.end, deltas);
        const int left = (int)std::min<int64_t>(op.out_features - column, VL);
        const int right = (int)std::clamp<int64_t>(op.out_features - column - VL, 0, VL);
        for (int64_t row = run.first_row; row < run.end; row++) {
            const float* sums = (const float*)op.input + row * op.out_features + column;
            finish.template put<true>(panel, row, load(sums, left), right ? load(sums + VL, right) : zero());
        }
    }
}
