// The panels of integer formats, as linear_int reads them.
#pragma once

#include <type_traits>

#include "../formats.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr bool has_offset(WeightFormat format) { return format.offset != Offset::none; }
// Scales of a group of 32.
constexpr int spans(WeightFormat format) { return int(kGroup) / format.span; }

// Calls `multiply` with each span's number as a constant.
template <WeightFormat format, typename Multiply>
inline void for_each_span(Multiply multiply) {
  multiply(std::integral_constant<int, 0>());
  if constexpr (spans(format) == 2) multiply(std::integral_constant<int, 1>());
}

// Reads a panel group by group, from first to last byte.
template <WeightFormat format>
class PanelReader {
 public:
  explicit PanelReader(const uint8_t* panel)
      : scales_(panel), values_(panel + kHeader.bytes), factors_(panel + kHeader.factors) {}

  const uint8_t* values() const { return values_; }
  // Of inputs [span * s, span * (s + 1)) of the group.
  f32x16 scale(int s) const { return load_scaled(scales_ + s * kSpanScales, factors_); }
  // What the sum of activations is multiplied by.
  f32x16 offset(int s, f32x16 scale) const {
    if constexpr (!has_offset(format)) {
      return zero();
    } else {
      const f32x16 stored =
          load_scaled(scales_ + kHeader.offsets + s * kSpanScales, factors_ + 2 * kLanes);
      return format.offset == Offset::zero ? scale * stored : stored;
    }
  }

  // Into the L2 cache: the group that lies `ahead` bytes from this one, with the scales after it.
  void prefetch(int64_t ahead) const {
    // The asm keeps the sums next + 64 i from becoming variables of the loop around this (2 %).
    const uint8_t* next = values_ + ahead;
    asm("" : "+r"(next));
    constexpr int64_t kLines = kValues / kAlign, kHeaderLines = kHeader.bytes / kAlign;
#pragma GCC unroll 8
    for (int64_t i = 0; i < kLines; ++i) __builtin_prefetch(next + i * kAlign, 0, 2);
    if (kBlock > 2 && !is_last()) return;
#pragma GCC unroll 6
    for (int64_t i = kLines; i < kLines + kHeaderLines; ++i) {
      __builtin_prefetch(next + i * kAlign, 0, 2);
    }
  }

  void next() {
    values_ += is_last() ? kValues + kHeader.bytes : kValues;
    scales_ += is_last() ? kBlockBytes - (kBlock - 1) * kHeader.group_scales : kHeader.group_scales;
    if (kBlock > 2) factors_ += is_last() ? kBlockBytes : 0;
    index_ = kBlock == 2 ? index_ ^ 1 : (index_ + 1) % kBlock;
  }

 private:
  static constexpr BlockHeader kHeader = block_header(format);
  static constexpr int kBlock = int(block_groups(format.scales));
  static constexpr int64_t kValues = group_bytes(format.values);
  static constexpr int64_t kBlockBytes = kHeader.bytes + kBlock * kValues;
  static constexpr int64_t kSpanScales = kLanes * scale_bytes(format.scales);

  bool is_last() const { return index_ == kBlock - 1; }

  static f32x16 load_scaled(const uint8_t* p, [[maybe_unused]] const uint8_t* factors) {
    if constexpr (format.scales == Scales::f32) {
      return load(reinterpret_cast<const float*>(p));
    } else if constexpr (format.scales == Scales::k8) {
      return load_i8(reinterpret_cast<const int8_t*>(p)) *
             load_f16(reinterpret_cast<const uint16_t*>(factors));
    } else {
      const auto* words = reinterpret_cast<const uint16_t*>(p);
      return format.scales == Scales::f16 ? load_f16(words) : load_bf16(words);
    }
  }

  const uint8_t* scales_;
  const uint8_t* values_;
  const uint8_t* factors_;
  int index_ = 0;   // of the group in its block
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
