// The gradients, a block a chunk and query head. S and dS: the state before the chunk, and the gradient of
// the one after it. With a_i = rho_i e^{L_i}, D_ij = rho_i rho_j e^{L_i - L_j} and r, w, read as in the
// scans,
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
//     dL_t = sum_j (P dP)_tj + r_t q_t . S do_t + sum_{i of t} [sum_j (N M)_ij - sum_j (N M)_ji - sum_s (P
//     dP)_si
//            - read_i G_i . S^T k_i - w_i k_i . dS U_i]               M_ij = D_ij k_i . k_j
//
// without what a token's rows do to each other, which no gate touches, plus <state after the chunk, dS>.
//
// The first four warps have 16 rows each of what belongs to k, v and beta; the other four 16 tokens each of
// what belongs to q, where the chunk has as many. Columns of V go 64 at a time.
#pragma once

#include "delta_product/chain.cuh"

namespace girih::kernels::delta_product {

constexpr int kGradientThreads = 256;
constexpr int kGroupThreads = 128;
constexpr int kGradientSlab = 64;  // columns of V at a time

template <typename T, int D>
struct GradientTiles {
  using Rows = SharedTile<T, kDeltaRows, D>;                // of k, q; or columns of a state
  using Square = SharedTile<T, kDeltaRows, kGradientSlab>;  // columns of v, do, G, Z, U
  // Sums of the gates' gradients: by token; by row; by column, a part from every warp.
  struct Sums_ {
    float token[kDeltaRows], row[kDeltaRows];
    float key_cols[4][kDeltaRows], query_cols[4][kDeltaRows];
    float edge[kGradientThreads / 32], end[4];
  };
  static constexpr int kBytes = 4 * Rows::kBytes + 5 * Square::kBytes + kDeltaLost + 2 * kDeltaRows * 4 +
                                static_cast<int>(sizeof(Sums_));

  Rows k, q, s, ds;
  Square v, g, dout, z, u;  // later z: dP, u: N, both weighted
  unsigned char* prepared;
  float* factors;
  Sums_* sums;

  __device__ explicit GradientTiles(unsigned char* next) {
    const auto take = [&](int bytes) {
      unsigned char* const here = next;
      next += bytes;
      return here;
    };
    for (Rows* tile : {&k, &q, &s, &ds}) tile->data = reinterpret_cast<T*>(take(Rows::kBytes));
    for (Square* tile : {&v, &g, &dout, &z, &u}) tile->data = reinterpret_cast<T*>(take(Square::kBytes));
    prepared = take(kDeltaLost);
    factors = reinterpret_cast<float*>(take(2 * kDeltaRows * 4));
    sums = reinterpret_cast<Sums_*>(take(sizeof(Sums_)));
  }
};

// A lane's two neighbours of a tile.
template <typename T, class Tile>
__device__ inline float2 pair_at(const Tile& tile, int row, int col) {
  return unpaired<T>(*reinterpret_cast<const uint32_t*>(&lane_at(tile, row, col)));
}
template <typename T, class Tile>
__device__ inline void put_pair(const Tile& tile, int row, int col, float left, float right) {
  *reinterpret_cast<uint32_t*>(&lane_at(tile, row, col)) = pair_of<T>(left, right);
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

// A warp's 16 rows from `row` on, to global memory; To: T or float.
template <typename To, typename T, int N>
__device__ inline void store_rows(const Sums<N>& sums, To* to, int64_t stride, int row, int rows, int cols) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = row + lane_row() + 8 * i, col = 8 * n + lane_col();
      if (r >= rows || col >= cols) continue;
      if constexpr (std::is_same<To, float>::value) {
        *reinterpret_cast<float2*>(to + r * stride + col) = {sums.at[n][2 * i], sums.at[n][2 * i + 1]};
      } else {
        *reinterpret_cast<uint32_t*>(to + r * stride + col) =
            pair_of<T>(sums.at[n][2 * i], sums.at[n][2 * i + 1]);
      }
    }
  }
}

// x . of a tile's rows, for the lane's two rows; all four lanes of a row get it.
template <typename T, int N, class Tile>
__device__ inline float2 dot_rows(const Sums<N>& x, const Tile& tile, int row) {
  float2 sum = {0.f, 0.f};
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float2 first = pair_at<T>(tile, row, 8 * n), second = pair_at<T>(tile, row + 8, 8 * n);
    sum.x = fmaf(first.x, x.at[n][0], fmaf(first.y, x.at[n][1], sum.x));
    sum.y = fmaf(second.x, x.at[n][2], fmaf(second.y, x.at[n][3], sum.y));
  }
  return {sum_over_row(sum.x), sum_over_row(sum.y)};
}

// x -= tile's rows times (x . row) times by^2: what is left is orthogonal to rows of length 1 / by.
template <typename T, int N, class Tile>
__device__ inline void take_along(Sums<N>& x, const Tile& tile, int row, float2 by) {
  const float2 along = dot_rows<T>(x, tile, row);
  const float2 of = {along.x * by.x * by.x, along.y * by.y * by.y};
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float2 first = pair_at<T>(tile, row, 8 * n), second = pair_at<T>(tile, row + 8, 8 * n);
    x.at[n][0] -= first.x * of.x, x.at[n][1] -= first.y * of.x;
    x.at[n][2] -= second.x * of.y, x.at[n][3] -= second.y * of.y;
  }
}

// 1 / the length of a tile's rows, the lane's two; of a row of zeros 1000.
template <typename T, int N, class Tile>
__device__ inline float2 inverse_lengths(const Tile& tile, int row) {
  float2 sum = {0.f, 0.f};
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float2 x = pair_at<T>(tile, row, 8 * n), y = pair_at<T>(tile, row + 8, 8 * n);
    sum.x = fmaf(x.x, x.x, fmaf(x.y, x.y, sum.x)), sum.y = fmaf(y.x, y.x, fmaf(y.y, y.y, sum.y));
  }
  return {rsqrtf(sum_over_row(sum.x) + 1e-6f), rsqrtf(sum_over_row(sum.y) + 1e-6f)};
}

template <int N>
__device__ inline void scale_rows(Sums<N>& x, float2 by) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    x.at[n][0] *= by.x, x.at[n][1] *= by.x, x.at[n][2] *= by.y, x.at[n][3] *= by.y;
  }
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
__device__ inline float2 add_up(const Sums<8>& x, float* cols) {
  float2 rows = {0.f, 0.f};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    rows.x += x.at[n][0] + x.at[n][1], rows.y += x.at[n][2] + x.at[n][3];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float sum = sum_over_col(x.at[n][j] + x.at[n][j + 2]);
      if (lane_row() == 0) cols[8 * n + lane_col() + j] = sum;
    }
  }
  return {sum_over_row(rows.x), sum_over_row(rows.y)};
}

// f(slab's first column) between a barrier before and one after its tiles are there, for all slabs of V.
template <typename T, int D, class F>
__device__ inline void for_each_slab(const DeltaGradients& p, const Here& here,
                                     const GradientTiles<T, D>& tile, const F& f) {
  const DeltaShape& shape = p.shape;
  const int64_t batch = here.piece.sequence.batch, row = here.piece.start * shape.n;
  for (int v = 0; v < shape.V; v += kGradientSlab) {
    const int cols = shape.V - v;
    const auto load = [&](const auto& to, const In<4>& from, int64_t first, int head, int rows) {
      load_async<kGradientThreads>(to, at<T>(from, batch, first, head, v), from.stride[1], rows, cols,
                                   threadIdx.x);
    };
    load(tile.v, p.v, row, here.head, here.rows);
    load(tile.g, p.dz, row, here.head, here.rows);
    load(tile.dout, p.dout, here.piece.start, here.query_head, here.piece.length);
    const int64_t state = ((here.chunk * shape.heads + here.head) * shape.V + v) * shape.D;
    load_async<kGradientThreads>(tile.s, static_cast<const T*>(p.states) + state, shape.D, cols, shape.D,
                                 threadIdx.x);
    load_async<kGradientThreads>(tile.ds, static_cast<const T*>(p.gradients) + state, shape.D, cols, shape.D,
                                 threadIdx.x);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    f(v);
    __syncthreads();
  }
}

// <S, dS> of a slab, this thread's part: of the rounded states, but of a sequence's first and last in fp32.
template <typename T, int D>
__device__ inline float edge_of(const DeltaGradients& p, const Here& here, const GradientTiles<T, D>& tile,
                                int v) {
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
         d += kGradientThreads / kGradientSlab * 2) {
      const auto pair_of_tile = [&](const auto& from) {
        return unpaired<T>(*reinterpret_cast<const uint32_t*>(&from.at(row, d)));
      };
      float2 s = pair_of_tile(tile.s), ds = pair_of_tile(tile.ds);
      if (first) s = {given(p.initial, d, v + row), given(p.initial, d + 1, v + row)};
      if (last) ds = {given(p.end, d, v + row), given(p.end, d + 1, v + row)};
      sum = fmaf(s.x, ds.x, fmaf(s.y, ds.y, sum));
    }
  }
  return sum;
}

// The warps of keys.
template <typename T, int D>
__device__ inline void run_keys(const DeltaGradients& p, const Here& here, const GradientTiles<T, D>& tile,
                                int warp) {
  const DeltaShape& shape = p.shape;
  const Prepared prepared{tile.prepared};
  const Vectors vectors = prepared.vectors();
  const int n = shape.n, row = kTileRows * warp, mine = row + lane_row();
  const int64_t batch = here.piece.sequence.batch, first_row = here.piece.start * n;
  const auto of_rows = [&](int vector) -> float2 {
    return {vectors.element(vector, mine), vectors.element(vector, mine + 8)};
  };
  const float2 beta = of_rows(kDeltaBeta), log = of_rows(kDeltaLog), unit = of_rows(kDeltaUnit);
  const float log_end = vectors.element(kDeltaLog, kDeltaRows - 1);
  const float2 from_start = {exp2_fast(log.x), exp2_fast(log.y)},
               to_end = {exp2_fast(log_end - log.x), exp2_fast(log_end - log.y)};
  const float2 a = {unit.x * from_start.x, unit.y * from_start.y};
  // rho_j is put to dk_j at the end, in fp32: 1000 times a sum may be too large for 16 bits.
  const float2 own = shape.unit ? inverse_lengths<T, D / 8>(tile.k, row) : make_float2(1.f, 1.f);
  // e^{L_i - L_j} for j < i, else 0
  const auto decay = [&](int i, int row_of_lane, int j) {
    const float2 log_j = vectors.pair(kDeltaLog, 8 * i);
    const float difference = (row_of_lane == 0 ? log.x : log.y) - (j == 0 ? log_j.x : log_j.y);
    return 8 * i + lane_col() + j < mine + 8 * row_of_lane ? exp2_fast(difference) : 0.f;
  };
  const auto unit_of = [&](int i, int j) {
    const float2 unit_j = vectors.pair(kDeltaUnit, 8 * i);
    return j == 0 ? unit_j.x : unit_j.y;
  };

  // -M, rounded
  Operand<kTilesDown> minus_m;
  if (here.first) {
    Sums<8> m;
    fill(m, 0.f);
#pragma unroll 1
    for (int col = 0; col < D; col += 16) {
      uint32_t k[4];
      load_block(k, tile.k, row, col);
      add_product_transposed<T>(m, k, tile.k, 0, col);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        m.at[i][j] *= -(j < 2 ? unit.x : unit.y) * unit_of(i, j % 2) * decay(i, j / 2, j % 2);
      }
    }
    round_to<T>(minus_m, m);
  }

  Sums<D / 8> dk;
  Sums<8> products;  // G U^T
  fill(dk, 0.f);
  fill(products, 0.f);
  float2 dbeta = {0.f, 0.f}, read_of_g = {0.f, 0.f};  // G . E, G . S^T k
  float edge = 0.f;
  for_each_slab(p, here, tile, [&](int v) {
    if (p.gated && here.first) edge += edge_of(p, here, tile, v);

    // E_i + sum_j M_ij U_j, and Z = beta times it
    Sums<8> e;
    fill(e, 0.f);
#pragma unroll 1
    for (int col = 0; col < D; col += 16) {
      uint32_t k[4];
      load_block(k, tile.k, row, col);
      add_product_transposed<T>(e, k, tile.s, 0, col);
    }
    T* const dv = at<T>(p.dv, batch, first_row, here.head, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 value = pair_at<T>(tile.v, row + 8 * j, 8 * i),
                     g = pair_at<T>(tile.g, row + 8 * j, 8 * i);
        float &left = e.at[i][2 * j], &right = e.at[i][2 * j + 1];
        float& sum = j == 0 ? read_of_g.x : read_of_g.y;
        sum = fmaf(g.x, left, fmaf(g.y, right, sum));
        const float by = j == 0 ? a.x : a.y, step = j == 0 ? beta.x : beta.y;
        left = fmaf(-by, left, value.x), right = fmaf(-by, right, value.y);
        put_pair<T>(tile.z, row + 8 * j, 8 * i, step * left, step * right);
        const int r = mine + 8 * j, col = 8 * i + lane_col();
        if (here.first && r < here.rows && v + col < shape.V) {
          *reinterpret_cast<uint32_t*>(dv + r * p.dv.stride[1] + col) = pair_of<T>(step * g.x, step * g.y);
        }
      }
    }
    barrier_wait(1, kGroupThreads);

    // U = X Z
    Sums<8> u;
    fill(u, 0.f);
#pragma unroll 1
    for (int j = 0; j <= warp; ++j) {
      uint32_t x[4];
      prepared.load(x, warp, j);
      add_product<T>(u, x, tile.z, kTileRows * j);
    }
    if (prepared.keeps()) {
      const auto* all = prepared_at(p.prepared, shape, here.chunk, here.head);
#pragma unroll 1
      for (int j = 0; j <= warp; ++j) {
        uint32_t x[4];
        load_lost(x, all, warp, j);
        add_product<T>(u, x, tile.z, kTileRows * j);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        put_pair<T>(tile.u, row + 8 * j, 8 * i, u.at[i][2 * j], u.at[i][2 * j + 1]);
      }
    }
    __syncthreads();
    if (!here.first) return;

      // dbeta = G . E
#pragma unroll
    for (int j = 0; j < kTilesDown; ++j) {
      if (j <= warp) add_product<T>(e, minus_m.at[j], tile.u, kTileRows * j);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 g = pair_at<T>(tile.g, row, 8 * i), below = pair_at<T>(tile.g, row + 8, 8 * i);
      dbeta.x = fmaf(g.x, e.at[i][0], fmaf(g.y, e.at[i][1], dbeta.x));
      dbeta.y = fmaf(below.x, e.at[i][2], fmaf(below.y, e.at[i][3], dbeta.y));
    }

    // G U^T,   dK += (w * U) dS^T - (read * G) S^T without rho
#pragma unroll 1
    for (int col = 0; col < kGradientSlab; col += 16) {
      uint32_t g[4], of_u[4];
      load_block(g, tile.g, row, col);
      add_product_transposed<T>(products, g, tile.u, 0, col);
      load_block(of_u, tile.u, row, col);
      multiply_rows<T>(of_u, to_end.x, to_end.y);
      add_product<T>(dk, of_u, tile.ds, col);
      multiply_rows<T>(g, -beta.x * from_start.x, -beta.y * from_start.y);
      add_product<T>(dk, g, tile.s, col);
    }
  });

  // N, weighted, to where U was
  Operand<kTilesDown> weights;
  if (here.first) {
    const float2 state_read = {-beta.x * a.x * sum_over_row(read_of_g.x),
                               -beta.y * a.y * sum_over_row(read_of_g.y)};
    float2 dl = {0.f, 0.f};
    if (p.gated) {
      // -read G . S^T k - w k . dS U, the sum of the latter's parts, and N M
      const float2 of_state = dot_rows<T>(dk, tile.k, row);
      const float2 end = {own.x * of_state.x - state_read.x, own.y * of_state.y - state_read.y};
      Sums<8> nm;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float2 m = unpaired<T>(minus_m.at[i / 2][i % 2 * 2 + j]);
          const int r = mine + 8 * j, c = 8 * i + lane_col();
          const float by = j == 0 ? beta.x : beta.y;
          nm.at[i][2 * j] = r / n == c / n ? 0.f : by * products.at[i][2 * j] * m.x;
          nm.at[i][2 * j + 1] = r / n == (c + 1) / n ? 0.f : by * products.at[i][2 * j + 1] * m.y;
        }
      }
      const float2 rows = add_up(nm, tile.sums->key_cols[warp]);
      dl = {state_read.x - end.x + rows.x, state_read.y - end.y + rows.y};
      float all = lane_col() == 0 ? end.x + end.y : 0.f;
      all = sum_over_row(sum_over_col(all));
      if (lane() == 0) tile.sums->end[warp] = all;
    }
    if (lane_col() == 0) {
      tile.sums->row[mine] = dl.x, tile.sums->row[mine + 8] = dl.y;
    }
    dbeta = {sum_over_row(dbeta.x), sum_over_row(dbeta.y)};
    if (lane_col() == 0) {
      float* const to =
          static_cast<float*>(p.dbeta.data) + batch * p.dbeta.stride[0] + here.head * p.dbeta.stride[2];
      if (mine < here.rows) to[(first_row + mine) * p.dbeta.stride[1]] = dbeta.x;
      if (mine + 8 < here.rows) to[(first_row + mine + 8) * p.dbeta.stride[1]] = dbeta.y;
    }
    // Either way the other row's rho.
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) products.at[i][j] *= -(j < 2 ? beta.x : beta.y) * decay(i, j / 2, j % 2);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float by = j == 0 ? unit.x : unit.y;
        put_pair<T>(tile.u, row + 8 * j, 8 * i, by * products.at[i][2 * j], by * products.at[i][2 * j + 1]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) products.at[i][j] *= unit_of(i, j % 2);
    }
    round_to<T>(weights, products);
  }
  if (p.gated) {
    edge = sum_over_col(sum_over_row(edge));
    if (lane() == 0) tile.sums->edge[warp] = edge;
  }
  __syncthreads();

  // dK += dP^T Q + N K + N^T K
#pragma unroll 1
  for (int b = 0; b < here.bands; ++b) {
    uint32_t of_p[4];
    load_block_transposed(of_p, tile.z, row, kTileRows * b);
    add_product<T>(dk, of_p, tile.q, kTileRows * b);
  }
  if (here.first) {
#pragma unroll
    for (int j = 0; j < kTilesDown; ++j) {
      if (j <= warp) add_product<T>(dk, weights.at[j], tile.k, kTileRows * j);
    }
#pragma unroll 1
    for (int i = warp; i < kTilesDown; ++i) {
      uint32_t of_n[4];
      load_block_transposed(of_n, tile.u, row, kTileRows * i);
      add_product<T>(dk, of_n, tile.k, kTileRows * i);
    }
  }
  if (shape.unit) {
    scale_rows(dk, own);
    take_along<T>(dk, tile.k, row, own);
  }
  if (p.dk.dtype == DType::f32) {
    store_rows<float, T>(dk, at<float>(p.dk, batch, first_row, here.query_head, 0), p.dk.stride[1], row,
                         here.rows, shape.D);
  } else {
    store_rows<T, T>(dk, at<T>(p.dk, batch, first_row, here.query_head, 0), p.dk.stride[1], row, here.rows,
                     shape.D);
  }
}

// The warps of queries.
template <typename T, int D>
__device__ inline void run_queries(const DeltaGradients& p, const Here& here, const GradientTiles<T, D>& tile,
                                   int warp) {
  const DeltaShape& shape = p.shape;
  const Vectors vectors = Prepared{tile.prepared}.vectors();
  const int n = shape.n, first_token = kTileRows * warp, token = first_token + lane_row();
  const bool any = warp < here.bands;
  Sums<D / 8> dq;
  Sums<8> dp;
  fill(dq, 0.f);
  fill(dp, 0.f);
  float edge = 0.f;
  for_each_slab(p, here, tile, [&](int v) {
    if (p.gated && here.first) edge += edge_of(p, here, tile, v);
    // dQ += dO S^T
    if (any) {
#pragma unroll 1
      for (int col = 0; col < kGradientSlab; col += 16) {
        uint32_t x[4];
        load_block(x, tile.dout, first_token, col);
        add_product<T>(dq, x, tile.s, col);
      }
    }
    __syncthreads();
    // dP += dO U^T
    if (any) {
#pragma unroll 1
      for (int col = 0; col < kGradientSlab; col += 16) {
        uint32_t x[4];
        load_block(x, tile.dout, first_token, col);
        add_product_transposed<T>(dp, x, tile.u, 0, col);
      }
    }
  });
  if (p.gated) {
    edge = sum_over_col(sum_over_row(edge));
    if (lane() == 0) tile.sums->edge[4 + warp] = edge;
  }

  Operand<kTilesDown> weights;
  if (any) {
    const float2 factor = {tile.factors[token], tile.factors[token + 8]};
    const float2 decay = {vectors.element(kDeltaLog, min(token * n, kDeltaRows - 1)),
                          vectors.element(kDeltaLog, min((token + 8) * n, kDeltaRows - 1))};
    // For dk with the token's factor, for dq with the row's.
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 log = vectors.pair(kDeltaLog, 8 * i), unit = vectors.pair(kDeltaUnit, 8 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int t = token + j / 2 * 8, r = 8 * i + lane_col() + j % 2;
        const float by = exp2_fast((j < 2 ? decay.x : decay.y) - (j % 2 == 0 ? log.x : log.y));
        float& x = dp.at[i][j];
        x = r < (t + 1) * n ? x * by : 0.f;
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float by = j == 0 ? factor.x : factor.y;
        put_pair<T>(tile.z, first_token + 8 * j, 8 * i, by * dp.at[i][2 * j], by * dp.at[i][2 * j + 1]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) dp.at[i][j] *= j % 2 == 0 ? unit.x : unit.y;
    }
    round_to<T>(weights, dp);
    scale_rows(dq, {exp2_fast(decay.x), exp2_fast(decay.y)});
    if (p.gated) {
      // P dP, and r q . S do
      Sums<8> scores;
      fill(scores, 0.f);
#pragma unroll 1
      for (int col = 0; col < D; col += 16) {
        uint32_t q[4];
        load_block(q, tile.q, first_token, col);
        add_product_transposed<T>(scores, q, tile.k, 0, col);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int r = 8 * i + lane_col() + j % 2;
          float& x = scores.at[i][j];
          x = r / n == token + j / 2 * 8 ? 0.f : x * dp.at[i][j] * (j < 2 ? factor.x : factor.y);
        }
      }
      const float2 rows = add_up(scores, tile.sums->query_cols[warp]);
      const float2 state = dot_rows<T>(dq, tile.q, first_token);
      if (lane_col() == 0) {
        tile.sums->token[token] = fmaf(factor.x, state.x, rows.x);
        tile.sums->token[token + 8] = fmaf(factor.y, state.y, rows.y);
      }
    }
  } else if (p.gated) {
    for (int i = lane(); i < kDeltaRows; i += 32) tile.sums->query_cols[warp][i] = 0.f;
  }
  __syncthreads();
  if (!any) return;

    // dQ += dP K
#pragma unroll
  for (int j = 0; j < kTilesDown; ++j) add_product<T>(dq, weights.at[j], tile.k, kTileRows * j);
  if (shape.unit) {
    const float2 own = inverse_lengths<T, D / 8>(tile.q, first_token);
    scale_rows(dq, {shape.scale * own.x, shape.scale * own.y});
    take_along<T>(dq, tile.q, first_token, own);
  } else {
    scale_rows(dq, {shape.scale, shape.scale});
  }
  store_rows<T, T>(dq, at<T>(p.dq, here.piece.sequence.batch, here.piece.start, here.query_head, 0),
                   p.dq.stride[1], first_token, here.piece.length, shape.D);
}

// dg_t = sum_{s>=t} dL_s + <state after, dS>, by one warp; a lane has two tokens.
template <class Sums_>
__device__ inline void put_gate_gradients(const DeltaGradients& p, const Here& here, const Sums_& sums,
                                          float whole) {
  const int n = p.shape.n, tokens = delta_chunk(n);
  float edge = 0.f;
  if (here.first) {
    for (int w = 0; w < kGradientThreads / 32; ++w) edge += sums.edge[w];
    edge *= whole;
    for (int w = 0; w < 4; ++w) edge += sums.end[w];
  }
  float dl[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = 2 * lane() + half;
    float sum = 0.f;
    if (token < here.piece.length && token < tokens) {
      sum = sums.token[token];
      for (int r = token * n; r < (token + 1) * n; ++r) {
        if (here.first) {
          sum += sums.row[r];
          for (int w = 0; w < 4; ++w) sum -= sums.key_cols[w][r];
        }
        for (int w = 0; w < 4; ++w) sum -= sums.query_cols[w][r];
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

template <typename T, int D>
__global__ void __launch_bounds__(kGradientThreads, 1) gradients(const __grid_constant__ DeltaGradients p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const GradientTiles<T, D> tile(shared);
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

  load_async<kGradientThreads>(tile.k, at<T>(p.k, batch, here.piece.start * n, here.head, 0), p.k.stride[1],
                               here.rows, shape.D, threadIdx.x);
  load_async<kGradientThreads>(tile.q, at<T>(p.q, batch, here.piece.start, here.query_head, 0), p.q.stride[1],
                               here.piece.length, shape.D, threadIdx.x);
  const unsigned char* prepared = prepared_at(p.prepared, shape, here.chunk, here.head);
  for (int i = threadIdx.x * 16; i < kDeltaLost; i += kGradientThreads * 16) {
    copy_async(shared_address(tile.prepared + i), prepared + i, true);
  }
  if (threadIdx.x < 2 * kDeltaRows / 4) {
    const float* from = p.factors + (here.chunk * shape.query_heads + here.query_head) * 2 * kDeltaRows;
    copy_async(shared_address(tile.factors + threadIdx.x * 4), from + threadIdx.x * 4, true);
  }
  commit_copies();
  wait_copies<0>();
  __syncthreads();

  const int warp = threadIdx.x / 32;
  if (warp < 4) {
    run_keys(p, here, tile, warp);
  } else {
    run_queries(p, here, tile, warp - 4);
  }
  if (p.gated && warp == 0) {
    const float log = Prepared{tile.prepared}.vectors().element(kDeltaLog, kDeltaRows - 1);
    put_gate_gradients(p, here, *tile.sums, exp2_fast(log));
  }
}

template <typename T, int D>
cudaError_t launch_gradients(const DeltaGradients& p, cudaStream_t stream) {
  constexpr int kBytes = GradientTiles<T, D>::kBytes;
  if (const cudaError_t error = allow_shared<gradients<T, D>>(kBytes); error != cudaSuccess) return error;
  const int64_t blocks = piece_count(p.shape.tokens, delta_chunk(p.shape.n)) * p.shape.query_heads;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  gradients<T, D><<<static_cast<unsigned>(blocks), kGradientThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace girih::kernels::delta_product
