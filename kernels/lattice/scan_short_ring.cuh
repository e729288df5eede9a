// The ring of scan_short.cuh: the tokens of a chunk, the memory before it, and H, alpha and rho from the
// state warps. With Apart, each of the two blocks has a ring (scan_short_apart.cuh).
#pragma once

#include "lattice/vectors.cuh"
#include "tile/cluster.h"

namespace girih::kernels::lattice {

// Parameters of the kernel.
struct ShortScan {
  LatticeScan scan;
  LatticeRead read;
};

template <typename T_, LatticeObjective Objective_, bool Apart>
struct ShortScanRing {
  using T = T_;
  static constexpr LatticeObjective kObjective = Objective_;
  using S = Sizes<T, 16, 64, 64>;
  static constexpr bool kApart = Apart;
  static constexpr int kStages = Apart ? 10 : 14, kReaders = Apart ? 10 : 6, kLoaders = 2;
  static constexpr int kChainLoaders = Apart ? 5 : kLoaders;  // in the block of the state warps
  static constexpr int kThreads = (Apart ? 0 : S::kThreads) + 32 * (kReaders + kLoaders);
  // Every stage has one producer warp. Output warps are at most one lap of the ring apart, because a barrier
  // has only one bit of phase. With Apart, sends may overtake each other, so a stage always has the same
  // output warp.
  static_assert(kStages % kLoaders == 0 && kStages % kChainLoaders == 0);
  static_assert(Apart ? kStages == kReaders : kStages >= kReaders);

  struct Numbers {
    ChunkTokens<16> tokens;
    float weights[20];         // put_weights()
    float alpha[64], rho[64];  // end of the chunk, from the state warps
    __device__ float kept() const { return weights[16]; }
    __device__ float open() const { return weights[17]; }
    __device__ float sum() const { return weights[18]; }
  };
  enum Of { v, k, q };                            // H replaces v, o replaces q
  static constexpr int kSources = Apart ? 2 : 3;  // k, v and q; Apart: k and v, or k and q
  static constexpr int kTokens = S::Keys::kBytes;
  static constexpr int kStage = S::Memory::kBytes + 3 * kTokens;
  static constexpr int kSent = S::Memory::kBytes + kTokens;  // memory and H
  static constexpr int kNumbers = sizeof(Numbers), kBarriers = Apart ? 4 : 3;
  static constexpr int kBytes = kStages * (kStage + kNumbers + kBarriers * 8) + S::Memory::kBytes + 4 * S::M +
                                static_cast<int>(sizeof(Carried)) +
                                kSources * static_cast<int>(sizeof(RowSource<T>));

  unsigned char* base;

  template <class Tile>
  __device__ Tile tile(int stage, int offset) const {
    return {reinterpret_cast<T*>(base + stage * kStage + offset)};
  }
  __device__ auto memory(int stage) const { return tile<typename S::Memory>(stage, 0); }  // S^T
  __device__ static constexpr int offset_of(Of which) {
    return S::Memory::kBytes + which * kTokens;
  }  // in a stage
  __device__ auto tokens(int stage, Of which) const {
    return tile<typename S::Keys>(stage, offset_of(which));
  }
  // Delta^T and |Delta_i|^2 of a resumed chunk.
  __device__ auto step() const { return tile<typename S::Memory>(kStages, 0); }
  __device__ float* step_square() const {
    return reinterpret_cast<float*>(base + kStages * kStage + S::Memory::kBytes);
  }
  __device__ Numbers& numbers(int stage) const {
    return reinterpret_cast<Numbers*>(step_square() + S::M)[stage];
  }
  __device__ uint64_t* full() const { return reinterpret_cast<uint64_t*>(&numbers(kStages)); }
  __device__ uint64_t* written() const { return full() + kStages; }  // the state warps have stored S and H
  __device__ uint64_t* empty() const { return full() + 2 * kStages; }
  // Apart: the output warps have finished with S and H
  __device__ uint64_t* taken() const { return full() + 3 * kStages; }

  // Sequence and head of the block, in shared memory to save registers.
  __device__ Carried& block() const { return *reinterpret_cast<Carried*>(full() + kBarriers * kStages); }
  __device__ RowSource<T>* sources() const { return reinterpret_cast<RowSource<T>*>(&block() + 1); }

  // `reads` (Apart): this block has the output warps.
  __device__ void start(const ShortScan& p, bool reads) const {
    if (threadIdx.x == 0) {
      block() = carried(p.scan.shape, Apart ? 2 : 1);
      list(p, reads);
    }
    if (threadIdx.x < kStages) {
      const bool sends = Apart && !reads, stores = p.scan.memories != nullptr;
      init_barrier(full() + threadIdx.x, 32 + once(1));
      init_barrier(written() + threadIdx.x, Apart && reads ? 1 : once(S::kWarps));
      init_barrier(empty() + threadIdx.x, sends ? 1 + (stores ? once(1) : 0) : once(1));
      if constexpr (Apart) {
        init_barrier(taken() + threadIdx.x, 1);
        publish_barriers();
      }
    }
    if constexpr (Apart) {
      cluster_wait();
    } else {
      __syncthreads();
    }
  }

  // Loads the chunks of a sequence in order; called by one of `loaders` warps.
  __device__ void load(const LatticeScan& p, int loader, int loaders, bool reads) const {
    const LatticeShape& shape = p.shape;
    const ChunkedSequence& of = block().of;
    const int head = block().head;
    if (loader >= of.chunks) return;
    auto next = load_tokens<16>(p.gamma, p.g, chunk_part(shape, of, loader, head));
    Turn turn;
    turn.skip(loader, kStages);
#pragma unroll 1
    for (int64_t n = loader; n < of.chunks; n += loaders, turn.skip(loaders, kStages)) {
      const Part part = chunk_part(shape, of, n, head);
      const auto raw = next;
      if (n + loaders < of.chunks) {
        next = load_tokens<16>(p.gamma, p.g, chunk_part(shape, of, n + loaders, head));
      }
      const int stage = turn.place;
      wait(empty() + stage, turn.parity ^ 1);
#pragma unroll 1
      for (int i = 0; i < kSources; ++i) {
        const RowSource<T>& source = sources()[i];
        source.bring(tokens(stage, static_cast<Of>(source.to)), part.chunk.start, part.chunk.length);
      }
      Numbers& to = numbers(stage);
      const auto gates = sum_tokens(raw, p.gamma.dtype, p.g.dtype);
      const float sign = sign_of(kObjective), before = decay_before(p.start, part);
      if (reads) put_tokens<T>(to.tokens, gates, sign, before);
      if (!Apart || !reads) put_weights(to.weights, gates, sign, before);
      arrive_after_copies(full() + stage);
      arrive_once(full() + stage);
    }
  }

  // Stores what backward needs of a chunk; called by a warp.
  __device__ void keep(const LatticeScan& p, int64_t number, int stage) const {
    const LatticeShape& shape = p.shape;
    const int head = block().head;
    store_rows<1>(memory(stage), static_cast<T*>(p.memories) + memory_place(shape, number, head), shape.D,
                  shape.M, shape.D, 0);
    const bool of_rho = lane() >= 16;
    const int m = lane() % 16 * 4;
    float* const to = p.ends + ((number * shape.heads + head) * 2 + (of_rho ? 1 : 0)) * shape.M + m;
    if (m < shape.M) {
      *reinterpret_cast<float4*>(to) =
          *reinterpret_cast<const float4*>((of_rho ? numbers(stage).rho : numbers(stage).alpha) + m);
    }
  }

 private:
  __device__ void list(const ShortScan& p, bool reads) const {
    const LatticeShape& shape = p.scan.shape;
    const int head = block().head;
    RowSource<T>* const to = sources();
    const auto rows = [&](const In<4>& x, int head, int cols, Of which) {
      return row_source<T>(x, block().of.sequence.batch, head, cols, which);
    };
    to[0] = rows(p.scan.k, head, shape.M, k);
    if (!Apart || !reads) to[1] = rows(p.scan.v, head, shape.D, v);
    if (reads) to[kSources - 1] = rows(p.read.q, head * (shape.query_heads / shape.heads), shape.M, q);
  }
};

// Whether the short kernel supports the chunks, the memory and the device.
inline cudaError_t is_short(const LatticeShape& shape, bool& is) {
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  constexpr auto kAny = LatticeObjective::decode;
  using Ring = ShortScanRing<__half, kAny, false>;  // the larger ring of the two
  static_assert(ShortScanRing<__half, kAny, true>::kBytes <= Ring::kBytes);
  is = shape.grid.size <= 16 && shape.D <= 64 && shape.M <= 64 && Ring::kBytes <= limit;
  return cudaSuccess;
}

}  // namespace girih::kernels::lattice
