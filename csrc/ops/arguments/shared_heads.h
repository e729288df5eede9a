// Heads that several others share: of keys, between memories; of queries, between memories with one output
// each. Head h of all has the shared head h / (all / shared).
#pragma once

#include "check.h"

namespace girih {

// How many heads are served by one of `x`'s [B, T, heads, ...].
inline int shared_by(const Tensor& x, int64_t heads) {
  return static_cast<int>(std::max<int64_t>(1, heads / x.size(2)));
}

// x with a head for each, for code that knows no shared ones.
inline Tensor for_each_head(const Tensor& x, int64_t heads) {
  const auto share = shared_by(x, heads);
  return share == 1 ? x : x.repeat_interleave(share, 2);
}

// The gradient of for_each_head()'s x.
inline Tensor summed_heads(const Tensor& gradient, const Tensor& x) {
  if (gradient.size(2) == x.size(2)) return gradient;
  return gradient.unflatten(2, {x.size(2), gradient.size(2) / x.size(2)}).sum(3);
}

}  // namespace girih
