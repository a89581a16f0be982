// An op over the ranks of a group: the sum of what they bring, or their columns side by side.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "collective.h"
#include "kernels.h"

namespace octavo {

// Rows go in rounds of as many as a rank can bring at a time, which are computed one after another
// in two halves, each by several threads: `send`, and, when the ranks have exchanged, `receive`.
// Both are cut into pieces of a row, numbered row by row.
class Exchange {
 public:
  // columns: that each rank brings. is_sum: their columns are equally many, and are added up; else
  // put side by side. Throws std::invalid_argument for others, and for rows that are too long.
  Exchange(std::shared_ptr<Collective> group, std::vector<int64_t> columns, bool is_sum);

  Collective& group() const { return *group_; }
  int64_t own_columns() const { return columns_[group_->rank()]; }
  int64_t result_columns() const;
  bool is_sum() const { return is_sum_; }
  // Whether the result may lie where x was: if x is read no later than the first writing.
  bool may_overwrite() const { return is_sum_ && group_->ranks() <= 2; }

  int64_t rounds(int64_t rows) const;
  // The first row of a round, of so many rows.
  int64_t begin(int64_t round, int64_t rows) const;
  int64_t sent_pieces() const { return static_cast<int64_t>(sent_.size()); }   // of a row
  int64_t received_pieces() const { return static_cast<int64_t>(received_.size()); }
  // Roughly what one takes, half of it coming from other cores' caches.
  double piece_ns(bool is_received) const;

  // Pieces [p0, p1) of the rows from `first` on.
  void send(Rows x, int64_t first, int64_t p0, int64_t p1) const;
  void exchange(int64_t rows) const;
  // x: what was sent. residual: added to a sum, unless its data is null.
  void receive(const Kernels& kernels, Rows x, Rows y, Rows residual, int64_t first, int64_t p0,
               int64_t p1) const;

 private:
  // Columns [from, from + size) of what a rank brings, from column `to` of the result on.
  struct Piece {
    int rank;
    int64_t from, size, to;
  };
  static void cut(std::vector<Piece>& pieces, int rank, int64_t columns, int64_t to);
  Rows incoming(int rank) const;

  const std::shared_ptr<Collective> group_;
  const std::vector<int64_t> columns_;
  const bool is_sum_;
  int64_t stride_;   // floats, of the rows that are sent: the same for all ranks
  int64_t round_rows_;
  std::vector<Piece> sent_, received_;
};

}  // namespace octavo
