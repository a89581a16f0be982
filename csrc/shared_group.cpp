#include "shared_group.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include "formats.h"
#include "pause.h"

namespace octavo {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// As in pool.cpp: longer than the others are usually late.
constexpr auto kSpin = microseconds(30);
// From when on whoever else wants this CPU gets it: a rank that is waited for may be among them
// (4 ranks on 2 CPUs, one row: about 12 us, not 44).
constexpr auto kAlone = microseconds(4);
// A sleeper looks by itself so often, should whoever was to wake it have died.
constexpr auto kNap = milliseconds(50);

constexpr int kMaxRanks = 64;

[[noreturn]] void refuse(int problem, const std::string& what) {
  throw std::system_error(problem, std::generic_category(), what);
}

}  // namespace

struct GroupMemory::Header {
  uint64_t key;
  int32_t ranks;
  std::atomic<uint64_t> joined;   // a bit for each rank

  // In all exchanges together. Whoever completes one wakes those who sleep.
  alignas(128) std::atomic<uint32_t> arrivals;
  std::atomic<uint32_t> sleepers;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(kMaxRanks <= 64);

namespace {

constexpr int64_t kHeaderBytes = 4096;
static_assert(sizeof(GroupMemory::Header) <= kHeaderBytes);

int64_t bytes_for(int ranks) { return kHeaderBytes + 2 * ranks * Collective::kCapacity; }

// Until the word is no longer `seen`, somebody wakes those who sleep on it, or the time is over.
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
  const timespec nap{0, std::chrono::nanoseconds(kNap).count()};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &nap, nullptr, 0);
#else
  if (word.load() == seen) std::this_thread::sleep_for(microseconds(50));
#endif
}

void wake_all([[maybe_unused]] std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

}  // namespace

GroupMemory::GroupMemory(int file, int ranks, int64_t bytes)
    : file_(file), ranks_(ranks), bytes_(bytes) {
  void* const data =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (data == MAP_FAILED) {
    const int problem = errno;
    close(file);
    refuse(problem, "mapping memory for a group of ranks");
  }
  data_ = static_cast<uint8_t*>(data);
}

GroupMemory::~GroupMemory() {
  munmap(data_, static_cast<size_t>(bytes_));
  close(file_);
}

std::shared_ptr<GroupMemory> GroupMemory::make(int ranks, uint64_t key) {
  if (ranks < 1 || ranks > kMaxRanks) throw std::invalid_argument("a group has 1 to 64 ranks");
#if defined(__linux__)
  const int file = memfd_create("octavo-group", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (file < 0) refuse(errno, "memory for a group of ranks");
  const int64_t bytes = bytes_for(ranks);
  // Sealed, so that no other process can take pages away that this one then reads.
  if (ftruncate(file, bytes) != 0 ||
      fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int problem = errno;
    close(file);
    refuse(problem, "memory for a group of ranks");
  }
  const std::shared_ptr<GroupMemory> memory(new GroupMemory(file, ranks, bytes));
  Header* const header = new (memory->data_) Header{};
  header->key = key;
  header->ranks = ranks;
  return memory;
#else
  refuse(ENOSYS, "memory for a group of ranks");
#endif
}

std::shared_ptr<GroupMemory> GroupMemory::open(const std::string& path, int ranks, uint64_t key) {
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) refuse(errno, path);
  struct stat found{};
  if (fstat(file, &found) != 0 || !S_ISREG(found.st_mode) || found.st_size != bytes_for(ranks)) {
    close(file);
    throw std::invalid_argument(path + " is not the memory of a group of " + std::to_string(ranks) +
                                " ranks");
  }
  std::shared_ptr<GroupMemory> memory(new GroupMemory(file, ranks, bytes_for(ranks)));
  if (memory->header().key != key || memory->header().ranks != ranks)
    throw std::invalid_argument(path + " is the memory of another group");
  return memory;
}

GroupMemory::Header& GroupMemory::header() const {
  return *std::launder(reinterpret_cast<Header*>(data_));
}

uint8_t* GroupMemory::part(int rank, uint32_t parity) const {
  return data_ + kHeaderBytes + (2 * rank + static_cast<int>(parity)) * Collective::kCapacity;
}

SharedGroup::SharedGroup(std::shared_ptr<GroupMemory> memory, int rank,
                         std::chrono::duration<double> patience)
    : Collective(rank, memory->ranks()), memory_(std::move(memory)), patience_(patience) {
  if (rank < 0 || rank >= ranks()) throw std::invalid_argument("the group has no such rank");
  const uint64_t bit = uint64_t{1} << rank;
  if ((memory_->header().joined.fetch_or(bit) & bit) != 0)
    throw std::invalid_argument("another has this rank in the group");
}

uint8_t* SharedGroup::outgoing() { return memory_->part(rank(), exchanges_ % 2); }

const uint8_t* SharedGroup::incoming(int rank) const {
  return memory_->part(rank, (exchanges_ - 1) % 2);
}

void SharedGroup::exchange(int64_t) {
  if (is_broken_) throw std::runtime_error("the ranks of the group have lost each other");
  GroupMemory::Header& header = memory_->header();
  const uint32_t complete = ++exchanges_ * static_cast<uint32_t>(ranks());
  if (header.arrivals.fetch_add(1, std::memory_order_seq_cst) + 1 != complete) {
    wait(complete);
  } else if (header.sleepers.load(std::memory_order_seq_cst) > 0) {
    wake_all(header.arrivals);
  }
}

void SharedGroup::wait(uint32_t arrivals) {
  GroupMemory::Header& header = memory_->header();
  // Some may have come to the next exchange already.
  const auto is_complete = [&](uint32_t seen) {
    return static_cast<int32_t>(seen - arrivals) >= 0;
  };
  uint32_t seen = header.arrivals.load(std::memory_order_acquire);
  const auto begin = steady_clock::now();
  while (!is_complete(seen)) {
    for (int i = 0; i < 32 && !is_complete(seen); ++i) {
      pause_briefly();
      seen = header.arrivals.load(std::memory_order_acquire);
    }
    const auto waited = steady_clock::now() - begin;
    if (is_complete(seen)) break;
    if (waited < kSpin) {
      if (waited > kAlone) std::this_thread::yield();
      continue;
    }
    if (waited > patience_) {
      is_broken_ = true;
      throw std::runtime_error("other ranks of the group have not come for " +
                               std::to_string(static_cast<int64_t>(patience_.count())) + " s");
    }
    header.sleepers.fetch_add(1, std::memory_order_seq_cst);
    seen = header.arrivals.load(std::memory_order_seq_cst);
    if (!is_complete(seen)) sleep_on(header.arrivals, seen);
    header.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    seen = header.arrivals.load(std::memory_order_acquire);
  }
}

}  // namespace octavo
