// The gradients, a block a chunk and query head. S: the state before the chunk, dS: the gradient of the one
// after it. With a_i = rho_i e^{L_i}, D_ij = rho_i rho_j e^{L_i - L_j} and r, w, read as in the scans,
//
//     E_i  = v_i - a_i S^T k_i - sum_{j<i} D_ij (k_i . k_j) U_j       what step i finds amiss: U = beta E
//     dv_i = beta_i G_i                                               dbeta_i = G_i . E_i
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
//     M_ij = D_ij k_i . k_j
//
// without what a token's rows do to each other, which no gate touches, plus <state after the chunk, dS>.
//
// Half of the warps find E and U, and with them dbeta, dv and dq; the others have dk and dP. Each has 16 rows
// or tokens, and of the columns all (D <= 64) or half. Columns of V go 64 at a time. The two halves have
// about as many products, before what they exchange and after: one with all that belongs to keys and another
// with what belongs to queries took as long as the first and waited in the second.
#pragma once

#include "delta_product/chain.cuh"

namespace girih::kernels::delta_product {

constexpr int kGradientSlab = 64;  // columns of V at a time
constexpr int kBands = 4;          // of 16 rows

// At D = 64 two blocks of 8 warps fit; beyond, one block, and only columns in halves leave registers for 16.
template <int D>
struct GradientSizes {
  static constexpr int kSplit = D == 64 ? 1 : 2;
  static constexpr int kGroup = 32 * kBands * kSplit;  // threads of either half
  static constexpr int kThreads = 2 * kGroup;
  static constexpr int kBlocks = D == 64 ? 2 : 1;  // of a multiprocessor
};

// What warps add up for each other, a part from each half of the columns or from each warp.
template <int D>
struct GradientSums {
  static constexpr int kSplit = GradientSizes<D>::kSplit;
  float beta[kSplit][kDeltaRows];
  float row[2][kSplit][kDeltaRows], token[2][kSplit][kDeltaRows];  // of dL, a part from either group of warps
  float key_cols[kBands][kDeltaRows], query_cols[kBands][kDeltaRows];
  float along[2][kSplit][kDeltaRows];  // of queries and of keys
  float edge[GradientSizes<D>::kThreads / 32], end[GradientSizes<D>::kThreads / 32];
};

template <typename T, int D>
struct GradientTiles {
  using Rows = SharedTile<T, kDeltaRows, D>;                // of k, q; or columns of a state
  using Square = SharedTile<T, kDeltaRows, kGradientSlab>;  // columns of v, do, G, Z, U; M
  static constexpr int kFixedBytes = 2 * Rows::kBytes + 3 * Square::kBytes + kDeltaLost + 2 * kDeltaRows * 4 +
                                     (static_cast<int>(sizeof(GradientSums<D>)) + 127) / 128 * 128;
  static constexpr int kSlabBytes = 2 * Rows::kBytes + 3 * Square::kBytes;

  // What 64 columns of V bring; one slab may be under way while another is worked on.
  struct Slab {
    Rows s, ds;
    Square v, g, dout;
  };

  Rows k, q;
  Square z, u, m;  // later z: dP, u: N, weighted
  int buffers;     // slabs
  unsigned char* prepared;
  float* factors;
  GradientSums<D>* sums;
  unsigned char* slabs;

  __device__ GradientTiles(unsigned char* next, int buffers) : buffers(buffers) {
    const auto take = [&](int bytes) {
      unsigned char* const here = next;
      next += bytes;
      return here;
    };
    for (Rows* tile : {&k, &q}) tile->data = reinterpret_cast<T*>(take(Rows::kBytes));
    for (Square* tile : {&z, &u, &m}) tile->data = reinterpret_cast<T*>(take(Square::kBytes));
    prepared = take(kDeltaLost);
    factors = reinterpret_cast<float*>(take(2 * kDeltaRows * 4));
    sums = reinterpret_cast<GradientSums<D>*>(take((sizeof(GradientSums<D>) + 127) / 128 * 128));
    slabs = next;
  }

  // Of the columns from v on. In the first one's v and g later stand N and dP, weighted otherwise.
  __device__ Slab slab(int v) const {
    unsigned char* const at = slabs + v / kGradientSlab % buffers * kSlabBytes;
    return {{reinterpret_cast<T*>(at)},
            {reinterpret_cast<T*>(at + Rows::kBytes)},
            {reinterpret_cast<T*>(at + 2 * Rows::kBytes)},
            {reinterpret_cast<T*>(at + 2 * Rows::kBytes + Square::kBytes)},
            {reinterpret_cast<T*>(at + 2 * Rows::kBytes + 2 * Square::kBytes)}};
  }
};

// A lane's two neighbours of a tile.
template <typename T, class Tile>
__device__ inline float2 pair_at(const Tile& tile, int row, int col) {
  return unpaired<T>(*reinterpret_cast<const uint32_t*>(&lane_at(tile, row, col)));
}
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

// The rows of a left factor times x: row lane_row(), and y: 8 further.
template <typename T>
__device__ inline void multiply_rows(uint32_t (&a)[4], float x, float y) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 value = unpaired<T>(a[i]);
    const float by = i % 2 == 0 ? x : y;
    a[i] = pair_of<T>(value.x * by, value.y * by);
  }
}

// x . a tile's rows from column `col` on, for the lane's two rows; a part from each of the four lanes.
template <typename T, int N, class Tile>
__device__ inline float2 dot_rows_part(const Sums<N>& x, const Tile& tile, int row, int col) {
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
  return sum;
}
// The whole, all four lanes get it.
template <typename T, int N, class Tile>
__device__ inline float2 dot_rows(const Sums<N>& x, const Tile& tile, int row, int col) {
  const float2 part = dot_rows_part<T>(x, tile, row, col);
  return {sum_over_row(part.x), sum_over_row(part.y)};
}

// x -= (row . x) row / |row|^2: what is left is orthogonal to the rows of a tile. `along`: row . x.
template <typename T, int N, class Tile>
__device__ inline void take_along(Sums<N>& x, const Tile& tile, int row, int col, float2 along,
                                  float2 inverse_length) {
  const float2 of = {along.x * inverse_length.x * inverse_length.x,
                     along.y * inverse_length.y * inverse_length.y};
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float2 first = pair_at<T>(tile, row, col + 8 * n), second = pair_at<T>(tile, row + 8, col + 8 * n);
    x.at[n][0] -= first.x * of.x, x.at[n][1] -= first.y * of.x;
    x.at[n][2] -= second.x * of.y, x.at[n][3] -= second.y * of.y;
  }
}

// 1 / the length of a tile's rows, the lane's two; of a row of zeros 1000.
template <typename T, class Tile>
__device__ inline float2 inverse_lengths(const Tile& tile, int row) {
  float2 sum = {0.f, 0.f};
#pragma unroll 4
  for (int col = 0; col < Tile::kCols; col += 8) {
    const float2 x = pair_at<T>(tile, row, col), y = pair_at<T>(tile, row + 8, col);
    sum.x = fmaf(x.x, x.x, fmaf(x.y, x.y, sum.x)), sum.y = fmaf(y.x, y.x, fmaf(y.y, y.y, sum.y));
  }
  return {rsqrtf(sum_over_row(sum.x) + 1e-6f), rsqrtf(sum_over_row(sum.y) + 1e-6f)};
}

// What a block knows of its chunk.
struct Here {
  Piece piece;
  int64_t chunk;
  int head, query_head, rows, bands;
  bool first;  // of the memory head's query heads
  bool last;   // the sequence's last chunk
};

// Row and column sums of a warp's 16 rows of products; cols: the warp's part of the sums of columns.
template <int N>
__device__ inline float2 add_up(const Sums<N>& x, float* cols) {
  float2 rows = {0.f, 0.f};
#pragma unroll
  for (int n = 0; n < N; ++n) {
    rows.x += x.at[n][0] + x.at[n][1], rows.y += x.at[n][2] + x.at[n][3];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float sum = sum_over_col(x.at[n][j] + x.at[n][j + 2]);
      if (lane_row() == 0) cols[8 * n + lane_col() + j] = sum;
    }
  }
  return {sum_over_row(rows.x), sum_over_row(rows.y)};
}

// The lane's two rows, to where others find them.
__device__ inline void put_rows(float* to, int row, float2 x) {
  if (lane_col() == 0) to[row + lane_row()] = x.x, to[row + lane_row() + 8] = x.y;
}

// A warp's place in its group (0: steps and queries, 1: keys): 16 rows and half of the columns.
template <int D, int Group>
struct Place {
  static constexpr int kSplit = GradientSizes<D>::kSplit;
  int band, half;

  __device__ int row() const { return kTileRows * band; }
  __device__ int mine() const { return row() + lane_row(); }  // and 8 further
  // The first of the warp's columns of so many.
  __device__ int col(int cols) const { return half * (cols / kSplit); }
  __device__ void wait_for_group() const { barrier_wait(1 + Group, GradientSizes<D>::kGroup); }

  // Both halves' parts, by all warps of the group.
  __device__ float2 whole(float2 part, GradientSums<D>& sums) const {
    if (kSplit == 1) return part;
    put_rows(sums.along[Group][half], row(), part);
    wait_for_group();
    float2 all = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kSplit; ++i) {
      all.x += sums.along[Group][i][mine()], all.y += sums.along[Group][i][mine() + 8];
    }
    return all;
  }
};

// All of the block: starts to load the slab from column v on.
template <typename T, int D>
__device__ inline void load_slab(const DeltaGradients& p, const Here& here, const GradientTiles<T, D>& tile,
                                 int v) {
  constexpr int kThreads = GradientSizes<D>::kThreads;
  const DeltaShape& shape = p.shape;
  if (v < shape.V) {
    const auto to = tile.slab(v);
    const int64_t batch = here.piece.sequence.batch, row = here.piece.start * shape.n;
    const int cols = shape.V - v;
    const auto load = [&](const auto& square, const In<4>& from, int64_t first, int head, int rows) {
      load_async<kThreads>(square, at<T>(from, batch, first, head, v), from.stride[1], rows, cols,
                           threadIdx.x);
    };
    load(to.v, p.v, row, here.head, here.rows);
    load(to.g, p.dz, row, here.head, here.rows);
    load(to.dout, p.dout, here.piece.start, here.query_head, here.piece.length);
    const int64_t state = ((here.chunk * shape.heads + here.head) * shape.V + v) * shape.D;
    load_async<kThreads>(to.s, static_cast<const T*>(p.states) + state, shape.D, cols, shape.D, threadIdx.x);
    load_async<kThreads>(to.ds, static_cast<const T*>(p.gradients) + state, shape.D, cols, shape.D,
                         threadIdx.x);
  }
  commit_copies();
}

// f(the slab's tiles, its first column) between a barrier before and one after, for all slabs of V, the first
// of which is under way. OneSlab: V <= 64; then what is summed over slabs needs no registers before them.
template <bool OneSlab, typename T, int D, class F>
__device__ inline void for_each_slab(const DeltaGradients& p, const Here& here,
                                     const GradientTiles<T, D>& tile, const F& f) {
  const auto slab = [&](int v) {
    if (!OneSlab && tile.buffers == 2) {
      load_slab(p, here, tile, v + kGradientSlab);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    f(tile.slab(OneSlab ? 0 : v), v);
    __syncthreads();
    if (!OneSlab && tile.buffers == 1) load_slab(p, here, tile, v + kGradientSlab);
  };
  if constexpr (OneSlab) {
    slab(0);
  } else {
    for (int v = 0; v < p.shape.V; v += kGradientSlab) slab(v);
  }
}

// <S, dS> of a slab, this thread's part: of the rounded states, but of a sequence's first and last in fp32.
template <typename T, int D>
__device__ inline float edge_of(const DeltaGradients& p, const Here& here,
                                const typename GradientTiles<T, D>::Slab& slab, int v) {
  const auto given = [&](const In<4>& state, int d, int col) {
    return static_cast<const float*>(
        state.data)[here.piece.sequence.index * state.stride[0] + here.head * state.stride[1] +
                    d * state.stride[2] + col * state.stride[3]];
  };
  const bool first = here.piece.index == 0 && p.initial.data != nullptr,
             last = here.last && p.end.data != nullptr;
  const int row = threadIdx.x % kGradientSlab, rows = min(kGradientSlab, p.shape.V - v);
  float sum = 0.f;
  if (row < rows) {
    for (int d = static_cast<int>(threadIdx.x) / kGradientSlab * 2; d < p.shape.D;
         d += GradientSizes<D>::kThreads / kGradientSlab * 2) {
      const auto pair_of_tile = [&](const auto& from) {
        return unpaired<T>(*reinterpret_cast<const uint32_t*>(&from.at(row, d)));
      };
      float2 s = pair_of_tile(slab.s), ds = pair_of_tile(slab.ds);
      if (first) s = {given(p.initial, d, v + row), given(p.initial, d + 1, v + row)};
      if (last) ds = {given(p.end, d, v + row), given(p.end, d + 1, v + row)};
      sum = fmaf(s.x, ds.x, fmaf(s.y, ds.y, sum));
    }
  }
  return sum;
}

// The warps that have E, U, dbeta, dv and dq.
template <bool OneSlab, typename T, int D>
__device__ inline void run_steps(const DeltaGradients& p, const Here& here, const GradientTiles<T, D>& tile,
                                 const Place<D, 0>& place) {
  constexpr int kSplit = Place<D, 0>::kSplit, kN = 8 / kSplit;  // eights of a square's columns
  const DeltaShape& shape = p.shape;
  const Prepared prepared{tile.prepared};
  const Vectors vectors = prepared.vectors();
  const int n = shape.n, row = place.row(), mine = place.mine(), band = place.band;
  const int col_d = place.col(D), col_s = place.col(kGradientSlab);
  const int64_t batch = here.piece.sequence.batch, first_row = here.piece.start * n;
  const bool has_tokens = band < here.bands;
  const auto of_rows = [&](int vector) -> float2 {
    return {vectors.element(vector, mine), vectors.element(vector, mine + 8)};
  };
  const float2 beta = of_rows(kDeltaBeta), log = of_rows(kDeltaLog), unit = of_rows(kDeltaUnit);

  Sums<D / 8 / kSplit> dq;
  Sums<kN> products;  // G U^T
  fill(dq, 0.f);
  fill(products, 0.f);
  float2 dbeta = {0.f, 0.f}, read_of_g = {0.f, 0.f};  // G . E, G . S^T k
  float edge = 0.f;
  for_each_slab<OneSlab>(p, here, tile, [&](const auto& slab, int v) {
    if (p.gated && here.first) edge += edge_of<T, D>(p, here, slab, v);

    // E_i + sum_j M_ij U_j, and Z = beta times it
    Sums<kN> e;
    fill(e, 0.f);
#pragma unroll 2
    for (int col = 0; col < D; col += 16) {
      uint32_t k[4];
      load_block(k, tile.k, row, col);
      add_product_transposed<T>(e, k, slab.s, col_s, col);
    }
    const float2 a = {unit.x * exp2_fast(log.x), unit.y * exp2_fast(log.y)};
    Sums<kN> dv, z;
#pragma unroll
    for (int i = 0; i < kN; i += 2) {
      uint32_t value_block[4], g_block[4];
      load_block(value_block, slab.v, row, col_s + 8 * i);
      load_block(g_block, slab.g, row, col_s + 8 * i);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float2 value = unpaired<T>(value_block[m]), g = unpaired<T>(g_block[m]);
        const int at = i + m / 2, j = m % 2 * 2;
        float &left = e.at[at][j], &right = e.at[at][j + 1];
        float& sum = j == 0 ? read_of_g.x : read_of_g.y;
        sum = fmaf(g.x, left, fmaf(g.y, right, sum));
        const float by = j == 0 ? a.x : a.y, step = j == 0 ? beta.x : beta.y;
        left = fmaf(-by, left, value.x), right = fmaf(-by, right, value.y);
        z.at[at][j] = step * left, z.at[at][j + 1] = step * right;
        dv.at[at][j] = step * g.x, dv.at[at][j + 1] = step * g.y;
      }
    }
    put_rows<T>(tile.z, row, col_s, z);
    if (here.first) {
      store_rows<T, T>(dv, at<T>(p.dv, batch, first_row, here.head, v + col_s), p.dv.stride[1], row,
                       here.rows, shape.V - v - col_s);
    }
    place.wait_for_group();

    // U = X Z
    {
      Sums<kN> u;
      fill(u, 0.f);
#pragma unroll 2
      for (int j = 0; j <= band; ++j) {
        uint32_t x[4];
        prepared.load(x, band, j);
        add_product<T>(u, x, tile.z, kTileRows * j, col_s);
      }
      if (__builtin_expect(prepared.keeps(), false)) {
        const auto* all = prepared_at(p.prepared, shape, here.chunk, here.head);
#pragma unroll 1
        for (int j = 0; j <= band; ++j) {
          uint32_t x[4];
          load_lost(x, all, band, j);
          add_product<T>(u, x, tile.z, kTileRows * j, col_s);
        }
      }
      put_rows<T>(tile.u, row, col_s, u);
    }
    __syncthreads();

    if (here.first) {
      // dbeta = G . E
#pragma unroll 2
      for (int j = 0; j <= band; ++j) {
        uint32_t minus_m[4];
        load_block(minus_m, tile.m, row, kTileRows * j);
        add_product<T>(e, minus_m, tile.u, kTileRows * j, col_s);
      }
      const float2 of_slab = dot_rows_part<T>(e, slab.g, row, col_s);
      dbeta.x += of_slab.x, dbeta.y += of_slab.y;

      // G U^T
#pragma unroll 2
      for (int col = 0; col < kGradientSlab; col += 16) {
        uint32_t g[4];
        load_block(g, slab.g, row, col);
        add_product_transposed<T>(products, g, tile.u, col_s, col);
      }
    }
    // dQ += dO S^T
    if (has_tokens) {
#pragma unroll 2
      for (int col = 0; col < kGradientSlab; col += 16) {
        uint32_t x[4];
        load_block(x, slab.dout, row, col);
        add_product<T>(dq, x, slab.s, col, col_d);
      }
    }
  });

  GradientSums<D>& sums = *tile.sums;
  const int warp = kBands * place.half + band;
  if (here.first) {
    put_rows(sums.beta[place.half], row, {sum_over_row(dbeta.x), sum_over_row(dbeta.y)});
    // e^{L_i - L_j} for j < i, else 0
    const auto decay = [&](int i, int row_of_lane, int j) {
      const float2 log_j = vectors.pair(kDeltaLog, col_s + 8 * i);
      const float difference = (row_of_lane == 0 ? log.x : log.y) - (j == 0 ? log_j.x : log_j.y);
      return col_s + 8 * i + lane_col() + j < mine + 8 * row_of_lane ? exp2_fast(difference) : 0.f;
    };
    if (p.gated) {
      // -read G . S^T k, twice, for those of dk have it too, and N M
      const float2 read = {beta.x * unit.x * exp2_fast(log.x), beta.y * unit.y * exp2_fast(log.y)};
      const float2 state_read = {-read.x * sum_over_row(read_of_g.x), -read.y * sum_over_row(read_of_g.y)};
      Sums<kN> nm;
#pragma unroll
      for (int i = 0; i < kN; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float2 m = pair_at<T>(tile.m, row + 8 * j, col_s + 8 * i);
          const int r = mine + 8 * j, c = col_s + 8 * i + lane_col();
          const float by = j == 0 ? beta.x : beta.y;
          nm.at[i][2 * j] = r / n == c / n ? 0.f : by * products.at[i][2 * j] * m.x;
          nm.at[i][2 * j + 1] = r / n == (c + 1) / n ? 0.f : by * products.at[i][2 * j + 1] * m.y;
        }
      }
      const float2 rows = add_up(nm, sums.key_cols[band] + col_s);
      put_rows(sums.row[0][place.half], row, {2.f * state_read.x + rows.x, 2.f * state_read.y + rows.y});
      const float all = sum_over_col(state_read.x + state_read.y);
      if (lane() == 0) sums.end[warp] = -all;
    }

    // N, weighted, with the rho of one row or the other: the one that is not the own row's.
    Sums<kN> of_row;
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const float2 unit_j = vectors.pair(kDeltaUnit, col_s + 8 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float x = products.at[i][j] * -(j < 2 ? beta.x : beta.y) * decay(i, j / 2, j % 2);
        of_row.at[i][j] = (j % 2 == 0 ? unit_j.x : unit_j.y) * x;
        products.at[i][j] = (j < 2 ? unit.x : unit.y) * x;
      }
    }
    put_rows<T>(tile.u, row, col_s, products);
    put_rows<T>(tile.slab(0).v, row, col_s, of_row);
  }
  if (p.gated) {
    edge = sum_over_col(sum_over_row(edge));
    if (lane() == 0) sums.edge[threadIdx.x / 32] = edge;
  }
  if (has_tokens) {
    const float2 token_decay = {exp2_fast(vectors.element(kDeltaLog, min(mine * n, kDeltaRows - 1))),
                                exp2_fast(vectors.element(kDeltaLog, min((mine + 8) * n, kDeltaRows - 1)))};
    scale_rows(dq, token_decay);
    if (p.gated) {
      // r q . S do
      const float2 state = dot_rows<T>(dq, tile.q, row, col_d);
      put_rows(sums.token[0][place.half], row,
               {tile.factors[mine] * state.x, tile.factors[mine + 8] * state.y});
    }
  }
  __syncthreads();

  // dQ += dP K
  if (has_tokens) {
#pragma unroll 2
    for (int j = 0; j < kBands; ++j) {
      uint32_t of_p[4];
      load_block(of_p, tile.slab(0).g, row, kTileRows * j);
      add_product<T>(dq, of_p, tile.k, kTileRows * j, col_d);
    }
  }
  if (shape.unit) {
    const float2 own = inverse_lengths<T>(tile.q, row);
    scale_rows(dq, {shape.scale * own.x, shape.scale * own.y});
    const float2 along = place.whole(dot_rows<T>(dq, tile.q, row, col_d), sums);
    take_along<T>(dq, tile.q, row, col_d, along, own);
  } else {
    scale_rows(dq, {shape.scale, shape.scale});
  }
  if (has_tokens) {
    store_rows<T, T>(dq, at<T>(p.dq, batch, here.piece.start, here.query_head, col_d), p.dq.stride[1], row,
                     here.piece.length, shape.D - col_d);
  }
}

// The warps that have dk and dP.
template <bool OneSlab, typename T, int D>
__device__ inline void run_keys(const DeltaGradients& p, const Here& here, const GradientTiles<T, D>& tile,
                                const Place<D, 1>& place) {
  constexpr int kSplit = Place<D, 1>::kSplit, kN = 8 / kSplit;
  const DeltaShape& shape = p.shape;
  const Vectors vectors = Prepared{tile.prepared}.vectors();
  const int n = shape.n, row = place.row(), mine = place.mine(), band = place.band;
  const int col_d = place.col(D), col_s = place.col(kGradientSlab);
  const bool has_tokens = band < here.bands;
  const auto of_rows = [&](int vector) -> float2 {
    return {vectors.element(vector, mine), vectors.element(vector, mine + 8)};
  };

  // -M, rounded
  if (here.first) {
    Sums<kN> m;
    fill(m, 0.f);
#pragma unroll 2
    for (int col = 0; col < D; col += 16) {
      uint32_t k[4];
      load_block(k, tile.k, row, col);
      add_product_transposed<T>(m, k, tile.k, col_s, col);
    }
    const float2 log = of_rows(kDeltaLog), unit = of_rows(kDeltaUnit);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const float2 log_j = vectors.pair(kDeltaLog, col_s + 8 * i),
                   unit_j = vectors.pair(kDeltaUnit, col_s + 8 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool before = col_s + 8 * i + lane_col() + j % 2 < mine + j / 2 * 8;
        const float difference = (j < 2 ? log.x : log.y) - (j % 2 == 0 ? log_j.x : log_j.y);
        m.at[i][j] *= -(j < 2 ? unit.x : unit.y) * (j % 2 == 0 ? unit_j.x : unit_j.y) *
                      (before ? exp2_fast(difference) : 0.f);
      }
    }
    put_rows<T>(tile.m, row, col_s, m);
  }

  Sums<D / 8 / kSplit> dk;
  Sums<kN> dp;
  fill(dk, 0.f);
  fill(dp, 0.f);
  float edge = 0.f;
  for_each_slab<OneSlab>(p, here, tile, [&](const auto& slab, int v) {
    if (p.gated && here.first) edge += edge_of<T, D>(p, here, slab, v);
    // dK += (w * U) dS^T - (read * G) S^T without rho
    const float2 log = of_rows(kDeltaLog);
    if (here.first) {
      const float2 beta = of_rows(kDeltaBeta);
#pragma unroll 2
      for (int col = 0; col < kGradientSlab; col += 16) {
        uint32_t g[4];
        load_block(g, slab.g, row, col);
        multiply_rows<T>(g, -beta.x * exp2_fast(log.x), -beta.y * exp2_fast(log.y));
        add_product<T>(dk, g, slab.s, col, col_d);
      }
    }
    __syncthreads();
    if (here.first) {
      const float log_end = vectors.element(kDeltaLog, kDeltaRows - 1);
      const float2 to_end = {exp2_fast(log_end - log.x), exp2_fast(log_end - log.y)};
#pragma unroll 2
      for (int col = 0; col < kGradientSlab; col += 16) {
        uint32_t u[4];
        load_block(u, tile.u, row, col);
        multiply_rows<T>(u, to_end.x, to_end.y);
        add_product<T>(dk, u, slab.ds, col, col_d);
      }
    }
    // dP += dO U^T
    if (has_tokens) {
#pragma unroll 2
      for (int col = 0; col < kGradientSlab; col += 16) {
        uint32_t x[4];
        load_block(x, slab.dout, row, col);
        add_product_transposed<T>(dp, x, tile.u, col_s, col);
      }
    }
  });

  // rho_j is put to dk_j at the end, in fp32: 1000 times a sum may be too large for 16 bits.
  const float2 own = shape.unit ? inverse_lengths<T>(tile.k, row) : make_float2(1.f, 1.f);
  GradientSums<D>& sums = *tile.sums;
  const int warp = kBands * (kSplit + place.half) + band;
  if (p.gated) {
    if (here.first) {
      // -read G . S^T k + w k . dS U
      const float2 of_state = dot_rows<T>(dk, tile.k, row, col_d);
      const float2 all = {own.x * of_state.x, own.y * of_state.y};
      put_rows(sums.row[1][place.half], row, {-all.x, -all.y});
      const float sum = sum_over_col(all.x + all.y);
      if (lane() == 0) sums.end[warp] = sum;
    }
    edge = sum_over_col(sum_over_row(edge));
    if (lane() == 0) sums.edge[threadIdx.x / 32] = edge;
  }

  if (has_tokens) {
    const int token = mine;
    const float2 factor = {tile.factors[token], tile.factors[token + 8]};
    const float2 decay = {vectors.element(kDeltaLog, min(token * n, kDeltaRows - 1)),
                          vectors.element(kDeltaLog, min((token + 8) * n, kDeltaRows - 1))};
    // For dk with the token's factor, for dq with the row's.
    Sums<kN> of_token;
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const int eight = col_s + 8 * i;
      const float2 log = vectors.pair(kDeltaLog, eight), unit = vectors.pair(kDeltaUnit, eight);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int t = token + j / 2 * 8, r = eight + lane_col() + j % 2;
        const float by = exp2_fast((j < 2 ? decay.x : decay.y) - (j % 2 == 0 ? log.x : log.y));
        const float x = r < (t + 1) * n ? dp.at[i][j] * by : 0.f;
        of_token.at[i][j] = (j < 2 ? factor.x : factor.y) * x;
        dp.at[i][j] = (j % 2 == 0 ? unit.x : unit.y) * x;
      }
    }
    put_rows<T>(tile.z, row, col_s, of_token);
    put_rows<T>(tile.slab(0).g, row, col_s, dp);
    if (p.gated) {
      // P dP
      Sums<kN> scores;
      fill(scores, 0.f);
#pragma unroll 2
      for (int col = 0; col < D; col += 16) {
        uint32_t q[4];
        load_block(q, tile.q, row, col);
        add_product_transposed<T>(scores, q, tile.k, col_s, col);
      }
#pragma unroll
      for (int i = 0; i < kN; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int r = col_s + 8 * i + lane_col() + j % 2;
          float& x = scores.at[i][j];
          x = r / n == token + j / 2 * 8 ? 0.f : x * dp.at[i][j] * (j < 2 ? factor.x : factor.y);
        }
      }
      put_rows(sums.token[1][place.half], row, add_up(scores, sums.query_cols[band] + col_s));
    }
  } else if (p.gated) {
    for (int i = lane(); i < 8 * kN; i += 32) sums.query_cols[band][col_s + i] = 0.f;
  }
  __syncthreads();

  // dK += dP^T Q + N K + N^T K
#pragma unroll 2
  for (int b = 0; b < here.bands; ++b) {
    uint32_t of_p[4];
    load_block_transposed(of_p, tile.z, row, kTileRows * b);
    add_product<T>(dk, of_p, tile.q, kTileRows * b, col_d);
  }
  if (here.first) {
#pragma unroll 2
    for (int j = 0; j <= band; ++j) {
      uint32_t of_n[4];
      load_block(of_n, tile.slab(0).v, row, kTileRows * j);
      add_product<T>(dk, of_n, tile.k, kTileRows * j, col_d);
    }
#pragma unroll 2
    for (int i = band; i < kBands; ++i) {
      uint32_t of_n[4];
      load_block_transposed(of_n, tile.u, row, kTileRows * i);
      add_product<T>(dk, of_n, tile.k, kTileRows * i, col_d);
    }
  }
  if (shape.unit) {
    scale_rows(dk, own);
    const float2 along = place.whole(dot_rows<T>(dk, tile.k, row, col_d), sums);
    take_along<T>(dk, tile.k, row, col_d, along, own);
  }
  const int64_t batch = here.piece.sequence.batch, first_row = here.piece.start * n;
  if (p.dk.dtype == DType::f32) {
    store_rows<float, T>(dk, at<float>(p.dk, batch, first_row, here.query_head, col_d), p.dk.stride[1], row,
                         here.rows, shape.D - col_d);
  } else {
    store_rows<T, T>(dk, at<T>(p.dk, batch, first_row, here.query_head, col_d), p.dk.stride[1], row,
                     here.rows, shape.D - col_d);
  }
}

// dg_t = sum_{s>=t} dL_s + <state after, dS>, by one warp; a lane has two tokens.
template <int D>
__device__ inline void put_gate_gradients(const DeltaGradients& p, const Here& here,
                                          const GradientSums<D>& sums, float whole) {
  constexpr int kSplit = GradientSizes<D>::kSplit;
  const int n = p.shape.n;
  float edge = 0.f;
  if (here.first) {
    for (int w = 0; w < GradientSizes<D>::kThreads / 32; ++w) edge += sums.edge[w];
    edge *= whole;
    for (int w = 0; w < GradientSizes<D>::kThreads / 32; ++w) edge += sums.end[w];
  }
  float dl[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = 2 * lane() + half;
    float sum = 0.f;
    if (token < here.piece.length) {
      for (int i = 0; i < kSplit; ++i) sum += sums.token[0][i][token] + sums.token[1][i][token];
      for (int r = token * n; r < (token + 1) * n; ++r) {
        if (here.first) {
          for (int i = 0; i < kSplit; ++i) sum += sums.row[0][i][r] + sums.row[1][i][r];
          for (int w = 0; w < kBands; ++w) sum -= sums.key_cols[w][r];
        }
        for (int w = 0; w < kBands; ++w) sum -= sums.query_cols[w][r];
      }
    }
    dl[half] = sum;
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
  for (int half = 1; half >= 0; --half) {
    const int token = 2 * lane() + half;
    if (half == 0) sum += dl[0];
    if (token < here.piece.length) {
      static_cast<float*>(
          p.dg.data)[here.piece.sequence.batch * p.dg.stride[0] +
                     (here.piece.start + token) * p.dg.stride[1] + here.query_head * p.dg.stride[2]] = sum;
    }
  }
}

template <typename T, int D, bool OneSlab>
__global__ void __launch_bounds__(GradientSizes<D>::kThreads, GradientSizes<D>::kBlocks)
    gradients(const __grid_constant__ DeltaGradients p, int buffers) {
  extern __shared__ __align__(128) unsigned char shared[];
  const GradientTiles<T, D> tile(shared, buffers);
  const DeltaShape& shape = p.shape;
  const int n = shape.n, tokens = delta_chunk(n), group = shape.query_heads / shape.heads;
  Here here;
  here.query_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.query_heads));
  here.chunk = blockIdx.x / static_cast<unsigned>(shape.query_heads);
  here.head = here.query_head / group;
  here.first = here.query_head % group == 0;
  here.piece = piece_at(shape.tokens, here.chunk, tokens);
  if (here.piece.length == 0) return;
  here.rows = here.piece.length * n;
  here.bands = (tokens + kTileRows - 1) / kTileRows;
  here.last = here.piece.start + here.piece.length == here.piece.sequence.end;
  const int64_t batch = here.piece.sequence.batch;

  load_async<GradientSizes<D>::kThreads>(tile.k, at<T>(p.k, batch, here.piece.start * n, here.head, 0),
                                         p.k.stride[1], here.rows, shape.D, threadIdx.x);
  load_async<GradientSizes<D>::kThreads>(tile.q, at<T>(p.q, batch, here.piece.start, here.query_head, 0),
                                         p.q.stride[1], here.piece.length, shape.D, threadIdx.x);
  const unsigned char* prepared = prepared_at(p.prepared, shape, here.chunk, here.head);
  for (int i = threadIdx.x * 16; i < kDeltaLost; i += GradientSizes<D>::kThreads * 16) {
    copy_async(shared_address(tile.prepared + i), prepared + i, true);
  }
  if (threadIdx.x < 2 * kDeltaRows / 4) {
    const float* from = p.factors + (here.chunk * shape.query_heads + here.query_head) * 2 * kDeltaRows;
    copy_async(shared_address(tile.factors + threadIdx.x * 4), from + threadIdx.x * 4, true);
  }
  commit_copies();
  load_slab(p, here, tile, 0);
  wait_copies<1>();
  __syncthreads();

  using Sizes = GradientSizes<D>;
  const int warp = warp_index(), of_group = warp % (kBands * Sizes::kSplit);
  const int band = of_group % kBands, half = of_group / kBands;
  if (warp == of_group) {
    run_steps<OneSlab>(p, here, tile, Place<D, 0>{band, half});
  } else {
    run_keys<OneSlab>(p, here, tile, Place<D, 1>{band, half});
  }

  // What warps added up stands since their last barrier for all.
  if (here.first && static_cast<int>(threadIdx.x) < here.rows) {
    float sum = 0.f;
    for (int i = 0; i < Sizes::kSplit; ++i) sum += tile.sums->beta[i][threadIdx.x];
    static_cast<float*>(
        p.dbeta.data)[batch * p.dbeta.stride[0] + (here.piece.start * n + threadIdx.x) * p.dbeta.stride[1] +
                      here.head * p.dbeta.stride[2]] = sum;
  }
  if (p.gated && warp == 0) {
    const float log = Prepared{tile.prepared}.vectors().element(kDeltaLog, kDeltaRows - 1);
    put_gate_gradients<D>(p, here, *tile.sums, exp2_fast(log));
  }
}

// Bytes of shared memory without which a block does not run.
template <typename T, int D>
constexpr int gradients_least() {
  return GradientTiles<T, D>::kFixedBytes + GradientTiles<T, D>::kSlabBytes;
}

template <typename T, int D, bool OneSlab>
cudaError_t launch_gradients_of(const DeltaGradients& p, cudaStream_t stream) {
  using Tiles = GradientTiles<T, D>;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  // A second slab under way where a multiprocessor has one block anyway and the shared memory for it.
  const int buffers =
      GradientSizes<D>::kBlocks == 1 && Tiles::kFixedBytes + 2 * Tiles::kSlabBytes <= limit ? 2 : 1;
  const int bytes = Tiles::kFixedBytes + buffers * Tiles::kSlabBytes;
  if (const cudaError_t error = allow_shared<gradients<T, D, OneSlab>>(bytes); error != cudaSuccess) {
    return error;
  }
  const int64_t blocks = piece_count(p.shape.tokens, delta_chunk(p.shape.n)) * p.shape.query_heads;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  gradients<T, D, OneSlab>
      <<<static_cast<unsigned>(blocks), GradientSizes<D>::kThreads, bytes, stream>>>(p, buffers);
  return cudaGetLastError();
}

template <typename T, int D>
cudaError_t launch_gradients(const DeltaGradients& p, cudaStream_t stream) {
  if constexpr (D == 64) {
    if (p.shape.V <= kGradientSlab) return launch_gradients_of<T, D, true>(p, stream);
  }
  return launch_gradients_of<T, D, false>(p, stream);
}

}  // namespace girih::kernels::delta_product
