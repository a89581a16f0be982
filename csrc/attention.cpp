#include "attention.h"

#include <algorithm>
#include <atomic>

#include "attention_scratch.h"

namespace octavo {
namespace {

// A unit that takes more than this share of a thread's part of the work is split.
constexpr int64_t kUnitsPerThread = 4;

// A unit of few rows takes the time of reading the cache, which is that of about so many rows.
constexpr int64_t kReadingRows = 4;

}  // namespace

int64_t attention_scratch_bytes(int64_t block_size, int64_t head_dim, int64_t heads_per_kv) {
  return AttentionScratch(block_size, head_dim, heads_per_kv).bytes;
}

// Floats between the results of two chunks.
int64_t AttentionPlan::part_stride(const Tile& tile) const {
  return (tile.last - tile.first) * (kind_.heads / kind_.kv_heads) * part_floats(kind_.head_dim);
}

void AttentionPlan::cut_into_tiles(const Batch& batch) {
  const int64_t sharing = kind_.heads / kind_.kv_heads, tile_tokens = unit_tokens(sharing);
  const int64_t chunk = attention_chunk(kind_.block_size);
  tiles_.clear();
  for (int64_t s = 0; s < batch.sequences; ++s) {
    const int64_t stop = batch.query_starts[s + 1];
    const int64_t offset = batch.context_lens[s] - stop;   // position of row 0, were it here
    for (int64_t first = batch.query_starts[s]; first < stop; first += tile_tokens) {
      const int64_t last = std::min(first + tile_tokens, stop);
      const int64_t begin =
          kind_.window > 0 ? std::max<int64_t>(offset + first - kind_.window + 1, 0) : 0;
      const int64_t end = offset + last;
      tiles_.push_back({static_cast<int32_t>(s), static_cast<int32_t>(first),
                        static_cast<int32_t>(last), static_cast<int32_t>(begin / chunk),
                        static_cast<int32_t>(ceil_div(end, chunk)), false,
                        (end - begin) * ((last - first) * sharing + kReadingRows)});
    }
  }
}

void AttentionPlan::build(const Batch& batch, int threads) {
  cut_into_tiles(batch);
  int64_t total = 0;
  for (const Tile& tile : tiles_) total += tile.cost * kind_.kv_heads;
  const int64_t longest = total / (threads * kUnitsPerThread);
  int64_t part_size = 0;
  for (Tile& tile : tiles_) {
    const int64_t chunks = tile.chunk_last - tile.chunk_first;
    tile.is_split = threads > 1 && chunks > 1 && tile.cost > longest;
    if (!tile.is_split) continue;
    tile.cost = ceil_div(tile.cost, chunks);
    part_size += part_stride(tile) * chunks * kind_.kv_heads;
  }
  // Ties in the batch's order, so that a plan depends on nothing else.
  std::sort(tiles_.begin(), tiles_.end(), [](const Tile& a, const Tile& b) {
    return a.cost != b.cost ? a.cost > b.cost : a.first < b.first;
  });
  if (static_cast<int64_t>(parts_.size()) < part_size) {
    parts_.clear();   // nothing of it is wanted in the larger one
    parts_.resize(part_size);
  }

  units_.clear();
  splits_.clear();
  float* part = parts_.data();
  for (const Tile& tile : tiles_) {
    for (int32_t g = 0; g < kind_.kv_heads; ++g) {
      AttentionUnit unit{tile.sequence,   g,      tile.first, tile.last, tile.chunk_first,
                         tile.chunk_last, nullptr};
      if (!tile.is_split) {
        units_.push_back({unit, -1});
        continue;
      }
      unit.partial = part;
      const int32_t count = tile.chunk_last - tile.chunk_first;
      splits_.push_back({unit, count, count});
      for (int32_t chunk = tile.chunk_first; chunk < tile.chunk_last; ++chunk) {
        unit.chunk_first = chunk;
        unit.chunk_last = chunk + 1;
        unit.partial = part;
        units_.push_back({unit, static_cast<int32_t>(splits_.size()) - 1});
        part += part_stride(tile);
      }
    }
  }
}

void AttentionPlan::run(int64_t index, const Kernels& kernels, const AttentionArgs& args,
                        const Batch& batch, void* scratch) {
  const Unit& unit = units_[index];
  kernels.attend(args, batch, unit.unit, scratch);
  if (unit.split < 0) return;
  Split& split = splits_[unit.split];
  std::atomic_ref<int32_t> unfinished(split.unfinished);
  if (unfinished.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  const int64_t rows = (split.first.last - split.first.first) * (kind_.heads / kind_.kv_heads);
  kernels.attend_merge(args, split.first, split.count, rows * part_floats(kind_.head_dim));
  unfinished.store(split.count, std::memory_order_relaxed);   // for the next layer
}

AttentionWork AttentionPlan::work(const AttentionArgs& args, const Batch& batch) const {
  double tokens = 0, pairs = 0;
  for (int64_t s = 0; s < batch.sequences; ++s) {
    const int64_t queries = batch.query_starts[s + 1] - batch.query_starts[s];
    const int64_t context = batch.context_lens[s];
    const int64_t window = kind_.window > 0 ? kind_.window : context;
    tokens += std::min(context, queries + window - 1);
    for (int64_t position = context - queries; position < context; ++position)
      pairs += std::min(position + 1, window);
  }
  const double token_bytes = static_cast<double>(args.cache.block_bytes()) / kind_.block_size;
  return {tokens * token_bytes, 4 * pairs * kind_.heads * kind_.head_dim};
}

}  // namespace octavo
