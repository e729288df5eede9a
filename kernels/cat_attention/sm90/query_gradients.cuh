// dq and the records CatQuery on sm_90. As forward, with the queries and the gradients of their outputs as
// left factors in registers.
//
//     delta = do.o        P = e^{scale S - lse}, S = Q K^T        dA = P * (dO V^T - delta)        dQ += dA K
//
// dQ of a block is in flight together with S and dO V^T of the next block.
#pragma once

#include "cat_attention/header_list.h"
#include "cat_attention/sm90/query_space.cuh"

namespace girih::kernels {

template <typename T, int Tile>
struct CatGroupQueryPass : CatRingPlace<CatGroupQuerySpace<T, Tile>> {
  using Space = CatGroupQuerySpace<T, Tile>;
  using CatRingPlace<Space>::rest, CatRingPlace<Space>::tile;
  using CatRingPlace<Space>::next, CatRingPlace<Space>::done;
  using Scores = Sums<kCatGroupKeys / 8>;
  using Weights = Operand<kCatGroupKeys / 16>;

  const CatGroupQueryGradients& p;
  const Space& space;
  const float scale;  // in units of log2
  int from;           // first row of the warp in the tile
  CatGroupPlan plan;
  const float* of_rows;  // lse of the warp's rows, in shared memory
  Operand<Tile / 16> q, dout;
  Sums<Tile / 8> dq;
  float lse[2], delta[2];  // lse in units of log2
  CatRows rows;

  __device__ CatGroupQueryPass(const CatGroupQueryGradients& p, const Space& space)
      : CatRingPlace<Space>{space.rest(), {}, {}},
        p(p),
        space(space),
        scale(p.call.shape.scale * kLog2E),
        from(16 * warp_index()) {}

  // Loads the left factors; computes delta.
  __device__ void begin() {
    const int at_o = next();
    const CatGroupQueryTile& of = rest.tiles[tile.place];
    plan = of.tile.read();
    rows = of.tile.rows(p.call.shape, plan, from);
    of_rows = of.lse + from;
    tile.next(Space::kTiles);
    const int at_dout = next();
    float sum[2] = {0.f, 0.f};
#pragma unroll
    for (int k = 0; k < Tile / 16; ++k) {
      uint32_t o[4];
      load_block(dout.at[k], space.own(at_dout), from, 16 * k);
      load_block(o, space.own(at_o), from, 16 * k);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = unpaired<T>(dout.at[k][i]), y = unpaired<T>(o[i]);
        sum[i & 1] = fmaf(x.x, y.x, fmaf(x.y, y.y, sum[i & 1]));
      }
    }
    done(at_o), done(at_dout);
    const int at_q = next();
    load_blocks(q, space.own(at_q), from);
    done(at_q);
    delta[0] = sum_over_row(sum[0]), delta[1] = sum_over_row(sum[1]);
    fill(dq, 0.f);
  }

  // Computes lse in units of log2; writes the records of the queries.
  __device__ void describe() {
    const CatShape& shape = p.call.shape;
    CatQuery* const queries =
        p.call.queries + (int64_t{plan.batch} * shape.query_heads + plan.head) * shape.rows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      lse[i] = of_rows[lane_row() + 8 * i] * kLog2E;
      const int row = plan.row + from + lane_row() + 8 * i;
      if (lane_col() == 0 && row < shape.rows)
        queries[row] = {lse[i], delta[i], rows.first[i], rows.chunk[i]};
    }
  }

  // S becomes P * (dP - delta).
  template <int N>
  __device__ void gradients(Sums<N>& s, const Sums<N>& dp) const {
    each_sum<N>([&](int n, int e) { s.at[n][e] *= dp.at[n][e] - delta[e >> 1]; });
  }
  // S becomes P.
  template <int N>
  __device__ void weights(Sums<N>& s) const {
    each_sum<N>([&](int n, int e) { s.at[n][e] = exp2_fast(fmaf(scale, s.at[n][e], -lse[e >> 1])); });
  }

  // The terms of the warp's rows from each other: dK = dA^T Q for keys, dV = P^T dO for values. Written to
  // the tile of the keys or of the values. Terms of headers are written to global memory without scale: later
  // chunks add to them. The right factors are transposed in registers, because their stages in shared memory
  // are in use again.
  template <int of_values>
  __device__ void give(const uint32_t (&left)[4], int place) const {
    const CatShape& shape = p.call.shape;
    const Operand<Tile / 16>& right = of_values ? dout : q;
    const auto to = space.own(place);
    const float by = of_values ? 1.f : shape.scale;
    const uint32_t turned[4] = {transpose_pairs(left[0]), transpose_pairs(left[2]), transpose_pairs(left[1]),
                                transpose_pairs(left[3])};
    float* share[2];  // for the lane's two rows, if these are headers
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = plan.row + from + lane_row() + 8 * i;
      const int64_t head = int64_t{plan.batch} * shape.heads + plan.head;
      share[i] = (row & (shape.size - 1)) == 0 && row < shape.rows
                     ? p.shares + ((head * shape.chunks.tokens + plan.chunk_of(row)) * 2 + of_values) * Tile +
                           lane_col()
                     : nullptr;
    }
#pragma unroll
    for (int k = 0; k < Tile / 16; ++k) {
      Sums<2> x;
      fill(x, 0.f);
#pragma unroll
      for (int n = 0; n < 2; ++n)
        mma<T>(x.at[n], turned, transpose_pairs(right.at[k][2 * n]), transpose_pairs(right.at[k][2 * n + 1]));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (share[i] == nullptr) continue;
#pragma unroll
        for (int n = 0; n < 2; ++n)
          *reinterpret_cast<float2*>(share[i] + 16 * k + 8 * n) = {x.at[n][2 * i], x.at[n][2 * i + 1]};
      }
      scale_rows(x, {by, by});
      Operand<1> rounded;
      round_to<T>(rounded, x);
      store_blocks(to, from, 16 * k, rounded);
    }
  }
  // Stores the tile to global memory in full rows, except rows of headers.
  __device__ void send(const Out<4>& to, int width, int place) const {
    constexpr int kPacks = Tile / 8, kStep = 32 / kPacks;
    const CatShape& shape = p.call.shape;
    const int col = lane() % kPacks * 8, at = from + lane() / kPacks;
    const auto tile = space.own(place);
    T* row = row_of<T>(to, plan.batch, plan.row + at, plan.head) + col;
#pragma unroll
    for (int i = 0; i < 16; i += kStep) {
      const int t = plan.row + at + i;
      const auto pack = *reinterpret_cast<const uint4*>(&tile.at(at + i, col));
      if (t < shape.rows && col < width && (t & (shape.size - 1)) != 0)
        store_pack(row, {pack.x, pack.y, pack.z, pack.w});
      row += kStep * to.stride[1];
    }
  }

  // The rows of the warp's own chunks, in blocks of 16 x 16.
  __device__ void own() {
    const CatShape& shape = p.call.shape;
    const int at_keys = next(), at_values = next();
    const auto keys = space.own(at_keys), values = space.own(at_values);
    describe();
#pragma unroll 1
    for (int key = from & -max(shape.size, 16); key <= from; key += 16) {
      Sums<2> s, dp;
      fill(s, 0.f), fill(dp, 0.f);
      add_product_transposed<T>(s, q, keys, key);
      add_product_transposed<T>(dp, dout, values, key);
      weights(s);
      for_pairs(rows, shape, plan.row + from, plan.row + key, [&](int n, int e, bool seen) {
        if (!seen) s.at[n][e] = 0.f;
      });
      Operand<1> of_values, of_keys;
      round_to<T>(of_values, s);
      gradients(s, dp);
      round_to<T>(of_keys, s);
      add_product<T>(dq, of_keys, keys, key);
      if (p.shares != nullptr) {
        __syncwarp();  // keys and values have been read
        give<1>(of_values.at[0], at_values);
        give<0>(of_keys.at[0], at_keys);
      }
    }
    if (p.shares != nullptr) {
      __syncwarp();
      send(p.call.dv, shape.V, at_values);
      send(p.call.dk, shape.D, at_keys);
      fence_tiles();
    }
    done(at_keys), done(at_values);
  }

  // Starts the products of the next block. dP is in flight while S becomes P.
  __device__ void start_scores(Scores& s, Scores& dp, int place) const {
    start_product_transposed<T, false>(s, q, space.keys(place));
    commit_products();
    start_product_transposed<T, false>(dp, dout, space.values(place));
    commit_products();
  }
  __device__ void finish_scores(Weights& rounded, Scores& s, Scores& dp, int met) {
    wait_products<1>(s);
    weights(s);
    if (met < plan.parts()) {
      const int first = plan.first_of(met) + lane_col();
      each_sum<kCatGroupKeys / 8>([&](int n, int e) {
        if (!rows.header(e >> 1, first + 8 * n + (e & 1))) s.at[n][e] = 0.f;
      });
    }
    wait_products<0>(dp);
    gradients(s, dp);
    round_to<T>(rounded, s);
  }

  // The product of dQ of a block is started before the products of the next block.
  __device__ void headers() {
    if (plan.blocks == 0) return;
    Weights rounded;
    Scores s, dp;
    int before = next();
    fence_products(s, dp);
    start_scores(s, dp, before);
    finish_scores(rounded, s, dp, 0);
#pragma unroll 1
    for (int met = 1; met < plan.blocks; ++met) {
      const int place = next();
      fence_products(s, dp, dq);
      start_product<T>(dq, rounded, space.keys(before));
      commit_products();
      start_scores(s, dp, place);
      wait_products<2>(dq);
      keep(rounded);
      done(before);
      finish_scores(rounded, s, dp, met);
      before = place;
    }
    fence_products(dq);
    start_product<T>(dq, rounded, space.keys(before));
    commit_products();
    wait_products<0>(dq);
    keep(rounded);
    done(before);
  }

  __device__ void store() const {
    const CatShape& shape = p.call.shape;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = plan.row + from + lane_row() + 8 * i;
      T* const to = row_of<T>(p.call.dq, plan.batch, row, plan.head);
      store_row(to, dq, i, shape.scale, shape.D, row < shape.rows);
    }
  }

  __device__ void run() {
    const unsigned items = CatGroupPlan::items(p.call.shape);
#pragma unroll 1
    for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
      begin();
      own();
      headers();
      store();
    }
  }
};

template <typename T, int Tile>
__global__ void __launch_bounds__(kCatGroupThreads, 1)
    cat_group_query_gradients_kernel(const __grid_constant__ CatGroupQueryGradients p) {
  if constexpr (kCatGroups) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const CatGroupQuerySpace<T, Tile> space{shared};
    run_groups<CatGroupRegisters<240, 24>>([&] { space.init(); }, [&] { load_queries(p, space); },
                                           [&] { CatGroupQueryPass<T, Tile>(p, space).run(); });
  }
}

template <typename T, int Tile>
cudaError_t try_cat_group_query_gradients(const CatQueryGradients& call, cudaStream_t stream, bool& taken) {
  constexpr auto kKernel = cat_group_query_gradients_kernel<T, Tile>;
  using Space = CatGroupQuerySpace<T, Tile>;
  const CatShape& shape = call.shape;
  taken = false;
  bool has = false;
  if (const cudaError_t error = has_warpgroups<kKernel>(has); error != cudaSuccess) return error;
  const int64_t items = query_tiles(shape);
  if (!has || !cat_fills_groups(shape) || items == 0) return cudaSuccess;
  CatGroupQueryGradients p{call, {}, {}, {}, {}, {}, {}, {}, nullptr};
  if (cat_joins(shape)) {
    p.shares = call.partials + CatHeaderList(shape, Tile, group_header_tiles<Tile>()).numbers();
  }
  for (const cudaError_t error : {describe_tile(p.q, call.q, shape, shape.query_heads, shape.D),
                                  describe_tile(p.dout, call.dout, shape, shape.query_heads, shape.V),
                                  describe_tile(p.k, call.k, shape, shape.heads, shape.D),
                                  describe_tile(p.v, call.v, shape, shape.heads, shape.V),
                                  describe_tile(p.o, call.o, shape, shape.query_heads, shape.V),
                                  describe_headers(p.header_k, call.k, shape, shape.D),
                                  describe_headers(p.header_v, call.v, shape, shape.V)}) {
    if (error != cudaSuccess) return error;
  }
  taken = true;
  return launch_groups<kKernel>(p, items, Space::kBytes, stream);
}

}  // namespace girih::kernels
