// Operations on rows by themselves: norms, positions, gates, residuals, quantization, lookup.
#include <cmath>

#include "../float_bits.h"
#include "map.h"
#include "table.h"

namespace octavo::OCTAVO_ISA {
namespace {

// What `add` makes of sums of a row's values. Lanes beyond the row's end hold `filler`, of which it
// must add nothing.
template <typename Add>
inline float sum_of(const float* x, int64_t size, float filler, Add add) {
  // Four sums, because one would wait for its own additions.
  f32x16 sums[4] = {zero(), zero(), zero(), zero()};
  int64_t c = 0;
  for (; c + 64 <= size; c += 64)
    for (int i = 0; i < 4; ++i) sums[i] = add(sums[i], load(x + c + 16 * i));
  for (; c + 16 <= size; c += 16) sums[0] = add(sums[0], load(x + c));
  if (c < size) {
    const int count = int(size - c);
    sums[0] = add(sums[0], fill_from(load_first(x + c, count), count, filler));
  }
  return sum_lanes((sums[0] + sums[2]) + (sums[1] + sums[3]));
}

void rms_norm(Rows x, Rows y, int64_t t0, int64_t t1, int64_t heads, int64_t size,
              const float* weight, float eps) {
  for (int64_t t = t0; t < t1; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      const float* in = x.row(t) + h * size;
      const auto add_square = [](f32x16 sum, f32x16 v) { return fma(v, v, sum); };
      const float mean = sum_of(in, size, 0.0f, add_square) / float(size);
      const f32x16 inverse = splat(1.0f / std::sqrt(mean + eps));
      float* const out = y.row(t) + h * size;
      if (weight == nullptr) {
        map(size, out, [inverse](f32x16 v) { return v * inverse; }, in);
      } else {
        map(size, out, [inverse](f32x16 v, f32x16 w) { return v * inverse * w; }, in, weight);
      }
    }
  }
}

void layer_norm(Rows x, Rows y, int64_t t0, int64_t t1, int64_t heads, int64_t size,
                const float* weight, const float* bias, int64_t head_stride, float eps) {
  const auto add = [](f32x16 sum, f32x16 v) { return sum + v; };
  for (int64_t t = t0; t < t1; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      const float* in = x.row(t) + h * size;
      float* out = y.row(t) + h * size;
      const float middle = sum_of(in, size, 0.0f, add) / float(size);
      const f32x16 mean = splat(middle);
      const auto add_square = [mean](f32x16 sum, f32x16 v) {
        const f32x16 deviation = v - mean;
        return fma(deviation, deviation, sum);
      };
      const float variance = sum_of(in, size, middle, add_square) / float(size);
      const f32x16 inverse = splat(1.0f / std::sqrt(variance + eps));
      const auto normal = [mean, inverse](f32x16 v) { return (v - mean) * inverse; };
      const auto weighted = [normal](f32x16 v, f32x16 w) { return normal(v) * w; };
      const auto shifted = [normal](f32x16 v, f32x16 w, f32x16 b) { return fma(normal(v), w, b); };
      const int64_t own = h * head_stride;
      if (weight == nullptr)
        map(size, out, normal, in);
      else if (bias == nullptr)
        map(size, out, weighted, in, weight + own);
      else
        map(size, out, shifted, in, weight + own, bias + own);
    }
  }
}

void rotary(Rows x, Rows y, int64_t t0, int64_t t1, int64_t heads, int64_t size, int64_t rotated,
            const float* table, const int64_t* positions) {
  const int64_t half = rotated / 2;
  for (int64_t t = t0; t < t1; ++t) {
    const float* cosines = table + positions[t] * rotated;
    const float* sines = cosines + half;
    for (int64_t h = 0; h < heads; ++h) {
      const float* in = x.row(t) + h * size;
      float* out = y.row(t) + h * size;
      for (int64_t e = 0; e < half; e += 16) {
        const int64_t left = half - e;
        const f32x16 c = load_rest(cosines + e, left), s = load_rest(sines + e, left);
        const f32x16 a = load_rest(in + e, left), b = load_rest(in + half + e, left);
        store_rest(out + e, a * c - b * s, left);  // after both loads, since y may be x
        store_rest(out + half + e, b * c + a * s, left);
      }
      if (rotated < size && out != in)
        std::memcpy(out + rotated, in + rotated, size_t(size - rotated) * sizeof(float));
    }
  }
}

void silu(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size) {
  const auto f = [](f32x16 v) { return times_sigmoid(v, v); };
  for (int64_t t = t0; t < t1; ++t) map(size, y.row(t), f, x.row(t));
}

void silu_mul(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size) {
  const auto f = [](f32x16 gate, f32x16 up) { return times_sigmoid(gate, gate) * up; };
  for (int64_t t = t0; t < t1; ++t) map(size, y.row(t), f, x.row(t), x.row(t) + size);
}

// (1 + tanh(z)) / 2 = sigmoid(2 z), which spares the cancellation where tanh is near -1.
inline f32x16 gelu_by_tanh(f32x16 v) {
  const f32x16 inner = fma(v * v * v, splat(0.044715f), v);
  return times_sigmoid(v, inner * splat(1.59576912f));  // 2 sqrt(2 / pi)
}

void gelu_tanh(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size) {
  for (int64_t t = t0; t < t1; ++t) map(size, y.row(t), gelu_by_tanh, x.row(t));
}

void gelu_tanh_mul(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size) {
  const auto f = [](f32x16 gate, f32x16 up) { return gelu_by_tanh(gate) * up; };
  for (int64_t t = t0; t < t1; ++t) map(size, y.row(t), f, x.row(t), x.row(t) + size);
}

// x times the normal distribution's share below x, (1 + erf(x / sqrt(2))) / 2. The tail beyond |x| is
// exp(-x^2 / 2) times a function without steep places, here a polynomial in t = 1 / (1 + |x| / 3)
// (fitted by least squares; its relative error is 2.4e-7), so that a small tail has all its digits.
inline f32x16 gelu_by_erf(f32x16 v) {
  const f32x16 size = abs(v), t = splat(1.0f) / fma(size, splat(1.0f / 3.0f), splat(1.0f));
  constexpr float kRest[] = {0.131158710f, -0.274422646f, 0.222441539f, -0.0556959212f,
                             0.120866880f, 0.112185732f,  0.133606017f, 0.132953167f};
  f32x16 p = splat(-0.0230934788f);
  for (const float coefficient : kRest) p = fma(p, t, splat(coefficient));
  const f32x16 tail = p * t * exp(v * v * splat(-0.5f)) * size;
  return max(v, zero()) - tail;
}

void gelu(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size) {
  for (int64_t t = t0; t < t1; ++t) map(size, y.row(t), gelu_by_erf, x.row(t));
}

void relu(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size) {
  const auto f = [](f32x16 v) { return max(zero(), v); };  // in this order a NaN stays one
  for (int64_t t = t0; t < t1; ++t) map(size, y.row(t), f, x.row(t));
}

void add(Rows x, Rows z, Rows y, int64_t t0, int64_t t1, int64_t size) {
  const auto f = [](f32x16 a, f32x16 b) { return a + b; };
  for (int64_t t = t0; t < t1; ++t) map(size, y.row(t), f, x.row(t), z.row(t));
}

void scale(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size, float factor) {
  const auto f = [factor = splat(factor)](f32x16 v) { return v * factor; };
  for (int64_t t = t0; t < t1; ++t) map(size, y.row(t), f, x.row(t));
}

void clamp(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size, float limit) {
  const auto f = [most = splat(limit), least = splat(-limit)](f32x16 v) {
    return min(most, max(least, v));  // in this order a NaN stays one
  };
  for (int64_t t = t0; t < t1; ++t) map(size, y.row(t), f, x.row(t));
}

void softcap(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size, float cap) {
  const auto f = [cap](f32x16 v) { return soft_capped(v, cap); };
  for (int64_t t = t0; t < t1; ++t) map(size, y.row(t), f, x.row(t));
}

void take_columns(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size, const int32_t* order) {
  for (int64_t t = t0; t < t1; ++t)
    for (int64_t c = 0; c < size; ++c) y.row(t)[c] = x.row(t)[order[c]];
}

// A row's quantization in four steps. Largest values and sums wait in `sums`, so that scales are
// computed for sixteen groups at once: one division each instead of sixteen (1.6 times as fast as
// group by group).
class RowQuantizer {
 public:
  RowQuantizer(const float* x, int64_t size, QuantizedRows y, int64_t t)
      : x_(x),
        size_(size),
        groups_(y.groups),
        values_(y.values(t)),
        scales_(y.scales(t)),
        starts_(y.starts(t)),
        sums_(y.sums(t)),
        halves_(reinterpret_cast<float*>(y.halves(t))) {}

  void find_largest() const {
    for (int64_t g = 0; g < groups_; ++g)
      sums_[g] = max_lanes(max(abs(load_half(g, 0)), abs(load_half(g, 1))));
  }

  // Leaves the inverses of scales in `sums`.
  void find_scales() const {
    // Below it 127 / largest could overflow; so small a group counts as zeros.
    constexpr float kSmallest = 0x1p-100f;
    for (int64_t g = 0; g < groups_; g += 16) {
      const int64_t left = groups_ - g;
      const f32x16 largest = load_rest(sums_ + g, left), limit = splat(127.0f);
      store_rest(scales_ + g, zero_where_below(largest / limit, largest, kSmallest), left);
      store_rest(sums_ + g, zero_where_below(limit / largest, largest, kSmallest), left);
    }
  }

  void round_values() const {
    for (int64_t g = 0; g < groups_; ++g) {
      const f32x16 inverse = splat(sums_[g]);
      const f32x16 a = round(load_half(g, 0) * inverse), b = round(load_half(g, 1) * inverse);
      store_i8(values_ + g * kGroup, a);
      store_i8(values_ + g * kGroup + 16, b);
      halves_[g] = sum_lanes(a);
      sums_[g] = halves_[g] + sum_lanes(b);  // exact
    }
  }

  void finish() const {
    for (int64_t g = 0; g < groups_; g += 16) {
      const int64_t left = groups_ - g;
      const f32x16 sum = load_rest(sums_ + g, left), scale = load_rest(scales_ + g, left);
      const auto store_times_128 = [left](int32_t* to, f32x16 x) {
        store_i32_first(to, x * splat(-128.0f), left < 16 ? int(left) : 16);
      };
      store_times_128(starts_ + g, sum);
      store_times_128(reinterpret_cast<int32_t*>(halves_) + g, load_rest(halves_ + g, left));
      store_rest(sums_ + g, sum * scale, left);
      // The sum is NaN if the group had a NaN, which `max` may have overlooked, or an infinity,
      // which became infinity * 0; the scale must be, too.
      store_rest(scales_ + g, scale + (sum - sum), left);
    }
  }

 private:
  f32x16 load_half(int64_t g, int64_t half) const {
    const int64_t k = g * kGroup + half * 16;
    return load_rest(x_ + k, size_ - k);
  }

  const float* x_;
  int64_t size_;
  int64_t groups_;
  int8_t* values_;
  float* scales_;
  int32_t* starts_;
  float* sums_;
  float* halves_;   // integers in the end
};

// Each step is done for a few rows before the next: a vector that is loaded where single floats
// were just stored waits until these have left the store queue, which took 40 % of the time.
constexpr int64_t kRowsTogether = 4;

void quantize(Rows x, QuantizedRows y, int64_t t0, int64_t t1, int64_t size) {
  for (int64_t first = t0; first < t1; first += kRowsTogether) {
    const int64_t last = first + kRowsTogether < t1 ? first + kRowsTogether : t1;
    const auto for_each_row = [&](void (RowQuantizer::*step)() const) {
      for (int64_t t = first; t < last; ++t) (RowQuantizer(x.row(t), size, y, t).*step)();
    };
    for_each_row(&RowQuantizer::find_largest);
    for_each_row(&RowQuantizer::find_scales);
    for_each_row(&RowQuantizer::round_values);
    for_each_row(&RowQuantizer::finish);
  }
}

// Input k's group of one output: its values, and its scale and minimum.
struct Span {
  const uint8_t* values;
  float scale, min;
};
Span span_of(const WeightFormat& format, const uint8_t* panel, int64_t k, int64_t lane) {
  const GroupOffsets at = group_offsets(format, k / kGroup);
  const int64_t number = k % kGroup / format.span * kLanes + lane;
  const auto read = [&](int64_t scales, int64_t factors) {
    const auto* words = reinterpret_cast<const uint16_t*>(panel + scales);
    switch (format.scales) {
      case Scales::f16: return float_of_half(int32_t(words[number]));
      case Scales::bf16: return float_of_bfloat(words[number]);
      case Scales::f32: return reinterpret_cast<const float*>(panel + scales)[number];
      case Scales::k8: break;
    }
    const auto* halves = reinterpret_cast<const uint16_t*>(panel + factors);
    return float(reinterpret_cast<const int8_t*>(panel + scales)[number]) *
           float_of_half(int32_t(halves[lane]));
  };
  const float scale = read(at.scales, at.factors);
  if (format.offset == Offset::none) return {panel + at.values, scale, 0.0f};
  const float offset = read(at.offsets, at.factors + 2 * kLanes);
  return {panel + at.values, scale, format.offset == Offset::zero ? scale * offset : offset};
}

// Value i of a group, of what its scale is multiplied with.
float value_of(const WeightFormat& format, const uint8_t* values, int64_t i, int64_t lane) {
  const bool is_plain = format.offset == Offset::none;
  const auto code = [&] {
    const uint8_t pair = values[i / 8 * 64 + 4 * lane + i % 4];
    return i % 8 < 4 ? pair & 15 : pair >> 4;
  };
  switch (format.values) {
    case Values::q8: return float(values[i / 4 * 64 + 4 * lane + i % 4] - (is_plain ? 128 : 0));
    case Values::q4: return float(code() - (is_plain ? 8 : 0));
    case Values::e2m1: return float(kE2M1[code()]);
    case Values::nf4: return kNF4[code()];
    case Values::fp4: return kFP4[code()];
    case Values::f8e4m3: {
      alignas(16) uint8_t bytes[kLanes] = {values[i * kLanes + lane]};
      float floats[kLanes];
      store(floats, load_f8_256th(bytes));
      return floats[0] * 256;
    }
    default: return 0;   // floats
  }
}

// One output's row of a panel. A token touches a cache line for each one to eight values, but only
// once a step.
void unpack_row(const PackedMatrix& matrix, int64_t output, float* y) {
  const uint8_t* panel = matrix.data + output / kLanes * matrix.panel_stride;
  const int64_t lane = output % kLanes, inputs = matrix.inputs;
  const auto unpack = [&](const auto* values, auto to_float) {
    for (int64_t k = 0; k < inputs; ++k) y[k] = to_float(values[k * kLanes + lane]);
  };
  switch (matrix.format.values) {
    case Values::f32:
      unpack(reinterpret_cast<const float*>(panel), [](float x) { return x; });
      return;
    case Values::bf16: unpack(reinterpret_cast<const uint16_t*>(panel), float_of_bfloat); return;
    case Values::f16:
      unpack(reinterpret_cast<const uint16_t*>(panel), float_of_half<int32_t>);
      return;
    default: break;
  }
  for (int64_t k = 0; k < inputs; ++k) {
    const Span span = span_of(matrix.format, panel, k, lane);
    y[k] = span.scale * value_of(matrix.format, span.values, k % kGroup, lane) + span.min;
  }
}

void embedding(const PackedMatrix& table, const int64_t* ids, Rows y, int64_t t0, int64_t t1) {
  for (int64_t t = t0; t < t1; ++t) unpack_row(table, ids[t], y.row(t));
}

}  // namespace

void install_rows(Kernels& table) {
  table.rms_norm = rms_norm;
  table.layer_norm = layer_norm;
  table.rotary = rotary;
  table.silu = silu;
  table.gelu = gelu;
  table.gelu_tanh = gelu_tanh;
  table.relu = relu;
  table.silu_mul = silu_mul;
  table.gelu_tanh_mul = gelu_tanh_mul;
  table.add = add;
  table.scale = scale;
  table.clamp = clamp;
  table.softcap = softcap;
  table.take_columns = take_columns;
  table.quantize = quantize;
  table.embedding = embedding;
}

}  // namespace octavo::OCTAVO_ISA
