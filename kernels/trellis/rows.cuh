// Per-token results of backward that do not depend on later chunks, for all chunks in parallel:
//
//     r_t = f(A_t q_t), keys, recomputed      dr_t = A_t do_t, values; with one memory dr_t = do_t
//     dy_t = J_f^T dr_t                       dq_t = A_t^T dy_t, keys
#pragma once

#include "trellis/chunk.cuh"
#include "trellis/map_gradients.cuh"

namespace girih::kernels {

// Tiles of the block's tokens; with one memory only those before kRowV. A warp replaces its own tiles of q
// and do by r and dy.
enum RowTile : int { kRowQ, kRowK, kRowDo, kRowUk, kRowV, kRowUv, kRowTiles };
__host__ __device__ constexpr int row_tiles(int memories) { return memories == 1 ? kRowV : kRowTiles; }

template <typename T, int Tile, int Memories>
__global__ void __launch_bounds__(128) trellis_rows_kernel(const __grid_constant__ TrellisRows p) {
  extern __shared__ __align__(128) unsigned char shared[];
  using Reader = TrellisChunk<T, Tile>;
  constexpr int N = Reader::N, K = Reader::K;
  const TrellisShape& shape = p.shape;
  Reader reader(shape, shared);

  reader.load(kRowDo, p.dout, shape.output_width());
  if constexpr (Memories == 2) {
    reader.load(kRowV, p.x[1], shape.V);
    reader.load(kRowUv, p.u[1], shape.M);
    reader.load_memory(p.memories[1]);
    reader.load_gates(p.gates, row_tiles(Memories));
    commit_copies();
  } else {
    reader.load_memory(p.memories[0]);
    reader.load_gates(p.gates, row_tiles(Memories));
  }
  reader.load(kRowQ, p.q, shape.D);
  reader.load(kRowK, p.x[0], shape.D);
  reader.load(kRowUk, p.u[0], shape.M);
  commit_copies();

  // dR
  Operand<K> w;
  Sums<N> dr, y, slope;
  if constexpr (Memories == 2) {
    wait_copies<1>();
    __syncthreads();
    reader.left(w, kRowDo);
    reader.read(dr, w, kRowV, kRowUv);
    __syncthreads();
    reader.load_memory(p.memories[0]);
    commit_copies();
  }
  wait_copies<0>();
  __syncthreads();
  if constexpr (Memories == 1) reader.wide(dr, kRowDo);

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
  if constexpr (Memories == 2) reader.store(kRowQ, y);
  reader.store(kRowDo, dr);
  __syncwarp();
  if constexpr (Memories == 2) reader.put_rows(p.l[1], shape.M, kRowQ);
  reader.put_rows(p.l[0], shape.M, kRowDo);

  // dQ. All warps have finished with the tile kRowUv; the tile kRowQ is the warp's own.
  round_to<T>(w, dr);
  reader.read_transposed(y, w, kRowUk, kRowK);
  reader.store_out(p.dq, shape.D, y, Memories == 2 ? kRowUv : kRowQ);
}

template <typename T, int Tile>
cudaError_t launch_trellis_rows(const TrellisRows& p, cudaStream_t stream) {
  return p.shape.memories == 1
             ? launch_chunks<trellis_rows_kernel<T, Tile, 1>, T, Tile>(p, row_tiles(1), stream)
             : launch_chunks<trellis_rows_kernel<T, Tile, 2>, T, Tile>(p, row_tiles(2), stream);
}

}  // namespace girih::kernels
