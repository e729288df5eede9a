// A block of gsa_rows_kernel: its members, its phases in the order of their calls, and the phases up to z and
// dp.
#pragma once

#include "gsa/feature.cuh"
#include "gsa/rows_tiles.cuh"

namespace girih::kernels {

// A block has a chunk and a query head. Accumulators are local variables of the callers: as members, arrays
// would keep the whole object out of registers until every loop over them is unrolled.
template <typename T, int M>
struct GsaRowBlock : ChunkBlock {
  using Tiles = GsaRowTiles<T, M>;
  using Stage = SharedTile<T, kChunk, kSlab>;
  static constexpr int kGroups = Tiles::kGroups, kThreads = kGroup * kGroups;
  template <bool Factored>
  static constexpr bool kOwnWeights = Factored && !Tiles::kOneByOne;

  const GsaRows& p;
  const Tiles tile;
  const int first;  // first slot of the warpgroup
  // Buffer for the stores and for the scratch of the warps, free once q, do and v have been read.
  Stage stage;
  int slots;  // slots from `first` to M
  RowReads<T, M, true, 64> reads;

  __device__ GsaRowBlock(const GsaRows& p, unsigned char* shared)
      : ChunkBlock(p.shape, threadIdx.x / 32 % 4, kGroups == 1 ? 0 : threadIdx.x / kGroup),
        p(p),
        tile(shared),
        first(64 * group) {}

  // Starts the copies of g and s, then of the first slab of each memory.
  __device__ void start_loads() const;
  __device__ void start_reads();

  // Computes dz and W of the warpgroup's slots. The code with factors and the code without are separate
  // instances: mixed, the compiler schedules instructions later, which costs a fifth of the kernel's time.
  template <bool Factored>
  __device__ void differentiate_rows(Sums<8>& dp, Scores& W);
  template <bool Factored>
  __device__ void read_values(Sums<8>& z, Sums<8>& dp);
  template <class Tile, class Memory, class LoadSlab>
  __device__ void multiply(Sums<8>& sums, Scores& a, const Stage& x_tile, const Tile& y_tile,
                           const Memory& memory, int width, const LoadSlab& load_slab);
  template <bool Factored>
  __device__ void bring_weights(bool of_z);
  template <bool Factored>
  __device__ void bring_values(const Sums<8>& z);
  __device__ void load_own_weights() const;

  // rows_finish.cuh: dz, the results for the other kernels, and dq.
  __device__ void take_z(Sums<8>& z);
  template <bool Factored>
  __device__ void apply_jacobian(Sums<8>& z, Sums<8>& dp) const;
  __device__ void join_softmax(SoftmaxSums& own) const;
  template <bool Factored>
  __device__ void put_reads(Sums<8>& z, const Sums<8>& dp) const;

  __device__ void join_scores(Scores& W) const;
  __device__ void put_dq(const Operand<4>& f, const Operand<2> (&w)[2]);

  // Starts the copies of 64 columns of keys or values and of their rows of the state.
  __device__ void load_memory_k(int d) const {
    load<kThreads>(tile.k, p.k, head, d, shape.D);
    load_states<kThreads>(tile.hk, p.states, d, shape.D - d);
  }
  __device__ void load_memory_v(int v) const {
    load<kThreads>(tile.v, p.v, head, v, shape.V);
    load_states<kThreads>(tile.hv, p.states, shape.D + v, shape.V - v);
  }

  // The warp's part of the buffer for z, which overlaps hk and k.
  __device__ float* aside() const {
    return reinterpret_cast<float*>(tile.hk.data) + threadIdx.x / 32 * Tiles::kAside * 128;
  }
  // First column of the last slab, which stays in the tiles k and hk.
  __device__ int last() const { return (shape.D - 1) / kSlab * kSlab; }
  // Scores of the lane's two rows with themselves, in the first (z) or second (dp) read.
  __device__ float2 own_score(int which) const {
    const float* of = tile.own + which * kChunk + kRows * warp + lane_row();
    return {of[0], of[8]};
  }
  __device__ void put(const Sums<8>& sums, const Out<4>& to) const {
    store_rows<T>(sums, stage, warp, to, piece, query_head, first, first + slots);
  }
  // Barrier of the warps with the same rows.
  __device__ void meet() const {
    if constexpr (kGroups > 1) barrier_wait(1 + warp, 32 * kGroups);
  }
  // Makes the compiler compute addresses inside of loops. Hoisted, the addresses of loads that rarely run
  // cost more registers than they save.
  __device__ void renew() { asm volatile("" : "+l"(piece.start), "+r"(piece.length)); }
};

template <typename T, int M>
__device__ inline void GsaRowBlock<T, M>::start_loads() const {
  load_slots<kThreads>(tile.g, p.g, tile.s, p.s);
  load<kThreads>(tile.q, p.q, query_head, 0, shape.D);
  load_memory_k(0);
  commit_copies();
  if (!Tiles::kOneByOne) load<kThreads>(tile.dout, p.dout, query_head, 0, shape.V);
  load_memory_v(0);
  commit_copies();
}

template <typename T, int M>
__device__ inline void GsaRowBlock<T, M>::start_reads() {
  slots = shape.M - first;
  stage = group == 0 ? tile.q : tile.v;
  // The weights take the place of hv.
  reads.at = {{tile.g.from_column(first), tile.decay + first, tile.totals + first, warp},
              tile.s.from_column(first),
              tile.hv.from_column(first),
              {rows_of(stage, warp)}};
  reads.template start<4>();
  if (threadIdx.x == 0 && leads()) p.left.factored[chunk * shape.heads + head] = reads.factored;
}

// a = X Y^T,   sums = X H, over all slabs
template <typename T, int M>
template <class Tile, class Memory, class LoadSlab>
__device__ inline void GsaRowBlock<T, M>::multiply(Sums<8>& sums, Scores& a, const Stage& x_tile,
                                                   const Tile& y_tile, const Memory& memory, int width,
                                                   const LoadSlab& load_slab) {
  zero(a);
  fill(sums, 0.f);
  const auto load_next = [&](int col) {
    renew();
    load_slab(col);
    commit_copies();
  };
  each_slab(width, load_next,
            [&](int) { add_slab<Side::earlier, T>(a, sums, x_tile, y_tile, memory, warp, first); });
}

// Loads the unscaled weights of the warp's rows, for the reads of the rows' own tokens, to its rows of the
// tile q. Without factors, or if do uses this tile, all weights are loaded to the tile hv instead.
template <typename T, int M>
__device__ inline void GsaRowBlock<T, M>::load_own_weights() const {
  const SharedTile<T, kRows, M> to{tile.q.data + kRows * warp * kSlab};
  if (p.s.data != nullptr) {
    load_async<32>(to, chunk_rows<T>(p.s, piece, head) + kRows * warp * p.s.stride[1], p.s.stride[1],
                   piece.length - kRows * warp, shape.M, lane());
    return;
  }
  each_pair<M / 8>([&](int n, int i) {
    const int row = kRows * warp + lane_row() + 8 * i;
    *reinterpret_cast<uint32_t*>(&lane_at(to, 8 * i, 8 * n)) =
        complement_pair<T>(p.g, piece, head, shape.M, row, 8 * n + lane_col());
  });
}

// Loads the weights that the value read of z, or the Jacobian after the read of dp, needs, to the tile hv:
// before hv is loaded, or after its last use.
template <typename T, int M>
template <bool Factored>
__device__ inline void GsaRowBlock<T, M>::bring_weights(bool of_z) {
  if (of_z) {
    if (!Factored) {
      wait_copies<0>();
      reads.template split<kThreads>(tile.hv, p.s, p.g, piece, head, shape.M);
    }
  } else if (!kOwnWeights<Factored>) {
    __syncthreads();
    load_weights<kThreads>(tile.hv, p.s, p.g, piece, head, shape.M);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
  }
}

// After z is read: loads the operands of dp, do and hv, unless they are loaded already.
template <typename T, int M>
template <bool Factored>
__device__ inline void GsaRowBlock<T, M>::bring_values(const Sums<8>& z) {
  if constexpr (kOwnWeights<Factored>) {
    load_own_weights();
    commit_copies();
    wait_copies<1>();  // not for the weights
  } else {
    __syncthreads();
    if (Tiles::kOneByOne) load<kThreads>(tile.dout, p.dout, query_head, 0, shape.V);
    if constexpr (kGroups > 1) put_sums<Tiles::kAside>(aside(), z);
    if (!Factored) load_memory_v(0);
    commit_copies();
    wait_copies<0>();
  }
  __syncthreads();
}

// z = e^L Q Hk + [sum_{j<i} q_i . k_j e^{L_i - L_j} s_j], and dp likewise of (do, v): the same instructions
// run twice. The loop has to stay a loop: with `unroll 1` the compiler moved masks out of the loop and
// spilled 40 registers. z is initialised before the loop: uninitialised, ptxas gave those elements of z that
// were spilled during the second iteration the values of dp.
template <typename T, int M>
template <bool Factored>
__device__ inline void GsaRowBlock<T, M>::read_values(Sums<8>& z, Sums<8>& dp) {
  fill(z, 0.f);
#pragma unroll
  for (int turn = 0; turn < 2; ++turn) {
    const bool of_z = turn == 0;
    renew();
    Scores a;
    multiply(dp, a, of_z ? tile.q : tile.dout, of_z ? tile.k : tile.v, of_z ? tile.hk : tile.hv,
             of_z ? shape.D : shape.V, [&](int col) {
               if (of_z) {
                 load<kThreads>(tile.q, p.q, query_head, col, shape.D);
                 load_memory_k(col);
               } else {
                 load<kThreads>(tile.dout, p.dout, query_head, col, shape.V);
                 load_memory_v(col);
               }
             });
    if (group == 0) put_diagonal(tile.own + turn * kChunk, a, warp);
    __syncwarp();
    bring_weights<Factored>(of_z);
    reads.value_read(dp, a);
    if (!of_z) break;
    z = dp;
    bring_values<Factored>(z);
  }
}

}  // namespace girih::kernels
