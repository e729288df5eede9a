// The last error of the CUDA runtime that is linked into libgirih_kernels.so, another than PyTorch's.
#pragma once

namespace girih::kernels {

// Forgets it, once it has been reported: the next launch would return it again.
void clear_last_error();

}  // namespace girih::kernels
