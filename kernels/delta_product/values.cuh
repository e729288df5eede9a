// What the gradient of U is without that of the state, a block a chunk and head:
//
//     dU_j = sum_t P_tj do_t          P_tj = scale rho_t rho_j e^{L_t - L_j} q_t . k_j
//
// Warp w has the rows 16 w to 16 w + 15. All query heads of the memory head add to it, one after another.
#pragma once

#include "delta_product/chain.cuh"

namespace girih::kernels::delta_product {

constexpr int kValueThreads = 128;
constexpr int kValueSlab = 64;  // columns of D and V at a time

// Two slabs of either kind are under way where there are two.
template <typename T>
struct ValueTiles {
  using Tile = SharedTile<T, kDeltaRows, kValueSlab>;
  static constexpr int kVectorBytes = kDeltaVectors * kDeltaRows * 4;

  unsigned char* vectors;
  float* factor;  // of every token: scale rho_t
  unsigned char *keys, *gradients;

  __host__ __device__ static constexpr int buffers(int cols) { return cols <= kValueSlab ? 1 : 2; }
  __host__ __device__ static constexpr int bytes(int D, int V) {
    return kVectorBytes + kDeltaRows * 4 + (2 * buffers(D) + buffers(V)) * Tile::kBytes;
  }

  __device__ ValueTiles(unsigned char* shared, int D)
      : vectors(shared),
        factor(reinterpret_cast<float*>(vectors + kVectorBytes)),
        keys(vectors + kVectorBytes + kDeltaRows * 4),
        gradients(keys + 2 * buffers(D) * Tile::kBytes) {}

  // Of the columns from `col` on.
  __device__ Tile k(int col) const { return in(keys, col, 2); }
  __device__ Tile q(int col) const { return in(keys + Tile::kBytes, col, 2); }
  __device__ Tile dout(int col) const { return in(gradients, col, 1); }

 private:
  __device__ static Tile in(unsigned char* from, int col, int apart) {
    return {reinterpret_cast<T*>(from + col / kValueSlab % 2 * apart * Tile::kBytes)};
  }
};

// Blocks of a multiprocessor that registers leave room for.
constexpr int value_blocks(int slabs) { return slabs == 1 ? 4 : slabs == 2 ? 3 : 2; }

template <typename T, int Slabs>
__global__ void __launch_bounds__(kValueThreads, value_blocks(Slabs))
    values(const __grid_constant__ DeltaValues p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const DeltaShape& shape = p.shape;
  const ValueTiles<T> tile(shared, shape.D);
  const int warp = warp_index(), n = shape.n, tokens = delta_chunk(n);
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.heads));
  const int64_t chunk = blockIdx.x / static_cast<unsigned>(shape.heads);
  const Piece piece = piece_at(shape.tokens, chunk, tokens);
  if (piece.length == 0) return;
  const int group = shape.query_heads / shape.heads, rows = piece.length * n;
  const int bands = (tokens + kTileRows - 1) / kTileRows;
  const int64_t batch = piece.sequence.batch;

  const unsigned char* prepared = prepared_at(p.prepared, shape, chunk, head) + kDeltaInverseBytes;
  if (threadIdx.x * 16 < ValueTiles<T>::kVectorBytes) {
    copy_async(shared_address(tile.vectors + threadIdx.x * 16), prepared + threadIdx.x * 16, true);
  }
  const Vectors vectors{reinterpret_cast<const float*>(tile.vectors)};
  const auto load_keys = [&](int query_head, int d) {
    if (d < shape.D) {
      load_async<kValueThreads>(tile.k(d), at<T>(p.k, batch, piece.start * n, head, d), p.k.stride[1], rows,
                                shape.D - d, threadIdx.x);
      load_async<kValueThreads>(tile.q(d), at<T>(p.q, batch, piece.start, query_head, d), p.q.stride[1],
                                piece.length, shape.D - d, threadIdx.x);
    }
    commit_copies();
  };
  const auto load_gradient = [&](int query_head, int v) {
    if (v < shape.V) {
      load_async<kValueThreads>(tile.dout(v), at<T>(p.dout, batch, piece.start, query_head, v),
                                p.dout.stride[1], piece.length, shape.V - v, threadIdx.x);
    }
    commit_copies();
  };

  Sums<8> du[Slabs];
#pragma unroll
  for (int i = 0; i < Slabs; ++i) fill(du[i], 0.f);
#pragma unroll 1
  for (int member = 0; member < group; ++member) {
    const int query_head = head * group + member;
    __syncthreads();
    load_keys(query_head, 0);
    load_keys(query_head, kValueSlab);
    load_gradient(query_head, 0);
    load_gradient(query_head, kValueSlab);

    // K Q^T, and |q_t|^2 of the warp's 16 tokens
    Sums<8> scores;
    fill(scores, 0.f);
    float2 square = {0.f, 0.f};
#pragma unroll 1
    for (int d = 0; d < shape.D; d += kValueSlab) {
      if (d < 2 * kValueSlab) {
        wait_copies<3>();
      } else {
        wait_copies<1>();
      }
      __syncthreads();
      const auto keys = tile.k(d), queries = tile.q(d);
#pragma unroll
      for (int col = 0; col < kValueSlab; col += 16) {
        uint32_t a[4];
        load_block(a, keys, kTileRows * warp, col);
        add_product_transposed<T>(scores, a, queries, 0, col);
        if (shape.unit) {
          load_block(a, queries, kTileRows * warp, col);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 x = unpaired<T>(a[i]);
            float& sum = i % 2 == 0 ? square.x : square.y;
            sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
          }
        }
      }
      if (d + 2 * kValueSlab < shape.D) __syncthreads();
      load_keys(query_head, d + 2 * kValueSlab);
    }
    square = {sum_over_row(square.x), sum_over_row(square.y)};
    if (lane_col() == 0) {
      const auto factor = [&](float x) {
        return shape.scale * (shape.unit && x > 0.f ? rsqrtf(x + 1e-6f) : 1.f);
      };
      tile.factor[kTileRows * warp + lane_row()] = factor(square.x);
      tile.factor[kTileRows * warp + lane_row() + 8] = factor(square.y);
    }
    __syncthreads();
    const auto log_of = [&](int token) { return vectors.element(kDeltaLog, min(token * n, kDeltaRows - 1)); };
    if (threadIdx.x < kDeltaRows) {
      float* const to = p.factors + (chunk * shape.query_heads + query_head) * 2 * kDeltaRows + threadIdx.x;
      const float factor = tile.factor[threadIdx.x];
      to[0] = factor;
      to[kDeltaRows] = factor * exp2_fast(log_of(threadIdx.x));
    }

    // P^T
    const int row = kTileRows * warp + lane_row();
    const float2 before = {vectors.element(kDeltaLog, row), vectors.element(kDeltaLog, row + 8)},
                 unit = {vectors.element(kDeltaUnit, row), vectors.element(kDeltaUnit, row + 8)};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int token = 8 * i + lane_col() + j % 2, of = row + j / 2 * 8;
        const float weight = tile.factor[token] * (j < 2 ? unit.x : unit.y) *
                             exp2_fast(log_of(token) - (j < 2 ? before.x : before.y));
        float& x = scores.at[i][j];
        x = of < (token + 1) * n ? x * weight : 0.f;
      }
    }
    Operand<kTilesDown> weights;
    round_to<T>(weights, scores);

    // dU += P^T dO
#pragma unroll
    for (int slab = 0; slab < Slabs; ++slab) {
      if (slab * kValueSlab < shape.V) {
        wait_copies<1>();
        __syncthreads();
#pragma unroll
        for (int b = 0; b < kTilesDown; ++b) {
          if (b < bands) {
            add_product<T>(du[slab], weights.at[b], tile.dout(slab * kValueSlab), kTileRows * b);
          }
        }
        if ((slab + 2) * kValueSlab < shape.V) __syncthreads();
        load_gradient(query_head, (slab + 2) * kValueSlab);
      }
    }
  }
#pragma unroll
  for (int slab = 0; slab < Slabs; ++slab) {
    if (slab * kValueSlab < shape.V) {
      store_rows<T, T>(du[slab], at<T>(p.du, batch, piece.start * n, head, slab * kValueSlab), p.du.stride[1],
                       kTileRows * warp, rows, shape.V - slab * kValueSlab);
    }
  }
}

template <typename T, int Slabs>
cudaError_t launch_values_of(const DeltaValues& p, cudaStream_t stream) {
  constexpr int kMostBytes = ValueTiles<T>::bytes(kDeltaMaxWidth, kDeltaMaxWidth);
  if (const cudaError_t error = allow_shared<values<T, Slabs>>(kMostBytes); error != cudaSuccess)
    return error;
  const int64_t blocks = piece_count(p.shape.tokens, delta_chunk(p.shape.n)) * p.shape.heads;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const int bytes = ValueTiles<T>::bytes(p.shape.D, p.shape.V);
  values<T, Slabs><<<static_cast<unsigned>(blocks), kValueThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_values(const DeltaValues& p, cudaStream_t stream) {
  if (p.shape.V <= 64) return launch_values_of<T, 1>(p, stream);
  if (p.shape.V <= 128) return launch_values_of<T, 2>(p, stream);
  return launch_values_of<T, 4>(p, stream);
}

}  // namespace girih::kernels::delta_product
