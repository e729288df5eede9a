// The gradients of key rows, one block a chunk and query head, warp w of every four with rows 16 w to 16 w +
// 15. G: what later chunks and the final state give to the state after this one. For each memory, one after
// the other (gsa's keys and values; gla has the second alone, with k and q in s's and p's place):
//
//     dx_j = G_j s_j         ds_j = sum of G_j^T x_j over the memories
//     G_j = e^{L_C - L_j} G + sum_{t>=j} e^{L_t - L_j} read_t y_t^T
//     dg_t = sum over the memories' rows of G_t * e^{g_t} H_{t-1}
//
// with x, read, y: k, q, scale dz, or v, do, p. What a row gives to its own token crosses no gate. Without
// it, with w = z dz + p dp of reads and s ds of writes, in the chunk
//
//     dg_t = sum H * (gradient of H) - sum_{j<t} (w - s ds)_j
//
// (s as it is in G's part of ds, as the tensor cores saw it in the rows' part, so that pairs of rows cancel)
//
// H the states before the chunk: their gradient is what the reverse scan wrote for the chunk before. Of the
// query heads that share a memory only the first adds what G gives.
#pragma once

#include "gsa/columns_block.cuh"

namespace girih::kernels {

template <typename T, int M, int Memories>
__global__ void __launch_bounds__(kGroup*(M / 64), M == 64 ? 3 : 1)
    gated_columns_kernel(const __grid_constant__ GatedColumns p) {
  using Block = GatedColumnBlock<T, M, Memories>;
  extern __shared__ __align__(128) unsigned char shared[];
  Block block(p, shared);
  if (block.piece.length == 0) return;
  block.start_loads();
  // What the edge needs, while the copies are on their way: the block of the chunk before has just read it.
  typename Block::EdgeRows edge_rows;
  const bool has_edge = block.has_edge();
  if (has_edge) block.load_edges(edge_rows, false);

  wait_copies<1>();
  __syncthreads();
  block.start_writes();
  if (has_edge) block.load_edges(edge_rows, true);
  block.put_edge(edge_rows);
  const bool factored = block.writes.factored;
  if (!factored) block.load_unscaled();
  wait_copies<0>();
  __syncthreads();

  // ds, the group's 64 columns; where factors serve without e^X. What the chunk's own rows give comes last.
  Sums<8> u;
  fill(u, 0.f);
  const float* w_rows = chunk_rows<float>(p.w, block.piece, block.query_head);
  if (factored) {
    block.template take_memories<true>(u, w_rows);
  } else {
    block.template take_memories<false>(u, w_rows);
  }

  float2 w[8][2];
  block.load_w(w, w_rows);
  if (Block::kGroups > 1) __syncthreads();  // rows on their way out go through read too
  if (factored) {
    block.template finish<true>(u, w);
  } else {
    block.template finish<false>(u, w);
  }
  block.put(u);
}

template <typename T, int M, int Memories>
cudaError_t launch_gated_columns(const GatedColumns& p, cudaStream_t stream) {
  return launch_blocks<gated_columns_kernel<T, M, Memories>>(
      p, kGroup * (M / 64), GatedColumnTiles<T, M, Memories>::kBytes, stream);
}

}  // namespace girih::kernels
