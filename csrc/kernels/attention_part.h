// A row's attention over some of its tokens, and how two such are merged.
#pragma once

#include "../attention_scratch.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

// One row's record, as part_floats() describes it.
struct Part {
  float* output;
  float* maximum;
  float* sum;

  Part(float* row, int64_t panels)
      : output(row), maximum(row + panels * kLanes), sum(maximum + 1) {}
};

// The one way in which chunks are merged, in rising order, whether one unit saw them all or each
// was a unit of its own. A sum of 0 says that the row sees none of the part's tokens (or that all
// their scores are minus infinity).
inline void merge(Part into, Part part, int64_t panels) {
  if (*part.sum == 0.0f) return;
  if (*into.sum == 0.0f) {
    std::memcpy(into.output, part.output, size_t(panels * kLanes) * sizeof(float));
    *into.maximum = *part.maximum;
    *into.sum = *part.sum;
    return;
  }
  const float top = *into.maximum > *part.maximum ? *into.maximum : *part.maximum;
  const f32x16 old = exp(splat(*into.maximum - top)), added = exp(splat(*part.maximum - top));
  for (int64_t i = 0; i < panels * kLanes; i += kLanes)
    store(into.output + i, fma(load(into.output + i), old, load(part.output + i) * added));
  store_first(into.sum, fma(splat(*into.sum), old, splat(*part.sum) * added), 1);
  *into.maximum = top;
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
