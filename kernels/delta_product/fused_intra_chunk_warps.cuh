// The intra-chunk warps of scan_fused: P and the factors of X, which do not depend on S, ahead of the state
// warps.
#pragma once

#include "delta_product/fused_storage.cuh"
#include "delta_product/scan_output_warps_transposed.cuh"

namespace girih::kernels::delta_product {

// X <- X diag(beta), or if `is_inverse_weighted` diag(w) X diag(beta); `thread` of 128.
template <typename T>
__device__ inline void scale_inverse(const InverseTile& x, const ChunkFactors& chunk_factors,
                                     bool is_inverse_weighted, int thread) {
  uint4* const packs = reinterpret_cast<uint4*>(const_cast<unsigned char*>(x.data));
#pragma unroll
  for (int i = 0; i < InverseTile::kBytes / 16 / 128; ++i) {
    const int pack = 128 * i + thread, half = pack >= 128;
    // Layout of InverseTile: of 16 columns the first 8 come first, for 32 rows.
    const int row = pack % 32 + 32 * half, col = (pack - 128 * half) / 32 * 8;
    float4 low = *reinterpret_cast<const float4*>(chunk_factors.data + kDeltaBeta * kDeltaChunkRows + col),
           high =
               *reinterpret_cast<const float4*>(chunk_factors.data + kDeltaBeta * kDeltaChunkRows + col + 4);
    if (is_inverse_weighted) {
      const float by = chunk_factors.element(kDeltaWriteFactor, row);
      low = {by * low.x, by * low.y, by * low.z, by * low.w};
      high = {by * high.x, by * high.y, by * high.z, by * high.w};
    }
    const uint4 packed = packs[pack];
    const float2 a = unpack_pair<T>(packed.x), b = unpack_pair<T>(packed.y), c = unpack_pair<T>(packed.z),
                 d = unpack_pair<T>(packed.w);
    packs[pack] = {pack_pair<T>(a.x * low.x, a.y * low.y), pack_pair<T>(b.x * low.z, b.y * low.w),
                   pack_pair<T>(c.x * high.x, c.y * high.y), pack_pair<T>(d.x * high.z, d.y * high.w)};
  }
}

// Warpgroup `group` of the intra-chunk warps; chunks are assigned to warpgroups round-robin.
template <bool HasFactors, typename T, int D, int Rows, int StateGroups>
__device__ inline void run_fused_intra_chunk_warps(const ScanParams& params, const BlockWork& work,
                                                   const FusedStorage<T, D, Rows, StateGroups>& storage,
                                                   int group, int warp) {
  constexpr int kIntraChunkGroups = FusedRoles<StateGroups>::kIntraChunkGroups;
  const DeltaScan& p = params.problem;
  // Tiles of 64 tokens have n = 1.
  const int n = Rows == kDeltaChunkRows ? 1 : p.shape.n;
  FusedBarriers& barriers = storage.barriers();
  const auto sync_group = [&] { named_barrier_sync(1 + group, 128); };
  PipelineState key_pipe, query_pipe;
  if (group > 0) key_pipe.skip(group, params.stages), query_pipe.skip(group, params.query_stages);
#pragma unroll 1
  for (int c = group; c < work.chunks; c += kIntraChunkGroups) {
    const auto stage = storage.stage(key_pipe.stage);
    const ChunkFactors chunk_factors = stage.prepared().chunk_factors();
    const auto query = storage.query(query_pipe.stage);
    float2* const token_factors = storage.token_factors(key_pipe.stage);
    barriers.full.wait(key_pipe);
    barriers.query_full.wait(query_pipe);
    fence_async_proxy();
    sync_group();

    // K Q^T
    Accumulator<Rows / 8> scores;
    wgmma_fence();
    wgmma_start_transposed<false>(scores, stage.k(), query);
    wgmma_commit();
    const bool has_inverse_lo = stage.prepared().has_inverse_lo();
    const float log_end = HasFactors ? chunk_factors.element(kDeltaLogDecay, kDeltaChunkRows - 1) : 0.f;
    const bool is_inverse_weighted = HasFactors && can_weigh_inverse<T>(has_inverse_lo, log_end);
    if (!has_inverse_lo)
      scale_inverse<T>(stage.inverse(), chunk_factors, is_inverse_weighted,
                       32 * warp + recomputed_lane<StateGroups>());
    if (HasFactors) {
      const int row = 32 * warp + lane() - kDeltaChunkRows;
      if (row >= 0) {  // a_i = rho_i e^{L_i} replaces read_i = beta_i a_i, because X contains beta
        const_cast<float*>(chunk_factors.data)[kDeltaReadFactor * kDeltaChunkRows + row] =
            chunk_factors.element(kDeltaRho, row) * exp2_fast(chunk_factors.element(kDeltaLogDecay, row));
      }
      compute_token_factors(query, p.shape, chunk_factors, warp, [&](int token, float factor, float log) {
        // See FusedStorage::token_factors().
        token_factors[token] =
            is_inverse_weighted ? float2{factor * exp2_fast(log - log_end), 0.f} : float2{factor, log};
        storage.query_factors(query_pipe.stage)[token] = factor * exp2_fast(log);
      });
      sync_group();  // the factors of the tokens are stored
    }
    wgmma_wait<0>(scores);
    const int opaque_n = Rows == kDeltaChunkRows ? 1 : opaque_value(n);
    if (is_inverse_weighted) {
      scale_scores_transposed(scores, opaque_n, warp, [&](int i) {  // P / w
        const float4 two = *reinterpret_cast<const float4*>(token_factors + 8 * i + lane_col());
        return float2{two.x, two.z};
      });
    } else if (HasFactors) {
      apply_score_factors_transposed(scores, chunk_factors, opaque_n, warp, token_factors);
    } else {
      scale_scores_transposed(scores, opaque_n, warp, p.shape.scale);
    }
    AFragment<Rows / 16> masked_scores;
    round_to_a_fragment<T>(masked_scores, scores);
    store_blocks(storage.masked_scores(query_pipe.stage), kTileRows * warp, 0, masked_scores);
    fence_async_proxy();
    barriers.scores_full.arrive_warp(query_pipe.stage);
    key_pipe.skip(kIntraChunkGroups, params.stages), query_pipe.skip(kIntraChunkGroups, params.query_stages);
  }
}

}  // namespace girih::kernels::delta_product
