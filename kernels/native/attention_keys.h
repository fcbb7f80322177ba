// Which keys of a row's context a query sees, and where they lie in a cache of blocks. Knows no arithmetic of attention.
#pragma once

#include <algorithm>
#include <cstdint>

#include "bf16.h"

namespace blockplane {

constexpr int64_t MAX_HEAD_DIM = 512;

// Stands for a key or value that is not to be read.
inline const bf16 NO_NUMBERS[MAX_HEAD_DIM] = {};

// A layer's limit: of a window of `window` keys, the query's own among them, or of chunks of `chunk_size`, 0 = none.
struct Reach {
  int64_t window, chunk_size;

  // The first position that a query sees.
  int64_t first(int64_t position) const {
    if (chunk_size != 0) return std::max<int64_t>(position, 0) / chunk_size * chunk_size;
    return std::max<int64_t>(position - window + 1, 0);
  }

  // At most how many keys a query of a row of `seq_len` sees.
  int64_t longest(int64_t seq_len) const { return std::min(seq_len, chunk_size != 0 ? chunk_size : window); }
};

// Keys and values [num_blocks, block_size, num_kv_heads, head_dim].
struct Caches {
  const bf16 *keys, *values;
  int64_t block_size, num_kv_heads, head_dim;
};

// One row's context, in the keys of one head: `blocks` [width], -1 = skip; positions before `first` are not to be read.
struct Context {
  const Caches& caches;
  const int32_t* blocks;
  int64_t kv_head, first;
};

// What the cache holds of SIZE consecutive positions, without those of skipped blocks: the keys that a query sees are
// side by side. Positions before the context's first keep their places, so that a place depends on the position alone.
template <int64_t SIZE>
class KeyTile {
 public:
  const bf16 *keys[SIZE], *values[SIZE];
  int64_t num_keys = 0;

  KeyTile(const Context& context, int64_t start, int64_t end) : start_(start) {
    const int64_t last = std::min(end, start + SIZE);
    int64_t position = start;
    for (; position < std::min(context.first, last); position++) put(position, NO_NUMBERS, NO_NUMBERS);
    while (position < last) position = put_block(context, position, last);
    std::fill(keys + num_keys, keys + SIZE, NO_NUMBERS);
    std::fill(values + num_keys, values + SIZE, NO_NUMBERS);
    std::fill(ranks_ + (last - start), ranks_ + SIZE + 1, static_cast<int32_t>(num_keys));
  }

  // How many of the keys stand before `position`, which may lie outside.
  int64_t rank(int64_t position) const { return ranks_[std::clamp<int64_t>(position - start_, 0, SIZE)]; }

 private:
  void put(int64_t position, const bf16* key, const bf16* value) {
    ranks_[position - start_] = static_cast<int32_t>(num_keys);
    keys[num_keys] = key, values[num_keys] = value;
    num_keys++;
  }

  // The positions of one block, up to `last`; the position that follows.
  int64_t put_block(const Context& context, int64_t position, int64_t last) {
    const Caches& caches = context.caches;
    const int64_t index = position / caches.block_size, block = context.blocks[index];
    last = std::min(last, (index + 1) * caches.block_size);
    const int64_t stride = caches.num_kv_heads * caches.head_dim;
    // Of the block's slots those from this position's on.
    int64_t offset = (block * caches.block_size + position % caches.block_size) * stride + context.kv_head * caches.head_dim;
    for (; position < last; position++, offset += stride) {
      if (block >= 0) {
        put(position, caches.keys + offset, caches.values + offset);
      } else {
        ranks_[position - start_] = static_cast<int32_t>(num_keys);
      }
    }
    return position;
  }

  int64_t start_;
  int32_t ranks_[SIZE + 1];
};

}  // namespace blockplane
