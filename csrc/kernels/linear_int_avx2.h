// The products of linear_int with AVX2.
//
// q8: values and activations as int16, in pairs (k, k + 2) and (k + 1, k + 3) that come out of the
// bytes with one operation each: two vpmaddwd for 32 products. (The other exact way, vpsignb,
// vpmaddubsw and vpmaddwd on bytes, has a peak 21 % lower on Zen 4.)
// Tables become such bytes by one shuffle.
// q4: vpmaddubsw of values 0..15 and int8; 8 of these fit into int16: 8 * 2 * 15 * 127 = 30480.
#pragma once

#include "linear_int_panel.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Registers: 4 rows of integer sums, two each, 2 of values, and a few for what is read. The float
// sums are needed once a group only, and wait in memory in between.
constexpr int kTileRows = 4;
constexpr int kPrefetchRows = 2;

inline __m256i load_bytes(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline __m256i broadcast(const void* p) {
  int32_t x;
  std::memcpy(&x, p, sizeof x);
  return _mm256_set1_epi32(x);
}
inline f32x16 broadcast_float(const void* p) {
  const __m256 x = _mm256_castsi256_ps(broadcast(p));
  return {x, x};
}

// Adds in program order. Left to itself GCC 12 first computes all products of a group, then adds
// them up as a tree, and most of them wait on the stack: 40 % of the speed.
inline void add_int32(__m256i& sum, __m256i x) {
  sum = _mm256_add_epi32(sum, x);
  asm("" : "+x"(sum));
}
inline void add_int16(__m256i& sum, __m256i x) {
  sum = _mm256_add_epi16(sum, x);
  asm("" : "+x"(sum));
}

// The value of each code of e2m1 + 128, in both halves.
inline __m256i value_table() {
  return _mm256_add_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)kE2M1)),
                         _mm256_set1_epi8(int8_t(-128)));
}

// Eight outputs' bytes of inputs 4 i .. 4 i + 3 of a group, unsigned; half: which eight.
template <Values kind>
inline __m256i load_inputs(const uint8_t* values, int i, int half) {
  if constexpr (kind == Values::q8) {
    return load_bytes(values + 64 * i + 32 * half);
  } else {
    const __m256i pairs = load_bytes(values + 64 * (i / 2) + 32 * half);
    const __m256i low_bits = _mm256_set1_epi8(15);
    const __m256i codes =
        _mm256_and_si256(i % 2 == 0 ? pairs : _mm256_srli_epi16(pairs, 4), low_bits);
    return kind == Values::q4 ? codes : _mm256_shuffle_epi8(value_table(), codes);
  }
}

// Adds the products of inputs 4 i .. 4 i + 3, i in [begin, begin + count), in int32.
template <Values kind, int rows, int begin, int count>
inline void add_products_of_8_bits(const uint8_t* values, const uint8_t* const (&x)[rows],
                                   __m256i (&lo_sum)[rows], __m256i (&hi_sum)[rows]) {
  alignas(32) int16_t pairs[2][rows][kGroup / 2];  // of even and of odd activations
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
    const __m256i bytes = load_bytes(x[r]);
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
    _mm256_store_si256((__m256i*)pairs[0][r], even);
    _mm256_store_si256((__m256i*)pairs[1][r], _mm256_srai_epi16(bytes, 8));
  }
  asm("" : "+m"(pairs));  // a broadcast from memory is a load only, from a register two shuffles
#pragma GCC unroll 8
  for (int i = begin; i < begin + count; ++i) {
    const auto add_products = [&](__m256i lo, __m256i hi, int odd) {
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        const __m256i a = broadcast(pairs[odd][r] + 2 * i);
        add_int32(lo_sum[r], _mm256_madd_epi16(lo, a));
        add_int32(hi_sum[r], _mm256_madd_epi16(hi, a));
      }
    };
    const __m256i lo = load_inputs<kind>(values, i, 0), hi = load_inputs<kind>(values, i, 1);
    const __m256i low_byte = _mm256_set1_epi16(0xff);
    add_products(_mm256_and_si256(lo, low_byte), _mm256_and_si256(hi, low_byte), 0);
    add_products(_mm256_srli_epi16(lo, 8), _mm256_srli_epi16(hi, 8), 1);
  }
}

// The same in int16, even and odd bytes of a word apart.
template <int rows, int begin, int count>
inline void add_products_of_4_bits(const uint8_t* values, const uint8_t* const (&x)[rows],
                                   __m256i (&lo_sum)[rows], __m256i (&hi_sum)[rows]) {
#pragma GCC unroll 8
  for (int i = begin; i < begin + count; ++i) {
    const __m256i lo = load_inputs<Values::q4>(values, i, 0);
    const __m256i hi = load_inputs<Values::q4>(values, i, 1);
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const __m256i a = broadcast(x[r] + 4 * i);
      add_int16(lo_sum[r], _mm256_maddubs_epi16(lo, a));
      add_int16(hi_sum[r], _mm256_maddubs_epi16(hi, a));
    }
  }
}

template <WeightFormat format, int rows>
inline void multiply(const uint8_t* panel, QuantizedRows x, int64_t row, int64_t ahead,
                     f32x16 (&sum)[rows]) {
  const uint8_t* values[rows];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) values[r] = x.data + (row + r) * x.stride;
  // Where the group's numbers lie, from its values on.
  int64_t scales = x.groups * kGroup;
  int64_t starts = scales + x.groups * 4, sums = scales + x.groups * 8;
  int64_t halves = scales + x.groups * 12;
  // -128 times the sum of the activations that span s is multiplied with.
  const auto start_of = [&](int r, int s) {
    const auto half = [&] { return broadcast(values[r] + halves); };
    if (spans(format) == 1) return broadcast(values[r] + starts);
    return s == 0 ? half() : _mm256_sub_epi32(broadcast(values[r] + starts), half());
  };

#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) sum[r] = zero();
  PanelReader<format> weights(panel);
  for (int64_t g = 0; g < x.groups; ++g, weights.next()) {
    if constexpr (rows >= kPrefetchRows) weights.prefetch(ahead);
    for_each_span<format>([&](auto span) {
      constexpr int s = decltype(span)::value, kSteps = 8 / spans(format);
      asm("" : "+m"(sum));
      __m256i lo_sum[rows], hi_sum[rows];
      if constexpr (format.values == Values::q4) {
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) lo_sum[r] = hi_sum[r] = _mm256_setzero_si256();
        add_products_of_4_bits<rows, kSteps * s, kSteps>(weights.values(), values, lo_sum, hi_sum);
      } else {
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r)
          lo_sum[r] = hi_sum[r] = has_offset(format) ? _mm256_setzero_si256() : start_of(r, s);
        add_products_of_8_bits<format.values, rows, kSteps * s, kSteps>(weights.values(), values,
                                                                        lo_sum, hi_sum);
      }
      const f32x16 scale = weights.scale(s), offset = weights.offset(s, scale);
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        if (format.values == Values::q4) {
          const __m256i ones = _mm256_set1_epi16(1);
          lo_sum[r] = _mm256_madd_epi16(lo_sum[r], ones);
          hi_sum[r] = _mm256_madd_epi16(hi_sum[r], ones);
          if (!has_offset(format)) {
            const __m256i start = _mm256_srai_epi32(start_of(r, s), 4);
            lo_sum[r] = _mm256_add_epi32(lo_sum[r], start);
            hi_sum[r] = _mm256_add_epi32(hi_sum[r], start);
          }
        }
        const f32x16 product{_mm256_cvtepi32_ps(lo_sum[r]), _mm256_cvtepi32_ps(hi_sum[r])};
        const f32x16 scale_x = broadcast_float(values[r] + scales);
        f32x16 y = fma(product, scale * scale_x, sum[r]);
        if (has_offset(format)) {
          const auto half_sum = [&] {
            const __m256 start = _mm256_cvtepi32_ps(start_of(r, s));
            return f32x16{start, start} * splat(-0x1p-7f) * scale_x;
          };
          y = fma(offset, spans(format) == 1 ? broadcast_float(values[r] + sums) : half_sum(), y);
        }
        sum[r] = y;
      }
    });
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) values[r] += kGroup;
    scales += 4 - kGroup;
    starts += 4 - kGroup;
    sums += 4 - kGroup;
    halves += 4 - kGroup;
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
