// Attention of packed segments to their prior tokens and, causally, to themselves, by products of tiles (as in Dao et al.
// 2022, arXiv 2205.14135). Knows no other segments: a token's bits do not depend on them, nor on where its segment begins.
#pragma once

#include <vector>

#include "attention.h"
#include "attention_pack.h"
#include "gemm.h"

namespace blockplane {

// Rows are the query heads of one KV head, all those of a token before the next token's. A task has the keys packed for
// so many rows, and computes so many at a time.
constexpr int64_t TASK_ROWS = 512, PRODUCT_ROWS = 128;
constexpr int64_t PREFILL_TILE = 4 * PANEL;

struct PrefillBatch {
  // [num_tokens, num_heads, head_dim], as the output.
  const bf16* query;
  bf16* output;
  int64_t num_tokens;
  const int32_t* block_table;
  int64_t block_table_stride;
  // [num_seqs + 1] and [num_seqs].
  const int32_t *query_start_loc, *prior_tokens;
  int64_t num_seqs;
  // Whether what was cached before is read.
  bool reads_prior;
};

// What a thread works in.
struct PrefillMemory {
  Scratch<bf16> queries, keys, values, weights;
  Scratch<float> products, columns, sums;
};

class Prefill {
 public:
  Prefill(const Layer& layer, const PrefillBatch& batch)
      : layer_(layer),
        batch_(batch),
        head_dim_(layer.caches.head_dim),
        num_panels_(ceil_div(head_dim_, PANEL)),
        task_tokens_(std::max<int64_t>(TASK_ROWS / layer.group(), 1)) {}

  void run() {
    clear(0, batch_.query_start_loc[0]);
    clear(batch_.query_start_loc[batch_.num_seqs], batch_.num_tokens);
    for (int64_t seq = 0; seq < batch_.num_seqs; seq++) plan(seq);
    // The longest first, so that threads end together.
    std::sort(tasks_.begin(), tasks_.end(), [](const Task& a, const Task& b) { return a.num_keys > b.num_keys; });
    parallel_for(static_cast<int64_t>(tasks_.size()), [&](int64_t index) {
      static thread_local PrefillMemory memory;
      attend(tasks_[index], memory);
    });
  }

 private:
  // `num_tokens` tokens from `token` of the batch on, the first of which stands at `position`.
  struct Task {
    int64_t seq, kv_head, token, num_tokens, position, num_keys;
  };

  void clear(int64_t first, int64_t last) const {
    const int64_t size = layer_.num_heads * head_dim_;
    std::fill(batch_.output + first * size, batch_.output + std::max(first, last) * size, 0);
  }

  // The first position that a query of a segment sees.
  int64_t first_seen(int64_t seq, int64_t position) const {
    return std::max<int64_t>(layer_.reach.first(position), batch_.reads_prior ? 0 : batch_.prior_tokens[seq]);
  }

  void plan(int64_t seq) {
    const int64_t start = batch_.query_start_loc[seq], end = batch_.query_start_loc[seq + 1];
    for (int64_t token = start; token < end; token += task_tokens_) {
      const int64_t position = batch_.prior_tokens[seq] + token - start, num_tokens = std::min(task_tokens_, end - token);
      const int64_t num_keys = position + num_tokens - first_seen(seq, position);
      for (int64_t kv_head = 0; kv_head < layer_.caches.num_kv_heads; kv_head++) {
        tasks_.push_back({seq, kv_head, token, num_tokens, position, num_keys});
      }
    }
  }

  int64_t offset(const Task& task, int64_t row) const {
    const int64_t group = layer_.group(), token = task.token + row / group;
    return (token * layer_.num_heads + task.kv_head * group + row % group) * head_dim_;
  }

  void attend(const Task& task, PrefillMemory& memory) const {
    const int64_t group = layer_.group(), num_rows = task.num_tokens * group, num_columns = num_panels_ * PANEL;
    bf16* queries = memory.queries.get(num_rows * head_dim_);
    float* sums = memory.sums.get(num_rows * num_columns);
    std::fill(sums, sums + num_rows * num_columns, 0.0f);
    std::vector<Softmax> softmaxes(num_rows);
    for (int64_t row = 0; row < num_rows; row++) {
      std::copy_n(batch_.query + offset(task, row), head_dim_, queries + row * head_dim_);
      softmaxes[row] = layer_.first_softmax(task.kv_head * group + row % group);
    }
    const Context context{
        layer_.caches, batch_.block_table + task.seq * batch_.block_table_stride, task.kv_head,
        first_seen(task.seq, task.position)};
    const int64_t end = task.position + task.num_tokens;
    // Tiles begin at multiples of their size, so that no token's result depends on the task that it is in.
    for (int64_t start = context.first / PREFILL_TILE * PREFILL_TILE; start < end; start += PREFILL_TILE) {
      const KeyTile<PREFILL_TILE> tile(context, start, end);
      if (tile.num_keys == 0) continue;
      pack(tile, memory);
      for (int64_t row = 0; row < num_rows; row += PRODUCT_ROWS) {
        const int64_t rows = std::min(PRODUCT_ROWS, num_rows - row);
        attend_rows(task, tile, row, rows, softmaxes.data() + row, sums + row * num_columns, memory);
      }
    }
    for (int64_t row = 0; row < num_rows; row++) {
      const Floats inverse = broadcast(softmaxes[row].inverse_weight());
      bf16* output = batch_.output + offset(task, row);
      for (int64_t d = 0; d < head_dim_; d += LANES) {
        store(output + d, multiply(load(sums + row * num_columns + d), inverse));
      }
    }
  }

  void pack(const KeyTile<PREFILL_TILE>& tile, PrefillMemory& memory) const {
    bf16* keys = memory.keys.get(PREFILL_TILE * head_dim_);
    bf16* values = memory.values.get(PREFILL_TILE * num_panels_ * PANEL);
    for (int64_t first = 0; first < tile.num_keys; first += PANEL) {
      pack_keys(tile.keys + first, tile.num_keys - first, head_dim_, keys + first * head_dim_);
      for (int64_t panel = 0; panel < num_panels_; panel++) {
        pack_values(
            tile.values + first, tile.num_keys - first, head_dim_, panel * PANEL,
            values + (panel * PREFILL_TILE + first) * PANEL);
      }
    }
  }

  // `rows` rows from `first_row` of the task on, whose softmaxes and sums these are, over one tile of packed keys.
  void attend_rows(
      const Task& task, const KeyTile<PREFILL_TILE>& tile, int64_t first_row, int64_t rows, Softmax* softmaxes, float* sums,
      PrefillMemory& memory) const {
    const int64_t group = layer_.group(), num_columns = num_panels_ * PANEL;
    const auto position = [&](int64_t row) { return task.position + (first_row + row) / group; };
    const auto first_key = [&](int64_t row) { return tile.rank(first_seen(task.seq, position(row))); };
    const int64_t begin = first_key(0) / PANEL * PANEL, end = ceil_div(tile.rank(position(rows - 1) + 1), PANEL) * PANEL;
    if (begin >= end) return;
    const bf16* queries = memory.queries.get(0) + first_row * head_dim_;
    const bf16 *keys = memory.keys.get(0), *values = memory.values.get(0);
    float* products = memory.products.get(PRODUCT_ROWS * PREFILL_TILE);
    for (int64_t key = begin; key < end; key += PANEL) {
      multiply(queries, head_dim_, keys + key * head_dim_, head_dim_, products + key, PREFILL_TILE, rows);
    }
    bf16* weights = memory.weights.get(PRODUCT_ROWS * PREFILL_TILE);
    float shrinks[PRODUCT_ROWS];
    for (int64_t row = 0; row < rows; row++) {
      const int64_t last = std::max(begin, tile.rank(position(row) + 1)), first = std::min(last, first_key(row));
      shrinks[row] = softmaxes[row].fold(
          layer_.logits, products + row * PREFILL_TILE, first, last, begin, end, weights + row * PREFILL_TILE);
    }
    float* columns = memory.columns.get(PRODUCT_ROWS * PANEL);
    for (int64_t panel = 0; panel < num_panels_; panel++) {
      const bf16* packed = values + (panel * PREFILL_TILE + begin) * PANEL;
      multiply(weights + begin, PREFILL_TILE, packed, end - begin, columns, PANEL, rows);
      for (int64_t row = 0; row < rows; row++) {
        const Floats shrink = broadcast(shrinks[row]);
        float* to = sums + row * num_columns + panel * PANEL;
        for (int64_t d = 0; d < PANEL; d += LANES) {
          store(to + d, multiply_add(load(to + d), shrink, load(columns + row * PANEL + d)));
        }
      }
    }
  }

  const Layer& layer_;
  const PrefillBatch& batch_;
  int64_t head_dim_, num_panels_, task_tokens_;
  std::vector<Task> tasks_;
};

}  // namespace blockplane
