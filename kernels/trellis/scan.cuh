// Both memories from chunk to chunk, one block a sequence, head and memory.
//
// M / 16 warps have the memory. Others bring tiles of 16 tokens through a ring: x, a, and of every token the
// weight of its step, -gamma_t e^{L_C - L_t}; others again store the memory before every chunk. A row of z is
// spread over all warps; what its norm takes of it goes once through shared memory.
#pragma once

#include "trellis/memory.cuh"

namespace girih::kernels {

template <typename T, int Tile>
struct TrellisScanSpace {
  using Leaving = LeavingMemories<T, Tile>;
  using Token = SharedTile<T, kTile, Tile>;
  static constexpr int kWarps = Tile / 16, kLoaders = Tile == 64 ? 3 : 2, kStages = 8;
  static constexpr int kThreads = (kWarps + kLoaders + Leaving::kStorers) * 32;
  static constexpr int kTiles = kStages * 2 * Token::kBytes, kTable = 2 * kTile * kWarps * 16,
                       kWeights = kStages * (kTile + 4) * 4;
  static constexpr int kBytes =
      kTiles + Leaving::kBytes + kTable + kWeights + (2 * kStages + Leaving::kBarriers) * 8;

  unsigned char* base;

  __device__ Token x(int stage) const { return {reinterpret_cast<T*>(base + stage * 2 * Token::kBytes)}; }
  __device__ Token a(int stage) const {
    return {reinterpret_cast<T*>(base + (stage * 2 + 1) * Token::kBytes)};
  }
  // Moments of a row by every warp, of this tile and the one before.
  __device__ Moments* table(unsigned tiles) const {
    return reinterpret_cast<Moments*>(base + kTiles + Leaving::kBytes) + (tiles & 1) * kTile * kWarps;
  }
  // Of every token of a stage, and behind them the chunk's decay.
  __device__ float* weights(int stage) const {
    return reinterpret_cast<float*>(base + kTiles + Leaving::kBytes + kTable) + stage * (kTile + 4);
  }
  __device__ uint64_t* full() const {
    return reinterpret_cast<uint64_t*>(base + kTiles + Leaving::kBytes + kTable + kWeights);
  }
  __device__ uint64_t* empty() const { return full() + kStages; }
  __device__ Leaving leaving() const { return {base + kTiles, full() + 2 * kStages}; }
};

// The warps that load take tiles in turn.
template <typename T, int Tile>
__device__ inline void load_scan(const TrellisScan& p, const TrellisPart& part,
                                 const TrellisScanSpace<T, Tile>& space, int loader) {
  using Space = TrellisScanSpace<T, Tile>;
  const auto& x = p.x[part.memory];
  const int64_t batch = part.of.sequence.batch;
  Turn turn;
  int mine = loader;
  for (int64_t i = 0; i < part.of.chunks; ++i) {
    const Chunk chunk = chunk_of(p.shape.grid, part.of, i);
    for (int j = 0; j < chunk.length; j += kTile, turn.next(Space::kStages)) {
      if (mine-- > 0) continue;
      mine = Space::kLoaders - 1;
      const GatePair gates = load_gates(p.gamma, p.g, batch, chunk, part.head);
      const GateSums sums(gates);
      const int rows = min(chunk.length - j, kTile), s = turn.place;
      wait(space.empty() + s, turn.parity ^ 1);
      load_async<32>(space.x(s), row_of<T>(x, batch, chunk.start + j, part.head), x.stride[1], rows,
                     p.shape.width(part.memory), lane());
      load_async<32>(space.a(s), row_of<T>(p.a, batch, chunk.start + j, part.head), p.a.stride[1], rows,
                     p.shape.M, lane());
      float* weights = space.weights(s);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int t = 2 * lane() + e - j;
        if (t >= 0 && t < kTile) weights[t] = -gates.gamma[e] * exp2_fast(sums.after[e]);
      }
      if (lane() == 0) weights[kTile] = exp2_fast(sums.after[0] + gates.gate[0]);
      arrive_after_copies(space.full() + s);
      arrive_once(space.full() + s);
    }
  }
}

template <typename T, int Tile>
__device__ inline void store_scan(const TrellisScan& p, const TrellisPart& part,
                                  const TrellisScanSpace<T, Tile>& space, int storer) {
  const int width = p.shape.width(part.memory);
  const int64_t size = int64_t{p.shape.M} * width;
  T* to = static_cast<T*>(p.memories[part.memory]) + (part.of.first * p.shape.heads + part.head) * size;
  Turn turn;
  for (int64_t i = 0; i < part.of.chunks; ++i, to += p.shape.heads * size) {
    space.leaving().store(turn, to, p.shape.M, width, storer);
  }
}

template <typename T, int Tile, class Map>
__device__ inline void run_scan(const TrellisScan& p, const TrellisPart& part,
                                const TrellisScanSpace<T, Tile>& space, int warp) {
  using Space = TrellisScanSpace<T, Tile>;
  constexpr int N = Tile / 8, K = Tile / 16, kWarps = Space::kWarps;
  const TrellisShape& shape = p.shape;
  const Map phi(shape.phi, shape.slots);
  const auto leaving = space.leaving();
  const int slot = 16 * warp;
  const Columns columns{slot, shape.slots};

  Sums<N> A;
  load_state(A, p.initial[part.memory], part, shape, slot);
  Operand<K> first;
  Turn turn, left;
  unsigned tiles = 0;
  // What tokens leave, from the first one on.
  const bool kept = p.z[0].data != nullptr;
  const int64_t start = part.of.sequence.start, u_stride = p.u[part.memory].stride[1],
                z_stride = p.z[part.memory].stride[1], fit_stride = p.fit[part.memory].stride[1];
  T* u_to = part_of<T>(p.u[part.memory], part, start, slot);
  T* z_to = kept ? part_of<T>(p.z[part.memory], part, start, slot) : nullptr;
  const int fit_row = lane_row() + 8 * (lane() & 1);
  float* fit_to =
      kept && warp == 0 && (lane() & 2) == 0
          ? row_of<float>(p.fit[part.memory], part.of.sequence.batch, start, part.head) + fit_row * fit_stride
          : nullptr;
  int64_t ahead = part.of.sequence.end - start;  // tokens
  bool within = false;                           // the last chunk is not complete
  for (int64_t i = 0; ahead > 0; ++i) {
    const int room = shape.grid.size - (i == 0 ? part.of.begun : 0);
    within = ahead < room;
    const int length = within ? static_cast<int>(ahead) : room;
    ahead -= length;
    const bool resumed = i == 0 && p.first[part.memory].data != nullptr;

    // A', and A for those who read
    round_to<T>(first, A);
    if (resumed) leaving.leave(left, first, slot);
    if (within && !resumed) store_state(p.last_first[part.memory], A, part, shape, slot);
    if (resumed) {
      Sums<N> given;
      load_state(given, p.first[part.memory], part, shape, slot);
      round_to<T>(first, given);
      if (within) store_state(p.last_first[part.memory], given, part, shape, slot);
    }

    for (int j = 0; j < length; j += kTile, turn.next(Space::kStages), ++tiles) {
      const int s = turn.place;
      wait(space.full() + s, turn.parity);
      const auto x = space.x(s);
      const float* weights = space.weights(s);

      // Z = X A'^T
      Sums<2> u, slope, a;
      product_with<T>(u, x, first);
      if (j == 0) {
        // Beside the product: A' is handed on, and A <- e^{L_C} A.
        if (!resumed) leaving.leave(left, first, slot);
        const float decay = weights[kTile];
        scale_rows(A, {decay, decay});
      }
      load_wide<T>(a, space.a(s), 0, slot);

      // U = J_phi(Z)^T (phi(Z) - a): the sums of a row are those of all warps. Backward finds z as it is
      // kept, in 16 bits: all that is made of it is made of that.
      Operand<1> z;
      round_to<T>(z, u);
      unpack<T>(u, z.at[0]);
      activate(phi, u, slope);
      Moments* table = space.table(tiles);
      const Moments own = moments_of_rows(phi, u, a, columns);
      if ((lane() & 2) == 0) table[fit_row * kWarps + warp] = own;
      const float2 weight = {weights[lane_row()], weights[lane_row() + 8]};
      barrier_wait(1, 32 * kWarps);
      Moments parts[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) parts[w] = table[fit_row * kWarps + w];
      const Fit found = fit<2>(phi, parts, shape.slots);
      Fit fits[2];
      both_rows(fits, found);
#pragma unroll
      for (int half = 0; half < 2; ++half) to_residual(phi, u, slope, a, fits[half], half, columns);

      // A <- e^{L_C} A - (U * gamma e^{L_C - L})^T X
      uint32_t step[4];
      transpose_step<T>(step, u, weight);
      add_product<T>(A, step, x, 0);
      arrive_once(space.empty() + s);

      const int rows = min(length - j, kTile);
      store_part(u_to, u_stride, u, rows, slot, shape.M);
      u_to += rows * u_stride;
      if (!kept) continue;
      unpack<T>(u, z.at[0]);
      store_part(z_to, z_stride, u, rows, slot, shape.M);
      z_to += rows * z_stride;
      if (fit_to != nullptr && fit_row < rows) {
        *reinterpret_cast<float4*>(fit_to) = {found.mean, found.inverse, found.beta, found.mean_a};
      }
      if (fit_to != nullptr) fit_to += rows * fit_stride;
    }
  }
  store_state(p.last[part.memory], A, part, shape, slot);
  if (within) return;
  // A chunk has been completed, or there was no token: then A' is what it was.
  if (part.of.chunks == 0 && p.first[part.memory].data != nullptr) {
    load_state(A, p.first[part.memory], part, shape, slot);
  }
  store_state(p.last_first[part.memory], A, part, shape, slot);
}

template <typename T, int Tile, bool Softmax>
__global__ void __launch_bounds__(TrellisScanSpace<T, Tile>::kThreads, 1)
    trellis_scan_kernel(const __grid_constant__ TrellisScan p) {
  using Space = TrellisScanSpace<T, Tile>;
  extern __shared__ __align__(128) unsigned char shared[];
  const Space space{shared};
  const TrellisPart part(p.shape, blockIdx.x);
  const int warp = warp_index();
  if (threadIdx.x == 0) {
    space.leaving().init();
    for (int s = 0; s < Space::kStages; ++s) {
      init_barrier(space.full() + s, 32 + once(1));
      init_barrier(space.empty() + s, once(Space::kWarps));
    }
  }
  if (threadIdx.x == 0 && part.head == 0 && part.memory == 0) {
    const auto& sequence = part.of.sequence;
    p.last_position[part.sequence] = (part.of.begun + sequence.end - sequence.start) % p.shape.grid.size;
  }
  __syncthreads();
  if (warp < Space::kWarps) {
    run_scan<T, Tile, Map<Softmax>>(p, part, space, warp);
  } else if (warp < Space::kWarps + Space::kLoaders) {
    load_scan(p, part, space, warp - Space::kWarps);
  } else {
    store_scan(p, part, space, warp - Space::kWarps - Space::kLoaders);
  }
}

template <typename T, int Tile>
cudaError_t launch_trellis_scan(const TrellisScan& p, cudaStream_t stream) {
  using Space = TrellisScanSpace<T, Tile>;
  const int64_t blocks = 2 * p.shape.grid.tokens.sequences * p.shape.heads;
  return p.shape.phi.norm == Norm::softmax
             ? launch_parts<trellis_scan_kernel<T, Tile, true>, Space>(p, blocks, stream)
             : launch_parts<trellis_scan_kernel<T, Tile, false>, Space>(p, blocks, stream);
}

}  // namespace girih::kernels
