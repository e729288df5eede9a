// The gates of one chunk, and the two reads that go through them:
//
//     value_read   y_i = e^{L_i} * (x_i H) + sum_{j<=i} a_ij e^{L_i - L_j} * s_j                  [M]
//     key_read     (f, W) of p:  f_i = e^{L_i} * p_i,  W_ij = sum_m p_im s_jm e^{L_im - L_jm}     j <= i
//
// H the chunk's first state, a_ij = x_i . y_j the scores, L_i the sum of g through row i, slot by slot. A
// block owns a chunk, a warp 16 of its rows.
//
// Where the gates of the whole chunk sum to little, e^{L_i - L_j} = r_i e^{X_j} with X_j = sum of g after j
// and r_i = e^{-X_i}: s~ = s e^X serves all rows, one exponential a token and slot. Elsewhere r overflows;
// there rows take the earlier 16-row blocks one by one, each with the end of that block as its reference, and
// the block of their own pair by pair: no exponent is above 0.
#pragma once

#include <type_traits>

#include "gsa/gsa.h"
#include "tile/gates.h"
#include "tile/pack.h"

namespace girih::kernels {

// The largest sum of gates, in powers of two, that goes by the factors. bf16 has the range of fp32: r stays
// below 2^80, and products with logits and gradients below 2^127. fp16 ends at 2^-14 below and 2^16 above: s~
// must keep its digits, and a quarter of its range is left to p, dz and q.
template <typename T>
__device__ constexpr float factored_limit() {
  return std::is_same_v<T, __half> ? 2.f : 80.f;
}

// The rows of one chunk and memory head in a [B, T, heads, width] array.
template <typename T, template <int> class Array>
__device__ inline auto chunk_rows(const Array<4>& array, const Piece& piece, int head) {
  using Pointer = std::conditional_t<std::is_same_v<Array<4>, In<4>>, const T*, T*>;
  return static_cast<Pointer>(array.data) + piece.sequence.batch * array.stride[0] +
         piece.start * array.stride[1] + head * array.stride[2];
}

// 1 - e^g of two neighbours; of a row or column that does not exist, that of one that does.
template <typename T>
__device__ inline uint32_t complement_pair(const In<4>& g, const Piece& piece, int head, int slots, int row,
                                           int col) {
  const float* gates = chunk_rows<float>(g, piece, head) + min(row, piece.length - 1) * g.stride[1];
  const float2 pair = *reinterpret_cast<const float2*>(gates + min(col, slots - 2));
  return pair_of<T>(complement(pair.x), complement(pair.y));
}

// All of the block: starts to load s, or writes 1 - e^g for it.
template <int Threads, typename T, int M>
__device__ inline void load_weights(const SharedTile<T, kChunk, M>& s, const In<4>& from, const In<4>& g,
                                    const Piece& piece, int head, int slots) {
  if (from.data != nullptr) {
    load_async<Threads>(s, chunk_rows<T>(from, piece, head), from.stride[1], piece.length, slots,
                        threadIdx.x);
    return;
  }
  const float* gates = chunk_rows<float>(g, piece, head);
  for (int i = threadIdx.x; i < kChunk * M / 4; i += Threads) {
    const int row = i / (M / 4), col = i % (M / 4) * 4;
    Pack<4> pack = zeros<4>();
    if (row < piece.length && col < slots) pack = load<4>(gates + row * g.stride[1] + col);
    *reinterpret_cast<uint2*>(&s.at(row, col)) = {pair_of<T>(complement(pack.at[0]), complement(pack.at[1])),
                                                  pair_of<T>(complement(pack.at[2]), complement(pack.at[3]))};
  }
}

// The scores of a warp's 16 rows against the chunk's 64, in two halves: the second is all masked for the
// first two warps, who skip it.
struct Scores {
  Sums<4> half[2];
};

__device__ inline void zero(Scores& a) {
  fill(a.half[0], 0.f);
  fill(a.half[1], 0.f);
}

// Which scores stay: those of earlier columns (and the row's own), or of later ones.
enum class Side { earlier, later };

template <Side side>
__device__ inline bool has_half(int h, int warp) {
  return side == Side::earlier ? h == 0 || warp >= 2 : h == 1 || warp < 2;
}

// a += x y^T, columns col..col+15 of both; halves without a score left out.
template <Side side, typename T, class Tile>
__device__ inline void add_scores(Scores& a, const uint32_t (&x)[4], const Tile& y, int col, int warp) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (has_half<side>(h, warp)) add_product_transposed<T>(a.half[h], x, y, 32 * h, col);
  }
}

// Rounded, and zero on the other side of the diagonal and, without `Diagonal`, on it; halves that are all
// zero are not touched.
template <Side side, bool Diagonal, typename T>
__device__ inline void round_scores(Operand<2> (&to)[2], const Scores& a, int warp) {
  // Of the diagonal's half one of two blocks of 16 columns is its own. No branches: with them the compiler
  // kept `to` in memory, for one half's place there or the other's.
  const bool second = warp & 1;
  uint32_t stay[2][4];
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    const int row = lane_row() + (x & 1) * 8, col = lane_col() + (x >> 1) * 8;
    const auto stays = [&](int c) {
      return (side == Side::earlier ? c < row : c > row) || (Diagonal && c == row);
    };
    const uint32_t diagonal = (stays(col) ? 0xffffu : 0u) | (stays(col + 1) ? 0xffff0000u : 0u);
    stay[0][x] = second ? (side == Side::earlier ? ~0u : 0u) : diagonal;
    stay[1][x] = second ? diagonal : (side == Side::earlier ? 0u : ~0u);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (!has_half<side>(h, warp)) continue;
    round_to<T>(to[h], a.half[h]);
    const uint32_t whole = h == warp >> 1 ? 0u : ~0u;
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      to[h].at[0][x] &= stay[0][x] | whole;
      to[h].at[1][x] &= stay[1][x] | whole;
    }
  }
}

// sums += a y, columns col.. of y
template <Side side, typename T, int N, class Tile>
__device__ inline void add_scored(Sums<N>& sums, const Operand<2> (&a)[2], const Tile& y, int warp,
                                  int col = 0) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (has_half<side>(h, warp)) add_product<T>(sums, a[h], y, 32 * h, col);
  }
}

// The 16 columns of block `block` of the scores.
__device__ inline void block_of(Sums<2>& to, const Scores& a, int block) {
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    if (b != block) continue;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to.at[n][i] = a.half[b >> 1].at[2 * (b & 1) + n][i];
    }
  }
}

// The scores of rows with themselves, to [64].
__device__ inline void put_diagonal(float* to, const Scores& a, int warp) {
  Sums<2> own;
  block_of(own, a, warp);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane_row() + 8 * (i >> 1);
      if (8 * n + lane_col() + (i & 1) == row) to[kRows * warp + row] = own.at[n][i];
    }
  }
}

// Two neighbours of a tile, as floats.
template <typename T, class Tile>
__device__ inline float2 pair_at(const Tile& tile, int row, int col) {
  return unpaired<T>(*reinterpret_cast<const uint32_t*>(&tile.at(row, col)));
}
// At (row + lane_row(), col + lane_col()).
template <typename T, class Tile>
__device__ inline float2 lane_pair(const Tile& tile, int row, int col) {
  return unpaired<T>(*reinterpret_cast<const uint32_t*>(&lane_at(tile, row, col)));
}
template <typename T, class Tile>
__device__ inline void put_lane_pair(const Tile& tile, int row, int col, float left, float right) {
  *reinterpret_cast<uint32_t*>(&lane_at(tile, row, col)) = pair_of<T>(left, right);
}

// tile *= factors, 16 rows from `first` on.
template <typename T, int N, class Tile>
__device__ inline void scale_rows(const Tile& tile, int first, const Sums<N>& factors) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 x = lane_pair<T>(tile, first + 8 * i, 8 * n);
      put_lane_pair<T>(tile, first + 8 * i, 8 * n, x.x * factors.at[n][2 * i],
                       x.y * factors.at[n][2 * i + 1]);
    }
  }
}

// Where factors serve: e^{-X} takes the place of g, decay [M] becomes e^{L_C}, and weigh(row, col, weight) is
// called with e^{X} of (row + lane_row(), col + lane_col()) and the next column, until all have been. By all
// of the block after g has arrived: every `Warps` warps have `Columns` columns of g from its first on, a warp
// some of its own. True if factors serve for all of the block's columns, else nothing is written. The results
// are seen after the next barrier.
template <typename T, int Warps, int Columns, int M, class Weigh>
__device__ inline bool factor_gates(const SharedTile<float, kChunk, M>& g, float* decay, const Weigh& weigh) {
  constexpr int kTiles = Columns / 8 / Warps;  // of 8 columns, a warp's
  constexpr int kBlocks = kChunk / kRows;
  const int first = static_cast<int>(threadIdx.x) / 32 % Warps * kTiles * 8;
  uint32_t triangle[4], square[4];
  ones(triangle, Sum::after);
  ones(square, Sum::all);
  Sums<kBlocks> after[kTiles];  // from the last 16 rows to the first
  Sums<1> total[kTiles];
  bool small = true;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    fill(total[t], 0.f);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      GateParts<1> gates;
      load(gates, g, kRows * (kBlocks - 1 - b), first + 8 * t);
      Sums<1> sums = total[t];
      add_gates(sums, triangle, gates);
      add_gates(total[t], square, gates);
#pragma unroll
      for (int i = 0; i < 4; ++i) after[t].at[b][i] = kLog2E * sums.at[0][i];
    }
    small = small && kLog2E * fminf(total[t].at[0][0], total[t].at[0][1]) > -factored_limit<T>();
  }
  if (!__syncthreads_and(small)) return false;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int col = first + 8 * t;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = kRows * (kBlocks - 1 - b) + 8 * i;
        const float left = after[t].at[b][2 * i], right = after[t].at[b][2 * i + 1];
        weigh(row, col, float2{exp2_fast(left), exp2_fast(right)});
        *reinterpret_cast<float2*>(&lane_at(g, row, col)) = {exp2_fast(-left), exp2_fast(-right)};
      }
    }
    if (lane_row() == 0) {
      *reinterpret_cast<float2*>(decay + col + lane_col()) = {exp2_fast(kLog2E * total[t].at[0][0]),
                                                              exp2_fast(kLog2E * total[t].at[0][1])};
    }
  }
  return true;
}

// A warp's view of its chunk's gates in shared memory, `Columns` of the M: all arrays start at its first.
template <int M, int Columns = M>
struct Gates {
  static constexpr int N = Columns / 8;
  // e^{-X} where factors serve; else, after split(), the sums of log2 e^g through each row of its 16.
  SharedTile<float, kChunk, M> g;
  float* decay;   // [M]: e^{L_C}, where factors serve
  float* totals;  // [4, M]: sums of each 16 rows, elsewhere
  int warp;       // of four

  __device__ int row() const { return kRows * warp; }
  // Row lane_row() + 8 i of the warp's, columns 8n + lane_col() and the next.
  __device__ float2 factor(int i, int n) const {
    return *reinterpret_cast<const float2*>(&lane_at(g, row() + 8 * i, 8 * n));
  }
  __device__ float2 chunk_decay(int n) const {
    return *reinterpret_cast<const float2*>(decay + 8 * n + lane_col());
  }
  // sums *= e^{-X}
  __device__ void multiply(Sums<N>& sums) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 r = factor(i, n);
        sums.at[n][2 * i] *= r.x, sums.at[n][2 * i + 1] *= r.y;
      }
    }
  }

  // The rest is for chunks where factors do not serve.

  // By four warps, each its rows; all warps of the block pass the barriers around it.
  __device__ void split() const {
    uint32_t triangle[4];
    ones(triangle, Sum::through);
    Sums<N> through;
    fill(through, 0.f);
    add_gates(through, triangle, g, row());
    __syncwarp();
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int col = 8 * n + lane_col();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<float2*>(&g.at(row() + lane_row() + 8 * i, col)) = {
            kLog2E * through.at[n][2 * i], kLog2E * through.at[n][2 * i + 1]};
      }
      if (lane_row() == 7) {
        *reinterpret_cast<float2*>(totals + warp * M + col) = {kLog2E * through.at[n][2],
                                                               kLog2E * through.at[n][3]};
      }
    }
    __syncwarp();
  }

  __device__ float2 block_decay(int block, int n) const {
    const float2 sum = *reinterpret_cast<const float2*>(totals + block * M + 8 * n + lane_col());
    return {exp2_fast(sum.x), exp2_fast(sum.y)};
  }
  // Of row j of the warp's 16.
  __device__ float2 through(int j, int n) const {
    return *reinterpret_cast<const float2*>(&g.at(row() + j, 8 * n + lane_col()));
  }
  __device__ void through(Sums<N>& to) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 sum = through(lane_row() + 8 * i, n);
        to.at[n][2 * i] = sum.x, to.at[n][2 * i + 1] = sum.y;
      }
    }
  }
  // e^{sum through each row}, and e^{sum after it}, within the 16.
  __device__ void decay_through(Sums<N>& to) const {
    through(to);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to.at[n][i] = exp2_fast(to.at[n][i]);
    }
  }
  __device__ void decay_after(Sums<N>& to) const {
    through(to);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float2 all = through(kRows - 1, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) to.at[n][i] = exp2_fast((i & 1 ? all.y : all.x) - to.at[n][i]);
    }
  }
};

// The 16 x 16 scratch of a warp.
struct Scratch {
  float* at;

  __device__ void put(const Sums<2>& block) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        at[(lane_row() + 8 * (i >> 1)) * kRows + 8 * n + lane_col() + (i & 1)] = block.at[n][i];
      }
    }
    __syncwarp();
  }
  __device__ void get(Sums<2>& block) const {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        block.at[n][i] = at[(lane_row() + 8 * (i >> 1)) * kRows + 8 * n + lane_col() + (i & 1)];
      }
    }
    __syncwarp();
  }
  // Column j: of rows lane_row() and lane_row() + 8.
  __device__ float2 column(int j) const {
    return {at[lane_row() * kRows + j], at[(lane_row() + 8) * kRows + j]};
  }
  // By all lanes, from sums over the four lanes of a row.
  __device__ void put_column(int j, float above, float below) const {
    above = sum_over_row(above);
    below = sum_over_row(below);
    if (lane_col() == 0) {
      at[lane_row() * kRows + j] = above;
      at[(lane_row() + 8) * kRows + j] = below;
    }
  }
};

// The block `block` of the scores becomes `from`.
__device__ inline void set_block(Scores& a, const Sums<2>& from, int block) {
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    if (b != block) continue;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a.half[b >> 1].at[2 * (b & 1) + n][i] = from.at[n][i];
    }
  }
}

// Row i of the warp's 16 against row j, slot by slot: e^{l_i - l_j}, 1 where j is the later row (masked
// elsewhere).
__device__ inline float decay_between(float later, float earlier) {
  return exp2_fast(fminf(later - earlier, 0.f));
}

// The reads of a warp's rows, `Columns` of the M slots: all arrays start at its first. A `Strict` value_read
// leaves out what a row reads of its own token.
template <typename T, int M, bool Strict = false, int Columns = M>
struct RowReads {
  static constexpr int N = Columns / 8;
  using Tile = SharedTile<T, kChunk, M>;

  // What they need, all in shared memory.
  struct Shared {
    Gates<M, Columns> gates;
    Tile s;    // the weights times e^{sum of g after the row}, in the chunk or within its 16
    Tile raw;  // the weights as they are, where factors do not serve
    Scratch scratch;
  };
  Shared at;
  bool factored;

  // By all of the block, `Warps` warps with these columns, after g and s have arrived. Ends in a barrier.
  template <int Warps>
  __device__ void start() {
    const Tile s = at.s;
    factored =
        factor_gates<T, Warps, Columns>(at.gates.g, at.gates.decay, [&](int row, int col, float2 weight) {
          const float2 old = lane_pair<T>(s, row, col);
          put_lane_pair<T>(s, row, col, old.x * weight.x, old.y * weight.y);
        });
    __syncthreads();
  }

  // Of row lane_row() + 8 i of the warp's, columns 8n + lane_col() and the next; 1 where factors do not
  // serve.
  __device__ float2 factor(int i, int n) const {
    const float2 r = at.gates.factor(i, n);
    return {factored ? r.x : 1.f, factored ? r.y : 1.f};
  }

  // Where factors do not serve, before the first read and when `raw`, the tile of at.raw, is free. By all
  // warps; ends in a barrier.
  template <int Threads>
  __device__ void split(const Tile& raw, const In<4>& weights, const In<4>& g, const Piece& piece, int head,
                        int slots) {
    if (factored) return;
    __syncthreads();
    load_weights<Threads>(raw, weights, g, piece, head, slots);
    commit_copies();
    split_by_blocks(at);
    wait_copies<0>();
    __syncthreads();
  }

  // x *= e^{L_i}, where factors do not serve.
  __device__ void decay_from_start(Sums<N>& x) const {
    Sums<N> copy = x;  // what goes by reference is kept in memory
    decay_by_blocks(at, copy);
    x = copy;
  }

  // y, so far x H, becomes the value read. a: the scores.
  __device__ void value_read(Sums<N>& y, const Scores& a) const {
    if (!factored) {
      Sums<N> copy = y;
      const Scores scores = a;
      value_read_by_blocks(at, copy, scores);
      y = copy;
      return;
    }
    scale_columns(y, [&](int n) { return at.gates.chunk_decay(n); });
    Operand<2> scores[2];
    round_scores<Side::earlier, !Strict, T>(scores, a, at.gates.warp);
    add_scored<Side::earlier, T>(y, scores, at.s, at.gates.warp);
    at.gates.multiply(y);
  }

  // p becomes f, and what these columns add to W. Where factors serve p may come with them: `Multiplied` says
  // so.
  template <bool Multiplied = false>
  __device__ void key_read(Sums<N>& p, Scores& W) const {
    if (!factored) {
      Sums<N> copy = p;
      Scores scores;
      key_read_by_blocks(at, copy, scores);
      p = copy;
      W = scores;
    } else {
      zero(W);
      if constexpr (!Multiplied) at.gates.multiply(p);
#pragma unroll
      for (int k = 0; k < N / 2; ++k) {
        Operand<1> x;
        round_to<T>(x, p, 2 * k);
        add_scores<Side::earlier, T>(W, x.at[0], at.s, 16 * k, at.gates.warp);
      }
      scale_columns(p, [&](int n) { return at.gates.chunk_decay(n); });
    }
  }
  // The same with all columns' W, rounded.
  __device__ void key_read(Sums<N>& p, Operand<2> (&w)[2]) const {
    Scores W;
    key_read(p, W);
    round_scores<Side::earlier, true, T>(w, W, at.gates.warp);
  }

 private:
  // Rarely run, and large: calls of their own, lest they take registers from the rest.
  __device__ __noinline__ static void split_by_blocks(const Shared at) {
    at.gates.split();
    Sums<N> after;
    at.gates.decay_after(after);
    scale_rows<T>(at.s, at.gates.row(), after);
  }

  __device__ __noinline__ static void decay_by_blocks(const Shared at, Sums<N>& x) {
    Sums<N> through;
    at.gates.decay_through(through);
    multiply(x, through);
#pragma unroll 1
    for (int b = 0; b < at.gates.warp; ++b) {
      scale_columns(x, [&](int n) { return at.gates.block_decay(b, n); });
    }
  }

  __device__ __noinline__ static void value_read_by_blocks(const Shared at, Sums<N>& y, const Scores& a) {
    const Gates<M, Columns>& gates = at.gates;
    // y <- e^{l} (... ((x H) e^{total 0} + a_0 s_0) e^{total 1} + ...)
    Sums<2> block;
#pragma unroll 1
    for (int b = 0; b < gates.warp; ++b) {
      block_of(block, a, b);
      Operand<1> scores;
      round_to<T>(scores, block);
      scale_columns(y, [&](int n) { return gates.block_decay(b, n); });
      add_product<T>(y, scores, at.s, kRows * b);
    }
    block_of(block, a, gates.warp);
    at.scratch.put(block);
    Sums<N> through;
    gates.through(through);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) y.at[n][i] *= exp2_fast(through.at[n][i]);
    }
#pragma unroll 1
    for (int j = 0; j < kRows; ++j) {
      float2 score = at.scratch.column(j);
      if (j + Strict > lane_row()) score.x = 0.f;
      if (j + Strict > lane_row() + 8) score.y = 0.f;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float2 weight = pair_at<T>(at.raw, gates.row() + j, 8 * n + lane_col()),
                     l = gates.through(j, n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          y.at[n][i] += (i < 2 ? score.x : score.y) * (i & 1 ? weight.y : weight.x) *
                        decay_between(through.at[n][i], i & 1 ? l.y : l.x);
        }
      }
    }
    __syncwarp();
  }

  __device__ __noinline__ static void key_read_by_blocks(const Shared at, Sums<N>& p, Scores& W) {
    const Gates<M, Columns>& gates = at.gates;
    zero(W);
    Sums<N> through;
    gates.through(through);
#pragma unroll 1
    for (int j = 0; j < kRows; ++j) {
      float above = 0.f, below = 0.f;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float2 weight = pair_at<T>(at.raw, gates.row() + j, 8 * n + lane_col()),
                     l = gates.through(j, n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          (i < 2 ? above : below) +=
              p.at[n][i] * (i & 1 ? weight.y : weight.x) * decay_between(through.at[n][i], i & 1 ? l.y : l.x);
        }
      }
      at.scratch.put_column(j, above, below);
    }
    Sums<2> block;
    at.scratch.get(block);
    set_block(W, block, gates.warp);
    // The earlier blocks, from the nearest: f takes on one block's decay after the other.
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p.at[n][i] *= exp2_fast(through.at[n][i]);
    }
#pragma unroll 1
    for (int b = gates.warp - 1; b >= 0; --b) {
      Operand<N / 2> x;
      round_to<T>(x, p);
      fill(block, 0.f);
      add_product_transposed<T>(block, x, at.s, kRows * b);
      set_block(W, block, b);
      scale_columns(p, [&](int n) { return gates.block_decay(b, n); });
    }
  }
};

}  // namespace girih::kernels
