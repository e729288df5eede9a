// Heads shared by several others: key heads between memories, query heads between memories with one output
// each. Head h of `heads` uses head h / (heads / shared).
#pragma once

#include "check.h"

namespace girih {

// How many of `heads` share one head of x [B, T, x heads, ...].
inline int shared_by(const Tensor& x, int64_t heads) {
  return static_cast<int>(std::max<int64_t>(1, heads / x.size(2)));
}

// Repeats the heads of x to `heads`, for code without shared heads.
inline Tensor for_each_head(const Tensor& x, int64_t heads) {
  const auto share = shared_by(x, heads);
  return share == 1 ? x : x.repeat_interleave(share, 2);
}

// The gradient of x from the gradient of for_each_head(x): sums over the heads that share one.
inline Tensor summed_heads(const Tensor& gradient, const Tensor& x) {
  if (gradient.size(2) == x.size(2)) return gradient;
  return gradient.unflatten(2, {x.size(2), gradient.size(2) / x.size(2)}).sum(3);
}

}  // namespace girih
