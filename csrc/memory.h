// Memory for large arrays.
#pragma once

#include <cstdint>
#include <memory>

namespace octavo {

// Memory aligned to its pages, which are huge ones where it is large and the system has them.
std::shared_ptr<void> allocate_aligned(int64_t bytes);

constexpr int64_t kHugePage = 2 << 20;
// A wish; small pages do as well.
void advise_huge_pages(void* memory, int64_t bytes);

}  // namespace octavo
