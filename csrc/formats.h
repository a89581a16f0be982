// How weights, quantized activations and the KV cache lie in memory. The same bytes serve every
// instruction set, so that a packed file moves between machines.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

constexpr int64_t kLanes = 16;   // outputs of a panel; int32 lanes of one 512-bit register
constexpr int64_t kGroup = 32;   // values that share a scale
constexpr int64_t kAlign = 64;   // bytes

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

enum class WeightFormat : int32_t { f32 = 0, bf16 = 1, f16 = 2, q8 = 3, q4 = 4 };

// A matrix w (O, I) in panels of 16 outputs; the last panel is padded with zeros. Panel p holds
// outputs 16 p .. 16 p + 15, `panel_stride` bytes after the one before, 64-byte aligned:
//
//   f32         float    [I][16]
//   bf16, f16   uint16_t [I][16]
//   q8          pairs of groups, one after another; a pair is
//                 fp16    [2][16]        scale:  w = scale * value
//                 uint8_t [2][8][16][4]  value + 128 of k = 32 g + 4 j + b at [g % 2][j][lane][b]
//   q4          pairs of groups; a pair is
//                 fp16    [2][16]        scale, and with has_min
//                 fp16    [2][16]        min:    w = scale * value + min
//                                        (without: w = scale * (value - 8))
//                 uint8_t [2][4][16][4]  values 0..15: the low nibble of [g % 2][j][lane][b] is
//                                        k = 32 g + 8 j + b, the high one is k + 4
//   groups = ceil(I / 32); values beyond I count for nothing, since activations are zero there. If
//   their number is odd, the last pair ends after its first group's values.
//
// A kernel with few rows reads these bytes strictly in order. That matters: with a panel's scales
// after its values the hardware prefetcher lost track, and one Zen 4 core read 14 GB/s, not 31.
struct PackedMatrix {
  WeightFormat format;
  bool has_min;        // q4 only
  int64_t outputs;     // O
  int64_t inputs;      // I
  const uint8_t* data;
  int64_t panel_stride;

  int64_t panels() const { return ceil_div(outputs, kLanes); }
  int64_t groups() const { return ceil_div(inputs, kGroup); }
};

// Bytes of 16 outputs' values of one group.
constexpr int64_t group_bytes(WeightFormat format) {
  return kLanes * (format == WeightFormat::q8 ? kGroup : kGroup / 2);
}
// Bytes of the scales (and minimums) of 16 outputs and two groups.
constexpr int64_t pair_header_bytes(bool has_min) { return kLanes * (has_min ? 8 : 4); }

// Where group g of a q8 or q4 panel lies, in bytes from the panel's start.
struct GroupOffsets {
  int64_t values, scales, mins;
};
constexpr GroupOffsets group_offsets(WeightFormat format, bool has_min, int64_t g) {
  const int64_t header = pair_header_bytes(has_min), values = group_bytes(format);
  const int64_t pair = g / 2 * (header + 2 * values), scales = pair + g % 2 * kLanes * 2;
  return {pair + header + g % 2 * values, scales, scales + kLanes * 4};
}

inline int64_t panel_bytes(WeightFormat format, bool has_min, int64_t inputs) {
  const int64_t groups = ceil_div(inputs, kGroup);
  int64_t bytes = 0;
  switch (format) {
    case WeightFormat::f32: bytes = inputs * kLanes * 4; break;
    case WeightFormat::bf16:
    case WeightFormat::f16: bytes = inputs * kLanes * 2; break;
    case WeightFormat::q8:
    case WeightFormat::q4:
      bytes = ceil_div(groups, 2) * pair_header_bytes(has_min) + groups * group_bytes(format);
      break;
  }
  return round_up(bytes, kAlign);
}

// Activations quantized to int8 in groups of 32, each row by itself: x = scale * value, value in
// -127..127, scale = max|x| / 127 (a row with a NaN or infinity gets NaN scales, so that it shows
// in the row's result and nowhere else). One record a row:
//
//   int8_t  [32 groups]   values, zero beyond I
//   float   [groups]      scale
//   int32_t [groups]      -128 * sum(values): where a dot product with value + 128 starts
//   float   [groups]      scale * sum(values): what a weight's min is multiplied by
struct QuantizedRows {
  uint8_t* data;
  int64_t stride;   // bytes from row to row, a multiple of 64
  int64_t groups;

  int8_t* values(int64_t row) const { return reinterpret_cast<int8_t*>(data + row * stride); }
  float* scales(int64_t row) const {
    return reinterpret_cast<float*>(data + row * stride + groups * kGroup);
  }
  int32_t* starts(int64_t row) const { return reinterpret_cast<int32_t*>(scales(row) + groups); }
  float* sums(int64_t row) const { return scales(row) + 2 * groups; }
};

inline int64_t quantized_row_bytes(int64_t inputs) {
  const int64_t groups = ceil_div(inputs, kGroup);
  return round_up(groups * (kGroup + 12), kAlign);
}

enum class KVFormat : int32_t { f32 = 0, bf16 = 1, i8 = 2, f8e4m3 = 3, i4 = 4 };

// One layer's paged cache, keys and values each in a format of their own. A block holds, for each of
// its G heads, one after another, K, V, the scales of K and the scales of V:
//
//   K  T     [subs][E][16]            sub-block s, dimension e, token 16 s + lane: tokens in lanes
//   V  T     [subs][panels][16][16]   sub-block s, panel e / 16, token, dimension e % 16
//   bf16 in pairs, which instructions for its products want:
//   K  T     [subs][(E + 1) / 2][16][2]    dimension 2 i + j, token 16 s + lane
//   V  T     [subs][panels][8][16][2]      token 16 s + 2 i + j, dimension e % 16
//   i4 two to a byte, which is one token's, the first in the low nibble:
//   K  uint8 [subs][(E + 1) / 2][16]       dimensions 2 i and 2 i + 1, token 16 s + lane
//   V  uint8 [subs][panels][16][8]         token, dimensions 16 p + i and 16 p + i + 8
//   i8 and i4 only: float [B padded] scales (x = scale * value)
//
// subs = ceil(B / 16), panels = ceil(E / 16), B padded = 16 subs. Every part is 64-byte aligned.
// f8e4m3 saturates at +-448; its x = factor * value, by the cache's own factors. What i4 stores is
// rotated (rotation_block()). The cache starts as zeros; what a block holds beyond a sequence's
// tokens is arbitrary (even NaN) and must not reach any result.
struct KVCache {
  KVFormat k_format, v_format;
  uint8_t* data;
  int64_t num_blocks;
  int64_t block_size;   // B
  int64_t heads;        // G
  int64_t head_dim;     // E
  float k_factor = 1.0f, v_factor = 1.0f;  // of f8e4m3; 1 for all others

  int64_t subs() const { return ceil_div(block_size, 16); }
  int64_t panels() const { return ceil_div(head_dim, 16); }
  // Of a sub-block.
  int64_t k_group_bytes() const {
    switch (k_format) {
      case KVFormat::f32: return head_dim * 16 * 4;
      case KVFormat::bf16: return round_up(head_dim, 2) * 16 * 2;
      case KVFormat::i8:
      case KVFormat::f8e4m3: return head_dim * 16;
      case KVFormat::i4: return round_up(head_dim, 2) * 16 / 2;
    }
    return 0;
  }
  int64_t v_group_bytes() const {
    switch (v_format) {
      case KVFormat::f32: return panels() * 256 * 4;
      case KVFormat::bf16: return panels() * 256 * 2;
      case KVFormat::i8:
      case KVFormat::f8e4m3: return panels() * 256;
      case KVFormat::i4: return panels() * 256 / 2;
    }
    return 0;
  }
  int64_t k_bytes() const { return round_up(subs() * k_group_bytes(), kAlign); }
  int64_t v_bytes() const { return round_up(subs() * v_group_bytes(), kAlign); }
  int64_t k_scale_bytes() const { return scale_bytes(k_format); }
  int64_t v_scale_bytes() const { return scale_bytes(v_format); }
  int64_t head_bytes() const { return k_bytes() + v_bytes() + k_scale_bytes() + v_scale_bytes(); }
  int64_t block_bytes() const { return heads * head_bytes(); }
  uint8_t* head(int64_t block, int64_t head) const {
    return data + block * block_bytes() + head * head_bytes();
  }

 private:
  int64_t scale_bytes(KVFormat format) const {
    const bool has_scales = format == KVFormat::i8 || format == KVFormat::i4;
    return has_scales ? round_up(subs() * 16 * 4, kAlign) : 0;
  }
};

// Sixteen steps for a whole vector are few: one large value makes all others small. Before vectors
// are stored in i4 they are therefore multiplied by a Hadamard matrix, in blocks of the largest
// power of two up to 128 that divides E, which spreads large values over the block. The matrix is
// orthogonal, so products of keys with queries that are rotated too stay what they are; and it is its
// own inverse, which outputs are rotated back with.
constexpr int64_t kMostRotated = 1024;  // the largest E in i4
constexpr int64_t rotation_block(int64_t head_dim) {
  const int64_t power = head_dim & -head_dim;
  return power < 128 ? power : 128;
}

// One layer's paged cache of latent attention: of a token one vector for all heads, C values and R
// with its position. A block holds B rows, one after another:
//
//   T      [C + R padded to 16]   the vector, then zeros
//   float  scale, i8 only         x = scale * value, of all values
//
// Rows are padded to 16 bytes, blocks to 64. What KVCache says of values and of what was never
// written holds here, too. It has no i4.
struct LatentCache {
  KVFormat format;
  uint8_t* data;
  int64_t num_blocks;
  int64_t block_size;   // B
  int64_t rank;         // C
  int64_t rope_dim;     // R

  int64_t padded() const { return round_up(rank + rope_dim, kLanes); }
  int64_t value_bytes() const {
    return format == KVFormat::f32 ? 4 : format == KVFormat::bf16 ? 2 : 1;
  }
  int64_t row_bytes() const {
    const int64_t scale = format == KVFormat::i8 ? int64_t{sizeof(float)} : 0;
    return round_up(padded() * value_bytes() + scale, 16);
  }
  int64_t block_bytes() const { return round_up(block_size * row_bytes(), kAlign); }
  uint8_t* row(int64_t block, int64_t token) const {
    return data + block * block_bytes() + token * row_bytes();
  }
  // Of a row.
  float* scale(uint8_t* row) const { return reinterpret_cast<float*>(row + padded()); }
};

}  // namespace octavo
