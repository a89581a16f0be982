// Packing, products and lookups.
#include <algorithm>
#include <iterator>
#include <numeric>

#include "results.h"

namespace octavo {
namespace {

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

}  // namespace

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

std::shared_ptr<Matrix> random_matrix(const WeightFormat& format, int64_t outputs, int64_t inputs) {
  if (!can_pack(format, StoredType::f32)) return random_panels(format, outputs, inputs);
  return pack(format, StoredType::f32, outputs, inputs,
              bytes_of(random_rows(outputs, inputs, static_cast<uint64_t>(inputs))));
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
      add_row_op(machine, results, name_of(name.c_str(), "bias-and-residual"), x, inputs, outputs,
                 {1, 9}, [&](Tape& tape, Ref in) {
                   const Ref residual = tape.linear({matrix}, in, nullptr);
                   const Ref scaled = tape.scale(in, inputs, 0.3f);
                   return tape.add(residual, tape.linear({matrix}, scaled, bias.data()), outputs);
                 });
    }

    // Columns in another order than activations.
    auto ordered = random_matrix(format, 40, 70);
    std::vector<int32_t> order(70);
    for (int32_t k = 0; k < 70; ++k) order[static_cast<size_t>(k)] = k * 3 % 70;
    ordered->order = order.data();
    add_row_op(machine, results, name_of("linear", name_of_format(format), "ordered"),
               random_rows(kRows, 70, 3), 70, 40, {1, 9},
               [&](Tape& tape, Ref in) { return tape.linear({ordered}, in, nullptr); });

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

}  // namespace octavo
