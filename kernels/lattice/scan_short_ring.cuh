// The ring of scan_short.cuh: a chunk's tokens, the memory before it, and what the chain makes of them for
// those who read it.
#pragma once

#include "lattice/vectors.cuh"

namespace girih::kernels::lattice {

// As parameters of one kernel. `shares`: blocks that have the same sequence and head.
struct ShortScan {
  LatticeScan scan;
  LatticeRead read;
  int shares;
};

template <typename T_>
struct ShortScanRing {
  using T = T_;
  using S = Sizes<T, 16, 64, 64>;
  static constexpr int kStages = 14, kLoaders = 2, kReaders = 6, kMostShares = 2;
  static constexpr int kThreads = S::kThreads + 32 * (kLoaders + kReaders);
  // Every stage has one loader, and is one share's or never is. Readers are no further ahead of one another
  // than a turn of the ring, else one would take another's turn for its own.
  static_assert(kStages % kLoaders == 0 && kStages % kMostShares == 0 && kReaders * kMostShares <= kStages);

  struct Numbers {
    ChunkTokens<16> tokens;
    float weights[20];         // put_weights()
    float alpha[64], rho[64];  // from the chain: of the chunk's end
    __device__ float kept() const { return weights[16]; }
    __device__ float open() const { return weights[17]; }
    __device__ float sum() const { return weights[18]; }
  };
  enum Of { q, k, v };                // o in the place of q, H in that of V
  static constexpr int kSources = 3;  // k, v, q
  static constexpr int kTokens = S::Keys::kBytes;
  static constexpr int kStage = S::Memory::kBytes + 3 * kTokens;
  static constexpr int kNumbers = sizeof(Numbers);
  static constexpr int kBytes = kStages * (kStage + kNumbers + 3 * 8) + S::Memory::kBytes + 4 * S::M +
                                static_cast<int>(sizeof(Carried)) +
                                kSources * static_cast<int>(sizeof(RowSource<T>));

  unsigned char* base;

  template <class Tile>
  __device__ Tile tile(int stage, int offset) const {
    return {reinterpret_cast<T*>(base + stage * kStage + offset)};
  }
  __device__ auto memory(int stage) const { return tile<typename S::Memory>(stage, 0); }  // S^T
  __device__ auto tokens(int stage, Of which) const {
    return tile<typename S::Keys>(stage, S::Memory::kBytes + which * kTokens);
  }
  // Of a resumed chunk: Delta^T and |Delta_i|^2.
  __device__ auto step() const { return tile<typename S::Memory>(kStages, 0); }
  __device__ float* step_square() const {
    return reinterpret_cast<float*>(base + kStages * kStage + S::Memory::kBytes);
  }
  __device__ Numbers& numbers(int stage) const {
    return reinterpret_cast<Numbers*>(step_square() + S::M)[stage];
  }
  __device__ uint64_t* full() const { return reinterpret_cast<uint64_t*>(&numbers(kStages)); }
  __device__ uint64_t* written() const { return full() + kStages; }  // the chain is through with it
  __device__ uint64_t* empty() const { return full() + 2 * kStages; }

  // What the block has: there, for registers are few.
  __device__ Carried& block() const { return *reinterpret_cast<Carried*>(full() + 3 * kStages); }
  __device__ RowSource<T>* sources() const { return reinterpret_cast<RowSource<T>*>(&block() + 1); }

  __device__ void start(const ShortScan& p) const {
    if (threadIdx.x == 0) {
      block() = carried(p.scan.shape, static_cast<unsigned>(p.shares));
      list(p);
    }
    if (threadIdx.x < kStages) {
      init_barrier(full() + threadIdx.x, 32 + once(1));
      init_barrier(written() + threadIdx.x, once(S::kWarps));
      init_barrier(empty() + threadIdx.x, once(1));
    }
    __syncthreads();
  }

  // By a loader: the sequence's chunks in order. Nobody reads those that are another share's.
  __device__ void load(const ShortScan& of_both, int loader) const {
    const LatticeScan& p = of_both.scan;
    const LatticeShape& shape = p.shape;
    const ChunkedSequence& of = block().of;
    const int head = block().head;
    if (loader >= of.chunks) return;
    auto next = load_tokens<16>(p.gamma, p.g, chunk_part(shape, of, loader, head));
    Turn turn;
    turn.skip(loader, kStages);
#pragma unroll 1
    for (int64_t n = loader; n < of.chunks; n += kLoaders, turn.skip(kLoaders, kStages)) {
      const Part part = chunk_part(shape, of, n, head);
      const auto raw = next;
      if (n + kLoaders < of.chunks) {
        next = load_tokens<16>(p.gamma, p.g, chunk_part(shape, of, n + kLoaders, head));
      }
      const int stage = turn.place;
      const bool reads = is_own(n, block().share, of_both.shares);
      wait((reads ? empty() : written()) + stage, turn.parity ^ 1);
#pragma unroll 1
      for (int i = 0; i < (reads ? kSources : kSources - 1); ++i) {
        const RowSource<T>& source = sources()[i];
        source.bring(tokens(stage, static_cast<Of>(source.to)), part.chunk.start, part.chunk.length);
      }
      Numbers& to = numbers(stage);
      const auto gates = sum_tokens(raw, p.gamma.dtype, p.g.dtype);
      const float sign = sign_of(shape.objective), before = decay_before(p.start, part);
      put_tokens<T>(to.tokens, gates, sign, before);
      put_weights(to.weights, gates, sign, before);
      arrive_after_copies(full() + stage);
      arrive_once(full() + stage);
    }
  }

 private:
  __device__ void list(const ShortScan& p) const {
    const LatticeShape& shape = p.scan.shape;
    const int head = block().head;
    RowSource<T>* const to = sources();
    const auto rows = [&](const In<4>& x, int head, int cols, Of which) {
      return row_source<T>(x, block().of.sequence.batch, head, cols, which);
    };
    to[0] = rows(p.scan.k, head, shape.M, k), to[1] = rows(p.scan.v, head, shape.D, v);
    to[2] = rows(p.read.q, head * (shape.query_heads / shape.heads), shape.M, q);
  }
};

// Whether chunks, memories and the card are such.
inline cudaError_t is_short(const LatticeShape& shape, bool& is) {
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  is = shape.grid.size <= 16 && shape.D <= 64 && shape.M <= 64 && ShortScanRing<__half>::kBytes <= limit;
  return cudaSuccess;
}

}  // namespace girih::kernels::lattice
