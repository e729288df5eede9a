// A block of gradients: its data, and the work of one slab of columns of V, which is the products with the
// states and with U. gradients.cuh has the start, gradient_finish.cuh the rest.
#pragma once

#include "delta_product/gradient_gates.cuh"
#include "delta_product/gradient_loads.cuh"
#include "delta_product/gradient_rows.cuh"
#include "delta_product/gradient_tiles.cuh"
#include "delta_product/gradient_weights.cuh"
#include "tile/row_store.h"

namespace girih::kernels::delta_product {

// OneSlab: V fits one slab, so sums over slabs need no registers before the slab.
template <typename T, int D, bool OneSlab, Factors factors>
struct GradientBlock {
  using Sizes = GradientSizes<D>;
  using Tiles = GradientTiles<T, D, OneSlab>;
  using Gradient = Sums<Sizes::kCols / 8>;
  static constexpr int kThreads = Sizes::kThreads, kGroup = 128;  // threads of a warpgroup
  static constexpr bool kBoth = Sizes::kGroups == 1;              // one warpgroup has N and dP
  static constexpr bool kOwn = Tiles::kOwn, kAside = Tiles::kAside;
  static constexpr bool kDirect = factors == Factors::none, kGates = factors == Factors::any,
                        kScaled = kScalesBefore<T, factors>;

  const DeltaGradients& p;
  const Tiles& tile;
  const GradientLoads<T, D, OneSlab> loads;
  const Here& here;
  const Prepared prepared;
  const Vectors vectors;
  const int warp;
  WarpPlace place;
  const bool gated, unit_rows, many_tokens;
  const bool late;  // queries are loaded after the last use of U or dS, whose memory they replace
  bool has_edge, has_tokens, has_values;

  Edge<T, D, OneSlab> of_states;
  Gradient dq, dk;
  Sums<8> of_steps;  // G U^T
  Sums<8> both;      // do U^T, if one warpgroup computes all
  float2 of_beta = {0.f, 0.f}, read_of_g = {0.f, 0.f};

  __device__ GradientBlock(const DeltaGradients& p, const GradientBoxes& boxes, const Tiles& tile,
                           bool many_tokens)
      : p(p),
        tile(tile),
        loads(p, boxes, tile),
        here(*tile.here),
        prepared{tile.prepared},
        vectors(prepared.vectors()),
        warp(warp_index()),
        gated(kGates && p.gated),
        unit_rows(!kDirect && p.shape.unit),
        many_tokens(many_tokens),
        late(kOwn || (kAside && many_tokens)) {
    place.group = kBoth ? 0 : warp / 4, place.band = warp % 4;
    place.row = kTileRows * place.band, place.mine = place.row + lane_row();
    place.col = Sizes::kCols * place.group;
  }

  // Starts the first loads. Returns false if the chunk has no tokens.
  __device__ bool start(const GradientGrid& grid);

  // gradient_finish.cuh: products with N and dP, after all slabs. `left` is the A fragment of the product in
  // flight.
  __device__ void weigh(const Divider& steps, Operand<kTilesDown>& left);
  __device__ void start_left(const Operand<kTilesDown>& left, Gradient& sums) const;
  __device__ void start_dq(Operand<kTilesDown>& left);
  template <int Bands>
  __device__ void add_queries(const Operand<kTilesDown>& left);
  __device__ void add_keys(Operand<kTilesDown>& left);
  __device__ void finish_lengths();
  __device__ void put() const;

  __device__ Sums<8>& of_queries() { return kBoth ? both : of_steps; }
  __device__ static float power(float x) { return kGates ? exp2_fast(x) : 1.f; }
  __device__ float2 of_rows(int vector) const { return vectors.rows(vector, place.mine); }
  __device__ float2 logs() const { return kGates ? of_rows(kDeltaLog) : make_float2(0.f, 0.f); }
  __device__ float end_log() const { return kGates ? vectors.element(kDeltaLog, kDeltaRows - 1) : 0.f; }
  // L_C - L. Clamped to -60 (base 2), so that a quotient by its exponential stays in range; the error of U
  // dS^T is a factor of 2^-60.
  __device__ float until_end(float log) const { return fmaxf(end_log() - log, -60.f); }
  // The factor beta that the rows of G lack: 1 if dz holds dv.
  __device__ float2 steps_left(float2 steps) const {
    return divides<T>(p, prepared) ? make_float2(1.f, 1.f) : steps;
  }
  // The other query heads of a memory head contribute to dk by dP only; their other terms are multiplied by
  // zero.
  __device__ float2 first_only(float2 x) const { return here.first ? x : make_float2(0.f, 0.f); }
  template <class Tile>
  __device__ WarpRows<Tile> rows_of(const Tile& of, int col) const {
    return WarpRows<Tile>(tile.origin, of, col);
  }
  // The first column of the warpgroup in a slab. With one slab and gates it is recomputed at each use to save
  // registers.
  __device__ int of_values() const {
    return kAside && kGates ? worked_out_here(64 * place.group) : 64 * place.group;
  }

  __device__ void group_barrier() const {
    place.group == 0 ? barrier_wait(1, kGroup) : barrier_wait(2, kGroup);
  }
  // Matches the barriers that only the other warpgroup executes `times` times (for racecheck).
  __device__ void group_barrier_for_racecheck(int times = 1) const {
    for (int i = 0; kCountsBarriers && i < times; ++i) group_barrier();
  }

  // <S, dS>, for the gradient of the gates.
  __device__ void add_edge(int v) {
    float part = of_states.sum(p, here, tile, v);
    part = sum_over_col(sum_over_row(part));
    float& sum = tile.sums->edge[warp];
    if (lane() == 0) sum = v == 0 ? part : sum + part;
  }

  // dv_i = beta_i G_i, eight columns at a time, unless reverse has stored dv.
  __device__ void put_values(int v) const {
    if (!here.first || divides<T>(p, prepared)) return;
    constexpr int kPacks = Sizes::kSlab / 8, kStep = kThreads / kPacks, kPasses = kDeltaRows / kStep;
    const int first = threadIdx.x / kPacks, col = threadIdx.x % kPacks * 8;
    const int rows = col < p.shape.V - v ? here.rows : 0;
    static_assert(kStep % 8 == 0, "packs change places alike in all of the thread's rows");
    const T* const from = &tile.g.at(first, col);
    T* to = at<T>(p.dv, here.piece.sequence.batch, here.piece.start * p.shape.n + first, here.head, v + col);
    uint4 g[kPasses];
    float beta[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      g[i] = *reinterpret_cast<const uint4*>(from + i * kStep * 64);
      beta[i] = vectors.element(kDeltaBeta, first + i * kStep);
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i, to += kStep * p.dv.stride[1]) {
      if (first + i * kStep >= rows) continue;
      uint32_t pack[4] = {g[i].x, g[i].y, g[i].z, g[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 value = unpaired<T>(pack[j]);
        pack[j] = pair_of<T>(beta[i] * value.x, beta[i] * value.y);
      }
      store_pack(to, pack);
    }
  }

  // Z_i = beta_i (v_i - a_i S^T k_i) replaces v. Adds G_i . (v_i - a_i S^T k_i) to dbeta_i, and with gates
  // sums G_i . S^T k_i. ks: K S.
  __device__ void make_amiss(const Sums<8>& ks, bool last) {
    const float2 log = logs(), steps = of_rows(kDeltaBeta);
    const float2 unit = kDirect ? make_float2(1.f, 1.f) : of_rows(kDeltaUnit);
    const float2 a = {unit.x * power(log.x), unit.y * power(log.y)};
    const auto rows_of_v = rows_of(tile.u, of_values()), rows_of_g = rows_of(tile.g, of_values());
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      uint32_t values[4], g_block[4], z[4];
      rows_of_v.load(values, 8 * i);
      rows_of_g.load(g_block, 8 * i);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float2 value = unpaired<T>(values[m]), g = unpaired<T>(g_block[m]);
        const float left = ks.at[i + m / 2][m % 2 * 2], right = ks.at[i + m / 2][m % 2 * 2 + 1];
        const float by = m % 2 == 0 ? a.x : a.y, step = m % 2 == 0 ? steps.x : steps.y;
        float& of_step = m % 2 == 0 ? of_beta.x : of_beta.y;
        const float2 amiss = {fmaf(-by, left, value.x), fmaf(-by, right, value.y)};
        of_step = fmaf(g.x, amiss.x, fmaf(g.y, amiss.y, of_step));
        z[m] = pair_of<T>(step * amiss.x, step * amiss.y);
      }
      rows_of_v.put(8 * i, z);
      if (gated) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const float2 g = unpaired<T>(g_block[m]);
          float& read = m % 2 == 0 ? read_of_g.x : read_of_g.y;
          read = fmaf(g.x, ks.at[i + m / 2][m % 2 * 2], fmaf(g.y, ks.at[i + m / 2][m % 2 * 2 + 1], read));
        }
      }
    }
    if (last) {
      put_rows(tile.sums->beta[place.group], place.mine, sum_over_rows(of_beta));
      if (gated) put_rows(tile.sums->read[place.group], place.mine, sum_over_rows(read_of_g));
    }
  }

  // dk_j = -read_j S G_j without rho. With one slab this is divided by e^{L_C - L_j}, by which U dS^T is
  // multiplied afterwards: the two products then share one accumulator, which leaves registers for G U^T.
  __device__ void read_states() {
    const float2 log = logs();
    if constexpr (OneSlab) {
      const auto reads = [&](float log) { return power(log - until_end(log)); };
      fill(dk, 0.f);
      start_states<D, -1>(tile.origin, dk, tile.g, tile.states, place.col);
      if (kAside) wait_products<0>(dq);
      wait_products<0>(dk);
      if (!kDirect || !divides<T>(p, prepared)) {
        const float2 left = steps_left(of_rows(kDeltaBeta));
        scale_rows(dk, first_only({left.x * reads(log.x), left.y * reads(log.y)}));
      }
    } else {
      Sums<Sizes::kCols / 8> of_state;
      fill(of_state, 0.f);
      add_states<D>(tile.origin, of_state, tile.g, tile.states, place.col);
      const float2 left = steps_left(of_rows(kDeltaBeta));
      add_scaled(dk, of_state, first_only({-left.x * exp2_fast(log.x), -left.y * exp2_fast(log.y)}));
    }
  }

  // U = X Z replaces Z, for the columns of the warpgroup.
  __device__ void solve() const {
    fence_tiles();
    group_barrier();
    Sums<8> u;
    fill(u, 0.f);
#pragma unroll
    for (int first = 0; first < kTilesDown; first += 2) {
      Operand<2> x;
      fill(x);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (first + j <= place.band) prepared.load(x.at[j], place.band, first + j);
      }
      fence_products(u);
      start_product<T>(tile.origin, u, x, tile.u, of_values(), kTileRows * first);
      commit_products();
      wait_products<0>(u);
    }
    if (__builtin_expect(prepared.keeps(), false)) {
      const unsigned char* const all = here.prepared(p);
#pragma unroll 1
      for (int j = 0; j <= place.band; ++j) {
        uint32_t lost[4];
        load_lost(lost, all, place.band, j);
        add_product<T>(u, lost, tile.u, kTileRows * j, of_values());
      }
    }
    group_barrier();
    put_rows<T>(rows_of(tile.u, of_values()), u);
  }

  // Starts G U^T or do U^T.
  __device__ void start_steps() {
    fill(of_steps, 0.f);
    fence_products(of_steps);
    if (!kBoth && place.group == Sizes::kQueries) {
      start_product_transposed(tile.origin, of_steps, tile.dout, tile.u);
    } else {
      start_product_transposed(tile.origin, of_steps, tile.g, tile.u);
    }
    commit_products();
  }

  // dk_j += w_j dS U_j without rho; waits for G U^T or do U^T.
  __device__ void write_states() {
    const float2 log = logs();
    if constexpr (OneSlab) {
      start_states<D>(tile.origin, dk, tile.u, tile.gradients, place.col);
      if (!kAside) start_steps();
      wait_products<0>(of_steps);
      wait_products<0>(dk);
      if (kGates) {
        scale_rows(dk, first_only({power(until_end(log.x)), power(until_end(log.y))}));
      } else if (!here.first) {
        fill(dk, 0.f);
      }
    } else {
      Sums<Sizes::kCols / 8> of_state;
      fill(of_state, 0.f);
      add_states<D>(tile.origin, of_state, tile.u, tile.gradients, place.col);
      const float end = end_log();
      add_scaled(dk, of_state, first_only({exp2_fast(end - log.x), exp2_fast(end - log.y)}));
      start_steps();
      wait_products<0>(of_steps);
    }
  }

  // Sums over slabs in shared memory; registers do not suffice.
  __device__ void add_slabs(int v, bool last) {
    const auto add = [&](Sums<8>& x, int which) {
      float* const so_far = tile.partial + which * kDeltaRows * kDeltaRows + threadIdx.x % 128;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (v != 0) x.at[i / 4][i % 4] += so_far[i * 128];
      }
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (!last) so_far[i * 128] = x.at[i / 4][i % 4];
      }
    };
    if (place.group == 0) add(of_steps, 0);
    if (place.group == Sizes::kQueries) add(of_queries(), 1);
  }

  // The slab of columns of V from `v` on.
  __device__ void take_slab(int v) {
    const bool last = OneSlab || v + Sizes::kSlab >= p.shape.V;
    const int number = v / Sizes::kSlab;
    if (v != 0) {
      loads.start_states(here.number, v);
      loads.start_values(here, v);
      if (has_edge) of_states.load(p, here, v);
    }
    loads.wait_states(here, number);
    if (has_edge && !Sizes::kApart) add_edge(v);

    // K S
    Sums<8> ks;
    fill(ks, 0.f);
    if (has_values) {
      fence_products(ks);
      start_product_transposed(tile.origin, ks, tile.k, tile.s(of_values()));
      commit_products();
    }
    loads.wait_values(here, number);

    // dq_t = S do_t. With kAside this product overlaps with Z.
    if (kAside) {
      fill(dq, 0.f);
      start_states<D>(tile.origin, dq, tile.dout, tile.states, place.col);
    } else {
      put_values(v);
    }
    wait_products<kAside ? 1 : 0>(ks);
    if (!OneSlab) add_states<D>(tile.origin, dq, tile.dout, tile.states, place.col);

    if (has_values) make_amiss(ks, last);
    if (!kAside) read_states();
    if (!Sizes::kApart && !kAside) {
      fence_tiles();
      __syncthreads();
      loads.start_gradients(here, v);
    }
    if (has_values) {
      solve();
    } else {
      group_barrier_for_racecheck(2);
    }
    if (kAside) read_states();
    if (!Sizes::kApart && !kAside) loads.wait_gradients(number);
    fence_tiles();
    __syncthreads();
    if (kAside) {
      // The load of dS overlaps: dS replaces S only now.
      loads.start_gradients(here, v);
      start_steps();
      put_values(v);
      loads.wait_gradients(number);
    }
    write_states();
    if (gated && here.first && Sizes::kApart) add_edge(v);
    if (kBoth && !kOwn) {
      fill(both, 0.f);
      add_scores<T>(tile.origin, both, tile.dout, tile.u);
    }
    if (!OneSlab) add_slabs(v, last);
    __syncthreads();
  }
};

}  // namespace girih::kernels::delta_product
