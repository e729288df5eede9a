// X = (I + A)^-1 and the factors of a chunk's rows, one warp a chunk and head. A warp has one chunk after
// another: what it loads of the next is on its way while it inverts this one.
//
// K K^T comes from the tensor cores, the ten 16 x 16 blocks on and below its diagonal; of N = -A
//
//     X = (I - N)^-1        X_ij = X_ii sum_{j<=m<i} N_im X_mj
//
// by halves: of the 8 x 8 blocks of the diagonal by forward substitution in fp32, a column a lane, then of
// 16, 32 and 64 rows,
//
//     (  X_0        )
//     ( X_1 S   X_1 )        S = N_10 X_0
//
// with every factor in two bf16 parts, hi + lo: keys that are nearly parallel make large X of which the next
// products keep little, and one part alone loses it. S is computed transposed: then all that sums up is the
// next product's factor as it lies.
#pragma once

#include "delta_product/chain.cuh"
#include "tile/gates.h"
#include "tile/pack.h"

namespace girih::kernels::delta_product {

constexpr int kPrepareWarps = 4;
constexpr int kPrepareBlocks = 4;  // of a multiprocessor, that registers leave room for
constexpr int kSlab = 64;          // columns of k at a time
constexpr int kSmall = 8;          // rows of the blocks of forward substitution

using Block = Sums<2>;

// Two neighbouring elements of a factor, in two parts.
struct Parts {
  uint32_t hi, lo;
};

__device__ inline Parts split(float left, float right) {
  const uint32_t hi = pair_of<__nv_bfloat16>(left, right);
  const float2 back = unpaired<__nv_bfloat16>(hi);
  return {hi, pair_of<__nv_bfloat16>(left - back.x, right - back.y)};
}

__device__ inline Parts turned(const Parts& x) { return {transpose_pairs(x.hi), transpose_pairs(x.lo)}; }

// A block as a left factor, in two parts.
struct Split {
  uint32_t hi[4], lo[4];

  __device__ void set(int i, const Parts& x) { hi[i] = x.hi, lo[i] = x.lo; }
};

__device__ inline Split split(const Block& x) {
  Split parts;
#pragma unroll
  for (int i = 0; i < 4; ++i) parts.set(i, split(x.at[i / 2][i % 2 * 2], x.at[i / 2][i % 2 * 2 + 1]));
  return parts;
}

// Of 8 x 8 blocks: ( a  0 )
//                  ( b  c )
__device__ inline Split triangle(const Parts& a, const Parts& b, const Parts& c) {
  return {{a.hi, b.hi, 0, c.hi}, {a.lo, b.lo, 0, c.lo}};
}

__device__ inline Split transposed_triangle(const Parts& a, const Parts& b, const Parts& c) {
  const Parts of_a = turned(a), of_b = turned(b), of_c = turned(c);
  return {{of_a.hi, 0, of_b.hi, of_c.hi}, {of_a.lo, 0, of_b.lo, of_c.lo}};
}

// sums += left right^T, of right's rows eight: the pairs of its left and right half.
__device__ inline void add_split_product(float (&sums)[4], const Split& left, const Parts& right0,
                                         const Parts& right1) {
  mma<__nv_bfloat16>(sums, left.lo, right0.hi, right1.hi);
  mma<__nv_bfloat16>(sums, left.hi, right0.lo, right1.lo);
  mma<__nv_bfloat16>(sums, left.hi, right0.hi, right1.hi);
}

// sums += left right^T: a right factor's transpose lies as a left factor.
__device__ inline void add_split_product(Block& sums, const Split& left, const Split& right) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    add_split_product(sums.at[n], left, {right.hi[n], right.lo[n]}, {right.hi[n + 2], right.lo[n + 2]});
  }
}

__device__ inline Block split_product(const Split& left, const Split& right) {
  Block sums;
  fill(sums, 0.f);
  add_split_product(sums, left, right);
  return sums;
}

// What a warp has in shared memory: of its rows beta, L and rho, the small blocks, and a slab of keys. Two
// would leave room for three blocks of a multiprocessor instead of four: of keys of more than 64 channels the
// other slabs wait in the L2 cache. Keys of up to 64 are one slab, and go by the code of two Slabs in turn,
// of which they never have the second: it needs fewer registers.
template <typename T, int Slabs>
struct PrepareSpace {
  using Keys = SharedTile<T, kDeltaRows, kSlab>;
  static constexpr int kVectorBytes = kDeltaRows * 4;
  static constexpr int kSmallBytes = kSmall * kSmall * 4;
  static constexpr int kKeys = 3 * kVectorBytes + kDeltaRows / kSmall * kSmallBytes;
  static constexpr int kBytes = kKeys + Keys::kBytes;
  static constexpr int kBlockBytes = kPrepareWarps * kBytes;

  unsigned char* data;

  __device__ Keys keys(int slab) const {
    return {reinterpret_cast<T*>(data + kKeys + slab % Slabs * Keys::kBytes)};
  }
  __device__ float* beta() const { return reinterpret_cast<float*>(data); }
  __device__ float* log() const { return reinterpret_cast<float*>(data + kVectorBytes); }
  __device__ float* unit() const { return reinterpret_cast<float*>(data + 2 * kVectorBytes); }
  __device__ float* small(int block) const {
    return reinterpret_cast<float*>(data + 3 * kVectorBytes + block * kSmallBytes);
  }
};

// An element whose type is known at run time only, on its way to shared memory: the four bytes that hold it
// as far as its last, or of fp64 the element itself, in fp32. What those four begin with, where 16 bits are
// their upper half, is the element before: allocations begin at a multiple of four, so that one is in this
// element's. What comes behind may be outside, and is not read. In registers it would be spilled, and that
// waits for it.
__device__ inline void start_element(float* to, const void* data, DType dtype, int64_t index, bool exists) {
  if (dtype == DType::f64) {
    *to = exists ? static_cast<float>(static_cast<const double*>(data)[index]) : 0.f;
    return;
  }
  // A copy of no bytes does not touch its source.
  const int size = bytes_of(dtype);
  const auto address = reinterpret_cast<uintptr_t>(data) + (exists ? index * size : 0);
  const int into = static_cast<int>(address & 3);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared_address(to)),
               "l"(address - into), "r"(exists ? into + size : 0));
}
// Of 16 bits, whether it is the upper half of those four bytes.
__device__ inline uint32_t is_upper(const void* data, int64_t index) {
  return static_cast<uint32_t>((reinterpret_cast<uintptr_t>(data) >> 1) + index) & 1;
}
__device__ inline float arrived_element(const float* at, DType dtype, bool upper) {
  uint32_t bits = __float_as_uint(*at);
  if (bytes_of(dtype) == 2) {
    bits = upper ? bits >> 16 : bits & 0xffff;
    if (dtype == DType::f16) return unpaired<__half>(bits).x;
    bits <<= 16;
  }
  return __uint_as_float(bits);
}

// The sum over lanes 0 to this one.
__device__ inline double sum_through(double x) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const double before = __shfl_up_sync(~0u, x, distance);
    if (lane() >= distance) x += before;
  }
  return x;
}

// What a warp has loaded or under way of a chunk and head.
template <typename T>
struct Chunk {
  const T* keys;
  int rows = 0;        // 0: there is no such chunk, or it has no tokens
  uint32_t upper = 0;  // of the lane's rows, l and 32 further, a bit each for beta, and for gates
};

template <typename T, int Slabs>
__device__ inline void load_keys(const DeltaPrepare& p, const PrepareSpace<T, Slabs>& space,
                                 const Chunk<T>& chunk, int slab) {
  if (slab * kSlab < p.shape.D && chunk.rows > 0) {
    const auto keys = space.keys(slab);
    const int row = lane() / 8, col = lane() % 8 * 8;
    const bool valid = slab * kSlab + col < p.shape.D;
    const int64_t stride = p.k.stride[1];
    // Every fourth row; two addresses, for rows 8 apart lie alike.
    const uint32_t to[2] = {keys.address(row, col), keys.address(row + 4, col)};
    constexpr int kEight = 8 * kSlab * static_cast<int>(sizeof(T));
    const T* from = chunk.keys + row * stride + slab * kSlab + col;
    if (chunk.rows == kDeltaRows && stride >> 24 == 0) {
      // Products of 32 bits: a third of the instructions of what any chunk takes.
      const int step = static_cast<int>(stride) * 4;
#pragma unroll
      for (int i = 0; i < kDeltaRows / 4; ++i) {
        copy_async(to[i % 2] + i / 2 * kEight, from + static_cast<int64_t>(step) * i, valid);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kDeltaRows / 4; ++i) {
        // A copy of no bytes does not touch its source.
        copy_async(to[i % 2] + i / 2 * kEight, from, valid && row + 4 * i < chunk.rows);
        from += 4 * stride;
      }
    }
  }
  commit_copies();
}

// To the L2 cache, the slabs that have no room yet.
template <typename T>
__device__ inline void prefetch_keys(const DeltaPrepare& p, const Chunk<T>& chunk) {
#pragma unroll
  for (int row = lane(); row < kDeltaRows; row += 32) {
    if (row >= chunk.rows) continue;
    const T* from = chunk.keys + row * p.k.stride[1];
#pragma unroll 1
    for (int col = kSlab; col < p.shape.D; col += kSlab) prefetch(from + col);
  }
}

// The chunks and heads that a warp has, every step-th: head by head.
struct Job {
  int64_t number;
  int head;

  __device__ void next(const Job& step, int heads) {
    number += step.number;
    head += step.head;
    if (head >= heads) head -= heads, ++number;
  }
};

// beta, gates, where those of the chunk before were, and the first slabs of its keys are under way
// afterwards.
template <typename T, int Slabs>
__device__ inline Chunk<T> start_chunk(const DeltaPrepare& p, const PrepareSpace<T, Slabs>& space,
                                       const Job& job, int64_t numbers, const Divider& each) {
  const int n = p.shape.n;
  Chunk<T> chunk;
  if (job.number < numbers) {
    const Piece piece = chunk_at(p.shape.tokens, job.number, delta_chunk(n), each);
    const int64_t batch = piece.sequence.batch, first_row = piece.start * n;
    chunk.rows = piece.length * n;
    chunk.keys = at<T>(p.k, batch, first_row, job.head / p.shape.key_share, 0);
    if (chunk.rows > 0) {  // else nobody waits for what comes
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = half * 32 + lane();
        const bool exists = row < chunk.rows;
        const int64_t beta =
            batch * p.beta.stride[0] + (first_row + row) * p.beta.stride[1] + job.head * p.beta.stride[2];
        start_element(space.beta() + row, p.beta.data, p.beta.dtype, beta, exists);
        chunk.upper |= is_upper(p.beta.data, beta) << half;
        if (p.g.data == nullptr) continue;
        const int64_t gate =
            batch * p.g.stride[0] + (piece.start + row / n) * p.g.stride[1] + job.head * p.g.stride[2];
        start_element(space.log() + row, p.g.data, p.g.dtype, gate, exists && row % n == 0);
        chunk.upper |= is_upper(p.g.data, gate) << (half + 2);
      }
    }
  }
  commit_copies();
#pragma unroll 1
  for (int slab = 0; slab < Slabs; ++slab) load_keys(p, space, chunk, slab);
  return chunk;
}

// N_ij = -beta_i rho_i rho_j e^{L_i - L_j} k_i . k_j from k_i . k_j. Of blocks below the diagonal the power
// is a row's, a column's and the block's: L_i less L at the rows' start, that less L at the columns' end, and
// that less L_j, none of them more than 0.
template <typename T, int Slabs>
__device__ inline void weigh(Block (&a)[kDeltaBlocks], const PrepareSpace<T, Slabs>& space, bool gated,
                             bool unit) {
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
  // j < i
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

// Whether rows nearly repeat earlier keys with strong steps: the mean of their largest |A_ij|, 1 at most
// each. With random keys of 64 channels it is about a quarter of beta.
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

// The 8 x 8 blocks of X on the diagonal, in place of those of N: x_i = [i is the column] + sum_{j<i} n_ij
// x_j. A lane has a column of block l / 8 and of the fourth after it, and leaves it as a row: columns 0, 2,
// 4, 6, 1, 3, 5, 7, so that a read of pairs meets no conflicts.
template <typename T, int Slabs>
__device__ inline void invert_small(const PrepareSpace<T, Slabs>& space) {
  const int column = lane() % kSmall;
  float own[2][kSmall];
#pragma unroll
  for (int i = 0; i < kSmall; ++i) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float* const row = space.small(lane() / kSmall + 4 * b) + i * kSmall;
      float even = column == i ? 1.f : 0.f, odd = 0.f;
#pragma unroll
      for (int j = 0; j < i; j += 4) {
        const float4 four = *reinterpret_cast<const float4*>(row + j);
        even = fmaf(four.x, own[b][j], even);
        if (j + 1 < i) odd = fmaf(four.y, own[b][j + 1], odd);
        if (j + 2 < i) even = fmaf(four.z, own[b][j + 2], even);
        if (j + 3 < i) odd = fmaf(four.w, own[b][j + 3], odd);
      }
      own[b][i] = even + odd;
    }
  }
  __syncwarp();
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    auto* const to = reinterpret_cast<float4*>(space.small(lane() / kSmall + 4 * b) +
                                               (column / 2 + column % 2 * 4) * kSmall);
    to[0] = {own[b][0], own[b][1], own[b][2], own[b][3]};
    to[1] = {own[b][4], own[b][5], own[b][6], own[b][7]};
  }
}

template <typename T, int Slabs>
__global__ void __launch_bounds__(kPrepareWarps * 32, kPrepareBlocks)
    prepare(const __grid_constant__ DeltaPrepare p, const __grid_constant__ Divider each) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const DeltaShape& shape = p.shape;
  const int warp = warp_index(), l = lane();
  using Space = PrepareSpace<T, Slabs>;
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
      // beta, and L in fp64: its differences are what counts.
      double log_before = 0;
      if (Slabs == 1) prefetch_keys(p, chunk);
      wait_copies<Slabs>();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = half * 32 + l;
        float log = 0.f;
        if (gated) {
          const float gate =
              summable(arrived_element(space.log() + row, p.g.dtype, chunk.upper >> (half + 2) & 1));
          const double sum = log_before + sum_through(static_cast<double>(gate) * 1.4426950408889634);
          log_before = __shfl_sync(~0u, sum, 31);
          log = static_cast<float>(sum);
        }
        space.beta()[row] = arrived_element(space.beta() + row, p.beta.dtype, chunk.upper >> half & 1);
        space.log()[row] = log;
        space.unit()[row] = row < rows ? 1.f : 0.f;
      }

      // K K^T
#pragma unroll 1
      for (int slab = 0; slab * kSlab < shape.D; ++slab) {
        wait_copies<Slabs - 1>();
        __syncwarp();
        const auto keys = space.keys(slab);
#pragma unroll 2
        for (int col = 0; col < kSlab; col += 16) {
          // Right factors read on their own: out of left ones their pairs would take a third of the
          // instructions.
          uint32_t right[kTilesDown][4];
#pragma unroll
          for (int i = 0; i < kTilesDown; ++i) {
            uint32_t left[4];
            load_block(left, keys, kTileRows * i, col);
            load_matrices(right[i],
                          keys.address(kTileRows * i, col, (l & 7) + (l >> 4) * 8, (l >> 3 & 1) * 8));
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
    next.next(step, shape.heads);
    if (rows == 0) {
      chunk = start_chunk(p, space, next, numbers, each);
      continue;
    }

    // rho_i from the diagonal of K K^T; a row that is not there has none.
    if (shape.unit) {
#pragma unroll
      for (int i = 0; i < kDeltaRows / 8; ++i) {
        const float(&block)[4] = a[block_of(i / 2, i / 2)].at[i % 2];
        const float square = l & 4 ? block[i % 2 * 2 + 1] : block[i % 2 * 2];
        const int at = 8 * i + lane_row();
        // Of a key that is zero, rho only scales the gradient: 1 instead of 1000 overflows nowhere.
        if (lane_col() == (lane_row() & ~1) && at < rows && square > 0.f) {
          space.unit()[at] = rsqrtf(square + 1e-6f);
        }
      }
      __syncwarp();
    }

    unsigned char* const out =
        static_cast<unsigned char*>(p.prepared) + (job.number * shape.heads + job.head) * kDeltaPreparedBytes;
    float* const vectors = reinterpret_cast<float*>(out + kDeltaInverseBytes);
    const float log_end = space.log()[kDeltaRows - 1];
    constexpr float kLeastStep = 0x1p-40f;
    bool divides = kHasRange<T> && !gated && !shape.unit;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 32 + l;
      const float beta = space.beta()[row], log = space.log()[row], unit = space.unit()[row];
      divides = divides && (row >= rows || fabsf(beta) >= kLeastStep);
      vectors[kDeltaBeta * kDeltaRows + row] = beta;
      vectors[kDeltaRead * kDeltaRows + row] = beta * unit * exp2_fast(log);
      vectors[kDeltaWrite * kDeltaRows + row] = unit * exp2_fast(log_end - log);
      vectors[kDeltaLog * kDeltaRows + row] = log;
      vectors[kDeltaUnit * kDeltaRows + row] = unit;
    }

    weigh(a, space, gated, shape.unit);
    const bool keeps = repeat(a, rows);
    divides = __all_sync(~0u, divides);
    if (l == 0) {
      *reinterpret_cast<float*>(out + kDeltaFlag) = keeps;
      *reinterpret_cast<float*>(out + kDeltaDivides) = divides;
    }
    __syncwarp();
    chunk = start_chunk(p, space, next, numbers, each);

    // Out: a block as its four 8 x 8 matrices, in the order of a left factor, so that ldmatrix reads it as
    // any.
    const auto put = [&](int i, int j, const Block& x) {
      Operand<1> block;
      round_to<T>(block, x);
      auto* const to = reinterpret_cast<uint32_t*>(out + block_of(i, j) * 512) + l;
#pragma unroll
      for (int m = 0; m < 4; ++m) to[32 * m] = block.at[0][m];
      if (keeps) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const float2 back = unpaired<T>(block.at[0][m]);
          to[kDeltaLost / 4 + 32 * m] =
              pair_of<T>(x.at[m / 2][m % 2 * 2] - back.x, x.at[m / 2][m % 2 * 2 + 1] - back.y);
        }
      }
    };

    // 8 rows
#pragma unroll
    for (int i = 0; i < kDeltaRows / kSmall; ++i) {
      const float* const two = a[block_of(i / 2, i / 2)].at[i % 2] + i % 2 * 2;
      reinterpret_cast<float2*>(space.small(i))[l] = {two[0], two[1]};
    }
    __syncwarp();
    invert_small(space);
    __syncwarp();

    // 16 rows, of two blocks of the diagonal at a time.
    Split x[kTilesDown], x_turned[kTilesDown];
#pragma unroll
    for (int i = 0; i < kTilesDown; i += 2) {
      Block found[2];
      Parts upper[2], left[2], lower[2];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        Block& block = found[b];
        fill(block, 0.f);
        const float *const first = space.small(2 * (i + b)) + l % 4 * kSmall + lane_row(), *const second =
                                                                                               first +
                                                                                               kSmall *
                                                                                                   kSmall;
#pragma unroll
        for (int y = 0; y < 2; ++y) {
          block.at[0][y] = first[y * 4 * kSmall];
          block.at[1][2 + y] = second[y * 4 * kSmall];
        }
        upper[b] = split(block.at[0][0], block.at[0][1]);
        left[b] = split(a[block_of(i + b, i + b)].at[0][2], a[block_of(i + b, i + b)].at[0][3]);
        lower[b] = split(block.at[1][2], block.at[1][3]);
      }
      const Parts none = {0, 0};
      float s[4] = {0.f, 0.f, 0.f, 0.f}, product[4] = {0.f, 0.f, 0.f, 0.f};
      add_split_product(s, triangle(turned(upper[0]), none, turned(upper[1])), left[0], left[1]);
      add_split_product(product, triangle(lower[0], none, lower[1]), split(s[0], s[1]), split(s[2], s[3]));
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        found[b].at[0][2] = product[2 * b], found[b].at[0][3] = product[2 * b + 1];
        put(i + b, i + b, found[b]);
        const Parts between = split(product[2 * b], product[2 * b + 1]);
        x[i + b] = triangle(upper[b], between, lower[b]);
        x_turned[i + b] = transposed_triangle(upper[b], between, lower[b]);
      }
    }

    // 32 rows
    const Split s10 = split(split_product(x_turned[0], split(a[block_of(1, 0)]))),
                s32 = split(split_product(x_turned[2], split(a[block_of(3, 2)])));
    const Block x10 = split_product(x[1], s10), x32 = split_product(x[3], s32);
    put(1, 0, x10);
    put(3, 2, x32);
    const Split x10_turned = split(split_product(s10, x[1])), x32_split = split(x32);

    // 64 rows, of 16 columns at a time.
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      Block s[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        s[i] = split_product(x_turned[j], split(a[block_of(i + 2, j)]));
        if (j == 0) add_split_product(s[i], x10_turned, split(a[block_of(i + 2, 1)]));
      }
      const Split upper = split(s[0]);
      put(2, j, split_product(x[2], upper));
      Block found = split_product(x32_split, upper);
      add_split_product(found, x[3], split(s[1]));
      put(3, j, found);
    }
  }
}

template <typename T, int Slabs>
cudaError_t launch_prepare_of(const DeltaPrepare& p, cudaStream_t stream) {
  constexpr auto kKernel = prepare<T, Slabs>;
  constexpr int kBytes = PrepareSpace<T, Slabs>::kBlockBytes;
  if (const cudaError_t error = allow_shared<kKernel>(kBytes); error != cudaSuccess) return error;
  const int64_t jobs = piece_count(p.shape.tokens, delta_chunk(p.shape.n)) * p.shape.heads;
  if (jobs == 0) return cudaSuccess;
  int device = 0, processors = 0, blocks = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess) {
    return error;
  }
  if (const cudaError_t error =
          cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kKernel, kPrepareWarps * 32, kBytes);
      error != cudaSuccess) {
    return error;
  }
  const int64_t most = static_cast<int64_t>(processors) * std::max(blocks, 1);
  const auto grid = static_cast<unsigned>(std::min(divide_up(jobs, kPrepareWarps), most));
  kKernel<<<grid, kPrepareWarps * 32, kBytes, stream>>>(p, chunks_of_each(p.shape));
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_prepare(const DeltaPrepare& p, cudaStream_t stream) {
  return p.shape.D <= kSlab ? launch_prepare_of<T, 2>(p, stream) : launch_prepare_of<T, 1>(p, stream);
}

}  // namespace girih::kernels::delta_product
