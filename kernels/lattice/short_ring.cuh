// The ring of reverse_short.cuh: inputs of a chunk, and the results of the state warps.
#pragma once

#include "lattice/vectors.cuh"

namespace girih::kernels::lattice {

// Parameters of the kernel. `shares`: blocks with the same sequence and head.
struct ShortReverse {
  LatticeReverse reverse;
  LatticeColumns columns;
  int shares;
};

template <typename T_>
struct ShortRing {
  using T = T_;
  using S = Sizes<T, 16, 64, 64>;
  static constexpr int kStages = 8, kLoaders = 4, kColumns = 4, kMostShares = 2;
  static constexpr int kThreads = S::kThreads + 32 * (kLoaders + kColumns);
  // Every stage has one producer warp, and always belongs to the same share.
  static_assert(kStages % kLoaders == 0 && kStages % kMostShares == 0);
  // Dkv warps that take chunks round-robin. They are at most one lap of the ring apart, because a barrier has
  // only one bit of phase.
  __device__ static int columns(int shares) { return min(kColumns, kStages / shares); }

  struct Numbers {
    float alpha[64], rho[64];
    float weights[16], step[16], to_end[16];  // sign gamma e^{L_C - L_t}, sign gamma, e^{L_C - L_t}
    float kept, open, sum, unused;            // m_C, e^{L_C} of this call's tokens, L_C of the whole chunk
    // columns.cuh: the cancelling sum at the end, and whether the vector is mostly steps
    float cancels[64], steps[64];
  };
  static constexpr int kSources = 6;  // S, its gradient, k, v, dk, dv
  static constexpr int kTokens = S::Keys::kBytes;
  static constexpr int kStage = 2 * S::Memory::kBytes + 4 * kTokens;
  static constexpr int kNumbers = sizeof(Numbers);
  static constexpr int kBytes = kStages * (kStage + kNumbers + 3 * 8) + S::Values::kBytes +
                                kColumns * kTokens + 2 * S::kWarps * static_cast<int>(sizeof(float)) +
                                static_cast<int>(sizeof(Carried)) +
                                kSources * static_cast<int>(sizeof(RowSource<T>));
  enum Of { k, v, dk, dv };

  unsigned char* base;

  template <class Tile>
  __device__ Tile tile(int stage, int offset) const {
    return {reinterpret_cast<T*>(base + stage * kStage + offset)};
  }
  __device__ auto memory(int stage) const { return tile<typename S::Memory>(stage, 0); }
  __device__ auto gradient(int stage) const { return tile<typename S::Memory>(stage, S::Memory::kBytes); }
  __device__ auto tokens(int stage, Of which) const {
    return tile<typename S::Keys>(stage, 2 * S::Memory::kBytes + which * kTokens);
  }
  __device__ auto exchange() const { return tile<typename S::Values>(kStages, 0); }
  // A tile for each dkv warp.
  __device__ auto rounded(int worker) const {
    return tile<typename S::Keys>(kStages, S::Values::kBytes + worker * kTokens);
  }
  __device__ unsigned char* beyond() const {
    return base + kStages * kStage + S::Values::kBytes + kColumns * kTokens;
  }
  __device__ Numbers& numbers(int stage) const { return reinterpret_cast<Numbers*>(beyond())[stage]; }
  __device__ uint64_t* full() const { return reinterpret_cast<uint64_t*>(beyond() + kStages * kNumbers); }
  __device__ uint64_t* empty() const { return full() + kStages; }
  __device__ uint64_t* done() const { return full() + 2 * kStages; }  // the state warps have stored dX
  // For each state warp Delta'.dDelta', and m_C c of a resumed chunk.
  __device__ float* sums() const { return reinterpret_cast<float*>(full() + 3 * kStages); }

  // Sequence and head of the block, in shared memory to save registers.
  __device__ Carried& block() const { return *reinterpret_cast<Carried*>(sums() + 2 * S::kWarps); }
  __device__ RowSource<T>* sources() const { return reinterpret_cast<RowSource<T>*>(&block() + 1); }

  __device__ void start(const ShortReverse& p) const {
    if (threadIdx.x == 0) {
      block() = carried(p.reverse.shape, static_cast<unsigned>(p.shares));
      list(p);
    }
    if (threadIdx.x < kStages) {
      init_barrier(full() + threadIdx.x, 32 + once(1));
      init_barrier(empty() + threadIdx.x, once(1));
      init_barrier(done() + threadIdx.x, once(S::kWarps));
    }
    __syncthreads();
  }

  // Loads the chunks of a sequence from the last to the first; called by a producer warp. A chunk of another
  // share is needed by the state warps only.
  __device__ void load(const ShortReverse& p, int loader) const {
    const ChunkedSequence& of = block().of;
    const int head = block().head;
    const LatticeReverse& from = p.reverse;
    const LatticeShape& shape = from.shape;
    const auto part_of = [&](int64_t n) { return chunk_part(shape, of, of.chunks - 1 - n, head); };
    if (loader >= of.chunks) return;
    auto next = load_tokens<16>(from.gamma, from.g, part_of(loader));
    Turn turn;
    turn.skip(loader, kStages);
#pragma unroll 1
    for (int64_t n = loader; n < of.chunks; n += kLoaders, turn.skip(kLoaders, kStages)) {
      const Part part = part_of(n);
      const auto raw = next;
      if (n + kLoaders < of.chunks) next = load_tokens<16>(from.gamma, from.g, part_of(n + kLoaders));
      const int stage = turn.place;
      const auto gates = sum_tokens(raw, from.gamma.dtype, from.g.dtype);
      const float before = decay_before(from.start, part);
      const bool own = is_own(n, block().share, p.shares);
      wait((own ? empty() : done()) + stage, turn.parity ^ 1);
      bring(stage, own ? kSources : kSources - 2, shape, part);
      Numbers& at = numbers(stage);
      const float* const ends = from.ends + (part.number * shape.heads + head) * 2 * shape.M;
      const int m = lane() % 16 * 4;
      copy_async(shared_address(lane() < 16 ? &at.alpha[m] : &at.rho[m]),
                 ends + (lane() < 16 ? 0 : shape.M) + m, m < shape.M);
      put_numbers(at, gates, sign_of(shape.objective), before);
      arrive_after_copies(full() + stage);
      arrive_once(full() + stage);
    }
  }

 private:
  __device__ void list(const ShortReverse& p) const {
    const LatticeReverse& from = p.reverse;
    const LatticeShape& shape = from.shape;
    const int head = block().head;
    RowSource<T>* const to = sources();
    const auto memories = [&](const void* x) {
      return RowSource<T>{static_cast<const T*>(x) + memory_place(shape, 0, head), shape.D, shape.D, 0};
    };
    const auto rows = [&](const auto& x, int cols, Of which) {
      return row_source<T>(x, block().of.sequence.batch, head, cols, which);
    };
    to[0] = memories(from.memories), to[1] = memories(from.gradients);
    to[2] = rows(from.k, shape.M, k), to[3] = rows(from.v, shape.D, v);
    to[4] = rows(p.columns.dk, shape.M, dk), to[5] = rows(p.columns.dv, shape.D, dv);
  }
  // A memory that fills its tile is one copy, with offsets known at compile time.
  __device__ void bring(int stage, int count, const LatticeShape& shape, const Part& part) const {
    const int64_t first = part.number * shape.heads * shape.M;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const RowSource<T>& source = sources()[i];
      const auto to = tile<typename S::Memory>(stage, i * S::Memory::kBytes);
      if (shape.D == S::D && shape.M == S::M) {
        load_async<32>(to, source.from + first * S::D, S::D, S::M, S::D, lane());
      } else {
#pragma unroll 1
        for (int row = 0; row < S::M; row += 16) {
          source.bring(typename S::Keys{to.data + row * S::D}, first + row, shape.M - row);
        }
      }
    }
#pragma unroll 1
    for (int i = 2; i < count; ++i) {
      const RowSource<T>& source = sources()[i];
      source.bring(tokens(stage, static_cast<Of>(source.to)), part.chunk.start, part.chunk.length);
    }
  }

  __device__ void put_numbers(Numbers& at, const LaneTokens<16>& of, float sign, float before) const {
    const float sum = of.all();
    if (lane() < 16) {
      const float step = sign * of.gamma[0], to_end = exp2_fast(sum - of.sum[0]);
      at.step[lane()] = step, at.to_end[lane()] = to_end, at.weights[lane()] = step * to_end;
    }
    if (lane() == 0) {
      const float all = before + sum;
      at.kept = exp2_fast(fmaxf(all, kLeastKept)), at.open = exp2_fast(sum), at.sum = all;
    }
  }
};

}  // namespace girih::kernels::lattice
