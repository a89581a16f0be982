#include "sampling.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

#include "memory.h"

namespace octavo {

// The row's weights, and its tokens twice, to sort them from the one to the other.
int64_t sample_scratch_bytes(int64_t size) {
  return round_up(size, 64) * int64_t{sizeof(float)} + 2 * size * int64_t{sizeof(uint64_t)};
}

namespace {

// The calling thread's own, kept from call to call: the page faults of new memory would take about
// as long as sampling a row.
void* thread_scratch(int64_t size) {
  thread_local std::shared_ptr<void> memory;
  thread_local int64_t held = 0;
  const int64_t needed = sample_scratch_bytes(size);
  if (held < needed) {
    memory = allocate_aligned(needed);
    held = needed;
  }
  return memory.get();
}

void check_below(std::span<const int64_t> indices, int64_t limit, const char* message) {
  for (const int64_t index : indices)
    if (index < 0 || index >= limit) throw std::out_of_range(message);
}

SampleArgs args_of_row(const SampleSettings& settings, int64_t r) {
  return {settings.temperature[r], settings.top_k[r], settings.top_p[r], settings.min_p[r]};
}

}  // namespace

void adjust_logits(Pool& pool, const Logits& logits, const LogitEdits& edits) {
  for (const auto& rows :
       {edits.penalty_rows, edits.bias_rows, edits.allowed_rows, edits.allowed_pair_rows})
    check_below(rows, logits.count, "an edit of a row that is not among the logits");
  for (const auto& tokens : {edits.penalty_tokens, edits.bias_tokens, edits.allowed_pair_tokens})
    check_below(tokens, logits.size, "an edit of a token beyond the vocabulary");

  for (size_t i = 0; i < edits.penalty_rows.size(); ++i) {
    const int64_t row = edits.penalty_rows[i], count = edits.penalty_counts[i];
    float& logit = logits.rows.row(row)[edits.penalty_tokens[i]];
    logit = logit > 0.0f ? logit / edits.repetition[row] : logit * edits.repetition[row];
    if (count > 0) logit -= edits.presence[row] + edits.frequency[row] * static_cast<float>(count);
  }
  for (size_t i = 0; i < edits.bias_rows.size(); ++i)
    logits.rows.row(edits.bias_rows[i])[edits.bias_tokens[i]] += edits.bias_values[i];

  const auto allowed = [&](size_t i) -> float& {
    return logits.rows.row(edits.allowed_pair_rows[i])[edits.allowed_pair_tokens[i]];
  };
  std::vector<float> kept(edits.allowed_pair_rows.size());
  for (size_t i = 0; i < kept.size(); ++i) kept[i] = allowed(i);
  pool.parallel_for(static_cast<int64_t>(edits.allowed_rows.size()), [&](int64_t i, int) {
    std::fill_n(logits.rows.row(edits.allowed_rows[static_cast<size_t>(i)]), logits.size,
                -std::numeric_limits<float>::infinity());
  });
  for (size_t i = 0; i < kept.size(); ++i) allowed(i) = kept[i];
}

void sample(Pool& pool, const Kernels& kernels, const Logits& logits,
            const SampleSettings& settings, const double* uniform, int64_t* tokens) {
  pool.parallel_for(logits.count, [&](int64_t r, int) {
    tokens[r] = kernels.sample(logits.rows.row(r), logits.size, args_of_row(settings, r),
                               uniform[r], thread_scratch(logits.size));
  });
}

void probabilities(Pool& pool, const Kernels& kernels, const Logits& logits,
                   const SampleSettings& settings, float* result) {
  pool.parallel_for(logits.count, [&](int64_t r, int) {
    kernels.probabilities(logits.rows.row(r), logits.size, args_of_row(settings, r),
                          result + r * logits.size, thread_scratch(logits.size));
  });
}

void log_probabilities(Pool& pool, const Kernels& kernels, const Logits& logits,
                       const int64_t* tokens, int64_t num_top, const LogProbabilities& result) {
  check_below({tokens, static_cast<size_t>(logits.count)}, logits.size,
              "a token beyond the vocabulary");
  pool.parallel_for(logits.count, [&](int64_t r, int) {
    kernels.log_probabilities(logits.rows.row(r), logits.size, tokens[r], num_top, result.own + r,
                              result.ranks + r, result.top_ids + r * num_top,
                              result.top_values + r * num_top, thread_scratch(logits.size));
  });
}

void non_finite_rows(Pool& pool, const Kernels& kernels, const Logits& logits, bool* rows) {
  pool.parallel_for(logits.count, [&](int64_t r, int) {
    rows[r] = !kernels.row_is_finite(logits.rows.row(r), logits.size);
  });
}

}  // namespace octavo
