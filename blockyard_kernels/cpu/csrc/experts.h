// Mixtures of experts: which rows go to which expert, in what order their products are made, and how these are added.
//
// A row is copied once for each expert that it goes to; the copies of one expert stand together, in the order of the
// step. Products run over these as over any rows: an output is one accumulator that walks over K. A row's results are
// added in the order of its ranks. So no bit depends on the batch, the threads, or what other rows chose.
#pragma once

#include "activations.h"
#include "step.h"

// Neighbouring copies of rows that go to one expert: no more than a unit of a product has.
struct ExpertRun {
    int64_t expert;
    int64_t first;
    int64_t end;
};

// The places of the copies of a step's rows, one for each expert of a row. One thread makes them.
class ExpertRows {
   public:
    // Gives each copy its place.
    void place(const Op& op, int64_t num_rows) {
        count(op, num_rows);
        for (int64_t i = 0; i < num_rows * op.top_k; i++) op.expert_places[i] = (int32_t)starts_[op.expert_ids[i]]++;
    }

    // Lists the runs of all experts that have rows.
    void cut(const Op& op, int64_t num_rows) {
        count(op, num_rows);
        runs_.clear();
        for (int64_t expert = 0; expert < op.num_experts; expert++) {
            const int64_t first = starts_[expert], count = starts_[expert + 1] - first;
            const int64_t cuts = (count + UNIT_ROWS - 1) / UNIT_ROWS;
            for (int64_t cut = 0; cut < cuts; cut++)
                runs_.push_back({expert, first + count * cut / cuts, first + count * (cut + 1) / cuts});
        }
    }

    const std::vector<ExpertRun>& runs() const { return runs_; }

   private:
    void count(const Op& op, int64_t num_rows) {
        starts_.assign(op.num_experts + 1, 0);
        for (int64_t i = 0; i < num_rows * op.top_k; i++) starts_[op.expert_ids[i] + 1]++;
        for (int64_t expert = 0; expert < op.num_experts; expert++) starts_[expert + 1] += starts_[expert];
    }

    std::vector<int64_t> starts_;
    std::vector<ExpertRun> runs_;
};

// Added to the sum of sigmoids by which weights are divided.
constexpr float SMALLEST_SUM = 1e-6f;

// Puts the experts of the largest keys in order: of equal ones the lowest id first. A key is a logit, or a sigmoid with
// the expert's bias. NaN counts as infinite, so that the row's weights show it. `keys`: [top_k], written.
inline void choose_experts(const Op& op, const float* logits, int32_t* ids, float* keys) {
    const int64_t top_k = op.top_k;
    const float* biases = (const float*)op.bias;
    int64_t count = 0;
    for (int64_t expert = 0; expert < op.num_experts; expert++) {
        float key = op.is_sigmoid ? sigmoid(logits[expert]) : logits[expert];
        if (biases) key += biases[expert];
        if (std::isnan(key)) key = std::numeric_limits<float>::infinity();
        if (count == top_k && !(key > keys[top_k - 1])) continue;
        int64_t place = count < top_k ? count++ : top_k - 1;
        for (; place > 0 && key > keys[place - 1]; place--) keys[place] = keys[place - 1], ids[place] = ids[place - 1];
        keys[place] = key, ids[place] = (int32_t)expert;
    }
}

// The powers of so many numbers less the largest, `to` may be `from`; and in lane order their sum.
inline float exponentials(const float* from, int64_t count, float largest, float* to) {
    Floats sum = zero();
    for (int64_t i = 0; i < count; i += VL) {
        const int n = (int)std::min<int64_t>(VL, count - i);
        const Floats power =
            power_of_two<float>(mul(sub(load(from + i, n), broadcast(largest)), broadcast(LOG2_OF_E)));
        if (to) store(to + i, power, n);
        sum = add(sum, n < VL ? select(first_lanes(n), zero(), power) : power);
    }
    return add_lanes(sum);
}

// Chooses the experts of a row of logits in float32, and weighs them.
inline void route_row(const Op& op, int64_t row) {
    const float* logits = (const float*)op.input + row * op.num_experts;
    int32_t* ids = op.expert_ids + row * op.top_k;
    float* weights = op.expert_weights + row * op.top_k;
    choose_experts(op, logits, ids, weights);
    if (op.is_sigmoid) {
        float sum = SMALLEST_SUM;
        for (int64_t rank = 0; rank < op.top_k; rank++) sum += weights[rank] = sigmoid(logits[ids[rank]]);
        for (int64_t rank = 0; rank < op.top_k; rank++) weights[rank] = weights[rank] / (op.renormalises ? sum : 1) * op.scale;
        return;
    }
    const float largest = logits[ids[0]];
    for (int64_t rank = 0; rank < op.top_k; rank++) weights[rank] = logits[ids[rank]];
    float total = exponentials(weights, op.top_k, largest, weights);
    if (!op.renormalises) total = exponentials(logits, op.num_experts, largest, nullptr);
    for (int64_t rank = 0; rank < op.top_k; rank++) weights[rank] = weights[rank] / total * op.scale;
}

// Copies a row to its places.
template <class E>
void gather_row(const Op& op, int64_t row) {
    const int64_t width = op.in_features;
    for (int64_t i = row * op.top_k; i < (row + 1) * op.top_k; i++)
        memcpy((void*)((E*)op.output + op.expert_places[i] * width), (const E*)op.input + row * op.input_stride, sizeof(E) * width);
}

// Adds what a row's experts gave, in float32, with their biases and times their weights, rounded once.
template <class E>
void combine_row(const Op& op, int64_t row) {
    const int64_t width = op.out_features, first = row * op.top_k;
    for (int64_t i = 0; i < width; i += VL) {
        const int n = (int)std::min<int64_t>(VL, width - i);
        Floats total = zero();
        for (int64_t k = first; k < first + op.top_k; k++) {
            Floats x = load((const float*)op.input + op.expert_places[k] * width + i, n);
            if (op.bias) x = add(x, load((const E*)((const char*)op.bias + op.expert_ids[k] * op.expert_stride) + i, n));
            total = fma(x, broadcast(op.expert_weights[k]), total);
        }
        store((E*)op.output + row * width + i, total, n);
    }
}
