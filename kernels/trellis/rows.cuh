// What a chunk's tokens need of backward that no later chunk has a part in.
//
//     dr_t = A_t do_t of values        dy = J_f^T dr        dq_t = A_t^T dy_t of keys
// and of either memory, with l = dy and w = q of keys, l = r and w = do of values, what du is of reads in the
// chunk itself:  direct_i = sum over t >= i of e^{L_t - L_i} (w_t.x_i) l_t.
#pragma once

#include "trellis/chunk.cuh"
#include "trellis/map_gradients.cuh"

namespace girih::kernels {

enum RowTile : int { kRowQ, kRowK, kRowV, kRowDo, kRowUk, kRowUv, kRowR, kRowDy, kRowTiles };

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
  reader.load_memory(p.memories[1], shape.V);
  commit_copies();
  reader.load(kRowQ, p.q, shape.D);
  reader.load(kRowK, p.x[0], shape.D);
  reader.load(kRowUk, p.u[0], shape.M);
  commit_copies();
  reader.load_gates(p.gamma, p.g, kRowTiles);
  wait_copies<1>();
  __syncthreads();

  // dR
  Operand<K> w;
  Sums<N> dr, y, slope;
  reader.left(w, kRowDo);
  reader.read(dr, w, kRowV, kRowUv);
  __syncthreads();
  reader.load_memory(p.memories[0], shape.D);
  commit_copies();
  wait_copies<0>();
  __syncthreads();

  // Y, r = f(Y), dY = J_f^T dR
  reader.left(w, kRowQ);
  reader.read(y, w, kRowK, kRowUk);
  with_map(shape.f, shape.slots, [&](const auto& f) {
    activate(f, y, slope);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Fit found = fit_of(f, y, half, reader.columns);
      to_transposed_product(f, dr, y, slope, found, half, reader.columns);
      to_image(f, y, found, half, reader.columns);
    }
  });
  reader.store(kRowR, y);
  reader.store(kRowDy, dr);
  __syncwarp();
  reader.put_rows(p.l[1], shape.M, kRowR);
  reader.put_rows(p.l[0], shape.M, kRowDy);

  // dQ. The tile of the values' u has been read by all.
  round_to<T>(w, dr);
  reader.read_transposed(y, w, kRowUk, kRowK);
  reader.store_out(p.dq, shape.D, y, kRowUv);
  __syncthreads();

  // direct
  const auto L = reader.own_through();
  const auto direct = [&](int memory, int x, int of_w, int of_l) {
    reader.left(w, x);
    fill(y, 0.f);
    for (int j = reader.tile; j < reader.block.tiles; ++j) {
      add_scored<T>(y, w, reader.rows_of(of_w, j), reader.rows_of(of_l, j), [&](Sums<2>& s) {
        weigh_later(s, L, reader.gates_of(j), j == reader.tile, reader.rows_in(j));
      });
    }
    reader.store_out(p.direct[memory], shape.M, y, kRowUv);
  };
  direct(0, kRowK, kRowQ, kRowDy);
  direct(1, kRowV, kRowDo, kRowR);
}

template <typename T, int Tile>
cudaError_t launch_trellis_rows(const TrellisRows& p, cudaStream_t stream) {
  return launch_chunks<trellis_rows_kernel<T, Tile>, T, Tile>(p, 1, kRowTiles, stream);
}

}  // namespace girih::kernels
