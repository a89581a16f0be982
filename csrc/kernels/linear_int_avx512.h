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
// Each output's four bytes of w times the four bytes at p, added to dot. GCC has no pattern for the
// instruction with a broadcast in it and makes two; half as many fit in the window in which the
// processor looks for work: with 4 to 16 rows this gained 4 %, with more 1 %.
inline __m512i add_product(__m512i dot, __m512i w, const uint8_t* p) {
  asm("vpdpbusd %2%{1to16%}, %1, %0"
      : "+v"(dot)
      : "v"(w), "m"(*reinterpret_cast<const uint8_t (*)[4]>(p)));
  return dot;
}

template <Weights kind, int rows>
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

#pragma GCC unroll 12
  for (int r = 0; r < rows; ++r) sum[r] = zero();
  PanelReader<kind> weights(panel);
  for (int64_t g = 0; g < x.groups; ++g, weights.next()) {
    asm("" : "+r"(stride));
#pragma GCC unroll 4
    for (int i = 0; i < kBases; ++i) asm("" : "+r"(base[i]));

    if constexpr (rows >= kPrefetchRows) weights.prefetch(ahead);
    __m512i dot[rows];
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) {
      if (kind == Weights::q8) dot[r] = broadcast(at(r) + starts);
      if (kind == Weights::q4) dot[r] = _mm512_srai_epi32(broadcast(at(r) + starts), 4);
      if (kind == Weights::q4_min) dot[r] = _mm512_setzero_si512();
    }
    const auto add_products = [&](__m512i w, int k) {
#pragma GCC unroll 12
      for (int r = 0; r < rows; ++r) dot[r] = add_product(dot[r], w, at(r) + k);
    };
    if constexpr (kind == Weights::q8) {
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        add_products(_mm512_loadu_si512(weights.values() + 64 * j), 4 * j);
      }
    } else {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m512i pairs = _mm512_loadu_si512(weights.values() + 64 * j);
        const __m512i low_bits = _mm512_set1_epi8(15);
        add_products(_mm512_and_si512(pairs, low_bits), 8 * j);
        add_products(_mm512_and_si512(_mm512_srli_epi16(pairs, 4), low_bits), 8 * j + 4);
      }
    }

    const f32x16 scale = load_f16(weights.scales());
    const f32x16 min = has_min(kind) ? load_f16(weights.mins()) : zero();
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) {
      const f32x16 product{_mm512_cvtepi32_ps(dot[r])};
      sum[r] = fma(product, scale * broadcast_float(at(r) + scales), sum[r]);
      if (has_min(kind)) sum[r] = fma(min, broadcast_float(at(r) + sums), sum[r]);
    }

#pragma GCC unroll 4
    for (int i = 0; i < kBases; ++i) base[i] += kGroup;
    scales += 4 - kGroup;
    starts += 4 - kGroup;
    sums += 4 - kGroup;
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
