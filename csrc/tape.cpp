// A tape's recording. Mixtures of experts are in tape_experts.cpp, what ranks do together in
// tape_exchange.cpp, `finish` in tape_plan.cpp, `run` in tape_replay.cpp.
#include "tape.h"

#include <algorithm>
#include <cstring>

#include "tape_state.h"

namespace octavo {
namespace {

// An odd number of cache lines, so that the rows of a tile fall into different sets of the
// first-level cache (K = 2048, 14 rows: 150 GFLOP/s unpadded, 190 to 200 so).
int64_t spread_stride(int64_t bytes) {
  const int64_t lines = ceil_div(bytes, kAlign);
  return (lines % 2 == 0 ? lines + 1 : lines) * kAlign;
}

}  // namespace

Tape::Tape(std::shared_ptr<Pool> pool, std::shared_ptr<const Kernels> kernels)
    : pool_(std::move(pool)), kernels_(std::move(kernels)) {}
Tape::~Tape() = default;

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

int32_t Tape::split_buffer(bool is_quantized, Symbol symbol, int64_t columns, int64_t parts) {
  const int64_t bytes =
      is_quantized ? quantized_row_bytes(columns) : columns * int64_t{sizeof(float)};
  Buffer buffer{is_quantized ? Buffer::Kind::quantized : Buffer::Kind::floats, symbol, columns,
                spread_stride(bytes) * parts};
  buffer.parts = parts;
  buffers_.push_back(buffer);
  return static_cast<int32_t>(buffers_.size()) - 1;
}

Tape::Op& Tape::append(const char* name, Symbol symbol, std::vector<int32_t> reads, int32_t write) {
  ops_.push_back({Op::Kind::rows, name, symbol, std::move(reads), write});
  return ops_.back();
}

Ref Tape::embedding(std::shared_ptr<const PackedMatrix> table, Ref ids, int64_t first) {
  const Symbol symbol = buffers_[ids.buffer].symbol;
  const Ref y = new_buffer(symbol, table->inputs);
  Op& op = append("embedding", symbol, {ids.buffer}, y.buffer);
  op.row_ns = 2.0 * table->inputs;
  op.compute = [this, table, ids, y, first](const Batch*, int64_t t0, int64_t t1) {
    const Rows target = buffers_[y.buffer].rows(0);
    for (int64_t t = t0; t < t1; ++t) {
      const int64_t row = buffers_[ids.buffer].ints()[t] - first;
      if (0 <= row && row < table->outputs)
        kernels_->embedding(*table, &row, {target.row(t), 0}, 0, 1);
      else
        std::memset(target.row(t), 0, table->inputs * sizeof(float));
    }
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

// A row of x holds gates, then what they multiply.
Ref Tape::gated(const char* name, double value_ns, Ref x, int64_t size, RowKernel kernel) {
  const Ref y = map(name, value_ns, x, size, kernel);
  ops_.back().may_overwrite = false;  // x is wider
  return y;
}

Ref Tape::silu_mul(Ref x, int64_t size) {
  return gated("silu_mul", 0.7, x, size, kernels_->silu_mul);
}

Ref Tape::gelu_tanh_mul(Ref x, int64_t size) {
  return gated("gelu_tanh_mul", 0.9, x, size, kernels_->gelu_tanh_mul);
}

Ref Tape::clamped_silu_mul(Ref x, int64_t size) {
  return gated("clamped_silu_mul", 0.8, x, size, kernels_->clamped_silu_mul);
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

Ref Tape::attention(Ref q, const KVCache& cache, int64_t heads, float softmax_scale,
                    const Reach& reach, float softcap, const float* slopes, const float* sinks) {
  const Symbol symbol = buffers_[q.buffer].symbol;
  const Ref y = new_buffer(symbol, heads * cache.head_dim);
  Op& op = append("attention", symbol, {q.buffer}, y.buffer);
  op.kind = Op::Kind::attention;
  op.cache = cache;
  op.q = q;
  op.heads = heads;
  op.softmax_scale = softmax_scale;
  op.reach = reach;
  op.softcap = softcap;
  op.slopes = slopes;
  op.sinks = sinks;
  op.plan = plan_of({cache.block_size, cache.heads, cache.head_dim, heads, reach});
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
  op.plan = plan_of({cache.block_size, 1, cache.rank, heads, {}});
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

}  // namespace octavo
