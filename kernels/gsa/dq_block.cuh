// A block of gsa_dq_kernel: its members, its phases in the order of their calls, and the phases up to z and
// dp.
#pragma once

#include "gsa/dq_tiles.cuh"
#include "gsa/feature.cuh"

namespace girih::kernels {

// A block has a chunk and a query head. Accumulators are local variables of the callers: as members, arrays
// would keep the whole object out of registers until every loop over them is unrolled.
template <typename T, int M>
struct GsaDqBlock : ChunkBlock {
  using Tiles = GsaDqTiles<T, M>;
  using StagingTile = SharedTile<T, kChunk, kSlab>;
  static constexpr int kWarpgroups = Tiles::kWarpgroups, kThreads = kWarpgroupThreads * kWarpgroups;
  template <bool IsFactored>
  static constexpr bool kLoadsSelfWeights = IsFactored && !Tiles::kReusesQueryTile;

  const GsaDq& p;
  const Tiles tile;
  const int first_slot;  // first slot of the warpgroup
  // Buffer for the stores and for the scratch of the warps, free once q, do and v have been read.
  StagingTile staging;
  int slots;  // number of slots from first_slot to M
  RowReads<T, M, true, 64> reads;

  __device__ GsaDqBlock(const GsaDq& p, unsigned char* shared)
      : ChunkBlock(p.shape, threadIdx.x / 32 % 4, kWarpgroups == 1 ? 0 : threadIdx.x / kWarpgroupThreads),
        p(p),
        tile(shared),
        first_slot(64 * warpgroup) {}

  // Starts the copies of g and s, then of the first slab of each memory.
  __device__ void start_loads() const;
  __device__ void init_reads();

  // Computes dz and W of the warpgroup's slots. The code with factors and the code without are separate
  // instances: mixed, the compiler schedules instructions later, which costs a fifth of the kernel's time.
  template <bool IsFactored>
  __device__ void compute_dz(Accumulator<8>& dp, Scores& W);
  template <bool IsFactored>
  __device__ void compute_z_and_dp(Accumulator<8>& z, Accumulator<8>& dp);
  template <class Tile, class Memory, class LoadSlab>
  __device__ void multiply(Accumulator<8>& sums, Scores& a, const StagingTile& x_tile, const Tile& y_tile,
                           const Memory& memory, int width, const LoadSlab& load_slab);
  template <bool IsFactored>
  __device__ void load_read_weights(bool is_z);
  template <bool IsFactored>
  __device__ void load_dp_operands(const Accumulator<8>& z);
  __device__ void load_self_weights() const;

  // dq_finish.cuh: dz, the results for the other kernels, and dq.
  __device__ void restore_z(Accumulator<8>& z);
  template <bool IsFactored>
  __device__ void apply_jacobian(Accumulator<8>& z, Accumulator<8>& dp) const;
  __device__ void merge_softmax_sums(SoftmaxSums& sums) const;
  template <bool IsFactored>
  __device__ void store_p_and_dz(Accumulator<8>& z, const Accumulator<8>& dp) const;

  __device__ void sum_warpgroup_scores(Scores& W) const;
  __device__ void store_dq(const AFragment<4>& f, const AFragment<2> (&w)[2]);

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
  __device__ float* spill_buffer() const {
    return reinterpret_cast<float*>(tile.hk.data) + threadIdx.x / 32 * Tiles::kSpillTiles * 128;
  }
  // First column of the last slab of D, which stays in the tiles k and hk.
  __device__ int last_slab() const { return (shape.D - 1) / kSlab * kSlab; }
  // Scores of the lane's two rows with themselves, in the first (z) or second (dp) read.
  __device__ float2 self_score(int read) const {
    const float* row = tile.own + read * kChunk + kWarpRows * warp + lane_row();
    return {row[0], row[8]};
  }
  __device__ void store_slots(const Accumulator<8>& sums, const OutputTensor<4>& to) const {
    store_rows<T>(sums, staging, warp, to, range, query_head, first_slot, first_slot + slots);
  }
  // Barrier of the warps with the same rows.
  __device__ void sync_row_warps() const {
    if constexpr (kWarpgroups > 1) named_barrier_sync(1 + warp, 32 * kWarpgroups);
  }
  // Makes the compiler compute addresses inside of loops. Hoisted, the addresses of loads that rarely run
  // cost more registers than they save.
  __device__ void recompute_addresses() { ptx::make_opaque(range.start, range.length); }
};

template <typename T, int M>
__device__ inline void GsaDqBlock<T, M>::start_loads() const {
  load_slots<kThreads>(tile.g, p.g, tile.s, p.s);
  load<kThreads>(tile.q, p.q, query_head, 0, shape.D);
  load_memory_k(0);
  commit_copies();
  if (!Tiles::kReusesQueryTile) load<kThreads>(tile.dout, p.dout, query_head, 0, shape.V);
  load_memory_v(0);
  commit_copies();
}

template <typename T, int M>
__device__ inline void GsaDqBlock<T, M>::init_reads() {
  slots = shape.M - first_slot;
  staging = warpgroup == 0 ? tile.q : tile.v;
  // The weights take the place of hv.
  reads.operands = {{tile.g.from_column(first_slot), tile.decay + first_slot, tile.totals + first_slot, warp},
                    tile.s.from_column(first_slot),
                    tile.hv.from_column(first_slot),
                    {warp_scratch(staging, warp)}};
  reads.template start<4>();
  if (threadIdx.x == 0 && is_group_leader())
    p.gate_terms.is_factored[chunk * shape.heads + head] = reads.is_factored;
}

// a = X Y^T,   sums = X H, over all slabs
template <typename T, int M>
template <class Tile, class Memory, class LoadSlab>
__device__ inline void GsaDqBlock<T, M>::multiply(Accumulator<8>& sums, Scores& a, const StagingTile& x_tile,
                                                  const Tile& y_tile, const Memory& memory, int width,
                                                  const LoadSlab& load_slab) {
  zero(a);
  fill(sums, 0.f);
  const auto load_next = [&](int col) {
    recompute_addresses();
    load_slab(col);
    commit_copies();
  };
  for_each_slab(width, load_next,
                [&](int) { add_slab<Side::earlier, T>(a, sums, x_tile, y_tile, memory, warp, first_slot); });
}

// Loads the unscaled weights of the warp's rows, for the reads of the rows' own tokens, to its rows of the
// tile q. Without factors, or if do uses this tile, all weights are loaded to the tile hv instead.
template <typename T, int M>
__device__ inline void GsaDqBlock<T, M>::load_self_weights() const {
  const SharedTile<T, kWarpRows, M> to{tile.q.data + kWarpRows * warp * kSlab};
  if (p.s.data != nullptr) {
    load_async<32>(to, chunk_rows<T>(p.s, range, head) + kWarpRows * warp * p.s.stride[1], p.s.stride[1],
                   range.length - kWarpRows * warp, shape.M, lane());
    return;
  }
  for_each_register_pair<M / 8>([&](int n, int i) {
    const int row = kWarpRows * warp + lane_row() + 8 * i;
    *reinterpret_cast<uint32_t*>(&lane_element(to, 8 * i, 8 * n)) =
        complement_pair<T>(p.g, range, head, shape.M, row, 8 * n + lane_col());
  });
}

// Loads the weights that the value read of z, or the Jacobian after the read of dp, needs, to the tile hv:
// before hv is loaded, or after its last use.
template <typename T, int M>
template <bool IsFactored>
__device__ inline void GsaDqBlock<T, M>::load_read_weights(bool is_z) {
  if (is_z) {
    if (!IsFactored) {
      wait_copies<0>();
      reads.template split_into_subchunks<kThreads>(tile.hv, p.s, p.g, range, head, shape.M);
    }
  } else if (!kLoadsSelfWeights<IsFactored>) {
    __syncthreads();
    load_weights<kThreads>(tile.hv, p.s, p.g, range, head, shape.M);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
  }
}

// After z is read: loads the operands of dp, do and hv, unless they are loaded already.
template <typename T, int M>
template <bool IsFactored>
__device__ inline void GsaDqBlock<T, M>::load_dp_operands(const Accumulator<8>& z) {
  if constexpr (kLoadsSelfWeights<IsFactored>) {
    load_self_weights();
    commit_copies();
    wait_copies<1>();  // not for the weights
  } else {
    __syncthreads();
    if (Tiles::kReusesQueryTile) load<kThreads>(tile.dout, p.dout, query_head, 0, shape.V);
    if constexpr (kWarpgroups > 1) store_accumulator<Tiles::kSpillTiles>(spill_buffer(), z);
    if (!IsFactored) load_memory_v(0);
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
template <bool IsFactored>
__device__ inline void GsaDqBlock<T, M>::compute_z_and_dp(Accumulator<8>& z, Accumulator<8>& dp) {
  fill(z, 0.f);
#pragma unroll
  for (int pass = 0; pass < 2; ++pass) {
    const bool is_z = pass == 0;
    recompute_addresses();
    Scores a;
    multiply(dp, a, is_z ? tile.q : tile.dout, is_z ? tile.k : tile.v, is_z ? tile.hk : tile.hv,
             is_z ? shape.D : shape.V, [&](int col) {
               if (is_z) {
                 load<kThreads>(tile.q, p.q, query_head, col, shape.D);
                 load_memory_k(col);
               } else {
                 load<kThreads>(tile.dout, p.dout, query_head, col, shape.V);
                 load_memory_v(col);
               }
             });
    if (warpgroup == 0) store_diagonal(tile.own + pass * kChunk, a, warp);
    __syncwarp();
    load_read_weights<IsFactored>(is_z);
    reads.value_read(dp, a);
    if (!is_z) break;
    z = dp;
    load_dp_operands<IsFactored>(z);
  }
}

}  // namespace girih::kernels
