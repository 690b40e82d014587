// Quantizes a weight's rows as int8.h says, and lays them out in panels.
#pragma once

#include "int8.h"
#include "pack.h"

// The panels of a weight, and for each leaf of their columns the worth of its bytes and SHIFT times their sum.
struct Int8Panels {
    uint32_t* words;
    float* scales;  // [leaves][columns]
    int32_t* sums;  // [leaves][columns]
    int leaves;
};

// Packs rows of E, given as in pack.h.
template <class E>
class Int8Packing : public Work {
   public:
    Int8Packing(const void* const* rows, int64_t num_panels, int64_t width, Int8Panels packed, int num_threads)
        : rows_((const E* const*)rows), num_panels_(num_panels), width_(width), packed_(packed), quantized_(num_threads) {
        for (auto& quantized : quantized_) quantized.reserve(TILE_COLUMNS, width, packed.leaves);
    }

    int num_phases() const override { return 1; }
    int64_t num_units(int) override { return num_panels_; }
    int64_t units_at_once(int) override { return 1; }

    void run(int, int64_t begin, int64_t end, int thread) override {
        for (int64_t panel = begin; panel < end; panel++) pack(panel, quantized_[thread]);
    }

   private:
    void pack(int64_t panel, QuantizedRows& quantized) const {
        const int64_t words = words_of<int8_t>(width_);
        const char* columns[TILE_COLUMNS];
        for (int c = 0; c < TILE_COLUMNS; c++) {
            const int64_t column = panel * TILE_COLUMNS + c;
            columns[c] = nullptr;
            if (rows_[column]) {
                quantized.quantize(c, rows_[column]);
                columns[c] = (const char*)quantized.bytes(c);
            }
            const int64_t leaf_bytes = 4 * words / packed_.leaves;
            for (int leaf = 0; leaf < packed_.leaves; leaf++) {
                const int64_t place = leaf * num_panels_ * TILE_COLUMNS + column;
                packed_.scales[place] = columns[c] ? quantized.scales()[c * packed_.leaves + leaf] : 0;
                packed_.sums[place] =
                    columns[c] ? SHIFT * take_back_shift(quantized.bytes(c) + leaf * leaf_bytes, leaf_bytes) : 0;
            }
        }
        pack_panel(columns, words, packed_.words + panel * words * TILE_COLUMNS);
    }

    // Turns bytes into signed ones in place, and gives their sum.
    static int32_t take_back_shift(uint8_t* bytes, int64_t count) {
        int32_t sum = 0;
        for (int64_t i = 0; i < count; i++) {
            bytes[i] ^= SHIFT;
            sum += (int8_t)bytes[i];
        }
        return sum;
    }

    const E* const* rows_;
    int64_t num_panels_, width_;
    Int8Panels packed_;
    std::vector<QuantizedRows> quantized_;
};
