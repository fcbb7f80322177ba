// Products of activations with a stored weight, packed once into panels. Knows neither layers nor tensors.
#include <cmath>
#include <limits>
#include <vector>

#include "gemm.h"
#include "threads.h"

namespace blockplane {
namespace {

// Rows whose sums a thread keeps at a time.
constexpr int64_t CHUNK_ROWS = 128;

// sqrt(2 / pi): gelu(x) = x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), in its tanh form (arXiv 1606.08415).
constexpr float GELU_FACTOR = 2 * 0.7978845608f, GELU_CUBE = 0.044715f;

inline Floats sigmoid_times(Floats factor, Floats x) {
  return divide(factor, add(broadcast(1.0f), exponential(subtract(broadcast(0.0f), x))));
}

inline Floats gelu(Floats x) {
  const Floats cubed = multiply(multiply(x, x), x);
  return sigmoid_times(x, multiply(broadcast(GELU_FACTOR), multiply_add(broadcast(GELU_CUBE), cubed, x)));
}

inline Floats silu(Floats x) { return sigmoid_times(x, x); }

inline void write(bf16* to, Floats values) { store(to, values); }

// Logits are many, and read much later: they pass by the caches, which would read their lines first.
inline void write(float* to, Floats values) {
  reinterpret_cast<uintptr_t>(to) % sizeof values == 0 ? stream(to, values) : store(to, values);
}

inline void set(bf16& to, float value) { to = to_bf16(value); }
inline void set(float& to, float value) { to = value; }

template <class Value>
void write_sums(const float* sums, const float* bias, Value* output, int64_t output_stride, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; i++, sums += PANEL, output += output_stride) {
    int64_t j = 0;
    for (; j + LANES <= columns; j += LANES) {
      write(output + j, bias == nullptr ? load(sums + j) : add(load(sums + j), load(bias + j)));
    }
    for (; j < columns; j++) set(output[j], sums[j] + (bias == nullptr ? 0.0f : bias[j]));
  }
}

// Panels of a task that looks for the largest output.
constexpr int64_t TASK_PANELS = 16;

// The largest of some outputs of a row, the first of equals.
struct Largest {
  float value = -std::numeric_limits<float>::infinity();
  bool is_finite = true;
  int64_t id = -1;

  void look_at(const float* outputs, int64_t first_id, int64_t count) {
    int64_t j = 0;
    Floats most = broadcast(value), zeros = broadcast(0.0f);
    for (; j + LANES <= count; j += LANES) {
      const Floats values = load(outputs + j);
      most = maximum(most, values);
      // 0, or NaN of what is not finite.
      zeros = add(zeros, subtract(values, values));
    }
    bool has_more = largest(most) > value;
    is_finite &= sum(zeros) == 0.0f;
    for (; j < count; j++) {
      has_more |= outputs[j] > value;
      is_finite &= std::isfinite(outputs[j]);
    }
    for (j = 0; has_more && j < count; j++) {
      if (outputs[j] > value) value = outputs[j], id = first_id + j;
    }
  }

  void look_at(const Largest& later) {
    is_finite &= later.is_finite;
    if (later.value > value) value = later.value, id = later.id;
  }
};

template <class Value>
void linear(
    const bf16* input,
    int64_t input_stride,
    const bf16* weight,
    const float* bias,
    Value* output,
    int64_t output_stride,
    int64_t num_rows,
    int64_t in_features,
    int64_t out_features) {
  const int64_t num_panels = ceil_div(out_features, PANEL), num_chunks = ceil_div(num_rows, CHUNK_ROWS);
  parallel_for(num_panels * num_chunks, [&](int64_t task) {
    const int64_t first = task / num_panels * CHUNK_ROWS, column = task % num_panels * PANEL;
    const int64_t rows = std::min(CHUNK_ROWS, num_rows - first);
    alignas(64) float sums[CHUNK_ROWS * PANEL];
    multiply(input + first * input_stride, input_stride, weight + column * in_features, in_features, sums, PANEL, rows);
    write_sums(
        sums, bias == nullptr ? nullptr : bias + column, output + first * output_stride + column, output_stride, rows,
        std::min(PANEL, out_features - column));
  });
}

}  // namespace
}  // namespace blockplane

using namespace blockplane;

// weight [out_features, in_features], row by row -> panels, the last one filled up with zeros.
extern "C" void pack_linear(const bf16* weight, bf16* packed, int64_t out_features, int64_t in_features) {
  parallel_for(ceil_div(out_features, PANEL), [&](int64_t index) {
    bf16* panel = packed + index * PANEL * in_features;
    const int64_t first = index * PANEL;
    for (int64_t k = 0; k < in_features; k += 2) {
      for (int64_t j = 0; j < PANEL; j++, panel += 2) {
        const bool is_there = first + j < out_features;
        const bf16* pair = weight + (first + j) * in_features + k;
        panel[0] = is_there ? pair[0] : 0;
        panel[1] = is_there ? pair[1] : 0;
      }
    }
  });
}

// A packed weight's rows [num_ids][in_features] by their indices: the embeddings of tied weights.
extern "C" void packed_rows(
    const bf16* packed, const int64_t* ids, bf16* output, int64_t num_ids, int64_t in_features) {
  for (int64_t i = 0; i < num_ids; i++, output += in_features) {
    const bf16* pair = packed + ids[i] / PANEL * PANEL * in_features + ids[i] % PANEL * 2;
    for (int64_t k = 0; k < in_features; k += 2, pair += 2 * PANEL) std::copy(pair, pair + 2, output + k);
  }
}

extern "C" void linear_bf16(
    const bf16* input, int64_t input_stride, const bf16* weight, const float* bias, bf16* output, int64_t output_stride,
    int64_t num_rows, int64_t in_features, int64_t out_features) {
  linear(input, input_stride, weight, bias, output, output_stride, num_rows, in_features, out_features);
}

// The same, unrounded.
extern "C" void linear_float(
    const bf16* input, int64_t input_stride, const bf16* weight, const float* bias, float* output, int64_t output_stride,
    int64_t num_rows, int64_t in_features, int64_t out_features) {
  linear(input, input_stride, weight, bias, output, output_stride, num_rows, in_features, out_features);
}

// The largest of each row's outputs, ids [num_rows]: the lowest of equals; -1 where one is not finite. The outputs
// themselves are written nowhere, which for a large vocabulary costs more than the product.
extern "C" void largest_outputs(
    const bf16* input, int64_t input_stride, const bf16* weight, int64_t* ids, int64_t num_rows, int64_t in_features,
    int64_t out_features) {
  const int64_t num_panels = ceil_div(out_features, PANEL), num_tasks = ceil_div(num_panels, TASK_PANELS);
  for (int64_t first = 0; first < num_rows; first += CHUNK_ROWS) {
    const int64_t rows = std::min(CHUNK_ROWS, num_rows - first);
    std::vector<Largest> found(num_tasks * rows);
    parallel_for(num_tasks, [&](int64_t task) {
      alignas(64) float sums[CHUNK_ROWS * PANEL];
      const int64_t last = std::min(num_panels, (task + 1) * TASK_PANELS);
      for (int64_t panel = task * TASK_PANELS; panel < last; panel++) {
        multiply(
            input + first * input_stride, input_stride, weight + panel * PANEL * in_features, in_features, sums, PANEL,
            rows);
        const int64_t columns = std::min(PANEL, out_features - panel * PANEL);
        for (int64_t i = 0; i < rows; i++) found[task * rows + i].look_at(sums + i * PANEL, panel * PANEL, columns);
      }
    });
    for (int64_t i = 0; i < rows; i++) {
      Largest all = found[i];
      for (int64_t task = 1; task < num_tasks; task++) all.look_at(found[task * rows + i]);
      ids[first + i] = all.is_finite ? all.id : -1;
    }
  }
}

// act(x gate^T) * (x up^T) of weight [2 * out_features, in_features], packed, the gate's rows first; out_features is a
// multiple of PANEL.
extern "C" void gated_linear(
    const bf16* input, int64_t input_stride, const bf16* weight, bf16* output, int64_t num_rows, int64_t in_features,
    int64_t out_features, bool is_gelu) {
  const int64_t num_panels = out_features / PANEL, num_chunks = ceil_div(num_rows, CHUNK_ROWS);
  parallel_for(num_panels * num_chunks, [&](int64_t task) {
    const int64_t first = task / num_panels * CHUNK_ROWS, column = task % num_panels * PANEL;
    const int64_t rows = std::min(CHUNK_ROWS, num_rows - first);
    const bf16* from = input + first * input_stride;
    alignas(64) float gate[CHUNK_ROWS * PANEL], up[CHUNK_ROWS * PANEL];
    multiply(from, input_stride, weight + column * in_features, in_features, gate, PANEL, rows);
    multiply(from, input_stride, weight + (out_features + column) * in_features, in_features, up, PANEL, rows);
    bf16* to = output + first * out_features + column;
    for (int64_t i = 0; i < rows; i++, to += out_features) {
      for (int64_t j = 0; j < PANEL; j += LANES) {
        const Floats x = load(gate + i * PANEL + j);
        store(to + j, multiply(is_gelu ? gelu(x) : silu(x), load(up + i * PANEL + j)));
      }
    }
  });
}
