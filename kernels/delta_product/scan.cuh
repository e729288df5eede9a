// The scan's kernel: from chunk to chunk
//
//     Y = K S        Z_i = beta_i v_i - read_i Y_i        U = X Z        S <- e^{L_C} S + K^T (w * U)
//     o_t = scale rho_t e^{L_t} S^T q_t + sum_j P_tj U_j          S the state before the chunk
//
// A block has 16 W columns of V of one head's state, for all chunks of a sequence or a segment of one.
//
// Its first W warps are the chain, each with 16 columns. They keep S^T [16, D] in fp32 and compute everything
// transposed: then the sums of every product become the left factor of the next by rounding alone, and no two
// warps of the chain ever wait for each other. What they have rounded, S and U, they leave in a ring for the
// four readers, which make the output beside them: a reader has 16 tokens and makes its own rows of
// P = Q K^T, so P stays in its registers. Two loaders fill the stages that all read.
#pragma once

#include "delta_product/chain.cuh"

namespace girih::kernels::delta_product {

constexpr int kReaders = 4;  // warps

// What depends on the tile of D alone.
template <int D>
struct ScanSizes {
  static constexpr int kCols = scan_columns(D);  // of V, a block's
  static constexpr int kChain = kCols / 16;      // warps
  static constexpr int kThreads = 32 * (kChain + kReaders + kLoaders);
  static constexpr int kMaxStages = D == 64 ? 5 : 4;
  static constexpr int kRing = D == 256 ? 1 : 2;
  static constexpr int kQueries = 2;  // buffers of a reader

  static constexpr int kStateBytes = D * 32,
                       kUpdateBytes = kDeltaRows * 32;  // a warp's part of a ring's slot
  static constexpr int kSlotBytes = kChain * (kStateBytes + kUpdateBytes);
  static constexpr int kQueryBytes = kTileRows * D * 2;
  static constexpr int kFixedBytes = 128 + kRing * kSlotBytes + kReaders * kQueries * kQueryBytes;
};

struct ScanBarriers {
  uint64_t full[5], empty[5];          // stages
  uint64_t published[2], consumed[2];  // slots of the ring
};
static_assert(sizeof(ScanBarriers) <= 128, "");

template <typename T, int D>
__device__ inline void load_stages(const ScanPass& pass, const Part& part, unsigned char* stages,
                                   ScanBarriers& barriers, int thread) {
  const DeltaScan& p = pass.scan;
  const int n = p.shape.n, tokens = delta_chunk(n);
  const int64_t batch = part.piece.sequence.batch, first = part.piece.start * n;
  const typename Stage<T, D>::Loader loader(at<T>(p.k, batch, first, part.head, 0), p.k.stride[1], p.shape.D,
                                            at<T>(p.v, batch, first, part.head, part.col), p.v.stride[1],
                                            p.shape.V - part.col, thread);
  Turn turn;
  for (int c = 0; c < part.chunks; ++c) {
    if (c >= pass.stages) wait(&barriers.empty[turn.at], turn.parity ^ 1);
    loader.start({stages + turn.at * Stage<T, D>::kBytes}, c * tokens * n, tokens_in(part, tokens, c) * n,
                 !part.transition, prepared_at(p.prepared, p.shape, part.chunk + c, part.head));
    arrive_after_copies(&barriers.full[turn.at]);
    turn.next(pass.stages);
  }
  commit_copies();
  wait_copies<0>();
}

// The chain's warp `warp`.
template <typename T, int D>
__device__ inline void run_chain(const ScanPass& pass, const Part& part, unsigned char* stages,
                                 unsigned char* ring, ScanBarriers& barriers, int warp) {
  using Sizes = ScanSizes<D>;
  const DeltaScan& p = pass.scan;
  const int first_col = part.col + 16 * warp;
  const bool weighted = p.gated || p.shape.unit;  // else every w_j and e^{L_i - L_j} is 1

  Sums<D / 8> s;  // S^T
  start_state(s, p.shape, pass.walk, part, first_col, p.initial);

  Turn turn, slot;
#pragma unroll 1
  for (int c = 0; c < part.chunks; ++c) {
    const Stage<T, D> stage{stages + turn.at * Stage<T, D>::kBytes};
    const Prepared prepared = stage.prepared();
    const Vectors vectors = prepared.vectors();
    unsigned char* const own =
        ring + slot.at * Sizes::kSlotBytes + warp * (Sizes::kStateBytes + Sizes::kUpdateBytes);
    wait(&barriers.full[turn.at], turn.parity);
    if (!pass.walk.alone && c >= Sizes::kRing) wait(&barriers.consumed[slot.at], slot.parity ^ 1);

    // Y^T = S^T K^T
    Sums<8> y;
    fill(y, 0.f);
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      Operand<1> state;
      round_to<T>(state, s, 2 * k);
      if (!pass.walk.alone) leave(own + k * 512, state);
      add_product_transposed<T>(y, state.at[0], stage.k(), 0, 16 * k);
    }

    // Z_i = beta_i v_i - read_i Y_i
    Operand<kTilesDown> z;
#pragma unroll
    for (int j = 0; j < kTilesDown; ++j) {
      uint32_t v[4];
      load_block_transposed(v, stage.v(), 16 * warp, 16 * j);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float(&of)[4] = y.at[2 * j + half];
        const float2 beta = vectors.pair(kDeltaBeta, 16 * j + 8 * half),
                     read = vectors.pair(kDeltaRead, 16 * j + 8 * half);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 value = unpaired<T>(v[2 * half + i]);
          of[2 * i] = fmaf(beta.x, value.x, -read.x * of[2 * i]);
          of[2 * i + 1] = fmaf(beta.y, value.y, -read.y * of[2 * i + 1]);
        }
      }
    }
    round_to<T>(z, y);

    // U^T = Z^T X^T
    Sums<8> u;
    fill(u, 0.f);
#pragma unroll
    for (int j = 0; j < kTilesDown; ++j) {
#pragma unroll
      for (int i = j; i < kTilesDown; ++i) {
        uint32_t x[4];
        prepared.load(x, i, j);
        mma<T>(u.at[2 * i], z.at[j], x[0], x[2]);
        mma<T>(u.at[2 * i + 1], z.at[j], x[1], x[3]);
      }
    }
    if (prepared.keeps()) {
      const auto* all = prepared_at(p.prepared, p.shape, part.chunk + c, part.head);
#pragma unroll
      for (int j = 0; j < kTilesDown; ++j) {
#pragma unroll
        for (int i = j; i < kTilesDown; ++i) {
          uint32_t x[4];
          load_lost(x, all, i, j);
          mma<T>(u.at[2 * i], z.at[j], x[0], x[2]);
          mma<T>(u.at[2 * i + 1], z.at[j], x[1], x[3]);
        }
      }
    }
    Operand<kTilesDown> update;
    round_to<T>(update, u);
    if (!pass.walk.alone) {
      leave(own + Sizes::kStateBytes, update);
      __syncwarp();
      if (lane() == 0) arrive(&barriers.published[slot.at]);
    }

    // S^T <- e^{L_C} S^T + (w * U)^T K
    if (weighted) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 write = vectors.pair(kDeltaWrite, 8 * i);
        u.at[i][0] *= write.x, u.at[i][1] *= write.y, u.at[i][2] *= write.x, u.at[i][3] *= write.y;
      }
      round_to<T>(update, u);
    }
    if (p.gated) {
      const float decay = exp2_fast(vectors.element(kDeltaLog, kDeltaRows - 1));
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) s.at[i][j] *= decay;
      }
    }
    add_product<T>(s, update, stage.k());
    __syncwarp();
    if (lane() == 0) arrive(&barriers.empty[turn.at]);
    turn.next(pass.stages);
    slot.next(Sizes::kRing);
  }

  end_state(s, p.shape, pass.walk, part, first_col, p.final);
}

// Reader `reader`: 16 tokens of every chunk, and where there are fewer than 64 a part of the columns.
template <typename T, int D>
__device__ inline void run_reader(const ScanPass& pass, const Part& part, unsigned char* stages,
                                  unsigned char* ring, unsigned char* queries, ScanBarriers& barriers,
                                  int reader) {
  using Sizes = ScanSizes<D>;
  using Query = SharedTile<T, kTileRows, D>;
  using Out = SharedTile<T, kTileRows, Sizes::kCols>;
  static_assert(Out::kBytes <= Query::kBytes, "the output leaves through the queries' buffer");
  constexpr int kWarpBytes = Sizes::kStateBytes + Sizes::kUpdateBytes;
  const DeltaScan& p = pass.scan;
  const int n = p.shape.n, tokens = delta_chunk(n), group = p.shape.query_heads / p.shape.heads;
  // The last tokens see the most keys: theirs are not the readers that share a scheduler with the chain at D
  // = 64.
  const int bands = (tokens + kTileRows - 1) / kTileRows, band = bands - 1 - reader % bands,
            parts = kReaders / bands;
  const bool weighted = p.gated || p.shape.unit;
  const int from = reader / bands * Sizes::kChain / parts, to = (reader / bands + 1) * Sizes::kChain / parts;
  const int first_token = band * kTileRows;
  const int key_tiles = min(n * (band + 1), kTilesDown);  // 16 rows each that the tokens see
  const int64_t batch = part.piece.sequence.batch, first_head = static_cast<int64_t>(part.head) * group;

  // The queries of every chunk's every head, in turns.
  const TileCopier<32, Query> copier(at<T>(p.q, batch, part.piece.start + first_token, first_head, 0),
                                     p.q.stride[1], p.shape.D, lane());
  queries += reader * Sizes::kQueries * Sizes::kQueryBytes;
  int next_chunk = 0, next_member = 0;
  const auto load_next = [&](int buffer) {
    if (next_chunk < part.chunks) {
      const int rows = tokens_in(part, tokens, next_chunk) - first_token;
      copier.start({reinterpret_cast<T*>(queries + buffer * Sizes::kQueryBytes)}, next_chunk * tokens, rows,
                   next_member * p.q.stride[2]);
      if (++next_member == group) next_member = 0, ++next_chunk;
    }
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < Sizes::kQueries; ++i) load_next(i);

  Turn turn, slot;
  int buffer = 0;
#pragma unroll 1
  for (int c = 0; c < part.chunks; ++c) {
    const Stage<T, D> stage{stages + turn.at * Stage<T, D>::kBytes};
    const Vectors vectors = stage.prepared().vectors();
    const unsigned char* const left = ring + slot.at * Sizes::kSlotBytes;
    const int rows = tokens_in(part, tokens, c) - first_token;
    wait(&barriers.full[turn.at], turn.parity);

#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      const Query q{reinterpret_cast<T*>(queries + buffer * Sizes::kQueryBytes)};
      wait_copies<Sizes::kQueries - 1>();
      __syncwarp();

      // Q K^T, and |q_t|^2
      Sums<8> scores;
      float2 square = {0.f, 0.f};
      fill(scores, 0.f);
#pragma unroll 2
      for (int k = 0; k < D / 16; ++k) {
        uint32_t a[4];
        load_block(a, q, 0, 16 * k);
        if (p.shape.unit) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 x = unpaired<T>(a[i]);
            float& sum = i % 2 == 0 ? square.x : square.y;
            sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
          }
        }
#pragma unroll
        for (int j = 0; j < kTilesDown; ++j) {
          if (j < key_tiles) {
            uint32_t b[4];
            load_matrices(b, stage.k().address(16 * j, 16 * k, (lane() & 7) + (lane() >> 4) * 8,
                                               ((lane() >> 3) & 1) * 8));
            mma<T>(scores.at[2 * j], a, b[0], b[1]);
            mma<T>(scores.at[2 * j + 1], a, b[2], b[3]);
          }
        }
      }

      // P_tj = scale rho_t rho_j e^{L_t - L_j} q_t . k_j
      float2 factor = {p.shape.scale, p.shape.scale};
      if (p.shape.unit) {
        factor.x *= rsqrtf(sum_over_row(square.x) + 1e-6f);
        factor.y *= rsqrtf(sum_over_row(square.y) + 1e-6f);
      }
      const int token = first_token + lane_row();  // and 8 further
      const float2 decay = {vectors.element(kDeltaLog, min(token * n, kDeltaRows - 1)),
                            vectors.element(kDeltaLog, min((token + 8) * n, kDeltaRows - 1))};
      const int2 seen = {(token + 1) * n, (token + 9) * n};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (weighted && j < 2 * key_tiles) {
          const float2 before = vectors.pair(kDeltaLog, 8 * j), unit = vectors.pair(kDeltaUnit, 8 * j);
          const int row = 8 * j + lane_col();
          const auto weigh = [&](float& x, int row, int seen, float factor, float unit, float log) {
            x = row < seen ? x * (factor * unit * exp2_fast(log)) : 0.f;
          };
          float(&x)[4] = scores.at[j];
          weigh(x[0], row, seen.x, factor.x, unit.x, decay.x - before.x);
          weigh(x[1], row + 1, seen.x, factor.x, unit.y, decay.x - before.y);
          weigh(x[2], row, seen.y, factor.y, unit.x, decay.y - before.x);
          weigh(x[3], row + 1, seen.y, factor.y, unit.y, decay.y - before.y);
        } else if (j < 2 * key_tiles) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const bool sees = 8 * j + lane_col() + i % 2 < (i < 2 ? seen.x : seen.y);
            scores.at[j][i] = sees ? scores.at[j][i] * p.shape.scale : 0.f;
          }
        }
      }
      Operand<kTilesDown> weights;
      round_to<T>(weights, scores);

      if (member == 0) {
        wait(&barriers.published[slot.at], slot.parity);
        if (p.states != nullptr) {
          T* const states =
              static_cast<T*>(p.states) +
              (((part.chunk + c) * p.shape.heads + part.head) * p.shape.V + part.col) * p.shape.D;
          publish_state<T, D>(states, left, kWarpBytes, p.shape, p.shape.V - part.col, reader, kReaders);
        }
      }

      // O = scale rho_t e^{L_t} Q S + P U
      Sums<2> o[Sizes::kChain];
#pragma unroll
      for (int w = 0; w < Sizes::kChain; ++w) fill(o[w], 0.f);
      const auto add_left = [&](const uint32_t(&a)[4], int offset) {
#pragma unroll
        for (int w = 0; w < Sizes::kChain; ++w) {
          if (w >= from && w < to) {
            uint32_t b[4];
            load_matrices(b, shared_address(left + w * kWarpBytes + offset + lane() * 16));
            mma<T>(o[w].at[0], a, b[0], b[2]);
            mma<T>(o[w].at[1], a, b[1], b[3]);
          }
        }
      };
#pragma unroll 2
      for (int k = 0; k < D / 16; ++k) {
        uint32_t a[4];
        load_block(a, q, 0, 16 * k);
        add_left(a, k * 512);
      }
      const float2 read = {factor.x * exp2_fast(decay.x), factor.y * exp2_fast(decay.y)};
#pragma unroll
      for (int w = 0; w < Sizes::kChain; ++w) {
#pragma unroll
        for (int i = 0; i < 8; ++i) o[w].at[i / 4][i % 4] *= i % 4 < 2 ? read.x : read.y;
      }
#pragma unroll
      for (int j = 0; j < kTilesDown; ++j) {
        if (j < key_tiles) add_left(weights.at[j], Sizes::kStateBytes + j * 512);
      }
      if (member + 1 == group) {
        __syncwarp();
        if (lane() == 0) {
          arrive(&barriers.consumed[slot.at]);
          arrive(&barriers.empty[turn.at]);
        }
      }

      // Out, through the buffer of the queries.
      __syncwarp();
      const Out out{q.data};
#pragma unroll
      for (int w = 0; w < Sizes::kChain; ++w) {
        if (w >= from && w < to) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            *reinterpret_cast<uint32_t*>(&lane_at(out, 8 * (i % 2), 16 * w + 8 * (i / 2))) =
                pair_of<T>(o[w].at[i / 2][i % 2 * 2], o[w].at[i / 2][i % 2 * 2 + 1]);
          }
        }
      }
      __syncwarp();
      T* const out_rows =
          at<T>(p.o, batch, part.piece.start + c * tokens + first_token, first_head + member, part.col);
      const int packs = 2 * (to - from);
      for (int i = lane(); i < kTileRows * packs; i += 32) {
        const int row = i / packs, col = 16 * from + i % packs * 8;
        if (row < rows && part.col + col < p.shape.V) {
          *reinterpret_cast<uint4*>(out_rows + row * p.o.stride[1] + col) =
              *reinterpret_cast<const uint4*>(&out.at(row, col));
        }
      }
      __syncwarp();
      load_next(buffer);
      buffer = buffer + 1 == Sizes::kQueries ? 0 : buffer + 1;
    }
    turn.next(pass.stages);
    slot.next(Sizes::kRing);
  }
  wait_copies<0>();
}

template <typename T, int D>
__global__ void __launch_bounds__(ScanSizes<D>::kThreads, 1) scan(const __grid_constant__ ScanPass pass) {
  using Sizes = ScanSizes<D>;
  extern __shared__ __align__(128) unsigned char shared[];
  Part part;
  if (!part_of<Sizes::kCols>(pass.scan.shape, pass.walk, part)) return;
  auto& barriers = *reinterpret_cast<ScanBarriers*>(shared);
  unsigned char* const ring = shared + 128;
  unsigned char* const queries = ring + Sizes::kRing * Sizes::kSlotBytes;
  unsigned char* const stages = shared + (pass.walk.alone ? 128 : Sizes::kFixedBytes);
  const int readers = pass.walk.alone ? 0 : kReaders;
  if (threadIdx.x == 0) {
    for (int i = 0; i < pass.stages; ++i) {
      init_barrier(&barriers.full[i], 32 * kLoaders);
      init_barrier(&barriers.empty[i], Sizes::kChain + readers);
    }
    for (int i = 0; i < Sizes::kRing; ++i) {
      init_barrier(&barriers.published[i], Sizes::kChain);
      init_barrier(&barriers.consumed[i], kReaders);
    }
  }
  __syncthreads();
  const int warp = threadIdx.x / 32;
  if (warp < Sizes::kChain) {
    run_chain<T, D>(pass, part, stages, ring, barriers, warp);
  } else if (warp < Sizes::kChain + readers) {
    run_reader<T, D>(pass, part, stages, ring, queries, barriers, warp - Sizes::kChain);
  } else {
    load_stages<T, D>(pass, part, stages, barriers, threadIdx.x - 32 * (Sizes::kChain + readers));
  }
}

// Bytes of shared memory without which a block does not run.
template <typename T, int D>
constexpr int scan_least() {
  return ScanSizes<D>::kFixedBytes + 2 * Stage<T, D>::kBytes;
}

template <typename T, int D>
cudaError_t launch_scan(const ScanPass& given, cudaStream_t stream) {
  using Sizes = ScanSizes<D>;
  ScanPass pass = given;
  const DeltaShape& shape = pass.scan.shape;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  const int stages = std::min((limit - Sizes::kFixedBytes) / Stage<T, D>::kBytes, Sizes::kMaxStages);
  if (stages < 2) return cudaErrorInvalidConfiguration;
  const int most = Sizes::kFixedBytes + stages * Stage<T, D>::kBytes;
  if (const cudaError_t error = allow_shared<scan<T, D>>(most); error != cudaSuccess) return error;
  const int64_t blocks = blocks_of(shape, pass.walk, Sizes::kCols);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  // Without readers several blocks fit a multiprocessor, if they leave each other shared memory.
  pass.stages = pass.walk.alone ? std::min(stages, 3) : stages;
  const int threads = pass.walk.alone ? 32 * (Sizes::kChain + kLoaders) : Sizes::kThreads;
  const int bytes = pass.walk.alone ? 128 + pass.stages * Stage<T, D>::kBytes : most;
  scan<T, D><<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(pass);
  return cudaGetLastError();
}

}  // namespace girih::kernels::delta_product
