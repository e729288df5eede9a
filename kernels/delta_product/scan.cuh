// The scan's kernel: from chunk to chunk
//
//     Y = K S        Z_i = beta_i v_i - read_i Y_i        U = X Z        S <- e^{L_C} S + K^T (w * U)
//     o_t = scale rho_t e^{L_t} S^T q_t + sum_j P_tj U_j          S the state before the chunk
//
// A block has 64 columns of V of one head's state, for all chunks of a sequence or a segment of one. The time
// of a chunk is that of its chain of products, each of which waits for the one before: a warpgroup does
// nothing but these. Beside it a warpgroup makes the output, five warps make P, one stores the states, and
// two load what all of them read.
#pragma once

#include "delta_product/scan_chain.cuh"
#include "delta_product/scan_readers.cuh"
#include "delta_product/scan_scores.cuh"

namespace girih::kernels::delta_product {

template <typename T, int D, int Rows>
__device__ inline void load_stages(const ScanPass& pass, const Part& part, const ScanSpace<T, D, Rows>& space,
                                   int thread) {
  const DeltaScan& p = pass.scan;
  const int n = p.shape.n, tokens = delta_chunk(n), group = p.shape.query_heads / p.shape.heads;
  const int64_t batch = part.piece.sequence.batch, first_head = static_cast<int64_t>(part.head) * group;
  ScanBarriers& barriers = space.barriers();
  const auto loader = stage_loader<T, D>(p.shape, p.k, p.v, part, thread);
  // Without output no row of q is touched.
  const TileCopier<32 * kLoaders, BlockTile<T, D, Rows == 0 ? 32 : Rows>> q(
      at<T>(p.q, batch, part.piece.start, first_head, 0), p.q.stride[1], p.shape.D, thread);
  Turn turn, query_turn;
#pragma unroll 1
  for (int c = 0; c < part.chunks; ++c) {
    const int length = tokens_in(part, tokens, c);
    wait(&barriers.empty[turn.place], turn.parity ^ 1);
    loader.start(space.stage(turn.place), c * tokens * n, length * n, !part.transition,
                 prepared_at(p.prepared, p.shape, part.chunk + c, part.head));
    arrive_after_copies(&barriers.full[turn.place]);
    turn.next(pass.stages);
    if constexpr (Rows != 0) {
#pragma unroll 1
      for (int member = 0; member < group; ++member) {
        wait(&barriers.query_empty[query_turn.place], query_turn.parity ^ 1);
        q.start(space.query(query_turn.place).q(), c * tokens, length, member * p.q.stride[2]);
        arrive_after_copies(&barriers.query_full[query_turn.place]);
        query_turn.next(pass.queries);
      }
    }
  }
  commit_copies();
  wait_copies<0>();
}

template <typename T, int D, int Rows>
__device__ inline void store_states(const ScanPass& pass, const Part& part,
                                    const ScanSpace<T, D, Rows>& space) {
  const DeltaScan& p = pass.scan;
  if (p.states == nullptr) return;
  ScanBarriers& barriers = space.barriers();
  Turn slot;
#pragma unroll 1
  for (int c = 0; c < part.chunks; ++c) {
    T* const to = state_at(static_cast<T*>(p.states), p.shape, part.chunk + c, part.head, part.col);
    wait(&barriers.state[slot.place], slot.parity);
    store_rows<1>(space.state(slot.place), to, p.shape.D, p.shape.V - part.col, p.shape.D, 0);
    arrive(&barriers.read[slot.place]);
    slot.next(pass.slots);
  }
}

// Of a thread, by role: the chain's states need more than its share of a multiprocessor.
template <int D>
struct ScanRegisters {
  static constexpr int kChain = D == 256 ? 240 : 200, kReaders = D == 256 ? 96 : 120,
                       kOthers = (512 - kChain - kReaders) / 16 * 8;
};

template <typename T, int D, int Rows>
__global__ void __launch_bounds__(ScanRoles<Rows>::kThreads, 1) scan(const __grid_constant__ ScanPass pass) {
  using Roles = ScanRoles<Rows>;
  using Space = ScanSpace<T, D, Rows>;
  extern __shared__ __align__(1024) unsigned char shared[];
  Part part;
  if (!part_of(pass.scan.shape, pass.walk, part)) return;
  const Space space{shared, pass.stages, pass.queries, pass.slots};
  if (threadIdx.x == 0) {
    ScanBarriers& barriers = space.barriers();
    for (int i = 0; i < pass.stages; ++i) {
      init_barrier(&barriers.full[i], 32 * kLoaders);
      init_barrier(&barriers.ready[i], 32);
      init_barrier(&barriers.empty[i], 32 * (Roles::kChain + Roles::kScores));
    }
    for (int i = 0; i < pass.queries; ++i) {
      init_barrier(&barriers.query_full[i], 32 * kLoaders);
      init_barrier(&barriers.scored[i], 32 * Roles::kScores);
      init_barrier(&barriers.query_empty[i], 32 * Roles::kReaders);
    }
    for (int i = 0; i < pass.slots; ++i) {
      init_barrier(&barriers.state[i], 32 * Roles::kChain);
      init_barrier(&barriers.update[i], 32 * Roles::kChain);
      init_barrier(&barriers.read[i],
                   32 * (Roles::kReaders + (pass.scan.states == nullptr ? 0 : Roles::kStores)));
    }
  }
  // P and the factors, of which only what tokens see is ever written.
  if constexpr (Rows != 0) {
    using Query = typename Space::Query;
    for (int i = 0; i < pass.queries; ++i) {
      for (int at = Query::Q::kBytes + 16 * threadIdx.x; at < Query::kBytes; at += 16 * Roles::kThreads) {
        *reinterpret_cast<uint4*>(space.query(i).data + at) = {0, 0, 0, 0};
      }
    }
  }
  __syncthreads();
  const int warp = warp_index();
  if (warp < Roles::kChain) {
    if (Rows != 0) take_registers<ScanRegisters<D>::kChain>();
    run_chain<T, D, Rows>(pass, part, space, warp);
    return;
  }
  if constexpr (Rows != 0) {
    const int reader = warp - Roles::kChain, score = reader - Roles::kReaders;
    if (score < 0) {
      leave_registers<ScanRegisters<D>::kReaders>();
      return run_readers(pass, part, space, reader);
    }
    leave_registers<ScanRegisters<D>::kOthers>();
    if (score < Roles::kScores) return run_scores(pass, part, space, score);
    if (score == Roles::kScores) return store_states(pass, part, space);
  }
  load_stages(pass, part, space, threadIdx.x - (Roles::kThreads - 32 * kLoaders));
}

// Bytes of shared memory without which a block does not run.
template <typename T, int D>
constexpr int scan_least() {
  return ScanSpace<T, D, kDeltaRows>::bytes(1, 1, 1);
}

template <typename T, int D, int Rows>
cudaError_t launch_scan_of(const ScanPass& given, cudaStream_t stream) {
  using Space = ScanSpace<T, D, Rows>;
  ScanPass pass = given;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  if (Rows == 0) {
    // Several blocks fit a multiprocessor, if they leave each other shared memory.
    pass.stages = std::min((limit - Space::bytes(0, 0, 0)) / Stage<T, D>::kBytes, 3);
    pass.queries = pass.slots = 0;
  } else {
    // As many stages of both kinds as there is room for. Two slots beside three of each are better than one
    // beside more.
    const auto fit = [&](int slots) {
      pass.slots = slots;
      for (int most = kMaxStages; most > 0; --most) {
        for (pass.stages = kMaxStages; pass.stages >= most; --pass.stages) {
          for (pass.queries = kMaxStages; pass.queries >= most; --pass.queries) {
            if (Space::bytes(pass.stages, pass.queries, slots) <= limit) return most;
          }
        }
      }
      return 0;
    };
    if (fit(kMaxSlots) < 3) fit(1);
  }
  if (pass.stages < 1 || Space::bytes(pass.stages, pass.queries, pass.slots) > limit) {
    return cudaErrorInvalidConfiguration;
  }
  if (const cudaError_t error = allow_shared<scan<T, D, Rows>>(limit); error != cudaSuccess) return error;
  const int64_t blocks = blocks_of(pass.scan.shape, pass.walk);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const int bytes = Space::bytes(pass.stages, pass.queries, pass.slots);
  scan<T, D, Rows><<<static_cast<unsigned>(blocks), ScanRoles<Rows>::kThreads, bytes, stream>>>(pass);
  return cudaGetLastError();
}

template <typename T, int D>
cudaError_t launch_scan(const ScanPass& pass, cudaStream_t stream) {
  if (pass.walk.alone) return launch_scan_of<T, D, 0>(pass, stream);
  return has_many(delta_chunk(pass.scan.shape.n)) ? launch_scan_of<T, D, kDeltaRows>(pass, stream)
                                                  : launch_scan_of<T, D, kDeltaRows / 2>(pass, stream);
}

}  // namespace girih::kernels::delta_product
