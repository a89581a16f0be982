// Conversions between kinds of numbers, of one or of four at a time, that any processor has.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace octavo {

// Four floats, or integers, that any processor has as one vector.
constexpr int kWidth = 4;
using Floats = float __attribute__((vector_size(4 * kWidth)));
using Ints = int32_t __attribute__((vector_size(4 * kWidth)));
using Halves = uint16_t __attribute__((vector_size(2 * kWidth)));

constexpr int32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;

template <typename T>
T load(const void* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

template <typename T>
void store(void* p, T x) {
  std::memcpy(p, &x, sizeof x);
}

inline float to_float(int32_t x) { return float(x); }
inline Floats to_float(Ints x) { return __builtin_convertvector(x, Floats); }

// fp16 <-> float32, of one number (Int is int32_t, Float is float) or of four. Every case is
// computed and one is taken, so that loops over numbers vectorise, too.

template <typename Int>
auto float_of_half(Int half) {
  using Float = decltype(to_float(half));
  const Int rest = half & 0x7fff;
  // Subnormals go through an integer: a thread may take subnormal floats for zero.
  const Float subnormal = to_float(rest) * 0x1p-24f;
  const Float normal = std::bit_cast<Float>((rest << 13) + (112 << 23));
  const Float special = std::bit_cast<Float>(rest << 13 | kInfinity);
  const Float finite = rest < 0x400 ? subnormal : normal;
  const Float magnitude = rest < 0x7c00 ? finite : special;
  return std::bit_cast<Float>(std::bit_cast<Int>(magnitude) | (half & 0x8000) << 16);
}

template <typename Int, typename Float>
Int half_of_float(Float x) {
  const Int bits = std::bit_cast<Int>(x), rest = bits & kMagnitude;
  const Int normal = (rest + 0xfff + (rest >> 13 & 1) - (112 << 23)) >> 13;
  // Halves below 2^-14 lie as far apart as floats from 0.5 on.
  const Int subnormal =
      std::bit_cast<Int>(std::bit_cast<Float>(rest) + 0.5f) - std::bit_cast<int32_t>(0.5f);
  const Int finite = rest < 0x38800000 ? subnormal : normal;
  const Int rounded = rest < 0x477ff000 ? finite : Int{} + 0x7c00;   // 65520 and more: infinity
  return (rest > kInfinity ? Int{} + 0x7e00 : rounded) | (bits >> 16 & 0x8000);
}

inline float float_of_bfloat(uint16_t b) { return std::bit_cast<float>(uint32_t(b) << 16); }

inline uint16_t bfloat_of_float(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
  return uint16_t(((bits & kMagnitude) > kInfinity ? bits | 0x400000 : rounded) >> 16);
}

// To float8 e4m3: round to nearest, ties to even; beyond 448 (and infinite) becomes 448; NaN becomes
// 0x7f, the one code that is read as NaN.
inline uint8_t f8e4m3_of_float(float x) {
  const auto bits = std::bit_cast<uint32_t>(x), sign = bits >> 24 & 0x80;
  const uint32_t magnitude = bits & kMagnitude, most = std::bit_cast<uint32_t>(448.0f);
  const uint32_t limited = magnitude < most ? magnitude : most;
  // Exponents differ in their bias by 120, fractions in their width by 20 bits.
  const uint32_t normal = ((limited + 0x7ffff + (limited >> 20 & 1)) >> 20) - (120 << 3);
  // Below 2^-6 the step is 2^-9 throughout, as that of floats from 2^14 on.
  const float small = std::bit_cast<float>(limited) + 0x1p14f;
  const uint32_t subnormal = std::bit_cast<uint32_t>(small) - std::bit_cast<uint32_t>(0x1p14f);
  const uint32_t code = limited < std::bit_cast<uint32_t>(0x1p-6f) ? subnormal : normal;
  return uint8_t(magnitude > uint32_t(kInfinity) ? 0x7f : sign | code);
}

}  // namespace octavo
