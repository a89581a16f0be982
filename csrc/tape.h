// A tape: the ops of a forward pass, recorded once, with sizes that are symbolic in the step's
// number of rows. Replaying it is one call that needs neither Python nor its lock.
//
// Recording appends ops on buffers; `finish` fuses what can be fused, groups the ops into regions
// for the pool and plans memory, so that buffers which are never alive together share it; `run`
// resolves the sizes of this step and executes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "attention.h"
#include "exchange.h"
#include "experts.h"
#include "kernels.h"
#include "pool.h"

namespace octavo {

// What a buffer's number of rows is: the step's tokens, or the rows whose logits are wanted.
enum class Symbol : int32_t { tokens = 0, rows = 1 };
constexpr int kSymbols = 2;

// Columns [column, ...) of a buffer of float32.
struct Ref {
  int32_t buffer;
  int64_t column;
};

// Of a profiled run: what a region did and what it took. bytes: weights and cache read, operations:
// multiply-adds counted as two; 0 where they don't matter.
struct RegionTime {
  std::string name;
  double nanoseconds;
  double bytes;
  double operations;
};

// Memory of a run's input: rows of floats or of int64.
struct InputRows {
  const void* data;
  int64_t stride;   // bytes from row to row
};

// Memory of an output, valid until the tape runs again (or, if it must grow, as long as `owner`).
struct OutputRows {
  float* data;
  int64_t rows, columns, stride;   // stride in floats
  std::shared_ptr<void> owner;
};

enum class Gate { silu_mul, gelu_tanh_mul, clamped_silu_mul };

// Experts with `size` inputs and outputs; ops/experts.py has the definition.
struct ExpertArgs {
  int64_t size;     // D
  int64_t active;   // K
  Gate gate;
  const float* gate_up_bias;   // or null
  const float* down_bias;      // or null
  bool weighs_inputs;
};

class Tape {
 public:
  Tape(std::shared_ptr<Pool> pool, std::shared_ptr<const Kernels> kernels);
  ~Tape();
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  // --- recording; each op returns where its result is ---------------------------------------
  Ref input(Symbol symbol, int64_t columns);   // floats
  Ref int_input(Symbol symbol);                // int64, one column: token ids, positions, rows
  // first: the id of the table's first row; zeros for ids of which it has none.
  Ref embedding(std::shared_ptr<const PackedMatrix> table, Ref ids, int64_t first = 0);
  // Several matrices stand one below another.
  Ref linear(const std::vector<std::shared_ptr<const PackedMatrix>>& weights, Ref x,
             const float* bias);
  Ref rms_norm(Ref x, int64_t heads, int64_t size, const float* weight, float eps);
  Ref layer_norm(Ref x, int64_t heads, int64_t size, const float* weight, const float* bias,
                 int64_t head_stride, float eps);
  Ref rotary(Ref x, int64_t heads, int64_t size, int64_t rotated, const float* table,
             Ref positions);
  Ref silu(Ref x, int64_t size);
  Ref gelu(Ref x, int64_t size);
  Ref gelu_tanh(Ref x, int64_t size);
  Ref relu(Ref x, int64_t size);
  Ref silu_mul(Ref x, int64_t size);
  Ref gelu_tanh_mul(Ref x, int64_t size);
  Ref clamped_silu_mul(Ref x, int64_t size);
  Ref sigmoid_mul(Ref x, Ref gates, int64_t size);
  Ref add(Ref x, Ref z, int64_t size);
  Ref scale(Ref x, int64_t size, float factor);
  Ref clamp(Ref x, int64_t size, float limit);
  Ref softcap(Ref x, int64_t size, float cap);
  Ref take_rows(Ref x, int64_t size, Ref rows);
  void write_kv(Ref k, Ref v, const KVCache& cache);
  Ref attention(Ref q, const KVCache& cache, int64_t heads, float softmax_scale, const Reach& reach,
                float softcap, const float* slopes, const float* sinks);
  void write_latent(Ref latents, Ref rotated, const LatentCache& cache);
  Ref latent_attention(Ref q, Ref rotated, const LatentCache& cache, int64_t heads,
                       float softmax_scale);
  Ref route(Ref logits, int64_t size, const float* bias, const RouterArgs& router);
  // Rows in order of their experts, through their products, and back.
  Ref experts(Ref x, Ref routing, std::shared_ptr<const PackedMatrix> gate_up,
              std::shared_ptr<const PackedMatrix> down, const ExpertArgs& args);
  // Head h of x, of as many columns as the weight has inputs, times the h-th part of its outputs.
  Ref head_linear(std::shared_ptr<const PackedMatrix> weight, Ref x, int64_t heads);
  // Over the ranks of a group, which record and run the same; ops/collectives.py has the
  // definitions.
  Ref all_reduce(Ref x, int64_t size, std::shared_ptr<Collective> group);
  Ref all_gather(Ref x, const std::vector<int64_t>& columns, std::shared_ptr<Collective> group);
  void finish(const std::vector<std::pair<Ref, int64_t>>& outputs);   // with their columns

  // --- replay --------------------------------------------------------------------------------
  // rows: by symbol. inputs: in the order in which they were declared. batch: null if no op needs
  // one. times: filled with what each region took, if given. Throws what an exchange with other ranks
  // throws; what was to follow it has then not been run.
  std::vector<OutputRows> run(const int64_t (&rows)[kSymbols], const std::vector<InputRows>& inputs,
                              const Batch* batch, std::vector<RegionTime>* times);

  // Bytes of the buffers as they are now.
  int64_t buffer_bytes() const;

 private:
  struct Buffer;
  struct Op;
  struct Region;
  struct Slot;
  class Replay;

  Ref new_buffer(Symbol symbol, int64_t columns);
  Ref ordered(Ref x, int64_t size, const int32_t* order);
  int32_t quantized(Ref x, int64_t size);
  using RowsFunction = std::function<void(Rows x, Rows y, int64_t t0, int64_t t1)>;
  using RowKernel = decltype(Kernels::silu);
  using FactorKernel = decltype(Kernels::scale);
  Ref map(const char* name, double value_ns, Ref x, int64_t size, RowsFunction function);
  Ref map(const char* name, double value_ns, Ref x, int64_t size, RowKernel kernel);
  Ref map(const char* name, double value_ns, Ref x, int64_t size, FactorKernel kernel,
          float factor);
  Ref gated(const char* name, double value_ns, Ref x, int64_t size, RowKernel kernel);
  int32_t split_buffer(bool is_quantized, Symbol symbol, int64_t columns, int64_t parts);
  int32_t gathered(Ref x, Ref routing, const ExpertArgs& args, bool is_integer);
  Ref exchange(const char* name, Ref x, std::shared_ptr<const Exchange> exchange);
  int32_t plan_of(const AttentionKind& kind);
  Op& append_grouped(const char* name, int32_t x, int32_t y,
                     std::shared_ptr<const PackedMatrix> weight, int64_t groups);
  Op& append(const char* name, Symbol symbol, std::vector<int32_t> reads, int32_t write);
  void fuse_residuals();
  void group();
  void plan_memory(const std::vector<std::pair<Ref, int64_t>>& outputs);
  void grow(const int64_t (&rows)[kSymbols]);

  std::shared_ptr<Pool> pool_;
  std::shared_ptr<const Kernels> kernels_;
  std::vector<Buffer> buffers_;
  std::vector<Op> ops_;
  std::vector<Region> regions_;
  std::vector<Slot> slots_;
  std::vector<std::pair<Ref, int64_t>> outputs_;
  std::vector<int32_t> inputs_;
  std::vector<std::unique_ptr<AttentionPlan>> plans_;  // one for each kind of attention
  std::vector<AttentionKind> kinds_;
  ExpertPlan expert_plan_;  // of the experts at hand
  int64_t scratch_bytes_ = 0;
  std::vector<std::shared_ptr<void>> scratch_;  // by worker
};

}  // namespace octavo
