// Every kernel of every instruction set that runs here, on inputs that are the same everywhere: a
// line "<set> <result> <digest>" for each, or "<set> can't run: <reason>". Equal digests on two
// processors are equal bits. Ops run from tapes, on a pool of three threads, as the engine runs
// them: so these are tried out, too.
#include "isa.h"
#include "results.h"

namespace octavo {
namespace {

void add_all(const Isa& isa) {
  if (!isa.problem.empty()) {
    std::printf("%s can't run: %s\n", isa.name, isa.problem.c_str());
    return;
  }
  const Results results(isa.name);
  const Machine machine{std::make_shared<Pool>(3),
                        std::make_shared<Kernels>(*kernels_named(isa.name))};
  add_products(machine, results);
  add_row_ops(machine, results);
  add_attention(machine, results);
  add_latent_attention(machine, results);
  add_experts(machine, results);
  add_sampling(machine, results);
}

}  // namespace
}  // namespace octavo

int main() {
  octavo::add_packing();
  for (const octavo::Isa& isa : octavo::built_isas()) octavo::add_all(isa);
}
