// What a scan whose chain makes the output has made beside it (scan_output.cuh).
#pragma once

#include "delta_product/output_space.cuh"
#include "delta_product/scan_half_readers.cuh"
#include "tile/row_store.h"

namespace girih::kernels::delta_product {

// X diag(beta), of a mild chunk diag(w) X diag(beta), by thread `thread` of 128.
template <typename T>
__device__ inline void weigh_inverse(const InverseRows& x, const Vectors& vectors, bool mild, int thread) {
  uint4* const packs = reinterpret_cast<uint4*>(const_cast<unsigned char*>(x.data));
#pragma unroll
  for (int i = 0; i < InverseRows::kBytes / 16 / 128; ++i) {
    const int pack = 128 * i + thread, half = pack >= 128;
    // Of each 16 columns those of the first 8 come first, 32 rows of them.
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

// A warpgroup that makes P of every second chunk, and weighs its X.
template <bool Weighted, typename T, int D, int Rows>
__device__ inline void run_makers(const ScanPass& pass, const Part& part,
                                  const OutputSpace<T, D, Rows>& space, int maker, int warp) {
  constexpr int kMakers = OutputRoles::kMakers;
  const DeltaScan& p = pass.scan;
  // More than half a tile of tokens have one step each.
  const int n = Rows == kDeltaRows ? 1 : p.shape.n, thread = 32 * warp + lane();
  OutputBarriers& barriers = space.barriers();
  const auto together = [&] { barrier_wait(1 + maker, 128); };
  Turn turn, place;
  if (maker > 0) turn.skip(maker, pass.stages), place.skip(maker, pass.places);
#pragma unroll 1
  for (int c = maker; c < part.chunks; c += kMakers) {
    const Stage<T, D> stage = space.stage(turn.place);
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
    if (!keeps) weigh_inverse<T>(stage.inverse(), vectors, mild, thread);
    if (Weighted) {
      if (thread < kDeltaRows) {  // in place of beta_i r_i: r_i = rho_i e^{L_i}, for beta is in X
        const_cast<float*>(vectors.data)[kDeltaRead * kDeltaRows + thread] =
            vectors.element(kDeltaUnit, thread) * exp2_fast(vectors.element(kDeltaLog, thread));
      }
      for_each_token(query, p.shape, vectors, warp, [&](int token, float factor, float log) {
        of_tokens[token] = mild ? float2{factor * exp2_fast(log - log_end), 0.f} : float2{factor, log};
        space.far(place.place)[token] = factor * exp2_fast(log);
      });
      together();  // the tokens' factors are there
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

// Stores outputs, and fetches queries to their places: warp `worker` of `Warps`.
template <int Warps, typename T, int D, int Rows>
__device__ inline void run_tokens(const ScanPass& pass, const Part& part,
                                  const OutputSpace<T, D, Rows>& space, int worker) {
  const DeltaScan& p = pass.scan;
  const int tokens = delta_chunk(p.shape.n), cols = p.shape.V - part.col;
  const int64_t batch = part.piece.sequence.batch;
  OutputBarriers& barriers = space.barriers();
  // A warp has the same rows of both: it overwrites with queries what it alone has read.
  constexpr int kRows = Rows / Warps, kPacks = D / 8, kStep = 32 / kPacks, kEach = 8 / kStep;
  static_assert(kRows % 8 == 0);
  const int row = worker * kRows + lane() / kPacks, col = lane() % kPacks * 8;
  const T* const of_lane = at<T>(p.q, batch, part.piece.start + row, part.head / p.shape.query_share, col);
  const int64_t stride = p.q.stride[1];
  const bool valid = col < p.shape.D;
  const auto fetch = [&](int chunk, int place) {
    if (chunk >= part.chunks) return;
    // What a lane has of eight rows lies as of the eight before.
    const auto query = space.query(place);
    uint32_t to[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) to[i] = query.address(row + i * kStep, col);
    constexpr int kEight = 8 * 64 * static_cast<int>(sizeof(T));
    const int rows = tokens_in(part, tokens, chunk);
    const T* from = of_lane + chunk * tokens * stride;
    if (rows == Rows) {
#pragma unroll
      for (int i = 0; i < kRows / kStep; ++i) {
        copy_async(to[i % kEach] + i / kEach * kEight, from, valid);
        from += kStep * stride;
      }
    } else {
#pragma unroll 1
      for (int eight = 0; eight < kRows; eight += 8) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          // A copy of no bytes does not touch its source.
          copy_async(to[i], from, valid && row + eight + i * kStep < rows);
          to[i] += kEight;
          from += kStep * stride;
        }
      }
    }
    arrive_after_copies(&barriers.queried[place]);
  };
#pragma unroll 1
  for (int c = 0; c < pass.places; ++c) fetch(c, c);
  Turn place;
#pragma unroll 1
  for (int c = 0; c < part.chunks; ++c) {
    T* const to = at<T>(p.o, batch, part.piece.start + c * tokens, part.head, part.col);
    wait(&barriers.output[place.place], place.parity);
    store_rows<Warps>(space.output(place.place), to, p.o.stride[1], tokens_in(part, tokens, c), cols, worker);
    __syncwarp();
    fetch(c + pass.places, place.place);
    place.next(pass.places);
  }
  commit_copies();
  wait_copies<0>();
}

}  // namespace girih::kernels::delta_product
