// Shared memory of a warp of prepare, and the loads of keys, beta and gates.
#pragma once

#include "delta_product/prepared.cuh"
#include "delta_product/work.cuh"
#include "tile/launch.h"
#include "tile/shared.h"

namespace girih::kernels::delta_product {

constexpr int kPrepareWarps = 4;
constexpr int kSlab = 64;             // columns of k that are loaded together
constexpr int kSubstitutionRows = 8;  // rows of the blocks of forward substitution

// Shared memory of a warp: beta, L and rho of its rows, the 8 x 8 blocks, and a slab of keys; with b also a
// slab of b. Only one slab is kept: with two, three blocks instead of four fit on a multiprocessor, and later
// slabs wait in the L2 cache. For D <= 64, Slabs is 2 although there is only one slab: that code needs fewer
// registers.
template <typename T, int Slabs, bool HasB = false>
struct PrepareStorage {
  using Keys = SharedTile<T, kDeltaChunkRows, kSlab>;
  static constexpr bool kHasB = HasB;
  static constexpr int kVectorBytes = kDeltaChunkRows * 4;
  static constexpr int kSubstitutionBytes = kSubstitutionRows * kSubstitutionRows * 4;
  static constexpr int kKeysOffset =
      3 * kVectorBytes + kDeltaChunkRows / kSubstitutionRows * kSubstitutionBytes;
  static constexpr int kBytes = kKeysOffset + (HasB ? 2 : 1) * Keys::kBytes;
  static constexpr int kBlockBytes = kPrepareWarps * kBytes;

  unsigned char* data;

  __device__ Keys keys(int slab) const {
    return {reinterpret_cast<T*>(data + kKeysOffset + slab % Slabs * Keys::kBytes)};
  }
  __device__ Keys b_or_k(int slab) const {
    return HasB ? Keys{reinterpret_cast<T*>(data + kKeysOffset + Keys::kBytes)} : keys(slab);
  }
  __device__ float* beta() const { return reinterpret_cast<float*>(data); }
  __device__ float* log_decay() const { return reinterpret_cast<float*>(data + kVectorBytes); }
  __device__ float* rho() const { return reinterpret_cast<float*>(data + 2 * kVectorBytes); }
  __device__ float* substitution_block(int block) const {
    return reinterpret_cast<float*>(data + 3 * kVectorBytes + block * kSubstitutionBytes);
  }
};

// Starts the copy of an element whose type is known at run time only. The copy ends at the last byte of the
// element and begins at the 4-byte word that contains it. If a 16-bit element is the upper half of its word,
// the lower half is the previous element; allocations are aligned to 4 bytes, so the word is readable. Bytes
// behind the element may lie outside of the tensor and are not read. fp64 is converted here. Copies to
// registers would be spilled, and the spill waits for the load.
__device__ inline void copy_element_async(float* to, const void* data, DType dtype, int64_t index,
                                          bool exists) {
  if (dtype == DType::f64) {
    *to = exists ? static_cast<float>(static_cast<const double*>(data)[index]) : 0.f;
    return;
  }
  // A copy of 0 bytes does not access its source.
  const int size = dtype_size(dtype);
  const auto address = reinterpret_cast<uintptr_t>(data) + (exists ? index * size : 0);
  const int into = static_cast<int>(address & 3);
  ptx::cp_async_4(shared_address(to), reinterpret_cast<const void*>(address - into),
                  exists ? into + size : 0);
}
// True if a 16-bit element is the upper half of its 4-byte word.
__device__ inline uint32_t is_upper(const void* data, int64_t index) {
  return static_cast<uint32_t>((reinterpret_cast<uintptr_t>(data) >> 1) + index) & 1;
}
__device__ inline float convert_element(const float* at, DType dtype, bool upper) {
  uint32_t bits = __float_as_uint(*at);
  if (dtype_size(dtype) == 2) {
    bits = upper ? bits >> 16 : bits & 0xffff;
    if (dtype == DType::f16) return unpack_pair<__half>(bits).x;
    bits <<= 16;
  }
  return __uint_as_float(bits);
}

// The chunk and head whose loads a warp has started.
template <typename T>
struct ChunkLoads {
  const T *keys, *b;
  int rows = 0;        // 0: the chunk does not exist or has no tokens
  uint32_t upper = 0;  // is_upper of the lane's rows l and l + 32: bits 0 and 1 for beta, 2 and 3 for gates
};

// Starts the copies of one slab of the rows of a chunk; `first` points to row 0.
template <class Keys, typename T>
__device__ inline void start_keys(const Keys& keys, const T* first, int64_t stride, int rows, int cols,
                                  int slab) {
  const int row = lane() / 8, col = lane() % 8 * 8;
  const bool valid = slab * kSlab + col < cols;
  // A lane copies every fourth row; rows 8 apart have the same swizzle, so two addresses suffice.
  const uint32_t to[2] = {keys.address(row, col), keys.address(row + 4, col)};
  constexpr int kEight = 8 * kSlab * static_cast<int>(sizeof(T));
  const T* from = first + row * stride + slab * kSlab + col;
  if (rows == kDeltaChunkRows && stride >> 24 == 0) {
    // A full chunk with short strides uses 32-bit products: a third of the instructions of the other branch.
    const int step = static_cast<int>(stride) * 4;
#pragma unroll
    for (int i = 0; i < kDeltaChunkRows / 4; ++i) {
      copy_async(to[i % 2] + i / 2 * kEight, from + static_cast<int64_t>(step) * i, valid);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kDeltaChunkRows / 4; ++i) {
      // A copy of 0 bytes does not access its source.
      copy_async(to[i % 2] + i / 2 * kEight, from, valid && row + 4 * i < rows);
      from += 4 * stride;
    }
  }
}
template <class Storage, typename T>
__device__ inline void load_keys(const DeltaPrepare& p, const Storage& storage, const ChunkLoads<T>& chunk,
                                 int slab) {
  if (slab * kSlab < p.shape.D && chunk.rows > 0) {
    start_keys(storage.keys(slab), chunk.keys, p.k.stride[1], chunk.rows, p.shape.D, slab);
    if (Storage::kHasB) {
      start_keys(storage.b_or_k(slab), chunk.b, p.b.stride[1], chunk.rows, p.shape.D, slab);
    }
  }
  commit_copies();
}

// Prefetches the slabs after the first to the L2 cache.
template <bool HasB, typename T>
__device__ inline void prefetch_keys(const DeltaPrepare& p, const ChunkLoads<T>& chunk) {
#pragma unroll
  for (int row = lane(); row < kDeltaChunkRows; row += 32) {
    if (row >= chunk.rows) continue;
    const T* from = chunk.keys + row * p.k.stride[1];
#pragma unroll 1
    for (int col = kSlab; col < p.shape.D; col += kSlab) {
      prefetch(from + col);
      if (HasB) prefetch(chunk.b + row * p.b.stride[1] + col);
    }
  }
}

// Index of a chunk and head; heads vary fastest.
struct ChunkHead {
  int64_t chunk;
  int head;

  __device__ void advance(const ChunkHead& step, int heads) {
    chunk += step.chunk;
    head += step.head;
    if (head >= heads) head -= heads, ++chunk;
  }
};

// Starts the loads of beta, of the gates and of the first slabs of keys of a chunk, into the memory of the
// previous chunk.
template <typename T, int Slabs, bool HasB>
__device__ inline ChunkLoads<T> start_chunk_loads(const DeltaPrepare& p,
                                                  const PrepareStorage<T, Slabs, HasB>& storage,
                                                  const ChunkHead& chunk_head, int64_t chunk_count,
                                                  const Divider& sequence_chunks) {
  const int n = p.shape.n;
  ChunkLoads<T> chunk;
  if (chunk_head.chunk < chunk_count) {
    const TokenRange range =
        chunk_at(p.shape.tokens, chunk_head.chunk, delta_chunk_tokens(n), sequence_chunks);
    const int64_t batch = range.sequence.batch, first_row = range.start * n;
    chunk.rows = range.length * n;
    chunk.keys = at<T>(p.k, batch, first_row, chunk_head.head / p.shape.key_share, 0);
    if (HasB) chunk.b = at<T>(p.b, batch, first_row, chunk_head.head, 0);
    if (chunk.rows > 0) {  // else no thread waits for the copies
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = half * 32 + lane();
        const bool exists = row < chunk.rows;
        if (!HasB) {
          const int64_t beta = offset_of(p.beta, batch, first_row + row, chunk_head.head);
          copy_element_async(storage.beta() + row, p.beta.data, p.beta.dtype, beta, exists);
          chunk.upper |= is_upper(p.beta.data, beta) << half;
        }
        if (p.g.data == nullptr) continue;
        const int64_t gate = offset_of(p.g, batch, range.start + row / n, chunk_head.head);
        copy_element_async(storage.log_decay() + row, p.g.data, p.g.dtype, gate, exists && row % n == 0);
        chunk.upper |= is_upper(p.g.data, gate) << (half + 2);
      }
    }
  }
  commit_copies();
#pragma unroll 1
  for (int slab = 0; slab < Slabs; ++slab) load_keys(p, storage, chunk, slab);
  return chunk;
}

}  // namespace girih::kernels::delta_product
