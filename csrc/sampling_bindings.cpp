#include <nanobind/ndarray.h>

#include <initializer_list>
#include <span>
#include <stdexcept>

#include "bindings.h"
#include "sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using LogitsArray = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;
using ReadLogits = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu, nb::ro>;
template <typename T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu, nb::ro>;
template <typename T, size_t dims = 1>
using Out = nb::ndarray<T, nb::ndim<dims>, nb::c_contig, nb::device::cpu>;

template <typename Array>
Logits logits_of(const Array& array) {
  if (array.shape(1) == 0) throw std::invalid_argument("logits must have columns");
  if (array.size() > 0 && array.shape(1) > 1 && array.stride(1) != 1)
    throw std::invalid_argument("logits must have dense rows");
  // Only adjust_logits writes, and it takes no read-only array.
  return {{const_cast<float*>(array.data()), array.stride(0)},
          static_cast<int64_t>(array.shape(0)),
          static_cast<int64_t>(array.shape(1))};
}

void check_lengths(std::initializer_list<size_t> lengths, int64_t expected) {
  for (const size_t length : lengths)
    if (static_cast<int64_t>(length) != expected)
      throw std::invalid_argument("arrays that belong together differ in length");
}

template <typename T>
std::span<const T> span_of(const In<T>& array) {
  return {array.data(), array.size()};
}

void py_adjust_logits(Pool& pool, const LogitsArray& array, const In<int64_t>& penalty_rows,
                      const In<int64_t>& penalty_tokens, const In<int64_t>& penalty_counts,
                      const In<float>& repetition, const In<float>& presence,
                      const In<float>& frequency, const In<int64_t>& bias_rows,
                      const In<int64_t>& bias_tokens, const In<float>& bias_values,
                      const In<int64_t>& allowed_rows, const In<int64_t>& allowed_pair_rows,
                      const In<int64_t>& allowed_pair_tokens) {
  const Logits logits = logits_of(array);
  check_lengths({repetition.size(), presence.size(), frequency.size()}, logits.count);
  check_lengths({penalty_tokens.size(), penalty_counts.size()},
                static_cast<int64_t>(penalty_rows.size()));
  check_lengths({bias_tokens.size(), bias_values.size()}, static_cast<int64_t>(bias_rows.size()));
  check_lengths({allowed_pair_tokens.size()}, static_cast<int64_t>(allowed_pair_rows.size()));
  const LogitEdits edits{
      span_of(penalty_rows), span_of(penalty_tokens),    span_of(penalty_counts),
      span_of(repetition),   span_of(presence),          span_of(frequency),
      span_of(bias_rows),    span_of(bias_tokens),       span_of(bias_values),
      span_of(allowed_rows), span_of(allowed_pair_rows), span_of(allowed_pair_tokens)};
  const nb::gil_scoped_release unlocked;
  adjust_logits(pool, logits, edits);
}

void py_sample(Pool& pool, const Kernels& kernels, const ReadLogits& array,
               const In<float>& temperature, const In<int64_t>& top_k, const In<float>& top_p,
               const In<float>& min_p, const In<double>& uniform, const Out<int64_t>& tokens) {
  const Logits logits = logits_of(array);
  check_lengths(
      {temperature.size(), top_k.size(), top_p.size(), min_p.size(), uniform.size(), tokens.size()},
      logits.count);
  const SampleSettings settings{temperature.data(), top_k.data(), top_p.data(), min_p.data()};
  const nb::gil_scoped_release unlocked;
  sample(pool, kernels, logits, settings, uniform.data(), tokens.data());
}

void py_probabilities(Pool& pool, const Kernels& kernels, const ReadLogits& array,
                      const In<float>& temperature, const In<int64_t>& top_k,
                      const In<float>& top_p, const In<float>& min_p, const Out<float, 2>& result) {
  const Logits logits = logits_of(array);
  check_lengths({temperature.size(), top_k.size(), top_p.size(), min_p.size(), result.shape(0)},
                logits.count);
  check_lengths({result.shape(1)}, logits.size);
  const SampleSettings settings{temperature.data(), top_k.data(), top_p.data(), min_p.data()};
  const nb::gil_scoped_release unlocked;
  probabilities(pool, kernels, logits, settings, result.data());
}

void py_log_probabilities(Pool& pool, const Kernels& kernels, const ReadLogits& array,
                          const In<int64_t>& tokens, const Out<float>& own,
                          const Out<int64_t>& ranks, const Out<int64_t, 2>& top_ids,
                          const Out<float, 2>& top_values) {
  const Logits logits = logits_of(array);
  const auto num_top = static_cast<int64_t>(top_ids.shape(1));
  check_lengths({tokens.size(), own.size(), ranks.size(), top_ids.shape(0), top_values.shape(0)},
                logits.count);
  check_lengths({top_values.shape(1)}, num_top);
  if (num_top > logits.size) throw std::invalid_argument("there are fewer tokens than num_top");
  const LogProbabilities result{own.data(), ranks.data(), top_ids.data(), top_values.data()};
  const nb::gil_scoped_release unlocked;
  log_probabilities(pool, kernels, logits, tokens.data(), num_top, result);
}

void py_non_finite_rows(Pool& pool, const Kernels& kernels, const ReadLogits& array,
                        const Out<bool>& rows) {
  const Logits logits = logits_of(array);
  check_lengths({rows.size()}, logits.count);
  const nb::gil_scoped_release unlocked;
  non_finite_rows(pool, kernels, logits, rows.data());
}

}  // namespace

// Results are written to the arrays that come last. No logits are converted: a copy that Python
// made in passing would be edited in vain, or cost more than the op.
void bind_sampling(nb::module_& m) {
  m.def("adjust_logits", &py_adjust_logits, "pool"_a, "logits"_a.noconvert(), "penalty_rows"_a,
        "penalty_tokens"_a, "penalty_counts"_a, "repetition"_a, "presence"_a, "frequency"_a,
        "bias_rows"_a, "bias_tokens"_a, "bias_values"_a, "allowed_rows"_a, "allowed_pair_rows"_a,
        "allowed_pair_tokens"_a, "ops.adjust_logits in place; the edits are LogitEdits' fields.");
  m.def("sample", &py_sample, "pool"_a, "kernels"_a, "logits"_a.noconvert(), "temperature"_a,
        "top_k"_a, "top_p"_a, "min_p"_a, "uniform"_a, "tokens"_a.noconvert());
  m.def("probabilities", &py_probabilities, "pool"_a, "kernels"_a, "logits"_a.noconvert(),
        "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "result"_a.noconvert());
  m.def("log_probabilities", &py_log_probabilities, "pool"_a, "kernels"_a, "logits"_a.noconvert(),
        "tokens"_a, "own"_a.noconvert(), "ranks"_a.noconvert(), "top_ids"_a.noconvert(),
        "top_values"_a.noconvert());
  m.def("non_finite_rows", &py_non_finite_rows, "pool"_a, "kernels"_a, "logits"_a.noconvert(),
        "rows"_a.noconvert());
}

}  // namespace octavo
