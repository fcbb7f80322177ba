// Attention over keys that come in pieces (Milakov and Gimelshein 2018, arXiv 1805.02867), a query at a time. Knows
// neither keys nor values.
#pragma once

#include <limits>

#include "bf16.h"

namespace blockplane {

constexpr float LOG2_E = 1.44269504f;

// a * 2^n where x is not below -126, 0 elsewhere, and never a subnormal number, which would take as long as a hundred.
inline Floats scale_where_normal(Floats x, Floats a, Floats n) {
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, broadcast(-126.0f), _CMP_NLT_UQ), a, n);
#else
  return _mm256_and_ps(_mm256_cmp_ps(x, broadcast(-126.0f), _CMP_NLT_UQ), scale_by_power(a, n));
#endif
}

// 2^x for x <= 0, to 3e-6 of it; NaN stays one.
inline Floats power_of_two(Floats x) {
  const Floats n = nearest(x), r = subtract(x, n);
  // The Taylor polynomial of degree 5, |r| <= 1/2.
  Floats p = broadcast(1.33335581e-3f);
  for (const float coefficient : {9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f}) {
    p = multiply_add(p, r, broadcast(coefficient));
  }
  return scale_where_normal(x, p, n);
}

inline float power_of_two(float x) {
  float values[LANES];
  store(values, power_of_two(broadcast(x)));
  return values[0];
}

// How products of queries and keys become logits, which are in base 2 from then on.
struct Logits {
  // Positive.
  float scale;
  // 0 = none.
  float soft_cap;

  float factor() const { return (soft_cap == 0.0f ? scale : soft_cap) * LOG2_E; }

  // What is to be multiplied by the factor: tanh(score / cap), from the exponential of twice that.
  Floats capped(Floats product) const {
    const Floats power = exponential(multiply(product, broadcast(2.0f * scale / soft_cap)));
    return subtract(broadcast(1.0f), divide(broadcast(2.0f), add(power, broadcast(1.0f))));
  }
};

// One query's softmax so far: the greatest logit, and the sum of weights relative to it.
struct Softmax {
  float top = LOWEST, weight = 0.0f;

  // Finite, so that a query that has seen nothing yet rescales by 1.
  static constexpr float LOWEST = -1e30f;

  // A sink is a first key of no value.
  static Softmax of_sink(float sink) { return {sink * LOG2_E, 1.0f}; }

  // What `seen` so far weighs relative to a new top.
  float shrink_to(float new_top) const { return power_of_two(top - new_top); }

  // Adds the products [end] of which the query sees those in [first, last); others are overwritten. Gives their weights
  // [end], 0 where unseen, and the factor of all that was added before. `begin` and `end` are multiples of LANES.
  template <class Weight>
  float fold(const Logits& logits, float* products, int64_t first, int64_t last, int64_t begin, int64_t end, Weight* weights) {
    if (logits.soft_cap != 0.0f) {
      for (int64_t i = begin; i < end; i += LANES) store(products + i, logits.capped(load(products + i)));
    }
    constexpr float HIDDEN = -std::numeric_limits<float>::infinity();
    std::fill(products + begin, products + first, HIDDEN);
    std::fill(products + last, products + end, HIDDEN);
    const Floats factor = broadcast(logits.factor());
    Floats tops = load(products + begin);
    for (int64_t i = begin + LANES; i < end; i += LANES) tops = maximum(tops, load(products + i));
    const float new_top = std::max(top, largest(tops) * logits.factor());
    const Floats base = broadcast(-new_top);
    Floats sums = broadcast(0.0f);
    for (int64_t i = begin; i < end; i += LANES) {
      store(weights + i, power_of_two(multiply_add(load(products + i), factor, base)));
      // As they were rounded, so that they weigh 1 in all.
      sums = add(sums, load(weights + i));
    }
    const float shrink = shrink_to(new_top);
    top = new_top;
    weight = weight * shrink + sum(sums);
    return shrink;
  }

  // Where nothing was seen, the values' sum is 0 as well.
  float inverse_weight() const { return weight > 0.0f || weight != weight ? 1.0f / weight : 0.0f; }
};

}  // namespace blockplane
