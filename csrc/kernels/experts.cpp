// What mixtures of experts have besides products: choosing experts, and adding up what they say.
#include <cmath>

#include "map.h"
#include "table.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Scores of `size` experts.
void score(const float* logits, int64_t size, bool is_softmax, float* scores) {
  if (!is_softmax) {
    map(size, scores, [](f32x16 x) { return times_sigmoid(splat(1.0f), x); }, logits);
    return;
  }
  const auto lanes = [&](const float* from, int64_t i) {
    const int64_t left = size - i;
    const f32x16 x = load_rest(from + i, left);
    return left < kLanes ? fill_from(x, int(left), -INFINITY) : x;
  };
  f32x16 top = splat(-INFINITY);
  for (int64_t i = 0; i < size; i += kLanes) top = max(lanes(logits, i), top);
  const f32x16 maximum = splat(max_lanes(top));
  f32x16 sums = zero();
  for (int64_t i = 0; i < size; i += kLanes) {
    const f32x16 e = exp(lanes(logits, i) - maximum);
    sums = sums + e;
    store_rest(scores + i, e, size - i);
  }
  const f32x16 sum = splat(sum_lanes(sums));
  map(size, scores, [sum](f32x16 e) { return e / sum; }, scores);
}

// The largest of those that are not taken, which it then is; of equal ones, the first.
int64_t take_best(const float* values, int64_t size, bool* taken) {
  int64_t best = -1;
  for (int64_t i = 0; i < size; ++i)
    if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
  taken[best] = true;
  return best;
}

// Takes all experts that are not in one of the best groups.
void limit_groups(const float* votes, int64_t size, const RouterArgs& router, bool* taken) {
  const int64_t group = size / router.groups;
  float scores[kMaxExperts];
  bool counted[kMaxExperts] = {}, is_kept[kMaxExperts] = {};
  for (int64_t g = 0; g < router.groups; ++g) {
    scores[g] = 0.0f;
    for (int64_t i = 0; i < router.group_votes; ++i)
      scores[g] += votes[g * group + take_best(votes + g * group, group, counted + g * group)];
  }
  for (int64_t i = 0; i < router.kept_groups; ++i) take_best(scores, router.groups, is_kept);
  for (int64_t i = 0; i < size; ++i) taken[i] = !is_kept[i / group];
}

void route(Rows logits, const float* bias, const RouterArgs& router, Rows y, int64_t t0, int64_t t1,
           int64_t size) {
  float scores[kMaxExperts], biased[kMaxExperts];
  for (int64_t t = t0; t < t1; ++t) {
    score(logits.row(t), size, router.is_softmax, scores);
    const float* votes = scores;
    if (bias != nullptr) {
      map(size, biased, [](f32x16 s, f32x16 b) { return s + b; }, scores, bias);
      votes = biased;
    }
    bool taken[kMaxExperts] = {};
    if (router.kept_groups < router.groups) limit_groups(votes, size, router, taken);
    float* const weights = y.row(t);
    float* const numbers = weights + router.active;
    float sum = 0.0f;
    for (int64_t k = 0; k < router.active; ++k) {
      const int64_t expert = take_best(votes, size, taken);
      numbers[k] = float(expert);
      weights[k] = scores[expert];
      sum += scores[expert];
    }
    // All sigmoids may be too small for a float.
    const float divisor = router.renormalizes ? sum + 1e-20f : 1.0f;
    for (int64_t k = 0; k < router.active; ++k) weights[k] = weights[k] / divisor * router.factor;
  }
}

// y = sum_k weights[k] * row rows[k] of x, k rising; the sum alone if there are no weights.
void add_rows(Rows x, const int32_t* rows, const float* weights, int64_t count, float* y,
              int64_t size) {
  for (int64_t c = 0; c < size; c += kLanes) {
    const int64_t left = size - c;
    f32x16 sum = zero();
    for (int64_t k = 0; k < count; ++k) {
      const f32x16 value = load_rest(x.row(rows[k]) + c, left);
      sum = weights != nullptr ? fma(splat(weights[k]), value, sum) : sum + value;
    }
    store_rest(y + c, sum, left);
  }
}

// Source: the gate of gpt-oss, whose constants these are.
void clamped_silu_mul(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size) {
  const auto f = [](f32x16 gate, f32x16 up) {
    const f32x16 limit = splat(7.0f), low = splat(-7.0f);
    const f32x16 g = min(limit, gate), u = max(low, min(limit, up));  // NaN stays NaN
    return times_sigmoid(g, g * splat(1.702f)) * (u + splat(1.0f));
  };
  for (int64_t t = t0; t < t1; ++t) map(size, y.row(t), f, x.row(t), x.row(t) + size);
}

void sigmoid_mul(Rows x, Rows gates, Rows y, int64_t t0, int64_t t1, int64_t size) {
  for (int64_t t = t0; t < t1; ++t) {
    const f32x16 gate = splat(*gates.row(t));
    map(size, y.row(t), [gate](f32x16 v) { return times_sigmoid(v, gate); }, x.row(t));
  }
}

}  // namespace

void install_experts(Kernels& table) {
  table.route = route;
  table.add_rows = add_rows;
  table.clamped_silu_mul = clamped_silu_mul;
  table.sigmoid_mul = sigmoid_mul;
}

}  // namespace octavo::OCTAVO_ISA
