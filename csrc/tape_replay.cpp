// Running a tape: this step's sizes, the chunks that threads take, and what they do with them.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <string>

#include "tape_state.h"

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

int64_t clamp_chunks(double ns, int64_t limit, int threads) {
  const int64_t most = std::min<int64_t>(limit, threads * kChunksPerThread);
  return std::clamp<int64_t>(static_cast<int64_t>(ns / kChunkNs), 1, std::max<int64_t>(most, 1));
}

}  // namespace

class Tape::Replay final : public Program {
 public:
  Replay(Tape& tape, const int64_t (&rows)[kSymbols], const Batch* batch,
         std::vector<RegionTime>* times)
      : tape_(tape), batch_(batch), times_(times) {
    for (Region& region : tape.regions_) {
      prepare(region, rows);
      const int32_t index = static_cast<int32_t>(&region - tape.regions_.data());
      region.step = static_cast<int64_t>(steps_.size());
      if (region.kind != Op::Kind::exchange) steps_.push_back({index, 0});
      for (int32_t half = 0; half < 2 * region.rounds; ++half) steps_.push_back({index, half});
    }
  }

  // Begins the next part of the steps, as many as a pool takes; false when all are done.
  bool goes_on() {
    begin_ = end_;
    end_ = std::min(begin_ + Pool::kMaxRegions - 1, static_cast<int64_t>(steps_.size()));
    return begin_ < end_;
  }

  int64_t regions() const override { return end_ - begin_; }

  int64_t chunks(int64_t index) override {
    index += begin_;
    if (times_ != nullptr) stamp(index);
    end_exchange();
    if (failure_) return 0;
    Region& region = tape_.regions_[steps_[index].region];
    if (region.count == 0) return 0;
    const Op& op = tape_.ops_[region.first];
    if (region.kind == Op::Kind::exchange) {
      begin_exchange(op.exchange->group());
      return prepare_half(region, op, steps_[index].half);
    }
    if (op.routing >= 0) {
      const Buffer& choices = tape_.buffers_[op.routing];
      const int64_t active = choices.columns / 2;
      const Op& products = tape_.ops_[tape_.regions_[steps_[index].region + 1].first];
      tape_.expert_plan_.build(choices.rows(0), region.count, active, products.groups);
    }
    if (region.kind == Op::Kind::grouped) prepare_grouped(region, op);
    return region.chunks;
  }

  void run(int64_t index, int64_t chunk, int worker) override {
    index += begin_;
    const Region& region = tape_.regions_[steps_[index].region];
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
      case Op::Kind::exchange: run_half(region, steps_[index].half, chunk); break;
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

  // When all is done. Throws what made it stop before.
  void finish() {
    end_exchange();
    if (failure_) std::rethrow_exception(failure_);
    if (times_ == nullptr) return;
    stamp(end_);
    const size_t count = tape_.regions_.size();
    for (size_t i = 0; i < count; ++i) {
      const Region& region = tape_.regions_[i];
      const int64_t end = i + 1 < count ? tape_.regions_[i + 1].step : end_;
      RegionTime time{"", stamps_[end] - stamps_[region.step], 0, 0};
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
      } else if (region.kind == Op::Kind::attention || region.kind == Op::Kind::latent_attention) {
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
    region.rounds = 0;
    if (region.count == 0) return;
    switch (region.kind) {
      case Op::Kind::rows: {
        double row_ns = 0;
        for (int32_t i = region.first; i < region.last; ++i) row_ns += tape_.ops_[i].row_ns;
        region.chunks = clamp_chunks(region.count * row_ns, region.count, threads);
        break;
      }
      case Op::Kind::linear: prepare_linear(region, op, threads); break;
      case Op::Kind::exchange: region.rounds = op.exchange->rounds(region.count); break;
      case Op::Kind::grouped: break;  // when it begins: only then is it known which rows there are
      case Op::Kind::attention: {
        region.attention = {op.cache,
                            tape_.buffers_[op.q.buffer].rows(op.q.column),
                            tape_.buffers_[op.write].rows(0),
                            op.heads,
                            op.softmax_scale,
                            op.reach,
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

  // The time of a half counts until whatever follows it begins.
  void begin_exchange(Collective& group) {
    group_ = &group;
    exchange_begin_ns_ = now_ns();
  }

  void end_exchange() {
    if (group_ == nullptr) return;
    group_->spend(1e-9 * (now_ns() - exchange_begin_ns_));
    group_ = nullptr;
  }

  // Of an exchange: rounds, of two halves each. Before the second the ranks wait for each other;
  // the pool's other threads sleep meanwhile if it takes long.
  int64_t prepare_half(Region& region, const Op& op, int32_t half) {
    const Exchange& exchange = *op.exchange;
    const bool receives = half % 2 == 1;
    const int64_t rows =
        exchange.begin(half / 2 + 1, region.count) - exchange.begin(half / 2, region.count);
    try {
      if (receives) exchange.exchange(rows);
    } catch (...) {
      failure_ = std::current_exception();
      return 0;
    }
    region.pieces = rows * (receives ? exchange.received_pieces() : exchange.sent_pieces());
    if (region.pieces == 0) return 0;
    const double ns = static_cast<double>(region.pieces) * exchange.piece_ns(receives);
    return region.chunks = clamp_chunks(ns, region.pieces, tape_.pool_->threads());
  }

  void run_half(const Region& region, int32_t half, int64_t chunk) const {
    const Op& op = tape_.ops_[region.first];
    const int64_t first = op.exchange->begin(half / 2, region.count);
    const int64_t p0 = region.pieces * chunk / region.chunks;
    const int64_t p1 = region.pieces * (chunk + 1) / region.chunks;
    const Rows x = tape_.buffers_[op.x.buffer].rows(op.x.column);
    if (half % 2 == 0) {
      op.exchange->send(x, first, p0, p1);
      return;
    }
    Rows residual{nullptr, 0};
    if (op.residual.buffer >= 0)
      residual = tape_.buffers_[op.residual.buffer].rows(op.residual.column);
    const Rows y = tape_.buffers_[op.write].rows(0);
    op.exchange->receive(*tape_.kernels_, x, y, residual, first, p0, p1);
  }

  // A group's matrix, of the first group.
  PackedMatrix group_of(const Region& region) const {
    const Op& op = tape_.ops_[region.first];
    PackedMatrix part = *op.weight;
    part.outputs /= op.groups;
    return part;
  }

  // Pieces that take about equally long. A group's panels are read once for each block of its rows.
  // Rounded up: of one token's 8 experts 2 threads take 16 pieces, not 8, the last of which would
  // keep one waiting for an eighth of the time.
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
        const double ns = panels * panel_ns(t1 - t0);
        const auto pieces =
            std::clamp<int64_t>(static_cast<int64_t>(std::ceil(ns / wanted)), 1, panels);
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
  // What the pool takes for regions: those of the tape, but of an exchange its halves.
  struct Step {
    int32_t region, half;
  };
  std::vector<Step> steps_;
  int64_t begin_ = 0, end_ = 0;  // of those that the pool has now
  Collective* group_ = nullptr;  // whose exchange has begun
  double exchange_begin_ns_ = 0;
  std::exception_ptr failure_;  // nothing of the tape runs after it
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
  while (replay.goes_on()) pool_->run(replay);
  replay.finish();

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
