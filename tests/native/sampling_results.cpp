// Sampling.
#include <algorithm>

#include "results.h"
#include "sampling.h"

namespace octavo {

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

}  // namespace octavo
