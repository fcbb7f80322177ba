// Attention of each row's last few tokens to its cached context, which is read once. Knows no other rows: a row's bits
// do not depend on them.
#pragma once

#include <atomic>
#include <vector>

#include "attention.h"
#include "attention_rows.h"

namespace blockplane {

// A context is split among threads, by its length alone, into pairs of parts, for each so many positions one, and parts
// of at least so many.
constexpr int64_t PAIR = 512, MAX_PAIRS = 32, SPLIT_MULTIPLE = 32;

struct DecodeBatch {
  // [num_seqs, num_new_tokens, num_heads, head_dim], as the output.
  const bf16* query;
  bf16* output;
  const int32_t* block_table;
  int64_t block_table_stride;
  // [num_seqs], 0 = padding.
  const int32_t* seq_lens;
  int64_t num_seqs, num_new_tokens;
};

// Attention of some query rows to a part of their context: what each has seen, and their weighted sums of values.
struct Partial {
  Softmax* softmaxes;
  float* sums;
};

// What a thread works in.
struct DecodeMemory {
  Scratch<const bf16*> queries;
  Scratch<char> rows;
  Scratch<float> products, shrinks;
  Scratch<DecodeRows::Weight> weights;
};

class Decode {
 public:
  Decode(const Layer& layer, const DecodeBatch& batch)
      : layer_(layer), batch_(batch), head_dim_(layer.caches.head_dim), num_rows_(batch.num_new_tokens * layer.group()) {}

  void run() {
    for (int64_t seq = 0; seq < batch_.num_seqs; seq++) plan(seq);
    static thread_local Scratch<float> memory;
    float* parts = memory.get(num_parts_ * partial_size());
    std::vector<int32_t> num_done(num_seq_heads_);
    parallel_for(static_cast<int64_t>(tasks_.size()), [&](int64_t index) {
      const Task& task = tasks_[index];
      attend(task, partial(parts, task.first_part + task.split));
      std::atomic_ref<int32_t> done(num_done[task.seq_head]);
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == task.num_splits) combine(task, parts);
    });
  }

 private:
  struct Task {
    int64_t seq, kv_head, seq_head, split, num_splits, split_size, first_part;
  };

  int64_t partial_size() const { return num_rows_ * (head_dim_ + 2); }

  Partial partial(float* parts, int64_t index) const {
    float* from = parts + index * partial_size();
    return {reinterpret_cast<Softmax*>(from + num_rows_ * head_dim_), from};
  }

  int64_t seq_len(int64_t seq) const { return batch_.seq_lens[seq]; }

  // Of a query row: all heads of a token come before the next token's.
  int64_t position(int64_t seq, int64_t row) const {
    return seq_len(seq) - batch_.num_new_tokens + row / layer_.group();
  }

  int64_t offset(int64_t seq, int64_t kv_head, int64_t row) const {
    const int64_t group = layer_.group(), token = seq * batch_.num_new_tokens + row / group;
    return (token * layer_.num_heads + kv_head * group + row % group) * head_dim_;
  }

  // Parts begin at multiples of their size: where a token's context is cut does not depend on the tokens beside it.
  void plan(int64_t seq) {
    const int64_t first = layer_.reach.first(position(seq, 0)), longest = layer_.reach.longest(seq_len(seq));
    const int64_t num_parts = 2 * std::clamp<int64_t>(ceil_div(longest, PAIR), 1, MAX_PAIRS);
    const int64_t size = std::max<int64_t>(ceil_div(longest, num_parts * SPLIT_MULTIPLE), 1) * SPLIT_MULTIPLE;
    const int64_t first_split = first / size, num_splits = std::max<int64_t>(1, ceil_div(seq_len(seq), size) - first_split);
    for (int64_t kv_head = 0; kv_head < layer_.caches.num_kv_heads; kv_head++, num_seq_heads_++) {
      for (int64_t split = 0; split < num_splits; split++) {
        tasks_.push_back({seq, kv_head, num_seq_heads_, split, num_splits, size, num_parts_});
      }
      num_parts_ += num_splits;
    }
  }

  void attend(const Task& task, const Partial& part) const {
    const int64_t seq = task.seq, end = seq_len(seq), group = layer_.group();
    for (int64_t row = 0; row < num_rows_; row++) {
      // The sink belongs to the first part.
      part.softmaxes[row] = task.split == 0 ? layer_.first_softmax(task.kv_head * group + row % group) : Softmax();
    }
    std::fill(part.sums, part.sums + num_rows_ * head_dim_, 0.0f);
    static thread_local DecodeMemory memory;
    DecodeRows rows(num_rows_, head_dim_);
    const bf16** queries = memory.queries.get(num_rows_);
    for (int64_t row = 0; row < num_rows_; row++) queries[row] = batch_.query + offset(seq, task.kv_head, row);
    rows.take(queries, memory.rows.get(rows.num_bytes()));
    const Context context{
        layer_.caches, batch_.block_table + seq * batch_.block_table_stride, task.kv_head,
        layer_.reach.first(position(seq, 0))};
    const int64_t start = (context.first / task.split_size + task.split) * task.split_size;
    const int64_t last = std::min(end, start + task.split_size);
    // Whole tiles before what is seen are left out.
    int64_t at = start + std::max<int64_t>(context.first - start, 0) / DECODE_TILE * DECODE_TILE;
    if (at >= last) return;
    for (DecodeTile tile(context, at, last); at < last; at += DECODE_TILE) {
      const DecodeTile next(context, std::min(at + DECODE_TILE, last), last);
      if (tile.num_keys != 0) attend_tile(task, rows, tile, next, part, memory);
      tile = next;
    }
  }

  void attend_tile(
      const Task& task, const DecodeRows& rows, const DecodeTile& tile, const DecodeTile& next, const Partial& part,
      DecodeMemory& memory) const {
    float *products = memory.products.get(num_rows_ * DECODE_TILE), *shrinks = memory.shrinks.get(num_rows_);
    rows.multiply_keys(tile, next, products);
    auto* weights = memory.weights.get(num_rows_ * DECODE_TILE);
    for (int64_t row = 0; row < num_rows_; row++) {
      const int64_t query = position(task.seq, row);
      const int64_t last = tile.rank(query + 1), first = std::min(last, tile.rank(layer_.reach.first(query)));
      shrinks[row] = part.softmaxes[row].fold(
          layer_.logits, products + row * DECODE_TILE, first, last, 0, DECODE_TILE, weights + row * DECODE_TILE);
    }
    rows.add_values(weights, shrinks, tile, next, part.sums);
  }

  // Whoever finishes the last part of a row's head joins all of them, in their order.
  void combine(const Task& task, float* parts) const {
    for (int64_t row = 0; row < num_rows_; row++) {
      Softmax whole;
      for (int64_t split = 0; split < task.num_splits; split++) {
        whole.top = std::max(whole.top, partial(parts, task.first_part + split).softmaxes[row].top);
      }
      for (int64_t split = 0; split < task.num_splits; split++) {
        Softmax& part = partial(parts, task.first_part + split).softmaxes[row];
        // From now on the factor of its sums.
        part.top = part.shrink_to(whole.top);
        whole.weight += part.weight * part.top;
      }
      const Floats inverse = broadcast(whole.inverse_weight());
      bf16* output = batch_.output + offset(task.seq, task.kv_head, row);
      for (int64_t d = 0; d < head_dim_; d += LANES) {
        Floats sum = broadcast(0.0f);
        for (int64_t split = 0; split < task.num_splits; split++) {
          const Partial part = partial(parts, task.first_part + split);
          sum = multiply_add(load(part.sums + row * head_dim_ + d), broadcast(part.softmaxes[row].top), sum);
        }
        store(output + d, multiply(sum, inverse));
      }
    }
  }

  const Layer& layer_;
  const DecodeBatch& batch_;
  int64_t head_dim_, num_rows_;
  std::vector<Task> tasks_;
  int64_t num_parts_ = 0, num_seq_heads_ = 0;
};

}  // namespace blockplane
