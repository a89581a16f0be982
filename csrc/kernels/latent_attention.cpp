// Attention over a cache of latent vectors, which all heads share: they are keys as a whole, and
// values in their first C dimensions.
//
// A unit's rows are (query token, head) pairs. For every 32 tokens the cached vectors are unpacked
// to floats once, as they are and turned round, so that scores have tokens in lanes and outputs
// dimensions; then come all rows, in tiles of one query token's heads. Each score and each output
// has one accumulator that takes its terms in rising order, of just the tokens that its row sees;
// chunks are merged as those of paged attention: how rows are cut into units changes no bit.

#include <cfloat>
#include <cmath>

#include "attention_part.h"
#include "table.h"

namespace octavo::OCTAVO_ISA {
namespace {

using f32x4 [[gnu::vector_size(16)]] = float;

inline f32x4 load4(const float* p) {
  f32x4 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// to[j][i] = from[i][j] for four by four floats, rows `from_stride` and `to_stride` apart.
inline void transpose4(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  const f32x4 a = load4(from), b = load4(from + from_stride);
  const f32x4 c = load4(from + 2 * from_stride), d = load4(from + 3 * from_stride);
  const f32x4 turned[4] = {{a[0], b[0], c[0], d[0]},
                           {a[1], b[1], c[1], d[1]},
                           {a[2], b[2], c[2], d[2]},
                           {a[3], b[3], c[3], d[3]}};
  for (int i = 0; i < 4; ++i) std::memcpy(to + i * to_stride, &turned[i], sizeof(f32x4));
}

// Sixteen of a row's values.
inline f32x16 load_cached(const LatentCache& cache, const uint8_t* row, int64_t e) {
  switch (cache.format) {
    case KVFormat::f32: return load(reinterpret_cast<const float*>(row) + e);
    case KVFormat::bf16: return load_bf16(reinterpret_cast<const uint16_t*>(row) + e);
    case KVFormat::i8: {
      const float scale = *cache.scale(const_cast<uint8_t*>(row));
      return load_i8(reinterpret_cast<const int8_t*>(row) + e) * splat(scale);
    }
    case KVFormat::f8e4m3: return load_f8_256th(row + e) * splat(256.0f);
    case KVFormat::i4: break;  // which LatentMemory refuses
  }
  return zero();
}

// scores[r][lane] = <row r of q, token `lane`>.
template <int R>
void score_rows(const float* q, int64_t size, const float* keys, float* scores, int64_t stride) {
  f32x16 sums[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sums[r] = zero();
  for (int64_t e = 0; e < size; ++e) {
    const f32x16 key = load(keys + e * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r] = fma(splat(q[r * size + e]), key, sums[r]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store(scores + r * stride, sums[r]);
}

// outputs[r] = factors[r] * outputs[r] + sum of the first `count` tokens t of p[r][t] * values[t].
template <int R>
void weigh_rows(const float* p, const float* factors, const float* values, int64_t size,
                int64_t count, int64_t panels, float* outputs, int64_t stride) {
  for (int64_t c = 0; c < panels * kLanes; c += kLanes) {
    f32x16 sums[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r] = load(outputs + r * stride + c) * splat(factors[r]);
    for (int64_t t = 0; t < count; ++t) {
      const f32x16 value = load(values + t * size + c);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r] = fma(splat(p[r * kLatentTokens + t]), value, sums[r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store(outputs + r * stride + c, sums[r]);
  }
}

// By rows - 1.
constexpr decltype(&score_rows<1>) kScoreRows[kTileRows] = {
    score_rows<1>, score_rows<2>, score_rows<3>, score_rows<4>, score_rows<5>, score_rows<6>};
constexpr decltype(&weigh_rows<1>) kWeighRows[kTileRows] = {
    weigh_rows<1>, weigh_rows<2>, weigh_rows<3>, weigh_rows<4>, weigh_rows<5>, weigh_rows<6>};

class Unit {
 public:
  Unit(const LatentArgs& args, const Batch& batch, const AttentionUnit& unit, uint8_t* scratch)
      : args_(args),
        batch_(batch),
        cache_(args.cache),
        unit_(unit),
        table_(batch.block_tables + unit.sequence * batch.table_stride),
        size_(cache_.padded()),
        panels_(ceil_div(cache_.rank, kLanes)),
        stride_(part_floats(cache_.rank)),
        rows_((unit.last - unit.first) * args.heads),
        chunk_tokens_(attention_chunk(cache_.block_size)) {
    const LatentScratch at(size_, cache_.rank, args.heads);
    queries_ = reinterpret_cast<float*>(scratch + at.queries);
    values_ = reinterpret_cast<float*>(scratch + at.values);
    keys_ = reinterpret_cast<float*>(scratch + at.keys);
    weights_ = reinterpret_cast<float*>(scratch + at.weights);
    part_ = reinterpret_cast<float*>(scratch + at.part);
    state_ = reinterpret_cast<float*>(scratch + at.state);
  }

  void run() {
    scale_queries();
    if (unit_.partial != nullptr) {
      attend_chunk(unit_.chunk_first, unit_.partial);
      return;
    }
    for (int64_t r = 0; r < rows_; ++r) *row_of(state_, r).sum = 0.0f;
    for (int64_t chunk = unit_.chunk_first; chunk < unit_.chunk_last; ++chunk) {
      attend_chunk(chunk, part_);
      for (int64_t r = 0; r < rows_; ++r) merge(row_of(state_, r), row_of(part_, r), panels_);
    }
    for (int64_t r = 0; r < rows_; ++r) finish(args_, unit_, r, row_of(state_, r));
  }

  // y = output / sum.
  static void finish(const LatentArgs& args, const AttentionUnit& unit, int64_t r, Part part) {
    const int64_t rank = args.cache.rank;
    float* const y = args.y.row(unit.first + r / args.heads) + r % args.heads * rank;
    const f32x16 sum = splat(*part.sum);
    for (int64_t c = 0; c < rank; c += kLanes)
      store_rest(y + c, load(part.output + c) / sum, rank - c);
  }

 private:
  Part row_of(float* parts, int64_t r) const { return {parts + r * stride_, panels_}; }

  void scale_queries() {
    const int64_t rank = cache_.rank, rope_dim = cache_.rope_dim;
    const float scale = args_.softmax_scale;
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t t = unit_.first + r / args_.heads, head = r % args_.heads;
      const float* const latent = args_.q.row(t) + head * rank;
      const float* const rotated = args_.rotated.row(t) + head * rope_dim;
      float* const q = queries_ + r * size_;
      for (int64_t e = 0; e < rank; ++e) q[e] = latent[e] * scale;
      for (int64_t e = 0; e < rope_dim; ++e) q[rank + e] = rotated[e] * scale;
      for (int64_t e = rank + rope_dim; e < size_; ++e) q[e] = 0.0f;
    }
  }

  // All rows' attention over one chunk of the context.
  void attend_chunk(int64_t chunk, float* parts) {
    for (int64_t r = 0; r < rows_; ++r) {
      const Part row = row_of(parts, r);
      for (int64_t c = 0; c < panels_ * kLanes; c += kLanes) store(row.output + c, zero());
      *row.maximum = -FLT_MAX;
      *row.sum = 0.0f;
    }
    const int64_t begin = chunk * chunk_tokens_;
    for (int64_t at = begin; at < begin + chunk_tokens_; at += kLatentTokens) {
      const int64_t rest = begin + chunk_tokens_ - at;
      const int64_t length = rest < kLatentTokens ? rest : kLatentTokens;
      const auto seen = [&](int32_t t) {
        const int64_t count = batch_.position(unit_.sequence, t) + 1 - at;
        return count < length ? count : length;
      };
      const bool is_own = at + length > first_own();
      if (!(unit_.has_paths && is_own) && seen(unit_.last - 1) > 0)
        unpack(at, seen(unit_.last - 1), -1);
      for (int32_t t = unit_.first; t < unit_.last; ++t) {
        const int64_t count = seen(t);
        if (count <= 0) continue;
        if (unit_.has_paths && is_own) unpack(at, count, t);
        for (int64_t h = 0; h < args_.heads; h += kTileRows) {
          const int64_t left = args_.heads - h;
          attend_tile((t - unit_.first) * args_.heads + h, left < kTileRows ? left : kTileRows,
                      count, parts);
        }
      }
    }
  }

  // The first of the step's own tokens of this sequence, in the cache.
  int64_t first_own() const {
    return batch_.offset(unit_.sequence) + batch_.query_starts[unit_.sequence];
  }

  // `count` vectors from position `at` on, as floats; of the path of query row t, if that is one.
  void unpack(int64_t at, int64_t count, int32_t t) {
    int64_t tokens[kLatentTokens];
    for (int64_t i = 0; i < count; ++i) tokens[i] = at + i;
    if (t >= 0) {
      const int64_t offset = batch_.offset(unit_.sequence);
      for (; batch_.positions[t] != offset + t; t = batch_.parents[t]) {
        const int64_t i = batch_.positions[t] - at;
        if (i < 0) break;
        if (i < count) tokens[i] = offset + t;
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t block = table_[tokens[i] / cache_.block_size];
      const uint8_t* const row = cache_.row(block, tokens[i] % cache_.block_size);
      for (int64_t e = 0; e < size_; e += kLanes)
        store(values_ + i * size_ + e, load_cached(cache_, row, e));
    }
    // Scores of what lies beyond are computed, too, and replaced.
    const int64_t filled = round_up(count, kLanes);
    for (int64_t i = count; i < filled; ++i)
      for (int64_t e = 0; e < size_; e += kLanes) store(values_ + i * size_ + e, zero());
    for (int64_t i = 0; i < filled; i += 4)
      for (int64_t e = 0; e < size_; e += 4)
        transpose4(values_ + i * size_ + e, size_,
                   keys_ + i / kLanes * size_ * kLanes + e * kLanes + i % kLanes, kLanes);
  }

  // Rows [first, first + rows), one query token's, and the first `count` of the unpacked vectors.
  void attend_tile(int64_t first, int64_t rows, int64_t count, float* parts) {
    const int64_t groups = ceil_div(count, kLanes);
    for (int64_t g = 0; g < groups; ++g)
      kScoreRows[rows - 1](queries_ + first * size_, size_, keys_ + g * size_ * kLanes,
                           weights_ + g * kLanes, kLatentTokens);
    float factors[kTileRows];
    for (int64_t r = 0; r < rows; ++r)
      factors[r] = softmax(weights_ + r * kLatentTokens, count, row_of(parts, first + r));
    kWeighRows[rows - 1](weights_, factors, values_, size_, count, panels_,
                         row_of(parts, first).output, stride_);
  }

  // Scores become exp(score - maximum), which adds to the part's sum; returns what its output and
  // its sum are to be multiplied by.
  float softmax(float* scores, int64_t count, Part part) const {
    f32x16 top = splat(-FLT_MAX);
    for (int64_t i = 0; i < count; i += kLanes) {
      f32x16 score = load(scores + i);
      if (count - i < kLanes) score = fill_from(score, int(count - i), -INFINITY);
      store(scores + i, score);
      top = max(score, top);  // in this order a NaN is left out of the maximum, but not of the sum
    }
    const float largest = max_lanes(top), old = *part.maximum;
    const float maximum = largest > old ? largest : old;
    f32x16 sums = zero();
    for (int64_t i = 0; i < count; i += kLanes) {
      const f32x16 p = exp(load(scores + i) - splat(maximum));
      sums = sums + p;
      store(scores + i, p);
    }
    float factors[kLanes];
    store(factors, exp(splat(old - maximum)));
    *part.maximum = maximum;
    *part.sum = *part.sum * factors[0] + sum_lanes(sums);
    return factors[0];
  }

  const LatentArgs& args_;
  const Batch& batch_;
  const LatentCache& cache_;
  const AttentionUnit& unit_;
  const int32_t* const table_;
  const int64_t size_;  // C + R, padded
  const int64_t panels_;  // of outputs
  const int64_t stride_;  // of parts
  const int64_t rows_;
  const int64_t chunk_tokens_;
  float* queries_;
  float* values_;
  float* keys_;
  float* weights_;
  float* part_;
  float* state_;
};

void attend_latent(const LatentArgs& args, const Batch& batch, const AttentionUnit& unit,
                   void* scratch) {
  Unit(args, batch, unit, static_cast<uint8_t*>(scratch)).run();
}

void merge_latent(const LatentArgs& args, const AttentionUnit& unit, int64_t count,
                  int64_t stride) {
  const int64_t panels = ceil_div(args.cache.rank, kLanes), floats = part_floats(args.cache.rank);
  for (int64_t r = 0; r < (unit.last - unit.first) * args.heads; ++r) {
    float* const row = unit.partial + r * floats;
    for (int64_t i = 1; i < count; ++i)
      merge(Part(row, panels), Part(row + i * stride, panels), panels);
    Unit::finish(args, unit, r, Part(row, panels));
  }
}

}  // namespace

void install_latent_attention(Kernels& table) {
  table.attend_latent = attend_latent;
  table.merge_latent = merge_latent;
}

}  // namespace octavo::OCTAVO_ISA
