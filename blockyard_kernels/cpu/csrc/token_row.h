// One row of logits: its order, its mass and its races, each found in few passes and from this row alone.
//
// Owns the summary of a row that lets every later pass skip most of it. Knows no other rows and no threads. Tokens are
// ordered by value (logit over temperature), the largest first, ties by the lower id. A filter keeps the first tokens of
// that order, whichever filter it is: so what passes is one bound, and no row is ever sorted.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "philox.h"

// Tokens of which one vector holds the largest, lane by lane.
constexpr int64_t CHUNK_TOKENS = 64 * VL;

// The first tokens of the order: those above a value, and those of just that value whose ids are below the end.
struct Prefix {
    float value;
    int32_t end;

    Prefix narrowed(const Prefix& other) const {
        if (value != other.value) return value > other.value ? *this : other;
        return {value, std::min(end, other.end)};
    }
};

struct Token {
    float value;
    int32_t id;
};

INLINE bool comes_before(const Token& a, const Token& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

// Memory of a thread, which grows and stays.
struct RowScratch {
    std::vector<float> maxima;
    std::vector<Token> tokens;
};

// A floating-point number as an integer of the same order, and back.
INLINE int32_t order_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}
INLINE float of_order(int32_t order) {
    const int32_t bits = order < 0 ? order ^ 0x7fffffff : order;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

class TokenRow {
   public:
    static constexpr float IMPOSSIBLE = -std::numeric_limits<float>::infinity();

    TokenRow(const float* logits, int64_t size, float temperature, RowScratch& scratch)
        : logits_(logits), size_(size), num_chunks_((size + CHUNK_TOKENS - 1) / CHUNK_TOKENS),
          temperature_(temperature), scratch_(scratch) {
        scratch.maxima.resize(num_chunks_ * VL);
        Floats best = broadcast(IMPOSSIBLE);
        for (int64_t chunk = 0; chunk < num_chunks_; chunk++) {
            const Floats maxima = chunk_maxima(chunk);
            store(scratch.maxima.data() + chunk * VL, maxima);
            best = max(best, maxima);
        }
        best_ = max_lanes(best) / temperature;
    }

    // The largest value; what is not a number counts as impossible.
    float best() const { return best_; }
    Prefix all_possible() const { return {IMPOSSIBLE, 0}; }
    Prefix at_least(float value) const { return {value, (int32_t)size_}; }
    float value(int64_t id) const { return logits_[id] / temperature_; }

    // The first token of the order.
    int64_t first() const {
        for (int64_t chunk = 0; chunk < num_chunks_; chunk++)
            if (best_logit_of(chunk) / temperature_ == best_)
                for (int64_t id = begin(chunk); id < end(chunk); id++)
                    if (value(id) == best_) return id;
        return 0;
    }

    // Gathers the first `count` tokens and those that are not far behind, in no order; fewer only if some are no numbers.
    std::vector<Token>& gather_first(int64_t count) {
        // Logits that differ may be one value.
        const float least = least_logit_of(at_least(least_logit(count) / temperature_));
        scratch_.tokens.clear();
        for (int64_t chunk = 0; chunk < num_chunks_; chunk++)
            if (best_logit_of(chunk) >= least) gather(chunk, least);
        return scratch_.tokens;
    }

    // The bound of the first `count` tokens, of fewer if the others are impossible.
    Prefix first_tokens(int64_t count) {
        if (count >= size_) return all_possible();
        std::vector<Token>& tokens = gather_first(count);
        if ((int64_t)tokens.size() < count) return all_possible();
        std::nth_element(tokens.begin(), tokens.begin() + count - 1, tokens.end(), comes_before);
        const Token& last = tokens[count - 1];
        return last.value > IMPOSSIBLE ? Prefix{last.value, last.id + 1} : all_possible();
    }

    // How many tokens there are.
    int64_t count(Prefix prefix) const {
        int64_t found = 0;
        for (int64_t chunk = 0; chunk < num_chunks_; chunk++)
            visit(chunk, prefix, [&](Floats, Mask passing) { found += __builtin_popcount(lane_bits(passing)); });
        return found;
    }

    // The sum of e to the power of value - best.
    double mass(Prefix prefix) const {
        double total = 0;
        const Floats best = broadcast(best_), log2_of_e = broadcast(1.44269504088896341f);
        // Logits below this have no mass: their exponentials would be no normal numbers.
        prefix = prefix.narrowed(at_least(best_ - 87.0f));
        for (int64_t chunk = 0; chunk < num_chunks_; chunk++) {
            Floats sum = zero();
            visit(chunk, prefix, [&](Floats values, Mask passing) {
                sum = add(sum, select(passing, zero(), power_of_two<float>(mul(sub(values, best), log2_of_e))));
            });
            total += add_lanes(sum);
        }
        return total;
    }

    // The winner of the race of exponentials: the largest value - log(noise), ties by the lower id; id -1 without tokens.
    Token race(Prefix prefix, const Philox& noise) const {
        Race race{prefix, noise, {IMPOSSIBLE, -1}};
        int64_t favourite = 0;
        for (int64_t chunk = 1; chunk < num_chunks_; chunk++)
            if (best_logit_of(chunk) > best_logit_of(favourite)) favourite = chunk;
        // First where the winner probably is: what comes after has to beat it, and most of it cannot.
        run_chunk(favourite, race);
        for (int64_t chunk = 0; chunk < num_chunks_; chunk++)
            if (chunk != favourite) run_chunk(chunk, race);
        return race.winner;
    }

   private:
    // `winner` holds its score in the place of its value.
    struct Race {
        Prefix prefix;
        const Philox& noise;
        Token winner;
    };

    int64_t begin(int64_t chunk) const { return chunk * CHUNK_TOKENS; }
    int64_t end(int64_t chunk) const { return std::min(size_, (chunk + 1) * CHUNK_TOKENS); }
    float best_logit_of(int64_t chunk) const { return max_lanes(load(scratch_.maxima.data() + chunk * VL)); }

    // Logits from an id on, impossible past the end.
    INLINE Floats logits_at(int64_t id) const {
        const int64_t n = size_ - id;
        if (n >= VL) return load(logits_ + id);
        if (n <= 0) return broadcast(IMPOSSIBLE);
        return select(first_lanes((int)n), broadcast(IMPOSSIBLE), load(logits_ + id, (int)n));
    }

    Floats chunk_maxima(int64_t chunk) const {
        Floats maxima = broadcast(IMPOSSIBLE);
        for (int64_t id = begin(chunk); id < end(chunk); id += VL) maxima = max(logits_at(id), maxima);
        return maxima;
    }

    INLINE Mask passing(int64_t id, Floats values, Prefix prefix) const {
        const Floats bound = broadcast(prefix.value);
        const Words ids = add_words(broadcast_word((uint32_t)id), lane_numbers());
        return either(greater(values, bound), both(equal(values, bound), less(ids, broadcast_word((uint32_t)prefix.end))));
    }

    // A logit which those of a prefix reach, whatever rounds or is too small to be told from 0.
    float least_logit_of(Prefix prefix) const {
        const float least = prefix.value * temperature_;
        return least - std::fabs(least) * 0x1p-21f - temperature_ * 0x1p-148f;
    }

    // Calls for each vector of a chunk that may have tokens of a prefix.
    template <class Visitor>
    INLINE void visit(int64_t chunk, Prefix prefix, Visitor&& visitor) const {
        const float least = least_logit_of(prefix);
        if (best_logit_of(chunk) < least) return;
        const Floats temperature = broadcast(temperature_), bound = broadcast(least);
        for (int64_t id = begin(chunk); id < end(chunk); id += VL) {
            const Floats logits = logits_at(id);
            if (!any(::at_least(logits, bound))) continue;
            const Floats values = div(logits, temperature);
            visitor(values, passing(id, values, prefix));
        }
    }

    // A logit which at least `count` tokens reach, and not many more: so many of the largest ones of each lane of each
    // chunk do, or where these are too few, so many of all.
    float least_logit(int64_t count) const {
        const int64_t num_maxima = num_chunks_ * VL;
        if (count <= num_maxima / 2) return reached_by(count, scratch_.maxima.data(), num_maxima);
        return reached_by(count, logits_, size_);
    }

    // A number which at least `count` of some numbers reach, and no more than an eighth over unless they tie. Halves what
    // lies between, in the order of floating-point numbers.
    static float reached_by(int64_t count, const float* numbers, int64_t size) {
        int64_t low = order_of(IMPOSSIBLE), high = (int64_t)order_of(-IMPOSSIBLE) + 1, reached = size;
        while (high - low > 1 && reached > count + count / 8) {
            const int64_t middle = low + (high - low) / 2, found = num_at_least(numbers, size, of_order((int32_t)middle));
            if (found < count)
                high = middle;
            else
                low = middle, reached = found;
        }
        return of_order((int32_t)low);
    }

    static int64_t num_at_least(const float* numbers, int64_t size, float least) {
        const Floats bound = broadcast(least);
        int64_t found = 0;
        for (int64_t i = 0; i < size; i += VL) {
            const int n = (int)std::min<int64_t>(VL, size - i);
            found += __builtin_popcount(lane_bits(::at_least(load(numbers + i, n), bound)) & ((2u << (n - 1)) - 1));
        }
        return found;
    }

    void gather(int64_t chunk, float least) {
        const Floats bound = broadcast(least);
        for (int64_t id = begin(chunk); id < end(chunk); id += VL) {
            uint32_t bits = lane_bits(::at_least(logits_at(id), bound));
            for (; bits; bits &= bits - 1) {
                const int64_t found = id + __builtin_ctz(bits);
                if (found < size_) scratch_.tokens.push_back({value(found), (int32_t)found});
            }
        }
    }

    void run_chunk(int64_t chunk, Race& race) const {
        // An impossible token never wins. Where a grammar allows few tokens, that is most of the vocabulary.
        const float least = std::max(least_logit_of(race.prefix), std::numeric_limits<float>::lowest());
        if (best_logit_of(chunk) < least) return;
        const float best = best_logit_of(chunk) / temperature_;
        int64_t bound = winning_word(best, race.winner.value);
        for (int64_t id = begin(chunk); id < end(chunk) && bound >= 0; id += TOKENS_AT_ONCE) {
            const Floats logits = max(logits_at(id), logits_at(id + VL));
            if (!any(::at_least(logits, broadcast(least)))) continue;
            Words words[4];
            race.noise.generate((uint32_t)(id / 4), words);
            const Words smallest = min_unsigned(min_unsigned(words[0], words[1]), min_unsigned(words[2], words[3]));
            if (!has_word_up_to(bound, smallest)) continue;
            // The chunk's best might win with one of these words; might one of these tokens?
            if (!has_word_up_to(winning_word(max_lanes(logits) / temperature_, race.winner.value), smallest)) continue;
            run_tokens(id, words, race);
            bound = winning_word(best, race.winner.value);
        }
    }

    static bool has_word_up_to(int64_t bound, Words words) {
        return bound >= 0 && any_lower_half_at_most(words, broadcast_word((uint32_t)bound));
    }

    // The largest word with which a token of this value can beat the winner; -1: none. A word w makes noise of at least
    // w / 2^32, so its score is at most the value less the logarithm of that; what rounds is more than allowed for.
    static int64_t winning_word(float value, float score) {
        const double slack = 1e-3 + 0x1p-22 * (std::fabs((double)value) + std::fabs((double)score));
        const double exponent = (double)value - score + slack;
        if (!(exponent < 0)) return UINT32_MAX;
        // The smallest noise is 2^-33.
        if (exponent < -23.5) return -1;
        return (int64_t)std::min<double>(UINT32_MAX, std::exp(exponent) * 0x1p32 + 1);
    }

    // Scores tokens whose words are at hand.
    void run_tokens(int64_t id, const Words (&words)[4], Race& race) const {
        uint64_t wide[4][COUNTERS_AT_ONCE];
        uint32_t in_order[TOKENS_AT_ONCE];
        for (int word = 0; word < 4; word++) store_words(wide[word], words[word]);
        for (int token = 0; token < TOKENS_AT_ONCE; token++) in_order[token] = (uint32_t)wide[token % 4][token / 4];
        for (int first = 0; first < TOKENS_AT_ONCE && id + first < size_; first += VL) {
            const Floats values = div(logits_at(id + first), broadcast(temperature_));
            float scores[VL];
            store(scores, sub(values, logarithm(exponential_noise(load_words(in_order + first)))));
            for (uint32_t bits = lane_bits(passing(id + first, values, race.prefix)); bits; bits &= bits - 1) {
                const int lane = __builtin_ctz(bits);
                const Token runner{scores[lane], (int32_t)(id + first + lane)};
                if (race.winner.id < 0 || comes_before(runner, race.winner)) race.winner = runner;
            }
        }
    }

    const float* logits_;
    int64_t size_;
    int64_t num_chunks_;
    float temperature_;
    float best_;
    RowScratch& scratch_;
};
