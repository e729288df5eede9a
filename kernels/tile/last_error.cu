#include "tile/last_error.h"

#include <cuda_runtime_api.h>

namespace girih::kernels {

void clear_last_error() { (void)cudaGetLastError(); }

}  // namespace girih::kernels
