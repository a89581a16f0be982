// Attention over the paged cache.
//
// A unit's rows are (query token, query head of the group) pairs, cut into tiles of up to 6 rows.
// For each chunk of the context and each tile: scores = rows x keys (tokens in lanes, so there are
// no horizontal sums), maximum and exponentials row by row, output = probabilities x values
// (dimensions in lanes); then the chunk's (output, maximum, sum) is merged into that of the chunks
// before. Each score and each output of a chunk has one accumulator that takes its terms in rising
// order, of just the tokens that its row sees: how rows are cut into tiles and units changes
// no bit.

#include <cfloat>
#include <cmath>

#include "../attention_scratch.h"
#include "../cached_token.h"
#include "attention_part.h"
#include "attention_products.h"
#include "rotation.h"
#include "simd.h"
#include "table.h"

namespace octavo::OCTAVO_ISA {
namespace {

// --- softmax and merging -------------------------------------------------------------------------

alignas(kAlign) constexpr float kLaneNumbers[kLanes] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                        8, 9, 10, 11, 12, 13, 14, 15};

inline const float* sink_of(const AttentionArgs& args, int64_t head) {
  return args.sinks == nullptr ? nullptr : args.sinks + head;
}

// y = output / sum, of the dimensions that there are. sink: of the row's head, or null.
inline void finish(Part part, const float* sink, const KVCache& cache, float* y) {
  const ValueFormat& values = kValueFormats[int(cache.v_format)];
  const int64_t size = cache.head_dim;
  f32x16 sum = splat(*part.sum);
  if (sink != nullptr) sum = sum + exp(splat(*sink - *part.maximum));
  const f32x16 scale = splat(values.factor * cache.v_factor) / sum;
  for (int64_t i = 0; i < size; i += kLanes)
    store_rest(y + i, load(part.output + i) * scale, size - i);
  if (values.is_rotated) rotate(y, size);
}

// --- a unit --------------------------------------------------------------------------------------

// Groups [begin, end) among the chunk's.
struct GroupRange {
  int64_t begin, end;
};

class Unit {
 public:
  Unit(const AttentionArgs& args, const Batch& batch, const AttentionUnit& unit,
       const AttentionUnit* next, uint8_t* scratch)
      : args_(args),
        batch_(batch),
        cache_(args.cache),
        keys_(kKeyFormats[int(args.cache.k_format)]),
        values_(kValueFormats[int(args.cache.v_format)]),
        unit_(unit),
        next_(next),
        table_(batch.block_tables + unit.sequence * batch.table_stride),
        size_(cache_.head_dim),
        panels_(cache_.panels()),
        sharing_(args.heads / cache_.heads),
        rows_((unit.last - unit.first) * sharing_),
        chunk_tokens_(attention_chunk(cache_.block_size)) {
    const AttentionScratch at(cache_.block_size, size_, sharing_);
    queries_ = reinterpret_cast<float*>(scratch + at.queries);
    groups_ = reinterpret_cast<TokenGroup*>(scratch + at.groups);
    scores_ = reinterpret_cast<float*>(scratch + at.scores);
    part_ = reinterpret_cast<float*>(scratch + at.part);
    state_ = reinterpret_cast<float*>(scratch + at.state);
    copies_ = scratch + at.copies;
  }

  void run() {
    scale_queries();
    if (unit_.partial != nullptr) {
      for_each_tile(unit_.chunk_first, [&](const Tile& tile) {
        attend_tile(tile, row_of(unit_.partial, tile.first).output);
      });
      return;
    }
    for (int64_t r = 0; r < rows_; ++r) *row_of(state_, r).sum = 0.0f;
    for (int32_t chunk = unit_.chunk_first; chunk < unit_.chunk_last; ++chunk)
      for_each_tile(chunk, [&](const Tile& tile) {
        attend_tile(tile, part_);
        for (int64_t r = 0; r < tile.rows; ++r)
          merge(row_of(state_, tile.first + r), row_of(part_, r), panels_);
      });
    for (int64_t r = 0; r < rows_; ++r)
      finish(row_of(state_, r), sink_of(args_, head_of(r)), cache_, vector_of(args_.y, r));
  }

 private:
  // Rows [first, first + rows) of the unit, and the tokens of the chunk that each sees: neither end
  // ever falls from row to row.
  struct Tile {
    int64_t first, rows;
    int64_t start;  // the chunk's first token
    TokenSpan spans[kTileRows];

    TokenSpan seen_by_any() const { return {spans[0].begin, spans[rows - 1].end}; }
    TokenSpan seen_by_all() const { return {spans[rows - 1].begin, spans[0].end}; }
  };

  Part row_of(float* parts, int64_t r) const { return {parts + r * part_floats(size_), panels_}; }

  int64_t head_of(int64_t r) const { return unit_.kv_head * sharing_ + r % sharing_; }

  float* vector_of(Rows rows, int64_t r) const {
    return rows.row(unit_.first + r / sharing_) + head_of(r) * size_;
  }

  // Words of the first `size` (a multiple of 16) values of a query.
  int64_t query_words(int64_t size) const { return keys_.is_packed ? size / 2 : size; }

  float* query(int64_t r) const { return queries_ + r * query_words(round_up(size_, kLanes)); }

  void scale_queries() {
    const f32x16 scale = splat(args_.softmax_scale * (keys_.factor * cache_.k_factor));
    for (int64_t r = 0; r < rows_; ++r) {
      const float* const from = vector_of(args_.q, r);
      for (int64_t e = 0; e < size_; e += kLanes)
        put(keys_.is_packed, query(r) + query_words(e), load_rest(from + e, size_ - e) * scale);
      if (keys_.is_rotated) rotate(query(r), size_);
    }
  }

  template <class Body>
  void for_each_tile(int64_t chunk, Body body) {
    if (!unit_.has_paths || (chunk + 1) * chunk_tokens_ <= first_own()) {
      find_groups(chunk, 0, rows_);
      for_each_tile(chunk, 0, rows_, body);
      return;
    }
    for (int64_t r = 0; r < rows_; r += sharing_) {
      find_groups(chunk, r, r + sharing_);
      follow_path(chunk, unit_.first + r / sharing_, visible(r, chunk * chunk_tokens_));
      for_each_tile(chunk, r, r + sharing_, body);
    }
  }

  // Tiles of rows [begin, end).
  template <class Body>
  void for_each_tile(int64_t chunk, int64_t begin, int64_t end, Body body) {
    const int64_t start = chunk * chunk_tokens_, rows = end - begin;
    const int64_t tiles = ceil_div(rows, kTileRows);
    for (int64_t i = 0; i < tiles; ++i) {
      // As equal as can be: 7 rows are 3 and 4, not 6 and 1.
      Tile tile{begin + rows * i / tiles, 0, start, {}};
      tile.rows = begin + rows * (i + 1) / tiles - tile.first;
      for (int64_t r = 0; r < tile.rows; ++r) tile.spans[r] = visible(tile.first + r, start);
      body(tile);
    }
  }

  // The first of the step's own tokens of this sequence, in the cache.
  int64_t first_own() const {
    return batch_.offset(unit_.sequence) + batch_.query_starts[unit_.sequence];
  }

  // What row r sees of the chunk that begins at token `start`.
  TokenSpan visible(int64_t r, int64_t start) const {
    const int64_t position = batch_.position(unit_.sequence, unit_.first + r / sharing_);
    const int64_t begin = args_.reach.first(position);
    const auto within = [&](int64_t token) {
      return token < start ? 0 : token - start < chunk_tokens_ ? token - start : chunk_tokens_;
    };
    return {within(begin), within(position + 1)};
  }

  // The chunk's groups that any of rows [first_row, end_row) sees. Those beyond are not even looked
  // up: their blocks may not exist.
  void find_groups(int64_t chunk, int64_t first_row, int64_t end_row) {
    const int64_t start = chunk * chunk_tokens_;
    const TokenSpan seen = {visible(first_row, start).begin, visible(end_row - 1, start).end};
    range_ = {0, 0};
    if (seen.begin >= seen.end) return;
    const int64_t size = cache_.block_size, per_block = groups_of_block(size);
    const int64_t first_block = seen.begin / size, last_block = (seen.end - 1) / size;
    for (int64_t b = first_block; b <= last_block; ++b) {
      const CachedGroup first = cached_group(cache_, table_[start / size + b], unit_.kv_head, 0);
      for (int64_t i = 0; i < per_block; ++i) {
        TokenGroup& group = groups_[b * per_block + i];
        group.k = first.k + i * cache_.k_group_bytes();
        group.v = first.v + i * cache_.v_group_bytes();
        group.k_scales = first.k_scales + i * kLanes;
        group.v_scales = first.v_scales + i * kLanes;
        group.token = b * size + i * kLanes;
        group.count = size - i * kLanes < kLanes ? size - i * kLanes : kLanes;
      }
    }
    range_ = {first_block * per_block + seen.begin % size / kLanes,
              last_block * per_block + (seen.end - 1) % size / kLanes + 1};
    // All keys, then all values, is the order in which they are used.
    for (int64_t i = range_.begin; i < range_.end; ++i) {
      const int64_t ahead = i + kGroupsAhead, beyond = range_.begin + ahead - range_.end;
      const TokenGroup& value = groups_[beyond < range_.end ? beyond : i];
      groups_[i].after_k = ahead < range_.end ? groups_[ahead].k : value.v;
      groups_[i].after_v =
          ahead < range_.end ? groups_[ahead].v : next_key(chunk, ahead - range_.end);
    }
  }

  // Copies the groups where the path of query row t differs from the cache, and puts the path's
  // tokens in: from t up to where all rows before are on the path. seen: what t sees of the chunk.
  void follow_path(int64_t chunk, int32_t t, TokenSpan seen) {
    const int64_t size = cache_.block_size, offset = batch_.offset(unit_.sequence);
    int64_t copied = -1;
    CachedGroup copy{};
    for (; batch_.positions[t] != offset + t; t = batch_.parents[t]) {
      const int64_t token = batch_.positions[t] - chunk * chunk_tokens_;
      if (token < seen.begin) break;
      if (token >= seen.end) continue;
      const int64_t i = token / size * groups_of_block(size) + token % size / kLanes;
      if (i != copied) {
        copy = copy_group(i);
        copied = i;
      }
      const int64_t own = offset + t;
      copy_token(cache_,
                 cached_group(cache_, table_[own / size], unit_.kv_head, own % size / kLanes),
                 own % size % kLanes, copy, token % size % kLanes);
    }
  }

  // Lets the chunk's i-th group be a copy of what it was.
  CachedGroup copy_group(int64_t i) {
    const int64_t k_bytes = cache_.k_group_bytes(), v_bytes = cache_.v_group_bytes();
    TokenGroup& group = groups_[i];
    CachedGroup copy{};
    copy.k = copies_ + i * copy_bytes(size_);
    copy.v = copy.k + k_bytes;
    copy.k_scales = reinterpret_cast<float*>(copy.v + v_bytes);
    copy.v_scales = copy.k_scales + kLanes;
    std::memcpy(copy.k, group.k, size_t(k_bytes));
    std::memcpy(copy.v, group.v, size_t(v_bytes));
    group.k = copy.k;
    group.v = copy.v;
    if (keys_.has_scales) {
      std::memcpy(copy.k_scales, group.k_scales, kLanes * sizeof(float));
      group.k_scales = copy.k_scales;
    }
    if (values_.has_scales) {
      std::memcpy(copy.v_scales, group.v_scales, kLanes * sizeof(float));
      group.v_scales = copy.v_scales;
    }
    return copy;
  }

  // The i-th group of keys of what comes after this chunk; anything of its own if there is no such.
  const uint8_t* next_key(int64_t chunk, int64_t i) const {
    const bool is_last = chunk + 1 == unit_.chunk_last;
    const AttentionUnit* const unit = is_last ? next_ : &unit_;
    if (unit == nullptr) return groups_[range_.begin].v;
    const int64_t size = cache_.block_size, per_block = groups_of_block(size);
    const int64_t token = (is_last ? unit->chunk_first : chunk + 1) * chunk_tokens_ +
                          i / per_block * size + i % per_block * kLanes;
    if (token >= batch_.context_lens[unit->sequence]) return groups_[range_.begin].v;
    const int32_t* const table = batch_.block_tables + unit->sequence * batch_.table_stride;
    return cache_.head(table[token / size], unit->kv_head) + i % per_block * cache_.k_group_bytes();
  }

  // Groups that hold `tokens`, of which there are some.
  GroupRange holding(TokenSpan tokens) const {
    GroupRange range = range_;
    while (groups_[range.begin].token + groups_[range.begin].count <= tokens.begin) ++range.begin;
    while (groups_[range.end - 1].token >= tokens.end) --range.end;
    return range;
  }

  // A tile's attention over the chunk at hand; `part` has a record for each of its rows.
  void attend_tile(const Tile& tile, float* part) {
    for (int64_t r = 0; r < tile.rows; ++r) {
      const Part row = row_of(part, r);
      for (int64_t i = 0; i < panels_ * kLanes; i += kLanes) store(row.output + i, zero());
      *row.maximum = -FLT_MAX;
      *row.sum = 0.0f;
    }
    const TokenSpan any = tile.seen_by_any();
    if (any.begin >= any.end) return;
    const GroupRange range = holding(any);
    keys_.score[tile.rows - 1](query(tile.first), groups_ + range.begin, range.end - range.begin,
                               size_, scores_ + range.begin * tile.rows * kLanes);
    for (int64_t r = 0; r < tile.rows; ++r) softmax(tile, r, row_of(part, r));
    // Values of the tokens that all rows see are taken together, those at the edges of the mask, on
    // both sides, row by row.
    const TokenSpan all = pairs_of(tile);
    const TokenSpan shared = all.begin < all.end ? all : TokenSpan{any.end, any.end};
    for (int64_t r = 0; r < tile.rows; ++r) {
      const TokenSpan span = tile.spans[r];
      weigh(tile, r, 1, {span.begin, span.end < shared.begin ? span.end : shared.begin}, part);
    }
    weigh(tile, 0, tile.rows, shared, part);
    for (int64_t r = 0; r < tile.rows; ++r)
      weigh(tile, r, 1, {shared.end, tile.spans[r].end}, part);
  }

  // Tokens that all rows see, but not one of a pair whose other token some rows see and some don't:
  // a pair that a row sees is taken in one step, whatever the tile's other rows see.
  TokenSpan pairs_of(const Tile& tile) const {
    const TokenSpan any = tile.seen_by_any(), all = tile.seen_by_all();
    const auto past_pair = [&](int64_t token) { return token % cache_.block_size % values_.pair; };
    return {any.begin == all.begin ? all.begin : all.begin + past_pair(all.begin),
            any.end == all.end ? all.end : all.end - past_pair(all.end)};
  }

  // Scores of row r of the tile become exp(score - maximum), times the scale of the token's value.
  // Beyond what the row sees they are replaced, whatever they are.
  void softmax(const Tile& tile, int64_t r, Part part) {
    const TokenSpan span = tile.spans[r];
    if (span.begin >= span.end) return;
    const GroupRange range = holding(span);
    const auto scores_of = [&](int64_t i) { return scores_ + (i * tile.rows + r) * kLanes; };
    const bool has_slope = args_.slopes != nullptr;
    const int64_t row = tile.first + r;
    const float slope = has_slope ? args_.slopes[head_of(row)] : 0.0f;
    const int64_t behind =  // of the chunk's first token from the query's
        tile.start - batch_.position(unit_.sequence, unit_.first + row / sharing_);
    f32x16 top = splat(-FLT_MAX);
    for (int64_t i = range.begin; i < range.end; ++i) {
      const TokenGroup& group = groups_[i];
      float* const at = scores_of(i);
      f32x16 score = load(at);
      if (keys_.has_scales) score = score * load(group.k_scales);
      if (args_.softcap > 0.0f) score = soft_capped(score, args_.softcap);
      if (has_slope) {
        const f32x16 distance = load(kLaneNumbers) + splat(float(behind + group.token));
        score = fma(splat(slope), distance, score);
      }
      if (keys_.has_scales || args_.softcap > 0.0f || has_slope) store(at, score);
      const int64_t first = span.begin - group.token, rest = span.end - group.token;
      const int64_t last = rest < group.count ? rest : group.count;
      if (first > 0 || last < kLanes) {
        score = fill_from(score, int(last), -INFINITY);
        store(at, score);
        for (int64_t t = 0; t < first; ++t) at[t] = -INFINITY;
        if (first > 0) score = load(at);
      }
      top = max(score, top);  // in this order a NaN is left out of the maximum, but not of the sum
    }
    const float maximum = max_lanes(top);
    f32x16 sums = zero();
    for (int64_t i = range.begin; i < range.end; ++i) {
      float* const at = scores_of(i);
      f32x16 p = exp(load(at) - splat(maximum));
      sums = sums + p;
      if (values_.has_scales) p = p * load(groups_[i].v_scales);
      put(values_.is_packed, at, p);
    }
    *part.maximum = maximum;
    *part.sum = sum_lanes(sums);
  }

  // Adds the values of `tokens`, if any, to the outputs of rows [r, r + rows) of the tile.
  void weigh(const Tile& tile, int64_t r, int64_t rows, TokenSpan tokens, float* part) {
    if (tokens.begin >= tokens.end) return;
    const GroupRange range = holding(tokens);
    values_.weigh[rows - 1](scores_ + (range.begin * tile.rows + r) * kLanes, tile.rows * kLanes,
                            groups_ + range.begin, range.end - range.begin, tokens, panels_,
                            row_of(part, r).output, part_floats(size_));
  }

  const AttentionArgs& args_;
  const Batch& batch_;
  const KVCache& cache_;
  const KeyFormat& keys_;
  const ValueFormat& values_;
  const AttentionUnit& unit_;
  const AttentionUnit* const next_;
  const int32_t* const table_;
  const int64_t size_;  // E
  const int64_t panels_;
  const int64_t sharing_;  // query heads of a kv head
  const int64_t rows_;
  const int64_t chunk_tokens_;
  GroupRange range_ = {0, 0};  // what the unit sees of the chunk at hand
  float* queries_;
  TokenGroup* groups_;
  float* scores_;
  float* part_;
  float* state_;
  uint8_t* copies_;
};

void attend(const AttentionArgs& args, const Batch& batch, const AttentionUnit& unit,
            const AttentionUnit* next, void* scratch) {
  Unit(args, batch, unit, next, static_cast<uint8_t*>(scratch)).run();
}

void attend_merge(const AttentionArgs& args, const AttentionUnit& unit, int64_t count,
                  int64_t stride) {
  const int64_t size = args.cache.head_dim, panels = args.cache.panels();
  const int64_t sharing = args.heads / args.cache.heads;
  for (int64_t r = 0; r < (unit.last - unit.first) * sharing; ++r) {
    float* const row = unit.partial + r * part_floats(size);
    for (int64_t i = 1; i < count; ++i)
      merge(Part(row, panels), Part(row + i * stride, panels), panels);
    const int64_t head = unit.kv_head * sharing + r % sharing;
    float* const y = args.y.row(unit.first + r / sharing) + head * size;
    finish(Part(row, panels), sink_of(args, head), args.cache, y);
  }
}

}  // namespace

void install_attention(Kernels& table) {
  table.attend = attend;
  table.attend_merge = attend_merge;
}

}  // namespace octavo::OCTAVO_ISA
