// Random words that are a function of a key and a counter, and the noise that is made of them.
//
// Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Knows no logits. A counter stands
// in a lane of 64 bits, of which the lower half counts: products are of lower halves, so what the upper ones hold is of
// no matter, and nothing is ever masked.
#pragma once

#include "simd.h"

// The numbers that a row's draw depends on beside its logits.
struct DrawKey {
    int64_t seed;
    int64_t position;
    int64_t sequence_index;
};

constexpr int COUNTERS_AT_ONCE = VL / 2;
// A counter gives four neighbouring tokens a word each.
constexpr int TOKENS_AT_ONCE = 4 * COUNTERS_AT_ONCE;

class Philox {
   public:
    explicit Philox(const DrawKey& key)
        : position_(broadcast_word((uint32_t)key.position)), index_(broadcast_word((uint32_t)key.sequence_index)) {
        uint32_t low = (uint32_t)key.seed, high = (uint32_t)((uint64_t)key.seed >> 32);
        for (int round = 0; round < ROUNDS; round++) {
            low_keys_[round] = broadcast_word(low);
            high_keys_[round] = broadcast_word(high);
            low += 0x9E3779B9;
            high += 0xBB67AE85;
        }
    }

    // The four words of the counters from `first` on, in the lower halves of lanes of 64 bits.
    INLINE void generate(uint32_t first, Words (&words)[4]) const {
        const Words multiplier0 = broadcast_word(0xD2511F53), multiplier1 = broadcast_word(0xCD9E8D57);
        Words c0 = add_words(broadcast_word(first), wide_lane_numbers()), c1 = position_, c2 = index_;
        Words c3 = broadcast_word(0);
        UNROLL for (int round = 0; round < ROUNDS; round++) {
            const Words product0 = multiply_wide(c0, multiplier0), product1 = multiply_wide(c2, multiplier1);
            c0 = xor_words(upper_half(product1), c1, low_keys_[round]);
            c2 = xor_words(upper_half(product0), c3, high_keys_[round]);
            c1 = product1;
            c3 = product0;
        }
        words[0] = c0;
        words[1] = c1;
        words[2] = c2;
        words[3] = c3;
    }

   private:
    static constexpr int ROUNDS = 10;

    Words position_;
    Words index_;
    Words low_keys_[ROUNDS];
    Words high_keys_[ROUNDS];
};

// Turns uniform words into Exp(1): small values, which win a race, keep all their bits.
INLINE Floats exponential_noise(Words words) {
    const Floats one = broadcast(1.0f);
    Floats uniform = mul(add(unsigned_to_floats(words), broadcast(0.5f)), broadcast(0x1p-32f));
    uniform = min(uniform, broadcast(1.0f - 0x1p-24f));
    // log1p(-u) without its loss where 1 - u rounds: Kahan's quotient.
    const Floats rest = sub(one, uniform);
    const Floats quotient = div(mul(uniform, logarithm(rest)), sub(rest, one));
    return select(equal(rest, one), quotient, uniform);
}
