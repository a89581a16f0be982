// From the rows of a checkpoint to the panels of formats.h.
#pragma once

#include <cstdint>

#include "formats.h"
#include "stored_rows.h"

namespace octavo {

// Whether rows of this type can become a matrix of this format: codes one with scales (not of
// K-quants), all else any of floats and any that floats are quantized to, and blocks their own.
bool can_pack(const WeightFormat& format, StoredType type);

// Packs `num_rows` outputs of `inputs` weights each into ceil(num_rows / 16) panels; lanes without
// an output become zeros. Rows of different types may stand side by side.
//
// Blocks keep their values and the bits of their scales in the format of their own
// (format_of_blocks), and q4_0 in that of q4_1, too (min = -8 * scale). Codes are kept, their scales
// rounded to the format's. 16-bit floats keep their bits in their own format. All else is computed
// from the values as float32: floats are rounded to nearest even; q8, q4 and f8e4m3 are quantized,
// `scale_group` values along a row sharing a scale: a multiple of 32, or at least `inputs` for one
// scale a row.
void pack_panels(const WeightFormat& format, int64_t inputs, const StoredRow* rows,
                 int64_t num_rows, int64_t scale_group, uint8_t* panels);

}  // namespace octavo
