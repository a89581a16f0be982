#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "bindings.h"
#include "pack.h"

namespace nb = nanobind;

namespace octavo {
namespace {

using Panels = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ByteRows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu, nb::ro>;

void pack(const Panels& panels, int format_number, bool has_min, int64_t inputs,
          const std::vector<std::pair<int, ByteRows>>& parts, int64_t scale_group) {
  const auto format = static_cast<WeightFormat>(format_number);
  std::vector<StoredRow> rows;
  for (const auto& [type_number, bytes] : parts) {
    const auto type = static_cast<StoredType>(type_number);
    if (static_cast<int64_t>(bytes.shape(1)) != stored_row_bytes(type, inputs))
      throw nb::value_error("the rows of a part have not the length of `inputs` values");
    for (size_t r = 0; r < bytes.shape(0); ++r)
      rows.push_back({type, bytes.data() + r * bytes.shape(1)});
  }
  const auto num_rows = static_cast<int64_t>(rows.size());
  if (static_cast<int64_t>(panels.shape(0)) !=
      ceil_div(num_rows, kLanes) * panel_bytes(format, has_min, inputs))
    throw nb::value_error("`panels` has not the size of these rows' panels");
  if (reinterpret_cast<uintptr_t>(panels.data()) % kAlign != 0)
    throw nb::value_error("`panels` is not aligned to 64 bytes");
  if (scale_group < inputs && (scale_group < kGroup || scale_group % kGroup != 0))
    throw nb::value_error("`scale_group` is neither a multiple of 32 nor a whole row");
  const nb::gil_scoped_release unlocked;
  pack_panels(format, has_min, inputs, rows.data(), num_rows, scale_group, panels.data());
}

}  // namespace

void bind_pack(nb::module_& m) {
  m.def("pack", &pack, nb::arg("panels").noconvert(), nb::arg("format"), nb::arg("has_min"),
        nb::arg("inputs"), nb::arg("parts"), nb::arg("scale_group"),
        "Pack the rows of `parts`, one part after another, into `panels` (see csrc/pack.h): uint8, "
        "64-byte aligned, as long as the panels of all rows. parts: (StoredType, bytes (rows, "
        "bytes of a row)). Doesn't hold the interpreter's lock.");
}

}  // namespace octavo
