// The state of the scan and of reverse in registers: 64 columns a warpgroup, 16 columns a warp, transposed,
// in fp32.
#pragma once

#include "delta_product/stage.cuh"
#include "delta_product/work.cuh"
#include "tile/row_store.h"
#include "tile/strided_elements.h"

namespace girih::kernels::delta_product {

// The warp's 16 rows of U^T or G^T, in two halves of 32 columns (rows of the chunk): the upper right 32 x 32
// of X is zero, and its products are skipped. Parts of 48 and 16 columns would skip more, but then the
// compiler inserts a wait after each product.
using ChunkAccumulator = Accumulator<4>[2];

template <typename T>
__device__ inline void round_to_a_fragment(AFragment<kChunkTiles>& a, const ChunkAccumulator& sums) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    round_to_a_fragment<T>(reinterpret_cast<AFragment<2>(&)[2]>(a)[half], sums[half]);
  }
}

// sums *= factors; factors(row) returns the factors of the lane's two of the eight rows from `row` on.
template <class Factors>
__device__ inline void scale_chunk_rows(ChunkAccumulator& sums, const Factors& factors) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    scale_columns(sums[half], [&](int i) { return factors(32 * half + 8 * i); });
  }
}

// The warp's 16 rows of the transposed state [V, D], fp32, in slabs of 64 columns of D.
template <int D>
struct State {
  static constexpr int kSlabs = D / 64;
  Accumulator<8> slab[kSlabs];
};

template <int D>
__device__ inline void fence_state(State<D>& s) {
#pragma unroll
  for (int i = 0; i < State<D>::kSlabs; ++i) wgmma_fence(s.slab[i]);
}
// Waits until at most `Pending` groups of products are in flight.
template <int Pending, int D>
__device__ inline void wait_state(State<D>& s) {
#pragma unroll
  for (int i = 0; i < State<D>::kSlabs; ++i) wgmma_wait<Pending>(s.slab[i]);
}

// The rounded S^T as A fragments. At D = 256 registers suffice for one slab only; each slab is rounded again
// for every product.
template <typename T, int D>
struct RoundedState {
  static constexpr int kSlabs = State<D>::kSlabs;
  static constexpr bool kHasAllSlabs = D < 256;

  AFragment<4> slab[kHasAllSlabs ? kSlabs : 1];

  __device__ void set(const State<D>& s) {
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      if (kHasAllSlabs) round_to_a_fragment<T>(slab[i], s.slab[i]);
    }
  }
  // Starts sums = S^T keys^T, one commit group. At D = 256 every slab is a group, and the products are
  // complete on return, because the next slab overwrites the fragment. Calls beside(i, slab i) for every slab
  // while a product runs.
  template <class Beside>
  __device__ void start_read(Accumulator<8>& sums, const State<D>& s, const BlockTile<T, D>& keys,
                             const Beside& beside) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      AFragment<4>& a = slab[kHasAllSlabs ? i : 0];
      if (!kHasAllSlabs) round_to_a_fragment<T>(a, s.slab[i]);
      if (!kHasAllSlabs) wgmma_fence();
      if (i == 0) wgmma_start_transposed<T, false>(sums, a, keys, 0);
      if (i > 0) wgmma_start_transposed<T, true>(sums, a, keys, 64 * i);
      if (!kHasAllSlabs || i + 1 == kSlabs) wgmma_commit();
      if (!kHasAllSlabs) beside(i, a);
      if (!kHasAllSlabs) wgmma_wait<0>(sums);
    }
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      if (kHasAllSlabs) beside(i, slab[kHasAllSlabs ? i : 0]);
    }
  }
  __device__ void start_read(Accumulator<8>& sums, const State<D>& s, const BlockTile<T, D>& keys) {
    start_read(sums, s, keys, [](int, const AFragment<4>&) {});
  }
  // Called after the wait for the products of start_read: keeps their operand in registers until then.
  __device__ void keep() const {
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      if (kHasAllSlabs) kernels::keep_registers(slab[i]);
    }
  }
  // Stores S^T to `tile`, whose row is a column of the state; warp `warp` has 16 rows.
  template <class Tile>
  __device__ void store(const State<D>& s, const Tile& tile, int warp) {
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      AFragment<4>& a = slab[kHasAllSlabs ? i : 0];
      if (!kHasAllSlabs) round_to_a_fragment<T>(a, s.slab[i]);
      store_blocks(tile, 16 * warp, 64 * i, a);
    }
  }
};

// Starts S^T += update K, or with Sign = -1 S^T -= update K, one commit group.
template <typename T, int Sign = 1, int D>
__device__ inline void start_update(State<D>& s, const AFragment<kChunkTiles>& update,
                                    const BlockTile<T, D>& keys) {
  fence_state(s);
#pragma unroll
  for (int i = 0; i < State<D>::kSlabs; ++i) wgmma_start<T, Sign>(s.slab[i], update, keys, 64 * i);
  wgmma_commit();
}

template <int D>
__device__ inline void scale(State<D>& s, float by) {
#pragma unroll
  for (int i = 0; i < State<D>::kSlabs; ++i) scale_rows(s.slab[i], {by, by});
}

// 16 columns of a tile [rows of the chunk, 64], transposed: block j is the A fragment of rows 16 j to 16 j +
// 15 that load_block_transposed loads.
using ColumnFragments = uint32_t[kChunkTiles][4];

template <typename T>
__device__ inline void convert_values(Accumulator<8>& sums, const ColumnFragments& blocks) {
  for_each_register<kChunkTiles>([&](int j, int i) {
    const float2 pair = unpack_pair<T>(blocks[j][i]);
    sums.at[2 * j + i / 2][i % 2 * 2] = pair.x, sums.at[2 * j + i / 2][i % 2 * 2 + 1] = pair.y;
  });
}

// Stores the transpose of the warp's fragment to its 16 columns of `tile`.
template <int K, class Tile>
__device__ inline void store_transposed(const Tile& tile, const AFragment<K>& a, int warp) {
#pragma unroll
  for (int k = 0; k < K; ++k) store_block_transposed(tile, 16 * warp, 16 * k, a.at[k]);
}

// Calls f(element, reference) for the elements of the warp that exist. `first` is element (0, 0) of an array
// with the rows and columns of the state; `first_col` is the first column of the warp.
template <int D, class Element, class F>
__device__ inline void for_each_state_element(State<D>& s, const DeltaShape& shape, const BlockWork& work,
                                              int first_col, Element* first, int64_t row_stride,
                                              int64_t col_stride, const F& f) {
  for_each_strided_element<D / 8>([&](int n) -> float(&)[4] { return s.slab[n / 8].at[n % 8]; },
                                  first_col + lane_row(), work.is_transition ? shape.D : shape.V, lane_col(),
                                  shape.D, first, col_stride, row_stride, f);
}

template <int D>
__device__ inline void load_initial_state(State<D>& s, const DeltaShape& shape, const ScanGrid& grid,
                                          const BlockWork& work, int first_col,
                                          const InputTensor<4>& initial) {
#pragma unroll
  for (int i = 0; i < State<D>::kSlabs; ++i) fill(s.slab[i], 0.f);
  if (work.is_transition) {
    const int col = first_col + lane_row();
    for_each_register<D / 8>([&](int i, int j) {
      const int d = 8 * i + lane_col() + j % 2;
      s.slab[i / 8].at[i % 8][j] = d == col + j / 2 * 8 && d < shape.D ? 1.f : 0.f;
    });
  } else if (initial.data != nullptr && (work.is_first || !grid.is_local)) {
    const int64_t index = grid.is_local ? work.range.sequence.index : work.range_index;
    const float* from = static_cast<const float*>(initial.data) + offset_of(initial, index, work.head);
    for_each_state_element(s, shape, work, first_col, from, initial.stride[2], initial.stride[3],
                           [](float& x, const float& stored) { x = stored; });
  }
}

template <int D>
__device__ inline void store_final_state(State<D>& s, const DeltaShape& shape, const ScanGrid& grid,
                                         const BlockWork& work, int first_col, const OutputTensor<4>& final) {
  if (!work.is_last && !grid.is_local) return;
  const int64_t index = grid.is_local ? work.range_index : work.range.sequence.index;
  float* to = static_cast<float*>(final.data) + offset_of(final, index, work.head);
  if (work.is_transition) to += shape.V * final.stride[3];
  for_each_state_element(s, shape, work, first_col, to, final.stride[2], final.stride[3],
                         [](float x, float& stored) { stored = x; });
}

// Stores the transition of the segment, row-major. Reverse reads it as its own transition, the transpose, in
// column-major order.
template <int D>
__device__ inline void save_transition(State<D>& s, const DeltaShape& shape, const BlockWork& work,
                                       int first_col, float* transitions) {
  float* const to = transitions + (work.range_index * shape.heads + work.head) * shape.D * shape.D;
  for_each_state_element(s, shape, work, first_col, to, shape.D, 1,
                         [](float x, float& stored) { stored = x; });
}

}  // namespace girih::kernels::delta_product
