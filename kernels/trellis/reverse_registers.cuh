// The gradient G of a memory [M, X] in the registers of the state warps of the reverse scan, and the warp's
// slots of a tile of tokens.
//
// A warp has 8 S slots, from `slot` on, of all columns. There are eight warps, while the scan has four warps
// of 16 slots for a width of 64: the reverse scan has twice the instructions, and more warps hide each
// other's latency.
#pragma once

#include "trellis/common.cuh"

namespace girih::kernels {

// Accumulators of G^T in fp32: at[k] has columns 16 k to 16 k + 15 by the warp's slots.
template <int K, int S>
struct TransposedGradient {
  Accumulator<S> at[K];
};
// G rounded, as the B fragment of products with G^T.
template <int K, int S>
struct GradientBFragment {
  uint32_t at[K][S][2];
};
// The warp's slots of 16 tokens, in the layout of a tile: at[n] and at[n + 1] have tokens 0 to 7 and 8 to 15
// of slots 4 n to 4 n + 7.
template <int S>
struct SlotFragment {
  uint32_t at[2 * S];
};

// ---- states in global memory -----------------------------------------------------------------------------

template <int K, int S>
__device__ inline void add_state(TransposedGradient<K, S>& G, const InputTensor<4>& state,
                                 const TrellisBlockCoord& coord, const TrellisShape& shape, int slot) {
#pragma unroll
  for (int k = 0; k < K; ++k) add_state<true>(G.at[k], state, coord, shape, 16 * k, slot);
}
template <int K, int S>
__device__ inline void store_state(const OutputTensor<4>& state, const TransposedGradient<K, S>& G,
                                   const TrellisBlockCoord& coord, const TrellisShape& shape, int slot) {
#pragma unroll
  for (int k = 0; k < K; ++k) store_state<true>(state, G.at[k], coord, shape, 16 * k, slot);
}

// ---- a memory's products ---------------------------------------------------------------------------------

template <int K, int S>
__device__ inline void clear(TransposedGradient<K, S>& G) {
#pragma unroll
  for (int k = 0; k < K; ++k) fill(G.at[k], 0.f);
}
template <int K, int S>
__device__ inline void scale(TransposedGradient<K, S>& G, float factor) {
#pragma unroll
  for (int k = 0; k < K; ++k) scale_rows(G.at[k], {factor, factor});
}

template <typename T, int K, int S>
__device__ inline void round_to_b_fragment(GradientBFragment<K, S>& right,
                                           const TransposedGradient<K, S>& G) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int n = 0; n < S; ++n) {
      const float(&block)[4] = G.at[k].at[n];
      right.at[k][n][0] = transpose_pairs(pack_pair<T>(block[0], block[1]));
      right.at[k][n][1] = transpose_pairs(pack_pair<T>(block[2], block[3]));
    }
  }
}
// Stores the warp's rows to a tile [M, X].
template <class Tile, int K, int S>
__device__ inline void store_gradient(const Tile& tile, int slot, const GradientBFragment<K, S>& right) {
#pragma unroll
  for (int n = 0; n < S; ++n) {
#pragma unroll
    for (int k = 0; k < K; k += 2) {
      const uint32_t four[4] = {right.at[k][n][0], right.at[k][n][1], right.at[k + 1][n][0],
                                right.at[k + 1][n][1]};
#if __CUDA_ARCH__ >= 900
      stmatrix(tile.address(slot + 8 * n, 16 * k, lane() & 7, (lane() >> 3) * 8), four);
#else
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        *reinterpret_cast<uint32_t*>(&lane_element(tile, slot + 8 * n, 16 * k + 8 * i)) = four[i];
      }
#endif
    }
  }
}

// z = x G^T for 16 tokens. Even and odd blocks have their own accumulators, which halves the chain of
// dependent products.
template <typename T, class Tile, int K, int S>
__device__ inline void multiply_transposed(Accumulator<S>& z, const Tile& x,
                                           const GradientBFragment<K, S>& right) {
  Accumulator<S> odd;
  fill(z, 0.f);
  fill(odd, 0.f);
#pragma unroll
  for (int k = 0; k < K; k += 2) {
    uint32_t left[2][4];
    load_block(left[0], x, 0, 16 * k);
    load_block(left[1], x, 0, 16 * k + 16);
#pragma unroll
    for (int n = 0; n < S; ++n) {
      mma<T>(z.at[n], left[0], right.at[k][n][0], right.at[k][n][1]);
      mma<T>(odd.at[n], left[1], right.at[k + 1][n][0], right.at[k + 1][n][1]);
    }
  }
  add(z, odd);
}

// Columns col to col + 15 of G += y^T x for 16 tokens: x is a tile, y the warp's slots as a B fragment.
template <typename T, class Tile, int S>
__device__ inline void add_outer_product_block(Accumulator<S>& G, const Tile& x, int col,
                                               const SlotFragment<S>& y) {
  uint32_t left[4];
  load_block_transposed(left, x, col, 0);
#pragma unroll
  for (int n = 0; n < S; ++n) mma<T>(G.at[n], left, y.at[2 * n], y.at[2 * n + 1]);
}
template <typename T, class Tile, int K, int S>
__device__ inline void add_outer_product(TransposedGradient<K, S>& G, const Tile& x,
                                         const SlotFragment<S>& y) {
#pragma unroll
  for (int k = 0; k < K; ++k) add_outer_product_block<T>(G.at[k], x, 16 * k, y);
}

// ---- slots of 16 tokens -----------------------------------------------------------------------------------

// Loads the warp's slots.
template <class Tile, int S>
__device__ inline void load_slots(SlotFragment<S>& x, const Tile& tile, int slot) {
  uint32_t four[4];
  ldmatrix(four, tile.address(0, slot, lane() & 15, S == 1 ? 0 : (lane() >> 4) * 8));
#pragma unroll
  for (int i = 0; i < 2 * S; ++i) x.at[i] = four[i];
}
// Loads the warp's slots as a B fragment.
template <class Tile, int S>
__device__ inline void load_slots_as_b(SlotFragment<S>& x, const Tile& tile, int slot) {
  uint32_t four[4];
  ldmatrix_trans(four, tile.address(0, slot, lane() & 15, S == 1 ? 0 : (lane() >> 4) * 8));
#pragma unroll
  for (int i = 0; i < 2 * S; ++i) x.at[i] = four[i];
}
template <class Tile, int S>
__device__ inline void store_slots(const Tile& tile, int slot, const SlotFragment<S>& x) {
#pragma unroll
  for (int i = 0; i < 2 * S; ++i) {
    *reinterpret_cast<uint32_t*>(&lane_element(tile, i % 2 * 8, slot + i / 2 * 8)) = x.at[i];
  }
}

template <typename T, int S>
__device__ inline void unpack(Accumulator<S>& x, const SlotFragment<S>& raw) {
#pragma unroll
  for (int i = 0; i < 2 * S; ++i) {
    const float2 pair = unpack_pair<T>(raw.at[i]);
    x.at[i / 2][2 * (i % 2)] = pair.x, x.at[i / 2][2 * (i % 2) + 1] = pair.y;
  }
}
template <typename T, int S>
__device__ inline void round_to_slots(SlotFragment<S>& x, const Accumulator<S>& sums) {
#pragma unroll
  for (int i = 0; i < 2 * S; ++i) {
    x.at[i] = pack_pair<T>(sums.at[i / 2][2 * (i % 2)], sums.at[i / 2][2 * (i % 2) + 1]);
  }
}
// Sets padding slots to zero.
template <int S>
__device__ inline void clear_padding(SlotFragment<S>& x, const uint32_t (&slot_masks)[S]) {
#pragma unroll
  for (int i = 0; i < 2 * S; ++i) x.at[i] &= slot_masks[i / 2];
}
// Converts to a B fragment.
template <int S>
__device__ inline SlotFragment<S> to_b_fragment(const SlotFragment<S>& x) {
  SlotFragment<S> right;
#pragma unroll
  for (int i = 0; i < 2 * S; ++i) right.at[i] = transpose_pairs(x.at[i]);
  return right;
}

}  // namespace girih::kernels
