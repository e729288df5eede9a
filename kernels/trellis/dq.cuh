// Per-token results of backward that do not depend on later chunks, for all chunks in parallel:
//
//     r_t = f(A_t q_t), keys, recomputed      dr_t = A_t do_t, values; with one memory dr_t = do_t
//     dy_t = J_f^T dr_t                       dq_t = A_t^T dy_t, keys
#pragma once

#include "trellis/map_gradients.cuh"
#include "trellis/parallel_chunks.cuh"

namespace girih::kernels {

// Tiles of the block's tokens; with one memory only those before kDqV. A warp replaces its own tiles of q
// and do by r and dy.
enum DqTile : int { kDqQ, kDqK, kDqDo, kDqUk, kDqV, kDqUv, kDqTiles };
__host__ __device__ constexpr int dq_tiles(int memories) { return memories == 1 ? kDqV : kDqTiles; }

template <typename T, int Tile, int Memories>
__global__ void __launch_bounds__(128) trellis_dq_kernel(const __grid_constant__ TrellisDq p) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  using Warp = TrellisChunkWarp<T, Tile>;
  constexpr int N = Warp::N, K = Warp::K;
  const TrellisShape& shape = p.shape;
  Warp chunk_warp(shape, shared);

  chunk_warp.load(kDqDo, p.dout, shape.output_width());
  if constexpr (Memories == 2) {
    chunk_warp.load(kDqV, p.x[1], shape.V);
    chunk_warp.load(kDqUv, p.u[1], shape.M);
    chunk_warp.load_memory(p.memories[1]);
    chunk_warp.load_gates(p.gates, dq_tiles(Memories));
    commit_copies();
  } else {
    chunk_warp.load_memory(p.memories[0]);
    chunk_warp.load_gates(p.gates, dq_tiles(Memories));
  }
  chunk_warp.load(kDqQ, p.q, shape.D);
  chunk_warp.load(kDqK, p.x[0], shape.D);
  chunk_warp.load(kDqUk, p.u[0], shape.M);
  commit_copies();

  // dR
  AFragment<K> w;
  Accumulator<N> dr, y, slope;
  if constexpr (Memories == 2) {
    wait_copies<1>();
    __syncthreads();
    chunk_warp.load_a_fragment(w, kDqDo);
    chunk_warp.compute_read(dr, w, kDqV, kDqUv);
    __syncthreads();
    chunk_warp.load_memory(p.memories[0]);
    commit_copies();
  }
  wait_copies<0>();
  __syncthreads();
  if constexpr (Memories == 1) chunk_warp.load_fp32(dr, kDqDo);

  // Y, r = f(Y), dY = J_f^T dR
  chunk_warp.load_a_fragment(w, kDqQ);
  chunk_warp.compute_read(y, w, kDqK, kDqUk);
  dispatch_map(shape.f, shape.slots, [&](const auto& f) {
    activate<T>(f, y, slope);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const MapStats stats = compute_row_stats_of_quad(f, y, half, chunk_warp.map_slots);
      apply_jacobian_transpose(f, dr, y, slope, stats, half, chunk_warp.map_slots);
      apply_map(f, y, stats, half, chunk_warp.map_slots);
    }
  });
  if constexpr (Memories == 2) chunk_warp.store(kDqQ, y);
  chunk_warp.store(kDqDo, dr);
  __syncwarp();
  if constexpr (Memories == 2) chunk_warp.store_rows_of_tile(p.l[1], shape.M, kDqQ);
  chunk_warp.store_rows_of_tile(p.l[0], shape.M, kDqDo);

  // dQ. All warps have finished with the tile kDqUv; the tile kDqQ is the warp's own.
  round_to_a_fragment<T>(w, dr);
  chunk_warp.compute_transposed_read(y, w, kDqUk, kDqK);
  chunk_warp.store_result(p.dq, shape.D, y, Memories == 2 ? kDqUv : kDqQ);
}

template <typename T, int Tile>
cudaError_t launch_trellis_dq(const TrellisDq& p, cudaStream_t stream) {
  return p.shape.memories == 1
             ? launch_chunks<trellis_dq_kernel<T, Tile, 1>, T, Tile>(p, dq_tiles(1), stream)
             : launch_chunks<trellis_dq_kernel<T, Tile, 2>, T, Tile>(p, dq_tiles(2), stream);
}

}  // namespace girih::kernels
