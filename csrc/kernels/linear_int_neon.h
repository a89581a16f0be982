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
// What has 8 bits is taken as value - 128.
template <WeightFormat format>
inline int8x16_t load_inputs(const uint8_t* values, int i, int quarter) {
  if constexpr (format.values == Values::q8) {
    return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(values + 64 * i + 16 * quarter), vdupq_n_u8(128)));
  } else {
    const uint8x16_t pairs = vld1q_u8(values + 64 * (i / 2) + 16 * quarter);
    const uint8x16_t codes = i % 2 == 0 ? vandq_u8(pairs, vdupq_n_u8(15)) : vshrq_n_u8(pairs, 4);
    if constexpr (format.values == Values::q4) return vreinterpretq_s8_u8(codes);
    return vqtbl1q_s8(vld1q_s8(kE2M1), codes);
  }
}

// The products of inputs 4 i .. 4 i + 3, which lie in lane i % 4 of x.
template <WeightFormat format, int i, int rows>
inline void add_products(const uint8_t* values, const int8x16_t (&x)[rows],
                         int32x4_t (&dot)[rows][4]) {
#pragma GCC unroll 4
  for (int quarter = 0; quarter < 4; ++quarter) {
    const int8x16_t w = load_inputs<format>(values, i, quarter);
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r) {
      dot[r][quarter] = vdotq_laneq_s32(dot[r][quarter], w, x[r], i % 4);
    }
  }
}

template <WeightFormat format, int rows>
inline void multiply(const uint8_t* panel, QuantizedRows x, int64_t row, int64_t ahead,
                     f32x16 (&sum)[rows]) {
  const uint8_t* at[rows];
#pragma GCC unroll 6
  for (int r = 0; r < rows; ++r) at[r] = x.data + (row + r) * x.stride;
  // Where the group's numbers lie, from its values on.
  int64_t scales = x.groups * kGroup;
  int64_t starts = scales + x.groups * 4, sums = scales + x.groups * 8;
  int64_t halves = scales + x.groups * 12;
  // -128 times the sum of the activations that span s is multiplied with.
  const auto start_of = [&](int r, int s) {
    const auto half = [&] { return load_as<int32_t>(at[r] + halves); };
    if (spans(format) == 1) return load_as<int32_t>(at[r] + starts);
    return s == 0 ? half() : load_as<int32_t>(at[r] + starts) - half();
  };

#pragma GCC unroll 6
  for (int r = 0; r < rows; ++r) sum[r] = zero();
  PanelReader<format> weights(panel);
  for (int64_t g = 0; g < x.groups; ++g, weights.next()) {
    if constexpr (rows >= kPrefetchRows) weights.prefetch(ahead);
    for_each_span<format>([&](auto span) {
      constexpr int s = decltype(span)::value;
      asm("" : "+m"(sum));
      int32x4_t dot[rows][4];
#pragma GCC unroll 6
      for (int r = 0; r < rows; ++r) {
        int32_t start = 0;
        if (format.values == Values::q4 && !has_offset(format)) start = start_of(r, s) >> 4;
        if (format.values == Values::q8 && has_offset(format)) start = -start_of(r, s);
        dot[r][0] = dot[r][1] = dot[r][2] = dot[r][3] = vdupq_n_s32(start);
      }
      int8x16_t values[rows];
      const auto load_values = [&](int half) {
#pragma GCC unroll 6
        for (int r = 0; r < rows; ++r) values[r] = load_as<int8x16_t>(at[r] + 16 * half);
      };
      if constexpr (s == 0) {
        load_values(0);
        add_products<format, 0>(weights.values(), values, dot);
        add_products<format, 1>(weights.values(), values, dot);
        add_products<format, 2>(weights.values(), values, dot);
        add_products<format, 3>(weights.values(), values, dot);
      }
      if constexpr (s == 1 || spans(format) == 1) {
        load_values(1);
        add_products<format, 4>(weights.values(), values, dot);
        add_products<format, 5>(weights.values(), values, dot);
        add_products<format, 6>(weights.values(), values, dot);
        add_products<format, 7>(weights.values(), values, dot);
      }

      const f32x16 scale = weights.scale(s), offset = weights.offset(s, scale);
#pragma GCC unroll 6
      for (int r = 0; r < rows; ++r) {
        const f32x16 product{f32x4(vcvtq_f32_s32(dot[r][0])), f32x4(vcvtq_f32_s32(dot[r][1])),
                             f32x4(vcvtq_f32_s32(dot[r][2])), f32x4(vcvtq_f32_s32(dot[r][3]))};
        const float scale_x = load_as<float>(at[r] + scales);
        f32x16 y = fma(product, scale * splat(scale_x), sum[r]);
        if (has_offset(format)) {
          const float sum_x = spans(format) == 1 ? load_as<float>(at[r] + sums)
                                                 : float(start_of(r, s)) * -0x1p-7f * scale_x;
          y = fma(offset, splat(sum_x), y);
        }
        sum[r] = y;
      }
    });
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r) at[r] += kGroup;
    scales += 4 - kGroup;
    starts += 4 - kGroup;
    sums += 4 - kGroup;
    halves += 4 - kGroup;
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
