// How attention cuts query rows into units, and the memory that a unit works in: integer arithmetic
// that the plan (compiled once) and the kernels (once for each instruction set) must agree on.
#pragma once

#include "formats.h"
#include "kernels.h"

namespace octavo {

// Query rows of a unit, which share the keys that it reads: enough that a chunk's keys and values
// come from a core's second-level cache, few enough that short prompts still give many units.
constexpr int64_t kUnitRows = 48;

// Rows whose scores and outputs are computed together, in registers.
constexpr int64_t kTileRows = 6;

// Query tokens of a unit: a token's rows, one for each query head of the group, stay together.
constexpr int64_t unit_tokens(int64_t heads_per_kv) {
  return heads_per_kv >= kUnitRows ? 1 : kUnitRows / heads_per_kv;
}

// One row's attention over a chunk, or over several, merged: round_up(E, 16) floats of output, not
// yet divided by the sum, then the maximum of the scores and the sum of exp(score - maximum).
constexpr int64_t part_floats(int64_t head_dim) { return round_up(head_dim, kLanes) + kLanes; }

// Up to 16 neighbouring tokens of a head in the cache (fewer where a block ends).
struct TokenGroup {
  const uint8_t* k;  // a sub-block of K and of V, as in formats.h
  const uint8_t* v;
  const uint8_t* after_k;  // what to fetch into the caches while k and v are used
  const uint8_t* after_v;
  const float* k_scales;  // of integers only
  const float* v_scales;
  int64_t token;  // the first one, counted from the chunk's first
  int64_t count;
};

constexpr int64_t groups_of_block(int64_t block_size) { return ceil_div(block_size, kLanes); }
constexpr int64_t groups_of_chunk(int64_t block_size) {
  return attention_chunk(block_size) / block_size * groups_of_block(block_size);
}

// Room for a copy of a group in any format: K, V, and the scales of both.
constexpr int64_t copy_bytes(int64_t head_dim) {
  return (round_up(head_dim, 2) + round_up(head_dim, kLanes) + 2) * kLanes * 4;
}

// Byte offsets of what lies in a thread's scratch.
struct AttentionScratch {
  int64_t queries;  // float [rows][round_up(E, 16)], or pairs of bf16 in half of it
  int64_t groups;  // TokenGroup [groups of a chunk]
  int64_t scores;  // float [groups of a chunk][rows of the tile][16]
  int64_t part;  // float [kTileRows][part_floats]: of the chunk at hand
  int64_t state;  // float [rows][part_floats]: of the chunks so far
  int64_t copies;  // [groups of a chunk][copy_bytes]; untouched but by units with has_paths
  int64_t bytes = 0;

  AttentionScratch(int64_t block_size, int64_t head_dim, int64_t heads_per_kv) {
    const int64_t rows = unit_tokens(heads_per_kv) * heads_per_kv;
    const int64_t group_count = groups_of_chunk(block_size);
    queries = take(rows * round_up(head_dim, kLanes) * 4);
    groups = take(group_count * int64_t{sizeof(TokenGroup)});
    scores = take(group_count * kTileRows * kLanes * 4);
    part = take(kTileRows * part_floats(head_dim) * 4);
    state = take(rows * part_floats(head_dim) * 4);
    copies = take(group_count * copy_bytes(head_dim));
  }

 private:
  int64_t take(int64_t size) {
    const int64_t offset = bytes;
    bytes += round_up(size, kAlign);
    return offset;
  }
};

// Tokens whose latent vectors are unpacked together: few enough for a core's second-level cache.
constexpr int64_t kLatentTokens = 32;

// The same of latent attention, whose heads all share the cached vectors.
struct LatentScratch {
  int64_t queries;  // float [rows][padded]
  int64_t values;  // float [kLatentTokens][padded]
  int64_t keys;  // float [kLatentTokens / 16][padded][16]: the same, turned round
  int64_t weights;  // float [kTileRows][kLatentTokens]
  int64_t part;  // float [rows][part_floats]: of the chunk at hand
  int64_t state;  // float [rows][part_floats]: of the chunks so far
  int64_t bytes = 0;

  LatentScratch(int64_t padded, int64_t rank, int64_t heads) {
    const int64_t rows = unit_tokens(heads) * heads;
    queries = take(rows * padded * 4);
    values = take(kLatentTokens * padded * 4);
    keys = take(kLatentTokens * padded * 4);
    weights = take(kTileRows * kLatentTokens * 4);
    part = take(rows * part_floats(rank) * 4);
    state = take(rows * part_floats(rank) * 4);
  }

 private:
  int64_t take(int64_t size) {
    const int64_t offset = bytes;
    bytes += round_up(size, kAlign);
    return offset;
  }
};

}  // namespace octavo
