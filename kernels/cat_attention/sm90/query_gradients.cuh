// dq by warpgroups, and what the kernels of keys need to know of queries: as forward, with the queries and
// the gradients of their outputs as left factors in registers.
//
//     delta = do.o        P = e^{scale S - lse}, S = Q K^T        dA = P * (dO V^T - delta)        dQ += dA K
//
// dQ takes a block while S and dO V^T of the next are under way.
#pragma once

#include "cat_attention/sm90/space.cuh"

namespace girih::kernels {

struct CatGroupQueryGradients {
  CatQueryGradients call;
  Boxes q, dout, k, v, o;    // 128 rows of a head
  Boxes header_k, header_v;  // 64 headers
};

template <typename T, int Tile>
struct CatGroupQuerySpace {
  static constexpr int kStages = Tile == 64 ? 6 : 3, kOwn = 4;
  using Own = BlockTile<T, Tile, kCatGroupRows>;
  using Headers = BlockTile<T, Tile, kCatGroupKeys>;
  struct Barriers {
    uint64_t own, own_read, stage[kStages], read[kStages];
  };
  // A stage: headers' keys and values, or what 128 rows have put out.
  static constexpr int kStage = 2 * Headers::kBytes;
  static_assert(kStage == Own::kBytes);
  static constexpr int kBytes = kOwn * Own::kBytes + kStages * kStage + static_cast<int>(sizeof(Barriers));

  unsigned char* shared;

  // q, dout, k, v
  __device__ Own own(int which) const { return {reinterpret_cast<T*>(shared + which * Own::kBytes)}; }
  __device__ T* stage(int n) const { return reinterpret_cast<T*>(shared + kOwn * Own::kBytes + n * kStage); }
  __device__ Own output(int n) const { return {stage(n)}; }
  __device__ Headers keys(int n) const { return {stage(n)}; }
  __device__ Headers values(int n) const { return {stage(n) + kCatGroupKeys * Tile}; }
  __device__ Barriers& barriers() const {
    return *reinterpret_cast<Barriers*>(shared + kOwn * Own::kBytes + kStages * kStage);
  }
  __device__ void init() const {
    Barriers& all = barriers();
    init_barrier(&all.own, 1), init_barrier(&all.own_read, once(kCatGroupWarps));
    for (int i = 0; i < kStages; ++i) {
      init_barrier(&all.stage[i], 1), init_barrier(&all.read[i], once(kCatGroupWarps));
    }
  }
};

// By one thread.
template <typename T, int Tile>
__device__ inline void load_queries(const CatGroupQueryGradients& p,
                                    const CatGroupQuerySpace<T, Tile>& space) {
  using Space = CatGroupQuerySpace<T, Tile>;
  const CatShape& shape = p.call.shape;
  auto& barriers = space.barriers();
  const unsigned items = CatGroupPlan::items(shape);
  // The tile's own, a tensor at a time: the next tile's come between blocks of headers.
  unsigned tiles = 0;
  const auto own = [&](unsigned item, int which) {
    const CatGroupPlan plan(shape, item);
    if (which == 0) {
      wait(&barriers.own_read, (tiles++ & 1) ^ 1);
      arrive_expecting(&barriers.own, Space::kOwn * Space::Own::kBytes);
    }
    const Boxes& boxes = which == 0 ? p.q : which == 1 ? p.dout : which == 2 ? p.k : p.v;
    const BoxPlace at{0, plan.row, which < 2 ? plan.head : plan.head / shape.group(), plan.batch};
    copy_rows(space.own(which), boxes, at, &barriers.own);
  };
  if (blockIdx.x < items) {
    for (int which = 0; which < Space::kOwn; ++which) own(blockIdx.x, which);
  }
  Turn turn;
  for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
    const CatGroupPlan plan(shape, item);
    const unsigned next = item + gridDim.x;
    int which = next < items ? 0 : Space::kOwn;
    for (int met = -1; met < plan.blocks; ++met) {
      // By then the stages are full, and the tile's own have been read.
      if (met >= Space::kStages && which < Space::kOwn) own(next, which++);
      uint64_t* const barrier = &barriers.stage[turn.place];
      wait(&barriers.read[turn.place], turn.parity ^ 1);
      arrive_expecting(barrier, Space::kStage);
      if (met < 0) {
        copy_rows(space.output(turn.place), p.o, {0, plan.row, plan.head, plan.batch}, barrier);
      } else {
        const BoxPlace at{0, plan.first_of(met), plan.head / shape.group(), plan.batch};
        copy_rows(space.keys(turn.place), p.header_k, at, barrier);
        copy_rows(space.values(turn.place), p.header_v, at, barrier);
      }
      turn.next(Space::kStages);
    }
    while (which < Space::kOwn) own(next, which++);
  }
}

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
      gradients(s, dp);
      Operand<1> rounded;
      round_to<T>(rounded, s);
      add_product<T>(dq, rounded, keys, key);
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
  if constexpr (kBoxes) {
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
  if (!has || !cat_fills_groups(shape) || items == 0 || items > 0x7fffffff) return cudaSuccess;
  CatGroupQueryGradients p{call, {}, {}, {}, {}, {}, {}, {}};
  const auto rows = [&](Boxes& boxes, const auto& x, int heads, int width) {
    return describe_rows(boxes, x, shape, shape.rows, 1, heads, width, kCatGroupRows);
  };
  const auto headers = [&](Boxes& boxes, const In<4>& x, int width) {
    return describe_rows(boxes, x, shape, shape.chunks.tokens, shape.size, shape.heads, width, kCatGroupKeys);
  };
  for (const cudaError_t error :
       {rows(p.q, call.q, shape.query_heads, shape.D), rows(p.dout, call.dout, shape.query_heads, shape.V),
        rows(p.k, call.k, shape.heads, shape.D), rows(p.v, call.v, shape.heads, shape.V),
        rows(p.o, call.o, shape.query_heads, shape.V), headers(p.header_k, call.k, shape.D),
        headers(p.header_v, call.v, shape.V)}) {
    if (error != cudaSuccess) return error;
  }
  int processors = 0;
  if (const cudaError_t error = multiprocessors(processors); error != cudaSuccess) return error;
  if (const cudaError_t error = allow_shared<kKernel>(Space::kBytes); error != cudaSuccess) return error;
  taken = true;
  const auto blocks = static_cast<unsigned>(items < processors ? items : processors);
  kKernel<<<blocks, kCatGroupThreads, Space::kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace girih::kernels
