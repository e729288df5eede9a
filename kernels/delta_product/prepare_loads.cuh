// What a warp of prepare has in shared memory, and how a chunk gets there: its keys, beta and gates.
#pragma once

#include "delta_product/part.cuh"
#include "delta_product/prepared.cuh"
#include "tile/launch.h"
#include "tile/shared.h"

namespace girih::kernels::delta_product {

constexpr int kPrepareWarps = 4;
constexpr int kSlab = 64;  // columns of k at a time
constexpr int kSmall = 8;  // rows of the blocks of forward substitution

// What a warp has in shared memory: of its rows beta, L and rho, the small blocks, and a slab of keys. (Of
// keys that read, where others write, a slab beside.) Two would leave room for three blocks of a
// multiprocessor instead of four: of keys of more than 64 channels the other slabs wait in the L2 cache. Keys
// of up to 64 are one slab, and go by the code of two Slabs in turn, of which they never have the second: it
// needs fewer registers.
template <typename T, int Slabs, bool ReadKeys = false>
struct PrepareSpace {
  using Keys = SharedTile<T, kDeltaRows, kSlab>;
  static constexpr bool kReadKeys = ReadKeys;
  static constexpr int kVectorBytes = kDeltaRows * 4;
  static constexpr int kSmallBytes = kSmall * kSmall * 4;
  static constexpr int kKeys = 3 * kVectorBytes + kDeltaRows / kSmall * kSmallBytes;
  static constexpr int kBytes = kKeys + (ReadKeys ? 2 : 1) * Keys::kBytes;
  static constexpr int kBlockBytes = kPrepareWarps * kBytes;

  unsigned char* data;

  __device__ Keys keys(int slab) const {
    return {reinterpret_cast<T*>(data + kKeys + slab % Slabs * Keys::kBytes)};
  }
  __device__ Keys read_keys(int slab) const {
    return ReadKeys ? Keys{reinterpret_cast<T*>(data + kKeys + Keys::kBytes)} : keys(slab);
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

// What a warp has loaded or under way of a chunk and head.
template <typename T>
struct Chunk {
  const T *keys, *read_keys;
  int rows = 0;        // 0: there is no such chunk, or it has no tokens
  uint32_t upper = 0;  // of the lane's rows, l and 32 further, a bit each for beta, and for gates
};

// A chunk's rows, from `first` on, of a slab's columns.
template <class Keys, typename T>
__device__ inline void start_keys(const Keys& keys, const T* first, int64_t stride, int rows, int cols,
                                  int slab) {
  const int row = lane() / 8, col = lane() % 8 * 8;
  const bool valid = slab * kSlab + col < cols;
  // Every fourth row; two addresses, for rows 8 apart lie alike.
  const uint32_t to[2] = {keys.address(row, col), keys.address(row + 4, col)};
  constexpr int kEight = 8 * kSlab * static_cast<int>(sizeof(T));
  const T* from = first + row * stride + slab * kSlab + col;
  if (rows == kDeltaRows && stride >> 24 == 0) {
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
      copy_async(to[i % 2] + i / 2 * kEight, from, valid && row + 4 * i < rows);
      from += 4 * stride;
    }
  }
}
template <class Space, typename T>
__device__ inline void load_keys(const DeltaPrepare& p, const Space& space, const Chunk<T>& chunk, int slab) {
  if (slab * kSlab < p.shape.D && chunk.rows > 0) {
    start_keys(space.keys(slab), chunk.keys, p.k.stride[1], chunk.rows, p.shape.D, slab);
    if (Space::kReadKeys) {
      start_keys(space.read_keys(slab), chunk.read_keys, p.b.stride[1], chunk.rows, p.shape.D, slab);
    }
  }
  commit_copies();
}

// To the L2 cache, the slabs that have no room yet.
template <bool ReadKeys, typename T>
__device__ inline void prefetch_keys(const DeltaPrepare& p, const Chunk<T>& chunk) {
#pragma unroll
  for (int row = lane(); row < kDeltaRows; row += 32) {
    if (row >= chunk.rows) continue;
    const T* from = chunk.keys + row * p.k.stride[1];
#pragma unroll 1
    for (int col = kSlab; col < p.shape.D; col += kSlab) {
      prefetch(from + col);
      if (ReadKeys) prefetch(chunk.read_keys + row * p.b.stride[1] + col);
    }
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
template <typename T, int Slabs, bool ReadKeys>
__device__ inline Chunk<T> start_chunk(const DeltaPrepare& p, const PrepareSpace<T, Slabs, ReadKeys>& space,
                                       const Job& job, int64_t numbers, const Divider& each) {
  const int n = p.shape.n;
  Chunk<T> chunk;
  if (job.number < numbers) {
    const Piece piece = chunk_at(p.shape.tokens, job.number, delta_chunk(n), each);
    const int64_t batch = piece.sequence.batch, first_row = piece.start * n;
    chunk.rows = piece.length * n;
    chunk.keys = at<T>(p.k, batch, first_row, job.head / p.shape.key_share, 0);
    if (ReadKeys) chunk.read_keys = at<T>(p.b, batch, first_row, job.head, 0);
    if (chunk.rows > 0) {  // else nobody waits for what comes
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = half * 32 + lane();
        const bool exists = row < chunk.rows;
        if (!ReadKeys) {
          const int64_t beta = offset_of(p.beta, batch, first_row + row, job.head);
          start_element(space.beta() + row, p.beta.data, p.beta.dtype, beta, exists);
          chunk.upper |= is_upper(p.beta.data, beta) << half;
        }
        if (p.g.data == nullptr) continue;
        const int64_t gate = offset_of(p.g, batch, piece.start + row / n, job.head);
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

}  // namespace girih::kernels::delta_product
