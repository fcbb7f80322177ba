// Chooses tokens by their logits: the likeliest, or one drawn by inverse transform from all or from what top-k, top-p and
// min-p leave; and tells how likely tokens are. Knows neither seeds nor requests.
//
// One thread does all of a row: neither batch-mates nor the number of threads change what is chosen.
#include "ladder.h"

namespace blockplane {
namespace {

constexpr int32_t NO_TOKEN = -1;
// A lower one, too, leaves the likeliest tokens alone; from here on quotients are finite.
constexpr double LOWEST_TEMPERATURE = 1e-300;

struct Truncation {
  int64_t top_k;  // 0 = all
  double top_p, min_p;

  bool keeps_all() const { return top_k == 0 && top_p >= 1 && min_p <= 0; }
};

struct Place {
  int64_t index;
  double before;
};

// The first whose own weight and those before it exceed the target, or the last that weighs anything.
Place invert(const double* weights, int64_t count, double before, double target) {
  Place place{0, before};
  for (int64_t i = 0; i < count; i++) {
    if (!(weights[i] > 0)) continue;
    place = {i, before};
    before += weights[i];
    if (before > target) break;
  }
  return place;
}

int32_t draw_from_all(const Row& row, const Heat& heat, double noise, Room& room) {
  const double target = noise * weigh_blocks(row, heat, room.weights);
  const Place block = invert(room.weights.data(), row.num_blocks(), 0, target);
  alignas(64) float logits[BLOCK];
  alignas(64) double weights[BLOCK];
  heat.weigh_block(row.block(block.index, logits), weights);
  return static_cast<int32_t>(block.index * BLOCK + invert(weights, BLOCK, block.before, target).index);
}

// A logit that all reach that are left, and all of which top-p is a share.
float least_left(const Row& row, const Heat& heat, const Truncation& cut, double total, Room& room) {
  if (cut.top_k > 0) return reached_by(cut.top_k, room);
  double weight = cut.min_p;
  // All that weigh less are together less than what top-p leaves out.
  if (cut.top_p < 1) weight = std::max(weight, (1 - cut.top_p) * total / (2 * row.size));
  return heat.logit_of(weight);
}

int32_t draw_from_likeliest(const Row& row, const Heat& heat, const Truncation& cut, double noise, Room& room) {
  const bool shares_all = cut.top_k == 0 && cut.top_p < 1;
  double total = shares_all ? weigh_blocks(row, heat, room.weights) : 0;
  Ladder ladder(row, heat, least_left(row, heat, cut, total, room), room);
  const int64_t top_k = cut.top_k > 0 ? cut.top_k : row.size;
  // Top-p is a share of what top-k leaves.
  if (cut.top_p < 1 && !shares_all) total = ladder.walk({top_k, INFINITE, 0}).mass;
  const auto left = ladder.walk({top_k, cut.top_p < 1 ? cut.top_p * total : INFINITE, cut.min_p});
  const double above_target = std::nextafter(noise * left.mass, INFINITE);
  return ladder.walk({left.num_tokens, above_target, 0}).last_id;
}

int32_t choose(const Row& row, double temperature, double noise, const Truncation& cut, bool may_ban) {
  thread_local Room room;
  const auto [largest, is_finite] = survey(row, room.maxima);
  // A row that something is banned from counts as sound once anything is left.
  if (may_ban ? !std::isfinite(largest) : !is_finite) return NO_TOKEN;
  if (!(temperature > 0)) return static_cast<int32_t>(first_largest(row, room.maxima, largest));
  const Heat heat{largest, LOG2_E / std::max(temperature, LOWEST_TEMPERATURE)};
  return cut.keeps_all() ? draw_from_all(row, heat, noise, room) : draw_from_likeliest(row, heat, cut, noise, room);
}

void tell(const Row& row, int32_t num_likeliest, int32_t* token_ids, float* logprobs) {
  thread_local Room room;
  const auto [largest, is_finite] = survey(row, room.maxima);
  if (!is_finite) return std::fill(logprobs, logprobs + 1 + num_likeliest, NAN);
  const Heat heat{largest, LOG2_E};
  const double log_total = heat.largest + std::log(weigh_blocks(row, heat, room.weights));
  logprobs[0] = static_cast<float>(row.logits[token_ids[0]] - log_total);
  if (num_likeliest == 0) return;
  collect(row, reached_by(num_likeliest, room), INFINITE, room);
  sort(room.entries);
  for (int32_t i = 0; i < num_likeliest; i++) {
    token_ids[1 + i] = room.entries[i].id;
    logprobs[1 + i] = static_cast<float>(room.entries[i].logit - log_total);
  }
}

}  // namespace
}  // namespace blockplane

using namespace blockplane;

// Of all three: logits [num_rows][size], rows `stride` elements apart.

extern "C" void find_finite_rows(
    const float* logits, int64_t num_rows, int64_t size, int64_t stride, bool* is_finite) {
  parallel_for(num_rows, [&](int64_t i) {
    thread_local std::vector<float> maxima;
    is_finite[i] = survey({logits + i * stride, size}, maxima).is_finite;
  });
}

// A token for each row, or -1: where a logit is not finite; or, where some may be banned by -infinity, where all are.
extern "C" void sample_rows(
    const float* logits, int64_t num_rows, int64_t size, int64_t stride, const double* temperature, const double* noise,
    const int64_t* top_k, const double* top_p, const double* min_p, bool may_ban, int32_t* token_ids) {
  parallel_for(num_rows, [&](int64_t i) {
    const Truncation cut{top_k[i], top_p[i], min_p[i]};
    token_ids[i] = choose({logits + i * stride, size}, temperature[i], noise[i], cut, may_ban);
  });
}

// Log-probabilities of token_ids[i][0] and, behind it, of row i's likeliest, whose ids are written there: both
// [num_rows][width]. Of a row that is not finite all are NaN, and no ids are written.
extern "C" void tell_rows(
    const float* logits, int64_t num_rows, int64_t size, int64_t stride, const int32_t* num_likeliest, int64_t width,
    int32_t* token_ids, float* logprobs) {
  parallel_for(num_rows, [&](int64_t i) {
    tell({logits + i * stride, size}, num_likeliest[i], token_ids + i * width, logprobs + i * width);
  });
}
