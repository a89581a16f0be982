// Writing keys and values into the paged cache, in its formats.

#include <cfloat>
#include <cmath>

#include "simd.h"
#include "table.h"

namespace octavo::OCTAVO_ISA {
namespace {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Round to nearest, ties to even; beyond 448 (and infinite) becomes 448; NaN becomes 0x7f, the one
// code that is read as NaN.
inline uint8_t to_f8e4m3(float x) {
  const uint32_t sign = bits_of(x) >> 24 & 0x80, magnitude = bits_of(x) & 0x7fffffff;
  const uint32_t limited = magnitude < bits_of(448.0f) ? magnitude : bits_of(448.0f);
  // Exponents differ in their bias by 120, fractions in their width by 20 bits.
  const uint32_t normal = ((limited + 0x7ffff + (limited >> 20 & 1)) >> 20) - (120 << 3);
  // Below 2^-6 the step is 2^-9 throughout, as that of floats from 2^14 on.
  const uint32_t subnormal = bits_of(float_of(limited) + 0x1p14f) - bits_of(0x1p14f);
  const uint32_t code = limited < bits_of(0x1p-6f) ? subnormal : normal;
  return uint8_t(magnitude > 0x7f800000 ? 0x7f : sign | code);
}

// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t to_bf16(float x) {
  uint16_t rounded[kLanes];
  store_bf16(rounded, splat(x));
  return rounded[0];
}

// Scale and its inverse of int8 values; a vector of zeros has a scale of 0, one with a NaN or an
// infinity a scale of NaN. Both have the inverse 0, and zeros for values.
struct I8Scale {
  float scale, inverse;
};

I8Scale i8_scale(const float* x, int64_t size) {
  uint32_t largest = 0;  // as bits, magnitudes are in order, NaN above infinity
  for (int64_t e = 0; e < size; ++e) {
    const uint32_t magnitude = bits_of(x[e]) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  if (largest >= 0x7f800000) return {NAN, 0.0f};
  const float inverse = 127.0f / float_of(largest);
  if (inverse > FLT_MAX) return {0.0f, 0.0f};  // zero, or too small to divide by
  return {float_of(largest) / 127.0f, inverse};
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
void put_key(const float* x, int64_t size, int64_t lane, Value* group, Convert convert) {
  convert_row<kPair, Value>(x, size, convert, [&](int64_t e, const Value* values) {
    std::memcpy(group + e * kLanes + lane * kPair, values, kPair * sizeof(Value));
  });
}

template <int kPair, class Value, class Convert>
void put_value(const float* x, int64_t size, int64_t lane, Value* group, Convert convert) {
  Value* const row = group + lane / kPair * kPair * kLanes + lane % kPair;
  convert_row<1, Value>(x, size, convert, [&](int64_t e, const Value* value) {
    row[e / kLanes * kLanes * kLanes + e % kLanes * kPair] = *value;
  });
}

// Converters of int8 differ between keys and values.
template <int kPair, class Value, class ConvertKey, class ConvertValue>
void put(const KVCache& cache, uint8_t* head, int64_t token, const float* key, const float* value,
         ConvertKey convert_key, ConvertValue convert_value) {
  const int64_t size = cache.head_dim, group = token / kLanes, lane = token % kLanes;
  Value* const k = reinterpret_cast<Value*>(head);
  Value* const v = reinterpret_cast<Value*>(head + cache.k_bytes());
  put_key<kPair>(key, size, lane, k + group * round_up(size, kPair) * kLanes, convert_key);
  put_value<kPair>(value, size, lane, v + group * cache.panels() * kLanes * kLanes, convert_value);
}

void write_kv(const KVCache& cache, Rows k, Rows v, const int64_t* slots, int64_t t0, int64_t t1) {
  const int64_t size = cache.head_dim;
  for (int64_t t = t0; t < t1; ++t) {
    const int64_t block = slots[t] / cache.block_size, token = slots[t] % cache.block_size;
    for (int64_t g = 0; g < cache.heads; ++g) {
      uint8_t* const head = cache.head(block, g);
      const float* const key = k.row(t) + g * size;
      const float* const value = v.row(t) + g * size;
      switch (cache.format) {
        case KVFormat::f32: {
          const auto same = [](f32x16 x, float* to) { store(to, x); };
          put<1, float>(cache, head, token, key, value, same, same);
          break;
        }
        case KVFormat::bf16: {
          const auto rounded = [](f32x16 x, uint16_t* to) { store_bf16(to, x); };
          put<2, uint16_t>(cache, head, token, key, value, rounded, rounded);
          break;
        }
        case KVFormat::i8: {
          const I8Scale ks = i8_scale(key, size), vs = i8_scale(value, size);
          float* const scales =
              reinterpret_cast<float*>(head + cache.k_bytes() + cache.v_bytes()) + token;
          scales[0] = ks.scale;
          scales[cache.scale_bytes() / int64_t{sizeof(float)}] = vs.scale;
          const auto rounded = [](float inverse) {
            return [inverse](f32x16 x, int8_t* to) {
              store_i8(to, inverse == 0.0f ? zero() : round(x * splat(inverse)));
            };
          };
          put<1, int8_t>(cache, head, token, key, value, rounded(ks.inverse), rounded(vs.inverse));
          break;
        }
        case KVFormat::f8e4m3: {
          const auto rounded = [](f32x16 x, uint8_t* to) {
            float values[kLanes];
            store(values, x);
            for (int64_t i = 0; i < kLanes; ++i) to[i] = to_f8e4m3(values[i]);
          };
          put<1, uint8_t>(cache, head, token, key, value, rounded, rounded);
          break;
        }
      }
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
      case KVFormat::bf16: {
        put(reinterpret_cast<uint16_t*>(row), to_bf16);
        break;
      }
      case KVFormat::i8: {
        const I8Scale of_latent = i8_scale(latents.row(t), rank);
        const I8Scale of_rotated = i8_scale(rotated.row(t), rope_dim);
        const bool is_nan = of_latent.scale != of_latent.scale;
        const I8Scale& s = is_nan || of_latent.scale > of_rotated.scale ? of_latent : of_rotated;
        *cache.scale(row) = s.scale;
        put(reinterpret_cast<int8_t*>(row), [&](float x) {
          return int8_t(s.inverse == 0.0f ? 0.0f : std::nearbyint(x * s.inverse));
        });
        break;
      }
      case KVFormat::f8e4m3: put(row, to_f8e4m3); break;
    }
  }
}

}  // namespace

void install_write_kv(Kernels& table) {
  table.write_kv = write_kv;
  table.write_latent = write_latent;
}

}  // namespace octavo::OCTAVO_ISA
