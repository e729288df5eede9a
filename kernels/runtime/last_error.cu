#include <cuda_runtime_api.h>

#include "last_error.h"

namespace girih::kernels {

void clear_last_error() { (void)cudaGetLastError(); }

}  // namespace girih::kernels
