#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "formats.h"

namespace octavo {

void advise_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  madvise(memory, static_cast<size_t>(bytes), MADV_HUGEPAGE);
#endif
}

std::shared_ptr<void> allocate_aligned(int64_t bytes) {
  const int64_t page = bytes >= kHugePage ? kHugePage : 4096;
  const int64_t size = round_up(std::max<int64_t>(bytes, 1), page);
  void* memory = nullptr;
  if (posix_memalign(&memory, static_cast<size_t>(page), static_cast<size_t>(size)) != 0)
    throw std::bad_alloc();
  if (page == kHugePage) advise_huge_pages(memory, size);
  return {memory, std::free};
}

}  // namespace octavo
