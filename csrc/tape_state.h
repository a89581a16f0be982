// What a tape's parts share: buffers, ops, and the regions and slots that they are planned into.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "tape.h"

namespace octavo {

inline bool is_integer(const PackedMatrix& weight) { return is_integer(weight.format.values); }

struct Tape::Buffer {
  enum class Kind { floats, quantized, ints } kind;
  Symbol symbol;
  int64_t columns;
  int64_t stride;          // bytes from row to row
  int64_t parts = 1;       // that each row is cut into; `columns` are then a part's
  int32_t input = -1;      // index among a run's inputs
  int32_t slot = -1;
  // Of a run:
  uint8_t* data = nullptr;

  int64_t part_stride() const { return stride / parts; }
  // Of buffers with several parts, rows are the parts.
  Rows rows(int64_t column) const {
    return {reinterpret_cast<float*>(data) + column, part_stride() / int64_t{sizeof(float)}};
  }
  QuantizedRows quantized() const { return {data, part_stride(), ceil_div(columns, kGroup)}; }
  const int64_t* ints() const { return reinterpret_cast<const int64_t*>(data); }
};

struct Tape::Op {
  enum class Kind { rows, linear, grouped, attention, latent_attention, exchange } kind;
  const char* name;
  Symbol symbol;
  std::vector<int32_t> reads;
  int32_t write;                  // -1: the KV cache
  bool may_overwrite = false;     // element by element: the result may take reads[0]'s memory

  // rows: computes rows [t0, t1). row_ns: roughly what a row takes, its input often coming from
  // another core's caches; for cutting work into chunks only.
  std::function<void(const Batch* batch, int64_t t0, int64_t t1)> compute{};
  double row_ns = 0;
  bool reads_other_rows = false;  // than its own: what makes them must be complete
  // Puts rows in order of experts, by this buffer's choices, before it begins.
  int32_t routing = -1;

  // linear, grouped
  std::shared_ptr<const PackedMatrix> weight{};
  Ref x{-1, 0};
  Ref residual{-1, 0};
  const float* bias = nullptr;
  int64_t groups = 1;  // that the weight's outputs are cut into, each with its own rows
  bool is_routed =
      false;  // rows in order of experts, the groups; else a group has a part of each row
  int64_t y_column = 0;  // of `write`
  const int32_t* order = nullptr;

  // attention
  KVCache cache{};
  LatentCache latents{};
  Ref q{-1, 0};
  Ref rotated{-1, 0};
  int64_t heads = 0;
  float softmax_scale = 0;
  Reach reach{};
  float softcap = 0;
  const float* slopes = nullptr;
  const float* sinks = nullptr;
  int32_t plan = -1;

  std::shared_ptr<const Exchange> exchange{};
};

// A piece of a product in groups: rows of a group, times panels of it.
struct GroupChunk {
  int32_t group;
  int32_t t0, t1, p0, p1;
};

// Ops that run together: one product, one attention, one exchange, or a chain of ops on the same rows, each of
// which needs only its own row of what comes before it.
struct Tape::Region {
  int32_t first, last;            // ops [first, last)
  Op::Kind kind;
  // Of a run:
  LinearArgs linear{};
  AttentionArgs attention{};
  LatentArgs latent_attention{};
  int64_t count = 0;              // rows
  int64_t chunks = 0;
  // linear: chunk c takes bundles (of `bundle` panels) [starts[c], starts[c + 1]) of the `row_blocks`
  // blocks of rows, one block's after another's.
  int64_t row_blocks = 0, bundle = 0;
  std::vector<int64_t> starts{};
  std::vector<GroupChunk> group_chunks{};
  // exchange; `pieces` are those of the half at hand
  int64_t rounds = 0, pieces = 0;
  int64_t step = 0;   // of the replay, its first
};

struct Tape::Slot {
  Symbol symbol;
  int64_t row_bytes;
  int64_t capacity = 0;           // rows
  std::shared_ptr<void> memory{};
};

}  // namespace octavo
