// One token's key and value within a layer's cache: where they lie, and copies of them as bytes. For
// code that moves tokens; what computes with them goes by KVCache in formats.h itself.
#pragma once

#include <cstring>

#include "formats.h"

namespace octavo {

// What a head has of a group of 16 neighbouring tokens: sub-blocks of K and V, i8's scales.
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
  float* const v_scales = k_scales + cache.scale_bytes() / int64_t{sizeof(float)};
  return {k + group * cache.k_group_bytes(), v + group * cache.v_group_bytes(),
          k_scales + group * kLanes, v_scales + group * kLanes};
}

// Token i of one group becomes token j of another.
template <class Value, int kPair>
inline void copy_values(const KVCache& cache, const CachedGroup& from, int64_t i,
                        const CachedGroup& to, int64_t j) {
  constexpr int64_t kStep = kPair * int64_t{sizeof(Value)};  // bytes of a token's dimensions
  for (int64_t at = 0; at < cache.k_group_bytes(); at += kLanes * kStep)
    std::memcpy(to.k + at + j * kStep, from.k + at + i * kStep, kStep);
  const auto row = [](uint8_t* v, int64_t token) {
    return reinterpret_cast<Value*>(v) + token / kPair * kPair * kLanes + token % kPair;
  };
  const Value* source = row(from.v, i);
  Value* target = row(to.v, j);
  for (int64_t panel = 0; panel < cache.panels(); ++panel) {
    for (int64_t e = 0; e < kLanes; ++e) target[e * kPair] = source[e * kPair];
    source += kLanes * kLanes;
    target += kLanes * kLanes;
  }
}

inline void copy_token(const KVCache& cache, const CachedGroup& from, int64_t i,
                       const CachedGroup& to, int64_t j) {
  switch (cache.format) {
    case KVFormat::f32: copy_values<uint32_t, 1>(cache, from, i, to, j); break;
    case KVFormat::bf16: copy_values<uint16_t, 2>(cache, from, i, to, j); break;
    case KVFormat::i8:
      to.k_scales[j] = from.k_scales[i];
      to.v_scales[j] = from.v_scales[i];
      [[fallthrough]];
    case KVFormat::f8e4m3: copy_values<uint8_t, 1>(cache, from, i, to, j); break;
  }
}

}  // namespace octavo
