// linear_int: a matrix of an integer format times int8 activations. Per output and span of 32 or 16
// inputs, which share a scale, the products are summed exactly in integers, then
//
//   y = fma(float(dot), scale_w * scale_x, y), then with an offset y = fma(min_w, sum_x, y),
//
// where min_w is the minimum or scale_w * offset, spans in rising order; bias and residual are added
// at the end, in this order. Every instruction set and every tile height does the same float
// operations, so a row's bits depend on neither.
#include <array>
#include <iterator>
#include <utility>

#include "linear_int_panel.h"
#include "simd.h"
#include "table.h"

// Each defines kTileRows, the largest height of a tile, kPrefetchRows and
//   template <WeightFormat format, int rows>
//   void multiply(const uint8_t* panel, QuantizedRows x, int64_t row, int64_t ahead,
//                 f32x16 (&sum)[rows]);
// which sets sum[r] to the products of row `row` + r with the panel's 16 outputs. If rows are at
// least kPrefetchRows, it prefetches as many bytes, `ahead` of those that it reads.
#if defined(__AVX512VNNI__)
#include "linear_int_avx512.h"
#elif defined(__AVX2__)
#include "linear_int_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "linear_int_neon.h"
#else
#include "linear_int_portable.h"
#endif

namespace octavo::OCTAVO_ISA {
namespace {

template <WeightFormat format, int rows>
void tile(const LinearArgs& args, int64_t row, int64_t p, int64_t ahead) {
  const PackedMatrix& weight = *args.weight;
  f32x16 sum[rows];
  multiply<format, rows>(weight.data + p * weight.panel_stride, args.xq, row, ahead, sum);

  const int64_t column = p * kLanes;
  const int64_t count = weight.outputs - column;
  const auto finish = [&](auto load_columns, auto store_columns) {
    const f32x16 bias = args.bias ? load_columns(args.bias + column) : zero();
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) {
      f32x16 y = sum[r];
      if (args.bias) y = y + bias;
      if (args.residual.data) y = y + load_columns(args.residual.row(row + r) + column);
      store_columns(args.y.row(row + r) + column, y);
    }
  };
  if (count >= kLanes) {
    finish([](const float* from) { return load(from); }, [](float* to, f32x16 y) { store(to, y); });
  } else {
    finish([count](const float* from) { return load_first(from, int(count)); },
           [count](float* to, f32x16 y) { store_first(to, y, int(count)); });
  }
}

using Tile = void (*)(const LinearArgs& args, int64_t row, int64_t p, int64_t ahead);

template <WeightFormat format, int rows = kTileRows>
Tile tile_of_height(int64_t height) {
  if (height == rows) return tile<format, rows>;
  if constexpr (rows > 1) return tile_of_height<format, rows - 1>(height);
  return nullptr;
}

// Activations of a block of rows stay in the L2 cache while the panels pass through the L1 cache,
// each used by all of the block's tiles.
constexpr int64_t kBlockBytes = 256 << 10;

template <WeightFormat format>
void linear(const LinearArgs& args, int64_t t0, int64_t t1, int64_t p0, int64_t p1) {
  int64_t block = kBlockBytes / args.xq.stride / kTileRows * kTileRows;
  if (block < kTileRows) block = kTileRows;
  for (int64_t first = t0; first < t1; first += block) {
    // Tiles of nearly equal height: a small remainder would read the panel for little work.
    const int64_t rows = first + block < t1 ? block : t1 - first;
    const int64_t tiles = ceil_div(rows, kTileRows);
    const int64_t height = rows / tiles, num_taller = rows % tiles;
    const Tile tile = tile_of_height<format>(height);
    const Tile taller = num_taller > 0 ? tile_of_height<format>(height + 1) : nullptr;
    for (int64_t p = p0; p < p1; ++p) {
      int64_t row = first;
      for (int64_t i = 0; i < tiles; ++i) {
        // The last tile brings the next panel: while the others read this one from a cache, the
        // hardware sees no stream to prefetch. With one thread and the weights in memory, 12 rows
        // gained 65 %, 16 rows 40 %, 64 rows 20 %.
        const int64_t ahead = i == tiles - 1 ? args.weight->panel_stride : 0;
        if (i < num_taller) {
          taller(args, row, p, ahead);
          row += height + 1;
        } else {
          tile(args, row, p, ahead);
          row += height;
        }
      }
    }
  }
}

constexpr size_t kFormats = std::size(kIntegerFormats);
using Linear = void (*)(const LinearArgs& args, int64_t t0, int64_t t1, int64_t p0, int64_t p1);
template <size_t... i>
constexpr std::array<Linear, kFormats> linears_of(std::index_sequence<i...>) {
  return {linear<kIntegerFormats[i]>...};
}

void linear_int(const LinearArgs& args, int64_t t0, int64_t t1, int64_t p0, int64_t p1) {
  static constexpr auto kLinears = linears_of(std::make_index_sequence<kFormats>());
  for (size_t i = 0; i < kFormats; ++i)
    if (args.weight->format == kIntegerFormats[i]) return kLinears[i](args, t0, t1, p0, p1);
}

}  // namespace

void install_linear_int(Kernels& table) { table.linear_int = linear_int; }

}  // namespace octavo::OCTAVO_ISA
