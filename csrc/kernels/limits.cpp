// The most that an instruction set can do, for `octavo bench ops` to compare kernels with: loops of
// nothing but loads, fused multiply-adds, or products of 8-bit integers.
#include "simd.h"
#include "table.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace octavo::OCTAVO_ISA {
namespace {

// One register of floats, and of integers.
#if defined(__AVX512F__)
using Floats = __m512;
using Ints = __m512i;
#elif defined(__AVX2__)
using Floats = __m256;
using Ints = __m256i;
#else
using Floats = f32x4;
using Ints = i32x4;
#endif

// From here on the compiler knows nothing of the value, so that it can't move a product of
// constants out of the loop.
template <typename V>
inline void forget(V& value) {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(value));
#elif defined(__x86_64__)
  asm volatile("" : "+x"(value));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(value));
#else
  asm volatile("" : "+m"(value));
#endif
}

inline Floats fused(Floats a, Floats b, Floats sum) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, sum);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, sum);
#elif defined(__aarch64__)
  return vfmaq_f32(sum, a, b);
#else
  return a * b + sum;
#endif
}

// The set's fastest product of bytes that loses nothing, added up in 32 bits. kByteProducts: how
// many products one call makes.
#if defined(__AVX512F__)
constexpr int kByteProducts = 64;
inline Ints add_byte_products(Ints sum, Ints a, Ints b) { return _mm512_dpbusd_epi32(sum, a, b); }
#elif defined(__AVX2__)
constexpr int kByteProducts = 32;
inline Ints add_byte_products(Ints sum, Ints a, Ints b) {
  const Ints pairs = _mm256_maddubs_epi16(a, b);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#elif defined(__SSE2__)
constexpr int kByteProducts = 8;  // widened to 16 bits before
inline Ints add_byte_products(Ints sum, Ints a, Ints b) {
  return sum + Ints(_mm_madd_epi16((__m128i)a, (__m128i)b));
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kByteProducts = 16;
inline Ints add_byte_products(Ints sum, Ints a, Ints b) {
  return Ints(vdotq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b));
}
#elif defined(__aarch64__)
constexpr int kByteProducts = 8;
inline Ints add_byte_products(Ints sum, Ints a, Ints b) {
  const int16x8_t products = vmull_s8(vget_low_s8((int8x16_t)a), vget_low_s8((int8x16_t)b));
  return Ints(vpadalq_s16((int32x4_t)sum, products));
}
#else
constexpr int kByteProducts = 4;  // widened to 32 bits before
inline Ints add_byte_products(Ints sum, Ints a, Ints b) { return sum + a * b; }
#endif

// Sums that hide the latency of an addition behind two or more of them a cycle, and stay in registers
// beside the operands. Each has a name: GCC 12 keeps an array of them in memory.
constexpr int kSums = 12;

template <typename V, typename F>
inline V repeat(int64_t rounds, F add_products, V a, V b) {
  V s0{}, s1{}, s2{}, s3{}, s4{}, s5{}, s6{}, s7{}, s8{}, s9{}, s10{}, s11{};
  const auto each = [&](auto f) {
    f(s0), f(s1), f(s2), f(s3), f(s4), f(s5), f(s6), f(s7), f(s8), f(s9), f(s10), f(s11);
  };
  for (int64_t r = 0; r < rounds; ++r) {
    each([&](V& sum) {
      forget(a);
      sum = add_products(sum, a, b);
      forget(sum);  // now, or GCC 12 makes all products first and has no registers for them
    });
  }
  V total{};
  each([&](V& sum) { total = total + sum; });
  return total;
}

int64_t multiply_floats(int64_t rounds) {
  Floats a = Floats{} + 1.0f, b = Floats{} + 0.001f;
  forget(b);
  Floats total =
      repeat(rounds, [](Floats sum, Floats x, Floats y) { return fused(x, y, sum); }, a, b);
  forget(total);
  return 2 * rounds * kSums * int64_t(sizeof(Floats) / sizeof(float));
}

int64_t multiply_bytes(int64_t rounds) {
  Ints a, b;
  std::memset(&a, 1, sizeof a);
  std::memset(&b, 1, sizeof b);
  forget(b);
  Ints total =
      repeat(rounds, [](Ints sum, Ints x, Ints y) { return add_byte_products(sum, x, y); }, a, b);
  forget(total);
  return 2 * rounds * kSums * kByteProducts;
}

void read_memory(const uint8_t* data, int64_t bytes) {
  Ints sums[4] = {};
  for (int64_t i = 0; i < bytes; i += int64_t(sizeof sums)) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      Ints values;
      std::memcpy(&values, data + i + j * int64_t(sizeof values), sizeof values);
      sums[j] = sums[j] + values;
    }
  }
  Ints total = sums[0] + sums[1] + sums[2] + sums[3];
  forget(total);
}

}  // namespace

void install_limits(Kernels& table) {
  table.multiply_floats = multiply_floats;
  table.multiply_bytes = multiply_bytes;
  table.read_memory = read_memory;
}

}  // namespace octavo::OCTAVO_ISA
