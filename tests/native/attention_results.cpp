// Attention over paged caches, of keys and values or of latent vectors, and what is written there.
#include <algorithm>

#include "results.h"

namespace octavo {
namespace {

int64_t row_bytes(int64_t columns) { return columns * int64_t{sizeof(float)}; }

// A cache's zeroed memory.
std::shared_ptr<void> allocate_zeros(int64_t bytes) {
  std::shared_ptr<void> memory = allocate_aligned(bytes);
  std::memset(memory.get(), 0, static_cast<size_t>(bytes));
  return memory;
}

// Decodes, a prompt, a part of one. All tokens of all sequences are written, a few of them ask.
class Sequences {
 public:
  explicit Sequences(int64_t block_size) {
    constexpr std::pair<int64_t, int64_t> kContextsAndQueries[] = {{1, 1},   {17, 1},   {530, 1},
                                                                   {60, 60}, {300, 33}, {200, 3}};
    for (const auto& [context, queries] : kContextsAndQueries) {
      lens_.push_back(static_cast<int32_t>(context));
      starts_.push_back(static_cast<int32_t>(tokens += queries));
      for (int64_t i = 0; i < context; ++i) slots_.push_back(blocks * block_size + i);
      blocks += ceil_div(context, block_size);
      table_stride_ = std::max(table_stride_, ceil_div(context, block_size));
    }
    written = static_cast<int64_t>(slots_.size());
    tables_.resize(lens_.size() * static_cast<size_t>(table_stride_));
    int32_t next = 0;
    for (size_t s = 0; s < lens_.size(); ++s)
      for (int64_t i = 0; i < ceil_div(lens_[s], block_size); ++i)
        tables_[s * static_cast<size_t>(table_stride_) + static_cast<size_t>(i)] = next++;

    Random branches(15);
    for (size_t s = 0; s < lens_.size(); ++s)
      for (int32_t t = starts_[s]; t < starts_[s + 1]; ++t) {
        const int64_t back = 1 + branches.below(std::clamp(t - starts_[s], 1, 3));
        parents_.push_back(t - static_cast<int32_t>(back));
        positions_.push_back(t == starts_[s]
                                 ? lens_[s] - (starts_[s + 1] - t)
                                 : positions_[static_cast<size_t>(parents_.back())] + 1);
      }
  }

  int64_t blocks = 0, tokens = 0, written = 0;

  Batch writing() const {
    Batch batch{};
    batch.tokens = written;
    batch.kv_slots = slots_.data();
    return batch;
  }
  Batch chains() const {
    return {tokens,        static_cast<int64_t>(lens_.size()),
            nullptr,       nullptr,
            nullptr,       starts_.data(),
            lens_.data(),  tables_.data(),
            table_stride_, nullptr};
  }
  // The same rows: each but the first two of a sequence follows one of the three before.
  Batch trees() const {
    Batch batch = chains();
    batch.positions = positions_.data();
    batch.parents = parents_.data();
    return batch;
  }

 private:
  std::vector<int64_t> slots_, positions_;
  std::vector<int32_t> starts_{0}, lens_, tables_, parents_;
  int64_t table_stride_ = 0;
};

// Rows as wide as their columns.
struct Input {
  const std::vector<float>& values;
  int64_t columns;
  InputRows rows() const { return {values.data(), row_bytes(columns)}; }
};

// Writes into a cache and attends to it, and adds what is in it then and what that gives.
template <typename Write, typename Attend>
void add_cache(const Machine& machine, const Results& results, const std::string& name,
               const Sequences& sequences, const void* cache, int64_t bytes,
               const std::pair<Input, Input>& written, const std::vector<Input>& queries,
               int64_t output_columns, Write write, Attend attend) {
  Tape writing(machine.pool, machine.kernels);
  const Ref first = writing.input(Symbol::tokens, written.first.columns);
  const Ref second = writing.input(Symbol::tokens, written.second.columns);
  write(writing, first, second);
  writing.finish({});
  Batch batch = sequences.writing();
  writing.run({sequences.written, 0}, {written.first.rows(), written.second.rows()}, &batch,
              nullptr);
  Digest digest;
  digest.add_words(cache, bytes / 4);
  results.add(name_of("write", name), digest);

  Tape attending(machine.pool, machine.kernels);
  std::vector<Ref> refs;
  std::vector<InputRows> rows;
  for (const Input& input : queries) {
    refs.push_back(attending.input(Symbol::tokens, input.columns));
    rows.push_back(input.rows());
  }
  attending.finish({{attend(attending, refs), output_columns}});
  for (const bool has_trees : {false, true}) {
    batch = has_trees ? sequences.trees() : sequences.chains();
    results.add(name_of(has_trees ? "attend-over-trees" : "attend", name),
                digest_of(attending.run({sequences.tokens, 0}, rows, &batch, nullptr)));
  }
}

struct Shape {
  const char* name;
  int64_t heads, kv_heads, head_dim, block_size;
  Reach reach;
  float softcap;
  bool has_slopes_and_sinks;
};

struct Formats {
  const char* name;
  KVFormat keys, values;
};

}  // namespace

void add_attention(const Machine& machine, const Results& results) {
  constexpr Formats kFormats[] = {
      {"f32", KVFormat::f32, KVFormat::f32}, {"bf16", KVFormat::bf16, KVFormat::bf16},
      {"i8", KVFormat::i8, KVFormat::i8},    {"f8", KVFormat::f8e4m3, KVFormat::f8e4m3},
      {"i4", KVFormat::i4, KVFormat::i4},    {"i8-i4", KVFormat::i8, KVFormat::i4}};
  constexpr Shape kShapes[] = {
      {"grouped", 6, 2, 64, 16, {}, 0.0f, false},
      {"one-kv-head", 9, 1, 24, 32, {}, 0.0f, false},
      {"odd-blocks-softcap", 2, 2, 40, 7, {}, 20.0f, false},
      {"window", 4, 2, 16, 16, {100, 0}, 0.0f, false},
      {"chunks", 4, 2, 16, 16, {0, 48}, 0.0f, false},
      {"slopes-and-sinks", 6, 2, 24, 16, {}, 0.0f, true},
      {"large-heads", 2, 1, 256, 16, {}, 0.0f, false},
  };
  constexpr float kSlopes[] = {0.5f, 0.25f, 0.125f, 0.0625f, 0.7071067f, 0.3535534f};
  constexpr float kSinks[] = {0.0f, 1.5f, -3.0f, 20.0f, 0.3f, -0.7f};
  for (const Shape& shape : kShapes) {
    const Sequences sequences(shape.block_size);
    const int64_t kv_columns = shape.kv_heads * shape.head_dim;
    const int64_t columns = shape.heads * shape.head_dim;
    const std::vector<float> keys = random_rows(sequences.written, kv_columns, 10);
    std::vector<float> values = random_rows(sequences.written, kv_columns, 11);
    values[0] = 1e-4f;  // subnormal in 8 bits, and too large for them
    values[1] = 1e4f;
    const std::vector<float> queries = random_rows(sequences.tokens, columns, 12);

    for (const auto& [format_name, keys_as, values_as] : kFormats) {
      KVCache cache{keys_as,          values_as,      nullptr,       sequences.blocks,
                    shape.block_size, shape.kv_heads, shape.head_dim};
      if (keys_as == KVFormat::f8e4m3) cache.k_factor = 0.05f, cache.v_factor = 1.5f;
      const int64_t bytes = sequences.blocks * cache.block_bytes();
      const std::shared_ptr<void> memory = allocate_zeros(bytes);
      cache.data = static_cast<uint8_t*>(memory.get());
      const float* slopes = shape.has_slopes_and_sinks ? kSlopes : nullptr;
      const float* sinks = shape.has_slopes_and_sinks ? kSinks : nullptr;
      add_cache(
          machine, results, name_of("kv", format_name, shape.name), sequences, cache.data, bytes,
          {{keys, kv_columns}, {values, kv_columns}}, {{queries, columns}}, columns,
          [&](Tape& tape, Ref k, Ref v) { tape.write_kv(k, v, cache); },
          [&](Tape& tape, const std::vector<Ref>& q) {
            return tape.attention(q[0], cache, shape.heads, 0.2f, shape.reach, shape.softcap,
                                  slopes, sinks);
          });
    }
  }
}

void add_latent_attention(const Machine& machine, const Results& results) {
  struct LatentShape {
    const char* name;
    int64_t heads, rank, rope_dim, block_size;
  };
  constexpr LatentShape kShapes[] = {
      {"few-heads", 7, 48, 16, 16}, {"many-heads", 64, 64, 8, 32}, {"odd-blocks", 3, 40, 10, 7}};
  constexpr std::pair<const char*, KVFormat> kFormats[] = {{"f32", KVFormat::f32},
                                                           {"bf16", KVFormat::bf16},
                                                           {"i8", KVFormat::i8},
                                                           {"f8", KVFormat::f8e4m3}};
  for (const LatentShape& shape : kShapes) {
    const Sequences sequences(shape.block_size);
    const int64_t columns = shape.heads * shape.rank, rotated = shape.heads * shape.rope_dim;
    const std::vector<float> latents = random_rows(sequences.written, shape.rank, 16);
    const std::vector<float> keys = random_rows(sequences.written, shape.rope_dim, 17);
    const std::vector<float> queries = random_rows(sequences.tokens, columns, 18);
    const std::vector<float> rotated_queries = random_rows(sequences.tokens, rotated, 19);
    for (const auto& [format_name, format] : kFormats) {
      LatentCache cache{format,           nullptr,    sequences.blocks,
                        shape.block_size, shape.rank, shape.rope_dim};
      const int64_t bytes = sequences.blocks * cache.block_bytes();
      const std::shared_ptr<void> memory = allocate_zeros(bytes);
      cache.data = static_cast<uint8_t*>(memory.get());
      add_cache(
          machine, results, name_of("latents", format_name, shape.name), sequences, cache.data,
          bytes, {{latents, shape.rank}, {keys, shape.rope_dim}},
          {{queries, columns}, {rotated_queries, rotated}}, columns,
          [&](Tape& tape, Ref c, Ref r) { tape.write_latent(c, r, cache); },
          [&](Tape& tape, const std::vector<Ref>& q) {
            return tape.latent_attention(q[0], q[1], cache, shape.heads, 0.2f);
          });
    }
  }
}

}  // namespace octavo
