// The cache of latent attention, as Python sees it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "latent_memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

void bind_latents(nb::module_& m) {
  using Longs = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu, nb::ro>;
  nb::class_<LatentMemory>(m, "LatentCache", "One layer's paged cache of latent vectors, zeroed.")
      .def(
          "__init__",
          [](LatentMemory* self, int format, int64_t num_blocks, int64_t block_size, int64_t rank,
             int64_t rope_dim, double shift) {
            if (!(shift >= 0 && shift < 1)) throw nb::value_error("a shift is from 0 to 1");
            new (self) LatentMemory(static_cast<KVFormat>(format), num_blocks, block_size, rank,
                                    rope_dim, shift);
          },
          "format"_a, "num_blocks"_a, "block_size"_a, "rank"_a, "rope_dim"_a, "shift"_a = 0.0)
      .def_prop_ro("rank", [](const LatentMemory& c) { return c.cache().rank; })
      .def_prop_ro("rope_dim", [](const LatentMemory& c) { return c.cache().rope_dim; })
      .def("copy_blocks", &LatentMemory::copy_blocks)
      .def("move_kv", [](LatentMemory& c, Longs sources, Longs targets) {
        if (sources.shape(0) != targets.shape(0))
          throw nb::value_error("as many sources as targets are wanted");
        c.move(sources.data(), targets.data(), sources.shape(0));
      });
  m.def(
      "latent_block_bytes",
      [](int format, int64_t block_size, int64_t rank, int64_t rope_dim) {
        return LatentCache{static_cast<KVFormat>(format), nullptr, 1, block_size, rank, rope_dim}
            .block_bytes();
      },
      "format"_a, "block_size"_a, "rank"_a, "rope_dim"_a);
}

}  // namespace octavo
