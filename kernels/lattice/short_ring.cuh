// The ring of reverse_short.cuh: what a chunk needs, and what it gives until it has been used.
#pragma once

#include "lattice/vectors.cuh"

namespace girih::kernels::lattice {

// As parameters of one kernel. `shares`: blocks that have the same sequence and head.
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
  // Every stage has one loader, and is one share's or never is.
  static_assert(kStages % kLoaders == 0 && kStages % kMostShares == 0);
  // Warps of `columns` that take chunks in turn: were they a turn of the ring ahead of one another, one would
  // take another's for its own.
  __device__ static int columns(int shares) { return min(kColumns, kStages / shares); }

  struct Numbers {
    float alpha[64], rho[64];
    float weights[16], step[16], to_end[16];  // sign gamma e^{L_C - L_t}, sign gamma, e^{L_C - L_t}
    float kept, open, sum, unused;            // m_C, e^{L_C} of the tokens here, L_C of all the chunk
    float cancels[64], steps[64];             // columns.cuh: what cancels at the end, and where most is steps
  };
  // What a loader brings of every chunk, to one place of a stage after another: the two memories, k, v, dk,
  // dv.
  struct Piece {
    const T* from;
    int64_t step, stride;  // elements from chunk to chunk, or token to token, and from row to row
    int rows, cols;        // rows 0: the chunk's tokens
  };
  static constexpr int kPieces = 6;
  static constexpr int kTokens = S::Keys::kBytes;
  static constexpr int kStage = 2 * S::Memory::kBytes + 4 * kTokens;
  static constexpr int kNumbers = sizeof(Numbers);
  static constexpr int kBytes = kStages * (kStage + kNumbers + 3 * 8) + S::Values::kBytes +
                                kColumns * kTokens + 2 * S::kWarps * static_cast<int>(sizeof(float)) +
                                static_cast<int>(sizeof(Carried)) + kPieces * static_cast<int>(sizeof(Piece));
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
  // A place of each of `columns`.
  __device__ auto rounded(int worker) const {
    return tile<typename S::Keys>(kStages, S::Values::kBytes + worker * kTokens);
  }
  __device__ unsigned char* beyond() const {
    return base + kStages * kStage + S::Values::kBytes + kColumns * kTokens;
  }
  __device__ Numbers& numbers(int stage) const { return reinterpret_cast<Numbers*>(beyond())[stage]; }
  __device__ uint64_t* full() const { return reinterpret_cast<uint64_t*>(beyond() + kStages * kNumbers); }
  __device__ uint64_t* empty() const { return full() + kStages; }
  __device__ uint64_t* done() const { return full() + 2 * kStages; }  // the chain leaves it to `columns`
  // Each chain warp's Delta'.dDelta', and of a resumed chunk its m_C c.
  __device__ float* sums() const { return reinterpret_cast<float*>(full() + 3 * kStages); }

  // What the block has: there, for registers are few.
  __device__ Carried& block() const { return *reinterpret_cast<Carried*>(sums() + 2 * S::kWarps); }
  __device__ Piece* pieces() const { return reinterpret_cast<Piece*>(&block() + 1); }

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

  // By a loader: the sequence's chunks from the last to the first. Of those that are another share's nobody
  // makes more than the chain does.
  __device__ void load(const ShortReverse& p, int loader) const {
    const ChunkedSequence& of = block().of;
    const int head = block().head;
    const LatticeReverse& from = p.reverse;
    const LatticeShape& shape = from.shape;
    const auto part_of = [&](int64_t n) { return chunk_part(shape, of, of.chunks - 1 - n, head); };
    if (loader >= of.chunks) return;
    RawTokens next = load_tokens(from.gamma, from.g, part_of(loader));
    Turn turn;
    turn.skip(loader, kStages);
#pragma unroll 1
    for (int64_t n = loader; n < of.chunks; n += kLoaders, turn.skip(kLoaders, kStages)) {
      const Part part = part_of(n);
      const RawTokens raw = next;
      if (n + kLoaders < of.chunks) next = load_tokens(from.gamma, from.g, part_of(n + kLoaders));
      const int stage = turn.place;
      const bool own = is_own(n, block().share, p.shares);
      wait((own ? empty() : done()) + stage, turn.parity ^ 1);
      bring(stage, own ? kPieces : kPieces - 2, part);
      Numbers& at = numbers(stage);
      const float* const ends = from.ends + (part.number * shape.heads + head) * 2 * shape.M;
      const int m = lane() % 16 * 4;
      copy_async(shared_address(lane() < 16 ? &at.alpha[m] : &at.rho[m]),
                 ends + (lane() < 16 ? 0 : shape.M) + m, m < shape.M);
      put_numbers(at, raw, from, part);
      arrive_after_copies(full() + stage);
      arrive_once(full() + stage);
    }
  }

 private:
  __device__ void list(const ShortReverse& p) const {
    const LatticeReverse& from = p.reverse;
    const LatticeShape& shape = from.shape;
    const int64_t batch = block().of.sequence.batch, memory = memory_place(shape, 0, block().head),
                  step = memory_place(shape, 1, 0);
    const auto tokens = [&](const auto& x, int cols) {
      return Piece{row_of<T>(x, batch, 0, block().head), x.stride[1], x.stride[1], 0, cols};
    };
    Piece* const to = pieces();
    to[0] = {static_cast<const T*>(from.memories) + memory, step, shape.D, shape.M, shape.D};
    to[1] = {static_cast<const T*>(from.gradients) + memory, step, shape.D, shape.M, shape.D};
    to[2] = tokens(from.k, shape.M), to[3] = tokens(from.v, shape.D);
    to[4] = tokens(p.columns.dk, shape.M), to[5] = tokens(p.columns.dv, shape.D);
  }
  // In a loop of few instructions (columns_short.cuh).
  __device__ void bring(int stage, int count, const Part& part) const {
    using Rows = typename S::Keys;  // 16 of a memory too
    T* to = memory(stage).data;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const Piece& piece = pieces()[i];
      const T* from = piece.from + (piece.rows > 0 ? part.number : part.chunk.start) * piece.step;
      const int of_tile = piece.rows > 0 ? S::M : 16, rows = piece.rows > 0 ? piece.rows : part.chunk.length;
#pragma unroll 1
      for (int row = 0; row < of_tile; row += 16, to += 16 * 64, from += 16 * piece.stride) {
        load_async<32>(Rows{to}, from, piece.stride, rows - row, piece.cols, lane());
      }
    }
  }

  __device__ void put_numbers(Numbers& at, const RawTokens& raw, const LatticeReverse& p,
                              const Part& part) const {
    const LaneTokens of = sum_tokens(raw, p.gamma.dtype, p.g.dtype);
    const float sum = __shfl_sync(~0u, of.sum[1], 31), sign = sign_of(p.shape.objective);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = 2 * lane() + i;
      if (t >= 16) continue;
      const float step = sign * of.gamma[i], to_end = exp2_fast(sum - of.sum[i]);
      at.step[t] = step, at.to_end[t] = to_end, at.weights[t] = step * to_end;
    }
    if (lane() == 0) {
      const float all = decay_before(p.start, part) + sum;
      at.kept = exp2_fast(fmaxf(all, kLeastKept)), at.open = exp2_fast(sum), at.sum = all;
    }
  }
};

}  // namespace girih::kernels::lattice
