// A row's tokens from the likeliest on, of which no more are put in order than are looked at. Knows no noise.
#pragma once

#include <array>

#include "logits.h"

namespace blockplane {

// Tokens stand on rungs by their weight, and each rung knows how many there are and what they weigh together: only the
// rung on which a walk ends is sorted. There are 32 to a halving of the weight; all that weigh less than 2^-64 share one.
class Ladder {
 public:
  // Where a walk ends: behind the token that makes them so many, or so heavy together, and before one that weighs less.
  struct Limits {
    int64_t num_tokens;
    double mass, own_weight;
  };

  struct End {
    int64_t num_tokens = 0;
    double mass = 0;
    int32_t last_id = -1;
  };

  // Of the tokens that reach `least`; `room` has the row's maxima.
  Ladder(const Row& row, const Heat& heat, float least, Room& room) : row_(row), heat_(heat), least_(least), room_(room) {
    alignas(64) float own[BLOCK];
    alignas(64) double weights[BLOCK];
    alignas(64) int32_t rungs[BLOCK];
    for (int64_t block = 0; block < row.num_blocks(); block++) {
      if (!(room.maxima[block] >= least)) continue;
      const float* logits = row.block(block, own);
      heat.weigh_block(logits, weights);
      // Loops of their own, for vector instructions: a branch would be foreseen as seldom as not.
      for (int32_t i = 0; i < BLOCK; i++) rungs[i] = rung_of(logits[i]);
      for (int32_t i = 0; i < BLOCK; i++) rungs[i] = logits[i] >= least ? rungs[i] : OFF + i;
      for (int64_t i = 0; i < row.count(block); i++) {
        num_tokens_[rungs[i]]++;
        mass_[rungs[i]] += weights[i];
      }
    }
  }

  // From the likeliest token on; it weighs 1, and no limit leaves it out.
  End walk(const Limits& limits) {
    const double too_light = limits.own_weight > 0 ? -std::log2(limits.own_weight) * RUNGS_A_HALVING - 1e-6 : NUM_RUNGS;
    End end;
    for (int32_t rung = 0; rung < NUM_RUNGS; rung++) {
      const int64_t num_tokens = end.num_tokens + num_tokens_[rung];
      const double mass = end.mass + mass_[rung];
      if (num_tokens >= limits.num_tokens || mass >= limits.mass || rung + 1 > too_light) {
        if (walk_rung(rung, limits, end)) return end;
      } else {
        end = {num_tokens, mass};
      }
    }
    return end;
  }

 private:
  // Off the ladder stands what does not reach `least`; neighbours apart, since a sum waits for the one before it.
  static constexpr int32_t NUM_RUNGS = 2048, OFF = NUM_RUNGS;
  static constexpr double RUNGS_A_HALVING = 32;

  int32_t rung_of(float logit) const {
    const double halvings = (heat_.largest - logit) * heat_.rate;
    // In this order, so that a NaN, too, stands somewhere.
    return static_cast<int32_t>(std::min(NUM_RUNGS - 1.0, halvings * RUNGS_A_HALVING));
  }

  // A logit of which a rung's are at most a hair larger.
  float top_of(int32_t rung) const {
    return static_cast<float>(heat_.largest - rung / (RUNGS_A_HALVING * heat_.rate));
  }

  void sort_rung(int32_t rung) {
    const float least = rung + 1 < NUM_RUNGS ? std::nextafter(top_of(rung + 1), -INFINITE) : -INFINITE;
    collect(row_, std::max(least, least_), std::nextafter(top_of(rung), INFINITE), room_);
    std::erase_if(room_.entries, [&](const Entry& entry) { return rung_of(entry.logit) != rung; });
    sort(room_.entries);
  }

  // Whether the walk ends here.
  bool walk_rung(int32_t rung, const Limits& limits, End& end) {
    if (num_tokens_[rung] == 0) return false;
    sort_rung(rung);
    for (const Entry& entry : room_.entries) {
      const double weight = heat_.weight_of(entry.logit);
      if (weight < limits.own_weight) return true;
      end = {end.num_tokens + 1, end.mass + weight, entry.id};
      if (end.num_tokens >= limits.num_tokens || end.mass >= limits.mass) return true;
    }
    return false;
  }

  const Row& row_;
  const Heat& heat_;
  const float least_;
  Room& room_;
  std::array<int32_t, NUM_RUNGS + BLOCK> num_tokens_{};
  std::array<double, NUM_RUNGS + BLOCK> mass_{};
};

}  // namespace blockplane
