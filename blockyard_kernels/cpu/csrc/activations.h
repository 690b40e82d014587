// The functions of a single number that networks use: activations, and the tangent that caps scores and logits.
//
// All in float32, with bfloat16 in mind as exact as `power_of_two` is. What is no number stays none.
#pragma once

#include "plan.h"
#include "simd.h"

constexpr float LOG2_OF_E = 1.44269504088896341f;

// x / (1 + 2^exponent). No overflow: the exponent is cut where the result is 0 in either type.
template <class E>
INLINE Floats divide_by_one_and_power(Floats x, Floats exponent) {
    return div(x, add(broadcast(1.0f), power_of_two<E>(min(broadcast(126.0f), exponent))));
}

template <class E>
INLINE Floats silu(Floats x) {
    return divide_by_one_and_power<E>(x, mul(x, broadcast(-LOG2_OF_E)));
}

INLINE float sigmoid(float x) {
    float kept[VL];
    store(kept, divide_by_one_and_power<float>(broadcast(1.0f), broadcast(-x * LOG2_OF_E)));
    return kept[0];
}

// x / 2 * (1 + tanh(u)) is x / (1 + exp(-2 u)), which loses nothing where the tangent is near -1.
template <class E>
INLINE Floats gelu_tanh(Floats x) {
    constexpr float FACTOR = -2.0f * 0.797884560802865356f * LOG2_OF_E;
    const Floats cube = mul(mul(x, x), x);
    return divide_by_one_and_power<E>(x, mul(fma(cube, broadcast(0.044715f), x), broadcast(FACTOR)));
}

// x / 2 * (1 + erf(t)) with t = x / sqrt(2). erf near 0 as t + t * p(t^2), elsewhere 1 - exp(q(|t|)); both polynomials are
// Norbert Juffa's, within 1 ulp of erf. Of a negative x the power itself is what is left of 1 + erf.
template <class E>
INLINE Floats gelu_erf(Floats x) {
    const Floats t = mul(x, broadcast(0.707106781186547524f)), square = mul(t, t);
    Floats p = broadcast(-5.96761703e-4f);
    p = fma(p, square, broadcast(4.99119423e-3f));
    p = fma(p, square, broadcast(-2.67681349e-2f));
    p = fma(p, square, broadcast(1.12819925e-1f));
    p = fma(p, square, broadcast(-3.76125336e-1f));
    p = fma(p, square, broadcast(1.28379166e-1f));
    const Floats near = add(broadcast(1.0f), fma(p, t, t));
    // Past 10 nothing is left that either type could tell from 0.
    const Floats size = min(broadcast(10.0f), max(sub(zero(), t), t)), size_squared = mul(size, size);
    Floats q = fma(broadcast(-1.72853470e-5f), size, broadcast(3.83197126e-4f));
    q = fma(q, size_squared, fma(broadcast(-3.88396438e-3f), size, broadcast(2.42546219e-2f)));
    q = fma(q, size, broadcast(-1.06777877e-1f));
    q = fma(q, size, broadcast(-6.34846687e-1f));
    q = fma(q, size, broadcast(-1.28717512e-1f));
    q = fma(q, size, sub(zero(), size));
    const Floats rest = power_of_two<E>(mul(q, broadcast(LOG2_OF_E)));
    const Floats far = select(greater(zero(), t), sub(broadcast(2.0f), rest), rest);
    return mul(mul(x, broadcast(0.5f)), select(greater(size, broadcast(0.927734375f)), near, far));
}

// The hyperbolic tangent, within 2 ulp. Cephes' polynomial near 0.
INLINE Floats hyperbolic_tangent(Floats x) {
    const Floats size = max(sub(zero(), x), x), square = mul(x, x);
    Floats p = broadcast(-5.70498872745e-3f);
    p = fma(p, square, broadcast(2.06390887954e-2f));
    p = fma(p, square, broadcast(-5.37397155531e-2f));
    p = fma(p, square, broadcast(1.33314422036e-1f));
    p = fma(p, square, broadcast(-3.33332819422e-1f));
    const Floats near = fma(mul(p, square), x, x);
    const Floats far =
        sub(broadcast(1.0f), divide_by_one_and_power<float>(broadcast(2.0f), mul(size, broadcast(2.0f * LOG2_OF_E))));
    return select(greater(broadcast(0.625f), size), select(greater(zero(), x), far, sub(zero(), far)), near);
}

// Apart from the loops that it ends: there are many of them, and few networks come here.
template <class E>
__attribute__((noinline)) Floats activate(int32_t activation, Floats x) {
    switch (activation) {
        case SILU: return silu<E>(x);
        case GELU_TANH: return gelu_tanh<E>(x);
        case GELU_ERF: return gelu_erf<E>(x);
        case RELU: return max(zero(), x);
        case RELU2: return mul(max(zero(), x), max(zero(), x));
        case TANH: return hyperbolic_tangent(x);
        default: return x;
    }
}

// Multiplies logits by the scale, then bounds them: softcap * tanh(logit / softcap). A softcap of 0 bounds nothing.
__attribute__((noinline)) inline Floats transform_logits(Floats logits, float scale, float softcap) {
    logits = mul(logits, broadcast(scale));
    return softcap == 0 ? logits : mul(hyperbolic_tangent(mul(logits, broadcast(1 / softcap))), broadcast(softcap));
}
