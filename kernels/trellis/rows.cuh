// What a chunk's tokens need of backward that no later chunk has a part in.
//
//     r_t = f(A_t q_t) of keys, again        dr_t = A_t do_t of values
//     dy = J_f^T dr                          dq_t = A_t^T dy_t of keys
#pragma once

#include "trellis/chunk.cuh"
#include "trellis/map_gradients.cuh"

namespace girih::kernels {

// Tokens' vectors. Those of q and do, which are the warp's own, make way for r and dy.
enum RowTile : int { kRowQ, kRowK, kRowV, kRowDo, kRowUk, kRowUv, kRowTiles };

template <typename T, int Tile>
__global__ void __launch_bounds__(128) trellis_rows_kernel(const __grid_constant__ TrellisRows p) {
  extern __shared__ __align__(128) unsigned char shared[];
  using Reader = TrellisChunk<T, Tile>;
  constexpr int N = Reader::N, K = Reader::K;
  const TrellisShape& shape = p.shape;
  Reader reader(shape, shared);

  reader.load(kRowDo, p.dout, shape.V);
  reader.load(kRowV, p.x[1], shape.V);
  reader.load(kRowUv, p.u[1], shape.M);
  reader.load_memory(p.memories[1]);
  reader.load_gates(p.gates, kRowTiles);
  commit_copies();
  reader.load(kRowQ, p.q, shape.D);
  reader.load(kRowK, p.x[0], shape.D);
  reader.load(kRowUk, p.u[0], shape.M);
  commit_copies();
  wait_copies<1>();
  __syncthreads();

  // dR
  Operand<K> w;
  Sums<N> dr, y, slope;
  reader.left(w, kRowDo);
  reader.read(dr, w, kRowV, kRowUv);
  __syncthreads();
  reader.load_memory(p.memories[0]);
  commit_copies();
  wait_copies<0>();
  __syncthreads();

  // Y, r = f(Y), dY = J_f^T dR
  reader.left(w, kRowQ);
  reader.read(y, w, kRowK, kRowUk);
  with_map(shape.f, shape.slots, [&](const auto& f) {
    activate<T>(f, y, slope);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Fit found = fit_of(f, y, half, reader.columns);
      to_transposed_product(f, dr, y, slope, found, half, reader.columns);
      to_image(f, y, found, half, reader.columns);
    }
  });
  reader.store(kRowQ, y);
  reader.store(kRowDo, dr);
  __syncwarp();
  reader.put_rows(p.l[1], shape.M, kRowQ);
  reader.put_rows(p.l[0], shape.M, kRowDo);

  // dQ. The tile of the values' u has been read by all.
  round_to<T>(w, dr);
  reader.read_transposed(y, w, kRowUk, kRowK);
  reader.store_out(p.dq, shape.D, y, kRowUv);
}

template <typename T, int Tile>
cudaError_t launch_trellis_rows(const TrellisRows& p, cudaStream_t stream) {
  return launch_chunks<trellis_rows_kernel<T, Tile>, T, Tile>(p, kRowTiles, stream);
}

}  // namespace girih::kernels
