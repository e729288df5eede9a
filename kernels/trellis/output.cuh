// o of all chunks in parallel, from the memories before the chunks and u.
#pragma once

#include "trellis/parallel_chunks.cuh"

namespace girih::kernels {

// Tensors whose tiles are in shared memory.
enum OutputTile : int { kOutQ, kOutK, kOutV, kOutUk, kOutUv, kOutputTiles };

template <typename T, int Width>
__global__ void __launch_bounds__(128) trellis_output_kernel(const __grid_constant__ TrellisOutput p) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  using Warp = TrellisChunkWarp<T, Width>;
  constexpr int N = Warp::N, K = Warp::K;
  const TrellisShape& shape = p.shape;
  Warp chunk_warp(shape, shared);

  chunk_warp.load(kOutQ, p.q, shape.D);
  chunk_warp.load(kOutK, p.x[kKeyMemory], shape.D);
  chunk_warp.load(kOutUk, p.u[kKeyMemory], shape.M);
  chunk_warp.load_memory(p.memories[kKeyMemory]);
  chunk_warp.load_gates(p.gates, kOutputTiles);
  commit_copies();
  chunk_warp.load(kOutV, p.x[kValueMemory], shape.V);
  chunk_warp.load(kOutUv, p.u[kValueMemory], shape.M);
  commit_copies();
  wait_copies<1>();
  __syncthreads();

  // Y, r = f(Y)
  AFragment<K> w;
  chunk_warp.load_a_fragment(w, kOutQ);
  Accumulator<N> y;
  chunk_warp.compute_read(y, w, kOutK, kOutUk);
  __syncthreads();
  chunk_warp.load_memory(p.memories[kValueMemory]);
  commit_copies();
  apply_map_to_rows<T>(shape.f, shape.slots, y);
  AFragment<K> r;
  round_to_a_fragment<T>(r, y);
  wait_copies<0>();
  __syncthreads();

  // O
  chunk_warp.compute_transposed_read(y, r, kOutUv, kOutV);
  chunk_warp.store_result(p.o, shape.V, y, kOutQ);
}

template <typename T, int Width>
cudaError_t launch_trellis_output(const TrellisOutput& p, cudaStream_t stream) {
  return launch_chunks<trellis_output_kernel<T, Width>, T, Width>(p, kOutputTiles, stream);
}

}  // namespace girih::kernels
