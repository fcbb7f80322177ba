// Threads that share the work of one kernel after another. Knows no kernel.
#pragma once

#include <cstdint>
#include <type_traits>

namespace blockplane {

using Body = void (*)(const void* context, int64_t index);

// Calls body(context, i) once for each i in [0, count), on all threads of the pool and the caller's; returns when all
// have returned. Indices are handed out one by one in ascending order, so that a thread that loses its core holds up one
// of them. Called while the pool is at work for another thread, it does all the work itself.
void run_parallel(int64_t count, Body body, const void* context);

template <class Function>
void parallel_for(int64_t count, const Function& function) {
  run_parallel(
      count, [](const void* context, int64_t index) { (*static_cast<const Function*>(context))(index); }, &function);
}

inline int64_t ceil_div(int64_t dividend, int64_t divisor) { return (dividend + divisor - 1) / divisor; }

}  // namespace blockplane
