// The gradients of queries, keys and gates, one block a chunk, query head and tile of keys. A chunk's partner
// is the other one of its pair; ' marks what is the partner's. S the state before the pair, G the gradient
// that reaches the state after it:
//
//     near_ij = scale e^{L_i - L_j} (do_i . v_j)
//     dq_i = scale e^{L_i} do_i S^T + sum_{j<=i} near_ij k_j                         in a pair's first chunk
//     dq_i = e^{L_i} (scale e^{L'_C} do_i S^T + sum_j cross_ij k'_j) + ...           in its second
//            cross_ij = scale e^{L'_C - L'_j} (do_i . v'_j)
//     dk_j = e^{L_C - L_j} v_j G^T + sum_{i>=j} near_ij q_i                          in its second
//     dk_j = e^{L_C - L_j} (e^{L'_C} v_j G^T + sum_i cross_ij q'_i) + ...            in its first
//            cross_ij = scale e^{L'_i} (do'_i . v_j)
//
// They are the same but for what stands where: a block has a warpgroup for each, which makes the scores with
// its own rows as rows, and one of the two crosses to the partner. A partner that is not there has no rows,
// and e^{L'_C} = 1. The scores come first, of all of V, and what the gate's gradient has of them; then the
// gradients by 64 columns, for which there are registers beside both scores.
//
// A gate decays what pairs of rows j < t <= i exchange:
//
//     dg_t = e^{L_C + L'_C} <S, G>                                  both outside of the pair
//          + sum_{i>=t} q_i . (dq_i through S) + sum_{j<t} k_j . (dk_j through G)
//          + sum_{j<t<=i} near_ij (q_i . k_j)
//
// The last is a sum over i >= t of what rows have less what columns have: the same products in fp32, so that
// what does not belong cancels. Rows of the own chunk have what crosses to the partner beside what goes
// through S or G: the same gates decay it. Of the partner's rows all count, without what crosses: for gates
// of a pair's first chunk its second has sum_i q'_i . (dq'_i through S), for those of the second the first
// has sum_j k'_j . (dk'_j through G). So a block gives its partner one number for all gates, that sum and its
// half of <S, G>. A tile of keys has its part of every term.
//
// Before a sequence's first token both states are there in fp32; there <S, dS>, less what the pair's own rows
// read, is the first term: the first chunk has all of it but what the second's rows read.
#pragma once

#include "gla/head_gates.cuh"
#include "gla/head_launch.h"
#include "gsa/gradients.cuh"
#include "tile/grid.h"

namespace girih::kernels {

constexpr int kHeadGradientThreads = 256;

template <typename T, int D>
struct HeadGradientTiles {
  BlockTile<T, D> q, k;
  BlockTile<T, 2 * kSlab> s, ds;  // 64 keys of S and G: of 64 values, and of 64 more, [values, keys]
  BlockTile<T, 2 * kSlab> v, dout, partner;  // partner: of v' or do', then of k' or q'
  // L, L' and a row's part of dg: of all gates up to it, and of all after it.
  float *sums, *partner_sums, *of_row, *of_col;

  static constexpr int kFloats = 4 * kChunk;
  static constexpr int kBytes =
      2 * BlockTile<T, D>::kBytes + 5 * BlockTile<T, 2 * kSlab>::kBytes + kFloats * 4;

  __device__ explicit HeadGradientTiles(unsigned char* shared) {
    Layout(shared)(q)(k)(s)(ds)(v)(dout)(partner)(sums, kChunk)(partner_sums, kChunk)(of_row, kChunk)(of_col,
                                                                                                      kChunk);
  }
  // What every warp has for all own gates, and for all of the partner's. Two blocks of a multiprocessor leave
  // no room for these: they take that of L' once the scores are decayed, of which only the last is read then.
  __device__ float* own_edge() const { return partner_sums; }
  __device__ float* partner_edge() const { return partner_sums + kHeadGradientThreads / 32; }
  __device__ const float& partner_whole() const { return partner_sums[kChunk - 1]; }
};

// Back from rounded ones.
template <typename T>
__device__ inline void widen(Sums<8>& sums, const Operand<4>& a) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 pair = unpaired<T>(a.at[n / 2][n % 2 * 2 + i]);
      sums.at[n][2 * i] = pair.x, sums.at[n][2 * i + 1] = pair.y;
    }
  }
}

// x_i . y_i of the lane's two rows, those of y in `rows`.
template <typename T, int N, class Tile>
__device__ inline float2 row_products(const Sums<N>& x, const Tile& rows, int warp) {
  float2 sum = {0.f, 0.f};
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float2 upper = lane_pair<T>(rows, kRows * warp, 8 * n);
    const float2 lower = lane_pair<T>(rows, kRows * warp + 8, 8 * n);
    sum.x = fmaf(x.at[n][0], upper.x, fmaf(x.at[n][1], upper.y, sum.x));
    sum.y = fmaf(x.at[n][2], lower.x, fmaf(x.at[n][3], lower.y, sum.y));
  }
  return {sum_over_row(sum.x), sum_over_row(sum.y)};
}

// A thread's share of <S, dS> before the sequence's first token, keys `key` and the D - 1 after it.
__device__ inline float product_at_start(const HeadGradients& p, const Piece& piece, int query_head, int key,
                                         int D) {
  const HeadShape& shape = p.shape;
  const auto rows = [&](const In<4>& x, int head) {
    return static_cast<const float*>(x.data) + piece.sequence.index * x.stride[0] + head * x.stride[1];
  };
  const float* state = rows(p.initial, query_head / (shape.query_heads / shape.heads));
  const float* gradient = rows(p.start, query_head);
  float sum = 0.f;
  for (int i = threadIdx.x; i < min(D, shape.keys - key) * shape.values; i += kHeadGradientThreads) {
    const int of_key = key + i / shape.values, value = i % shape.values;
    sum = fmaf(state[value * p.initial.stride[2] + of_key * p.initial.stride[3]],
               gradient[value * p.start.stride[2] + of_key * p.start.stride[3]], sum);
  }
  return sum;
}

template <typename T, int D>
__global__ void __launch_bounds__(kHeadGradientThreads, 2)
    head_gradients_kernel(const __grid_constant__ HeadGradients p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const HeadGradientTiles<T, D> tile(shared);
  const HeadShape& shape = p.shape;
  const int group = shape.query_heads / shape.heads;
  const int all_warps = warp_index();  // products of warpgroups bear no branch of single threads
  const int warp = all_warps % 4;
  const bool of_keys = all_warps >= 4;
  const unsigned parts = (shape.D + D - 1) / D;
  unsigned job = blockIdx.x;
  const int key = static_cast<int>(job % parts) * D, keys = min(D, shape.D - key);
  job /= parts;
  const int query_head = static_cast<int>(job % shape.query_heads), head = query_head / group;
  const int key_head = head / shape.key_share, head_of_query = query_head / shape.query_share;
  const int64_t chunk = job / shape.query_heads;
  const Piece piece = piece_at(shape.tokens, chunk, kChunk);
  const bool wants_gates = p.dg.data != nullptr;
  if (piece.length == 0) {
    if (wants_gates && threadIdx.x == 0) p.across[blockIdx.x] = 0.f;
    return;
  }
  const Piece partner = partner_of(piece);
  const bool second = piece.index % 2 == 1;
  // Which warpgroup has rows of the partner.
  const bool crosses = __shfl_sync(~0u, static_cast<int>(of_keys != second), 0) != 0;

  constexpr int kThreads = kHeadGradientThreads, kWide = 2 * kSlab;
  const T* const dout = chunk_rows<T>(p.dout, piece, query_head);
  const T* const values = chunk_rows<T>(p.v, piece, head);
  const int64_t state = static_cast<int64_t>(shape.V) * shape.D;
  const int64_t pair = first_piece(shape.tokens, piece.sequence, kHeadPair) + piece.index / 2;
  const T* const s = static_cast<const T*>(p.states) + (pair * shape.heads + head) * state + key;
  const T* const ds =
      static_cast<const T*>(p.gradients) + (pair * shape.query_heads + query_head) * state + key;
  const auto load_partner = [&](int v) {
    const T* const rows =
        second ? chunk_rows<T>(p.v, partner, head) : chunk_rows<T>(p.dout, partner, query_head);
    load_async<kThreads>(tile.partner, rows + v, second ? p.v.stride[1] : p.dout.stride[1], partner.length,
                         shape.V - v, threadIdx.x);
  };
  const auto load_rows = [&](int v) {
    load_async<kThreads>(tile.dout, dout + v, p.dout.stride[1], piece.length, shape.V - v, threadIdx.x);
    load_async<kThreads>(tile.v, values + v, p.v.stride[1], piece.length, shape.V - v, threadIdx.x);
  };
  // The states by slabs of 64 keys and 128 values, of the first keys all values first.
  struct Slab {
    int col, v;
  };
  const auto next_of = [&](const Slab& at) {
    return at.v + kWide < shape.V ? Slab{at.col, at.v + kWide} : Slab{at.col + kSlab, 0};
  };
  const auto half = [](const BlockTile<T, kWide>& slab, int i) {
    return BlockTile<T, kSlab>{slab.data + i * kSlab * kSlab};
  };
  const auto load_states = [&](const Slab& at) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int v = at.v + i * kSlab;
      if (v >= shape.V) break;
      const int64_t first = static_cast<int64_t>(v) * shape.D + at.col;
      load_async<kThreads>(half(tile.s, i), s + first, shape.D, shape.V - v, keys - at.col, threadIdx.x);
      load_async<kThreads>(half(tile.ds, i), ds + first, shape.D, shape.V - v, keys - at.col, threadIdx.x);
    }
  };
  // There is room for one slab: the next waits in the L2 cache. A line of 128 bytes a thread.
  const auto prefetch_states = [&](const Slab& at) {
    const int v = at.v + static_cast<int>(threadIdx.x) % kWide;
    if (v < shape.V && at.col < keys)
      prefetch((of_keys ? ds : s) + static_cast<int64_t>(v) * shape.D + at.col);
  };
  load_rows(0);
  load_partner(0);
  load_async<kThreads>(tile.q, chunk_rows<T>(p.q, piece, head_of_query) + key, p.q.stride[1], piece.length,
                       keys, threadIdx.x);
  load_async<kThreads>(tile.k, chunk_rows<T>(p.k, piece, key_head) + key, p.k.stride[1], piece.length, keys,
                       threadIdx.x);
  commit_copies();
  load_states({0, 0});
  commit_copies();
  prefetch_states(next_of({0, 0}));
  if (warp == 0) {
    GatePair::load(shape.g, piece.sequence, of_keys ? partner.start : piece.start, head,
                   of_keys ? partner.length : piece.length)
        .put_sums(of_keys ? tile.partner_sums : tile.sums);
  }
  const bool from_start = piece.index < 2 && p.initial.data != nullptr;

  // A warpgroup's x, y, H, z: dq of do, v, S, k; dk of v, do, G, q. The partner's y', then z'.
  const BlockTile<T, kWide> x{of_keys ? tile.v.data : tile.dout.data};
  const BlockTile<T, kWide> y{of_keys ? tile.dout.data : tile.v.data};
  const BlockTile<T, kWide> h{of_keys ? tile.ds.data : tile.s.data};
  const BlockTile<T, D> z{of_keys ? tile.q.data : tile.k.data}, own{of_keys ? tile.k.data : tile.q.data},
      partner_z{tile.partner.data};

  // near and cross, x y^T and x y'^T so far
  Sums<8> near, cross;
  fill(near, 0.f);
  fill(cross, 0.f);
  for (int v = 0; v < shape.V; v += kWide) {
    if (v == 0) {
      wait_copies<1>();
    } else {
      __syncthreads();
      load_rows(v);
      load_partner(v);
      commit_copies();
      wait_copies<0>();
    }
    fence_tiles();
    __syncthreads();
    fence_products(near);
    start_product_transposed(near, x, y);
    commit_products();
    wait_products<0>(near);
    if (crosses) {
      fence_products(cross);
      start_product_transposed(cross, x, tile.partner);
      commit_products();
      wait_products<0>(cross);
    }
  }
  Operand<4> far{};
  if (crosses) {
    // All of the warpgroup have their scores: z' takes the place of y'.
    of_keys ? barrier_wait(1, 128) : barrier_wait(2, 128);
    const T* const rows =
        second ? chunk_rows<T>(p.k, partner, key_head) : chunk_rows<T>(p.q, partner, head_of_query);
    load_async<128>(partner_z, rows + key, second ? p.k.stride[1] : p.q.stride[1], partner.length, keys,
                    threadIdx.x % 128);
    scale_columns(cross, [&](int n) {
      const float2 sum = *reinterpret_cast<const float2*>(tile.partner_sums + 8 * n + lane_col());
      const float whole = tile.partner_whole();
      return second ? float2{shape.scale * exp2_fast(whole - sum.x), shape.scale * exp2_fast(whole - sum.y)}
                    : float2{shape.scale * exp2_fast(sum.x), shape.scale * exp2_fast(sum.y)};
    });
    round_to<T>(far, cross);
  }
  commit_copies();
  decay_scores(near, tile.sums, shape.scale, warp, of_keys);

  const int first = kRows * warp + lane_row();
  float2 read = {0.f, 0.f};  // a row's part of dg
  if (wants_gates) {
    Sums<8> pairs;
    fill(pairs, 0.f);
    fence_products(pairs);
    start_product_transposed(pairs, own, z);
    commit_products();
    wait_products<0>(pairs);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // A row's own token passes no gate.
        const bool itself = i >> 1 == n % 2 && n / 2 == warp && lane_row() == lane_col() + (i & 1);
        (i < 2 ? read.x : read.y) += itself ? 0.f : pairs.at[n][i] * near.at[n][i];
      }
    }
    read = {sum_over_row(read.x), sum_over_row(read.y)};
    // What columns have is taken from rows: those add to it behind the next barriers.
    if (of_keys) {
      if (lane() % 4 == 0) tile.of_row[first] = -read.x, tile.of_row[first + 8] = -read.y;
      read = {0.f, 0.f};
    }
  }
  Operand<4> scores;
  round_to<T>(scores, near);

  // By 64 columns: x H, and <S, G>, of which each chunk of the pair has every second share; then
  // gradient = r (to_state x H + cross z') + near z, while the next slab of the states is on its way.
  const Out<4>& out = of_keys ? p.dk : p.dq;
  const int share = second ? kThreads : 0, shares = partner.length > 0 ? 2 * kThreads : kThreads;
  Sums<8> gradient;
  Operand<4> done{};  // the block before
  fill(gradient, 0.f);
  float edge = 0.f, of_state = 0.f;  // <S, G>; own . (gradient through H)
  if (wants_gates && from_start && !second) edge = product_at_start(p, piece, query_head, key, D);
  if (shape.V > kWide) {
    __syncthreads();
    load_rows(0);
    commit_copies();
    wait_copies<0>();
  } else {
    wait_copies<1>();  // for the slab, not for z'
  }
#pragma unroll 1
  for (Slab at{0, 0};;) {
    fence_tiles();
    __syncthreads();
    fence_products(gradient);
    start_product(gradient, x, 0, half(h, 0));
    commit_products();
    const bool both = shape.V - at.v > kSlab;
    if (both) {
      fence_products(gradient);
      start_product(gradient, x, kSlab, half(h, 1));
      commit_products();
    }
    if (wants_gates && !from_start) {
      const int packs = (both ? 2 : 1) * kSlab * kSlab / 8;
#pragma unroll 2
      for (int i = threadIdx.x + share; i < packs; i += shares) {
        const uint4 of_s = reinterpret_cast<const uint4*>(tile.s.data)[i];
        const uint4 of_ds = reinterpret_cast<const uint4*>(tile.ds.data)[i];
        const uint32_t s[4] = {of_s.x, of_s.y, of_s.z, of_s.w};
        const uint32_t ds[4] = {of_ds.x, of_ds.y, of_ds.z, of_ds.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 a = unpaired<T>(s[j]), b = unpaired<T>(ds[j]);
          edge = fmaf(a.x, b.x, fmaf(a.y, b.y, edge));
        }
      }
    }
    wait_products<0>(gradient);

    const Slab next = next_of(at);
    const bool follows = next.col < keys;
    if (follows) {
      __syncthreads();
      load_states(next);
      if (shape.V > kWide) load_rows(next.v);
      prefetch_states(next_of(next));
    }
    commit_copies();
    const int col = at.col;
    at = next;
    if (next.col == col) {
      wait_copies<0>();
      continue;
    }

    const float whole = tile.sums[kChunk - 1], upper = tile.sums[first], lower = tile.sums[first + 8];
    const float2 r = of_keys ? float2{exp2_fast(whole - upper), exp2_fast(whole - lower)}
                             : float2{exp2_fast(upper), exp2_fast(lower)};
    const float to_state = (of_keys ? 1.f : shape.scale) * (crosses ? exp2_fast(tile.partner_whole()) : 1.f);
    scale_rows(gradient, {to_state, to_state});
    float2 products = {0.f, 0.f};
    if (wants_gates) {
      products = row_products<T>(gradient, own.block(col), warp);
      of_state += r.x * products.x + r.y * products.y;
    }
    if (crosses) {
      wait_copies<1>();  // for z', not for the next slab
      fence_tiles();
      of_keys ? barrier_wait(1, 128) : barrier_wait(2, 128);
      fence_products(gradient);
      start_product<T>(gradient, far, partner_z, col);
      commit_products();
      wait_products<0>(gradient);
      keep(far);
      if (wants_gates) products = row_products<T>(gradient, own.block(col), warp);
    }
    read = {fmaf(r.x, products.x, read.x), fmaf(r.y, products.y, read.y)};
    scale_rows(gradient, r);
    fence_products(gradient);
    start_product<T>(gradient, scores, z, col);
    commit_products();
    wait_products<0>(gradient);
    keep(scores);
    if (D <= kSlab || !follows) break;
    if (out.dtype == DType::f32) {
      store_rows_of<T>(gradient, x.block(0), warp, out, piece, query_head, key + col, shape.D);
    } else {
      round_to<T>(done, gradient);
    }
    fill(gradient, 0.f);
    wait_copies<0>();
  }

  if (wants_gates) {
    edge = sum_over_col(sum_over_row(edge));
    of_state = sum_over_col(of_state);
    if (!from_start) {
      edge *= exp2_fast(tile.sums[kChunk - 1] + tile.partner_whole());
    } else if (!of_keys) {
      edge -= of_state;
    }
    if (lane() == 0) {
      tile.own_edge()[threadIdx.x / 32] = edge;
      tile.partner_edge()[threadIdx.x / 32] = crosses ? edge + of_state : edge;
    }
    if (lane() % 4 == 0) {
      if (of_keys) {
        tile.of_col[first] = read.x, tile.of_col[first + 8] = read.y;
      } else {
        tile.of_row[first] += read.x, tile.of_row[first + 8] += read.y;
      }
    }
  }
  // x has no reader left: its rows are the warp's room for rows on their way out.
  of_keys ? barrier_wait(1, 128) : barrier_wait(2, 128);
  const int last = (keys - 1) / kSlab * kSlab;
  store_rows_of<T>(gradient, x.block(0), warp, out, piece, query_head, key + last, shape.D);
  if (D > kSlab && last > 0 && out.dtype != DType::f32) {
    widen<T>(gradient, done);
    store_rows_of<T>(gradient, x.block(kSlab), warp, out, piece, query_head, key, shape.D);
  }
  __syncthreads();

  if (!wants_gates || threadIdx.x >= 32) return;
  // Rows 2 l and 2 l + 1 a lane.
  const float2 row = *reinterpret_cast<const float2*>(tile.of_row + 2 * lane());
  const float2 col = *reinterpret_cast<const float2*>(tile.of_col + 2 * lane());
  float after = row.x + row.y, before = col.x + col.y;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float later = __shfl_down_sync(~0u, after, step), earlier = __shfl_up_sync(~0u, before, step);
    if (lane() + step < 32) after += later;
    if (lane() >= step) before += earlier;
  }
  float later = __shfl_down_sync(~0u, after, 1), earlier = __shfl_up_sync(~0u, before, 1);
  if (lane() == 31) later = 0.f;
  if (lane() == 0) earlier = 0.f;
  float outside = 0.f, of_partner = 0.f;
#pragma unroll
  for (int i = 0; i < kHeadGradientThreads / 32; ++i) {
    outside += tile.own_edge()[i], of_partner += tile.partner_edge()[i];
  }
  if (lane() == 0) p.across[blockIdx.x] = of_partner;
  const unsigned of_token = shape.query_heads * parts;  // of a token
  const int64_t token = piece.sequence.batch * shape.tokens.tokens + piece.start + 2 * lane();
  float* dg = p.dg_parts + token * of_token + blockIdx.x % of_token;
  if (2 * lane() < piece.length) *dg = outside + after + earlier;
  if (2 * lane() + 1 < piece.length) dg[of_token] = outside + later + row.y + earlier + col.x;
}

template <typename T, int D>
cudaError_t launch_head_gradients(const HeadGradients& p, cudaStream_t stream) {
  constexpr int kBytes = HeadGradientTiles<T, D>::kBytes;
  static_assert(2 * (kBytes + 1024) <= 228 * 1024, "two blocks of a multiprocessor, each gives 1 KB away");
  if (const cudaError_t error = allow_shared<head_gradients_kernel<T, D>>(kBytes); error != cudaSuccess) {
    return error;
  }
  const HeadShape& shape = p.shape;
  const int64_t blocks = piece_count(shape.tokens, kChunk) * shape.query_heads * divide_up(shape.D, D);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  head_gradients_kernel<T, D><<<static_cast<unsigned>(blocks), kHeadGradientThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace girih::kernels
