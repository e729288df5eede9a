// A block has one piece, one memory head and 64 columns of D. Its threads have four rows and four columns of
// every 64 x 64 product, as in tiles.cuh. First what the steps read, then query head after query head:
//
//     A_ij = do_i . u_j, or -du_i . u_j        over V, with     F = do S, or -du S,        and     u dS
//     dq, db = e^{L_i} F + (E * A) K           dk <- dk + (E * A)^T (Q, or B)
//
// What a gate scales is never a difference of sums, of which little would be left behind closed gates: of the
// pairs  E_ij A_ij (x_i . k_j)  those that it lies between are added up, and of F and u dS the rows on its
// side.
#include "delta_product/exact_piece.cuh"
#include "tile/launch.h"

namespace girih::kernels {
namespace delta_product::by_piece {
namespace {

template <bool Gated>
__global__ void __launch_bounds__(kThreads, 2) gradients(const __grid_constant__ DeltaExactGradients p) {
  extern __shared__ __align__(16) float shared[];
  const DeltaExactShape& shape = p.shape;
  const unsigned slabs = (shape.D + kTile - 1) / kTile;
  PieceGradients<Gated> block(p, shared, static_cast<int>(blockIdx.x % slabs));
  if (!block.find(blockIdx.x / slabs)) return;
  if constexpr (Gated) block.sum_gates();
  clear(block.dk);
  GradientSpace& space = block.space;
  if constexpr (Gated) {
    if (block.thread < kTile) space.steps[block.thread] = 0.f;
  }
  block.template add_reader<true>(p.b, p.du, -1.f, p.db, space.head, space.steps);
#pragma unroll 1
  for (int member = 0, group = shape.query_heads / shape.heads; member < group; ++member) {
    const int of = space.head * group + member;
    block.template add_reader<false>(p.q, p.dout, shape.scale, p.dq, of, space.queries);
  }
  block.store_rows(p.dk, true, space.head, block.dk);
  if constexpr (Gated) block.put_gates();
}

template <bool Gated>
cudaError_t launch(const DeltaExactGradients& p, cudaStream_t stream) {
  constexpr int kBytes = gradient_floats(Gated) * static_cast<int>(sizeof(float));
  if (const cudaError_t error = allow_shared<gradients<Gated>>(kBytes); error != cudaSuccess) return error;
  const int64_t blocks = piece_count(p.shape.pieces) * p.shape.heads * divide_up(p.shape.D, kTile);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  gradients<Gated><<<static_cast<unsigned>(blocks), kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace
}  // namespace delta_product::by_piece

cudaError_t delta_exact_gradients(const DeltaExactGradients& p, cudaStream_t stream) {
  return p.g.data == nullptr ? delta_product::by_piece::launch<false>(p, stream)
                             : delta_product::by_piece::launch<true>(p, stream);
}

}  // namespace girih::kernels
