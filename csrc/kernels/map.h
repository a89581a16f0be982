// What kernels that work element by element share.
#pragma once

#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

// y[c] = f(inputs[c]...), sixteen columns at a time; the remainder takes the same path, so that a
// value's bits do not depend on its column. y may be one of the inputs.
template <typename F, typename... Inputs>
inline void map(int64_t size, float* y, F f, const Inputs*... inputs) {
  int64_t c = 0;
  for (; c + 16 <= size; c += 16) store(y + c, f(load(inputs + c)...));
  if (c < size) {
    const int count = int(size - c);
    store_first(y + c, f(load_first(inputs + c, count)...), count);
  }
}

// x * sigmoid(z). exp stays finite, so that a large negative z gives almost nothing, never NaN.
inline f32x16 times_sigmoid(f32x16 x, f32x16 z) { return x / (splat(1.0f) + exp(zero() - z)); }

}  // namespace
}  // namespace octavo::OCTAVO_ISA
