// Products of activations with a stored weight, packed once into panels. Knows neither layers nor tensors.
#include "products.h"

namespace blockplane {
namespace {

class PackedProduct {
 public:
  static constexpr int64_t MAX_ROWS = 128;

  PackedProduct(const bf16* input, int64_t input_stride, const bf16* weight, int64_t depth)
      : input_(input), input_stride_(input_stride), weight_(weight), depth_(depth) {}

  void operator()(int64_t first, int64_t num_rows, int64_t panel, float* sums) const {
    multiply(
        input_ + first * input_stride_, input_stride_, weight_ + panel * PANEL * depth_, depth_, sums, PANEL, num_rows);
  }

 private:
  const bf16* input_;
  int64_t input_stride_;
  const bf16* weight_;
  int64_t depth_;
};

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
  const PackedProduct product(input, input_stride, weight, in_features);
  write_outputs(product, bias, output, output_stride, num_rows, out_features);
}

// The same, unrounded.
extern "C" void linear_float(
    const bf16* input, int64_t input_stride, const bf16* weight, const float* bias, float* output, int64_t output_stride,
    int64_t num_rows, int64_t in_features, int64_t out_features) {
  const PackedProduct product(input, input_stride, weight, in_features);
  write_outputs(product, bias, output, output_stride, num_rows, out_features);
}

// As `find_largest` has it.
extern "C" void largest_outputs(
    const bf16* input, int64_t input_stride, const bf16* weight, int64_t* ids, int64_t num_rows, int64_t in_features,
    int64_t out_features) {
  find_largest(PackedProduct(input, input_stride, weight, in_features), ids, num_rows, out_features);
}

// As `write_gated_outputs` has it; weight [2 * out_features, in_features], packed.
extern "C" void gated_linear(
    const bf16* input, int64_t input_stride, const bf16* weight, bf16* output, int64_t num_rows, int64_t in_features,
    int64_t out_features, bool is_gelu) {
  const PackedProduct product(input, input_stride, weight, in_features);
  write_gated_outputs(product, output, num_rows, out_features, is_gelu);
}
