// What becomes of a tape when all is recorded: what is fused, which ops run together, and which
// buffers share memory.
#include <algorithm>
#include <cstring>

#include "memory.h"
#include "tape_state.h"

namespace octavo {

void Tape::finish(const std::vector<std::pair<Ref, int64_t>>& outputs) {
  outputs_ = outputs;
  fuse_residuals();
  group();
  plan_memory(outputs);
  for (int worker = 0; scratch_bytes_ > 0 && worker < pool_->threads(); ++worker)
    scratch_.push_back(allocate_aligned(scratch_bytes_));
}

// x + linear(y), where nothing else wants the product: the product is added as it is made. The same
// for the sum of several ranks' products.
void Tape::fuse_residuals() {
  std::vector<int> uses(buffers_.size(), 0), made_at(buffers_.size(), -1);
  for (size_t i = 0; i < ops_.size(); ++i) {
    for (int32_t buffer : ops_[i].reads) ++uses[buffer];
    if (ops_[i].write >= 0) made_at[ops_[i].write] = static_cast<int>(i);
  }
  for (const auto& [ref, columns] : outputs_) ++uses[ref.buffer];
  std::vector<bool> removed(ops_.size(), false);
  for (size_t i = 0; i < ops_.size(); ++i) {
    Op& add = ops_[i];
    if (std::strcmp(add.name, "add") != 0) continue;
    for (const auto& [product, other] : {std::pair{add.residual, add.x}, {add.x, add.residual}}) {
      const int at = made_at[product.buffer];
      if (at < 0 || ops_[at].residual.buffer >= 0) continue;
      if (uses[product.buffer] != 1 || made_at[other.buffer] > at) continue;
      if (buffers_[add.write].columns != buffers_[product.buffer].columns) continue;
      Op& maker = ops_[at];
      if (maker.kind == Op::Kind::linear) {
        if (maker.weight->outputs != buffers_[product.buffer].columns) continue;   // a part
        maker.reads.insert(maker.reads.begin(), other.buffer);
        maker.may_overwrite = other.column == 0;
      } else if (maker.kind == Op::Kind::exchange && maker.exchange->is_sum()) {
        maker.reads.push_back(other.buffer);
      } else {
        continue;
      }
      maker.residual = other;
      maker.write = add.write;
      made_at[add.write] = at;
      removed[i] = true;
      break;
    }
  }
  size_t kept = 0;
  for (size_t i = 0; i < ops_.size(); ++i)
    if (!removed[i]) {
      if (kept != i) ops_[kept] = std::move(ops_[i]);
      ++kept;
    }
  ops_.erase(ops_.begin() + kept, ops_.end());
}

void Tape::group() {
  for (int32_t i = 0; i < static_cast<int32_t>(ops_.size()); ++i) {
    const Op& op = ops_[i];
    const bool joins = op.kind == Op::Kind::rows && !regions_.empty() &&
                       regions_.back().kind == Op::Kind::rows &&
                       ops_[regions_.back().first].symbol == op.symbol && !op.reads_other_rows;
    if (joins)
      regions_.back().last = i + 1;
    else
      regions_.push_back({i, i + 1, op.kind});
  }
}

// Buffers get slots of memory; a slot is free again after the last region that reads its buffer.
void Tape::plan_memory(const std::vector<std::pair<Ref, int64_t>>& outputs) {
  const int end = static_cast<int>(regions_.size());
  std::vector<int> last_use(buffers_.size(), -1), last_op(buffers_.size(), -1);
  for (int r = 0; r < end; ++r)
    for (int32_t i = regions_[r].first; i < regions_[r].last; ++i) {
      for (int32_t buffer : ops_[i].reads) last_use[buffer] = r, last_op[buffer] = i;
      if (ops_[i].write >= 0) last_use[ops_[i].write] = std::max(last_use[ops_[i].write], r);
    }
  for (const auto& [ref, columns] : outputs) last_use[ref.buffer] = end;

  std::vector<int32_t> free;
  const auto take = [&](Buffer& buffer) {
    int32_t best = -1;
    for (int32_t slot : free) {
      if (slots_[slot].symbol != buffer.symbol) continue;
      const int64_t size = slots_[slot].row_bytes;
      const bool fits = size >= buffer.stride;
      const bool best_fits = best >= 0 && slots_[best].row_bytes >= buffer.stride;
      // The tightest that fits, else the largest, which then grows.
      if (best < 0 || (fits && !best_fits) ||
          (fits == best_fits && (size < slots_[best].row_bytes) == fits))
        best = slot;
    }
    if (best < 0) {
      best = static_cast<int32_t>(slots_.size());
      slots_.push_back({buffer.symbol, buffer.stride});
    } else {
      free.erase(std::find(free.begin(), free.end(), best));
      slots_[best].row_bytes = std::max(slots_[best].row_bytes, buffer.stride);
    }
    return best;
  };
  for (int r = 0; r < end; ++r) {
    std::vector<int32_t> handed_on;
    for (int32_t i = regions_[r].first; i < regions_[r].last; ++i) {
      const Op& op = ops_[i];
      if (op.write < 0) continue;
      Buffer& target = buffers_[op.write];
      if (target.slot >= 0) continue;   // another part of it was written before
      const int32_t source = op.reads[0];
      // A product reads all of its input's row for each output: only the residual may go.
      const bool overwrites = op.may_overwrite && buffers_[source].slot >= 0 &&
                              std::count(op.reads.begin(), op.reads.end(), source) == 1 &&
                              last_use[source] == r && last_op[source] == i &&
                              buffers_[source].stride == target.stride;
      if (overwrites) {
        target.slot = buffers_[source].slot;
        handed_on.push_back(source);
      } else {
        target.slot = take(target);
      }
    }
    for (int32_t b = 0; b < static_cast<int32_t>(buffers_.size()); ++b)
      if (last_use[b] == r && buffers_[b].slot >= 0 &&
          std::find(handed_on.begin(), handed_on.end(), b) == handed_on.end())
        free.push_back(buffers_[b].slot);
  }
}

void Tape::grow(const int64_t (&rows)[kSymbols]) {
  for (Slot& slot : slots_) {
    const int64_t wanted = rows[static_cast<int>(slot.symbol)];
    if (wanted <= slot.capacity) continue;
    // To the next power of two, so that a growing batch seldom moves it; what an output was lives
    // on with its owner.
    int64_t capacity = 16;
    while (capacity < wanted) capacity *= 2;
    slot.memory = allocate_aligned(capacity * slot.row_bytes);
    slot.capacity = capacity;
  }
}

int64_t Tape::buffer_bytes() const {
  int64_t bytes = 0;
  for (const Slot& slot : slots_) bytes += slot.capacity * slot.row_bytes;
  return bytes;
}

}  // namespace octavo
