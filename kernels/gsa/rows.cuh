// The gradients of query rows, one block a chunk and query head, warp w with rows 16 w to 16 w + 15:
//
//     dp_t = Hv_t do_t          dz_t = J_feature^T dp_t          dq_t = scale Hk_t dz_t
//
// The first is a value read of (do, v), the last a key read of dz: no memory but forward's is needed.
#pragma once

#include "gsa/block.cuh"
#include "gsa/feature.cuh"

namespace girih::kernels {

template <typename T, int M>
struct GsaRowTiles {
  SharedTile<float, kChunk, M> g;
  SharedTile<T, kChunk, M> s, raw, hk, hv;
  SharedTile<T, kChunk, kSlab> q, k, v, dout;
  float *totals, *decay, *scratch;

  static constexpr int kBytes = SharedTile<float, kChunk, M>::kBytes + 4 * SharedTile<T, kChunk, M>::kBytes +
                                4 * SharedTile<T, kChunk, kSlab>::kBytes + 5 * M * 4 + 4 * kRows * kRows * 4;

  __device__ explicit GsaRowTiles(unsigned char* shared) {
    Layout(shared)(g)(s)(raw)(hk)(hv)(q)(k)(v)(dout)(totals, 4 * M)(decay, M)(scratch, 4 * kRows * kRows);
  }
};

template <typename T, int M>
__global__ void __launch_bounds__(kGsaThreads, M == 64 ? 2 : 1)
    gsa_rows_kernel(const __grid_constant__ GsaRows p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const GsaRowTiles<T, M> tile(shared);
  const GsaShape& shape = p.shape;
  const int warp = threadIdx.x >> 5,
            query_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.query_heads));
  const int head = query_head / (shape.query_heads / shape.heads);
  const int64_t chunk = blockIdx.x / static_cast<unsigned>(shape.query_heads);
  const Piece piece = piece_at(shape.tokens, chunk, kChunk);
  if (piece.length == 0) return;

  const auto load_gate = [&] {
    load_async<kGsaThreads>(tile.g, chunk_rows<float>(p.g, piece, head), p.g.stride[1], piece.length, shape.M,
                            threadIdx.x);
    load_weights<kGsaThreads>(tile.s, p.s, p.g, piece, head, shape.M);
    commit_copies();
  };
  // 64 columns of x (a query head's), y and the memory they read.
  const auto load_slab = [&](const auto& x_tile, const In<4>& x, const auto& y_tile, const In<4>& y,
                             const auto& memory, int first_row, int col, int cols) {
    if (x.data != nullptr) {
      load_async<kGsaThreads>(x_tile, chunk_rows<T>(x, piece, query_head) + col, x.stride[1], piece.length,
                              cols - col, threadIdx.x);
    }
    load_async<kGsaThreads>(y_tile, chunk_rows<T>(y, piece, head) + col, y.stride[1], piece.length,
                            cols - col, threadIdx.x);
    load_async<kGsaThreads>(memory, state_rows<T>(p.states, shape, chunk, head, first_row + col), shape.M,
                            cols - col, shape.M, threadIdx.x);
    commit_copies();
  };
  const auto load_keys = [&](int d) { load_slab(tile.q, p.q, tile.k, p.k, tile.hk, 0, d, shape.D); };
  const auto load_values = [&](int v) {
    load_slab(tile.dout, p.dout, tile.v, p.v, tile.hv, shape.D, v, shape.V);
  };
  load_gate();
  load_keys(0);
  load_values(0);

  wait_copies<2>();
  __syncthreads();
  RowReads<T, M> reads;
  reads.at = {
      {tile.g, tile.totals, tile.decay, warp}, tile.s, tile.raw, {tile.scratch + warp * kRows * kRows}};
  reads.start();
  reads.template split<kGsaThreads>(p.s, p.g, piece, head, shape.M);

  // y = e^L X H + [sum_j x_i . y_j e^{L_i - L_j} s_j], over all slabs of x
  const auto read = [&](Sums<M / 8>& y, const auto& x_tile, const auto& y_tile, const auto& memory, int cols,
                        const auto& load_next) {
    Scores a;
    zero(a);
    fill(y, 0.f);
    for (int col = 0;; col += kSlab) {
      Operand<4> x;
      load(x, x_tile, kRows * warp);
      add_scores<T>(a, x, y_tile, warp);
      add_product<T>(y, x, memory);
      if (col + kSlab >= cols) break;
      __syncthreads();
      load_next(col + kSlab);
      wait_copies<0>();
      __syncthreads();
    }
    mask_causal(a, warp);
    reads.value_read(y, a);
  };
  Sums<M / 8> z, dp;
  wait_copies<1>();
  __syncthreads();
  read(z, tile.q, tile.k, tile.hk, shape.D, load_keys);
  wait_copies<0>();
  __syncthreads();
  read(dp, tile.dout, tile.v, tile.hv, shape.V, load_values);

  // dp becomes scale * dz, z becomes p; w goes out.
  const bool sole = shape.D <= kSlab;  // k and hk are still in their tiles
  if (!sole) {
    __syncthreads();
    load_slab(tile.q, {}, tile.k, p.k, tile.hk, 0, 0, shape.D);
  }
  {
    float* w = static_cast<float*>(p.w.data) + piece.sequence.batch * p.w.stride[0] +
               piece.start * p.w.stride[1] + query_head * p.w.stride[2];
    differentiate(z, dp, shape.feature, shape.scale, shape.slots, [&](int n, int i, float left, float right) {
      const int row = kRows * warp + lane_row() + 8 * i, col = 8 * n + lane_col();
      if (row < piece.length && col < shape.M) {
        *reinterpret_cast<float2*>(w + row * p.w.stride[1] + col) = {left, right};
      }
    });
  }
#pragma unroll
  for (int m = 0; m < M; m += kSlab) {
    store_rows<T>(z, m / 8, tile.q, warp, chunk_rows<T>(p.p, piece, query_head) + m, p.p.stride[1],
                  piece.length, shape.M - m);
    store_rows<T>(dp, m / 8, tile.dout, warp, chunk_rows<T>(p.dz, piece, query_head) + m, p.dz.stride[1],
                  piece.length, shape.M - m);
  }

  // dQ = (dz e^L) Hk^T + [dz_i . e^{L_i - L_j} s_j, j <= i] K
  Operand<M / 8 / 2> f;
  Operand<2> w[2];
  {
    Scores W;
    reads.key_read(dp, W);
    round_to<T>(f, dp);
    round_to<T>(w, W);
  }
  for (int d = 0;; d += kSlab) {
    if (!sole) {
      wait_copies<0>();
      __syncthreads();
    }
    Sums<8> dq;
    fill(dq, 0.f);
    add_product_transposed<T>(dq, f, tile.hk);
    add_scored<T>(dq, w, tile.k, warp);
    store_rows<T>(dq, 0, tile.q, warp, chunk_rows<T>(p.dq, piece, query_head) + d, p.dq.stride[1],
                  piece.length, shape.D - d);
    if (d + kSlab >= shape.D) break;
    __syncthreads();
    load_slab(tile.q, {}, tile.k, p.k, tile.hk, 0, d + kSlab, shape.D);
  }
}

template <typename T, int M>
cudaError_t launch_gsa_rows(const GsaRows& p, cudaStream_t stream) {
  constexpr int bytes = GsaRowTiles<T, M>::kBytes;
  if (const cudaError_t error = allow_shared<gsa_rows_kernel<T, M>>(bytes); error != cudaSuccess)
    return error;
  const int64_t blocks = piece_count(p.shape.tokens, kChunk) * p.shape.query_heads;
  if (blocks == 0) return cudaSuccess;
  gsa_rows_kernel<T, M><<<static_cast<unsigned>(blocks), kGsaThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace girih::kernels
