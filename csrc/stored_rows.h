// The rows of matrices as checkpoints store them.
#pragma once

#include <cstdint>

#include "formats.h"

namespace octavo {

// Floats; or ggml's blocks along the row, whose layout is that of the public GGUF format: of 32
// values q8_0 (w = scale * value), q5_0 and q4_0 (scale * (value - 16), - 8), q5_1 and q4_1
// (scale * value + min); of 256 values the K-quants, whose groups of 32 or 16 have a scale, and
// perhaps a minimum, of a few bits, times an fp16 number of the block; or a byte a value, a code,
// with float scales beside it.
enum class StoredType : int32_t {
  f32,
  bf16,
  f16,
  q8_0,
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  codes
};

struct StoredRow {
  StoredType type;
  const uint8_t* data;             // of any alignment
  // Of codes, those of each span of the format (offsets may be null): what PackedMatrix says of
  // them, but zero points with their own sign, and the scale that of e2m1's numbers, not of their
  // doubles.
  const float* scales = nullptr;
  const float* offsets = nullptr;
};

int64_t stored_row_bytes(StoredType type, int64_t inputs);
// Inputs that a row must have a multiple of.
int64_t stored_block(StoredType type);

// 32 values of a row in blocks: codes as the panels of a format have them, and what they mean.
struct StoredGroup {
  alignas(8) uint8_t codes[kGroup];
  // By span of 16: the weight is scale * (code - zero) + min.
  float scales[2], mins[2];
  int zero;
  // Of K-quants: the same as bytes times fp16 numbers.
  int8_t scale_bytes[2], min_bytes[2];
  uint16_t scale_factor, min_factor;
};

// The format that loses nothing of a type of blocks, and is no larger than it must be.
WeightFormat format_of_blocks(StoredType type);

// Group g of a row in blocks, its codes as format_of_blocks has them.
void read_group(const StoredRow& row, int64_t g, StoredGroup& group);

// `count` values of a row as float32, from `first` on, a multiple of 32 (and so is the length of
// rows of blocks). Not of codes.
void read_values(const StoredRow& row, int64_t first, int64_t count, float* out);

}  // namespace octavo
