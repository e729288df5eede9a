// The gradients of key rows, one block a chunk and query head: two groups of four warps, one a memory, in
// each warp w with rows 16 w to 16 w + 15. Gk, Gv: what later chunks and the final state give to the state
// after this one.
//
//     dk_j = Gk_j s_j         ds_j = Gk_j^T k_j + Gv_j v_j         dv_j = Gv_j^T s_j
//     Gk_j = e^{L_C - L_j} Gk + sum_{t>=j} e^{L_t - L_j} scale q_t dz_t^T        Gv_j alike with p_t, do_t
//     dg_t = sum over d, v of Gk_t * e^{g_t} Hk_{t-1} + Gv_t * e^{g_t} Hv_{t-1}
//
// What a row gives to its own token crosses no gate. Without it, with w = z dz + p dp of reads and s ds of
// writes, in the chunk
//
//     dg_t = E_0 - sum_{j<t} (w - s ds)_j = E_1 + sum_{i>=t} (w - s ds)_i
//
// E_0 = sum of H * (the gradient of H) for the state H before the chunk, E_1 for the one after it. The first
// half of the rows counts from the start, the second from the end: fewer sums that cancel. E_1 = e^{L_C} sum
// (G * H) + sum_j s_j e^{L_C - L_j} (k_j Gk + v_j Gv), which asks for no state but H. Of the query heads that
// share a memory only the first adds what G gives.
#pragma once

#include "gsa/block.cuh"
#include "gsa/writes.cuh"

namespace girih::kernels {

constexpr int kColumnThreads = 256;

template <typename T, int M>
struct GsaColumnTiles {
  SharedTile<float, kChunk, M> g;
  SharedTile<T, kChunk, M> s, end, dz, p, gk, gv;
  SharedTile<T, kChunk, kSlab> q, k, v, dout;
  float *totals, *decay, *rest, *edges, *own, *ends;

  static constexpr int kBytes = SharedTile<float, kChunk, M>::kBytes + 6 * SharedTile<T, kChunk, M>::kBytes +
                                4 * SharedTile<T, kChunk, kSlab>::kBytes + (4 + 1 + 8 + 2) * M * 4 +
                                2 * kChunk * 4 + 16 * kColumnThreads * 4;

  __device__ explicit GsaColumnTiles(unsigned char* shared) {
    Layout(shared)(g)(s)(end)(dz)(p)(gk)(gv)(q)(k)(v)(dout)(totals, 4 * M)(decay, M)(rest, 8 * M)(
        edges, 2 * M)(own, 2 * kChunk)(ends, 16 * kColumnThreads);
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
__global__ void __launch_bounds__(kColumnThreads, M == 64 ? 2 : 1)
    gsa_columns_kernel(const __grid_constant__ GsaColumns p) {
  constexpr int N = M / 8;
  constexpr int kPacks = M / 8;                 // a row's, of 8 columns
  constexpr int kRowsAtOnce = kGroup / kPacks;  // of a state, by a group
  extern __shared__ __align__(128) unsigned char shared[];
  const GsaColumnTiles<T, M> tile(shared);
  const GsaShape& shape = p.shape;
  const int warp = threadIdx.x / 32 % 4, thread = threadIdx.x % kGroup;
  const bool values = threadIdx.x >= kGroup;  // the second group
  const int query_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.query_heads));
  const int group = shape.query_heads / shape.heads, head = query_head / group;
  const bool first = query_head % group == 0;
  const int64_t chunk = blockIdx.x / static_cast<unsigned>(shape.query_heads);
  const Piece piece = piece_at(shape.tokens, chunk, kChunk);
  if (piece.length == 0) return;

  load_async<kColumnThreads>(tile.g, chunk_rows<float>(p.g, piece, head), p.g.stride[1], piece.length,
                             shape.M, threadIdx.x);
  load_weights<kColumnThreads>(tile.s, p.s, p.g, piece, head, shape.M);
  commit_copies();

  // The group's x (k or v), what read it (q or do), y (dz or p) and gradient, 64 columns of D or V at a time.
  const auto x_tile = values ? tile.v : tile.k, read_tile = values ? tile.dout : tile.q;
  const auto y_tile = values ? tile.p : tile.dz, gradient = values ? tile.gv : tile.gk;
  const int width = values ? shape.V : shape.D, first_row = values ? shape.D : 0;
  const bool sole = width <= kSlab;
  const auto load_slab = [&](int col) {
    const In<4>&x = values ? p.v : p.k, &read = values ? p.dout : p.q;
    load_async<kGroup>(x_tile, chunk_rows<T>(x, piece, head) + col, x.stride[1], piece.length, width - col,
                       thread);
    load_async<kGroup>(read_tile, chunk_rows<T>(read, piece, query_head) + col, read.stride[1], piece.length,
                       width - col, thread);
    load_async<kGroup>(gradient, state_rows<T>(p.gradients, shape, chunk, head, first_row + col), shape.M,
                       first ? width - col : 0, shape.M, thread);
    commit_copies();
  };
  {
    const In<4>& y = values ? p.p : p.dz;
    load_async<kGroup>(y_tile, chunk_rows<T>(y, piece, query_head), y.stride[1], piece.length, shape.M,
                       thread);
  }
  load_slab(0);
  // Read late, and not by copies.
  const float* w_rows = chunk_rows<float>(p.w, piece, query_head);
  if (thread < piece.length) prefetch(w_rows + thread * p.w.stride[1] + (values ? shape.M / 2 : 0));
  for (int row = thread; first && row < width; row += kGroup) {
    prefetch(state_rows<T>(p.states, shape, chunk, head, first_row + row));
  }

  wait_copies<1>();
  __syncthreads();
  RowWrites<T, M> writes;
  writes.at = {{tile.g, tile.decay, tile.totals, warp}, tile.s, tile.end, {rows_of(x_tile, warp)}, values};
  writes.template start<kColumnThreads / 32>();
  wait_copies<0>();
  writes.at.group_barrier();

  // a = X Read^T,   u = X G
  Sums<N> u;  // the memory's part of ds
  // Sums over the thread's rows of the state, 8 columns: of G * H, and of H times its own gradient.
  float end[8], begin[8];
  fill(u, 0.f);
#pragma unroll
  for (int i = 0; i < 8; ++i) end[i] = begin[i] = 0.f;
  {
    // At a sequence's start both the state, if there is one, and its gradient are there in fp32.
    const auto add_start = [&](int slab) {
      const In<4>&state = values ? p.initial_v : p.initial_k, &of_state = values ? p.start_v : p.start_k;
      if (state.data == nullptr) return;
      const auto at = [&](const In<4>& x, int row, int col) {
        return static_cast<const float*>(x.data)[piece.sequence.index * x.stride[0] + head * x.stride[1] +
                                                 row * x.stride[2] + col * x.stride[3]];
      };
      for (int row = thread / kPacks; row < min(kSlab, width - slab); row += kRowsAtOnce) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int col = thread % kPacks * 8 + j;
          if (col < shape.M) begin[j] += at(state, slab + row, col) * at(of_state, slab + row, col);
        }
      }
    };
    Scores a;
    zero(a);
    for (int slab = 0;; slab += kSlab) {
#pragma unroll 2
      for (int col = 0; col < kSlab; col += 16) {
        uint32_t x[4];
        load_block(x, x_tile, kRows * warp, col);
        add_scores<Side::later, T>(a, x, read_tile, col, warp);
        add_product<T>(u, x, gradient, col);
      }
      if (first) {
        const int pack = thread % kPacks * 8;
        const T* states = state_rows<T>(p.states, shape, chunk, head, first_row + slab) + pack;
        const T* before =
            state_rows<T>(p.gradients, shape, piece.index > 0 ? chunk - 1 : chunk, head, first_row + slab) +
            pack;
#pragma unroll
        for (int i = 0; i < kSlab / kRowsAtOnce; ++i) {
          const int row = thread / kPacks + i * kRowsAtOnce;
          if (row >= width - slab || pack >= shape.M) continue;
          const Pack<8> state = load<8>(states + static_cast<int64_t>(row) * shape.M);
          const Pack<8> from = load<8>(&gradient.at(row, pack));
#pragma unroll
          for (int j = 0; j < 8; ++j) end[j] += state.at[j] * from.at[j];
          if (piece.index > 0) {
            const Pack<8> own = load<8>(before + static_cast<int64_t>(row) * shape.M);
#pragma unroll
            for (int j = 0; j < 8; ++j) begin[j] += state.at[j] * own.at[j];
          }
        }
        if (piece.index == 0) add_start(slab);
      }
      if (slab + kSlab >= width) break;
      writes.at.group_barrier();
      load_slab(slab + kSlab);
      wait_copies<0>();
      writes.at.group_barrier();
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      tile.ends[threadIdx.x * 8 + i] = end[i];
      tile.ends[(kColumnThreads + threadIdx.x) * 8 + i] = begin[i];
    }
    put_diagonal(tile.own + values * kChunk, a, warp);
    __syncwarp();
    writes.add_end(u, tile.rest + (threadIdx.x / 32) * M);

    // u += [a_jt e^{L_t - L_j} y_t, t > j],   dX = f G^T + W Read
    Operand<2> w[2];
    writes.write(u, w, a, y_tile);
    for (int col = 0; col < width; col += kSlab) {
      if (!sole) {
        writes.at.group_barrier();
        load_slab(col);
        wait_copies<0>();
        writes.at.group_barrier();
      }
      Sums<8> dx;
      fill(dx, 0.f);
      add_scored<Side::later, T>(dx, w, read_tile, warp);
#pragma unroll 2
      for (int m = 0; m < M; m += 16) {
        uint32_t weights[4];
        load_block(weights, tile.end, kRows * warp, m);
        add_product_transposed<T>(dx, weights, gradient, 0, m);
      }
      __syncwarp();
      store_rows_of<T>(dx, x_tile, warp, values ? p.dv : p.dk, piece, query_head, col, width);
    }
  }

  // The groups' parts of ds are added.
  const SharedTile<float, kChunk, M> ds{reinterpret_cast<float*>(tile.gk.data)};  // and gv
  const SharedTile<float, kChunk, M> beyond{
      reinterpret_cast<float*>(tile.q.data)};  // to dout: dg beyond the sums
  static_assert(SharedTile<float, kChunk, M>::kBytes == 2 * SharedTile<T, kChunk, M>::kBytes);
  const auto each_pair = [&](const auto& f) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float2& pair =
            *reinterpret_cast<float2*>(&ds.at(kRows * warp + lane_row() + 8 * i, 8 * n + lane_col()));
        f(pair, float2{u.at[n][2 * i], u.at[n][2 * i + 1]});
      }
    }
  };
  __syncthreads();
  if (!values) each_pair([](float2& sum, float2 part) { sum = part; });
  __syncthreads();
  if (values) each_pair([](float2& sum, float2 part) { sum = {sum.x + part.x, sum.y + part.y}; });
  __syncthreads();

  // ds, and c = w - s ds in place of g.
  const float* g = chunk_rows<float>(p.g, piece, head);
  const T *dz_rows = chunk_rows<T>(p.dz, piece, query_head), *p_rows = chunk_rows<T>(p.p, piece, query_head);
#pragma unroll 2
  for (int i = threadIdx.x; i < kChunk * M / 4; i += kColumnThreads) {
    const int row = i / (M / 4), col = i % (M / 4) * 4;
    auto& c = *reinterpret_cast<Pack<4>*>(&tile.g.at(row, col));
    Pack<4> late = zeros<4>();
    if (row < piece.length && col < shape.M) {
      Pack<4> x = load<4>(&ds.at(row, col));
      if (writes.factored) {
#pragma unroll
        for (int j = 0; j < 4; ++j) x.at[j] = __fdividef(x.at[j], c.at[j]);  // of e^{-X}
      }
      const Pack<4> s = load<4>(&tile.s.at(row, col));
      c = load<4>(w_rows + row * p.w.stride[1] + col);
#pragma unroll
      for (int j = 0; j < 4; ++j) c.at[j] -= s.at[j] * x.at[j];
      // What the row gave to its own token.
      const Pack<4> dz = load<4>(dz_rows + row * p.dz.stride[1] + col);
      const Pack<4> prob = load<4>(p_rows + row * p.p.stride[1] + col);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x.at[j] += tile.own[row] * dz.at[j] + tile.own[kChunk + row] * prob.at[j];
      }
      if (p.s.data == nullptr) {  // s = 1 - e^g
        const Pack<4> gate = load<4>(g + row * p.g.stride[1] + col);
#pragma unroll
        for (int j = 0; j < 4; ++j) late.at[j] = -exp2_fast(kLog2E * gate.at[j]) * x.at[j];
      } else if (p.ds.dtype == DType::f32) {
        store<4>(chunk_rows<float>(p.ds, piece, query_head) + row * p.ds.stride[1] + col, x);
      } else {
        store<4>(chunk_rows<T>(p.ds, piece, query_head) + row * p.ds.stride[1] + col, x);
      }
    } else {
      c = zeros<4>();
    }
    store<4>(&beyond.at(row, col), late);
  }
  // E_0 and E_1
  for (int m = threadIdx.x; m < M; m += kColumnThreads) {
    float start = 0.f, sum = 0.f;
#pragma unroll 8
    for (int row = 0; row < kColumnThreads / kPacks; ++row) {
      const int i = (row * kPacks + m / 8) * 8 + m % 8;
      sum += tile.ends[i];
      start += tile.ends[kColumnThreads * 8 + i];
    }
    if (writes.factored) {
      sum *= tile.decay[m];
    } else {
      float log = 0.f;
      for (int b = 0; b < 4; ++b) log += tile.totals[b * M + m];
      sum *= exp2_fast(log);
    }
    for (int i = 0; i < 8; ++i) sum += tile.rest[i * M + m];
    tile.edges[m] = start;
    tile.edges[M + m] = sum;
  }
  __syncthreads();

  // A thread has a column and a share of the rows; what lies between them and the edge is added first.
  constexpr int kShare = kChunk * M / kColumnThreads;
  const int m = threadIdx.x % M, from = threadIdx.x / M * kShare;
  float* dg = chunk_rows<float>(p.dg, piece, query_head) + m;
  const auto put = [&](int row, float sum) {
    if (row < piece.length && m < shape.M) dg[row * p.dg.stride[1]] = sum + beyond.at(row, m);
  };
  if (from < kChunk / 2) {
    float sum = tile.edges[m];
#pragma unroll 8
    for (int row = 0; row < from; ++row) sum -= tile.g.at(row, m);
#pragma unroll 8
    for (int row = from; row < from + kShare; ++row) {
      put(row, sum);
      sum -= tile.g.at(row, m);
    }
  } else {
    float sum = tile.edges[M + m];
#pragma unroll 8
    for (int row = kChunk - 1; row >= from + kShare; --row) sum += tile.g.at(row, m);
#pragma unroll 8
    for (int row = from + kShare - 1; row >= from; --row) {
      sum += tile.g.at(row, m);
      put(row, sum);
    }
  }
}

template <typename T, int M>
cudaError_t launch_gsa_columns(const GsaColumns& p, cudaStream_t stream) {
  return launch_blocks<gsa_columns_kernel<T, M>>(p, kColumnThreads, GsaColumnTiles<T, M>::kBytes, stream);
}

}  // namespace girih::kernels
