// State warps of the reverse scan. G is the gradient of A at the end of a chunk, and (l, w) are the reads of
// A:
//
//     dU_i = intra_i - gamma_i e^{L_C - L_i} G x_i         dZ_i = (Hessian of E at z_i) dU_i
//     G   <- e^{L_C} G + sum over t of e^{L_t} l_t w_t^T + dZ^T X
//
// intra_i is the term of the reads in the chunk (reverse_producer_warps.cuh). G is transposed in registers:
// rows are columns of A, and columns are the warp's slots.
#pragma once

#include "trellis/map_gradients.cuh"
#include "trellis/reverse_registers.cuh"
#include "trellis/reverse_storage.cuh"

namespace girih::kernels {

// state += y^T x in global memory, for the gradient of an argument A'.
template <typename T, int K, class Tile, int S>
__device__ inline void add_to_state(const OutputTensor<4>& state, const SlotFragment<S>& y, const Tile& x,
                                    const TrellisBlockCoord& coord, const TrellisShape& shape, int slot) {
#pragma unroll 1
  for (int k = 0; k < K; ++k) {
    Accumulator<S> sums;
    fill(sums, 0.f);
    add_outer_product_block<T>(sums, x, 16 * k, y);
    for_each_element<true, S>(state, coord, shape, 16 * k, slot, [&](int n, int i, int64_t offset) {
      static_cast<float*>(state.data)[offset] += sums.at[n][i];
    });
  }
}

// Inputs of a tile that do not depend on G, for the warp's slots.
template <int S>
struct TileInputs {
  Accumulator<S> y, slope, curvature_term;
  SlotFragment<S> a, intra_du;  // packed, to save registers
  MapStats row_stats[2];
  float2 x_scale;

  template <typename T, class Phi, class Storage, class Weights>
  __device__ void load(const Phi& phi, const Storage& storage, int s, int slot, const Weights& weights) {
    const auto& scalars = storage.scalars(s);
    SlotFragment<S> z;
    Accumulator<S> target;
    load_slots(z, storage.stage_tile(s, Storage::kZ), slot);
    load_slots(a, storage.stage_tile(s, Storage::kTargets), slot);
    load_slots(intra_du, storage.stage_tile(s, Storage::kIntraDu), slot);
    unpack<T>(y, z);
    unpack<T>(target, a);
    x_scale = {scalars.x_scale[lane_row()], scalars.x_scale[lane_row() + 8]};
    row_stats[0] = scalars.row_stats[lane_row()], row_stats[1] = scalars.row_stats[lane_row() + 8];
    activate<T>(phi, y, slope, &curvature_term);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (Phi::has_weight) {
        if (half == 0) multiply_by_weight(target, weights);
        compute_weighted_curvature_term(curvature_term, y, target, weights, row_stats[half], half);
      } else {
        compute_curvature_term(curvature_term, y, target, row_stats[half], half);
      }
    }
  }
};

// Loads G at the end of the sequence. If there are positions, also initialises the gradient of the argument
// A' (dchunk_start), which is not a term of dA.
template <int K, int S>
__device__ inline void load_final_gradient(TransposedGradient<K, S>& G, const TrellisReverse& p,
                                           const TrellisBlockCoord& coord, bool ends_incomplete, int slot) {
  const TrellisShape& shape = p.shape;
  const int memory = coord.memory;
  const bool has_positions = p.dchunk_start[memory].data != nullptr;
  clear(G);
  add_state(G, p.dlast[memory], coord, shape, slot);
  // A' of the final state is A if the last chunk is complete, and the caller's A' if there are no tokens.
  const int64_t chunks = coord.chunked.chunks;
  if (chunks > 0 ? !ends_incomplete : !has_positions)
    add_state(G, p.dlast_chunk_start[memory], coord, shape, slot);
  if (!has_positions) return;
  TransposedGradient<K, S> start_gradient;
  clear(start_gradient);
  if (chunks == 0 || (chunks == 1 && ends_incomplete))
    add_state(start_gradient, p.dlast_chunk_start[memory], coord, shape, slot);
  store_state(p.dchunk_start[memory], start_gradient, coord, shape, slot);
}

// HasOneTile: a chunk has at most one tile. Its output warp waits for dz_full, which also covers G.
template <typename T, int Width, class Phi, bool HasOneTile>
__device__ inline void run_reverse_state_warp(const TrellisReverse& p, const TrellisBlockCoord& coord,
                                              const TrellisReverseStorage<T, Width>& storage, int warp) {
  using Storage = TrellisReverseStorage<T, Width>;
  constexpr int K = Width / 16, kWarps = Storage::kStateWarps, S = Width / kWarps / 8;
  constexpr bool kPrefetch = Storage::kPrefetch;
  const TrellisShape& shape = p.shape;
  const int memory = coord.memory, slot = 8 * S * warp, own_row = lane_row() + 8 * (lane() & 1);
  const Phi phi(shape.phi, shape.slots);
  const MapSlots map_slots{slot, shape.slots};
  uint32_t slot_masks[S];
#pragma unroll
  for (int n = 0; n < S; ++n) slot_masks[n] = map_slots.pair_mask(n);
  // The gradient of phi's weight is summed over the tokens.
  const std::conditional_t<Phi::has_weight, Weights<S>, NoWeights> weights(p.weight + coord.head * shape.M,
                                                                           map_slots);
  float dw[S][2] = {};
  const int64_t last = coord.chunked.chunks - 1;
  const bool ends_incomplete = last >= 0 && !chunk_of(shape.grid, coord.chunked, last).is_complete;
  TransposedGradient<K, S> G;
  load_final_gradient(G, p, coord, ends_incomplete, slot);

  // With kPrefetch the next tile is loaded while this tile waits for the sums.
  GradientBFragment<K, S> gradient_operand;  // G at the end of the chunk, rounded
  PipelineState token_pipe, gradient_pipe;
  TileInputs<S> next_tile;
  const auto load_next_tile = [&](const PipelineState& pipe) {
    storage.barriers().full.wait(pipe);
    next_tile.template load<T>(phi, storage, pipe.stage, slot, weights);
  };
  if (kPrefetch && last >= 0) load_next_tile(token_pipe);
  bool has_more = last >= 0;             // whether there are tiles
  bool is_incomplete = ends_incomplete;  // whether the current chunk is the incomplete last one
#pragma unroll 1
  for (unsigned tile_index = 0; has_more; ++tile_index) {
    const int s = token_pipe.stage;
    if (!kPrefetch) load_next_tile(token_pipe);
    const int tile_flags = storage.scalars(s).tile_flags;
    has_more = !(tile_flags & Storage::kFirstTileOfSequence);
    token_pipe.next(Storage::kStages);
    const bool enters_chunk =
        tile_flags & Storage::kLastTileOfChunk;  // tiles are processed from the last one on
    if (enters_chunk) round_to_b_fragment<T>(gradient_operand, G);

    // dU
    Accumulator<S> du, a, intra_du;
    multiply_transposed<T>(du, storage.stage_tile(s, Storage::kX), gradient_operand);
    if (enters_chunk) {
      // Overlaps with the product.
      storage.barriers().gradient_empty.wait(gradient_pipe);
      store_gradient(storage.gradient(gradient_pipe.stage), slot, gradient_operand);
      if (!HasOneTile) storage.barriers().gradient_full.arrive_warp(gradient_pipe.stage);
      gradient_pipe.next(Storage::kMemoryStages);
      const float decay = storage.scalars(s).decay;
      if (decay != 1.f) scale(G, decay);
    }
    const TileInputs<S> tile = next_tile;
    unpack<T>(a, tile.a);
    unpack<T>(intra_du, tile.intra_du);
#pragma unroll
    for (int n = 0; n < S; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        du.at[n][e] = fmaf(e < 2 ? tile.x_scale.x : tile.x_scale.y, du.at[n][e], intra_du.at[n][e]);
      }
    }
    // Sums of both rows over the quad: each lane gets the sums of one row.
    float4* partial_sums = storage.partial_sums(tile_index);
    float4 weighted_stats[2];
    if constexpr (Phi::has_weight) {
      multiply_by_weight(a, weights);
      float4 sums[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        weighted_stats[half] = storage.weighted_row_stats(s)[lane_row() + 8 * half];
        sums[half] =
            compute_weighted_jacobian_sums(du, tile.y, tile.slope, a, weights, tile.row_stats[half], half);
      }
      const float4 own = reduce_rows(sums);
      if ((lane() & 2) == 0) partial_sums[warp * kTokenTile + own_row] = own;
    } else {
      const float3 sums[2] = {compute_jacobian_sums(phi, du, tile.y, tile.slope, a, tile.row_stats[0], 0),
                              compute_jacobian_sums(phi, du, tile.y, tile.slope, a, tile.row_stats[1], 1)};
      const float3 own = reduce_rows(sums);
      if ((lane() & 2) == 0) partial_sums[warp * kTokenTile + own_row] = {own.x, own.y, own.z, 0.f};
    }

    // G += sum over t of e^{L_t} l_t w_t^T, and the loads of the next tile, overlap with the wait for the
    // other warps
    SlotFragment<S> scaled_l;
    load_slots_as_b(scaled_l, storage.stage_tile(s, Storage::kScaledL), slot);
    add_outer_product<T>(G, storage.stage_tile(s, Storage::kW), scaled_l);
    if (kPrefetch && has_more) load_next_tile(token_pipe);

    // dZ, and J dU
    Accumulator<S> j_du = du;
    named_barrier_sync(1, 32 * kWarps);
    std::conditional_t<Phi::has_weight, float4, float3> row_total{}, row_totals[2];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float4 warp_sums = partial_sums[w * kTokenTile + own_row];
      row_total.x += warp_sums.x, row_total.y += warp_sums.y, row_total.z += warp_sums.z;
      if constexpr (Phi::has_weight) row_total.w += warp_sums.w;
    }
    unpack<T>(a, tile.a);
    exchange_rows(row_totals, row_total);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (Phi::has_weight) {
        apply_weighted_hessian(phi, du, j_du, dw, tile.y, tile.slope, tile.curvature_term, a, weights,
                               tile.row_stats[half], weighted_stats[half], row_totals[half], half);
      } else {
        apply_jacobian(phi, j_du, tile.y, tile.slope, tile.row_stats[half], row_totals[half], half);
        apply_hessian(phi, du, tile.y, tile.slope, tile.curvature_term, a, tile.row_stats[half],
                      row_totals[half], half);
      }
    }
    // G += dZ^T X
    SlotFragment<S> dz, da;
    round_to_slots<T>(dz, du);
    clear_padding(dz, slot_masks);
    const SlotFragment<S> dz_b = to_b_fragment(dz);
    if (tile_flags & Storage::kResumedChunk) {
      add_to_state<T, K>(p.dchunk_start[memory], dz_b, storage.stage_tile(s, Storage::kX), coord, shape,
                         slot);
    } else {
      add_outer_product<T>(G, storage.stage_tile(s, Storage::kX), dz_b);
    }
    // The warp has loaded its slots of z and a, and overwrites these.
    store_slots(storage.stage_tile(s, Storage::kZ), slot, dz);
    round_to_slots<T>(da, j_du);
#pragma unroll
    for (int i = 0; i < 2 * S; ++i) da.at[i] ^= 0x80008000u;  // da = -J dU: both signs of a pair
    store_slots(storage.stage_tile(s, Storage::kTargets), slot, da);
    storage.barriers().dz_full.arrive_warp(s);
    if (is_incomplete && tile_flags & Storage::kFirstTileOfChunk) {
      if (!(tile_flags & Storage::kResumedChunk))
        add_state(G, p.dlast_chunk_start[memory], coord, shape, slot);
      is_incomplete = false;
    }
  }
  store_state(p.dinitial[memory], G, coord, shape, slot);
  if constexpr (Phi::has_weight) {
    float* const to = p.dweight + (coord.sequence * shape.heads + coord.head) * shape.M + slot;
#pragma unroll
    for (int n = 0; n < S; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = sum_over_col(dw[n][i]);
        if (lane_row() == 0 && map_slots.has(n, i)) to[8 * n + lane_col() + i] = sum;
      }
    }
  }
}

}  // namespace girih::kernels
