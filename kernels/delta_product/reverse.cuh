// The gradient of the state from chunk to chunk, from the end. dS: of the state after the chunk.
//
//     dU_j = sum_t P_tj do_t + w_j dS^T k_j        G = X^T dU
//     dS <- e^{L_C} dS + sum_t r_t q_t do_t^T - sum_i k_i read_i G_i^T
//
// A block as in the scan, of whose products these are the mirror images: a chain that keeps dS^T in
// registers, a warpgroup that makes P and its part of dU ahead of it, two warps that store dS and G, two that
// load. A memory head's query heads come one after another in stages of their own.
#pragma once

#include "delta_product/chain.cuh"
#include "delta_product/tokens.cuh"

namespace girih::kernels::delta_product {

constexpr int kReverseChain = 4, kReverseMakers = 4, kReverseStores = 2;  // warps
constexpr int kReverseThreads = 32 * (kReverseChain + kReverseMakers + kReverseStores + kLoaders);

// What one query head brings to a chunk: `Rows` tokens, 64, or with several steps a token 32.
template <typename T, int D, int Rows>
struct GradientStage {
  using Q = BlockTile<T, D, Rows>;
  using O = BlockTile<T, kScanColumns, Rows>;
  static constexpr int kBytes = Q::kBytes + O::kBytes, kFactorBytes = Rows * 12;

  unsigned char *data, *after;

  __device__ Q q() const { return {reinterpret_cast<T*>(data)}; }
  __device__ O dout() const { return {reinterpret_cast<T*>(data + Q::kBytes)}; }
  // Of every token scale rho_t and L_t, and r_t.
  __device__ float2* tokens() const { return reinterpret_cast<float2*>(after); }
  __device__ float* read() const { return reinterpret_cast<float*>(after + Rows * 8); }
};

constexpr int kReverseStages = 4, kReverseSlots = 2, kReverseMade = 2;

struct ReverseBarriers {
  uint64_t full[kReverseStages], empty[kReverseStages];  // stages
  uint64_t made[kReverseMade], used[kReverseMade];       // dU's part
  // Of the query heads; ready: their factors.
  uint64_t query_full[kReverseStages], query_ready[kReverseStages], query_empty[kReverseStages];
  uint64_t state[kReverseSlots], state_stored[kReverseSlots];    // dS
  uint64_t update[kReverseSlots], update_stored[kReverseSlots];  // G, or dv
};
constexpr int kReverseBarrierBytes = 384;
static_assert(sizeof(ReverseBarriers) <= kReverseBarrierBytes, "");

template <typename T, int D, int Rows>
struct ReverseSpace {
  using Keys = Stage<T, D, false>;
  using Query = GradientStage<T, D, Rows>;
  using StateSlot = PaddedTile<T, kScanColumns, D>;
  using UpdateSlot = PaddedTile<T, kDeltaRows, kScanColumns>;
  static constexpr int kSlotBytes = StateSlot::kBytes + UpdateSlot::kBytes;
  // Of one stage of both kinds.
  static constexpr int kStageBytes = Keys::kBytes + Query::kBytes + Query::kFactorBytes;

  unsigned char* data;
  int stages, slots;

  __host__ __device__ static constexpr int bytes(int stages, int slots) {
    return kReverseBarrierBytes + kReverseMade * Values<T>::kBytes + stages * kStageBytes +
           slots * kSlotBytes;
  }

  __device__ Values<T> made(int i) const { return {reinterpret_cast<T*>(data + i * Values<T>::kBytes)}; }
  __device__ Keys stage(int i) const { return {after_made() + i * Keys::kBytes}; }
  __device__ Query query(int i) const {
    unsigned char* const queries = after_made() + stages * Keys::kBytes;
    unsigned char* const after = queries + stages * Query::kBytes;
    return {queries + i * Query::kBytes, after + i * Query::kFactorBytes};
  }
  __device__ StateSlot state(int i) const { return {reinterpret_cast<T*>(slot(i))}; }
  __device__ UpdateSlot update(int i) const { return {reinterpret_cast<T*>(slot(i) + StateSlot::kBytes)}; }
  __device__ ReverseBarriers& barriers() const {
    return *reinterpret_cast<ReverseBarriers*>(data + bytes(stages, slots) - kReverseBarrierBytes);
  }

 private:
  __device__ unsigned char* after_made() const { return data + kReverseMade * Values<T>::kBytes; }
  __device__ unsigned char* slot(int i) const { return after_made() + stages * kStageBytes + i * kSlotBytes; }
};

template <typename T, int D, int Rows>
__device__ inline void load_reverse(const ReversePass& pass, const Part& part,
                                    const ReverseSpace<T, D, Rows>& space, int thread) {
  constexpr int kThreads = 32 * kLoaders;
  using Query = typename ReverseSpace<T, D, Rows>::Query;
  const DeltaReverse& p = pass.scan;
  const int n = p.shape.n, tokens = delta_chunk(n), group = p.shape.query_heads / p.shape.heads;
  const int64_t batch = part.piece.sequence.batch, first_head = static_cast<int64_t>(part.head) * group;
  const typename ReverseSpace<T, D, Rows>::Keys::Loader loader(
      at<T>(p.k, batch, part.piece.start * n, part.head / p.shape.key_share, 0), p.k.stride[1], p.shape.D,
      thread);
  const TileCopier<kThreads, typename Query::Q> q(
      at<T>(p.q, batch, part.piece.start, first_head / p.shape.query_share, 0), p.q.stride[1], p.shape.D,
      thread);
  const TileCopier<kThreads, typename Query::O> dout(
      at<T>(p.dout, batch, part.piece.start, first_head, part.col), p.dout.stride[1], p.shape.V - part.col,
      thread);
  ReverseBarriers& barriers = space.barriers();
  Turn turn, query_turn;
#pragma unroll 1
  for (int i = 0; i < part.chunks; ++i) {
    const int c = part.chunks - 1 - i, length = tokens_in(part, tokens, c);
    wait(&barriers.empty[turn.place], turn.parity ^ 1);
    loader.start(space.stage(turn.place), c * tokens * n, length * n,
                 prepared_at(p.prepared, p.shape, part.chunk + c, part.head));
    arrive_after_copies(&barriers.full[turn.place]);
    turn.next(pass.stages);
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      wait(&barriers.query_empty[query_turn.place], query_turn.parity ^ 1);
      const Query stage = space.query(query_turn.place);
      q.start(stage.q(), c * tokens, length, member * p.q.stride[2]);
      dout.start(stage.dout(), c * tokens, part.transition ? 0 : length, member * p.dout.stride[2]);
      arrive_after_copies(&barriers.query_full[query_turn.place]);
      query_turn.next(pass.stages);
    }
  }
  commit_copies();
  wait_copies<0>();
}

// sum_t P_tj do_t of every chunk, what is known of dU without dS; warp w has the rows 16 w to 16 w + 15. What
// it finds of tokens goes to memory too, for the gradients.
//
// Direct: every row's rho is 1 and its L 0, and so is its w 1. (Those of rows that are not there are not, but
// their keys are zero.) Then Y is added at once to what has been made of dU, which is waited for before any
// of the chunk's queries is used (n = 2, 4 x 4096 tokens, 16 heads of 128: 189 us instead of 195).
template <bool Direct, typename T, int D, int Rows>
__device__ inline void make_given(const ReversePass& pass, const Part& part,
                                  const ReverseSpace<T, D, Rows>& space, int warp) {
  constexpr int kEights = Rows / 8;
  const DeltaReverse& p = pass.scan;
  const int n = p.shape.n, group = p.shape.query_heads / p.shape.heads;
  const bool tells = !pass.walk.alone && part.col == 0;
  ReverseBarriers& barriers = space.barriers();
  Turn turn, query_turn, made;
#pragma unroll 1
  for (int c = part.chunks - 1; c >= 0; --c) {
    Sums<8> du;
    fill(du, 0.f);
    wait(&barriers.full[turn.place], turn.parity);
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      const ReverseSpace<T, D, Rows> here{space.data + worked_out_here(0), space.stages, space.slots};
      const auto stage = here.stage(turn.place);
      const Vectors vectors = stage.prepared().vectors();
      const auto query = here.query(query_turn.place);
      wait(&barriers.query_full[query_turn.place], query_turn.parity);
      fence_tiles();

      // K Q^T
      Sums<kEights> scores;
      fence_products();
      start_product_transposed<false>(scores, stage.k(), query.q());
      commit_products();
      float* const factors = p.factors + ((part.chunk + c) * p.shape.query_heads +
                                          static_cast<int64_t>(part.head) * group + member) *
                                             kDeltaRows;
      for_each_token(query.q(), p.shape, vectors, warp, [&](int token, float factor, float log) {
        query.tokens()[token] = {factor, log};
        query.read()[token] = factor * exp2_fast(log);
        if (!tells) return;
        factors[token] = factor;
        if (Rows < kDeltaRows) factors[Rows + token] = p.shape.scale;  // no token's
      });
      barrier_wait(1, 32 * kReverseMakers);
      arrive_once(&barriers.query_ready[query_turn.place]);
      wait_products<0>(scores);

      // dU += P^T dO
      if constexpr (Direct) {
        scale_transposed(scores, worked_out_here(n), warp, p.shape.scale);
      } else {
        weigh_transposed(scores, vectors, worked_out_here(n), warp, query.tokens());
      }
      Operand<kEights / 2> weights;
      round_to<T>(weights, scores);
      fence_products(du);
      start_product<T>(du, weights, query.dout());
      commit_products();
      wait_products<0>(du);
      keep(weights);
      arrive_once(&barriers.query_empty[query_turn.place]);
      query_turn.next(pass.stages);
    }
    Operand<kTilesDown> rounded;
    round_to<T>(rounded, du);
    wait(&barriers.used[made.place], made.parity ^ 1);
    store_blocks(space.made(made.place), kTileRows * warp, 0, rounded);
    arrive_once(&barriers.made[made.place]);
    made.next(kReverseMade);
    turn.next(pass.stages);
  }
}

// S^T += a Q, a = (r * dO)^T of the warp's columns, under way afterwards.
template <int Bands, typename T, int D, int Rows>
__device__ inline void start_queries(State<D>& s, Operand<Bands>& a, const GradientStage<T, D, Rows>& query,
                                     int warp) {
#pragma unroll
  for (int b = 0; b < Bands; ++b) {
    load_weighed_transposed<T>(a.at[b], query.dout(), 16 * warp, kTileRows * b, query.read() + kTileRows * b);
  }
  begin(s);
#pragma unroll
  for (int b = 0; b < Bands; ++b) {
#pragma unroll
    for (int i = 0; i < State<D>::kSlabs; ++i) {
      start_product<T>(s.slab[i], a.at[b], query.q(), 64 * i, kTileRows * b);
    }
  }
  commit_products();
}

// G^T += dU^T X by the blocks that `load` gives, transposed, warp by warp.
template <typename T, class Load>
__device__ inline void add_transposed_solution(Halves& g, const Operand<kTilesDown>& du, const Load& load) {
#pragma unroll
  for (int i = 0; i < kTilesDown; ++i) {
#pragma unroll
    for (int j = 0; j <= i; ++j) {
      uint32_t x[4];
      load(x, i, j);
      mma<T>(g[j / 2].at[j % 2 * 2], du.at[i], x[0], x[1]);
      mma<T>(g[j / 2].at[j % 2 * 2 + 1], du.at[i], x[2], x[3]);
    }
  }
}

// G^T = dU^T X, under way afterwards.
template <typename T>
__device__ inline void start_transposed_solution(Halves& g, const Operand<kTilesDown>& du,
                                                 const InverseRows& x) {
  fence_products();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const auto matrices = [&](int i, int half) {
    return descriptor(shared_address(x.data), InverseRows::block(i, 2 * half), 128, InverseRows::kNext);
  };
  group_mma<T, Lines::columns, 32, false>(g[0].at, du.at[0], matrices(0, 0));
  group_mma<T, Lines::columns, 32, false>(g[1].at, du.at[2], matrices(2, 1));
  group_mma<T, Lines::columns, 32>(g[1].at, du.at[3], matrices(3, 1));
#pragma unroll
  for (int i = 1; i < kTilesDown; ++i) group_mma<T, Lines::columns, 32>(g[0].at, du.at[i], matrices(i, 0));
#else
  fill(g[0], 0.f), fill(g[1], 0.f);
  add_transposed_solution<T>(g, du,
                             [&](uint32_t(&block)[4], int i, int j) { x.load_transposed(block, i, j); });
#endif
  commit_products();
}

template <bool Direct, typename T, int D, int Rows>
__device__ inline void run_reverse_chain(const ReversePass& pass, const Part& part,
                                         const ReverseSpace<T, D, Rows>& space, int warp) {
  constexpr bool kWhole = RoundedState<T, D>::kWhole;
  const DeltaReverse& p = pass.scan;
  const int group = p.shape.query_heads / p.shape.heads, first_col = part.col + 16 * warp;
  const bool stores = !pass.walk.alone;
  ReverseBarriers& barriers = space.barriers();
  State<D> s;  // dS^T
  start_state(s, p.shape, pass.walk, part, first_col, p.initial);
  RoundedState<T, D> rounded;
  rounded.take(s);

  Turn turn, query_turn, slot, made;
  const auto wait_for_queries = [&] {
    wait(&barriers.query_ready[query_turn.place], query_turn.parity);
    fence_tiles();
  };
  ColumnBlocks values;
  const auto load_values = [&](int j) {
    load_block_transposed(values[j], space.made(made.place), 16 * warp, 16 * j);
  };
  Sums<8> y;
  const auto wait_for_stage = [&] {
    wait(&barriers.full[turn.place], turn.parity);
    wait_for_queries();
    if constexpr (Direct) {
      wait(&barriers.made[made.place], made.parity);
#pragma unroll
      for (int j = 0; j < kTilesDown; ++j) load_values(j);
      widen<T>(y, values);
    }
  };
  if (part.chunks > 0) wait_for_stage();
#pragma unroll 1
  for (int c = part.chunks - 1; c >= 0; --c) {
    const auto stage = space.stage(turn.place);
    const Prepared prepared = stage.prepared();
    const Vectors vectors = prepared.vectors();

    // Y^T = dS^T K^T, and with gates dS decays meanwhile
    rounded.template start_read<Direct>(y, s, stage.k());
    const RowFactors write = Direct ? RowFactors() : RowFactors(vectors, kDeltaWrite);
    if (stores) {
      wait(&barriers.state_stored[slot.place], slot.parity ^ 1);
      rounded.leave(s, space.state(slot.place), warp);
      arrive_once(&barriers.state[slot.place]);
    }
    // S is there. Without a word of it the compiler waits for Y too.
    finish<1>(s);
    if (!Direct && p.gated) scale(s, exp2_fast(vectors.element(kDeltaLog, kDeltaRows - 1)));
    const bool keeps = prepared.keeps();

    // dS^T += (r * dO)^T Q, the last query head's still under way when Y is there. Unless Direct, all of them
    // come before what has been made of dU, to which each adds: there may be more than stages.
    Operand<Rows / kTileRows> read_by;
    const auto add_queries = [&] { start_queries(s, read_by, space.query(query_turn.place), warp); };
    const auto leave_queries = [&] {
      finish<0>(s);
      keep(read_by);
      arrive_once(&barriers.query_empty[query_turn.place]);
      query_turn.next(pass.stages);
    };
#pragma unroll 1
    for (int member = 1; member < group; ++member) {
      add_queries();
      leave_queries();
      wait_for_queries();
    }
    add_queries();
    if (!Direct) wait(&barriers.made[made.place], made.parity);
#pragma unroll
    for (int j = 0; j < kTilesDown; ++j) {
      if (!Direct && kWhole) load_values(j);
    }
    wait_products<kWhole ? 1 : 0>(y);
    rounded.keep();

    // dU_j += w_j Y_j
    if constexpr (!Direct) {
#pragma unroll
      for (int j = 0; j < kTilesDown; ++j) {
        if (!kWhole) load_values(j);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float(&of)[4] = y.at[2 * j + half];
          const float2 by = write.at[2 * j + half];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float2 value = unpaired<T>(values[j][2 * half + i]);
            of[2 * i] = fmaf(by.x, of[2 * i], value.x);
            of[2 * i + 1] = fmaf(by.y, of[2 * i + 1], value.y);
          }
        }
      }
    }
    arrive_once(&barriers.used[made.place]);
    made.next(kReverseMade);
    Operand<kTilesDown> du;
    round_to<T>(du, y);

    // G^T = dU^T X
    Halves g;
    start_transposed_solution<T>(g, du, stage.inverse());
    const RowFactors read(vectors, kDeltaRead);
    wait_products<0>(g[0], g[1]);
    keep(du);
    leave_queries();
    if (__builtin_expect(keeps, false)) {
      const auto* all = prepared_at(p.prepared, p.shape, part.chunk + c, part.head);
      add_transposed_solution<T>(g, du, [&](uint32_t(&x)[4], int i, int j) {
        load_lost(x, all, i, j);
#pragma unroll
        for (int m = 0; m < 4; ++m) x[m] = transpose_pairs(x[m]);
      });
    }

    // dS^T <- dS^T - (read * G)^T K. What is left of it is G, or dv where that is the same as read * G.
    Operand<kTilesDown> left, update;
    const bool same = divides<T>(p, prepared);
    if (stores && !same) round_to<T>(left, g);
    scale_chunk_rows(g, [&](int row) { return read.at[row / 8]; });
    round_to<T>(update, g);
    start_update<T, -1>(s, update, stage.k());
    if (stores) {
      wait(&barriers.update_stored[slot.place], slot.parity ^ 1);
      if (same) {
        leave_transposed(space.update(slot.place), update, warp);
      } else {
        leave_transposed(space.update(slot.place), left, warp);
      }
      arrive_once(&barriers.update[slot.place]);
      slot.next(pass.slots);
    }
    uint64_t* const emptied = &barriers.empty[turn.place];
    turn.next(pass.stages);
    // The fence's time is that of the update, if there is another stage.
    const bool more = c > 0, early = more && pass.stages > 1;
    if (early) wait_for_stage();
    finish<0>(s);
    keep(update);
    rounded.take(s);
    arrive_once(emptied);
    if (more && !early) wait_for_stage();
  }
  end_state(s, p.shape, pass.walk, part, first_col, p.final);
}

template <typename T, int D, int Rows>
__device__ inline void store(const ReversePass& pass, const Part& part, const ReverseSpace<T, D, Rows>& space,
                             int worker) {
  const DeltaReverse& p = pass.scan;
  const int n = p.shape.n, tokens = delta_chunk(n), cols = p.shape.V - part.col;
  ReverseBarriers& barriers = space.barriers();
  Turn slot;
#pragma unroll 1
  for (int c = part.chunks - 1; c >= 0; --c) {
    T* const gradients = state_at(static_cast<T*>(p.gradients), p.shape, part.chunk + c, part.head, part.col);
    wait(&barriers.state[slot.place], slot.parity);
    store_rows<kReverseStores>(space.state(slot.place), gradients, p.shape.D, cols, p.shape.D, worker);
    arrive_once(&barriers.state_stored[slot.place]);
    T* const dz =
        at<T>(p.dz, part.piece.sequence.batch, (part.piece.start + c * tokens) * n, part.head, part.col);
    wait(&barriers.update[slot.place], slot.parity);
    store_rows<kReverseStores>(space.update(slot.place), dz, p.dz.stride[1], tokens_in(part, tokens, c) * n,
                               cols, worker);
    arrive_once(&barriers.update_stored[slot.place]);
    slot.next(pass.slots);
  }
}

// Of a thread, by role.
template <int D>
struct ReverseRegisters {
  static constexpr int kChain = D == 256 ? 240 : 216, kMakers = D == 256 ? 152 : 168,
                       kOthers = 504 - kChain - kMakers;
};

template <typename T, int D, int Rows, bool Direct>
__global__ void __launch_bounds__(kReverseThreads, 1) reverse(const __grid_constant__ ReversePass pass) {
  using Registers = ReverseRegisters<D>;
  static_assert(Registers::kChain + Registers::kMakers + Registers::kOthers <= registers_of(kReverseThreads));
  extern __shared__ __align__(1024) unsigned char shared[];
  Part part;
  if (!part_of(pass.scan.shape, pass.walk, blockIdx.x, part)) return;
  const ReverseSpace<T, D, Rows> space{shared, pass.stages, pass.slots};
  if (threadIdx.x == 0) {
    ReverseBarriers& barriers = space.barriers();
    for (int i = 0; i < pass.stages; ++i) {
      init_barrier(&barriers.full[i], 32 * kLoaders);
      init_barrier(&barriers.empty[i], once(kReverseChain));
      init_barrier(&barriers.query_full[i], 32 * kLoaders);
      init_barrier(&barriers.query_ready[i], once(kReverseMakers));
      init_barrier(&barriers.query_empty[i], once(kReverseChain + kReverseMakers));
    }
    for (int i = 0; i < kReverseMade; ++i) {
      init_barrier(&barriers.made[i], once(kReverseMakers));
      init_barrier(&barriers.used[i], once(kReverseChain));
    }
    for (int i = 0; i < pass.slots; ++i) {
      init_barrier(&barriers.state[i], once(kReverseChain));
      init_barrier(&barriers.state_stored[i], once(kReverseStores));
      init_barrier(&barriers.update[i], once(kReverseChain));
      init_barrier(&barriers.update_stored[i], once(kReverseStores));
    }
  }
  __syncthreads();
  const int warp = warp_index(), maker = warp - kReverseChain, worker = maker - kReverseMakers;
  if (maker < 0) {
    take_registers<Registers::kChain>();
    run_reverse_chain<Direct>(pass, part, space, warp);
  } else if (worker < 0) {
    leave_registers<Registers::kMakers>();
    make_given<Direct>(pass, part, space, maker);
  } else {
    leave_registers<Registers::kOthers>();
    if (worker >= kReverseStores) {
      load_reverse(pass, part, space, threadIdx.x - (kReverseThreads - 32 * kLoaders));
    } else if (!pass.walk.alone) {
      store(pass, part, space, worker);
    }
  }
}

// Bytes of shared memory without which a block does not run.
template <typename T, int D>
constexpr int reverse_least() {
  return ReverseSpace<T, D, kDeltaRows>::bytes(1, 1);
}

template <bool Direct, typename T, int D, int Rows>
cudaError_t launch_reverse_of(const ReversePass& pass, int64_t blocks, int limit, cudaStream_t stream) {
  constexpr auto kKernel = reverse<T, D, Rows, Direct>;
  if (const cudaError_t error = allow_shared<kKernel>(limit); error != cudaSuccess) return error;
  const int bytes = ReverseSpace<T, D, Rows>::bytes(pass.stages, pass.slots);
  kKernel<<<static_cast<unsigned>(blocks), kReverseThreads, bytes, stream>>>(pass);
  return cudaGetLastError();
}

template <typename T, int D, int Rows>
cudaError_t launch_reverse_of(ReversePass pass, cudaStream_t stream) {
  using Space = ReverseSpace<T, D, Rows>;
  const DeltaShape& shape = pass.scan.shape;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  const auto stages_beside = [&](int slots) {
    return std::min((limit - Space::bytes(0, slots)) / Space::kStageBytes, kReverseStages);
  };
  pass.slots = pass.walk.alone ? 0 : stages_beside(kReverseSlots) >= 2 ? kReverseSlots : 1;
  pass.stages = stages_beside(pass.slots);
  if (pass.stages < 1) return cudaErrorInvalidConfiguration;
  const int64_t blocks = blocks_of(shape, pass.walk);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  if constexpr (RoundedState<T, D>::kWhole) {
    // All of a chunk's queries are there before any is used; those of two, so that nobody waits for them.
    const bool fits = 2 * (shape.query_heads / shape.heads) <= pass.stages;
    if (fits && !pass.scan.gated && !shape.unit)
      return launch_reverse_of<true, T, D, Rows>(pass, blocks, limit, stream);
  }
  return launch_reverse_of<false, T, D, Rows>(pass, blocks, limit, stream);
}

template <typename T, int D>
cudaError_t launch_reverse(const ReversePass& pass, cudaStream_t stream) {
  return has_many(delta_chunk(pass.scan.shape.n)) ? launch_reverse_of<T, D, kDeltaRows>(pass, stream)
                                                  : launch_reverse_of<T, D, kDeltaRows / 2>(pass, stream);
}

}  // namespace girih::kernels::delta_product
