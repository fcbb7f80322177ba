// See threads.h. Between two kernels of a forward a thread spins, since waking one takes longer than many a kernel; after
// SPIN_TIME without work it sleeps, and leaves its core to the engine.
#include "threads.h"

#include <immintrin.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace blockplane {
namespace {

constexpr auto SPIN_TIME = std::chrono::microseconds(60);
constexpr int PAUSES_A_LOOK = 32;

class Pool {
 public:
  explicit Pool(int num_threads) {
    for (int i = 1; i < num_threads; i++) threads_.emplace_back([this] { work(); });
  }

  ~Pool() {
    is_ending_ = true;
    announce();
    for (auto& thread : threads_) thread.join();
  }

  void run(int64_t count, Body body, const void* context) {
    count_ = count, body_ = body, context_ = context;
    next_ = 0;
    is_open_ = true;
    announce();
    take_part();
    is_open_ = false;
    // Who entered before may still compute, or look.
    while (num_inside_ != 0) _mm_pause();
  }

 private:
  void announce() {
    tickets_++;
    tickets_.notify_all();
  }

  void take_part() {
    for (int64_t index; (index = next_++) < count_;) body_(context_, index);
  }

  void work() {
    for (uint32_t seen = 0; !is_ending_;) {
      seen = next_ticket(seen);
      num_inside_++;
      if (is_open_) take_part();
      num_inside_--;
    }
  }

  uint32_t next_ticket(uint32_t seen) {
    const auto until = std::chrono::steady_clock::now() + SPIN_TIME;
    while (std::chrono::steady_clock::now() < until) {
      for (int i = 0; i < PAUSES_A_LOOK; i++) {
        if (const uint32_t ticket = tickets_; ticket != seen) return ticket;
        _mm_pause();
      }
    }
    tickets_.wait(seen);
    return tickets_;
  }

  // The job is written by `run` alone, while nobody is inside.
  int64_t count_ = 0;
  Body body_ = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> tickets_{0};
  std::atomic<bool> is_open_{false}, is_ending_{false};
  alignas(64) std::atomic<int> num_inside_{0};
  std::vector<std::thread> threads_;
};

std::mutex mutex;
// Changed and used by who holds the mutex. Never destroyed: at the process's end its threads may be anywhere.
Pool* pool = nullptr;

}  // namespace

void run_parallel(int64_t count, Body body, const void* context) {
  if (count > 1 && mutex.try_lock()) {
    const std::lock_guard lock(mutex, std::adopt_lock);
    if (pool != nullptr) return pool->run(count, body, context);
  }
  for (int64_t index = 0; index < count; index++) body(context, index);
}

}  // namespace blockplane

// Kernels run on so many threads from now on, the caller's among them; before the first call on one.
extern "C" void set_num_threads(int num_threads) {
  const std::lock_guard lock(blockplane::mutex);
  delete blockplane::pool;
  blockplane::pool = num_threads > 1 ? new blockplane::Pool(num_threads) : nullptr;
}
