// The gradient of the state from chunk to chunk, from the end. dS: of the state after the chunk.
//
//     dU_j = sum_t P_tj do_t + w_j dS^T k_j        G = X^T dU
//     dS <- e^{L_C} dS + sum_t r_t q_t do_t^T - sum_i k_i read_i G_i^T
//
// A block as in the scan, of whose products these are the mirror images: chain warps that keep dS^T in
// registers, two writers that carry away dS and G from a ring, two loaders. A memory head's query heads come
// one after another in stages of their own.
#pragma once

#include "delta_product/chain.cuh"

namespace girih::kernels::delta_product {

constexpr int kWriters = 2;  // warps; more of them leave a chain of four too few registers

// What depends on the tile of D alone.
template <int D>
struct ReverseSizes {
  static constexpr int kCols = scan_columns(D);  // of V, a block's
  static constexpr int kChain = kCols / 16;      // warps
  static constexpr int kThreads = 32 * (kChain + kWriters + kLoaders);
  static constexpr int kMaxStages = 4;
  static constexpr int kMaxRing = D == 64 ? 4 : D == 128 ? 2 : 1;
  static constexpr int kStateBytes = D * 32,
                       kUpdateBytes = kDeltaRows * 32;  // a warp's part of a ring's slot
  static constexpr int kSlotBytes = kChain * (kStateBytes + kUpdateBytes);
};

// What one query head brings to a chunk, in bands of 16 tokens: as many as the chunk has.
template <typename T, int D>
struct QueryStage {
  using Q = BlockTile<T, D, kTileRows>;
  using O = SharedTile<T, kTileRows, scan_columns(D)>;
  static constexpr int kFactorBytes = kDeltaRows * 4, kBandBytes = Q::kBytes + O::kBytes;

  unsigned char* data;
  float* factors;

  __host__ __device__ static constexpr int bytes(int bands) { return bands * kBandBytes; }
  __device__ Q q(int band) const { return {reinterpret_cast<T*>(data + band * kBandBytes)}; }
  __device__ O dout(int band) const { return {reinterpret_cast<T*>(data + band * kBandBytes + Q::kBytes)}; }
};
// Two where there is only one: the chain has two forms.
__host__ __device__ constexpr int bands_of(int n) { return n == 1 ? kTilesDown : 2; }

struct ReverseBarriers {
  uint64_t full[4], empty[4];              // stages
  uint64_t query_full[4], query_empty[4];  // of the query heads
  // Slots of the ring: dS is there, G too, both are written.
  uint64_t state[4], published[4], consumed[4];
};
constexpr int kReverseBarrierBytes = 256;
static_assert(sizeof(ReverseBarriers) <= kReverseBarrierBytes, "");

template <typename T, int D>
struct ReverseSpace {
  ReverseBarriers& barriers;
  unsigned char *stages, *queries, *ring, *factors;
  int bands;

  __device__ QueryStage<T, D> query(int at) const {
    using Query = QueryStage<T, D>;
    return {queries + at * Query::bytes(bands), reinterpret_cast<float*>(factors + at * Query::kFactorBytes)};
  }
};

template <typename T, int D>
__device__ inline void load_reverse(const ReversePass& pass, const Part& part,
                                    const ReverseSpace<T, D>& space, int thread) {
  constexpr int kThreads = 32 * kLoaders;
  using Query = QueryStage<T, D>;
  const DeltaReverse& p = pass.scan;
  const int n = p.shape.n, tokens = delta_chunk(n), group = p.shape.query_heads / p.shape.heads;
  const int64_t batch = part.piece.sequence.batch, first = part.piece.start * n,
                first_head = static_cast<int64_t>(part.head) * group;
  const typename Stage<T, D>::Loader loader(at<T>(p.k, batch, first, part.head, 0), p.k.stride[1], p.shape.D,
                                            at<T>(p.du, batch, first, part.head, part.col), p.du.stride[1],
                                            p.shape.V - part.col, thread);
  const TileCopier<kThreads, typename Query::Q> q(at<T>(p.q, batch, part.piece.start, first_head, 0),
                                                  p.q.stride[1], p.shape.D, thread);
  const TileCopier<kThreads, typename Query::O> dout(
      at<T>(p.dout, batch, part.piece.start, first_head, part.col), p.dout.stride[1], p.shape.V - part.col,
      thread);
  Turn turn, query_turn;
  int64_t queries = 0;
  for (int i = 0; i < part.chunks; ++i) {
    const int c = part.chunks - 1 - i, length = tokens_in(part, tokens, c);
    if (i >= pass.stages) wait(&space.barriers.empty[turn.place], turn.parity ^ 1);
    loader.start({space.stages + turn.place * Stage<T, D>::kBytes}, c * tokens * n, length * n,
                 !part.transition, prepared_at(p.prepared, p.shape, part.chunk + c, part.head));
    arrive_after_copies(&space.barriers.full[turn.place]);
    turn.next(pass.stages);
    for (int member = 0; member < group; ++member, ++queries) {
      if (queries >= pass.stages) wait(&space.barriers.query_empty[query_turn.place], query_turn.parity ^ 1);
      const Query stage = space.query(query_turn.place);
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
      arrive_after_copies(&space.barriers.query_full[query_turn.place]);
      query_turn.next(pass.stages);
    }
  }
  commit_copies();
  wait_copies<0>();
}

// S^T += (r * dO)^T Q of the warp's columns, under way afterwards.
template <int Bands, typename T, int D>
__device__ inline void start_queries(State<D>& s, const QueryStage<T, D>& query, int warp) {
  constexpr bool kGroup = Products<D>::kGroup;
  uint32_t a[Bands][4];
  const auto add = [&](int b) {
#pragma unroll
    for (int i = 0; i < State<D>::kSlabs; ++i) {
      Products<D>::template add<T>(s.slab[i], a[b], query.q(b), 64 * i);
    }
  };
#pragma unroll
  for (int b = 0; b < Bands; ++b) {
    load_block_transposed(a[b], query.dout(b), 16 * warp, 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 read =
          *reinterpret_cast<const float2*>(query.factors + kTileRows * b + 8 * half + lane_col());
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 value = unpaired<T>(a[b][2 * half + i]);
        a[b][2 * half + i] = pair_of<T>(value.x * read.x, value.y * read.y);
      }
    }
    if (!kGroup) add(b);
  }
  if (kGroup) {
    begin(s);
#pragma unroll
    for (int b = 0; b < Bands; ++b) add(b);
    Products<D>::commit();
  }
}

// G^T = dU^T X, under way afterwards.
template <typename T, int D>
__device__ inline void start_transposed_solution(Halves& g, const Operand<kTilesDown>& du,
                                                 const InverseRows& x) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kGroup = Products<D>::kGroup;
#else
  constexpr bool kGroup = false;
#endif
  if constexpr (kGroup) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const auto matrices = [&](int i, int half) {
      return descriptor(shared_address(x.data + InverseRows::block(i, 2 * half)), 128, InverseRows::kNext);
    };
    group_mma<T, Lines::columns, 32, false>(g[0].at, du.at[0], matrices(0, 0));
    group_mma<T, Lines::columns, 32, false>(g[1].at, du.at[2], matrices(2, 1));
    group_mma<T, Lines::columns, 32>(g[1].at, du.at[3], matrices(3, 1));
#pragma unroll
    for (int i = 1; i < kTilesDown; ++i) group_mma<T, Lines::columns, 32>(g[0].at, du.at[i], matrices(i, 0));
#endif
  } else {
    fill(g[0], 0.f), fill(g[1], 0.f);
#pragma unroll
    for (int i = 0; i < kTilesDown; ++i) {
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        uint32_t block[4];
        x.load_transposed(block, i, j);
        mma<T>(g[j / 2].at[j % 2 * 2], du.at[i], block[0], block[1]);
        mma<T>(g[j / 2].at[j % 2 * 2 + 1], du.at[i], block[2], block[3]);
      }
    }
  }
}

template <typename T, int D, int Bands>
__device__ inline void run_reverse_chain(const ReversePass& pass, const Part& part,
                                         const ReverseSpace<T, D>& space, int warp) {
  using Sizes = ReverseSizes<D>;
  const DeltaReverse& p = pass.scan;
  const int group = p.shape.query_heads / p.shape.heads, first_col = part.col + 16 * warp;
  State<D> s;  // dS^T
  start_state(s, p.shape, pass.walk, part, first_col, p.initial);
  RoundedState<T, D> rounded;
  rounded.take(s);

  Turn turn, query_turn, slot;
#pragma unroll 1
  for (int c = part.chunks - 1; c >= 0; --c) {
    const Stage<T, D> stage{space.stages + turn.place * Stage<T, D>::kBytes};
    const Prepared prepared = stage.prepared();
    const Vectors vectors = prepared.vectors();
    unsigned char* const own = pass.walk.alone ? nullptr
                                               : space.ring + slot.place * Sizes::kSlotBytes +
                                                     warp * (Sizes::kStateBytes + Sizes::kUpdateBytes);
    const auto wait_for_slot = [&] {
      if (own != nullptr && part.chunks - 1 - c >= pass.ring) {
        wait(&space.barriers.consumed[slot.place], slot.parity ^ 1);
      }
    };
    wait(&space.barriers.full[turn.place], turn.parity);
    fence_tiles();
    if (!rounded.kWhole) wait_for_slot();

    // Y^T = dS^T K^T, and dS decays meanwhile
    Sums<8> y;
    rounded.start_read(y, s, stage.k(), own);
    if (rounded.kWhole) wait_for_slot();
    rounded.leave_in(own);
    if (own != nullptr) arrive(&space.barriers.state[slot.place]);
    if (p.gated) scale(s, exp2_fast(vectors.element(kDeltaLog, kDeltaRows - 1)));
    const bool keeps = prepared.keeps();

    // dS^T += (r * dO)^T Q, of a warpgroup the first query head's still under way when Y is there
    const auto add_queries = [&] {
      wait(&space.barriers.query_full[query_turn.place], query_turn.parity);
      fence_tiles();
      start_queries<Bands>(s, space.query(query_turn.place), warp);
    };
    const auto leave_queries = [&] {
      finish(s);
      arrive(&space.barriers.query_empty[query_turn.place]);
      query_turn.next(pass.stages);
    };
    const auto add_later_queries = [&](int member) {
#pragma unroll 1
      for (; member < group; ++member) {
        add_queries();
        leave_queries();
      }
    };
    if (Products<D>::kGroup) add_queries();
    uint32_t values[kTilesDown][4];
    const auto load_values = [&](int j) { load_block_transposed(values[j], stage.v(), 16 * warp, 16 * j); };
#pragma unroll
    for (int j = 0; j < kTilesDown; ++j) {
      if (Products<D>::kGroup) load_values(j);
    }
    Products<D>::template wait<1>(y);

    // dU_j += w_j Y_j
#pragma unroll
    for (int j = 0; j < kTilesDown; ++j) {
      if (!Products<D>::kGroup) load_values(j);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float(&of)[4] = y.at[2 * j + half];
        const float2 write = vectors.pair(kDeltaWrite, 16 * j + 8 * half);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 value = unpaired<T>(values[j][2 * half + i]);
          of[2 * i] = fmaf(write.x, of[2 * i], value.x);
          of[2 * i + 1] = fmaf(write.y, of[2 * i + 1], value.y);
        }
      }
    }
    Operand<kTilesDown> du;
    round_to<T>(du, y);

    // G^T = dU^T X
    Halves g;
    Products<D>::begin();
    start_transposed_solution<T, D>(g, du, stage.inverse());
    Products<D>::commit();
    float2 read[kDeltaRows / 8];
#pragma unroll
    for (int i = 0; i < kDeltaRows / 8; ++i) read[i] = vectors.pair(kDeltaRead, 8 * i);
    Products<D>::template wait<0>(g[0], g[1]);
    if (Products<D>::kGroup) {
      leave_queries();
      add_later_queries(1);
    }
    if (__builtin_expect(keeps, false)) {
      const auto* all = prepared_at(p.prepared, p.shape, part.chunk + c, part.head);
#pragma unroll
      for (int i = 0; i < kTilesDown; ++i) {
#pragma unroll
        for (int j = 0; j <= i; ++j) {
          uint32_t x[4];
          load_lost(x, all, i, j);
          mma<T>(g[j / 2].at[j % 2 * 2], du.at[i], transpose_pairs(x[0]), transpose_pairs(x[1]));
          mma<T>(g[j / 2].at[j % 2 * 2 + 1], du.at[i], transpose_pairs(x[2]), transpose_pairs(x[3]));
        }
      }
    }

    // dS^T <- dS^T - (read * G)^T K
    Operand<kTilesDown> unweighted, update;
    if (own != nullptr) round_to<T>(unweighted, g);
    scale_chunk_rows(g, [&](int row) { return float2{-read[row / 8].x, -read[row / 8].y}; });
    round_to<T>(update, g);
    const auto publish = [&] {
      if (own == nullptr) return;
      leave(own + Sizes::kStateBytes, unweighted);
      arrive(&space.barriers.published[slot.place]);
    };
    if (!Products<D>::kGroup) publish();
    start_update<T>(s, update, stage.k());
    if (Products<D>::kGroup) publish();
    if (!Products<D>::kGroup) add_later_queries(0);
    rounded.take(s);
    arrive(&space.barriers.empty[turn.place]);
    turn.next(pass.stages);
    slot.next(pass.ring);
  }
  end_state(s, p.shape, pass.walk, part, first_col, p.final);
}

template <typename T, int D>
__device__ inline void run_writer(const ReversePass& pass, const Part& part, const ReverseSpace<T, D>& space,
                                  int writer) {
  using Sizes = ReverseSizes<D>;
  constexpr int kWarpBytes = Sizes::kStateBytes + Sizes::kUpdateBytes;
  const DeltaReverse& p = pass.scan;
  const int n = p.shape.n, tokens = delta_chunk(n), cols = p.shape.V - part.col;
  Turn slot;
#pragma unroll 1
  for (int c = part.chunks - 1; c >= 0; --c) {
    const unsigned char* const left = space.ring + slot.place * Sizes::kSlotBytes;
    const int rows = tokens_in(part, tokens, c) * n;
    wait(&space.barriers.state[slot.place], slot.parity);
    T* const gradients = static_cast<T*>(p.gradients) +
                         (((part.chunk + c) * p.shape.heads + part.head) * p.shape.V + part.col) * p.shape.D;
    publish_state<T, D>(gradients, left, kWarpBytes, p.shape, cols, writer, kWriters);
    wait(&space.barriers.published[slot.place], slot.parity);
    T* const dz =
        at<T>(p.dz, part.piece.sequence.batch, (part.piece.start + c * tokens) * n, part.head, part.col);
    // G of 16 rows and 32 columns at a time, eight of them a lane.
#pragma unroll 2
    for (int i = writer; i < Sizes::kChain / 2 * kTilesDown; i += kWriters) {
      const int w = i % (Sizes::kChain / 2) * 2, j = i / (Sizes::kChain / 2);
      const unsigned char* const from = left + w * kWarpBytes + Sizes::kStateBytes + j * 512 + lane() * 16;
      uint32_t g[2][4];
      load_matrices_transposed(g[0], shared_address(from));
      load_matrices_transposed(g[1], shared_address(from + kWarpBytes));
      const int col = 16 * w + 4 * lane_col();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t pack[4] = {g[0][2 * half], g[0][2 * half + 1], g[1][2 * half], g[1][2 * half + 1]};
        turn_quad(pack);
        const int row = kTileRows * j + 8 * half + lane_row();
        if (row < rows && col < cols) {
          *reinterpret_cast<uint4*>(dz + row * p.dz.stride[1] + col) = {pack[0], pack[1], pack[2], pack[3]};
        }
      }
    }
    arrive(&space.barriers.consumed[slot.place]);
    slot.next(pass.ring);
  }
}

template <typename T, int D>
__global__ void __launch_bounds__(ReverseSizes<D>::kThreads, 1)
    reverse(const __grid_constant__ ReversePass pass) {
  using Sizes = ReverseSizes<D>;
  extern __shared__ __align__(1024) unsigned char shared[];
  Part part;
  if (!part_of<Sizes::kCols>(pass.scan.shape, pass.walk, part)) return;
  const int writers = pass.walk.alone ? 0 : kWriters, bands = bands_of(pass.scan.shape.n);
  unsigned char* const queries = shared + pass.stages * Stage<T, D>::kBytes;
  unsigned char* const factors = queries + pass.stages * QueryStage<T, D>::bytes(bands);
  unsigned char* const barriers = factors + pass.stages * QueryStage<T, D>::kFactorBytes;
  const ReverseSpace<T, D> space{*reinterpret_cast<ReverseBarriers*>(barriers),
                                 shared,
                                 queries,
                                 barriers + kReverseBarrierBytes,
                                 factors,
                                 bands};
  if (threadIdx.x == 0) {
    for (int i = 0; i < pass.stages; ++i) {
      init_barrier(&space.barriers.full[i], 32 * kLoaders);
      init_barrier(&space.barriers.empty[i], 32 * Sizes::kChain);
      init_barrier(&space.barriers.query_full[i], 32 * kLoaders);
      init_barrier(&space.barriers.query_empty[i], 32 * Sizes::kChain);
    }
    for (int i = 0; i < pass.ring; ++i) {
      init_barrier(&space.barriers.state[i], 32 * Sizes::kChain);
      init_barrier(&space.barriers.published[i], 32 * Sizes::kChain);
      init_barrier(&space.barriers.consumed[i], 32 * kWriters);
    }
  }
  __syncthreads();
  const int warp = warp_index();
  if (warp < Sizes::kChain) {
    if (bands == kTilesDown) {
      run_reverse_chain<T, D, kTilesDown>(pass, part, space, warp);
    } else {
      run_reverse_chain<T, D, 2>(pass, part, space, warp);
    }
  } else if (warp < Sizes::kChain + writers) {
    run_writer<T, D>(pass, part, space, warp - Sizes::kChain);
  } else {
    load_reverse<T, D>(pass, part, space, threadIdx.x - 32 * (Sizes::kChain + writers));
  }
}

// Bytes of one stage of both kinds.
template <typename T, int D>
constexpr int reverse_stage(int n) {
  return Stage<T, D>::kBytes + QueryStage<T, D>::bytes(bands_of(n)) + QueryStage<T, D>::kFactorBytes;
}
// Bytes of shared memory without which a block does not run.
template <typename T, int D>
constexpr int reverse_least() {
  return kReverseBarrierBytes + ReverseSizes<D>::kSlotBytes + 2 * reverse_stage<T, D>(1);
}

template <typename T, int D>
cudaError_t launch_reverse(const ReversePass& given, cudaStream_t stream) {
  using Sizes = ReverseSizes<D>;
  ReversePass pass = given;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  const int stage = reverse_stage<T, D>(pass.scan.shape.n);
  const auto stages_beside = [&](int ring) {
    return std::min((limit - kReverseBarrierBytes - ring * Sizes::kSlotBytes) / stage, Sizes::kMaxStages);
  };
  int ring = Sizes::kMaxRing;
  while (ring > 1 && stages_beside(ring) < 2) --ring;
  const int stages = stages_beside(ring);
  if (stages < 2) return cudaErrorInvalidConfiguration;
  if (const cudaError_t error = allow_shared<reverse<T, D>>(limit); error != cudaSuccess) return error;
  const int64_t blocks = blocks_of(pass.scan.shape, pass.walk, Sizes::kCols);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  // Without writers several blocks fit a multiprocessor, if they leave each other shared memory.
  pass.stages = pass.walk.alone ? 2 : stages;
  pass.ring = pass.walk.alone ? 0 : ring;
  const int threads = pass.walk.alone ? 32 * (Sizes::kChain + kLoaders) : Sizes::kThreads;
  const int bytes = kReverseBarrierBytes + pass.ring * Sizes::kSlotBytes + pass.stages * stage;
  reverse<T, D><<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(pass);
  return cudaGetLastError();
}

}  // namespace girih::kernels::delta_product
