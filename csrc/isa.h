// Which of the kernels that were built can run on this processor.
#pragma once

#include <string>
#include <vector>

namespace octavo {

struct Isa {
  const char* name;     // as in kernels_named()
  const char* tested;   // where the tests run it; empty if nowhere
  std::string problem;  // why it can't run here; empty if it can
};

// All instruction sets that were built, the most general first.
std::vector<Isa> built_isas();

// Why kernels_named(name) is null; empty if it is not.
std::string isa_problem(const std::string& name);

}  // namespace octavo
