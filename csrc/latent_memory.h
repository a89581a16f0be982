// One layer's cache of latent vectors, with its memory.
#pragma once

#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "pages.h"

namespace octavo {

class LatentMemory {
 public:
  LatentMemory(KVFormat format, int64_t num_blocks, int64_t block_size, int64_t rank,
               int64_t rope_dim, double shift)
      : cache_{format, nullptr, num_blocks, block_size, rank, rope_dim},
        pages_(num_blocks * cache_.block_bytes(), shift) {
    if (format == KVFormat::i4) throw std::invalid_argument("latent vectors are not cached in i4");
    cache_.data = pages_.data();
  }

  const LatentCache& cache() const { return cache_; }

  void copy_blocks(const std::vector<std::pair<int64_t, int64_t>>& pairs) {
    for (const auto& [source, target] : pairs) {
      for (const int64_t block : {source, target})
        if (block < 0 || block >= cache_.num_blocks) throw std::out_of_range("no such block");
      std::memmove(cache_.row(target, 0), cache_.row(source, 0),
                   static_cast<size_t>(cache_.block_bytes()));
    }
  }

  // The tokens of `count` slots, in this order, go to others.
  void move(const int64_t* sources, const int64_t* targets, size_t count) {
    const int64_t size = cache_.block_size;
    const auto row = [&](int64_t slot) {
      if (slot < 0 || slot >= cache_.num_blocks * size) throw std::out_of_range("no such slot");
      return cache_.row(slot / size, slot % size);
    };
    for (size_t i = 0; i < count; ++i)
      std::memmove(row(targets[i]), row(sources[i]), static_cast<size_t>(cache_.row_bytes()));
  }

 private:
  LatentCache cache_;
  Pages pages_;
};

}  // namespace octavo
