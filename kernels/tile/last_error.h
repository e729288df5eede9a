// The CUDA runtime's memory of an error.
#pragma once

namespace girih::kernels {

// Forgets a refused launch once it has been reported, so that the next launch does not report it again. The
// library has a runtime of its own, whose memory the program's cudaGetLastError does not reach.
void clear_last_error();

}  // namespace girih::kernels
