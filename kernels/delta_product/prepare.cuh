// X = (I + A)^-1 and the factors of a chunk's rows, one warp a chunk and head.
//
// K K^T comes from the tensor cores, the ten 16 x 16 blocks on and below its diagonal. The diagonal blocks of
// X are found by forward substitution in fp32, a column a lane; the others, by distance from the diagonal,
// are
//
//     X_ij = -X_ii sum_{j<=m<i} A_im X_mj
//
// with every factor in two bf16 parts, hi + lo: keys that are nearly parallel make large X of which the next
// products keep little, and one part alone loses it.
#pragma once

#include "delta_product/chain.cuh"
#include "tile/gates.h"
#include "tile/pack.h"

namespace girih::kernels::delta_product {

constexpr int kPrepareWarps = 4;
constexpr int kSlab = 64;  // columns of k at a time

using Block = Sums<2>;

// A block as a factor, in two parts.
struct Split {
  uint32_t hi[4], lo[4];
};

__device__ inline Split split(const Block& x, float sign = 1.f) {
  Split parts;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float left = sign * x.at[i / 2][i % 2 * 2], right = sign * x.at[i / 2][i % 2 * 2 + 1];
    parts.hi[i] = pair_of<__nv_bfloat16>(left, right);
    const float2 back = unpaired<__nv_bfloat16>(parts.hi[i]);
    parts.lo[i] = pair_of<__nv_bfloat16>(left - back.x, right - back.y);
  }
  return parts;
}

// From a left factor to a right one.
__device__ inline Split turned(const Split& left) {
  Split right;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    right.hi[i] = transpose_pairs(left.hi[i]);
    right.lo[i] = transpose_pairs(left.lo[i]);
  }
  return right;
}

// sums += left right
__device__ inline void add_split_product(Block& sums, const Split& left, const Split& right) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    mma<__nv_bfloat16>(sums.at[n], left.lo, right.hi[2 * n], right.hi[2 * n + 1]);
    mma<__nv_bfloat16>(sums.at[n], left.hi, right.lo[2 * n], right.lo[2 * n + 1]);
    mma<__nv_bfloat16>(sums.at[n], left.hi, right.hi[2 * n], right.hi[2 * n + 1]);
  }
}

// What a warp has in shared memory: the factors of its rows, and the slabs of keys under way.
template <typename T>
struct PrepareSpace {
  using Keys = SharedTile<T, kDeltaRows, kSlab>;
  // Blocks are this far apart, so that the two that a load reads lie in other banks.
  static constexpr int kScratch = kTileRows * kTileRows + kTileRows;
  static constexpr int kVectorBytes = kDeltaVectors * kDeltaRows * 4;
  static_assert(kTilesDown * kScratch * 4 <= Keys::kBytes, "the scratch takes the place of keys");

  unsigned char* data;

  // One slab or two.
  __host__ __device__ static constexpr int bytes(int D) {
    return kVectorBytes + (D <= kSlab ? 1 : 2) * Keys::kBytes;
  }
  __device__ Keys keys(int slab) const {
    return {reinterpret_cast<T*>(data + kVectorBytes + slab % 2 * Keys::kBytes)};
  }
  __device__ float* scratch(int block) const {
    return reinterpret_cast<float*>(data + kVectorBytes) + block * kScratch;
  }
  __device__ float* vector(int which) const { return reinterpret_cast<float*>(data) + which * kDeltaRows; }
};

// The sum over lanes 0 to this one.
__device__ inline double sum_through(double x) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const double before = __shfl_up_sync(~0u, x, distance);
    if (lane() >= distance) x += before;
  }
  return x;
}

// f(row, column, value of a block's element that is the lane's)
template <class F>
__device__ inline void for_each_element(Block& block, const F& f) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) f(lane_row() + i / 2 * 8, 8 * n + lane_col() + i % 2, block.at[n][i]);
  }
}

// Four blocks of a multiprocessor: a third of a warp's time is the wait for its keys.
template <typename T>
__global__ void __launch_bounds__(kPrepareWarps * 32, 4) prepare(const __grid_constant__ DeltaPrepare p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const DeltaShape& shape = p.shape;
  const int warp = warp_index(), l = lane(), n = shape.n;
  const PrepareSpace<T> space{shared + warp * PrepareSpace<T>::bytes(shape.D)};
  const int64_t tokens = delta_chunk(n), job = static_cast<int64_t>(blockIdx.x) * kPrepareWarps + warp;
  const int64_t number = job / shape.heads;
  const int head = static_cast<int>(job % shape.heads);
  if (number >= piece_count(shape.tokens, tokens)) return;
  const Piece piece = piece_at(shape.tokens, number, tokens);
  if (piece.length == 0) return;
  const int rows = piece.length * n;
  const int64_t first_row = piece.start * n;

  // K, two slabs of columns under way.
  const T* const keys_of = static_cast<const T*>(p.k.data) + piece.sequence.batch * p.k.stride[0] +
                           first_row * p.k.stride[1] + head * p.k.stride[2];
  const int slabs = (shape.D + kSlab - 1) / kSlab;
  const auto load = [&](int slab) {
    if (slab < slabs) {
      load_async<32>(space.keys(slab), keys_of + slab * kSlab, p.k.stride[1], rows, shape.D - slab * kSlab,
                     l);
    }
    commit_copies();
  };
  load(0);
  load(1);

  // beta, and L in fp64: its differences are what counts.
  double log_before = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 32 + l;
    float beta = 0.f, gate = 0.f;
    if (row < rows) {
      beta = load_any(p.beta.data, p.beta.dtype,
                      piece.sequence.batch * p.beta.stride[0] + (first_row + row) * p.beta.stride[1] +
                          head * p.beta.stride[2]);
      if (p.g.data != nullptr && row % n == 0) {
        gate = summable(load_any(p.g.data, p.g.dtype,
                                 piece.sequence.batch * p.g.stride[0] +
                                     (piece.start + row / n) * p.g.stride[1] + head * p.g.stride[2]));
      }
    }
    const double sum = log_before + sum_through(static_cast<double>(gate) * 1.4426950408889634);
    space.vector(kDeltaBeta)[row] = beta;
    space.vector(kDeltaLog)[row] = static_cast<float>(sum);
    log_before = __shfl_sync(~0u, sum, 31);
  }

  // K K^T
  Block a[kDeltaBlocks];
#pragma unroll
  for (int i = 0; i < kDeltaBlocks; ++i) fill(a[i], 0.f);
#pragma unroll 1
  for (int slab = 0; slab < slabs; ++slab) {
    wait_copies<1>();
    __syncwarp();
    const auto keys = space.keys(slab);
#pragma unroll 2
    for (int col = 0; col < kSlab; col += 16) {
      uint32_t k[kTilesDown][4];
#pragma unroll
      for (int i = 0; i < kTilesDown; ++i) load_block(k[i], keys, kTileRows * i, col);
#pragma unroll
      for (int i = 0; i < kTilesDown; ++i) {
#pragma unroll
        for (int j = 0; j <= i; ++j) {
          mma<T>(a[block_of(i, j)].at[0], k[i], k[j][0], k[j][2]);
          mma<T>(a[block_of(i, j)].at[1], k[i], k[j][1], k[j][3]);
        }
      }
    }
    __syncwarp();
    load(slab + 2);
  }
  wait_copies<0>();

  // rho_i from the diagonal of K K^T; a row that is not there has none.
#pragma unroll
  for (int i = 0; i < kTilesDown; ++i) {
    for_each_element(a[block_of(i, i)], [&](int row, int col, float square) {
      if (row == col) {
        const int at = kTileRows * i + row;
        // Of a key that is zero, rho only scales the gradient: 1 instead of 1000 overflows nowhere.
        const bool scaled = shape.unit && square > 0.f;
        space.vector(kDeltaUnit)[at] = at >= rows ? 0.f : scaled ? rsqrtf(square + 1e-6f) : 1.f;
      }
    });
  }
  __syncwarp();

  // A_ij = beta_i rho_i rho_j e^{L_i - L_j} k_i . k_j
  const float *const beta = space.vector(kDeltaBeta), *const decay = space.vector(kDeltaLog),
                     *const unit = space.vector(kDeltaUnit);
#pragma unroll
  for (int i = 0; i < kTilesDown; ++i) {
#pragma unroll
    for (int j = 0; j <= i; ++j) {
      for_each_element(a[block_of(i, j)], [&](int row, int col, float& x) {
        const int r = kTileRows * i + row, c = kTileRows * j + col;
        const float factor = beta[r] * unit[r] * unit[c] * exp2_fast(decay[r] - decay[c]);
        x = c < r ? x * factor : 0.f;
      });
    }
  }

  // Whether rows nearly repeat earlier keys with strong steps: the mean of their largest |A_ij|, 1 at most
  // each. With random keys of 64 channels it is about a quarter of beta.
  float repeats = 0.f;
#pragma unroll
  for (int i = 0; i < kTilesDown; ++i) {
    float2 most = {0.f, 0.f};
#pragma unroll
    for (int j = 0; j <= i; ++j) {
      for_each_element(a[block_of(i, j)], [&](int row, int, float value) {
        float& of_row = row == lane_row() ? most.x : most.y;
        of_row = fmaxf(of_row, fabsf(value));
      });
    }
    repeats += fminf(max_over_row(most.x), 1.f) + fminf(max_over_row(most.y), 1.f);
  }
  const bool keeps = sum_over_col(repeats) > 0.6f * rows;

  // The diagonal blocks of X: x_i = [i is the column] - sum_{j<i} a_ij x_j. Lanes 0-15 have the columns of
  // blocks 0 and 2, lanes 16-31 those of 1 and 3.
  Block x[kDeltaBlocks];
#pragma unroll
  for (int i = 0; i < kTilesDown; ++i) {
    for_each_element(a[block_of(i, i)],
                     [&](int row, int col, float value) { space.scratch(i)[row * kTileRows + col] = value; });
  }
  __syncwarp();
  {
    const int column = l % 16;
    float own[2][kTileRows];
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float* row = space.scratch(l / 16 + 2 * b) + i * kTileRows;
        float even = column == i ? 1.f : 0.f, odd = 0.f;
#pragma unroll
        for (int j = 0; j < i; j += 4) {
          const float4 four = *reinterpret_cast<const float4*>(row + j);
          even = fmaf(-four.x, own[b][j], even);
          if (j + 1 < i) odd = fmaf(-four.y, own[b][j + 1], odd);
          if (j + 2 < i) even = fmaf(-four.z, own[b][j + 2], even);
          if (j + 3 < i) odd = fmaf(-four.w, own[b][j + 3], odd);
        }
        own[b][i] = even + odd;
      }
    }
    __syncwarp();
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int i = 0; i < kTileRows; ++i) {
        space.scratch(l / 16 + 2 * b)[i * kTileRows + column] = own[b][i];
      }
    }
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < kTilesDown; ++i) {
    for_each_element(x[block_of(i, i)], [&](int row, int col, float& value) {
      value = space.scratch(i)[row * kTileRows + col];
    });
  }

  // The others.
  Split left[kTilesDown], right[kDeltaBlocks];
#pragma unroll
  for (int i = 0; i < kTilesDown; ++i) {
    left[i] = split(x[block_of(i, i)], -1.f);
    right[block_of(i, i)] = turned(split(x[block_of(i, i)]));
  }
#pragma unroll
  for (int distance = 1; distance < kTilesDown; ++distance) {
#pragma unroll
    for (int j = 0; j + distance < kTilesDown; ++j) {
      const int i = j + distance;
      Block sum;
      fill(sum, 0.f);
#pragma unroll
      for (int m = j; m < i; ++m) add_split_product(sum, split(a[block_of(i, m)]), right[block_of(m, j)]);
      Block& found = x[block_of(i, j)];
      fill(found, 0.f);
      add_split_product(found, left[i], turned(split(sum)));
      right[block_of(i, j)] = turned(split(found));
    }
  }

  // Out: a block as its four 8 x 8 matrices, in the order of a left factor, so that ldmatrix reads it as any.
  unsigned char* const out = static_cast<unsigned char*>(p.prepared) + job * kDeltaPreparedBytes;
#pragma unroll
  for (int i = 0; i < kDeltaBlocks; ++i) {
    Operand<1> block;
    round_to<T>(block, x[i]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      reinterpret_cast<uint32_t*>(out + i * 512 + j * 128)[l] = block.at[0][j];
      if (keeps) {
        const float2 back = unpaired<T>(block.at[0][j]);
        const float* const exact = x[i].at[j / 2] + j % 2 * 2;
        reinterpret_cast<uint32_t*>(out + kDeltaLost + i * 512 + j * 128)[l] =
            pair_of<T>(exact[0] - back.x, exact[1] - back.y);
      }
    }
  }
  if (l == 0) *reinterpret_cast<float*>(out + kDeltaFlag) = keeps;
  float* const vectors = reinterpret_cast<float*>(out + kDeltaInverseBytes);
  const float log_end = decay[kDeltaRows - 1];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 32 + l;
    vectors[kDeltaBeta * kDeltaRows + row] = beta[row];
    vectors[kDeltaRead * kDeltaRows + row] = beta[row] * unit[row] * exp2_fast(decay[row]);
    vectors[kDeltaWrite * kDeltaRows + row] = unit[row] * exp2_fast(log_end - decay[row]);
    vectors[kDeltaLog * kDeltaRows + row] = decay[row];
    vectors[kDeltaUnit * kDeltaRows + row] = unit[row];
  }
}

template <typename T>
cudaError_t launch_prepare(const DeltaPrepare& p, cudaStream_t stream) {
  constexpr int kMostBytes = kPrepareWarps * PrepareSpace<T>::bytes(kDeltaMaxWidth);
  if (const cudaError_t error = allow_shared<prepare<T>>(kMostBytes); error != cudaSuccess) return error;
  const int64_t jobs = piece_count(p.shape.tokens, delta_chunk(p.shape.n)) * p.shape.heads;
  const int64_t blocks = divide_up(jobs, kPrepareWarps);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const int bytes = kPrepareWarps * PrepareSpace<T>::bytes(p.shape.D);
  prepare<T><<<static_cast<unsigned>(blocks), kPrepareWarps * 32, bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace girih::kernels::delta_product
