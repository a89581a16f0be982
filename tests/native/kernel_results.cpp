// Every kernel of every instruction set that runs here, on inputs that are the same everywhere: a
// line "<set> <result> <digest>" for each, or "<set> can't run: <reason>". Equal digests on two
// processors are equal bits. Ops run from tapes, on a pool of three threads, as the engine runs
// them: so these are tried out, too.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "isa.h"
#include "kernels.h"
#include "memory.h"
#include "pack.h"
#include "pool.h"
#include "sampling.h"
#include "tape.h"

namespace octavo {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// --- inputs --------------------------------------------------------------------------------------

// SplitMix64, and values that come out of it exactly: the standard library's distributions may use
// logarithms, which differ between machines.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  int64_t below(int64_t limit) { return static_cast<int64_t>(bits() >> 33) % limit; }
  double unit() { return static_cast<double>(bits() >> 11) * 0x1p-53; }  // [0, 1)
  // Bell-shaped, with a deviation of 1.15; every 50th value is 16 times as large.
  float normal() {
    const double sum = unit() + unit() + unit() + unit() - 2.0;
    return static_cast<float>(sum * (below(50) == 0 ? 32.0 : 2.0));
  }

 private:
  uint64_t state_;
};

// Rows (T, D), each of a size of its own.
std::vector<float> random_rows(int64_t rows, int64_t columns, uint64_t seed) {
  Random random(seed);
  std::vector<float> values(static_cast<size_t>(rows * columns));
  for (int64_t t = 0; t < rows; ++t) {
    const float size = std::ldexp(1.0f, static_cast<int>(random.below(7)) - 3);
    for (int64_t c = 0; c < columns; ++c)
      values[static_cast<size_t>(t * columns + c)] = size * random.normal();
  }
  return values;
}

// --- results -------------------------------------------------------------------------------------

// FNV-1a of 32-bit words. Payloads of NaN are not specified, so all are one.
class Digest {
 public:
  void add_words(const void* data, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      uint32_t word;
      std::memcpy(&word, static_cast<const uint8_t*>(data) + 4 * i, 4);
      add(word);
    }
  }
  void add_floats(const float* values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const float value = std::isnan(values[i]) ? kNaN : values[i];
      add_words(&value, 1);
    }
  }
  uint64_t value() const { return value_; }

 private:
  void add(uint32_t word) { value_ = (value_ ^ word) * 0x100000001b3; }
  uint64_t value_ = 0xcbf29ce484222325;
};

// "linear/q8/33"
template <typename... Parts>
std::string name_of(const char* first, const Parts&... parts) {
  std::ostringstream name;
  name << first;
  ((name << '/' << parts), ...);
  return name.str();
}

class Results {
 public:
  explicit Results(std::string set) : set_(std::move(set)) {}

  void add(const std::string& name, const Digest& digest) const {
    std::printf("%s %s %016" PRIx64 "\n", set_.c_str(), name.c_str(), digest.value());
  }

 private:
  std::string set_;
};

struct Machine {
  std::shared_ptr<Pool> pool;
  std::shared_ptr<const Kernels> kernels;
};

Digest digest_of(const std::vector<OutputRows>& outputs) {
  Digest digest;
  for (const OutputRows& output : outputs)
    for (int64_t t = 0; t < output.rows; ++t)
      digest.add_floats(output.data + t * output.stride, output.columns);
  return digest;
}

// A tape of one function of float rows (T, D), replayed for each number of rows.
template <typename Record>
void add_row_op(const Machine& machine, const Results& results, const std::string& name,
                const std::vector<float>& x, int64_t columns, int64_t output_columns,
                const std::vector<int64_t>& row_counts, Record record) {
  Tape tape(machine.pool, machine.kernels);
  const Ref input = tape.input(Symbol::tokens, columns);
  tape.finish({{record(tape, input), output_columns}});
  for (const int64_t rows : row_counts) {
    const InputRows given{x.data(), columns * int64_t{sizeof(float)}};
    results.add(name_of(name.c_str(), "rows", rows),
                digest_of(tape.run({rows, 0}, {given}, nullptr, nullptr)));
  }
}

// --- weights -------------------------------------------------------------------------------------

// "q4-k8-min-16"
std::string name_of_format(const WeightFormat& format) {
  static constexpr const char* kValues[] = {"f32",  "bf16", "f16", "q8", "q4",
                                            "e2m1", "f8",   "nf4", "fp4"};
  static constexpr const char* kScales[] = {"f16", "bf16", "f32", "k8"};
  static constexpr const char* kOffsets[] = {"", "-min", "-zero"};
  std::ostringstream name;
  name << kValues[static_cast<int>(format.values)];
  if (is_plain(format.values)) return name.str();
  name << '-' << kScales[static_cast<int>(format.scales)]
       << kOffsets[static_cast<int>(format.offset)] << '-' << format.span;
  return name.str();
}

std::vector<WeightFormat> all_formats() {
  std::vector<WeightFormat> formats(std::begin(kFloatFormats), std::end(kFloatFormats));
  formats.insert(formats.end(), std::begin(kIntegerFormats), std::end(kIntegerFormats));
  return formats;
}

// Panels and the memory that they lie in.
struct Matrix : PackedMatrix {
  std::shared_ptr<void> memory;
  int64_t bytes() const { return panels() * panel_stride; }
};

std::shared_ptr<Matrix> allocate_matrix(const WeightFormat& format, int64_t outputs,
                                        int64_t inputs) {
  auto matrix = std::make_shared<Matrix>();
  const int64_t stride = panel_bytes(format, inputs);
  matrix->memory = allocate_aligned(ceil_div(outputs, kLanes) * stride);
  auto* panels = static_cast<uint8_t*>(matrix->memory.get());
  std::memset(panels, 0, static_cast<size_t>(ceil_div(outputs, kLanes) * stride));
  static_cast<PackedMatrix&>(*matrix) = {format, outputs, inputs, panels, stride};
  return matrix;
}

std::shared_ptr<Matrix> pack(const WeightFormat& format, StoredType type, int64_t outputs,
                             int64_t inputs, const std::vector<uint8_t>& stored,
                             const std::vector<float>& scales = {}) {
  auto matrix = allocate_matrix(format, outputs, inputs);
  const int64_t row_bytes = stored_row_bytes(type, inputs);
  std::vector<StoredRow> rows;
  for (int64_t r = 0; r < outputs; ++r) {
    const float* numbers =
        scales.empty() ? nullptr : scales.data() + r * ceil_div(inputs, format.span);
    rows.push_back({type, stored.data() + r * row_bytes, numbers, numbers});
  }
  pack_panels(format, inputs, rows.data(), outputs, kGroup,
              static_cast<uint8_t*>(matrix->memory.get()));
  return matrix;
}

std::vector<uint8_t> bytes_of(const std::vector<float>& values) {
  std::vector<uint8_t> bytes(values.size() * sizeof(float));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// Any values, with scales and offsets that are ordinary numbers.
std::shared_ptr<Matrix> random_panels(const WeightFormat& format, int64_t outputs, int64_t inputs) {
  auto matrix = allocate_matrix(format, outputs, inputs);
  auto* panels = static_cast<uint8_t*>(matrix->memory.get());
  Random random(static_cast<uint64_t>(inputs));
  for (int64_t i = 0; i < matrix->bytes(); ++i) panels[i] = static_cast<uint8_t>(random.bits());
  // The upper byte of numbers from 2^-7 to 2, in fp16 to 2^-6.
  const auto set_number = [&](uint8_t* first, Scales kind) {
    const bool is_half = kind == Scales::f16;
    first[scale_bytes(kind) - 1] = static_cast<uint8_t>((is_half ? 0x20 : 0x3c) + random.below(4));
  };
  const int64_t kinds = format.offset == Offset::none ? 1 : 2;
  const int64_t bytes = scale_bytes(format.scales), numbers = kGroup / format.span * kLanes;
  for (int64_t p = 0; p < matrix->panels(); ++p)
    for (int64_t g = 0; g < matrix->groups(); ++g) {
      const GroupOffsets at = group_offsets(format, g);
      uint8_t* panel = panels + p * matrix->panel_stride;
      if (format.scales == Scales::k8) {
        for (int64_t i = 0; i < kinds * kLanes; ++i)
          set_number(panel + at.factors + 2 * i, Scales::f16);
        continue;
      }
      for (int64_t i = 0; i < numbers; ++i) {
        set_number(panel + at.scales + i * bytes, format.scales);
        if (kinds == 2) set_number(panel + at.offsets + i * bytes, format.scales);
      }
    }
  return matrix;
}

std::shared_ptr<Matrix> random_matrix(const WeightFormat& format, int64_t outputs, int64_t inputs) {
  if (!can_pack(format, StoredType::f32)) return random_panels(format, outputs, inputs);
  return pack(format, StoredType::f32, outputs, inputs,
              bytes_of(random_rows(outputs, inputs, static_cast<uint64_t>(inputs))));
}

struct Blocks {
  const char* name;
  StoredType type;
  int64_t halves[2];   // where the scale, or the factors, lie in a block; -1: nowhere
};
constexpr Blocks kBlocks[] = {
    {"q8_0", StoredType::q8_0, {0, -1}},   {"q4_0", StoredType::q4_0, {0, -1}},
    {"q4_1", StoredType::q4_1, {0, 2}},    {"q5_0", StoredType::q5_0, {0, -1}},
    {"q5_1", StoredType::q5_1, {0, 2}},    {"q2_k", StoredType::q2_k, {80, 82}},
    {"q3_k", StoredType::q3_k, {108, -1}}, {"q4_k", StoredType::q4_k, {0, 2}},
    {"q5_k", StoredType::q5_k, {0, 2}},    {"q6_k", StoredType::q6_k, {208, -1}},
};

// Any bytes, but scales that are ordinary numbers.
std::vector<uint8_t> random_blocks(const Blocks& blocks, int64_t rows, int64_t inputs) {
  Random random(1);
  std::vector<uint8_t> bytes(static_cast<size_t>(rows * stored_row_bytes(blocks.type, inputs)));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.bits());
  const int64_t size = stored_row_bytes(blocks.type, stored_block(blocks.type));
  for (int64_t at = 0; at < static_cast<int64_t>(bytes.size()); at += size)
    for (const int64_t half : blocks.halves)
      if (half >= 0)
        bytes[static_cast<size_t>(at + half + 1)] =
            static_cast<uint8_t>((half == blocks.halves[0] ? 0x20 : 0xa0) + random.below(8));
  return bytes;
}

// Packing has no kernels: it is the same for all sets.
void add_packing() {
  const Results results("packing");
  const int64_t outputs = 21, inputs = 256;
  for (const WeightFormat& format : all_formats()) {
    const auto add = [&](const char* type_name, StoredType type, const std::vector<uint8_t>& stored,
                         const std::vector<float>& scales = {}) {
      if (!can_pack(format, type)) return;
      const auto matrix = pack(format, type, outputs, inputs, stored, scales);
      Digest digest;
      digest.add_words(matrix->data, matrix->bytes() / 4);
      results.add(name_of("pack", type_name, "into", name_of_format(format)), digest);
    };
    add("f32", StoredType::f32, bytes_of(random_rows(outputs, inputs, inputs)));
    std::vector<uint8_t> halves(static_cast<size_t>(outputs * inputs * 2));
    Random random(2);
    for (size_t i = 0; i < halves.size(); i += 2) {  // no NaN or infinity in either format
      halves[i] = static_cast<uint8_t>(random.bits());
      halves[i + 1] = static_cast<uint8_t>(0x20 + random.below(0x20) + 0x80 * random.below(2));
    }
    add("bf16", StoredType::bf16, halves);
    add("f16", StoredType::f16, halves);
    std::vector<uint8_t> codes(static_cast<size_t>(outputs * inputs));
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random.bits());
    add("codes", StoredType::codes, codes, random_rows(outputs, inputs / format.span, 3));
    for (const Blocks& blocks : kBlocks)
      add(blocks.name, blocks.type, random_blocks(blocks, outputs, inputs));
  }
}

// --- products and lookups ------------------------------------------------------------------------

void add_products(const Machine& machine, const Results& results) {
  constexpr int64_t kRows = 70;
  constexpr std::pair<int64_t, int64_t> kSizes[] = {{33, 77}, {96, 16}, {576, 200}};  // I, O
  // Tiles of every height: the highest of any set has 14 rows.
  std::vector<int64_t> row_counts(14);
  std::iota(row_counts.begin(), row_counts.end(), 1);
  row_counts.push_back(kRows);
  for (const WeightFormat& format : all_formats()) {
    for (const auto& [inputs, outputs] : kSizes) {
      const std::shared_ptr<Matrix> matrix = random_matrix(format, outputs, inputs);
      const std::string name = name_of("linear", name_of_format(format), inputs);
      std::vector<float> x = random_rows(kRows, inputs, 3);
      add_row_op(machine, results, name, x, inputs, outputs, row_counts,
                 [&](Tape& tape, Ref in) { return tape.linear({matrix}, in, nullptr); });

      // Broken rows, whose neighbours are not; a row of zeros; with bias and residual.
      x[static_cast<size_t>(2 * inputs + 5)] = kNaN;
      x[static_cast<size_t>(4 * inputs + 32)] = kInfinity;
      std::fill_n(x.begin() + 6 * inputs, inputs, 0.0f);
      const std::vector<float> bias = random_rows(1, outputs, 4);
      const std::vector<float> scales = random_rows(1, inputs, 5);
      add_row_op(machine, results, name_of(name.c_str(), "bias-and-residual"), x, inputs, outputs,
                 {1, 9}, [&](Tape& tape, Ref in) {
                   const Ref residual = tape.linear({matrix}, in, nullptr);
                   const Ref scaled = tape.scale(in, inputs, 0.3f);
                   return tape.add(residual, tape.linear({matrix}, scaled, bias.data()), outputs);
                 });
    }

    constexpr int64_t kVocabulary = 40, kSize = 70;
    Tape tape(machine.pool, machine.kernels);
    const Ref ids = tape.int_input(Symbol::tokens);
    const Ref rows = tape.embedding(random_matrix(format, kVocabulary, kSize), ids);
    tape.finish({{rows, kSize}});
    std::vector<int64_t> tokens(kVocabulary);
    std::iota(tokens.rbegin(), tokens.rend(), 0);
    results.add(name_of("embedding", name_of_format(format)),
                digest_of(tape.run({kVocabulary, 0}, {{tokens.data(), sizeof(int64_t)}}, nullptr,
                                   nullptr)));
  }
}

// --- operations on rows --------------------------------------------------------------------------

void add_row_ops(const Machine& machine, const Results& results) {
  constexpr int64_t kHeads = 3, kRows = 9;
  for (const int64_t size : {2, 34, 64, 128}) {
    const int64_t columns = kHeads * size;
    const std::vector<float> x = random_rows(kRows, 2 * columns, 6);
    const std::vector<float> weight = random_rows(1, size, 7);
    const auto add = [&](const char* name, int64_t width, int64_t output_width, auto record) {
      add_row_op(machine, results, name_of(name, size), x, width, output_width, {1, kRows}, record);
    };
    add("rms_norm", columns, columns,
        [&](Tape& tape, Ref in) { return tape.rms_norm(in, kHeads, size, weight.data(), 1e-6f); });
    add("layer_norm", columns, columns, [&](Tape& tape, Ref in) {
      return tape.layer_norm(in, kHeads, size, weight.data(), weight.data(), 0, 1e-5f);
    });
    add("silu", columns, columns, [&](Tape& tape, Ref in) { return tape.silu(in, columns); });
    add("gelu", columns, columns, [&](Tape& tape, Ref in) { return tape.gelu(in, columns); });
    add("gelu_tanh", columns, columns,
        [&](Tape& tape, Ref in) { return tape.gelu_tanh(in, columns); });
    add("relu", columns, columns, [&](Tape& tape, Ref in) { return tape.relu(in, columns); });
    add("clamp", columns, columns,
        [&](Tape& tape, Ref in) { return tape.clamp(in, columns, 0.8f); });
    add("softcap", columns, columns,
        [&](Tape& tape, Ref in) { return tape.softcap(in, columns, 3.0f); });
    add("silu_mul", 2 * size, size, [&](Tape& tape, Ref in) { return tape.silu_mul(in, size); });
    add("gelu_tanh_mul", 2 * size, size,
        [&](Tape& tape, Ref in) { return tape.gelu_tanh_mul(in, size); });
    add("scale", columns, columns,
        [&](Tape& tape, Ref in) { return tape.scale(in, columns, 33.941125f); });
    add("add", columns, columns,
        [&](Tape& tape, Ref in) { return tape.add(in, tape.scale(in, columns, -0.7f), columns); });

    Tape tape(machine.pool, machine.kernels);
    const Ref in = tape.input(Symbol::tokens, columns), at = tape.int_input(Symbol::tokens);
    const std::vector<float> table = random_rows(kRows, size, 8);
    tape.finish({{tape.rotary(in, kHeads, size, size, table.data(), at), columns}});
    std::vector<int64_t> positions(kRows);
    std::iota(positions.rbegin(), positions.rend(), 0);
    results.add(name_of("rotary", size),
                digest_of(tape.run({kRows, 0},
                                   {{x.data(), columns * int64_t{sizeof(float)}},
                                    {positions.data(), sizeof(int64_t)}},
                                   nullptr, nullptr)));
  }

  // Activations by themselves: products don't tell a zero group's scale from another.
  for (const int64_t size : {1, 33, 576}) {
    std::vector<float> x = random_rows(kRows, size, 9);
    std::fill_n(x.begin() + size, size, 0.0f);
    std::fill_n(x.begin() + 2 * size, size, 1e-35f);
    std::fill_n(x.begin() + 3 * size, size, 1e35f);
    const int64_t bytes = quantized_row_bytes(size), groups = ceil_div(size, kGroup);
    std::vector<uint8_t> records(static_cast<size_t>(kRows * bytes));
    machine.kernels->quantize({x.data(), size}, {records.data(), bytes, groups}, 0, kRows, size);
    Digest digest;
    for (int64_t t = 0; t < kRows; ++t)
      digest.add_words(records.data() + t * bytes, groups * (kGroup + 12) / 4);
    results.add(name_of("quantize", size), digest);
  }
}

// --- attention -----------------------------------------------------------------------------------

struct Shape {
  const char* name;
  int64_t heads, kv_heads, head_dim, block_size, window;
  float softcap;
  bool has_slopes_and_sinks;
};

void add_attention(const Machine& machine, const Results& results) {
  struct Format {
    const char* name;
    KVFormat keys, values;
  };
  constexpr Format kFormats[] = {
      {"f32", KVFormat::f32, KVFormat::f32}, {"bf16", KVFormat::bf16, KVFormat::bf16},
      {"i8", KVFormat::i8, KVFormat::i8},    {"f8", KVFormat::f8e4m3, KVFormat::f8e4m3},
      {"i4", KVFormat::i4, KVFormat::i4},    {"i8-i4", KVFormat::i8, KVFormat::i4}};
  constexpr Shape kShapes[] = {
      {"grouped", 6, 2, 64, 16, 0, 0.0f, false},
      {"one-kv-head", 9, 1, 24, 32, 0, 0.0f, false},
      {"odd-blocks-softcap", 2, 2, 40, 7, 0, 20.0f, false},
      {"window", 4, 2, 16, 16, 100, 0.0f, false},
      {"slopes-and-sinks", 6, 2, 24, 16, 0, 0.0f, true},
  };
  constexpr float kSlopes[] = {0.5f, 0.25f, 0.125f, 0.0625f, 0.7071067f, 0.3535534f};
  constexpr float kSinks[] = {0.0f, 1.5f, -3.0f, 20.0f, 0.3f, -0.7f};
  // (context, queries) of each sequence: decodes, a prompt, a part of one.
  constexpr std::pair<int64_t, int64_t> kSequences[] = {{1, 1},   {17, 1},   {530, 1},
                                                        {60, 60}, {300, 33}, {200, 3}};
  for (const Shape& shape : kShapes) {
    // All tokens of all sequences are written, a few of them ask.
    std::vector<int64_t> slots;
    std::vector<int32_t> starts{0}, lens;
    int64_t blocks = 0, tokens = 0, table_stride = 0;
    for (const auto& [context, queries] : kSequences) {
      lens.push_back(static_cast<int32_t>(context));
      starts.push_back(static_cast<int32_t>(tokens += queries));
      for (int64_t i = 0; i < context; ++i) slots.push_back(blocks * shape.block_size + i);
      blocks += ceil_div(context, shape.block_size);
      table_stride = std::max(table_stride, ceil_div(context, shape.block_size));
    }
    std::vector<int32_t> tables(lens.size() * static_cast<size_t>(table_stride));
    int32_t next = 0;
    for (size_t s = 0; s < lens.size(); ++s)
      for (int64_t i = 0; i < ceil_div(lens[s], shape.block_size); ++i)
        tables[s * static_cast<size_t>(table_stride) + static_cast<size_t>(i)] = next++;

    // The same rows as trees: each but the first two of a sequence follows one of the three before.
    std::vector<int64_t> positions;
    std::vector<int32_t> parents;
    Random branches(15);
    for (size_t s = 0; s < lens.size(); ++s)
      for (int32_t t = starts[s]; t < starts[s + 1]; ++t) {
        const int64_t back = 1 + branches.below(std::clamp(t - starts[s], 1, 3));
        parents.push_back(t - static_cast<int32_t>(back));
        positions.push_back(t == starts[s] ? lens[s] - (starts[s + 1] - t)
                                           : positions[static_cast<size_t>(parents.back())] + 1);
      }

    const auto written = static_cast<int64_t>(slots.size());
    const int64_t kv_columns = shape.kv_heads * shape.head_dim;
    const int64_t columns = shape.heads * shape.head_dim;
    const std::vector<float> keys = random_rows(written, kv_columns, 10);
    std::vector<float> values = random_rows(written, kv_columns, 11);
    values[0] = 1e-4f;  // subnormal in 8 bits, and too large for them
    values[1] = 1e4f;
    const std::vector<float> queries = random_rows(tokens, columns, 12);
    const auto stride = [](int64_t width) { return width * int64_t{sizeof(float)}; };

    for (const auto& [format_name, keys_as, values_as] : kFormats) {
      KVCache cache{keys_as,          values_as,      nullptr,       blocks,
                    shape.block_size, shape.kv_heads, shape.head_dim};
      const int64_t bytes = blocks * cache.block_bytes();
      const std::shared_ptr<void> memory = allocate_aligned(bytes);
      cache.data = static_cast<uint8_t*>(memory.get());
      std::memset(cache.data, 0, static_cast<size_t>(bytes));

      Tape writing(machine.pool, machine.kernels);
      const Ref k = writing.input(Symbol::tokens, kv_columns);
      const Ref v = writing.input(Symbol::tokens, kv_columns);
      writing.write_kv(k, v, cache);
      writing.finish({});
      Batch batch{};
      batch.tokens = written;
      batch.kv_slots = slots.data();
      writing.run({written, 0},
                  {{keys.data(), stride(kv_columns)}, {values.data(), stride(kv_columns)}}, &batch,
                  nullptr);
      Digest digest;
      digest.add_words(cache.data, bytes / 4);
      results.add(name_of("write_kv", format_name, shape.name), digest);

      Tape attending(machine.pool, machine.kernels);
      const Ref q = attending.input(Symbol::tokens, columns);
      const float* slopes = shape.has_slopes_and_sinks ? kSlopes : nullptr;
      const float* sinks = shape.has_slopes_and_sinks ? kSinks : nullptr;
      const Ref y = attending.attention(q, cache, shape.heads, 0.2f, shape.window, shape.softcap,
                                        slopes, sinks);
      attending.finish({{y, columns}});
      batch = {tokens,       static_cast<int64_t>(lens.size()),
               nullptr,      nullptr,
               nullptr,      starts.data(),
               lens.data(),  tables.data(),
               table_stride, nullptr};
      const auto attend = [&](const char* name) {
        results.add(name_of(name, format_name, shape.name),
                    digest_of(attending.run({tokens, 0}, {{queries.data(), stride(columns)}},
                                            &batch, nullptr)));
      };
      attend("attention");
      batch.positions = positions.data();
      batch.parents = parents.data();
      attend("attention-over-trees");
    }
  }
}

// --- sampling ------------------------------------------------------------------------------------

void add_sampling(const Machine& machine, const Results& results) {
  constexpr int64_t kRows = 24, kTop = 5;
  for (const int64_t size : {5, 1000, 30001}) {
    std::vector<float> values = random_rows(kRows, size, 13);
    const Logits logits{{values.data(), size}, kRows, size};
    Random random(14);
    std::vector<float> temperature, top_p, min_p;
    std::vector<int64_t> top_k, chosen, tokens(kRows);
    std::vector<double> uniform;
    for (int64_t r = 0; r < kRows; ++r) {
      temperature.push_back(r % 4 == 0 ? 0.0f : 0.4f * static_cast<float>(r % 4));
      top_k.push_back(r % 3 == 0 ? 1 + r : 0);
      top_p.push_back(r % 2 == 0 ? 0.9f : 1.0f);
      min_p.push_back(r % 5 == 0 ? 0.05f : 0.0f);
      uniform.push_back(random.unit());
      chosen.push_back(random.below(size));
    }
    const SampleSettings settings{temperature.data(), top_k.data(), top_p.data(), min_p.data()};
    sample(*machine.pool, *machine.kernels, logits, settings, uniform.data(), tokens.data());
    Digest digest;
    digest.add_words(tokens.data(), 2 * kRows);
    results.add(name_of("sample", size), digest);

    std::vector<float> distributions(static_cast<size_t>(kRows * size));
    probabilities(*machine.pool, *machine.kernels, logits, settings, distributions.data());
    digest = Digest();
    digest.add_floats(distributions.data(), kRows * size);
    results.add(name_of("probabilities", size), digest);

    std::vector<float> own(kRows), top_values(kRows * kTop);
    std::vector<int64_t> ranks(kRows), top_ids(kRows * kTop);
    log_probabilities(*machine.pool, *machine.kernels, logits, chosen.data(), kTop,
                      {own.data(), ranks.data(), top_ids.data(), top_values.data()});
    digest = Digest();
    digest.add_floats(own.data(), kRows);
    digest.add_words(ranks.data(), 2 * kRows);
    digest.add_words(top_ids.data(), 2 * kRows * kTop);
    digest.add_floats(top_values.data(), kRows * kTop);
    results.add(name_of("log_probabilities", size), digest);

    values[1] = kNaN;
    values[static_cast<size_t>(3 * size + size - 1)] = kInfinity;
    values[static_cast<size_t>(5 * size)] = -kInfinity;
    std::fill_n(values.begin() + 7 * size, size, -kInfinity);
    bool broken[kRows];
    non_finite_rows(*machine.pool, *machine.kernels, logits, broken);
    digest = Digest();
    digest.add_words(broken, kRows / 4);
    results.add(name_of("non_finite_rows", size), digest);
  }
}

void add_all(const Isa& isa) {
  if (!isa.problem.empty()) {
    std::printf("%s can't run: %s\n", isa.name, isa.problem.c_str());
    return;
  }
  const Results results(isa.name);
  const Machine machine{std::make_shared<Pool>(3),
                        std::make_shared<Kernels>(*kernels_named(isa.name))};
  add_products(machine, results);
  add_row_ops(machine, results);
  add_attention(machine, results);
  add_sampling(machine, results);
}

}  // namespace
}  // namespace octavo

int main() {
  octavo::add_packing();
  for (const octavo::Isa& isa : octavo::built_isas()) octavo::add_all(isa);
}
