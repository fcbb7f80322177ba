// A panel of a quantized matrix: how it lies in memory, and the numbers that it stands for. Knows no product.
//
// Of each column GROUP numbers along the depth share a scale and a minimum: number = scale * code + minimum. A code has
// BITS bits; of 8 the minimum is -128 scales and is stored nowhere. A panel is one Group after another.
#pragma once

#include <cmath>

#include "gemm.h"

namespace blockplane {

constexpr int64_t GROUP = 32;

// Codes of so many neighbours along the depth lie side by side for each column, a line of them for all columns: as
// vpdpbusd takes them.
constexpr int64_t STEP = 4;
constexpr int64_t LINE = STEP * PANEL;

template <int BITS>
struct Group;

template <>
struct alignas(64) Group<8> {
  bf16 scales[PANEL];
  uint8_t lines[GROUP / STEP][LINE];
};

// A byte holds a code and, above it, that of STEP further down.
template <>
struct alignas(64) Group<4> {
  bf16 scales[PANEL], minimums[PANEL];
  uint8_t lines[GROUP / STEP / 2][LINE];
};

template <int BITS>
constexpr int STEPS_A_LINE = 8 / BITS;

// Has what comes so far behind a line fetched from memory: further than the CPU looks ahead by itself.
inline void prefetch_after(const uint8_t (&line)[LINE]) {
  constexpr int64_t DISTANCE = 4096, CACHE_LINE = 64;
  for (int64_t byte = 0; byte < LINE; byte += CACHE_LINE) {
    _mm_prefetch(reinterpret_cast<const char*>(line) + DISTANCE + byte, _MM_HINT_T1);
  }
}

// Of LANES columns from this one on.
template <int BITS>
Floats scales_of(const Group<BITS>& group, int64_t column) {
  return load(group.scales + column);
}

inline Floats minimums_of(const Group<8>& group, int64_t column) {
  return multiply(scales_of(group, column), broadcast(-128.0f));
}

inline Floats minimums_of(const Group<4>& group, int64_t column) { return load(group.minimums + column); }

// The byte that has a code, and above how many bits it does.
template <int BITS, class AnyGroup>
auto& byte_of(AnyGroup& group, int64_t depth, int64_t column) {
  return group.lines[depth / (STEP * STEPS_A_LINE<BITS>)][column * STEP + depth % STEP];
}

template <int BITS>
constexpr int shift_of(int64_t depth) {
  return static_cast<int>(depth / STEP % STEPS_A_LINE<BITS>) * BITS;
}

template <int BITS>
float number_of(const Group<BITS>& group, int64_t depth, int64_t column) {
  const int code = byte_of<BITS>(group, depth, column) >> shift_of<BITS>(depth) & ((1 << BITS) - 1);
  const float scale = to_float(group.scales[column]);
  if constexpr (BITS == 8) return scale * static_cast<float>(code - 128);
  if constexpr (BITS == 4) return std::fma(scale, static_cast<float>(code), to_float(group.minimums[column]));
}

#if defined(__AVX512F__)

using Integers = __m512i;

inline Integers load_integers(const void* from) { return _mm512_loadu_si512(from); }

#else

using Integers = __m256i;

inline Integers load_integers(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

#endif

}  // namespace blockplane
