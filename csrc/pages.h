// Zeroed memory of the system's, which hands it out as it is first touched, in huge pages where it
// can: 5 to 8 % of a decode step's attention.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <new>
#include <stdexcept>

#include "formats.h"
#include "memory.h"

namespace octavo {

// shift: of the first byte into a huge page, as a share of it, from 0 to 1. With another one for each
// layer's cache, the layers don't all ask for a new page in the same step, which would stop all
// requests for as long as clearing these takes.
class Pages {
 public:
  Pages(int64_t bytes, double shift) : bytes_(bytes + 2 * kHugePage) {
    if (!(shift >= 0 && shift < 1)) throw std::invalid_argument("a shift is from 0 to 1");
    memory_ = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    const int64_t past = reinterpret_cast<intptr_t>(memory_) % kHugePage;
    const auto shifted = static_cast<int64_t>(shift * kHugePage) / kAlign * kAlign;
    data_ = static_cast<uint8_t*>(memory_) + (kHugePage - past) % kHugePage + shifted;
    advise_huge_pages(memory_, bytes_);
  }
  ~Pages() { munmap(memory_, static_cast<size_t>(bytes_)); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  uint8_t* data() const { return data_; }

 private:
  int64_t bytes_;
  void* memory_;
  uint8_t* data_;
};

}  // namespace octavo
