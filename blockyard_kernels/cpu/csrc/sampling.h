// Chooses the tokens of rows of logits and gives log probabilities: the reductions of sampling, row by row.
//
// Owns the order of the filters and the division of rows among threads. A row is one thread's, so that nothing of it
// depends on the others.
#pragma once

#include "team.h"
#include "token_row.h"

// Rows [R, vocabulary] and what is asked of each of them: arrays [R], in and out. Mirrored in blockyard_kernels/cpu/sampling.py.
struct Choices {
    const float* logits;
    int64_t num_rows;
    int64_t vocab_size;
    const float* temperatures;      // 0: the first token
    const int64_t* top_k;           // 0: all
    const float* top_p;
    const float* min_p;
    const int64_t* seeds;
    const int64_t* positions;
    const int64_t* sequence_indexes;
    int64_t* token_ids;             // -1: none is possible, or one is infinite
};

// Log probabilities of some rows: of the token that stands there, if there is one, and of the first of the order.
struct TokenLogprobs {
    const float* logits;            // [any, vocabulary]
    int64_t vocab_size;
    int64_t num_rows;
    const int64_t* rows;            // [R]: which
    const int64_t* token_ids;       // [R], or null
    int64_t num_best;
    int64_t* candidates;            // [R, 1 + num_best], or [R, num_best] without tokens: ids, the token's first
    float* logprobs;                // as many
    int64_t* ranks;                 // [R]: the tokens' places in the order, from 1
};

// Tokens that some rows allow. Mirrored in blockyard_kernels/cpu/sampling.py.
struct Masks {
    float* logits;                  // [any, vocabulary]; written
    int64_t vocab_size;
    int64_t num_rows;
    const int64_t* rows;            // [R]: which, none twice
    const uint32_t* words;          // [R, vocabulary / 32, rounded up]: a bit for each token that is allowed
};

template <class RowFunction>
class RowWork : public Work {
   public:
    RowWork(int64_t num_rows, RowFunction& function) : num_rows_(num_rows), function_(function) {}
    int num_phases() const override { return 1; }
    int64_t num_units(int) override { return num_rows_; }
    int64_t units_at_once(int) override { return 1; }
    void run(int, int64_t begin, int64_t end, int) override {
        for (int64_t row = begin; row < end; row++) function_(row);
    }

   private:
    int64_t num_rows_;
    RowFunction& function_;
};

// Calls a function for each row. A single one is not worth waking the team.
template <class RowFunction>
void for_each_row(Team& team, int64_t num_rows, RowFunction function) {
    if (num_rows == 1) return function(0);
    RowWork<RowFunction> work(num_rows, function);
    team.run(work);
}

inline RowScratch& row_scratch() {
    static thread_local RowScratch scratch;
    return scratch;
}

inline bool is_finite_row(const float* logits, int64_t size) {
    for (int64_t i = 0; i < size; i += VL)
        if (any(not_finite(load(logits + i, (int)std::min<int64_t>(VL, size - i))))) return false;
    return true;
}

inline float scalar_logarithm(float x) {
    float lanes[VL];
    store(lanes, logarithm(broadcast(x)));
    return lanes[0];
}

// Draws among the tokens of a prefix whose mass before them is less than a share of the whole. Noise belongs to a token,
// so the winner among all, if it is one of these, is the winner among these; if it is not, then nothing that comes after
// it is either, and those before it race again. Each time a random part of what must not win goes: few times are enough.
inline int64_t race_in_nucleus(const TokenRow& row, Prefix prefix, float top_p, const Philox& noise) {
    const double share = (double)top_p * row.mass(prefix);
    while (true) {
        const Token winner = row.race(prefix, noise);
        if (winner.id < 0) return -1;
        const Prefix before{row.value(winner.id), winner.id};
        const double mass = row.mass(before);
        if (mass == 0 || mass < share) return winner.id;
        prefix = before;
    }
}

inline int64_t choose_token(const Choices& choices, int64_t i) {
    const float temperature = choices.temperatures[i], top_p = choices.top_p[i], min_p = choices.min_p[i];
    const float* logits = choices.logits + i * choices.vocab_size;
    TokenRow row(logits, choices.vocab_size, temperature > 0 ? temperature : 1.0f, row_scratch());
    if (!std::isfinite(row.best())) return -1;
    if (!(temperature > 0)) return row.first();
    Prefix prefix = row.all_possible();
    if (min_p > 0) prefix = row.at_least(row.best() + scalar_logarithm(min_p));
    if (choices.top_k[i] > 0) prefix = prefix.narrowed(row.first_tokens(choices.top_k[i]));
    const Philox noise({choices.seeds[i], choices.positions[i], choices.sequence_indexes[i]});
    return top_p < 1 ? race_in_nucleus(row, prefix, top_p, noise) : row.race(prefix, noise).id;
}

inline void write_best(TokenRow& row, int64_t num_best, int64_t* candidates) {
    if (!num_best) return;
    std::vector<Token>& tokens = row.gather_first(num_best);
    // Fewer only if some are no numbers.
    const int64_t found = std::min<int64_t>(num_best, tokens.size());
    std::partial_sort(tokens.begin(), tokens.begin() + found, tokens.end(), comes_before);
    for (int64_t i = 0; i < num_best; i++) candidates[i] = i < found ? tokens[i].id : 0;
}

inline void token_logprobs_of_row(const TokenLogprobs& wanted, int64_t i) {
    TokenRow row(wanted.logits + wanted.rows[i] * wanted.vocab_size, wanted.vocab_size, 1.0f, row_scratch());
    const int64_t num_tokens = wanted.token_ids ? 1 : 0, width = num_tokens + wanted.num_best;
    int64_t* candidates = wanted.candidates + i * width;
    if (num_tokens) {
        candidates[0] = wanted.token_ids[i];
        wanted.ranks[i] = 1 + row.count({row.value(candidates[0]), (int32_t)candidates[0]});
    }
    write_best(row, wanted.num_best, candidates + num_tokens);
    const float log_mass = scalar_logarithm((float)row.mass(row.all_possible()));
    for (int64_t k = 0; k < width; k++) wanted.logprobs[i * width + k] = row.value(candidates[k]) - row.best() - log_mass;
}

inline void find_finite_rows(Team& team, const float* logits, int64_t num_rows, int64_t vocab_size, uint8_t* finite) {
    for_each_row(team, num_rows, [=](int64_t i) { finite[i] = is_finite_row(logits + i * vocab_size, vocab_size); });
}

inline void apply_mask(float* logits, const uint32_t* words, int64_t vocab_size) {
    for (int64_t i = 0; i < vocab_size; i += 32) {
        const uint32_t word = words[i / 32];
        if (word == UINT32_MAX) continue;
        const int num_tokens = (int)std::min<int64_t>(32, vocab_size - i);
        // Most words allow no token at all, or all of them.
        if (word == 0) {
            std::fill_n(logits + i, num_tokens, -INFINITY);
            continue;
        }
        for (int k = 0; k < num_tokens; k++) logits[i + k] = word >> k & 1 ? logits[i + k] : -INFINITY;
    }
}

inline void apply_masks(Team& team, const Masks& masks) {
    const int64_t num_words = (masks.vocab_size + 31) / 32;
    for_each_row(team, masks.num_rows, [&](int64_t i) {
        apply_mask(masks.logits + masks.rows[i] * masks.vocab_size, masks.words + i * num_words, masks.vocab_size);
    });
}

inline void choose(Team& team, const Choices& choices) {
    for_each_row(team, choices.num_rows, [&](int64_t i) { choices.token_ids[i] = choose_token(choices, i); });
}

inline void token_logprobs(Team& team, const TokenLogprobs& wanted) {
    for_each_row(team, wanted.num_rows, [&](int64_t i) { token_logprobs_of_row(wanted, i); });
}
