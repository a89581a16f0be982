// The panels of q8 and q4 matrices, as linear_int reads them.
#pragma once

#include "../formats.h"

namespace octavo::OCTAVO_ISA {
namespace {

enum class Weights { q8, q4, q4_min };

constexpr bool has_min(Weights kind) { return kind == Weights::q4_min; }
constexpr WeightFormat format(Weights kind) {
  return kind == Weights::q8 ? WeightFormat::q8 : WeightFormat::q4;
}

// Reads a panel group by group, from first to last byte.
template <Weights kind>
class PanelReader {
 public:
  explicit PanelReader(const uint8_t* panel) : scales_(panel), values_(panel + kHeader) {}

  const uint8_t* values() const { return values_; }
  const uint16_t* scales() const { return reinterpret_cast<const uint16_t*>(scales_); }
  const uint16_t* mins() const { return scales() + 2 * kLanes; }

  // Into the L2 cache: the group that lies `ahead` bytes from this one, with its scales.
  void prefetch(int64_t ahead) const {
    // The asm keeps the sums next + 64 i from becoming variables of the loop around this (2 %).
    const uint8_t* next = values_ + ahead;
    asm("" : "+r"(next));
#pragma GCC unroll 10
    for (int64_t i = 0; i < (kValues + kHeader) / kAlign; ++i) {
      __builtin_prefetch(next + i * kAlign, 0, 2);
    }
  }

  void next() {
    values_ += is_second_ ? kValues + kHeader : kValues;
    scales_ += is_second_ ? kHeader + 2 * kValues - kScales : kScales;
    is_second_ = !is_second_;
  }

 private:
  static constexpr int64_t kHeader = pair_header_bytes(has_min(kind));
  static constexpr int64_t kValues = group_bytes(format(kind));
  static constexpr int64_t kScales = kLanes * 2;
  const uint8_t* scales_;
  const uint8_t* values_;
  bool is_second_ = false;  // of its pair
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
