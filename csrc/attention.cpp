#include "attention.h"

#include <algorithm>
#include <atomic>

#include "attention_scratch.h"

namespace octavo {
namespace {

// Units that each thread should find at least: one that is longer than its share is split, if it
// has several chunks.
constexpr int64_t kUnitsPerThread = 4;

// A unit of few rows takes the time of reading the cache, which is that of about so many rows.
constexpr int64_t kReadingRows = 4;

}  // namespace

int64_t attention_scratch_bytes(int64_t block_size, int64_t head_dim, int64_t heads_per_kv) {
  return AttentionScratch(block_size, head_dim, heads_per_kv).bytes;
}

int64_t latent_scratch_bytes(const LatentCache& cache, int64_t heads) {
  return LatentScratch(cache.padded(), cache.rank, heads).bytes;
}

int64_t AttentionPlan::rows(int32_t first, int32_t last) const {
  return (last - first) * (kind_.heads / kind_.kv_heads);
}

// Floats between the results of two chunks.
int64_t AttentionPlan::part_stride(int32_t first, int32_t last) const {
  return rows(first, last) * part_floats(kind_.head_dim);
}

void AttentionPlan::cut_into_tiles(const Batch& batch) {
  const int64_t tile_tokens = unit_tokens(kind_.heads / kind_.kv_heads);
  tiles_.clear();
  for (int64_t s = 0; s < batch.sequences; ++s) {
    const int32_t start = batch.query_starts[s], stop = batch.query_starts[s + 1];
    // Up to the first row that doesn't follow the one before it, a tree is a chain like others; no
    // row from there on is, since its path goes past some row before it.
    int32_t branch = stop;
    if (batch.parents != nullptr)
      for (branch = start + 1; branch < stop && batch.parents[branch] == branch - 1;) ++branch;
    const auto upto = [&](int32_t first, int32_t limit) {
      return static_cast<int32_t>(std::min<int64_t>(first + tile_tokens, limit));
    };
    for (int32_t first = start; first < branch;) {
      const int32_t last = upto(first, branch);
      add_tile(batch, s, first, last, false);
      first = last;
    }
    for (int32_t first = branch; first < stop;) {
      const int32_t limit = upto(first, stop);
      int32_t last = first + 1;
      while (last < limit && batch.positions[last] >= batch.positions[last - 1]) ++last;
      add_tile(batch, s, first, last, true);
      first = last;
    }
  }
}

void AttentionPlan::add_tile(const Batch& batch, int64_t sequence, int32_t first, int32_t last,
                             bool has_paths) {
  const int64_t chunk = attention_chunk(kind_.block_size);
  const int64_t begin = kind_.reach.first(batch.position(sequence, first));
  const int64_t end = batch.position(sequence, last - 1) + 1;
  QueryTile tile{};
  tile.sequence = static_cast<int32_t>(sequence);
  tile.first = first;
  tile.last = last;
  tile.chunk_first = static_cast<int32_t>(begin / chunk);
  tile.chunk_last = static_cast<int32_t>(ceil_div(end, chunk));
  tile.has_paths = has_paths;
  tile.cost = (end - begin) * (rows(first, last) + kReadingRows);
  tiles_.push_back(tile);
}

void AttentionPlan::build(const Batch& batch, int threads) {
  threads_ = threads;
  cut_into_tiles(batch);
  int64_t total = 0;
  for (const QueryTile& tile : tiles_) total += tile.cost * kind_.kv_heads;
  const int64_t longest = total / (threads * kUnitsPerThread);
  int64_t part_size = 0;
  for (QueryTile& tile : tiles_) {
    const int64_t chunks = tile.chunk_last - tile.chunk_first;
    tile.is_split = threads > 1 && chunks > 1 && tile.cost > longest;
    if (!tile.is_split) continue;
    tile.cost = ceil_div(tile.cost, chunks);
    part_size += part_stride(tile.first, tile.last) * chunks * kind_.kv_heads;
  }
  std::sort(tiles_.begin(), tiles_.end(), [](const QueryTile& a, const QueryTile& b) {
    return a.cost != b.cost ? a.cost > b.cost : a.first < b.first;
  });
  if (static_cast<int64_t>(parts_.size()) < part_size) {
    parts_.clear();   // nothing of it is wanted in the larger one
    parts_.resize(part_size);
  }

  units_.clear();
  splits_.clear();
  float* part = parts_.data();
  for (const QueryTile& tile : tiles_) {
    for (int32_t g = 0; g < kind_.kv_heads; ++g) {
      AttentionUnit unit{};
      unit.sequence = tile.sequence;
      unit.kv_head = g;
      unit.first = tile.first;
      unit.last = tile.last;
      unit.chunk_first = tile.chunk_first;
      unit.chunk_last = tile.chunk_last;
      unit.has_paths = tile.has_paths;
      if (!tile.is_split) {
        units_.push_back({unit, -1});
        continue;
      }
      const int32_t count = tile.chunk_last - tile.chunk_first;
      unit.partial = part;
      splits_.push_back({unit, count, count});
      for (int32_t chunk = tile.chunk_first; chunk < tile.chunk_last; ++chunk) {
        unit.chunk_first = chunk;
        unit.chunk_last = chunk + 1;
        unit.partial = part;
        units_.push_back({unit, static_cast<int32_t>(splits_.size()) - 1});
        part += part_stride(tile.first, tile.last);
      }
    }
  }
}

template <class Args, class Attend, class Merge>
void AttentionPlan::run(int64_t index, const Args& args, Attend attend, Merge merge) {
  const Unit& unit = units_[index];
  // Units are claimed in order, by all threads in turn.
  const AttentionUnit* const next =
      index + threads_ < units() ? &units_[index + threads_].unit : nullptr;
  attend(unit.unit, next);
  if (unit.split < 0) return;
  Split& split = splits_[unit.split];
  std::atomic_ref<int32_t> unfinished(split.unfinished);
  if (unfinished.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  merge(args, split.whole, split.count, part_stride(split.whole.first, split.whole.last));
  unfinished.store(split.count, std::memory_order_relaxed);   // for the next layer
}

void AttentionPlan::run(int64_t index, const Kernels& kernels, const AttentionArgs& args,
                        const Batch& batch, void* scratch) {
  const auto attend = [&](const AttentionUnit& unit, const AttentionUnit* next) {
    kernels.attend(args, batch, unit, next, scratch);
  };
  run(index, args, attend, kernels.attend_merge);
}

void AttentionPlan::run(int64_t index, const Kernels& kernels, const LatentArgs& args,
                        const Batch& batch, void* scratch) {
  const auto attend = [&](const AttentionUnit& unit, const AttentionUnit*) {
    kernels.attend_latent(args, batch, unit, scratch);
  };
  run(index, args, attend, kernels.merge_latent);
}

AttentionPlan::Seen AttentionPlan::seen(const Batch& batch) const {
  Seen seen{0, 0};
  for (int64_t s = 0; s < batch.sequences; ++s) {
    const int64_t queries = batch.query_starts[s + 1] - batch.query_starts[s];
    const int64_t context = batch.context_lens[s];
    seen.tokens += context - kind_.reach.first(context - queries);
    for (int32_t t = batch.query_starts[s]; t < batch.query_starts[s + 1]; ++t)
      seen.pairs +=
          kind_.heads * (batch.position(s, t) + 1 - kind_.reach.first(batch.position(s, t)));
  }
  return seen;
}

AttentionWork AttentionPlan::work(const AttentionArgs& args, const Batch& batch) const {
  const auto [tokens, pairs] = seen(batch);
  const double token_bytes = static_cast<double>(args.cache.block_bytes()) / kind_.block_size;
  return {tokens * token_bytes, 4 * pairs * kind_.head_dim};
}

AttentionWork AttentionPlan::work(const LatentArgs& args, const Batch& batch) const {
  const auto [tokens, pairs] = seen(batch);
  const int64_t rank = args.cache.rank, rope_dim = args.cache.rope_dim;
  return {tokens * args.cache.row_bytes(), 2 * pairs * (2 * rank + rope_dim)};
}

}  // namespace octavo
