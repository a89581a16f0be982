// Ranks on one machine, processes or threads of one, that exchange rows through memory which they
// share.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "collective.h"

namespace octavo {

// The memory of a group: of Linux alone. It has no name, so that nothing of it is left when all who
// use it are gone, however they ended. One rank makes it; the others open the file that it is, by
// the maker's process and the file's number there, as long as the maker has it.
class GroupMemory {
 public:
  // key: any number that those who open it know as well: what they find there may be another file,
  // of a maker that is gone and whose numbers another process has. Both throw std::system_error if
  // the system refuses; `open` throws std::invalid_argument for memory with another key, or for
  // another number of ranks.
  static std::shared_ptr<GroupMemory> make(int ranks, uint64_t key);
  static std::shared_ptr<GroupMemory> open(const std::string& path, int ranks, uint64_t key);
  ~GroupMemory();
  GroupMemory(const GroupMemory&) = delete;
  GroupMemory& operator=(const GroupMemory&) = delete;

  int file() const { return file_; }
  int ranks() const { return ranks_; }

  struct Header;
  Header& header() const;
  // A rank's place in exchanges of even or of odd number.
  uint8_t* part(int rank, uint32_t parity) const;

 private:
  GroupMemory(int file, int ranks, int64_t bytes);

  const int file_, ranks_;
  const int64_t bytes_;
  uint8_t* data_ = nullptr;
};

// One barrier an exchange: a rank writes its part for exchange e + 2 where that of e was, and by then
// has waited for all in e + 1, to which they come when they have read e.
class SharedGroup final : public Collective {
 public:
  // patience: how long a rank waits for the others before it gives up. Throws std::invalid_argument
  // if there is no such rank, or if it has been taken.
  SharedGroup(std::shared_ptr<GroupMemory> memory, int rank,
              std::chrono::duration<double> patience);

  uint8_t* outgoing() override;
  void exchange(int64_t bytes) override;
  const uint8_t* incoming(int rank) const override;

 private:
  void wait(uint32_t arrivals);

  const std::shared_ptr<GroupMemory> memory_;
  const std::chrono::duration<double> patience_;
  uint32_t exchanges_ = 0;   // that are done; it may begin again at 0
  bool is_broken_ = false;   // gave up: the ranks no longer are at the same exchange
};

}  // namespace octavo
