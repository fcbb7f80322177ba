// Products of activations with a weight that is stored in 8 or 4 bits. Knows neither layers nor how codes are chosen.
#include "products.h"
#include "quantized_rows.h"
#include "quantized_unpacking.h"

namespace blockplane {
namespace {

#if defined(__AMX_BF16__)
constexpr int64_t MAX_INTEGER_ROWS = 12;
#else
constexpr int64_t MAX_INTEGER_ROWS = std::numeric_limits<int64_t>::max();
#endif

// Of few rows with the codes as they are. Of more, where there are tiles, with the numbers that these stand for: in
// integers without tiles any number of rows takes less time than in bfloat16.
template <int BITS>
class QuantizedProduct {
 public:
  static constexpr int64_t MAX_ROWS = 512;

  QuantizedProduct(const bf16* input, int64_t input_stride, const void* packed, int64_t num_rows, int64_t depth)
      : input_(input),
        input_stride_(input_stride),
        depth_(depth),
        panels_(static_cast<const Group<BITS>*>(packed)),
        is_in_integers_(num_rows <= MAX_INTEGER_ROWS),
        integers_(input, input_stride, is_in_integers_ ? num_rows : 0, depth) {}

  void operator()(int64_t first, int64_t num_rows, int64_t panel, float* sums) const {
    const Group<BITS>* groups = panels_ + panel * (depth_ / GROUP);
    if (is_in_integers_) return integers_.multiply(first, num_rows, groups, sums);
#if defined(__AMX_BF16__)
    thread_local std::vector<bf16> unpacked;
    if (std::ssize(unpacked) < depth_ * PANEL) unpacked.resize(depth_ * PANEL);
    unpack(groups, depth_, unpacked.data());
    multiply(input_ + first * input_stride_, input_stride_, unpacked.data(), depth_, sums, PANEL, num_rows);
#endif
  }

 private:
  const bf16* input_;
  int64_t input_stride_, depth_;
  const Group<BITS>* panels_;
  bool is_in_integers_;
  QuantizedRows integers_;
};

template <class Function>
void with_bits(int64_t bits, const Function& function) {
  bits == 4 ? function(std::integral_constant<int, 4>()) : function(std::integral_constant<int, 8>());
}

template <int BITS>
void pack(
    const uint8_t* codes, const bf16* scales, const bf16* minimums, Group<BITS>* packed, int64_t out_features,
    int64_t in_features) {
  const int64_t num_groups = in_features / GROUP;
  parallel_for(ceil_div(out_features, PANEL), [&](int64_t panel) {
    const int64_t first = panel * PANEL, count = std::min(PANEL, out_features - first);
    for (int64_t g = 0; g < num_groups; g++) {
      Group<BITS>& group = packed[panel * num_groups + g];
      group = {};
      for (int64_t j = 0; j < count; j++) {
        group.scales[j] = scales[(first + j) * num_groups + g];
        if constexpr (BITS == 4) group.minimums[j] = minimums[(first + j) * num_groups + g];
        for (int64_t k = 0; k < GROUP; k++) {
          byte_of<BITS>(group, k, j) |= codes[(first + j) * in_features + g * GROUP + k] << shift_of<BITS>(k);
        }
      }
    }
  });
}

template <class Value>
void quantized_linear(
    const bf16* input, int64_t input_stride, const void* packed, const float* bias, Value* output, int64_t output_stride,
    int64_t num_rows, int64_t in_features, int64_t out_features, int64_t bits) {
  with_bits(bits, [&](auto constant) {
    const QuantizedProduct<constant> product(input, input_stride, packed, num_rows, in_features);
    write_outputs(product, bias, output, output_stride, num_rows, out_features);
  });
}

}  // namespace
}  // namespace blockplane

using namespace blockplane;

// Bytes of `in_features` of a panel.
extern "C" int64_t quantized_panel_bytes(int64_t in_features, int64_t bits) {
  return in_features / GROUP * static_cast<int64_t>(bits == 4 ? sizeof(Group<4>) : sizeof(Group<8>));
}

// codes [out_features, in_features], a byte each; scales and minimums [out_features, in_features / GROUP], of 8 bits
// without minimums -> panels, the last one filled up with zeros.
extern "C" void pack_quantized(
    const uint8_t* codes, const bf16* scales, const bf16* minimums, void* packed, int64_t out_features,
    int64_t in_features, int64_t bits) {
  with_bits(bits, [&](auto constant) {
    pack(codes, scales, minimums, static_cast<Group<constant>*>(packed), out_features, in_features);
  });
}

// A packed weight's rows [num_ids][in_features] by their indices.
extern "C" void quantized_rows(
    const void* packed, const int64_t* ids, bf16* output, int64_t num_ids, int64_t in_features, int64_t bits) {
  with_bits(bits, [&](auto constant) {
    parallel_for(num_ids, [&](int64_t i) {
      const auto* panel = static_cast<const Group<constant>*>(packed) + ids[i] / PANEL * (in_features / GROUP);
      for (int64_t k = 0; k < in_features; k++) {
        output[i * in_features + k] = to_bf16(number_of(panel[k / GROUP], k % GROUP, ids[i] % PANEL));
      }
    });
  });
}

extern "C" void quantized_linear_bf16(
    const bf16* input, int64_t input_stride, const void* packed, const float* bias, bf16* output, int64_t output_stride,
    int64_t num_rows, int64_t in_features, int64_t out_features, int64_t bits) {
  quantized_linear(
      input, input_stride, packed, bias, output, output_stride, num_rows, in_features, out_features, bits);
}

// The same, unrounded.
extern "C" void quantized_linear_float(
    const bf16* input, int64_t input_stride, const void* packed, const float* bias, float* output, int64_t output_stride,
    int64_t num_rows, int64_t in_features, int64_t out_features, int64_t bits) {
  quantized_linear(
      input, input_stride, packed, bias, output, output_stride, num_rows, in_features, out_features, bits);
}

extern "C" void largest_quantized_outputs(
    const bf16* input, int64_t input_stride, const void* packed, int64_t* ids, int64_t num_rows, int64_t in_features,
    int64_t out_features, int64_t bits) {
  with_bits(bits, [&](auto constant) {
    const QuantizedProduct<constant> product(input, input_stride, packed, num_rows, in_features);
    find_largest(product, ids, num_rows, out_features);
  });
}

extern "C" void gated_quantized_linear(
    const bf16* input, int64_t input_stride, const void* packed, bf16* output, int64_t num_rows, int64_t in_features,
    int64_t out_features, bool is_gelu, int64_t bits) {
  with_bits(bits, [&](auto constant) {
    const QuantizedProduct<constant> product(input, input_stride, packed, num_rows, in_features);
    write_gated_outputs(product, output, num_rows, out_features, is_gelu);
  });
}
