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

constexpr int kWriters = 2;  // warps

// What depends on the tile of D alone.
template <int D>
struct ReverseSizes {
  static constexpr int kCols = scan_columns(D);  // of V, a block's
  static constexpr int kChain = kCols / 16;      // warps
  static constexpr int kThreads = 32 * (kChain + kWriters + kLoaders);
  static constexpr int kMaxStages = 4;
  static constexpr int kRing = D == 256 ? 1 : 2;
  static constexpr int kStateBytes = D * 32,
                       kUpdateBytes = kDeltaRows * 32;  // a warp's part of a ring's slot
  static constexpr int kSlotBytes = kChain * (kStateBytes + kUpdateBytes);
  static constexpr int kFixedBytes = 256 + kRing * kSlotBytes;
};

// What one query head brings to a chunk.
template <typename T, int D>
struct QueryStage {
  using Q = SharedTile<T, kDeltaRows, D>;
  using O = SharedTile<T, kDeltaRows, scan_columns(D)>;
  static constexpr int kBytes = Q::kBytes + O::kBytes + kDeltaRows * 4;

  unsigned char* data;

  __device__ Q q() const { return {reinterpret_cast<T*>(data)}; }
  __device__ O dout() const { return {reinterpret_cast<T*>(data + Q::kBytes)}; }
  __device__ float* factors() const { return reinterpret_cast<float*>(data + Q::kBytes + O::kBytes); }
};

struct ReverseBarriers {
  uint64_t full[4], empty[4];              // stages
  uint64_t query_full[4], query_empty[4];  // of the query heads
  uint64_t published[2], consumed[2];      // slots of the ring
};
static_assert(sizeof(ReverseBarriers) <= 256, "");

template <typename T, int D>
struct ReverseSpace {
  ReverseBarriers& barriers;
  unsigned char *ring, *stages, *queries;
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
    if (i >= pass.stages) wait(&space.barriers.empty[turn.at], turn.parity ^ 1);
    loader.start({space.stages + turn.at * Stage<T, D>::kBytes}, c * tokens * n, length * n, !part.transition,
                 prepared_at(p.prepared, p.shape, part.chunk + c, part.head));
    arrive_after_copies(&space.barriers.full[turn.at]);
    turn.next(pass.stages);
    if (part.transition) continue;
    for (int member = 0; member < group; ++member, ++queries) {
      if (queries >= pass.stages) wait(&space.barriers.query_empty[query_turn.at], query_turn.parity ^ 1);
      const Query stage{space.queries + query_turn.at * Query::kBytes};
      q.start(stage.q(), c * tokens, length, member * p.q.stride[2]);
      dout.start(stage.dout(), c * tokens, length, member * p.dout.stride[2]);
      if (thread < kDeltaRows / 4) {
        const float* from =
            p.factors + (((part.chunk + c) * p.shape.query_heads + first_head + member) * 2 + 1) * kDeltaRows;
        copy_async(shared_address(stage.factors() + thread * 4), from + thread * 4, true);
      }
      arrive_after_copies(&space.barriers.query_full[query_turn.at]);
      query_turn.next(pass.stages);
    }
  }
  commit_copies();
  wait_copies<0>();
}

template <typename T, int D>
__device__ inline void run_reverse_chain(const ReversePass& pass, const Part& part,
                                         const ReverseSpace<T, D>& space, int warp) {
  using Sizes = ReverseSizes<D>;
  using Query = QueryStage<T, D>;
  const DeltaReverse& p = pass.scan;
  const int group = p.shape.query_heads / p.shape.heads, first_col = part.col + 16 * warp;
  const int bands = (delta_chunk(p.shape.n) + kTileRows - 1) / kTileRows;
  Sums<D / 8> s;  // dS^T
  start_state(s, p.shape, pass.walk, part, first_col, p.initial);

  Turn turn, query_turn, slot;
#pragma unroll 1
  for (int c = part.chunks - 1; c >= 0; --c) {
    const Stage<T, D> stage{space.stages + turn.at * Stage<T, D>::kBytes};
    const Prepared prepared = stage.prepared();
    const Vectors vectors = prepared.vectors();
    unsigned char* const own =
        space.ring + slot.at * Sizes::kSlotBytes + warp * (Sizes::kStateBytes + Sizes::kUpdateBytes);
    wait(&space.barriers.full[turn.at], turn.parity);
    if (!pass.walk.alone && part.chunks - 1 - c >= Sizes::kRing) {
      wait(&space.barriers.consumed[slot.at], slot.parity ^ 1);
    }

    const bool keeps = prepared.keeps();

    // Y^T = dS^T K^T
    Sums<8> y;
    fill(y, 0.f);
    Operand<kTilesDown> du;
    read_state<T, D>(y, s, stage.k(), pass.walk.alone ? nullptr : own, [&] {
    // dU_j += w_j Y_j
#pragma unroll
      for (int j = 0; j < kTilesDown; ++j) {
        uint32_t of_values[4];
        load_block_transposed(of_values, stage.v(), 16 * warp, 16 * j);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float(&of)[4] = y.at[2 * j + half];
          const float2 write = vectors.pair(kDeltaWrite, 16 * j + 8 * half);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float2 value = unpaired<T>(of_values[2 * half + i]);
            of[2 * i] = fmaf(write.x, of[2 * i], value.x);
            of[2 * i + 1] = fmaf(write.y, of[2 * i + 1], value.y);
          }
        }
      }
      round_to<T>(du, y);
    });

    // G^T = dU^T X
    Sums<8> g;
    fill(g, 0.f);
#pragma unroll
    for (int i = 0; i < kTilesDown; ++i) {
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        uint32_t x[4];
        prepared.load_transposed(x, i, j);
        mma<T>(g.at[2 * j], du.at[i], x[0], x[1]);
        mma<T>(g.at[2 * j + 1], du.at[i], x[2], x[3]);
      }
    }
    if (__builtin_expect(keeps, false)) {
      const auto* all = prepared_at(p.prepared, p.shape, part.chunk + c, part.head);
#pragma unroll
      for (int i = 0; i < kTilesDown; ++i) {
#pragma unroll
        for (int j = 0; j <= i; ++j) {
          uint32_t x[4];
          load_lost(x, all, i, j);
          mma<T>(g.at[2 * j], du.at[i], transpose_pairs(x[0]), transpose_pairs(x[1]));
          mma<T>(g.at[2 * j + 1], du.at[i], transpose_pairs(x[2]), transpose_pairs(x[3]));
        }
      }
    }
    Operand<kTilesDown> update;
    if (!pass.walk.alone) {
      round_to<T>(update, g);
      leave(own + Sizes::kStateBytes, update);
      arrive(&space.barriers.published[slot.at]);
    }

    // dS^T <- e^{L_C} dS^T - (read * G)^T K
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 read = vectors.pair(kDeltaRead, 8 * i);
      g.at[i][0] *= -read.x, g.at[i][1] *= -read.y, g.at[i][2] *= -read.x, g.at[i][3] *= -read.y;
    }
    round_to<T>(update, g);
    if (p.gated) {
      const float decay = exp2_fast(vectors.element(kDeltaLog, kDeltaRows - 1));
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) s.at[i][j] *= decay;
      }
    }
    add_product<T>(s, update, stage.k());
    arrive(&space.barriers.empty[turn.at]);
    turn.next(pass.stages);
    slot.next(Sizes::kRing);
    if (part.transition) continue;

      // dS^T += (r * dO)^T Q
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      const Query query{space.queries + query_turn.at * Query::kBytes};
      wait(&space.barriers.query_full[query_turn.at], query_turn.parity);
#pragma unroll 1
      for (int b = 0; b < bands; ++b) {
        uint32_t a[4];
        load_block_transposed(a, query.dout(), 16 * warp, kTileRows * b);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 read =
              *reinterpret_cast<const float2*>(query.factors() + kTileRows * b + 8 * half + lane_col());
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float2 value = unpaired<T>(a[2 * half + i]);
            a[2 * half + i] = pair_of<T>(value.x * read.x, value.y * read.y);
          }
        }
        add_product<T>(s, a, query.q(), kTileRows * b);
      }
      arrive(&space.barriers.query_empty[query_turn.at]);
      query_turn.next(pass.stages);
    }
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
    const unsigned char* const left = space.ring + slot.at * Sizes::kSlotBytes;
    const int rows = tokens_in(part, tokens, c) * n;
    wait(&space.barriers.published[slot.at], slot.parity);
    T* const gradients = static_cast<T*>(p.gradients) +
                         (((part.chunk + c) * p.shape.heads + part.head) * p.shape.V + part.col) * p.shape.D;
    publish_state<T, D>(gradients, left, kWarpBytes, p.shape, cols, writer, kWriters);
    T* const dz =
        at<T>(p.dz, part.piece.sequence.batch, (part.piece.start + c * tokens) * n, part.head, part.col);
#pragma unroll 1
    for (int i = writer; i < Sizes::kChain * kTilesDown; i += kWriters) {
      const int w = i % Sizes::kChain, j = i / Sizes::kChain;
      uint32_t g[4];
      load_matrices_transposed(
          g, shared_address(left + w * kWarpBytes + Sizes::kStateBytes + j * 512 + lane() * 16));
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int row = kTileRows * j + m / 2 * 8 + lane_row(), col = 16 * w + m % 2 * 8 + lane_col();
        if (row < rows && col < cols) *reinterpret_cast<uint32_t*>(dz + row * p.dz.stride[1] + col) = g[m];
      }
    }
    arrive(&space.barriers.consumed[slot.at]);
    slot.next(Sizes::kRing);
  }
}

template <typename T, int D>
__global__ void __launch_bounds__(ReverseSizes<D>::kThreads, 1)
    reverse(const __grid_constant__ ReversePass pass) {
  using Sizes = ReverseSizes<D>;
  extern __shared__ __align__(128) unsigned char shared[];
  Part part;
  if (!part_of<Sizes::kCols>(pass.scan.shape, pass.walk, part)) return;
  unsigned char* const stages = shared + (pass.walk.alone ? 256 : Sizes::kFixedBytes);
  const int writers = pass.walk.alone ? 0 : kWriters;
  const ReverseSpace<T, D> space{*reinterpret_cast<ReverseBarriers*>(shared), shared + 256, stages,
                                 stages + pass.stages * Stage<T, D>::kBytes};
  if (threadIdx.x == 0) {
    for (int i = 0; i < pass.stages; ++i) {
      init_barrier(&space.barriers.full[i], 32 * kLoaders);
      init_barrier(&space.barriers.empty[i], 32 * Sizes::kChain);
      init_barrier(&space.barriers.query_full[i], 32 * kLoaders);
      init_barrier(&space.barriers.query_empty[i], 32 * Sizes::kChain);
    }
    for (int i = 0; i < Sizes::kRing; ++i) {
      init_barrier(&space.barriers.published[i], 32 * Sizes::kChain);
      init_barrier(&space.barriers.consumed[i], 32 * kWriters);
    }
  }
  __syncthreads();
  const int warp = warp_index();
  if (warp < Sizes::kChain) {
    run_reverse_chain<T, D>(pass, part, space, warp);
  } else if (warp < Sizes::kChain + writers) {
    run_writer<T, D>(pass, part, space, warp - Sizes::kChain);
  } else {
    load_reverse<T, D>(pass, part, space, threadIdx.x - 32 * (Sizes::kChain + writers));
  }
}

// Bytes of one stage of both kinds.
template <typename T, int D>
constexpr int reverse_stage() {
  return Stage<T, D>::kBytes + QueryStage<T, D>::kBytes;
}
// Bytes of shared memory without which a block does not run.
template <typename T, int D>
constexpr int reverse_least() {
  return ReverseSizes<D>::kFixedBytes + 2 * reverse_stage<T, D>();
}

template <typename T, int D>
cudaError_t launch_reverse(const ReversePass& given, cudaStream_t stream) {
  using Sizes = ReverseSizes<D>;
  ReversePass pass = given;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  const int stages = std::min((limit - Sizes::kFixedBytes) / reverse_stage<T, D>(), Sizes::kMaxStages);
  if (stages < 2) return cudaErrorInvalidConfiguration;
  const int most = Sizes::kFixedBytes + stages * reverse_stage<T, D>();
  if (const cudaError_t error = allow_shared<reverse<T, D>>(most); error != cudaSuccess) return error;
  const int64_t blocks = blocks_of(pass.scan.shape, pass.walk, Sizes::kCols);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  // Without writers several blocks fit a multiprocessor, if they leave each other shared memory.
  pass.stages = pass.walk.alone ? 2 : stages;
  const int threads = pass.walk.alone ? 32 * (Sizes::kChain + kLoaders) : Sizes::kThreads;
  const int bytes = pass.walk.alone ? 256 + pass.stages * reverse_stage<T, D>() : most;
  reverse<T, D><<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(pass);
  return cudaGetLastError();
}

}  // namespace girih::kernels::delta_product
