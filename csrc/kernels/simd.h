// f32x16: sixteen float32 lanes, the width that all kernels are written for, in what registers the
// instruction set has: one 512-bit, two 256-bit, or four 128-bit vectors that the compiler maps to
// SSE2, NEON or scalars. Every operation gives the same bits on each of them, but for `fma` on the
// portable path, which rounds twice where the baseline has no fused multiply-add (x86-64).
//
// Counts of lanes are 0..16. NaN payloads are not specified.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace octavo::OCTAVO_ISA {

#if defined(__AVX2__)

// Sixteen bytes with the low (h = 0) or high nibbles of `bytes` in their upper halves, zeros below:
// 16 times numbers of four bits, as int8.
inline __m128i upper_nibbles(__m128i bytes, int h) {
  return _mm_and_si128(h == 0 ? _mm_slli_epi16(bytes, 4) : bytes, _mm_set1_epi8(int8_t(0xf0)));
}
inline __m128i pair_nibbles(const uint8_t* p, int h) {
  return upper_nibbles(_mm_loadu_si128((const __m128i*)p), h);
}
inline __m128i half_nibbles(const uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64((const __m128i*)p);
  return _mm_unpacklo_epi64(upper_nibbles(bytes, 0), upper_nibbles(bytes, 1));
}

#endif

#if defined(__AVX512F__)

struct f32x16 {
  __m512 v;
};
inline f32x16 zero() { return {_mm512_setzero_ps()}; }
inline f32x16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
// The first `count` lanes, the others zero; memory beyond them is not touched.
inline f32x16 load_first(const float* p, int count) {
  return {_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p)};
}
inline void store_first(float* p, f32x16 a, int count) {
  _mm512_mask_storeu_ps(p, __mmask16((1u << count) - 1), a.v);
}
inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Of a NaN and a number, and of two zeros, max and min give `b`.
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline f32x16 abs(f32x16 a) { return {_mm512_abs_ps(a.v)}; }
inline f32x16 round(f32x16 a) { return {_mm512_roundscale_ps(a.v, 8)}; }  // nearest, ties to even
// One permutation into the upper halves, where widening and shifting would be two instructions.
inline f32x16 load_bf16(const uint16_t* p) {
  const __m512i index =
      _mm512_set_epi32(15 << 16, 14 << 16, 13 << 16, 12 << 16, 11 << 16, 10 << 16, 9 << 16, 8 << 16,
                       7 << 16, 6 << 16, 5 << 16, 4 << 16, 3 << 16, 2 << 16, 1 << 16, 0);
  const __m512i words = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)p));
  return {_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, index, words))};
}
// Round to nearest, ties to even; a NaN stays one.
inline void store_bf16(uint16_t* p, f32x16 a) {
  const __m512i bits = _mm512_castps_si512(a.v), upper = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i nan = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i words = _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), is_nan, nan);
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(words));
}
// Sixteen pairs' first (h = 0) or second numbers.
inline f32x16 load_bf16_of_pairs(const uint16_t* p, int h) {
  const __m512i pairs = _mm512_loadu_si512(p);
  const __m512i upper = _mm512_set1_epi32(int32_t(0xffff0000));
  return {
      _mm512_castsi512_ps(h == 0 ? _mm512_slli_epi32(pairs, 16) : _mm512_and_si512(pairs, upper))};
}
inline f32x16 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
inline f32x16 floats_of_i8(__m128i bytes) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
inline f32x16 load_i8(const int8_t* p) { return floats_of_i8(_mm_loadu_si128((const __m128i*)p)); }
// 16 times sixteen numbers of four bits: the first (h = 0) or second nibbles of 16 bytes, or the
// first and then the second ones of 8.
inline f32x16 load_i4_of_pairs_times_16(const uint8_t* p, int h) {
  return floats_of_i8(pair_nibbles(p, h));
}
inline f32x16 load_i4_of_halves_times_16(const uint8_t* p) { return floats_of_i8(half_nibbles(p)); }
// Integral values in -128..127; what a NaN stores is not specified.
inline void store_i8(int8_t* p, f32x16 a) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
// The first `count` of sixteen integral values below 2^22 in magnitude; as above for a NaN.
inline void store_i32_first(int32_t* p, f32x16 a, int count) {
  _mm512_mask_storeu_epi32(p, __mmask16((1u << count) - 1), _mm512_cvtps_epi32(a.v));
}
// float8 e4m3 divided by 256: shifted into the place of fp16's fields, which makes subnormals right.
// 0x7f alone is NaN.
inline f32x16 load_f8_256th(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
  const __m256i half = _mm256_and_si256(shifted, _mm256_set1_epi16(int16_t(0xbf80)));
  const __mmask16 is_nan = _mm_cmpeq_epi8_mask(bytes, _mm_set1_epi8(0x7f));
  return {_mm512_cvtph_ps(_mm256_mask_mov_epi16(half, is_nan, _mm256_set1_epi16(0x7e00)))};
}
// table[code] of sixteen words' codes in bits shift .. shift + 3.
inline f32x16 look_up(const float (&table)[16], const uint8_t* words, int shift) {
  const __m512i codes = _mm512_srli_epi32(_mm512_loadu_si512(words), unsigned(shift));
  return {_mm512_permutexvar_ps(codes, _mm512_loadu_ps(table))};  // by the lowest four bits
}
// a * 2^n for integral n in -126..127; not specified for others, but a NaN stays one.
inline f32x16 times_power_of_2(f32x16 a, f32x16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// a, but 0 in lanes where x < limit.
inline f32x16 zero_where_below(f32x16 a, f32x16 x, float limit) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ), a.v)};
}
// Bit i: a > b, or a >= b, in lane i; false where either is NaN.
inline uint32_t mask_greater(f32x16 a, f32x16 b) {
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ);
}
inline uint32_t mask_at_least(f32x16 a, f32x16 b) {
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ);
}
// Lanes `from` and beyond become x.
inline f32x16 fill_from(f32x16 a, int from, float x) {
  return {_mm512_mask_mov_ps(_mm512_set1_ps(x), __mmask16((1u << from) - 1), a.v)};
}

#elif defined(__AVX2__)

struct f32x16 {
  __m256 lo, hi;
};
inline f32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline f32x16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, f32x16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline __m256i first_mask(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline f32x16 load_first(const float* p, int count) {
  return {_mm256_maskload_ps(p, first_mask(count)),
          _mm256_maskload_ps(p + 8, first_mask(count - 8))};
}
inline void store_first(float* p, f32x16 a, int count) {
  _mm256_maskstore_ps(p, first_mask(count), a.lo);
  _mm256_maskstore_ps(p + 8, first_mask(count - 8), a.hi);
}
inline f32x16 operator+(f32x16 a, f32x16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline f32x16 operator-(f32x16 a, f32x16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline f32x16 operator*(f32x16 a, f32x16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline f32x16 operator/(f32x16 a, f32x16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline f32x16 max(f32x16 a, f32x16 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
inline f32x16 min(f32x16 a, f32x16 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
inline f32x16 abs(f32x16 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline f32x16 round(f32x16 a) { return {_mm256_round_ps(a.lo, 8), _mm256_round_ps(a.hi, 8)}; }
inline f32x16 load_bf16(const uint16_t* p) {
  const auto half = [](const uint16_t* q) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)q));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  };
  return {half(p), half(p + 8)};
}
inline void store_bf16(uint16_t* p, f32x16 a) {
  const auto half = [](__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), upper = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i nan = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), nan, is_nan);
  };
  const __m256i words = _mm256_packus_epi32(half(a.lo), half(a.hi));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(words, 0xd8));
}
inline f32x16 load_bf16_of_pairs(const uint16_t* p, int h) {
  const auto half = [h](const uint16_t* q) {
    const __m256i pairs = _mm256_loadu_si256((const __m256i*)q);
    const __m256i upper = _mm256_set1_epi32(int32_t(0xffff0000));
    return _mm256_castsi256_ps(h == 0 ? _mm256_slli_epi32(pairs, 16)
                                      : _mm256_and_si256(pairs, upper));
  };
  return {half(p), half(p + 16)};
}
inline f32x16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline f32x16 load_i8(const int8_t* p) {
  const auto half = [](const int8_t* q) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)q)));
  };
  return {half(p), half(p + 8)};
}
inline f32x16 floats_of_i8(__m128i bytes) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes)))};
}
inline f32x16 load_i4_of_pairs_times_16(const uint8_t* p, int h) {
  return floats_of_i8(pair_nibbles(p, h));
}
inline f32x16 load_i4_of_halves_times_16(const uint8_t* p) { return floats_of_i8(half_nibbles(p)); }
inline void store_i8(int8_t* p, f32x16 a) {
  const auto half = [](__m256 x) {  // eight int32 to int16
    const __m256i i = _mm256_cvtps_epi32(x);
    return _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
  };
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(half(a.lo), half(a.hi)));
}
inline void store_i32_first(int32_t* p, f32x16 a, int count) {
  _mm256_maskstore_epi32(p, first_mask(count), _mm256_cvtps_epi32(a.lo));
  _mm256_maskstore_epi32(p + 8, first_mask(count - 8), _mm256_cvtps_epi32(a.hi));
}
inline f32x16 load_f8_256th(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
  const __m256i nan = _mm256_cmpeq_epi16(wide, _mm256_set1_epi16(0x7f));
  const __m256i fields =
      _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(int16_t(0xbf80)));
  const __m256i half = _mm256_or_si256(fields, nan);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
}
inline f32x16 look_up(const float (&table)[16], const uint8_t* words, int shift) {
  const auto half = [&](const uint8_t* p) {
    const __m256i codes =
        _mm256_srl_epi32(_mm256_loadu_si256((const __m256i*)p), _mm_cvtsi32_si128(shift));
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), codes);  // by three bits
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), codes);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
  };
  return {half(words), half(words + 32)};
}
inline f32x16 times_power_of_2(f32x16 a, f32x16 n) {
  const auto half = [](__m256 x, __m256 y) {
    const __m256i i = _mm256_add_epi32(_mm256_cvtps_epi32(y), _mm256_set1_epi32(127));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(i, 23)));
  };
  return {half(a.lo, n.lo), half(a.hi, n.hi)};
}
inline f32x16 zero_where_below(f32x16 a, f32x16 x, float limit) {
  const auto half = [limit](__m256 y, __m256 z) {
    return _mm256_and_ps(y, _mm256_cmp_ps(z, _mm256_set1_ps(limit), _CMP_NLT_UQ));
  };
  return {half(a.lo, x.lo), half(a.hi, x.hi)};
}
inline uint32_t mask_greater(f32x16 a, f32x16 b) {
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ))) |
         uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))) << 8;
}
inline uint32_t mask_at_least(f32x16 a, f32x16 b) {
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ))) |
         uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ))) << 8;
}
inline f32x16 fill_from(f32x16 a, int from, float x) {
  const __m256 fill = _mm256_set1_ps(x);
  return {_mm256_blendv_ps(fill, a.lo, _mm256_castsi256_ps(first_mask(from))),
          _mm256_blendv_ps(fill, a.hi, _mm256_castsi256_ps(first_mask(from - 8)))};
}

#else

// Vectors of the compiler (GCC, Clang), which become whatever the target has.
typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));

// Members, not an array: GCC 12 keeps an array in memory.
struct f32x16 {
  f32x4 a, b, c, d;
};

template <typename To, typename From>
inline To load_as(const From* p) {
  To x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline f32x4 floats_of_bits(u32x4 bits) { return (f32x4)bits; }
inline u32x4 bits_of_floats(f32x4 x) { return (u32x4)x; }

inline f32x16 splat(float x) {
  const f32x4 all = {x, x, x, x};
  return {all, all, all, all};
}
inline f32x16 zero() { return splat(0.0f); }
inline f32x16 load(const float* p) {
  return {load_as<f32x4>(p), load_as<f32x4>(p + 4), load_as<f32x4>(p + 8), load_as<f32x4>(p + 12)};
}
inline void store(float* p, f32x16 a) { std::memcpy(p, &a, sizeof a); }
inline f32x16 load_first(const float* p, int count) {
  f32x16 a = zero();
  std::memcpy(&a, p, size_t(count) * sizeof(float));
  return a;
}
inline void store_first(float* p, f32x16 a, int count) {
  std::memcpy(p, &a, size_t(count) * sizeof(float));
}
inline f32x16 operator+(f32x16 a, f32x16 b) { return {a.a + b.a, a.b + b.b, a.c + b.c, a.d + b.d}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {a.a - b.a, a.b - b.b, a.c - b.c, a.d - b.d}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {a.a * b.a, a.b * b.b, a.c * b.c, a.d * b.d}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {a.a / b.a, a.b / b.b, a.c / b.c, a.d / b.d}; }

// f of the quarters of each argument.
template <typename F, typename... A>
inline f32x16 each(F f, A... x) {
  return {f(x.a...), f(x.b...), f(x.c...), f(x.d...)};
}
// f of what lies at p, p + step, ...
template <typename F, typename T>
inline f32x16 each_at(F f, const T* p, int step = 4) {
  return {f(p), f(p + step), f(p + 2 * step), f(p + 3 * step)};
}

inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__aarch64__)
  return each([](f32x4 x, f32x4 y, f32x4 z) { return f32x4(vfmaq_f32(z, x, y)); }, a, b, c);
#else
  return a * b + c;
#endif
}
inline f32x16 max(f32x16 a, f32x16 b) {
  return each([](f32x4 x, f32x4 y) { return x > y ? x : y; }, a, b);
}
inline f32x16 min(f32x16 a, f32x16 b) {
  return each([](f32x4 x, f32x4 y) { return x < y ? x : y; }, a, b);
}
inline f32x4 abs(f32x4 x) { return floats_of_bits(bits_of_floats(x) & 0x7fffffff); }
inline f32x16 abs(f32x16 a) {
  return each([](f32x4 x) { return abs(x); }, a);
}
// The low bits of the sum are the integer (and no conversion of a NaN is undefined).
inline u32x4 integer_bits(f32x4 x) { return bits_of_floats(x + 0x1.8p23f); }
inline void store_i32_first(int32_t* p, f32x16 a, int count) {
  const uint32_t offset = 0x4b400000;  // the bits of 1.5 * 2^23
  const u32x4 words[4] = {integer_bits(a.a) - offset, integer_bits(a.b) - offset,
                          integer_bits(a.c) - offset, integer_bits(a.d) - offset};
  std::memcpy(p, words, size_t(count) * sizeof(int32_t));
}
#if defined(__aarch64__)
// What these convert is several times as much work in vectors of the compiler: GCC 12 takes narrow
// ones apart.
inline f32x4 widen_f16(uint16x4_t halves) {
  return f32x4(vcvt_f32_f16(vreinterpret_f16_u16(halves)));
}
inline f32x16 round(f32x16 a) {
  return each([](f32x4 x) { return f32x4(vrndnq_f32(x)); }, a);
}
inline f32x16 load_bf16(const uint16_t* p) {
  return each_at([](const uint16_t* q) { return f32x4(vshll_n_u16(vld1_u16(q), 16)); }, p);
}
inline f32x16 load_f16(const uint16_t* p) {
  return each_at([](const uint16_t* q) { return widen_f16(vld1_u16(q)); }, p);
}
inline f32x16 load_i8(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t lo = vmovl_s8(vget_low_s8(bytes)), hi = vmovl_high_s8(bytes);
  const auto widen = [](int16x4_t x) { return f32x4(vcvtq_f32_s32(vmovl_s16(x))); };
  return {widen(vget_low_s16(lo)), widen(vget_high_s16(lo)), widen(vget_low_s16(hi)),
          widen(vget_high_s16(hi))};
}
inline void store_i8(int8_t* p, f32x16 a) {
  const auto narrow = [](f32x4 x, f32x4 y) {
    return vmovn_high_s32(vmovn_s32(vcvtnq_s32_f32(x)), vcvtnq_s32_f32(y));
  };
  vst1q_s8(p, vmovn_high_s16(vmovn_s16(narrow(a.a, a.b)), narrow(a.c, a.d)));
}
inline f32x16 load_f8_256th(const uint8_t* p) {
  // In the place of an fp16 number's fields; 0x7f makes a NaN of it.
  const auto half = [](int16x8_t wide) {
    const uint16x8_t fields = vreinterpretq_u16_s16(vshlq_n_s16(wide, 7));
    const uint16x8_t nan = vceqq_s16(wide, vdupq_n_s16(0x7f));
    return vorrq_u16(vandq_u16(fields, vdupq_n_u16(0xbf80)), nan);
  };
  const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
  const uint16x8_t lo = half(vmovl_s8(vget_low_s8(bytes))), hi = half(vmovl_high_s8(bytes));
  return {widen_f16(vget_low_u16(lo)), widen_f16(vget_high_u16(lo)), widen_f16(vget_low_u16(hi)),
          widen_f16(vget_high_u16(hi))};
}
inline f32x16 look_up(const float (&table)[16], const uint8_t* words, int shift) {
  const uint8x16x4_t bytes = vld1q_u8_x4(reinterpret_cast<const uint8_t*>(table));
  return each_at(
      [&](const uint8_t* p) {
        const uint32x4_t word = vreinterpretq_u32_u8(vld1q_u8(p));
        const uint32x4_t code = vandq_u32(vshlq_u32(word, vdupq_n_s32(-shift)), vdupq_n_u32(15));
        // Where the bytes of the code's number lie.
        const uint32x4_t index = vmlaq_n_u32(vdupq_n_u32(0x03020100), code, 0x04040404);
        return f32x4(vreinterpretq_f32_u8(vqtbl4q_u8(bytes, vreinterpretq_u8_u32(index))));
      },
      words, 16);
}
#else
inline f32x16 look_up(const float (&table)[16], const uint8_t* words, int shift) {
  return each_at(
      [&](const uint8_t* p) {
        const u32x4 codes = load_as<u32x4>(p) >> uint32_t(shift) & 15;
        return f32x4{table[codes[0]], table[codes[1]], table[codes[2]], table[codes[3]]};
      },
      words, 16);
}
inline f32x16 round(f32x16 a) {
  return each(
      [](f32x4 x) {
        // The sum has no bits for fractions, so the addition rounds them.
        const f32x4 size = abs(x), rounded = (size + 0x1p23f) - 0x1p23f;
        const u32x4 sign = bits_of_floats(x) & 0x80000000;
        return size < 0x1p23f ? floats_of_bits(bits_of_floats(rounded) | sign) : x;
      },
      a);
}
// Bits of an fp16 number without its sign in the place of a float's fields: the value is 2^112 too
// small, also when subnormal.
inline f32x4 half_magnitude(u32x4 bits) {
  const u32x4 finite = bits_of_floats(floats_of_bits(bits) * 0x1p112f);
  return floats_of_bits(bits >= (0x7c00u << 13) ? bits | 0x7f800000 : finite);
}
inline f32x4 with_sign(f32x4 magnitude, u32x4 sign) {
  return floats_of_bits(bits_of_floats(magnitude) | sign);
}
inline f32x16 load_bf16(const uint16_t* p) {
  typedef uint16_t u16x4 __attribute__((vector_size(8)));
  return each_at(
      [](const uint16_t* q) {
        return floats_of_bits(__builtin_convertvector(load_as<u16x4>(q), u32x4) << 16);
      },
      p);
}
inline f32x16 load_f16(const uint16_t* p) {
  typedef uint16_t u16x4 __attribute__((vector_size(8)));
  return each_at(
      [](const uint16_t* q) {
        const u32x4 h = __builtin_convertvector(load_as<u16x4>(q), u32x4);
        return with_sign(half_magnitude((h & 0x7fff) << 13), (h & 0x8000) << 16);
      },
      p);
}
inline f32x16 load_i8(const int8_t* p) {
  typedef int8_t i8x4 __attribute__((vector_size(4)));
  return each_at(
      [](const int8_t* q) {
        return __builtin_convertvector(__builtin_convertvector(load_as<i8x4>(q), i32x4), f32x4);
      },
      p);
}
inline void store_i8(int8_t* p, f32x16 a) {
  const u32x4 words[4] = {integer_bits(a.a), integer_bits(a.b), integer_bits(a.c),
                          integer_bits(a.d)};
  for (int i = 0; i < 16; ++i) p[i] = int8_t(words[i / 4][i % 4]);
}
inline f32x16 load_f8_256th(const uint8_t* p) {
  typedef uint8_t u8x4 __attribute__((vector_size(4)));
  return each_at(
      [](const uint8_t* q) {
        const u32x4 b = __builtin_convertvector(load_as<u8x4>(q), u32x4);
        const u32x4 is_nan = (u32x4)(b == 0x7f);
        return with_sign(half_magnitude((b & 0x7f) << 20), (b & 0x80) << 24 | is_nan);
      },
      p);
}
#endif
inline f32x16 load_i4_of_pairs_times_16(const uint8_t* p, int h) {
  int8_t values[16];
  for (int i = 0; i < 16; ++i) values[i] = int8_t(h == 0 ? p[i] << 4 : p[i] & 0xf0);
  return load_i8(values);
}
inline f32x16 load_i4_of_halves_times_16(const uint8_t* p) {
  int8_t values[16];
  for (int i = 0; i < 8; ++i) {
    values[i] = int8_t(p[i] << 4);
    values[i + 8] = int8_t(p[i] & 0xf0);
  }
  return load_i8(values);
}
inline void store_bf16(uint16_t* p, f32x16 a) {
  const auto half = [](f32x4 x) {
    const u32x4 bits = bits_of_floats(x), upper = bits >> 16;
    return x == x ? (bits + 0x7fff + (upper & 1)) >> 16 : upper | 0x40;
  };
  const u32x4 words[4] = {half(a.a), half(a.b), half(a.c), half(a.d)};
  for (int i = 0; i < 16; ++i) p[i] = uint16_t(words[i / 4][i % 4]);
}
// Words of two numbers, the first in the lower half (as on every machine that these run on).
inline f32x16 load_bf16_of_pairs(const uint16_t* p, int h) {
  const auto half = [h](const uint16_t* q) {
    const u32x4 pairs = load_as<u32x4>(q);
    return floats_of_bits(h == 0 ? pairs << 16 : pairs & 0xffff0000);
  };
  return {half(p), half(p + 8), half(p + 16), half(p + 24)};
}
inline f32x16 times_power_of_2(f32x16 a, f32x16 n) {
  return each([](f32x4 x, f32x4 y) { return x * floats_of_bits((integer_bits(y) + 127) << 23); }, a,
              n);
}
inline f32x16 zero_where_below(f32x16 a, f32x16 x, float limit) {
  return each([limit](f32x4 y, f32x4 z) { return z < limit ? f32x4{} : y; }, a, x);
}
// Bit i of the result: lane i of the four comparisons, which are -1 where true.
inline uint32_t mask_of(i32x4 a, i32x4 b, i32x4 c, i32x4 d) {
  const i32x4 bits = {1, 2, 4, 8};
  const i32x4 all = (a & bits) | (b & (bits << 4)) | (c & (bits << 8)) | (d & (bits << 12));
  return uint32_t(all[0] | all[1] | all[2] | all[3]);
}
inline uint32_t mask_greater(f32x16 a, f32x16 b) {
  return mask_of(a.a > b.a, a.b > b.b, a.c > b.c, a.d > b.d);
}
inline uint32_t mask_at_least(f32x16 a, f32x16 b) {
  return mask_of(a.a >= b.a, a.b >= b.b, a.c >= b.c, a.d >= b.d);
}
inline f32x16 fill_from(f32x16 a, int from, float x) {
  f32x16 filled = splat(x);
  std::memcpy(&filled, &a, size_t(from) * sizeof(float));
  return filled;
}

#endif

// As much of a row as `left`, at most sixteen values; a branch, because AVX2's masked stores are
// several times slower than whole ones.
inline f32x16 load_rest(const float* p, int64_t left) {
  return left >= 16 ? load(p) : load_first(p, left > 0 ? int(left) : 0);
}
inline void store_rest(float* p, f32x16 a, int64_t left) {
  if (left >= 16)
    store(p, a);
  else
    store_first(p, a, left > 0 ? int(left) : 0);
}

// Sums and maxima over lanes, always in the same tree: lanes i and i + 8, then + 4, + 2, + 1. Of a
// NaN and a number, the maximum is that of the higher lane.
#if defined(__AVX2__)
template <typename F>
inline float fold_lanes(F f, __m256 a) {
  const __m128 four = f(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 two = f(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(f(two, _mm_movehdup_ps(two)));
}
inline float sum_lanes(f32x16 a) {
#if defined(__AVX512F__)
  const __m256 lo = _mm512_castps512_ps256(a.v), hi = _mm512_extractf32x8_ps(a.v, 1);
#else
  const __m256 lo = a.lo, hi = a.hi;
#endif
  return fold_lanes([](__m128 x, __m128 y) { return _mm_add_ps(x, y); }, _mm256_add_ps(lo, hi));
}
inline float max_lanes(f32x16 a) {
#if defined(__AVX512F__)
  const __m256 lo = _mm512_castps512_ps256(a.v), hi = _mm512_extractf32x8_ps(a.v, 1);
#else
  const __m256 lo = a.lo, hi = a.hi;
#endif
  return fold_lanes([](__m128 x, __m128 y) { return _mm_max_ps(x, y); }, _mm256_max_ps(lo, hi));
}
#else
inline float sum_lanes(f32x16 a) {
  const f32x4 four = (a.a + a.c) + (a.b + a.d);
  return (four[0] + four[2]) + (four[1] + four[3]);
}
inline float max_lanes(f32x16 a) {
  const auto larger = [](auto x, auto y) { return x > y ? x : y; };
  const f32x4 four = larger(larger(a.a, a.c), larger(a.b, a.d));
  return larger(larger(four[0], four[2]), larger(four[1], four[3]));
}
#endif

// exp(x) to about 1 ulp: 2^n times a polynomial on [-ln2/2, ln2/2]. Exactly 0 below -87.3; beyond
// 88.3 as at 88.3; NaN stays NaN.
inline f32x16 exp(f32x16 x) {
  const f32x16 limited = min(splat(88.3f), x);  // this order lets a NaN through
  const f32x16 n = round(limited * splat(1.44269504f));
  f32x16 r = fma(n, splat(-0.693359375f), limited);
  r = fma(n, splat(2.12194440e-4f), r);
  f32x16 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  return zero_where_below(times_power_of_2(p, n), x, -87.3f);
}

// cap * tanh(x / cap), the hyperbolic tangent as 1 - 2 / (exp(2 x) + 1).
inline f32x16 soft_capped(f32x16 x, float cap) {
  const f32x16 one = splat(1.0f), two = splat(2.0f);
  const f32x16 tanh = one - two / (exp(two * (x / splat(cap))) + one);
  return splat(cap) * tanh;
}

}  // namespace octavo::OCTAVO_ISA
