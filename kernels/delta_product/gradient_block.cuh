// A block of gradients: its data, and the work of one slab of columns of V, which is the products with the
// states and with U. gradients.cuh has the start, gradient_finish.cuh the rest.
#pragma once

#include "delta_product/gradient_gates.cuh"
#include "delta_product/gradient_loads.cuh"
#include "delta_product/gradient_operands.cuh"
#include "delta_product/gradient_rows.cuh"
#include "delta_product/gradient_tiles.cuh"
#include "tile/row_store.h"

namespace girih::kernels::delta_product {

// OneSlab: V fits one slab, so sums over slabs need no registers before the slab.
template <typename T, int D, bool OneSlab, Factors factors>
struct GradientBlock {
  using Sizes = GradientSizes<D>;
  using Tiles = GradientTiles<T, D, OneSlab>;
  using Gradient = Accumulator<Sizes::kCols / 8>;
  static constexpr int kThreads = Sizes::kThreads, kGroup = 128;  // threads of a warpgroup
  static constexpr bool kHasOneGroup = Sizes::kGroups == 1;       // one warpgroup has N and dP
  static constexpr bool kHasNInRegisters = Tiles::kHasNInRegisters, kSpillsDq = Tiles::kSpillsDq;
  static constexpr bool kHasNoFactors = factors == Factors::none, kHasGates = factors == Factors::any,
                        kHasScaledDp = kCanScaleDp<T, factors>;

  const DeltaGradients& p;
  const Tiles& tile;
  const GradientLoads<T, D, OneSlab> loads;
  const ChunkInfo& chunk_info;
  const Prepared prepared;
  const ChunkFactors chunk_factors;
  const int warp;
  WarpCoord coord;
  const bool gated, unit_rows, many_tokens;
  const bool is_query_late;  // queries are loaded after the last use of U or dS, whose memory they replace
  bool has_state_dot, has_tokens, has_values;

  StateDot<T, D, OneSlab> state_dot_loads;
  Gradient dq, dk;
  Accumulator<8> products;     // G U^T
  Accumulator<8> do_products;  // do U^T, if one warpgroup computes all
  float2 beta_sums = {0.f, 0.f}, read_sums = {0.f, 0.f};

  __device__ GradientBlock(const DeltaGradients& p, const GradientTensorMaps& maps, const Tiles& tile,
                           bool many_tokens)
      : p(p),
        tile(tile),
        loads(p, maps, tile),
        chunk_info(*tile.chunk_info),
        prepared{tile.prepared},
        chunk_factors(prepared.chunk_factors()),
        warp(warp_index()),
        gated(kHasGates && p.gated),
        unit_rows(!kHasNoFactors && p.shape.unit),
        many_tokens(many_tokens),
        is_query_late(kHasNInRegisters || (kSpillsDq && many_tokens)) {
    coord.group = kHasOneGroup ? 0 : warp / 4, coord.band = warp % 4;
    coord.row = kTileRows * coord.band, coord.thread_row = coord.row + lane_row();
    coord.col = Sizes::kCols * coord.group;
  }

  // Starts the first loads. Returns false if the chunk has no tokens.
  __device__ bool start(const GradientGrid& grid);

  // gradient_finish.cuh: products with N and dP, after all slabs. `left` is the A fragment of the product in
  // flight.
  __device__ void compute_operands(const Divider& steps, AFragment<kChunkTiles>& left);
  __device__ void start_key_product(const AFragment<kChunkTiles>& left, Gradient& sums) const;
  __device__ void start_dq(AFragment<kChunkTiles>& left);
  template <int Bands>
  __device__ void add_queries(const AFragment<kChunkTiles>& left);
  __device__ void add_keys(AFragment<kChunkTiles>& left);
  __device__ void finish_lengths();
  __device__ void store() const;

  __device__ Accumulator<8>& query_products() { return kHasOneGroup ? do_products : products; }
  __device__ static float gate_power(float x) { return kHasGates ? exp2_fast(x) : 1.f; }
  __device__ float2 factor_rows(int kind) const { return chunk_factors.rows(kind, coord.thread_row); }
  __device__ float2 log_rows() const {
    return kHasGates ? factor_rows(kDeltaLogDecay) : make_float2(0.f, 0.f);
  }
  __device__ float end_log() const {
    return kHasGates ? chunk_factors.element(kDeltaLogDecay, kDeltaChunkRows - 1) : 0.f;
  }
  // L_C - L in powers of two, at least -60, so that a quotient by e^{L_C - L} stays in range. Where the limit
  // applies, the factor of U dS^T is 2^-60 instead of a smaller number.
  __device__ float log_to_end(float log) const { return fmaxf(end_log() - log, -60.f); }
  // The factor from the rows of dz to dv = beta G: beta, or 1 if dz holds dv.
  __device__ float2 missing_beta(float2 beta) const {
    return dz_holds_dv<T>(p, prepared) ? make_float2(1.f, 1.f) : beta;
  }
  // x for the first query head of a memory head, else 0: the other query heads add only their terms of dP to
  // dk.
  __device__ float2 mask_first_head(float2 x) const {
    return chunk_info.is_first_head ? x : make_float2(0.f, 0.f);
  }
  template <class Tile>
  __device__ WarpRows<Tile> rows_of(const Tile& of, int col) const {
    return WarpRows<Tile>(tile.origin, of, col);
  }
  // The first column of the warpgroup in a slab. With one slab and gates it is recomputed at each use to save
  // registers.
  __device__ int value_column() const {
    return kSpillsDq && kHasGates ? opaque_value(64 * coord.group) : 64 * coord.group;
  }

  __device__ void group_barrier() const {
    coord.group == 0 ? named_barrier_sync(1, kGroup) : named_barrier_sync(2, kGroup);
  }
  // Matches the barriers that only the other warpgroup executes `times` times (for racecheck).
  __device__ void group_barrier_for_racecheck(int times = 1) const {
    for (int i = 0; kHasEqualBarrierCounts && i < times; ++i) group_barrier();
  }

  // <S, dS>, for the gradient of the gates.
  __device__ void add_state_dot(int v) {
    float part = state_dot_loads.sum(p, chunk_info, tile, v);
    part = sum_over_col(sum_over_row(part));
    float& sum = tile.sums->state_dot[warp];
    if (lane() == 0) sum = v == 0 ? part : sum + part;
  }

  // dv_i = beta_i G_i, eight columns at a time, unless reverse has stored dv.
  __device__ void store_dv(int v) const {
    if (!chunk_info.is_first_head || dz_holds_dv<T>(p, prepared)) return;
    constexpr int kPacks = Sizes::kSlab / 8, kStep = kThreads / kPacks, kPasses = kDeltaChunkRows / kStep;
    const int first = threadIdx.x / kPacks, col = threadIdx.x % kPacks * 8;
    const int rows = col < p.shape.V - v ? chunk_info.rows : 0;
    static_assert(kStep % 8 == 0, "packs change places alike in all of the thread's rows");
    const T* const from = &tile.g.at(first, col);
    T* to = at<T>(p.dv, chunk_info.range.sequence.batch, chunk_info.range.start * p.shape.n + first,
                  chunk_info.head, v + col);
    uint4 g[kPasses];
    float beta[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      g[i] = *reinterpret_cast<const uint4*>(from + i * kStep * 64);
      beta[i] = chunk_factors.element(kDeltaBeta, first + i * kStep);
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i, to += kStep * p.dv.stride[1]) {
      if (first + i * kStep >= rows) continue;
      uint32_t pack[4] = {g[i].x, g[i].y, g[i].z, g[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 value = unpack_pair<T>(pack[j]);
        pack[j] = pack_pair<T>(beta[i] * value.x, beta[i] * value.y);
      }
      store_pack(to, pack);
    }
  }

  // Z_i = beta_i (v_i - a_i S^T k_i) replaces v. Adds G_i . (v_i - a_i S^T k_i) to dbeta_i, and with gates
  // sums G_i . S^T k_i. ks: K S.
  __device__ void compute_residual(const Accumulator<8>& ks, bool last) {
    const float2 log = log_rows(), beta = factor_rows(kDeltaBeta);
    const float2 rho = kHasNoFactors ? make_float2(1.f, 1.f) : factor_rows(kDeltaRho);
    const float2 a = {rho.x * gate_power(log.x), rho.y * gate_power(log.y)};
    const auto rows_of_v = rows_of(tile.u, value_column()), rows_of_g = rows_of(tile.g, value_column());
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      uint32_t values[4], g_block[4], z[4];
      rows_of_v.load(values, 8 * i);
      rows_of_g.load(g_block, 8 * i);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float2 value = unpack_pair<T>(values[m]), g = unpack_pair<T>(g_block[m]);
        const float left = ks.at[i + m / 2][m % 2 * 2], right = ks.at[i + m / 2][m % 2 * 2 + 1];
        const float a_i = m % 2 == 0 ? a.x : a.y, beta_i = m % 2 == 0 ? beta.x : beta.y;
        float& beta_sum = m % 2 == 0 ? beta_sums.x : beta_sums.y;
        const float2 residual = {fmaf(-a_i, left, value.x), fmaf(-a_i, right, value.y)};
        beta_sum = fmaf(g.x, residual.x, fmaf(g.y, residual.y, beta_sum));
        z[m] = pack_pair<T>(beta_i * residual.x, beta_i * residual.y);
      }
      rows_of_v.store(8 * i, z);
      if (gated) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const float2 g = unpack_pair<T>(g_block[m]);
          float& read = m % 2 == 0 ? read_sums.x : read_sums.y;
          read = fmaf(g.x, ks.at[i + m / 2][m % 2 * 2], fmaf(g.y, ks.at[i + m / 2][m % 2 * 2 + 1], read));
        }
      }
    }
    if (last) {
      store_warp_rows(tile.sums->beta[coord.group], coord.thread_row, sum_over_rows(beta_sums));
      if (gated) store_warp_rows(tile.sums->read[coord.group], coord.thread_row, sum_over_rows(read_sums));
    }
  }

  // dk_j -= read_j S G_j without rho. With one slab the term is divided by e^{L_C - L_j}: add_state_writes()
  // adds U dS^T to the same accumulator and multiplies the sum by e^{L_C - L_j}. One accumulator for both
  // products leaves registers for G U^T.
  __device__ void add_state_reads() {
    const float2 log = log_rows();
    if constexpr (OneSlab) {
      const auto decay = [&](float log) { return gate_power(log - log_to_end(log)); };  // e^{L - (L_C - L)}
      fill(dk, 0.f);
      start_states<D, -1>(tile.origin, dk, tile.g, tile.states, coord.col);
      if (kSpillsDq) wgmma_wait<0>(dq);
      wgmma_wait<0>(dk);
      if (!kHasNoFactors || !dz_holds_dv<T>(p, prepared)) {
        const float2 beta = missing_beta(factor_rows(kDeltaBeta));
        scale_rows(dk, mask_first_head({beta.x * decay(log.x), beta.y * decay(log.y)}));
      }
    } else {
      Accumulator<Sizes::kCols / 8> state_product;
      fill(state_product, 0.f);
      add_states<D>(tile.origin, state_product, tile.g, tile.states, coord.col);
      const float2 beta = missing_beta(factor_rows(kDeltaBeta));
      add_scaled(dk, state_product,
                 mask_first_head({-beta.x * exp2_fast(log.x), -beta.y * exp2_fast(log.y)}));
    }
  }

  // U = X Z replaces Z, for the columns of the warpgroup.
  __device__ void solve() const {
    fence_async_proxy();
    group_barrier();
    Accumulator<8> u;
    fill(u, 0.f);
#pragma unroll
    for (int first = 0; first < kChunkTiles; first += 2) {
      AFragment<2> x;
      fill(x);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (first + j <= coord.band) prepared.load_inverse(x.at[j], coord.band, first + j);
      }
      wgmma_fence(u);
      wgmma_start<T>(tile.origin, u, x, tile.u, value_column(), kTileRows * first);
      wgmma_commit();
      wgmma_wait<0>(u);
    }
    if (__builtin_expect(prepared.has_inverse_lo(), false)) {
      const unsigned char* const all = chunk_info.prepared(p);
#pragma unroll 1
      for (int j = 0; j <= coord.band; ++j) {
        uint32_t inverse_lo[4];
        load_inverse_lo(inverse_lo, all, coord.band, j);
        add_product<T>(u, inverse_lo, tile.u, kTileRows * j, value_column());
      }
    }
    group_barrier();
    store_warp_rows<T>(rows_of(tile.u, value_column()), u);
  }

  // Starts G U^T or do U^T.
  __device__ void start_u_products() {
    fill(products, 0.f);
    wgmma_fence(products);
    if (!kHasOneGroup && coord.group == Sizes::kQueryGroup) {
      wgmma_start_transposed(tile.origin, products, tile.dout, tile.u);
    } else {
      wgmma_start_transposed(tile.origin, products, tile.g, tile.u);
    }
    wgmma_commit();
  }

  // dk_j += w_j dS U_j without rho; waits for G U^T or do U^T.
  __device__ void add_state_writes() {
    const float2 log = log_rows();
    if constexpr (OneSlab) {
      start_states<D>(tile.origin, dk, tile.u, tile.gradients, coord.col);
      if (!kSpillsDq) start_u_products();
      wgmma_wait<0>(products);
      wgmma_wait<0>(dk);
      if (kHasGates) {
        scale_rows(dk, mask_first_head({gate_power(log_to_end(log.x)), gate_power(log_to_end(log.y))}));
      } else if (!chunk_info.is_first_head) {
        fill(dk, 0.f);
      }
    } else {
      Accumulator<Sizes::kCols / 8> state_product;
      fill(state_product, 0.f);
      add_states<D>(tile.origin, state_product, tile.u, tile.gradients, coord.col);
      const float end = end_log();
      add_scaled(dk, state_product, mask_first_head({exp2_fast(end - log.x), exp2_fast(end - log.y)}));
      start_u_products();
      wgmma_wait<0>(products);
    }
  }

  // Sums G U^T (index 0) and do U^T (index 1) over the slabs in shared memory; registers do not suffice.
  __device__ void add_slabs(int v, bool last) {
    const auto add = [&](Accumulator<8>& x, int index) {
      float* const partial = tile.partial + index * kDeltaChunkRows * kDeltaChunkRows + threadIdx.x % 128;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (v != 0) x.at[i / 4][i % 4] += partial[i * 128];
      }
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (!last) partial[i * 128] = x.at[i / 4][i % 4];
      }
    };
    if (coord.group == 0) add(products, 0);
    if (coord.group == Sizes::kQueryGroup) add(query_products(), 1);
  }

  // The slab of columns of V from `v` on.
  __device__ void process_slab(int v) {
    const bool last = OneSlab || v + Sizes::kSlab >= p.shape.V;
    const int number = v / Sizes::kSlab;
    if (v != 0) {
      loads.start_states(chunk_info.number, v);
      loads.start_values(chunk_info, v);
      if (has_state_dot) state_dot_loads.load(p, chunk_info, v);
    }
    loads.wait_states(chunk_info, number);
    if (has_state_dot && !Sizes::kHasBothStates) add_state_dot(v);

    // K S
    Accumulator<8> ks;
    fill(ks, 0.f);
    if (has_values) {
      wgmma_fence(ks);
      wgmma_start_transposed(tile.origin, ks, tile.k, tile.s(value_column()));
      wgmma_commit();
    }
    loads.wait_values(chunk_info, number);

    // dq_t = S do_t. With kSpillsDq this product overlaps with Z.
    if (kSpillsDq) {
      fill(dq, 0.f);
      start_states<D>(tile.origin, dq, tile.dout, tile.states, coord.col);
    } else {
      store_dv(v);
    }
    wgmma_wait<kSpillsDq ? 1 : 0>(ks);
    if (!OneSlab) add_states<D>(tile.origin, dq, tile.dout, tile.states, coord.col);

    if (has_values) compute_residual(ks, last);
    if (!kSpillsDq) add_state_reads();
    if (!Sizes::kHasBothStates && !kSpillsDq) {
      fence_async_proxy();
      __syncthreads();
      loads.start_gradients(chunk_info, v);
    }
    if (has_values) {
      solve();
    } else {
      group_barrier_for_racecheck(2);
    }
    if (kSpillsDq) add_state_reads();
    if (!Sizes::kHasBothStates && !kSpillsDq) loads.wait_gradients(number);
    fence_async_proxy();
    __syncthreads();
    if (kSpillsDq) {
      // The load of dS overlaps: dS replaces S only now.
      loads.start_gradients(chunk_info, v);
      start_u_products();
      store_dv(v);
      loads.wait_gradients(number);
    }
    add_state_writes();
    if (gated && chunk_info.is_first_head && Sizes::kHasBothStates) add_state_dot(v);
    if (kHasOneGroup && !kHasNInRegisters) {
      fill(do_products, 0.f);
      add_scores<T>(tile.origin, do_products, tile.dout, tile.u);
    }
    if (!OneSlab) add_slabs(v, last);
    __syncthreads();
  }
};

}  // namespace girih::kernels::delta_product
