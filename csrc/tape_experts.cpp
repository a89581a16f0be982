// Recording mixtures of experts, and products by head.
#include <cstring>
#include <stdexcept>

#include "tape_state.h"

namespace octavo {

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

}  // namespace octavo
