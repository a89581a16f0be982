// One token's key and value within a layer's cache: where they lie, and copies of them as bytes. For
// code that moves tokens; what computes with them goes by KVCache in formats.h itself.
#pragma once

#include <cstring>

#include "formats.h"

namespace octavo {

// What a head has of a group of 16 neighbouring tokens: sub-blocks of K and V, scales where the
// format has them.
struct CachedGroup {
  uint8_t* k;
  uint8_t* v;
  float* k_scales;  // of the group's first token
  float* v_scales;
};

inline CachedGroup cached_group(const KVCache& cache, int64_t block, int64_t head, int64_t group) {
  uint8_t* const k = cache.head(block, head);
  uint8_t* const v = k + cache.k_bytes();
  float* const k_scales = reinterpret_cast<float*>(v + cache.v_bytes());
  float* const v_scales = k_scales + cache.k_scale_bytes() / int64_t{sizeof(float)};
  return {k + group * cache.k_group_bytes(), v + group * cache.v_group_bytes(),
          k_scales + group * kLanes, v_scales + group * kLanes};
}

// Token i of one group becomes token j of another. kStep: bytes that a token has of each row of
// sixteen.
template <int64_t kStep>
inline void copy_key(int64_t group_bytes, const uint8_t* from, int64_t i, uint8_t* to, int64_t j) {
  for (int64_t at = 0; at < group_bytes; at += kLanes * kStep)
    std::memcpy(to + at + j * kStep, from + at + i * kStep, kStep);
}

// kPair: tokens whose dimensions lie side by side.
template <class Value, int kPair>
inline void copy_value(int64_t panels, const uint8_t* from, int64_t i, uint8_t* to, int64_t j) {
  const auto row = [](auto* v, int64_t token) {
    return v + token / kPair * kPair * kLanes + token % kPair;
  };
  const Value* source = row(reinterpret_cast<const Value*>(from), i);
  Value* target = row(reinterpret_cast<Value*>(to), j);
  for (int64_t panel = 0; panel < panels; ++panel) {
    for (int64_t e = 0; e < kLanes; ++e) target[e * kPair] = source[e * kPair];
    source += kLanes * kLanes;
    target += kLanes * kLanes;
  }
}

inline void copy_token(const KVCache& cache, const CachedGroup& from, int64_t i,
                       const CachedGroup& to, int64_t j) {
  const int64_t k_bytes = cache.k_group_bytes(), panels = cache.panels();
  switch (cache.k_format) {
    case KVFormat::f32:
    case KVFormat::bf16: copy_key<4>(k_bytes, from.k, i, to.k, j); break;
    case KVFormat::i8:
    case KVFormat::i4:
    case KVFormat::f8e4m3: copy_key<1>(k_bytes, from.k, i, to.k, j); break;
  }
  switch (cache.v_format) {
    case KVFormat::f32: copy_value<uint32_t, 1>(panels, from.v, i, to.v, j); break;
    case KVFormat::bf16: copy_value<uint16_t, 2>(panels, from.v, i, to.v, j); break;
    case KVFormat::i8:
    case KVFormat::f8e4m3: copy_value<uint8_t, 1>(panels, from.v, i, to.v, j); break;
    case KVFormat::i4:
      for (int64_t panel = 0; panel < panels; ++panel) {
        constexpr int64_t kBytes = kLanes / 2;
        std::memcpy(to.v + (panel * kLanes + j) * kBytes, from.v + (panel * kLanes + i) * kBytes,
                    kBytes);
      }
      break;
  }
  if (cache.k_scale_bytes() > 0) to.k_scales[j] = from.k_scales[i];
  if (cache.v_scale_bytes() > 0) to.v_scales[j] = from.v_scales[i];
}

}  // namespace octavo
