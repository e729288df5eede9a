#include <algorithm>

#include "trellis/dq.cuh"
#include "trellis/launch.h"
#include "trellis/output.cuh"
#include "trellis/reverse.cuh"
#include "trellis/scan.cuh"

namespace girih::kernels {
namespace {

template <int Tile>
int most_bytes() {
  using T = __nv_bfloat16;
  int most =
      std::max(TrellisScanStorage<T, Tile>::kWeightedBytes, TrellisReverseStorage<T, Tile>::kWeightedBytes);
  for (const int chunk : {16, 32, 48, 64}) {
    const auto block = ChunkBlockShape::of(chunk);
    most = std::max({most, chunk_bytes<T, Tile>(block, kOutputTiles), chunk_bytes<T, Tile>(block, kDqTiles)});
  }
  return most;
}

}  // namespace

int trellis_shared_bytes() { return std::max(most_bytes<64>(), most_bytes<128>()); }

}  // namespace girih::kernels
