// Products of fp32 matrices by a warp on the tensor cores, as three tf32 products (mma.sync m16n8k8). Each
// number is split into a tf32 high part h and a remainder l, x = h + l, and
//
//     (h + l)(h' + l') = h h' + h l' + l h' + l l'
//
// without l l', at most 2^-22 of the product, and without the last bit of l, 2^-23. The tensor cores truncate
// their sums. Each sum on the tensor cores therefore has sixteen products, small ones first, and the sums are
// added by fp32 additions. In SplitAccumulator this holds for h h' only: the sum of h l' + l h' stays on the
// tensor cores through all blocks, where the truncation is at most 2^-10 of that of h h'.
//
// The order of the sixteen inner columns is arbitrary, if it is the same in both factors. The order here lets
// a lane use neighbouring elements without an exchange between lanes.
#pragma once

#include "tile/matrix.h"

namespace girih::kernels {

// d += a b, where a is 16 x 8 and b is 8 x 8; the lower 13 bits of the factors are ignored.
__device__ inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  ptx::mma_m16n8k8_tf32(d, a, b0, b1);
}

// x = high + low: x rounded to 11 significant bits, and the remainder, which has at most 12. The sum of the
// parts is NaN for infinities and for numbers that round to infinity (within 2^-12 of the largest).
struct Tf32Parts {
  uint32_t high, low;

  __device__ explicit Tf32Parts(float x) {
    high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high));
  }
};

// Splits the elements of the lane for 8 N columns of a right factor.
template <int N>
__device__ inline void split_tf32(uint32_t (&high)[N][4], uint32_t (&low)[N][4], const float (&right)[N][4]) {
  for_each_register<N>([&](int n, int j) {
    const Tf32Parts parts(right[n][j]);
    high[n][j] = parts.high, low[n][j] = parts.low;
  });
}

// A 16 x 16 block of a left factor, split.
struct SplitAFragment {
  uint32_t high[2][4], low[2][4];  // [0]: the first eight columns, [1]: the other eight

  // Sets row lane_row() + 8 i. The lane has four columns, two of the first eight and two of the others.
  __device__ void set(int i, float x, float y, float z, float w) {
    const float all[4] = {x, y, z, w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Tf32Parts parts(all[j]);
      high[j / 2][j % 2 * 2 + i] = parts.high, low[j / 2][j % 2 * 2 + i] = parts.low;
    }
  }
  // Sets the block to columns 8n..8n+15 of sums. The columns of the lane are 8n + lane_col() + {0, 1, 8, 9}.
  template <int N>
  __device__ void take(const Accumulator<N>& sums, int n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      set(i, sums.at[n][2 * i], sums.at[n][2 * i + 1], sums.at[n + 1][2 * i], sums.at[n + 1][2 * i + 1]);
    }
  }
  // Loads rows row..row+15, columns col..col+15 of a tile. The columns of the lane are col + 2 lane_col() +
  // 0..3.
  template <class Tile>
  __device__ void load(const Tile& tile, int row, int col) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 x =
          *reinterpret_cast<const float4*>(&tile.at(row + 8 * i, col, lane_row(), 2 * lane_col()));
      set(i, x.x, x.y, x.z, x.w);
    }
  }
  // Flips the sign of all elements if `sign` is the sign bit, 0x80000000; no change for 0.
  __device__ void flip_sign(uint32_t sign) {
    for_each_register<2>([&](int i, int j) { high[i][j] ^= sign, low[i][j] ^= sign; });
  }

  // sums[n] += this block times right[n]. right[n] has four elements of column lane_row() of the right
  // factor, in the order of set(). The products of different n are interleaved, since each waits for the
  // previous product of the same sum.
  template <int N>
  __device__ void multiply(float (&sums)[N][4], const float (&right)[N][4]) const {
    uint32_t right_high[N][4], right_low[N][4];
    float d[N][4] = {};
    split_tf32(right_high, right_low, right);
    const auto add = [&](const uint32_t(&left)[2][4], const uint32_t(&right_part)[N][4]) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int n = 0; n < N; ++n) mma_tf32(d[n], left[i], right_part[n][2 * i], right_part[n][2 * i + 1]);
      }
    };
    add(low, right_high), add(high, right_low), add(high, right_high);
    for_each_register<N>([&](int n, int j) { sums[n][j] += d[n][j]; });
  }
  __device__ void multiply(float (&sums)[4], const float (&right)[4]) const {
    multiply(reinterpret_cast<float(&)[1][4]>(sums), reinterpret_cast<const float(&)[1][4]>(right));
  }
};

// N sums of a product over several blocks. The small products, of a part l, have accumulators of their own:
// this shortens the chains of dependent products.
template <int N>
struct SplitAccumulator {
  float high[N][4], low[N][4];

  __device__ void clear() {
    for_each_register<N>([&](int n, int j) { high[n][j] = low[n][j] = 0.f; });
  }
  // Sum From + n += left times right[n], or with `First` = left times right[n]. right[n] has four elements of
  // each lane, in the order of SplitAFragment::set().
  template <bool First, int From = 0, int M>
  __device__ void add(const SplitAFragment& left, const float (&right)[M][4]) {
    static_assert(From + M <= N);
    uint32_t right_high[M][4], right_low[M][4];
    float d[M][4] = {};
    split_tf32(right_high, right_low, right);
    if constexpr (First) {
      for_each_register<M>([&](int n, int j) { low[From + n][j] = 0.f; });
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int n = 0; n < M; ++n) {
        const uint32_t *const h = right_high[n] + 2 * i, *const l = right_low[n] + 2 * i;
        mma_tf32(low[From + n], left.low[i], h[0], h[1]);
        mma_tf32(d[n], left.high[i], h[0], h[1]);
        mma_tf32(low[From + n], left.high[i], l[0], l[1]);
      }
    }
    for_each_register<M>(
        [&](int n, int j) { high[From + n][j] = First ? d[n][j] : high[From + n][j] + d[n][j]; });
  }
  __device__ float at(int n, int j) const { return high[n][j] + low[n][j]; }
  template <int M>
  __device__ void put(float (&sums)[M][4], int from = 0) const {
    for_each_register<M>([&](int n, int j) { sums[n][j] = at(from + n, j); });
  }
};

}  // namespace girih::kernels
