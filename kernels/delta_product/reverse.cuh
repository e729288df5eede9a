// The gradient of the state from chunk to chunk, from the end. dS: of the state after the chunk.
//
//     dU_j = sum_t P_tj do_t + w_j dS^T k_j        G = X^T dU
//     dS <- e^{L_C} dS + sum_t r_t q_t do_t^T - sum_i k_i read_i G_i^T
//
// A block as in the scan, of whose products these are the mirror images: a chain that keeps dS^T in
// registers, two warps that store dS and G, two that load. A memory head's query heads come one after another
// in stages of their own.
#pragma once

#include "delta_product/chain.cuh"

namespace girih::kernels::delta_product {

constexpr int kReverseChain = 4, kReverseStores = 2;  // warps
constexpr int kReverseThreads = 32 * (kReverseChain + kReverseStores + kLoaders);

// What one query head brings to a chunk, in bands of 16 tokens: four, or with several steps a token two.
template <typename T, int D>
struct GradientStage {
  using Q = BlockTile<T, D, kTileRows>;
  using O = SharedTile<T, kTileRows, kScanColumns>;
  static constexpr int kFactorBytes = kDeltaRows * 4, kBandBytes = Q::kBytes + O::kBytes;

  unsigned char* data;
  float* factors;

  __host__ __device__ static constexpr int bytes(int bands) { return bands * kBandBytes; }
  __device__ Q q(int band) const { return {reinterpret_cast<T*>(data + band * kBandBytes)}; }
  __device__ O dout(int band) const { return {reinterpret_cast<T*>(data + band * kBandBytes + Q::kBytes)}; }
};
// Two also where the tokens fill only one: the chain has two forms.
__host__ __device__ constexpr int bands_of(int n) { return n == 1 ? kTilesDown : 2; }

constexpr int kReverseStages = 4, kReverseSlots = 2;

struct ReverseBarriers {
  uint64_t full[kReverseStages], empty[kReverseStages];              // stages
  uint64_t query_full[kReverseStages], query_empty[kReverseStages];  // of the query heads
  uint64_t state[kReverseSlots], state_stored[kReverseSlots];        // dS
  uint64_t update[kReverseSlots], update_stored[kReverseSlots];      // G
};
constexpr int kReverseBarrierBytes = 256;
static_assert(sizeof(ReverseBarriers) <= kReverseBarrierBytes, "");

template <typename T, int D>
struct ReverseSpace {
  using Query = GradientStage<T, D>;
  using StateSlot = PaddedTile<T, kScanColumns, D>;
  using UpdateSlot = PaddedTile<T, kDeltaRows, kScanColumns>;
  static constexpr int kSlotBytes = StateSlot::kBytes + UpdateSlot::kBytes;

  unsigned char* data;
  int stages, slots, bands;

  // Of one stage of both kinds.
  __host__ __device__ static constexpr int stage_bytes(int bands) {
    return Stage<T, D>::kBytes + Query::bytes(bands) + Query::kFactorBytes;
  }
  __host__ __device__ static constexpr int bytes(int stages, int slots, int bands) {
    return kReverseBarrierBytes + stages * stage_bytes(bands) + slots * kSlotBytes;
  }

  __device__ Stage<T, D> stage(int i) const { return {data + i * Stage<T, D>::kBytes}; }
  __device__ Query query(int i) const {
    unsigned char* const queries = data + stages * Stage<T, D>::kBytes;
    unsigned char* const factors = queries + stages * Query::bytes(bands);
    return {queries + i * Query::bytes(bands), reinterpret_cast<float*>(factors + i * Query::kFactorBytes)};
  }
  __device__ StateSlot state(int i) const { return {reinterpret_cast<T*>(slot(i))}; }
  __device__ UpdateSlot update(int i) const { return {reinterpret_cast<T*>(slot(i) + StateSlot::kBytes)}; }
  __device__ ReverseBarriers& barriers() const {
    return *reinterpret_cast<ReverseBarriers*>(data + bytes(stages, slots, bands) - kReverseBarrierBytes);
  }

 private:
  __device__ unsigned char* slot(int i) const { return data + stages * stage_bytes(bands) + i * kSlotBytes; }
};

template <typename T, int D>
__device__ inline void load_reverse(const ReversePass& pass, const Part& part,
                                    const ReverseSpace<T, D>& space, int thread) {
  constexpr int kThreads = 32 * kLoaders;
  using Query = typename ReverseSpace<T, D>::Query;
  const DeltaReverse& p = pass.scan;
  const int n = p.shape.n, tokens = delta_chunk(n), group = p.shape.query_heads / p.shape.heads;
  const int64_t batch = part.piece.sequence.batch, first_head = static_cast<int64_t>(part.head) * group;
  const auto loader = stage_loader<T, D>(p.shape, p.k, p.du, part, thread);
  const TileCopier<kThreads, typename Query::Q> q(at<T>(p.q, batch, part.piece.start, first_head, 0),
                                                  p.q.stride[1], p.shape.D, thread);
  const TileCopier<kThreads, typename Query::O> dout(
      at<T>(p.dout, batch, part.piece.start, first_head, part.col), p.dout.stride[1], p.shape.V - part.col,
      thread);
  ReverseBarriers& barriers = space.barriers();
  Turn turn, query_turn;
#pragma unroll 1
  for (int i = 0; i < part.chunks; ++i) {
    const int c = part.chunks - 1 - i, length = tokens_in(part, tokens, c);
    wait(&barriers.empty[turn.place], turn.parity ^ 1);
    loader.start(space.stage(turn.place), c * tokens * n, length * n, !part.transition,
                 prepared_at(p.prepared, p.shape, part.chunk + c, part.head));
    arrive_after_copies(&barriers.full[turn.place]);
    turn.next(pass.stages);
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      wait(&barriers.query_empty[query_turn.place], query_turn.parity ^ 1);
      const auto stage = space.query(query_turn.place);
#pragma unroll 1
      for (int b = 0; b < space.bands; ++b) {
        const int before = b * kTileRows;
        q.start(stage.q(b), c * tokens + before, length - before, member * p.q.stride[2]);
        dout.start(stage.dout(b), c * tokens + before, part.transition ? 0 : length - before,
                   member * p.dout.stride[2]);
      }
      if (thread < kDeltaRows / 4) {
        const float* from =
            p.factors + (((part.chunk + c) * p.shape.query_heads + first_head + member) * 2 + 1) * kDeltaRows;
        copy_async(shared_address(stage.factors + thread * 4), from + thread * 4, true);
      }
      arrive_after_copies(&barriers.query_full[query_turn.place]);
      query_turn.next(pass.stages);
    }
  }
  commit_copies();
  wait_copies<0>();
}

// S^T += a Q, a = (r * dO)^T of the warp's columns, under way afterwards.
template <int Bands, typename T, int D>
__device__ inline void start_queries(State<D>& s, Operand<Bands>& a, const GradientStage<T, D>& query,
                                     int warp) {
#pragma unroll
  for (int b = 0; b < Bands; ++b) {
    load_weighed_transposed<T>(a.at[b], query.dout(b), 16 * warp, 0, query.factors + kTileRows * b);
  }
  begin(s);
#pragma unroll
  for (int b = 0; b < Bands; ++b) {
#pragma unroll
    for (int i = 0; i < State<D>::kSlabs; ++i) start_product<T>(s.slab[i], a.at[b], query.q(b), 64 * i);
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

template <typename T, int D, int Bands>
__device__ inline void run_reverse_chain(const ReversePass& pass, const Part& part,
                                         const ReverseSpace<T, D>& space, int warp) {
  constexpr bool kWhole = RoundedState<T, D>::kWhole;
  const DeltaReverse& p = pass.scan;
  const int group = p.shape.query_heads / p.shape.heads, first_col = part.col + 16 * warp;
  const bool stores = !pass.walk.alone;
  ReverseBarriers& barriers = space.barriers();
  State<D> s;  // dS^T
  start_state(s, p.shape, pass.walk, part, first_col, p.initial);
  RoundedState<T, D> rounded;
  rounded.take(s);

  Turn turn, query_turn, slot;
  const auto wait_for_queries = [&] {
    wait(&barriers.query_full[query_turn.place], query_turn.parity);
    fence_tiles();
  };
  const auto wait_for_stage = [&] {
    wait(&barriers.full[turn.place], turn.parity);
    wait_for_queries();
  };
  if (part.chunks > 0) wait_for_stage();
#pragma unroll 1
  for (int c = part.chunks - 1; c >= 0; --c) {
    const Stage<T, D> stage = space.stage(turn.place);
    const Prepared prepared = stage.prepared();
    const Vectors vectors = prepared.vectors();

    // Y^T = dS^T K^T, and dS decays meanwhile
    Sums<8> y;
    rounded.start_read(y, s, stage.k());
    uint32_t values[kTilesDown][4];
    const auto load_values = [&](int j) { load_block_transposed(values[j], stage.v(), 16 * warp, 16 * j); };
#pragma unroll
    for (int j = 0; j < kTilesDown; ++j) {
      if (kWhole) load_values(j);
    }
    const RowFactors write(vectors, kDeltaWrite);
    if (stores) {
      wait(&barriers.state_stored[slot.place], slot.parity ^ 1);
      rounded.leave(s, space.state(slot.place), warp);
      arrive(&barriers.state[slot.place]);
    }
    // S is there. Without a word of it the compiler waits for Y too.
    finish<1>(s);
    if (p.gated) scale(s, exp2_fast(vectors.element(kDeltaLog, kDeltaRows - 1)));
    const bool keeps = prepared.keeps();

    // dS^T += (r * dO)^T Q, the first query head's still under way when Y is there
    Operand<Bands> read_by;
    const auto add_queries = [&] { start_queries(s, read_by, space.query(query_turn.place), warp); };
    const auto leave_queries = [&] {
      finish<0>(s);
      keep(read_by);
      arrive(&barriers.query_empty[query_turn.place]);
      query_turn.next(pass.stages);
    };
    add_queries();
    wait_products<kWhole ? 1 : 0>(y);
    rounded.keep();

    // dU_j += w_j Y_j
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
    Operand<kTilesDown> du;
    round_to<T>(du, y);

    // G^T = dU^T X
    Halves g;
    start_transposed_solution<T>(g, du, stage.inverse());
    const RowFactors read(vectors, kDeltaRead);
    wait_products<0>(g[0], g[1]);
    keep(du);
    leave_queries();
#pragma unroll 1
    for (int member = 1; member < group; ++member) {
      wait_for_queries();
      add_queries();
      leave_queries();
    }
    if (__builtin_expect(keeps, false)) {
      const auto* all = prepared_at(p.prepared, p.shape, part.chunk + c, part.head);
      add_transposed_solution<T>(g, du, [&](uint32_t(&x)[4], int i, int j) {
        load_lost(x, all, i, j);
#pragma unroll
        for (int m = 0; m < 4; ++m) x[m] = transpose_pairs(x[m]);
      });
    }

    // dS^T <- dS^T - (read * G)^T K
    Operand<kTilesDown> unweighted, update;
    if (stores) round_to<T>(unweighted, g);
    scale_chunk_rows(g, [&](int row) {
      const float2 by = read.at[row / 8];
      return float2{-by.x, -by.y};
    });
    round_to<T>(update, g);
    start_update<T>(s, update, stage.k());
    if (stores) {
      wait(&barriers.update_stored[slot.place], slot.parity ^ 1);
      leave_transposed(space.update(slot.place), unweighted, warp);
      arrive(&barriers.update[slot.place]);
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
    arrive(emptied);
    if (more && !early) wait_for_stage();
  }
  end_state(s, p.shape, pass.walk, part, first_col, p.final);
}

template <typename T, int D>
__device__ inline void store(const ReversePass& pass, const Part& part, const ReverseSpace<T, D>& space,
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
    arrive(&barriers.state_stored[slot.place]);
    T* const dz =
        at<T>(p.dz, part.piece.sequence.batch, (part.piece.start + c * tokens) * n, part.head, part.col);
    wait(&barriers.update[slot.place], slot.parity);
    store_rows<kReverseStores>(space.update(slot.place), dz, p.dz.stride[1], tokens_in(part, tokens, c) * n,
                               cols, worker);
    arrive(&barriers.update_stored[slot.place]);
    slot.next(pass.slots);
  }
}

template <typename T, int D>
__global__ void __launch_bounds__(kReverseThreads, 1) reverse(const __grid_constant__ ReversePass pass) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Part part;
  if (!part_of(pass.scan.shape, pass.walk, part)) return;
  const int stores = pass.walk.alone ? 0 : kReverseStores;
  const ReverseSpace<T, D> space{shared, pass.stages, pass.slots, bands_of(pass.scan.shape.n)};
  if (threadIdx.x == 0) {
    ReverseBarriers& barriers = space.barriers();
    for (int i = 0; i < pass.stages; ++i) {
      init_barrier(&barriers.full[i], 32 * kLoaders);
      init_barrier(&barriers.empty[i], 32 * kReverseChain);
      init_barrier(&barriers.query_full[i], 32 * kLoaders);
      init_barrier(&barriers.query_empty[i], 32 * kReverseChain);
    }
    for (int i = 0; i < pass.slots; ++i) {
      init_barrier(&barriers.state[i], 32 * kReverseChain);
      init_barrier(&barriers.state_stored[i], 32 * kReverseStores);
      init_barrier(&barriers.update[i], 32 * kReverseChain);
      init_barrier(&barriers.update_stored[i], 32 * kReverseStores);
    }
  }
  __syncthreads();
  const int warp = warp_index(), worker = warp - kReverseChain;
  if (warp < kReverseChain) {
    if (space.bands == kTilesDown) {
      run_reverse_chain<T, D, kTilesDown>(pass, part, space, warp);
    } else {
      run_reverse_chain<T, D, 2>(pass, part, space, warp);
    }
  } else if (worker >= stores) {
    load_reverse<T, D>(pass, part, space, threadIdx.x - 32 * (kReverseChain + stores));
  } else {
    store(pass, part, space, worker);
  }
}

// Bytes of shared memory without which a block does not run.
template <typename T, int D>
constexpr int reverse_least() {
  return ReverseSpace<T, D>::bytes(1, 1, kTilesDown);
}

template <typename T, int D>
cudaError_t launch_reverse(const ReversePass& given, cudaStream_t stream) {
  using Space = ReverseSpace<T, D>;
  ReversePass pass = given;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  const int bands = bands_of(pass.scan.shape.n);
  const auto stages_beside = [&](int slots) {
    return std::min((limit - Space::bytes(0, slots, bands)) / Space::stage_bytes(bands), kReverseStages);
  };
  // Without stores several blocks fit a multiprocessor, if they leave each other shared memory.
  pass.slots = pass.walk.alone ? 0 : stages_beside(kReverseSlots) >= 2 ? kReverseSlots : 1;
  pass.stages = pass.walk.alone ? std::min(stages_beside(0), 2) : stages_beside(pass.slots);
  if (pass.stages < 1) return cudaErrorInvalidConfiguration;
  if (const cudaError_t error = allow_shared<reverse<T, D>>(limit); error != cudaSuccess) return error;
  const int64_t blocks = blocks_of(pass.scan.shape, pass.walk);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const int threads = kReverseThreads - (pass.walk.alone ? 32 * kReverseStores : 0);
  const int bytes = Space::bytes(pass.stages, pass.slots, bands);
  reverse<T, D><<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(pass);
  return cudaGetLastError();
}

}  // namespace girih::kernels::delta_product
