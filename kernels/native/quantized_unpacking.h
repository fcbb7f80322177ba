// A quantized panel brought into the form of gemm.h, for tiles. Knows no product.
#pragma once

#include "quantized_panel.h"

#if defined(__AMX_BF16__)

namespace blockplane {

// The BITS bits of each lane above so many.
template <int BITS>
Floats bits_above(Integers lanes, int shift) {
  return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(lanes, shift), _mm512_set1_epi32((1 << BITS) - 1)));
}

// Two vectors of columns, rounded, as pairs side by side.
inline void store_pairs(bf16* to, Floats first, Floats second) {
  const Integers half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const Integers low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(first), half), 16);
  const Integers high = _mm512_add_epi32(_mm512_castps_si512(second), half);
  // low | high & upper
  _mm512_storeu_si512(to, _mm512_ternarylogic_epi32(low, high, upper, 0xf8));
}

// The numbers of a panel, rounded to bfloat16.
template <int BITS>
void unpack(const Group<BITS>* panel, int64_t depth, bf16* to) {
  constexpr int VECTORS = PANEL / LANES;
  for (const Group<BITS>* group = panel; group < panel + depth / GROUP; group++) {
    Floats scales[VECTORS], minimums[VECTORS];
    for (int j = 0; j < VECTORS; j++) {
      scales[j] = scales_of(*group, LANES * j), minimums[j] = minimums_of(*group, LANES * j);
    }
    for (const auto& line : group->lines) {
      prefetch_after(line);
// So that each shift is a constant, which takes half the time.
#pragma GCC unroll 4
      for (int pair = 0; pair < 2 * STEPS_A_LINE<BITS>; pair++, to += 2 * PANEL) {
        const int shift = pair % 2 * 16 + pair / 2 * BITS;
        for (int j = 0; j < VECTORS; j++) {
          const Integers lanes = load_integers(line + STEP * LANES * j);
          const Floats first = multiply_add(scales[j], bits_above<BITS>(lanes, shift), minimums[j]);
          const Floats second = multiply_add(scales[j], bits_above<BITS>(lanes, shift + 8), minimums[j]);
          store_pairs(to + 2 * LANES * j, first, second);
        }
      }
    }
  }
}

}  // namespace blockplane

#endif
