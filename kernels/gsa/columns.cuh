// The gradients of key rows, one block a chunk and query head, warp w with rows 16 w to 16 w + 15. Gk, Gv:
// what later chunks and the final state give to the state after this one.
//
//     dk_j = Gk_j s_j         ds_j = Gk_j^T k_j + Gv_j v_j         dv_j = Gv_j^T s_j
//     Gk_j = e^{L_C - L_j} Gk + sum_{t>=j} e^{L_t - L_j} scale q_t dz_t^T        Gv_j alike with p_t, do_t
//     dg_t = sum over d, v of Gk_t * e^{g_t} Hk_{t-1} + Gv_t * e^{g_t} Hv_{t-1}
//          = E + sum_{i>=t} (z dz + p dp - s ds)_i
// in the chunk, where E = e^{L_C} sum (G * H) + sum_j s_j e^{L_C - L_j} (k_j Gk + v_j Gv), H the chunk's
// first states. Of the query heads that share a memory only the first adds what G gives.
#pragma once

#include "gsa/block.cuh"
#include "gsa/writes.cuh"

namespace girih::kernels {

template <typename T, int M>
struct GsaColumnTiles {
  SharedTile<float, kChunk, M> g;
  SharedTile<T, kChunk, M> s, dz, p, gk, gv;
  SharedTile<T, kChunk, kSlab> q, k, v, dout;
  float *totals, *decay, *scratch, *end;

  static constexpr int kBytes = SharedTile<float, kChunk, M>::kBytes + 5 * SharedTile<T, kChunk, M>::kBytes +
                                4 * SharedTile<T, kChunk, kSlab>::kBytes + 6 * M * 4 + 4 * kRows * kRows * 4;

  __device__ explicit GsaColumnTiles(unsigned char* shared) {
    Layout(shared)(g)(s)(dz)(p)(gk)(gv)(q)(k)(v)(dout)(totals, 4 * M)(decay, M)(scratch, 4 * kRows * kRows)(
        end, M);
  }
};

// A warp's 16 rows of 64 columns to T or fp32, whichever the array holds.
template <typename T>
__device__ inline void store_rows_of(const Sums<8>& sums, const SharedTile<T, kChunk, kSlab>& stage, int warp,
                                     const Out<4>& to, const Piece& piece, int head, int col, int cols) {
  if (to.dtype != DType::f32) {
    store_rows<T>(sums, 0, stage, warp, chunk_rows<T>(to, piece, head) + col, to.stride[1], piece.length,
                  cols - col);
    return;
  }
  float* rows = chunk_rows<float>(to, piece, head) + col;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = kRows * warp + lane_row() + 8 * i, c = 8 * n + lane_col();
      if (row < piece.length && c < cols - col) {
        *reinterpret_cast<float2*>(rows + row * to.stride[1] + c) = {sums.at[n][2 * i],
                                                                     sums.at[n][2 * i + 1]};
      }
    }
  }
}

template <typename T, int M>
__global__ void __launch_bounds__(kGsaThreads, M == 64 ? 2 : 1)
    gsa_columns_kernel(const __grid_constant__ GsaColumns p) {
  constexpr int N = M / 8;
  constexpr int kPacks = M / 8;  // of 8 columns
  extern __shared__ __align__(128) unsigned char shared[];
  const GsaColumnTiles<T, M> tile(shared);
  const GsaShape& shape = p.shape;
  const int warp = threadIdx.x >> 5,
            query_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.query_heads));
  const int group = shape.query_heads / shape.heads, head = query_head / group;
  const bool first = query_head % group == 0;
  const int64_t chunk = blockIdx.x / static_cast<unsigned>(shape.query_heads);
  const Piece piece = piece_at(shape.tokens, chunk, kChunk);
  if (piece.length == 0) return;

  // The two memories: k and q, v and do; 64 columns of D or V at a time.
  const auto load_slab = [&](bool values, int col) {
    const In<4>&x = values ? p.v : p.k, &read = values ? p.dout : p.q;
    const int cols = (values ? shape.V : shape.D) - col;
    load_async<kGsaThreads>(values ? tile.v : tile.k, chunk_rows<T>(x, piece, head) + col, x.stride[1],
                            piece.length, cols, threadIdx.x);
    load_async<kGsaThreads>(values ? tile.dout : tile.q, chunk_rows<T>(read, piece, query_head) + col,
                            read.stride[1], piece.length, cols, threadIdx.x);
    load_async<kGsaThreads>(values ? tile.gv : tile.gk,
                            state_rows<T>(p.gradients, shape, chunk, head, (values ? shape.D : 0) + col),
                            shape.M, first ? cols : 0, shape.M, threadIdx.x);
  };
  load_async<kGsaThreads>(tile.g, chunk_rows<float>(p.g, piece, head), p.g.stride[1], piece.length, shape.M,
                          threadIdx.x);
  load_weights<kGsaThreads>(tile.s, p.s, p.g, piece, head, shape.M);
  commit_copies();
  load_slab(false, 0);
  load_async<kGsaThreads>(tile.dz, chunk_rows<T>(p.dz, piece, query_head), p.dz.stride[1], piece.length,
                          shape.M, threadIdx.x);
  commit_copies();
  load_slab(true, 0);
  load_async<kGsaThreads>(tile.p, chunk_rows<T>(p.p, piece, query_head), p.p.stride[1], piece.length, shape.M,
                          threadIdx.x);
  commit_copies();
  // Read late, without a copy of their own.
  const float* w_rows = chunk_rows<float>(p.w, piece, query_head);
  if (threadIdx.x < 2 * piece.length) {
    prefetch(w_rows + (threadIdx.x / 2) * p.w.stride[1] + threadIdx.x % 2 * min(32, shape.M / 2));
  }
  for (int row = threadIdx.x; first && row < shape.D + shape.V; row += kGsaThreads) {
    prefetch(state_rows<T>(p.states, shape, chunk, head, row));
  }

  wait_copies<2>();
  __syncthreads();
  RowWrites<T, M> writes;
  writes.at = {{tile.g, tile.totals, tile.decay, warp}, tile.s, {tile.scratch + warp * kRows * kRows}};
  writes.start();

  Sums<N> u;       // ds
  float end[8];    // sum of G * H over the thread's rows, 8 columns
  float2 rest[N];  // sum of s e^{L_C - L_j} (x_j G) over the lane's rows, 2 columns of 8
  fill(u, 0.f);
#pragma unroll
  for (int i = 0; i < 8; ++i) end[i] = 0.f;
#pragma unroll
  for (int n = 0; n < N; ++n) rest[n] = {0.f, 0.f};

#pragma unroll 1
  for (int memory = 0; memory < 2; ++memory) {
    const bool values = memory == 1;
    const auto x_tile = values ? tile.v : tile.k, read_tile = values ? tile.dout : tile.q;
    const auto gradient = values ? tile.gv : tile.gk;
    const int width = values ? shape.V : shape.D;
    const bool sole = width <= kSlab;
    if (values) {
      wait_copies<0>();
    } else {
      wait_copies<1>();
    }
    __syncthreads();
    // a = X Read^T,   x = X G
    Scores a;
    {
      Sums<N> x;
      zero(a);
      fill(x, 0.f);
      for (int col = 0;; col += kSlab) {
        Operand<4> rows;
        load(rows, x_tile, kRows * warp);
        add_later_scores<T>(a, rows, read_tile, warp);
        if (first) {
          add_product<T>(x, rows, gradient);
          const T* states = state_rows<T>(p.states, shape, chunk, head, (values ? shape.D : 0) + col);
          const int pack = static_cast<int>(threadIdx.x) % kPacks * 8;
#pragma unroll
          for (int i = 0; i < kSlab * kPacks / kGsaThreads; ++i) {
            const int row = threadIdx.x / kPacks + i * (kGsaThreads / kPacks);
            if (row >= width - col || pack >= shape.M) continue;
            const Pack<8> state = load<8>(states + static_cast<int64_t>(row) * shape.M + pack);
            const Pack<8> from = load<8>(&gradient.at(row, pack));
#pragma unroll
            for (int j = 0; j < 8; ++j) end[j] += state.at[j] * from.at[j];
          }
        }
        if (col + kSlab >= width) break;
        __syncthreads();
        load_slab(values, col + kSlab);
        commit_copies();
        wait_copies<0>();
        __syncthreads();
      }
      mask_later(a, warp);
      if (first) writes.add_end(u, rest, x);
    }

    // ds += [a_jt e^{L_t - L_j} y_t, t >= j],   dX = f G^T + W Read
    Operand<2> w[2];
    {
      Scores W;
      writes.write(u, W, a, values ? tile.p : tile.dz);
      round_to<T>(w, W);
    }
    for (int col = 0; col < width; col += kSlab) {
      if (!sole) {
        __syncthreads();
        load_slab(values, col);
        commit_copies();
        wait_copies<0>();
        __syncthreads();
      }
      Sums<8> dx;
      fill(dx, 0.f);
      if (first) add_product_transposed<T>(dx, writes.end, gradient);
      add_later_scored<T>(dx, w, read_tile, warp);
      store_rows_of<T>(dx, x_tile, warp, values ? p.dv : p.dk, piece, query_head, col, width);
    }
  }
  writes.finish(u);

  // ds, and c = z dz + p dp - s ds in place of g.
  const float* g = chunk_rows<float>(p.g, piece, head);
  const SharedTile<float, kChunk, M> own{reinterpret_cast<float*>(tile.dz.data)};  // and of p
  static_assert(SharedTile<float, kChunk, M>::kBytes <= 2 * SharedTile<T, kChunk, M>::kBytes);
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = kRows * warp + lane_row() + 8 * i, col = 8 * n + lane_col();
      const float2 ds = {u.at[n][2 * i], u.at[n][2 * i + 1]}, s = writes.at.weight(i, n);
      float2 c = {0.f, 0.f}, through_s = {0.f, 0.f};
      if (row < piece.length && col < shape.M) {
        c = *reinterpret_cast<const float2*>(w_rows + row * p.w.stride[1] + col);
        c.x -= s.x * ds.x, c.y -= s.y * ds.y;
        if (p.s.data == nullptr) {  // s = 1 - e^g
          const float2 gate = *reinterpret_cast<const float2*>(g + row * p.g.stride[1] + col);
          through_s = {-exp2_fast(kLog2E * gate.x) * ds.x, -exp2_fast(kLog2E * gate.y) * ds.y};
        }
      }
      *reinterpret_cast<float2*>(&tile.g.at(row, col)) = c;
      *reinterpret_cast<float2*>(&own.at(row, col)) = through_s;
    }
  }
  if (p.s.data != nullptr) {
#pragma unroll
    for (int m = 0; m < M; m += kSlab) {
      Sums<8> part;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) part.at[n][i] = u.at[m / 8 + n][i];
      }
      if (m < shape.M) store_rows_of<T>(part, tile.q, warp, p.ds, piece, query_head, m, shape.M);
    }
  }

  // E, column by column: sums in the order of threads and of rows.
  float* parts = tile.scratch;  // [threads, 8] floats
#pragma unroll
  for (int i = 0; i < 8; ++i) parts[threadIdx.x * 8 + i] = end[i];
  __syncthreads();
  for (int m = threadIdx.x; m < M; m += kGsaThreads) {
    float sum = 0.f;
    for (int row = 0; row < kGsaThreads / kPacks; ++row) sum += parts[(row * kPacks + m / 8) * 8 + m % 8];
    tile.end[m] = sum * tile.decay[m];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float left = sum_over_col(rest[n].x), right = sum_over_col(rest[n].y);
    if (lane_row() == 0) {
      tile.totals[warp * M + 8 * n + lane_col()] = left;
      tile.totals[warp * M + 8 * n + lane_col() + 1] = right;
    }
  }
  __syncthreads();

  // dg: sums from the last row up, a thread a column and a share of the rows; the shares below are added
  // first.
  constexpr int kShares = kGsaThreads / M, kShare = kChunk / kShares;
  const int m = threadIdx.x % M, share = threadIdx.x / M;
  float* dg = chunk_rows<float>(p.dg, piece, query_head);
  float sum = tile.end[m];
#pragma unroll
  for (int b = 0; b < 4; ++b) sum += tile.totals[b * M + m];
  for (int row = kChunk - 1; row >= (share + 1) * kShare; --row) sum += tile.g.at(row, m);
  for (int row = (share + 1) * kShare - 1; row >= share * kShare; --row) {
    sum += tile.g.at(row, m);
    if (row < piece.length && m < shape.M) dg[row * p.dg.stride[1] + m] = sum + own.at(row, m);
  }
}

template <typename T, int M>
cudaError_t launch_gsa_columns(const GsaColumns& p, cudaStream_t stream) {
  constexpr int bytes = GsaColumnTiles<T, M>::kBytes;
  if (const cudaError_t error = allow_shared<gsa_columns_kernel<T, M>>(bytes); error != cudaSuccess)
    return error;
  const int64_t blocks = piece_count(p.shape.tokens, kChunk) * p.shape.query_heads;
  if (blocks == 0) return cudaSuccess;
  gsa_columns_kernel<T, M><<<static_cast<unsigned>(blocks), kGsaThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace girih::kernels
