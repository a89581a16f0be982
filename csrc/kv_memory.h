// One layer's cache of keys and values, with its memory.
#pragma once

#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cached_token.h"
#include "pages.h"

namespace octavo {

class KVMemory {
 public:
  // shift: as of Pages. Factors are those of f8e4m3, and ignored with other formats.
  KVMemory(KVFormat k_format, KVFormat v_format, int64_t num_blocks, int64_t block_size,
           int64_t heads, int64_t head_dim, double shift, float k_factor, float v_factor)
      : cache_{k_format, v_format, nullptr, num_blocks, block_size, heads, head_dim},
        pages_(num_blocks * cache_.block_bytes(), shift) {
    const bool is_rotated = k_format == KVFormat::i4 || v_format == KVFormat::i4;
    if (is_rotated && head_dim > kMostRotated)
      throw std::invalid_argument("heads too large for int4");
    if (cache_.k_format == KVFormat::f8e4m3) cache_.k_factor = k_factor;
    if (cache_.v_format == KVFormat::f8e4m3) cache_.v_factor = v_factor;
    cache_.data = pages_.data();
  }

  const KVCache& cache() const { return cache_; }

  void copy_blocks(const std::vector<std::pair<int64_t, int64_t>>& pairs) {
    const int64_t bytes = cache_.block_bytes();
    for (const auto& [source, target] : pairs) {
      for (const int64_t block : {source, target})
        if (block < 0 || block >= cache_.num_blocks) throw std::out_of_range("no such block");
      std::memmove(cache_.data + target * bytes, cache_.data + source * bytes,
                   static_cast<size_t>(bytes));
    }
  }

  // The tokens of `count` slots, in this order, go to others.
  void move(const int64_t* sources, const int64_t* targets, size_t count) {
    const int64_t size = cache_.block_size;
    for (size_t i = 0; i < count; ++i) {
      const int64_t source = sources[i], target = targets[i];
      for (const int64_t slot : {source, target})
        if (slot < 0 || slot >= cache_.num_blocks * size) throw std::out_of_range("no such slot");
      const auto group_of = [&](int64_t slot, int64_t head) {
        return cached_group(cache_, slot / size, head, slot % size / kLanes);
      };
      for (int64_t head = 0; source != target && head < cache_.heads; ++head)
        copy_token(cache_, group_of(source, head), source % size % kLanes, group_of(target, head),
                   target % size % kLanes);
    }
  }

 private:
  KVCache cache_;
  Pages pages_;
};

}  // namespace octavo
