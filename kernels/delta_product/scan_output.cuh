// The scan whose state warps compute the output too, for D of 65 to 128 and HO = H, on GPUs with wgmma. The
// rounded S and U are already the A fragments of both products of the output:
//
//     o_t = scale rho_t e^{L_t} S^T q_t + sum_j P_tj U_j
//     P_tj = scale rho_t rho_j e^{L_t - L_j} q_t . k_j  (rows j of tokens <= t)
//
// so they do not go through shared memory. The time of a chunk is the instruction time of the state warps (a
// product with its A operand in registers blocks its warps). Producer warpgroups therefore compute all that
// does not depend on S, for chunks round-robin: P, and the factors of X in
//
//     U = Xb (v - r Y)        Xb = X diag(beta), r_i = rho_i e^{L_i}
//
// The other warps load queries and store outputs, store states, and load keys and values. (n = 2, 4 x 4096
// tokens, 16 heads, no gates: 135 us instead of 163 by output warps, which read S and U from shared memory.)
// A block has one state warpgroup and two producer warpgroups. If the GPU is full (has_two_chains), a block
// has two state warpgroups with 64 columns of V each and one producer warpgroup: both use the same loads and
// scores, and the products of one run while the other waits.
#pragma once

#include "delta_product/output_chain.cuh"
#include "delta_product/output_loaders.cuh"
#include "delta_product/output_makers.cuh"
#include "tile/launch.h"
#include "tile/segments.h"

namespace girih::kernels::delta_product {

template <typename T, int D, int Rows, bool Weighted, int Chains>
__global__ void __launch_bounds__(OutputRoles<Chains>::kThreads, 1)
    scan_output(const __grid_constant__ ScanPass pass) {
#if __CUDA_ARCH__ >= 900  // launched on sm_90a only
  using Roles = OutputRoles<Chains>;
  using Space = OutputSpace<T, D, Rows, Chains>;
  extern __shared__ __align__(1024) unsigned char shared[];
  Part part;
  if (!part_of(pass.scan.shape, pass.walk, blockIdx.x, part, 0, Chains)) return;
  const Space space{shared, pass.stages, pass.places, pass.slots};
  OutputBarriers& barriers = space.barriers();
  if (threadIdx.x == 0) {
    for (int i = 0; i < pass.stages; ++i) {
      init_barrier(&barriers.full[i], 32 * kLoaders);
      init_barrier(&barriers.empty[i], once(Roles::kChain));
    }
    for (int i = 0; i < pass.places; ++i) {
      init_barrier(&barriers.queried[i], pass.scan.states == nullptr ? 64 : 32);
      init_barrier(&barriers.made[i], once(Roles::kMaker));
      init_barrier(&barriers.used[i], once(Roles::kChain));
      init_barrier(&barriers.output[i], once(Roles::kChain));
    }
    for (int i = 0; i < pass.slots; ++i) {
      init_barrier(&barriers.state[i], once(Roles::kChain));
      init_barrier(&barriers.read[i], once(1));
    }
  }
  __syncthreads();
  const int warp = warp_index(), maker = warp - Roles::kChain, other = maker - Roles::kMakers * Roles::kMaker;
  if (maker < 0) {
    take_registers<Roles::kChainRegisters>();
    return run_output_chain<Weighted>(pass, part, space, warp);
  }
  if (other < 0) {
    leave_registers<Roles::kMakerRegisters>();
    return run_makers<Weighted>(pass, part, space, maker / Roles::kMaker, maker % Roles::kMaker);
  }
  leave_registers<Roles::kOtherRegisters>();
  // If no states are stored, both of these warps serve tokens.
  if (other < 2 && pass.scan.states == nullptr) return run_tokens<2>(pass, part, space, other);
  if (other == 0) return run_states(pass, part, space);
  if (other == 1) return run_tokens<1>(pass, part, space, 0);
  run_loader(pass, part, space, other - 2);
#endif
}

// True if a block has two state warpgroups. Such a block takes 1.75 times as long (1.94 times with factors
// and n = 1), so this pays if the number of waves of blocks decreases by more (1 x 8192 tokens, 96 heads: 364
// us instead of 430 with prepare; 8 x 8192 tokens, 16 heads, with gates: 484 instead of 497). With segments
// it is false: some blocks of packed sequences are empty, so the number of waves is unknown.
inline bool has_two_chains(const ScanPass& pass, bool weighted) {
  const DeltaShape& shape = pass.scan.shape;
  const int64_t blocks = blocks_of(shape, pass.walk);
  const int hundredths = weighted && shape.n == 1 ? 194 : 175;
  return pass.walk.segment == 0 && groups_of(shape.V) % 2 == 0 &&
         hundredths * divide_up(blocks / 2, kCard) <= 100 * divide_up(blocks, kCard);
}

// Chooses the largest rings that fit, with at least as many stages of queries as of keys. False if none fits.
template <class Space>
inline bool fit_output(ScanPass& pass, int limit) {
  pass.slots = pass.scan.states == nullptr ? 0 : Space::kChains == 1 ? 2 : 1;
  for (pass.stages = kMaxStages; pass.stages > 1; --pass.stages) {
    for (pass.places = kMaxPlaces; pass.places >= std::max(pass.stages, 3); --pass.places) {
      if (Space::bytes(pass.stages, pass.places, pass.slots) <= limit) return true;
    }
  }
  return false;
}

template <typename T, int D, int Rows, bool Weighted, int Chains>
cudaError_t launch_output(const ScanPass& pass, int limit, cudaStream_t stream) {
  const int bytes = OutputSpace<T, D, Rows, Chains>::bytes(pass.stages, pass.places, pass.slots);
  const int64_t blocks = blocks_of(pass.scan.shape, pass.walk, Chains);
  return launch_kernel<scan_output<T, D, Rows, Weighted, Chains>>(pass, blocks, OutputRoles<Chains>::kThreads,
                                                                  bytes, stream, limit);
}

// Launches this kernel and sets `launched` if device and shape allow it; otherwise does not change
// `launched`.
template <typename T, int D, int Rows>
cudaError_t try_output(ScanPass pass, int limit, cudaStream_t stream, bool& launched) {
  const DeltaShape& shape = pass.scan.shape;
  if (shape.heads != shape.query_heads) return cudaSuccess;
  bool can = false;
  if (const cudaError_t error = has_warpgroups<scan_output<T, D, Rows, false, 1>>(can);
      error != cudaSuccess || !can) {
    return error;
  }
  const bool weighted = pass.scan.gated || shape.unit;
  if (has_two_chains(pass, weighted) && fit_output<OutputSpace<T, D, Rows, 2>>(pass, limit)) {
    launched = true;
    return weighted ? launch_output<T, D, Rows, true, 2>(pass, limit, stream)
                    : launch_output<T, D, Rows, false, 2>(pass, limit, stream);
  }
  if (!fit_output<OutputSpace<T, D, Rows, 1>>(pass, limit)) return cudaSuccess;
  launched = true;
  return weighted ? launch_output<T, D, Rows, true, 1>(pass, limit, stream)
                  : launch_output<T, D, Rows, false, 1>(pass, limit, stream);
}

}  // namespace girih::kernels::delta_product
