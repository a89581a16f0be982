// Mixtures of experts, and products by head.
#include <algorithm>

#include "results.h"

namespace octavo {
namespace {

struct Routing {
  const char* name;
  int64_t experts;
  RouterArgs router;
  bool has_bias;
};
constexpr Routing kRoutings[] = {
    {"softmax", 10, {3, true, true, 1.0f, 1, 1, 1}, false},
    {"shares-of-all", 33, {4, true, false, 2.5f, 1, 1, 1}, false},
    {"sigmoid-groups-bias", 24, {5, false, true, 1.7f, 4, 2, 2}, true},
    {"one", 16, {1, false, false, 1.0f, 1, 1, 1}, false},
};

void add_routers(const Machine& machine, const Results& results) {
  constexpr int64_t kRows = 9;
  for (const Routing& routing : kRoutings) {
    const int64_t experts = routing.experts;
    std::vector<float> logits = random_rows(kRows, experts, 20);
    // Rows of equal logits, of one infinite one, and of one that is no number.
    std::fill_n(logits.begin() + experts, experts, 0.5f);
    logits[static_cast<size_t>(2 * experts + 3)] = kInfinity;
    logits[static_cast<size_t>(3 * experts)] = kNaN;
    logits[static_cast<size_t>(4 * experts + 5)] = -kInfinity;
    const std::vector<float> bias = random_rows(1, experts, 21);
    add_row_op(machine, results, name_of("route", routing.name), logits, experts,
               2 * routing.router.active, {1, kRows}, [&](Tape& tape, Ref in) {
                 return tape.route(in, experts, routing.has_bias ? bias.data() : nullptr,
                                   routing.router);
               });
  }
}

void add_mixtures(const Machine& machine, const Results& results) {
  constexpr int64_t kRows = 40, kExperts = 6, kSize = 80, kInner = 40;
  constexpr std::pair<const char*, Gate> kGates[] = {{"silu", Gate::silu_mul},
                                                     {"gelu_tanh", Gate::gelu_tanh_mul},
                                                     {"clamped_silu", Gate::clamped_silu_mul}};
  const std::vector<float> x = random_rows(kRows, kSize, 22);
  const std::vector<float> pairs_bias = random_rows(1, kExperts * 2 * kInner, 23);
  const std::vector<float> outputs_bias = random_rows(1, kExperts * kSize, 24);
  const auto router = random_matrix({Values::f32}, kExperts, kSize);
  for (const WeightFormat& format : all_formats()) {
    const auto gate_up = random_matrix(format, kExperts * 2 * kInner, kSize);
    const auto down = random_matrix(format, kExperts * kSize, kInner);
    for (const auto& [gate_name, gate] : kGates)
      for (const bool weighs_inputs : {false, true}) {
        const bool has_bias = gate == Gate::clamped_silu_mul;
        const ExpertArgs args{kSize,
                              2,
                              gate,
                              has_bias ? pairs_bias.data() : nullptr,
                              has_bias ? outputs_bias.data() : nullptr,
                              weighs_inputs};
        const std::string name = name_of("experts", name_of_format(format), gate_name,
                                         weighs_inputs ? "weighed-inputs" : "weighed-outputs");
        add_row_op(machine, results, name, x, kSize, kSize, {1, 5, kRows}, [&](Tape& tape, Ref in) {
          const Ref logits = tape.linear({router}, in, nullptr);
          const Ref routing = tape.route(logits, kExperts, nullptr, {2, true, true, 1.0f, 1, 1, 1});
          return tape.experts(in, routing, gate_up, down, args);
        });
      }
  }
}

void add_head_products(const Machine& machine, const Results& results) {
  constexpr int64_t kRows = 17, kHeads = 3;
  for (const WeightFormat& format : all_formats())
    for (const auto& [inputs, outputs] : {std::pair<int64_t, int64_t>{40, 48}, {96, 16}}) {
      const auto matrix = random_matrix(format, kHeads * outputs, inputs);
      add_row_op(machine, results, name_of("head_linear", name_of_format(format), inputs),
                 random_rows(kRows, kHeads * inputs, 25), kHeads * inputs, kHeads * outputs,
                 {1, kRows}, [&, matrix = matrix](Tape& tape, Ref in) {
                   return tape.head_linear(matrix, in, kHeads);
                 });
    }
}

}  // namespace

void add_experts(const Machine& machine, const Results& results) {
  add_routers(machine, results);
  add_mixtures(machine, results);
  add_head_products(machine, results);
}

}  // namespace octavo
