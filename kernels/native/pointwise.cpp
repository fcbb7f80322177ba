// What lies between a decoder layer's products: norms, residual sums, rotation. Each row by itself; knows no layer.
//
// Rounding to bf16 comes where the torch twin has it, so that both give the same numbers but for the order of sums.
#include <algorithm>
#include <cmath>

#include "bf16.h"
#include "threads.h"

namespace blockplane {
namespace {

// Rows of a task: less would cost more to hand out than to compute.
constexpr int64_t TASK_ROWS = 8;

template <class Function>
void for_rows(int64_t num_rows, const Function& function) {
  parallel_for(ceil_div(num_rows, TASK_ROWS), [&](int64_t task) {
    const int64_t last = std::min(num_rows, (task + 1) * TASK_ROWS);
    for (int64_t row = task * TASK_ROWS; row < last; row++) function(row);
  });
}

inline Floats rounded(Floats values) {
  bf16 words[LANES];
  store(words, values);
  return load(words);
}

// x / rms(x) * weight, over `size` numbers, a multiple of LANES.
struct RMSNorm {
  const float* weight;
  int64_t size;
  float eps;
  // Whether x / rms(x) is rounded before the product.
  bool rounds_first;

  float inverse_rms(float sum_of_squares) const {
    return 1.0f / std::sqrt(sum_of_squares / static_cast<float>(size) + eps);
  }

  Floats scaled(Floats x, float factor, int64_t at) const {
    const Floats normed = multiply(x, broadcast(factor));
    return multiply(rounds_first ? rounded(normed) : normed, load(weight + at));
  }

  float inverse_rms_of(const bf16* x) const {
    Floats squares = broadcast(0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
      const Floats values = load(x + i);
      squares = multiply_add(values, values, squares);
    }
    return inverse_rms(sum(squares));
  }

  void operator()(const bf16* x, bf16* output) const {
    const float factor = inverse_rms_of(x);
    for (int64_t i = 0; i < size; i += LANES) store(output + i, scaled(load(x + i), factor, i));
  }
};

// hidden += x, itself normed where there is such a norm.
void add_to(bf16* hidden, const bf16* x, const RMSNorm& norm) {
  const float factor = norm.weight == nullptr ? 0.0f : norm.inverse_rms_of(x);
  for (int64_t i = 0; i < norm.size; i += LANES) {
    Floats summand = load(x + i);
    if (norm.weight != nullptr) summand = rounded(norm.scaled(summand, factor, i));
    store(hidden + i, add(load(hidden + i), summand));
  }
}

// The pairs (i, i + size / 2) turned by cosines and sines, of which the first half is negated.
void rotate(const bf16* head, const float* cosines, const float* sines, bf16* output, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < size; i += LANES) {
    const Floats partner = load(head + (i < half ? i + half : i - half));
    store(output + i, multiply_add(partner, load(sines + i), multiply(load(head + i), load(cosines + i))));
  }
}

}  // namespace
}  // namespace blockplane

using namespace blockplane;

// bf16 [num_rows][size] -> the same shape.
extern "C" void rms_norm(
    const bf16* x, const float* weight, float eps, bool rounds_first, bf16* output, int64_t num_rows, int64_t size) {
  const RMSNorm norm{weight, size, eps, rounds_first};
  for_rows(num_rows, [&](int64_t row) { norm(x + row * size, output + row * size); });
}

// hidden [num_rows][size] += x, normed by `x_weight` first where that is not null; output = norm(hidden).
extern "C" void add_rms_norm(
    bf16* hidden, const bf16* x, const float* x_weight, const float* weight, float eps, bool rounds_first, bf16* output,
    int64_t num_rows, int64_t size) {
  const RMSNorm x_norm{x_weight, size, eps, rounds_first}, norm{weight, size, eps, rounds_first};
  for_rows(num_rows, [&](int64_t row) {
    add_to(hidden + row * size, x + row * size, x_norm);
    norm(hidden + row * size, output + row * size);
  });
}

// qkv [num_tokens][num_heads + 2 * num_kv_heads][head_dim] -> its heads apart, tokens of each in one piece; queries and
// keys are normed where `weight` [num_heads + num_kv_heads][head_dim] is not null, and turned by the rows `positions` of
// the table [num_positions][2][head_dim]. head_dim is a multiple of 2 * LANES.
extern "C" void split_heads(
    const bf16* qkv, const float* weight, float eps, bool rounds_first, const float* table, const int64_t* positions,
    bf16* query, bf16* key, bf16* value, int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim) {
  for_rows(num_tokens, [&](int64_t token) {
    const bf16* from = qkv + token * (num_heads + 2 * num_kv_heads) * head_dim;
    const float* cosines = table + positions[token] * 2 * head_dim;
    bf16* queries = query + token * num_heads * head_dim;
    bf16* keys = key + token * num_kv_heads * head_dim;
    bf16 normed[1024];
    for (int64_t head = 0; head < num_heads + num_kv_heads; head++, from += head_dim) {
      const bf16* turned = from;
      if (weight != nullptr) {
        RMSNorm{weight + head * head_dim, head_dim, eps, rounds_first}(from, normed);
        turned = normed;
      }
      bf16* to = head < num_heads ? queries + head * head_dim : keys + (head - num_heads) * head_dim;
      rotate(turned, cosines, cosines + head_dim, to, head_dim);
    }
    std::copy(from, from + num_kv_heads * head_dim, value + token * num_kv_heads * head_dim);
  });
}
