// Sums of gates inside a chunk of 64 tokens, on the tensor cores: a triangle of ones times the gates. A gate
// goes in as two 16-bit parts, hi + lo, which keeps 16 bits of every gate; the sums are fp32.
#pragma once

#include "tile/matrix.h"

namespace girih::kernels {

constexpr int kRows = 16;  // of a chunk, a warp's

// A gate as it goes into sums. e^-100 is 0 in fp32; a gate far below, or -inf, would take the digits of all
// others.
__device__ inline float summable(float gate) { return gate < -100.f ? -100.f : gate; }

// The left factor of a sum over the warp's 16 rows: element (i, j) is one where row i sums row j.
enum class Sum { after, through, all };  // the rows j > i, j <= i, or every row

__device__ inline void ones(uint32_t (&a)[4], Sum sum) {
  const int i = lane_row(), j = lane_col();
  const uint32_t one = 0x3f80u;  // bf16
  const auto has = [&](int row, int col) { return sum == Sum::all || (sum == Sum::after) == (col > row); };
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    const int row = i + (x & 1) * 8, col = j + (x >> 1) * 8;
    a[x] = (has(row, col) ? one : 0u) | (has(row, col + 1) ? one << 16 : 0u);
  }
}

// g[row..row+15, col..col+8N-1] of an fp32 tile as a right factor in two parts.
template <int N>
struct GateParts {
  uint32_t hi[N][2], lo[N][2];
};

template <int N, class Tile>
__device__ inline void load(GateParts<N>& gates, const Tile& g, int row, int col = 0) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = summable(g.at(row + (i >> 1) * 8, col + 8 * n, lane_col() + (i & 1), lane_row()));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      gates.hi[n][i] = pair_of<__nv_bfloat16>(x[2 * i], x[2 * i + 1]);
      const float2 back = unpaired<__nv_bfloat16>(gates.hi[n][i]);
      gates.lo[n][i] = pair_of<__nv_bfloat16>(x[2 * i] - back.x, x[2 * i + 1] - back.y);
    }
  }
}

// sums += ones * gates
template <int N>
__device__ inline void add_gates(Sums<N>& sums, const uint32_t (&a)[4], const GateParts<N>& gates) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    mma<__nv_bfloat16>(sums.at[n], a, gates.hi[n][0], gates.hi[n][1]);
    mma<__nv_bfloat16>(sums.at[n], a, gates.lo[n][0], gates.lo[n][1]);
  }
}

// sums += ones * g[row..row+15, 0..8N-1], of an fp32 tile.
template <int N, class Tile>
__device__ inline void add_gates(Sums<N>& sums, const uint32_t (&a)[4], const Tile& g, int row) {
  GateParts<N> gates;
  load(gates, g, row);
  add_gates(sums, a, gates);
}

// 1 - e^g. Near zero the difference has no digits left: there a series, which at 1/16 and -1/16, where they
// meet, is right to 2e-7.
__device__ inline float complement(float g) {
  const float series = -g * fmaf(g, fmaf(g, fmaf(g, 1.f / 24.f, 1.f / 6.f), 0.5f), 1.f);
  return fabsf(g) < 0.0625f ? series : 1.f - exp2_fast(g * kLog2E);
}

}  // namespace girih::kernels
