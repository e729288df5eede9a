// Per-token results of backward that do not depend on later chunks, for all chunks in parallel:
//
//     r_t = f(A_t q_t), keys, recomputed      dr_t = A_t do_t, values; with one memory dr_t = do_t
//     dy_t = J_f^T dr_t                       dq_t = A_t^T dy_t, keys
#pragma once

#include "trellis/map_gradients.cuh"
#include "trellis/parallel_chunks.cuh"

namespace girih::kernels {

// Tensors whose tiles are in shared memory; with one memory only those before kDqV. A warp replaces its own
// tiles of q and do by r and dy.
enum DqTile : int { kDqQ, kDqK, kDqDo, kDqUk, kDqV, kDqUv, kDqTiles };
__host__ __device__ constexpr int dq_tiles(int memory_count) { return memory_count == 1 ? kDqV : kDqTiles; }

template <typename T, int Width, int MemoryCount>
__global__ void __launch_bounds__(128) trellis_dq_kernel(const __grid_constant__ TrellisDq p) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  using Warp = TrellisChunkWarp<T, Width>;
  constexpr int N = Warp::N, K = Warp::K;
  const TrellisShape& shape = p.shape;
  Warp chunk_warp(shape, shared);

  chunk_warp.load(kDqDo, p.dout, shape.output_width());
  if constexpr (MemoryCount == 2) {
    chunk_warp.load(kDqV, p.x[kValueMemory], shape.V);
    chunk_warp.load(kDqUv, p.u[kValueMemory], shape.M);
    chunk_warp.load_memory(p.memories[kValueMemory]);
    chunk_warp.load_gates(p.gates, dq_tiles(MemoryCount));
    commit_copies();
  } else {
    chunk_warp.load_memory(p.memories[kKeyMemory]);
    chunk_warp.load_gates(p.gates, dq_tiles(MemoryCount));
  }
  chunk_warp.load(kDqQ, p.q, shape.D);
  chunk_warp.load(kDqK, p.x[kKeyMemory], shape.D);
  chunk_warp.load(kDqUk, p.u[kKeyMemory], shape.M);
  commit_copies();

  // dR
  AFragment<K> w;
  Accumulator<N> dr, y, slope;
  if constexpr (MemoryCount == 2) {
    wait_copies<1>();
    __syncthreads();
    chunk_warp.load_a_fragment(w, kDqDo);
    chunk_warp.compute_read(dr, w, kDqV, kDqUv);
    __syncthreads();
    chunk_warp.load_memory(p.memories[kKeyMemory]);
    commit_copies();
  }
  wait_copies<0>();
  __syncthreads();
  if constexpr (MemoryCount == 1) chunk_warp.load_fp32(dr, kDqDo);

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
  if constexpr (MemoryCount == 2) chunk_warp.store(kDqQ, y);
  chunk_warp.store(kDqDo, dr);
  __syncwarp();
  if constexpr (MemoryCount == 2) chunk_warp.store_rows_of_tile(p.l[kValueMemory], shape.M, kDqQ);
  chunk_warp.store_rows_of_tile(p.l[kKeyMemory], shape.M, kDqDo);

  // dQ. All warps have finished with the tile kDqUv; the tile kDqQ is the warp's own.
  round_to_a_fragment<T>(w, dr);
  chunk_warp.compute_transposed_read(y, w, kDqUk, kDqK);
  chunk_warp.store_result(p.dq, shape.D, y, MemoryCount == 2 ? kDqUv : kDqQ);
}

template <typename T, int Width>
cudaError_t launch_trellis_dq(const TrellisDq& p, cudaStream_t stream) {
  return p.shape.memories == 1
             ? launch_chunks<trellis_dq_kernel<T, Width, 1>, T, Width>(p, dq_tiles(1), stream)
             : launch_chunks<trellis_dq_kernel<T, Width, 2>, T, Width>(p, dq_tiles(2), stream);
}

}  // namespace girih::kernels
