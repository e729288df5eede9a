// Decays between the rows of a chunk. Gates are logs, g <= 0. Every exponent is a short sum of gates of one
// sign and not a difference of long sums, so that strong gates cost no precision.
#pragma once

#include <ATen/ATen.h>

namespace girih {

using at::Tensor;

// g [..., C] -> [..., C, C]: e^{g_{i+1} + ... + g_t} in row t, column i <= t; zero above the diagonal.
Tensor decay_matrix(const Tensor& g);

// Along `dim`: the sum of the gates after each row, g_{t+1} + ... + g_C.
Tensor sum_after(const Tensor& g, int64_t dim);

}  // namespace girih
