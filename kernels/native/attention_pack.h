// Keys and values where they lie in a cache, brought into the panels of gemm.h. Knows no attention.
#pragma once

#include "attention_keys.h"
#include "gemm.h"

namespace blockplane {

#if defined(__AVX512F__)

using Words = __m512i;

inline Words load_words(const bf16* from) { return _mm512_loadu_si512(from); }
inline void store_words(bf16* to, Words words) { _mm512_storeu_si512(to, words); }

// Of two vectors of LANES bf16, as floats: pairs of an even and an odd one.
inline Words interleave(Floats even, Floats odd) {
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd));
}

inline void transpose(Words (&rows)[LANES]) {
  Words a[LANES];
  for (int i = 0; i < LANES; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  Words b[LANES];
  for (int i = 0; i < LANES; i += 4) {
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
  }
  // b[4 i + j] holds in its quarters columns j, j + 4, j + 8, j + 12 of rows 4 i to 4 i + 3.
  for (int j = 0; j < 4; j++) {
    const Words low = _mm512_shuffle_i32x4(b[j], b[j + 4], 0x88), low_odd = _mm512_shuffle_i32x4(b[j], b[j + 4], 0xdd);
    const Words high = _mm512_shuffle_i32x4(b[j + 8], b[j + 12], 0x88);
    const Words high_odd = _mm512_shuffle_i32x4(b[j + 8], b[j + 12], 0xdd);
    rows[j] = _mm512_shuffle_i32x4(low, high, 0x88);
    rows[j + 8] = _mm512_shuffle_i32x4(low, high, 0xdd);
    rows[j + 4] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
    rows[j + 12] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
  }
}

#else

using Words = __m256i;

inline Words load_words(const bf16* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline void store_words(bf16* to, Words words) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words); }

inline Words interleave(Floats even, Floats odd) {
  return _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(even), 16), _mm256_castps_si256(odd));
}

inline void transpose(Words (&rows)[LANES]) {
  Words a[LANES];
  for (int i = 0; i < LANES; i += 2) {
    a[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  Words b[LANES];
  for (int i = 0; i < LANES; i += 4) {
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = _mm256_unpacklo_epi64(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = _mm256_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
  }
  // b[4 i + j] holds in its halves columns j and j + 4 of rows 4 i to 4 i + 3.
  for (int j = 0; j < 4; j++) {
    rows[j] = _mm256_permute2x128_si256(b[j], b[j + 4], 0x20);
    rows[j + 4] = _mm256_permute2x128_si256(b[j], b[j + 4], 0x31);
  }
}

#endif

// LANES rows [head_dim] as columns: their pairs along head_dim side by side, `stride` numbers between two pairs of a row.
inline void pack_columns(const bf16* const* rows, int64_t head_dim, bf16* to, int64_t stride) {
  for (int64_t d = 0; d < head_dim; d += 2 * LANES) {
    Words words[LANES];
    for (int i = 0; i < LANES; i++) words[i] = load_words(rows[i] + d);
    transpose(words);
    for (int i = 0; i < LANES; i++) store_words(to + (d / 2 + i) * stride, words[i]);
  }
}

// The first PANEL of `num_keys` keys as a panel's columns, whose depth is head_dim; zeros where there are fewer.
inline void pack_keys(const bf16* const* keys, int64_t num_keys, int64_t head_dim, bf16* panel) {
  for (int64_t first = 0; first < PANEL; first += LANES) {
    const bf16* rows[LANES];
    for (int i = 0; i < LANES; i++) rows[i] = first + i < num_keys ? keys[first + i] : NO_NUMBERS;
    pack_columns(rows, head_dim, panel + 2 * first, 2 * PANEL);
  }
}

// PANEL numbers from `column` on of the first PANEL of `num_keys` values, as PANEL of the depth of a panel; zeros where
// there are fewer keys or numbers.
inline void pack_values(const bf16* const* values, int64_t num_keys, int64_t head_dim, int64_t column, bf16* panel) {
  const int64_t num_columns = std::min(PANEL, head_dim - column);
  for (int64_t i = 0; i < PANEL; i += 2) {
    const bf16* even = i < num_keys ? values[i] : NO_NUMBERS;
    const bf16* odd = i + 1 < num_keys ? values[i + 1] : NO_NUMBERS;
    bf16* to = panel + i * PANEL;
    for (int64_t j = 0; j < num_columns; j += LANES) {
      store_words(to + 2 * j, interleave(load(even + column + j), load(odd + column + j)));
    }
    std::fill(to + 2 * num_columns, to + 2 * PANEL, 0);
  }
}

}  // namespace blockplane
