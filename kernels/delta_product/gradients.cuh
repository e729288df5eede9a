// The gradients, a block a chunk and query head. S: the state before the chunk, dS: the gradient of the one
// after it. With a_i = rho_i e^{L_i}, D_ij = rho_i rho_j e^{L_i - L_j}, M_ij = D_ij k_i . k_j (j < i) and r,
// w, read as in the scans,
//
//     E_i  = v_i - a_i S^T k_i - sum_j M_ij U_j                       what step i finds amiss: U = beta E
//     dv_i = beta_i G_i
//     dbeta_i = G_i . E_i = G_i . (v_i - a_i S^T k_i) - sum_j M_ij G_i . U_j
//     dP_tj = do_t . U_j      N_ij = -beta_i G_i . U_j (j < i)
//     dq_t = r_t S do_t + sum_j scale rho_t rho_j e^{L_t - L_j} dP_tj k_j
//     dk_j = w_j dS U_j - read_j S G_j + sum_t scale rho_t rho_j e^{L_t - L_j} dP_tj q_t
//            + sum_{i<j} D_ji N_ji k_i + sum_{i>j} D_ij N_ij k_i
//
// and, of unit vectors, what of dq and dk lies along q and k is taken away. A gate's gradient is the sum over
// the tokens from its own on of
//
//     dL_t = sum_j (P dP)_tj + r_t q_t . S do_t + sum of, for its rows i,
//                sum_j (N M)_ij - sum_j (N M)_ji - sum_s (P dP)_si - read_i G_i . S^T k_i - w_i k_i . dS U_i
//
// without what a token's rows do to each other, which no gate touches, plus <state after the chunk, dS>.
//
// A warpgroup has half of D's columns of dq and dk (at D = 64 all), and of a slab's 64 of U; the first
// has N, the second (or the only one) dP. A block waits for its loads and for itself: several of a
// multiprocessor are each other's work meanwhile, so what they hold of shared memory counts. At D = 128 dS
// comes where S was, and queries stand below the half tile of do, or come where do was.
#pragma once

#include "delta_product/tokens.cuh"

namespace girih::kernels::delta_product {

template <int D>
struct GradientSizes {
  static constexpr int kGroups = D == 64 ? 1 : 2;  // warpgroups
  static constexpr int kCols = D / kGroups;        // of dq and dk, a warpgroup's
  static constexpr int kThreads = 128 * kGroups;
  static constexpr int kSlab = D == 128 ? 128 : 64;  // columns of V at a time
  static constexpr int kParts = kSlab / 64;          // warpgroups that have some of them
  static constexpr bool kApart = D != 128;           // S and dS, and do and q, each have a room
  static constexpr int blocks(bool one_slab) {       // of a multiprocessor
    return D == 256 ? 1 : (D == 64 ? 2 : 1) + (one_slab ? 1 : 0);
  }
  static constexpr int kQueries = kGroups == 1 ? 0 : 1;  // the warpgroup that has dP
};

// What warps add up for each other: a part from each warpgroup, or from each warp.
template <int D>
struct GradientSums {
  using Sizes = GradientSizes<D>;
  float beta[Sizes::kParts + 1][kDeltaRows];  // of dbeta; the last part is that of M
  float read[Sizes::kParts][kDeltaRows];      // G . S^T k
  float state[Sizes::kGroups][kDeltaRows];    // k . dk through the states
  float query[Sizes::kGroups][kDeltaRows];    // q . dq through the state
  float row[kDeltaRows], token[kDeltaRows];   // of N M and of P dP, and their columns
  float row_cols[kTilesDown][kDeltaRows], token_cols[kTilesDown][kDeltaRows];
  float square[2][Sizes::kGroups][kDeltaRows];  // |k|^2, |q|^2
  float along[2][Sizes::kGroups][kDeltaRows];   // k . dk, q . dq
  float edge[Sizes::kThreads / 32];
};

// OneSlab: V is no wider than a slab.
template <typename T, int D, bool OneSlab>
struct GradientTiles {
  using Sizes = GradientSizes<D>;
  using Rows = BlockTile<T, D>;               // of k, q; 64 columns of a state
  using Values = BlockTile<T, Sizes::kSlab>;  // of G, do; of v, then Z, then U
  using Square = BlockTile<T, kDeltaRows>;
  static constexpr int kStateBytes = Sizes::kParts * Rows::kBytes;
  static constexpr int kFactorBytes = kDeltaRows * 4, kPartialBytes = 2 * kDeltaRows * kDeltaRows * 4;
  // N and dP as they go into products: where dS, U and G were, and where S was if it is not read again.
  enum { kStepRows, kStepCols, kOfTokens, kOfRows, kSquares };
  static constexpr int kLackBytes = D == 64 && OneSlab ? Square::kBytes : 0;

  static constexpr int bytes(bool many_tokens) {
    return (Sizes::kApart ? 2 : 1) * kStateBytes + kLackBytes +
           (Sizes::kApart || many_tokens ? 2 : 1) * Rows::kBytes + 3 * Values::kBytes + kDeltaLost +
           kFactorBytes + static_cast<int>(sizeof(GradientSums<D>)) + (OneSlab ? 0 : kPartialBytes);
  }

  unsigned char *states, *gradients, *squares;
  Values u, g, dout;
  Rows k, q;
  unsigned char* prepared;
  float* factors;
  GradientSums<D>* sums;
  float* partial;  // N and dP of the slabs so far

  __device__ GradientTiles(unsigned char* next, bool many_tokens) {
    const auto take = [&](int bytes) {
      unsigned char* const here = next;
      next += bytes;
      return here;
    };
    states = take(kStateBytes);
    gradients = Sizes::kApart ? take(kStateBytes) : states;
    take(kLackBytes);
    u.data = reinterpret_cast<T*>(take(Values::kBytes));
    g.data = reinterpret_cast<T*>(take(Values::kBytes));
    squares = OneSlab ? gradients : states;
    static_assert(kSquares * Square::kBytes <= (Sizes::kApart && !OneSlab ? 2 : 1) * kStateBytes +
                                                   kLackBytes + (D == 64 ? 2 * Values::kBytes : 0),
                  "");
    k.data = reinterpret_cast<T*>(take(Rows::kBytes));
    if (Sizes::kApart) q.data = reinterpret_cast<T*>(take(Rows::kBytes));
    dout.data = reinterpret_cast<T*>(take(Values::kBytes));
    if (!Sizes::kApart) {
      // Products of 64 rows that start at row 32 run on into what follows: their last 32 rows are not used.
      q.data = many_tokens ? reinterpret_cast<T*>(take(Rows::kBytes)) : dout.data + kDeltaRows / 2 * 64;
    }
    prepared = take(kDeltaLost);
    factors = reinterpret_cast<float*>(take(kFactorBytes));
    sums = reinterpret_cast<GradientSums<D>*>(take(sizeof(GradientSums<D>)));
    partial = reinterpret_cast<float*>(next);
  }

  // 64 of a slab's columns from `col` on.
  __device__ static Rows part(unsigned char* states, int col) {
    return {reinterpret_cast<T*>(states + col / 64 * Rows::kBytes)};
  }
  __device__ Rows s(int col) const { return part(states, col); }
  __device__ Rows ds(int col) const { return part(gradients, col); }
  // S once more, where U and G were.
  __device__ unsigned char* again() const { return reinterpret_cast<unsigned char*>(u.data); }
  __device__ Square square(int i) const { return {reinterpret_cast<T*>(squares + i * Square::kBytes)}; }
};

// What a block knows of its chunk, and a warp of its place: 16 rows, and columns of D from `col` on.
struct Here {
  Piece piece;
  int64_t chunk;
  int head, query_head, rows;
  bool first;        // of the memory head's query heads
  bool many_tokens;  // a chunk may have more than 32
  int group, band, row, mine, col;

  __device__ int bands() const { return many_tokens ? kTilesDown : kTilesDown / 2; }  // of 16 tokens
};

// A warp's 16 rows to a tile, rounded.
template <typename T, int N, class Tile>
__device__ inline void put_rows(const Tile& tile, int row, int col, const Sums<N>& sums) {
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    Operand<1> block;
    round_to<T>(block, sums, n);
    store_block(tile, row, col + 8 * n, block.at[0]);
  }
}
// The lane's two rows, to where others find them.
__device__ inline void put_rows(float* to, int row, float2 x) {
  if (lane_col() == 0) to[row + lane_row()] = x.x, to[row + lane_row() + 8] = x.y;
}
__device__ inline float2 sum_over_rows(float2 x) { return {sum_over_row(x.x), sum_over_row(x.y)}; }

// 64 columns of a tile's 16 rows as a left factor: row lane_row() times scale.x, the one 8 further times
// scale.y.
template <typename T, class Tile>
__device__ inline void load_scaled(Operand<4>& a, const Tile& tile, int row, int col, float2 scale) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    load_block(a.at[k], tile, row, col + 16 * k);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 value = unpaired<T>(a.at[k][i]);
      const float by = i % 2 == 0 ? scale.x : scale.y;
      a.at[k][i] = pair_of<T>(value.x * by, value.y * by);
    }
  }
}

// x . a tile's rows from column `col` on, for the lane's two rows.
template <typename T, int N, class Tile>
__device__ inline float2 dot_rows(const Sums<N>& x, const Tile& tile, int row, int col) {
  float2 sum = {0.f, 0.f};
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    uint32_t block[4];
    load_block(block, tile, row, col + 8 * n);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float2 y = unpaired<T>(block[m]);
      const float(&of)[4] = x.at[n + m / 2];
      float& of_row = m % 2 == 0 ? sum.x : sum.y;
      of_row = fmaf(y.x, of[m % 2 * 2], fmaf(y.y, of[m % 2 * 2 + 1], of_row));
    }
  }
  return sum_over_rows(sum);
}
// The squares of Cols columns of a tile's rows.
template <int Cols, typename T, class Tile>
__device__ inline float2 square_rows(const Tile& tile, int row, int col) {
  float2 sum = {0.f, 0.f};
#pragma unroll
  for (int n = 0; n < Cols / 8; n += 2) {
    uint32_t block[4];
    load_block(block, tile, row, col + 8 * n);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float2 y = unpaired<T>(block[m]);
      float& of_row = m % 2 == 0 ? sum.x : sum.y;
      of_row = fmaf(y.x, y.x, fmaf(y.y, y.y, of_row));
    }
  }
  return sum_over_rows(sum);
}

// x -= (row . x) row / |row|^2: what is left is orthogonal to the rows of a tile. `along`: row . x.
template <typename T, int N, class Tile>
__device__ inline void take_along(Sums<N>& x, const Tile& tile, int row, int col, float2 along,
                                  float2 inverse_length) {
  const float2 of = {-along.x * inverse_length.x * inverse_length.x,
                     -along.y * inverse_length.y * inverse_length.y};
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    uint32_t block[4];
    load_block(block, tile, row, col + 8 * n);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float2 y = unpaired<T>(block[m]);
      float(&of_x)[4] = x.at[n + m / 2];
      const float by = m % 2 == 0 ? of.x : of.y;
      of_x[m % 2 * 2] = fmaf(by, y.x, of_x[m % 2 * 2]);
      of_x[m % 2 * 2 + 1] = fmaf(by, y.y, of_x[m % 2 * 2 + 1]);
    }
  }
}

// What all warpgroups found of the lane's two rows.
template <int Groups>
__device__ inline float2 whole(const float (&parts)[Groups][kDeltaRows], int mine) {
  float2 sum = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < Groups; ++i) sum.x += parts[i][mine], sum.y += parts[i][mine + 8];
  return sum;
}
// 1 / length; of a row of zeros 1000.
__device__ inline float2 inverse_length(float2 square) {
  return {rsqrtf(square.x + 1e-6f), rsqrtf(square.y + 1e-6f)};
}

// Sums over the lanes that share columns of eight elements; the lane gets that of element lane_row().
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
__device__ inline void add_scores(Sums<N>& sums, const Tile& x, const Tile& y, int row = 0) {
  fence_products(sums);
  start_product_transposed(sums, x, y, row);
  commit_products();
  wait_products<0>(sums);
}

// sums += x S^T of a slab, the columns of D from `col` on.
template <int D, typename T>
__device__ inline void add_states(Sums<GradientSizes<D>::kCols / 8>& sums,
                                  const BlockTile<T, GradientSizes<D>::kSlab>& x, unsigned char* states,
                                  int col) {
  fence_products(sums);
#pragma unroll
  for (int v = 0; v < GradientSizes<D>::kSlab; v += 64) {
    start_product(sums, x, v,
                  BlockTile<T, D>{reinterpret_cast<T*>(states + v / 64 * BlockTile<T, D>::kBytes)}, col);
  }
  commit_products();
  wait_products<0>(sums);
}

// All of the block: starts to load a slab's columns of a state.
template <typename T, int D>
__device__ inline void load_state(unsigned char* to, const void* states, const DeltaShape& shape,
                                  const Here& here, int v) {
  using Rows = BlockTile<T, D>;
  const T* const from =
      static_cast<const T*>(states) + ((here.chunk * shape.heads + here.head) * shape.V + v) * shape.D;
#pragma unroll
  for (int i = 0; i < GradientSizes<D>::kParts; ++i) {
    load_async<GradientSizes<D>::kThreads>(Rows{reinterpret_cast<T*>(to + i * Rows::kBytes)},
                                           from + static_cast<int64_t>(64 * i) * shape.D, shape.D,
                                           shape.V - v - 64 * i, shape.D, threadIdx.x);
  }
}
// To the L2 cache, where what reads dS for <S, dS> brings it else.
template <typename T, int D>
__device__ inline void prefetch_state(const void* states, const DeltaShape& shape, const Here& here, int v) {
  const T* const from =
      static_cast<const T*>(states) + ((here.chunk * shape.heads + here.head) * shape.V + v) * shape.D;
  const int count = min(GradientSizes<D>::kSlab, shape.V - v) * shape.D;
  for (int i = threadIdx.x * 64; i < count; i += GradientSizes<D>::kThreads * 64) prefetch(from + i);
}
// Rows of tokens.
template <int D, typename T, int Cols>
__device__ inline void load_rows(const BlockTile<T, Cols>& tile, const T* from, int64_t stride, int cols,
                                 const Here& here) {
  using Sizes = GradientSizes<D>;
  if constexpr (!Sizes::kApart) {
    if (!here.many_tokens) {
      load_async<Sizes::kThreads>(HalfTile<T, Cols>{tile}, from, stride, here.piece.length, cols,
                                  threadIdx.x);
      return;
    }
  }
  load_async<Sizes::kThreads>(tile, from, stride, here.piece.length, cols, threadIdx.x);
}
// And what stands beside them of v, G and do.
template <typename T, int D, bool OneSlab>
__device__ inline void load_values(const DeltaGradients& p, const Here& here,
                                   const GradientTiles<T, D, OneSlab>& tile, int v) {
  using Sizes = GradientSizes<D>;
  const int64_t batch = here.piece.sequence.batch, row = here.piece.start * p.shape.n;
  const int cols = p.shape.V - v;
  load_async<Sizes::kThreads>(tile.u, at<T>(p.v, batch, row, here.head, v), p.v.stride[1], here.rows, cols,
                              threadIdx.x);
  load_async<Sizes::kThreads>(tile.g, at<T>(p.dz, batch, row, here.head, v), p.dz.stride[1], here.rows, cols,
                              threadIdx.x);
  const T* const dout = at<T>(p.dout, batch, here.piece.start, here.query_head, v);
  load_rows<D>(tile.dout, dout, p.dout.stride[1], cols, here);
}
template <typename T, int D, bool OneSlab>
__device__ inline void load_queries(const DeltaGradients& p, const Here& here,
                                    const GradientTiles<T, D, OneSlab>& tile) {
  load_rows<D>(tile.q, at<T>(p.q, here.piece.sequence.batch, here.piece.start, here.query_head, 0),
               p.q.stride[1], p.shape.D, here);
}

// This thread's share of a slab of <S, dS>: of the rounded states, but before a sequence's first token and
// after its last one in fp32.
template <typename T, int D, bool OneSlab>
class Edge {
  using Sizes = GradientSizes<D>;
  static constexpr int kPacks = Sizes::kSlab * D / 8 / Sizes::kThreads;
  uint4 ahead_[Sizes::kApart ? 1 : kPacks];  // dS, whose room S has yet

  __device__ static int row(int pack) { return (pack * Sizes::kThreads + threadIdx.x) / (D / 8); }
  __device__ static int col(int pack) { return (pack * Sizes::kThreads + threadIdx.x) % (D / 8) * 8; }
  __device__ static const T* of_chunk(const void* states, const DeltaShape& shape, const Here& here, int v) {
    return static_cast<const T*>(states) + ((here.chunk * shape.heads + here.head) * shape.V + v) * shape.D;
  }

 public:
  __device__ void load(const DeltaGradients& p, const Here& here, int v) {
    if (Sizes::kApart) return;
    const T* const from = of_chunk(p.gradients, p.shape, here, v);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const bool valid = v + row(i) < p.shape.V && col(i) < p.shape.D;
      ahead_[i] =
          valid ? *reinterpret_cast<const uint4*>(from + row(i) * p.shape.D + col(i)) : uint4{0u, 0u, 0u, 0u};
    }
  }

  __device__ float sum(const DeltaGradients& p, const Here& here, const GradientTiles<T, D, OneSlab>& tile,
                       int v) const {
    const bool first = here.piece.index == 0 && p.initial.data != nullptr,
               last =
                   here.piece.start + here.piece.length == here.piece.sequence.end && p.end.data != nullptr;
    float sum = 0.f;
    if (first || last) {
      const auto given = [&](const In<4>& state, const void* rounded, bool exact, int d, int col) {
        if (!exact) {
          return unpaired<T>(
              *reinterpret_cast<const uint32_t*>(of_chunk(rounded, p.shape, here, v) + col * p.shape.D + d));
        }
        const float* const at = static_cast<const float*>(state.data) +
                                here.piece.sequence.index * state.stride[0] + here.head * state.stride[1] +
                                d * state.stride[2] + (v + col) * state.stride[3];
        return make_float2(at[0], at[state.stride[2]]);
      };
      const int cols = min(Sizes::kSlab, p.shape.V - v);
#pragma unroll 1
      for (int i = threadIdx.x; i < cols * p.shape.D / 2; i += Sizes::kThreads) {
        const int d = i / cols * 2, col = i % cols;
        const float2 s = given(p.initial, p.states, first, d, col),
                     ds = given(p.end, p.gradients, last, d, col);
        sum = fmaf(s.x, ds.x, fmaf(s.y, ds.y, sum));
      }
      return sum;
    }
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int of_slab = row(i) % 64;
      const uint4 s = *reinterpret_cast<const uint4*>(&tile.s(row(i)).at(of_slab, col(i)));
      const uint4 ds = Sizes::kApart ? *reinterpret_cast<const uint4*>(&tile.ds(row(i)).at(of_slab, col(i)))
                                     : ahead_[Sizes::kApart ? 0 : i];
      const uint32_t x[4] = {s.x, s.y, s.z, s.w}, y[4] = {ds.x, ds.y, ds.z, ds.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 of_s = unpaired<T>(x[j]), of_ds = unpaired<T>(y[j]);
        sum = fmaf(of_s.x, of_ds.x, fmaf(of_s.y, of_ds.y, sum));
      }
    }
    return sum;
  }
};

// dv of a slab, eight columns at a time.
template <typename T, int D, bool OneSlab>
__device__ inline void put_value_gradients(const DeltaGradients& p, const Here& here,
                                           const GradientTiles<T, D, OneSlab>& tile, Vectors vectors, int v) {
  using Sizes = GradientSizes<D>;
  T* const to = at<T>(p.dv, here.piece.sequence.batch, here.piece.start * p.shape.n, here.head, v);
#pragma unroll 2
  for (int i = threadIdx.x; i < kDeltaRows * Sizes::kSlab / 8; i += Sizes::kThreads) {
    const int row = i / (Sizes::kSlab / 8), col = i % (Sizes::kSlab / 8) * 8;
    if (row >= here.rows || col >= p.shape.V - v) continue;
    const float beta = vectors.element(kDeltaBeta, row);
    const uint4 g = *reinterpret_cast<const uint4*>(&tile.g.at(row, col));
    uint32_t pack[4] = {g.x, g.y, g.z, g.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 value = unpaired<T>(pack[j]);
      pack[j] = pair_of<T>(beta * value.x, beta * value.y);
    }
    *reinterpret_cast<uint4*>(to + row * p.dv.stride[1] + col) = {pack[0], pack[1], pack[2], pack[3]};
  }
}

// Of G U^T: N, weighted, with the rho of one row or the other, the one that is not the own row's; and the
// sums that have M.
template <typename T, int D, bool OneSlab>
__device__ inline void weigh_steps(const DeltaGradients& p, const Here& here,
                                   const GradientTiles<T, D, OneSlab>& tile, Vectors vectors,
                                   Sums<8>& products) {
  using Tiles = GradientTiles<T, D, OneSlab>;
  const int n = p.shape.n, mine = here.mine;
  const int own = mine / n * n, own_below = (mine + 8) / n * n;  // the first row of the same token
  const auto of_rows = [&](int vector) -> float2 {
    return {vectors.element(vector, mine), vectors.element(vector, mine + 8)};
  };
  const float2 log = of_rows(kDeltaLog), unit = of_rows(kDeltaUnit),
               beta = here.first ? of_rows(kDeltaBeta) : make_float2(0.f, 0.f);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 log_j = vectors.pair(kDeltaLog, 8 * i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = mine + j / 2 * 8, c = 8 * i + lane_col() + j % 2;
      const float decay = exp2_fast((j < 2 ? log.x : log.y) - (j % 2 == 0 ? log_j.x : log_j.y));
      products.at[i][j] = c < r ? products.at[i][j] * decay : 0.f;
    }
  }
  pin(products);
  float2 of_beta = {0.f, 0.f}, of_row = {0.f, 0.f};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // K K^T
    Sums<4> m;
    fill(m, 0.f);
    add_scores<T>(m, tile.k, tile.k, 32 * half);
    float cols[8];
    uint32_t with_col[4], with_row[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int eight = 32 * half + 8 * i;
      const float2 unit_j = vectors.pair(kDeltaUnit, eight);
      float kept[4], of_col[4], of_own[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int r = mine + j / 2 * 8, c = eight + lane_col() + j % 2;
        const float rho = j < 2 ? unit.x : unit.y, rho_j = j % 2 == 0 ? unit_j.x : unit_j.y,
                    step = j < 2 ? beta.x : beta.y;
        const float x = products.at[4 * half + i][j];
        const float with_m = x * m.at[i][j] * rho * rho_j;
        (j < 2 ? of_beta.x : of_beta.y) -= with_m;
        kept[j] = c < (j < 2 ? own : own_below) ? -step * with_m : 0.f;
        (j < 2 ? of_row.x : of_row.y) += kept[j];
        // Zeros without a sign: the halves of a block on the diagonal are put together bit by bit.
        const float weight = c < r ? -step * x : 0.f;
        of_col[j] = rho_j * weight, of_own[j] = rho * weight;
      }
      cols[2 * i] = kept[0] + kept[2], cols[2 * i + 1] = kept[1] + kept[3];
      with_col[i % 2 * 2] = pair_of<T>(of_col[0], of_col[1]);
      with_col[i % 2 * 2 + 1] = pair_of<T>(of_col[2], of_col[3]);
      with_row[i % 2 * 2] = pair_of<T>(of_own[0], of_own[1]);
      with_row[i % 2 * 2 + 1] = pair_of<T>(of_own[2], of_own[3]);
      if (i % 2 == 1) {
        store_block(tile.square(Tiles::kStepRows), here.row, eight - 8, with_col);
        store_block(tile.square(Tiles::kStepCols), here.row, eight - 8, with_row);
      }
    }
    if (p.gated) {
      const int col = 32 * half + lane_row() / 2 * 8 + lane_col() + lane_row() % 2;
      tile.sums->row_cols[here.band][col] = sums_over_col(cols);
    }
  }
  put_rows(tile.sums->beta[GradientSizes<D>::kParts], here.row, sum_over_rows(of_beta));
  if (p.gated) put_rows(tile.sums->row, here.row, sum_over_rows(of_row));
}

// Of do U^T: dP, weighted, for dk with the token's factor, for dq with the row's; and of P dP the sums.
template <typename T, int D, bool OneSlab>
__device__ inline void weigh_queries(const DeltaGradients& p, const Here& here,
                                     const GradientTiles<T, D, OneSlab>& tile, Vectors vectors,
                                     Sums<8>& products) {
  using Tiles = GradientTiles<T, D, OneSlab>;
  const int n = p.shape.n, token = here.mine;
  const int first = token * n, first_below = (token + 8) * n;  // the tokens' rows
  const float2 factor = {tile.factors[token], tile.factors[token + 8]};
  const float2 log = {vectors.element(kDeltaLog, min(first, kDeltaRows - 1)),
                      vectors.element(kDeltaLog, min(first_below, kDeltaRows - 1))};
  const bool has_tokens = here.band < here.bands();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 log_j = vectors.pair(kDeltaLog, 8 * i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = 8 * i + lane_col() + j % 2;
      const float decay = exp2_fast((j < 2 ? log.x : log.y) - (j % 2 == 0 ? log_j.x : log_j.y));
      products.at[i][j] = r < (j < 2 ? first : first_below) + n ? products.at[i][j] * decay : 0.f;
    }
  }
  pin(products);
  float2 of_token = {0.f, 0.f};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Q K^T
    Sums<4> scores;
    fill(scores, 0.f);
    if (p.gated) add_scores<T>(scores, tile.q, tile.k, 32 * half);
    if (!has_tokens) continue;
    float cols[8];
    uint32_t with_token[4], with_row[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int eight = 32 * half + 8 * i;
      const float2 unit_j = vectors.pair(kDeltaUnit, eight);
      float kept[4], of_factor[4], of_rho[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int start = j < 2 ? first : first_below, r = eight + lane_col() + j % 2;
        const float x = products.at[4 * half + i][j];
        of_factor[j] = (j < 2 ? factor.x : factor.y) * x;
        of_rho[j] = (j % 2 == 0 ? unit_j.x : unit_j.y) * x;
        kept[j] = r < start ? scores.at[i][j] * of_rho[j] * (j < 2 ? factor.x : factor.y) : 0.f;
        (j < 2 ? of_token.x : of_token.y) += kept[j];
      }
      cols[2 * i] = kept[0] + kept[2], cols[2 * i + 1] = kept[1] + kept[3];
      with_token[i % 2 * 2] = pair_of<T>(of_factor[0], of_factor[1]);
      with_token[i % 2 * 2 + 1] = pair_of<T>(of_factor[2], of_factor[3]);
      with_row[i % 2 * 2] = pair_of<T>(of_rho[0], of_rho[1]);
      with_row[i % 2 * 2 + 1] = pair_of<T>(of_rho[2], of_rho[3]);
      if (i % 2 == 1) {
        store_block(tile.square(Tiles::kOfTokens), here.row, eight - 8, with_token);
        store_block(tile.square(Tiles::kOfRows), here.row, eight - 8, with_row);
      }
    }
    if (p.gated) {
      const int col = 32 * half + lane_row() / 2 * 8 + lane_col() + lane_row() % 2;
      tile.sums->token_cols[here.band][col] = sums_over_col(cols);
    }
  }
  if (p.gated && has_tokens) put_rows(tile.sums->token, here.row, sum_over_rows(of_token));
}

// dg_t = sum_{s>=t} dL_s + <state after, dS>, by one warp.
template <int D>
__device__ inline void put_gate_gradients(const DeltaGradients& p, const Here& here, GradientSums<D>& sums,
                                          Vectors vectors) {
  using Sizes = GradientSizes<D>;
  const int n = p.shape.n, bands = here.bands();
  float edge = 0.f;
  if (here.first) {
    if (lane() < Sizes::kThreads / 32) {
      edge = sums.edge[lane()] * exp2_fast(vectors.element(kDeltaLog, kDeltaRows - 1));
    }
  }
  // Of a row: -read G . S^T k - w k . dS U, and its part of N M and P dP. sum w k . dS U is <state after, dS>
  // less that of the state before.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = lane() + 32 * i;
    float sum = 0.f;
    if (here.first) {
      float read = 0.f, state = 0.f, square = 0.f;
      for (int w = 0; w < Sizes::kParts; ++w) read += sums.read[w][row];
      for (int w = 0; w < Sizes::kGroups; ++w) {
        state += sums.state[w][row];
        square += sums.square[0][w][row];
      }
      read *= vectors.element(kDeltaRead, row);
      if (p.shape.unit) state *= rsqrtf(square + 1e-6f);
      edge += state + read;
      sum = sums.row[row] - state - 2.f * read;
      for (int w = 0; w < kTilesDown; ++w) sum -= sums.row_cols[w][row];
    }
    for (int w = 0; w < bands; ++w) sum -= sums.token_cols[w][row];
    __syncwarp();
    sums.row[row] = sum;
  }
  edge = sum_over_col(sum_over_row(edge));
  __syncwarp();
  float dl[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 2 * lane() + i;
    float sum = 0.f;
    if (token < here.piece.length) {
      sum = sums.token[token];
      float query = 0.f;
      for (int w = 0; w < Sizes::kGroups; ++w) query += sums.query[w][token];
      sum += query;
      for (int r = token * n; r < (token + 1) * n; ++r) sum += sums.row[r];
    }
    dl[i] = sum;
  }
  // The sum of the lanes from this one on, then of those after it.
  float sum = dl[0] + dl[1];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float later = __shfl_down_sync(~0u, sum, distance);
    if (lane() + distance < 32) sum += later;
  }
  const float later = __shfl_down_sync(~0u, sum, 1);
  sum = edge + (lane() == 31 ? 0.f : later) + dl[1];
#pragma unroll
  for (int i = 1; i >= 0; --i) {
    const int token = 2 * lane() + i;
    if (i == 0) sum += dl[0];
    if (token < here.piece.length) {
      static_cast<float*>(
          p.dg.data)[here.piece.sequence.batch * p.dg.stride[0] +
                     (here.piece.start + token) * p.dg.stride[1] + here.query_head * p.dg.stride[2]] = sum;
    }
  }
}

// OneSlab: V is no wider; then what is summed over slabs needs no registers before them.
template <typename T, int D, bool OneSlab>
__global__ void __launch_bounds__(GradientSizes<D>::kThreads, GradientSizes<D>::blocks(OneSlab))
    gradients(const __grid_constant__ DeltaGradients p) {
  using Sizes = GradientSizes<D>;
  using Tiles = GradientTiles<T, D, OneSlab>;
  constexpr int kThreads = Sizes::kThreads;
  constexpr bool kBoth = Sizes::kGroups == 1, kLater = kBoth && OneSlab, kAgain = OneSlab && !Sizes::kApart;
  extern __shared__ __align__(1024) unsigned char room[];
  const DeltaShape& shape = p.shape;
  const int n = shape.n, tokens = delta_chunk(n), members = shape.query_heads / shape.heads;
  const int warp = warp_index();
  Here here;
  here.query_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.query_heads));
  here.chunk = blockIdx.x / static_cast<unsigned>(shape.query_heads);
  here.head = here.query_head / members;
  here.first = here.query_head % members == 0;
  here.many_tokens = has_many(tokens);
  here.piece = piece_at(shape.tokens, here.chunk, tokens);
  if (here.piece.length == 0) return;
  here.rows = here.piece.length * n;
  here.group = warp / 4, here.band = warp % 4;
  here.row = kTileRows * here.band, here.mine = here.row + lane_row(), here.col = Sizes::kCols * here.group;
  const int64_t batch = here.piece.sequence.batch, first_row = here.piece.start * n;
  const Tiles tile(room, here.many_tokens);
  const bool has_edge = p.gated && here.first;

  load_async<kThreads>(tile.k, at<T>(p.k, batch, first_row, here.head, 0), p.k.stride[1], here.rows, shape.D,
                       threadIdx.x);
  load_state<T, D>(tile.states, p.states, shape, here, 0);
  commit_copies();
  for (int i = threadIdx.x * 16; i < kDeltaLost; i += kThreads * 16) {
    copy_async(shared_address(tile.prepared + i), prepared_at(p.prepared, shape, here.chunk, here.head) + i,
               true);
  }
  if (threadIdx.x < kDeltaRows / 4) {
    const float* from = p.factors + (here.chunk * shape.query_heads + here.query_head) * 2 * kDeltaRows;
    copy_async(shared_address(tile.factors + threadIdx.x * 4), from + threadIdx.x * 4, true);
  }
  load_queries(p, here, tile);

  const Prepared prepared{tile.prepared};
  const Vectors vectors = prepared.vectors();
  GradientSums<D>& sums = *tile.sums;
  const int row = here.row, mine = here.mine;
  const bool has_values = Sizes::kParts == Sizes::kGroups || here.group < Sizes::kParts;
  const int of_values = 64 * here.group;  // the first of the warpgroup's columns of a slab
  const auto of_rows = [&](int vector) -> float2 {
    return {vectors.element(vector, mine), vectors.element(vector, mine + 8)};
  };

  // Of dk, a memory head's other query heads have their part of dP alone: all else comes in times zero.
  const auto first_only = [&](float2 x) { return here.first ? x : make_float2(0.f, 0.f); };

  Sums<Sizes::kCols / 8> dq, dk;
  Sums<8> of_steps;  // G U^T
  Sums<8> both;      // do U^T, where one warpgroup has both
  Sums<8>& of_queries = kBoth ? both : of_steps;
  if (!OneSlab) {
    fill(dq, 0.f);
    fill(dk, 0.f);
  }
  float2 of_beta = {0.f, 0.f}, read_of_g = {0.f, 0.f};
  const auto slab = [&](int v) {
    const bool last = OneSlab || v + Sizes::kSlab >= shape.V;
    const auto add_edge = [&](float part) {
      part = sum_over_col(sum_over_row(part));
      if (lane() == 0) sums.edge[warp] = v == 0 ? part : sums.edge[warp] + part;
    };
    if (v != 0) {
      load_state<T, D>(tile.states, p.states, shape, here, v);
      commit_copies();
    }
    load_values(p, here, tile, v);
    if (Sizes::kApart) load_state<T, D>(tile.gradients, p.gradients, shape, here, v);
    commit_copies();
    Edge<T, D, OneSlab> of_states;
    if (has_edge) {
      of_states.load(p, here, v);
    } else if (!Sizes::kApart) {
      prefetch_state<T, D>(p.gradients, shape, here, v);
    }
    wait_copies<1>();
    fence_tiles();
    __syncthreads();

    if (has_edge && !Sizes::kApart) add_edge(of_states.sum(p, here, tile, v));

    // K S
    Sums<8> e;
    fill(e, 0.f);
    if (has_values) {
      fence_products(e);
      start_product_transposed(e, tile.k, tile.s(of_values));
      commit_products();
    }
    wait_copies<0>();
    fence_tiles();
    __syncthreads();

    if (here.first) put_value_gradients(p, here, tile, vectors, v);
    wait_products<0>(e);
    // dQ += dO S^T
    if (!OneSlab) add_states<D>(dq, tile.dout, tile.states, here.col);

    // Z = beta (V - a K S)
    const float2 log = of_rows(kDeltaLog), steps = of_rows(kDeltaBeta);
    if (has_values) {
      const float2 unit = of_rows(kDeltaUnit);
      const float2 a = {unit.x * exp2_fast(log.x), unit.y * exp2_fast(log.y)};
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        uint32_t values[4], g_block[4], z[4];
        load_block(values, tile.u, row, of_values + 8 * i);
        load_block(g_block, tile.g, row, of_values + 8 * i);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const float2 value = unpaired<T>(values[m]), g = unpaired<T>(g_block[m]);
          const float left = e.at[i + m / 2][m % 2 * 2], right = e.at[i + m / 2][m % 2 * 2 + 1];
          const float by = m % 2 == 0 ? a.x : a.y, step = m % 2 == 0 ? steps.x : steps.y;
          float& read = m % 2 == 0 ? read_of_g.x : read_of_g.y;
          float& of_step = m % 2 == 0 ? of_beta.x : of_beta.y;
          read = fmaf(g.x, left, fmaf(g.y, right, read));
          const float2 amiss = {fmaf(-by, left, value.x), fmaf(-by, right, value.y)};
          of_step = fmaf(g.x, amiss.x, fmaf(g.y, amiss.y, of_step));
          z[m] = pair_of<T>(step * amiss.x, step * amiss.y);
        }
        store_block(tile.u, row, of_values + 8 * i, z);
      }
      if (last) {
        put_rows(sums.beta[here.group], row, sum_over_rows(of_beta));
        if (p.gated) put_rows(sums.read[here.group], row, sum_over_rows(read_of_g));
      }
    }
    // dK -= (read * G) S^T without rho
    const float2 of_g = first_only({-steps.x * exp2_fast(log.x), -steps.y * exp2_fast(log.y)});
    if (OneSlab) fill(dk, 0.f);
#pragma unroll
    for (int i = 0; i < Sizes::kParts; ++i) {
      Operand<4> g;
      load_scaled<T>(g, tile.g, row, 64 * i, of_g);
      fence_products(dk);
      start_product<T>(dk, g, tile.s(64 * i), here.col);
      commit_products();
      wait_products<0>(dk);
    }
    fence_tiles();
    __syncthreads();
    if (!Sizes::kApart) {
      load_state<T, D>(tile.gradients, p.gradients, shape, here, v);
      commit_copies();
    }

    // U = X Z
    if (has_values) {
      Sums<8> u;
      fill(u, 0.f);
#pragma unroll
      for (int j = 0; j < kTilesDown; ++j) {
        Operand<1> x;
#pragma unroll
        for (int i = 0; i < 4; ++i) x.at[0][i] = 0;
        if (j <= here.band) prepared.load(x.at[0], here.band, j);
        fence_products(u);
        start_product<T>(u, x, tile.u, of_values, kTileRows * j);
        commit_products();
        wait_products<0>(u);
      }
      if (__builtin_expect(prepared.keeps(), false)) {
        const unsigned char* const all = prepared_at(p.prepared, shape, here.chunk, here.head);
#pragma unroll 1
        for (int j = 0; j <= here.band; ++j) {
          uint32_t lost[4];
          load_lost(lost, all, here.band, j);
          add_product<T>(u, lost, tile.u, kTileRows * j, of_values);
        }
      }
      here.group == 0 ? barrier_wait(1, 128) : barrier_wait(2, 128);
      put_rows<T>(tile.u, row, of_values, u);
    }
    wait_copies<0>();
    fence_tiles();
    __syncthreads();

    // dK += (w * U) dS^T without rho
    const float log_end = vectors.element(kDeltaLog, kDeltaRows - 1);
    const float2 log_now = of_rows(kDeltaLog);
    const float2 to_end = first_only({exp2_fast(log_end - log_now.x), exp2_fast(log_end - log_now.y)});
#pragma unroll
    for (int i = 0; i < Sizes::kParts; ++i) {
      Operand<4> u;
      load_scaled<T>(u, tile.u, row, 64 * i, to_end);
      fence_products(dk);
      start_product<T>(dk, u, tile.ds(64 * i), here.col);
      commit_products();
      wait_products<0>(dk);
    }
    if (has_edge && Sizes::kApart) add_edge(of_states.sum(p, here, tile, v));

    // G U^T, dO U^T
    fill(of_steps, 0.f);
    fence_products(of_steps);
    if (!kBoth && here.group == Sizes::kQueries) {
      start_product_transposed(of_steps, tile.dout, tile.u);
    } else {
      start_product_transposed(of_steps, tile.g, tile.u);
    }
    commit_products();
    wait_products<0>(of_steps);
    if (kBoth && !kLater) {
      fill(both, 0.f);
      add_scores<T>(both, tile.dout, tile.u);
    }
    if (!OneSlab) {
      // What earlier slabs gave; it would have no registers beside the next one's.
      const auto add = [&](Sums<8>& x, int which) {
        float* const so_far = tile.partial + which * kDeltaRows * kDeltaRows + threadIdx.x % 128;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          float& at = x.at[i / 4][i % 4];
          if (v != 0) at += so_far[i * 128];
          if (!last) so_far[i * 128] = at;
        }
      };
      if (here.group == 0) add(of_steps, 0);
      if (here.group == Sizes::kQueries) add(of_queries, 1);
    }
    __syncthreads();
  };
  if constexpr (OneSlab) {
    slab(0);
  } else {
#pragma unroll 1
    for (int v = 0; v < shape.V; v += Sizes::kSlab) slab(v);
  }

  if (kAgain) {
    load_state<T, D>(tile.again(), p.states, shape, here, 0);
    commit_copies();
  }

  if (p.gated) put_rows(sums.state[here.group], row, dot_rows<T>(dk, tile.k, row, here.col));
  if (shape.unit) {
    put_rows(sums.square[0][here.group], row, square_rows<Sizes::kCols, T>(tile.k, row, here.col));
    put_rows(sums.square[1][here.group], row, square_rows<Sizes::kCols, T>(tile.q, row, here.col));
  }
  if (here.group == 0) weigh_steps(p, here, tile, vectors, of_steps);
  if (kLater) {
    fill(both, 0.f);
    add_scores<T>(both, tile.dout, tile.u);
    __syncthreads();
  }
  if (here.group == Sizes::kQueries) weigh_queries(p, here, tile, vectors, of_queries);
  wait_copies<0>();
  fence_tiles();
  __syncthreads();

  if (OneSlab) {
    fill(dq, 0.f);
    add_states<D>(dq, tile.dout, kAgain ? tile.again() : tile.states, here.col);
  }
  const float2 token_log = {vectors.element(kDeltaLog, min(mine * n, kDeltaRows - 1)),
                            vectors.element(kDeltaLog, min((mine + 8) * n, kDeltaRows - 1))};
  scale_rows(dq, {exp2_fast(token_log.x), exp2_fast(token_log.y)});
  if (p.gated) {
    // r q . S do
    const float2 state = dot_rows<T>(dq, tile.q, row, here.col);
    put_rows(sums.query[here.group], row, {tile.factors[mine] * state.x, tile.factors[mine + 8] * state.y});
  }
  // dQ += dP K
  Operand<4> of_k;
#pragma unroll
  for (int j = 0; j < kTilesDown; ++j) {
    load_block(of_k.at[j], tile.square(Tiles::kOfRows), row, kTileRows * j);
  }
  fence_products(dq);
  start_product<T>(dq, of_k, tile.k, here.col);
  commit_products();
  // dK += dP^T Q
  const auto add_queries = [&](auto& of_q) {
    constexpr int kBands = sizeof(of_q) / sizeof(of_q.at[0]);
#pragma unroll
    for (int b = 0; b < kBands; ++b) {
      load_block_transposed(of_q.at[b], tile.square(Tiles::kOfTokens), row, kTileRows * b);
    }
    fence_products(dk);
    start_product<T>(dk, of_q, tile.q, here.col);
    commit_products();
    wait_products<0>(dq, dk);
  };
  if (here.many_tokens) {
    Operand<4> of_q;
    add_queries(of_q);
  } else {
    Operand<2> of_q;
    add_queries(of_q);
  }
  // dK += (N + N^T) K: of a block on the diagonal both have a half, the rest is zero
  Operand<4> of_rows_of_k;
#pragma unroll
  for (int j = 0; j < kTilesDown; ++j) {
    uint32_t(&block)[4] = of_rows_of_k.at[j];
    uint32_t above[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i) block[i] = 0;
    if (j <= here.band) load_block(block, tile.square(Tiles::kStepRows), row, kTileRows * j);
    if (j >= here.band) load_block_transposed(above, tile.square(Tiles::kStepCols), row, kTileRows * j);
#pragma unroll
    for (int i = 0; i < 4; ++i) block[i] |= above[i];
  }
  fence_products(dk);
  start_product<T>(dk, of_rows_of_k, tile.k, here.col);
  commit_products();
  wait_products<0>(dk);

  const float2 of_key = inverse_length(whole(sums.square[0], mine)),
               of_q = inverse_length(whole(sums.square[1], mine));
  if (shape.unit) {
    // rho_j is put to dk_j here, in fp32: 1000 times a sum may be too large for 16 bits.
    scale_rows(dq, {shape.scale * of_q.x, shape.scale * of_q.y});
    scale_rows(dk, of_key);
    put_rows(sums.along[0][here.group], row, dot_rows<T>(dk, tile.k, row, here.col));
    put_rows(sums.along[1][here.group], row, dot_rows<T>(dq, tile.q, row, here.col));
  } else {
    scale_rows(dq, {shape.scale, shape.scale});
  }
  __syncthreads();
  if (shape.unit) {
    take_along<T>(dk, tile.k, row, here.col, whole(sums.along[0], mine), of_key);
    take_along<T>(dq, tile.q, row, here.col, whole(sums.along[1], mine), of_q);
  }
  store_rows<T, T>(dq, at<T>(p.dq, batch, here.piece.start, here.query_head, here.col), p.dq.stride[1], row,
                   here.piece.length, shape.D - here.col);
  if (p.dk.dtype == DType::f32) {
    store_rows<float, T>(dk, at<float>(p.dk, batch, first_row, here.query_head, here.col), p.dk.stride[1],
                         row, here.rows, shape.D - here.col);
  } else {
    store_rows<T, T>(dk, at<T>(p.dk, batch, first_row, here.query_head, here.col), p.dk.stride[1], row,
                     here.rows, shape.D - here.col);
  }

  // What warps added up stands since the last barrier.
  if (here.first && static_cast<int>(threadIdx.x) < here.rows) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i <= Sizes::kParts; ++i) sum += sums.beta[i][threadIdx.x];
    static_cast<float*>(
        p.dbeta.data)[batch * p.dbeta.stride[0] + (first_row + threadIdx.x) * p.dbeta.stride[1] +
                      here.head * p.dbeta.stride[2]] = sum;
  }
  if (p.gated && warp == kThreads / 32 - 1) put_gate_gradients<D>(p, here, sums, vectors);
}

// Bytes of shared memory without which a block does not run.
template <typename T, int D>
constexpr int gradients_least() {
  return std::max(D <= 128 ? GradientTiles<T, D, true>::bytes(true) : 0,
                  GradientTiles<T, D, false>::bytes(true));
}

template <typename T, int D, bool OneSlab>
cudaError_t launch_gradients_of(const DeltaGradients& p, cudaStream_t stream) {
  using Tiles = GradientTiles<T, D, OneSlab>;
  if (const cudaError_t error = allow_shared<gradients<T, D, OneSlab>>(Tiles::bytes(true));
      error != cudaSuccess) {
    return error;
  }
  const int tokens = delta_chunk(p.shape.n);
  const int64_t blocks = piece_count(p.shape.tokens, tokens) * p.shape.query_heads;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  constexpr int kThreads = GradientSizes<D>::kThreads;
  const int bytes = Tiles::bytes(has_many(tokens));
  gradients<T, D, OneSlab><<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, int D>
cudaError_t launch_gradients(const DeltaGradients& p, cudaStream_t stream) {
  if constexpr (D <= 128) {
    if (p.shape.V <= GradientSizes<D>::kSlab) return launch_gradients_of<T, D, true>(p, stream);
  }
  return launch_gradients_of<T, D, false>(p, stream);
}

}  // namespace girih::kernels::delta_product
