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
  static constexpr int kRing = D == 64 ? 4 : D == 128 ? 2 : 1;
  static constexpr int kStateBytes = D * 32,
                       kUpdateBytes = kDeltaRows * 32;  // a warp's part of a ring's slot
  static constexpr int kSlotBytes = kChain * (kStateBytes + kUpdateBytes);
  static constexpr int kFixedBytes = 256 + kRing * kSlotBytes;
};

// What one query head brings to a chunk, in bands of 16 tokens: as many as the chunk has.
template <typename T, int D>
struct QueryStage {
  using Q = SharedTile<T, kTileRows, D>;
  using O = SharedTile<T, kTileRows, scan_columns(D)>;
  static constexpr int kFactorBytes = kDeltaRows * 4, kBandBytes = Q::kBytes + O::kBytes;

  unsigned char* data;

  __host__ __device__ static constexpr int bytes(int bands) { return kFactorBytes + bands * kBandBytes; }
  __device__ float* factors() const { return reinterpret_cast<float*>(data); }
  __device__ Q q(int band) const { return {reinterpret_cast<T*>(data + kFactorBytes + band * kBandBytes)}; }
  __device__ O dout(int band) const {
    return {reinterpret_cast<T*>(data + kFactorBytes + band * kBandBytes + Q::kBytes)};
  }
};
__host__ __device__ constexpr int bands_of(int n) { return (delta_chunk(n) + kTileRows - 1) / kTileRows; }

struct ReverseBarriers {
  uint64_t full[4], empty[4];              // stages
  uint64_t query_full[4], query_empty[4];  // of the query heads
  uint64_t published[4], consumed[4];      // slots of the ring
};
static_assert(sizeof(ReverseBarriers) <= 256, "");

template <typename T, int D>
struct ReverseSpace {
  ReverseBarriers& barriers;
  unsigned char *ring, *stages, *queries;
  int bands;

  __device__ QueryStage<T, D> query(int at) const { return {queries + at * QueryStage<T, D>::bytes(bands)}; }
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
      const Query stage = space.query(query_turn.at);
#pragma unroll 1
      for (int b = 0; b < space.bands; ++b) {
        const int before = b * kTileRows;
        q.start(stage.q(b), c * tokens + before, length - before, member * p.q.stride[2]);
        dout.start(stage.dout(b), c * tokens + before, length - before, member * p.dout.stride[2]);
      }
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
  const DeltaReverse& p = pass.scan;
  const int group = p.shape.query_heads / p.shape.heads, first_col = part.col + 16 * warp;
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
      const QueryStage<T, D> query = space.query(query_turn.at);
      wait(&space.barriers.query_full[query_turn.at], query_turn.parity);
#pragma unroll 2
      for (int b = 0; b < space.bands; ++b) {
        uint32_t a[4];
        load_block_transposed(a, query.dout(b), 16 * warp, 0);
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
        add_product<T>(s, a, query.q(b), 0);
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
    // G of 16 rows and 32 columns at a time, eight of them a lane.
#pragma unroll 1
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
                                 stages + pass.stages * Stage<T, D>::kBytes, bands_of(pass.scan.shape.n)};
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
constexpr int reverse_stage(int n) {
  return Stage<T, D>::kBytes + QueryStage<T, D>::bytes(bands_of(n));
}
// Bytes of shared memory without which a block does not run.
template <typename T, int D>
constexpr int reverse_least() {
  return ReverseSizes<D>::kFixedBytes + 2 * reverse_stage<T, D>(1);
}

template <typename T, int D>
cudaError_t launch_reverse(const ReversePass& given, cudaStream_t stream) {
  using Sizes = ReverseSizes<D>;
  ReversePass pass = given;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  const int stage = reverse_stage<T, D>(pass.scan.shape.n);
  const int stages = std::min((limit - Sizes::kFixedBytes) / stage, Sizes::kMaxStages);
  if (stages < 2) return cudaErrorInvalidConfiguration;
  if (const cudaError_t error = allow_shared<reverse<T, D>>(limit); error != cudaSuccess) return error;
  const int64_t blocks = blocks_of(pass.scan.shape, pass.walk, Sizes::kCols);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  // Without writers several blocks fit a multiprocessor, if they leave each other shared memory.
  pass.stages = pass.walk.alone ? 2 : stages;
  const int threads = pass.walk.alone ? 32 * (Sizes::kChain + kLoaders) : Sizes::kThreads;
  const int bytes = (pass.walk.alone ? 256 : Sizes::kFixedBytes) + pass.stages * stage;
  reverse<T, D><<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(pass);
  return cudaGetLastError();
}

}  // namespace girih::kernels::delta_product
