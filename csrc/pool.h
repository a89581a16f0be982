// A thread pool for steps of a few milliseconds made of hundreds of short regions.
//
// A program is a list of regions; a region is a number of chunks that any thread may run in any
// order; the next region begins when all chunks of the one before are done. Threads claim chunks
// from counters, and nobody waits for a thread, only for chunks: a thread that the system has put
// aside between two regions delays nothing, and one that is put aside within a chunk delays that
// chunk alone. Half of the threads claim from the front and half from the back, until they meet:
// where chunks are rows, a thread finds most of what it reads in its own caches, since it wrote it
// in the region before (steps of 64 rows: 5 %; on a day when the two CPUs were far apart, 13 %).
// Waiting threads spin for a few tens of microseconds, then sleep, because on a busy
// machine a spinning thread holds the very core that its partner needs (docs/log.md).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

class Program {
 public:
  virtual ~Program() = default;
  virtual int64_t regions() const = 0;
  // Called once a region, by one thread, when all regions before it are done. 0 skips it.
  virtual int64_t chunks(int64_t region) = 0;
  // worker: 0 for the thread that called Pool::run, up to threads() - 1.
  virtual void run(int64_t region, int64_t chunk, int worker) = 0;
};

class Pool {
 public:
  // threads: the caller of `run` included, at least 1. The others start now.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  // Chunks in a region, and regions in a program, are fewer than these.
  static constexpr int64_t kMaxChunks = 1 << 16;
  static constexpr int64_t kMaxRegions = 1 << 13;

  // Runs all regions and returns; throws std::length_error for too many of them. One program at a
  // time: other callers wait their turn.
  void run(Program& program);
  void parallel_for(int64_t count, const std::function<void(int64_t index, int worker)>& body);

 private:
  void work(int worker);
  bool run_claimed(int worker, uint64_t ticket);
  void start_next(int worker);
  uint64_t wait_for_change(uint64_t seen);

  // Of the region that is open: [sequence number : 13][chunks : 17][claims from the back : 17][from
  // the front : 17]. One word, so that a claim (an addition) tells which region it is for. A valid
  // claim keeps its region, and with it program_ and region_, from changing until the chunk is done.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<uint32_t> wake_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> finished_{true};
  std::atomic<bool> stopping_{false};
  Program* program_ = nullptr;
  int64_t region_ = 0;
  const int threads_;
  std::mutex turn_;
  std::vector<std::thread> workers_;
};

}  // namespace octavo
