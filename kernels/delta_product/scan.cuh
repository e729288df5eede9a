// The scan's kernel: from chunk to chunk
//
//     Y = K S        Z_i = beta_i v_i - read_i Y_i        U = X Z        S <- e^{L_C} S + K^T (w * U)
//     o_t = scale rho_t e^{L_t} S^T q_t + sum_j P_tj U_j          S the state before the chunk
//
// A block has 16 W columns of V of one head's state, for all chunks of a sequence or a segment of one.
//
// Its first W warps are the chain, each with 16 columns. They keep S^T [16, D] in fp32 and compute everything
// transposed: then the sums of every product become the left factor of the next by rounding alone. Four such
// warps are a warpgroup, whose products read the keys from shared memory once for all of them: warp by warp
// that was most of what shared memory can do. What they have rounded, S and U, they leave in a ring for the
// readers, which make the output beside them. Two readers have a chunk, half of its bands of 16 tokens each,
// and two more the next, a pair for every slot of the ring: a reader has as many chunks' time for one as the
// ring has slots. It makes its own rows of P = Q K^T ahead, so that of a chunk's state and updates only their
// products wait. Two loaders fill the stages that all read.
#pragma once

#include "delta_product/chain.cuh"

namespace girih::kernels::delta_product {

constexpr int kPair = 2;  // readers of a chunk

// What depends on the tile of D alone.
template <int D>
struct ScanSizes {
  static constexpr int kCols = scan_columns(D);  // of V, a block's
  static constexpr int kChain = kCols / 16;      // warps
  static constexpr int kMaxStages = D == 64 ? 5 : 4;
  // Slots of the ring. Four readers of all chunks took 2.5 times as long as the chain at D = 64, and their
  // like have half of the work now.
  static constexpr int kMaxRing = D == 64 ? 4 : D == 128 ? 3 : 2;
  static constexpr int kMaxThreads = 32 * (kChain + kPair * kMaxRing + kLoaders);

  static constexpr int kStateBytes = D * 32,
                       kUpdateBytes = kDeltaRows * 32;  // a warp's part of a ring's slot
  static constexpr int kWarpBytes = kStateBytes + kUpdateBytes, kSlotBytes = kChain * kWarpBytes;
  static constexpr int kQueryBytes = kTileRows * D * 2;  // a band's
  // A slot with its pair's queries: of a token with one step a chunk has four bands, else two at most.
  __host__ __device__ static constexpr int ring_bytes(int n) {
    return kSlotBytes + (n == 1 ? 4 : 2) * kQueryBytes;
  }
};

struct ScanBarriers {
  uint64_t full[5], empty[5];                    // stages
  uint64_t state[4], published[4], consumed[4];  // slots of the ring: S is there, U too, both are read
};
constexpr int kScanBarrierBytes = 256;
static_assert(sizeof(ScanBarriers) <= kScanBarrierBytes, "");

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
    if (c >= pass.stages) wait(&barriers.empty[turn.place], turn.parity ^ 1);
    loader.start({stages + turn.place * Stage<T, D>::kBytes}, c * tokens * n, tokens_in(part, tokens, c) * n,
                 !part.transition, prepared_at(p.prepared, p.shape, part.chunk + c, part.head));
    arrive_after_copies(&barriers.full[turn.place]);
    turn.next(pass.stages);
  }
  commit_copies();
  wait_copies<0>();
}

// U^T = Z^T X^T, of 32 columns of it after the other 32, under way afterwards.
template <typename T, int D>
__device__ inline void start_solution(Halves& u, const Operand<kTilesDown>& z, const InverseRows& x) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kGroup = Products<D>::kGroup;
#else
  constexpr bool kGroup = false;
#endif
  if constexpr (kGroup) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const auto matrices = [&](int half, int j) {
      return descriptor(shared_address(x.data + InverseRows::block(2 * half, j)), InverseRows::kNext, 128);
    };
    group_mma<T, Lines::rows, 32, false>(u[0].at, z.at[0], matrices(0, 0));
    group_mma<T, Lines::rows, 32, false>(u[1].at, z.at[0], matrices(1, 0));
    group_mma<T, Lines::rows, 32>(u[0].at, z.at[1], matrices(0, 1));
#pragma unroll
    for (int j = 1; j < kTilesDown; ++j) group_mma<T, Lines::rows, 32>(u[1].at, z.at[j], matrices(1, j));
#endif
  } else {
    fill(u[0], 0.f), fill(u[1], 0.f);
#pragma unroll
    for (int j = 0; j < kTilesDown; ++j) {
#pragma unroll
      for (int i = j; i < kTilesDown; ++i) {
        uint32_t block[4];
        x.load(block, i, j);
        mma<T>(u[i / 2].at[i % 2 * 2], z.at[j], block[0], block[2]);
        mma<T>(u[i / 2].at[i % 2 * 2 + 1], z.at[j], block[1], block[3]);
      }
    }
  }
}

// The chain's warp `warp`.
template <typename T, int D>
__device__ inline void run_chain(const ScanPass& pass, const Part& part, unsigned char* stages,
                                 unsigned char* ring, ScanBarriers& barriers, int warp) {
  using Sizes = ScanSizes<D>;
  const DeltaScan& p = pass.scan;
  const int first_col = part.col + 16 * warp;
  const bool weighted = p.gated || p.shape.unit;  // else every w_j and e^{L_i - L_j} is 1

  State<D> s;  // S^T
  start_state(s, p.shape, pass.walk, part, first_col, p.initial);

  RoundedState<T, D> rounded;
  rounded.take(s);

  Turn turn, slot;
#pragma unroll 1
  for (int c = 0; c < part.chunks; ++c) {
    const Stage<T, D> stage{stages + turn.place * Stage<T, D>::kBytes};
    const Prepared prepared = stage.prepared();
    const Vectors vectors = prepared.vectors();
    unsigned char* const own =
        pass.walk.alone ? nullptr : ring + slot.place * Sizes::kSlotBytes + warp * Sizes::kWarpBytes;
    const auto wait_for_slot = [&] {
      if (own != nullptr && c >= pass.ring) wait(&barriers.consumed[slot.place], slot.parity ^ 1);
    };
    wait(&barriers.full[turn.place], turn.parity);
    fence_tiles();
    if (!rounded.kWhole) wait_for_slot();

    // Y^T = S^T K^T
    Sums<8> y;
    rounded.start_read(y, s, stage.k(), own);
    if (rounded.kWhole) wait_for_slot();
    rounded.leave_in(own);
    if (own != nullptr) arrive(&barriers.state[slot.place]);
    uint32_t v[kTilesDown][4];
    const auto load_values = [&](int j) { load_block_transposed(v[j], stage.v(), 16 * warp, 16 * j); };
#pragma unroll
    for (int j = 0; j < kTilesDown; ++j) {
      if (Products<D>::kGroup) load_values(j);
    }
    const bool keeps = prepared.keeps();
    Products<D>::template wait<0>(y);

    // Z_i = beta_i v_i - read_i Y_i
#pragma unroll
    for (int j = 0; j < kTilesDown; ++j) {
      if (!Products<D>::kGroup) load_values(j);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float(&of)[4] = y.at[2 * j + half];
        const float2 beta = vectors.pair(kDeltaBeta, 16 * j + 8 * half),
                     read = vectors.pair(kDeltaRead, 16 * j + 8 * half);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 value = unpaired<T>(v[j][2 * half + i]);
          of[2 * i] = fmaf(beta.x, value.x, -read.x * of[2 * i]);
          of[2 * i + 1] = fmaf(beta.y, value.y, -read.y * of[2 * i + 1]);
        }
      }
    }
    Operand<kTilesDown> z;
    round_to<T>(z, y);

    // U^T = Z^T X^T, and S decays meanwhile
    Halves u;
    Products<D>::begin();
    start_solution<T, D>(u, z, stage.inverse());
    Products<D>::commit();
    if (p.gated) scale(s, exp2_fast(vectors.element(kDeltaLog, kDeltaRows - 1)));
    Products<D>::template wait<0>(u[0], u[1]);
    if (__builtin_expect(keeps, false)) {
      const auto* all = prepared_at(p.prepared, p.shape, part.chunk + c, part.head);
#pragma unroll
      for (int j = 0; j < kTilesDown; ++j) {
#pragma unroll
        for (int i = j; i < kTilesDown; ++i) {
          uint32_t x[4];
          load_lost(x, all, i, j);
          mma<T>(u[i / 2].at[i % 2 * 2], z.at[j], x[0], x[2]);
          mma<T>(u[i / 2].at[i % 2 * 2 + 1], z.at[j], x[1], x[3]);
        }
      }
    }

    // S^T <- e^{L_C} S^T + (w * U)^T K
    Operand<kTilesDown> unweighted, update;
    round_to<T>(unweighted, u);
    if (weighted) {
      scale_chunk_rows(u, [&](int row) { return vectors.pair(kDeltaWrite, row); });
      round_to<T>(update, u);
    } else {
      update = unweighted;
    }
    const auto publish = [&] {
      if (own == nullptr) return;
      leave(own + Sizes::kStateBytes, unweighted);
      arrive(&barriers.published[slot.place]);
    };
    if (!Products<D>::kGroup) publish();
    start_update<T>(s, update, stage.k());
    if (Products<D>::kGroup) publish();
    rounded.take(s);
    arrive(&barriers.empty[turn.place]);
    turn.next(pass.stages);
    slot.next(pass.ring);
  }

  end_state(s, p.shape, pass.walk, part, first_col, p.final);
}

// A reader of the pair of slot `slot`, with Bands bands of every `ring`-th chunk's tokens.
template <typename T, int D, int Bands>
__device__ inline void run_reader(const ScanPass& pass, const Part& part, unsigned char* stages,
                                  const unsigned char* left, unsigned char* queries, ScanBarriers& barriers,
                                  int slot, int of_pair) {
  using Sizes = ScanSizes<D>;
  using Query = SharedTile<T, kTileRows, D>;
  static_assert(Sizes::kChain % 2 == 0, "the output leaves 32 columns at a time");
  const DeltaScan& p = pass.scan;
  const int n = p.shape.n, tokens = delta_chunk(n), group = p.shape.query_heads / p.shape.heads;
  const bool weighted = p.gated || p.shape.unit;
  const int64_t batch = part.piece.sequence.batch, first_head = static_cast<int64_t>(part.head) * group;

  // The last tokens see the most keys. Of four bands a reader has one of the last two and one of the first
  // two, of two bands one; one band leaves the second reader without.
  int band[Bands];
  band[0] = (tokens + kTileRows - 1) / kTileRows - 1 - of_pair;
  if (Bands == 2) band[Bands - 1] = of_pair;
  const bool any = band[0] >= 0;
  // 16 rows of keys each that the first band's tokens see; of the second band's in four they see two at most.
  const int key_tiles = min(n * (band[0] + 1), kTilesDown);
  const auto sees = [](int b, int tile) { return b == 0 || tile < kTilesDown / 2; };

  // The queries of every chunk's every head: what comes next is under way once this is in registers.
  const TileCopier<32, Query> copier(at<T>(p.q, batch, part.piece.start, first_head, 0), p.q.stride[1],
                                     p.shape.D, lane());
  const auto query = [&](int b) -> Query {
    return {reinterpret_cast<T*>(queries + (of_pair * Bands + b) * Sizes::kQueryBytes)};
  };
  int next_chunk = slot, next_member = 0;
  const auto load_next = [&] {
    if (any && next_chunk < part.chunks) {
      const int length = tokens_in(part, tokens, next_chunk);
#pragma unroll
      for (int b = 0; b < Bands; ++b) {
        const int first = kTileRows * band[b];
        copier.start(query(b), next_chunk * tokens + first, length - first, next_member * p.q.stride[2]);
      }
      if (++next_member == group) next_member = 0, next_chunk += pass.ring;
    }
    commit_copies();
  };
  load_next();

  Turn turn;
  turn.skip(slot, pass.stages);
  unsigned parity = 0;
#pragma unroll 1
  for (int c = slot; c < part.chunks; c += pass.ring) {
    const Stage<T, D> stage{stages + turn.place * Stage<T, D>::kBytes};
    const Vectors vectors = stage.prepared().vectors();
    const int length = tokens_in(part, tokens, c);
    // The stage's turn before this one is over, else its parity would say nothing: the chain was past it when
    // it left the state of this reader's last chunk, for the ring has no more slots than there are stages.
    wait(&barriers.full[turn.place], turn.parity);

#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      Operand<D / 16> q[Bands];
      Operand<kTilesDown> weights[Bands];
      float2 read[Bands];  // scale rho_t e^{L_t}
      if (any) {
        wait_copies<0>();
        __syncwarp();
#pragma unroll
        for (int b = 0; b < Bands; ++b) {
#pragma unroll
          for (int k = 0; k < D / 16; ++k) load_block(q[b].at[k], query(b), 0, 16 * k);
        }
        __syncwarp();
        load_next();

        float2 factor[Bands], decay[Bands];  // scale rho_t, L_t
#pragma unroll
        for (int b = 0; b < Bands; ++b) {
          factor[b] = {p.shape.scale, p.shape.scale};
          if (p.shape.unit) {
            float2 square = {0.f, 0.f};
#pragma unroll
            for (int k = 0; k < D / 16; ++k) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const float2 x = unpaired<T>(q[b].at[k][i]);
                float& sum = i % 2 == 0 ? square.x : square.y;
                sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
              }
            }
            factor[b].x *= rsqrtf(sum_over_row(square.x) + 1e-6f);
            factor[b].y *= rsqrtf(sum_over_row(square.y) + 1e-6f);
          }
          const int token = kTileRows * band[b] + lane_row();  // and 8 further
          decay[b] = {vectors.element(kDeltaLog, min(token * n, kDeltaRows - 1)),
                      vectors.element(kDeltaLog, min((token + 8) * n, kDeltaRows - 1))};
          read[b] = {factor[b].x * exp2_fast(decay[b].x), factor[b].y * exp2_fast(decay[b].y)};
        }

        // P_tj = scale rho_t rho_j e^{L_t - L_j} q_t . k_j
#pragma unroll
        for (int j = 0; j < kTilesDown; ++j) {
          if (j >= key_tiles) continue;
          Sums<2> scores[Bands];
#pragma unroll
          for (int b = 0; b < Bands; ++b) fill(scores[b], 0.f);
#pragma unroll
          for (int k = 0; k < D / 16; ++k) {
            uint32_t key[4];
            load_matrices(key, stage.k().address(16 * j, 16 * k, (lane() & 7) + (lane() >> 4) * 8,
                                                 ((lane() >> 3) & 1) * 8));
#pragma unroll
            for (int b = 0; b < Bands; ++b) {
              if (!sees(b, j)) continue;
              mma<T>(scores[b].at[0], q[b].at[k], key[0], key[1]);
              mma<T>(scores[b].at[1], q[b].at[k], key[2], key[3]);
            }
          }
#pragma unroll
          for (int b = 0; b < Bands; ++b) {
            if (!sees(b, j)) continue;
            const int first = kTileRows * band[b], seen = (first + lane_row() + 1) * n - lane_col();
            const auto for_each_half = [&](const auto& f) {
              f(scores[b].at[0], kTileRows * j);
              f(scores[b].at[1], kTileRows * j + 8);
            };
            if (weighted) {
              for_each_half([&](float(&x)[4], int row) {
                const float2 before = vectors.pair(kDeltaLog, row), unit = vectors.pair(kDeltaUnit, row);
                x[0] *= factor[b].x * unit.x * exp2_fast(decay[b].x - before.x);
                x[1] *= factor[b].x * unit.y * exp2_fast(decay[b].x - before.y);
                x[2] *= factor[b].y * unit.x * exp2_fast(decay[b].y - before.x);
                x[3] *= factor[b].y * unit.y * exp2_fast(decay[b].y - before.y);
              });
            } else {
              for_each_half([&](float(&x)[4], int) {
#pragma unroll
                for (int i = 0; i < 4; ++i) x[i] *= p.shape.scale;
              });
            }
            if (kTileRows * (j + 1) > (first + 1) * n) {
              for_each_half([&](float(&x)[4], int row) {
#pragma unroll
                for (int i = 0; i < 4; ++i) x[i] = row + i % 2 < seen + i / 2 * 8 * n ? x[i] : 0.f;
              });
            }
            Operand<1> rounded;
            round_to<T>(rounded, scores[b]);
#pragma unroll
            for (int i = 0; i < 4; ++i) weights[b].at[j][i] = rounded.at[0][i];
          }
        }
      }
      if (member + 1 == group) arrive(&barriers.empty[turn.place]);

      // The chain is at U still: a third of its time it waited for slots that were read only then.
      if (member == 0) {
        wait(&barriers.state[slot], parity);
        if (p.states != nullptr) {
          T* const states =
              static_cast<T*>(p.states) +
              (((part.chunk + c) * p.shape.heads + part.head) * p.shape.V + part.col) * p.shape.D;
          publish_state<T, D>(states, left, Sizes::kWarpBytes, p.shape, p.shape.V - part.col, of_pair, kPair);
        }
      }

      // O = scale rho_t e^{L_t} Q S + P U, the columns of two warps at a time: all at once spilled.
#pragma unroll 1
      for (int first = 0; any && first < Sizes::kChain; first += 2) {
        const unsigned char* const from = left + first * Sizes::kWarpBytes;
        Sums<4> o[Bands];
#pragma unroll
        for (int b = 0; b < Bands; ++b) fill(o[b], 0.f);
        const auto add_left = [&](int offset, const auto& factor, const auto& has) {
#pragma unroll
          for (int w = 0; w < 2; ++w) {
            uint32_t x[4];
            load_matrices(x, shared_address(from + w * Sizes::kWarpBytes + offset + lane() * 16));
#pragma unroll
            for (int b = 0; b < Bands; ++b) {
              if (!has(b)) continue;
              mma<T>(o[b].at[2 * w], factor(b), x[0], x[2]);
              mma<T>(o[b].at[2 * w + 1], factor(b), x[1], x[3]);
            }
          }
        };
#pragma unroll
        for (int k = 0; k < D / 16; ++k) {
          add_left(
              k * 512, [&](int b) -> auto& { return q[b].at[k]; }, [](int) { return true; });
        }
#pragma unroll
        for (int b = 0; b < Bands; ++b) scale_rows(o[b], read[b]);
        if (member == 0 && first == 0) wait(&barriers.published[slot], parity);
#pragma unroll
        for (int j = 0; j < kTilesDown; ++j) {
          if (j >= key_tiles) continue;
          add_left(
              Sizes::kStateBytes + j * 512, [&](int b) -> auto& { return weights[b].at[j]; },
              [&](int b) { return sees(b, j); });
        }

        T* const out_rows =
            at<T>(p.o, batch, part.piece.start + c * tokens, first_head + member, part.col + 16 * first);
        const int col = 4 * lane_col();  // eight of them a lane
#pragma unroll
        for (int b = 0; b < Bands; ++b) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            uint32_t pack[4];
#pragma unroll
            for (int m = 0; m < 4; ++m) pack[m] = pair_of<T>(o[b].at[m][2 * i], o[b].at[m][2 * i + 1]);
            turn_quad(pack);
            const int row = kTileRows * band[b] + lane_row() + 8 * i;
            if (row < length && part.col + 16 * first + col < p.shape.V) {
              *reinterpret_cast<uint4*>(out_rows + row * p.o.stride[1] + col) = {pack[0], pack[1], pack[2],
                                                                                 pack[3]};
            }
          }
        }
      }
      if (member + 1 == group) arrive(&barriers.consumed[slot]);
    }
    turn.skip(pass.ring, pass.stages);
    parity ^= 1;
  }
  wait_copies<0>();
}

template <typename T, int D>
__global__ void __launch_bounds__(ScanSizes<D>::kMaxThreads, 1) scan(const __grid_constant__ ScanPass pass) {
  using Sizes = ScanSizes<D>;
  extern __shared__ __align__(1024) unsigned char shared[];
  Part part;
  if (!part_of<Sizes::kCols>(pass.scan.shape, pass.walk, part)) return;
  unsigned char* const stages = shared;
  unsigned char* const ring = stages + pass.stages * Stage<T, D>::kBytes;
  unsigned char* const queries = ring + pass.ring * Sizes::kSlotBytes;
  auto& barriers = *reinterpret_cast<ScanBarriers*>(ring + pass.ring * Sizes::ring_bytes(pass.scan.shape.n));
  if (threadIdx.x == 0) {
    for (int i = 0; i < pass.stages; ++i) {
      init_barrier(&barriers.full[i], 32 * kLoaders);
      init_barrier(&barriers.empty[i], 32 * (Sizes::kChain + (pass.walk.alone ? 0 : kPair)));
    }
    for (int i = 0; i < pass.ring; ++i) {
      init_barrier(&barriers.state[i], 32 * Sizes::kChain);
      init_barrier(&barriers.published[i], 32 * Sizes::kChain);
      init_barrier(&barriers.consumed[i], 32 * kPair);
    }
  }
  __syncthreads();
  const int warp = warp_index(), reader = warp - Sizes::kChain;
  if (warp < Sizes::kChain) {
    run_chain<T, D>(pass, part, stages, ring, barriers, warp);
  } else if (reader < kPair * pass.ring) {
    const int slot = reader / kPair;
    unsigned char* const own = queries + slot * (Sizes::ring_bytes(pass.scan.shape.n) - Sizes::kSlotBytes);
    const unsigned char* const left = ring + slot * Sizes::kSlotBytes;
    if (pass.scan.shape.n == 1) {
      run_reader<T, D, 2>(pass, part, stages, left, own, barriers, slot, reader % kPair);
    } else {
      run_reader<T, D, 1>(pass, part, stages, left, own, barriers, slot, reader % kPair);
    }
  } else {
    load_stages<T, D>(pass, part, stages, barriers, threadIdx.x - 32 * (Sizes::kChain + kPair * pass.ring));
  }
}

// Bytes of shared memory without which a block does not run.
template <typename T, int D>
constexpr int scan_least() {
  return kScanBarrierBytes + ScanSizes<D>::ring_bytes(1) + 2 * Stage<T, D>::kBytes;
}

template <typename T, int D>
cudaError_t launch_scan(const ScanPass& given, cudaStream_t stream) {
  using Sizes = ScanSizes<D>;
  ScanPass pass = given;
  const DeltaShape& shape = pass.scan.shape;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  if (limit < scan_least<T, D>()) return cudaErrorInvalidConfiguration;
  // As many slots as there is room for, with as many stages.
  const int ring_bytes = Sizes::ring_bytes(shape.n);
  const auto stages_beside = [&](int ring) {
    return std::min((limit - kScanBarrierBytes - ring * ring_bytes) / Stage<T, D>::kBytes, Sizes::kMaxStages);
  };
  int ring = Sizes::kMaxRing;
  while (stages_beside(ring) < std::max(ring, 2)) --ring;
  const int stages = stages_beside(ring);
  if (const cudaError_t error = allow_shared<scan<T, D>>(limit); error != cudaSuccess) return error;
  const int64_t blocks = blocks_of(shape, pass.walk, Sizes::kCols);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  // Without readers several blocks fit a multiprocessor, if they leave each other shared memory.
  pass.stages = pass.walk.alone ? std::min(stages, 3) : stages;
  pass.ring = pass.walk.alone ? 0 : ring;
  const int threads = 32 * (Sizes::kChain + kPair * pass.ring + kLoaders);
  const int bytes = kScanBarrierBytes + pass.ring * ring_bytes + pass.stages * Stage<T, D>::kBytes;
  scan<T, D><<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(pass);
  return cudaGetLastError();
}

}  // namespace girih::kernels::delta_product
