#include "experts.h"

#include <algorithm>

namespace octavo {

void ExpertPlan::build(Rows routing, int64_t tokens, int64_t active, int64_t experts) {
  active_ = active;
  choices_.resize(tokens * active);
  rows_.resize(tokens * active);
  starts_.assign(experts + 2, 0);
  // Two places further on, so that counting rows up leaves the starts in place.
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t k = 0; k < active; ++k)
      ++starts_[static_cast<int64_t>(routing.row(t)[active + k]) + 2];
  for (int64_t e = 2; e < experts + 2; ++e) starts_[e] += starts_[e - 1];
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t k = 0; k < active; ++k) {
      const int64_t choice = t * active + k;
      const int32_t row = starts_[static_cast<int64_t>(routing.row(t)[active + k]) + 1]++;
      choices_[row] = static_cast<int32_t>(choice);
      rows_[choice] = row;
    }
}

}  // namespace octavo
