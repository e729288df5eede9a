// The fp32 scan, forward and reverse. A block has 32 columns of the state of one head and loops over its
// sequence by tiles of sixteen rows; a state warp has sixteen of the columns and half of D, in registers. A
// tile costs three dependent products, S^T b, X z and k u. Two load warps load rows, stages ahead, and four
// matrix warps compute X and P, which do not depend on the state. Products are those of tile/tf32.h.
//
// X is the inverse of a triangular matrix of sixteen rows, computed in fp64 by substitution, so that X z is
// as accurate as the recurrence.
#include "delta_product/fp32_load_warps.cuh"
#include "delta_product/fp32_matrix_warps.cuh"
#include "delta_product/fp32_state_warps.cuh"
#include "pipe/fit.h"
#include "tile/grid.h"
#include "tile/instance.h"
#include "tile/launch.h"

namespace girih::kernels {
namespace delta_product::fp32_scan {
namespace {

template <int Width, bool Reverse>
__global__ void __launch_bounds__(kThreads) scan(const __grid_constant__ DeltaFp32Scan p, int stages) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  const DeltaFp32Shape& shape = p.shape;
  const int slabs = (shape.V + kBlockColumns - 1) / kBlockColumns;
  const int first_block_col = static_cast<int>(blockIdx.x % slabs) * kBlockColumns;
  const HeadWork work(shape, blockIdx.x / slabs);
  const TileStorage<Width> storage{shared, stages};
  const int thread = static_cast<int>(threadIdx.x);
  TileBarriers& barriers = storage.barriers();
  barriers.full.init(32 * kLoadWarps, stages);
  barriers.matrices_full.init(arrival_count(1), stages);
  barriers.empty.init(arrival_count(kStateWarps), stages);
  if (p.g.data == nullptr && thread < kRows) {
    for (int i = 0; i < stages; ++i)
      storage.matrices(i).decay_from_block_start[thread] = storage.matrices(i).decay_to_block_end[thread] =
          1.f;
  }
  __syncthreads();
  const int warp = warp_index();
  if (warp < kStateWarps) {
    const int group = warp / kParts;
    WarpState<Width> state(p, work, first_block_col, warp);
    PartialSumExchange exchange{storage.exchange(group), group, state.part};
    state.load();
    if constexpr (Reverse) {
      run_reverse_state_warps(state, storage, exchange);
    } else {
      run_forward_state_warps(state, storage, exchange);
    }
    state.store();
  } else if (warp < kStateWarps + kMatrixWarps) {
    run_matrix_warps<Width, Reverse>(p, work, storage, warp - kStateWarps);
  } else {
    run_load_warps<Width, Reverse>(p, work, storage, first_block_col,
                                   thread - 32 * (kStateWarps + kMatrixWarps));
  }
  if (!Reverse && p.position != nullptr && work.head == 0 && first_block_col == 0 && thread == 0) {
    p.position[work.sequence.index] =
        (initial_position(shape.segments, work.sequence) + work.tokens) % shape.segments.chunk;
  }
}

template <int Width, bool Reverse>
cudaError_t launch(const DeltaFp32Scan& p, cudaStream_t stream) {
  using Storage = TileStorage<Width>;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  const int stages = fit_stages(limit, kMaxStages, Storage::bytes);
  if (stages < 1) return cudaErrorInvalidConfiguration;
  const int bytes = Storage::bytes(stages);
  if (const cudaError_t error = allow_shared<scan<Width, Reverse>>(bytes); error != cudaSuccess) return error;
  const int64_t blocks =
      p.shape.segments.tokens.sequences * p.shape.heads * divide_up(p.shape.V, kBlockColumns);
  return launch_grid<scan<Width, Reverse>>(blocks, kThreads, bytes, stream, p, stages);
}

}  // namespace
}  // namespace delta_product::fp32_scan

cudaError_t delta_fp32_scan(const DeltaFp32Scan& p, cudaStream_t stream) {
  using namespace delta_product;
  return dispatch_width<64, 128, kDeltaMaxWidth>(p.shape.D, [&](auto tile) {
    return p.reverse ? fp32_scan::launch<tile(), true>(p, stream)
                     : fp32_scan::launch<tile(), false>(p, stream);
  });
}

}  // namespace girih::kernels
