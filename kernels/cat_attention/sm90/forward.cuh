// o and lse by warpgroups: two multiply, of 64 queries each, and a warp of a third brings boxes of what they
// read. A tile of queries meets the rows of its own chunks first, which lie in it: the triangle of a chunk is
// a product of a warp. Then blocks of headers, the last of which is masked, come through a ring:
//
//     S = Q K^T        m' = max(m, S)        P = e^{scale (S - m')}        O <- e^{scale (m - m')} O + P V
//
// S of a block is under way while O takes the block before it.
#pragma once

#include "cat_attention/sm90/space.cuh"
#include "cat_attention/softmax.h"

namespace girih::kernels {

struct CatGroupForward {
  CatForward call;
  Boxes q, k, v;             // 128 rows of a head
  Boxes header_k, header_v;  // 64 headers
};

template <typename T, int Tile>
struct CatGroupSpace {
  static constexpr int kStages = Tile == 64 ? 8 : 4;
  using Own = BlockTile<T, Tile, kCatGroupRows>;
  using Headers = BlockTile<T, Tile, kCatGroupKeys>;
  struct Barriers {
    uint64_t own, own_read;
    uint64_t keys[kStages], keys_read[kStages], values[kStages], values_read[kStages];
  };
  static constexpr int kBytes =
      3 * Own::kBytes + 2 * kStages * Headers::kBytes + static_cast<int>(sizeof(Barriers));
  static_assert(kBytes <= kCatGroupBytes);

  unsigned char* shared;

  __device__ Own own(int which) const { return {reinterpret_cast<T*>(shared + which * Own::kBytes)}; }
  __device__ Headers keys(int stage) const {
    return {reinterpret_cast<T*>(shared + 3 * Own::kBytes + 2 * stage * Headers::kBytes)};
  }
  __device__ Headers values(int stage) const { return {keys(stage).data + kCatGroupKeys * Tile}; }
  __device__ Barriers& barriers() const {
    return *reinterpret_cast<Barriers*>(shared + 3 * Own::kBytes + 2 * kStages * Headers::kBytes);
  }
  __device__ void init() const {
    Barriers& all = barriers();
    init_barrier(&all.own, 1), init_barrier(&all.own_read, once(kCatGroupWarps));
    for (int i = 0; i < kStages; ++i) {
      init_barrier(&all.keys[i], 1), init_barrier(&all.values[i], 1);
      init_barrier(&all.keys_read[i], once(kCatGroupWarps));
      init_barrier(&all.values_read[i], once(kCatGroupWarps));
    }
  }
};

// By one thread.
template <typename T, int Tile>
__device__ inline void load_forward(const CatGroupForward& p, const CatGroupSpace<T, Tile>& space) {
  using Space = CatGroupSpace<T, Tile>;
  const CatShape& shape = p.call.shape;
  auto& barriers = space.barriers();
  const unsigned items = CatGroupPlan::items(shape);
  // The tile's own, a tensor at a time: the next tile's come between blocks of headers.
  unsigned tiles = 0;
  const auto own = [&](unsigned item, int which) {
    const CatGroupPlan plan(shape, item);
    if (which == 0) {
      wait(&barriers.own_read, (tiles++ & 1) ^ 1);
      arrive_expecting(&barriers.own, 3 * Space::Own::kBytes);
    }
    const BoxPlace at{0, plan.row, which == 0 ? plan.head : plan.head / shape.group(), plan.batch};
    copy_rows(space.own(which), which == 0 ? p.q : which == 1 ? p.k : p.v, at, &barriers.own);
  };
  if (blockIdx.x < items) {
    for (int which = 0; which < 3; ++which) own(blockIdx.x, which);
  }
  Turn turn;
  for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
    const CatGroupPlan plan(shape, item);
    const unsigned next = item + gridDim.x;
    int which = next < items ? 0 : 3;
    for (int met = 0; met < plan.blocks; ++met) {
      // By then the stages are full, and the tile's own have been read.
      if (met >= Space::kStages && which < 3) own(next, which++);
      const BoxPlace at{0, plan.first_of(met), plan.head / shape.group(), plan.batch};
      wait(&barriers.keys_read[turn.place], turn.parity ^ 1);
      arrive_expecting(&barriers.keys[turn.place], Space::Headers::kBytes);
      copy_rows(space.keys(turn.place), p.header_k, at, &barriers.keys[turn.place]);
      wait(&barriers.values_read[turn.place], turn.parity ^ 1);
      arrive_expecting(&barriers.values[turn.place], Space::Headers::kBytes);
      copy_rows(space.values(turn.place), p.header_v, at, &barriers.values[turn.place]);
      turn.next(Space::kStages);
    }
    while (which < 3) own(next, which++);
  }
}

template <typename T, int Tile>
struct CatGroupPass {
  using Space = CatGroupSpace<T, Tile>;

  const CatGroupForward& p;
  const Space& space;
  typename Space::Barriers& barriers;
  const CatScale scale;
  int from;           // the warp's first row of the tile
  Turn keys, values;  // the next of each
  Operand<Tile / 16> q;
  Sums<Tile / 8> o;
  CatSoftmax softmax;
  CatRows rows;

  __device__ CatGroupPass(const CatGroupForward& p, const Space& space)
      : p(p), space(space), barriers(space.barriers()), scale(p.call.shape.scale), from(16 * warp_index()) {}

  // The rows of the warp's own chunks, sixteen by sixteen.
  __device__ void own(const CatGroupPlan& plan) {
    const CatShape& shape = p.call.shape;
    fill(o, 0.f);
    softmax = CatSoftmax();
    rows = rows_seen(shape, plan.batch, plan.row + from);
    const auto queries = space.own(0);
#pragma unroll
    for (int k = 0; k < Tile / 16; ++k) {
      load_block(q.at[k], queries, from, 16 * k);
      scale.apply_sign(q.at[k]);
    }
#pragma unroll 1
    for (int key = from & -max(shape.size, 16); key <= from; key += 16) {
      Sums<2> s;
      fill(s, 0.f);
      add_product_transposed<T>(s, q, space.own(1), key);
      for_pairs(rows, shape, plan.row + from, plan.row + key, [&](int n, int e, bool seen) {
        if (!seen) s.at[n][e] = -INFINITY;
      });
      scale_rows(o, softmax.add(s, scale));
      Operand<1> weights;
      round_to<T>(weights, s);
      add_product<T>(o, weights, space.own(2), key);
    }
    arrive_once(&barriers.own_read);
  }

  // O takes the block that is next.
  template <int K>
  __device__ void take_values(const Operand<K>& weights) {
    wait(&barriers.values[values.place], values.parity);
    fence_products(o);
    start_product(o, weights);
    commit_products();
    wait_products<0>(o);
    keep(weights);
    arrive_once(&barriers.values_read[values.place]);
  }

  // A block of headers of which some rows read some, 8 N of them.
  template <int N>
  __device__ void part(int first) {
    Sums<N> s;
    fence_products(s);
    start_product_transposed<T, false>(s, q, space.keys(keys.place));
    commit_products();
    wait_products<0>(s);
    arrive_once(&barriers.keys_read[keys.place]);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!rows.header(e >> 1, first + 8 * n + lane_col() + (e & 1))) s.at[n][e] = -INFINITY;
      }
    }
    scale_rows(o, softmax.add(s, scale));
    Operand<N / 2> weights;
    round_to<T>(weights, s);
    take_values(weights);
  }
  template <int K>
  __device__ void start_product(Sums<Tile / 8>& to, const Operand<K>& weights) const {
    kernels::start_product<T>(to, weights, space.values(values.place));
  }

  __device__ void parts(const CatGroupPlan& plan) {
    // The warpgroup's last row reads most. All four warps decide alike.
    const int last = min(plan.row + (from & -64) + 64, p.call.shape.rows) - 1,
              most = last / p.call.shape.size;
    for (int met = 0; met < plan.parts(); ++met) {
      const int first = plan.first_of(met), count = min(most, plan.header_end) - first;
      wait(&barriers.keys[keys.place], keys.parity);
      if (count > 32) {
        part<8>(first);
      } else if (count > 0) {
        part<4>(first);
      } else {
        arrive_once(&barriers.keys_read[keys.place]);
        wait(&barriers.values[values.place], values.parity);
        arrive_once(&barriers.values_read[values.place]);
      }
      keys.next(Space::kStages), values.next(Space::kStages);
    }
  }

  __device__ void wholes(const CatGroupPlan& plan) {
    if (plan.whole == 0) return;
    Sums<kCatGroupKeys / 8> s;
    Operand<kCatGroupKeys / 16> weights;
    wait(&barriers.keys[keys.place], keys.parity);
    fence_products(s);
    start_product_transposed<T, false>(s, q, space.keys(keys.place));
    commit_products();
    wait_products<0>(s);
    arrive_once(&barriers.keys_read[keys.place]);
    keys.next(Space::kStages);
    scale_rows(o, softmax.add(s, scale));
    round_to<T>(weights, s);
#pragma unroll 1
    for (int i = 1; i < plan.whole; ++i) {
      wait(&barriers.keys[keys.place], keys.parity);
      fence_products(s, o);
      start_product_transposed<T, false>(s, q, space.keys(keys.place));
      commit_products();
      wait(&barriers.values[values.place], values.parity);
      fence_products(o);
      start_product(o, weights);
      commit_products();
      wait_products<1>(s);
      arrive_once(&barriers.keys_read[keys.place]);
      keys.next(Space::kStages);
      const float2 by = softmax.add(s, scale);
      wait_products<0>(o);
      keep(weights);
      arrive_once(&barriers.values_read[values.place]);
      values.next(Space::kStages);
      scale_rows(o, by);
      round_to<T>(weights, s);
    }
    take_values(weights);
    values.next(Space::kStages);
  }

  // O / sum, whole packs of 16 bytes; lse.
  __device__ void store(const CatGroupPlan& plan) {
    const CatForward& call = p.call;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = plan.row + from + lane_row() + 8 * i;
      const bool inside = rows.first[i] != kCatOutside;
      const float sum = sum_over_row(softmax.sum[i]), by = inside ? 1.f / sum : 0.f;
      if (call.lse.data != nullptr && lane_col() == 0 && row < call.shape.rows) {
        static_cast<float*>(call.lse.data)[offset_of(call.lse, plan.batch, row, plan.head)] =
            inside ? softmax.log_sum(i, sum, scale) : INFINITY;
      }
      T* const to = row_of<T>(call.o, plan.batch, row, plan.head);
      store_row(to, o, i, by, call.shape.V, row < call.shape.rows);
    }
  }

  __device__ void run() {
    const unsigned items = CatGroupPlan::items(p.call.shape);
    unsigned tiles = 0;
    for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
      const CatGroupPlan plan(p.call.shape, item);
      wait(&barriers.own, tiles++ & 1);
      own(plan);
      parts(plan);
      wholes(plan);
      store(plan);
    }
  }
};

template <typename T, int Tile>
__global__ void __launch_bounds__(kCatGroupThreads, 1)
    cat_group_forward_kernel(const __grid_constant__ CatGroupForward p) {
  if constexpr (kCatGroups) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const CatGroupSpace<T, Tile> space{shared};
    run_groups<CatGroupRegisters<232, 40>>([&] { space.init(); }, [&] { load_forward(p, space); },
                                           [&] { CatGroupPass<T, Tile>(p, space).run(); });
  }
}

template <typename T, int Tile>
cudaError_t try_cat_group_forward(const CatForward& call, cudaStream_t stream, bool& taken) {
  using Space = CatGroupSpace<T, Tile>;
  const CatShape& shape = call.shape;
  taken = false;
  bool has = false;
  if (const cudaError_t error = has_warpgroups<cat_group_forward_kernel<T, Tile>>(has); error != cudaSuccess)
    return error;
  const int64_t items = query_tiles(shape);
  if (!has || !cat_fills_groups(shape) || items == 0) return cudaSuccess;
  CatGroupForward p{call, {}, {}, {}, {}, {}};
  for (const cudaError_t error : {describe_tile(p.q, call.q, shape, shape.query_heads, shape.D),
                                  describe_tile(p.k, call.k, shape, shape.heads, shape.D),
                                  describe_tile(p.v, call.v, shape, shape.heads, shape.V),
                                  describe_headers(p.header_k, call.k, shape, shape.D),
                                  describe_headers(p.header_v, call.v, shape, shape.V)}) {
    if (error != cudaSuccess) return error;
  }
  taken = true;
  return launch_groups<cat_group_forward_kernel<T, Tile>>(p, items, Space::kBytes, stream);
}

}  // namespace girih::kernels
