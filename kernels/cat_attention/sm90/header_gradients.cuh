// The terms of dk and dv of headers from later chunks on sm_90: a block has 128 headers, 64 for each
// warpgroup, and loads tiles of 64 queries through a ring.
//
//     P^T = e^{scale K Q^T - lse}    dV += P^T dO    dA^T = P^T * (V dO^T - delta)    dK += dA^T Q
#pragma once

#include "cat_attention/header_list.h"
#include "cat_attention/sm90/space.cuh"

namespace girih::kernels {

struct CatGroupHeaderGradients {
  CatHeaderGradients call;
  Boxes k, v;     // 64 headers
  Boxes q, dout;  // 64 rows of a head
  CatHeaderList list;
};

constexpr int kCatGroupQueries = 64;

template <typename T, int Tile>
struct CatGroupHeaderSpace {
  static constexpr int kStages = Tile == 64 ? 8 : 4;
  using Rows = BlockTile<T, Tile>;
  struct Barriers {
    uint64_t keys, keys_read, stage[kStages], read[kStages];
  };
  static constexpr int kDescribed = kCatGroupQueries * static_cast<int>(sizeof(CatQuery));
  static constexpr int kStage = 2 * Rows::kBytes + kDescribed;
  static_assert(kStage % 1024 == 0);
  static constexpr int kBytes = 4 * Rows::kBytes + kStages * kStage + static_cast<int>(sizeof(Barriers));
  static_assert(kBytes <= kCatGroupBytes);

  unsigned char* shared;

  // The tile of a warpgroup.
  __device__ Rows keys(int group) const { return {reinterpret_cast<T*>(shared + group * Rows::kBytes)}; }
  __device__ Rows values(int group) const { return keys(2 + group); }
  __device__ unsigned char* stage(int n) const { return shared + 4 * Rows::kBytes + n * kStage; }
  __device__ Rows queries(int n) const { return {reinterpret_cast<T*>(stage(n))}; }
  __device__ Rows gradients(int n) const { return {reinterpret_cast<T*>(stage(n) + Rows::kBytes)}; }
  __device__ CatQuery* described(int n) const {
    return reinterpret_cast<CatQuery*>(stage(n) + 2 * Rows::kBytes);
  }
  __device__ Barriers& barriers() const {
    return *reinterpret_cast<Barriers*>(shared + 4 * Rows::kBytes + kStages * kStage);
  }
  __device__ void init() const {
    Barriers& all = barriers();
    init_barrier(&all.keys, 1), init_barrier(&all.keys_read, once(kCatGroupWarps));
    for (int i = 0; i < kStages; ++i) {
      init_barrier(&all.stage[i], 1), init_barrier(&all.read[i], once(kCatGroupWarps));
    }
  }
};

// Calls f(run) for the part of every item in the block's run.
template <class F>
__device__ inline void for_items(const CatGroupHeaderGradients& p, const F& f) {
  const int64_t end = min((blockIdx.x + 1) * p.list.run, p.list.total);
  for (int64_t at = blockIdx.x * p.list.run; at < end;) {
    const CatHeaderRun run(p.call.shape, p.list, blockIdx.x, at, end);
    f(run);
    at += run.until - run.entry;
  }
}

// Called by one warp; one thread loads.
template <typename T, int Tile>
__device__ inline void load_headers(const CatGroupHeaderGradients& p,
                                    const CatGroupHeaderSpace<T, Tile>& space) {
  using Space = CatGroupHeaderSpace<T, Tile>;
  if (lane() != 0) return;
  const CatShape& shape = p.call.shape;
  auto& barriers = space.barriers();
  Turn turn;
  unsigned items = 0;
  for_items(p, [&](const CatHeaderRun& run) {
    int i = run.next(run.entry);
    if (i == run.until) return;
    wait(&barriers.keys_read, (items++ & 1) ^ 1);
    arrive_expecting(&barriers.keys, 4 * Space::Rows::kBytes);
    for (int group = 0; group < 2; ++group) {
      const BoxPlace at{0, run.header + 64 * group, run.head, run.batch};
      copy_rows(space.keys(group), p.k, at, &barriers.keys);
      copy_rows(space.values(group), p.v, at, &barriers.keys);
    }
    for (; i < run.until; i = run.next(i + 1)) {
      const int row = run.row_at(i), head = run.head_at(shape, i), place = turn.place;
      const int bytes = min(kCatGroupQueries, shape.rows - row) * static_cast<int>(sizeof(CatQuery));
      wait(&barriers.read[place], turn.parity ^ 1);
      arrive_expecting(&barriers.stage[place], 2 * Space::Rows::kBytes + bytes);
      copy_rows(space.queries(place), p.q, {0, row, head, run.batch}, &barriers.stage[place]);
      copy_rows(space.gradients(place), p.dout, {0, row, head, run.batch}, &barriers.stage[place]);
      const int64_t at = (int64_t{run.batch} * shape.query_heads + head) * shape.rows + row;
      copy_bytes(space.described(place), p.call.queries + at, bytes, &barriers.stage[place]);
      turn.next(Space::kStages);
    }
  });
}

template <typename T, int Tile>
struct CatGroupHeaderPass {
  using Space = CatGroupHeaderSpace<T, Tile>;
  using Scores = Sums<kCatGroupQueries / 8>;

  const CatGroupHeaderGradients& p;
  const Space& space;
  typename Space::Barriers& barriers;
  const float scale;  // in units of log2
  const int group;    // index of the warpgroup
  Turn turn;
  Sums<Tile / 8> dk, dv;

  __device__ CatGroupHeaderPass(const CatGroupHeaderGradients& p, const Space& space)
      : p(p),
        space(space),
        barriers(space.barriers()),
        scale(p.call.shape.scale * kLog2E),
        group(warp_index() / 4) {}

  // S^T becomes P^T for the warp's headers from `header`. All: every query attends to all of them; otherwise
  // the first `queries` queries are masked by their records, and the rest are 0.
  template <bool All>
  __device__ void weights(Scores& s, const CatQuery* described, int header, int queries) const {
    each_pair<kCatGroupQueries / 8>([&](int n, int j) {
      const int at = 8 * n + lane_col() + j;
      const CatQuery query = described[at];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int h = header + lane_row() + 8 * i;
        const bool seen = All || (at < queries && query.first <= h && h < query.chunk);
        float& x = s.at[n][2 * i + j];
        x = seen ? exp2_fast(fmaf(scale, x, -query.lse)) : 0.f;
      }
    });
  }
  // P^T becomes P^T * (dP^T - delta). Masked elements stay 0, as delta may be undefined there.
  template <bool All>
  __device__ void gradients(Scores& s, const Scores& dp, const CatQuery* described) const {
    each_pair<kCatGroupQueries / 8>([&](int n, int j) {
      const float delta = described[8 * n + lane_col() + j].delta;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = s.at[n][2 * i + j];
        const float by = dp.at[n][2 * i + j] - delta;
        x = All || x != 0.f ? x * by : 0.f;
      }
    });
  }

  __device__ void meet(const CatHeaderRun& run, int row) {
    const int queries = min(kCatGroupQueries, p.call.shape.rows - row), header = run.header + 64 * group;
    wait(&barriers.stage[turn.place], turn.parity);
    const CatQuery* const described = space.described(turn.place);
    const CatQuery low = described[0], high = described[queries - 1];
    const int own = header + 16 * group_warp();
    if (header < max(low.chunk, high.chunk)) {
      const bool all = queries == kCatGroupQueries && low.first <= own && high.first <= own &&
                       own + 16 <= min(low.chunk, high.chunk);
      Scores s, dp;
      fence_products(s, dp, dk, dv);
      start_product_transposed<false>(s, space.keys(group), space.queries(turn.place));
      commit_products();
      start_product_transposed<false>(dp, space.values(group), space.gradients(turn.place));
      commit_products();
      wait_products<1>(s);
      if (all) {
        weights<true>(s, described, own, queries);
      } else {
        weights<false>(s, described, own, queries);
      }
      Operand<kCatGroupQueries / 16> left, other;
      round_to<T>(left, s);
      fence_products();
      start_product<T>(dv, left, space.gradients(turn.place));
      commit_products();
      wait_products<1>(dp);
      if (all) {
        gradients<true>(s, dp, described);
      } else {
        gradients<false>(s, dp, described);
      }
      round_to<T>(other, s);
      fence_products();
      start_product<T>(dk, other, space.queries(turn.place));
      commit_products();
      wait_products<0>(dk, dv);
      keep(left), keep(other);
    }
    arrive_once(&barriers.read[turn.place]);
    turn.next(Space::kStages);
  }

  __device__ void store(const CatHeaderRun& run) const {
    constexpr int kEight = 8 * Tile, kValues = 2 * 64 * Tile;
    float* const to =
        p.call.partials + run.place + (64 * group + 16 * group_warp() + lane_row()) * Tile + lane_col();
    each_pair<Tile / 8>([&](int n, int i) {
      float* const at = to + i * kEight + 8 * n;
      *reinterpret_cast<float2*>(at) = {dk.at[n][2 * i], dk.at[n][2 * i + 1]};
      *reinterpret_cast<float2*>(at + kValues) = {dv.at[n][2 * i], dv.at[n][2 * i + 1]};
    });
  }

  __device__ void run() {
    unsigned items = 0;
    for_items(p, [&](const CatHeaderRun& run) {
      fill(dk, 0.f), fill(dv, 0.f);
      int i = run.next(run.entry);
      if (i < run.until) {
        wait(&barriers.keys, items++ & 1);
#pragma unroll 1
        for (; i < run.until; i = run.next(i + 1)) meet(run, run.row_at(i));
        arrive_once(&barriers.keys_read);
      }
      store(run);
    });
  }
};

template <typename T, int Tile>
__global__ void __launch_bounds__(kCatGroupThreads, 1)
    cat_group_header_gradients_kernel(const __grid_constant__ CatGroupHeaderGradients p) {
  if constexpr (kCatGroups) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const CatGroupHeaderSpace<T, Tile> space{shared};
    run_groups<CatGroupRegisters<240, 24>>([&] { space.init(); }, [&] { load_headers(p, space); },
                                           [&] { CatGroupHeaderPass<T, Tile>(p, space).run(); });
  }
}

template <typename T, int Tile>
cudaError_t has_cat_group_headers(bool& has) {
  return has_warpgroups<cat_group_header_gradients_kernel<T, Tile>>(has);
}

template <typename T, int Tile>
cudaError_t launch_cat_group_header_gradients(const CatHeaderGradients& call, cudaStream_t stream) {
  constexpr auto kKernel = cat_group_header_gradients_kernel<T, Tile>;
  using Space = CatGroupHeaderSpace<T, Tile>;
  const CatShape& shape = call.shape;
  CatGroupHeaderGradients p{call, {}, {}, {}, {}, CatHeaderList(shape, Tile, group_header_tiles<Tile>())};
  if (p.list.runs == 0) return cudaSuccess;
  const auto headers = [&](Boxes& boxes, const In<4>& x, int width) {
    return describe_rows(boxes, x, shape, shape.chunks.tokens, shape.size, shape.heads, width, 64);
  };
  const auto rows = [&](Boxes& boxes, const In<4>& x, int width) {
    return describe_rows(boxes, x, shape, shape.rows, 1, shape.query_heads, width, kCatGroupQueries);
  };
  for (const cudaError_t error : {headers(p.k, call.k, shape.D), headers(p.v, call.v, shape.V),
                                  rows(p.q, call.q, shape.D), rows(p.dout, call.dout, shape.V)}) {
    if (error != cudaSuccess) return error;
  }
  return launch_kernel<kKernel>(p, p.list.runs, kCatGroupThreads, Space::kBytes, stream);
}

}  // namespace girih::kernels
