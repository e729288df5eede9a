// The gradients of both memories from chunk to chunk, from the end, one block a sequence, head and memory.
//
// With G that of A after a chunk and (l, w) its reads,
//     dU_i = -gamma_i (direct_i + e^{L_C - L_i} G x_i)        dZ_i = Hessian of E at z_i times dU_i
//     G   <- e^{L_C} G + sum over t of e^{L_t} l_t w_t^T + dZ^T X
// Warps have G as those of the scan have A, and others bring tiles of 16 tokens through a ring.
#pragma once

#include "trellis/map_gradients.cuh"
#include "trellis/memory.cuh"

namespace girih::kernels {

template <typename T, int Tile>
struct TrellisReverseSpace {
  using Leaving = LeavingMemories<T, Tile>;
  using Token = SharedTile<T, kTile, Tile>;
  static constexpr int kWarps = Tile / 16, kLoaders = Tile == 64 ? 3 : 2, kStages = Tile == 64 ? 8 : 4;
  static constexpr int kThreads = (kWarps + kLoaders + Leaving::kStorers) * 32;
  enum TokenTile : int { kX, kW, kL, kZ, kA, kDirect, kTokens };
  // Of every token: its Fit, -gamma, e^{L_C - L}, e^{L}; and the chunk's decay.
  static constexpr int kScalars = kTile * (16 + 3 * 4) + 16;
  static constexpr int kTiles = kStages * kTokens * Token::kBytes, kTable = 2 * kTile * kWarps * 16;
  static constexpr int kBytes =
      kTiles + Leaving::kBytes + kStages * kScalars + kTable + (2 * kStages + Leaving::kBarriers) * 8;

  unsigned char* base;

  __device__ Token token(int stage, TokenTile which) const {
    return {reinterpret_cast<T*>(base + (stage * kTokens + which) * Token::kBytes)};
  }
  __device__ unsigned char* scalars(int stage) const {
    return base + kTiles + Leaving::kBytes + stage * kScalars;
  }
  __device__ Fit* fits(int stage) const { return reinterpret_cast<Fit*>(scalars(stage)); }
  __device__ float* step(int stage) const { return reinterpret_cast<float*>(scalars(stage) + kTile * 16); }
  __device__ float* after(int stage) const { return step(stage) + kTile; }
  __device__ float* through(int stage) const { return step(stage) + 2 * kTile; }
  __device__ float* decay(int stage) const { return step(stage) + 3 * kTile; }
  // Sums of a row by every warp, of this tile and the one before.
  __device__ float4* table(unsigned tiles) const {
    return reinterpret_cast<float4*>(scalars(kStages)) + (tiles & 1) * kTile * kWarps;
  }
  __device__ uint64_t* full() const { return reinterpret_cast<uint64_t*>(scalars(kStages) + kTable); }
  __device__ uint64_t* empty() const { return full() + kStages; }
  __device__ Leaving leaving() const { return {base + kTiles, full() + 2 * kStages}; }
};

__device__ inline int last_tile(const Chunk& chunk) { return (chunk.length - 1) / kTile * kTile; }

template <typename T, int Tile>
__device__ inline void load_reverse(const TrellisReverse& p, const TrellisPart& part,
                                    const TrellisReverseSpace<T, Tile>& space, int loader) {
  using Space = TrellisReverseSpace<T, Tile>;
  const int memory = part.memory, width = p.shape.width(memory);
  const int64_t batch = part.of.sequence.batch;
  Turn turn;
  int mine = loader;
  for (int64_t i = part.of.chunks - 1; i >= 0; --i) {
    const Chunk chunk = chunk_of(p.shape.grid, part.of, i);
    for (int j = last_tile(chunk); j >= 0; j -= kTile, turn.next(Space::kStages)) {
      if (mine-- > 0) continue;
      mine = Space::kLoaders - 1;
      const GatePair gates = load_gates(p.gamma, p.g, batch, chunk, part.head);
      const GateSums sums(gates);
      const int rows = min(chunk.length - j, kTile), s = turn.place;
      wait(space.empty() + s, turn.parity ^ 1);
      const auto bring = [&](typename Space::TokenTile which, const In<4>& x, int cols) {
        load_async<32>(space.token(s, which), row_of<T>(x, batch, chunk.start + j, part.head), x.stride[1],
                       rows, cols, lane());
      };
      bring(Space::kX, p.x[memory], width);
      bring(Space::kW, p.w[memory], width);
      bring(Space::kL, p.l[memory], p.shape.M);
      bring(Space::kZ, p.z[memory], p.shape.M);
      bring(Space::kA, p.a, p.shape.M);
      bring(Space::kDirect, p.direct[memory], p.shape.M);
      if (lane() < kTile) {
        const float* fits = row_of<float>(p.fit[memory], batch, chunk.start + j, part.head);
        copy_async(shared_address(space.fits(s) + lane()), fits + lane() * p.fit[memory].stride[1],
                   lane() < rows);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int t = 2 * lane() + e - j;
        if (t < 0 || t >= kTile) continue;
        space.step(s)[t] = -gates.gamma[e];
        space.after(s)[t] = exp2_fast(sums.after[e]);
        space.through(s)[t] = exp2_fast(sums.through[e]);
      }
      if (lane() == 0) *space.decay(s) = exp2_fast(sums.after[0] + gates.gate[0]);
      arrive_after_copies(space.full() + s);
      arrive_once(space.full() + s);
    }
  }
}

// state += a x, the warp's slots: what reaches an A' that no state of the chain is.
template <typename T, int N, class Token>
__device__ inline void add_apart(const Out<4>& state, const uint32_t (&a)[4], const Token& x,
                                 const TrellisPart& part, const TrellisShape& shape, int slot) {
#pragma unroll 1
  for (int n = 0; n < N; n += 2) {
    Sums<2> sums;
    fill(sums, 0.f);
    add_product<T>(sums, a, x, 0, 8 * n);
    each_element<2>(
        state, part, shape, slot,
        [&](int m, int i, int64_t at) { static_cast<float*>(state.data)[at] += sums.at[m][i]; }, 8 * n);
  }
}

template <typename T, int Tile>
__device__ inline void store_reverse(const TrellisReverse& p, const TrellisPart& part,
                                     const TrellisReverseSpace<T, Tile>& space, int storer) {
  const int width = p.shape.width(part.memory);
  const int64_t size = int64_t{p.shape.M} * width, step = p.shape.heads * size;
  T* to = static_cast<T*>(p.gradients[part.memory]) + part.of.first * step + part.head * size;
  Turn turn;
  for (int64_t i = part.of.chunks - 1; i >= 0; --i) {
    space.leaving().store(turn, to + i * step, p.shape.M, width, storer);
  }
}

// What a tile's tokens have for the chain that does not hang on it, of the warp's slots.
struct ReverseTile {
  Sums<2> y, slope, bend, a, direct;
  Fit fits[2];
  float2 step, after;

  template <class Map, class Space>
  __device__ void load(const Map& phi, const Space& space, int s, int slot) {
    using T = typename Space::Token::Element;
    Sums<2> z;
    load_wide<T>(z, space.token(s, Space::kZ), 0, slot);
    load_wide<T>(a, space.token(s, Space::kA), 0, slot);
    load_wide<T>(direct, space.token(s, Space::kDirect), 0, slot);
    const int row = lane_row();
    step = {space.step(s)[row], space.step(s)[row + 8]},
    after = {space.after(s)[row], space.after(s)[row + 8]};
    fits[0] = space.fits(s)[row], fits[1] = space.fits(s)[row + 8];
    y = z;
    activate(phi, y, slope);
#pragma unroll
    for (int half = 0; half < 2; ++half) bend_of(phi, bend, z, y, a, fits[half], half);
  }
};

template <typename T, int Tile, class Map>
__device__ inline void run_reverse(const TrellisReverse& p, const TrellisPart& part,
                                   const TrellisReverseSpace<T, Tile>& space, int warp) {
  using Space = TrellisReverseSpace<T, Tile>;
  constexpr int N = Tile / 8, K = Tile / 16, kWarps = Space::kWarps;
  const TrellisShape& shape = p.shape;
  const int memory = part.memory, slot = 16 * warp;
  const Map phi(shape.phi, shape.slots);
  const auto leaving = space.leaving();
  const Columns columns{slot, shape.slots};
  const bool positions = p.dfirst[memory].data != nullptr;

  Sums<N> G;
  load_state(G, p.dlast[memory], part, shape, slot);
  // A' of the end: A, unless its chunk is not complete; without a token that of the start.
  const int64_t last = part.of.chunks - 1;
  const bool within = last >= 0 && !chunk_of(shape.grid, part.of, last).complete;
  if (last >= 0 ? !within : !positions) add_state(G, p.dlast_first[memory], part, shape, slot);
  // dA' of a first chunk that goes on is no part of dA.
  if (positions) {
    Sums<N> apart;
    fill(apart, 0.f);
    if (last < 0 || (last == 0 && within)) add_state(apart, p.dlast_first[memory], part, shape, slot);
    store_state(p.dfirst[memory], apart, part, shape, slot);
  }

  // Of narrow memories, which leave registers for it, a tile is made ready while the one before waits.
  constexpr bool kAhead = Tile == 64;
  Operand<K> after;  // G after the chunk
  Turn turn, left_behind;
  unsigned tiles = 0;
  ReverseTile ready;
  const auto make_ready = [&](ReverseTile& tile, const Turn& at) {
    wait(space.full() + at.place, at.parity);
    tile.load(phi, space, at.place, slot);
  };
  if (kAhead && last >= 0) make_ready(ready, turn);
  for (int64_t i = last; i >= 0; --i) {
    const Chunk chunk = chunk_of(shape.grid, part.of, i);
    const bool resumed = i == 0 && positions;
    round_to<T>(after, G);

    for (int j = last_tile(chunk); j >= 0; j -= kTile, ++tiles) {
      const int s = turn.place;
      if (!kAhead) make_ready(ready, turn);
      turn.next(Space::kStages);
      const auto x = space.token(s, Space::kX);

      // dU
      Sums<2> du;
      product_with<T>(du, x, after);
      if (j == last_tile(chunk)) {
        // Beside the product: what waits for nothing.
        leaving.leave(left_behind, after, slot);
        const float decay = *space.decay(s);
        scale_rows(G, {decay, decay});
      }
      const ReverseTile tile = ready;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          du.at[n][e] = (e < 2 ? tile.step.x : tile.step.y) *
                        fmaf(e < 2 ? tile.after.x : tile.after.y, du.at[n][e], tile.direct.at[n][e]);
        }
      }
      // The sums of both rows: each lane gets one row's.
      float4* table = space.table(tiles);
      const float3 sums[2] = {products_of(phi, du, tile.y, tile.slope, tile.a, tile.fits[0], 0, columns),
                              products_of(phi, du, tile.y, tile.slope, tile.a, tile.fits[1], 1, columns)};
      const float3 own = sum_of_rows(sums);
      const int own_row = lane_row() + 8 * (lane() & 1);
      if ((lane() & 2) == 0) table[own_row * kWarps + warp] = {own.x, own.y, own.z, 0.f};

      // G <- e^{L_C} G + sum over t of e^{L_t} l_t w_t^T, and the next tile, before the other warps' sums are
      // waited for
      uint32_t left[4];
      load_weighed_transposed<T>(left, space.token(s, Space::kL), slot, 0, space.through(s));
      add_product<T>(G, left, space.token(s, Space::kW), 0);
      if (kAhead && (i > 0 || j > 0)) make_ready(ready, turn);

      // dZ, and J dU
      Sums<2> targets = du;
      barrier_wait(1, 32 * kWarps);
      float3 all{0.f, 0.f, 0.f};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float4 of_warp = table[own_row * kWarps + w];
        all.x += of_warp.x, all.y += of_warp.y, all.z += of_warp.z;
      }
      float3 of_rows[2];
      both_rows(of_rows, all);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        to_jacobian_product(phi, targets, tile.y, tile.slope, tile.fits[half], of_rows[half], half, columns);
        to_hessian_product(phi, du, tile.y, tile.slope, tile.bend, tile.a, tile.fits[half], of_rows[half],
                           half, columns);
      }
      // G += dZ^T X
      transpose_step<T>(left, du, {1.f, 1.f});
      if (resumed) {
        add_apart<T, N>(p.dfirst[memory], left, x, part, shape, slot);
      } else {
        add_product<T>(G, left, x, 0);
      }
      arrive_once(space.empty() + s);
      const int rows = chunk.length - j;
      store_part(part_of<T>(p.jdu[memory], part, chunk.start + j, slot), p.jdu[memory].stride[1], targets,
                 rows, slot, shape.M);
      store_part(part_of<T>(p.dz[memory], part, chunk.start + j, slot), p.dz[memory].stride[1], du, rows,
                 slot, shape.M);
    }
    if (i == last && within && !resumed) add_state(G, p.dlast_first[memory], part, shape, slot);
  }
  store_state(p.dinitial[memory], G, part, shape, slot);
}

template <typename T, int Tile, bool Softmax>
__global__ void __launch_bounds__(TrellisReverseSpace<T, Tile>::kThreads, 1)
    trellis_reverse_kernel(const __grid_constant__ TrellisReverse p) {
  using Space = TrellisReverseSpace<T, Tile>;
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
  __syncthreads();
  if (warp < Space::kWarps) {
    run_reverse<T, Tile, Map<Softmax>>(p, part, space, warp);
  } else if (warp < Space::kWarps + Space::kLoaders) {
    load_reverse(p, part, space, warp - Space::kWarps);
  } else {
    store_reverse(p, part, space, warp - Space::kWarps - Space::kLoaders);
  }
}

template <typename T, int Tile>
cudaError_t launch_trellis_reverse(const TrellisReverse& p, cudaStream_t stream) {
  using Space = TrellisReverseSpace<T, Tile>;
  const int64_t blocks = 2 * p.shape.grid.tokens.sequences * p.shape.heads;
  return p.shape.phi.norm == Norm::softmax
             ? launch_parts<trellis_reverse_kernel<T, Tile, true>, Space>(p, blocks, stream)
             : launch_parts<trellis_reverse_kernel<T, Tile, false>, Space>(p, blocks, stream);
}

}  // namespace girih::kernels
