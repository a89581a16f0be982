// The extension module octavo.ops.native._native: what Python sees of the backend.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <iterator>
#include <map>

#include "bindings.h"
#include "formats.h"
#include "isa.h"
#include "kernels.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu, nb::ro>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu, nb::ro>;

// A table with each op's kernels from the instruction set that was chosen for it.
Kernels kernels_of(const std::map<std::string, std::string>& isa_by_op) {
  using Take = void (*)(Kernels&, const Kernels&);
  static const std::map<std::string, Take> parts = {
      {"embedding", [](Kernels& k, const Kernels& from) { k.embedding = from.embedding; }},
      {"linear",
       [](Kernels& k, const Kernels& from) {
         k.linear_float = from.linear_float;
         k.linear_int = from.linear_int;
         k.quantize = from.quantize;
         k.take_columns = from.take_columns;
       }},
      {"rms_norm", [](Kernels& k, const Kernels& from) { k.rms_norm = from.rms_norm; }},
      {"layer_norm", [](Kernels& k, const Kernels& from) { k.layer_norm = from.layer_norm; }},
      {"rotary", [](Kernels& k, const Kernels& from) { k.rotary = from.rotary; }},
      {"silu", [](Kernels& k, const Kernels& from) { k.silu = from.silu; }},
      {"gelu", [](Kernels& k, const Kernels& from) { k.gelu = from.gelu; }},
      {"gelu_tanh", [](Kernels& k, const Kernels& from) { k.gelu_tanh = from.gelu_tanh; }},
      {"relu", [](Kernels& k, const Kernels& from) { k.relu = from.relu; }},
      {"silu_mul", [](Kernels& k, const Kernels& from) { k.silu_mul = from.silu_mul; }},
      {"gelu_tanh_mul",
       [](Kernels& k, const Kernels& from) { k.gelu_tanh_mul = from.gelu_tanh_mul; }},
      {"clamped_silu_mul",
       [](Kernels& k, const Kernels& from) { k.clamped_silu_mul = from.clamped_silu_mul; }},
      {"sigmoid_mul", [](Kernels& k, const Kernels& from) { k.sigmoid_mul = from.sigmoid_mul; }},
      {"route", [](Kernels& k, const Kernels& from) { k.route = from.route; }},
      {"experts", [](Kernels& k, const Kernels& from) { k.add_rows = from.add_rows; }},
      {"write_latent", [](Kernels& k, const Kernels& from) { k.write_latent = from.write_latent; }},
      {"latent_attention",
       [](Kernels& k, const Kernels& from) {
         k.attend_latent = from.attend_latent;
         k.merge_latent = from.merge_latent;
       }},
      {"add", [](Kernels& k, const Kernels& from) { k.add = from.add; }},
      {"scale", [](Kernels& k, const Kernels& from) { k.scale = from.scale; }},
      {"clamp", [](Kernels& k, const Kernels& from) { k.clamp = from.clamp; }},
      {"softcap", [](Kernels& k, const Kernels& from) { k.softcap = from.softcap; }},
      {"write_kv", [](Kernels& k, const Kernels& from) { k.write_kv = from.write_kv; }},
      {"paged_attention",
       [](Kernels& k, const Kernels& from) {
         k.attend = from.attend;
         k.attend_merge = from.attend_merge;
       }},
      {"sample",
       [](Kernels& k, const Kernels& from) {
         k.argmax = from.argmax;
         k.sample = from.sample;
       }},
      {"probabilities",
       [](Kernels& k, const Kernels& from) { k.probabilities = from.probabilities; }},
      {"log_probabilities",
       [](Kernels& k, const Kernels& from) { k.log_probabilities = from.log_probabilities; }},
      {"non_finite_rows",
       [](Kernels& k, const Kernels& from) { k.row_is_finite = from.row_is_finite; }},
  };
  Kernels table = *kernels_named("portable");
  for (const auto& [op, isa] : isa_by_op) {
    const Kernels* from = kernels_named(isa.c_str());
    if (from == nullptr) throw nb::value_error((isa + ": " + isa_problem(isa)).c_str());
    const auto part = parts.find(op);
    if (part != parts.end()) part->second(table, *from);
  }
  return table;
}

std::shared_ptr<PackedMatrix> make_matrix(const FormatNumbers& format, int64_t outputs,
                                          int64_t inputs, Bytes data, int64_t panel_stride,
                                          std::optional<Ints> order) {
  auto matrix = std::make_shared<PackedMatrix>();
  *matrix = {format_of(format), outputs,      inputs,
             data.data(),       panel_stride, order ? order->data() : nullptr};
  if (static_cast<int64_t>(data.shape(0)) < matrix->panels() * panel_stride ||
      panel_stride < panel_bytes(matrix->format, inputs))
    throw nb::value_error("the data is too short for a matrix of this shape and format");
  if (!order) return matrix;
  if (static_cast<int64_t>(order->shape(0)) != inputs)
    throw nb::value_error("the order is not one of the matrix's inputs");
  for (int64_t k = 0; k < inputs; ++k)
    if (order->data()[k] < 0 || order->data()[k] >= inputs)
      throw nb::value_error("the order names an input that the matrix doesn't have");
  return matrix;
}

}  // namespace

NB_MODULE(_native, m) {
  m.def(
      "isas",
      [] {
        std::vector<std::tuple<std::string, std::string, std::string>> isas;
        for (const Isa& isa : built_isas()) isas.emplace_back(isa.name, isa.problem, isa.tested);
        return isas;
      },
      "(name, why it can't run here or \"\", where it was tested or \"\") of each instruction set "
      "that was built.");

  nb::class_<Pool>(m, "Pool", "Threads that run tapes, the calling one included.")
      .def(nb::init<int>(), "threads"_a)
      .def_prop_ro("threads", &Pool::threads);

  nb::class_<Kernels>(m, "Kernels", "The kernels that tapes run, by op and instruction set.")
      .def(nb::new_([](const std::map<std::string, std::string>& isa_by_op) {
             return std::make_shared<Kernels>(kernels_of(isa_by_op));
           }),
           "isa_by_op"_a);

  nb::class_<PackedMatrix>(m, "PackedMatrix", "A matrix in panels on somebody's memory.")
      .def(nb::new_(&make_matrix), "format"_a, "outputs"_a, "inputs"_a, "data"_a, "panel_stride"_a,
           "order"_a.none() = nb::none(), nb::keep_alive<0, 5>(), nb::keep_alive<0, 7>());
  m.def("panel_bytes", [](const FormatNumbers& format, int64_t inputs) {
    return panel_bytes(format_of(format), inputs);
  });
  m.def(
      "weight_formats",
      [] {
        std::vector<FormatNumbers> formats;
        const auto add = [&](const WeightFormat& f) {
          formats.emplace_back(int(f.values), int(f.scales), int(f.offset), f.span);
        };
        std::for_each(std::begin(kIntegerFormats), std::end(kIntegerFormats), add);
        std::for_each(std::begin(kFloatFormats), std::end(kFloatFormats), add);
        return formats;
      },
      "All formats of matrices that kernels have.");
  m.def(
      "tables",
      [] {
        std::map<std::string, std::vector<float>> tables{
            {"nf4", {std::begin(kNF4), std::end(kNF4)}},
            {"fp4", {std::begin(kFP4), std::end(kFP4)}}};
        for (const int8_t twice : kE2M1) tables["e2m1"].push_back(0.5f * float(twice));
        return tables;
      },
      "The values of sixteen codes, by the name of a format.");

  bind_caches(m);
  bind_groups(m);
  bind_limits(m);
  bind_pack(m);
  bind_sampling(m);
  bind_tape(m);
}

}  // namespace octavo
