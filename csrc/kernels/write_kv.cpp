// Writing keys and values into the paged cache, in its formats.

#include <bit>
#include <cfloat>
#include <cmath>

#include "../cached_token.h"
#include "../float_bits.h"
#include "rotation.h"
#include "simd.h"
#include "table.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Scale and its inverse of integers; a vector of zeros has a scale of 0, one with a NaN or an
// infinity a scale of NaN. Both have the inverse 0, and zeros for values.
struct Scale {
  float scale, inverse;

  f32x16 values(f32x16 x) const { return inverse == 0.0f ? zero() : round(x * splat(inverse)); }
};

// limit: 127, which the largest magnitude becomes, or -8, which the value itself does (the first of
// several): int4 reaches from there to 7, and its scale may be negative.
Scale scale_of(const float* x, int64_t size, float limit) {
  uint32_t largest = 0;  // as bits, magnitudes are in order, NaN above infinity
  int64_t at = 0;
  for (int64_t e = 0; e < size; ++e) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(x[e]) & kMagnitude;
    if (magnitude > largest) at = e;
    largest = magnitude > largest ? magnitude : largest;
  }
  if (largest >= uint32_t(kInfinity)) return {NAN, 0.0f};
  const float top = limit > 0.0f ? std::bit_cast<float>(largest) : x[at];
  const float inverse = limit / top;
  if (!(inverse <= FLT_MAX && inverse >= -FLT_MAX)) return {0.0f, 0.0f};  // (nearly) zero
  return {top / limit, inverse};
}

// Values of a token, the `lane`-th of its group, to the places that formats.h names. Sixteen are
// converted together, by convert(f32x16, Value*), and scattered then.
template <int kPair, class Value, class Convert, class Place>
inline void convert_row(const float* x, int64_t size, Convert convert, Place place) {
  for (int64_t e = 0; e < size; e += kLanes) {
    Value values[kLanes];
    convert(load_rest(x + e, size - e), values);
    const int64_t count = size - e < kLanes ? round_up(size - e, kPair) : kLanes;
    for (int64_t i = 0; i < count; i += kPair) place(e + i, values + i);
  }
}

template <int kPair, class Value, class Convert>
void put_key(const float* x, int64_t size, int64_t lane, uint8_t* group, Convert convert) {
  Value* const values = reinterpret_cast<Value*>(group);
  convert_row<kPair, Value>(x, size, convert, [&](int64_t e, const Value* pair) {
    std::memcpy(values + e * kLanes + lane * kPair, pair, kPair * sizeof(Value));
  });
}

template <int kPair, class Value, class Convert>
void put_value(const float* x, int64_t size, int64_t lane, uint8_t* group, Convert convert) {
  Value* const row = reinterpret_cast<Value*>(group) + lane / kPair * kPair * kLanes + lane % kPair;
  convert_row<1, Value>(x, size, convert, [&](int64_t e, const Value* value) {
    row[e / kLanes * kLanes * kLanes + e % kLanes * kPair] = *value;
  });
}

inline uint8_t nibbles(int8_t low, int8_t high) {
  return uint8_t((low & 0x0f) | uint8_t(high) << 4);
}

// Converters to the formats that keep a vector's values one by one.
struct Same {
  void operator()(f32x16 x, float* to) const { store(to, x); }
};
struct ToBF16 {
  void operator()(f32x16 x, uint16_t* to) const { store_bf16(to, x); }
};
struct ToF8 {
  float factor;
  void operator()(f32x16 x, uint8_t* to) const {
    float values[kLanes];
    store(values, x / splat(factor));
    for (int64_t i = 0; i < kLanes; ++i) to[i] = f8e4m3_of_float(values[i]);
  }
};
struct ToInt {
  Scale scale;
  void operator()(f32x16 x, int8_t* to) const { store_i8(to, scale.values(x)); }
};
struct ToInt4 {
  Scale scale;
  void operator()(f32x16 x, int8_t* to) const { store_i8(to, min(scale.values(x), splat(7.0f))); }
};

// A vector that is rotated, in scratch memory of the calling thread.
struct Rotated {
  float values[kMostRotated];

  Rotated(const float* x, int64_t size) {
    std::memcpy(values, x, size_t(size) * sizeof(float));
    rotate(values, size);
  }
};

void write_key(const KVCache& cache, const CachedGroup& group, int64_t lane, const float* x) {
  const int64_t size = cache.head_dim;
  switch (cache.k_format) {
    case KVFormat::f32: put_key<1, float>(x, size, lane, group.k, Same{}); break;
    case KVFormat::bf16: put_key<2, uint16_t>(x, size, lane, group.k, ToBF16{}); break;
    case KVFormat::f8e4m3: put_key<1, uint8_t>(x, size, lane, group.k, ToF8{cache.k_factor}); break;
    case KVFormat::i8: {
      const Scale scale = scale_of(x, size, 127.0f);
      group.k_scales[lane] = scale.scale;
      put_key<1, int8_t>(x, size, lane, group.k, ToInt{scale});
      break;
    }
    case KVFormat::i4: {
      const Rotated rotated(x, size);
      const Scale scale = scale_of(rotated.values, size, -8.0f);
      group.k_scales[lane] = scale.scale;
      convert_row<2, int8_t>(rotated.values, size, ToInt4{scale},
                             [&](int64_t e, const int8_t* pair) {
                               group.k[e / 2 * kLanes + lane] = nibbles(pair[0], pair[1]);
                             });
      break;
    }
  }
}

void write_value(const KVCache& cache, const CachedGroup& group, int64_t lane, const float* x) {
  const int64_t size = cache.head_dim;
  switch (cache.v_format) {
    case KVFormat::f32: put_value<1, float>(x, size, lane, group.v, Same{}); break;
    case KVFormat::bf16: put_value<2, uint16_t>(x, size, lane, group.v, ToBF16{}); break;
    case KVFormat::f8e4m3:
      put_value<1, uint8_t>(x, size, lane, group.v, ToF8{cache.v_factor});
      break;
    case KVFormat::i8: {
      const Scale scale = scale_of(x, size, 127.0f);
      group.v_scales[lane] = scale.scale;
      put_value<1, int8_t>(x, size, lane, group.v, ToInt{scale});
      break;
    }
    case KVFormat::i4: {
      const Rotated rotated(x, size);
      const Scale scale = scale_of(rotated.values, size, -8.0f);
      group.v_scales[lane] = scale.scale;
      for (int64_t panel = 0; panel < cache.panels(); ++panel) {
        const int64_t e = panel * kLanes;
        int8_t values[kLanes];
        ToInt4{scale}(load_rest(rotated.values + e, size - e), values);
        uint8_t* const row = group.v + (e + lane) * kLanes / 2;
        for (int64_t i = 0; i < kLanes / 2; ++i) row[i] = nibbles(values[i], values[i + 8]);
      }
      break;
    }
  }
}

void write_kv(const KVCache& cache, Rows k, Rows v, const int64_t* slots, int64_t t0, int64_t t1) {
  const int64_t size = cache.head_dim;
  for (int64_t t = t0; t < t1; ++t) {
    const int64_t block = slots[t] / cache.block_size, token = slots[t] % cache.block_size;
    for (int64_t g = 0; g < cache.heads; ++g) {
      const CachedGroup group = cached_group(cache, block, g, token / kLanes);
      write_key(cache, group, token % kLanes, k.row(t) + g * size);
      write_value(cache, group, token % kLanes, v.row(t) + g * size);
    }
  }
}

void write_latent(const LatentCache& cache, Rows latents, Rows rotated, const int64_t* slots,
                  int64_t t0, int64_t t1) {
  const int64_t rank = cache.rank, rope_dim = cache.rope_dim;
  for (int64_t t = t0; t < t1; ++t) {
    uint8_t* const row = cache.row(slots[t] / cache.block_size, slots[t] % cache.block_size);
    const auto put = [&](auto* to, auto convert) {
      for (int64_t e = 0; e < rank; ++e) to[e] = convert(latents.row(t)[e]);
      for (int64_t e = 0; e < rope_dim; ++e) to[rank + e] = convert(rotated.row(t)[e]);
      for (int64_t e = rank + rope_dim; e < cache.padded(); ++e) to[e] = convert(0.0f);
    };
    switch (cache.format) {
      case KVFormat::f32: put(reinterpret_cast<float*>(row), [](float x) { return x; }); break;
      case KVFormat::bf16: put(reinterpret_cast<uint16_t*>(row), bfloat_of_float); break;
      case KVFormat::i8: {
        const Scale of_latent = scale_of(latents.row(t), rank, 127.0f);
        const Scale of_rotated = scale_of(rotated.row(t), rope_dim, 127.0f);
        const bool is_nan = of_latent.scale != of_latent.scale;
        const Scale& s = is_nan || of_latent.scale > of_rotated.scale ? of_latent : of_rotated;
        *cache.scale(row) = s.scale;
        put(reinterpret_cast<int8_t*>(row), [&](float x) {
          return int8_t(s.inverse == 0.0f ? 0.0f : std::nearbyint(x * s.inverse));
        });
        break;
      }
      case KVFormat::f8e4m3: put(row, f8e4m3_of_float); break;
      case KVFormat::i4: break;  // which LatentMemory refuses
    }
  }
}

}  // namespace

void install_write_kv(Kernels& table) {
  table.write_kv = write_kv;
  table.write_latent = write_latent;
}

}  // namespace octavo::OCTAVO_ISA
