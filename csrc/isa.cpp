#include "isa.h"

#include <cstring>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace octavo {

namespace portable {
const Kernels& table();
}
#if defined(__x86_64__)
namespace avx2 {
const Kernels& table();
}
namespace avx512 {
const Kernels& table();
}
namespace avx512_bf16 {
const Kernels& table();
}
#elif defined(__linux__) && defined(__aarch64__)
namespace dotprod {
const Kernels& table();
}
#endif

namespace {

#if defined(__x86_64__)

enum Register { kEax, kEbx, kEcx };

// A bit of CPUID leaf 1 or 7.
struct Feature {
  const char* name;  // as in /proc/cpuinfo
  unsigned leaf;
  Register where;
  int bit;
  unsigned subleaf = 0;
};

// What the flags in CMakeLists.txt let the compiler use.
constexpr Feature kAvx2Features[] = {
    {"avx", 1, kEcx, 28},  {"avx2", 7, kEbx, 5}, {"fma", 1, kEcx, 12},
    {"f16c", 1, kEcx, 29}, {"bmi1", 7, kEbx, 3}, {"bmi2", 7, kEbx, 8},
};
constexpr Feature kAvx512Features[] = {
    {"avx512f", 7, kEbx, 16},  {"avx512dq", 7, kEbx, 17},    {"avx512bw", 7, kEbx, 30},
    {"avx512vl", 7, kEbx, 31}, {"avx512_vnni", 7, kEcx, 11},
};

constexpr Feature kAvx512Bf16Features[] = {{"avx512_bf16", 7, kEax, 5, 1}};

// Bits of XCR0: registers that the operating system saves when it switches threads.
constexpr uint32_t kYmmState = 0x06;
constexpr uint32_t kZmmState = 0xe6;

bool has(const Feature& feature) {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(feature.leaf, feature.subleaf, &eax, &ebx, &ecx, &edx)) return false;
  const unsigned word = feature.where == kEax ? eax : feature.where == kEbx ? ebx : ecx;
  return (word >> feature.bit) & 1;
}

uint32_t saved_registers() {
  constexpr Feature kXgetbvEnabled = {"osxsave", 1, kEcx, 27};
  if (!has(kXgetbvEnabled)) return 0;
  uint32_t low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

#elif defined(__linux__) && defined(__aarch64__)

// A bit of AT_HWCAP, which has those only whose registers the operating system saves.
struct Feature {
  const char* name;  // as in /proc/cpuinfo
  unsigned long bit;
};

// What the flags in CMakeLists.txt let the compiler use: Armv8.2 includes the first three.
constexpr Feature kDotprodFeatures[] = {
    {"crc32", HWCAP_CRC32},
    {"atomics", HWCAP_ATOMICS},
    {"asimdrdm", HWCAP_ASIMDRDM},
    {"asimddp", HWCAP_ASIMDDP},
};

bool has(const Feature& feature) { return (getauxval(AT_HWCAP) & feature.bit) != 0; }

#endif

template <typename Features>
std::string missing(const Features& features) {
  std::string names;
  for (const auto& feature : features) {
    if (!has(feature)) names += (names.empty() ? "" : ", ") + std::string(feature.name);
  }
  return names.empty() ? "" : "this processor lacks " + names;
}

std::string no_problem() { return ""; }

#if defined(__x86_64__)

template <typename Features>
std::string problem_of(const Features& features, uint32_t registers) {
  const std::string problem = missing(features);
  if (!problem.empty() || (saved_registers() & registers) == registers) return problem;
  return "the operating system does not save this instruction set's registers";
}

std::string avx2_problem() { return problem_of(kAvx2Features, kYmmState); }

std::string avx512_problem() {
  const std::string problem = avx2_problem();
  return problem.empty() ? problem_of(kAvx512Features, kZmmState) : problem;
}

std::string avx512_bf16_problem() {
  const std::string problem = avx512_problem();
  return problem.empty() ? problem_of(kAvx512Bf16Features, kZmmState) : problem;
}

#elif defined(__linux__) && defined(__aarch64__)

std::string dotprod_problem() { return missing(kDotprodFeatures); }

#endif

struct Build {
  const char* name;
  const char* tested;
  std::string (*problem)();
  const Kernels& (*table)();  // compiled with the set's instructions: only called where they run
};

// Where the tests run a set. One that no test runs is never measured, nor chosen where there is
// another.
[[maybe_unused]] constexpr const char* kHere = "on such processors";
[[maybe_unused]] constexpr const char* kEmulated = "on an emulated processor";
[[maybe_unused]] constexpr const char* kNowhere = "";

constexpr Build kBuilds[] = {
#if defined(__x86_64__)
    {"portable", kHere, no_problem, portable::table},
    {"avx2", kHere, avx2_problem, avx2::table},
    {"avx512", kHere, avx512_problem, avx512::table},
    {"avx512_bf16", kHere, avx512_bf16_problem, avx512_bf16::table},
#elif defined(__linux__) && defined(__aarch64__)
    {"portable", kEmulated, no_problem, portable::table},
    {"dotprod", kEmulated, dotprod_problem, dotprod::table},
#else
    {"portable", kNowhere, no_problem, portable::table},
#endif
};

const Build* build_named(const char* name) {
  for (const Build& build : kBuilds) {
    if (std::strcmp(build.name, name) == 0) return &build;
  }
  return nullptr;
}

}  // namespace

std::vector<Isa> built_isas() {
  std::vector<Isa> isas;
  for (const Build& build : kBuilds) isas.push_back({build.name, build.tested, build.problem()});
  return isas;
}

std::string isa_problem(const std::string& name) {
  if (const Build* build = build_named(name.c_str())) return build->problem();
  std::string names;
  for (const Build& build : kBuilds) {
    names += (names.empty() ? "" : ", ") + std::string(build.name);
  }
  return "not built; there are " + names;
}

const Kernels* kernels_named(const char* isa) {
  const Build* build = build_named(isa);
  return build != nullptr && build->problem().empty() ? &build->table() : nullptr;
}

}  // namespace octavo
