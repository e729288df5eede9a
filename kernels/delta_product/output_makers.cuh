// The producer warps of scan_output.
#pragma once

#include "delta_product/output_space.cuh"
#include "delta_product/scan_half_readers.cuh"

namespace girih::kernels::delta_product {

// X <- X diag(beta), or if `mild` diag(w) X diag(beta); `thread` of 128.
template <typename T>
__device__ inline void weigh_inverse(const InverseRows& x, const Vectors& vectors, bool mild, int thread) {
  uint4* const packs = reinterpret_cast<uint4*>(const_cast<unsigned char*>(x.data));
#pragma unroll
  for (int i = 0; i < InverseRows::kBytes / 16 / 128; ++i) {
    const int pack = 128 * i + thread, half = pack >= 128;
    // Layout of InverseRows: of 16 columns the first 8 come first, for 32 rows.
    const int row = pack % 32 + 32 * half, col = (pack - 128 * half) / 32 * 8;
    float4 low = *reinterpret_cast<const float4*>(vectors.data + kDeltaBeta * kDeltaRows + col),
           high = *reinterpret_cast<const float4*>(vectors.data + kDeltaBeta * kDeltaRows + col + 4);
    if (mild) {
      const float by = vectors.element(kDeltaWrite, row);
      low = {by * low.x, by * low.y, by * low.z, by * low.w};
      high = {by * high.x, by * high.y, by * high.z, by * high.w};
    }
    const uint4 given = packs[pack];
    const float2 a = unpaired<T>(given.x), b = unpaired<T>(given.y), c = unpaired<T>(given.z),
                 d = unpaired<T>(given.w);
    packs[pack] = {pair_of<T>(a.x * low.x, a.y * low.y), pair_of<T>(b.x * low.z, b.y * low.w),
                   pair_of<T>(c.x * high.x, c.y * high.y), pair_of<T>(d.x * high.z, d.y * high.w)};
  }
}

// A producer warpgroup: P of its chunks, and the factors of X.
template <bool Weighted, typename T, int D, int Rows, int Chains>
__device__ inline void run_makers(const ScanPass& pass, const Part& part,
                                  const OutputSpace<T, D, Rows, Chains>& space, int maker, int warp) {
  constexpr int kMakers = OutputRoles<Chains>::kMakers;
  const DeltaScan& p = pass.scan;
  // Tiles of 64 tokens have n = 1.
  const int n = Rows == kDeltaRows ? 1 : p.shape.n;
  OutputBarriers& barriers = space.barriers();
  const auto together = [&] { barrier_wait(1 + maker, 128); };
  Turn turn, place;
  if (maker > 0) turn.skip(maker, pass.stages), place.skip(maker, pass.places);
#pragma unroll 1
  for (int c = maker; c < part.chunks; c += kMakers) {
    const auto stage = space.stage(turn.place);
    const Vectors vectors = stage.prepared().vectors();
    const auto query = space.query(place.place);
    float2* const of_tokens = space.tokens(turn.place);
    wait(&barriers.full[turn.place], turn.parity);
    wait(&barriers.queried[place.place], place.parity);
    fence_tiles();
    together();

    // K Q^T
    Sums<Rows / 8> scores;
    fence_products();
    start_product_transposed<false>(scores, stage.k(), query);
    commit_products();
    const bool keeps = stage.prepared().keeps();
    const float log_end = Weighted ? vectors.element(kDeltaLog, kDeltaRows - 1) : 0.f;
    const bool mild = Weighted && is_mild<T>(keeps, log_end);
    if (!keeps) weigh_inverse<T>(stage.inverse(), vectors, mild, 32 * warp + lane_here<Chains>());
    if (Weighted) {
      const int row = 32 * warp + lane() - kDeltaRows;
      if (row >= 0) {  // r_i = rho_i e^{L_i} replaces beta_i r_i, because X contains beta
        const_cast<float*>(vectors.data)[kDeltaRead * kDeltaRows + row] =
            vectors.element(kDeltaUnit, row) * exp2_fast(vectors.element(kDeltaLog, row));
      }
      for_each_token(query, p.shape, vectors, warp, [&](int token, float factor, float log) {
        of_tokens[token] = mild ? float2{factor * exp2_fast(log - log_end), 0.f} : float2{factor, log};
        space.far(place.place)[token] = factor * exp2_fast(log);
      });
      together();  // the factors of the tokens are stored
    }
    wait_products<0>(scores);
    const int n_here = Rows == kDeltaRows ? 1 : worked_out_here(n);
    if (mild) {
      scale_transposed(scores, n_here, warp, [&](int i) {  // P / w
        const float4 two = *reinterpret_cast<const float4*>(of_tokens + 8 * i + lane_col());
        return float2{two.x, two.z};
      });
    } else if (Weighted) {
      weigh_transposed(scores, vectors, n_here, warp, of_tokens);
    } else {
      scale_transposed(scores, n_here, warp, p.shape.scale);
    }
    Operand<Rows / 16> near;
    round_to<T>(near, scores);
    store_blocks(space.near(place.place), kTileRows * warp, 0, near);
    fence_tiles();
    arrive_once(&barriers.made[place.place]);
    turn.skip(kMakers, pass.stages), place.skip(kMakers, pass.places);
  }
}

}  // namespace girih::kernels::delta_product
