#include "pack.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

namespace octavo {
namespace {

// Four floats, or integers, that any processor has as one vector.
constexpr int kWidth = 4;
using Floats = float __attribute__((vector_size(4 * kWidth)));
using Ints = int32_t __attribute__((vector_size(4 * kWidth)));
using Halves = uint16_t __attribute__((vector_size(2 * kWidth)));

constexpr int32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;

template <typename T>
T load(const void* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

template <typename T>
void store(void* p, T x) {
  std::memcpy(p, &x, sizeof x);
}

float to_float(int32_t x) { return float(x); }
Floats to_float(Ints x) { return __builtin_convertvector(x, Floats); }

// fp16 <-> float32, of one number (Int is int32_t, Float is float) or of four. Every case is
// computed and one is taken, so that loops over numbers vectorise, too.

template <typename Int>
auto float_of_half(Int half) {
  using Float = decltype(to_float(half));
  const Int rest = half & 0x7fff;
  // Subnormals go through an integer: a thread may take subnormal floats for zero.
  const Float subnormal = to_float(rest) * 0x1p-24f;
  const Float normal = std::bit_cast<Float>((rest << 13) + (112 << 23));
  const Float special = std::bit_cast<Float>(rest << 13 | kInfinity);
  const Float finite = rest < 0x400 ? subnormal : normal;
  const Float magnitude = rest < 0x7c00 ? finite : special;
  return std::bit_cast<Float>(std::bit_cast<Int>(magnitude) | (half & 0x8000) << 16);
}

template <typename Int, typename Float>
Int half_of_float(Float x) {
  const Int bits = std::bit_cast<Int>(x), rest = bits & kMagnitude;
  const Int normal = (rest + 0xfff + (rest >> 13 & 1) - (112 << 23)) >> 13;
  // Halves below 2^-14 lie as far apart as floats from 0.5 on.
  const Int subnormal =
      std::bit_cast<Int>(std::bit_cast<Float>(rest) + 0.5f) - std::bit_cast<int32_t>(0.5f);
  const Int finite = rest < 0x38800000 ? subnormal : normal;
  const Int rounded = rest < 0x477ff000 ? finite : Int{} + 0x7c00;   // 65520 and more: infinity
  return (rest > kInfinity ? Int{} + 0x7e00 : rounded) | (bits >> 16 & 0x8000);
}

float float_of_bfloat(uint16_t b) { return std::bit_cast<float>(uint32_t(b) << 16); }

uint16_t bfloat_of_float(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
  return uint16_t(((bits & kMagnitude) > kInfinity ? bits | 0x400000 : rounded) >> 16);
}

int64_t block_bytes(StoredType type) {
  switch (type) {
    case StoredType::q8_0: return 2 + kGroup;
    case StoredType::q4_0: return 2 + kGroup / 2;
    case StoredType::q4_1: return 4 + kGroup / 2;
    default: return 0;
  }
}

// The sixteen bytes of nibbles in a block of q4_0 or q4_1.
const uint8_t* nibbles(const StoredRow& row, int64_t group) {
  return row.data + (group + 1) * block_bytes(row.type) - kGroup / 2;
}

// `count` values of a row as float32, from `first` on, a multiple of 32 (and so is the length of
// rows of blocks).
void read_values(const StoredRow& row, int64_t first, int64_t count, float* out) {
  switch (row.type) {
    case StoredType::f32: std::memcpy(out, row.data + first * 4, size_t(count) * 4); return;
    case StoredType::bf16:
      for (int64_t i = 0; i < count; ++i)
        out[i] = float_of_bfloat(load<uint16_t>(row.data + (first + i) * 2));
      return;
    case StoredType::f16:
      for (int64_t i = 0; i < count; ++i)
        out[i] = float_of_half<int32_t>(load<uint16_t>(row.data + (first + i) * 2));
      return;
    default: break;
  }
  for (int64_t done = 0; done < count; done += kGroup, out += kGroup) {
    const int64_t group = (first + done) / kGroup;
    const uint8_t* block = row.data + group * block_bytes(row.type);
    const float scale = float_of_half<int32_t>(load<uint16_t>(block));
    if (row.type == StoredType::q8_0) {
      for (int i = 0; i < kGroup; ++i) out[i] = scale * float(int8_t(block[2 + i]));
      continue;
    }
    const float min =
        row.type == StoredType::q4_1 ? float_of_half<int32_t>(load<uint16_t>(block + 2)) : 0;
    const int zero = row.type == StoredType::q4_1 ? 0 : 8;
    const uint8_t* pairs = nibbles(row, group);
    for (int i = 0; i < 16; ++i) {
      out[i] = scale * float((pairs[i] & 15) - zero) + min;
      out[i + 16] = scale * float((pairs[i] >> 4) - zero) + min;
    }
  }
}

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

void pack_16_bit_panel(WeightFormat format, int64_t inputs, const StoredRow* rows, int64_t num_rows,
                       uint8_t* panel) {
  const bool is_bf16 = format == WeightFormat::bf16;
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

// --- panels of 8 and 4 bits -----------------------------------------------------------------

// Where the parts of one panel's groups lie.
struct QuantizedPanel {
  WeightFormat format;
  bool has_min;
  uint8_t* data;

  uint8_t* values(int64_t g) const { return data + offsets(g).values; }
  uint16_t* scales(int64_t g) const {
    return reinterpret_cast<uint16_t*>(data + offsets(g).scales);
  }
  uint16_t* mins(int64_t g) const { return reinterpret_cast<uint16_t*>(data + offsets(g).mins); }

 private:
  GroupOffsets offsets(int64_t g) const { return group_offsets(format, has_min, g); }
};

// Room for the weights of a panel, and for their values in two forms, [inputs][16] each.
// Values beyond the inputs stay what they are at first, which stands for a weight of zero.
struct Scratch {
  Scratch(WeightFormat format, int64_t inputs)
      : weights(size_t(round_up(inputs, kGroup) * kQuarters)),
        values(weights.size(), Ints{} + (format == WeightFormat::q8 ? 128 : 8)),
        trial(weights.size()) {}
  std::vector<Floats> weights;
  std::vector<Ints> values, trial;
};

// A group's values to the bytes, or pairs of nibbles, of formats.h: a vector has four lanes' words.
void put_group(WeightFormat format, const Ints* values, Ints* out) {
  const auto value = [&](int k) { return values[k * kQuarters]; };
  if (format == WeightFormat::q8) {
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

void quantize_panel(WeightFormat format, bool has_min, int64_t inputs, int64_t scale_group,
                    QuantizedPanel panel, Scratch& scratch) {
  const int64_t groups = ceil_div(inputs, kGroup);
  for (int quarter = 0; quarter < kQuarters; ++quarter) {
    const Floats* w = scratch.weights.data() + quarter;
    Ints* values = scratch.values.data() + quarter;
    for (int64_t first = 0; first < inputs; first += scale_group) {
      const int64_t count = std::min(scale_group, inputs - first), at = first * kQuarters;
      const Fit fit = format == WeightFormat::q8 ? quantize_q8(w + at, count, values + at)
                      : !has_min
                          ? quantize_q4(w + at, count, values + at)
                          : quantize_q4_min(w + at, count, values + at, scratch.trial.data());
      for (int64_t g = first / kGroup; g < ceil_div(first + count, kGroup); ++g) {
        const int64_t lane = quarter * kWidth;
        store(panel.scales(g) + lane, __builtin_convertvector(fit.scale, Halves));
        if (has_min) store(panel.mins(g) + lane, __builtin_convertvector(fit.min, Halves));
      }
    }
    for (int64_t g = 0; g < groups; ++g)
      put_group(format, values + g * kGroup * kQuarters,
                reinterpret_cast<Ints*>(panel.values(g)) + quarter);
  }
}

// Whether the row's blocks are of the panel's own kind.
bool keeps_blocks(WeightFormat format, bool has_min, StoredType type) {
  if (format == WeightFormat::q8) return type == StoredType::q8_0;
  return type == StoredType::q4_0 || (type == StoredType::q4_1 && has_min);
}

void copy_q8_0_row(const StoredRow& row, int64_t groups, int64_t lane, QuantizedPanel panel) {
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* block = row.data + g * block_bytes(row.type);
    panel.scales(g)[lane] = load<uint16_t>(block);
    uint8_t* out = panel.values(g) + lane * 4;
    for (int j = 0; j < 8; ++j)  // + 128 each
      store(out + j * kLanes * 4, load<uint32_t>(block + 2 + 4 * j) ^ 0x80808080u);
  }
}

void copy_q4_row(const StoredRow& row, bool has_min, int64_t groups, int64_t lane,
                 QuantizedPanel panel) {
  constexpr uint32_t kLow = 0x0f0f0f0f;
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* block = row.data + g * block_bytes(row.type);
    const auto scale = load<uint16_t>(block);
    panel.scales(g)[lane] = scale;
    if (has_min)
      panel.mins(g)[lane] =
          row.type == StoredType::q4_1
              ? load<uint16_t>(block + 2)
              : uint16_t(half_of_float<int32_t>(-8 * float_of_half<int32_t>(scale)));
    const uint8_t* pairs = nibbles(row, g);
    uint8_t* out = panel.values(g) + lane * 4;
    for (int j = 0; j < 2; ++j) {  // values 8 j .. 8 j + 7 and, in the high nibbles, 16 more
      const auto first = load<uint32_t>(pairs + 8 * j), second = load<uint32_t>(pairs + 8 * j + 4);
      store(out + j * kLanes * 4, (first & kLow) | (second & kLow) << 4);
      store(out + (j + 2) * kLanes * 4, (first >> 4 & kLow) | (second & ~kLow));
    }
  }
}

void pack_quantized_panel(WeightFormat format, bool has_min, int64_t inputs, const StoredRow* rows,
                          int64_t num_rows, int64_t scale_group, uint8_t* data, Scratch& scratch) {
  const QuantizedPanel panel{format, has_min, data};
  const auto is_kept = [&](const StoredRow& row) {
    return keeps_blocks(format, has_min, row.type);
  };
  if (!std::all_of(rows, rows + num_rows, is_kept)) {
    pack_f32_panel(inputs, rows, num_rows, reinterpret_cast<uint8_t*>(scratch.weights.data()));
    quantize_panel(format, has_min, inputs, scale_group, panel, scratch);
  }
  for (int64_t lane = 0; lane < num_rows; ++lane) {
    if (!is_kept(rows[lane])) continue;
    const int64_t groups = ceil_div(inputs, kGroup);
    if (format == WeightFormat::q8)
      copy_q8_0_row(rows[lane], groups, lane, panel);
    else
      copy_q4_row(rows[lane], has_min, groups, lane, panel);
  }
}

}  // namespace

int64_t stored_row_bytes(StoredType type, int64_t inputs) {
  switch (type) {
    case StoredType::f32: return inputs * 4;
    case StoredType::bf16:
    case StoredType::f16: return inputs * 2;
    default: return ceil_div(inputs, kGroup) * block_bytes(type);
  }
}

void pack_panels(WeightFormat format, bool has_min, int64_t inputs, const StoredRow* rows,
                 int64_t num_rows, int64_t scale_group, uint8_t* panels) {
  const int64_t stride = panel_bytes(format, has_min, inputs);
  Scratch scratch(format, inputs);
  for (int64_t first = 0; first < num_rows; first += kLanes, panels += stride) {
    const StoredRow* panel_rows = rows + first;
    const int64_t count = std::min(kLanes, num_rows - first);
    if (count < kLanes) std::memset(panels, 0, size_t(stride));
    switch (format) {
      case WeightFormat::f32: pack_f32_panel(inputs, panel_rows, count, panels); break;
      case WeightFormat::bf16:
      case WeightFormat::f16: pack_16_bit_panel(format, inputs, panel_rows, count, panels); break;
      case WeightFormat::q8:
      case WeightFormat::q4:
        pack_quantized_panel(format, has_min, inputs, panel_rows, count, scale_group, panels,
                             scratch);
        break;
    }
  }
}

}  // namespace octavo
