// The products of linear_int on vectors of 128 bits, which the compiler maps to what the processor
// has (SSE2, NEON). Values are taken as nibbles times int8 activations, both as int16: a group's 16
// products in one lane fit, 16 * 15 * 127 = 30480. A q8 value is two nibbles, summed apart.
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

template <Weights kind, int rows>
inline void multiply(const uint8_t* panel, QuantizedRows x, int64_t row, int64_t ahead,
                     f32x16 (&sum)[rows]) {
  constexpr bool is_q8 = kind == Weights::q8;
  for (int r = 0; r < rows; ++r) sum[r] = zero();
  PanelReader<kind> weights(panel);
  for (int64_t g = 0; g < x.groups; ++g, weights.next()) {
    if constexpr (rows >= kPrefetchRows) weights.prefetch(ahead);
    i16x8 even[rows][8], odd[rows][8];  // of each four activations
    int32_t start[rows];
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
      start[r] = is_q8 ? x.starts(row + r)[g] : has_min(kind) ? 0 : x.starts(row + r)[g] / 16;
    }

    float dot[rows][kLanes];
    for (int quarter = 0; quarter < 4; ++quarter) {
      i16x8 low[rows] = {}, high[rows] = {};  // high: 16ths of it
#pragma GCC unroll 8
      for (int j = 0; j < (is_q8 ? 8 : 4); ++j) {
        const auto w = load_as<u16x8>(weights.values() + 64 * j + 16 * quarter);
        const i16x8 w0 = i16x8(w & 15), w1 = i16x8(w >> 4 & 15);
        const i16x8 w2 = i16x8(w >> 8 & 15), w3 = i16x8(w >> 12);
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
        i32x4 total = pair_sums(low[r]) + start[r];
        if (is_q8) total += pair_sums(high[r]) << 4;
        const f32x4 product = __builtin_convertvector(total, f32x4);
        std::memcpy(dot[r] + 4 * quarter, &product, sizeof product);
      }
    }

    const f32x16 scale = load_f16(weights.scales());
    const f32x16 min = has_min(kind) ? load_f16(weights.mins()) : zero();
    for (int r = 0; r < rows; ++r) {
      sum[r] = fma(load(dot[r]), scale * splat(x.scales(row + r)[g]), sum[r]);
      if (has_min(kind)) sum[r] = fma(min, splat(x.sums(row + r)[g]), sum[r]);
    }
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
