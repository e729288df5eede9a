// prepare: X = (I + A)^-1 and the factors of the rows of every chunk. A warp processes one chunk and head at
// a time; the loads of the next chunk overlap with the inversion of the current one.
//
//     A_ij = beta_i rho_i rho_j e^{L_i - L_j} k_i . k_j (j < i)        rho_i = 1 / |k_i|, or 1
//     read_i = beta_i rho_i e^{L_i}        w_i = rho_i e^{L_C - L_i}
//
// With b, b_i . k_j replaces beta_i k_i . k_j, and beta_i is 1.
//
// The tensor cores compute the ten 16 x 16 blocks of K K^T on and below the diagonal; these become N = -A in
// place.
#pragma once

#include "delta_product/prepare_inverse.cuh"
#include "pipe/device.h"
#include "tile/gates.h"

namespace girih::kernels::delta_product {

// Blocks of a multiprocessor, limited by registers, or with b by shared memory.
constexpr int prepare_blocks(bool has_b) { return has_b ? 2 : 4; }

// Inclusive prefix sum over the lanes.
__device__ inline double prefix_sum(double x) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const double before = __shfl_up_sync(~0u, x, distance);
    if (lane() >= distance) x += before;
  }
  return x;
}

// Converts beta and the gates of a chunk from their own types. L is summed in fp64, because differences of L
// are used. rho is set to 1, and to 0 for rows that do not exist.
template <typename T, int Slabs, bool HasB>
__device__ inline void convert_rows(const DeltaPrepare& p, const PrepareStorage<T, Slabs, HasB>& storage,
                                    const ChunkLoads<T>& chunk) {
  double log_before = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 32 + lane();
    float log = 0.f;
    if (p.g.data != nullptr) {
      const float gate =
          clamp_gate(convert_element(storage.log_decay() + row, p.g.dtype, chunk.upper >> (half + 2) & 1));
      const double sum = log_before + prefix_sum(static_cast<double>(gate) * 1.4426950408889634);
      log_before = __shfl_sync(~0u, sum, 31);
      log = static_cast<float>(sum);
    }
    storage.beta()[row] =
        HasB ? 1.f : convert_element(storage.beta() + row, p.beta.dtype, chunk.upper >> half & 1);
    storage.log_decay()[row] = log;
    storage.rho()[row] = row < chunk.rows ? 1.f : 0.f;
  }
}

// K K^T, or B K^T, by slabs of 64 columns. After each slab the loads of a later slab start into its memory.
template <typename T, int Slabs, bool HasB>
__device__ inline void multiply_keys(Block (&a)[kDeltaInverseBlocks], const DeltaPrepare& p,
                                     const PrepareStorage<T, Slabs, HasB>& storage,
                                     const ChunkLoads<T>& chunk) {
  const int l = lane();
#pragma unroll 1
  for (int slab = 0; slab * kSlab < p.shape.D; ++slab) {
    wait_copies<Slabs - 1>();
    __syncwarp();
    const auto keys = storage.keys(slab), b_or_k = storage.b_or_k(slab);
#pragma unroll 2
    for (int col = 0; col < kSlab; col += 16) {
      // B fragments are loaded by ldmatrix on their own: forming them from A fragments costs a third of the
      // instructions.
      uint32_t right[kChunkTiles][4];
#pragma unroll
      for (int i = 0; i < kChunkTiles; ++i) {
        uint32_t left[4];
        load_block(left, b_or_k, kTileRows * i, col);
        ldmatrix(right[i], keys.address(kTileRows * i, col, (l & 7) + (l >> 4) * 8, (l >> 3 & 1) * 8));
#pragma unroll
        for (int j = 0; j <= i; ++j) {
          mma<T>(a[inverse_block_index(i, j)].at[0], left, right[j][0], right[j][1]);
          mma<T>(a[inverse_block_index(i, j)].at[1], left, right[j][2], right[j][3]);
        }
      }
    }
    __syncwarp();
    load_keys(p, storage, chunk, slab + Slabs);
  }
}

// rho_i from the diagonal of K K^T. A key of zeros has rho = 1: rho then scales the gradient only, and 1 /
// sqrt(1e-6) = 1000 could overflow.
template <class Storage>
__device__ inline void compute_rho(const Storage& storage, const Block (&a)[kDeltaInverseBlocks], int rows) {
#pragma unroll
  for (int i = 0; i < kDeltaChunkRows / 8; ++i) {
    const float(&block)[4] = a[inverse_block_index(i / 2, i / 2)].at[i % 2];
    const float square = lane() & 4 ? block[i % 2 * 2 + 1] : block[i % 2 * 2];
    const int at = 8 * i + lane_row();
    if (lane_col() == (lane_row() & ~1) && at < rows && square > 0.f) {
      storage.rho()[at] = rsqrtf(square + 1e-6f);
    }
  }
  __syncwarp();
}

// Stores the factors of every row. Returns `can_divide_by_beta` if |beta| of the lane's rows is large enough
// to divide by, else false.
template <class Storage>
__device__ inline bool store_factors(float* chunk_factors, const Storage& storage, int rows,
                                     bool can_divide_by_beta) {
  constexpr float kMinBeta = 0x1p-40f;
  const float log_end = storage.log_decay()[kDeltaChunkRows - 1];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 32 + lane();
    const float beta = storage.beta()[row], log = storage.log_decay()[row], rho = storage.rho()[row];
    can_divide_by_beta = can_divide_by_beta && (row >= rows || fabsf(beta) >= kMinBeta);
    chunk_factors[kDeltaBeta * kDeltaChunkRows + row] = beta;
    chunk_factors[kDeltaReadFactor * kDeltaChunkRows + row] = beta * rho * exp2_fast(log);
    chunk_factors[kDeltaWriteFactor * kDeltaChunkRows + row] = rho * exp2_fast(log_end - log);
    chunk_factors[kDeltaLogDecay * kDeltaChunkRows + row] = log;
    chunk_factors[kDeltaRho * kDeltaChunkRows + row] = rho;
  }
  return can_divide_by_beta;
}

// N_ij = -beta_i rho_i rho_j e^{L_i - L_j} k_i . k_j from k_i . k_j. Below the diagonal blocks, L_i - L_j is
// a sum of three differences, each at most 0 for gates <= 0: (L_i - L_first) + (L_first - L_last) + (L_last -
// L_j), with L_first of the first row of the block row and L_last of the last row of the block column.
template <class Storage>
__device__ inline void apply_row_factors(Block (&a)[kDeltaInverseBlocks], const Storage& storage, bool gated,
                                         bool unit) {
  const float *const beta = storage.beta(), *const log = storage.log_decay(), *const rho = storage.rho();
#pragma unroll
  for (int i = 0; i < kChunkTiles; ++i) {
    const int row = kTileRows * i + lane_row();
    float2 by = {-beta[row] * rho[row], -beta[row + 8] * rho[row + 8]};
    scale_rows(a[inverse_block_index(i, i)], by);
    if (gated) {
      const float start = log[kTileRows * i];
      by.x *= exp2_fast(log[row] - start), by.y *= exp2_fast(log[row + 8] - start);
    }
#pragma unroll
    for (int j = 0; j < i; ++j) scale_rows(a[inverse_block_index(i, j)], by);
  }
  if (gated || unit) {
#pragma unroll
    for (int j = 0; j < kChunkTiles; ++j) {
      float2 by[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        by[n] = *reinterpret_cast<const float2*>(rho + kTileRows * j + 8 * n + lane_col());
      }
      scale_columns(a[inverse_block_index(j, j)], [&](int n) { return by[n]; });
      const float end = log[kTileRows * j + kTileRows - 1];
      if (gated) {
        const float row_log[2] = {log[kTileRows * j + lane_row()], log[kTileRows * j + lane_row() + 8]};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float2 col_log = *reinterpret_cast<const float2*>(log + kTileRows * j + 8 * n + lane_col());
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            a[inverse_block_index(j, j)].at[n][i] *=
                exp2_fast(row_log[i / 2] - (i % 2 ? col_log.y : col_log.x));
          }
          by[n].x *= exp2_fast(end - col_log.x), by[n].y *= exp2_fast(end - col_log.y);
        }
      }
#pragma unroll
      for (int i = j + 1; i < kChunkTiles; ++i) {
        const float between = gated ? exp2_fast(log[kTileRows * i] - end) : 1.f;
        scale_columns(a[inverse_block_index(i, j)], [&](int n) {
          return float2{by[n].x * between, by[n].y * between};
        });
      }
    }
  }
  // N_ij = 0 unless j < i.
#pragma unroll
  for (int i = 0; i < kChunkTiles; ++i) {
    Block& block = a[inverse_block_index(i, i)];
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
__device__ inline bool has_repeated_keys(const Block (&a)[kDeltaInverseBlocks], int rows) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kChunkTiles; ++i) {
    float largest[2] = {0.f, 0.f};
#pragma unroll
    for (int j = 0; j <= i; ++j) {
#pragma unroll
      for (int x = 0; x < 8; ++x) {
        largest[x / 2 % 2] = fmaxf(largest[x / 2 % 2], fabsf(a[inverse_block_index(i, j)].at[x / 4][x % 4]));
      }
    }
    sum += fminf(max_over_row(largest[0]), 1.f) + fminf(max_over_row(largest[1]), 1.f);
  }
  return sum_over_col(sum) > 0.6f * rows;
}

template <typename T, int Slabs, bool HasB>
__global__ void __launch_bounds__(kPrepareWarps * 32, prepare_blocks(HasB))
    prepare(const __grid_constant__ DeltaPrepare p, const __grid_constant__ Divider sequence_chunks) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 1024);
  const DeltaShape& shape = p.shape;
  const int warp = warp_index();
  using Storage = PrepareStorage<T, Slabs, HasB>;
  const Storage storage{shared + warp * Storage::kBytes};
  const int tokens = delta_chunk_tokens(shape.n);
  const int64_t chunk_count = token_range_count(shape.tokens, tokens);
  const bool gated = p.g.data != nullptr;

  const unsigned first = blockIdx.x * kPrepareWarps + warp, warps = gridDim.x * kPrepareWarps,
                 heads = shape.heads;
  const ChunkHead step = {warps / heads, static_cast<int>(warps % heads)};
  ChunkHead next = {first / heads, static_cast<int>(first % heads)};
  ChunkLoads<T> chunk = start_chunk_loads(p, storage, next, chunk_count, sequence_chunks);
#pragma unroll 1
  while (next.chunk < chunk_count) {
    const ChunkHead chunk_head = next;
    const int rows = chunk.rows;
    Block a[kDeltaInverseBlocks];
#pragma unroll
    for (int i = 0; i < kDeltaInverseBlocks; ++i) fill(a[i], 0.f);
    if (rows > 0) {
      if (Slabs == 1) prefetch_keys<HasB>(p, chunk);
      wait_copies<Slabs>();
      convert_rows(p, storage, chunk);
      multiply_keys(a, p, storage, chunk);
    }
    next.advance(step, shape.heads);
    if (rows == 0) {
      chunk = start_chunk_loads(p, storage, next, chunk_count, sequence_chunks);
      continue;
    }
    if (shape.unit) compute_rho(storage, a, rows);

    unsigned char* const out = static_cast<unsigned char*>(p.prepared) +
                               (chunk_head.chunk * shape.heads + chunk_head.head) * kDeltaPreparedBytes;
    bool can_divide_by_beta = store_factors(reinterpret_cast<float*>(out + kDeltaInverseBytes), storage, rows,
                                            kHasFp32Range<T> && !gated && !shape.unit);
    apply_row_factors(a, storage, gated, shape.unit);
    const bool has_inverse_lo = has_repeated_keys(a, rows);
    can_divide_by_beta = __all_sync(~0u, can_divide_by_beta);
    if (lane() == 0) {
      *reinterpret_cast<float*>(out + kDeltaHasInverseLoOffset) = has_inverse_lo;
      *reinterpret_cast<float*>(out + kDeltaCanDivideByBetaOffset) = can_divide_by_beta;
    }
    __syncwarp();
    chunk = start_chunk_loads(p, storage, next, chunk_count, sequence_chunks);
    invert(a, storage, InverseOutput<T>{out, has_inverse_lo});
  }
}

template <typename T, int Slabs, bool HasB>
cudaError_t launch_prepare_instance(const DeltaPrepare& p, cudaStream_t stream) {
  constexpr auto kKernel = prepare<T, Slabs, HasB>;
  constexpr int kBytes = PrepareStorage<T, Slabs, HasB>::kBlockBytes;
  if (const cudaError_t error = allow_shared<kKernel>(kBytes); error != cudaSuccess) return error;
  const int64_t chunk_heads =
      token_range_count(p.shape.tokens, delta_chunk_tokens(p.shape.n)) * p.shape.heads;
  if (chunk_heads == 0) return cudaSuccess;
  int processors = 0, blocks = 0;
  if (const cudaError_t error = processor_count(processors); error != cudaSuccess) return error;
  if (const cudaError_t error =
          cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kKernel, kPrepareWarps * 32, kBytes);
      error != cudaSuccess) {
    return error;
  }
  const int64_t max_blocks = static_cast<int64_t>(processors) * std::max(blocks, 1);
  const int64_t grid = std::min(divide_up(chunk_heads, kPrepareWarps), max_blocks);
  return launch_grid<kKernel>(grid, kPrepareWarps * 32, kBytes, stream, p, make_chunk_divider(p.shape));
}

template <typename T>
cudaError_t launch_prepare(const DeltaPrepare& p, cudaStream_t stream) {
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  const auto launch = [&](auto slabs) {
    return p.b.data == nullptr ? launch_prepare_instance<T, slabs(), false>(p, stream)
                               : launch_prepare_instance<T, slabs(), true>(p, stream);
  };
  return p.shape.D <= kSlab ? launch(two) : launch(one);  // two: see PrepareStorage
}

}  // namespace girih::kernels::delta_product
