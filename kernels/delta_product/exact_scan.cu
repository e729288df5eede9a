// A block has 32 columns of one head's state, in registers, and walks its sequence: eight lanes share two
// columns, each with every eighth pack of four of their D rows. What a step waits for is the sum over D, a
// chain of products and three shuffles. So all else lies beside it: rows arrive in shared memory two batches
// ahead, the next step's factors are in registers before this one's sum is, and a token's last read is made
// along with the next token's first step, of the same state.
//
// A slot of shared memory has what one turn takes: a query, a step's k and b, and the block's columns of w or
// do. A token has G - 1 + n turns, G queries a memory: the first G - 1 read, the next reads and steps, the
// others step. Forward the reads are the token's before, so there is a turn after the last token.
#include "delta_product/exact_walk.cuh"
#include "tile/grid.h"
#include "tile/launch.h"

namespace girih::kernels {
namespace delta_product::by_token {
namespace {

template <int Tile, bool Reverse>
__global__ void __launch_bounds__(kThreads) scan(const __grid_constant__ DeltaExactScan p) {
  using Sizes = ScanSizes<Tile>;
  constexpr int kBatchFloats = Sizes::kBatch * Sizes::kSlot;
  extern __shared__ __align__(16) float shared[];
  const DeltaExactShape& shape = p.shape;
  const int slabs = (shape.V + kBlockCols - 1) / kBlockCols;
  const int slab = static_cast<int>(blockIdx.x % slabs) * kBlockCols;
  const Walked here(shape, blockIdx.x / slabs);

  // Without gates every decay is 1.
  if (p.decay == nullptr && threadIdx.x < kStages * Sizes::kBatch) {
    shared[threadIdx.x * Sizes::kSlot + Sizes::kDecay] = 1.f;
  }
  Fetcher<Tile, Reverse> fetcher(p, here, slab);
#pragma unroll 1
  for (int stage = 0; stage + 1 < kStages; ++stage) fetcher.fill(shared + stage * kBatchFloats);

  ExactWalk<Tile, Reverse> walk(p, here, slab);
  walk.load_state();
  Turn turn{0, 0};
  int stage = 0;
#pragma unroll 1
  for (int64_t all = here.template all_turns<Reverse>(); all > 0; all -= Sizes::kBatch) {
    wait_copies<kStages - 2>();
    __syncthreads();
    fetcher.fill(shared + (stage + kStages - 1) % kStages * kBatchFloats);
    const float* slot = shared + stage * kBatchFloats;
    stage = (stage + 1) % kStages;
    walk.take_both(slot);
    const int count = all < Sizes::kBatch ? static_cast<int>(all) : Sizes::kBatch;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      walk.take_turn(turn, slot, i + 1 < Sizes::kBatch ? slot + Sizes::kSlot : slot);
      turn.advance(0, 1, here.turns);
      slot += Sizes::kSlot;
    }
  }
  wait_copies<0>();

  const DeltaPieces& pieces = shape.pieces;
  if (Reverse && p.decay != nullptr && here.tokens > 0) {
    walk.S.scale(p.decay[(here.sequence.batch * pieces.tokens.tokens + here.sequence.start) * shape.heads +
                         here.head]);
  }
  walk.store_state();
  if (!Reverse && p.position != nullptr && here.head == 0 && slab == 0 && threadIdx.x == 0) {
    p.position[here.sequence.index] = (walk.position + static_cast<int64_t>(here.tokens)) % pieces.chunk;
  }
}

template <int Tile, bool Reverse>
cudaError_t launch(const DeltaExactScan& p, cudaStream_t stream) {
  constexpr int kBytes = ScanSizes<Tile>::kBytes;
  if (const cudaError_t error = allow_shared<scan<Tile, Reverse>>(kBytes); error != cudaSuccess) return error;
  const int64_t blocks = p.shape.pieces.tokens.sequences * p.shape.heads * divide_up(p.shape.V, kBlockCols);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  scan<Tile, Reverse><<<static_cast<unsigned>(blocks), kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

template <bool Reverse>
cudaError_t launch(const DeltaExactScan& p, cudaStream_t stream) {
  if (p.shape.D <= 64) return launch<64, Reverse>(p, stream);
  if (p.shape.D <= 128) return launch<128, Reverse>(p, stream);
  if (p.shape.D <= kDeltaMaxWidth) return launch<256, Reverse>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace delta_product::by_token

cudaError_t delta_exact_scan(const DeltaExactScan& p, cudaStream_t stream) {
  return p.reverse ? delta_product::by_token::launch<true>(p, stream)
                   : delta_product::by_token::launch<false>(p, stream);
}

}  // namespace girih::kernels
