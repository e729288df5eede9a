// prepare: X = (I + A)^-1 and the factors of the rows of every chunk. A warp processes one chunk and head at
// a time; the loads of the next chunk overlap with the inversion of the current one.
//
//     A_ij = beta_i rho_i rho_j e^{L_i - L_j} k_i . k_j (j < i)        rho_i = 1 / |k_i|, or 1
//     read_i = beta_i rho_i e^{L_i}        write_i = rho_i e^{L_C - L_i}
//
// With b, b_i . k_j replaces beta_i k_i . k_j, and beta_i is 1.
//
// The tensor cores compute the ten 16 x 16 blocks of K K^T on and below the diagonal; these become N = -A in
// place.
#pragma once

#include "delta_product/prepare_inverse.cuh"
#include "pipe/card.h"
#include "tile/gates.h"

namespace girih::kernels::delta_product {

// Blocks of a multiprocessor, limited by registers, or with b by shared memory.
constexpr int prepare_blocks(bool read_keys) { return read_keys ? 2 : 4; }

// Inclusive prefix sum over the lanes.
__device__ inline double sum_through(double x) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const double before = __shfl_up_sync(~0u, x, distance);
    if (lane() >= distance) x += before;
  }
  return x;
}

// Converts beta and the gates of a chunk from their own types. L is summed in fp64, because differences of L
// are used. rho is set to 1, and to 0 for rows that do not exist.
template <typename T, int Slabs, bool ReadKeys>
__device__ inline void take_rows(const DeltaPrepare& p, const PrepareSpace<T, Slabs, ReadKeys>& space,
                                 const Chunk<T>& chunk) {
  double log_before = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 32 + lane();
    float log = 0.f;
    if (p.g.data != nullptr) {
      const float gate =
          summable(arrived_element(space.log() + row, p.g.dtype, chunk.upper >> (half + 2) & 1));
      const double sum = log_before + sum_through(static_cast<double>(gate) * 1.4426950408889634);
      log_before = __shfl_sync(~0u, sum, 31);
      log = static_cast<float>(sum);
    }
    space.beta()[row] =
        ReadKeys ? 1.f : arrived_element(space.beta() + row, p.beta.dtype, chunk.upper >> half & 1);
    space.log()[row] = log;
    space.unit()[row] = row < chunk.rows ? 1.f : 0.f;
  }
}

// K K^T, or B K^T, by slabs of 64 columns. After each slab the loads of a later slab start into its memory.
template <typename T, int Slabs, bool ReadKeys>
__device__ inline void multiply_keys(Block (&a)[kDeltaBlocks], const DeltaPrepare& p,
                                     const PrepareSpace<T, Slabs, ReadKeys>& space, const Chunk<T>& chunk) {
  const int l = lane();
#pragma unroll 1
  for (int slab = 0; slab * kSlab < p.shape.D; ++slab) {
    wait_copies<Slabs - 1>();
    __syncwarp();
    const auto keys = space.keys(slab), read_keys = space.read_keys(slab);
#pragma unroll 2
    for (int col = 0; col < kSlab; col += 16) {
      // B fragments are loaded by ldmatrix on their own: forming them from A fragments costs a third of the
      // instructions.
      uint32_t right[kTilesDown][4];
#pragma unroll
      for (int i = 0; i < kTilesDown; ++i) {
        uint32_t left[4];
        load_block(left, read_keys, kTileRows * i, col);
        load_matrices(right[i], keys.address(kTileRows * i, col, (l & 7) + (l >> 4) * 8, (l >> 3 & 1) * 8));
#pragma unroll
        for (int j = 0; j <= i; ++j) {
          mma<T>(a[block_of(i, j)].at[0], left, right[j][0], right[j][1]);
          mma<T>(a[block_of(i, j)].at[1], left, right[j][2], right[j][3]);
        }
      }
    }
    __syncwarp();
    load_keys(p, space, chunk, slab + Slabs);
  }
}

// rho_i from the diagonal of K K^T. A key of zeros has rho = 1: rho then scales the gradient only, and 1 /
// sqrt(1e-6) = 1000 could overflow.
template <class Space>
__device__ inline void find_lengths(const Space& space, const Block (&a)[kDeltaBlocks], int rows) {
#pragma unroll
  for (int i = 0; i < kDeltaRows / 8; ++i) {
    const float(&block)[4] = a[block_of(i / 2, i / 2)].at[i % 2];
    const float square = lane() & 4 ? block[i % 2 * 2 + 1] : block[i % 2 * 2];
    const int at = 8 * i + lane_row();
    if (lane_col() == (lane_row() & ~1) && at < rows && square > 0.f) {
      space.unit()[at] = rsqrtf(square + 1e-6f);
    }
  }
  __syncwarp();
}

// Stores beta, read, write, L and rho of every row. Returns `divides` and that |beta| of the lane's rows is
// large enough to divide by.
template <class Space>
__device__ inline bool put_factors(float* vectors, const Space& space, int rows, bool divides) {
  constexpr float kLeastStep = 0x1p-40f;
  const float log_end = space.log()[kDeltaRows - 1];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 32 + lane();
    const float beta = space.beta()[row], log = space.log()[row], unit = space.unit()[row];
    divides = divides && (row >= rows || fabsf(beta) >= kLeastStep);
    vectors[kDeltaBeta * kDeltaRows + row] = beta;
    vectors[kDeltaRead * kDeltaRows + row] = beta * unit * exp2_fast(log);
    vectors[kDeltaWrite * kDeltaRows + row] = unit * exp2_fast(log_end - log);
    vectors[kDeltaLog * kDeltaRows + row] = log;
    vectors[kDeltaUnit * kDeltaRows + row] = unit;
  }
  return divides;
}

// N_ij = -beta_i rho_i rho_j e^{L_i - L_j} k_i . k_j from k_i . k_j. Below the diagonal blocks, L_i - L_j is
// a sum of three differences, each at most 0: L_i minus L at the first row of the block row, that minus L at
// the last row of the block column, and that minus L_j.
template <class Space>
__device__ inline void weigh(Block (&a)[kDeltaBlocks], const Space& space, bool gated, bool unit) {
  const float *const beta = space.beta(), *const log = space.log(), *const rho = space.unit();
#pragma unroll
  for (int i = 0; i < kTilesDown; ++i) {
    const int row = kTileRows * i + lane_row();
    float2 by = {-beta[row] * rho[row], -beta[row + 8] * rho[row + 8]};
    scale_rows(a[block_of(i, i)], by);
    if (gated) {
      const float start = log[kTileRows * i];
      by.x *= exp2_fast(log[row] - start), by.y *= exp2_fast(log[row + 8] - start);
    }
#pragma unroll
    for (int j = 0; j < i; ++j) scale_rows(a[block_of(i, j)], by);
  }
  if (gated || unit) {
#pragma unroll
    for (int j = 0; j < kTilesDown; ++j) {
      float2 by[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        by[n] = *reinterpret_cast<const float2*>(rho + kTileRows * j + 8 * n + lane_col());
      }
      scale_columns(a[block_of(j, j)], [&](int n) { return by[n]; });
      const float end = log[kTileRows * j + kTileRows - 1];
      if (gated) {
        const float of_row[2] = {log[kTileRows * j + lane_row()], log[kTileRows * j + lane_row() + 8]};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float2 of_col = *reinterpret_cast<const float2*>(log + kTileRows * j + 8 * n + lane_col());
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            a[block_of(j, j)].at[n][i] *= exp2_fast(of_row[i / 2] - (i % 2 ? of_col.y : of_col.x));
          }
          by[n].x *= exp2_fast(end - of_col.x), by[n].y *= exp2_fast(end - of_col.y);
        }
      }
#pragma unroll
      for (int i = j + 1; i < kTilesDown; ++i) {
        const float between = gated ? exp2_fast(log[kTileRows * i] - end) : 1.f;
        scale_columns(a[block_of(i, j)], [&](int n) { return float2{by[n].x * between, by[n].y * between}; });
      }
    }
  }
  // N_ij = 0 unless j < i.
#pragma unroll
  for (int i = 0; i < kTilesDown; ++i) {
    Block& block = a[block_of(i, i)];
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const bool below = lane_col() + x < lane_row();
      block.at[0][x] = below ? block.at[0][x] : 0.f;
      block.at[1][x] = 0.f;
      block.at[1][2 + x] = below ? block.at[1][2 + x] : 0.f;
    }
  }
}

// True if keys are nearly equal to earlier keys and beta is large: the mean over rows of min(1, max_j |A_ij|)
// exceeds 0.6. For random keys of 64 channels this mean is about beta / 4.
__device__ inline bool repeat(const Block (&a)[kDeltaBlocks], int rows) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kTilesDown; ++i) {
    float most[2] = {0.f, 0.f};
#pragma unroll
    for (int j = 0; j <= i; ++j) {
#pragma unroll
      for (int x = 0; x < 8; ++x) {
        most[x / 2 % 2] = fmaxf(most[x / 2 % 2], fabsf(a[block_of(i, j)].at[x / 4][x % 4]));
      }
    }
    sum += fminf(max_over_row(most[0]), 1.f) + fminf(max_over_row(most[1]), 1.f);
  }
  return sum_over_col(sum) > 0.6f * rows;
}

template <typename T, int Slabs, bool ReadKeys>
__global__ void __launch_bounds__(kPrepareWarps * 32, prepare_blocks(ReadKeys))
    prepare(const __grid_constant__ DeltaPrepare p, const __grid_constant__ Divider each) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const DeltaShape& shape = p.shape;
  const int warp = warp_index();
  using Space = PrepareSpace<T, Slabs, ReadKeys>;
  const Space space{shared + warp * Space::kBytes};
  const int tokens = delta_chunk(shape.n);
  const int64_t numbers = piece_count(shape.tokens, tokens);
  const bool gated = p.g.data != nullptr;

  const unsigned first = blockIdx.x * kPrepareWarps + warp, warps = gridDim.x * kPrepareWarps,
                 heads = shape.heads;
  const Job step = {warps / heads, static_cast<int>(warps % heads)};
  Job next = {first / heads, static_cast<int>(first % heads)};
  Chunk<T> chunk = start_chunk(p, space, next, numbers, each);
#pragma unroll 1
  while (next.number < numbers) {
    const Job job = next;
    const int rows = chunk.rows;
    Block a[kDeltaBlocks];
#pragma unroll
    for (int i = 0; i < kDeltaBlocks; ++i) fill(a[i], 0.f);
    if (rows > 0) {
      if (Slabs == 1) prefetch_keys<ReadKeys>(p, chunk);
      wait_copies<Slabs>();
      take_rows(p, space, chunk);
      multiply_keys(a, p, space, chunk);
    }
    next.next(step, shape.heads);
    if (rows == 0) {
      chunk = start_chunk(p, space, next, numbers, each);
      continue;
    }
    if (shape.unit) find_lengths(space, a, rows);

    unsigned char* const out =
        static_cast<unsigned char*>(p.prepared) + (job.number * shape.heads + job.head) * kDeltaPreparedBytes;
    bool divides = put_factors(reinterpret_cast<float*>(out + kDeltaInverseBytes), space, rows,
                               kHasRange<T> && !gated && !shape.unit);
    weigh(a, space, gated, shape.unit);
    const bool keeps = repeat(a, rows);
    divides = __all_sync(~0u, divides);
    if (lane() == 0) {
      *reinterpret_cast<float*>(out + kDeltaFlag) = keeps;
      *reinterpret_cast<float*>(out + kDeltaDivides) = divides;
    }
    __syncwarp();
    chunk = start_chunk(p, space, next, numbers, each);
    invert(a, space, InverseOut<T>{out, keeps});
  }
}

template <typename T, int Slabs, bool ReadKeys>
cudaError_t launch_prepare_of(const DeltaPrepare& p, cudaStream_t stream) {
  constexpr auto kKernel = prepare<T, Slabs, ReadKeys>;
  constexpr int kBytes = PrepareSpace<T, Slabs, ReadKeys>::kBlockBytes;
  if (const cudaError_t error = allow_shared<kKernel>(kBytes); error != cudaSuccess) return error;
  const int64_t jobs = piece_count(p.shape.tokens, delta_chunk(p.shape.n)) * p.shape.heads;
  if (jobs == 0) return cudaSuccess;
  int processors = 0, blocks = 0;
  if (const cudaError_t error = processor_count(processors); error != cudaSuccess) return error;
  if (const cudaError_t error =
          cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kKernel, kPrepareWarps * 32, kBytes);
      error != cudaSuccess) {
    return error;
  }
  const int64_t most = static_cast<int64_t>(processors) * std::max(blocks, 1);
  const int64_t grid = std::min(divide_up(jobs, kPrepareWarps), most);
  return launch_grid<kKernel>(grid, kPrepareWarps * 32, kBytes, stream, p, chunks_of_each(p.shape));
}

template <typename T>
cudaError_t launch_prepare(const DeltaPrepare& p, cudaStream_t stream) {
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  const auto launch = [&](auto slabs) {
    return p.b.data == nullptr ? launch_prepare_of<T, slabs(), false>(p, stream)
                               : launch_prepare_of<T, slabs(), true>(p, stream);
  };
  return p.shape.D <= kSlab ? launch(two) : launch(one);  // two: see PrepareSpace
}

}  // namespace girih::kernels::delta_product
