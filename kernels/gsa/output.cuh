// o = Hv^T feature(scale * Hk^T q), one block a chunk and query head.
//
// Warp w of every four has the chunk's rows 16 w to 16 w + 15, a group of four 64 of the M slots; the two
// warps of a row give each other what they sum over M. Columns of D and V are taken 64 at a time; logits and
// p stay in registers from the first slab of D to the last of V.
#pragma once

#include "gsa/block.cuh"
#include "gsa/feature.cuh"

namespace girih::kernels {

template <typename T, int M>
struct GsaOutputTiles {
  static constexpr int kGroups = M / 64;
  static constexpr int kRowSums = kGroups > 1 ? 2 * kGroups* kChunk : 0;

  SharedTile<float, kChunk, M> g;
  SharedTile<T, kChunk, M> s, hk, hv;
  SharedTile<T, kChunk, kSlab> q, k, v;
  float *totals, *decay, *row_sums;  // row_sums [2, groups, 64]: the softmax's, of a group's columns

  static constexpr int kBytes = SharedTile<float, kChunk, M>::kBytes + 3 * SharedTile<T, kChunk, M>::kBytes +
                                3 * SharedTile<T, kChunk, kSlab>::kBytes + (5 * M + kRowSums) * 4;

  __device__ explicit GsaOutputTiles(unsigned char* shared) {
    Layout(shared)(g)(s)(hk)(hv)(q)(k)(v)(totals, 4 * M)(decay, M)(row_sums, kRowSums);
  }
};

template <typename T, int M>
__global__ void __launch_bounds__(kGroup*(M / 64), M == 64 ? 3 : 2)
    gsa_output_kernel(const __grid_constant__ GsaOutput p) {
  constexpr int kGroups = GsaOutputTiles<T, M>::kGroups, kThreads = kGroup * kGroups;
  extern __shared__ __align__(128) unsigned char shared[];
  const GsaOutputTiles<T, M> tile(shared);
  const GsaShape& shape = p.shape;
  const int warp = threadIdx.x / 32 % 4, group = kGroups == 1 ? 0 : threadIdx.x / kGroup;
  const int first = 64 * group;  // of the group's columns
  const int query_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.query_heads));
  const int head = query_head / (shape.query_heads / shape.heads);
  const int64_t chunk = piece_in_time(shape.tokens, blockIdx.x / static_cast<unsigned>(shape.query_heads),
                                      kChunk, /*last_first=*/true);
  const Piece piece = piece_at(shape.tokens, chunk, kChunk);
  if (piece.length == 0) return;

  const auto load_gate = [&] {
    load_gates<kThreads>(tile.g, p.g, piece, head, shape.M);
    load_weights<kThreads>(tile.s, p.s, p.g, piece, head, shape.M);
    commit_copies();
  };
  const auto load_keys = [&](int d) {
    const int cols = shape.D - d;
    load_async<kThreads>(tile.q, chunk_rows<T>(p.q, piece, query_head) + d, p.q.stride[1], piece.length, cols,
                         threadIdx.x);
    load_async<kThreads>(tile.k, chunk_rows<T>(p.k, piece, head) + d, p.k.stride[1], piece.length, cols,
                         threadIdx.x);
    load_async<kThreads>(tile.hk, state_rows<T>(p.states, shape, chunk, head, d), shape.M, cols, shape.M,
                         threadIdx.x);
    commit_copies();
  };
  const auto load_values = [&](int v) {
    const int cols = shape.V - v;
    load_async<kThreads>(tile.v, chunk_rows<T>(p.v, piece, head) + v, p.v.stride[1], piece.length, cols,
                         threadIdx.x);
    load_async<kThreads>(tile.hv, state_rows<T>(p.states, shape, chunk, head, shape.D + v), shape.M, cols,
                         shape.M, threadIdx.x);
    commit_copies();
  };
  load_gate();
  load_keys(0);
  load_values(0);

  wait_copies<2>();
  __syncthreads();
  RowReads<T, M, false, 64> reads;
  // Each warp's scratch is in its rows of q, which have been read by then.
  reads.at = {{tile.g.from_column(first), tile.decay + first, tile.totals + first, warp},
              tile.s.from_column(first),
              tile.hk.from_column(first),
              {rows_of(tile.q, warp) + group * kRows * kRows}};
  reads.template start<4>();

  // a = Q K^T,  logits = Q Hk
  Scores a;
  Sums<8> logits;
  zero(a);
  fill(logits, 0.f);
  wait_copies<1>();
  __syncthreads();
  for (int d = 0;; d += kSlab) {
#pragma unroll 2
    for (int col = 0; col < kSlab; col += 16) {
      uint32_t q[4];
      load_block(q, tile.q, kRows * warp, col);
      add_scores<Side::earlier, T>(a, q, tile.k, col, warp);
      add_product<T>(logits, q, tile.hk, col, first);
    }
    if (d + kSlab >= shape.D) break;
    __syncthreads();
    load_keys(d + kSlab);
    wait_copies<0>();
    __syncthreads();
  }

  // logits = scale (e^L Q Hk + [sum_j a_ij e^{L_i - L_j} s_j])
  reads.template split<kThreads>(tile.hk, p.s, p.g, piece, head, shape.M);
  reads.value_read(logits, a);

  // p = feature(logits), for softmax without its divisor
  float2 divisor;
  apply(
      logits, shape.feature, shape.scale, shape.slots - first,
      [&](int what, float2 own, const auto& op) -> float2 {
        if constexpr (kGroups == 1) return own;
        const auto at = [&](int g) {
          return tile.row_sums + (what * kGroups + g) * kChunk + kRows * warp + lane_row();
        };
        if (lane_col() == 0) at(group)[0] = own.x, at(group)[8] = own.y;
        meet<kGroups>(warp);
        return {op(own.x, at(1 - group)[0]), op(own.y, at(1 - group)[8])};
      },
      divisor);

  // O = (p e^L) Hv + [p_i . e^{L_i - L_j} s_j, j <= i] V
  Operand<4> f;
  Operand<2> w[2];
  {
    Scores W;
    reads.key_read(logits, W);
    if constexpr (kGroups > 1) {
      meet<kGroups>(warp);  // the rows of g have served
      join_scores(W, rows_of(tile.g, warp), group, warp);
    }
    round_scores<Side::earlier, true, T>(w, W, warp);
  }
  round_to<T>(f, logits);
  wait_copies<0>();
  __syncthreads();
  constexpr int kEights = 8 / kGroups;  // of the slab's columns, the group's
  for (int v = 0;; v += kSlab) {
    Sums<kEights> o;
    read_rows<T, kGroups>(o, f, w, tile.hv, tile.v, rows_of(tile.s, warp), group, warp);
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o.at[n][i] *= i < 2 ? divisor.x : divisor.y;
    }
    const int col = 8 * kEights * group;
    store_rows<T, kEights>(o, 0, tile.q, warp, chunk_rows<T>(p.o, piece, query_head) + v + col, p.o.stride[1],
                           piece.length, shape.V - v - col, col);
    if (v + kSlab >= shape.V) break;
    __syncthreads();
    load_values(v + kSlab);
    wait_copies<0>();
    __syncthreads();
  }
}

template <typename T, int M>
cudaError_t launch_gsa_output(const GsaOutput& p, cudaStream_t stream) {
  return launch_blocks<gsa_output_kernel<T, M>>(p, kGroup * (M / 64), GsaOutputTiles<T, M>::kBytes, stream);
}

}  // namespace girih::kernels
