// How the ranks that share a model's layers exchange rows. The ops of a tape know this much of it.
#pragma once

#include <cstdint>

namespace octavo {

// All ranks of a group make the same exchanges in the same order. Each has three parts: any threads
// write what this rank brings, one thread exchanges it, any threads read what all ranks brought.
class Collective {
 public:
  // Bytes that a rank brings to one exchange, at most: so few that what is added up is still in some
  // cache.
  static constexpr int64_t kCapacity = 1 << 20;

  Collective(int rank, int ranks) : rank_(rank), ranks_(ranks) {}
  virtual ~Collective() = default;
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }

  // Where to write what this rank brings to the next exchange: kCapacity bytes, on a cache line.
  virtual uint8_t* outgoing() = 0;
  // Hands out the first `bytes` of it, as many as all other ranks do, and waits for theirs. Throws
  // if they don't come.
  virtual void exchange(int64_t bytes) = 0;
  // What a rank, this one included, brought to the last exchange; until the next one.
  virtual const uint8_t* incoming(int rank) const = 0;

  // What replays have spent on exchanges, all three parts and waiting for the other ranks included.
  double seconds() const { return seconds_; }
  void spend(double seconds) { seconds_ += seconds; }

 private:
  const int rank_, ranks_;
  double seconds_ = 0;
};

}  // namespace octavo
