// The kernel of the scan, chunk after chunk:
//
//     Y = K S        Z_i = beta_i v_i - read_i Y_i        U = X Z        S <- e^{L_C} S + K^T (w * U)
//     Y = B S        with b in place of beta k
//     o_t = scale rho_t e^{L_t} S^T q_t + sum_j P_tj U_j          S the state before the chunk
//
// A block has 64 columns of V of the state of one head, for all chunks of a sequence or of a segment. The
// time of a chunk is the latency of the dependent products Y, U and S, so one warpgroup (the state warps)
// computes nothing else. The other roles are one or two output warpgroups, a store warp for states, two load
// warps and a fence warp. At D = 64, if the GPU has two multiprocessors for each block, a cluster of two
// blocks shares the work (scan_apart.cuh). At D = 128 the state warps compute the output too where possible
// (scan_output.cuh). A launch with `alone` has no output; its blocks have two groups of columns if one each
// would exceed the GPU.
#pragma once

#include "delta_product/scan_apart.cuh"
#include "delta_product/scan_output.cuh"
#include "tile/segments.h"

namespace girih::kernels::delta_product {

template <typename T, int D, int Rows, bool ReadKeys>
__global__ void __launch_bounds__(ScanRoles<D, Rows>::kThreads, 1)
    scan(const __grid_constant__ ScanPass pass) {
  using Roles = ScanRoles<D, Rows>;
  using Space = ScanSpace<T, D, Rows, ReadKeys>;
  using Registers = ScanRegisters<D, Rows>;
  // The registers of all warpgroups do not exceed the registers at launch.
  static_assert(Roles::kChains * Registers::kChain + Roles::kReaders * Registers::kReaders +
                    Registers::kOthers <=
                registers_of(Roles::kThreads));
  extern __shared__ __align__(1024) unsigned char shared[];
  Part part;
  if (!part_of(pass.scan.shape, pass.walk, blockIdx.x, part, 0, pass.chains)) return;
  Part second;
  bool two = false;
  if constexpr (Roles::kChains == 2) {
    two = pass.chains == 2 && part_of(pass.scan.shape, pass.walk, blockIdx.x, second, 1, 2);
  }
  const Space space{shared, pass.stages, pass.slots, pass.readers};
  if (threadIdx.x == 0) {
    ScanBarriers& barriers = space.barriers();
    for (int i = 0; i < pass.stages; ++i) {
      init_barrier(&barriers.full[i], 32 * kLoaders);
      init_barrier(&barriers.ready[i], once(1));
      init_barrier(&barriers.empty[i], once((two ? 2 : 1) * Roles::kChain + Roles::kReader));
    }
    for (int i = 0; i < pass.slots; ++i) {
      init_barrier(&barriers.state[i], once(Roles::kChain));
      init_barrier(&barriers.update[i], once(Roles::kChain));
      init_barrier(&barriers.read[i],
                   once(Roles::kReader + (pass.scan.states == nullptr ? 0 : Roles::kStores)));
    }
  }
  __syncthreads();
  const int warp = warp_index();
  if (warp < Roles::kChains * Roles::kChain) {
    if (Registers::kShared) take_registers<Registers::kChain>();
    if constexpr (Roles::kChains == 2) {
      const bool is_second = warp >= Roles::kChain;
      if (is_second && !two) return;
      return run_chain(pass, is_second ? second : part, space, is_second, warp % Roles::kChain);
    } else {
      return run_chain(pass, part, space, 0, warp);
    }
  }
  if constexpr (Rows == kAlone) {
    if (Registers::kShared) leave_registers<Registers::kOthers>();
    if (warp < Roles::kThreads / 32 - kLoaders) return;
  } else {
    const int reader = warp - Roles::kChain, other = reader - Roles::kReaders * Roles::kReader;
    if (other < 0) {
      const int which = reader / Roles::kReader, its_warp = reader % Roles::kReader;
      leave_registers<Registers::kReaders>();
      if constexpr (Rows == Space::kTokens) {
        return run_half_readers<false>(pass, part, space, which, its_warp);
      } else {
        return run_readers<false>(pass, part, space, which, its_warp);
      }
    }
    leave_registers<Registers::kOthers>();
    if (other == 0) return store_states<T>(pass, part, space);
    if (other == 1) return fence_stages(pass, part, space);
  }
  load_stages<T, D>(pass, part, space, true, threadIdx.x - (Roles::kThreads - 32 * kLoaders));
}

// Minimal shared memory of a block in bytes.
template <typename T, int D, bool ReadKeys = false>
constexpr int scan_least() {
  return std::max(ScanSpace<T, D, kDeltaRows, ReadKeys>::bytes(1, 1, 1),
                  ScanSpace<T, D, kDeltaRows / 2, ReadKeys>::bytes(1, 1, 1));
}

template <typename T, int D, int Rows, bool ReadKeys>
cudaError_t launch_scan_of(const ScanPass& given, cudaStream_t stream) {
  using Space = ScanSpace<T, D, Rows, ReadKeys>;
  ScanPass pass = given;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  if (Rows == kAlone) {
    pass.stages = std::min((limit - Space::bytes(0, 0, 0)) / Space::kStageBytes, kMaxStages);
    pass.slots = pass.readers = 0;
  } else {
    // The largest number of stages beside all output warpgroups, or beside one if that is zero. Two stages of
    // states with three stages of keys are faster than one with more.
    const auto fit = [&](int slots, int readers = ScanRoles<D, Rows>::kReaders) {
      for (pass.stages = kMaxStages; pass.stages > 0; --pass.stages) {
        if (Space::bytes(pass.stages, slots, readers) <= limit) break;
      }
      pass.slots = slots;
      // An output warpgroup that skips chunks needs a stage of each ring of its own.
      pass.readers = std::min({readers, pass.stages, slots});
      return pass.stages;
    };
    if (const int stages = fit(2); stages < 3 && fit(1) <= stages) fit(stages > 0 ? 2 : 1);
    if (pass.stages == 0) fit(1, 1);
  }
  if (pass.stages < 1) return cudaErrorInvalidConfiguration;
  if (const cudaError_t error = allow_shared<scan<T, D, Rows, ReadKeys>>(limit); error != cudaSuccess)
    return error;
  // 1 x 32768 tokens, 8 heads of 128: 94 us instead of 122.
  pass.chains = ScanRoles<D, Rows>::kChains == 2 && parts_alone(pass.scan.shape, pass.walk) > kCard ? 2 : 1;
  const int64_t blocks = blocks_of(pass.scan.shape, pass.walk, pass.chains);
  if (blocks == 0) return cudaSuccess;
  if constexpr (D == 64 && Rows != kAlone && !ReadKeys) {  // D = 128 uses scan_output in one block
    bool can = false;
    if (blocks <= kCard / 2 && pass.stages >= kApartReaders &&
        Space::bytes(pass.stages, kApartReaders, kApartReaders) <= limit) {
      if (const cudaError_t error = has_clusters<scan_apart<T, D, Rows>>(can); error != cudaSuccess)
        return error;
    }
    if (can) return launch_apart<T, D, Rows>(pass, blocks, limit, stream);
  }
  if constexpr (D == 128 && Rows != kAlone && !ReadKeys) {
    bool launched = false;
    const cudaError_t error = try_output<T, D, Rows>(pass, limit, stream, launched);
    if (launched || error != cudaSuccess) return error;
  }
  const int bytes = Space::bytes(pass.stages, pass.slots, pass.readers);
  return launch_grid<scan<T, D, Rows, ReadKeys>>(blocks, ScanRoles<D, Rows>::kThreads, bytes, stream, pass);
}

template <typename T, int D, bool ReadKeys>
cudaError_t launch_scan_by_rows(const ScanPass& pass, cudaStream_t stream) {
  if (pass.walk.alone) return launch_scan_of<T, D, kAlone, ReadKeys>(pass, stream);
  return has_many(delta_chunk(pass.scan.shape.n))
             ? launch_scan_of<T, D, kDeltaRows, ReadKeys>(pass, stream)
             : launch_scan_of<T, D, kDeltaRows / 2, ReadKeys>(pass, stream);
}
template <typename T, int D>
cudaError_t launch_scan(const ScanPass& pass, cudaStream_t stream) {
  if (pass.scan.b.data == nullptr) return launch_scan_by_rows<T, D, false>(pass, stream);
  if constexpr (D <= kDeltaVectorMaxWidth) return launch_scan_by_rows<T, D, true>(pass, stream);
  return cudaErrorInvalidValue;
}

}  // namespace girih::kernels::delta_product
