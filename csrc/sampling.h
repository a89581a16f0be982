// From a batch of logits to tokens, rows in parallel; ops/sampling.py has the definitions. Rows are
// independent: nothing in one changes another's result, nor does the number of threads.
#pragma once

#include <cstdint>
#include <span>

#include "kernels.h"
#include "pool.h"

namespace octavo {

struct Logits {
  Rows rows;
  int64_t count;  // R
  int64_t size;  // V
};

// As ops/sampling.py has it; arrays that belong together are of one length.
struct LogitEdits {
  std::span<const int64_t> penalty_rows, penalty_tokens, penalty_counts;
  std::span<const float> repetition, presence, frequency;  // (R,)
  std::span<const int64_t> bias_rows, bias_tokens;
  std::span<const float> bias_values;
  std::span<const int64_t> allowed_rows, allowed_pair_rows, allowed_pair_tokens;
};

// In place. Raises std::out_of_range, before anything is changed, for rows or tokens that are not
// there.
void adjust_logits(Pool& pool, const Logits& logits, const LogitEdits& edits);

// Each (R,).
struct SampleSettings {
  const float* temperature;
  const int64_t* top_k;
  const float* top_p;
  const float* min_p;
};
// uniform, tokens: (R,).
void sample(Pool& pool, const Kernels& kernels, const Logits& logits,
            const SampleSettings& settings, const double* uniform, int64_t* tokens);
// result: (R, V).
void probabilities(Pool& pool, const Kernels& kernels, const Logits& logits,
                   const SampleSettings& settings, float* result);

// own, ranks: (R,); top_ids, top_values: (R, num_top), num_top at most V. Raises std::out_of_range
// for tokens that are not there.
struct LogProbabilities {
  float* own;
  int64_t* ranks;
  int64_t* top_ids;
  float* top_values;
};
void log_probabilities(Pool& pool, const Kernels& kernels, const Logits& logits,
                       const int64_t* tokens, int64_t num_top, const LogProbabilities& result);

void non_finite_rows(Pool& pool, const Kernels& kernels, const Logits& logits, bool* rows);

}  // namespace octavo
