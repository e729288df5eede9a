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

template <typename T>
struct ValueTiles {
  using Tile = SharedTile<T, kDeltaRows, kValueSlab>;
  static constexpr int kVectorBytes = kDeltaVectors * kDeltaRows * 4;
  static constexpr int kBytes = 3 * Tile::kBytes + kVectorBytes + kDeltaRows * 4;

  Tile k, q, dout;
  unsigned char* vectors;
  float* factor;  // of every token: scale rho_t

  __device__ explicit ValueTiles(unsigned char* shared)
      : k{reinterpret_cast<T*>(shared)},
        q{reinterpret_cast<T*>(shared + Tile::kBytes)},
        dout{reinterpret_cast<T*>(shared + 2 * Tile::kBytes)},
        vectors(shared + 3 * Tile::kBytes),
        factor(reinterpret_cast<float*>(vectors + kVectorBytes)) {}
};

template <typename T, int Slabs>
__global__ void __launch_bounds__(kValueThreads) values(const __grid_constant__ DeltaValues p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const ValueTiles<T> tile(shared);
  const DeltaShape& shape = p.shape;
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
    load_async<kValueThreads>(tile.k, at<T>(p.k, batch, piece.start * n, head, d), p.k.stride[1], rows,
                              shape.D - d, threadIdx.x);
    load_async<kValueThreads>(tile.q, at<T>(p.q, batch, piece.start, query_head, d), p.q.stride[1],
                              piece.length, shape.D - d, threadIdx.x);
    commit_copies();
  };
  const auto load_gradient = [&](int query_head, int v) {
    load_async<kValueThreads>(tile.dout, at<T>(p.dout, batch, piece.start, query_head, v), p.dout.stride[1],
                              piece.length, shape.V - v, threadIdx.x);
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
    load_gradient(query_head, 0);

    // K Q^T, and |q_t|^2 of the warp's 16 tokens
    Sums<8> scores;
    fill(scores, 0.f);
    float2 square = {0.f, 0.f};
#pragma unroll 1
    for (int d = 0;; d += kValueSlab) {
      if (d == 0) {
        wait_copies<1>();
      } else {
        wait_copies<0>();
      }
      __syncthreads();
#pragma unroll
      for (int col = 0; col < kValueSlab; col += 16) {
        uint32_t a[4];
        load_block(a, tile.k, kTileRows * warp, col);
        add_product_transposed<T>(scores, a, tile.q, 0, col);
        if (shape.unit) {
          load_block(a, tile.q, kTileRows * warp, col);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 x = unpaired<T>(a[i]);
            float& sum = i % 2 == 0 ? square.x : square.y;
            sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
          }
        }
      }
      if (d + kValueSlab >= shape.D) break;
      __syncthreads();
      load_keys(query_head, d + kValueSlab);
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
        if (slab > 0) {
          __syncthreads();
          load_gradient(query_head, slab * kValueSlab);
        }
        wait_copies<0>();
        __syncthreads();
#pragma unroll
        for (int b = 0; b < kTilesDown; ++b) {
          if (b < bands) add_product<T>(du[slab], weights.at[b], tile.dout, kTileRows * b);
        }
      }
    }
  }
#pragma unroll
  for (int slab = 0; slab < Slabs; ++slab) {
    T* const to = at<T>(p.du, batch, piece.start * n, head, slab * kValueSlab);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = kTileRows * warp + lane_row() + 8 * j, col = 8 * i + lane_col();
        if (row < rows && slab * kValueSlab + col < shape.V) {
          *reinterpret_cast<uint32_t*>(to + row * p.du.stride[1] + col) =
              pair_of<T>(du[slab].at[i][2 * j], du[slab].at[i][2 * j + 1]);
        }
      }
    }
  }
}

template <typename T, int Slabs>
cudaError_t launch_values_of(const DeltaValues& p, cudaStream_t stream) {
  constexpr int kBytes = ValueTiles<T>::kBytes;
  if (const cudaError_t error = allow_shared<values<T, Slabs>>(kBytes); error != cudaSuccess) return error;
  const int64_t blocks = piece_count(p.shape.tokens, delta_chunk(p.shape.n)) * p.shape.heads;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  values<T, Slabs><<<static_cast<unsigned>(blocks), kValueThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_values(const DeltaValues& p, cudaStream_t stream) {
  if (p.shape.V <= 64) return launch_values_of<T, 1>(p, stream);
  if (p.shape.V <= 128) return launch_values_of<T, 2>(p, stream);
  return launch_values_of<T, 4>(p, stream);
}

}  // namespace girih::kernels::delta_product
