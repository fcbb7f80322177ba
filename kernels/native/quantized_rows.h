// Rows as integers, and their product with a quantized panel as it is: of few rows it takes no longer than reading that.
#pragma once

#include <vector>

#include "quantized_panel.h"
#include "threads.h"

namespace blockplane {

#if defined(__AVX512VNNI__)

// Bits of a number's lower byte, and of its upper one.
constexpr int BYTE_BITS = 8;
// Of the registers 16 hold sums of high bytes and of low ones.
constexpr int64_t MAX_BLOCK = 2, BLOCK_VECTORS = 4;

inline Integers same(int32_t value) { return _mm512_set1_epi32(value); }
inline Integers nearest_integers(Floats x) { return _mm512_cvtps_epi32(x); }
inline Floats absolute(Floats x) { return _mm512_abs_ps(x); }
inline void store_integers(int32_t* to, Integers lanes) { _mm512_storeu_si512(to, lanes); }

// Of bytes with codes, four of each to a lane.
inline Integers add_products(Integers sums, Integers codes, Integers bytes) {
  return _mm512_dpbusd_epi32(sums, codes, bytes);
}

// Of two codes in each byte, the lower or the upper one.
inline Integers codes_at(Integers bytes, int step) {
  return _mm512_and_si512(_mm512_srli_epi32(bytes, 4 * step), _mm512_set1_epi8(15));
}

inline Floats joined(Integers high, Integers low) {
  return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, BYTE_BITS), low));
}

#else

// Two products of such a byte with a code fit into 16 bits.
constexpr int BYTE_BITS = 7;
// Of the sixteen registers eight hold sums.
constexpr int64_t MAX_BLOCK = 2, BLOCK_VECTORS = 2;

inline Integers same(int32_t value) { return _mm256_set1_epi32(value); }
inline Integers nearest_integers(Floats x) { return _mm256_cvtps_epi32(x); }
inline Floats absolute(Floats x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline void store_integers(int32_t* to, Integers lanes) { _mm256_storeu_si256(reinterpret_cast<Integers*>(to), lanes); }

inline Integers add_products(Integers sums, Integers codes, Integers bytes) {
  const Integers pairs = _mm256_maddubs_epi16(codes, bytes);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

inline Integers codes_at(Integers bytes, int step) {
  return _mm256_and_si256(_mm256_srli_epi32(bytes, 4 * step), _mm256_set1_epi8(15));
}

inline Floats joined(Integers high, Integers low) {
  return _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(high, BYTE_BITS), low));
}

#endif

// Rows as integers of two signed bytes: x = scale * (2^BYTE_BITS * high + low). A row's scale is that of its largest
// number, of which any other is off by less than 2^-16, or by 2^-14 where bytes have seven bits.
class QuantizedRows {
 public:
  QuantizedRows(const bf16* input, int64_t stride, int64_t num_rows, int64_t depth)
      : depth_(depth), scales_(num_rows), sums_(num_rows * depth / GROUP), high_(num_rows * depth), low_(num_rows * depth) {
    parallel_for(num_rows, [&](int64_t i) { quantize(input + i * stride, i); });
  }

  // sums [num_rows][PANEL], of rows from `first` on.
  template <int BITS>
  void multiply(int64_t first, int64_t num_rows, const Group<BITS>* panel, float* sums) const {
    int64_t i = 0;
    for (; i + MAX_BLOCK <= num_rows; i += MAX_BLOCK) multiply_block<BITS, MAX_BLOCK>(first + i, panel, sums + i * PANEL);
    for (; i < num_rows; i++) multiply_block<BITS, 1>(first + i, panel, sums + i * PANEL);
  }

 private:
  static constexpr int32_t HALF = 1 << (BYTE_BITS - 1);
  // Two bytes hold it, and its negative.
  static constexpr float MOST = ((HALF - 1) << BYTE_BITS) + HALF - 1;
  static constexpr float LEAST = 1e-30f;

  void quantize(const bf16* row, int64_t i) {
    Floats most = broadcast(LEAST), zeros = broadcast(0.0f);
    for (int64_t k = 0; k < depth_; k += LANES) {
      const Floats x = load(row + k);
      most = maximum(most, absolute(x));
      zeros = add(zeros, subtract(x, x));
    }
    const float largest_number = largest(most);
    // 0, or NaN of what is not finite, which the whole row then becomes.
    scales_[i] = largest_number / MOST + sum(zeros);
    const Floats factor = broadcast(MOST / largest_number);
    for (int64_t k = 0; k < depth_; k += GROUP) {
      alignas(64) int32_t integers[GROUP];
      for (int64_t j = 0; j < GROUP; j += LANES) {
        store_integers(integers + j, nearest_integers(blockplane::multiply(load(row + k + j), factor)));
      }
      int32_t sum = 0;
      for (int64_t j = 0; j < GROUP; j++) {
        const int32_t high = (integers[j] + HALF) >> BYTE_BITS;
        high_[i * depth_ + k + j] = static_cast<int8_t>(high);
        low_[i * depth_ + k + j] = static_cast<int8_t>(integers[j] - (high << BYTE_BITS));
        sum += integers[j];
      }
      sums_[(i * depth_ + k) / GROUP] = sum;
    }
  }

  int32_t sum_of(int64_t row, int64_t group) const { return sums_[row * depth_ / GROUP + group]; }

  template <int BITS, int ROWS>
  void multiply_block(int64_t first, const Group<BITS>* panel, float* sums) const {
    std::fill(sums, sums + ROWS * PANEL, 0.0f);
    for (int64_t g = 0; g < depth_ / GROUP; g++) {
      for (int64_t column = 0; column < PANEL; column += BLOCK_VECTORS * LANES) {
        multiply_group<BITS, ROWS>(first, g, panel[g], column, sums + column);
      }
    }
    for (int i = 0; i < ROWS; i++) {
      const Floats scale = broadcast(scales_[first + i]);
      for (int64_t j = 0; j < PANEL; j += LANES) {
        store(sums + i * PANEL + j, blockplane::multiply(scale, load(sums + i * PANEL + j)));
      }
    }
  }

  // Adds a group's products with some columns to `sums`, less the rows' scales.
  template <int BITS, int ROWS>
  void multiply_group(int64_t first, int64_t g, const Group<BITS>& group, int64_t column, float* sums) const {
    Integers high[ROWS][BLOCK_VECTORS], low[ROWS][BLOCK_VECTORS];
    for (int i = 0; i < ROWS; i++) {
      // Of 8 bits, a code stands for itself less 128.
      const Integers start = same(BITS == 8 ? -128 * sum_of(first + i, g) : 0);
      for (int j = 0; j < BLOCK_VECTORS; j++) high[i][j] = same(0), low[i][j] = start;
    }
    const int64_t place = first * depth_ + g * GROUP;
// As a loop its sums would not stay in registers.
#pragma GCC unroll 8
    for (int64_t line = 0; line < GROUP / STEP / STEPS_A_LINE<BITS>; line++) {
      if (column == 0) prefetch_after(group.lines[line]);
      Integers bytes[BLOCK_VECTORS];
      for (int j = 0; j < BLOCK_VECTORS; j++) bytes[j] = load_integers(group.lines[line] + STEP * (column + LANES * j));
#pragma GCC unroll 2
      for (int step = 0; step < STEPS_A_LINE<BITS>; step++) {
        Integers codes[BLOCK_VECTORS];
        for (int j = 0; j < BLOCK_VECTORS; j++) codes[j] = BITS == 8 ? bytes[j] : codes_at(bytes[j], step);
        const int64_t k = place + (line * STEPS_A_LINE<BITS> + step) * STEP;
        for (int i = 0; i < ROWS; i++) {
          const Integers upper = four(&high_[k + i * depth_]), lower = four(&low_[k + i * depth_]);
          for (int j = 0; j < BLOCK_VECTORS; j++) {
            high[i][j] = add_products(high[i][j], codes[j], upper);
            low[i][j] = add_products(low[i][j], codes[j], lower);
          }
        }
      }
    }
    for (int j = 0; j < BLOCK_VECTORS; j++) {
      const Floats scales = scales_of(group, column + LANES * j);
      for (int i = 0; i < ROWS; i++) {
        float* to = sums + i * PANEL + LANES * j;
        Floats sum = multiply_add(scales, joined(high[i][j], low[i][j]), load(to));
        if constexpr (BITS == 4) {
          const Floats row_sum = broadcast(static_cast<float>(sum_of(first + i, g)));
          sum = multiply_add(minimums_of(group, column + LANES * j), row_sum, sum);
        }
        store(to, sum);
      }
    }
  }

  static Integers four(const int8_t* from) {
    int32_t bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return same(bytes);
  }

  int64_t depth_;
  std::vector<float> scales_;
  // Of each group of a row.
  std::vector<int32_t> sums_;
  std::vector<int8_t> high_, low_;
};

}  // namespace blockplane
