// The gradients of query rows, one block a chunk and query head, warp w of every four with rows 16 w to 16 w
// + 15:
//
//     dp_t = Hv_t do_t          dz_t = J_feature^T dp_t          dq_t = scale Hk_t dz_t
//
// The first is a value read of (do, v), the last a key read of dz: no memory but forward's is needed.
//
// A group of four warps for every 64 of M: one for 128 has 117 KB of instructions from start to end, and
// waits for them two thirds of its time. The two warps of a row give each other what they sum over M.
#pragma once

#include "gsa/block.cuh"
#include "gsa/feature.cuh"

namespace girih::kernels {

template <typename T, int M>
struct GsaRowTiles {
  static constexpr int kGroups = M / 64;
  // With 128 slots two blocks fit where do comes after q.
  static constexpr bool kOneByOne = kGroups > 1;
  // Of z's 8 columns by 8 those that wait here for dp, in the place of hk and k, which come again: with all
  // of z in the 128 registers that a thread then has, what does not fit went to memory and back.
  static constexpr int kAside = 7;
  static constexpr int kSoftmax = kGroups > 1 ? 1024 : 0;

  SharedTile<float, kChunk, M> g;
  SharedTile<T, kChunk, M> s, hk, hv;
  SharedTile<T, kChunk, kSlab> q, k, v, dout;
  float* softmax;               // [groups, 64, 4]: a group's SoftmaxSums, once z is no longer aside
  float *totals, *decay, *own;  // own [2, 64]: scores of rows with themselves

  static constexpr int kBytes = SharedTile<float, kChunk, M>::kBytes + 3 * SharedTile<T, kChunk, M>::kBytes +
                                (kOneByOne ? 3 : 4) * SharedTile<T, kChunk, kSlab>::kBytes +
                                (kSoftmax + 5 * M + 2 * kChunk) * 4;
  static_assert(kGroups == 1 || kGroups * kGroup * kAside * 16 == SharedTile<T, kChunk, M>::kBytes +
                                                                      SharedTile<T, kChunk, kSlab>::kBytes +
                                                                      kSoftmax * 4);

  __device__ explicit GsaRowTiles(unsigned char* shared) {
    Layout layout(shared);
    layout(g)(s)(hv)(hk)(k)(softmax, kSoftmax)(q)(v)(totals, 4 * M)(decay, M)(own, 2 * kChunk);
    if constexpr (kOneByOne) {
      dout = q;
    } else {
      layout(dout);
    }
  }
};

// The first Count by 8 columns of sums, lane by lane: aside and back, or from one warp to another.
template <int Count, int N>
__device__ inline void put_sums(float* to, const Sums<N>& sums) {
#pragma unroll
  for (int n = 0; n < Count; ++n) {
    reinterpret_cast<float4*>(to)[32 * n + lane()] = {sums.at[n][0], sums.at[n][1], sums.at[n][2],
                                                      sums.at[n][3]};
  }
}
template <int Count, int N>
__device__ inline void take_sums(Sums<N>& sums, const float* from) {
#pragma unroll
  for (int n = 0; n < Count; ++n) {
    const float4 put = reinterpret_cast<const float4*>(from)[32 * n + lane()];
    sums.at[n][0] = put.x, sums.at[n][1] = put.y, sums.at[n][2] = put.z, sums.at[n][3] = put.w;
  }
}
template <int N>
__device__ inline void add_sums(Sums<N>& sums, const float* from) {
  Sums<N> other;
  take_sums<N>(other, from);
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums.at[n][i] += other.at[n][i];
  }
}

template <typename T, int M>
__global__ void __launch_bounds__(kGroup*(M / 64), M == 64 ? 3 : 2)
    gsa_rows_kernel(const __grid_constant__ GsaRows p) {
  using Tiles = GsaRowTiles<T, M>;
  constexpr int kGroups = Tiles::kGroups, kThreads = kGroup * kGroups;
  extern __shared__ __align__(128) unsigned char shared[];
  const Tiles tile(shared);
  const GsaShape& shape = p.shape;
  const int warp = threadIdx.x / 32 % 4, group = kGroups == 1 ? 0 : threadIdx.x / kGroup;
  const int first = 64 * group;  // of the group's columns
  const int query_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.query_heads));
  const int queries = shape.query_heads / shape.heads, head = query_head / queries;
  const int64_t chunk = blockIdx.x / static_cast<unsigned>(shape.query_heads);
  Piece piece = piece_at(shape.tokens, chunk, kChunk);
  if (piece.length == 0) return;

  load_gates<kThreads>(tile.g, p.g, piece, head, shape.M);
  load_weights<kThreads>(tile.s, p.s, p.g, piece, head, shape.M);
  commit_copies();

  // Columns col..col+63 of a row's data, of the states.
  const auto load = [&](const auto& to, const In<4>& from, int of, int col, int width) {
    load_async<kThreads>(to, chunk_rows<T>(from, piece, of) + col, from.stride[1], piece.length, width - col,
                         threadIdx.x);
  };
  const auto load_state = [&](const auto& to, int first, int col, int width) {
    load_async<kThreads>(to, state_rows<T>(p.states, shape, chunk, head, first + col), shape.M, width - col,
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
  // The room of a warp's rows on their way out, and of its scratch, once q, do and v have been read.
  const SharedTile<T, kChunk, kSlab> stage = group == 0 ? tile.q : tile.v;
  RowReads<T, M, true, 64> reads;
  // The weights take the place of hv.
  reads.at = {{tile.g.from_column(first), tile.decay + first, tile.totals + first, warp},
              tile.s.from_column(first),
              tile.hv.from_column(first),
              {rows_of(stage, warp)}};
  reads.template start<4>();
  if (threadIdx.x == 0 && query_head % queries == 0)
    p.left.factored[chunk * shape.heads + head] = reads.factored;
  wait_copies<1>();
  __syncthreads();

  // The warps of the same rows wait for each other.
  const auto meet = [&] {
    if constexpr (kGroups > 1) barrier_wait(1 + warp, 32 * kGroups);
  };

  // Addresses are worked out where a loop needs them: those of what it rarely loads, worked out ahead of it,
  // cost more than they save.
  const auto renew = [&] { asm volatile("" : "+l"(piece.start), "+r"(piece.length)); };

  // a = X Y^T,   sums = X H
  const auto multiply = [&](Sums<8>& sums, Scores& a, const auto& x_tile, const auto& y_tile,
                            const auto& memory, int width, const auto& load_slab) {
    zero(a);
    fill(sums, 0.f);
    for (int slab = 0;; slab += kSlab) {
#pragma unroll 2
      for (int col = 0; col < kSlab; col += 16) {
        uint32_t x[4];
        load_block(x, x_tile, kRows * warp, col);
        add_scores<Side::earlier, T>(a, x, y_tile, col, warp);
        add_product<T>(sums, x, memory, col, first);
      }
      if (slab + kSlab >= width) break;
      renew();
      __syncthreads();
      load_slab(slab + kSlab);
      commit_copies();
      wait_copies<0>();
      __syncthreads();
    }
  };

  // The weights of the warp's rows as they are, for what a row reads of its own token, in its rows of q.
  // Where the scratch or do needs those, all weights come to hv's place.
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

  const int last = (shape.D - 1) / kSlab * kSlab;  // the slab of k and hk that stays in the tiles
  float* aside = reinterpret_cast<float*>(tile.hk.data) + threadIdx.x / 32 * Tiles::kAside * 128;
  const auto own_score = [&](int which) -> float2 {
    const float* of = tile.own + which * kChunk + kRows * warp + lane_row();
    return {of[0], of[8]};
  };
  const int slots = shape.M - first;  // the group's
  const auto put = [&](const Sums<8>& sums, const Out<4>& to) {
    store_rows<T>(sums, 0, stage, warp, chunk_rows<T>(to, piece, query_head) + first, to.stride[1],
                  piece.length, slots);
  };
  // As far as dz, and W of the group's slots. Where factors serve apart from where they do not: among
  // what the other needs, instructions come later than they can run, for a fifth of the kernel's time.
  Sums<8> dp;
  const auto differentiate_rows = [&](Scores& W, auto serve) {
    constexpr bool factored = decltype(serve)::value;
    constexpr bool own_weights = factored && !Tiles::kOneByOne;
    // z = e^L Q Hk + [sum_{j<i} q_i . k_j e^{L_i - L_j} s_j], and dp alike: the same instructions in two
    // turns. It stays a loop; with `unroll 1` the compiler moved masks ahead of it, and 40 registers to
    // memory. z has a value before the first turn: unset there, those of its sums that found no register
    // through the second were given that turn's dp by the assembler.
    Sums<8> z;
    fill(z, 0.f);
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      const bool of_z = turn == 0;
      renew();
      Scores a;
      multiply(dp, a, of_z ? tile.q : tile.dout, of_z ? tile.k : tile.v, of_z ? tile.hk : tile.hv,
               of_z ? shape.D : shape.V, [&](int col) {
                 if (of_z) {
                   load(tile.q, p.q, query_head, col, shape.D);
                   load_memory_k(col);
                 } else {
                   load(tile.dout, p.dout, query_head, col, shape.V);
                   load_memory_v(col);
                 }
               });
      if (group == 0) put_diagonal(tile.own + turn * kChunk, a, warp);
      __syncwarp();
      if (of_z) {
        if (!factored) {
          wait_copies<0>();
          reads.template split<kThreads>(tile.hv, p.s, p.g, piece, head, shape.M);
        }
      } else if (!own_weights) {
        __syncthreads();
        load_weights<kThreads>(tile.hv, p.s, p.g, piece, head, shape.M);
        commit_copies();
        wait_copies<0>();
        __syncthreads();
      }
      reads.value_read(dp, a);
      if (!of_z) break;
      z = dp;
      if constexpr (own_weights) {
        load_own_weights();
        commit_copies();
        wait_copies<1>();  // the weights may come later
      } else {
        __syncthreads();
        if (Tiles::kOneByOne) load(tile.dout, p.dout, query_head, 0, shape.V);
        if constexpr (kGroups > 1) put_sums<Tiles::kAside>(aside, z);
        if (!factored) load_memory_v(0);
        commit_copies();
        wait_copies<0>();
      }
      __syncthreads();
    }
    renew();
    if constexpr (kGroups > 1) {
      take_sums<Tiles::kAside>(z, aside);
      __syncthreads();
      load_memory_k(last);
      commit_copies();
    } else {
      wait_copies<0>();
      __syncwarp();
    }

    const SharedTile<T, kChunk, M> weights{own_weights ? tile.q.data : tile.hv.data + first};
    const float unscaled = shape.scale == 0.f ? 0.f : 1.f / shape.scale;
    float* const w_first = chunk_rows<float>(p.left.w, piece, query_head) + first + lane_col();
    // The lane's two rows of w, and how many columns they have.
    const int row = kRows * warp + lane_row();
    float* const w_rows[2] = {w_first + row * p.left.w.stride[1], w_first + (row + 8) * p.left.w.stride[1]};
    const int w_cols[2] = {row < piece.length ? slots : 0, row + 8 < piece.length ? slots : 0};
    differentiate(
        z, dp, own_score(0), own_score(1),
        [&](int n, int i) { return lane_pair<T>(weights, kRows * warp + 8 * i, 8 * n); }, shape.feature,
        shape.scale, shape.slots - first,
        [&](SoftmaxSums& own) {
          if constexpr (kGroups == 1) return;
          const auto at = [&](int g, int i) -> float4& {
            return reinterpret_cast<float4*>(tile.softmax)[g * kChunk + kRows * warp + lane_row() + 8 * i];
          };
          if (lane_col() == 0) {
            at(group, 0) = {own.top.x, own.sum.x, own.delta.x, 0.f};
            at(group, 1) = {own.top.y, own.sum.y, own.delta.y, 0.f};
          }
          meet();
          const auto add = [](float4 other, float& top, float& sum, float& delta) {
            const float both = fmaxf(top, other.x), mine = exp2_fast(top - both),
                        its = exp2_fast(other.x - both);
            top = both;
            sum = sum * mine + other.y * its;
            delta = delta * mine + other.z * its;
          };
          add(at(1 - group, 0), own.top.x, own.sum.x, own.delta.x);
          add(at(1 - group, 1), own.top.y, own.sum.y, own.delta.y);
        },
        [&](int n, int i, float2 of_z, float2 of_dp, float2& prob, float2& dz) {
          // p and dz as others will see them: rounded with their factor.
          float2 r = {1.f, 1.f};
          if constexpr (factored) {
            r = reads.at.gates.factor(i, n);
            prob = {prob.x * r.x, prob.y * r.y};
            dz = {dz.x * r.x, dz.y * r.y};
          }
          const float2 seen_p = unpaired<T>(pair_of<T>(prob.x, prob.y)),
                       seen_dz = unpaired<T>(pair_of<T>(dz.x, dz.y));
          float2 w = {unscaled * of_z.x * seen_dz.x + of_dp.x * seen_p.x,
                      unscaled * of_z.y * seen_dz.y + of_dp.y * seen_p.y};
          if constexpr (factored) w = {divide_fast(w.x, r.x), divide_fast(w.y, r.y)};
          if (8 * n < w_cols[i]) *reinterpret_cast<float2*>(w_rows[i] + 8 * n) = w;
        });
    if constexpr (factored) {
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
    reads.template key_read<true>(dp, W);
  };

  // dQ = (dz e^L) Hk^T + [dz_i . e^{L_i - L_j} s_j, j <= i] K
  Operand<4> f;
  Operand<2> w[2];
  {
    Scores W;
    if (reads.factored) {
      differentiate_rows(W, std::true_type());
    } else {
      differentiate_rows(W, std::false_type());
    }
    if constexpr (kGroups > 1) {
      // The rows of g and, below, of the weights have served.
      float* rows = rows_of(tile.g, warp);
      meet();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (has_half<Side::earlier>(h, warp)) put_sums<4>(rows + (2 * group + h) * 512, W.half[h]);
      }
      meet();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (has_half<Side::earlier>(h, warp)) add_sums(W.half[h], rows + (2 * (1 - group) + h) * 512);
      }
    }
    round_scores<Side::earlier, true, T>(w, W, warp);
  }
  round_to<T>(f, dp);
  constexpr int kEights = 8 / kGroups;  // of the slab's columns, the group's
  if constexpr (kGroups > 1) {
    wait_copies<0>();
    __syncthreads();
  }
  for (int d = last; d >= 0; d -= kSlab) {
    if (d < last) {
      renew();
      __syncthreads();
      load_memory_k(d);
      commit_copies();
      wait_copies<0>();
      __syncthreads();
    }
    const int col = 8 * kEights * group;
    if constexpr (kGroups > 1) {
      // What the group's slots give to the other's columns.
      Sums<kEights> dq;
      fill(dq, 0.f);
      add_product_transposed<T>(dq, f, tile.hk.from_column(first), kSlab - 8 * kEights - col);
      put_sums<kEights>(rows_of(tile.hv, warp) + (1 - group) * kEights * 128, dq);
    }
    Sums<kEights> dq;
    fill(dq, 0.f);
    add_product_transposed<T>(dq, f, tile.hk.from_column(first), col);
    add_scored<Side::earlier, T>(dq, w, tile.k, warp, col);
    if constexpr (kGroups > 1) {
      meet();
      add_sums(dq, rows_of(tile.hv, warp) + group * kEights * 128);
    }
    store_rows<T, kEights>(dq, 0, stage, warp, chunk_rows<T>(p.dq, piece, query_head) + d + col,
                           p.dq.stride[1], piece.length, shape.D - d - col);
  }
}

template <typename T, int M>
cudaError_t launch_gsa_rows(const GsaRows& p, cudaStream_t stream) {
  return launch_blocks<gsa_rows_kernel<T, M>>(p, kGroup * (M / 64), GsaRowTiles<T, M>::kBytes, stream);
}

}  // namespace girih::kernels
