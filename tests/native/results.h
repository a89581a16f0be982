// What all results are made of: inputs that are the same everywhere, digests, tapes of one op.
#pragma once

#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "pack.h"
#include "pool.h"
#include "tape.h"

namespace octavo {

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
inline std::vector<float> random_rows(int64_t rows, int64_t columns, uint64_t seed) {
  Random random(seed);
  std::vector<float> values(static_cast<size_t>(rows * columns));
  for (int64_t t = 0; t < rows; ++t) {
    const float size = std::ldexp(1.0f, static_cast<int>(random.below(7)) - 3);
    for (int64_t c = 0; c < columns; ++c)
      values[static_cast<size_t>(t * columns + c)] = size * random.normal();
  }
  return values;
}

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

inline Digest digest_of(const std::vector<OutputRows>& outputs) {
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

// Panels and the memory that they lie in.
struct Matrix : PackedMatrix {
  std::shared_ptr<void> memory;
  int64_t bytes() const { return panels() * panel_stride; }
};
std::string name_of_format(const WeightFormat& format);
std::vector<WeightFormat> all_formats();
// Of ordinary numbers.
std::shared_ptr<Matrix> random_matrix(const WeightFormat& format, int64_t outputs, int64_t inputs);

// Each in a file of its own.
void add_packing();
void add_products(const Machine& machine, const Results& results);
void add_row_ops(const Machine& machine, const Results& results);
void add_attention(const Machine& machine, const Results& results);
void add_latent_attention(const Machine& machine, const Results& results);
void add_experts(const Machine& machine, const Results& results);
void add_sampling(const Machine& machine, const Results& results);

}  // namespace octavo
