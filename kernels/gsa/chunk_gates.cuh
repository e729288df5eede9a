// The gates of one chunk, for each slot, and the weights s. In the kernels that are parallel over chunks a
// block has a chunk, and a warp has 16 of its rows.
//
// L_i is the sum of g through row i, X_i = L_C - L_i is the sum of g after row i. If the sum of the gates of
// the chunk is small, the chunk is factored: e^{L_i - L_j} = r_i e^{X_j} with r_i = e^{-X_i}. Then s~ = s e^X
// serves all rows and needs one exponential for each token and slot. Otherwise r overflows and the chunk is
// not factored ("without factors" in the comments of gsa and gla): a row uses the earlier sub-chunks of 16
// rows one by one, each relative to the end of that sub-chunk, and the rows of its own sub-chunk one by one.
// No exponent is above 0 for gates <= 0.
#pragma once

#include <type_traits>

#include "gsa/gsa.h"
#include "tile/gates.h"
#include "tile/pack.h"
#include "tile/shared.h"

namespace girih::kernels {

constexpr int kSubchunks = kChunk / kSubchunk;

// A chunk is factored if -log2 e^{L_C} is below this limit. bf16 has the range of fp32: r stays below 2^80,
// and products with logits and gradients stay below 2^127. The range of fp16 is 2^-14 to 2^16; with the gates
// of a layer (log sigmoids divided by 8 or 16) e^{L_C} is about 2^-9 or 2^-4.
template <typename T>
constexpr float max_factored_log2 = std::is_same_v<T, __half> ? 13.f : 80.f;
// In fp16 both factors have to fit in the range: s~ is multiplied by 2^6 and r by 2^-6. Products of r with
// e^{L_C}, or of s~ with a factor other than r, are corrected by 2^6 or 2^-6. So s, p, dz and q have full
// precision from 2^-7 and stay finite up to 2^9.
template <typename T>
constexpr int factor_shift = std::is_same_v<T, __half> ? 6 : 0;

// Adds factor_shift to log2 of s~ / s, or to log2 of e^{L_C} where it multiplies r.
template <typename T>
__device__ inline float add_shift(float log2) {
  if constexpr (factor_shift<T> == 0) {
    return log2;
  } else {
    return log2 + factor_shift<T>;
  }
}
// x *= 2^factor_shift, or with `Inverse` x *= 2^-factor_shift.
template <typename T, bool Inverse = false, int N>
__device__ inline void apply_shift(Accumulator<N>& x) {
  if constexpr (factor_shift<T> != 0) {
    constexpr float kPower = 1 << factor_shift<T>;
    constexpr float kFactor = Inverse ? 1.f / kPower : kPower;
    for_each_register<N>([&](int n, int i) { x.at[n][i] *= kFactor; });
  }
}

// The rows of one chunk and head of an array [B, T, heads, width].
template <typename T, template <int> class Array>
__device__ inline auto chunk_rows(const Array<4>& array, const TokenRange& range, int head) {
  return at<T>(array, range.sequence.batch, range.start, head);
}
// Called by all threads of the block. Starts the copy of these rows, columns `col` to `width`.
template <int Threads, class Tile>
__device__ inline void load_rows(const Tile& tile, const InputTensor<4>& from, const TokenRange& range,
                                 int head, int col, int width) {
  load_async<Threads>(tile, chunk_rows<typename Tile::Element>(from, range, head) + col, from.stride[1],
                      range.length, width - col, threadIdx.x);
}

// 1 - e^g of two neighbouring columns. Rows and columns outside of the array are clamped.
template <typename T>
__device__ inline uint32_t complement_pair(const InputTensor<4>& g, const TokenRange& range, int head,
                                           int slots, int row, int col) {
  const float* gates = chunk_rows<float>(g, range, head) + min(row, range.length - 1) * g.stride[1];
  const float2 pair = *reinterpret_cast<const float2*>(gates + min(col, slots - 2));
  return pack_pair<T>(one_minus_exp(pair.x), one_minus_exp(pair.y));
}

// Called by all threads of the block. Starts the copy of s, or writes 1 - e^g if s is absent.
template <int Threads, typename T, int M>
__device__ inline void load_weights(const SharedTile<T, kChunk, M>& s, const InputTensor<4>& from,
                                    const InputTensor<4>& g, const TokenRange& range, int head, int slots) {
  if (from.data != nullptr) {
    load_rows<Threads>(s, from, range, head, 0, slots);
    return;
  }
  const float* gates = chunk_rows<float>(g, range, head);
  for (int i = threadIdx.x; i < kChunk * M / 4; i += Threads) {
    const int row = i / (M / 4), col = i % (M / 4) * 4;
    Pack<4> pack = zeros<4>();
    if (row < range.length && col < slots) pack = load<4>(gates + row * g.stride[1] + col);
    *reinterpret_cast<uint2*>(&s.at(row, col)) = {
        pack_pair<T>(one_minus_exp(pack.at[0]), one_minus_exp(pack.at[1])),
        pack_pair<T>(one_minus_exp(pack.at[2]), one_minus_exp(pack.at[3]))};
  }
}

// Two neighbouring elements of a tile as floats.
template <typename T, class Tile>
__device__ inline float2 load_pair(const Tile& tile, int row, int col) {
  return unpack_pair<T>(*reinterpret_cast<const uint32_t*>(&tile.at(row, col)));
}
// The pair at (row + lane_row(), col + lane_col()).
template <typename T, class Tile>
__device__ inline float2 load_lane_pair(const Tile& tile, int row, int col) {
  return unpack_pair<T>(*reinterpret_cast<const uint32_t*>(&lane_element(tile, row, col)));
}
template <typename T, class Tile>
__device__ inline void store_lane_pair(const Tile& tile, int row, int col, float left, float right) {
  *reinterpret_cast<uint32_t*>(&lane_element(tile, row, col)) = pack_pair<T>(left, right);
}

// sums = factor * 16 rows of a tile, from row `first`.
template <typename T, int N, class Tile>
__device__ inline void load_scaled_rows(Accumulator<N>& sums, const Tile& tile, int first,
                                        float factor = 1.f) {
  for_each_register_pair<N>([&](int n, int i) {
    const float2 x = load_lane_pair<T>(tile, first + 8 * i, 8 * n);
    sums.at[n][2 * i] = factor * x.x, sums.at[n][2 * i + 1] = factor * x.y;
  });
}

// tile *= factors, for 16 rows from row `first`.
template <typename T, int N, class Tile>
__device__ inline void scale_rows(const Tile& tile, int first, const Accumulator<N>& factors) {
  for_each_register_pair<N>([&](int n, int i) {
    const float2 x = load_lane_pair<T>(tile, first + 8 * i, 8 * n);
    store_lane_pair<T>(tile, first + 8 * i, 8 * n, x.x * factors.at[n][2 * i],
                       x.y * factors.at[n][2 * i + 1]);
  });
}

// If the chunk can be factored (for all columns of the block): replaces g by r = e^{-X}, sets decay [M] to
// e^{L_C}, calls scale_s(row, col, decay_to_end) with decay_to_end = e^{X} of (row + lane_row(), col +
// lane_col()) and of the next column, for all rows and columns, and returns true. Otherwise writes nothing
// and returns false. In fp16 e^X and e^{L_C} also contain 2^factor_shift, and r contains 2^-factor_shift.
//
// Called by all threads of the block after g is loaded. Each set of `Warps` warps has `Columns` columns of g;
// a warp has a part of these. The results are visible after the next barrier.
template <typename T, int Warps, int Columns, int M, class ScaleS>
__device__ inline bool factor_gates(const SharedTile<float, kChunk, M>& g, float* decay,
                                    const ScaleS& scale_s) {
  constexpr int kTiles = Columns / 8 / Warps;  // tiles of 8 columns of a warp
  const int first_col = static_cast<int>(threadIdx.x) / 32 % Warps * kTiles * 8;
  uint32_t suffix_ones[4], total_ones[4];
  fill_ones(suffix_ones, RowRange::later);
  fill_ones(total_ones, RowRange::all);
  Accumulator<kSubchunks> suffix_sum[kTiles];  // the last sub-chunk first
  Accumulator<1> total[kTiles];
  bool is_small = true;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    fill(total[t], 0.f);
#pragma unroll
    for (int b = 0; b < kSubchunks; ++b) {
      GateParts<1> gates;
      load(gates, g, kSubchunk * (kSubchunks - 1 - b), first_col + 8 * t);
      Accumulator<1> sums = total[t];
      add_gates(sums, suffix_ones, gates);
      add_gates(total[t], total_ones, gates);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = suffix_sum[t].at[b][i] = kLog2E * sums.at[0][i];
        // With gates above 0 a partial sum may exceed the whole sum, and fp16 has no range for it.
        if (factor_shift<T> != 0) is_small = is_small && x > -max_factored_log2<T> && x <= 1.f;
      }
    }
    is_small = is_small && kLog2E * fminf(total[t].at[0][0], total[t].at[0][1]) > -max_factored_log2<T>;
  }
  if (!__syncthreads_and(is_small)) return false;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int col = first_col + 8 * t;
    for_each_register_pair<kSubchunks>([&](int b, int i) {
      const int row = kSubchunk * (kSubchunks - 1 - b) + 8 * i;
      const float left = add_shift<T>(suffix_sum[t].at[b][2 * i]),
                  right = add_shift<T>(suffix_sum[t].at[b][2 * i + 1]);
      scale_s(row, col, float2{exp2_fast(left), exp2_fast(right)});
      *reinterpret_cast<float2*>(&lane_element(g, row, col)) = {exp2_fast(-left), exp2_fast(-right)};
    });
    if (lane_row() == 0) {
      *reinterpret_cast<float2*>(decay + col + lane_col()) = {
          exp2_fast(add_shift<T>(kLog2E * total[t].at[0][0])),
          exp2_fast(add_shift<T>(kLog2E * total[t].at[0][1]))};
    }
  }
  return true;
}

// The gates of a chunk in shared memory as a warp reads them, for `Columns` of M slots. All pointers start at
// the first of these columns.
template <int M, int Columns = M>
struct Gates {
  static constexpr int N = Columns / 8;
  // With factors: e^{-X}. Without, after split_into_subchunks(): sums of log2 e^g through each row, from the
  // start of its sub-chunk.
  SharedTile<float, kChunk, M> g;
  float* decay;   // [M], with factors: e^{L_C}
  float* totals;  // [4, M], without factors: sums of log2 e^g over each sub-chunk
  int warp;       // index in the warpgroup, and of the warp's sub-chunk

  __device__ int row() const { return kWarpRows * warp; }
  // The factors e^{-X} of row row() + lane_row() + 8 i, columns 8n + lane_col() and the next.
  __device__ float2 factor(int i, int n) const {
    return *reinterpret_cast<const float2*>(&lane_element(g, row() + 8 * i, 8 * n));
  }
  __device__ float2 chunk_decay(int n) const {
    return *reinterpret_cast<const float2*>(decay + 8 * n + lane_col());
  }
  // sums *= e^{-X}
  __device__ void multiply(Accumulator<N>& sums) const {
    for_each_register_pair<N>([&](int n, int i) {
      const float2 r = factor(i, n);
      sums.at[n][2 * i] *= r.x, sums.at[n][2 * i + 1] *= r.y;
    });
  }

  // The functions below are for chunks without factors.

  // Replaces g by its running sums within a sub-chunk and writes totals. Called by the four warps of a
  // warpgroup, each for its rows; barriers of the block before and after it are the caller's.
  __device__ void split_into_subchunks() const {
    uint32_t prefix_ones[4];
    fill_ones(prefix_ones, RowRange::up_to);
    Accumulator<N> prefix_sum;
    fill(prefix_sum, 0.f);
    add_gates(prefix_sum, prefix_ones, g, row());
    __syncwarp();
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int col = 8 * n + lane_col();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<float2*>(&g.at(row() + lane_row() + 8 * i, col)) = {
            kLog2E * prefix_sum.at[n][2 * i], kLog2E * prefix_sum.at[n][2 * i + 1]};
      }
      if (lane_row() == 7) {
        *reinterpret_cast<float2*>(totals + warp * M + col) = {kLog2E * prefix_sum.at[n][2],
                                                               kLog2E * prefix_sum.at[n][3]};
      }
    }
    __syncwarp();
  }

  // e^{sum of g over sub-chunk b}, columns 8n + lane_col() and the next.
  __device__ float2 subchunk_decay(int b, int n) const {
    const float2 sum = *reinterpret_cast<const float2*>(totals + b * M + 8 * n + lane_col());
    return {exp2_fast(sum.x), exp2_fast(sum.y)};
  }
  // The running sums of row j of the warp's sub-chunk.
  __device__ float2 prefix_sum(int j, int n) const {
    return *reinterpret_cast<const float2*>(&g.at(row() + j, 8 * n + lane_col()));
  }
  __device__ void prefix_sum(Accumulator<N>& to) const {
    for_each_register_pair<N>([&](int n, int i) {
      const float2 sum = prefix_sum(lane_row() + 8 * i, n);
      to.at[n][2 * i] = sum.x, to.at[n][2 * i + 1] = sum.y;
    });
  }
  // e^{sum of g through each row} and e^{sum of g after each row}, within the sub-chunk.
  __device__ void decay_from_subchunk_start(Accumulator<N>& to) const {
    prefix_sum(to);
    for_each_register<N>([&](int n, int i) { to.at[n][i] = exp2_fast(to.at[n][i]); });
  }
  __device__ void decay_to_subchunk_end(Accumulator<N>& to) const {
    prefix_sum(to);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float2 all = prefix_sum(kSubchunk - 1, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) to.at[n][i] = exp2_fast((i & 1 ? all.y : all.x) - to.at[n][i]);
    }
  }
};

// e^{l_i - l_j} of rows i and j of a sub-chunk for one slot, with l the prefix sums; 0 if j is the later row.
// The order of the rows is an argument: it does not follow from the sign of l_i - l_j, because gates may be
// above 0 or NaN.
__device__ inline float decay_between(float later, float earlier, bool is_ordered) {
  return exp2_fast(is_ordered ? later - earlier : -INFINITY);
}

}  // namespace girih::kernels
