// What the gradient of U is without that of the state, a block a chunk and head:
//
//     dU_j = sum_t P_tj do_t          P_tj = scale rho_t rho_j e^{L_t - L_j} q_t . k_j
//
// One warpgroup, warp w with the rows 16 w to 16 w + 15. All query heads of the memory head add to it, one
// after another. All that a block reads is under way at once: what it moves, not what it computes, takes its
// time.
#pragma once

#include "delta_product/tokens.cuh"

namespace girih::kernels::delta_product {

constexpr int kValueThreads = 128;

// Columns of D and V by 64. Many: more tokens than 32.
template <typename T, bool Many>
struct ValueTiles {
  using Rows = BlockTile<T, 64>;
  using Tokens = std::conditional_t<Many, Rows, HalfTile<T, 64>>;
  static constexpr int kTokens = Tokens::kRows;
  static constexpr int kTokenBytes = kTokens * 128;
  static constexpr int kVectorBytes = kDeltaVectors * kDeltaRows * 4;
  static constexpr int kPartialBytes = kDeltaRows * 64 * 4;

  unsigned char *keys, *queries, *gradients, *vectors;
  float2* tokens;  // of every token scale rho_t, L_t
  float* partial;  // dU of the query heads so far, where there are several

  __host__ __device__ static constexpr int slabs(int cols) { return (cols + 63) / 64; }
  __host__ __device__ static constexpr int bytes(int D, int V, bool several) {
    return slabs(D) * (Rows::kBytes + kTokenBytes) + slabs(V) * kTokenBytes + kVectorBytes + kTokens * 8 +
           (several ? slabs(V) * kPartialBytes : 0);
  }

  __device__ ValueTiles(unsigned char* shared, int D, int V)
      : keys(shared),
        queries(keys + slabs(D) * Rows::kBytes),
        gradients(queries + slabs(D) * kTokenBytes),
        vectors(gradients + slabs(V) * kTokenBytes),
        tokens(reinterpret_cast<float2*>(vectors + kVectorBytes)),
        partial(reinterpret_cast<float*>(tokens + kTokens)) {}

  // Of the columns from `col` on.
  __device__ Rows k(int col) const { return {reinterpret_cast<T*>(keys + col / 64 * Rows::kBytes)}; }
  __device__ Tokens q(int col) const { return of(queries, col); }
  __device__ Tokens dout(int col) const { return of(gradients, col); }
  // The thread's share of 64 columns, each element kValueThreads further.
  __device__ float* so_far(int col) const { return partial + col * kDeltaRows + threadIdx.x; }

 private:
  __device__ static Tokens of(unsigned char* from, int col) {
    Tokens tile;
    tile.data = reinterpret_cast<T*>(from + col / 64 * kTokenBytes);
    return tile;
  }
};

// Blocks of a multiprocessor that registers leave room for.
constexpr int value_blocks(bool many_tokens) { return many_tokens ? 5 : 6; }

// |q_t|^2 of eight tokens from `row` on, the lane's token `row` + lane_row().
template <typename T, bool Many>
__device__ inline float square_of_tokens(const ValueTiles<T, Many>& tile, int row, int D) {
  float sum = 0.f;
#pragma unroll 1
  for (int d = 0; d < D; d += 64) {
#pragma unroll
    for (int col = 0; col < 64; col += 32) {
      uint32_t four[4];
      load_matrices(four, tile.q(d).address(row, col, lane() & 7, (lane() >> 3) * 8));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = unpaired<T>(four[i]);
        sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
      }
    }
  }
  return sum_over_row(sum);
}

template <typename T, bool Many>
__global__ void __launch_bounds__(kValueThreads, value_blocks(Many))
    values(const __grid_constant__ DeltaValues p) {
  using Tiles = ValueTiles<T, Many>;
  constexpr int kEights = Tiles::kTokens / 8;
  extern __shared__ __align__(1024) unsigned char value_room[];
  const DeltaShape& shape = p.shape;
  const Tiles tile(value_room, shape.D, shape.V);
  const int warp = warp_index(), n = shape.n;
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.heads));
  const int64_t chunk = blockIdx.x / static_cast<unsigned>(shape.heads);
  const Piece piece = piece_at(shape.tokens, chunk, delta_chunk(n));
  if (piece.length == 0) return;
  const int group = shape.query_heads / shape.heads, rows = piece.length * n;
  const int64_t batch = piece.sequence.batch;

  const auto load = [&](const auto& slab, const T* from, int64_t stride, int count, int cols) {
#pragma unroll 1
    for (int col = 0; col < cols; col += 64) {
      load_async<kValueThreads>(slab(col), from + col, stride, count, cols - col, threadIdx.x);
    }
  };
  const unsigned char* prepared = prepared_at(p.prepared, shape, chunk, head) + kDeltaInverseBytes;
  if (threadIdx.x * 16 < Tiles::kVectorBytes) {
    copy_async(shared_address(tile.vectors + threadIdx.x * 16), prepared + threadIdx.x * 16, true);
  }
  load([&](int col) { return tile.k(col); }, at<T>(p.k, batch, piece.start * n, head, 0), p.k.stride[1], rows,
       shape.D);
  const Vectors vectors{reinterpret_cast<const float*>(tile.vectors)};

#pragma unroll 1
  for (int member = 0; member < group; ++member) {
    const int query_head = head * group + member;
    if (member != 0) __syncthreads();
    load([&](int col) { return tile.q(col); }, at<T>(p.q, batch, piece.start, query_head, 0), p.q.stride[1],
         piece.length, shape.D);
    commit_copies();
    load([&](int col) { return tile.dout(col); }, at<T>(p.dout, batch, piece.start, query_head, 0),
         p.dout.stride[1], piece.length, shape.V);
    commit_copies();
    wait_copies<1>();
    fence_tiles();
    __syncthreads();

    // K Q^T
    Sums<kEights> scores;
    fill(scores, 0.f);
    fence_products(scores);
#pragma unroll 1
    for (int d = 0; d < shape.D; d += 64) {
      const typename Tiles::Rows queries = tile.q(d);
      start_product_transposed(scores, tile.k(d), queries);
    }
    commit_products();

    // The factors of eight tokens a warp, twice: past the tile's they have no q.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int first = 8 * (warp + 4 * i), token = first + lane_row();
      const bool exists = Many || i == 0;
      const float square = exists && shape.unit ? square_of_tokens<T>(tile, first, shape.D) : 0.f;
      const float factor = shape.scale * (square > 0.f ? rsqrtf(square + 1e-6f) : 1.f),
                  log = vectors.element(kDeltaLog, min(token * n, kDeltaRows - 1));
      if (lane_col() == 0) {
        if (exists) tile.tokens[token] = {factor, log};
        float* const to = p.factors + (chunk * shape.query_heads + query_head) * 2 * kDeltaRows + token;
        to[0] = factor;
        to[kDeltaRows] = factor * exp2_fast(log);
      }
    }
    wait_copies<0>();
    fence_tiles();
    __syncthreads();
    wait_products<0>(scores);

    // P^T
    const int row = kTileRows * warp + lane_row();
    const float2 before = {vectors.element(kDeltaLog, row), vectors.element(kDeltaLog, row + 8)},
                 unit = {vectors.element(kDeltaUnit, row), vectors.element(kDeltaUnit, row + 8)};
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      const float4 two = *reinterpret_cast<const float4*>(tile.tokens + 8 * i + lane_col());
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int token = 8 * i + lane_col() + j % 2, of = row + j / 2 * 8;
        const float factor = j % 2 == 0 ? two.x : two.z, log = j % 2 == 0 ? two.y : two.w;
        const float weight =
            factor * (j < 2 ? unit.x : unit.y) * exp2_fast(log - (j < 2 ? before.x : before.y));
        float& x = scores.at[i][j];
        x = of < (token + 1) * n ? x * weight : 0.f;
      }
    }
    Operand<kEights / 2> weights;
    round_to<T>(weights, scores);

    // dU += P^T dO
#pragma unroll 1
    for (int v = 0; v < shape.V; v += 64) {
      Sums<8> du;
      float* const so_far = tile.so_far(v);
      if (member == 0) {
        fill(du, 0.f);
      } else {
#pragma unroll
        for (int i = 0; i < 32; ++i) du.at[i / 4][i % 4] = so_far[i * kValueThreads];
      }
      const typename Tiles::Rows dout = tile.dout(v);
      fence_products(du);
      start_product<T>(du, weights, dout);
      commit_products();
      wait_products<0>(du);
      if (member == group - 1) {
        store_rows<T, T>(du, at<T>(p.du, batch, piece.start * n, head, v), p.du.stride[1], kTileRows * warp,
                         rows, shape.V - v);
      } else {
#pragma unroll
        for (int i = 0; i < 32; ++i) so_far[i * kValueThreads] = du.at[i / 4][i % 4];
      }
    }
  }
}

// Bytes of shared memory without which a block does not run.
template <typename T>
constexpr int values_least(int D) {
  return ValueTiles<T, true>::bytes(D, kDeltaMaxWidth, true);
}

template <typename T, bool Many>
cudaError_t launch_values_of(const DeltaValues& p, cudaStream_t stream) {
  using Tiles = ValueTiles<T, Many>;
  const DeltaShape& shape = p.shape;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  if (const cudaError_t error = allow_shared<values<T, Many>>(limit); error != cudaSuccess) return error;
  const int64_t blocks = piece_count(shape.tokens, delta_chunk(shape.n)) * shape.heads;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const int bytes = Tiles::bytes(shape.D, shape.V, shape.query_heads != shape.heads);
  values<T, Many><<<static_cast<unsigned>(blocks), kValueThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_values(const DeltaValues& p, cudaStream_t stream) {
  return has_many(delta_chunk(p.shape.n)) ? launch_values_of<T, true>(p, stream)
                                          : launch_values_of<T, false>(p, stream);
}

}  // namespace girih::kernels::delta_product
