// A block has one piece, one memory head and 64 columns of D. Its threads have four rows and four columns of
// every 64 x 64 product, as in tiles.cuh. First what the steps read, then query head after query head:
//
//     A_ij = do_i . u_j, or -du_i . u_j        over V, with     F = do S, or -du S,        and     u dS
//     dq, db = e^{L_i} F + (E * A) K           dk <- dk + (E * A)^T (Q, or B)
//
// What a gate scales is never a difference of sums, of which little would be left behind closed gates: of the
// pairs  E_ij A_ij (x_i . k_j)  those that it lies between are added up, and of F and u dS the rows on its
// side.
#include "delta_product/between.h"
#include "delta_product/pieces.h"
#include "exact/tiles.cuh"

namespace girih::kernels {
namespace delta_product {
namespace {

using exact::add_dot, exact::add_product, exact::add_scaled, exact::add_scores, exact::block_of_rows,
    exact::clear, exact::four, exact::kPitch, exact::kThreads, exact::kTile, exact::kTileFloats,
    exact::lane_of_row, exact::load_matrix, exact::own_rows, exact::put;

constexpr int kParts = kThreads / kTile;

struct GradientSpace {
  // Of the piece's tokens: its gate, e^{gates through it}, e^{those after it}.
  float gate[kTile], through[kTile], after[kTile];
  // What the gates up to a query or a step scale of S, and those after a row of dS.
  float queries[kTile], steps[kTile], writes[kTile];
  float parts[kThreads / 32];  // S * dS, added up by the warps
  float dg[kThreads];          // of token thread / kParts, the threads' parts
  int token[kTile];            // of a row
  // Of the piece; here for want of registers.
  int64_t batch, start, states;  // row of x, first token, where its states begin
  int head, tokens;
  bool opens;
};
constexpr int kSpaceFloats = (static_cast<int>(sizeof(GradientSpace)) + 15) / 16 * 4;

constexpr int gradient_floats(bool gated) { return (4 + gated) * kTileFloats + kSpaceFloats; }

// Sums over V take their terms four at a time: one by one, 256 of them lost twice as many digits.
//     sum += x . y
__device__ inline void add_four(float& sum, const Pack<4>& x, const Pack<4>& y) {
  float part = x.at[0] * y.at[0];
#pragma unroll
  for (int i = 1; i < 4; ++i) part = fmaf(x.at[i], y.at[i], part);
  sum += part;
}
//     sums += x tile[m..m+3, col..col+3]
__device__ inline void add_four(Pack<4> (&sums)[4], const Pack<4> (&x)[4], const float* tile, int m,
                                int col) {
  Pack<4> y[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) y[j] = four(tile, m + j, col);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      add_four(sums[r].at[c], x[r], {{y[0].at[c], y[1].at[c], y[2].at[c], y[3].at[c]}});
    }
  }
}

// Sums over the 16 lanes that share rows.
__device__ inline float over_row(float x) {
#pragma unroll
  for (int other = 1; other < 16; other *= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

template <bool Gated>
__global__ void __launch_bounds__(kThreads, 2) gradients(const __grid_constant__ DeltaExactGradients p) {
  extern __shared__ __align__(16) float shared[];
  float *const left = shared, *const right = left + kTileFloats, *const third = right + kTileFloats,
               *const fourth = third + kTileFloats, *const decays = fourth + kTileFloats;
  GradientSpace& space = *reinterpret_cast<GradientSpace*>(fourth + (1 + Gated) * kTileFloats);
  const DeltaExactShape& shape = p.shape;
  const int D = in_fours(shape.D), V = in_fours(shape.V), n = shape.n;
  const unsigned slabs = (shape.D + kTile - 1) / kTile;
  const int slab = static_cast<int>(blockIdx.x % slabs), col = slab * kTile;
  const int a = lane_of_row(), b = block_of_rows(), thread = static_cast<int>(threadIdx.x);
  {
    const int64_t piece_head = blockIdx.x / slabs;
    const DeltaPiece piece = piece_at(shape.pieces, piece_head / shape.heads);
    if (piece.length == 0) return;
    if (thread == 0) {
      space.batch = piece.sequence.batch, space.start = piece.start;
      space.states = piece_head * shape.V * D;
      space.head = static_cast<int>(piece_head % shape.heads), space.tokens = piece.length;
      space.opens = piece.opens;
    }
  }
  if (thread < kTile) space.token[thread] = thread / n;
  space.dg[thread] = 0.f;
  __syncthreads();
  const auto rows_of = [&](bool steps) { return steps ? space.tokens * n : space.tokens; };
  if constexpr (Gated) {
    // Not differences of sums: long sums have no digits left for short ones.
    const auto gate = [&](int token) { return space.gate[token]; };
    if (thread < kTile) {
      const int64_t at =
          space.batch * p.g.stride[0] + (space.start + thread) * p.g.stride[1] + space.head * p.g.stride[2];
      space.gate[thread] = thread < space.tokens ? static_cast<const float*>(p.g.data)[at] : 0.f;
      space.queries[thread] = 0.f;
    }
    __syncthreads();
    if (thread < kTile) {
      float through = 0.f, after = 0.f;
      for (int t = 0; t <= thread; ++t) through += gate(t);
      for (int t = space.tokens - 1; t > thread; --t) after += gate(t);
      space.through[thread] = expf(through);
      space.after[thread] = expf(after);
    }
    // E of tokens: row t, column s <= t.
    const int s = thread % kTile, first = thread / kTile * (kTile / kParts);
    float sum = 0.f;
    for (int t = s + 1; t < first; ++t) sum += gate(t);
    for (int t = first; t < first + kTile / kParts; ++t) {
      if (t > s) sum += gate(t);
      decays[t * kPitch + s] = t < s ? 0.f : expf(sum);
    }
  }

  // Of an array the piece's rows, columns from..from+63 of `width`, to a tile.
  const auto load_rows = [&](float* tile, const In<4>& x, bool steps, int of, int from, int width) {
    const float* const data = static_cast<const float*>(x.data) + space.batch * x.stride[0] +
                              space.start * (steps ? n : 1) * x.stride[1] + of * x.stride[2] + from;
    load_matrix(tile, data, x.stride[1], rows_of(steps), width - from);
  };
  const auto store_rows = [&](const Out<4>& to, bool steps, int of, const Pack<4>(&sums)[4]) {
    float* const data = static_cast<float*>(to.data) + space.batch * to.stride[0] +
                        space.start * (steps ? n : 1) * to.stride[1] + of * to.stride[2] + col + 4 * a;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (4 * b + r < rows_of(steps) && col + 4 * a < D) {
        store<4>(data + (4 * b + r) * to.stride[1], sums[r]);
      }
    }
  };
  // The columns v..v+63 of S or dS, [V, D], to a tile.
  const auto load_state = [&](float* tile, const float* states, int v) {
    const float* const from = states + space.states + v * D + col;
    load_matrix(tile, from, D, shape.V - v, D - col);
  };

  // The gradient of what reads, x, from that of what it read, dx: sums over V, then over rows. A query reads
  // the rows of tokens up to its own, a step the rows before its own. Beside it what the rows x give dk.
  Pack<4> dk[4];
  clear(dk);
  const auto of_reader = [&](auto of_steps, const In<4>& x, const In<4>& dx, float factor, const Out<4>& to,
                             int of, float* far_sums) {
    constexpr bool kSteps = decltype(of_steps)::value;
    // Of the thread's four rows: whether they exist, and how many rows they read, at most.
    const bool idle = 4 * b >= rows_of(kSteps);
    const int most = (4 * b + 4) * (kSteps ? 1 : n), cols = idle ? 0 : most < kTile ? most : kTile;
    Pack<4> scores[4], sums[4];
    clear(scores);
    clear(sums);
    [[maybe_unused]] float both = 0.f;
#pragma unroll 1
    for (int v = 0; v < V; v += kTile) {
      __syncthreads();
      load_rows(left, dx, kSteps, of, v, V);
      load_rows(right, p.u, true, space.head, v, V);
      load_state(third, p.states, v);
      if constexpr (kSteps) load_state(fourth, p.gradients, v);
      if (space.opens) {
        // As the thread has written it.
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
          Pack<4> state = four(third, b + 16 * i, 4 * a);
#pragma unroll
          for (int e = 0; e < 4; ++e) state.at[e] = between(shape.pieces.between, state.at[e]);
          put(third, b + 16 * i, 4 * a, state);
        }
      }
      __syncthreads();
#pragma unroll 1
      for (int m = idle ? kTile : 0; m < kTile; m += 4) {
        Pack<4> reads[4];
        own_rows(reads, left, m);
        add_scores(scores, reads, right, m, cols,
                   [](float& sum, const Pack<4>& x, const Pack<4>& y) { add_four(sum, x, y); });
        add_four(sums, reads, third, m, 4 * a);
        if constexpr (kSteps) {
          own_rows(reads, right, m);
          add_four(dk, reads, fourth, m, 4 * a);
        }
      }
      if constexpr (kSteps && Gated) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          add_dot(both, four(third, b + 16 * i, 4 * a), four(fourth, b + 16 * i, 4 * a));
      }
    }
    __syncthreads();

    // A * E to a tile; the rows of K and of the reader to two others.
    float* const weights = third;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = 4 * b + r;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int j = a + 16 * c;
        const bool seen = kSteps ? j < i : space.token[j] <= i;
        float weight = seen ? factor * scores[r].at[c] : 0.f;
        if constexpr (Gated) {
          if (seen) weight *= decays[(kSteps ? space.token[i] : i) * kPitch + space.token[j]];
        }
        weights[i * kPitch + j] = weight;
      }
      float by = factor;
      if constexpr (Gated) by *= space.through[kSteps ? space.token[i] : i];
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[r].at[c] *= by;
    }
    load_rows(left, x, kSteps, of, col, D);
    load_rows(right, p.k, true, space.head, col, D);
    __syncthreads();

    if constexpr (Gated) {
      if constexpr (kSteps) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
          for (int c = 0; c < 4; ++c) dk[r].at[c] *= space.after[space.token[4 * b + r]];
          float far = 0.f;
          add_dot(far, dk[r], four(right, 4 * b + r, 4 * a));
          far = over_row(far);
          if (a == 0) space.writes[4 * b + r] = far;
        }
        both = over_row(both);
        both += __shfl_xor_sync(~0u, both, 16);
        if (thread % 32 == 0) space.parts[thread / 32] = both;
      }
      // A pair's share of the gates between its rows.
      Pack<4> pairs[4];
      clear(pairs);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float far = 0.f;
        add_dot(far, sums[r], four(left, 4 * b + r, 4 * a));
        far = over_row(far);
        if (a == 0) far_sums[4 * b + r] += far;
      }
#pragma unroll 1
      for (int m = idle ? kTile : 0; m < kTile; m += 4) {
        Pack<4> reads[4];
        own_rows(reads, left, m);
        add_scores(pairs, reads, right, m, cols);
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int at = (4 * b + r) * kPitch + a + 16 * c;
          fourth[at] = pairs[r].at[c] * weights[at];
        }
      }
    }
#pragma unroll 2
    for (int j = 0; j < cols; j += 4) {
      Pack<4> weight[4];
      own_rows(weight, weights, j);
      add_product(sums, weight, right, j);
    }
    // From the first that reads the thread's rows on.
#pragma unroll 4
    for (int i = kSteps ? 4 * b : space.token[4 * b]; i < rows_of(kSteps); ++i) {
      const Pack<4> weight = four(weights, i, 4 * b), read = four(left, i, 4 * a);
#pragma unroll
      for (int r = 0; r < 4; ++r) add_scaled(dk[r], weight.at[r], read);
    }
    store_rows(to, kSteps, of, sums);
    if constexpr (Gated) {
      // Of token t's gate: pairs of a write before it and a read at it or later.
      __syncthreads();
      const int t = thread / kParts;
      float dg = space.dg[thread];
      for (int i = (kSteps ? t * n : t) + thread % kParts; i < rows_of(kSteps); i += kParts) {
        Pack<4> sums_of = zeros<4>();
        int j = 0;
        for (; j + 4 <= t * n; j += 4) add_scaled(sums_of, 1.f, four(fourth, i, j));
        for (; j < t * n; ++j) dg += fourth[i * kPitch + j];
#pragma unroll
        for (int e = 0; e < 4; ++e) dg += sums_of.at[e];
      }
      space.dg[thread] = dg;
    }
  };

  if constexpr (Gated) {
    if (thread < kTile) space.steps[thread] = 0.f;
  }
  of_reader(std::true_type(), p.b, p.du, -1.f, p.db, space.head, space.steps);
#pragma unroll 1
  for (int member = 0, group = shape.query_heads / shape.heads; member < group; ++member) {
    const int of = space.head * group + member;
    of_reader(std::false_type(), p.q, p.dout, shape.scale, p.dq, of, space.queries);
  }
  store_rows(p.dk, true, space.head, dk);

  if constexpr (Gated) {
    __syncthreads();
    const int t = thread / kParts;
    float dg = space.dg[thread];
    for (int i = t + thread % kParts; i < rows_of(false); i += kParts) dg += space.queries[i];
    for (int i = t * n + thread % kParts; i < rows_of(true); i += kParts) dg += space.steps[i];
    for (int j = thread % kParts; j < t * n && j < rows_of(true); j += kParts) dg += space.writes[j];
    dg += __shfl_xor_sync(~0u, dg, 1);
    dg += __shfl_xor_sync(~0u, dg, 2);
    if (thread % kParts == 0 && t < space.tokens) {
      float whole = 0.f;
      for (int w = 0; w < kThreads / 32; ++w) whole += space.parts[w];
      const Tokens& all = shape.pieces.tokens;
      p.dg[((slab * all.batch + space.batch) * all.tokens + space.start + t) * shape.heads + space.head] =
          fmaf(space.through[space.tokens - 1], whole, dg);
    }
  }
}

template <bool Gated>
cudaError_t launch(const DeltaExactGradients& p, cudaStream_t stream) {
  constexpr int kBytes = gradient_floats(Gated) * static_cast<int>(sizeof(float));
  if (const cudaError_t error = allow_shared<gradients<Gated>>(kBytes); error != cudaSuccess) return error;
  const int64_t blocks = piece_count(p.shape.pieces) * p.shape.heads * divide_up(p.shape.D, kTile);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  gradients<Gated><<<static_cast<unsigned>(blocks), kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace
}  // namespace delta_product

cudaError_t delta_exact_gradients(const DeltaExactGradients& p, cudaStream_t stream) {
  return p.g.data == nullptr ? delta_product::launch<false>(p, stream)
                             : delta_product::launch<true>(p, stream);
}

}  // namespace girih::kernels
