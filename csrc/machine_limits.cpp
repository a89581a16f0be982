#include "machine_limits.h"

#include <algorithm>
#include <atomic>
#include <chrono>

namespace octavo {
namespace {

// Small beside a measurement, so that threads end together; large beside claiming one (50 ns).
constexpr int64_t kReadChunkBytes = 1 << 20;
constexpr double kPeakChunkSeconds = 1e-4;

template <typename F>
double seconds_of(F work) {
  using namespace std::chrono;
  const auto start = steady_clock::now();
  work();
  return duration<double>(steady_clock::now() - start).count();
}

}  // namespace

double seconds_to_read(Pool& pool, const Kernels& kernels, const uint8_t* data, int64_t bytes) {
  const int64_t chunks = ceil_div(bytes, kReadChunkBytes);
  return seconds_of([&] {
    pool.parallel_for(chunks, [&](int64_t chunk, int) {
      const int64_t start = chunk * kReadChunkBytes;
      kernels.read_memory(data + start, std::min(kReadChunkBytes, bytes - start));
    });
  });
}

double operations_per_second(Pool& pool, const Kernels& kernels, Arithmetic arithmetic,
                             double seconds) {
  const auto multiply =
      arithmetic == Arithmetic::floats ? kernels.multiply_floats : kernels.multiply_bytes;
  // As many rounds as a chunk takes; the first try is far too short and wakes the clock up.
  int64_t rounds = 1000;
  for (double taken = 0; taken < kPeakChunkSeconds; rounds *= 2)
    taken = seconds_of([&] { multiply(rounds); });
  const auto chunks = static_cast<int64_t>(seconds / kPeakChunkSeconds) * pool.threads();
  std::atomic<int64_t> operations{0};
  const double taken = seconds_of([&] {
    pool.parallel_for(chunks, [&](int64_t, int) {
      operations.fetch_add(multiply(rounds), std::memory_order_relaxed);
    });
  });
  return static_cast<double>(operations.load()) / taken;
}

}  // namespace octavo
