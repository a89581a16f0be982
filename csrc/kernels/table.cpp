#include "table.h"

#define OCTAVO_TEXT_(x) #x
#define OCTAVO_TEXT(x) OCTAVO_TEXT_(x)

namespace octavo::OCTAVO_ISA {

const Kernels& table() {
  static const Kernels kernels = [] {
    Kernels k{};
    k.isa = OCTAVO_TEXT(OCTAVO_ISA);
    install_rows(k);
    install_experts(k);
    install_linear_float(k);
    install_linear_int(k);
    install_attention(k);
    install_write_kv(k);
    install_latent_attention(k);
    install_sampling(k);
    install_limits(k);
    return k;
  }();
  return kernels;
}

}  // namespace octavo::OCTAVO_ISA
