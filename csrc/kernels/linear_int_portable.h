// The products of linear_int on vectors of 128 bits, which the compiler maps to what the processor
// has (SSE2, NEON). Values are taken as nibbles times int8 activations, both as int16: a group's 16
// products in one lane fit, 16 * 15 * 127 = 30480. A q8 value is two nibbles, summed apart; that of a
// table is computed.
#pragma once

#include "linear_int_panel.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kTileRows = 4;
constexpr int kPrefetchRows = 2;

typedef int16_t i16x8 __attribute__((vector_size(16)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));

inline i16x8 splat_pair(i32x4 pairs, int i) {
  return i16x8(i32x4{pairs[i], pairs[i], pairs[i], pairs[i]});
}
// Of neighbours, which are two products of one output.
inline i32x4 pair_sums(i16x8 a) { return (i32x4(a) << 16 >> 16) + (i32x4(a) >> 16); }

// What codes of four bits stand for: themselves, or kE2M1's numbers, of which eight steps become
// larger at 4 and at 6.
template <Values kind>
inline i16x8 values_of(i16x8 codes) {
  if (kind != Values::e2m1) return codes;
  const i16x8 step = codes & 7;
  const i16x8 size = step + ((step - 4) & (step > 4)) + ((step - 6) * 2 & (step > 6));
  return codes > 7 ? -size : size;
}

template <WeightFormat format, int rows>
inline void multiply(const uint8_t* panel, QuantizedRows x, int64_t row, int64_t ahead,
                     f32x16 (&sum)[rows]) {
  constexpr bool is_q8 = format.values == Values::q8;
  for (int r = 0; r < rows; ++r) sum[r] = zero();
  PanelReader<format> weights(panel);
  for (int64_t g = 0; g < x.groups; ++g, weights.next()) {
    if constexpr (rows >= kPrefetchRows) weights.prefetch(ahead);
    i16x8 even[rows][8], odd[rows][8];  // of each four activations
    for (int r = 0; r < rows; ++r) {
      for (int half = 0; half < 2; ++half) {
        const auto bytes = load_as<i16x8>(x.values(row + r) + g * kGroup + 16 * half);
        const auto even_pairs = i32x4(bytes << 8 >> 8), odd_pairs = i32x4(bytes >> 8);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          even[r][4 * half + i] = splat_pair(even_pairs, i);
          odd[r][4 * half + i] = splat_pair(odd_pairs, i);
        }
      }
    }
    for_each_span<format>([&](auto span) {
      constexpr int s = decltype(span)::value, kSteps = (is_q8 ? 8 : 4) / spans(format);
      // -128 times the sum of the activations that the span is multiplied with.
      int32_t start[rows];
      for (int r = 0; r < rows; ++r) {
        const int32_t half = spans(format) == 1 ? 0 : x.halves(row + r)[g];
        start[r] = spans(format) == 2 && s == 0 ? half : x.starts(row + r)[g] - half;
      }

      float dot[rows][kLanes];
      for (int quarter = 0; quarter < 4; ++quarter) {
        i16x8 low[rows] = {}, high[rows] = {};  // high: 16ths of it
#pragma GCC unroll 8
        for (int j = kSteps * s; j < kSteps * (s + 1); ++j) {
          const auto w = load_as<u16x8>(weights.values() + 64 * j + 16 * quarter);
          const auto nibbles = [w](int shift) {
            return values_of<format.values>(i16x8(w >> shift & 15));
          };
          const i16x8 w0 = nibbles(0), w1 = nibbles(4), w2 = nibbles(8), w3 = nibbles(12);
#pragma GCC unroll 4
          for (int r = 0; r < rows; ++r) {
            if (is_q8) {
              low[r] += w0 * even[r][j] + w2 * odd[r][j];
              high[r] += w1 * even[r][j] + w3 * odd[r][j];
            } else {
              low[r] += w0 * even[r][2 * j] + w2 * odd[r][2 * j];
              low[r] += w1 * even[r][2 * j + 1] + w3 * odd[r][2 * j + 1];
            }
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
          i32x4 total = pair_sums(low[r]);
          if (is_q8) total += pair_sums(high[r]) << 4;
          if (!has_offset(format) && format.values != Values::e2m1)
            total += is_q8 ? start[r] : start[r] / 16;
          const f32x4 product = __builtin_convertvector(total, f32x4);
          std::memcpy(dot[r] + 4 * quarter, &product, sizeof product);
        }
      }

      const f32x16 scale = weights.scale(s), offset = weights.offset(s, scale);
      for (int r = 0; r < rows; ++r) {
        const float scale_x = x.scales(row + r)[g];
        sum[r] = fma(load(dot[r]), scale * splat(scale_x), sum[r]);
        if (has_offset(format)) {
          const float sum_x =
              spans(format) == 1 ? x.sums(row + r)[g] : float(start[r]) * -0x1p-7f * scale_x;
          sum[r] = fma(offset, splat(sum_x), sum[r]);
        }
      }
    });
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
