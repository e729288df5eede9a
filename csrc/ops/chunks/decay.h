// Decays between the rows of a chunk. Gates are logs, g <= 0; every sum is of one sign and as short as it can
// be, and nothing is a difference of long sums: no digits are lost however strong the gates.
#pragma once

#include <ATen/ATen.h>

namespace girih {

using at::Tensor;

// g [..., C] -> [..., C, C]: e^{g_{i+1} + ... + g_t} in row t, column i <= t; zero above the diagonal.
Tensor decay_matrix(const Tensor& g);

// Along `dim`: from after each row to the chunk's end, g_{t+1} + ... + g_C.
Tensor sum_after(const Tensor& g, int64_t dim);

}  // namespace girih
