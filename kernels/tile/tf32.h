// A warp's products of fp32 numbers on the tensor cores (mma.sync m16n8k8 of tf32). A number goes there in
// two parts, x = h + l, and of (h + l)(h' + l') = h h' + h l' + l h' + l l' the last is left out, 2^-22 of
// the product at most, and the last bit of l, 2^-23. The tensor cores cut low bits off their sums: so these
// have sixteen products, small ones first, and are added up by fp32 additions. Of SplitSums that is so of
// h h' alone: the sums of h l' + l h' run on inside the tensor cores through all blocks, where what is cut
// off is 2^-10 at most of what it would be of h h'.
//
// Which sixteen columns of the factors are first, second, ... is as good in any order, if it is the same in
// both: a lane has neighbours in the right place, and nothing is exchanged.
#pragma once

#include "tile/matrix.h"

namespace girih::kernels {

// d += a b, a 16 x 8, b 8 x 8; of a number the lower 13 bits count for nothing.
__device__ inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// x = high + low, rounded to 11 bits and what that leaves, which has 12 at most. Numbers that round to an
// infinity, within 2^-12 of the largest, and infinities themselves have parts whose sum is NaN.
struct Parts {
  uint32_t high, low;

  __device__ explicit Parts(float x) {
    high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high));
  }
};

// The lane's numbers of N times eight columns of a right factor, in parts.
template <int N>
__device__ inline void split(uint32_t (&high)[N][4], uint32_t (&low)[N][4], const float (&right)[N][4]) {
  each_sum<N>([&](int n, int j) {
    const Parts parts(right[n][j]);
    high[n][j] = parts.high, low[n][j] = parts.low;
  });
}

// 16 x 16 of a left factor.
struct SplitBlock {
  uint32_t high[2][4], low[2][4];  // of eight columns and eight more

  // Row lane_row() + 8 i; a lane's four columns are two of the first eight and two of the others.
  __device__ void set(int i, float x, float y, float z, float w) {
    const float all[4] = {x, y, z, w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Parts parts(all[j]);
      high[j / 2][j % 2 * 2 + i] = parts.high, low[j / 2][j % 2 * 2 + i] = parts.low;
    }
  }
  // Columns 8n..8n+15 of sums: a lane's four are 8n + lane_col(), the next, and those 8 further.
  template <int N>
  __device__ void take(const Sums<N>& sums, int n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      set(i, sums.at[n][2 * i], sums.at[n][2 * i + 1], sums.at[n + 1][2 * i], sums.at[n + 1][2 * i + 1]);
    }
  }
  // The tile's sixteen rows from `row`, columns col..col+15: a lane's four are col + 2 lane_col() and the
  // next.
  template <class Tile>
  __device__ void load(const Tile& tile, int row, int col) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 x =
          *reinterpret_cast<const float4*>(&tile.at(row + 8 * i, col, lane_row(), 2 * lane_col()));
      set(i, x.x, x.y, x.z, x.w);
    }
  }
  // sign: a sign bit, or nothing.
  __device__ void flip(uint32_t sign) {
    each_sum<2>([&](int i, int j) { high[i][j] ^= sign, low[i][j] ^= sign; });
  }

  // sums[n] += this times right[n], four numbers of each lane in the order of set(): of column lane_row() of
  // the right factor. A product that adds to another waits for it: those of all n take turns.
  template <int N>
  __device__ void multiply(float (&sums)[N][4], const float (&right)[N][4]) const {
    uint32_t of_high[N][4], of_low[N][4];
    float d[N][4] = {};
    split(of_high, of_low, right);
    const auto add = [&](const uint32_t(&left)[2][4], const uint32_t(&of)[N][4]) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int n = 0; n < N; ++n) mma_tf32(d[n], left[i], of[n][2 * i], of[n][2 * i + 1]);
      }
    };
    add(low, of_high), add(high, of_low), add(high, of_high);
    each_sum<N>([&](int n, int j) { sums[n][j] += d[n][j]; });
  }
  __device__ void multiply(float (&sums)[4], const float (&right)[4]) const {
    multiply(reinterpret_cast<float(&)[1][4]>(sums), reinterpret_cast<const float(&)[1][4]>(right));
  }
};

// N sums of a product whose blocks follow each other. The products of a part l, which are small, are added up
// by the tensor cores beside the others: so no chain of them is long where a warp waits for its end.
template <int N>
struct SplitSums {
  float high[N][4], low[N][4];

  __device__ void clear() {
    each_sum<N>([&](int n, int j) { high[n][j] = low[n][j] = 0.f; });
  }
  // From the `From`-th on, += left times right[n], four numbers of each lane in the order of
  // SplitBlock::set(). First: = that.
  template <bool First, int From = 0, int M>
  __device__ void add(const SplitBlock& left, const float (&right)[M][4]) {
    static_assert(From + M <= N);
    uint32_t of_high[M][4], of_low[M][4];
    float d[M][4] = {};
    split(of_high, of_low, right);
    if constexpr (First) {
      each_sum<M>([&](int n, int j) { low[From + n][j] = 0.f; });
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int n = 0; n < M; ++n) {
        const uint32_t *const h = of_high[n] + 2 * i, *const l = of_low[n] + 2 * i;
        mma_tf32(low[From + n], left.low[i], h[0], h[1]);
        mma_tf32(d[n], left.high[i], h[0], h[1]);
        mma_tf32(low[From + n], left.high[i], l[0], l[1]);
      }
    }
    each_sum<M>([&](int n, int j) { high[From + n][j] = First ? d[n][j] : high[From + n][j] + d[n][j]; });
  }
  __device__ float at(int n, int j) const { return high[n][j] + low[n][j]; }
  template <int M>
  __device__ void put(float (&sums)[M][4], int from = 0) const {
    each_sum<M>([&](int n, int j) { sums[n][j] = at(from + n, j); });
  }
};

}  // namespace girih::kernels
