// bfloat16 in memory, float32 in registers. Knows neither matrices nor threads.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace blockplane {

using bf16 = uint16_t;

inline float to_float(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// To nearest, ties to even; NaN stays one.
inline bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<bf16>(bits >> 16 | 0x40);
  return static_cast<bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__AVX512F__)

constexpr int LANES = 16;
using Floats = __m512;

inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Floats values) { _mm512_storeu_ps(to, values); }
inline void stream(float* to, Floats values) { _mm512_stream_ps(to, values); }
inline Floats broadcast(float value) { return _mm512_set1_ps(value); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline float sum(Floats values) { return _mm512_reduce_add_ps(values); }
inline float largest(Floats values) { return _mm512_reduce_max_ps(values); }
// a * 2^b, b a whole number.
inline Floats scale_by_power(Floats a, Floats b) { return _mm512_scalef_ps(a, b); }
// a, but 0 where b < limit.
inline Floats zero_below(Floats a, Floats b, float limit) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(b, broadcast(limit), _CMP_GE_OQ), a);
}
inline Floats nearest(Floats a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline Floats load(const bf16* from) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

inline void store(bf16* to, Floats values) {
#if defined(__AVX512BF16__)
  const __m256i words = (__m256i)_mm512_cvtneps_pbh(values);
#else
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m256i words = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words);
}

#else

constexpr int LANES = 8;
using Floats = __m256;

inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Floats values) { _mm256_storeu_ps(to, values); }
inline void stream(float* to, Floats values) { _mm256_stream_ps(to, values); }
inline Floats broadcast(float value) { return _mm256_set1_ps(value); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats maximum(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats minimum(Floats a, Floats b) { return _mm256_min_ps(a, b); }

inline float sum(Floats values) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

inline float largest(Floats values) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

// For b of -126 to 127.
inline Floats scale_by_power(Floats a, Floats b) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(b), _mm256_set1_epi32(127));
  return multiply(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

inline Floats zero_below(Floats a, Floats b, float limit) {
  return _mm256_and_ps(_mm256_cmp_ps(b, broadcast(limit), _CMP_GE_OQ), a);
}

inline Floats nearest(Floats a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline Floats load(const bf16* from) {
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

inline void store(bf16* to, Floats values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), words);
}

#endif

// e^x to about 2 units in the last place, 0 below -87: 2^n times e^r, |r| <= ln 2 / 2, by the Taylor polynomial of degree
// 7. Numbers below the normal ones never arise: a CPU takes a hundred times as long for them.
inline Floats exponential(Floats exponent) {
  const Floats x = minimum(maximum(exponent, broadcast(-87.0f)), broadcast(88.0f));
  const Floats n = nearest(multiply(x, broadcast(1.44269504f)));
  Floats r = multiply_add(n, broadcast(-0.693359375f), x);
  r = multiply_add(n, broadcast(2.12194440e-4f), r);
  Floats p = broadcast(1.0f / 5040);
  for (const float coefficient : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f, 1.0f}) {
    p = multiply_add(p, r, broadcast(coefficient));
  }
  return zero_below(scale_by_power(p, n), exponent, -87.0f);
}

}  // namespace blockplane
