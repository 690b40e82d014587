// Lays a weight's rows out in the panels that linear.h walks through. Knows no number format: words are moved.
#pragma once

#include <cstring>

#include "simd.h"
#include "team.h"

// Packs the rows of one panel's columns; columns without a row (null) become zeros.
inline void pack_panel(const char* const* rows, int64_t words, uint32_t* panel) {
    // A cache line of each row at a time: read word by word, the rows would push each other out of the cache.
    constexpr int64_t LINE_WORDS = 16;
    // The hardware follows fewer streams than a panel has rows.
    constexpr int64_t PREFETCH_BYTES = 512;
    uint32_t lines[TILE_COLUMNS][LINE_WORDS] = {};
    for (int64_t first = 0; first < words; first += LINE_WORDS) {
        const int64_t count = std::min(LINE_WORDS, words - first);
        for (int column = 0; column < TILE_COLUMNS; column++) {
            if (!rows[column]) continue;
            const char* place = rows[column] + 4 * first;
            __builtin_prefetch(place + PREFETCH_BYTES);
            if (count == LINE_WORDS)
                memcpy(lines[column], place, sizeof lines[column]);
            else
                memcpy(lines[column], place, 4 * count);
        }
        for (int64_t word = 0; word < count; word++, panel += TILE_COLUMNS)
            for (int column = 0; column < TILE_COLUMNS; column++) panel[column] = lines[column][word];
    }
}

// Packs rows, given by the address of each panel's every column.
class Packing : public Work {
   public:
    Packing(const void* const* rows, int64_t num_panels, int64_t words, uint32_t* packed)
        : rows_(rows), num_panels_(num_panels), words_(words), packed_(packed) {}

    int num_phases() const override { return 1; }
    int64_t num_units(int) override { return num_panels_; }
    int64_t units_at_once(int) override { return 1; }

    void run(int, int64_t begin, int64_t end, int) override {
        for (int64_t panel = begin; panel < end; panel++)
            pack_panel((const char* const*)rows_ + panel * TILE_COLUMNS, words_, packed_ + panel * words_ * TILE_COLUMNS);
    }

   private:
    const void* const* rows_;
    int64_t num_panels_;
    int64_t words_;
    uint32_t* packed_;
};
