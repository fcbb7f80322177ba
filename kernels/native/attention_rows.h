// The products of a decode step: some query rows with a tile of keys, and their weights with its values. In matrix tiles
// where this variant has them, else in vectors. Knows no context and no softmax.
#pragma once

#include "attention_keys.h"
#include "attention_pack.h"
#include "gemm.h"

namespace blockplane {

// Keys whose values wait in a cache for their weights.
constexpr int64_t DECODE_TILE = 64;

using DecodeTile = KeyTile<DECODE_TILE>;

inline void fetch(const bf16* from) { _mm_prefetch(reinterpret_cast<const char*>(from), _MM_HINT_T0); }

// Numbers of a cache line.
constexpr int64_t LINE = 64 / sizeof(bf16);

#if defined(__AMX_BF16__)

// Query rows of a block: the columns of a matrix tile.
constexpr int64_t ROW_BLOCK = TILE;

class DecodeRows {
 public:
  using Weight = bf16;

  DecodeRows(int64_t num_rows, int64_t head_dim) : num_rows_(num_rows), head_dim_(head_dim) {}

  int64_t num_bytes() const { return ceil_rows() * head_dim_ * sizeof(bf16); }

  // Packs `queries` [num_rows], a block's pairs along head_dim side by side.
  void take(const bf16* const* queries, void* memory) {
    queries_ = static_cast<bf16*>(memory);
    for (int64_t row = 0; row < num_rows_; row += TILE) {
      const bf16* rows[TILE];
      for (int64_t i = 0; i < TILE; i++) rows[i] = row + i < num_rows_ ? queries[row + i] : NO_NUMBERS;
      pack_columns(rows, head_dim_, queries_ + row * head_dim_, 2 * TILE);
    }
  }

  // products[num_rows][DECODE_TILE] of all rows with the tile's keys; asks memory for the next tile's.
  void multiply_keys(const DecodeTile& tile, const DecodeTile& next, float* products) const {
    alignas(64) bf16 keys[TILE * MAX_HEAD_DIM];
    configure_tiles(TILE, TILE);
    for (int64_t first = 0; first < tile.num_keys; first += TILE) {
      for (int64_t j = 0; j < TILE; j++) {
        for (int64_t d = 0; d < head_dim_; d += LINE) {
          store_words(keys + j * head_dim_ + d, load_words(tile.keys[first + j] + d));
          fetch(next.keys[first + j] + d);
        }
      }
      for (int64_t row = 0; row < num_rows_; row += TILE) multiply_block(keys, row, products + row * DECODE_TILE + first);
    }
    _tile_release();
  }

  // sums[num_rows][head_dim] = sums * shrinks + weights[num_rows][DECODE_TILE] x the tile's values.
  void add_values(
      const bf16* weights, const float* shrinks, const DecodeTile& tile, const DecodeTile& next, float* sums) const {
    for (int64_t row = 0; row < num_rows_; row++) {
      const Floats shrink = broadcast(shrinks[row]);
      float* own = sums + row * head_dim_;
      for (int64_t d = 0; d < head_dim_; d += LANES) store(own + d, multiply(load(own + d), shrink));
    }
    for (int64_t row = 0; row < num_rows_; row += TILE) {
      configure_tiles(std::min(TILE, num_rows_ - row), 1);
      for (int64_t d = 0; d < head_dim_; d += 2 * TILE) {
        add_columns(weights + row * DECODE_TILE, tile, next, sums + row * head_dim_ + d, d);
      }
      _tile_release();
    }
  }

 private:
  int64_t ceil_rows() const { return (num_rows_ + TILE - 1) / TILE * TILE; }

  void multiply_block(const bf16* keys, int64_t row, float* products) const {
    _tile_zero(0);
    for (int64_t d = 0; d < head_dim_; d += 2 * TILE) {
      _tile_loadd(4, keys + d, head_dim_ * sizeof(bf16));
      _tile_loadd(6, queries_ + row * head_dim_ + d * TILE, 4 * TILE);
      _tile_dpbf16ps(0, 4, 6);
    }
    alignas(64) float sums[TILE * TILE];
    _tile_stored(0, sums, 4 * TILE);
    Words rows[TILE];
    for (int64_t i = 0; i < TILE; i++) rows[i] = _mm512_load_si512(sums + i * TILE);
    transpose(rows);
    for (int64_t i = 0; i < std::min(TILE, num_rows_ - row); i++) _mm512_storeu_si512(products + i * DECODE_TILE, rows[i]);
  }

  // 32 columns from `column` on.
  void add_columns(const bf16* weights, const DecodeTile& tile, const DecodeTile& next, float* sums, int64_t column) const {
    const int64_t stride = head_dim_ * sizeof(float);
    alignas(64) bf16 values[2 * TILE * 2 * TILE];
    _tile_loadd(0, sums, stride);
    _tile_loadd(1, sums + TILE, stride);
    for (int64_t first = 0; first < tile.num_keys; first += 2 * TILE) {
      for (int64_t j = 0; j < 2 * TILE; j += 2) {
        const bf16 *even = tile.values[first + j] + column, *odd = tile.values[first + j + 1] + column;
        for (int64_t half = 0; half < 2; half++) {
          store_words(
              values + half * 2 * TILE * TILE + j * TILE, interleave(load(even + half * TILE), load(odd + half * TILE)));
          fetch(next.values[first + j + half] + column);
        }
      }
      _tile_loadd(4, weights + first, DECODE_TILE * sizeof(bf16));
      _tile_loadd(6, values, 4 * TILE);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, values + 2 * TILE * TILE, 4 * TILE);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + TILE, stride);
  }

  int64_t num_rows_, head_dim_;
  bf16* queries_ = nullptr;
};

#else

// Query rows, and keys and vectors of values, that are in registers at a time.
constexpr int BLOCK_ROWS = 4, BLOCK_KEYS = LANES == 16 ? 4 : 2, BLOCK_COLUMNS = LANES == 16 ? 4 : 2;

class DecodeRows {
 public:
  using Weight = float;

  DecodeRows(int64_t num_rows, int64_t head_dim) : num_rows_(num_rows), head_dim_(head_dim) {}

  int64_t num_bytes() const { return num_rows_ * head_dim_ * sizeof(float); }

  void take(const bf16* const* queries, void* memory) {
    queries_ = static_cast<float*>(memory);
    for (int64_t row = 0; row < num_rows_; row++) {
      for (int64_t d = 0; d < head_dim_; d += LANES) store(queries_ + row * head_dim_ + d, load(queries[row] + d));
    }
  }

  void multiply_keys(const DecodeTile& tile, const DecodeTile& next, float* products) const {
    for_blocks<BLOCK_ROWS>(num_rows_, [&]<int ROWS>(int64_t row) {
      for_blocks<BLOCK_KEYS>(tile.num_keys, [&]<int KEYS>(int64_t j) {
        multiply_block<ROWS, KEYS>(row, tile.keys + j, next.keys + j, products + row * DECODE_TILE + j);
      });
    });
  }

  void add_values(
      const float* weights, const float* shrinks, const DecodeTile& tile, const DecodeTile& next, float* sums) const {
    for_blocks<BLOCK_ROWS>(num_rows_, [&]<int ROWS>(int64_t row) {
      for_blocks<BLOCK_COLUMNS>(head_dim_ / LANES, [&]<int COLUMNS>(int64_t column) {
        add_columns<ROWS, COLUMNS>(
            weights + row * DECODE_TILE, shrinks + row, tile, next, sums + row * head_dim_ + column * LANES,
            column * LANES);
      });
    });
  }

 private:
  // Calls function<MAX>(first) for blocks of MAX, and once for what is left.
  template <int MAX, class Function>
  static void for_blocks(int64_t count, const Function& function, int64_t first = 0) {
    for (; first + MAX <= count; first += MAX) function.template operator()<MAX>(first);
    if constexpr (MAX > 1) {
      if (first < count) for_blocks<MAX - 1>(count, function, first);
    }
  }

  template <int ROWS, int KEYS>
  void multiply_block(int64_t row, const bf16* const* keys, const bf16* const* next, float* products) const {
    const float* queries = queries_ + row * head_dim_;
    Floats sums[ROWS][KEYS];
    for (auto& own : sums) std::fill(own, own + KEYS, broadcast(0.0f));
    for (int64_t d = 0; d < head_dim_; d += LANES) {
      Floats key[KEYS];
      for (int j = 0; j < KEYS; j++) key[j] = load(keys[j] + d);
      for (int j = 0; d % LINE == 0 && j < KEYS; j++) fetch(next[j] + d);
      for (int i = 0; i < ROWS; i++) {
        const Floats query = load(queries + i * head_dim_ + d);
        for (int j = 0; j < KEYS; j++) sums[i][j] = multiply_add(query, key[j], sums[i][j]);
      }
    }
    for (int i = 0; i < ROWS; i++) {
      for (int j = 0; j < KEYS; j++) products[i * DECODE_TILE + j] = sum(sums[i][j]);
    }
  }

  // COLUMNS vectors of columns from `d` on.
  template <int ROWS, int COLUMNS>
  void add_columns(
      const float* weights, const float* shrinks, const DecodeTile& tile, const DecodeTile& next, float* sums,
      int64_t d) const {
    Floats column[ROWS][COLUMNS];
    for (int i = 0; i < ROWS; i++) {
      const Floats shrink = broadcast(shrinks[i]);
      for (int c = 0; c < COLUMNS; c++) column[i][c] = multiply(load(sums + i * head_dim_ + c * LANES), shrink);
    }
    for (int64_t j = 0; j < tile.num_keys; j++) {
      for (int c = 0; c < COLUMNS * LANES; c += LINE) fetch(next.values[j] + d + c);
      Floats value[COLUMNS];
      for (int c = 0; c < COLUMNS; c++) value[c] = load(tile.values[j] + d + c * LANES);
      for (int i = 0; i < ROWS; i++) {
        const Floats weight = broadcast(weights[i * DECODE_TILE + j]);
        for (int c = 0; c < COLUMNS; c++) column[i][c] = multiply_add(weight, value[c], column[i][c]);
      }
    }
    for (int i = 0; i < ROWS; i++) {
      for (int c = 0; c < COLUMNS; c++) store(sums + i * head_dim_ + c * LANES, column[i][c]);
    }
  }

  int64_t num_rows_, head_dim_;
  float* queries_ = nullptr;
};

#endif

}  // namespace blockplane
