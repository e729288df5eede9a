// Operations of a warp of gradients on its 16 rows.
#pragma once

#include "delta_product/gradient_tiles.cuh"

namespace girih::kernels::delta_product {

template <int K>
__device__ inline void fill(AFragment<K>& x) {
  for_each_register<K>([&](int k, int i) { x.at[k][i] = 0; });
}

// Stores the warp's 16 rows to a tile, rounded.
template <typename T, int N, class Tile>
__device__ inline void store_warp_rows(const WarpRows<Tile>& rows, const Accumulator<N>& sums) {
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    AFragment<1> block;
    round_to_a_fragment<T>(block, sums, n);
    rows.store(8 * n, block.at[0]);
  }
}
// Stores the warp's 16 rows to global memory in full lines. The rows pass through the warp's rows of a tile
// that no other warp reads any more. `to` points to the first row; `count` rows exist.
template <typename T, int N, class Tile>
__device__ inline void store_rows_by(const WarpRows<Tile>& rows, const Accumulator<N>& sums, T* to,
                                     int64_t stride, int count, int cols) {
  if (count <= 0) return;
  store_warp_rows<T>(rows, sums);
  __syncwarp();
  const int row = lane() / 8, col = lane() % 8 * 8;
  T* at = to + row * stride + col;
#pragma unroll
  for (int i = 0; i < kTileRows; i += 4, at += 4 * stride) {
#pragma unroll
    for (int n = 0; n < N; n += 8) {
      if (row + i < count && col + 8 * n < cols)
        *reinterpret_cast<uint4*>(at + 8 * n) = rows.pack(i / 4, 8 * n);
    }
  }
}
// Stores fp32 rows from `row` on, up to row `rows`.
template <int N>
__device__ inline void store_floats(const Accumulator<N>& sums, float* to, int64_t stride, int row, int rows,
                                    int cols) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = row + lane_row() + 8 * i, col = 8 * n + lane_col();
      if (r >= rows || col >= cols) continue;
      *reinterpret_cast<float2*>(to + r * stride + col) = {sums.at[n][2 * i], sums.at[n][2 * i + 1]};
    }
  }
}
// Stores the values of the lane's rows `thread_row` and `thread_row` + 8.
__device__ inline void store_warp_rows(float* to, int thread_row, float2 x) {
  if (lane_col() == 0) to[thread_row] = x.x, to[thread_row + 8] = x.y;
}
__device__ inline float2 sum_over_rows(float2 x) { return {sum_over_row(x.x), sum_over_row(x.y)}; }

// sums += x, row lane_row() multiplied by by.x, row lane_row() + 8 by by.y.
template <int N>
__device__ inline void add_scaled(Accumulator<N>& sums, const Accumulator<N>& x, float2 by) {
  for_each_register<N>(
      [&](int n, int i) { sums.at[n][i] = fmaf(x.at[n][i], i < 2 ? by.x : by.y, sums.at[n][i]); });
}

// Calls f(n, i, two elements) for 8 N columns of the rows of a tile; the elements correspond to sums.at[n][2
// i] and the next.
template <int N, typename T, class Tile, class F>
__device__ inline void for_each_pair(const WarpRows<Tile>& rows, const F& f) {
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    uint32_t block[4];
    rows.load(block, 8 * n);
#pragma unroll
    for (int m = 0; m < 4; ++m) f(n + m / 2, m % 2, unpack_pair<T>(block[m]));
  }
}

// Dot product of x and the rows of a tile, for the lane's two rows.
template <typename T, int N, class Tile>
__device__ inline float2 dot_rows(const Accumulator<N>& x, const WarpRows<Tile>& rows) {
  float2 sum = {0.f, 0.f};
  for_each_pair<N, T>(rows, [&](int n, int i, float2 y) {
    float& row_sum = i == 0 ? sum.x : sum.y;
    row_sum = fmaf(y.x, x.at[n][2 * i], fmaf(y.y, x.at[n][2 * i + 1], row_sum));
  });
  return sum_over_rows(sum);
}
// Squared length of `Cols` columns of the rows of a tile.
template <int Cols, typename T, class Tile>
__device__ inline float2 square_rows(const WarpRows<Tile>& rows) {
  float2 sum = {0.f, 0.f};
  for_each_pair<Cols / 8, T>(rows, [&](int, int i, float2 y) {
    float& row_sum = i == 0 ? sum.x : sum.y;
    row_sum = fmaf(y.x, y.x, fmaf(y.y, y.y, row_sum));
  });
  return sum_over_rows(sum);
}

// x -= (row . x) row / |row|^2, which makes x orthogonal to the row. `projection`: row . x.
template <typename T, int N, class Tile>
__device__ inline void subtract_projection(Accumulator<N>& x, const WarpRows<Tile>& rows, float2 projection,
                                           float2 inverse_length) {
  const float2 of = {-projection.x * inverse_length.x * inverse_length.x,
                     -projection.y * inverse_length.y * inverse_length.y};
  for_each_pair<N, T>(rows, [&](int n, int i, float2 y) {
    const float by = i == 0 ? of.x : of.y;
    x.at[n][2 * i] = fmaf(by, y.x, x.at[n][2 * i]);
    x.at[n][2 * i + 1] = fmaf(by, y.y, x.at[n][2 * i + 1]);
  });
}

// Sums over warpgroups, for the lane's two rows.
template <int Groups>
__device__ inline float2 sum_groups(const float (&parts)[Groups][kDeltaChunkRows], int thread_row) {
  float2 sum = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < Groups; ++i) sum.x += parts[i][thread_row], sum.y += parts[i][thread_row + 8];
  return sum;
}
// 1 / sqrt(square + 1e-6); 1000 for a row of zeros.
__device__ inline float2 inverse_length(float2 square) {
  return {rsqrtf(square.x + 1e-6f), rsqrtf(square.y + 1e-6f)};
}

// Sums each of 8 elements over the 8 lanes with the same columns; a lane gets element lane_row().
__device__ inline float sums_over_col(float (&x)[8]) {
#pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    const bool upper = lane_row() & step;
#pragma unroll
    for (int i = 0; i < step; ++i) {
      const float got = __shfl_xor_sync(~0u, upper ? x[i] : x[i + step], 4 * step);
      x[i] = (upper ? x[i + step] : x[i]) + got;
    }
  }
  return x[0];
}

// sums += x y^T
template <typename T, int N, class Tile>
__device__ inline void add_scores(const Origin& origin, Accumulator<N>& sums, const Tile& x, const Tile& y,
                                  int row = 0) {
  wgmma_fence(sums);
  wgmma_start_transposed(origin, sums, x, y, row);
  wgmma_commit();
  wgmma_wait<0>(sums);
}

// Starts sums += x S^T of a slab, or with Sign = -1 sums -= x S^T; columns of D from `col` on.
template <int D, int Sign = 1, typename T>
__device__ inline void start_states(const Origin& origin, Accumulator<GradientSizes<D>::kCols / 8>& sums,
                                    const BlockTile<T, GradientSizes<D>::kSlab>& x, unsigned char* states,
                                    int col) {
  wgmma_fence(sums);
#pragma unroll
  for (int v = 0; v < GradientSizes<D>::kSlab; v += 64) {
    wgmma_start<T, Sign>(origin, sums, x, v,
                         BlockTile<T, D>{reinterpret_cast<T*>(states + v / 64 * BlockTile<T, D>::kBytes)},
                         col);
  }
  wgmma_commit();
}
template <int D, typename T>
__device__ inline void add_states(const Origin& origin, Accumulator<GradientSizes<D>::kCols / 8>& sums,
                                  const BlockTile<T, GradientSizes<D>::kSlab>& x, unsigned char* states,
                                  int col) {
  start_states<D>(origin, sums, x, states, col);
  wgmma_wait<0>(sums);
}

// Stores a thread's accumulator to shared memory and loads it again; packs of 16 bytes, `Threads` packs
// apart.
template <int Threads, int N>
__device__ inline void spill_accumulator(float4* to, const Accumulator<N>& sums) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float(&x)[4] = sums.at[n];
    to[n * Threads] = {x[0], x[1], x[2], x[3]};
  }
}
template <int Threads, int N>
__device__ inline void reload_accumulator(Accumulator<N>& sums, const float4* from) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float4 x = from[n * Threads];
    sums.at[n][0] = x.x, sums.at[n][1] = x.y, sums.at[n][2] = x.z, sums.at[n][3] = x.w;
  }
}

}  // namespace girih::kernels::delta_product
