// The scan whose chain makes the output too, for heads of 128 with a query head each, on cards with warpgroup
// products: what the chain has rounded, S and U, is already the left factor of both of the output's products,
//
//     o_t = scale rho_t e^{L_t} S^T q_t + sum_j P_tj U_j
//     P_tj = scale rho_t rho_j e^{L_t - L_j} q_t . k_j  (rows j of tokens <= t)
//
// and passes through no shared memory. A chunk takes as long as the chain's instructions (a product with its
// left factor in registers holds its warps), so whatever needs nothing of S is done by makers, warpgroups
// that take chunks in turn: P, and the weights of
//
//     U = Xb (v - r Y)        Xb = X diag(beta), r_i = rho_i e^{L_i}
//
// Warps of their own fetch queries and store what the chain leaves of the output, store states, and load keys
// and values. (One chain, n = 2, 4 x 4096 tokens, 16 heads, without gates: 135 us instead of 163 by readers
// beside the chain, which have S and U through shared memory.) A block has two makers, or, where the card is
// full (has_two_chains), two chains, with 64 columns of V each, and a maker: what is loaded and made serves
// both chains, and one's products run while the other waits.
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
#if __CUDA_ARCH__ >= 900  // never launched elsewhere
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
  // Where no states are kept, both of these warps have tokens.
  if (other < 2 && pass.scan.states == nullptr) return run_tokens<2>(pass, part, space, other);
  if (other == 0) return run_states(pass, part, space);
  if (other == 1) return run_tokens<1>(pass, part, space, 0);
  run_loader(pass, part, space, other - 2);
#endif
}

// Whether a block has two chains. With them it takes 1.75 times as long, or, weighted and of a step a token,
// 1.94 times, so it has them where blocks take turns on the card and these become so much fewer (1 x 8192
// tokens, 96 heads: 364 us instead of 430, prepare included; 8 x 8192 tokens, 16 heads, gated: 484 instead of
// 497). Not where segments fill the card: of packed sequences some blocks are empty, and turns cannot be
// told.
inline bool has_two_chains(const ScanPass& pass, bool weighted) {
  const DeltaShape& shape = pass.scan.shape;
  const int64_t blocks = blocks_of(shape, pass.walk);
  const int hundredths = weighted && shape.n == 1 ? 194 : 175;
  return pass.walk.segment == 0 && groups_of(shape.V) % 2 == 0 &&
         hundredths * divide_up(blocks / 2, kCard) <= 100 * divide_up(blocks, kCard);
}

// Stages and places that there is room for, of places no fewer than of stages; false: there is none.
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

// Where the card and the shape are such that the chain makes the output, launches that; else leaves
// `launched` as it is.
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
