// Parts of the extension module that are bound in files of their own.
#pragma once

#include <nanobind/nanobind.h>

#include <tuple>

#include "formats.h"

namespace octavo {

// A WeightFormat as Python gives it: values, scales, offset, span.
using FormatNumbers = std::tuple<int, int, int, int>;

inline WeightFormat format_of(const FormatNumbers& numbers) {
  const auto [values, scales, offset, span] = numbers;
  const WeightFormat format{static_cast<Values>(values), static_cast<Scales>(scales),
                            static_cast<Offset>(offset), span};
  if (!is_known(format)) throw nanobind::value_error("no kernel has this format of weights");
  return format;
}

void bind_caches(nanobind::module_& m);
void bind_groups(nanobind::module_& m);
void bind_limits(nanobind::module_& m);
void bind_pack(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_tape(nanobind::module_& m);

}  // namespace octavo
