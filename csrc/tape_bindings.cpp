// Tapes, as Python sees them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "kv_memory.h"
#include "latent_memory.h"
#include "tape.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu, nb::ro>;
using FloatRows = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu, nb::ro>;
using Longs = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu, nb::ro>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu, nb::ro>;
using IntRows = nb::ndarray<const int32_t, nb::ndim<2>, nb::device::cpu, nb::ro>;
using PyRef = std::tuple<int32_t, int64_t>;   // buffer, column

Ref ref_of(const PyRef& ref) { return {std::get<0>(ref), std::get<1>(ref)}; }
PyRef py_ref(Ref ref) { return {ref.buffer, ref.column}; }

// A run's arrays as Python gives them: float rows may be strided, all others are contiguous.
std::vector<InputRows> inputs_of(const nb::list& arrays) {
  std::vector<InputRows> inputs;
  for (const nb::handle array : arrays) {
    Longs longs;
    FloatRows floats;
    // Without conversion: what it makes is gone when this loop goes on, and only a pointer is kept.
    if (nb::try_cast(array, longs, false)) {
      inputs.push_back({longs.data(), sizeof(int64_t)});
    } else if (nb::try_cast(array, floats, false) &&
               (floats.shape(1) == 0 || floats.stride(1) == 1)) {
      inputs.push_back({floats.data(), floats.stride(0) * int64_t{sizeof(float)}});
    } else {
      throw nb::type_error(
          "an input is neither (T, D) float32 with dense rows nor dense (T,) int64");
    }
  }
  return inputs;
}

// Told later, so that telling does not count as a part of the run (for 300 regions, 0.1 ms).
struct RegionTimes {
  std::vector<RegionTime> regions;

  nb::list tell() const {
    nb::list told;
    for (const RegionTime& time : regions)
      told.append(nb::make_tuple(time.name, time.nanoseconds, time.bytes, time.operations));
    return told;
  }
};

nb::object run_tape(
    Tape& tape, int64_t tokens, int64_t rows, const nb::list& arrays,
    const std::optional<std::tuple<Longs, Longs, Longs, Ints, Ints, IntRows, std::optional<Ints>>>&
        given,
    bool timed) {
  const std::vector<InputRows> inputs = inputs_of(arrays);
  Batch batch{};
  if (given) {
    const auto& [ids, positions, slots, starts, lens, tables, parents] = *given;
    if (tables.shape(1) > 1 && tables.stride(1) != 1)
      throw nb::type_error("block tables must have dense rows");
    batch = {static_cast<int64_t>(ids.shape(0)),
             static_cast<int64_t>(lens.shape(0)),
             ids.data(),
             positions.data(),
             slots.data(),
             starts.data(),
             lens.data(),
             tables.data(),
             tables.stride(0),
             parents ? parents->data() : nullptr};
  }
  std::vector<OutputRows> outputs;
  std::vector<RegionTime> times;
  {
    const nb::gil_scoped_release release;
    outputs = tape.run({tokens, rows}, inputs, given ? &batch : nullptr, timed ? &times : nullptr);
  }
  nb::list result;
  for (OutputRows& output : outputs) {
    auto* owner = new std::shared_ptr<void>(std::move(output.owner));
    const nb::capsule capsule(
        owner, [](void* p) noexcept { delete static_cast<std::shared_ptr<void>*>(p); });
    const size_t shape[2] = {static_cast<size_t>(output.rows), static_cast<size_t>(output.columns)};
    const int64_t strides[2] = {output.stride, 1};
    result.append(
        nb::ndarray<nb::numpy, float, nb::ndim<2>>(output.data, 2, shape, capsule, strides).cast());
  }
  if (!timed) return result;
  return nb::make_tuple(result, RegionTimes{std::move(times)});
}

}  // namespace

void bind_tape(nb::module_& m) {
  nb::class_<RegionTimes>(m, "RegionTimes", "What the regions of a timed run took.")
      .def("tell", &RegionTimes::tell, "Name, nanoseconds, bytes and operations of each.");
  nb::class_<Tape>(m, "Tape", "Recorded ops; see csrc/tape.h. Arrays given to it must outlive it.")
      .def(
          "__init__",
          [](Tape* self, std::shared_ptr<Pool> pool, std::shared_ptr<Kernels> kernels) {
            new (self) Tape(std::move(pool), std::move(kernels));
          },
          "pool"_a, "kernels"_a)
      .def("input",
           [](Tape& t, int symbol, int64_t columns) {
             return py_ref(t.input(static_cast<Symbol>(symbol), columns));
           })
      .def("int_input",
           [](Tape& t, int symbol) { return py_ref(t.int_input(static_cast<Symbol>(symbol))); })
      .def("embedding",
           [](Tape& t, std::shared_ptr<PackedMatrix> table, PyRef ids, int64_t first) {
             return py_ref(t.embedding(std::move(table), ref_of(ids), first));
           })
      .def(
          "linear",
          [](Tape& t, const std::vector<std::shared_ptr<PackedMatrix>>& weights, PyRef x,
             std::optional<Floats> bias) {
            const float* b = bias ? bias->data() : nullptr;
            return py_ref(t.linear({weights.begin(), weights.end()}, ref_of(x), b));
          },
          "weights"_a, "x"_a, "bias"_a.none())
      .def(
          "rms_norm",
          [](Tape& t, PyRef x, int64_t heads, int64_t size, std::optional<Floats> weight,
             float eps) {
            const float* w = weight ? weight->data() : nullptr;
            return py_ref(t.rms_norm(ref_of(x), heads, size, w, eps));
          },
          "x"_a, "heads"_a, "size"_a, "weight"_a.none(), "eps"_a)
      .def("rotary",
           [](Tape& t, PyRef x, int64_t heads, int64_t size, FloatRows table, PyRef positions) {
             const int64_t rotated = static_cast<int64_t>(table.shape(1));
             if (table.stride(0) != rotated || table.stride(1) != 1)
               throw nb::type_error("a rotary table must be contiguous");
             if (rotated > size) throw nb::value_error("a rotary table is wider than the heads");
             return py_ref(
                 t.rotary(ref_of(x), heads, size, rotated, table.data(), ref_of(positions)));
           })
      .def(
          "layer_norm",
          [](Tape& t, PyRef x, int64_t heads, int64_t size, std::optional<Floats> weight,
             std::optional<Floats> bias, float eps) {
            const auto pointer = [&](const std::optional<Floats>& values) -> const float* {
              if (!values) return nullptr;
              if (!weight || values->shape(0) != weight->shape(0))
                throw nb::value_error("a bias needs a weight of its size");
              return values->data();
            };
            const float* w = pointer(weight);
            const float* b = pointer(bias);
            const bool is_by_head = weight && static_cast<int64_t>(weight->shape(0)) != size;
            if (is_by_head && static_cast<int64_t>(weight->shape(0)) != heads * size)
              throw nb::value_error("a weight is for one head, or for each");
            return py_ref(t.layer_norm(ref_of(x), heads, size, w, b, is_by_head ? size : 0, eps));
          },
          "x"_a, "heads"_a, "size"_a, "weight"_a.none(), "bias"_a.none(), "eps"_a)
      .def("silu", [](Tape& t, PyRef x, int64_t size) { return py_ref(t.silu(ref_of(x), size)); })
      .def("gelu", [](Tape& t, PyRef x, int64_t size) { return py_ref(t.gelu(ref_of(x), size)); })
      .def("gelu_tanh",
           [](Tape& t, PyRef x, int64_t size) { return py_ref(t.gelu_tanh(ref_of(x), size)); })
      .def("relu", [](Tape& t, PyRef x, int64_t size) { return py_ref(t.relu(ref_of(x), size)); })
      .def("silu_mul",
           [](Tape& t, PyRef x, int64_t size) { return py_ref(t.silu_mul(ref_of(x), size)); })
      .def("gelu_tanh_mul",
           [](Tape& t, PyRef x, int64_t size) { return py_ref(t.gelu_tanh_mul(ref_of(x), size)); })
      .def("clamped_silu_mul",
           [](Tape& t, PyRef x, int64_t size) {
             return py_ref(t.clamped_silu_mul(ref_of(x), size));
           })
      .def("sigmoid_mul",
           [](Tape& t, PyRef x, PyRef gates, int64_t size) {
             return py_ref(t.sigmoid_mul(ref_of(x), ref_of(gates), size));
           })
      .def("write_latent",
           [](Tape& t, PyRef latents, PyRef rotated, const LatentMemory& cache) {
             t.write_latent(ref_of(latents), ref_of(rotated), cache.cache());
           })
      .def("latent_attention",
           [](Tape& t, PyRef q, PyRef rotated, const LatentMemory& cache, int64_t heads,
              float softmax_scale) {
             return py_ref(t.latent_attention(ref_of(q), ref_of(rotated), cache.cache(), heads,
                                              softmax_scale));
           })
      .def(
          "route",
          [](Tape& t, PyRef logits, int64_t size, std::optional<Floats> bias, int64_t active,
             bool is_softmax, bool renormalizes, float factor, int64_t groups, int64_t kept_groups,
             int64_t group_votes) {
            const RouterArgs router{active, is_softmax,  renormalizes, factor,
                                    groups, kept_groups, group_votes};
            return py_ref(t.route(ref_of(logits), size, bias ? bias->data() : nullptr, router));
          },
          "logits"_a, "size"_a, "bias"_a.none(), "active"_a, "is_softmax"_a, "renormalizes"_a,
          "factor"_a, "groups"_a, "kept_groups"_a, "group_votes"_a)
      .def(
          "experts",
          [](Tape& t, PyRef x, PyRef routing, std::shared_ptr<PackedMatrix> gate_up,
             std::shared_ptr<PackedMatrix> down, int64_t size, int64_t active,
             const std::string& gate, std::optional<Floats> gate_up_bias,
             std::optional<Floats> down_bias, bool weighs_inputs) {
            const ExpertArgs args{size,
                                  active,
                                  gate == "silu_mul"        ? Gate::silu_mul
                                  : gate == "gelu_tanh_mul" ? Gate::gelu_tanh_mul
                                                            : Gate::clamped_silu_mul,
                                  gate_up_bias ? gate_up_bias->data() : nullptr,
                                  down_bias ? down_bias->data() : nullptr,
                                  weighs_inputs};
            return py_ref(
                t.experts(ref_of(x), ref_of(routing), std::move(gate_up), std::move(down), args));
          },
          "x"_a, "routing"_a, "gate_up"_a, "down"_a, "size"_a, "active"_a, "gate"_a,
          "gate_up_bias"_a.none(), "down_bias"_a.none(), "weighs_inputs"_a)
      .def("head_linear",
           [](Tape& t, std::shared_ptr<PackedMatrix> weight, PyRef x, int64_t heads) {
             return py_ref(t.head_linear(std::move(weight), ref_of(x), heads));
           })
      .def("add", [](Tape& t, PyRef x, PyRef z,
                     int64_t size) { return py_ref(t.add(ref_of(x), ref_of(z), size)); })
      .def("scale", [](Tape& t, PyRef x, int64_t size,
                       float factor) { return py_ref(t.scale(ref_of(x), size, factor)); })
      .def("clamp", [](Tape& t, PyRef x, int64_t size,
                       float limit) { return py_ref(t.clamp(ref_of(x), size, limit)); })
      .def("softcap", [](Tape& t, PyRef x, int64_t size,
                         float cap) { return py_ref(t.softcap(ref_of(x), size, cap)); })
      .def("take_rows",
           [](Tape& t, PyRef x, int64_t size, PyRef rows) {
             return py_ref(t.take_rows(ref_of(x), size, ref_of(rows)));
           })
      .def("all_reduce",
           [](Tape& t, PyRef x, int64_t size, std::shared_ptr<Collective> group) {
             return py_ref(t.all_reduce(ref_of(x), size, std::move(group)));
           })
      .def("all_gather",
           [](Tape& t, PyRef x, const std::vector<int64_t>& columns,
              std::shared_ptr<Collective> group) {
             return py_ref(t.all_gather(ref_of(x), columns, std::move(group)));
           })
      .def("write_kv",
           [](Tape& t, PyRef k, PyRef v, const KVMemory& cache) {
             t.write_kv(ref_of(k), ref_of(v), cache.cache());
           })
      .def(
          "attention",
          [](Tape& t, PyRef q, const KVMemory& cache, int64_t heads, float softmax_scale,
             int64_t window, int64_t chunk, float softcap, std::optional<Floats> slopes,
             std::optional<Floats> sinks) {
            const auto by_head = [heads](const std::optional<Floats>& values) -> const float* {
              if (!values) return nullptr;
              if (static_cast<int64_t>(values->shape(0)) != heads)
                throw nb::value_error("slopes and sinks are one for each query head");
              return values->data();
            };
            return py_ref(t.attention(ref_of(q), cache.cache(), heads, softmax_scale,
                                      {window, chunk}, softcap, by_head(slopes), by_head(sinks)));
          },
          "q"_a, "cache"_a, "heads"_a, "softmax_scale"_a, "window"_a, "chunk"_a, "softcap"_a,
          "slopes"_a.none(), "sinks"_a.none())
      .def("finish",
           [](Tape& t, const std::vector<std::pair<PyRef, int64_t>>& outputs) {
             std::vector<std::pair<Ref, int64_t>> refs;
             for (const auto& [ref, columns] : outputs) refs.emplace_back(ref_of(ref), columns);
             t.finish(refs);
           })
      .def("run", &run_tape, "tokens"_a, "rows"_a, "inputs"_a, "batch"_a.none(), "timed"_a = false)
      .def_prop_ro("buffer_bytes", &Tape::buffer_bytes);
}

}  // namespace octavo
