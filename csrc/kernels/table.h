// Each file under kernels/ installs its functions; table.cpp collects them.
#pragma once

#include "../kernels.h"

#ifndef OCTAVO_ISA
#error "files under kernels/ are compiled once for each instruction set, with OCTAVO_ISA its name"
#endif

namespace octavo::OCTAVO_ISA {

void install_rows(Kernels& table);
void install_experts(Kernels& table);
void install_linear_float(Kernels& table);
void install_linear_int(Kernels& table);
void install_attention(Kernels& table);
void install_write_kv(Kernels& table);
void install_latent_attention(Kernels& table);
void install_sampling(Kernels& table);
void install_limits(Kernels& table);

}  // namespace octavo::OCTAVO_ISA
