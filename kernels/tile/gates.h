// Running sums of gates within a chunk of 64 tokens on the tensor cores: a triangular matrix of ones times
// the gates. A gate is split into two bf16 parts, hi + lo, which have 16 significant bits; sums are fp32.
#pragma once

#include "tile/matrix.h"

namespace girih::kernels {

constexpr int kWarpRows = 16;         // rows that a warp has of a product: M of mma m16n8k16
constexpr int kSubchunk = kWarpRows;  // tokens whose gates one product sums

// A gate clamped for summation. e^-100 is 0 in fp32; a much smaller gate, or -inf, would cancel the digits of
// all other gates in the sum.
__device__ inline float clamp_gate(float gate) { return gate < -100.f ? -100.f : gate; }

// The rows j of a sub-chunk that row i sums: j > i (suffix sums), j <= i (prefix sums), or all.
enum class RowRange { later, up_to, all };

// The 16 x 16 left factor of such a sum: element (i, j) is 1 if row i sums row j, else 0.
__device__ inline void fill_ones(uint32_t (&a)[4], RowRange range) {
  const int i = lane_row(), j = lane_col();
  const uint32_t one = 0x3f80u;  // bf16
  const auto has = [&](int row, int col) {
    return range == RowRange::all || (range == RowRange::later) == (col > row);
  };
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    const int row = i + (x & 1) * 8, col = j + (x >> 1) * 8;
    a[x] = (has(row, col) ? one : 0u) | (has(row, col + 1) ? one << 16 : 0u);
  }
}

// Rows row..row+15 and columns col..col+8N-1 of an fp32 tile of gates as B fragments, in two bf16 parts.
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
      x[i] = clamp_gate(g.at(row + (i >> 1) * 8, col + 8 * n, lane_col() + (i & 1), lane_row()));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      gates.hi[n][i] = pack_pair<__nv_bfloat16>(x[2 * i], x[2 * i + 1]);
      const float2 back = unpack_pair<__nv_bfloat16>(gates.hi[n][i]);
      gates.lo[n][i] = pack_pair<__nv_bfloat16>(x[2 * i] - back.x, x[2 * i + 1] - back.y);
    }
  }
}

// sums += ones * gates
template <int N>
__device__ inline void add_gates(Accumulator<N>& sums, const uint32_t (&a)[4], const GateParts<N>& gates) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    mma<__nv_bfloat16>(sums.at[n], a, gates.hi[n][0], gates.hi[n][1]);
    mma<__nv_bfloat16>(sums.at[n], a, gates.lo[n][0], gates.lo[n][1]);
  }
}

// sums += ones * g[row..row+15, 0..8N-1], where g is an fp32 tile.
template <int N, class Tile>
__device__ inline void add_gates(Accumulator<N>& sums, const uint32_t (&a)[4], const Tile& g, int row) {
  GateParts<N> gates;
  load(gates, g, row);
  add_gates(sums, a, gates);
}

// 1 - e^g. For |g| < 1/16 the difference loses its digits to cancellation, and a series replaces it. At
// |g| = 1/16 the relative error of the series is 2e-7.
__device__ inline float one_minus_exp(float g) {
  const float series = -g * fmaf(g, fmaf(g, fmaf(g, 1.f / 24.f, 1.f / 6.f), 0.5f), 1.f);
  return fabsf(g) < 0.0625f ? series : 1.f - exp2_fast(g * kLog2E);
}

}  // namespace girih::kernels
