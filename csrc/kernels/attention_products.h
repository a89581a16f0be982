// The products of attention with cached keys and values, in every format of the cache.
#pragma once

#include "../attention_scratch.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

// --- formats of the cache ------------------------------------------------------------------------

// What the products of rows with the cache are made of. A step reads from each of the cache's
// vectors what lies together: a dimension of 16 tokens' keys, or a token's 16 dimensions of its
// value; of bf16 caches, and of keys in i4, two of them, which lie in pairs.
//
//   kStepBytes        of a step
//   kPair             dimensions, or tokens, of a step
//   kOperands         operands that a step has for each row
//   Operand, load     what a step reads, for the operand h of kOperands
//   splat             of a row, for every lane
//   add               sum + product
//   kFactor           what loaded values must be multiplied by, folded into queries and outputs
struct Floats {
  using Operand = f32x16;
  static constexpr int kOperands = 1;
  static constexpr int kPair = 1;
  static constexpr float kFactor = 1.0f;
  static f32x16 splat(const float* p) { return OCTAVO_ISA::splat(*p); }
  static f32x16 add(f32x16 sum, f32x16 x, f32x16 cached) { return fma(x, cached, sum); }
};

struct F32 : Floats {
  static constexpr int64_t kStepBytes = kLanes * 4;
  static f32x16 load(const uint8_t* p, int) {
    return OCTAVO_ISA::load(reinterpret_cast<const float*>(p));
  }
};

struct I8 : Floats {
  static constexpr int64_t kStepBytes = kLanes;
  static f32x16 load(const uint8_t* p, int) { return load_i8(reinterpret_cast<const int8_t*>(p)); }
};

struct F8E4M3 : Floats {
  static constexpr int64_t kStepBytes = kLanes;
  static constexpr float kFactor = 256.0f;
  static f32x16 load(const uint8_t* p, int) { return load_f8_256th(p); }
};

// A nibble in the upper half of a byte is 16 times what it is.
struct I4Keys : Floats {
  static constexpr int kOperands = 2;
  static constexpr int kPair = 2;
  static constexpr int64_t kStepBytes = kLanes;
  static constexpr float kFactor = 1.0f / 16;
  static f32x16 load(const uint8_t* p, int h) { return load_i4_of_pairs_times_16(p, h); }
};

struct I4Values : Floats {
  static constexpr int64_t kStepBytes = kLanes / 2;
  static constexpr float kFactor = 1.0f / 16;
  static f32x16 load(const uint8_t* p, int) { return load_i4_of_halves_times_16(p); }
};

#if defined(__AVX512BF16__)

// Two products of each lane in one instruction, if the other operand is bf16 too: queries and
// probabilities are rounded to it (but not the sum of probabilities). Twice the products of fma:
// a prompt of 512 tokens spends 36 ms in attention instead of 58.
struct BF16 : Floats {
  using Operand = __m512bh;
  static constexpr int kPair = 2;
  static constexpr int64_t kStepBytes = kLanes * 4;
  static Operand load(const uint8_t* p, int) { return (Operand)_mm512_loadu_si512(p); }
  static Operand splat(const float* p) { return (Operand)_mm512_set1_ps(*p); }
  static f32x16 add(f32x16 sum, Operand x, Operand cached) {
    return {_mm512_dpbf16_ps(sum.v, x, cached)};
  }
  // One of a pair, with nothing for the other: what is cached there may be NaN.
  static Operand load_half(const uint8_t* p, int h) {
    const __m512i half = _mm512_set1_epi32(h == 0 ? 0x0000ffff : int32_t(0xffff0000));
    return (Operand)_mm512_and_si512(_mm512_loadu_si512(p), half);
  }
};

#else

struct BF16 : Floats {
  static constexpr int kOperands = 2;
  static constexpr int kPair = 2;
  static constexpr int64_t kStepBytes = kLanes * 4;
  static f32x16 load(const uint8_t* p, int h) {
    return load_bf16_of_pairs(reinterpret_cast<const uint16_t*>(p), h);
  }
};

#endif

// Words (floats, or pairs of bf16) of a row of `size` values, filled up with zeros.
template <class Format>
constexpr int64_t row_words(int64_t size) {
  return round_up(size, kLanes) * Format::kOperands / Format::kPair;
}

// --- tiles of rows -------------------------------------------------------------------------------

// Accumulators side by side in a tile of `rows`: enough to hide the latency of fma, no more than
// the registers hold together with what is loaded. A spilled one adds a store and a load to each
// step of its chain (AVX2, int8, 3 rows by 2: 1.5 times slower than 3 by 1).
constexpr int tile_columns([[maybe_unused]] int rows) {
#if defined(__AVX512F__)
  return 4;
#else
  return rows <= 2 ? 2 : 1;
#endif
}

// Decoding waits for memory: fetching 4 groups ahead, beside the arithmetic, raised 16 sequences of
// 512 tokens from 13.3 to 22 GB/s (float) and from 12.5 to 16 (bf16) on one thread. Where a step
// takes many bytes the second-level cache is the better place.
constexpr int64_t kGroupsAhead = 4;

template <class Format>
inline void fetch(const uint8_t* p) {
  __builtin_prefetch(p, 0, Format::kStepBytes <= kLanes ? 3 : 2);
}

// scores[c][r][lane] = sum_e q[r][e] * k[c][e][lane] for C groups of tokens. (Here and below, loops
// over R and C are unrolled by order: else GCC keeps the sums in memory.)
template <class Format, int R, int C>
inline void score_tile(const float* q, const TokenGroup* groups, int64_t size, float* scores) {
  const int64_t steps = ceil_div(size, Format::kPair), stride = row_words<Format>(size);
  f32x16 sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sums[r][c] = zero();
  for (int64_t i = 0; i < steps; ++i) {
    const int64_t offset = i * Format::kStepBytes;
    if (offset % kAlign == 0)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) fetch<Format>(groups[c].after_k + offset);
#pragma GCC unroll 2
    for (int h = 0; h < Format::kOperands; ++h) {
      typename Format::Operand keys[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) keys[c] = Format::load(groups[c].k + offset, h);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const auto x = Format::splat(q + r * stride + i * Format::kOperands + h);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sums[r][c] = Format::add(sums[r][c], x, keys[c]);
      }
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store(scores + (c * R + r) * kLanes, sums[r][c]);
}

template <class Format, int R>
void score_rows(const float* q, const TokenGroup* groups, int64_t count, int64_t size,
                float* scores) {
  constexpr int C = tile_columns(R);
  int64_t i = 0;
  for (; i + C <= count; i += C)
    score_tile<Format, R, C>(q, groups + i, size, scores + i * R * kLanes);
  if constexpr (C > 1)
    for (; i < count; ++i) score_tile<Format, R, 1>(q, groups + i, size, scores + i * R * kLanes);
}

// Tokens [begin, end) of a chunk.
struct TokenSpan {
  int64_t begin, end;
};

// outputs[r][c][lane] += sum over `tokens` t of p[r][t] * v[c][t][lane] for C panels of dimensions
// from `panel` on. p: of row r and the i-th group at i * p_stride + 16 r.
template <class Format, int R, int C>
inline void weigh_tile(const float* p, int64_t p_stride, const TokenGroup* groups, int64_t count,
                       TokenSpan tokens, int64_t panel, float* outputs, int64_t stride) {
  constexpr int64_t kPanelBytes = kLanes / Format::kPair * Format::kStepBytes;
  f32x16 sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sums[r][c] = load(outputs + r * stride + (panel + c) * kLanes);
  for (int64_t i = 0; i < count; ++i) {
    const TokenGroup& group = groups[i];
    const int64_t first = tokens.begin > group.token ? tokens.begin - group.token : 0;
    const int64_t rest = tokens.end - group.token;
    const int64_t last = rest < group.count ? rest : group.count;
    const uint8_t* const v = group.v + panel * kPanelBytes;
    const uint8_t* const after_v = group.after_v + panel * kPanelBytes;
    const float* const weights = p + i * p_stride;
    // The tokens of step `s`; load(pointer, h) gives what is cached of them.
    const auto step = [&](int64_t s, int h, auto load) __attribute__((always_inline)) {
      typename Format::Operand values[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) values[c] = load(v + c * kPanelBytes + s * Format::kStepBytes, h);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const auto x = Format::splat(weights + r * kLanes + s * Format::kOperands + h);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sums[r][c] = Format::add(sums[r][c], x, values[c]);
      }
    };
    // One token of a pair.
    const auto half_step = [&](int64_t t) {
      if constexpr (Format::kOperands == 2) {
        if (t % 2 == 0)
          step(t / 2, 0, Format::load);
        else
          step(t / 2, 1, Format::load);
      } else if constexpr (Format::kPair == 2) {
        const int half = t % 2;
        step(t / 2, 0, [half](const uint8_t* from, int) { return Format::load_half(from, half); });
      }
    };
    int64_t t = first;
    if (t % Format::kPair != 0) half_step(t++);
    for (; t + Format::kPair <= last; t += Format::kPair) {
      const int64_t s = t / Format::kPair;
#pragma GCC unroll 4
      for (int64_t line = 0; line < C * Format::kStepBytes; line += kAlign)
        fetch<Format>(after_v + s * C * Format::kStepBytes + line);
#pragma GCC unroll 2
      for (int h = 0; h < Format::kOperands; ++h) step(s, h, Format::load);
    }
    if (t < last) half_step(t);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(outputs + r * stride + (panel + c) * kLanes, sums[r][c]);
}

template <class Format, int R>
void weigh_rows(const float* p, int64_t p_stride, const TokenGroup* groups, int64_t count,
                TokenSpan tokens, int64_t panels, float* outputs, int64_t stride) {
  constexpr int C = tile_columns(R);
  int64_t panel = 0;
  for (; panel + C <= panels; panel += C)
    weigh_tile<Format, R, C>(p, p_stride, groups, count, tokens, panel, outputs, stride);
  if constexpr (C > 1)
    for (; panel < panels; ++panel)
      weigh_tile<Format, R, 1>(p, p_stride, groups, count, tokens, panel, outputs, stride);
}

// What a unit needs to know of how keys, or values, are cached. By rows - 1: `score`, `weigh`.
// is_packed: what splat reads are pairs of bf16. A unit has one of keys and one of values, so that
// every format goes with every other.
struct KeyFormat {
  decltype(&score_rows<F32, 1>) score[kTileRows];
  bool has_scales, is_packed, is_rotated;
  float factor;
};
struct ValueFormat {
  decltype(&weigh_rows<F32, 1>) weigh[kTileRows];
  int64_t pair;
  bool has_scales, is_packed, is_rotated;
  float factor;
};

template <class Format>
constexpr bool kIsPacked = Format::kPair > Format::kOperands;

template <class Format>
constexpr KeyFormat key_format(bool has_scales = false, bool is_rotated = false) {
  return {{score_rows<Format, 1>, score_rows<Format, 2>, score_rows<Format, 3>,
           score_rows<Format, 4>, score_rows<Format, 5>, score_rows<Format, 6>},
          has_scales,
          kIsPacked<Format>,
          is_rotated,
          Format::kFactor};
}

template <class Format>
constexpr ValueFormat value_format(bool has_scales = false, bool is_rotated = false) {
  return {{weigh_rows<Format, 1>, weigh_rows<Format, 2>, weigh_rows<Format, 3>,
           weigh_rows<Format, 4>, weigh_rows<Format, 5>, weigh_rows<Format, 6>},
          Format::kPair,
          has_scales,
          kIsPacked<Format>,
          is_rotated,
          Format::kFactor};
}

// By KVFormat.
constexpr KeyFormat kKeyFormats[] = {key_format<F32>(), key_format<BF16>(), key_format<I8>(true),
                                     key_format<F8E4M3>(), key_format<I4Keys>(true, true)};
constexpr ValueFormat kValueFormats[] = {value_format<F32>(), value_format<BF16>(),
                                         value_format<I8>(true), value_format<F8E4M3>(),
                                         value_format<I4Values>(true, true)};

// 16 floats of a row (or probabilities), as splat reads them.
inline void put(bool is_packed, float* p, f32x16 x) {
#if defined(__AVX512BF16__)
  if (is_packed) {
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x.v));
    return;
  }
#endif
  (void)is_packed;
  store(p, x);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
