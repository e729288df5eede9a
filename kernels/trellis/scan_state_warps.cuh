// State warps of the scan: update one memory chunk by chunk. For every tile of a chunk,
//
//     Z = X A'^T     U = J_phi(Z)^T (phi(Z) - a)     A <- A + U^T X~     X~_t = -gamma_t e^{L_C - L_t} x_t
//
// The first tile of a chunk also scales A by e^{L_C}. Producer warps compute X~.
//
// Width / 16 warps hold the memory; a warp has 16 slots. A row of z is distributed over all of these warps,
// so the sums of its norm are exchanged once through shared memory.
#pragma once

#include "trellis/scan_storage.cuh"

namespace girih::kernels {

template <typename T, int Width, class Phi>
class TrellisScanStateWarp {
 protected:
  using Storage = TrellisScanStorage<T, Width>;
  using StageTile = typename Storage::StageTile;
  static constexpr int N = Width / 8, K = Width / 16, kWarps = Storage::kStateWarps;
  static constexpr bool kHasWeight = Phi::has_weight;
  // kPrefetch, where registers suffice: the tokens of the next tile are loaded to registers while the current
  // tile waits for its sums. Then u of a tile is stored after the next tile is full, so the ring has one more
  // stage.
  static constexpr bool kPrefetch = Width == 64;
  static_assert(!kPrefetch || Storage::kStages > Storage::kProducerWarps + Storage::kOutputWarps);

  const TrellisScan& p;
  const TrellisBlockCoord& coord;
  const Storage& storage;
  const Phi phi;
  const int warp, slot;
  int row, lane_moment;  // the lane's first row, and the moment that the lane stores
  const MapSlots map_slots;
  const std::conditional_t<kHasWeight, Weights<2>, NoWeights> weights;
  const bool stores_stats;
  uint32_t lane_offset, slot_masks[2];  // see PrecomputedTile; masks of the slots that exist
  Accumulator<N> A;
  // The rounded A before the chunk, which store_memory() stores, and then the rounded A', the right factor of
  // Z. A' differs from A only in a chunk that began in an earlier call.
  BFragment<K> A_rounded;
  PipelineState token_pipe, memory_pipe;
  unsigned tile_index = 0;  // of the sequence
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
        lane_offset(sizeof(T) * StageTile::offset(0, 0, lane() & 15, (lane() >> 4) * 8)),
        slot_masks{map_slots.pair_mask(0), map_slots.pair_mask(1)} {
    // Keeps these values in registers; otherwise the compiler recomputes them for every tile.
    ptx::make_opaque(lane_offset, slot_masks[0], slot_masks[1], row, lane_moment);
  }

  __device__ void run() {
    const InputTensor<4>& chunk_start = p.chunk_start[coord.memory];
    load_state(A, p.initial[coord.memory], coord, p.shape, slot);
    bool has_more = coord.chunked.chunks > 0, is_incomplete = false;
    if (kPrefetch && has_more) load_tile();
#pragma unroll 1
    while (has_more) {
      if constexpr (!kPrefetch) load_tile();
      if (is_special_chunk()) begin_special_chunk();
#pragma unroll 1
      do {  // until a special chunk begins; without kPrefetch the flags of the next tile are not yet loaded
        is_incomplete = inputs.tile_flags & Storage::kIncompleteChunk;
        has_more = process_tile();
      } while (kPrefetch && has_more && !is_special_chunk());
    }
    store_state(p.last[coord.memory], A, coord, p.shape, slot);
    if (is_incomplete) return;
    // The last chunk is complete: A' of the next token is A. Without tokens A' does not change.
    if (coord.chunked.chunks == 0 && chunk_start.data != nullptr)
      load_state(A, chunk_start, coord, p.shape, slot);
    store_state(p.last_chunk_start[coord.memory], A, coord, p.shape, slot);
  }

 protected:
  __device__ PrecomputedTile<StageTile> stage_tile(int stage, typename Storage::StageTensor tensor) const {
    const StageTile tile = storage.stage_tile(stage, tensor);
    return {tile, shared_address(tile.data), lane_offset};
  }

  // Loads the inputs of the current tile to registers. Without a tile it loads unspecified data and does not
  // wait.
  __device__ void load_tile(bool has_tile = true) {
    const int s = token_pipe.stage;
    if (has_tile) storage.barriers().full.wait(token_pipe);
    const auto& scalars = storage.scalars(s);
    inputs.tile_flags = scalars.tile_flags, inputs.rows = scalars.rows[row];
    if constexpr (kPrefetch) {
      load_blocks(inputs.x, stage_tile(s, Storage::kX));
      load_block(inputs.a, stage_tile(s, Storage::kTargets), 0, slot);
    }
  }

  // Passes the memory before a chunk to the output warps and to the warp that stores memories.
  __device__ void store_memory() {
    storage.barriers().memory_empty.wait(memory_pipe);
    store_b_fragment(storage.memory(memory_pipe.stage), slot, 0, A_rounded);
    storage.barriers().memory_full.arrive_warp(memory_pipe.stage);
    memory_pipe.next(Storage::kMemoryStages);
  }
  // A <- e^{L_C} A
  __device__ void apply_decay() {
    if (inputs.rows.decay != 1.f) scale_rows(A, {inputs.rows.decay, inputs.rows.decay});
  }

  // A special chunk is a chunk whose A' is an argument (it may have begun in an earlier call), or a chunk
  // that stays incomplete. True if the current tile is the first of a special chunk.
  __device__ bool is_special_chunk() const {
    return (inputs.tile_flags & Storage::kFirstTileOfChunk) &&
           (inputs.tile_flags & (Storage::kIncompleteChunk | Storage::kResumedChunk));
  }
  __device__ void begin_special_chunk() {
    const bool is_incomplete = inputs.tile_flags & Storage::kIncompleteChunk;
    const OutputTensor<4>& last_chunk_start = p.last_chunk_start[coord.memory];
    round_to_b_fragment<T>(A_rounded, A);
    store_memory();
    if (inputs.tile_flags & Storage::kResumedChunk) {
      Accumulator<N> chunk_start;
      load_state(chunk_start, p.chunk_start[coord.memory], coord, p.shape, slot);
      round_to_b_fragment<T>(A_rounded, chunk_start);
      if (is_incomplete) store_state(last_chunk_start, chunk_start, coord, p.shape, slot);
    } else {
      store_state(last_chunk_start, A, coord, p.shape, slot);
    }
    apply_decay();
    inputs.tile_flags &= ~Storage::kFirstTileOfChunk;
  }

  // Moments of a row: one entry for each warp; with a weight, which needs further sums, one entry for the sum
  // over the warps.
  struct RowMoments {
    Moments parts[kHasWeight ? 1 : kWarps], weighted;
  };
  // Stores the moments over the warp's slots for both rows of the lane, for all warps.
  __device__ void store_moments(const Accumulator<2>& y, const Accumulator<2>& a) const {
    Moments rows[2];
    compute_moments(rows, phi, y, a, map_slots);
    const int moment = lane_moment;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      storage.moments(tile_index, moment, row + 8 * half)[warp ^ moment] = component(rows[half], moment);
    }
    if constexpr (kHasWeight) {
      compute_weighted_moments(rows, weights, y, a);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        storage.weighted_moments(tile_index, moment, row + 8 * half)[warp ^ moment] =
            component(rows[half], moment);
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
      for (int moment = 0; moment < Phi::kMoments; ++moment) {
        const float* const parts = storage.moments(tile_index, moment, row + 8 * half);
        if constexpr (kHasWeight) {
          component(sums[half].parts[0], moment) = sum_of_warps(parts);
          component(sums[half].weighted, moment) =
              sum_of_warps(storage.weighted_moments(tile_index, moment, row + 8 * half));
        } else {
#pragma unroll
          for (int w = 0; w < kWarps; w += 4) {
            const float4 four = *reinterpret_cast<const float4*>(parts + w);
#pragma unroll
            for (int i = 0; i < 4; ++i)
              component(sums[half].parts[w + (i ^ moment)], moment) = component(four, i);
          }
        }
      }
    }
    ++tile_index;
  }

  // Replaces y = z by y = silu(z) or z, and computes its slope, z rounded to T, and the warp's moments. y is
  // computed from the rounded z, because backward loads the rounded z.
  __device__ void begin_update(Accumulator<2>& y, Accumulator<2>& slope, AFragment<1>& rounded_z,
                               const Accumulator<2>& a) const {
    round_to_a_fragment<T>(rounded_z, y);
    unpack<T>(y, rounded_z.at[0]);
    activate<T>(phi, y, slope);
    store_moments(y, a);
  }
  // Statistics of both rows of the lane.
  __device__ void compute_row_stats(MapStats (&row_stats)[2], WeightedMapStats (&weighted_stats)[2],
                                    const RowMoments (&sums)[2], const float (&sum_a)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kHasWeight) {
        row_stats[half] = compute_weighted_stats(phi, sums[half].parts[0], sums[half].weighted,
                                                 weights.square, weighted_stats[half]);
      } else {
        row_stats[half] = compute_stats(phi, sums[half].parts, sum_a[half]);
      }
    }
  }
  // Replaces y by U = J_phi(Z)^T (phi(Z) - a), and computes U rounded, and U^T as an A fragment.
  __device__ void finish_update(Accumulator<2>& y, const Accumulator<2>& slope, const Accumulator<2>& a,
                                const MapStats (&row_stats)[2], AFragment<1>& rounded_u,
                                uint32_t (&u_transposed)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kHasWeight) {
        compute_weighted_residual(y, slope, a, weights, row_stats[half], half);
      } else {
        compute_residual(phi, y, slope, a, row_stats[half], half);
      }
    }
    round_to_a_fragment<T>(rounded_u, y);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      rounded_u.at[0][2 * n] &= slot_masks[n], rounded_u.at[0][2 * n + 1] &= slot_masks[n];
      u_transposed[n] = transpose_pairs(rounded_u.at[0][2 * n]);
      u_transposed[2 + n] = transpose_pairs(rounded_u.at[0][2 * n + 1]);
    }
  }
  // Stores u, z in place of a, and the row statistics, for the output warps.
  __device__ void store_u(int s, const AFragment<1>& u, const AFragment<1>& z, const MapStats (&row_stats)[2],
                          const WeightedMapStats (&weighted_stats)[2]) const {
    store_block(stage_tile(s, Storage::kU), 0, slot, u.at[0]);
    store_block(stage_tile(s, Storage::kTargets), 0, slot, z.at[0]);
    if (stores_stats) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        storage.scalars(s).row_stats[row + 8 * half] = row_stats[half];
        if constexpr (kHasWeight) storage.weighted_row_stats(s)[row + 8 * half] = weighted_stats[half];
      }
    }
    storage.barriers().u_full.arrive_warp(s);
  }

  // Processes a tile. Returns whether there is another.
  __device__ bool process_tile() {
    const int s = token_pipe.stage;
    const bool begins_chunk = inputs.tile_flags & Storage::kFirstTileOfChunk,
               has_more = !(inputs.tile_flags & Storage::kLastTileOfSequence);
    if (begins_chunk) round_to_b_fragment<T>(A_rounded, A);

    // Z = X A'^T; y is z, then silu(z) or z, then u
    Accumulator<2> y, slope, a;
    if constexpr (kPrefetch) {
      multiply_transposed<T>(y, inputs.x, A_rounded);
    } else {
      multiply_transposed<T>(y, stage_tile(s, Storage::kX), A_rounded);
    }
    // Overlaps with the product.
    if (begins_chunk) store_memory(), apply_decay();
    if constexpr (kPrefetch) {
      unpack<T>(a, inputs.a);
    } else {
      load_block_fp32<T>(a, stage_tile(s, Storage::kTargets), 0, slot);
    }
    multiply_by_weight(a, weights);
    AFragment<1> rounded_z;
    begin_update(y, slope, rounded_z, a);
    RowMoments sums[2];
    const float sum_a[2] = {inputs.rows.sum_a[0], inputs.rows.sum_a[1]};
    named_barrier_sync(1, 32 * kWarps);
    load_moments(sums);
    token_pipe.next(Storage::kStages);
    // Overlaps with the sums: the operands of the next products.
    BFragment<K> scaled_x;
    if constexpr (kPrefetch) {
      load_b_fragment(scaled_x, stage_tile(s, Storage::kScaledX));
      load_tile(has_more);
    }
    MapStats row_stats[2];
    WeightedMapStats weighted_stats[2];
    compute_row_stats(row_stats, weighted_stats, sums, sum_a);
    AFragment<1> rounded_u;
    uint32_t u_transposed[4];
    finish_update(y, slope, a, row_stats, rounded_u, u_transposed);

    // A += U^T X~; the first tile of the chunk has scaled A
    if constexpr (kPrefetch) {
      add_product<T>(A, u_transposed, scaled_x);
    } else {
      add_product<T>(A, u_transposed, stage_tile(s, Storage::kScaledX), 0);
    }

    store_u(s, rounded_u, rounded_z, row_stats, weighted_stats);
    return has_more;
  }
};

}  // namespace girih::kernels
