// State warps of the scan for chunks of at most one tile: they compute one chunk ahead.
//
// The z of the next chunk depends on the current u only through a product with 16 x 16 scores, which producer
// warps compute:
//
//     A <- e^{L_C} A + U^T X~            X~_t = -gamma_t e^{L_C - L_t} x_t
//     Z_next = e^{L_C} X_next A^T + (X_next X~^T) U            A: before the update
//
// The term with A is computed before U is. So neither the rounding of the next A nor a product with the next
// A is on the critical path between one U and the next.
#pragma once

#include "trellis/scan_state_warps.cuh"

namespace girih::kernels {

template <typename T, int Width, class Phi>
class TrellisLookaheadScanStateWarp : TrellisScanStateWarp<T, Width, Phi> {
  using Base = TrellisScanStateWarp<T, Width, Phi>;
  using Base::A, Base::A_rounded, Base::inputs, Base::token_pipe, Base::p, Base::coord, Base::storage,
      Base::slot;
  using Base::K, Base::kWarps, Base::N, Base::phi, Base::stage_tile;
  using typename Base::Storage;
  static_assert(Storage::kHasLookahead && Base::kPrefetch);

  // y, its slope and the rounded z of the current chunk. `inputs` has a and the scalars of the current chunk,
  // and X of the next chunk.
  Accumulator<2> y, slope;
  AFragment<1> rounded_z;
  // Masks of the lane's slots, as rows of U^T (Base::slot_masks has columns of U). Padding is zero already:
  // the AND copies U^T once to registers in the order of an A fragment. Without it the compiler copies the
  // registers for every product, because U as B fragment needs them in another order.
  uint32_t slot_masks[2];

 public:
  __device__ TrellisLookaheadScanStateWarp(const TrellisScan& p, const TrellisBlockCoord& coord,
                                           const Storage& storage, int warp)
      : Base(p, coord, storage, warp) {
#pragma unroll
    for (int i = 0; i < 2; ++i) slot_masks[i] = slot + lane_row() + 8 * i < p.shape.slots ? ~0u : 0u;
    ptx::make_opaque(slot_masks[0], slot_masks[1]);
  }

  __device__ void run() {
    const int chunks = static_cast<int>(coord.chunked.chunks);
    // 0, or 1 if the last chunk is incomplete
    const int incomplete_chunks =
        chunks > 0 && !chunk_of(p.shape.grid, coord.chunked, chunks - 1).is_complete ? 1 : 0;
    const bool has_chunk_start = p.chunk_start[coord.memory].data != nullptr;
    load_state(A, p.initial[coord.memory], coord, p.shape, slot);
    if (chunks > 0) begin_sequence(chunks, has_chunk_start);
#pragma unroll 1
    for (int remaining = chunks; remaining > 0;) {  // the complete chunks, then the incomplete one
      if (remaining == incomplete_chunks) store_chunk_start(chunks == 1 && has_chunk_start);
#pragma unroll 1
      do {
        process_chunk(remaining);
      } while (--remaining > incomplete_chunks);
    }
    store_state(p.last[coord.memory], A, coord, p.shape, slot);
    // The last chunk is complete: A' of the next token is A. Without tokens A' does not change.
    if (incomplete_chunks == 0) store_chunk_start(chunks == 0 && has_chunk_start);
  }

 private:
  // Stores A' of the chunk of the next token: the argument A', or A.
  __device__ void store_chunk_start(bool use_argument) const {
    Accumulator<N> A = this->A;
    if (use_argument) load_state(A, p.chunk_start[coord.memory], coord, p.shape, slot);
    store_state(p.last_chunk_start[coord.memory], A, coord, p.shape, slot);
  }

  // Computes z of the chunk in which the sequence starts. If that chunk began in an earlier call, A' is not
  // A.
  __device__ void begin_sequence(int chunks, bool has_chunk_start) {
    Accumulator<N> chunk_start = A;
    if (has_chunk_start) load_state(chunk_start, p.chunk_start[coord.memory], coord, p.shape, slot);
    round_to_b_fragment<T>(A_rounded, chunk_start);
    storage.barriers().full.wait({});
    load_blocks(inputs.x, stage_tile(0, Storage::kX));
    Accumulator<2> z;
    compute_z(z);
    load_targets();
    begin_chunk(z);
    load_next_x(chunks > 1);
  }

  // z = X A^T with the rounded A. One chain of products is fast enough: in process_chunk() it overlaps with
  // the exchange of moments.
  __device__ void compute_z(Accumulator<2>& z) const {
    fill(z, 0.f);
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int j = 0; j < 2; ++j)
        mma<T>(z.at[j], inputs.x.at[k], A_rounded.at[k][2 * j], A_rounded.at[k][2 * j + 1]);
    }
  }

  // Loads a and the scalars of the current chunk, which is full, if there is one.
  __device__ void load_targets() {
    inputs.rows = storage.scalars(token_pipe.stage).rows[this->row];
    load_block(inputs.a, stage_tile(token_pipe.stage, Storage::kTargets), 0, slot);
  }
  // Computes the current chunk up to the moments of the warp.
  __device__ void begin_chunk(const Accumulator<2>& z) {
    Accumulator<2> a;
    unpack<T>(a, inputs.a);
    multiply_by_weight(a, this->weights);
    y = z;
    this->begin_update(y, slope, rounded_z, a);
  }
  // Loads X of the next chunk; unspecified data if there is none.
  __device__ void load_next_x(bool has_next) {
    PipelineState next = token_pipe;
    next.next(Storage::kStages);
    if (has_next) storage.barriers().full.wait(next);
    load_blocks(inputs.x, stage_tile(next.stage, Storage::kX));
  }

  // Processes a chunk from its moments to the moments of the next chunk. `remaining` chunks include this one.
  // After the last chunk the results of the next chunk are unspecified and unused.
  __device__ void process_chunk(int remaining) {
    const int s = token_pipe.stage;
    const float decay = inputs.rows.decay;

    // Overlaps with the exchange of moments: the term of A in the next z, and the rounded A.
    Accumulator<2> z, a;
    round_to_b_fragment<T>(A_rounded, A);
    compute_z(z);
    token_pipe.next(Storage::kStages);
    const uint4 scores = storage.scores(token_pipe.stage);
    named_barrier_sync(1, 32 * kWarps);
    typename Base::RowMoments sums[2];
    this->load_moments(sums);
    this->store_memory();
    scale_rows(A, {decay, decay});
    scale_rows(z, {decay, decay});
    MapStats row_stats[2];
    WeightedMapStats weighted_stats[2];
    this->compute_row_stats(row_stats, weighted_stats, sums, inputs.rows.sum_a);
    AFragment<1> rounded_u;
    uint32_t u_transposed[4];
    unpack<T>(a, inputs.a);
    multiply_by_weight(a, this->weights);
    load_targets();
    this->finish_update(y, slope, a, row_stats, rounded_u, u_transposed);

    // z += (X_next X~^T) U; the registers of U^T as an A fragment are also those of U as a B fragment
    const uint32_t scores_a[4] = {scores.x, scores.y, scores.z, scores.w};
#pragma unroll
    for (int j = 0; j < 2; ++j) mma<T>(z.at[j], scores_a, u_transposed[j], u_transposed[2 + j]);
    // Loads X~ after the next z is computed, and before store_u(): then an output warp may overwrite X~ with
    // o.
    BFragment<K> scaled_x;
    load_b_fragment(scaled_x, stage_tile(s, Storage::kScaledX));
    this->store_u(s, rounded_u, rounded_z, row_stats, weighted_stats);
    uint32_t u_transposed_copy[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) u_transposed_copy[i] = u_transposed[i] & slot_masks[i % 2];
    add_product<T>(A, u_transposed_copy, scaled_x);
    begin_chunk(z);
    load_next_x(remaining > 2);
  }
};

}  // namespace girih::kernels
