// The gradients, a block a chunk and query head. S: the state before the chunk, dS: the gradient of the one
// after it. With a_i = rho_i e^{L_i}, D_ij = rho_i rho_j e^{L_i - L_j}, M_ij = D_ij k_i . k_j (j < i) and r,
// w, read as in the scans,
//
//     E_i  = v_i - a_i S^T k_i - sum_j M_ij U_j                       what step i finds amiss: U = beta E
//     dv_i = beta_i G_i
//     dbeta_i = G_i . E_i = G_i . (v_i - a_i S^T k_i) - sum_j M_ij G_i . U_j
//     dP_tj = do_t . U_j      N_ij = -beta_i G_i . U_j (j < i)
//     dq_t = r_t S do_t + sum_j scale rho_t rho_j e^{L_t - L_j} dP_tj k_j
//     dk_j = w_j dS U_j - read_j S G_j + sum_t scale rho_t rho_j e^{L_t - L_j} dP_tj q_t
//            + sum_{i<j} D_ji N_ji k_i + sum_{i>j} D_ij N_ij k_i
//
// and, of unit vectors, what of dq and dk lies along q and k is taken away. A gate's gradient is the sum over
// the tokens from its own on of
//
//     dL_t = sum_j (P dP)_tj + r_t q_t . S do_t + sum of, for its rows i,
//                sum_j (N M)_ij - sum_j (N M)_ji - sum_s (P dP)_si - read_i G_i . S^T k_i - w_i k_i . dS U_i
//
// without what a token's rows do to each other, which no gate touches, plus <state after the chunk, dS>.
//
// Where reverse has left dv in place of G, G's factor beta_i is left out of N and dk, and dbeta_i divided by
// it.
//
// A warpgroup has half of D's columns of dq and dk (at D = 64 all), and of a slab's 64 of U; the first
// has N, the second (or the only one) dP. A block waits for its loads and for itself: several of a
// multiprocessor are each other's work meanwhile, so what they hold of shared memory and of registers counts:
// of one slab there are four at D = 64, two at D = 128. At D = 64 queries come where dS was, and N K is taken
// of N as it stands in registers. At D = 128 dS comes where S was; queries, where they are no more than 32,
// stand below the half tile of do, else they come where U was; and of one slab dq waits where G was while N
// and dP are weighed, for there are no registers for it (S read once more instead was a sixth of what comes
// from memory).
#pragma once

#include "delta_product/gradient_gates.cuh"
#include "delta_product/gradient_loads.cuh"
#include "delta_product/gradient_rows.cuh"
#include "delta_product/gradient_tiles.cuh"
#include "delta_product/gradient_weights.cuh"

namespace girih::kernels::delta_product {

// dv of a slab, eight columns at a time.
template <typename T, int D, bool OneSlab>
__device__ inline void put_value_gradients(const DeltaGradients& p, const Here& here,
                                           const GradientTiles<T, D, OneSlab>& tile, Vectors vectors, int v) {
  using Sizes = GradientSizes<D>;
  constexpr int kPacks = Sizes::kSlab / 8, kStep = Sizes::kThreads / kPacks;
  const int first = threadIdx.x / kPacks, col = threadIdx.x % kPacks * 8;
  const int rows = col < p.shape.V - v ? here.rows : 0;
  static_assert(kStep % 8 == 0, "packs change places alike in all of the thread's rows");
  const T* const from = &tile.g.at(first, col);
  T* to = at<T>(p.dv, here.piece.sequence.batch, here.piece.start * p.shape.n + first, here.head, v + col);
  constexpr int kPasses = kDeltaRows / kStep;
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

// OneSlab: V is no wider; then what is summed over slabs needs no registers before them.
template <typename T, int D, bool OneSlab, Factors factors>
__global__ void __launch_bounds__(GradientSizes<D>::kThreads, GradientSizes<D>::blocks(OneSlab))
    gradients(const __grid_constant__ DeltaGradients p, const __grid_constant__ GradientGrid grid,
              const __grid_constant__ GradientBoxes boxes) {
  using Sizes = GradientSizes<D>;
  using Tiles = GradientTiles<T, D, OneSlab>;
  constexpr int kThreads = Sizes::kThreads, kGroup = 128;
  constexpr bool kBoth = Sizes::kGroups == 1, kOwn = Tiles::kOwn, kAside = Tiles::kAside;
  extern __shared__ __align__(1024) unsigned char room[];
  const DeltaShape& shape = p.shape;
  const int n = shape.n, warp = warp_index();
  constexpr bool kDirect = factors == Factors::none, kGates = factors == Factors::any,
                 kScaled = kScalesBefore<T, factors>;
  const bool gated = kGates && p.gated, unit_rows = !kDirect && shape.unit;
  const auto power = [](float x) { return kGates ? exp2_fast(x) : 1.f; };
  const bool many_tokens = has_many(grid.tokens);
  const Tiles tile(room, many_tokens);
  Place place;
  place.group = kBoth ? 0 : warp / 4, place.band = warp % 4;
  place.row = kTileRows * place.band, place.mine = place.row + lane_row();
  place.col = Sizes::kCols * place.group;
  // Queries come once U is through, or dS, whose room they get.
  const bool late = kOwn || (kAside && many_tokens);

  using Loads = GradientLoads<T, D, OneSlab>;
  const Loads loads(p, boxes, tile);
  const uint32_t chunk = grid.query_heads.divide(blockIdx.x),
                 query_head = blockIdx.x - chunk * grid.query_heads.by,
                 head = grid.members.divide(query_head), chunk_and_head = chunk * shape.heads + head;
  // But for S, all that comes first.
  const auto start = [&](const Here& here) {
    loads.start_keys(here);
    late ? loads.prefetch_queries(here) : loads.template start_queries<kThreads>(here);
    loads.start_values(here, 0);
  };
  if (threadIdx.x == 0) {
    if (kBoxes) {
      // Under way while tokens are looked up, which it does not need.
      loads.init();
      loads.start_states(chunk_and_head, 0);
    }
    Here here;
    here.query_head = static_cast<int>(query_head);
    here.head = static_cast<int>(head);
    here.number = chunk_and_head;
    here.first = query_head == head * grid.members.by;
    here.many_tokens = many_tokens;
    here.piece = chunk_at(shape.tokens, chunk, grid.tokens, grid.each);
    here.rows = here.piece.length * n;
    *tile.here = here;
    // (That the others go on meanwhile, to their own wait, takes longer.)
    if (kBoxes && here.rows > 0) start(here);
  }
  tile.origin.put();
  __syncthreads();
  const Here& here = *tile.here;
  if (here.rows == 0) {
    if (kBoxes) wait(&tile.barriers->states, 0);
    return;
  }
  if (!kBoxes) {
    loads.start_states(here.number, 0);
    start(here);
  }
  const bool has_edge = gated && here.first;
  Edge<T, D, OneSlab> of_states;
  if (has_edge) of_states.load(p, here, 0);

  const Prepared prepared{tile.prepared};
  const Vectors vectors = prepared.vectors();
  GradientSums<D>& sums = *tile.sums;
  LaterSums<D>& later = *tile.later;
  const int row = place.row, mine = place.mine;
  const bool has_tokens = many_tokens || place.band < kTilesDown / 2;
  const bool has_values = Sizes::kParts == Sizes::kGroups || place.group < Sizes::kParts;
  const int of_values = 64 * place.group;  // the first of the warpgroup's columns of a slab
  const auto of_rows = [&](int vector) -> float2 {
    return {vectors.element(vector, mine), vectors.element(vector, mine + 8)};
  };
  const auto logs = [&] { return kGates ? of_rows(kDeltaLog) : make_float2(0.f, 0.f); };

  // Of beta what the rows of G do not have yet.
  const auto steps_left = [&](float2 steps) {
    return divides<T>(p, prepared) ? make_float2(1.f, 1.f) : steps;
  };

  const auto group_barrier = [&] { place.group == 0 ? barrier_wait(1, kGroup) : barrier_wait(2, kGroup); };
  // Where the other warpgroup alone has `times` of them.
  const auto group_barrier_for_racecheck = [&](int times = 1) {
    for (int i = 0; kCountsBarriers && i < times; ++i) group_barrier();
  };

  const auto rows_of = [&](const auto& of, int col) {
    return WarpRows<std::decay_t<decltype(of)>>(tile.origin, of, col);
  };

  // Of dk, a memory head's other query heads have their part of dP alone: all else comes in times zero.
  const auto first_only = [&](float2 x) { return here.first ? x : make_float2(0.f, 0.f); };

  Sums<Sizes::kCols / 8> dq, dk;
  Sums<8> of_steps;  // G U^T
  Sums<8> both;      // do U^T, where one warpgroup has both
  Sums<8>& of_queries = kBoth ? both : of_steps;
  if (!OneSlab) {
    fill(dq, 0.f);
    fill(dk, 0.f);
  }
  float2 of_beta = {0.f, 0.f}, read_of_g = {0.f, 0.f};
  const auto slab = [&](int v) {
    const bool last = OneSlab || v + Sizes::kSlab >= shape.V;
    const auto add_edge = [&] {
      float part = of_states.sum(p, here, tile, v);
      part = sum_over_col(sum_over_row(part));
      if (lane() == 0) sums.edge[warp] = v == 0 ? part : sums.edge[warp] + part;
    };
    const auto put_values = [&] {
      if (here.first && !divides<T>(p, prepared)) put_value_gradients(p, here, tile, vectors, v);
    };
    const int number = v / Sizes::kSlab;
    if (v != 0) {
      loads.start_states(here.number, v);
      loads.start_values(here, v);
      if (has_edge) of_states.load(p, here, v);
    }
    loads.wait_states(here, number);
    if (has_edge && !Sizes::kApart) add_edge();

    // K S
    Sums<8> e;
    fill(e, 0.f);
    if (has_values) {
      fence_products(e);
      start_product_transposed(tile.origin, e, tile.k, tile.s(of_values));
      commit_products();
    }
    loads.wait_values(here, number);

    // Where dq is to wait aside, dQ = dO S^T is made while Z is.
    if (kAside) {
      fill(dq, 0.f);
      start_states<D>(tile.origin, dq, tile.dout, tile.states, place.col);
    } else {
      put_values();
    }
    wait_products<kAside ? 1 : 0>(e);
    // dQ += dO S^T
    if (!OneSlab) add_states<D>(tile.origin, dq, tile.dout, tile.states, place.col);

    // Z = beta (V - a K S)
    const float2 log = logs(), steps = of_rows(kDeltaBeta);
    if (has_values) {
      const float2 unit = kDirect ? make_float2(1.f, 1.f) : of_rows(kDeltaUnit);
      const float2 a = {unit.x * power(log.x), unit.y * power(log.y)};
      const auto rows_of_v = rows_of(tile.u, of_values), rows_of_g = rows_of(tile.g, of_values);
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        uint32_t values[4], g_block[4], z[4];
        rows_of_v.load(values, 8 * i);
        rows_of_g.load(g_block, 8 * i);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const float2 value = unpaired<T>(values[m]), g = unpaired<T>(g_block[m]);
          const float left = e.at[i + m / 2][m % 2 * 2], right = e.at[i + m / 2][m % 2 * 2 + 1];
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
            read = fmaf(g.x, e.at[i + m / 2][m % 2 * 2], fmaf(g.y, e.at[i + m / 2][m % 2 * 2 + 1], read));
          }
        }
      }
      if (last) {
        put_rows(sums.beta[place.group], mine, sum_over_rows(of_beta));
        if (gated) put_rows(sums.read[place.group], mine, sum_over_rows(read_of_g));
      }
    }
    // dK -= read * G S^T without rho. Of one slab this is divided by e^{L_C - L_j}, with which U dS^T will
    // come: both then have the same sums, and those of G U^T room beside them. The power is held at 2^-60,
    // so that the quotient stays in range; what that lets through of U dS^T is 2^-60 of it.
    constexpr float kLeast = -60.f;
    const float log_end = kGates ? vectors.element(kDeltaLog, kDeltaRows - 1) : 0.f;
    const auto until_end = [&](float log) { return fmaxf(log_end - log, kLeast); };
    const auto read_states = [&] {
      if constexpr (OneSlab) {
        const auto reads = [&](float log) { return power(log - until_end(log)); };
        fill(dk, 0.f);
        start_states<D, -1>(tile.origin, dk, tile.g, tile.states, place.col);
        if (kAside) wait_products<0>(dq);
        wait_products<0>(dk);
        if (!kDirect || !divides<T>(p, prepared)) {
          const float2 left = steps_left(steps);
          scale_rows(dk, first_only({left.x * reads(log.x), left.y * reads(log.y)}));
        }
      } else {
        Sums<Sizes::kCols / 8> of_state;
        fill(of_state, 0.f);
        add_states<D>(tile.origin, of_state, tile.g, tile.states, place.col);
        const float2 left = steps_left(steps);
        add_scaled(dk, of_state, first_only({-left.x * exp2_fast(log.x), -left.y * exp2_fast(log.y)}));
      }
    };
    if (!kAside) read_states();
    if (!Sizes::kApart && !kAside) {
      fence_tiles();
      __syncthreads();
      loads.start_gradients(here, v);
    }

    // U = X Z, of the warpgroup's own columns
    if (has_values) {
      fence_tiles();
      group_barrier();
      Sums<8> u;
      fill(u, 0.f);
#pragma unroll
      for (int first = 0; first < kTilesDown; first += 2) {
        Operand<2> x;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) x.at[j][i] = 0;
          if (first + j <= place.band) prepared.load(x.at[j], place.band, first + j);
        }
        fence_products(u);
        start_product<T>(tile.origin, u, x, tile.u, of_values, kTileRows * first);
        commit_products();
        wait_products<0>(u);
      }
      if (__builtin_expect(prepared.keeps(), false)) {
        const unsigned char* const all = here.prepared(p);
#pragma unroll 1
        for (int j = 0; j <= place.band; ++j) {
          uint32_t lost[4];
          load_lost(lost, all, place.band, j);
          add_product<T>(u, lost, tile.u, kTileRows * j, of_values);
        }
      }
      group_barrier();
      put_rows<T>(rows_of(tile.u, of_values), u);
    } else {
      group_barrier_for_racecheck(2);
    }

    if (kAside) read_states();
    if (!Sizes::kApart && !kAside) loads.wait_gradients(number);
    fence_tiles();
    __syncthreads();
    // G U^T, dO U^T; while dS is on its way, where it has no room before
    const auto start_steps = [&] {
      fill(of_steps, 0.f);
      fence_products(of_steps);
      if (!kBoth && place.group == Sizes::kQueries) {
        start_product_transposed(tile.origin, of_steps, tile.dout, tile.u);
      } else {
        start_product_transposed(tile.origin, of_steps, tile.g, tile.u);
      }
      commit_products();
    };
    if (kAside) {
      loads.start_gradients(here, v);
      start_steps();
      put_values();
      loads.wait_gradients(number);
    }

    // dK += w * U dS^T without rho
    const float2 log_now = logs();
    if constexpr (OneSlab) {
      start_states<D>(tile.origin, dk, tile.u, tile.gradients, place.col);
      if (!kAside) start_steps();
      wait_products<0>(of_steps);
      wait_products<0>(dk);
      if (kGates) {
        scale_rows(dk, first_only({power(until_end(log_now.x)), power(until_end(log_now.y))}));
      } else if (!here.first) {
        fill(dk, 0.f);
      }
    } else {
      Sums<Sizes::kCols / 8> of_state;
      fill(of_state, 0.f);
      add_states<D>(tile.origin, of_state, tile.u, tile.gradients, place.col);
      add_scaled(dk, of_state, first_only({exp2_fast(log_end - log_now.x), exp2_fast(log_end - log_now.y)}));
      start_steps();
      wait_products<0>(of_steps);
    }
    if (gated && here.first && Sizes::kApart) add_edge();
    if (kBoth && !kOwn) {
      fill(both, 0.f);
      add_scores<T>(tile.origin, both, tile.dout, tile.u);
    }
    if (!OneSlab) {
      // What earlier slabs gave; it would have no registers beside the next one's.
      const auto add = [&](Sums<8>& x, int which) {
        float* const so_far = tile.partial + which * kDeltaRows * kDeltaRows + threadIdx.x % 128;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          float& at = x.at[i / 4][i % 4];
          if (v != 0) at += so_far[i * 128];
          if (!last) so_far[i * 128] = at;
        }
      };
      if (place.group == 0) add(of_steps, 0);
      if (place.group == Sizes::kQueries) add(of_queries, 1);
    }
    __syncthreads();
  };
  if constexpr (OneSlab) {
    slab(0);
  } else {
#pragma unroll 1
    for (int v = 0; v < shape.V; v += Sizes::kSlab) slab(v);
  }

  if (kAside) put_aside<kThreads>(tile.aside(), dq);
  if (place.group == Sizes::kQueries && late) loads.template start_queries<kGroup>(here);
  if (gated) put_rows(later.state[place.group], mine, dot_rows<T>(dk, rows_of(tile.k, place.col)));
  // Of fewer tokens than steps the second warpgroup has less to do.
  if (unit_rows && place.group == (many_tokens ? 0 : Sizes::kQueries)) {
    put_rows(later.square[0], mine, square_rows<D, T>(rows_of(tile.k, 0)));
  }
  Operand<kTilesDown> left;
  const auto start_left = [&](const Operand<kTilesDown>& x, auto& sums) {
    fence_products(sums);
    start_product<T>(tile.origin, sums, x, tile.k, place.col);
    commit_products();
  };
  if (place.group == 0) weigh_steps<factors>(p, place, tile, vectors, grid.steps, of_steps, left);
  if (kOwn) {
    // dK += N K
    start_left(left, dk);
    fill(both, 0.f);
    add_scores<T>(tile.origin, both, tile.dout, tile.u);
    wait_products<0>(dk);
    keep(left);
    loads.template wait_queries<kGroup>(here);
    fence_tiles();
    __syncthreads();
  }
  if (place.group == Sizes::kQueries) {
    if (!kOwn) {
      loads.template wait_queries<kGroup>(here);
      fence_tiles();
      group_barrier();
    }
    if (unit_rows && has_tokens) put_rows(later.square[1], mine, square_rows<D, T>(rows_of(tile.q, 0)));
    weigh_queries<factors>(p, place, tile, vectors, of_queries);
  } else if (!kOwn) {
    group_barrier_for_racecheck();
  }
  if (kOwn) {
    fill(dq, 0.f);
    start_states<D>(tile.origin, dq, tile.dout, tile.states, place.col);
  }
  __syncthreads();

  if (kAside) take_back<kThreads>(dq, tile.aside());
  if (kOwn) wait_products<0>(dq);
  if (gated) {
    const float2 token_log = {vectors.element(kDeltaLog, min(mine * n, kDeltaRows - 1)),
                              vectors.element(kDeltaLog, min((mine + 8) * n, kDeltaRows - 1))};
    scale_rows(dq, {exp2_fast(token_log.x), exp2_fast(token_log.y)});
    // r q . S do; what stands below the last tokens' rows is others' to write
    const float2 state = has_tokens ? dot_rows<T>(dq, rows_of(tile.q, place.col)) : float2{0.f, 0.f};
    put_rows(later.query[place.group], mine,
             {tile.factors[mine] * state.x, tile.factors[mine + 8] * state.y});
  }
  if (kScaled) scale_rows(dq, {shape.scale, shape.scale});
  // dQ += dP K
  fill(left);
#pragma unroll
  for (int j = 0; j < kTilesDown; ++j) {
    if (has_tokens && Here::follow(place.band, j, n)) {
      tile.blocks(kScaled ? Tiles::kOfTokens : Tiles::kOfRows)
          .load(left.at[j], Blocks::of_tokens(many_tokens, place.band, j));
    }
  }
  start_left(left, dq);
  // dK += dP^T Q
  const auto add_queries = [&](auto& of_q) {
    constexpr int kBands = sizeof(of_q) / sizeof(of_q.at[0]);
    fill(of_q);
#pragma unroll
    for (int b = 0; b < kBands; ++b) {
      if (Here::follow(b, place.band, n)) {
        tile.blocks(Tiles::kOfTokens)
            .load_transposed(of_q.at[b], Blocks::of_tokens(many_tokens, b, place.band));
      }
    }
    fence_products(dk);
    start_product<T>(tile.origin, dk, of_q, tile.q, place.col);
    commit_products();
    wait_products<0>(dq, dk);
    keep(left);
    keep(of_q);
  };
  if (many_tokens) {
    Operand<4> of_q;
    add_queries(of_q);
  } else {
    Operand<2> of_q;
    add_queries(of_q);
  }
  // dK += (N + N^T) K: of a block on the diagonal both have a half, the rest is zero
  fill(left);
#pragma unroll
  for (int j = 0; j < kTilesDown; ++j) {
    uint32_t above[4] = {0, 0, 0, 0};
    if (!kOwn && j <= place.band)
      tile.blocks(kDirect ? Tiles::kStepCols : Tiles::kStepRows).load(left.at[j], block_of(place.band, j));
    if (j >= place.band) tile.blocks(Tiles::kStepCols).load_transposed(above, block_of(j, place.band));
#pragma unroll
    for (int i = 0; i < 4; ++i) left.at[j][i] |= above[i];
  }
  start_left(left, dk);
  wait_products<0>(dk);
  keep(left);

  float2 of_key, of_q;
  if (unit_rows) {
    of_key = inverse_length({later.square[0][mine], later.square[0][mine + 8]});
    of_q = inverse_length({later.square[1][mine], later.square[1][mine + 8]});
    // rho_j is put to dk_j here, in fp32: 1000 times a sum may be too large for 16 bits.
    scale_rows(dq, {shape.scale * of_q.x, shape.scale * of_q.y});
    scale_rows(dk, of_key);
    put_rows(later.along[0][place.group], mine, dot_rows<T>(dk, rows_of(tile.k, place.col)));
    if (has_tokens) {
      put_rows(later.along[1][place.group], mine, dot_rows<T>(dq, rows_of(tile.q, place.col)));
    }
  } else if (!kScaled) {
    scale_rows(dq, {shape.scale, shape.scale});
  }
  __syncthreads();
  if (unit_rows) {
    take_along<T>(dk, rows_of(tile.k, place.col), whole(later.along[0], mine), of_key);
    if (has_tokens) take_along<T>(dq, rows_of(tile.q, place.col), whole(later.along[1], mine), of_q);
  }
  const int64_t batch = here.piece.sequence.batch, first_row = here.piece.start * n;
  store_rows_by(rows_of(tile.q, place.col), dq,
                at<T>(p.dq, batch, here.piece.start + row, here.query_head, place.col), p.dq.stride[1],
                here.piece.length - row, shape.D - place.col);
  if (p.dk.dtype == DType::f32) {
    store_rows<float, T>(dk, at<float>(p.dk, batch, first_row, here.query_head, place.col), p.dk.stride[1],
                         row, here.rows, shape.D - place.col);
  } else {
    store_rows_by(rows_of(tile.k, place.col), dk,
                  at<T>(p.dk, batch, first_row + row, here.query_head, place.col), p.dk.stride[1],
                  here.rows - row, shape.D - place.col);
  }

  // What warps added up stands since the last barrier.
  if (here.first && static_cast<int>(threadIdx.x) < here.rows) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i <= Sizes::kParts; ++i) sum += sums.beta[i][threadIdx.x];
    if (divides<T>(p, prepared)) sum = divide_fast(sum, vectors.element(kDeltaBeta, threadIdx.x));
    static_cast<float*>(
        p.dbeta.data)[batch * p.dbeta.stride[0] + (first_row + threadIdx.x) * p.dbeta.stride[1] +
                      here.head * p.dbeta.stride[2]] = sum;
  }
  if (gated && warp == kThreads / 32 - 1) put_gate_gradients<D>(p, here, sums, later, vectors);
}

// Bytes of shared memory without which a block does not run.
template <typename T, int D>
constexpr int gradients_least() {
  return std::max(D <= 128 ? GradientTiles<T, D, true>::bytes(true) : 0,
                  GradientTiles<T, D, false>::bytes(true));
}

template <typename T, int D, bool OneSlab, Factors factors = Factors::any>
cudaError_t launch_gradients_of(const DeltaGradients& p, cudaStream_t stream) {
  constexpr auto kernel = gradients<T, D, OneSlab, factors>;
  using Tiles = GradientTiles<T, D, OneSlab>;
  static_assert(!OneSlab || Tiles::bytes(true) <= (D == 64 ? 56 : 113) * 1024,
                "four blocks or two have 228 KB, of which each gives away one");
  if (const cudaError_t error = allow_shared<kernel>(Tiles::bytes(true)); error != cudaSuccess) {
    return error;
  }
  const int tokens = delta_chunk(p.shape.n);
  const int64_t blocks = piece_count(p.shape.tokens, tokens) * p.shape.query_heads;
  if (blocks == 0 || p.shape.tokens.tokens == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  GradientBoxes boxes{};
  bool has = false;
  if (const cudaError_t error = has_boxes<kernel>(has); error != cudaSuccess) return error;
  if (has) {
    if (const cudaError_t error = describe(boxes, p); error != cudaSuccess) return error;
  }
  constexpr int kThreads = GradientSizes<D>::kThreads;
  const int bytes = Tiles::bytes(has_many(tokens));
  kernel<<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(p, GradientGrid(p.shape), boxes);
  return cudaGetLastError();
}

template <typename T, int D>
cudaError_t launch_gradients(const DeltaGradients& p, cudaStream_t stream) {
  if constexpr (D <= 128) {
    if (p.shape.V <= GradientSizes<D>::kSlab) {
      // (At D = 64 the compiler then lets no product run beside another.)
      if constexpr (D == 128) {
        if (!p.gated) {
          return p.shape.unit ? launch_gradients_of<T, D, true, Factors::lengths>(p, stream)
                              : launch_gradients_of<T, D, true, Factors::none>(p, stream);
        }
      }
      return launch_gradients_of<T, D, true>(p, stream);
    }
  }
  return launch_gradients_of<T, D, false>(p, stream);
}

}  // namespace girih::kernels::delta_product
