// The fp32 scan, forward and reverse. A block has 32 columns of the state of one head and loops over its
// sequence by tiles of sixteen rows; a state warp has sixteen of the columns and half of D, in registers. A
// tile costs three dependent products, S^T b, X z and k u. Two load warps load rows, stages ahead, and four
// producer warps compute X and P, which do not depend on the state. Products are those of tile/tf32.h.
//
// X is the inverse of a triangular matrix of sixteen rows, computed in fp64 by substitution, so that X z is
// as accurate as the recurrence.
#include "delta_product/exact_chain.cuh"
#include "delta_product/exact_loaders.cuh"
#include "delta_product/exact_makers.cuh"
#include "tile/grid.h"
#include "tile/instance.h"
#include "tile/launch.h"

namespace girih::kernels {
namespace delta_product::by_tile {
namespace {

template <int Tile, bool Reverse>
__global__ void __launch_bounds__(kThreads) scan(const __grid_constant__ DeltaExactScan p, int stages) {
  extern __shared__ __align__(128) unsigned char shared[];
  const DeltaExactShape& shape = p.shape;
  const int slabs = (shape.V + kBlockCols - 1) / kBlockCols;
  const int slab = static_cast<int>(blockIdx.x % slabs) * kBlockCols;
  const Walked here(shape, blockIdx.x / slabs);
  const TileSpace<Tile> space{shared, stages};
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    TileBarriers& barriers = space.barriers();
    for (int i = 0; i < stages; ++i) {
      init_barrier(&barriers.full[i], 32 * kLoaders);
      init_barrier(&barriers.made[i], once(1));
      init_barrier(&barriers.empty[i], once(kChains));
    }
  }
  if (p.g.data == nullptr && thread < kRows) {
    for (int i = 0; i < stages; ++i) space.weights(i).through[thread] = space.weights(i).after[thread] = 1.f;
  }
  __syncthreads();
  const int warp = warp_index();
  if (warp < kChains) {
    const int group = warp / kParts;
    ChainState<Tile> state(p, here, slab, warp);
    Exchanger exchange{space.exchange(group), group, state.part};
    state.load();
    if constexpr (Reverse) {
      run_reverse(state, space, exchange);
    } else {
      run_forward(state, space, exchange);
    }
    state.store();
  } else if (warp < kChains + kMakers) {
    make_weights<Tile, Reverse>(p, here, space, warp - kChains);
  } else {
    load_tiles<Tile, Reverse>(p, here, space, slab, thread - 32 * (kChains + kMakers));
  }
  if (!Reverse && p.position != nullptr && here.head == 0 && slab == 0 && thread == 0) {
    p.position[here.sequence.index] =
        (position_of(shape.pieces, here.sequence) + here.tokens) % shape.pieces.chunk;
  }
}

template <int Tile, bool Reverse>
cudaError_t launch(const DeltaExactScan& p, cudaStream_t stream) {
  using Space = TileSpace<Tile>;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  int stages = kMaxStages;
  while (stages > 1 && Space::bytes(stages) > limit) --stages;
  const int bytes = Space::bytes(stages);
  if (const cudaError_t error = allow_shared<scan<Tile, Reverse>>(bytes); error != cudaSuccess) return error;
  const int64_t blocks = p.shape.pieces.tokens.sequences * p.shape.heads * divide_up(p.shape.V, kBlockCols);
  return launch_grid<scan<Tile, Reverse>>(blocks, kThreads, bytes, stream, p, stages);
}

}  // namespace
}  // namespace delta_product::by_tile

cudaError_t delta_exact_scan(const DeltaExactScan& p, cudaStream_t stream) {
  using namespace delta_product;
  return by_width<64, 128, kDeltaMaxWidth>(p.shape.D, [&](auto tile) {
    return p.reverse ? by_tile::launch<tile(), true>(p, stream) : by_tile::launch<tile(), false>(p, stream);
  });
}

}  // namespace girih::kernels
