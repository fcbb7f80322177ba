// One row of logits: its largest, how much its tokens weigh, and its likeliest in order. Chooses nothing.
//
// Sums run in float64 in an order that the row alone decides. A first pass finds the largest logit of each block of ids;
// what follows looks only at the blocks in which it finds something.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "bf16.h"
#include "threads.h"

namespace blockplane {

constexpr int64_t BLOCK = 64;
constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr double LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;

// -- float64 in vectors -------------------------------------------------------------------------------------------------

constexpr int64_t WIDTH = LANES / 2;
using Doubles = double __attribute__((vector_size(WIDTH * sizeof(double))));
using Longs = int64_t __attribute__((vector_size(WIDTH * sizeof(int64_t))));
using Singles = float __attribute__((vector_size(WIDTH * sizeof(float))));

template <class Vector, class Element>
inline Vector load_as(const Element* from) {
  Vector values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

inline void store(double* to, Doubles values) { std::memcpy(to, &values, sizeof values); }

inline double sum(Doubles values) {
  double total = 0;
  for (int64_t i = 0; i < WIDTH; i++) total += values[i];
  return total;
}

inline Doubles widen(Singles values) {
#if defined(__AVX512F__)
  return _mm512_cvtps_pd(values);
#else
  return _mm256_cvtps_pd(values);
#endif
}

constexpr int DEGREE = 12;

// Of the Taylor polynomial of 2^x.
struct Coefficients {
  double of[DEGREE + 1] = {1};
  constexpr Coefficients() {
    for (int k = 1; k <= DEGREE; k++) of[k] = of[k - 1] * LN_2 / k;
  }
};

// 2^x to about a unit in the last place, for x <= 0; 0 below -1022.
inline Doubles power_of_two(Doubles x) {
  constexpr Coefficients coefficients;
  // Added to a number, it leaves the nearest whole one in the lowest bits.
  constexpr double ROUND = 0x1.8p52;
  const Doubles rounded = x + ROUND, rest = x - (rounded - ROUND);
  Doubles power = Doubles{} + coefficients.of[DEGREE];
  for (int k = DEGREE - 1; k >= 0; k--) power = power * rest + coefficients.of[k];
  const Doubles scale = (Doubles)(((Longs)rounded + 1023) << 52);
  return x < -1022.0 ? Doubles{} : power * scale;
}

// -- a row --------------------------------------------------------------------------------------------------------------

struct Row {
  const float* logits;
  int64_t size;

  int64_t num_blocks() const { return ceil_div(size, BLOCK); }
  int64_t count(int64_t block) const { return std::min(BLOCK, size - block * BLOCK); }

  // BLOCK logits; those of the last block are written into `room`, and what is never chosen behind them.
  const float* block(int64_t index, float* room) const {
    const float* own = logits + index * BLOCK;
    if (count(index) == BLOCK) return own;
    std::fill(std::copy(own, own + count(index), room), room + BLOCK, -INFINITE);
    return room;
  }
};

struct Entry {
  float logit;
  int32_t id;
};

// What a thread works in; it grows to what the largest row needs, and stays.
struct Room {
  std::vector<float> maxima, best_maxima;
  std::vector<double> weights;
  std::vector<Entry> entries;
};

struct Survey {
  float largest;
  bool is_finite;
};

// The largest logit of all and, in `maxima`, of each block: of a row with a NaN any number.
inline Survey survey(const Row& row, std::vector<float>& maxima) {
  constexpr int64_t VECTORS = BLOCK / LANES;
  alignas(64) float room[BLOCK];
  maxima.resize(row.num_blocks());
  // A number times zero is zero, and nothing else is.
  Floats zeros[VECTORS];
  for (Floats& zero : zeros) zero = broadcast(0.0f);
  float most_of_all = -INFINITE;
  const int64_t num_whole = row.size / BLOCK;
  for (int64_t block = 0; block < row.num_blocks(); block++) {
    const float* logits = row.block(block, room);
    Floats most = load(logits);
    for (int64_t i = 0; i < VECTORS; i++) {
      const Floats values = load(logits + i * LANES);
      most = maximum(most, values);
      if (block < num_whole) zeros[i] = multiply_add(values, broadcast(0.0f), zeros[i]);
    }
    maxima[block] = std::max(-INFINITE, largest(most));
    most_of_all = std::max(most_of_all, maxima[block]);
  }
  bool is_finite = true;
  for (const Floats& zero : zeros) is_finite &= sum(zero) == 0;
  for (int64_t id = num_whole * BLOCK; id < row.size; id++) is_finite &= std::isfinite(row.logits[id]);
  return {most_of_all, is_finite};
}

inline int64_t first_largest(const Row& row, const std::vector<float>& maxima, float largest) {
  alignas(64) float room[BLOCK];
  const int64_t block = std::find(maxima.begin(), maxima.end(), largest) - maxima.begin();
  const float* logits = row.block(block, room);
  return block * BLOCK + (std::find(logits, logits + BLOCK, largest) - logits);
}

// -- weights ------------------------------------------------------------------------------------------------------------

// What weighs a token: its probability as a share of the likeliest one's, 2^((logit - largest) * rate).
struct Heat {
  double largest, rate;

  Doubles weigh(Singles logits) const { return power_of_two((widen(logits) - largest) * rate); }

  void weigh_block(const float* logits, double* weights) const {
    for (int64_t i = 0; i < BLOCK; i += WIDTH) store(weights + i, weigh(load_as<Singles>(logits + i)));
  }

  double weight_of(float logit) const { return weigh(Singles{} + logit)[0]; }

  // A logit below which all weigh less, by a hair.
  float logit_of(double weight) const {
    return std::nextafter(static_cast<float>(largest + (std::log2(weight) - 1e-9) / rate), -INFINITE);
  }
};

// The weight of each block and, returned, of all.
inline double weigh_blocks(const Row& row, const Heat& heat, std::vector<double>& weights) {
  alignas(64) float room[BLOCK];
  weights.resize(row.num_blocks());
  double total = 0;
  for (int64_t block = 0; block < row.num_blocks(); block++) {
    const float* logits = row.block(block, room);
    Doubles own{};
    for (int64_t i = 0; i < BLOCK; i += WIDTH) own += heat.weigh(load_as<Singles>(logits + i));
    total += weights[block] = sum(own);
  }
  return total;
}

// -- the likeliest ------------------------------------------------------------------------------------------------------

// A logit that the k likeliest reach, and few others.
inline float reached_by(int64_t k, Room& room) {
  if (k > static_cast<int64_t>(room.maxima.size())) return -INFINITE;
  room.best_maxima = room.maxima;
  const auto kth = room.best_maxima.begin() + k - 1;
  std::nth_element(room.best_maxima.begin(), kth, room.best_maxima.end(), std::greater<>());
  return *kth;
}

// Bit i: whether value i lies between the two, or is one of them.
inline uint32_t lying_between(Floats values, float least, float most) {
#if defined(__AVX512F__)
  const __mmask16 reach = _mm512_cmp_ps_mask(values, broadcast(least), _CMP_GE_OQ);
  return _mm512_mask_cmp_ps_mask(reach, values, broadcast(most), _CMP_LE_OQ);
#else
  const Floats reach = _mm256_cmp_ps(values, broadcast(least), _CMP_GE_OQ);
  return _mm256_movemask_ps(_mm256_and_ps(reach, _mm256_cmp_ps(values, broadcast(most), _CMP_LE_OQ)));
#endif
}

// The entries between two logits, these included, by their ids.
inline void collect(const Row& row, float least, float most, Room& room) {
  alignas(64) float own[BLOCK];
  room.entries.clear();
  for (int64_t block = 0; block < row.num_blocks(); block++) {
    if (!(room.maxima[block] >= least)) continue;
    const float* logits = row.block(block, own);
    for (int64_t first = 0; first < row.count(block); first += LANES) {
      for (uint32_t found = lying_between(load(logits + first), least, most); found; found &= found - 1) {
        const int64_t i = first + std::countr_zero(found);
        room.entries.push_back({logits[i], static_cast<int32_t>(block * BLOCK + i)});
      }
    }
  }
}

// Likeliest first, and the lower id first among equals.
inline void sort(std::vector<Entry>& entries) {
  std::sort(entries.begin(), entries.end(), [](const Entry& one, const Entry& other) {
    return one.logit != other.logit ? one.logit > other.logit : one.id < other.id;
  });
}

}  // namespace blockplane
