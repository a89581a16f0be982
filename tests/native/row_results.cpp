// Operations on rows by themselves.
#include <algorithm>
#include <numeric>

#include "results.h"

namespace octavo {

void add_row_ops(const Machine& machine, const Results& results) {
  constexpr int64_t kHeads = 3, kRows = 9;
  for (const int64_t size : {2, 34, 64, 128}) {
    const int64_t columns = kHeads * size;
    const std::vector<float> x = random_rows(kRows, 2 * columns, 6);
    const std::vector<float> weight = random_rows(1, size, 7);
    const std::vector<float> weights = random_rows(1, columns, 7);
    const auto add = [&](const char* name, int64_t width, int64_t output_width, auto record) {
      add_row_op(machine, results, name_of(name, size), x, width, output_width, {1, kRows}, record);
    };
    add("rms_norm", columns, columns,
        [&](Tape& tape, Ref in) { return tape.rms_norm(in, kHeads, size, weight.data(), 1e-6f); });
    add("layer_norm", columns, columns, [&](Tape& tape, Ref in) {
      return tape.layer_norm(in, kHeads, size, weight.data(), weight.data(), 0, 1e-5f);
    });
    add("rms_norm-without-weight", columns, columns,
        [&](Tape& tape, Ref in) { return tape.rms_norm(in, kHeads, size, nullptr, 1e-6f); });
    add("layer_norm-by-head", columns, columns, [&](Tape& tape, Ref in) {
      return tape.layer_norm(in, kHeads, size, weights.data(), nullptr, size, 1e-5f);
    });
    add("layer_norm-without-weight", columns, columns, [&](Tape& tape, Ref in) {
      return tape.layer_norm(in, kHeads, size, nullptr, nullptr, 0, 1e-5f);
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
    add("clamped_silu_mul", 2 * size, size,
        [&](Tape& tape, Ref in) { return tape.clamped_silu_mul(in, size); });
    add("sigmoid_mul", columns, columns,
        [&](Tape& tape, Ref in) { return tape.sigmoid_mul(in, tape.scale(in, 1, 0.5f), columns); });
    add("scale", columns, columns,
        [&](Tape& tape, Ref in) { return tape.scale(in, columns, 33.941125f); });
    add("add", columns, columns,
        [&](Tape& tape, Ref in) { return tape.add(in, tape.scale(in, columns, -0.7f), columns); });

    std::vector<int64_t> positions(kRows);
    std::iota(positions.rbegin(), positions.rend(), 0);
    for (const int64_t rotated : {size, size / 4 * 2}) {
      if (rotated == 0) continue;
      Tape tape(machine.pool, machine.kernels);
      const Ref in = tape.input(Symbol::tokens, columns), at = tape.int_input(Symbol::tokens);
      const std::vector<float> table = random_rows(kRows, rotated, 8);
      tape.finish({{tape.rotary(in, kHeads, size, rotated, table.data(), at), columns}});
      results.add(name_of("rotary", size, rotated),
                  digest_of(tape.run({kRows, 0},
                                     {{x.data(), columns * int64_t{sizeof(float)}},
                                      {positions.data(), sizeof(int64_t)}},
                                     nullptr, nullptr)));
    }
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

}  // namespace octavo
