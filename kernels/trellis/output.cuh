// o of all chunks in parallel, from the memories before the chunks and u.
#pragma once

#include "trellis/chunk.cuh"

namespace girih::kernels {

enum OutputTile : int { kOutQ, kOutK, kOutV, kOutUk, kOutUv, kOutputTiles };

template <typename T, int Tile>
__global__ void __launch_bounds__(128) trellis_output_kernel(const __grid_constant__ TrellisOutput p) {
  extern __shared__ __align__(128) unsigned char shared[];
  using Reader = TrellisChunk<T, Tile>;
  constexpr int N = Reader::N, K = Reader::K;
  const TrellisShape& shape = p.shape;
  Reader reader(shape, shared);

  reader.load(kOutQ, p.q, shape.D);
  reader.load(kOutK, p.x[0], shape.D);
  reader.load(kOutUk, p.u[0], shape.M);
  reader.load_memory(p.memories[0]);
  reader.load_gates(p.gates, kOutputTiles);
  commit_copies();
  reader.load(kOutV, p.x[1], shape.V);
  reader.load(kOutUv, p.u[1], shape.M);
  commit_copies();
  wait_copies<1>();
  __syncthreads();

  // Y, r = f(Y)
  Operand<K> w;
  reader.left(w, kOutQ);
  Sums<N> y;
  reader.read(y, w, kOutK, kOutUk);
  __syncthreads();
  reader.load_memory(p.memories[1]);
  commit_copies();
  to_images<T>(shape.f, shape.slots, y);
  Operand<K> r;
  round_to<T>(r, y);
  wait_copies<0>();
  __syncthreads();

  // O
  reader.read_transposed(y, r, kOutUv, kOutV);
  reader.store_out(p.o, shape.V, y, kOutQ);
}

template <typename T, int Tile>
cudaError_t launch_trellis_output(const TrellisOutput& p, cudaStream_t stream) {
  return launch_chunks<trellis_output_kernel<T, Tile>, T, Tile>(p, kOutputTiles, stream);
}

}  // namespace girih::kernels
