#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "pack.h"

namespace nb = nanobind;

namespace octavo {
namespace {

using Panels = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ByteRows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu, nb::ro>;
using FloatRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu, nb::ro>;
using Part = std::tuple<int, ByteRows, std::optional<FloatRows>, std::optional<FloatRows>>;

// The scales or offsets of row r of a part in codes, null if it has none.
const float* numbers_of(const std::optional<FloatRows>& numbers, size_t r) {
  return numbers ? numbers->data() + r * numbers->shape(1) : nullptr;
}

void check_codes(const WeightFormat& format, int64_t inputs, const Part& part) {
  const auto& [type, bytes, scales, offsets] = part;
  const auto fits = [&](const FloatRows& numbers) {
    return numbers.shape(0) == bytes.shape(0) &&
           static_cast<int64_t>(numbers.shape(1)) == ceil_div(inputs, format.span);
  };
  if (!scales || !fits(*scales) || offsets.has_value() != (format.offset != Offset::none) ||
      (offsets && !fits(*offsets)))
    throw nb::value_error("the codes of a part have not the scales and offsets of their format");
}

void pack(const Panels& panels, const FormatNumbers& numbers, int64_t inputs,
          const std::vector<Part>& parts, int64_t scale_group) {
  const WeightFormat format = format_of(numbers);
  std::vector<StoredRow> rows;
  for (const Part& part : parts) {
    const auto& [type_number, bytes, scales, offsets] = part;
    const auto type = static_cast<StoredType>(type_number);
    if (!can_pack(format, type)) throw nb::value_error("the format can't hold rows of this type");
    if (inputs % stored_block(type) != 0 ||
        static_cast<int64_t>(bytes.shape(1)) != stored_row_bytes(type, inputs))
      throw nb::value_error("the rows of a part have not the length of `inputs` values");
    if (type == StoredType::codes) check_codes(format, inputs, part);
    for (size_t r = 0; r < bytes.shape(0); ++r)
      rows.push_back(
          {type, bytes.data() + r * bytes.shape(1), numbers_of(scales, r), numbers_of(offsets, r)});
  }
  const auto num_rows = static_cast<int64_t>(rows.size());
  if (static_cast<int64_t>(panels.shape(0)) !=
      ceil_div(num_rows, kLanes) * panel_bytes(format, inputs))
    throw nb::value_error("`panels` has not the size of these rows' panels");
  if (reinterpret_cast<uintptr_t>(panels.data()) % kAlign != 0)
    throw nb::value_error("`panels` is not aligned to 64 bytes");
  if (scale_group < inputs && (scale_group < kGroup || scale_group % kGroup != 0))
    throw nb::value_error("`scale_group` is neither a multiple of 32 nor a whole row");
  const nb::gil_scoped_release unlocked;
  pack_panels(format, inputs, rows.data(), num_rows, scale_group, panels.data());
}

}  // namespace

void bind_pack(nb::module_& m) {
  m.def("pack", &pack, nb::arg("panels").noconvert(), nb::arg("format"), nb::arg("inputs"),
        nb::arg("parts"), nb::arg("scale_group"),
        "Pack the rows of `parts`, one part after another, into `panels` (see csrc/pack.h): uint8, "
        "64-byte aligned, as long as the panels of all rows. parts: (StoredType, bytes (rows, "
        "bytes of a row), scales and offsets (rows, groups) of codes). Doesn't hold the "
        "interpreter's lock.");
}

}  // namespace octavo
