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
  // With 128 slots two blocks fit where do comes after q.
  static constexpr bool kOneByOne = M != 64;

  SharedTile<float, kChunk, M> g;
  SharedTile<T, kChunk, M> s, hk, hv;
  SharedTile<T, kChunk, kSlab> q, k, v, dout;
  float *totals, *decay, *own;  // own [2, 64]: scores of rows with themselves

  static constexpr int kBytes = SharedTile<float, kChunk, M>::kBytes + 3 * SharedTile<T, kChunk, M>::kBytes +
                                (kOneByOne ? 3 : 4) * SharedTile<T, kChunk, kSlab>::kBytes + 5 * M * 4 +
                                2 * kChunk * 4;

  __device__ explicit GsaRowTiles(unsigned char* shared) {
    Layout layout(shared);
    layout(g)(s)(hk)(hv)(q)(k)(v)(totals, 4 * M)(decay, M)(own, 2 * kChunk);
    if constexpr (kOneByOne) {
      dout = q;
    } else {
      layout(dout);
    }
  }
};

template <typename T, int M>
__global__ void __launch_bounds__(kGroup, M == 64 ? 3 : 2)
    gsa_rows_kernel(const __grid_constant__ GsaRows p) {
  using Tiles = GsaRowTiles<T, M>;
  extern __shared__ __align__(128) unsigned char shared[];
  const Tiles tile(shared);
  const GsaShape& shape = p.shape;
  const int warp = threadIdx.x >> 5;
  const int query_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.query_heads));
  const int group = shape.query_heads / shape.heads, head = query_head / group;
  const int64_t chunk = piece_in_time(shape.tokens, blockIdx.x / static_cast<unsigned>(shape.query_heads),
                                      kChunk, /*last_first=*/false);
  const Piece piece = piece_at(shape.tokens, chunk, kChunk);
  if (piece.length == 0) return;

  load_gates<kGroup>(tile.g, p.g, piece, head, shape.M);
  load_weights<kGroup>(tile.s, p.s, p.g, piece, head, shape.M);
  commit_copies();

  // Columns col..col+63 of a row's data, of the states.
  const auto load = [&](const auto& to, const In<4>& from, int of, int col, int width) {
    load_async<kGroup>(to, chunk_rows<T>(from, piece, of) + col, from.stride[1], piece.length, width - col,
                       threadIdx.x);
  };
  const auto load_state = [&](const auto& to, int first, int col, int width) {
    load_async<kGroup>(to, state_rows<T>(p.states, shape, chunk, head, first + col), shape.M, width - col,
                       shape.M, threadIdx.x);
  };
  const auto load_memory_k = [&](int d) {
    load(tile.k, p.k, head, d, shape.D);
    load_state(tile.hk, 0, d, shape.D);
  };
  const auto load_memory_v = [&](int v) {
    load(tile.v, p.v, head, v, shape.V);
    load_state(tile.hv, shape.D, v, shape.V);
  };
  load(tile.q, p.q, query_head, 0, shape.D);
  load_memory_k(0);
  commit_copies();
  if (!Tiles::kOneByOne) load(tile.dout, p.dout, query_head, 0, shape.V);
  load_memory_v(0);
  commit_copies();

  wait_copies<2>();
  __syncthreads();
  RowReads<T, M, true> reads;
  // A warp's scratch is its rows of q, which it has read by then; the weights take the place of hv.
  reads.at = {{tile.g, tile.decay, tile.totals, warp}, tile.s, tile.hv, {rows_of(tile.q, warp)}};
  reads.template start<4>();
  if (threadIdx.x == 0 && query_head % group == 0)
    p.left.factored[chunk * shape.heads + head] = reads.factored;
  wait_copies<1>();
  __syncthreads();

  // a = X Y^T,   sums = X H
  const auto multiply = [&](Sums<M / 8>& sums, Scores& a, const auto& x_tile, const auto& y_tile,
                            const auto& memory, int width, const auto& load_slab) {
    zero(a);
    fill(sums, 0.f);
    for (int slab = 0;; slab += kSlab) {
#pragma unroll 2
      for (int col = 0; col < kSlab; col += 16) {
        uint32_t x[4];
        load_block(x, x_tile, kRows * warp, col);
        add_scores<Side::earlier, T>(a, x, y_tile, col, warp);
        add_product<T>(sums, x, memory, col);
      }
      if (slab + kSlab >= width) break;
      __syncthreads();
      load_slab(slab + kSlab);
      commit_copies();
      wait_copies<0>();
      __syncthreads();
    }
  };

  // The weights of the warp's rows as they are, for what a row reads of its own token, in its rows of q.
  // Where the scratch or do needs those, load_raw() brings all weights to hv's place.
  const auto load_own_weights = [&] {
    const SharedTile<T, kRows, M> to{tile.q.data + kRows * warp * kSlab};
    if (p.s.data != nullptr) {
      load_async<32>(to, chunk_rows<T>(p.s, piece, head) + kRows * warp * p.s.stride[1], p.s.stride[1],
                     piece.length - kRows * warp, shape.M, lane());
      return;
    }
#pragma unroll
    for (int n = 0; n < M / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = kRows * warp + lane_row() + 8 * i;
        *reinterpret_cast<uint32_t*>(&lane_at(to, 8 * i, 8 * n)) =
            complement_pair<T>(p.g, piece, head, shape.M, row, 8 * n + lane_col());
      }
    }
  };

  // z = e^L Q Hk + [sum_{j<i} q_i . k_j e^{L_i - L_j} s_j], and dp alike
  Sums<M / 8> z, dp;
  {
    Scores a;
    multiply(z, a, tile.q, tile.k, tile.hk, shape.D, [&](int d) {
      load(tile.q, p.q, query_head, d, shape.D);
      load_memory_k(d);
    });
    put_diagonal(tile.own, a, warp);
    __syncwarp();
    if (!reads.factored) wait_copies<0>();
    reads.template split<kGroup>(p.s, p.g, piece, head, shape.M);
    reads.value_read(z, a);
    if constexpr (!Tiles::kOneByOne) {
      if (reads.factored) load_own_weights();
    }
    if (Tiles::kOneByOne || !reads.factored) {
      __syncthreads();
      if (Tiles::kOneByOne) load(tile.dout, p.dout, query_head, 0, shape.V);
      if (!reads.factored) load_memory_v(0);
    }
    commit_copies();
    if (Tiles::kOneByOne || !reads.factored) {
      wait_copies<0>();
    } else {
      wait_copies<1>();  // the weights may come later
    }
    __syncthreads();
    multiply(dp, a, tile.dout, tile.v, tile.hv, shape.V, [&](int v) {
      load(tile.dout, p.dout, query_head, v, shape.V);
      load_memory_v(v);
    });
    put_diagonal(tile.own + kChunk, a, warp);
    __syncwarp();
    if (Tiles::kOneByOne || !reads.factored) {
      reads.template load_raw<kGroup>(p.s, p.g, piece, head, shape.M);
    }
    reads.value_read(dp, a);
  }
  const auto own_score = [&](int which) -> float2 {
    const float* of = tile.own + which * kChunk + kRows * warp + lane_row();
    return {of[0], of[8]};
  };
  wait_copies<0>();
  __syncwarp();
  const bool of_q = !Tiles::kOneByOne && reads.factored;
  const SharedTile<T, kChunk, M> weights{of_q ? tile.q.data : tile.hv.data};
  float* w_rows = chunk_rows<float>(p.left.w, piece, query_head);
  const float unscaled = shape.scale == 0.f ? 0.f : 1.f / shape.scale;
  differentiate(
      z, dp, own_score(0), own_score(1),
      [&](int n, int i) { return lane_pair<T>(weights, kRows * warp + 8 * i, 8 * n); }, shape.feature,
      shape.scale, shape.slots,
      [&](int n, int i, float2 of_z, float2 of_dp, float2& prob, float2& dz) {
        // p and dz as others will see them: rounded with their factor.
        const float2 r = reads.factor(i, n);
        prob = {prob.x * r.x, prob.y * r.y};
        dz = {dz.x * r.x, dz.y * r.y};
        const float2 seen_p = unpaired<T>(pair_of<T>(prob.x, prob.y)),
                     seen_dz = unpaired<T>(pair_of<T>(dz.x, dz.y));
        const float2 w = {__fdividef(unscaled * of_z.x * seen_dz.x + of_dp.x * seen_p.x, r.x),
                          __fdividef(unscaled * of_z.y * seen_dz.y + of_dp.y * seen_p.y, r.y)};
        const int row = kRows * warp + lane_row() + 8 * i, col = 8 * n + lane_col();
        if (row < piece.length && col < shape.M) {
          *reinterpret_cast<float2*>(w_rows + row * p.left.w.stride[1] + col) = w;
        }
      });

  const auto put = [&](const Sums<M / 8>& sums, const Out<4>& to) {
#pragma unroll
    for (int m = 0; m < M; m += kSlab) {
      store_rows<T>(sums, m / 8, tile.q, warp, chunk_rows<T>(to, piece, query_head) + m, to.stride[1],
                    piece.length, shape.M - m);
    }
  };
  if (reads.factored) {
    put(z, p.p_scan);
    put(dp, p.dz_scan);
  } else {
    put(z, p.p);
    put(dp, p.dz);
    reads.decay_from_start(z);
    put(z, p.p_scan);
    z = dp;
    reads.decay_from_start(z);
    put(z, p.dz_scan);
    __syncwarp();
  }

  // dQ = (dz e^L) Hk^T + [dz_i . e^{L_i - L_j} s_j, j <= i] K
  Operand<M / 8 / 2> f;
  Operand<2> w[2];
  reads.template key_read<true>(dp, w);
  round_to<T>(f, dp);
  const int last = (shape.D - 1) / kSlab * kSlab;  // of k and hk, still in the tiles
  for (int d = last; d >= 0; d -= kSlab) {
    if (d < last) {
      __syncthreads();
      load_memory_k(d);
      commit_copies();
      wait_copies<0>();
      __syncthreads();
    }
    Sums<8> dq;
    fill(dq, 0.f);
    add_product_transposed<T>(dq, f, tile.hk);
    add_scored<Side::earlier, T>(dq, w, tile.k, warp);
    store_rows<T>(dq, 0, tile.q, warp, chunk_rows<T>(p.dq, piece, query_head) + d, p.dq.stride[1],
                  piece.length, shape.D - d);
  }
}

template <typename T, int M>
cudaError_t launch_gsa_rows(const GsaRows& p, cudaStream_t stream) {
  return launch_blocks<gsa_rows_kernel<T, M>>(p, kGroup, GsaRowTiles<T, M>::kBytes, stream);
}

}  // namespace girih::kernels
