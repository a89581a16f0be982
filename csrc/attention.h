// What each thread does in a step's attention.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace octavo {

// What a plan depends on besides the batch: the same for all layers that are alike.
struct AttentionKind {
  int64_t block_size;
  int64_t kv_heads;   // G
  int64_t head_dim;   // E
  int64_t heads;      // H
  Reach reach;

  bool operator==(const AttentionKind&) const = default;
};

// Bytes of the cache and floating-point operations that one attention cannot do without.
struct AttentionWork {
  double bytes;
  double operations;
};

// Cuts a step's attention into units that threads take in any order, the longest first. Long units
// are split by chunks of the context where there would else be too few for the threads; whoever
// ends the last of a unit's chunks merges them. Neither how units are cut nor who computes them
// changes a result. Memory is kept from step to step and grows as needed.
class AttentionPlan {
 public:
  explicit AttentionPlan(const AttentionKind& kind) : kind_(kind) {}

  void build(const Batch& batch, int threads);

  int64_t units() const { return static_cast<int64_t>(units_.size()); }

  // Computes a unit. Each must run once before any runs again, for the next layer.
  // scratch: attention_scratch_bytes() of the calling thread's own.
  void run(int64_t unit, const Kernels& kernels, const AttentionArgs& args, const Batch& batch,
           void* scratch);
  // The same of latent attention, whose plans have one kv head, of the size of a latent vector.
  void run(int64_t unit, const Kernels& kernels, const LatentArgs& args, const Batch& batch,
           void* scratch);

  AttentionWork work(const AttentionArgs& args, const Batch& batch) const;
  AttentionWork work(const LatentArgs& args, const Batch& batch) const;

 private:
  // Query tokens [first, last) of the step that form a unit (or several) for each kv head.
  struct QueryTile {
    int32_t sequence;
    int32_t first, last;
    int32_t chunk_first, chunk_last;
    bool has_paths;
    bool is_split;
    int64_t cost;   // of one unit
  };

  // What the chunks of a split unit are merged into. `whole.partial`: the first chunk's results.
  struct Split {
    AttentionUnit whole;
    int32_t count;
    int32_t unfinished;   // counted down by the threads
  };

  struct Unit {
    AttentionUnit unit;
    int32_t split;   // index, or -1
  };

  // Tokens that are read, and pairs of a query with a token, of all heads together.
  struct Seen {
    double tokens, pairs;
  };

  template <class Args, class Attend, class Merge>
  void run(int64_t unit, const Args& args, Attend attend, Merge merge);
  Seen seen(const Batch& batch) const;
  void cut_into_tiles(const Batch& batch);
  void add_tile(const Batch& batch, int64_t sequence, int32_t first, int32_t last, bool has_paths);
  int64_t rows(int32_t first, int32_t last) const;
  int64_t part_stride(int32_t first, int32_t last) const;

  AttentionKind kind_;
  int threads_ = 1;
  std::vector<QueryTile> tiles_;
  std::vector<Split> splits_;
  std::vector<Unit> units_;
  std::vector<float> parts_;
};

}  // namespace octavo
