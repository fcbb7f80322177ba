// What both attentions are given, and the memory that a thread works in. Knows no order of work.
#pragma once

#include <memory>

#include "attention_keys.h"
#include "attention_softmax.h"
#include "threads.h"

namespace blockplane {

// A layer's attention over its caches.
struct Layer {
  Caches caches;
  Reach reach;
  Logits logits;
  // [num_heads], or null.
  const float* sinks;
  int64_t num_heads;

  // Query heads of a KV head, side by side.
  int64_t group() const { return num_heads / caches.num_kv_heads; }

  Softmax first_softmax(int64_t head) const { return sinks == nullptr ? Softmax() : Softmax::of_sink(sinks[head]); }
};

// Memory that grows with what is asked of it and is not cleared. Begins at a cache line.
template <class Value>
class Scratch {
 public:
  Value* get(int64_t size) {
    if (size > size_) {
      values_.reset(static_cast<Value*>(std::aligned_alloc(64, ceil_div(size * sizeof(Value), 64) * 64)));
      size_ = size;
    }
    return values_.get();
  }

 private:
  struct Free {
    void operator()(Value* values) const { std::free(values); }
  };

  int64_t size_ = 0;
  std::unique_ptr<Value[], Free> values_;
};

}  // namespace blockplane
