// The contract between the tape, which decides what runs where, and the kernels, which compute.
//
// Files under kernels/ are compiled once for each instruction set, into a namespace of its name;
// each fills its part of a table like this. A kernel computes the rows (and columns) that it is
// told to, on the calling thread, and allocates nothing. Rules that make a row's bits independent
// of its batch, of chunking and of the number of threads:
//   - an output has one accumulator (a fixed tree of lanes for sums along a row), its terms in
//     rising order; tiles may vary in height, never in the order or the type of a sum;
//   - exp, sigmoid and tanh are our own polynomials, the same for every lane and remainder;
//   - built with -ffp-contract=off; fused multiply-adds are written.
#pragma once

#include <cstdint>

#include "formats.h"

namespace octavo {

// Rows of float32: element (t, c) at data[t * stride + c].
struct Rows {
  float* data;
  int64_t stride;
  float* row(int64_t t) const { return data + t * stride; }
};

// The ragged batch, as ops/batch.py describes it.
struct Batch {
  int64_t tokens;      // T
  int64_t sequences;   // S
  const int64_t* token_ids;       // (T,)
  const int64_t* positions;       // (T,)
  const int64_t* kv_slots;        // (T,)
  const int32_t* query_starts;    // (S + 1,)
  const int32_t* context_lens;    // (S,)
  const int32_t* block_tables;    // (S, table_stride)
  int64_t table_stride;
  const int32_t* parents;         // (T,), or null: all sequences are chains

  // Row t of sequence s is cached token offset(s) + t of the sequence.
  int64_t offset(int64_t s) const { return context_lens[s] - query_starts[s + 1]; }
  // Where it stands in the text.
  int64_t position(int64_t s, int64_t t) const {
    return parents == nullptr ? offset(s) + t : positions[t];
  }
};

struct LinearArgs {
  const PackedMatrix* weight;
  Rows x;                 // float formats read x,
  QuantizedRows xq;       // integer formats xq
  Rows y;                 // (T, O); lanes beyond O are never written
  const float* bias;      // (O,) or null
  Rows residual;          // added to the product; data null for none; may be y itself
};

// Which of the tokens before it a query sees.
struct Reach {
  int64_t window;  // so many with itself; 0: all
  int64_t chunk;   // those of its own chunk of the text, which begins at a multiple; 0: all

  int64_t first(int64_t position) const {
    const int64_t begin = window > 0 && position >= window ? position - window + 1 : 0;
    const int64_t own = chunk > 0 ? position / chunk * chunk : 0;
    return begin > own ? begin : own;
  }
  bool operator==(const Reach&) const = default;
};

struct AttentionArgs {
  KVCache cache;
  Rows q;                 // (T, H * E)
  Rows y;                 // (T, H * E)
  int64_t heads;          // H
  float softmax_scale;
  Reach reach;
  float softcap;          // 0: none; else scores become softcap * tanh(score / softcap)
  const float* slopes;  // (H,) or null: slope * (position of the key - that of the query) is added
  const float* sinks;  // (H,) or null: one more score in the softmax, of a key without a value
};

// One unit of attention: query tokens [first, last) of sequence s, kv head g, against the cached
// tokens of context chunks [chunk_first, chunk_last) (chunks at absolute multiples of
// attention_chunk(B) tokens). With `partial` null the rows of y are written; else the unit is one
// chunk, and its results go there, to be merged by attend_merge.
//
// With has_paths the rows branch off: before some row on the way up from each, by Batch::parents,
// cached tokens are not those of its path. The kernel then works on a copy of the groups of 16
// tokens in question, for each query token its own, in which each token of the path stands at its
// position in the text. A query so reads what a chain of its path would have left in the cache, and
// its result has the same bits. Positions don't fall from query to query of a unit.
struct AttentionUnit {
  int32_t sequence, kv_head;
  int32_t first, last;  // query rows of the step, [query_starts[s], query_starts[s+1])
  int32_t chunk_first, chunk_last;
  bool has_paths;
  float* partial;  // rows (last - first) * H / G of part_floats() (attention_scratch.h)
};

struct LatentArgs {
  LatentCache cache;
  Rows q;  // (T, H * C)
  Rows rotated;  // (T, H * R): of the queries, what is multiplied by the R values
  Rows y;  // (T, H * C)
  int64_t heads;  // H
  float softmax_scale;
};

// What sampling one row asks for; ops/sampling.py has the definition.
struct SampleArgs {
  float temperature;
  int64_t top_k;
  float top_p;
  float min_p;
};

// How a mixture of experts chooses; ops/experts.py has the definition.
struct RouterArgs {
  int64_t active;  // K
  bool is_softmax;
  bool renormalizes;
  float factor;
  int64_t groups;
  int64_t kept_groups;
  int64_t group_votes;
};
constexpr int64_t kMaxExperts = 1024;

struct Kernels {
  const char* isa;

  // rows.cpp: rows [t0, t1) each. `heads` vectors of `size` lie side by side in a row.
  void (*rms_norm)(Rows x, Rows y, int64_t t0, int64_t t1, int64_t heads, int64_t size,
                   const float* weight, float eps);
  // weight, bias: null, or `size` values for each head, `head_stride` (0 or size) floats apart.
  void (*layer_norm)(Rows x, Rows y, int64_t t0, int64_t t1, int64_t heads, int64_t size,
                     const float* weight, const float* bias, int64_t head_stride, float eps);
  // The first `rotated` values of each head; the table has rows of so many.
  void (*rotary)(Rows x, Rows y, int64_t t0, int64_t t1, int64_t heads, int64_t size,
                 int64_t rotated, const float* table, const int64_t* positions);
  void (*silu)(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size);
  void (*gelu)(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size);
  void (*gelu_tanh)(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size);
  void (*relu)(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size);
  void (*silu_mul)(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size);  // x has 2 size
  void (*gelu_tanh_mul)(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size);  // columns
  void (*add)(Rows x, Rows z, Rows y, int64_t t0, int64_t t1, int64_t size);  // y = x + z
  void (*scale)(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size, float factor);
  void (*clamp)(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size, float limit);
  void (*softcap)(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size, float cap);
  // y[t, c] = x[t, order[c]]
  void (*take_columns)(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size, const int32_t* order);
  void (*quantize)(Rows x, QuantizedRows y, int64_t t0, int64_t t1, int64_t size);
  // y[t] = row ids[t] of the matrix, dequantized.
  void (*embedding)(const PackedMatrix& table, const int64_t* ids, Rows y, int64_t t0, int64_t t1);

  // linear_float.cpp, linear_int.cpp: rows [t0, t1) times panels [p0, p1).
  void (*linear_float)(const LinearArgs& args, int64_t t0, int64_t t1, int64_t p0, int64_t p1);
  void (*linear_int)(const LinearArgs& args, int64_t t0, int64_t t1, int64_t p0, int64_t p1);

  // write_kv.cpp: rows [t0, t1), into the cache's slots.
  void (*write_kv)(const KVCache& cache, Rows k, Rows v, const int64_t* slots, int64_t t0,
                   int64_t t1);

  // attention.cpp. next: the unit that this thread is likely to compute next, or null.
  // scratch: attention_scratch_bytes() of the calling thread's own, 64-byte aligned.
  void (*attend)(const AttentionArgs& args, const Batch& batch, const AttentionUnit& unit,
                 const AttentionUnit* next, void* scratch);
  // Merge the results of `count` chunks, `stride` floats apart from unit.partial on, in that order
  // into the rows of y.
  void (*attend_merge)(const AttentionArgs& args, const AttentionUnit& unit, int64_t count,
                       int64_t stride);

  // sampling.cpp: one row of V logits each.
  bool (*row_is_finite)(const float* logits, int64_t size);  // some finite, none NaN or +inf
  int64_t (*argmax)(const float* logits, int64_t size);  // the lowest id among equals
  // scratch: sample_scratch_bytes(V) of the calling thread's own, 64-byte aligned.
  int64_t (*sample)(const float* logits, int64_t size, const SampleArgs& args, double uniform,
                    void* scratch);
  // What `sample` draws from: V values.
  void (*probabilities)(const float* logits, int64_t size, const SampleArgs& args, float* result,
                        void* scratch);
  void (*log_probabilities)(const float* logits, int64_t size, int64_t token, int64_t num_top,
                            float* own, int64_t* rank, int64_t* top_ids, float* top_values,
                            void* scratch);

  // limits.cpp: what the instruction set can do at most. The products return how many operations
  // (multiplications and additions) they were.
  int64_t (*multiply_floats)(int64_t rounds);
  int64_t (*multiply_bytes)(int64_t rounds);  // int8, added up in int32
  void (*read_memory)(const uint8_t* data, int64_t bytes);  // a multiple of 256 bytes

  // experts.cpp. route: of rows [t0, t1), from logits of `size` experts, at most kMaxExperts, to K
  // weights and K numbers.
  void (*route)(Rows logits, const float* bias, const RouterArgs& router, Rows y, int64_t t0,
                int64_t t1, int64_t size);
  // y = the sum of some rows of x, times their weights if there are any.
  void (*add_rows)(Rows x, const int32_t* rows, const float* weights, int64_t count, float* y,
                   int64_t size);
  void (*clamped_silu_mul)(Rows x, Rows y, int64_t t0, int64_t t1, int64_t size);
  // y[t] = x[t] * sigmoid(gates[t][0]).
  void (*sigmoid_mul)(Rows x, Rows gates, Rows y, int64_t t0, int64_t t1, int64_t size);

  // write_kv.cpp, latent_attention.cpp: as write_kv, attend and attend_merge; units have kv_head 0.
  void (*write_latent)(const LatentCache& cache, Rows latents, Rows rotated, const int64_t* slots,
                       int64_t t0, int64_t t1);
  // scratch: latent_scratch_bytes() of the calling thread's own, 64-byte aligned.
  void (*attend_latent)(const LatentArgs& args, const Batch& batch, const AttentionUnit& unit,
                        void* scratch);
  void (*merge_latent)(const LatentArgs& args, const AttentionUnit& unit, int64_t count,
                       int64_t stride);
};

// Context tokens of an attention chunk: whole blocks, 256 tokens where blocks allow.
constexpr int64_t attention_chunk(int64_t block_size) {
  return block_size >= 256 ? block_size : 256 / block_size * block_size;
}
int64_t attention_scratch_bytes(int64_t block_size, int64_t head_dim, int64_t heads_per_kv);
int64_t latent_scratch_bytes(const LatentCache& cache, int64_t heads);
int64_t sample_scratch_bytes(int64_t size);

// Tables by name (isa.cpp has them); null if this build or this processor lacks it.
const Kernels* kernels_named(const char* isa);

}  // namespace octavo
