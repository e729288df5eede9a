// The state of the scan and of reverse in registers: 64 columns a warpgroup, 16 columns a warp, transposed,
// in fp32.
#pragma once

#include "delta_product/part.cuh"
#include "delta_product/stage.cuh"
#include "tile/places.h"
#include "tile/row_store.h"

namespace girih::kernels::delta_product {

// 16 columns of U^T or G^T of a warp, in two halves of 32 rows of the chunk. X would also allow products of
// 48 and 16 rows, but then the compiler inserts a wait after each product.
using Halves = Sums<4>[2];

template <typename T>
__device__ inline void round_to(Operand<kTilesDown>& a, const Halves& sums) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    round_to<T>(reinterpret_cast<Operand<2>(&)[2]>(a)[half], sums[half]);
  }
}

// sums *= factors; factors(row) returns the factors of the lane's two of the eight rows from `row` on.
template <class Factors>
__device__ inline void scale_chunk_rows(Halves& sums, const Factors& factors) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    scale_columns(sums[half], [&](int i) { return factors(32 * half + 8 * i); });
  }
}

// 16 columns of a state of a warp, transposed, fp32, in slabs of 64 rows of the state.
template <int D>
struct State {
  static constexpr int kSlabs = D / 64;
  Sums<8> slab[kSlabs];
};

template <int D>
__device__ inline void begin(State<D>& s) {
#pragma unroll
  for (int i = 0; i < State<D>::kSlabs; ++i) fence_products(s.slab[i]);
}
// Waits until at most `Pending` groups of products are in flight.
template <int Pending, int D>
__device__ inline void finish(State<D>& s) {
#pragma unroll
  for (int i = 0; i < State<D>::kSlabs; ++i) wait_products<Pending>(s.slab[i]);
}

// The rounded state as an operand: all of it, or at D = 256, where registers do not suffice, one slab at a
// time, which is rounded again for every product.
template <typename T, int D>
struct RoundedState {
  static constexpr int kSlabs = State<D>::kSlabs;
  static constexpr bool kWhole = D < 256;

  Operand<4> slab[kWhole ? kSlabs : 1];

  __device__ void take(const State<D>& s) {
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      if (kWhole) round_to<T>(slab[i], s.slab[i]);
    }
  }
  // Starts sums = S^T keys^T; at D = 256 the products are complete on return. Calls beside(i, slab i) for
  // every slab while products run.
  template <class Beside>
  __device__ void start_read(Sums<8>& sums, const State<D>& s, const BlockTile<T, D>& keys,
                             const Beside& beside) {
    fence_products();
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      Operand<4>& a = slab[kWhole ? i : 0];
      if (!kWhole) round_to<T>(a, s.slab[i]);
      if (!kWhole) fence_products();
      if (i == 0) start_product_transposed<T, false>(sums, a, keys, 0);
      if (i > 0) start_product_transposed<T, true>(sums, a, keys, 64 * i);
      if (!kWhole || i + 1 == kSlabs) commit_products();
      if (!kWhole) beside(i, a);
      if (!kWhole) wait_products<0>(sums);
    }
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      if (kWhole) beside(i, slab[kWhole ? i : 0]);
    }
  }
  __device__ void start_read(Sums<8>& sums, const State<D>& s, const BlockTile<T, D>& keys) {
    start_read(sums, s, keys, [](int, const Operand<4>&) {});
  }
  // Call after the wait for the products of start_read.
  __device__ void keep() const {
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      if (kWhole) kernels::keep(slab[i]);
    }
  }
  // Stores S^T to `slot`, whose row is a column of the state; warp `warp` has 16 rows.
  template <class Tile>
  __device__ void leave(const State<D>& s, const Tile& slot, int warp) {
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      Operand<4>& a = slab[kWhole ? i : 0];
      if (!kWhole) round_to<T>(a, s.slab[i]);
      store_blocks(slot, 16 * warp, 64 * i, a);
    }
  }
};

// Starts S^T += update K, or with Sign = -1 S^T -= update K.
template <typename T, int Sign = 1, int D>
__device__ inline void start_update(State<D>& s, const Operand<kTilesDown>& update,
                                    const BlockTile<T, D>& keys) {
  begin(s);
#pragma unroll
  for (int i = 0; i < State<D>::kSlabs; ++i) start_product<T, Sign>(s.slab[i], update, keys, 64 * i);
  commit_products();
}

template <int D>
__device__ inline void scale(State<D>& s, float by) {
#pragma unroll
  for (int i = 0; i < State<D>::kSlabs; ++i) scale_rows(s.slab[i], {by, by});
}

// 16 columns of the rows of a chunk, transposed: the result of load_block_transposed for each 16 rows.
using ColumnBlocks = uint32_t[kTilesDown][4];

template <typename T>
__device__ inline void widen(Sums<8>& sums, const ColumnBlocks& blocks) {
  each_sum<kTilesDown>([&](int j, int i) {
    const float2 pair = unpaired<T>(blocks[j][i]);
    sums.at[2 * j + i / 2][i % 2 * 2] = pair.x, sums.at[2 * j + i / 2][i % 2 * 2 + 1] = pair.y;
  });
}

// Stores the transpose of the warp's fragment to its 16 columns of `slot`.
template <int K, class Tile>
__device__ inline void leave_transposed(const Tile& slot, const Operand<K>& a, int warp) {
#pragma unroll
  for (int k = 0; k < K; ++k) store_block_transposed(slot, 16 * warp, 16 * k, a.at[k]);
}

// Calls f(element, reference) for the elements of the warp that exist. `first` is element (0, 0) of an array
// with the rows and columns of the state; `first_col` is the first column of the warp.
template <int D, class Place, class F>
__device__ inline void for_each_of_state(State<D>& s, const DeltaShape& shape, const Part& part,
                                         int first_col, Place* first, int64_t by_row, int64_t by_col,
                                         const F& f) {
  for_each_place<D / 8>([&](int n) -> float(&)[4] { return s.slab[n / 8].at[n % 8]; }, first_col + lane_row(),
                        part.transition ? shape.D : shape.V, lane_col(), shape.D, first, by_col, by_row, f);
}

template <int D>
__device__ inline void start_state(State<D>& s, const DeltaShape& shape, const Walk& walk, const Part& part,
                                   int first_col, const In<4>& initial) {
#pragma unroll
  for (int i = 0; i < State<D>::kSlabs; ++i) fill(s.slab[i], 0.f);
  if (part.transition) {
    const int col = first_col + lane_row();
    each_sum<D / 8>([&](int i, int j) {
      const int d = 8 * i + lane_col() + j % 2;
      s.slab[i / 8].at[i % 8][j] = d == col + j / 2 * 8 && d < shape.D ? 1.f : 0.f;
    });
  } else if (initial.data != nullptr && (part.opens || !walk.alone)) {
    const int64_t number = walk.alone ? part.piece.sequence.index : part.number;
    const float* from = static_cast<const float*>(initial.data) + offset_of(initial, number, part.head);
    for_each_of_state(s, shape, part, first_col, from, initial.stride[2], initial.stride[3],
                      [](float& x, const float& at) { x = at; });
  }
}

template <int D>
__device__ inline void end_state(State<D>& s, const DeltaShape& shape, const Walk& walk, const Part& part,
                                 int first_col, const Out<4>& final) {
  if (!part.last && !walk.alone) return;
  const int64_t number = walk.alone ? part.number : part.piece.sequence.index;
  float* to = static_cast<float*>(final.data) + offset_of(final, number, part.head);
  if (part.transition) to += shape.V * final.stride[3];
  for_each_of_state(s, shape, part, first_col, to, final.stride[2], final.stride[3],
                    [](float x, float& at) { at = x; });
}

// Stores the transition of the segment for reverse; a row of the array is a column of the transition.
template <int D>
__device__ inline void keep_transition(State<D>& s, const DeltaShape& shape, const Part& part, int first_col,
                                       float* transitions) {
  float* const to = transitions + (part.number * shape.heads + part.head) * shape.D * shape.D;
  for_each_of_state(s, shape, part, first_col, to, shape.D, 1, [](float x, float& at) { at = x; });
}

}  // namespace girih::kernels::delta_product
