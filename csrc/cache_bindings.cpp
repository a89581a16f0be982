// The caches of attention, as Python sees them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "kv_memory.h"
#include "latent_memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Longs = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu, nb::ro>;

template <class Memory>
void move_tokens(Memory& memory, Longs sources, Longs targets) {
  if (sources.shape(0) != targets.shape(0))
    throw nb::value_error("as many sources as targets are wanted");
  memory.move(sources.data(), targets.data(), sources.shape(0));
}

KVFormat kv_format(int number) { return static_cast<KVFormat>(number); }

}  // namespace

void bind_caches(nb::module_& m) {
  nb::class_<KVMemory>(m, "KVCache", "One layer's paged cache, zeroed.")
      .def(
          "__init__",
          [](KVMemory* self, int k_format, int v_format, int64_t num_blocks, int64_t block_size,
             int64_t heads, int64_t head_dim, double shift, float k_factor, float v_factor) {
            new (self) KVMemory(kv_format(k_format), kv_format(v_format), num_blocks, block_size,
                                heads, head_dim, shift, k_factor, v_factor);
          },
          "k_format"_a, "v_format"_a, "num_blocks"_a, "block_size"_a, "heads"_a, "head_dim"_a,
          "shift"_a = 0.0, "k_factor"_a = 1.0f, "v_factor"_a = 1.0f)
      .def_prop_ro("heads", [](const KVMemory& c) { return c.cache().heads; })
      .def_prop_ro("head_dim", [](const KVMemory& c) { return c.cache().head_dim; })
      .def("copy_blocks", &KVMemory::copy_blocks)
      .def("move_kv", &move_tokens<KVMemory>);
  m.def(
      "kv_block_bytes",
      [](int k_format, int v_format, int64_t block_size, int64_t heads, int64_t head_dim) {
        const KVCache cache{
            kv_format(k_format), kv_format(v_format), nullptr, 1, block_size, heads, head_dim};
        return cache.block_bytes();
      },
      "k_format"_a, "v_format"_a, "block_size"_a, "heads"_a, "head_dim"_a);

  nb::class_<LatentMemory>(m, "LatentCache", "One layer's paged cache of latent vectors, zeroed.")
      .def(
          "__init__",
          [](LatentMemory* self, int format, int64_t num_blocks, int64_t block_size, int64_t rank,
             int64_t rope_dim, double shift) {
            new (self)
                LatentMemory(kv_format(format), num_blocks, block_size, rank, rope_dim, shift);
          },
          "format"_a, "num_blocks"_a, "block_size"_a, "rank"_a, "rope_dim"_a, "shift"_a = 0.0)
      .def_prop_ro("rank", [](const LatentMemory& c) { return c.cache().rank; })
      .def_prop_ro("rope_dim", [](const LatentMemory& c) { return c.cache().rope_dim; })
      .def("copy_blocks", &LatentMemory::copy_blocks)
      .def("move_kv", &move_tokens<LatentMemory>);
  m.def(
      "latent_block_bytes",
      [](int format, int64_t block_size, int64_t rank, int64_t rope_dim) {
        const LatentCache cache{kv_format(format), nullptr, 1, block_size, rank, rope_dim};
        return cache.block_bytes();
      },
      "format"_a, "block_size"_a, "rank"_a, "rope_dim"_a);
}

}  // namespace octavo
