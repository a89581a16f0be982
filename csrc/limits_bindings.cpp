#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "bindings.h"
#include "isa.h"
#include "machine_limits.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu, nb::ro>;

const Kernels& kernels_of(const std::string& isa) {
  const Kernels* kernels = kernels_named(isa.c_str());
  if (kernels == nullptr) throw std::invalid_argument(isa + ": " + isa_problem(isa));
  return *kernels;
}

double read(Pool& pool, const std::string& isa, const Bytes& memory) {
  const auto bytes = static_cast<int64_t>(memory.size());
  if (bytes % 256 != 0)
    throw std::invalid_argument("memory to read must be a multiple of 256 bytes");
  const Kernels& kernels = kernels_of(isa);
  const nb::gil_scoped_release unlocked;
  return seconds_to_read(pool, kernels, memory.data(), bytes);
}

double measure(Pool& pool, const std::string& isa, Arithmetic arithmetic, double seconds) {
  const Kernels& kernels = kernels_of(isa);
  const nb::gil_scoped_release unlocked;
  return operations_per_second(pool, kernels, arithmetic, seconds);
}

}  // namespace

void bind_limits(nb::module_& m) {
  m.def("seconds_to_read", &read, "pool"_a, "isa"_a, "memory"_a,
        "Seconds in which the pool's threads read the array once.");
  m.def(
      "float_operations_per_second",
      [](Pool& pool, const std::string& isa, double seconds) {
        return measure(pool, isa, Arithmetic::floats, seconds);
      },
      "pool"_a, "isa"_a, "seconds"_a,
      "Of fused multiply-adds (two operations each) in registers, all threads together.");
  m.def(
      "byte_operations_per_second",
      [](Pool& pool, const std::string& isa, double seconds) {
        return measure(pool, isa, Arithmetic::bytes, seconds);
      },
      "pool"_a, "isa"_a, "seconds"_a,
      "Of products of 8-bit integers added up in 32 bits, all threads together.");
}

}  // namespace octavo
