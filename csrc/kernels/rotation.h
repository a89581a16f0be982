// The rotation of vectors that are cached in i4 (rotation_block() in formats.h).
#pragma once

#include <cmath>

#include "../formats.h"

namespace octavo::OCTAVO_ISA {

// x in place, block by block times the Hadamard matrix of its size, normalised: the butterflies of
// Walsh and Hadamard, which add and subtract in one fixed order.
inline void rotate(float* x, int64_t size) {
  const int64_t block = rotation_block(size);
  const float factor = 1.0f / std::sqrt(float(block));
  for (int64_t begin = 0; begin < size; begin += block) {
    float* const b = x + begin;
    for (int64_t half = 1; half < block; half *= 2)
      for (int64_t i = 0; i < block; i += 2 * half)
        for (int64_t j = i; j < i + half; ++j) {
          const float low = b[j], high = b[j + half];
          b[j] = low + high;
          b[j + half] = low - high;
        }
    for (int64_t i = 0; i < block; ++i) b[i] *= factor;
  }
}

}  // namespace octavo::OCTAVO_ISA
