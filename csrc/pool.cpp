#include "pool.h"

#include <cfenv>
#include <chrono>
#include <stdexcept>

#include "pause.h"

namespace octavo {
namespace {

constexpr int kFieldBits = 17;
constexpr uint64_t kFieldMask = (uint64_t{1} << kFieldBits) - 1;

uint64_t field(uint64_t ticket, int number) { return ticket >> number * kFieldBits & kFieldMask; }
uint64_t from_front(uint64_t ticket) { return field(ticket, 0); }
uint64_t from_back(uint64_t ticket) { return field(ticket, 1); }
uint64_t chunks_of(uint64_t ticket) { return field(ticket, 2); }
uint64_t sequence_of(uint64_t ticket) { return field(ticket, 3); }
constexpr uint64_t kNextSequence = uint64_t{1} << 3 * kFieldBits;

bool has_chunk(uint64_t ticket) {
  return from_front(ticket) + from_back(ticket) < chunks_of(ticket);
}
// Of a worker's end, what it adds to the ticket.
uint64_t claim(int worker) { return uint64_t{1} << worker % 2 * kFieldBits; }

// Longer than most regions take, shorter than what a neighbour would feel.
constexpr auto kSpin = std::chrono::microseconds(50);

// Rounding to nearest, subnormals kept. A library that sets its threads to flush subnormals to zero
// (torch does) must not change a result, least of all on those threads only.
class DefaultArithmetic {
 public:
  DefaultArithmetic() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_;
};

}  // namespace

Pool::Pool(int threads) : threads_(threads) {
  workers_.reserve(threads - 1);
  for (int worker = 1; worker < threads; ++worker)
    workers_.emplace_back([this, worker] { work(worker); });
}

Pool::~Pool() {
  stopping_ = true;
  wake_.fetch_add(1);
  wake_.notify_all();
  // Those that are spinning see it too: a new, empty region.
  ticket_.fetch_add(kNextSequence);
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(Program& program) {
  // More would let a thread that slept through them take the last one for the first.
  if (program.regions() >= kMaxRegions) throw std::length_error("a step of too many regions");
  const std::lock_guard lock(turn_);
  const DefaultArithmetic arithmetic;
  program_ = &program;
  region_ = -1;
  finished_.store(false, std::memory_order_relaxed);
  uint64_t seen = ticket_.load(std::memory_order_relaxed);
  start_next(0);
  while (!finished_.load(std::memory_order_acquire)) {
    const uint64_t ticket = ticket_.fetch_add(claim(0), std::memory_order_acq_rel);
    if (run_claimed(0, ticket)) continue;
    seen = ticket;
    if (finished_.load(std::memory_order_acquire)) break;
    wait_for_change(seen);
  }
}

void Pool::parallel_for(int64_t count, const std::function<void(int64_t, int)>& body) {
  struct Loop final : Program {
    int64_t count;
    const std::function<void(int64_t, int)>& body;
    Loop(int64_t n, const std::function<void(int64_t, int)>& f) : count(n), body(f) {}
    int64_t regions() const override { return 1; }
    int64_t chunks(int64_t) override { return count < kMaxChunks ? count : kMaxChunks - 1; }
    void run(int64_t, int64_t chunk, int worker) override {
      for (int64_t i = chunk; i < count; i += kMaxChunks - 1) body(i, worker);
    }
  };
  Loop loop(count, body);
  run(loop);
}

void Pool::work(int worker) {
  const DefaultArithmetic arithmetic;   // a thread begins with its creator's
  uint64_t seen = ticket_.load(std::memory_order_acquire);
  while (!stopping_.load(std::memory_order_acquire)) {
    if (has_chunk(seen)) {
      seen = ticket_.fetch_add(claim(worker), std::memory_order_acq_rel);
      if (run_claimed(worker, seen)) {
        seen = ticket_.load(std::memory_order_acquire);
        continue;
      }
    }
    seen = wait_for_change(seen);
  }
}

// Runs the chunk that the claim `ticket` got; false if there was none left.
bool Pool::run_claimed(int worker, uint64_t ticket) {
  if (!has_chunk(ticket)) return false;
  const uint64_t chunk =
      worker % 2 == 0 ? from_front(ticket) : chunks_of(ticket) - 1 - from_back(ticket);
  program_->run(region_, static_cast<int64_t>(chunk), worker);
  const int64_t done = done_.fetch_add(1, std::memory_order_acq_rel) + 1;
  if (done == static_cast<int64_t>(chunks_of(ticket))) start_next(worker);
  return true;
}

// Opens the next region that is worth sharing; those of a single chunk are run here, without the
// others being told.
void Pool::start_next(int worker) {
  int64_t chunks = 0;
  while (++region_ < program_->regions()) {
    chunks = program_->chunks(region_);
    if (chunks > 1 && threads_ > 1) break;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) program_->run(region_, chunk, worker);
    chunks = 0;
  }
  done_.store(0, std::memory_order_relaxed);
  if (chunks == 0) finished_.store(true, std::memory_order_release);
  const uint64_t sequence = sequence_of(ticket_.load(std::memory_order_relaxed)) + 1;
  ticket_.store(sequence * kNextSequence | static_cast<uint64_t>(chunks) << 2 * kFieldBits,
                std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    wake_.fetch_add(1, std::memory_order_seq_cst);
    wake_.notify_all();
  }
}

// Until another region than that of `seen` is open; returns its ticket.
uint64_t Pool::wait_for_change(uint64_t seen) {
  const uint64_t sequence = sequence_of(seen);
  const auto is_new = [&](uint64_t ticket) { return sequence_of(ticket) != sequence; };
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  while (!is_new(ticket)) {
    for (int i = 0; i < 32 && !is_new(ticket); ++i) {
      pause_briefly();
      ticket = ticket_.load(std::memory_order_acquire);
    }
    if (is_new(ticket) || std::chrono::steady_clock::now() < deadline) continue;
    const uint32_t woken = wake_.load(std::memory_order_seq_cst);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    ticket = ticket_.load(std::memory_order_seq_cst);
    if (!is_new(ticket) && !stopping_.load(std::memory_order_seq_cst)) {
      wake_.wait(woken, std::memory_order_seq_cst);
    }
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    ticket = ticket_.load(std::memory_order_acquire);
    if (stopping_.load(std::memory_order_acquire)) break;
  }
  return ticket;
}

}  // namespace octavo
