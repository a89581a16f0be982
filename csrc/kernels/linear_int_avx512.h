// The products of linear_int with VNNI: four bytes of a row, broadcast, times four bytes of each of
// 16 outputs in one vpdpbusd. A group of 32 takes a row 8 of these, and 2 multiplications for its
// scale (3 with a minimum), all on the same two ports of Zen 4: at most 80 % (73 %) of the integer
// peak. A tile reaches 77 to 78 % (71 %).
#pragma once

#include "linear_int_panel.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Registers: 12 rows of integer and of float sums, and a few for what is read.
constexpr int kTileRows = 12;
// Of fewer rows the hardware's own prefetching is enough, and ours was in its way.
constexpr int kPrefetchRows = 6;

inline __m512i broadcast(const uint8_t* p) {
  int32_t x;
  std::memcpy(&x, p, sizeof x);
  return _mm512_set1_epi32(x);
}
inline f32x16 broadcast_float(const uint8_t* p) {
  float x;
  std::memcpy(&x, p, sizeof x);
  return splat(x);
}
// The value of each code of e2m1 + 128, in every 128 bits.
inline __m512i value_table() {
  return _mm512_broadcast_i32x4(
      _mm_add_epi8(_mm_loadu_si128((const __m128i*)kE2M1), _mm_set1_epi8(int8_t(-128))));
}
// Each output's four bytes of w times the four bytes at p, added to dot. GCC has no pattern for the
// instruction with a broadcast in it and makes two; half as many fit in the window in which the
// processor looks for work: with 4 to 16 rows this gained 4 %, with more 1 %.
inline __m512i add_product(__m512i dot, __m512i w, const uint8_t* p) {
  asm("vpdpbusd %2%{1to16%}, %1, %0"
      : "+v"(dot)
      : "v"(w), "m"(*reinterpret_cast<const uint8_t (*)[4]>(p)));
  return dot;
}

// Sixteen outputs' values of inputs 4 i .. 4 i + 3 of a group, unsigned.
template <WeightFormat format>
inline __m512i load_inputs(const uint8_t* values, int i) {
  if constexpr (format.values == Values::q8) {
    return _mm512_loadu_si512(values + 64 * i);
  } else {
    const __m512i pairs = _mm512_loadu_si512(values + 64 * (i / 2));
    const __m512i low_bits = _mm512_set1_epi8(15);
    const __m512i codes =
        _mm512_and_si512(i % 2 == 0 ? pairs : _mm512_srli_epi16(pairs, 4), low_bits);
    return format.values == Values::q4 ? codes : _mm512_shuffle_epi8(value_table(), codes);
  }
}

template <WeightFormat format, int rows>
inline void multiply(const uint8_t* panel, QuantizedRows x, int64_t row, int64_t ahead,
                     f32x16 (&sum)[rows]) {
  // Only every third row has a pointer: base + {0, 1, 2} * stride + constant are addressing modes.
  // The asm below keeps the compiler from giving each row, and each constant, a register of its
  // own: these ended on the stack and in vector registers, for 3 % of the time.
  constexpr int kBases = (rows + 2) / 3;
  const uint8_t* base[kBases];
  int64_t stride = x.stride;
#pragma GCC unroll 4
  for (int i = 0; i < kBases; ++i) base[i] = x.data + (row + 3 * i) * stride;
  const auto at = [&](int r) { return base[r / 3] + r % 3 * stride; };

  // Where the group's numbers lie, from its values on.
  int64_t scales = x.groups * kGroup;
  int64_t starts = scales + x.groups * 4, sums = scales + x.groups * 8;
  int64_t halves = scales + x.groups * 12;
  // -128 times the sum of the activations that span s is multiplied with.
  const auto start_of = [&](int r, int s) {
    const auto half = [&] { return broadcast(at(r) + halves); };
    if (spans(format) == 1) return broadcast(at(r) + starts);
    return s == 0 ? half() : _mm512_sub_epi32(broadcast(at(r) + starts), half());
  };

#pragma GCC unroll 12
  for (int r = 0; r < rows; ++r) sum[r] = zero();
  PanelReader<format> weights(panel);
  for (int64_t g = 0; g < x.groups; ++g, weights.next()) {
    asm("" : "+r"(stride));
#pragma GCC unroll 4
    for (int i = 0; i < kBases; ++i) asm("" : "+r"(base[i]));

    if constexpr (rows >= kPrefetchRows) weights.prefetch(ahead);
    for_each_span<format>([&](auto span) {
      constexpr int s = decltype(span)::value, kSteps = 8 / spans(format);
      __m512i dot[rows];
#pragma GCC unroll 12
      for (int r = 0; r < rows; ++r) {
        if (has_offset(format)) {
          dot[r] = _mm512_setzero_si512();
        } else {
          dot[r] = start_of(r, s);
          if (format.values == Values::q4) dot[r] = _mm512_srai_epi32(dot[r], 4);
        }
      }
#pragma GCC unroll 8
      for (int i = kSteps * s; i < kSteps * (s + 1); ++i) {
        const __m512i w = load_inputs<format>(weights.values(), i);
#pragma GCC unroll 12
        for (int r = 0; r < rows; ++r) dot[r] = add_product(dot[r], w, at(r) + 4 * i);
      }

      const f32x16 scale = weights.scale(s), offset = weights.offset(s, scale);
#pragma GCC unroll 12
      for (int r = 0; r < rows; ++r) {
        const f32x16 product{_mm512_cvtepi32_ps(dot[r])};
        const f32x16 scale_x = broadcast_float(at(r) + scales);
        sum[r] = fma(product, scale * scale_x, sum[r]);
        if (has_offset(format)) {
          const f32x16 sum_x = spans(format) == 1 ? broadcast_float(at(r) + sums)
                                                  : f32x16{_mm512_cvtepi32_ps(start_of(r, s))} *
                                                        splat(-0x1p-7f) * scale_x;
          sum[r] = fma(offset, sum_x, sum[r]);
        }
      }
    });

#pragma GCC unroll 4
    for (int i = 0; i < kBases; ++i) base[i] += kGroup;
    scales += 4 - kGroup;
    starts += 4 - kGroup;
    sums += 4 - kGroup;
    halves += 4 - kGroup;
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
