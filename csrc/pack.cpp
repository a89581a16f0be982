#include "pack.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

#include "float_bits.h"

namespace octavo {
namespace {

// --- floats ---------------------------------------------------------------------------------

// Fills [inputs][16] of one panel. read(lane, first, count, out): values of a row, as T.
template <typename T, typename Read>
void pack_float_panel(int64_t inputs, int64_t num_rows, uint8_t* panel, Read read) {
  alignas(kAlign) T values[kLanes][kGroup] = {};
  for (int64_t first = 0; first < inputs; first += kGroup) {
    const int64_t count = std::min(kGroup, inputs - first);
    for (int64_t lane = 0; lane < num_rows; ++lane) read(lane, first, count, values[lane]);
    T* out = reinterpret_cast<T*>(panel) + first * kLanes;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t lane = 0; lane < kLanes; ++lane) out[i * kLanes + lane] = values[lane][i];
  }
}

void pack_f32_panel(int64_t inputs, const StoredRow* rows, int64_t num_rows, uint8_t* panel) {
  pack_float_panel<float>(inputs, num_rows, panel,
                          [&](int64_t lane, int64_t first, int64_t count, float* out) {
                            read_values(rows[lane], first, count, out);
                          });
}

void pack_16_bit_panel(Values kind, int64_t inputs, const StoredRow* rows, int64_t num_rows,
                       uint8_t* panel) {
  const bool is_bf16 = kind == Values::bf16;
  const StoredType same = is_bf16 ? StoredType::bf16 : StoredType::f16;
  pack_float_panel<uint16_t>(
      inputs, num_rows, panel, [&](int64_t lane, int64_t first, int64_t count, uint16_t* out) {
        if (rows[lane].type == same) {
          std::memcpy(out, rows[lane].data + first * 2, size_t(count) * 2);
          return;
        }
        float values[kGroup];
        read_values(rows[lane], first, count, values);
        for (int64_t i = 0; i < count; ++i)
          out[i] =
              is_bf16 ? bfloat_of_float(values[i]) : uint16_t(half_of_float<int32_t>(values[i]));
      });
}

// --- quantization ---------------------------------------------------------------------------
//
// Four outputs at a time, one in each lane of a vector. Input k of a panel's sixteen outputs is four
// such vectors, [k][4]: functions are given one of them and step by four. A lane's arithmetic is its
// own, so that this vectorises without changing the order of any sum.

constexpr int kQuarters = kLanes / kWidth;

// To nearest even, for |x| < 2^22.
Ints round_to_int(Floats x) { return Ints(x + 0x1.8p23f) - std::bit_cast<int32_t>(0x1.8p23f); }

Floats clamp(Floats x, float low, float high) {
  x = x > low ? x : low;
  return x < high ? x : high;
}

// 1 / x, and 0 where a scale is 0, infinite or no number.
Floats inverse_scale(Floats x) {
  const Ints magnitude = Ints(x) & kMagnitude;
  return (magnitude > 0) & (magnitude < kInfinity) ? 1 / x : Floats{};
}

// The largest |w|, or a NaN if some w is infinite or no number.
Floats largest_magnitude(const Floats* w, int64_t count) {
  Ints largest = {};
  for (int64_t k = 0; k < count * kQuarters; k += kQuarters) {
    const Ints bits = Ints(w[k]) & kMagnitude;  // in the order of the floats, NaN above infinity
    largest = bits > largest ? bits : largest;
  }
  return largest < kInfinity ? Floats(largest) : Floats{} + NAN;
}

// In fp16.
struct Fit {
  Ints scale, min;
};

Ints halves_of(Floats x) { return half_of_float<Ints>(x); }

// w = scale * value, value in -127..127, stored + 128. Of 32 scales from max|w| / 127 up by a third,
// the one with the least squared error. Against the first one, the root mean square error of
// normally distributed weights is 9 % less, that of weights on a grid of 4 bits 41 %; SmolLM2-135M
// in 8 bits is 0.0034 nats (KL) from its float32 instead of 0.0041, and takes a core 1.4 s to pack
// instead of 0.14.
Fit quantize_q8(const Floats* w, int64_t count, Ints* values) {
  constexpr int kTrials = 32;
  const Floats largest = largest_magnitude(w, count);
  Ints first = halves_of(largest / 127);
  // Only subnormal scales lie so far apart that one must be raised, lest a value pass 127. (True is
  // -1.)
  first -= (largest > 0) & (largest >= 127.5f * float_of_half(first));
  Ints best = first;
  Floats least = Floats{} + INFINITY;
  for (int trial = 0; trial < kTrials; ++trial) {
    const Ints next = halves_of(largest / 127 * (1 + float(trial) / 96));
    const Ints half = next > first ? next : first;
    const Floats scale = float_of_half(half), inverse = inverse_scale(scale);
    Floats errors = {};
    for (int64_t k = 0; k < count * kQuarters; k += kQuarters) {
      const Floats error = scale * to_float(round_to_int(w[k] * inverse)) - w[k];
      errors += error * error;
    }
    const Ints is_better = errors < least;
    least = is_better ? errors : least;
    best = is_better ? half : best;
  }
  const Floats inverse = inverse_scale(float_of_half(best));
  for (int64_t k = 0; k < count * kQuarters; k += kQuarters)
    values[k] = round_to_int(clamp(w[k] * inverse, -127, 127)) + 128;
  return {best, Ints{}};
}

// w = scale * (value - 8), value in 0..15. ggml's rule for Q4_0: the largest |w| has the value 0.
Fit quantize_q4(const Floats* w, int64_t count, Ints* values) {
  const Floats largest = largest_magnitude(w, count);
  Floats extreme = largest;
  for (int64_t k = 0; k < count * kQuarters; k += kQuarters)
    extreme = w[k] == -largest ? -largest : extreme;
  const Ints scale = halves_of(extreme / -8);
  const Floats inverse = inverse_scale(float_of_half(scale));
  for (int64_t k = 0; k < count * kQuarters; k += kQuarters)
    values[k] = round_to_int(clamp(w[k] * inverse + 8, 0, 15));
  return {scale, Ints{}};
}

// The values 0..15 that bring scale * value + min nearest to w; returns the sums of squared errors.
Floats nearest_values(const Floats* w, int64_t count, const Fit& fit, Ints* values) {
  const Floats scale = float_of_half(fit.scale), min = float_of_half(fit.min);
  const Floats inverse = inverse_scale(scale);
  Floats errors = {};
  for (int64_t k = 0; k < count * kQuarters; k += kQuarters) {
    values[k] = round_to_int(clamp((w[k] - min) * inverse, 0, 15));
    const Floats error = scale * to_float(values[k]) + min - w[k];
    errors += error * error;
  }
  return errors;
}

// The scale and the minimum that fit best (least squares) if the range from `low` up is divided
// into steps of 1 / inverse.
Fit fit_steps(const Floats* w, int64_t count, Floats low, Floats inverse) {
  Floats sum_v = {}, sum_vv = {}, sum_x = {}, sum_vx = {};  // x = w - low keeps more digits than w
  for (int64_t k = 0; k < count * kQuarters; k += kQuarters) {
    const Floats x = w[k] - low;
    const Floats v = to_float(round_to_int(clamp(x * inverse, 0, 15)));
    sum_v += v;
    sum_vv += v * v;
    sum_x += x;
    sum_vx += v * x;
  }
  const float n = float(count);
  const Floats determinant = n * sum_vv - sum_v * sum_v;
  return {halves_of((n * sum_vx - sum_v * sum_x) / determinant),
          halves_of(low + (sum_vv * sum_x - sum_v * sum_vx) / determinant)};
}

// w = scale * value + min, value in 0..15. Of six fits the one with the least squared error: the
// plain one, 15 steps from the smallest w to the largest, which is exact for weights that lie on
// such a grid; and the best scale and minimum for ranges of 14 to 16 steps. Of normally distributed
// weights the root mean square error is 7.1 % instead of 7.8 %.
Fit quantize_q4_min(const Floats* w, int64_t count, Ints* values, Ints* trial) {
  const Floats largest = largest_magnitude(w, count);
  Floats low = w[0], high = w[0];
  for (int64_t k = 0; k < count * kQuarters; k += kQuarters) {
    low = w[k] < low ? w[k] : low;
    high = w[k] > high ? w[k] : high;
  }
  Fit best{halves_of((high - low) / 15), halves_of(largest == largest ? low : NAN)};
  Floats least = nearest_values(w, count, best, values);
  for (const float steps : {14.0f, 14.5f, 15.0f, 15.5f, 16.0f}) {
    const Fit fit = fit_steps(w, count, low, inverse_scale(high - low) * steps);
    const Floats errors = nearest_values(w, count, fit, trial);
    const Ints is_better = errors < least;
    least = is_better ? errors : least;
    for (int64_t k = 0; k < count * kQuarters; k += kQuarters)
      values[k] = is_better ? trial[k] : values[k];
    best.scale = is_better ? fit.scale : best.scale;
    best.min = is_better ? fit.min : best.min;
  }
  return best;
}

// w = scale * value, the scale such that the largest |w| has the largest value, 448.
Floats fit_f8(const Floats* w, int64_t count) { return largest_magnitude(w, count) / 448; }

// --- panels with scales ---------------------------------------------------------------------

// Where the parts of one panel's groups lie.
struct ScaledPanel {
  WeightFormat format;
  uint8_t* data;

  uint8_t* values(int64_t g) const { return data + offsets(g).values; }
  // Of one lane; s: which of the group's.
  void put_scale(int64_t g, int64_t s, int64_t lane, float scale) const {
    put(offsets(g).scales, s * kLanes + lane, scale);
  }
  void put_offset(int64_t g, int64_t s, int64_t lane, float offset) const {
    put(offsets(g).offsets, s * kLanes + lane, offset);
  }
  // Of K-quants.
  void put_bytes(int64_t g, int64_t lane, const StoredGroup& group) const {
    const GroupOffsets at = offsets(g);
    const auto put = [&](int64_t bytes, int64_t factors, const int8_t* own, uint16_t factor) {
      for (int64_t s = 0; s < kGroup / format.span; ++s)
        store(data + bytes + s * kLanes + lane, own[s]);
      store(data + factors + lane * 2, factor);
    };
    put(at.scales, at.factors, group.scale_bytes, group.scale_factor);
    if (format.offset != Offset::none)
      put(at.offsets, at.factors + 2 * kLanes, group.min_bytes, group.min_factor);
  }

 private:
  GroupOffsets offsets(int64_t g) const { return group_offsets(format, g); }
  void put(int64_t begin, int64_t number, float x) const {
    switch (format.scales) {
      case Scales::f16:
        store(data + begin + number * 2, uint16_t(half_of_float<int32_t>(x)));
        return;
      case Scales::bf16: store(data + begin + number * 2, bfloat_of_float(x)); return;
      case Scales::f32: store(data + begin + number * 4, x); return;
      case Scales::k8: return;  // put_bytes
    }
  }
};

// Room for the weights of a panel, and for their values in two forms, [inputs][16] each.
// Values beyond the inputs stay what they are at first, which stands for a weight of zero.
struct Scratch {
  Scratch(const WeightFormat& format, int64_t inputs)
      : weights(size_t(round_up(inputs, kGroup) * kQuarters)),
        values(weights.size(), Ints{} + (format.values == Values::q8   ? 128
                                         : format.values == Values::q4 ? 8
                                                                       : 0)),
        trial(weights.size()) {}
  std::vector<Floats> weights;
  std::vector<Ints> values, trial;
};

// A group's values to the bytes, or pairs of nibbles, of formats.h: a vector has four lanes' words.
void put_group(Values kind, const Ints* values, Ints* out) {
  const auto value = [&](int k) { return values[k * kQuarters]; };
  if (kind == Values::q8) {
    for (int j = 0; j < 8; ++j)
      out[j * kQuarters] =
          value(4 * j) | value(4 * j + 1) << 8 | value(4 * j + 2) << 16 | value(4 * j + 3) << 24;
    return;
  }
  for (int j = 0; j < 4; ++j) {
    Ints word = {};
    for (int b = 0; b < 4; ++b) word |= (value(8 * j + b) | value(8 * j + b + 4) << 4) << (8 * b);
    out[j * kQuarters] = word;
  }
}

void quantize_panel(int64_t inputs, int64_t scale_group, ScaledPanel panel, Scratch& scratch) {
  const WeightFormat& format = panel.format;
  const int64_t groups = ceil_div(inputs, kGroup);
  const bool has_min = format.offset == Offset::min;
  for (int quarter = 0; quarter < kQuarters; ++quarter) {
    const Floats* w = scratch.weights.data() + quarter;
    Ints* values = scratch.values.data() + quarter;
    for (int64_t first = 0; first < inputs; first += scale_group) {
      const int64_t count = std::min(scale_group, inputs - first), at = first * kQuarters;
      const Fit fit = format.values == Values::q8 ? quantize_q8(w + at, count, values + at)
                      : !has_min
                          ? quantize_q4(w + at, count, values + at)
                          : quantize_q4_min(w + at, count, values + at, scratch.trial.data());
      const Floats scale = float_of_half(fit.scale), min = float_of_half(fit.min);
      for (int64_t g = first / kGroup; g < ceil_div(first + count, kGroup); ++g)
        for (int i = 0; i < kWidth; ++i) {
          panel.put_scale(g, 0, quarter * kWidth + i, scale[i]);
          if (has_min) panel.put_offset(g, 0, quarter * kWidth + i, min[i]);
        }
    }
    for (int64_t g = 0; g < groups; ++g)
      put_group(format.values, values + g * kGroup * kQuarters,
                reinterpret_cast<Ints*>(panel.values(g)) + quarter);
  }
}

void quantize_f8_panel(int64_t inputs, int64_t scale_group, ScaledPanel panel, Scratch& scratch) {
  const auto* weights = reinterpret_cast<const float*>(scratch.weights.data());
  for (int64_t first = 0; first < inputs; first += scale_group) {
    const int64_t end = std::min(first + scale_group, inputs);
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const Floats scales =
          fit_f8(scratch.weights.data() + first * kQuarters + lane / kWidth, end - first);
      const float scale = scales[lane % kWidth];
      // Of a subnormal scale it may be infinite, which zeros must not be multiplied by.
      const float inverse = scale >= FLT_MIN ? 1 / scale : 0;
      for (int64_t g = first / kGroup; g * kGroup < end; ++g) panel.put_scale(g, 0, lane, scale);
      for (int64_t k = first; k < end; ++k)
        panel.values(k / kGroup)[k % kGroup * kLanes + lane] =
            f8e4m3_of_float(weights[k * kLanes + lane] * inverse);
    }
  }
}

// One lane's values of a group, as the panel's format has them.
void put_codes(Values kind, const uint8_t* codes, int64_t lane, uint8_t* values) {
  switch (kind) {
    case Values::q8:
      for (int j = 0; j < 8; ++j)
        store(values + j * kLanes * 4 + lane * 4, load<uint32_t>(codes + 4 * j));
      return;
    case Values::f8e4m3:  // both NaN become the one that kernels know
      for (int i = 0; i < kGroup; ++i)
        values[i * kLanes + lane] = codes[i] == 0xff ? 0x7f : codes[i];
      return;
    default:
      for (int j = 0; j < 4; ++j) {
        const auto low = load<uint32_t>(codes + 8 * j), high = load<uint32_t>(codes + 8 * j + 4);
        store(values + j * kLanes * 4 + lane * 4, low | high << 4);
      }
      return;
  }
}

void keep_blocks(const StoredRow& row, int64_t groups, int64_t lane, ScaledPanel panel) {
  const WeightFormat& format = panel.format;
  StoredGroup group;
  for (int64_t g = 0; g < groups; ++g) {
    read_group(row, g, group);
    put_codes(format.values, group.codes, lane, panel.values(g));
    if (format.scales == Scales::k8) {
      panel.put_bytes(g, lane, group);
      continue;
    }
    panel.put_scale(g, 0, lane, group.scales[0]);
    if (format.offset == Offset::min)
      panel.put_offset(g, 0, lane, group.mins[0] - group.scales[0] * float(group.zero));
  }
}

void keep_codes(const StoredRow& row, int64_t inputs, int64_t lane, ScaledPanel panel) {
  const WeightFormat& format = panel.format;
  const float unit = format.values == Values::e2m1 ? 0.5f : 1.0f;
  const uint8_t largest = format.values == Values::q8 || format.values == Values::f8e4m3 ? 255 : 15;
  for (int64_t g = 0; g * kGroup < inputs; ++g) {
    uint8_t codes[kGroup] = {};
    const int64_t count = std::min(kGroup, inputs - g * kGroup);
    for (int64_t i = 0; i < count; ++i) codes[i] = row.data[g * kGroup + i] & largest;
    put_codes(format.values, codes, lane, panel.values(g));
    const int64_t spans = kGroup / format.span, last = ceil_div(inputs, format.span) - 1;
    for (int64_t s = 0; s < spans; ++s) {
      const int64_t number = std::min(g * spans + s, last);
      panel.put_scale(g, s, lane, row.scales[number] * unit);
      if (format.offset == Offset::none) continue;
      const float sign = format.offset == Offset::zero ? -1.0f : 1.0f;
      panel.put_offset(g, s, lane, sign * row.offsets[number]);
    }
  }
}

bool is_float(StoredType type) {
  return type == StoredType::f32 || type == StoredType::bf16 || type == StoredType::f16;
}

// Whether the row's blocks are of the panel's own kind.
bool keeps_blocks(const WeightFormat& format, StoredType type) {
  if (is_float(type) || type == StoredType::codes) return false;
  return format == format_of_blocks(type) ||
         (type == StoredType::q4_0 && format == format_of_blocks(StoredType::q4_1));
}

bool quantizes_floats(const WeightFormat& format) {
  return format == WeightFormat{Values::q8, Scales::f16} ||
         format == WeightFormat{Values::q4, Scales::f16} ||
         format == WeightFormat{Values::q4, Scales::f16, Offset::min} ||
         format == WeightFormat{Values::f8e4m3, Scales::f32};
}

void pack_scaled_panel(const WeightFormat& format, int64_t inputs, const StoredRow* rows,
                       int64_t num_rows, int64_t scale_group, uint8_t* data, Scratch& scratch) {
  const ScaledPanel panel{format, data};
  const auto is_kept = [&](const StoredRow& row) {
    return row.type == StoredType::codes || keeps_blocks(format, row.type);
  };
  if (!std::all_of(rows, rows + num_rows, is_kept)) {
    auto* weights = reinterpret_cast<float*>(scratch.weights.data());
    pack_float_panel<float>(inputs, num_rows, reinterpret_cast<uint8_t*>(weights),
                            [&](int64_t lane, int64_t first, int64_t count, float* out) {
                              if (is_kept(rows[lane])) return;
                              read_values(rows[lane], first, count, out);
                            });
    if (format.values == Values::f8e4m3)
      quantize_f8_panel(inputs, scale_group, panel, scratch);
    else
      quantize_panel(inputs, scale_group, panel, scratch);
  }
  for (int64_t lane = 0; lane < num_rows; ++lane) {
    if (rows[lane].type == StoredType::codes)
      keep_codes(rows[lane], inputs, lane, panel);
    else if (is_kept(rows[lane]))
      keep_blocks(rows[lane], ceil_div(inputs, kGroup), lane, panel);
  }
}

}  // namespace

bool can_pack(const WeightFormat& format, StoredType type) {
  if (type == StoredType::codes) return !is_plain(format.values) && format.scales != Scales::k8;
  return is_plain(format.values) || quantizes_floats(format) || keeps_blocks(format, type);
}

void pack_panels(const WeightFormat& format, int64_t inputs, const StoredRow* rows,
                 int64_t num_rows, int64_t scale_group, uint8_t* panels) {
  const int64_t stride = panel_bytes(format, inputs);
  Scratch scratch(format, inputs);
  for (int64_t first = 0; first < num_rows; first += kLanes, panels += stride) {
    const StoredRow* panel_rows = rows + first;
    const int64_t count = std::min(kLanes, num_rows - first);
    if (count < kLanes) std::memset(panels, 0, size_t(stride));
    switch (format.values) {
      case Values::f32: pack_f32_panel(inputs, panel_rows, count, panels); break;
      case Values::bf16:
      case Values::f16: pack_16_bit_panel(format.values, inputs, panel_rows, count, panels); break;
      default:
        pack_scaled_panel(format, inputs, panel_rows, count, scale_group, panels, scratch);
        break;
    }
  }
}

}  // namespace octavo
