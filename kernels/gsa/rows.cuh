// The gradients of query rows, one block a chunk and query head:
//
//     dp_t = Hv_t do_t          dz_t = J_feature^T dp_t          dq_t = scale Hk_t dz_t
//
// The first is a value read of (do, v), the last a key read of dz: no memory but forward's is needed. Two
// groups of four warps, in each warp w with rows 16 w to 16 w + 15: the first makes the logits z, the second
// dp, they exchange them, and the first makes dq while the second writes p, dz and w.
#pragma once

#include "gsa/block.cuh"
#include "gsa/feature.cuh"

namespace girih::kernels {

constexpr int kRowThreads = 256;

template <typename T, int M>
struct GsaRowTiles {
  // With 64 slots what is exchanged takes the place of tiles that have been read; then two blocks fit.
  static constexpr bool kReuse = M == 64;
  static constexpr int kExchange = kChunk * M;  // floats

  SharedTile<float, kChunk, M> g;
  SharedTile<T, kChunk, M> s, raw, hk, hv;
  SharedTile<T, kChunk, kSlab> q, k, v, dout;
  float *totals, *decay, *own, *z, *dp;  // own [2, 64]: scores of rows with themselves

  static constexpr int kBytes = SharedTile<float, kChunk, M>::kBytes + 4 * SharedTile<T, kChunk, M>::kBytes +
                                4 * SharedTile<T, kChunk, kSlab>::kBytes + 5 * M * 4 + 2 * kChunk * 4 +
                                (kReuse ? 0 : 2 * kExchange * 4);

  __device__ explicit GsaRowTiles(unsigned char* shared) {
    Layout layout(shared);
    layout(g)(s)(raw)(hk)(k)(q)(dout)(v)(hv)(totals, 4 * M)(decay, M)(own, 2 * kChunk);
    if constexpr (kReuse) {
      static_assert(kExchange * 4 == SharedTile<T, kChunk, M>::kBytes + SharedTile<T, kChunk, kSlab>::kBytes);
      z = reinterpret_cast<float*>(q.data);   // and dout
      dp = reinterpret_cast<float*>(v.data);  // and hv
    } else {
      layout(z, kExchange)(dp, kExchange);
    }
  }
};

// A warp's sums to its part of an exchange, and back from there.
template <int N>
__device__ inline float4* exchange_place(float* exchange, int warp) {
  return reinterpret_cast<float4*>(exchange) + warp * N * 32 + lane();
}
template <int N>
__device__ inline void give(float* exchange, int warp, const Sums<N>& sums) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float(&x)[4] = sums.at[n];
    exchange_place<N>(exchange, warp)[n * 32] = {x[0], x[1], x[2], x[3]};
  }
}
template <int N>
__device__ inline void take(float* exchange, int warp, Sums<N>& sums) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float4 x = exchange_place<N>(exchange, warp)[n * 32];
    sums.at[n][0] = x.x, sums.at[n][1] = x.y, sums.at[n][2] = x.z, sums.at[n][3] = x.w;
  }
}

template <typename T, int M>
__global__ void __launch_bounds__(kRowThreads, M == 64 ? 2 : 1)
    gsa_rows_kernel(const __grid_constant__ GsaRows p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const GsaRowTiles<T, M> tile(shared);
  const GsaShape& shape = p.shape;
  const int warp = threadIdx.x / 32 % 4, thread = threadIdx.x % kGroup;
  const bool values = threadIdx.x >= kGroup;  // the second group
  const int query_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.query_heads));
  const int head = query_head / (shape.query_heads / shape.heads);
  const int64_t chunk = blockIdx.x / static_cast<unsigned>(shape.query_heads);
  const Piece piece = piece_at(shape.tokens, chunk, kChunk);
  if (piece.length == 0) return;
  const auto group_barrier = [&] { barrier_wait(1 + values, kGroup); };

  load_async<kRowThreads>(tile.g, chunk_rows<float>(p.g, piece, head), p.g.stride[1], piece.length, shape.M,
                          threadIdx.x);
  load_weights<kRowThreads>(tile.s, p.s, p.g, piece, head, shape.M);
  commit_copies();

  // The group's x (q or do), y (k or v) and memory, 64 columns at a time.
  const auto x_tile = values ? tile.dout : tile.q, y_tile = values ? tile.v : tile.k;
  const auto memory = values ? tile.hv : tile.hk;
  const int width = values ? shape.V : shape.D;
  const auto load_slab = [&](int col, bool with_x) {
    const In<4>&x = values ? p.dout : p.q, &y = values ? p.v : p.k;
    if (with_x) {
      load_async<kGroup>(x_tile, chunk_rows<T>(x, piece, query_head) + col, x.stride[1], piece.length,
                         width - col, thread);
    }
    load_async<kGroup>(y_tile, chunk_rows<T>(y, piece, head) + col, y.stride[1], piece.length, width - col,
                       thread);
    load_async<kGroup>(memory, state_rows<T>(p.states, shape, chunk, head, (values ? shape.D : 0) + col),
                       shape.M, width - col, shape.M, thread);
    commit_copies();
  };
  load_slab(0, true);

  wait_copies<1>();
  __syncthreads();
  RowReads<T, M, true> reads;
  reads.at = {{tile.g, tile.decay, tile.totals, warp}, tile.s, tile.raw, {rows_of(x_tile, warp)}};
  reads.template start<kRowThreads / 32>();
  reads.template split<kRowThreads>(p.s, p.g, piece, head, shape.M, !values);
  wait_copies<0>();
  group_barrier();

  // e^L X H + [sum_{j<i} x_i . y_j e^{L_i - L_j} s_j]
  Sums<M / 8> own;  // z or dp
  {
    Scores a;
    zero(a);
    fill(own, 0.f);
    for (int slab = 0;; slab += kSlab) {
#pragma unroll 2
      for (int col = 0; col < kSlab; col += 16) {
        uint32_t x[4];
        load_block(x, x_tile, kRows * warp, col);
        add_scores<Side::earlier, T>(a, x, y_tile, col, warp);
        add_product<T>(own, x, memory, col);
      }
      if (slab + kSlab >= width) break;
      group_barrier();
      load_slab(slab + kSlab, true);
      wait_copies<0>();
      group_barrier();
    }
    put_diagonal(tile.own + values * kChunk, a, warp);
    reads.value_read(own, a);
  }
  const bool sole = shape.D <= kSlab;  // k and hk are still in their tiles
  __syncthreads();
  give(values ? tile.dp : tile.z, warp, own);
  __syncthreads();

  const auto own_score = [&](int which) -> float2 {
    const float* of = tile.own + which * kChunk + kRows * warp + lane_row();
    return {of[0], of[8]};
  };
  const auto weight = [&](int n, int i) { return reads.weight(i, n); };
  if (values) {
    Sums<M / 8> z;
    take(tile.z, warp, z);
    float* rows = chunk_rows<float>(p.w, piece, query_head);
    differentiate(z, own, own_score(0), own_score(1), weight, shape.feature, shape.scale, shape.slots,
                  [&](int n, int i, float left, float right) {
                    const int row = kRows * warp + lane_row() + 8 * i, col = 8 * n + lane_col();
                    if (row < piece.length && col < shape.M) {
                      *reinterpret_cast<float2*>(rows + row * p.w.stride[1] + col) = {left, right};
                    }
                  });
    // The warp's part of z has been read by it alone: room for its rows on their way out.
    const SharedTile<T, kChunk, kSlab> stage{reinterpret_cast<T*>(tile.z + warp * kRows * M) -
                                             warp * kRows * kSlab};
    const auto put = [&](const Sums<M / 8>& sums, const Out<4>& to) {
#pragma unroll
      for (int m = 0; m < M; m += kSlab) {
        store_rows<T>(sums, m / 8, stage, warp, chunk_rows<T>(to, piece, query_head) + m, to.stride[1],
                      piece.length, shape.M - m);
      }
    };
    put(z, p.p);
    put(own, p.dz);
    reads.decay_from_start(z);
    reads.decay_from_start(own);
    put(z, p.p_scan);
    put(own, p.dz_scan);
    return;
  }

  // dQ = (dz e^L) Hk^T + [dz_i . e^{L_i - L_j} s_j, j <= i] K
  if (!sole) load_slab(0, false);
  Operand<M / 8 / 2> f;
  Operand<2> w[2];
  {
    Sums<M / 8> dz;
    take(tile.dp, warp, dz);
    differentiate(own, dz, own_score(0), own_score(1), weight, shape.feature, shape.scale, shape.slots,
                  [](int, int, float, float) {});
    __syncwarp();
    reads.at.scratch = {tile.dp + warp * kRows * M};
    reads.key_read(dz, w);
    round_to<T>(f, dz);
  }
  const SharedTile<T, kChunk, kSlab> stage{reinterpret_cast<T*>(tile.dp + warp * kRows * M) -
                                           warp * kRows * kSlab};
  for (int d = 0;; d += kSlab) {
    if (!sole) {
      wait_copies<0>();
      group_barrier();
    }
    Sums<8> dq;
    fill(dq, 0.f);
    add_product_transposed<T>(dq, f, tile.hk);
    add_scored<Side::earlier, T>(dq, w, tile.k, warp);
    store_rows<T>(dq, 0, stage, warp, chunk_rows<T>(p.dq, piece, query_head) + d, p.dq.stride[1],
                  piece.length, shape.D - d);
    if (d + kSlab >= shape.D) break;
    group_barrier();
    load_slab(d + kSlab, false);
  }
}

template <typename T, int M>
cudaError_t launch_gsa_rows(const GsaRows& p, cudaStream_t stream) {
  return launch_blocks<gsa_rows_kernel<T, M>>(p, kRowThreads, GsaRowTiles<T, M>::kBytes, stream);
}

}  // namespace girih::kernels
