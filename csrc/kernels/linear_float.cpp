// Products of float rows with panels of floats, of f8e4m3 and of tables of floats.
//
// Where a group has scales, a weight is first made the float32 number scale * value, so that the
// product is that of the dequantized matrix. A tile of R rows by P panels stays in registers over the
// whole of k. Whatever the tile, an output is one fused multiply-add after another in rising k, then
// bias, then residual: that makes a row's bits independent of its batch.
#include <type_traits>
#include <utility>

#include "simd.h"
#include "table.h"

namespace octavo::OCTAVO_ISA {
namespace {

struct F32 {
  using Value = float;
  static f32x16 load_lanes(const float* p) { return load(p); }
};
struct BF16 {
  using Value = uint16_t;
  static f32x16 load_lanes(const uint16_t* p) { return load_bf16(p); }
};
struct F16 {
  using Value = uint16_t;
  static f32x16 load_lanes(const uint16_t* p) { return load_f16(p); }
};

// Input i of a group, before its scale. The scale is that of a 256th.
struct F8E4M3 {
  static constexpr WeightFormat kFormat{Values::f8e4m3, Scales::f32};
  static constexpr float kUnit = 256;
  static f32x16 load_lanes(const uint8_t* values, int64_t i) {
    return load_f8_256th(values + i * kLanes);
  }
};
template <Values values, const float (&numbers)[16]>
struct Table {
  static constexpr WeightFormat kFormat{values, Scales::f32};
  static constexpr float kUnit = 1;
  static f32x16 load_lanes(const uint8_t* values_of_group, int64_t i) {
    return look_up(numbers, values_of_group + i / 8 * kLanes * 4, int(i % 4 * 8 + i % 8 / 4 * 4));
  }
};
using NF4 = Table<Values::nf4, kNF4>;
using FP4 = Table<Values::fp4, kFP4>;

template <typename W>
constexpr bool has_scales = requires { W::kFormat; };
template <typename W>
constexpr bool is_table = std::is_same_v<W, NF4> || std::is_same_v<W, FP4>;

// The tallest tile fills the registers with sums, less what one k needs. One panel by itself is
// read fastest (68 against 61 GB/s for four side by side), so it suits 1 and 2 rows; up to 6 rows
// four panels give as many sums as the tall tiles have. Of a table's codes a panel takes so few
// bytes that one sum's additions, each of which waits for the one before, would be slower than the
// memory: with one thread of a Zen 4, four panels made 1 row 1.6 and 2 rows 1.4 times as fast.
#if defined(__AVX512F__)
constexpr int kMaxRows = 14, kPrefetchRows = 6;
template <typename W>
constexpr int panels_of_tile(int rows) {
  if (rows <= 2) return is_table<W> ? 4 : 1;
  return rows <= 6 ? 4 : 2;
}
#else
#if defined(__AVX2__)
constexpr int kMaxRows = 6, kPrefetchRows = 4;
#elif defined(__aarch64__)
constexpr int kMaxRows = 5, kPrefetchRows = 4;
#else
constexpr int kMaxRows = 2, kPrefetchRows = 2;
#endif
template <typename W>
constexpr int panels_of_tile(int rows) {
  return is_table<W> && rows == 1 && kMaxRows > 2 ? 2 : 1;
}
#endif

// A tile that computes for longer than its panels take to arrive fetches the next tile's into the
// L2 cache; else waiting and computing would alternate: +10 to +50 % at 6 to 14 rows (bf16: 2 to
// 14). A lower one keeps the memory busy by itself, and fetching ahead costs it up to 30 %.
template <typename W, int R>
constexpr bool kPrefetches = [] {
  if constexpr (has_scales<W>)
    return R >= 2;
  else
    return R >= (sizeof(typename W::Value) == 4 ? kPrefetchRows : 2);
}();

// Bias and residual of outputs that `sums` holds as [rows][panels]. Inlined, it would make most of
// the code of each tile.
[[gnu::noinline]] void finish(const LinearArgs& args, int64_t t, int64_t p, int rows, int panels,
                              const f32x16* sums) {
  for (int i = 0; i < panels; ++i) {
    const int64_t column = (p + i) * kLanes, left = args.weight->outputs - column;
    const f32x16 bias = args.bias ? load_rest(args.bias + column, left) : zero();
    for (int r = 0; r < rows; ++r) {
      f32x16 y = sums[r * panels + i];
      if (args.bias) y = y + bias;
      if (args.residual.data) y = y + load_rest(args.residual.row(t + r) + column, left);
      store_rest(args.y.row(t + r) + column, y, left);
    }
  }
}

template <typename W, int R, int P>
void tile(const LinearArgs& args, int64_t t, int64_t p) {
  const PackedMatrix& matrix = *args.weight;
  const int64_t inputs = matrix.inputs, panel_stride = matrix.panel_stride;
  const uint8_t* panels = matrix.data + p * panel_stride;
  const float* x = args.x.row(t);
  const int64_t x_stride = args.x.stride;

  // Unrolled wholly, so that GCC keeps the sums in registers.
  f32x16 sums[R][P];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < P; ++i) sums[r][i] = zero();
  }
  // load_panel(i): weights of input k of panel p + i.
  const auto add_products = [&](int64_t k, auto load_panel) {
    f32x16 w[P];
#pragma GCC unroll 4
    for (int i = 0; i < P; ++i) w[i] = load_panel(i);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const f32x16 a = splat(x[r * x_stride + k]);
#pragma GCC unroll 4
      for (int i = 0; i < P; ++i) sums[r][i] = fma(a, w[i], sums[r][i]);
    }
  };
  const auto prefetch = [&](const uint8_t* lanes) {
    if constexpr (kPrefetches<W, R>) __builtin_prefetch(lanes + P * panel_stride, 0, 2);
  };
  if constexpr (has_scales<W>) {
    for (int64_t g = 0; g * kGroup < inputs; ++g) {
      const GroupOffsets at = group_offsets(W::kFormat, g);
      for (int64_t line = 0; line < group_bytes(W::kFormat.values); line += kAlign)
        for (int i = 0; i < P; ++i) prefetch(panels + i * panel_stride + at.values + line);
      f32x16 scales[P];
#pragma GCC unroll 4
      for (int i = 0; i < P; ++i)
        scales[i] = load(reinterpret_cast<const float*>(panels + i * panel_stride + at.scales)) *
                    splat(W::kUnit);
      const auto add_input = [&](int64_t i) {
        add_products(g * kGroup + i, [&](int p) {
          return W::load_lanes(panels + p * panel_stride + at.values, i) * scales[p];
        });
      };
      const int64_t left = inputs - g * kGroup;
      if (left >= kGroup) {
        // By eight, whose codes lie in the same words: where in them is then a constant (nf4 with 4
        // rows: 1.2 times as fast).
        for (int64_t i = 0; i < kGroup; i += 8) {
#pragma GCC unroll 8
          for (int64_t j = 0; j < 8; ++j) add_input(i + j);
        }
      } else {
        for (int64_t i = 0; i < left; ++i) add_input(i);
      }
    }
  } else {
    for (int64_t k = 0; k < inputs; ++k)
      add_products(k, [&](int i) {
        const auto* panel = reinterpret_cast<const typename W::Value*>(panels + i * panel_stride);
        const auto* lanes = panel + k * kLanes;
        prefetch(reinterpret_cast<const uint8_t*>(lanes));
        return W::load_lanes(lanes);
      });
  }
  f32x16 done[R * P];  // a copy, since handing out the address of `sums` would put it into memory
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < P; ++i) done[r * P + i] = sums[r][i];
  }
  finish(args, t, p, R, P, done);
}

// Tiles by their number of rows: as wide as suits it, and one panel wide for what is left over.
using Tile = void (*)(const LinearArgs& args, int64_t t, int64_t p);
struct Tiles {
  Tile wide[kMaxRows + 1];
  Tile narrow[kMaxRows + 1];
};
template <typename W, int... R>
constexpr Tiles tiles_of(std::integer_sequence<int, R...>) {
  return {{nullptr, tile<W, R + 1, panels_of_tile<W>(R + 1)>...}, {nullptr, tile<W, R + 1, 1>...}};
}
template <typename W>
constexpr Tiles kTiles = tiles_of<W>(std::make_integer_sequence<int, kMaxRows>());

template <typename W>
void multiply(const LinearArgs& args, int64_t t0, int64_t t1, int64_t p0, int64_t p1) {
  // Rows are shared out evenly, so that the tiles of one call have the same width.
  static_assert(panels_of_tile<W>((kMaxRows + 1) / 2) == panels_of_tile<W>(kMaxRows));
  constexpr const Tiles& tiles = kTiles<W>;
  const int64_t rows = t1 - t0, num_tiles = ceil_div(rows, kMaxRows);
  const int width = panels_of_tile<W>(int(ceil_div(rows, num_tiles)));
  // All rows for some panels, which stay in the L2 cache meanwhile, then the next panels.
  for (int64_t p = p0; p < p1;) {
    const bool is_wide = p + width <= p1;
    for (int64_t i = 0; i < num_tiles; ++i) {  // of heights that differ by one at most
      const int64_t t = t0 + rows * i / num_tiles;
      const int64_t height = t0 + rows * (i + 1) / num_tiles - t;
      (is_wide ? tiles.wide : tiles.narrow)[height](args, t, p);
    }
    p += is_wide ? width : 1;
  }
}

void linear_float(const LinearArgs& args, int64_t t0, int64_t t1, int64_t p0, int64_t p1) {
  if (t0 >= t1) return;
  switch (args.weight->format.values) {
    case Values::f32: return multiply<F32>(args, t0, t1, p0, p1);
    case Values::bf16: return multiply<BF16>(args, t0, t1, p0, p1);
    case Values::f16: return multiply<F16>(args, t0, t1, p0, p1);
    case Values::f8e4m3: return multiply<F8E4M3>(args, t0, t1, p0, p1);
    case Values::nf4: return multiply<NF4>(args, t0, t1, p0, p1);
    case Values::fp4: return multiply<FP4>(args, t0, t1, p0, p1);
    default: return;  // linear_int's
  }
}

}  // namespace

void install_linear_float(Kernels& table) { table.linear_float = linear_float; }

}  // namespace octavo::OCTAVO_ISA
