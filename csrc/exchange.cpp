#include "exchange.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

// So long that one row of a decode step's hidden states is one piece, and a row of logits is many.
constexpr int64_t kPieceColumns = 8192;

// What is sent lies in other cores' caches, which read it last, and each line would be taken from
// them before it is written. Past the caches it is not: on two cores of an EPYC a sum of 9 KiB takes
// 1.8 us, not 5.5, and one of 256 KiB whose parts both come from here 34, not 45. to: on a cache line.
void stream(float* to, const float* from, int64_t count) {
#if defined(__x86_64__)
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
  for (; i < count; ++i) to[i] = from[i];
#else
  std::memcpy(to, from, count * sizeof(float));
#endif
}

// Orders what was streamed before what this thread writes next.
void finish_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace

Exchange::Exchange(std::shared_ptr<Collective> group, std::vector<int64_t> columns, bool is_sum)
    : group_(std::move(group)), columns_(std::move(columns)), is_sum_(is_sum) {
  const auto equals_own = [this](int64_t count) { return count == own_columns(); };
  if (static_cast<int>(columns_.size()) != group_->ranks() ||
      *std::min_element(columns_.begin(), columns_.end()) < 0 ||
      (is_sum_ && !std::all_of(columns_.begin(), columns_.end(), equals_own)))
    throw std::invalid_argument("an exchange wants the columns of each of the group's ranks");
  const int64_t widest = *std::max_element(columns_.begin(), columns_.end());
  stride_ = std::max<int64_t>(round_up(widest, kLanes), kLanes);
  round_rows_ = Collective::kCapacity / (stride_ * int64_t{sizeof(float)});
  if (round_rows_ == 0) throw std::invalid_argument("rows are too long to be exchanged");
  cut(sent_, group_->rank(), own_columns(), 0);
  if (is_sum_) {
    cut(received_, group_->rank(), own_columns(), 0);
    return;
  }
  int64_t to = 0;
  for (int rank = 0; rank < group_->ranks(); ++rank) {
    cut(received_, rank, columns_[rank], to);
    to += columns_[rank];
  }
}

void Exchange::cut(std::vector<Piece>& pieces, int rank, int64_t columns, int64_t to) {
  for (int64_t from = 0; from < columns; from += kPieceColumns)
    pieces.push_back({rank, from, std::min(kPieceColumns, columns - from), to + from});
}

int64_t Exchange::result_columns() const {
  return is_sum_ ? own_columns() : std::accumulate(columns_.begin(), columns_.end(), int64_t{0});
}

int64_t Exchange::rounds(int64_t rows) const { return ceil_div(rows, round_rows_); }

int64_t Exchange::begin(int64_t round, int64_t rows) const {
  return std::min(round * round_rows_, rows);
}

double Exchange::piece_ns(bool is_received) const {
  const double columns = static_cast<double>(std::min(stride_, kPieceColumns));
  return 0.2 * columns * (is_received && is_sum_ ? group_->ranks() : 1);
}

Rows Exchange::incoming(int rank) const {
  // Rows have no constant kind; nobody writes to these.
  return {reinterpret_cast<float*>(const_cast<uint8_t*>(group_->incoming(rank))), stride_};
}

void Exchange::send(Rows x, int64_t first, int64_t p0, int64_t p1) const {
  const Rows target{reinterpret_cast<float*>(group_->outgoing()), stride_};
  const int64_t pieces = sent_pieces();
  for (int64_t p = p0; p < p1; ++p) {
    const Piece& piece = sent_[p % pieces];
    const int64_t t = p / pieces;
    stream(target.row(t) + piece.from, x.row(first + t) + piece.from, piece.size);
  }
  finish_streams();
}

void Exchange::exchange(int64_t rows) const {
  group_->exchange(rows * stride_ * int64_t{sizeof(float)});
}

void Exchange::receive(const Kernels& kernels, Rows x, Rows y, Rows residual, int64_t first,
                       int64_t p0, int64_t p1) const {
  const int64_t pieces = received_pieces();
  for (int64_t p = p0; p < p1; ++p) {
    const Piece& piece = received_[p % pieces];
    const int64_t t = p / pieces;
    const Rows out{y.row(first + t) + piece.to, 0};
    // This rank's own is in its caches, where it came from.
    const auto part = [&](int rank) {
      return Rows{(rank == group_->rank() ? x.row(first + t) : incoming(rank).row(t)) + piece.from,
                  0};
    };
    if (!is_sum_ || group_->ranks() == 1) {
      std::memcpy(out.data, part(piece.rank).data, piece.size * sizeof(float));
    } else {
      kernels.add(part(0), part(1), out, 0, 1, piece.size);
      for (int rank = 2; rank < group_->ranks(); ++rank)
        kernels.add(out, part(rank), out, 0, 1, piece.size);
    }
    if (residual.data != nullptr)
      kernels.add(out, {residual.row(first + t) + piece.to, 0}, out, 0, 1, piece.size);
  }
}

}  // namespace octavo
