// Groups of ranks, as Python sees them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <chrono>
#include <system_error>

#include "bindings.h"
#include "memory.h"
#include "shared_group.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

// An exchange that Python makes, as between machines.
class CalledGroup final : public Collective {
 public:
  CalledGroup(int rank, int ranks, nb::callable function)
      : Collective(rank, ranks),
        function_(std::move(function)),
        outgoing_(allocate_aligned(kCapacity)),
        incoming_(allocate_aligned(ranks * kCapacity)) {}

  uint8_t* outgoing() override { return static_cast<uint8_t*>(outgoing_.get()); }

  void exchange(int64_t bytes) override {
    bytes_ = bytes;
    const nb::gil_scoped_acquire locked;
    const nb::capsule nobody(this, [](void*) noexcept {});
    const size_t own[1] = {static_cast<size_t>(bytes)};
    const size_t all[2] = {static_cast<size_t>(ranks()), static_cast<size_t>(bytes)};
    function_(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(outgoing_.get(), 1, own, nobody).cast(),
              nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>(incoming_.get(), 2, all, nobody).cast());
  }

  const uint8_t* incoming(int rank) const override {
    return static_cast<const uint8_t*>(incoming_.get()) + rank * bytes_;
  }

 private:
  const nb::callable function_;
  const std::shared_ptr<void> outgoing_, incoming_;
  int64_t bytes_ = 0;
};

// As OSError, which says what the system said.
template <typename F>
std::shared_ptr<GroupMemory> told(F make) {
  try {
    return make();
  } catch (const std::system_error& error) {
    PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
    throw nb::python_error();
  }
}

}  // namespace

void bind_groups(nb::module_& m) {
  nb::class_<GroupMemory>(m, "GroupMemory", "Memory that ranks of one machine share.")
      .def(nb::new_([](int ranks, uint64_t key) {
             return told([&] { return GroupMemory::make(ranks, key); });
           }),
           "ranks"_a, "key"_a)
      .def_static(
          "open",
          [](const std::string& path, int ranks, uint64_t key) {
            return told([&] { return GroupMemory::open(path, ranks, key); });
          },
          "path"_a, "ranks"_a, "key"_a)
      .def_prop_ro("file", &GroupMemory::file);

  nb::class_<Collective>(m, "Collective", "How ranks exchange rows; see csrc/collective.h.")
      .def_prop_ro("seconds", &Collective::seconds);
  nb::class_<SharedGroup, Collective>(m, "SharedGroup", "Through memory that the ranks share.")
      .def(nb::new_([](std::shared_ptr<GroupMemory> memory, int rank, double patience_s) {
             return std::make_shared<SharedGroup>(std::move(memory), rank,
                                                  std::chrono::duration<double>(patience_s));
           }),
           "memory"_a, "rank"_a, "patience_s"_a);
  nb::class_<CalledGroup, Collective>(m, "CalledGroup", "By a function.")
      .def(nb::new_([](int rank, int ranks, nb::callable exchange) {
             return std::make_shared<CalledGroup>(rank, ranks, std::move(exchange));
           }),
           "rank"_a, "ranks"_a, "exchange"_a);
}

}  // namespace octavo
