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

// What the values of a matrix are. Of the tables, e2m1 is that of MXFP4, nf4 and fp4 those of
// bitsandbytes.
enum class Values : int32_t { f32, bf16, f16, q8, q4, e2m1, f8e4m3, nf4, fp4 };
// What scales and offsets are; k8: int8, times an fp16 number of the block's (ggml's K-quants).
enum class Scales : int32_t { f16, bf16, f32, k8 };
enum class Offset : int32_t { none, min, zero };

// Floats have neither scales nor offsets.
struct WeightFormat {
  Values values;
  Scales scales = Scales::f16;
  Offset offset = Offset::none;
  int32_t span = kGroup;   // inputs that share a scale: 32 or 16

  bool operator==(const WeightFormat&) const = default;
};

// A matrix w (O, I) in panels of 16 outputs; the last panel is padded with zeros. Panel p holds
// outputs 16 p .. 16 p + 15, `panel_stride` bytes after the one before, 64-byte aligned:
//
//   f32         float    [I][16]
//   bf16, f16   uint16_t [I][16]
//   others      blocks of B groups, one after another (B = 2, with k8 8); a block is
//                 Scales  [B][32 / span][16]   scale
//                 Scales  [B][32 / span][16]   offset, if there are any
//                 fp16    [16]                 with k8: what its scales are multiplied by
//                 fp16    [16]                 and its offsets, if there are any
//                 filled up to a multiple of 64 bytes, then the values, group by group:
//   q8            uint8_t [8][16][4]   of k = 32 g + 4 j + b at [j][lane][b]
//   q4, tables    uint8_t [4][16][4]   the low nibble of [j][lane][b] is k = 32 g + 8 j + b, the
//                                      high one is k + 4
//   f8e4m3        uint8_t [32][16]     of k = 32 g + i at [i][lane]
//   groups = ceil(I / 32); values beyond I count for nothing, since activations are zero there, or
//   end there. If their number is no multiple of B, the last block ends after its last group.
//
// A weight is, of the stored value v,
//
//   without offset   q8: scale * (v - 128), q4: scale * (v - 8), tables: scale * table[v],
//                    f8e4m3: scale * v
//   min              scale * v + offset
//   zero             scale * v + scale * offset   (the offset is minus the zero point)
//
// A kernel with few rows reads these bytes strictly in order. That matters: with a panel's scales
// after its values the hardware prefetcher lost track, and one Zen 4 core read 14 GB/s, not 31.
struct PackedMatrix {
  WeightFormat format;
  int64_t outputs;     // O
  int64_t inputs;      // I
  const uint8_t* data;
  int64_t panel_stride;
  const int32_t* order = nullptr;   // (I,) which of the activations column k is for; null if k

  int64_t panels() const { return ceil_div(outputs, kLanes); }
  int64_t groups() const { return ceil_div(inputs, kGroup); }
};

// The formats that linear_int multiplies with activations in 8 bits, and linear_float with floats.
// e2m1 is in the first list because its values are halves of small integers.
constexpr WeightFormat kIntegerFormats[] = {
    {Values::q8, Scales::f16},
    {Values::q8, Scales::bf16},
    {Values::q8, Scales::f32},
    {Values::q8, Scales::f32, Offset::min},
    {Values::q8, Scales::f32, Offset::min, 16},
    {Values::q8, Scales::k8, Offset::min},
    {Values::q8, Scales::k8, Offset::none, 16},
    {Values::q4, Scales::f16},
    {Values::q4, Scales::f16, Offset::min},
    {Values::q4, Scales::f16, Offset::zero},
    {Values::q4, Scales::bf16},
    {Values::q4, Scales::bf16, Offset::zero},
    {Values::q4, Scales::f32, Offset::min},
    {Values::q4, Scales::f32, Offset::min, 16},
    {Values::q4, Scales::k8, Offset::min},
    {Values::q4, Scales::k8, Offset::none, 16},
    {Values::q4, Scales::k8, Offset::min, 16},
    {Values::e2m1, Scales::bf16},
    {Values::e2m1, Scales::f32, Offset::none, 16},
};
constexpr WeightFormat kFloatFormats[] = {
    {Values::f32},
    {Values::bf16},
    {Values::f16},
    {Values::f8e4m3, Scales::f32},
    {Values::nf4, Scales::f32},
    {Values::fp4, Scales::f32},
};
constexpr bool is_integer(Values values) {
  return values == Values::q8 || values == Values::q4 || values == Values::e2m1;
}
constexpr bool is_plain(Values values) {
  return values == Values::f32 || values == Values::bf16 || values == Values::f16;
}
constexpr bool is_known(const WeightFormat& format) {
  for (const WeightFormat& known : kIntegerFormats)
    if (format == known) return true;
  for (const WeightFormat& known : kFloatFormats)
    if (format == known) return true;
  return false;
}

// Twice the numbers of OCP's Microscaling formats, by code, as integers.
constexpr int8_t kE2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
// Of arXiv 2305.14314, appendix E: quantiles of the normal distribution.
constexpr float kNF4[16] = {-1.0f,
                            -0.6961928009986877f,
                            -0.5250730514526367f,
                            -0.39491748809814453f,
                            -0.28444138169288635f,
                            -0.18477343022823334f,
                            -0.09105003625154495f,
                            0.0f,
                            0.07958029955625534f,
                            0.16093020141124725f,
                            0.24611230194568634f,
                            0.33791524171829224f,
                            0.44070982933044434f,
                            0.5626170039176941f,
                            0.7229568362236023f,
                            1.0f};
// bitsandbytes' own floats of 4 bits, multiples of 1 / 192.
constexpr float kFP4[16] = {0.0f,      1.0f / 192, 2.0f / 3,  1.0f,        1.0f / 3,  0.5f,
                            1.0f / 6,  0.25f,      0.0f,      -1.0f / 192, -2.0f / 3, -1.0f,
                            -1.0f / 3, -0.5f,      -1.0f / 6, -0.25f};

// Of formats with scales: bytes of 16 outputs' values of one group.
constexpr int64_t group_bytes(Values values) {
  return kLanes * (values == Values::q8 || values == Values::f8e4m3 ? kGroup : kGroup / 2);
}
constexpr int64_t scale_bytes(Scales scales) {
  return scales == Scales::f32 ? 4 : scales == Scales::k8 ? 1 : 2;
}
constexpr int64_t block_groups(Scales scales) { return scales == Scales::k8 ? 8 : 2; }

// Where the parts of a block's header lie, in bytes from its start.
struct BlockHeader {
  int64_t group_scales;   // bytes from a group's scales to the next one's
  int64_t offsets, factors, bytes;
};
constexpr BlockHeader block_header(const WeightFormat& format) {
  const int64_t group = kGroup / format.span * kLanes * scale_bytes(format.scales);
  const int64_t kinds = format.offset == Offset::none ? 1 : 2;
  const int64_t offsets = group * block_groups(format.scales), factors = kinds * offsets;
  const int64_t end = factors + (format.scales == Scales::k8 ? kinds * kLanes * 2 : 0);
  return {group, offsets, factors, round_up(end, kAlign)};
}

// Where group g of a panel lies, in bytes from the panel's start.
struct GroupOffsets {
  int64_t values, scales, offsets, factors;
};
constexpr GroupOffsets group_offsets(const WeightFormat& format, int64_t g) {
  const BlockHeader header = block_header(format);
  const int64_t in_block = block_groups(format.scales), values = group_bytes(format.values);
  const int64_t block = g / in_block * (header.bytes + in_block * values), i = g % in_block;
  const int64_t scales = block + i * header.group_scales;
  return {block + header.bytes + i * values, scales, scales + header.offsets,
          block + header.factors};
}

inline int64_t panel_bytes(const WeightFormat& format, int64_t inputs) {
  const int64_t groups = ceil_div(inputs, kGroup);
  if (is_plain(format.values))
    return round_up(inputs * kLanes * (format.values == Values::f32 ? 4 : 2), kAlign);
  return round_up(ceil_div(groups, block_groups(format.scales)) * block_header(format).bytes +
                      groups * group_bytes(format.values),
                  kAlign);
}

// Activations quantized to int8 in groups of 32, each row by itself: x = scale * value, value in
// -127..127, scale = max|x| / 127 (a row with a NaN or infinity gets NaN scales, so that it shows
// in the row's result and nowhere else). One record a row:
//
//   int8_t  [32 groups]   values, zero beyond I
//   float   [groups]      scale
//   int32_t [groups]      -128 * sum(values): where a dot product with value + 128 starts
//   float   [groups]      scale * sum(values): what a weight's min is multiplied by
//   int32_t [groups]      -128 * sum(values 0 .. 15)
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
  int32_t* halves(int64_t row) const { return starts(row) + 2 * groups; }
};

inline int64_t quantized_row_bytes(int64_t inputs) {
  const int64_t groups = ceil_div(inputs, kGroup);
  return round_up(groups * (kGroup + 16), kAlign);
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
