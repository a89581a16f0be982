// Recording what the ranks of a group do together.
#include "tape_state.h"

namespace octavo {

Ref Tape::exchange(const char* name, Ref x, std::shared_ptr<const Exchange> exchange) {
  const Symbol symbol = buffers_[x.buffer].symbol;
  const Ref y = new_buffer(symbol, exchange->result_columns());
  Op& op = append(name, symbol, {x.buffer}, y.buffer);
  op.kind = Op::Kind::exchange;
  op.x = x;
  op.may_overwrite = exchange->may_overwrite() && x.column == 0;
  op.exchange = std::move(exchange);
  return y;
}

Ref Tape::all_reduce(Ref x, int64_t size, std::shared_ptr<Collective> group) {
  const std::vector<int64_t> columns(group->ranks(), size);
  return exchange("all_reduce", x, std::make_shared<Exchange>(std::move(group), columns, true));
}

Ref Tape::all_gather(Ref x, const std::vector<int64_t>& columns,
                     std::shared_ptr<Collective> group) {
  return exchange("all_gather", x, std::make_shared<Exchange>(std::move(group), columns, false));
}

}  // namespace octavo
