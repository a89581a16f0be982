// The products of linear_int with NEON's dot products (sdot): four bytes of each of 4 outputs times
// four bytes of a row, which are one lane of its register. The values of q8 become signed for it by
// one exclusive or, whose cost all rows of a tile share.
#pragma once

#include "linear_int_panel.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Registers: 6 rows of integer sums, four each, 6 of activations, 1 of values and a constant. The
// float sums are needed once a group only, and wait in memory in between.
constexpr int kTileRows = 6;
constexpr int kPrefetchRows = 2;

// Inputs 4 i .. 4 i + 3 of the outputs of one quarter of a panel, from the values of a group.
template <Weights kind>
inline int8x16_t load_inputs(const uint8_t* values, int i, int quarter) {
  if (kind == Weights::q8) {
    return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(values + 64 * i + 16 * quarter), vdupq_n_u8(128)));
  }
  const uint8x16_t pairs = vld1q_u8(values + 64 * (i / 2) + 16 * quarter);
  return vreinterpretq_s8_u8(i % 2 == 0 ? vandq_u8(pairs, vdupq_n_u8(15)) : vshrq_n_u8(pairs, 4));
}

// The products of inputs 4 i .. 4 i + 3, which lie in lane i % 4 of x.
template <Weights kind, int i, int rows>
inline void add_products(const uint8_t* values, const int8x16_t (&x)[rows],
                         int32x4_t (&dot)[rows][4]) {
#pragma GCC unroll 4
  for (int quarter = 0; quarter < 4; ++quarter) {
    const int8x16_t w = load_inputs<kind>(values, i, quarter);
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r) {
      dot[r][quarter] = vdotq_laneq_s32(dot[r][quarter], w, x[r], i % 4);
    }
  }
}

template <Weights kind, int rows>
inline void multiply(const uint8_t* panel, QuantizedRows x, int64_t row, int64_t ahead,
                     f32x16 (&sum)[rows]) {
  const uint8_t* at[rows];
#pragma GCC unroll 6
  for (int r = 0; r < rows; ++r) at[r] = x.data + (row + r) * x.stride;
  // Where the group's numbers lie, from its values on.
  int64_t scales = x.groups * kGroup;
  int64_t starts = scales + x.groups * 4, sums = scales + x.groups * 8;

#pragma GCC unroll 6
  for (int r = 0; r < rows; ++r) sum[r] = zero();
  PanelReader<kind> weights(panel);
  for (int64_t g = 0; g < x.groups; ++g, weights.next()) {
    asm("" : "+m"(sum));
    if constexpr (rows >= kPrefetchRows) weights.prefetch(ahead);
    int32x4_t dot[rows][4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r) {
      // Of q4 without a minimum: -8 * sum(values).
      const int32_t start = kind == Weights::q4 ? load_as<int32_t>(at[r] + starts) >> 4 : 0;
      dot[r][0] = dot[r][1] = dot[r][2] = dot[r][3] = vdupq_n_s32(start);
    }
    int8x16_t values[rows];
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r) values[r] = load_as<int8x16_t>(at[r]);
    add_products<kind, 0>(weights.values(), values, dot);
    add_products<kind, 1>(weights.values(), values, dot);
    add_products<kind, 2>(weights.values(), values, dot);
    add_products<kind, 3>(weights.values(), values, dot);
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r) values[r] = load_as<int8x16_t>(at[r] + 16);
    add_products<kind, 4>(weights.values(), values, dot);
    add_products<kind, 5>(weights.values(), values, dot);
    add_products<kind, 6>(weights.values(), values, dot);
    add_products<kind, 7>(weights.values(), values, dot);

    const f32x16 scale = load_f16(weights.scales());
    const f32x16 min = has_min(kind) ? load_f16(weights.mins()) : zero();
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r) {
      const f32x16 product{f32x4(vcvtq_f32_s32(dot[r][0])), f32x4(vcvtq_f32_s32(dot[r][1])),
                           f32x4(vcvtq_f32_s32(dot[r][2])), f32x4(vcvtq_f32_s32(dot[r][3]))};
      f32x16 y = fma(product, scale * splat(load_as<float>(at[r] + scales)), sum[r]);
      if (has_min(kind)) y = fma(min, splat(load_as<float>(at[r] + sums)), y);
      sum[r] = y;
      at[r] += kGroup;
    }
    scales += 4 - kGroup;
    starts += 4 - kGroup;
    sums += 4 - kGroup;
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
