#include "abc.h"

namespace girih::gsa {

Abc normalise(const Chunks& chunks, const Tensor& logits, const Tensor& z0) {
  // -inf would make inf - inf; this stands for it, far below any logit and far from overflow.
  const auto empty = at::full({}, -1e30, logits.options());
  const auto absent = ~chunks.valid().unsqueeze(2).unsqueeze(-1) | (logits <= -1e29);
  const auto s = at::where(absent, empty, logits);
  const auto from_start = s.logcumsumexp(3);  // the chunk's own tokens
  const auto all = from_start.select(3, chunks.length() - 1).unbind(1);
  const auto scan = chunks.scan({at::where(z0 <= -1e29, empty, z0)}, [&](int64_t c, const Chunks::States& z) {
    return Chunks::States{at::logaddexp(z[0], all[c])};
  });
  const auto start = chunks.starts(scan, 0).unsqueeze(3);
  const auto earlier = at::cat({empty.expand_as(start), from_start.narrow(3, 0, chunks.length() - 1)}, 3);
  const auto before = at::logaddexp(start, earlier);  // z_{t-1}
  const auto d = s - before;
  const auto zero = at::zeros({}, logits.options());
  const auto z = scan.finals[0];
  return {at::where(absent, zero, d.sigmoid()),
          at::where(absent | (before <= -1e29), zero, at::log_sigmoid(-d)),
          at::where(z <= -1e29, at::full({}, -INFINITY, z.options()), z)};
}

}  // namespace girih::gsa
