// dq by warpgroups, and what the kernels of keys need to know of queries: as forward, with the queries and
// the gradients of their outputs as left factors in registers.
//
//     delta = do.o        P = e^{scale S - lse}, S = Q K^T        dA = P * (dO V^T - delta)        dQ += dA K
//
// dQ takes a block while S and dO V^T of the next are under way.
#pragma once

#include "cat_attention/header_list.h"
#include "cat_attention/sm90/query_space.cuh"

namespace girih::kernels {

template <typename T, int Tile>
struct CatGroupQueryPass {
  using Space = CatGroupQuerySpace<T, Tile>;

  const CatGroupQueryGradients& p;
  const Space& space;
  typename Space::Barriers& barriers;
  const float scale;  // scores in units of log2
  int from;           // the warp's first row of the tile
  Turn turn;
  Operand<Tile / 16> q, dout;
  Sums<Tile / 8> dq;
  float lse[2], delta[2];
  CatRows rows;

  __device__ CatGroupQueryPass(const CatGroupQueryGradients& p, const Space& space)
      : p(p),
        space(space),
        barriers(space.barriers()),
        scale(p.call.shape.scale * kLog2E),
        from(16 * warp_index()) {}

  __device__ void done() {
    arrive_once(&barriers.read[turn.place]);
    turn.next(Space::kStages);
  }

  // The queries' numbers, to memory too.
  __device__ void describe(const CatGroupPlan& plan) {
    const CatShape& shape = p.call.shape;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = plan.row + from + lane_row() + 8 * i;
      lse[i] = 0.f;
      if (row < shape.rows) {
        lse[i] =
            static_cast<const float*>(p.call.lse.data)[offset_of(p.call.lse, plan.batch, row, plan.head)] *
            kLog2E;
      }
    }
    rows = rows_seen(shape, plan.batch, plan.row + from);
    float sum[2] = {0.f, 0.f};
    wait(&barriers.stage[turn.place], turn.parity);
    const auto output = space.output(turn.place);
#pragma unroll
    for (int k = 0; k < Tile / 16; ++k) {
      uint32_t o[4];
      load_block(o, output, from, 16 * k);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = unpaired<T>(dout.at[k][i]), y = unpaired<T>(o[i]);
        sum[i & 1] = fmaf(x.x, y.x, fmaf(x.y, y.y, sum[i & 1]));
      }
    }
    done();
    CatQuery* const queries =
        p.call.queries + (int64_t{plan.batch} * shape.query_heads + plan.head) * shape.rows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      delta[i] = sum_over_row(sum[i]);
      const int row = plan.row + from + lane_row() + 8 * i;
      if (lane_col() == 0 && row < shape.rows)
        queries[row] = {lse[i], delta[i], rows.first[i], rows.chunk[i]};
    }
  }

  // S becomes P * (dP - delta).
  template <int N>
  __device__ void gradients(Sums<N>& s, const Sums<N>& dp) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s.at[n][e] *= dp.at[n][e] - delta[e >> 1];
    }
  }
  // S becomes P.
  template <int N>
  __device__ void weights(Sums<N>& s) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s.at[n][e] = exp2_fast(fmaf(scale, s.at[n][e], -lse[e >> 1]));
    }
  }

  // What the warp's rows get of themselves: of keys dK = dA^T Q, of values dV = P^T dO. Headers' to memory as
  // they are: later chunks add to them.
  template <int of_values>
  __device__ void give(const CatGroupPlan& plan, const uint32_t (&left)[4]) const {
    const CatShape& shape = p.call.shape;
    const Out<4>& to = of_values ? p.call.dv : p.call.dk;
    const int width = of_values ? shape.V : shape.D;
    const float by = of_values ? 1.f : shape.scale;
    const uint32_t turned[4] = {transpose_pairs(left[0]), transpose_pairs(left[2]), transpose_pairs(left[1]),
                                transpose_pairs(left[3])};
#pragma unroll 1
    for (int col = 0; col < width; col += 32) {
      Sums<4> x;
      fill(x, 0.f);
      add_product<T>(x, turned, space.own(of_values), from, col);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = plan.row + from + lane_row() + 8 * i;
        const bool header = row % shape.size == 0;
        store_row(row_of<T>(to, plan.batch, row, plan.head) + col, x, i, by, width - col,
                  row < shape.rows && !header);
        if (!header || row >= shape.rows) continue;
        const int64_t head = int64_t{plan.batch} * shape.heads + plan.head;
        float* const share = p.shares +
                             ((head * shape.chunks.tokens + row / shape.size) * 2 + of_values) * Tile + col +
                             lane_col();
#pragma unroll
        for (int n = 0; n < 4; ++n)
          *reinterpret_cast<float2*>(share + 8 * n) = {x.at[n][2 * i], x.at[n][2 * i + 1]};
      }
    }
  }

  // The rows of the warp's own chunks, sixteen by sixteen.
  __device__ void own(const CatGroupPlan& plan) {
    const CatShape& shape = p.call.shape;
    const auto keys = space.own(2), values = space.own(3);
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
      Operand<1> rounded;
      round_to<T>(rounded, s);
      if (p.shares != nullptr) give<1>(plan, rounded.at[0]);
      gradients(s, dp);
      round_to<T>(rounded, s);
      add_product<T>(dq, rounded, keys, key);
      if (p.shares != nullptr) give<0>(plan, rounded.at[0]);
    }
    arrive_once(&barriers.own_read);
  }

  // A block of headers of which some rows read some, 8 N of them.
  template <int N>
  __device__ void part(int first) {
    Sums<N> s, dp;
    fence_products(s, dp);
    start_product_transposed<T, false>(s, q, space.keys(turn.place));
    start_product_transposed<T, false>(dp, dout, space.values(turn.place));
    commit_products();
    wait_products<0>(s, dp);
    weights(s);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!rows.header(e >> 1, first + 8 * n + lane_col() + (e & 1))) s.at[n][e] = 0.f;
      }
    }
    gradients(s, dp);
    Operand<N / 2> rounded;
    round_to<T>(rounded, s);
    fence_products(dq);
    start_product<T>(dq, rounded, space.keys(turn.place));
    commit_products();
    wait_products<0>(dq);
    keep(rounded);
  }

  __device__ void parts(const CatGroupPlan& plan) {
    // The warpgroup's last row reads most. All four warps decide alike.
    const int last = min(plan.row + (from & -64) + 64, p.call.shape.rows) - 1,
              most = min(last / p.call.shape.size, plan.header_end);
    for (int met = 0; met < plan.parts(); ++met) {
      const int first = plan.first_of(met), count = most - first;
      wait(&barriers.stage[turn.place], turn.parity);
      if (count > 32) {
        part<8>(first);
      } else if (count > 0) {
        part<4>(first);
      }
      done();
    }
  }

  // The products of the next block; dP is under way while S becomes P.
  __device__ void start_scores(Sums<kCatGroupKeys / 8>& s, Sums<kCatGroupKeys / 8>& dp) const {
    start_product_transposed<T, false>(s, q, space.keys(turn.place));
    commit_products();
    start_product_transposed<T, false>(dp, dout, space.values(turn.place));
    commit_products();
  }
  __device__ void finish_scores(Operand<kCatGroupKeys / 16>& rounded, Sums<kCatGroupKeys / 8>& s,
                                Sums<kCatGroupKeys / 8>& dp) {
    wait_products<1>(s);
    weights(s);
    wait_products<0>(dp);
    gradients(s, dp);
    round_to<T>(rounded, s);
  }

  // dQ takes a block ahead of the products of the next.
  __device__ void wholes(const CatGroupPlan& plan) {
    if (plan.whole == 0) return;
    Operand<kCatGroupKeys / 16> rounded;
    Sums<kCatGroupKeys / 8> s, dp;
    wait(&barriers.stage[turn.place], turn.parity);
    fence_products(s, dp);
    start_scores(s, dp);
    finish_scores(rounded, s, dp);
    int before = turn.place;
    turn.next(Space::kStages);
#pragma unroll 1
    for (int i = 1; i < plan.whole; ++i) {
      wait(&barriers.stage[turn.place], turn.parity);
      fence_products(s, dp, dq);
      start_product<T>(dq, rounded, space.keys(before));
      commit_products();
      start_scores(s, dp);
      wait_products<2>(dq);
      keep(rounded);
      arrive_once(&barriers.read[before]);
      finish_scores(rounded, s, dp);
      before = turn.place;
      turn.next(Space::kStages);
    }
    fence_products(dq);
    start_product<T>(dq, rounded, space.keys(before));
    commit_products();
    wait_products<0>(dq);
    keep(rounded);
    arrive_once(&barriers.read[before]);
  }

  __device__ void store(const CatGroupPlan& plan) const {
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
    unsigned tiles = 0;
    for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
      const CatGroupPlan plan(p.call.shape, item);
      wait(&barriers.own, tiles++ & 1);
#pragma unroll
      for (int k = 0; k < Tile / 16; ++k) {
        load_block(q.at[k], space.own(0), from, 16 * k);
        load_block(dout.at[k], space.own(1), from, 16 * k);
      }
      describe(plan);
      fill(dq, 0.f);
      own(plan);
      parts(plan);
      wholes(plan);
      store(plan);
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
