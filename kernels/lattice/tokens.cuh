// The tokens of a chunk: their gates and steps, and running sums over tokens.
#pragma once

#include <algorithm>
#include <type_traits>

#include "lattice/kernels.h"
#include "tile/gates.h"
#include "tile/grid.h"
#include "tile/matrix.h"
#include "tile/pack.h"

namespace girih::kernels::lattice {

// A chunk of a head.
struct ChunkCoord {
  ChunkedSequence of;
  Chunk chunk;
  int64_t number;  // number of the chunk in the grid
  int head;
  bool resumed;  // the chunk began in an earlier call

  __device__ int64_t batch() const { return of.sequence.batch; }
  __device__ int64_t sequence() const { return of.sequence.index; }
};

__device__ inline ChunkCoord chunk_coord(const LatticeShape& shape, const ChunkedSequence& of, int64_t i,
                                         int head) {
  return {of, chunk_of(shape.grid, of, i), of.first + i, head, i == 0 && of.prior_tokens > 0};
}
// The chunk and head of the block.
__device__ inline ChunkCoord chunk_coord(const LatticeShape& shape) {
  const auto heads = static_cast<unsigned>(shape.heads);
  const NumberedChunk at = chunk_at(shape.grid, blockIdx.x / heads);
  ChunkCoord coord = chunk_coord(shape, at.of, at.index, static_cast<int>(blockIdx.x % heads));
  if (at.index < 0) coord.chunk.length = 0;
  return coord;
}
// The same for chunks that are not resumed, with divisors from the host: a division costs twenty
// instructions.
struct ChunkDividers {
  Divider heads, row;  // divisors: heads, chunks of a batch row
  explicit ChunkDividers(const LatticeShape& shape)
      : heads(shape.heads), row(std::max<int64_t>(chunks_in_row(shape.grid), 1)) {}
};
__device__ inline ChunkCoord chunk_coord(const LatticeShape& shape, const ChunkDividers& by) {
  const ChunkGrid& grid = shape.grid;
  if (is_packed(grid.tokens)) return chunk_coord(shape);
  const unsigned number = by.heads.divide(blockIdx.x), row = by.row.divide(number);
  const ChunkedSequence of{sequence_at(grid.tokens, row), 0, by.row.by, 0};
  return {of, chunk_of(grid, of, number - row * by.row.by), number,
          static_cast<int>(blockIdx.x - number * by.heads.by), false};
}

// sign in W = sign * gamma * c.
__device__ inline float sign_of(LatticeObjective objective) {
  return objective == LatticeObjective::similarity ? 1.f : -1.f;
}

// fp16 has the range 2^-24 to 2^16. If gates have decayed the memory to nothing, reads see only the steps: W
// and q~ = q / |x|. So W is scaled by fp16_scale() in shared memory, and q~ and eta by 1 / fp16_scale().
template <typename T>
__host__ __device__ constexpr float fp16_scale() {
  return std::is_same_v<T, __half> ? 256.f : 1.f;
}

// Sums of gates are in units of log2.
constexpr float kMinLogDecay = -30.f * kLog2E;  // lower bound of log2(m), so that m^2 does not underflow

// R: tokens of a tile. Padding tokens have step 0 and gate 0.
template <int R>
struct ChunkTokens {
  float step[R];          // sign * gamma
  float scaled_step[R];   // fp16_scale<T>() * step
  float sum[R];           // L over this call's tokens of the chunk, in units of log2
  float memory_decay[R];  // m = e^{max(L, -30)}, L from the start of the chunk
  float square[R];        // |h|^2
  float call_decay[R];    // e^{L}, L over this call's tokens

  // E_tj = e^{L_t - L_j}
  __device__ float decay(int t, int j) const { return exp2_fast(sum[t] - sum[j]); }
};

// One or two neighbouring tokens of a lane: gamma, and the running sum of gates in units of log2.
template <int R>
struct LaneTokens {
  static constexpr int kTokensPerLane = R > 32 ? 2 : 1, kLanes = R / kTokensPerLane;
  float gamma[kTokensPerLane], sum[kTokensPerLane];

  __device__ static int first() { return kTokensPerLane * lane(); }
  __device__ float all() const { return __shfl_sync(~0u, sum[kTokensPerLane - 1], kLanes - 1); }
};
template <int R>
struct RawTokens {
  RawElement gamma[LaneTokens<R>::kTokensPerLane], gate[LaneTokens<R>::kTokensPerLane];
};
template <int R>
__device__ inline RawTokens<R> load_tokens(const InputTensor<3>& gamma, const InputTensor<3>& g,
                                           const ChunkCoord& coord) {
  using Lane = LaneTokens<R>;
  RawTokens<R> raw;
#pragma unroll
  for (int i = 0; i < Lane::kTokensPerLane; ++i) {
    const int t = Lane::first() + i;
    if (t >= coord.chunk.length) continue;
    raw.gamma[i] =
        load_raw_element(gamma, coord.batch(), coord.chunk.start + t, static_cast<int64_t>(coord.head));
    if (g.data != nullptr) {
      raw.gate[i] =
          load_raw_element(g, coord.batch(), coord.chunk.start + t, static_cast<int64_t>(coord.head));
    }
  }
  return raw;
}
template <int R>
__device__ inline LaneTokens<R> sum_tokens(const RawTokens<R>& raw, DType gamma, DType g) {
  using Lane = LaneTokens<R>;
  Lane tokens;
  float through = 0.f;
#pragma unroll
  for (int i = 0; i < Lane::kTokensPerLane; ++i) {
    tokens.gamma[i] = decode_element(raw.gamma[i], gamma);
    tokens.sum[i] = through += clamp_gate(decode_element(raw.gate[i], g)) * kLog2E;
  }
  float all = through;
#pragma unroll
  for (int step = 1; step < Lane::kLanes; step *= 2) {
    const float before = __shfl_up_sync(~0u, all, step);
    if (lane() >= step) all += before;
  }
  if constexpr (Lane::kTokensPerLane > 1) {
    const float before = __shfl_up_sync(~0u, all, 1);
    tokens.sum[0] += lane() == 0 ? 0.f : before;
  }
  tokens.sum[Lane::kTokensPerLane - 1] = all;
  return tokens;
}

// Sum of a resumed chunk's gates before this call, in units of log2.
__device__ inline float earlier_log_decay(const LatticeStart& start, const ChunkCoord& coord) {
  if (!coord.resumed || start.decay.data == nullptr) return 0.f;
  return load_element(start.decay, coord.sequence(), static_cast<int64_t>(coord.head)) * kLog2E;
}

// Called by one warp. `before`: earlier_log_decay() of a resumed chunk.
template <typename T, int R>
__device__ inline void store_tokens(ChunkTokens<R>& to, const LaneTokens<R>& tokens, float sign,
                                    float before) {
#pragma unroll
  for (int i = 0; i < tokens.kTokensPerLane; ++i) {
    const int t = tokens.first() + i;
    if (t >= R) continue;
    to.step[t] = sign * tokens.gamma[i];
    to.scaled_step[t] = fp16_scale<T>() * to.step[t];
    to.sum[t] = tokens.sum[i];
    to.call_decay[t] = exp2_fast(tokens.sum[i]);
    to.memory_decay[t] = exp2_fast(fmaxf(before + tokens.sum[i], kMinLogDecay));
  }
}
template <typename T, int R, class Problem>
__device__ inline void store_tokens(ChunkTokens<R>& to, const Problem& p, const LatticeStart& start,
                                    const ChunkCoord& coord) {
  store_tokens<T>(to, sum_tokens(load_tokens<R>(p.gamma, p.g, coord), p.gamma.dtype, p.g.dtype),
                  sign_of(p.shape.objective), earlier_log_decay(start, coord));
}

// Running sums over tokens for matrices whose columns are tokens, 16 at a time, by products with a triangle
// of decays on the tensor cores. Each factor is split into two bf16 parts, which keeps 16 bits.
enum class Direction {
  forward,
  backward
};  // forward: y_t = sum over j <= t of E_tj x_j; backward: y_j = sum over t >= j of E_tj x_t

// B fragment for tokens first..first+15: E, or its elementwise square.
struct Triangle {
  uint32_t hi[2][2], lo[2][2];
};
struct Triangles {
  Triangle decay, square;
};

__device__ inline void split_pair(uint32_t& hi, uint32_t& lo, float x, float y) {
  hi = pack_pair<__nv_bfloat16>(x, y);
  const float2 back = unpack_pair<__nv_bfloat16>(hi);
  lo = pack_pair<__nv_bfloat16>(x - back.x, y - back.y);
}

template <Direction run, int R>
__device__ inline void make_triangles(Triangles& to, const ChunkTokens<R>& tokens, int first) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int col = 8 * n + lane_row(), row = 8 * k + lane_col();
      float e[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int t = run == Direction::forward ? col : row + i,
                  j = run == Direction::forward ? row + i : col;
        e[i] = j <= t ? tokens.decay(first + t, first + j) : 0.f;
      }
      split_pair(to.decay.hi[n][k], to.decay.lo[n][k], e[0], e[1]);
      split_pair(to.square.hi[n][k], to.square.lo[n][k], e[0] * e[0], e[1] * e[1]);
    }
  }
}

// The triangles of 16 tokens for forward sums, and E [t, j], zero for j > t.
__device__ inline void make_triangles(Triangles& to, Accumulator<2>& E, const ChunkTokens<16>& tokens) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int t = 8 * n + lane_row(), j = 8 * k + lane_col();
      float* const e = &E.at[k][2 * n];
      e[0] = j <= t ? tokens.decay(t, j) : 0.f, e[1] = j + 1 <= t ? tokens.decay(t, j + 1) : 0.f;
      split_pair(to.decay.hi[n][k], to.decay.lo[n][k], e[0], e[1]);
      split_pair(to.square.hi[n][k], to.square.lo[n][k], e[0] * e[0], e[1] * e[1]);
    }
  }
}
// Transposes forward's triangle to backward's.
__device__ inline void transpose_triangle(Triangle& to, const Triangle& from) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      to.hi[k][n] = transpose_pairs(from.hi[n][k]), to.lo[k][n] = transpose_pairs(from.lo[n][k]);
    }
  }
}
__device__ inline void transpose_triangle(Triangles& to, const Triangles& from) {
  transpose_triangle(to.decay, from.decay);
  transpose_triangle(to.square, from.square);
}

// Value of the running sums that a block of 16 tokens passes to the next block, for both rows of the lane.
struct Carry {
  float at[2] = {0.f, 0.f};
};

// sums += x * triangle
__device__ inline void add_triangle_product(Accumulator<2>& sums, const Accumulator<2>& x,
                                            const Triangle& triangle) {
  uint32_t hi[4], lo[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    split_pair(hi[i], lo[i], x.at[i / 2][i % 2 * 2], x.at[i / 2][i % 2 * 2 + 1]);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    mma<__nv_bfloat16>(sums.at[n], hi, triangle.hi[n][0], triangle.hi[n][1]);
    mma<__nv_bfloat16>(sums.at[n], lo, triangle.hi[n][0], triangle.hi[n][1]);
    mma<__nv_bfloat16>(sums.at[n], hi, triangle.lo[n][0], triangle.lo[n][1]);
  }
}

// Replaces x by its running sums. `by(col)`: decays of columns col and col + 1 from the block before, or a
// power of these.
template <Direction run, class Decays>
__device__ inline void compute_running_sums(Accumulator<2>& x, const Triangle& triangle, Carry& carry,
                                            const Decays& by) {
  Accumulator<2> sums;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 e = by(8 * n);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums.at[n][i] = carry.at[i >> 1] * (i & 1 ? e.y : e.x);
  }
  add_triangle_product(sums, x, triangle);
  x = sums;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    carry.at[i] = run == Direction::forward ? __shfl_sync(~0u, x.at[1][2 * i + 1], lane() | 3)
                                            : __shfl_sync(~0u, x.at[0][2 * i], lane() & ~3);
  }
}

// Decay of two tokens of the block at `first` from the token that precedes it in the direction of the sums.
template <Direction run, int R>
__device__ inline float2 block_decay(const ChunkTokens<R>& tokens, int first, int col) {
  const float2 sum = *reinterpret_cast<const float2*>(&tokens.sum[first + col + lane_col()]);
  if (run == Direction::forward) {
    if (first == 0) return {0.f, 0.f};
    const float before = tokens.sum[first - 1];
    return {exp2_fast(sum.x - before), exp2_fast(sum.y - before)};
  }
  if (first + 16 >= R) return {0.f, 0.f};
  const float after = tokens.sum[first + 16];
  return {exp2_fast(after - sum.x), exp2_fast(after - sum.y)};
}
__device__ inline float2 squared(float2 x) { return {x.x * x.x, x.y * x.y}; }

}  // namespace girih::kernels::lattice
