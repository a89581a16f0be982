// Parts of the extension module that are bound in files of their own.
#pragma once

#include <nanobind/nanobind.h>

namespace octavo {

void bind_latents(nanobind::module_& m);
void bind_limits(nanobind::module_& m);
void bind_pack(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);

}  // namespace octavo
