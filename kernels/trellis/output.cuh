// o of every chunk by itself, from the memories before it.
#pragma once

#include "trellis/chunk.cuh"

namespace girih::kernels {

enum OutputTile : int { kOutQ, kOutK, kOutV, kOutA, kOutU, kOutputTiles };

template <typename T, int Tile>
__global__ void __launch_bounds__(128) trellis_output_kernel(const __grid_constant__ TrellisOutput p) {
  extern __shared__ __align__(128) unsigned char shared[];
  using Reader = TrellisChunk<T, Tile>;
  constexpr int N = Reader::N, K = Reader::K;
  const TrellisShape& shape = p.shape;
  Reader reader(shape, shared);

  reader.load(kOutK, p.x[0], shape.D);
  reader.load(kOutA, p.a, shape.M);
  if (!reader.resumed(p.first[0])) reader.load_memory(p.memories[0], shape.D);
  commit_copies();
  reader.load(kOutQ, p.q, shape.D);
  reader.load(kOutV, p.x[1], shape.V);
  commit_copies();
  reader.load_gates(p.gamma, p.g, kOutputTiles);
  if (reader.resumed(p.first[0])) reader.load_first(p.first[0], shape.D);
  wait_copies<0>();
  __syncthreads();

  // U = J_phi(Z)^T (phi(Z) - a) of the memory in place; then A where it was A'.
  const auto updates = [&](int x, int memory) {
    Operand<K> left;
    reader.left(left, x);
    Sums<N> u, slope, a;
    reader.wide(a, kOutA);
    fill(u, 0.f);
    add_product_transposed<T>(u, left, reader.memory());
    with_map(shape.phi, shape.slots, [&](const auto& phi) {
      activate(phi, u, slope);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        to_residual(phi, u, slope, a, reader.fit_of(phi, u, a, half), half, reader.columns);
      }
    });
    reader.store(kOutU, u);
    if (p.first[memory].data != nullptr) {
      __syncthreads();
      if (reader.resumed(p.first[memory])) reader.load_memory(p.memories[memory], shape.width(memory));
      commit_copies();
      wait_copies<0>();
    }
    __syncthreads();
  };
  updates(kOutK, 0);

  // Y, r = f(Y)
  Operand<K> w;
  reader.left(w, kOutQ);
  Sums<N> y;
  reader.read(y, w, kOutK, kOutU);
  with_map(shape.f, shape.slots, [&](const auto& f) {
    Sums<N> slope;
    activate(f, y, slope);
#pragma unroll
    for (int half = 0; half < 2; ++half) to_image(f, y, reader.fit_of(f, y, y, half), half, reader.columns);
  });
  Operand<K> r;
  round_to<T>(r, y);
  __syncthreads();

  if (reader.resumed(p.first[1])) {
    reader.load_first(p.first[1], shape.V);
  } else {
    reader.load_memory(p.memories[1], shape.V);
  }
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  updates(kOutV, 1);

  // O
  reader.read_transposed(y, r, kOutU, kOutV);
  reader.store_out(p.o, shape.V, y, kOutQ);
}

template <typename T, int Tile>
cudaError_t launch_trellis_output(const TrellisOutput& p, cudaStream_t stream) {
  return launch_chunks<trellis_output_kernel<T, Tile>, T, Tile>(p, kOutputTiles, stream);
}

}  // namespace girih::kernels
