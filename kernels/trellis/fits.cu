#include <algorithm>

#include "trellis/dq.cuh"
#include "trellis/launch.h"
#include "trellis/output.cuh"
#include "trellis/reverse.cuh"
#include "trellis/scan.cuh"

namespace girih::kernels {
namespace {

template <int Width>
int max_shared_bytes() {
  using T = __nv_bfloat16;
  int most =
      std::max(TrellisScanStorage<T, Width>::kWeightedBytes, TrellisReverseStorage<T, Width>::kWeightedBytes);
  for (const int chunk : {16, 32, 48, 64}) {
    const auto block = ChunkBlockShape::of(chunk);
    most =
        std::max({most, chunk_bytes<T, Width>(block, kOutputTiles), chunk_bytes<T, Width>(block, kDqTiles)});
  }
  return most;
}

}  // namespace

int trellis_shared_bytes() { return std::max(max_shared_bytes<64>(), max_shared_bytes<128>()); }

}  // namespace girih::kernels
