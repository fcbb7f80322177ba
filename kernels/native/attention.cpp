// Attention over a cache of blocks, as Python calls it; and what writes the cache. Knows no tensors.
#include "attention_decode.h"
#include "attention_prefill.h"

namespace blockplane {
namespace {

// Tokens of a task: less would cost more to hand out than to copy.
constexpr int64_t TASK_TOKENS = 16;

}  // namespace
}  // namespace blockplane

using namespace blockplane;

// key, value [num_tokens, width], their rows that far apart; caches [num_slots, width]; slot -1 = padding.
extern "C" void write_kv(
    const bf16* key, int64_t key_stride, const bf16* value, int64_t value_stride, bf16* k_cache, bf16* v_cache,
    const int64_t* slots, int64_t num_tokens, int64_t width) {
  parallel_for(ceil_div(num_tokens, TASK_TOKENS), [&](int64_t task) {
    const int64_t last = std::min(num_tokens, (task + 1) * TASK_TOKENS);
    for (int64_t token = task * TASK_TOKENS; token < last; token++) {
      if (slots[token] < 0) continue;
      std::copy_n(key + token * key_stride, width, k_cache + slots[token] * width);
      std::copy_n(value + token * value_stride, width, v_cache + slots[token] * width);
    }
  });
}

// See kernels/reference.py; of a layer: no window = a large one, no chunks and no cap = 0, no sinks = null.
extern "C" void decode_attention(
    const bf16* query, const bf16* k_cache, const bf16* v_cache, const int32_t* block_table, int64_t block_table_stride,
    const int32_t* seq_lens, bf16* output, int64_t num_seqs, int64_t num_new_tokens, int64_t num_heads,
    int64_t num_kv_heads, int64_t head_dim, int64_t block_size, float scale, int64_t sliding_window,
    int64_t attention_chunk_size, float soft_cap, const float* sinks) {
  const Layer layer{
      {k_cache, v_cache, block_size, num_kv_heads, head_dim}, {sliding_window, attention_chunk_size}, {scale, soft_cap},
      sinks, num_heads};
  const DecodeBatch batch{query, output, block_table, block_table_stride, seq_lens, num_seqs, num_new_tokens};
  Decode(layer, batch).run();
}

extern "C" void segmented_attention(
    const bf16* query, const bf16* k_cache, const bf16* v_cache, const int32_t* block_table, int64_t block_table_stride,
    const int32_t* query_start_loc, const int32_t* prior_tokens, bf16* output, int64_t num_tokens, int64_t num_seqs,
    bool reads_prior, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t block_size, float scale,
    int64_t sliding_window, int64_t attention_chunk_size, float soft_cap, const float* sinks) {
  const Layer layer{
      {k_cache, v_cache, block_size, num_kv_heads, head_dim}, {sliding_window, attention_chunk_size}, {scale, soft_cap},
      sinks, num_heads};
  const PrefillBatch batch{
      query, output, num_tokens, block_table, block_table_stride, query_start_loc, prior_tokens, num_seqs, reads_prior};
  Prefill(layer, batch).run();
}
