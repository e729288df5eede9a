// The last error that the CUDA runtime stores.
#pragma once

namespace girih::kernels {

// Clears the last error after a failed launch has been reported, so that the next launch does not report the
// same error. The library links its own CUDA runtime, so cudaGetLastError of the program does not clear it.
void clear_last_error();

}  // namespace girih::kernels
