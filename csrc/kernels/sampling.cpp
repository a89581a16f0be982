// From one row's logits to a token, or to log-probabilities; ops/sampling.py has the definitions.
//
// Weights are exp((logit - maximum) / temperature): the probabilities before their division by the
// sum. They lie in [0, 1], and the likeliest token's is 1. Tokens are drawn in falling order, but
// few of them need to be sorted for it:
//   - with top_k, one pass keeps the k likeliest in a buffer;
//   - else the weights' mass is added up in narrow bins, and only the bins in which a limit falls
//     are sorted: usually two of a few tokens each. A row is sorted as a whole only where all its
//     weights are about the same.
#include <cfloat>
#include <cmath>

#include "simd.h"
#include "table.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr float kNaN = __builtin_nanf("");
constexpr int64_t kChunk = 64;   // weights that are looked at together

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Up to sixteen values, where `left` are left; the other lanes are `fill`.
inline f32x16 load_rest(const float* p, int64_t left, float fill) {
  return left >= 16 ? load(p) : fill_from(load_first(p, int(left)), int(left), fill);
}

// f(i) for each bit i of the mask, rising.
template <typename F>
inline void for_each_bit(uint64_t mask, F f) {
  for (; mask != 0; mask &= mask - 1) f(__builtin_ctzll(mask));
}

bool row_is_finite(const float* logits, int64_t size) {
  uint32_t below_infinity = 0xffff, finite = 0;
  for (int64_t c = 0; c < size; c += 16) {
    const f32x16 x = load_rest(logits + c, size - c, -kInfinity);
    below_infinity &= mask_greater(splat(kInfinity), x);
    finite |= mask_at_least(x, splat(-FLT_MAX));
  }
  return below_infinity == 0xffff && finite != 0;
}

// The maximum in each lane, of what is not NaN.
f32x16 lane_maxima(const float* x, int64_t size) {
  // Four, because one would wait for itself.
  f32x16 m0 = splat(-kInfinity), m1 = m0, m2 = m0, m3 = m0;
  int64_t c = 0;
  for (; c + 64 <= size; c += 64) {
    m0 = max(load(x + c), m0);  // in this order a NaN gives m0
    m1 = max(load(x + c + 16), m1);
    m2 = max(load(x + c + 32), m2);
    m3 = max(load(x + c + 48), m3);
  }
  for (; c < size; c += 16) m0 = max(load_rest(x + c, size - c, kNaN), m0);
  return max(max(m0, m1), max(m2, m3));
}

int64_t argmax(const float* logits, int64_t size) {
  // Only the part with the first of the largest is looked through again.
  constexpr int64_t kPart = 1024;
  float largest = -kInfinity;
  int64_t c = 0;
  for (int64_t part = 0; part < size; part += kPart) {
    const int64_t left = size - part;
    const f32x16 maxima = lane_maxima(logits + part, left < kPart ? left : kPart);
    if (mask_greater(maxima, splat(largest)) != 0) {
      largest = max_lanes(maxima);
      c = part;
    }
  }
  for (; c < size; c += 16) {
    const uint32_t mask = mask_at_least(load_rest(logits + c, size - c, kNaN), splat(largest));
    if (mask != 0) return c + __builtin_ctz(mask);
  }
  return 0;  // all are NaN
}

// Sixteen sums in double, of four vectors at a time: a row's sum is then as good as its terms.
class LaneSums {
 public:
  void add(f32x16 a) {
    alignas(64) float v[16];
    store(v, a);
    for (int i = 0; i < 16; ++i) sums_[i] += double(v[i]);
  }
  double total() const {
    double sum = 0;
    for (const double lane : sums_) sum += lane;
    return sum;
  }

 private:
  double sums_[16] = {};
};

// weights = exp((logits - maximum) * factor), and zeros up to a multiple of kChunk; returns their
// sum. `weights` may be `logits`.
double exponentials(const float* logits, int64_t size, float maximum, float factor,
                    float* weights) {
  const auto weigh = [&](f32x16 x) { return exp((x - splat(maximum)) * splat(factor)); };
  LaneSums sums;
  int64_t c = 0;
  for (; c + kChunk <= size; c += kChunk) {
    f32x16 w[4];
    for (int i = 0; i < 4; ++i) {
      w[i] = weigh(load(logits + c + 16 * i));
      store(weights + c + 16 * i, w[i]);
    }
    sums.add((w[0] + w[1]) + (w[2] + w[3]));
  }
  for (; c < size; c += 16) {
    const f32x16 w = weigh(load_rest(logits + c, size - c, -kInfinity));
    store(weights + c, w);
    sums.add(w);
  }
  for (; c % kChunk != 0; c += 16) store(weights + c, zero());
  return sums.total();
}

// --- tokens in falling order ---------------------------------------------------------------------

// What is sorted: the upper half rises as the value falls, the lower half is the token's id.
inline uint64_t entry_of(float value, int64_t id) {
  const uint32_t bits = bits_of(value + 0.0f);  // -0 becomes 0, which equals it
  const uint32_t rising = bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
  return uint64_t(~rising) << 32 | uint32_t(id);
}
inline int64_t id_of(uint64_t entry) { return int64_t(entry & 0xffffffff); }

// Of entries that lie in order of their ids. The result is in `entries` or in `spare`.
uint64_t* sort(uint64_t* entries, uint64_t* spare, int64_t count) {
  constexpr int64_t kFew = 48;  // insertion is faster up to there, as measured
  if (count <= kFew) {
    for (int64_t i = 1; i < count; ++i) {
      const uint64_t entry = entries[i];
      int64_t place = i;
      for (; place > 0 && entries[place - 1] > entry; --place) entries[place] = entries[place - 1];
      entries[place] = entry;
    }
    return entries;
  }
  // By each byte of the values, the lowest first; equal values stay in order of their ids.
  uint32_t starts[4][256] = {};
  for (int64_t i = 0; i < count; ++i)
    for (int b = 0; b < 4; ++b) ++starts[b][entries[i] >> (32 + 8 * b) & 255];
  for (int b = 0; b < 4; ++b) {
    const int shift = 32 + 8 * b;
    if (starts[b][entries[0] >> shift & 255] == count) continue;  // alike in all
    uint32_t start = 0;
    for (uint32_t& place : starts[b]) {
      const uint32_t next = start + place;
      place = start;
      start = next;
    }
    for (int64_t i = 0; i < count; ++i) spare[starts[b][entries[i] >> shift & 255]++] = entries[i];
    uint64_t* sorted = spare;
    spare = entries;
    entries = sorted;
  }
  return entries;
}

struct Scratch {
  float* weights;       // size, padded to kChunk
  uint64_t* entries;    // size
  uint64_t* spare;      // size

  Scratch(void* memory, int64_t size) {
    uint8_t* bytes = static_cast<uint8_t*>(memory);
    weights = reinterpret_cast<float*>(bytes);
    entries = reinterpret_cast<uint64_t*>(bytes + round_up(size, kChunk) * 4);
    spare = entries + size;
  }
};

// The `count` likeliest tokens, best first, ties by id; 1 <= count <= size.
const uint64_t* likeliest(const float* logits, int64_t size, int64_t count, Scratch& s) {
  // Tokens that beat the count-th of those seen so far wait in the buffer until it is full; then
  // all but `count` are dropped. A random row drops about log(size / count) times. One that rises,
  // where each token beats those before it, drops size / count times, which still is O(size).
  const int64_t capacity = 2 * count > 256 ? 2 * count : 256;
  int64_t held = 0;
  bool any_dropped = false;
  f32x16 worst = zero();
  const auto drop = [&] {
    uint64_t* sorted = sort(s.entries, s.spare, held);
    if (sorted != s.entries) {
      s.spare = s.entries;
      s.entries = sorted;
    }
    held = count;
  };
  for (int64_t c = 0; c < size; c += 16) {
    const int64_t left = size - c;
    const f32x16 x = load_rest(logits + c, left, kNaN);
    uint32_t mask = left >= 16 ? 0xffff : (1u << left) - 1;
    if (any_dropped) mask &= mask_greater(x, worst);  // later equals have higher ids
    for_each_bit(mask, [&](int i) { s.entries[held++] = entry_of(logits[c + i], c + i); });
    if (held >= capacity) {
      drop();
      any_dropped = true;
      worst = splat(logits[id_of(s.entries[count - 1])]);
    }
  }
  drop();
  return s.entries;
}

// --- drawing -------------------------------------------------------------------------------------

// The first place of `count` at which the sum of weights reaches `target`; the last if rounding
// keeps it below. `sum`: of what comes before these places, then of all up to the found one.
template <typename WeightAt>
int64_t reach(double target, int64_t count, WeightAt weight, double& sum) {
  for (int64_t i = 0;; ++i) {
    sum += double(weight(i));
    if (sum >= target || i + 1 >= count) return i;
  }
}

// What a sum must reach for `share` of `total` to be exceeded. Never more than `total`, since share
// is below 1.
inline double beyond(double share, double total) {
  return std::nextafter(share * total, double(kInfinity));
}

// What the filters leave, where top_k is one of them: the first `count` of `sorted`, whose weights
// lie in the scratch, in this order, and add up to `total`.
struct TopK {
  const uint64_t* sorted;
  int64_t count;
  double total;
};

TopK keep_top_k(const float* logits, int64_t size, const SampleArgs& args, float factor,
                Scratch& s) {
  const uint64_t* sorted = likeliest(logits, size, args.top_k, s);
  int64_t kept = args.top_k;
  for (int64_t i = 0; i < kept; ++i) s.weights[i] = logits[id_of(sorted[i])];
  exponentials(s.weights, kept, s.weights[0], factor, s.weights);
  while (kept > 1 && s.weights[kept - 1] < args.min_p) --kept;
  const auto weight = [&](int64_t i) { return s.weights[i]; };
  double total = 0;  // added up in the order in which `reach` does
  for (int64_t i = 0; i < kept; ++i) total += double(weight(i));
  if (args.top_p < 1.0f) {
    double nucleus = 0;
    kept = reach(double(args.top_p) * total, kept, weight, nucleus) + 1;
    total = nucleus;
  }
  return {sorted, kept, total};
}

int64_t sample_top_k(const float* logits, int64_t size, const SampleArgs& args, double uniform,
                     float factor, Scratch& s) {
  const TopK kept = keep_top_k(logits, size, args, factor, s);
  const auto weight = [&](int64_t i) { return s.weights[i]; };
  double sum = 0;
  return id_of(kept.sorted[reach(beyond(uniform, kept.total), kept.count, weight, sum)]);
}

// A row's weights from `floor` up to 1, in bins of falling weight whose masses are known and whose
// tokens are looked up and sorted when asked for.
class Bins {
 public:
  // A token's place in falling order, and the mass of all up to it.
  struct Place {
    int64_t bin, index;
    double sum;
  };

  Bins(const float* logits, int64_t size, Scratch& scratch)
      : logits_(logits), weights_(scratch.weights), size_(size), s_(scratch) {}

  // Count the tokens from `floor` on, which is at least FLT_MIN; returns their mass.
  double fill(float floor) {
    // Bins are ranges of the weights' bits, which rise with the weights: of equal relative width,
    // but for a factor of two.
    span_ = kOne - bits_of(floor);
    shift_ = 0;
    while (span_ >> shift_ >= kBins) ++shift_;
    bins_ = (span_ >> shift_) + 1;
    for (double& mass : mass_) mass = 0;
    for (int64_t c = 0; c < size_; c += kChunk) {
      const float* w = weights_ + c;
      uint64_t mask = 0;
      for (int i = 0; i < kChunk; i += 16)
        mask |= uint64_t(mask_at_least(load(w + i), splat(floor))) << i;
      if (__builtin_popcountll(mask) < kChunk / 2) {
        for_each_bit(mask, [&](int i) { mass_[bin_of(w[i])] += double(w[i]); });
        continue;
      }
      // Many: all are added, those below the floor as zeros to any bin. Without a branch for each,
      // and with bins computed sixteen at a time, this takes 0.6 of the time.
      uint32_t bins[kChunk];
      float counted[kChunk];
      for (int i = 0; i < kChunk; ++i) {
        bins[i] = bin_of(w[i]) % kBins;
        counted[i] = w[i] >= floor ? w[i] : 0.0f;
      }
      for (int i = 0; i < kChunk; ++i) mass_[bins[i]] += double(counted[i]);
    }
    double total = 0;
    for (int64_t b = 0; b < bins_; ++b) total += mass_[b];
    sorted_bin_ = -1;
    return total;
  }

  Place end() const { return {bins_ - 1, size_, 0}; }

  // The first place where the mass reaches `target`; not beyond `last`.
  Place find(double target, Place last) {
    int64_t bin = 0;
    double sum = 0;
    while (bin < last.bin && sum + mass_[bin] < target) sum += mass_[bin++];
    if (bin != sorted_bin_) sort_bin(bin);
    const int64_t count = bin == last.bin && last.index < count_ ? last.index + 1 : count_;
    const auto weight = [this](int64_t i) { return weights_[id_of(sorted_[i])]; };
    const int64_t index = reach(target, count, weight, sum);
    return {bin, index, sum};
  }

  // Of the place that was found last.
  int64_t id(Place place) const { return id_of(sorted_[place.index]); }
  // f(id) for each token of its bin up to it. What comes in earlier bins weighs at least above(it).
  template <typename F>
  void for_each_in_bin(Place place, F f) const {
    for (int64_t i = 0; i <= place.index; ++i) f(id_of(sorted_[i]));
  }
  float above(Place place) const { return float_of(kOne - (uint32_t(place.bin) << shift_) + 1); }

 private:
  static constexpr uint32_t kOne = 0x3f800000;  // the bits of 1.0f
  static constexpr uint32_t kBins = 1024;

  uint32_t bin_of(float weight) const { return (kOne - bits_of(weight)) >> shift_; }

  void sort_bin(int64_t bin) {
    const uint64_t end = (uint64_t(bin) + 1) << shift_;
    const f32x16 highest = splat(float_of(kOne - (uint32_t(bin) << shift_)));
    const f32x16 lowest = splat(float_of(kOne - (end <= span_ ? uint32_t(end) - 1 : span_)));
    count_ = 0;
    for (int64_t c = 0; c < size_; c += 16) {
      const f32x16 w = load(weights_ + c);
      for_each_bit(mask_at_least(w, lowest) & mask_at_least(highest, w), [&](int i) {
        // By logit, because weights may be equal by rounding where logits are not.
        s_.entries[count_++] = entry_of(logits_[c + i], c + i);
      });
    }
    sorted_ = sort(s_.entries, s_.spare, count_);
    sorted_bin_ = bin;
  }

  const float* logits_;
  const float* weights_;
  int64_t size_;
  Scratch& s_;
  uint32_t span_ = 0;
  int shift_ = 0;
  int64_t bins_ = 0;
  double mass_[kBins];
  const uint64_t* sorted_ = nullptr;   // the tokens of sorted_bin_
  int64_t sorted_bin_ = -1;
  int64_t count_ = 0;
};

bool is_greedy(const SampleArgs& args) { return !(args.temperature > 0.0f) || args.top_k == 1; }

float factor_of(const SampleArgs& args) {
  const float inverse = 1.0f / args.temperature;
  return inverse <= FLT_MAX ? inverse : FLT_MAX;  // infinity times 0 would be NaN
}

// The least weight that is ever drawn.
float least_weight(const SampleArgs& args) {
  const float least = args.min_p < 1.0f ? args.min_p : 1.0f;
  return least > FLT_MIN ? least : FLT_MIN;
}

// Count the tokens that min_p leaves; without it, so many of the likeliest that their mass reaches
// `needed`, which is about `share` of the row's `total`. Returns the mass that shares are of.
double fill(Bins& bins, int64_t size, const SampleArgs& args, double share, double needed,
            double total) {
  if (args.min_p > 0.0f) return bins.fill(least_weight(args));
  // Tokens below a floor have less mass than size * floor: with this one, the others have enough.
  // Should rounding have it otherwise, a lower one is tried.
  double floor = (1.0 - share) * total / double(size);
  for (;;) {
    floor = floor < FLT_MIN ? FLT_MIN : floor > 1.0 ? 1.0 : floor;
    const double mass = bins.fill(float(floor));
    if (mass >= needed) return total;
    if (floor == FLT_MIN) return mass;  // that is all
    floor *= 1.0 / 4096;
  }
}

int64_t sample(const float* logits, int64_t size, const SampleArgs& args, double uniform,
               void* scratch) {
  if (is_greedy(args)) return argmax(logits, size);
  Scratch s(scratch, size);
  const float factor = factor_of(args);
  if (args.top_k > 0 && args.top_k < size)
    return sample_top_k(logits, size, args, uniform, factor, s);

  const int64_t best = argmax(logits, size);
  double total = exponentials(logits, size, logits[best], factor, s.weights);
  if (!(total < double(kInfinity))) return best;  // NaN: the row is broken
  Bins bins(logits, size, s);
  const bool has_top_p = args.top_p < 1.0f;
  const double share = has_top_p ? double(args.top_p) : uniform;
  const double needed = has_top_p ? share * total : beyond(share, total);
  total = fill(bins, size, args, share, needed, total);
  Bins::Place last = bins.end();
  if (has_top_p) {
    last = bins.find(share * total, last);
    total = last.sum;
  }
  return bins.id(bins.find(beyond(uniform, total), last));
}

void probabilities(const float* logits, int64_t size, const SampleArgs& args, float* result,
                   void* scratch) {
  if (is_greedy(args) || !row_is_finite(logits, size)) {
    std::memset(result, 0, size_t(size) * sizeof(float));
    result[argmax(logits, size)] = 1.0f;
    return;
  }
  Scratch s(scratch, size);
  const float factor = factor_of(args);
  if (args.top_k > 0 && args.top_k < size) {
    const TopK kept = keep_top_k(logits, size, args, factor, s);
    std::memset(result, 0, size_t(size) * sizeof(float));
    for (int64_t i = 0; i < kept.count; ++i)
      result[id_of(kept.sorted[i])] = float(double(s.weights[i]) / kept.total);
    return;
  }

  const float maximum = logits[argmax(logits, size)];
  double total = exponentials(logits, size, maximum, factor, s.weights);
  Bins bins(logits, size, s);
  const bool has_top_p = args.top_p < 1.0f;
  const double share = args.top_p;
  if (has_top_p || args.min_p > 0.0f) total = fill(bins, size, args, share, share * total, total);
  float least = least_weight(args);
  Bins::Place last = bins.end();
  if (has_top_p) {
    last = bins.find(share * total, last);
    total = last.sum;
    least = bins.above(last);
  }
  const float inverse = float(1.0 / total);
  for (int64_t c = 0; c < size; c += 16) {
    const f32x16 w = load(s.weights + c);
    store_first(result + c, zero_where_below(w, w, least) * splat(inverse),
                int(size - c < 16 ? size - c : 16));
  }
  if (has_top_p)
    bins.for_each_in_bin(last, [&](int64_t id) { result[id] = s.weights[id] * inverse; });
}

void log_probabilities(const float* logits, int64_t size, int64_t token, int64_t num_top,
                       float* own, int64_t* rank, int64_t* top_ids, float* top_values,
                       void* scratch) {
  Scratch s(scratch, size);
  const float maximum = logits[argmax(logits, size)];
  const double sum = exponentials(logits, size, maximum, 1.0f, s.weights);
  const double log_sum = double(maximum) + std::log(sum);
  *own = float(double(logits[token]) - log_sum);
  *rank = 1;
  const f32x16 chosen = splat(logits[token]);
  for (int64_t c = 0; c < size; c += 16)
    *rank += __builtin_popcount(mask_greater(load_rest(logits + c, size - c, kNaN), chosen));
  if (num_top == 0) return;
  const uint64_t* sorted = likeliest(logits, size, num_top, s);
  for (int64_t i = 0; i < num_top; ++i) {
    top_ids[i] = id_of(sorted[i]);
    top_values[i] = float(double(logits[top_ids[i]]) - log_sum);
  }
}

}  // namespace

void install_sampling(Kernels& table) {
  table.row_is_finite = row_is_finite;
  table.argmax = argmax;
  table.sample = sample;
  table.probabilities = probabilities;
  table.log_probabilities = log_probabilities;
}

}  // namespace octavo::OCTAVO_ISA
