// The product of some rows with one panel of a packed matrix, in the best instructions that this variant is built for.
// Knows no threads and no layer.
//
// A panel is PANEL columns of a [depth, columns] matrix, packed as bf16 [depth / 2][PANEL][2]: a pair of depth for each
// column side by side, as AVX512-BF16 and AMX take them; depth is a multiple of DEPTH_MULTIPLE.
#pragma once

#include <algorithm>

#include "bf16.h"

namespace blockplane {

constexpr int64_t PANEL = 64;
constexpr int64_t DEPTH_MULTIPLE = 32;

#if defined(__AVX512BF16__)

// Rows of a register block: 24 sums, 4 vectors of the panel, one pair of a row.
constexpr int64_t MAX_BLOCK_ROWS = 6;

template <int ROWS>
void multiply_block(const bf16* a, int64_t a_stride, const bf16* panel, int64_t depth, float* c, int64_t c_stride) {
  constexpr int COLUMNS = PANEL / LANES;
  __m512 sums[ROWS][COLUMNS] = {};
  for (int64_t k = 0; k < depth; k += 2, panel += 2 * PANEL) {
    __m512bh columns[COLUMNS];
    for (int j = 0; j < COLUMNS; j++) columns[j] = (__m512bh)_mm512_loadu_si512(panel + 2 * LANES * j);
    for (int i = 0; i < ROWS; i++) {
      int32_t pair;
      std::memcpy(&pair, a + i * a_stride + k, sizeof pair);
      const __m512bh row = (__m512bh)_mm512_set1_epi32(pair);
      for (int j = 0; j < COLUMNS; j++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], row, columns[j]);
    }
  }
  for (int i = 0; i < ROWS; i++) {
    for (int j = 0; j < COLUMNS; j++) store(c + i * c_stride + LANES * j, sums[i][j]);
  }
}

#else

constexpr int64_t MAX_BLOCK_ROWS = 3;

// Half a panel at a time: of the sixteen registers twelve hold sums.
template <int ROWS>
void multiply_block(const bf16* a, int64_t a_stride, const bf16* panel, int64_t depth, float* c, int64_t c_stride) {
  constexpr int COLUMNS = PANEL / 2 / LANES;
  for (int half = 0; half < 2; half++) {
    const bf16* from = panel + half * PANEL;
    Floats sums[ROWS][COLUMNS];
    for (auto& row : sums) std::fill(row, row + COLUMNS, broadcast(0.0f));
    for (int64_t k = 0; k < depth; k += 2, from += 2 * PANEL) {
      for (int j = 0; j < COLUMNS; j++) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 2 * LANES * j));
        const Floats first = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
        const Floats second = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000)));
        for (int i = 0; i < ROWS; i++) {
          const bf16* pair = a + i * a_stride + k;
          sums[i][j] = multiply_add(broadcast(to_float(pair[0])), first, sums[i][j]);
          sums[i][j] = multiply_add(broadcast(to_float(pair[1])), second, sums[i][j]);
        }
      }
    }
    for (int i = 0; i < ROWS; i++) {
      for (int j = 0; j < COLUMNS; j++) store(c + i * c_stride + half * PANEL / 2 + LANES * j, sums[i][j]);
    }
  }
}

#endif

template <int ROWS>
void multiply_rest(
    const bf16* a, int64_t a_stride, const bf16* panel, int64_t depth, float* c, int64_t c_stride, int64_t rows) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return multiply_block<ROWS>(a, a_stride, panel, depth, c, c_stride);
    multiply_rest<ROWS - 1>(a, a_stride, panel, depth, c, c_stride, rows);
  }
}

inline void multiply_in_vectors(
    const bf16* a, int64_t a_stride, const bf16* panel, int64_t depth, float* c, int64_t c_stride, int64_t rows) {
  int64_t i = 0;
  for (; i + MAX_BLOCK_ROWS <= rows; i += MAX_BLOCK_ROWS) {
    multiply_block<MAX_BLOCK_ROWS>(a + i * a_stride, a_stride, panel, depth, c + i * c_stride, c_stride);
  }
  multiply_rest<MAX_BLOCK_ROWS - 1>(a + i * a_stride, a_stride, panel, depth, c + i * c_stride, c_stride, rows - i);
}

#if defined(__AMX_BF16__)

// Below, most of a tile would be empty, and vectors are as fast as memory.
constexpr int64_t MIN_TILE_ROWS = 1;
constexpr int64_t TILE = 16;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 sum, 4 and 5 are of the rows, 6 and 7 of the panel.
inline void configure_tiles(int64_t upper, int64_t lower) {
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = 64;
  config.rows[0] = config.rows[1] = config.rows[4] = static_cast<uint8_t>(upper);
  config.rows[2] = config.rows[3] = config.rows[5] = static_cast<uint8_t>(std::max<int64_t>(lower, 1));
  config.rows[6] = config.rows[7] = TILE;
  // GCC 12 takes the instruction to read eight bytes of the configuration, and may leave out what sets the others.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// 32 columns of up to 32 rows; LOWER: whether there are more than 16; FETCHES: whether the same columns of the next panel,
// which lies behind this one, are brought near meanwhile.
template <bool LOWER, bool FETCHES>
void multiply_tiles(const bf16* a, int64_t a_stride, const bf16* panel, int64_t depth, float* c, int64_t c_stride) {
  constexpr int64_t PAIR_BYTES = 2 * PANEL * sizeof(bf16);
  const int64_t a_bytes = a_stride * sizeof(bf16), c_bytes = c_stride * sizeof(float);
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (LOWER) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < depth; k += 2 * TILE) {
    const bf16* columns = panel + k * PANEL;
    if constexpr (FETCHES) {
      const bf16* next = columns + depth * PANEL;
      for (int64_t i = 0; i < TILE; i++, next += 2 * PANEL) {
        _mm_prefetch(next, _MM_HINT_T1);
        _mm_prefetch(next + 2 * TILE, _MM_HINT_T1);
      }
    }
    _tile_loadd(4, a + k, a_bytes);
    _tile_loadd(6, columns, PAIR_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, columns + 2 * TILE, PAIR_BYTES);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (LOWER) {
      _tile_loadd(5, a + TILE * a_stride + k, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + TILE, c_bytes);
  if constexpr (LOWER) {
    _tile_stored(2, c + TILE * c_stride, c_bytes);
    _tile_stored(3, c + TILE * c_stride + TILE, c_bytes);
  }
}

inline void multiply_in_tiles(
    const bf16* a, int64_t a_stride, const bf16* panel, int64_t depth, float* c, int64_t c_stride, int64_t rows) {
  const int64_t whole = rows / (2 * TILE) * (2 * TILE), rest = rows - whole;
  // Half a panel stays in the first cache while the rows pass.
  const auto halves = [&](int64_t first, int64_t last, auto&& multiply, auto&& multiply_first) {
    for (int64_t column = 0; column < PANEL; column += 2 * TILE) {
      for (int64_t i = first; i < last; i += 2 * TILE) {
        (i == 0 ? multiply_first : multiply)(
            a + i * a_stride, a_stride, panel + 2 * column, depth, c + i * c_stride + column, c_stride);
      }
    }
  };
  if (whole) {
    configure_tiles(TILE, TILE);
    halves(0, whole, multiply_tiles<true, false>, multiply_tiles<true, true>);
  }
  if (rest) {
    configure_tiles(std::min(rest, TILE), rest - TILE);
    if (rest > TILE) {
      halves(whole, rows, multiply_tiles<true, false>, multiply_tiles<true, true>);
    } else {
      halves(whole, rows, multiply_tiles<false, false>, multiply_tiles<false, true>);
    }
  }
  _tile_release();
}

#endif

// c[rows][PANEL] = a[rows][depth] x panel, in float32; strides in elements.
inline void multiply(
    const bf16* a, int64_t a_stride, const bf16* panel, int64_t depth, float* c, int64_t c_stride, int64_t rows) {
#if defined(__AMX_BF16__)
  if (rows >= MIN_TILE_ROWS) return multiply_in_tiles(a, a_stride, panel, depth, c, c_stride, rows);
#endif
  multiply_in_vectors(a, a_stride, panel, depth, c, c_stride, rows);
}

}  // namespace blockplane
