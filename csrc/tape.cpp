#include "tape.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace octavo {
namespace {

// What a chunk should take: far more than claiming it does (about 50 ns), far less than a step.
constexpr double kChunkNs = 2000;
constexpr int64_t kChunksPerThread = 6;   // of row ops
// Rough costs, for cutting work into chunks only.
constexpr double kBytesPerNs = 12;
constexpr double kOperationsPerNs = 300;
// Rows that are multiplied by the same panels before the next: their activations come from the
// caches for each panel, while a panel comes from memory for each block of rows.
constexpr int64_t kRowBlockBytes = 2 << 20;
// Products of float rows take up to this many panels at a time; integer products take one.
constexpr int64_t kPanelsTogether = 4;

double now_ns() {
  using namespace std::chrono;
  return duration<double, std::nano>(steady_clock::now().time_since_epoch()).count();
}

// An odd number of cache lines, so that the rows of a tile fall into different sets of the
// first-level cache (K = 2048, 14 rows: 150 GFLOP/s unpadded, 190 to 200 so).
int64_t spread_stride(int64_t bytes) {
  const int64_t lines = ceil_div(bytes, kAlign);
  return (lines % 2 == 0 ? lines + 1 : lines) * kAlign;
}

bool is_integer(const PackedMatrix& weight) { return is_integer(weight.format.values); }

int64_t clamp_chunks(double ns, int64_t limit, int threads) {
  const int64_t most = std::min<int64_t>(limit, threads * kChunksPerThread);
  return std::clamp<int64_t>(static_cast<int64_t>(ns / kChunkNs), 1, std::max<int64_t>(most, 1));
}

}  // namespace

void advise_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  madvise(memory, static_cast<size_t>(bytes), MADV_HUGEPAGE);
#endif
}

std::shared_ptr<void> allocate_aligned(int64_t bytes) {
  const int64_t page = bytes >= kHugePage ? kHugePage : 4096;
  const int64_t size = round_up(std::max<int64_t>(bytes, 1), page);
  void* memory = nullptr;
  if (posix_memalign(&memory, static_cast<size_t>(page), static_cast<size_t>(size)) != 0)
    throw std::bad_alloc();
  if (page == kHugePage) advise_huge_pages(memory, size);
  return {memory, std::free};
}

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
  enum class Kind { rows, linear, grouped, attention, latent_attention } kind;
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
  int64_t window = 0;
  float softcap = 0;
  const float* slopes = nullptr;
  const float* sinks = nullptr;
  int32_t plan = -1;
};

// A piece of a product in groups: rows of a group, times panels of it.
struct GroupChunk {
  int32_t group;
  int32_t t0, t1, p0, p1;
};

// Ops that run together: one product, one attention, or a chain of ops on the same rows, each of
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
};

struct Tape::Slot {
  Symbol symbol;
  int64_t row_bytes;
  int64_t capacity = 0;           // rows
  std::shared_ptr<void> memory{};
};

Tape::Tape(std::shared_ptr<Pool> pool, std::shared_ptr<const Kernels> kernels)
    : pool_(std::move(pool)), kernels_(std::move(kernels)) {}
Tape::~Tape() = default;

// --- recording -----------------------------------------------------------------------------------

Ref Tape::new_buffer(Symbol symbol, int64_t columns) {
  const int64_t stride = spread_stride(columns * int64_t{sizeof(float)});
  buffers_.push_back({Buffer::Kind::floats, symbol, columns, stride});
  return {static_cast<int32_t>(buffers_.size()) - 1, 0};
}

Ref Tape::input(Symbol symbol, int64_t columns) {
  const Ref ref = new_buffer(symbol, columns);
  buffers_[ref.buffer].input = static_cast<int32_t>(inputs_.size());
  inputs_.push_back(ref.buffer);
  return ref;
}

Ref Tape::int_input(Symbol symbol) {
  const Ref ref = input(symbol, 1);
  buffers_[ref.buffer].kind = Buffer::Kind::ints;
  return ref;
}

Tape::Op& Tape::append(const char* name, Symbol symbol, std::vector<int32_t> reads, int32_t write) {
  ops_.push_back({Op::Kind::rows, name, symbol, std::move(reads), write});
  return ops_.back();
}

Ref Tape::embedding(std::shared_ptr<const PackedMatrix> table, Ref ids) {
  const Symbol symbol = buffers_[ids.buffer].symbol;
  const Ref y = new_buffer(symbol, table->outputs == 0 ? 0 : table->inputs);
  Op& op = append("embedding", symbol, {ids.buffer}, y.buffer);
  op.row_ns = 2.0 * table->inputs;
  op.compute = [this, table, ids, y](const Batch*, int64_t t0, int64_t t1) {
    kernels_->embedding(*table, buffers_[ids.buffer].ints(), buffers_[y.buffer].rows(0), t0, t1);
  };
  return y;
}

// The buffer that holds x quantized; made by the first linear that needs it.
int32_t Tape::quantized(Ref x, int64_t size) {
  for (const Op& op : ops_)
    if (op.kind == Op::Kind::rows && std::strcmp(op.name, "quantize") == 0 &&
        op.reads[0] == x.buffer && op.x.column == x.column && buffers_[op.write].columns == size)
      return op.write;
  const Symbol symbol = buffers_[x.buffer].symbol;
  const int64_t stride = spread_stride(quantized_row_bytes(size));
  buffers_.push_back({Buffer::Kind::quantized, symbol, size, stride});
  const int32_t y = static_cast<int32_t>(buffers_.size()) - 1;
  Op& op = append("quantize", symbol, {x.buffer}, y);
  op.row_ns = 0.3 * size;
  op.x = x;
  op.compute = [this, x, y, size](const Batch*, int64_t t0, int64_t t1) {
    kernels_->quantize(buffers_[x.buffer].rows(x.column), buffers_[y].quantized(), t0, t1, size);
  };
  return y;
}

// x with its columns in another order; made by the first linear that needs it.
Ref Tape::ordered(Ref x, int64_t size, const int32_t* order) {
  for (const Op& op : ops_)
    if (op.order == order && op.x.buffer == x.buffer && op.x.column == x.column)
      return {op.write, 0};
  const Symbol symbol = buffers_[x.buffer].symbol;
  const Ref y = new_buffer(symbol, size);
  Op& op = append("order", symbol, {x.buffer}, y.buffer);
  op.row_ns = 1.0 * size;
  op.x = x;
  op.order = order;
  op.compute = [this, x, y, size, order](const Batch*, int64_t t0, int64_t t1) {
    kernels_->take_columns(buffers_[x.buffer].rows(x.column), buffers_[y.buffer].rows(0), t0, t1,
                           size, order);
  };
  return y;
}

Ref Tape::linear(const std::vector<std::shared_ptr<const PackedMatrix>>& weights, Ref x,
                 const float* bias) {
  const Symbol symbol = buffers_[x.buffer].symbol;
  int64_t outputs = 0;
  for (const auto& weight : weights) outputs += weight->outputs;
  const Ref y = new_buffer(symbol, outputs);
  int64_t column = 0;
  for (const auto& weight : weights) {
    Ref from = x;
    if (weight->order != nullptr) from = ordered(from, weight->inputs, weight->order);
    if (is_integer(*weight)) from = {quantized(from, weight->inputs), 0};
    Op& op = append("linear", symbol, {from.buffer}, y.buffer);
    op.kind = Op::Kind::linear;
    op.weight = weight;
    op.x = from;
    op.bias = bias == nullptr ? nullptr : bias + column;
    op.y_column = column;
    column += weight->outputs;
  }
  return y;
}

Ref Tape::rms_norm(Ref x, int64_t heads, int64_t size, const float* weight, float eps) {
  const Symbol symbol = buffers_[x.buffer].symbol;
  const Ref y = new_buffer(symbol, heads * size);
  Op& op = append("rms_norm", symbol, {x.buffer}, y.buffer);
  op.row_ns = 0.3 * heads * size;
  op.compute = [=, this](const Batch*, int64_t t0, int64_t t1) {
    kernels_->rms_norm(buffers_[x.buffer].rows(x.column), buffers_[y.buffer].rows(0), t0, t1, heads,
                       size, weight, eps);
  };
  return y;
}

Ref Tape::layer_norm(Ref x, int64_t heads, int64_t size, const float* weight, const float* bias,
                     int64_t head_stride, float eps) {
  const Symbol symbol = buffers_[x.buffer].symbol;
  const Ref y = new_buffer(symbol, heads * size);
  Op& op = append("layer_norm", symbol, {x.buffer}, y.buffer);
  op.row_ns = 0.4 * heads * size;
  op.compute = [=, this](const Batch*, int64_t t0, int64_t t1) {
    kernels_->layer_norm(buffers_[x.buffer].rows(x.column), buffers_[y.buffer].rows(0), t0, t1,
                         heads, size, weight, bias, head_stride, eps);
  };
  return y;
}

Ref Tape::rotary(Ref x, int64_t heads, int64_t size, int64_t rotated, const float* table,
                 Ref positions) {
  const Symbol symbol = buffers_[x.buffer].symbol;
  const Ref y = new_buffer(symbol, heads * size);
  Op& op = append("rotary", symbol, {x.buffer, positions.buffer}, y.buffer);
  op.row_ns = 0.15 * heads * size;
  op.compute = [=, this](const Batch*, int64_t t0, int64_t t1) {
    kernels_->rotary(buffers_[x.buffer].rows(x.column), buffers_[y.buffer].rows(0), t0, t1, heads,
                     size, rotated, table, buffers_[positions.buffer].ints());
  };
  return y;
}

// Element by element. value_ns: roughly what a value takes.
Ref Tape::map(const char* name, double value_ns, Ref x, int64_t size, RowsFunction function) {
  const Symbol symbol = buffers_[x.buffer].symbol;
  const Ref y = new_buffer(symbol, size);
  Op& op = append(name, symbol, {x.buffer}, y.buffer);
  op.row_ns = value_ns * size;
  op.may_overwrite = x.column == 0;
  op.compute = [this, x, y, function = std::move(function)](const Batch*, int64_t t0, int64_t t1) {
    function(buffers_[x.buffer].rows(x.column), buffers_[y.buffer].rows(0), t0, t1);
  };
  return y;
}

Ref Tape::map(const char* name, double value_ns, Ref x, int64_t size, RowKernel kernel) {
  return map(name, value_ns, x, size,
             [=](Rows in, Rows out, int64_t t0, int64_t t1) { kernel(in, out, t0, t1, size); });
}

Ref Tape::map(const char* name, double value_ns, Ref x, int64_t size, FactorKernel kernel,
              float factor) {
  return map(name, value_ns, x, size, [=](Rows in, Rows out, int64_t t0, int64_t t1) {
    kernel(in, out, t0, t1, size, factor);
  });
}

Ref Tape::silu(Ref x, int64_t size) { return map("silu", 0.7, x, size, kernels_->silu); }

Ref Tape::gelu(Ref x, int64_t size) { return map("gelu", 0.9, x, size, kernels_->gelu); }

Ref Tape::gelu_tanh(Ref x, int64_t size) {
  return map("gelu_tanh", 0.8, x, size, kernels_->gelu_tanh);
}

Ref Tape::relu(Ref x, int64_t size) { return map("relu", 0.2, x, size, kernels_->relu); }

Ref Tape::silu_mul(Ref x, int64_t size) {
  const Symbol symbol = buffers_[x.buffer].symbol;
  const Ref y = new_buffer(symbol, size);
  Op& op = append("silu_mul", symbol, {x.buffer}, y.buffer);
  op.row_ns = 0.7 * size;
  op.compute = [=, this](const Batch*, int64_t t0, int64_t t1) {
    kernels_->silu_mul(buffers_[x.buffer].rows(x.column), buffers_[y.buffer].rows(0), t0, t1, size);
  };
  return y;
}

Ref Tape::gelu_tanh_mul(Ref x, int64_t size) {
  const Symbol symbol = buffers_[x.buffer].symbol;
  const Ref y = new_buffer(symbol, size);
  Op& op = append("gelu_tanh_mul", symbol, {x.buffer}, y.buffer);
  op.row_ns = 0.9 * size;
  op.compute = [=, this](const Batch*, int64_t t0, int64_t t1) {
    kernels_->gelu_tanh_mul(buffers_[x.buffer].rows(x.column), buffers_[y.buffer].rows(0), t0, t1,
                            size);
  };
  return y;
}

Ref Tape::clamped_silu_mul(Ref x, int64_t size) {
  const Symbol symbol = buffers_[x.buffer].symbol;
  const Ref y = new_buffer(symbol, size);
  Op& op = append("clamped_silu_mul", symbol, {x.buffer}, y.buffer);
  op.row_ns = 0.8 * size;
  op.compute = [=, this](const Batch*, int64_t t0, int64_t t1) {
    kernels_->clamped_silu_mul(buffers_[x.buffer].rows(x.column), buffers_[y.buffer].rows(0), t0,
                               t1, size);
  };
  return y;
}

Ref Tape::sigmoid_mul(Ref x, Ref gates, int64_t size) {
  const Symbol symbol = buffers_[x.buffer].symbol;
  const Ref y = new_buffer(symbol, size);
  Op& op = append("sigmoid_mul", symbol, {x.buffer, gates.buffer}, y.buffer);
  op.row_ns = 0.3 * size;
  op.may_overwrite = x.column == 0;
  op.compute = [=, this](const Batch*, int64_t t0, int64_t t1) {
    kernels_->sigmoid_mul(buffers_[x.buffer].rows(x.column),
                          buffers_[gates.buffer].rows(gates.column), buffers_[y.buffer].rows(0), t0,
                          t1, size);
  };
  return y;
}

Ref Tape::add(Ref x, Ref z, int64_t size) {
  const Symbol symbol = buffers_[x.buffer].symbol;
  const Ref y = new_buffer(symbol, size);
  Op& op = append("add", symbol, {x.buffer, z.buffer}, y.buffer);
  op.row_ns = 0.3 * size;
  op.may_overwrite = x.column == 0;
  op.x = x;
  op.residual = z;
  op.compute = [=, this](const Batch*, int64_t t0, int64_t t1) {
    kernels_->add(buffers_[x.buffer].rows(x.column), buffers_[z.buffer].rows(z.column),
                  buffers_[y.buffer].rows(0), t0, t1, size);
  };
  return y;
}

Ref Tape::scale(Ref x, int64_t size, float factor) {
  return map("scale", 0.2, x, size, kernels_->scale, factor);
}

Ref Tape::clamp(Ref x, int64_t size, float limit) {
  return map("clamp", 0.2, x, size, kernels_->clamp, limit);
}

Ref Tape::softcap(Ref x, int64_t size, float cap) {
  return map("softcap", 0.8, x, size, kernels_->softcap, cap);
}

Ref Tape::take_rows(Ref x, int64_t size, Ref rows) {
  const Symbol symbol = buffers_[rows.buffer].symbol;
  const Ref y = new_buffer(symbol, size);
  Op& op = append("take_rows", symbol, {x.buffer, rows.buffer}, y.buffer);
  op.reads_other_rows = true;
  op.row_ns = 0.2 * size;
  op.compute = [=, this](const Batch*, int64_t t0, int64_t t1) {
    const Rows source = buffers_[x.buffer].rows(x.column), target = buffers_[y.buffer].rows(0);
    const int64_t* index = buffers_[rows.buffer].ints();
    for (int64_t t = t0; t < t1; ++t)
      std::memcpy(target.row(t), source.row(index[t]), size * sizeof(float));
  };
  return y;
}

void Tape::write_kv(Ref k, Ref v, const KVCache& cache) {
  Op& op = append("write_kv", buffers_[k.buffer].symbol, {k.buffer, v.buffer}, -1);
  op.row_ns = 4.0 * cache.heads * cache.head_dim;
  op.compute = [=, this](const Batch* batch, int64_t t0, int64_t t1) {
    kernels_->write_kv(cache, buffers_[k.buffer].rows(k.column), buffers_[v.buffer].rows(v.column),
                       batch->kv_slots, t0, t1);
  };
}

Ref Tape::attention(Ref q, const KVCache& cache, int64_t heads, float softmax_scale, int64_t window,
                    float softcap, const float* slopes, const float* sinks) {
  const Symbol symbol = buffers_[q.buffer].symbol;
  const Ref y = new_buffer(symbol, heads * cache.head_dim);
  Op& op = append("attention", symbol, {q.buffer}, y.buffer);
  op.kind = Op::Kind::attention;
  op.cache = cache;
  op.q = q;
  op.heads = heads;
  op.softmax_scale = softmax_scale;
  op.window = window;
  op.softcap = softcap;
  op.slopes = slopes;
  op.sinks = sinks;
  op.plan = plan_of({cache.block_size, cache.heads, cache.head_dim, heads, window});
  const int64_t sharing = heads / cache.heads;
  scratch_bytes_ =
      std::max(scratch_bytes_, attention_scratch_bytes(cache.block_size, cache.head_dim, sharing));
  return y;
}

void Tape::write_latent(Ref latents, Ref rotated, const LatentCache& cache) {
  Op& op =
      append("write_latent", buffers_[latents.buffer].symbol, {latents.buffer, rotated.buffer}, -1);
  op.row_ns = 1.0 * cache.padded();
  op.compute = [=, this](const Batch* batch, int64_t t0, int64_t t1) {
    kernels_->write_latent(cache, buffers_[latents.buffer].rows(latents.column),
                           buffers_[rotated.buffer].rows(rotated.column), batch->kv_slots, t0, t1);
  };
}

Ref Tape::latent_attention(Ref q, Ref rotated, const LatentCache& cache, int64_t heads,
                           float softmax_scale) {
  const Symbol symbol = buffers_[q.buffer].symbol;
  const Ref y = new_buffer(symbol, heads * cache.rank);
  Op& op = append("latent_attention", symbol, {q.buffer, rotated.buffer}, y.buffer);
  op.kind = Op::Kind::latent_attention;
  op.latents = cache;
  op.q = q;
  op.rotated = rotated;
  op.heads = heads;
  op.softmax_scale = softmax_scale;
  op.plan = plan_of({cache.block_size, 1, cache.rank, heads, 0});
  scratch_bytes_ = std::max(scratch_bytes_, latent_scratch_bytes(cache, heads));
  return y;
}

int32_t Tape::plan_of(const AttentionKind& kind) {
  const auto known = std::find(kinds_.begin(), kinds_.end(), kind);
  if (known != kinds_.end()) return static_cast<int32_t>(known - kinds_.begin());
  kinds_.push_back(kind);
  plans_.push_back(std::make_unique<AttentionPlan>(kind));
  return static_cast<int32_t>(kinds_.size()) - 1;
}

// --- mixtures of experts, products by head ---------------------------------------------------------

Ref Tape::route(Ref logits, int64_t size, const float* bias, const RouterArgs& router) {
  const bool is_possible = 0 < router.active && router.active <= size && size <= kMaxExperts &&
                           0 < router.kept_groups && router.kept_groups <= router.groups &&
                           size % router.groups == 0 &&
                           router.active <= router.kept_groups * (size / router.groups) &&
                           router.group_votes <= size / router.groups;
  if (!is_possible) throw std::invalid_argument("no router of experts can choose so");
  const Symbol symbol = buffers_[logits.buffer].symbol;
  const Ref y = new_buffer(symbol, 2 * router.active);
  Op& op = append("route", symbol, {logits.buffer}, y.buffer);
  op.row_ns = size * (1.0 + 0.5 * router.active);
  op.compute = [=, this](const Batch*, int64_t t0, int64_t t1) {
    kernels_->route(buffers_[logits.buffer].rows(logits.column), bias, router,
                    buffers_[y.buffer].rows(0), t0, t1, size);
  };
  return y;
}

int32_t Tape::split_buffer(bool is_quantized, Symbol symbol, int64_t columns, int64_t parts) {
  const int64_t bytes =
      is_quantized ? quantized_row_bytes(columns) : columns * int64_t{sizeof(float)};
  Buffer buffer{is_quantized ? Buffer::Kind::quantized : Buffer::Kind::floats, symbol, columns,
                spread_stride(bytes) * parts};
  buffer.parts = parts;
  buffers_.push_back(buffer);
  return static_cast<int32_t>(buffers_.size()) - 1;
}

// Rows of x in order of their experts.
int32_t Tape::gathered(Ref x, Ref routing, const ExpertArgs& args, bool is_integer) {
  const Symbol symbol = buffers_[x.buffer].symbol;
  const int64_t active = args.active, size = args.size;
  const bool copies_quantized = is_integer && !args.weighs_inputs;
  if (copies_quantized) x = {quantized(x, size), 0};
  const int32_t y = split_buffer(copies_quantized, symbol, size, active);
  Op& gather = append("gather", symbol, {x.buffer, routing.buffer}, y);
  gather.row_ns = 0.1 * size * active;
  gather.reads_other_rows = true;
  gather.routing = routing.buffer;
  gather.compute = [=, this](const Batch*, int64_t t0, int64_t t1) {
    const Buffer &source = buffers_[x.buffer], &target = buffers_[y];
    const int64_t bytes =
        copies_quantized ? quantized_row_bytes(size) : size * int64_t{sizeof(float)};
    for (int64_t row = t0 * active; row < t1 * active; ++row) {
      const int64_t choice = expert_plan_.choice_of_row(row);
      const int64_t t = choice / active;
      if (args.weighs_inputs) {
        const float weight = buffers_[routing.buffer].rows(routing.column).row(t)[choice % active];
        const Rows one = source.rows(x.column), to = target.rows(0);
        kernels_->scale({one.row(t), 0}, {to.row(row), 0}, 0, 1, size, weight);
      } else {
        std::memcpy(target.data + row * target.part_stride(),
                    source.data + t * source.stride + x.column * int64_t{sizeof(float)}, bytes);
      }
    }
  };
  if (!is_integer || copies_quantized) return y;
  const int32_t z = split_buffer(true, symbol, size, active);
  Op& quantize = append("quantize", symbol, {y}, z);
  quantize.row_ns = 0.3 * size * active;
  quantize.x = {y, 0};
  quantize.compute = [=, this](const Batch*, int64_t t0, int64_t t1) {
    kernels_->quantize(buffers_[y].rows(0), buffers_[z].quantized(), t0 * active, t1 * active,
                       size);
  };
  return z;
}

Tape::Op& Tape::append_grouped(const char* name, int32_t x, int32_t y,
                               std::shared_ptr<const PackedMatrix> weight, int64_t groups) {
  if (weight->outputs % (groups * kLanes) != 0)
    throw std::invalid_argument("groups of outputs must be whole panels");
  Op& op = append(name, buffers_[x].symbol, {x}, y);
  op.kind = Op::Kind::grouped;
  op.x = {x, 0};
  op.weight = std::move(weight);
  op.groups = groups;
  return op;
}

Ref Tape::experts(Ref x, Ref routing, std::shared_ptr<const PackedMatrix> gate_up,
                  std::shared_ptr<const PackedMatrix> down, const ExpertArgs& args) {
  const Symbol symbol = buffers_[x.buffer].symbol;
  const int64_t active = args.active, size = args.size, inner = down->inputs;
  const int64_t count = down->outputs / size;
  if (gate_up->inputs != size || down->outputs != count * size ||
      gate_up->outputs != count * 2 * inner)
    throw std::invalid_argument("the experts' matrices do not fit each other");

  const int32_t sorted = gathered(x, routing, args, is_integer(*gate_up));
  const int32_t pairs = split_buffer(false, symbol, 2 * inner, active);
  Op& first = append_grouped("experts", sorted, pairs, std::move(gate_up), count);
  first.is_routed = true;
  first.bias = args.gate_up_bias;

  int32_t gated = split_buffer(false, symbol, inner, active);
  Op& gate = append("gate", symbol, {pairs}, gated);
  gate.row_ns = 0.8 * inner * active;
  gate.compute = [=, this](const Batch*, int64_t t0, int64_t t1) {
    const auto kernel = args.gate == Gate::silu_mul        ? kernels_->silu_mul
                        : args.gate == Gate::gelu_tanh_mul ? kernels_->gelu_tanh_mul
                                                           : kernels_->clamped_silu_mul;
    kernel(buffers_[pairs].rows(0), buffers_[gated].rows(0), t0 * active, t1 * active, inner);
  };
  if (is_integer(*down)) {
    const int32_t z = split_buffer(true, symbol, inner, active);
    Op& quantize = append("quantize", symbol, {gated}, z);
    quantize.row_ns = 0.3 * inner * active;
    quantize.x = {gated, 0};
    quantize.compute = [=, this](const Batch*, int64_t t0, int64_t t1) {
      kernels_->quantize(buffers_[gated].rows(0), buffers_[z].quantized(), t0 * active, t1 * active,
                         inner);
    };
    gated = z;
  }
  const int32_t said = split_buffer(false, symbol, size, active);
  Op& second = append_grouped("experts", gated, said, std::move(down), count);
  second.is_routed = true;
  second.bias = args.down_bias;

  const Ref y = new_buffer(symbol, size);
  Op& sum = append("add_rows", symbol, {said, routing.buffer}, y.buffer);
  sum.row_ns = 0.2 * size * active;
  sum.reads_other_rows = true;
  sum.compute = [=, this](const Batch*, int64_t t0, int64_t t1) {
    const Rows weights = buffers_[routing.buffer].rows(routing.column);
    for (int64_t t = t0; t < t1; ++t)
      kernels_->add_rows(buffers_[said].rows(0), expert_plan_.rows_of_token(t),
                         args.weighs_inputs ? nullptr : weights.row(t), active,
                         buffers_[y.buffer].rows(0).row(t), size);
  };
  return y;
}

Ref Tape::head_linear(std::shared_ptr<const PackedMatrix> weight, Ref x, int64_t heads) {
  const Symbol symbol = buffers_[x.buffer].symbol;
  const int64_t size = weight->inputs;
  const Ref y = new_buffer(symbol, weight->outputs);
  if (is_integer(*weight)) {
    const int32_t z = split_buffer(true, symbol, size, heads);
    Op& quantize = append("quantize_heads", symbol, {x.buffer}, z);
    quantize.row_ns = 0.3 * size * heads;
    quantize.compute = [=, this](const Batch*, int64_t t0, int64_t t1) {
      const Buffer& target = buffers_[z];
      for (int64_t h = 0; h < heads; ++h)
        kernels_->quantize(
            buffers_[x.buffer].rows(x.column + h * size),
            {target.data + h * target.part_stride(), target.stride, ceil_div(size, kGroup)}, t0, t1,
            size);
    };
    x = {z, 0};
  }
  append_grouped("head_linear", x.buffer, y.buffer, std::move(weight), heads).x = x;
  return y;
}

// --- planning ------------------------------------------------------------------------------------

void Tape::finish(const std::vector<std::pair<Ref, int64_t>>& outputs) {
  outputs_ = outputs;
  fuse_residuals();
  group();
  plan_memory(outputs);
  for (int worker = 0; scratch_bytes_ > 0 && worker < pool_->threads(); ++worker)
    scratch_.push_back(allocate_aligned(scratch_bytes_));
}

// x + linear(y), where nothing else wants the product: the product is added as it is made.
void Tape::fuse_residuals() {
  std::vector<int> uses(buffers_.size(), 0), made_at(buffers_.size(), -1);
  for (size_t i = 0; i < ops_.size(); ++i) {
    for (int32_t buffer : ops_[i].reads) ++uses[buffer];
    if (ops_[i].write >= 0) made_at[ops_[i].write] = static_cast<int>(i);
  }
  for (const auto& [ref, columns] : outputs_) ++uses[ref.buffer];
  std::vector<bool> removed(ops_.size(), false);
  for (size_t i = 0; i < ops_.size(); ++i) {
    Op& add = ops_[i];
    if (std::strcmp(add.name, "add") != 0) continue;
    for (const auto& [product, other] : {std::pair{add.residual, add.x}, {add.x, add.residual}}) {
      const int at = made_at[product.buffer];
      if (at < 0 || ops_[at].kind != Op::Kind::linear || ops_[at].residual.buffer >= 0) continue;
      if (uses[product.buffer] != 1 || made_at[other.buffer] > at) continue;
      if (ops_[at].weight->outputs != buffers_[product.buffer].columns) continue;   // a part
      Op& linear = ops_[at];
      linear.residual = other;
      linear.reads.insert(linear.reads.begin(), other.buffer);
      linear.write = add.write;
      linear.may_overwrite = other.column == 0;
      made_at[add.write] = at;
      removed[i] = true;
      break;
    }
  }
  size_t kept = 0;
  for (size_t i = 0; i < ops_.size(); ++i)
    if (!removed[i]) {
      if (kept != i) ops_[kept] = std::move(ops_[i]);
      ++kept;
    }
  ops_.erase(ops_.begin() + kept, ops_.end());
}

void Tape::group() {
  for (int32_t i = 0; i < static_cast<int32_t>(ops_.size()); ++i) {
    const Op& op = ops_[i];
    const bool joins = op.kind == Op::Kind::rows && !regions_.empty() &&
                       regions_.back().kind == Op::Kind::rows &&
                       ops_[regions_.back().first].symbol == op.symbol && !op.reads_other_rows;
    if (joins)
      regions_.back().last = i + 1;
    else
      regions_.push_back({i, i + 1, op.kind});
  }
}

// Buffers get slots of memory; a slot is free again after the last region that reads its buffer.
void Tape::plan_memory(const std::vector<std::pair<Ref, int64_t>>& outputs) {
  const int end = static_cast<int>(regions_.size());
  std::vector<int> last_use(buffers_.size(), -1), last_op(buffers_.size(), -1);
  for (int r = 0; r < end; ++r)
    for (int32_t i = regions_[r].first; i < regions_[r].last; ++i) {
      for (int32_t buffer : ops_[i].reads) last_use[buffer] = r, last_op[buffer] = i;
      if (ops_[i].write >= 0) last_use[ops_[i].write] = std::max(last_use[ops_[i].write], r);
    }
  for (const auto& [ref, columns] : outputs) last_use[ref.buffer] = end;

  std::vector<int32_t> free;
  const auto take = [&](Buffer& buffer) {
    int32_t best = -1;
    for (int32_t slot : free) {
      if (slots_[slot].symbol != buffer.symbol) continue;
      const int64_t size = slots_[slot].row_bytes;
      const bool fits = size >= buffer.stride;
      const bool best_fits = best >= 0 && slots_[best].row_bytes >= buffer.stride;
      // The tightest that fits, else the largest, which then grows.
      if (best < 0 || (fits && !best_fits) ||
          (fits == best_fits && (size < slots_[best].row_bytes) == fits))
        best = slot;
    }
    if (best < 0) {
      best = static_cast<int32_t>(slots_.size());
      slots_.push_back({buffer.symbol, buffer.stride});
    } else {
      free.erase(std::find(free.begin(), free.end(), best));
      slots_[best].row_bytes = std::max(slots_[best].row_bytes, buffer.stride);
    }
    return best;
  };
  for (int r = 0; r < end; ++r) {
    std::vector<int32_t> handed_on;
    for (int32_t i = regions_[r].first; i < regions_[r].last; ++i) {
      const Op& op = ops_[i];
      if (op.write < 0) continue;
      Buffer& target = buffers_[op.write];
      if (target.slot >= 0) continue;   // another part of it was written before
      const int32_t source = op.reads[0];
      // A product reads all of its input's row for each output: only the residual may go.
      const bool overwrites = op.may_overwrite && buffers_[source].slot >= 0 &&
                              std::count(op.reads.begin(), op.reads.end(), source) == 1 &&
                              last_use[source] == r && last_op[source] == i &&
                              buffers_[source].stride == target.stride;
      if (overwrites) {
        target.slot = buffers_[source].slot;
        handed_on.push_back(source);
      } else {
        target.slot = take(target);
      }
    }
    for (int32_t b = 0; b < static_cast<int32_t>(buffers_.size()); ++b)
      if (last_use[b] == r && buffers_[b].slot >= 0 &&
          std::find(handed_on.begin(), handed_on.end(), b) == handed_on.end())
        free.push_back(buffers_[b].slot);
  }
}

void Tape::grow(const int64_t (&rows)[kSymbols]) {
  for (Slot& slot : slots_) {
    const int64_t wanted = rows[static_cast<int>(slot.symbol)];
    if (wanted <= slot.capacity) continue;
    // To the next power of two, so that a growing batch seldom moves it; what an output was lives
    // on with its owner.
    int64_t capacity = 16;
    while (capacity < wanted) capacity *= 2;
    slot.memory = allocate_aligned(capacity * slot.row_bytes);
    slot.capacity = capacity;
  }
}

int64_t Tape::buffer_bytes() const {
  int64_t bytes = 0;
  for (const Slot& slot : slots_) bytes += slot.capacity * slot.row_bytes;
  return bytes;
}

// --- replay --------------------------------------------------------------------------------------

class Tape::Replay final : public Program {
 public:
  Replay(Tape& tape, const int64_t (&rows)[kSymbols], const Batch* batch,
         std::vector<RegionTime>* times)
      : tape_(tape), batch_(batch), times_(times) {
    for (Region& region : tape.regions_) prepare(region, rows);
  }

  int64_t regions() const override { return static_cast<int64_t>(tape_.regions_.size()); }

  int64_t chunks(int64_t index) override {
    if (times_ != nullptr) stamp(index);
    Region& region = tape_.regions_[index];
    if (region.count == 0) return 0;
    const Op& op = tape_.ops_[region.first];
    if (op.routing >= 0) {
      const Buffer& choices = tape_.buffers_[op.routing];
      const int64_t active = choices.columns / 2;
      const Op& products = tape_.ops_[tape_.regions_[index + 1].first];
      tape_.expert_plan_.build(choices.rows(0), region.count, active, products.groups);
    }
    if (region.kind == Op::Kind::grouped) prepare_grouped(region, op);
    return region.chunks;
  }

  void run(int64_t index, int64_t chunk, int worker) override {
    const Region& region = tape_.regions_[index];
    switch (region.kind) {
      case Op::Kind::rows: {
        const int64_t t0 = region.count * chunk / region.chunks;
        const int64_t t1 = region.count * (chunk + 1) / region.chunks;
        for (int32_t i = region.first; i < region.last; ++i) tape_.ops_[i].compute(batch_, t0, t1);
        break;
      }
      case Op::Kind::linear: {
        const PackedMatrix& weight = *region.linear.weight;
        const int64_t start = region.starts[chunk], size = region.starts[chunk + 1] - start;
        const int64_t bundles = ceil_div(weight.panels(), region.bundle);
        const int64_t block = start / bundles;
        const int64_t t0 = region.count * block / region.row_blocks;
        const int64_t t1 = region.count * (block + 1) / region.row_blocks;
        // Threads that come from the back begin with the first panels, too: what one of them reads
        // from memory the others find in a cache.
        const bool is_mirrored = 2 * block >= region.row_blocks;
        const int64_t at = start % bundles, b0 = is_mirrored ? bundles - at - size : at;
        const int64_t p0 = b0 * region.bundle;
        const int64_t p1 = std::min(p0 + size * region.bundle, weight.panels());
        const bool is_integer = region.linear.xq.data != nullptr;
        (is_integer ? tape_.kernels_->linear_int : tape_.kernels_->linear_float)(region.linear, t0,
                                                                                 t1, p0, p1);
        break;
      }
      case Op::Kind::grouped: run_grouped(region, region.group_chunks[chunk]); break;
      case Op::Kind::attention:
      case Op::Kind::latent_attention: {
        AttentionPlan& plan = *tape_.plans_[tape_.ops_[region.first].plan];
        // The longest units, which the plan has first, are begun first from both ends.
        int64_t unit = chunk;
        if (tape_.pool_->threads() > 1)
          unit = 2 * chunk < region.chunks ? 2 * chunk : 2 * (region.chunks - chunk) - 1;
        for (; unit < plan.units(); unit += region.chunks) {
          void* const scratch = tape_.scratch_[worker].get();
          if (region.kind == Op::Kind::attention)
            plan.run(unit, *tape_.kernels_, region.attention, *batch_, scratch);
          else
            plan.run(unit, *tape_.kernels_, region.latent_attention, *batch_, scratch);
        }
        break;
      }
    }
  }

  void finish_times() {
    if (times_ == nullptr) return;
    stamp(regions());
    for (int64_t i = 0; i < regions(); ++i) {
      const Region& region = tape_.regions_[i];
      RegionTime time{"", stamps_[i + 1] - stamps_[i], 0, 0};
      for (int32_t op = region.first; op < region.last; ++op)
        time.name.append(op > region.first ? "+" : "").append(tape_.ops_[op].name);
      if (region.kind == Op::Kind::linear) {
        const PackedMatrix& weight = *region.linear.weight;
        const std::string outputs = std::to_string(weight.outputs);
        time.name.append(" ").append(outputs).append("x").append(std::to_string(weight.inputs));
        time.bytes = static_cast<double>(weight.panels() * weight.panel_stride);
        time.operations = 2.0 * region.count * weight.outputs * weight.inputs;
      } else if (region.kind == Op::Kind::grouped) {
        const PackedMatrix& weight = *tape_.ops_[region.first].weight;
        const std::string outputs = std::to_string(group_of(region).outputs);
        time.name.append(" ").append(outputs).append("x").append(std::to_string(weight.inputs));
        for (const GroupChunk& chunk : region.group_chunks) {
          const double panels = chunk.p1 - chunk.p0;
          time.bytes += panels * weight.panel_stride;
          time.operations += 2.0 * (chunk.t1 - chunk.t0) * panels * kLanes * weight.inputs;
        }
      } else if (region.kind != Op::Kind::rows) {
        const AttentionPlan& plan = *tape_.plans_[tape_.ops_[region.first].plan];
        const auto [bytes, operations] = region.kind == Op::Kind::attention
                                             ? plan.work(region.attention, *batch_)
                                             : plan.work(region.latent_attention, *batch_);
        time.bytes = bytes;
        time.operations = operations;
      }
      times_->push_back(std::move(time));
    }
  }

 private:
  void stamp(int64_t index) {
    if (stamps_.size() <= static_cast<size_t>(index)) stamps_.resize(index + 1);
    stamps_[index] = now_ns();
  }

  void prepare(Region& region, const int64_t (&rows)[kSymbols]) {
    const Op& op = tape_.ops_[region.first];
    const int threads = tape_.pool_->threads();
    region.count = rows[static_cast<int>(op.symbol)];
    region.chunks = 0;
    if (region.count == 0) return;
    switch (region.kind) {
      case Op::Kind::rows: {
        double row_ns = 0;
        for (int32_t i = region.first; i < region.last; ++i) row_ns += tape_.ops_[i].row_ns;
        region.chunks = clamp_chunks(region.count * row_ns, region.count, threads);
        break;
      }
      case Op::Kind::linear: prepare_linear(region, op, threads); break;
      case Op::Kind::grouped: break;  // when it begins: only then is it known which rows there are
      case Op::Kind::attention: {
        region.attention = {op.cache,
                            tape_.buffers_[op.q.buffer].rows(op.q.column),
                            tape_.buffers_[op.write].rows(0),
                            op.heads,
                            op.softmax_scale,
                            op.window,
                            op.softcap,
                            op.slopes,
                            op.sinks};
        region.chunks = std::min(tape_.plans_[op.plan]->units(), Pool::kMaxChunks - 1);
        break;
      }
      case Op::Kind::latent_attention:
        region.latent_attention = {op.latents,
                                   tape_.buffers_[op.q.buffer].rows(op.q.column),
                                   tape_.buffers_[op.rotated.buffer].rows(op.rotated.column),
                                   tape_.buffers_[op.write].rows(0),
                                   op.heads,
                                   op.softmax_scale};
        region.chunks = std::min(tape_.plans_[op.plan]->units(), Pool::kMaxChunks - 1);
        break;
    }
  }

  void prepare_linear(Region& region, const Op& op, int threads) {
    const PackedMatrix& weight = *op.weight;
    const Buffer& x = tape_.buffers_[op.x.buffer];
    LinearArgs& args = region.linear;
    args = {};
    args.weight = &weight;
    if (x.kind == Buffer::Kind::quantized)
      args.xq = {x.data, x.stride, weight.groups()};
    else
      args.x = x.rows(op.x.column);
    args.y = tape_.buffers_[op.write].rows(op.y_column);
    args.bias = op.bias;
    if (op.residual.buffer >= 0)
      args.residual = tape_.buffers_[op.residual.buffer].rows(op.residual.column);

    const double bytes = static_cast<double>(weight.panels() * weight.panel_stride);
    const double operations = 2.0 * region.count * weight.outputs * weight.inputs;
    const double read_ns = bytes / kBytesPerNs, compute_ns = operations / kOperationsPerNs;
    const double ns = std::max({1.0, read_ns, compute_ns});
    const bool is_integer = x.kind == Buffer::Kind::quantized;
    region.row_blocks = ceil_div(region.count * x.stride, kRowBlockBytes);
    // Rows in two halves, the front's and the back's, keep a thread at its own rows. Each half reads
    // the weights, so this is for products that wait little for memory even so.
    if (is_integer && threads > 1 && compute_ns >= 2 * read_ns)
      region.row_blocks = round_up(region.row_blocks, 2);
    region.bundle = is_integer ? 1 : kPanelsTogether;
    const int64_t bundles = ceil_div(weight.panels(), region.bundle);
    const int64_t total = bundles * region.row_blocks;
    const int64_t least = std::max<int64_t>(static_cast<int64_t>(total * kChunkNs / ns), 1);
    // Guided self-scheduling, from both ends: a chunk is half of a thread's share of what is left.
    // The first are long, since each begins with memory that no cache has; the last, in the middle,
    // are short, so that threads end together. 3 to 8 % over chunks of equal size with 8 to 512
    // rows.
    std::vector<int64_t>& starts = region.starts;
    starts.clear();
    const int64_t half = total / 2;
    for (int64_t at = 0; at < half;) {
      starts.push_back(at);
      const int64_t size = std::max(ceil_div(half - at, threads), least);
      at += std::min({size, bundles - at % bundles, half - at});
    }
    const size_t mirrored = starts.size();
    if (2 * half < total) starts.push_back(half);
    starts.push_back(total - half);
    for (size_t i = mirrored; i-- > 0;) starts.push_back(total - starts[i]);
    region.chunks = static_cast<int64_t>(region.starts.size()) - 1;
  }

  // A group's matrix, of the first group.
  PackedMatrix group_of(const Region& region) const {
    const Op& op = tape_.ops_[region.first];
    PackedMatrix part = *op.weight;
    part.outputs /= op.groups;
    return part;
  }

  // Pieces that take about equally long. A group's panels are read once for each block of its rows.
  void prepare_grouped(Region& region, const Op& op) {
    const PackedMatrix part = group_of(region);
    const int64_t panels = part.panels(), row_bytes = tape_.buffers_[op.x.buffer].part_stride();
    const auto rows_of = [&](int64_t group) {
      return op.is_routed ? tape_.expert_plan_.rows(group) : region.count;
    };
    const auto panel_ns = [&](int64_t rows) {
      const double read_ns = static_cast<double>(part.panel_stride) / kBytesPerNs;
      return std::max(read_ns, 2.0 * rows * kLanes * part.inputs / kOperationsPerNs);
    };
    double total = 0;
    for (int64_t g = 0; g < op.groups; ++g)
      if (rows_of(g) > 0) total += panels * panel_ns(rows_of(g));
    const double wanted = std::max(total / (tape_.pool_->threads() * kChunksPerThread), kChunkNs);

    region.group_chunks.clear();
    for (int64_t g = 0; g < op.groups; ++g) {
      const int64_t rows = rows_of(g), blocks = ceil_div(rows * row_bytes, kRowBlockBytes);
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t t0 = rows * b / blocks, t1 = rows * (b + 1) / blocks;
        const auto pieces = std::clamp<int64_t>(
            static_cast<int64_t>(panels * panel_ns(t1 - t0) / wanted), 1, panels);
        for (int64_t i = 0; i < pieces; ++i)
          region.group_chunks.push_back({static_cast<int32_t>(g), static_cast<int32_t>(t0),
                                         static_cast<int32_t>(t1),
                                         static_cast<int32_t>(panels * i / pieces),
                                         static_cast<int32_t>(panels * (i + 1) / pieces)});
      }
    }
    region.chunks = static_cast<int64_t>(region.group_chunks.size());
  }

  void run_grouped(const Region& region, const GroupChunk& chunk) const {
    const Op& op = tape_.ops_[region.first];
    PackedMatrix part = group_of(region);
    part.data += chunk.group * part.panels() * part.panel_stride;
    const Buffer &x = tape_.buffers_[op.x.buffer], &y = tape_.buffers_[op.write];
    LinearArgs args{};
    args.weight = &part;
    args.bias = op.bias == nullptr ? nullptr : op.bias + chunk.group * part.outputs;
    const bool is_quantized = x.kind == Buffer::Kind::quantized;
    if (op.is_routed) {
      const int64_t first = tape_.expert_plan_.first_row(chunk.group);
      if (is_quantized)
        args.xq = {x.data + first * x.part_stride(), x.part_stride(), part.groups()};
      else
        args.x = {x.rows(0).row(first), x.rows(0).stride};
      args.y = {y.rows(0).row(first), y.rows(0).stride};
    } else {
      if (is_quantized)
        args.xq = {x.data + chunk.group * x.part_stride(), x.stride, part.groups()};
      else
        args.x = x.rows(op.x.column + chunk.group * part.inputs);
      args.y = y.rows(chunk.group * part.outputs);
    }
    (is_quantized ? tape_.kernels_->linear_int : tape_.kernels_->linear_float)(
        args, chunk.t0, chunk.t1, chunk.p0, chunk.p1);
  }

  Tape& tape_;
  const Batch* batch_;
  std::vector<RegionTime>* times_;
  std::vector<double> stamps_;
};

std::vector<OutputRows> Tape::run(const int64_t (&rows)[kSymbols],
                                  const std::vector<InputRows>& inputs, const Batch* batch,
                                  std::vector<RegionTime>* times) {
  grow(rows);
  for (Buffer& buffer : buffers_) {
    if (buffer.input >= 0) {
      const InputRows& given = inputs[buffer.input];
      buffer.data = static_cast<uint8_t*>(const_cast<void*>(given.data));
      buffer.stride = given.stride;
    } else if (buffer.slot >= 0) {
      buffer.data = static_cast<uint8_t*>(slots_[buffer.slot].memory.get());
    }
  }
  for (const auto& plan : plans_) plan->build(*batch, pool_->threads());
  Replay replay(*this, rows, batch, times);
  pool_->run(replay);
  replay.finish_times();

  std::vector<OutputRows> outputs;
  for (const auto& [ref, columns] : outputs_) {
    const Buffer& buffer = buffers_[ref.buffer];
    const Rows at = buffer.rows(ref.column);
    std::shared_ptr<void> owner = buffer.slot >= 0 ? slots_[buffer.slot].memory : nullptr;
    outputs.push_back(
        {at.data, rows[static_cast<int>(buffer.symbol)], columns, at.stride, std::move(owner)});
  }
  return outputs;
}

}  // namespace octavo
