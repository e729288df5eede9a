// Decays between the rows of a chunk.
#include "decay.h"

namespace girih {

Tensor decay_matrix(const Tensor& g) {
  const auto C = g.size(-1);
  const auto rows = at::arange(C, g.options().dtype(at::kLong).requires_grad(false));
  const auto t = rows.unsqueeze(1), i = rows.unsqueeze(0);
  // Column i sums the gates of the rows after i: masked first, then summed downwards.
  auto later = at::where(t > i, g.unsqueeze(-1), at::zeros({}, g.options()));
  const auto sums = later.cumsum(-2);
  return at::where(t >= i, sums, at::full({}, -INFINITY, g.options())).exp();
}

Tensor sum_after(const Tensor& g, int64_t dim) {
  const auto C = g.size(dim);
  if (C == 0) return g;
  // The suffix sum is exclusive: the gate of the row itself is shifted out.
  const auto next = at::cat({g.narrow(dim, 1, C - 1), at::zeros_like(g.narrow(dim, 0, 1))}, dim);
  return next.flip(dim).cumsum(dim).flip(dim);
}

}  // namespace girih
