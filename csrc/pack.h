// From the rows of a checkpoint to the panels of formats.h.
#pragma once

#include <cstdint>

#include "formats.h"

namespace octavo {

// How a checkpoint stores the values of a row: floats, or ggml's blocks of 32 along the row:
//
//   q8_0   fp16 scale, int8_t value[32]:                      w = scale * value
//   q4_0   fp16 scale, uint8_t[16]:                           w = scale * (value - 8)
//   q4_1   fp16 scale, fp16 min, uint8_t[16]:                 w = scale * value + min
//
// Byte i of the sixteen has value i in its low nibble and value i + 16 in its high one.
enum class StoredType : int32_t { f32 = 0, bf16 = 1, f16 = 2, q8_0 = 3, q4_0 = 4, q4_1 = 5 };

struct StoredRow {
  StoredType type;
  const uint8_t* data;   // of any alignment
};

int64_t stored_row_bytes(StoredType type, int64_t inputs);

// Packs `num_rows` outputs of `inputs` weights each into ceil(num_rows / 16) panels; lanes without
// an output become zeros. Rows of different types may stand side by side.
//
// Blocks keep their values and the bits of their scales where the format has the same kind: q8_0 in
// q8, q4_0 in q4 without min, q4_1 in q4 with min, and q4_0 there, too (min = -8 * scale). 16-bit
// floats keep their bits in their own format. All else is computed from the values as float32:
// floats are rounded to nearest even; q8 and q4 are quantized, `scale_group` values along a row
// sharing a scale: a multiple of 32, or at least `inputs` for one scale a row.
void pack_panels(WeightFormat format, bool has_min, int64_t inputs, const StoredRow* rows,
                 int64_t num_rows, int64_t scale_group, uint8_t* panels);

}  // namespace octavo
