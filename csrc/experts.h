// Which rows of a step go to which expert.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace octavo {

// The choices of a step's tokens, K each, put in order of their experts: those of one expert are
// rows next to each other, in order of tokens.
class ExpertPlan {
 public:
  // routing: of each token K weights, then the numbers of its experts, of which there are `experts`.
  void build(Rows routing, int64_t tokens, int64_t active, int64_t experts);

  int64_t first_row(int64_t expert) const { return starts_[expert]; }
  int64_t rows(int64_t expert) const { return starts_[expert + 1] - starts_[expert]; }
  // Choice k of token t, as K t + k.
  int64_t choice_of_row(int64_t row) const { return choices_[row]; }
  // Of token t's K choices.
  const int32_t* rows_of_token(int64_t t) const { return rows_.data() + t * active_; }

 private:
  int64_t active_ = 0;
  std::vector<int32_t> starts_;    // (experts + 1,)
  std::vector<int32_t> choices_;   // by row
  std::vector<int32_t> rows_;      // by choice
};

}  // namespace octavo
