// The matrix warps of the fp32 scan: X, P and the decays of every tile, ahead of the state warps.
#pragma once

#include "delta_product/fp32_tiles.cuh"
#include "tile/tf32.h"

namespace girih::kernels::delta_product::fp32_scan {

// d += a b in fp64, a 8 x 4, b 4 x 8. The lane has a(lane / 4, lane % 4), b(lane % 4, lane / 4) and
// d(lane_row(), lane_col()) with its right neighbour.
__device__ inline void mma_f64(double (&d)[2], double a, double b) { ptx::mma_m8n8k4_f64(d, a, b); }

// x y^T of sixteen rows each. A lane has four neighbouring columns. (The loops in this file are not unrolled,
// so that the code of all roles fits the instruction cache.)
template <int Width>
__device__ inline Accumulator<2> scores(const RowTile<Width>& x, const RowTile<Width>& y) {
  SplitAccumulator<2> sums;
  sums.clear();
#pragma unroll 1
  for (int col = 0; col < Width; col += 16) {
    SplitAFragment block;
    block.load(x, 0, col);
    float right[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) load_four(right[n], &y.at(8 * n, col, lane_row(), 2 * lane_col()));
    sums.template add<false>(block, right);
  }
  Accumulator<2> all;
  sums.put(all.at);
  return all;
}

// The lane's elements of a 16 x 16 matrix, in the layout of Accumulator<2>.
using Scores64 = double[2][4];

// b k^T, or with Reverse k b^T, in fp64, for 8 x 8 blocks where the row of b is not before that of k.
template <bool Reverse, int Width>
__device__ inline void scores_fp64(Scores64& scores, const RowTile<Width>& b, const RowTile<Width>& k) {
  double sums[2][2][2] = {};
#pragma unroll 1
  for (int col = 0; col < Width; col += 16) {
    double b_elements[2][4], k_elements[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      load_four(b_elements[n], &b.at(8 * n, col, lane_row(), 2 * lane_col()));
      load_four(k_elements[n], &k.at(8 * n, col, lane_row(), 2 * lane_col()));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int down = 0; down < 2; ++down) {
#pragma unroll
        for (int right = 0; right < 2; ++right) {
          if (Reverse ? down > right : down < right) continue;
          mma_f64(sums[down][right], (Reverse ? k_elements : b_elements)[down][i],
                  (Reverse ? b_elements : k_elements)[right][i]);
        }
      }
    }
  }
  for_each_register<2>([&](int n, int i) { scores[n][i] = sums[i / 2][n][i % 2]; });
}

// e^ of the sum of gates up to each row, and after it. The sums are fp64 because differences of them are
// used.
__device__ inline void store_decays(TileMatrices& matrices, MatrixStorage& matrix_storage,
                                    const float* gates) {
  const int row = lane() % kRows;
  double through = 0., all = 0.;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    // A gate of -inf is clamped, so that it does not remove the digits of the others; NaN stays.
    all += gates[i] < -1e4f ? -1e4f : gates[i];
    if (i == row) through = all;
  }
  matrix_storage.gates[row] = through;
  matrices.decay_from_block_start[row] = expf(static_cast<float>(through));
  matrices.decay_to_block_end[row] = expf(static_cast<float>(all - through));
  matrices.decay_total = expf(static_cast<float>(all));
  __syncwarp();
}

// Multiplies the scores by decay and `scale`, and clears those whose reading row is before the written one
// (or equal, unless `is_inclusive`). The rows of the matrix are the reading rows, with Reverse the written
// ones.
template <bool Reverse, class T>
__device__ inline void apply_decay(T (&scores)[2][4], const double* gates, bool is_inclusive, float scale) {
  for_each_register<2>([&](int n, int i) {
    const int row = lane_row() + 8 * (i / 2), col = 8 * n + lane_col() + i % 2;
    const int read = Reverse ? col : row, written = Reverse ? row : col;
    float by = scale;
    if (gates != nullptr) by *= expf(static_cast<float>(gates[read] - gates[written]));
    scores[n][i] = read > written || (is_inclusive && read == written) ? by * scores[n][i] : T{};
  });
}

// For a row that ends a token the index of that token in its segment, else -1.
template <bool Reverse>
__device__ inline void store_token_indices(TileMatrices& matrices,
                                           const TileIterator<Reverse>& tile_iterator) {
  const int i = lane();
  if (i < kRows)
    matrices.token[i] =
        i < tile_iterator.rows() && tile_iterator.ends_token(i) ? tile_iterator.token_of_segment(i) : -1;
}

// The lane's column of X = (1 + A)^-1 by rows:   x_i = [i = column] - sum_{m<i} A_im x_m
__device__ inline void solve(double (&x)[kRows], const double (&a)[kRows][kRows], int column) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    double sums[2] = {i == column ? 1. : 0., 0.};
#pragma unroll
    for (int m = 0; m < i; m += 2) {
      const double2 two = *reinterpret_cast<const double2*>(&a[i][m]);
      sums[0] = fma(-two.x, x[m], sums[0]);
      if (m + 1 < i) sums[1] = fma(-two.y, x[m + 1], sums[1]);
    }
    x[i] = sums[0] + sums[1];
  }
}

// Position of term i of a sum in a row of X or P.
__device__ constexpr int operand_index(int i) { return i % 8 / 2 * 4 + i / 8 * 2 + i % 2; }

// Computes X from A in fp64 and stores X as the sum of three tf32 numbers. If a key repeats and beta is 2,
// the same rounding error of A = 2 k . k or of X returns with every token, and one ulp of fp32 exceeds all
// other rounding errors of a tile.
template <bool Reverse>
__device__ inline void store_inverse(TileMatrices& matrices, MatrixStorage& matrix_storage,
                                     const Scores64& a) {
  for_each_register<2>([&](int n, int i) {
    const int row = lane_row() + 8 * (i / 2), col = 8 * n + lane_col() + i % 2;
    matrix_storage.a[Reverse ? col : row][Reverse ? row : col] = a[n][i];
  });
  __syncwarp();
  double x[kRows];
  const int column = lane() % kRows;
  solve(x, matrix_storage.a, column);
  __syncwarp();
  if (lane() < kRows) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int part = 0; part < kInverseParts; ++part) {
        const uint32_t high = Tf32Parts(static_cast<float>(x[i])).high;
        (Reverse ? matrices.x[part][column][operand_index(i)] : matrices.x[part][i][operand_index(column)]) =
            high;
        x[i] -= __uint_as_float(high);
      }
    }
  }
}
__device__ inline void store_p(TileMatrices& matrices, const Accumulator<2>& p) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    *reinterpret_cast<float4*>(&matrices.p[lane_row() + 8 * i][2 * lane_col()]) = {
        p.at[0][2 * i], p.at[0][2 * i + 1], p.at[1][2 * i], p.at[1][2 * i + 1]};
  }
}

// Matrix warp `warp` computes X and P of every `warps`-th visit (see run_load_warps). There are at most as
// many matrix warps as stages, so a warp never waits for a phase that is two ahead of the phase of the
// barrier.
//
//     A_ij = E_ij b_i . k_j  (j < i)     X = (1 + A)^-1     P_ij = scale E_ij q_i . k_j  (j <= i)
template <int Width, bool Reverse>
__device__ inline void run_matrix_warps(const DeltaFp32Scan& p, const HeadWork& work,
                                        const TileStorage<Width>& storage, int warp) {
  TileBarriers& barriers = storage.barriers();
  MatrixStorage& matrix_storage = storage.matrix_storage(warp);
  const bool gated = p.g.data != nullptr;
  const double* const gates = gated ? matrix_storage.gates : nullptr;
  const int warps = storage.stages < kMatrixWarps ? storage.stages : kMatrixWarps;
  if (warp >= warps) return;
  PipelineState pipe;
  int visits_before_own = warp;
#pragma unroll 1
  for (TileIterator<Reverse> tile_iterator(p.shape, work); tile_iterator.has_tile(); tile_iterator.next()) {
#pragma unroll 1
    for (int member = 0; member < work.group; ++member, pipe.next(storage.stages)) {
      if (visits_before_own-- > 0) continue;
      visits_before_own = warps - 1;
      const int stage = pipe.stage;
      barriers.full.wait(pipe);
      TileMatrices& matrices = storage.matrices(stage);
      if (gated) store_decays(matrices, matrix_storage, storage.gates(stage));
      store_token_indices(matrices, tile_iterator);
      const bool has_steps = member == (Reverse ? work.group - 1 : 0);
      const auto q = storage.q(stage), k = storage.k(stage);
      Accumulator<2> reads = scores(Reverse ? k : q, Reverse ? q : k);
      apply_decay<Reverse>(reads.at, gates, true, p.shape.scale);
      store_p(matrices, reads);
      if (has_steps) {
        Scores64 steps;
        scores_fp64<Reverse>(steps, storage.b(stage), k);
        apply_decay<Reverse>(steps, gates, false, 1.f);
        store_inverse<Reverse>(matrices, matrix_storage, steps);
      }
      barriers.matrices_full.arrive_warp(stage);
    }
  }
}

}  // namespace girih::kernels::delta_product::fp32_scan
