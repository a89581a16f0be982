#include "stored_rows.h"

#include <cstring>

#include "float_bits.h"

namespace octavo {
namespace {

constexpr int64_t kSuperBlock = 256;   // values of a K-quant's block

// Bytes of a block; 0 where there are none.
int64_t block_bytes(StoredType type) {
  switch (type) {
    case StoredType::q8_0: return 34;
    case StoredType::q4_0: return 18;
    case StoredType::q4_1: return 20;
    case StoredType::q5_0: return 22;
    case StoredType::q5_1: return 24;
    case StoredType::q2_k: return 84;
    case StoredType::q3_k: return 110;
    case StoredType::q4_k: return 144;
    case StoredType::q5_k: return 176;
    case StoredType::q6_k: return 210;
    default: return 0;
  }
}

float half_at(const uint8_t* p) { return float_of_half<int32_t>(load<uint16_t>(p)); }

// Value i of the first sixteen is the low nibble of byte i, of the others the high one.
void read_nibbles(const uint8_t* pairs, uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = pairs[i] & 15;
    codes[i + 16] = pairs[i] >> 4;
  }
}
void add_fifth_bits(const uint8_t* bits, uint8_t* codes, int zero) {
  const auto high = load<uint32_t>(bits);
  for (int i = 0; i < 32; ++i) codes[i] = uint8_t(codes[i] + (high >> i & 1) * 16 + zero);
}

// --- blocks of 32 ----------------------------------------------------------------------------

void read_small_block(StoredType type, const uint8_t* block, StoredGroup& group) {
  const bool has_min = type == StoredType::q4_1 || type == StoredType::q5_1;
  group.scales[0] = group.scales[1] = half_at(block);
  group.mins[0] = group.mins[1] = has_min ? half_at(block + 2) : 0;
  const uint8_t* rest = block + (has_min ? 4 : 2);
  switch (type) {
    case StoredType::q8_0:
      group.zero = 128;
      for (int i = 0; i < kGroup; ++i) group.codes[i] = rest[i] ^ 0x80;
      return;
    case StoredType::q5_0:
      group.zero = 128;
      read_nibbles(rest + 4, group.codes);
      add_fifth_bits(rest, group.codes, 128 - 16);
      return;
    case StoredType::q5_1:
      group.zero = 0;
      read_nibbles(rest + 4, group.codes);
      add_fifth_bits(rest, group.codes, 0);
      return;
    default:
      group.zero = has_min ? 0 : 8;
      read_nibbles(rest, group.codes);
      return;
  }
}

// --- K-quants: g is the group's number in its block of eight ---------------------------------

// Two bits of each value: of byte i for four groups.
void read_pairs(const uint8_t* quarters, int g, uint8_t* codes) {
  const uint8_t* bytes = quarters + g / 4 * 32;
  for (int i = 0; i < 32; ++i) codes[i] = bytes[i] >> g % 4 * 2 & 3;
}
// Byte i's low nibbles are a group, its high ones the next.
void read_nibbles_of_two(const uint8_t* pairs, int g, uint8_t* codes) {
  const uint8_t* bytes = pairs + g / 2 * 32;
  for (int i = 0; i < 32; ++i) codes[i] = bytes[i] >> g % 2 * 4 & 15;
}

// The scale and the minimum of a group of q4_k and q5_k, in six bits each, of twelve bytes.
void read_six_bits(const uint8_t* bytes, int g, StoredGroup& group) {
  const int scale = g < 4 ? bytes[g] & 63 : (bytes[g + 4] & 15) | bytes[g - 4] >> 6 << 4;
  const int min = g < 4 ? bytes[g + 4] & 63 : bytes[g + 4] >> 4 | bytes[g] >> 6 << 4;
  group.scale_bytes[0] = group.scale_bytes[1] = int8_t(scale);
  group.min_bytes[0] = group.min_bytes[1] = int8_t(-min);
}

void read_large_block(StoredType type, const uint8_t* block, int g, StoredGroup& group) {
  group.zero = 0;
  group.min_factor = 0;
  group.min_bytes[0] = group.min_bytes[1] = 0;
  const auto set_factors = [&](const uint8_t* halves, bool has_min) {
    group.scale_factor = load<uint16_t>(halves);
    if (has_min) group.min_factor = load<uint16_t>(halves + 2);
  };
  switch (type) {
    case StoredType::q2_k:   // scales and minimums [16], values [64], factors [2]
      read_pairs(block + 16, g, group.codes);
      for (int s = 0; s < 2; ++s) {
        group.scale_bytes[s] = int8_t(block[2 * g + s] & 15);
        group.min_bytes[s] = int8_t(-(block[2 * g + s] >> 4));
      }
      set_factors(block + 80, true);
      break;
    case StoredType::q3_k: {   // third bits [32], values [64], scales [12], factor
      group.zero = 8;
      read_pairs(block + 32, g, group.codes);
      for (int i = 0; i < 32; ++i) group.codes[i] += (block[i] >> g & 1) * 4 + 4;
      const uint8_t* scales = block + 96;   // four bits of sixteen, then two bits of each
      for (int s = 0; s < 2; ++s) {
        const int i = 2 * g + s;
        const int low = scales[i % 8] >> i / 8 * 4 & 15, high = scales[8 + i % 4] >> i / 4 * 2 & 3;
        group.scale_bytes[s] = int8_t((low | high << 4) - 32);
      }
      set_factors(block + 108, false);
      break;
    }
    case StoredType::q4_k:   // factors [2], scales and minimums [12], values [128]
      read_nibbles_of_two(block + 16, g, group.codes);
      read_six_bits(block + 4, g, group);
      set_factors(block, true);
      break;
    case StoredType::q5_k:  // factors [2], scales and minimums [12], fifth bits [32], values [128]
      read_nibbles_of_two(block + 48, g, group.codes);
      for (int i = 0; i < 32; ++i) group.codes[i] += (block[16 + i] >> g & 1) * 16;
      read_six_bits(block + 4, g, group);
      set_factors(block, true);
      break;
    default: {  // q6_k: low bits [128], high bits [64], scales [16], factor
      group.zero = 128;
      const uint8_t* low = block + g / 4 * 64 + g % 2 * 32;
      const uint8_t* high = block + 128 + g / 4 * 32;
      for (int i = 0; i < 32; ++i)
        group.codes[i] =
            uint8_t((low[i] >> g % 4 / 2 * 4 & 15) + (high[i] >> g % 4 * 2 & 3) * 16 + 128 - 32);
      std::memcpy(group.scale_bytes, block + 192 + 2 * g, 2);
      set_factors(block + 208, false);
      break;
    }
  }
  for (int s = 0; s < 2; ++s) {
    group.scales[s] = float_of_half<int32_t>(group.scale_factor) * float(group.scale_bytes[s]);
    group.mins[s] = float_of_half<int32_t>(group.min_factor) * float(group.min_bytes[s]);
  }
}

}  // namespace

int64_t stored_block(StoredType type) {
  if (block_bytes(type) == 0) return 1;
  return type >= StoredType::q2_k ? kSuperBlock : kGroup;
}

int64_t stored_row_bytes(StoredType type, int64_t inputs) {
  switch (type) {
    case StoredType::f32: return inputs * 4;
    case StoredType::bf16:
    case StoredType::f16: return inputs * 2;
    case StoredType::codes: return inputs;
    default: return ceil_div(inputs, stored_block(type)) * block_bytes(type);
  }
}

WeightFormat format_of_blocks(StoredType type) {
  switch (type) {
    case StoredType::q4_0: return {Values::q4, Scales::f16};
    case StoredType::q4_1: return {Values::q4, Scales::f16, Offset::min};
    case StoredType::q5_1: return {Values::q8, Scales::f32, Offset::min};
    case StoredType::q2_k: return {Values::q4, Scales::k8, Offset::min, 16};
    case StoredType::q3_k: return {Values::q4, Scales::k8, Offset::none, 16};
    case StoredType::q4_k: return {Values::q4, Scales::k8, Offset::min};
    case StoredType::q5_k: return {Values::q8, Scales::k8, Offset::min};
    case StoredType::q6_k: return {Values::q8, Scales::k8, Offset::none, 16};
    default: return {Values::q8, Scales::f16};  // q8_0, q5_0
  }
}

void read_group(const StoredRow& row, int64_t g, StoredGroup& group) {
  const int64_t in_block = stored_block(row.type) / kGroup;
  const uint8_t* block = row.data + g / in_block * block_bytes(row.type);
  if (in_block == 1)
    read_small_block(row.type, block, group);
  else
    read_large_block(row.type, block, int(g % in_block), group);
}

void read_values(const StoredRow& row, int64_t first, int64_t count, float* out) {
  switch (row.type) {
    case StoredType::f32: std::memcpy(out, row.data + first * 4, size_t(count) * 4); return;
    case StoredType::bf16:
      for (int64_t i = 0; i < count; ++i)
        out[i] = float_of_bfloat(load<uint16_t>(row.data + (first + i) * 2));
      return;
    case StoredType::f16:
      for (int64_t i = 0; i < count; ++i)
        out[i] = float_of_half<int32_t>(load<uint16_t>(row.data + (first + i) * 2));
      return;
    default: break;
  }
  StoredGroup group;
  for (int64_t done = 0; done < count; done += kGroup, out += kGroup) {
    read_group(row, (first + done) / kGroup, group);
    for (int i = 0; i < kGroup; ++i)
      out[i] = group.scales[i / 16] * float(group.codes[i] - group.zero) + group.mins[i / 16];
  }
}

}  // namespace octavo
