// State warps of the scan: update one memory chunk by chunk.
//
// M / 16 warps hold the memory; a warp has 16 slots. A row of z is distributed over all of these warps, so
// the sums of its norm are exchanged once through shared memory.
#pragma once

#include "trellis/scan_storage.cuh"

namespace girih::kernels {

template <typename T, int Tile, class ActivationMap>
class TrellisScanStateWarp {
 protected:
  using Storage = TrellisScanStorage<T, Tile>;
  using Token = typename Storage::Token;
  static constexpr int N = Tile / 8, K = Tile / 16, kWarps = Storage::kStateWarps;
  static constexpr bool kHasWeight = ActivationMap::has_weight;
  // If registers allow, the tokens of a tile are loaded to registers while the tile before waits for its
  // sums. This needs another full stage before the output warps release a chunk.
  static constexpr bool kPrefetch = Tile == 64;
  static_assert(!kPrefetch || Storage::kStages > Storage::kProducerWarps + Storage::kOutputWarps);

  const TrellisScan& p;
  const TrellisBlockCoord& coord;
  const Storage& storage;
  const ActivationMap phi;
  const int warp, slot;
  int row, lane_moment;  // of the lane: its upper row, and the moment that it stores
  const MapSlots map_slots;
  const std::conditional_t<kHasWeight, Weights<2>, NoWeights> weights;
  const bool stores_stats;
  uint32_t lane_place, slot_masks[2];  // lane offset of PrecomputedTile; masks of the slots that exist
  Accumulator<N> A;
  BFragment<K> chunk_start;  // A', rounded, as a B fragment
  PipelineState token_pipe, memory_pipe;
  unsigned tiles = 0;
  // Inputs of the current tile: X, and the warp's slots of a.
  struct {
    AFragment<K> x;
    uint32_t a[4];
    typename Storage::RowScalars rows;
    int tile_flags;
  } inputs;

 public:
  __device__ TrellisScanStateWarp(const TrellisScan& p, const TrellisBlockCoord& coord,
                                  const Storage& storage, int warp)
      : p(p),
        coord(coord),
        storage(storage),
        phi(p.shape.phi, p.shape.slots),
        warp(warp),
        slot(16 * warp),
        row(lane_row()),
        lane_moment(lane() & 3),
        map_slots{slot, p.shape.slots},
        weights(p.weight + coord.head * p.shape.M, map_slots),
        stores_stats(p.row_stats[0].data != nullptr && warp == 0 && (lane() & 3) == 0),
        lane_place(sizeof(T) * Token::offset(0, 0, lane() & 15, (lane() >> 4) * 8)),
        slot_masks{map_slots.pair_mask(0), map_slots.pair_mask(1)} {
    // Keeps these values in registers; otherwise the compiler recomputes them for every tile.
    ptx::make_opaque(lane_place, slot_masks[0], slot_masks[1], row, lane_moment);
  }

  __device__ void run() {
    const InputTensor<4>& caller_state = p.chunk_start[coord.memory];
    load_state(A, p.initial[coord.memory], coord, p.shape, slot);
    bool has_more = coord.chunked.chunks > 0, is_incomplete = false;
    if (kPrefetch && has_more) load_tile();
#pragma unroll 1
    while (has_more) {
      if constexpr (!kPrefetch) load_tile();
      if (is_special_chunk()) begin_special_chunk();
#pragma unroll 1
      do {  // tiles of ordinary chunks
        is_incomplete = inputs.tile_flags & Storage::kIncompleteChunk;
        has_more = step();
      } while (kPrefetch && has_more && !is_special_chunk());
    }
    store_state(p.last[coord.memory], A, coord, p.shape, slot);
    if (is_incomplete) return;
    // The last chunk is complete: A' of the next token is A. Without tokens A' does not change.
    if (coord.chunked.chunks == 0 && caller_state.data != nullptr)
      load_state(A, caller_state, coord, p.shape, slot);
    store_state(p.last_chunk_start[coord.memory], A, coord, p.shape, slot);
  }

 protected:
  __device__ PrecomputedTile<Token> token(int stage, typename Storage::TokenTile which) const {
    const Token tile = storage.token(stage, which);
    return {tile, shared_address(tile.data), lane_place};
  }

  // Loads the inputs of the current tile to registers. Without a tile it loads unspecified data and does not
  // wait.
  __device__ void load_tile(bool has_tile = true) {
    const int s = token_pipe.stage;
    if (has_tile) wait(storage.full() + s, token_pipe.phase);
    const auto& scalars = storage.scalars(s);
    inputs.tile_flags = scalars.tile_flags, inputs.rows = scalars.rows[row];
    if constexpr (kPrefetch) {
      load_blocks(inputs.x, token(s, Storage::kX));
      load_block(inputs.a, token(s, Storage::kA), 0, slot);
    }
  }

  // Passes the memory before a chunk to the output warps and to the warp that stores memories.
  __device__ void store_memory() {
    wait(storage.memory_empty() + memory_pipe.stage, memory_pipe.phase ^ 1);
    store_b_fragment(storage.memory(memory_pipe.stage), slot, 0, chunk_start);
    arrive_warp(storage.memory_full() + memory_pipe.stage);
    memory_pipe.next(Storage::kMemoryStages);
  }
  // A <- e^{L_C} A
  __device__ void apply_decay() {
    if (inputs.rows.decay != 1.f) scale_rows(A, {inputs.rows.decay, inputs.rows.decay});
  }

  // The current tile starts a chunk that began in an earlier call (A' is not A), or a chunk that stays
  // incomplete.
  __device__ bool is_special_chunk() const {
    return (inputs.tile_flags & Storage::kChunkStart) &&
           (inputs.tile_flags & (Storage::kIncompleteChunk | Storage::kResumedChunk));
  }
  __device__ void begin_special_chunk() {
    const bool is_incomplete = inputs.tile_flags & Storage::kIncompleteChunk;
    const OutputTensor<4>& left = p.last_chunk_start[coord.memory];
    round_to_b_fragment<T>(chunk_start, A);
    store_memory();
    if (inputs.tile_flags & Storage::kResumedChunk) {
      Accumulator<N> caller_state;
      load_state(caller_state, p.chunk_start[coord.memory], coord, p.shape, slot);
      round_to_b_fragment<T>(chunk_start, caller_state);
      if (is_incomplete) store_state(left, caller_state, coord, p.shape, slot);
    } else {
      store_state(left, A, coord, p.shape, slot);
    }
    apply_decay();
    inputs.tile_flags &= ~Storage::kChunkStart;
  }

  // Moments of a row: one entry for each warp. With a weight, which needs further sums, the total over all
  // warps.
  struct RowMoments {
    Moments parts[kHasWeight ? 1 : kWarps], scaled;
  };
  // Stores the moments over the warp's slots for both rows of the lane, for all warps.
  __device__ void store_moments(const Accumulator<2>& y, const Accumulator<2>& a) const {
    Moments own[2];
    compute_moments(own, phi, y, a, map_slots);
    const int which = lane_moment;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      storage.moments(tiles, which, row + 8 * half)[warp ^ which] = component(own[half], which);
    }
    if constexpr (kHasWeight) {
      compute_weighted_moments(own, weights, y, a);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        storage.weighted_moments(tiles, which, row + 8 * half)[warp ^ which] = component(own[half], which);
      }
    }
  }
  __device__ static float sum_of_warps(const float* parts) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; w += 4) {
      const float4 four = *reinterpret_cast<const float4*>(parts + w);
      sum += (four.x + four.y) + (four.z + four.w);
    }
    return sum;
  }
  __device__ void load_moments(RowMoments (&sums)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int which = 0; which < ActivationMap::kMoments; ++which) {
        const float* const parts = storage.moments(tiles, which, row + 8 * half);
        if constexpr (kHasWeight) {
          component(sums[half].parts[0], which) = sum_of_warps(parts);
          component(sums[half].scaled, which) =
              sum_of_warps(storage.weighted_moments(tiles, which, row + 8 * half));
        } else {
#pragma unroll
          for (int w = 0; w < kWarps; w += 4) {
            const float4 four = *reinterpret_cast<const float4*>(parts + w);
#pragma unroll
            for (int i = 0; i < 4; ++i)
              component(sums[half].parts[w + (i ^ which)], which) = component(four, i);
          }
        }
      }
    }
    ++tiles;
  }

  // From z and a: z rounded to T, y, its slope, and the warp's moments. y is computed from the rounded z,
  // because backward loads the rounded z.
  __device__ void begin_update(Accumulator<2>& u, Accumulator<2>& slope, const Accumulator<2>& a,
                               AFragment<1>& z) const {
    round_to_a_fragment<T>(z, u);
    unpack<T>(u, z.at[0]);
    activate<T>(phi, u, slope);
    store_moments(u, a);
  }
  // Fits of both rows of the lane.
  __device__ void compute_row_stats(MapStats (&row_stats)[2], WeightedMapStats (&weighted_stats)[2],
                                    const RowMoments (&sums)[2], const float (&sum_a)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kHasWeight) {
        row_stats[half] = compute_weighted_stats(phi, sums[half].parts[0], sums[half].scaled, weights.square,
                                                 weighted_stats[half]);
      } else {
        row_stats[half] = compute_stats(phi, sums[half].parts, sum_a[half]);
      }
    }
  }
  // U = J_phi(Z)^T (phi(Z) - a), rounded, and U^T as an A fragment.
  __device__ void finish_update(Accumulator<2>& u, const Accumulator<2>& slope, const Accumulator<2>& a,
                                const MapStats (&row_stats)[2], AFragment<1>& rounded,
                                uint32_t (&transposed)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kHasWeight) {
        compute_weighted_residual(u, slope, a, weights, row_stats[half], half);
      } else {
        compute_residual(phi, u, slope, a, row_stats[half], half);
      }
    }
    round_to_a_fragment<T>(rounded, u);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      rounded.at[0][2 * n] &= slot_masks[n], rounded.at[0][2 * n + 1] &= slot_masks[n];
      transposed[n] = transpose_pairs(rounded.at[0][2 * n]);
      transposed[2 + n] = transpose_pairs(rounded.at[0][2 * n + 1]);
    }
  }
  // Stores u, z in place of a, and the fits for the output warps.
  __device__ void store_u(int s, const AFragment<1>& u, const AFragment<1>& z, const MapStats (&row_stats)[2],
                          const WeightedMapStats (&weighted_stats)[2]) const {
    store_block(token(s, Storage::kU), 0, slot, u.at[0]);
    store_block(token(s, Storage::kA), 0, slot, z.at[0]);
    if (stores_stats) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        storage.scalars(s).row_stats[row + 8 * half] = row_stats[half];
        if constexpr (kHasWeight) storage.weighted_row_stats(s)[row + 8 * half] = weighted_stats[half];
      }
    }
    arrive_warp(storage.u_full() + s);
  }

  // Processes a tile. Returns whether there is another.
  __device__ bool step() {
    const int s = token_pipe.stage;
    const bool enters = inputs.tile_flags & Storage::kChunkStart,
               has_more = !(inputs.tile_flags & Storage::kSequenceEnd);
    if (enters) round_to_b_fragment<T>(chunk_start, A);

    // Z = X A'^T
    Accumulator<2> u, slope, a;
    if constexpr (kPrefetch) {
      multiply_transposed<T>(u, inputs.x, chunk_start);
    } else {
      multiply_transposed<T>(u, token(s, Storage::kX), chunk_start);
    }
    // Overlaps with the product.
    if (enters) store_memory(), apply_decay();
    if constexpr (kPrefetch) {
      unpack<T>(a, inputs.a);
    } else {
      load_wide<T>(a, token(s, Storage::kA), 0, slot);
    }
    multiply_by_weight(a, weights);
    AFragment<1> z;
    begin_update(u, slope, a, z);
    RowMoments sums[2];
    const float sum_a[2] = {inputs.rows.sum_a[0], inputs.rows.sum_a[1]};
    named_barrier_sync(1, 32 * kWarps);
    load_moments(sums);
    token_pipe.next(Storage::kStages);
    // Overlaps with the sums: the operands of the next products.
    BFragment<K> scaled;
    if constexpr (kPrefetch) {
      load_b_fragment(scaled, token(s, Storage::kScaled));
      load_tile(has_more);
    }
    MapStats row_stats[2];
    WeightedMapStats weighted_stats[2];
    compute_row_stats(row_stats, weighted_stats, sums, sum_a);
    AFragment<1> rounded;
    uint32_t step[4];
    finish_update(u, slope, a, row_stats, rounded, step);

    // A <- e^{L_C} A - (U * gamma e^{L_C - L})^T X
    if constexpr (kPrefetch) {
      add_product<T>(A, step, scaled);
    } else {
      add_product<T>(A, step, token(s, Storage::kScaled), 0);
    }

    store_u(s, rounded, z, row_stats, weighted_stats);
    return has_more;
  }
};

}  // namespace girih::kernels
