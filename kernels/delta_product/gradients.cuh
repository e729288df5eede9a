// gradients: a block has a chunk and a query head. S is the state before the chunk, dS the gradient of the
// state after it. With a_i = rho_i e^{L_i}, D_ij = rho_i rho_j e^{L_i - L_j}, M_ij = D_ij k_i . k_j (j < i),
// and r_t, w_j, read_j as in kernels.h:
//
//     E_i = v_i - a_i S^T k_i - sum_j M_ij U_j          the residual (prediction error); U_i = beta_i E_i
//     dv_i = beta_i G_i
//     dbeta_i = G_i . E_i = G_i . (v_i - a_i S^T k_i) - sum_j M_ij G_i . U_j
//     dP_tj = do_t . U_j          N_ij = -beta_i G_i . U_j (j < i)
//     dq_t = r_t S do_t + sum_j scale rho_t rho_j e^{L_t - L_j} dP_tj k_j
//     dk_j = w_j dS U_j - read_j S G_j + sum_t scale rho_t rho_j e^{L_t - L_j} dP_tj q_t
//            + sum_{i<j} D_ji N_ji k_i + sum_{i>j} D_ij N_ij k_i
//
// With normalised q and k the components of dq parallel to q and of dk parallel to k are subtracted. The
// gradient of a gate is the sum over its token and all following tokens of the chunk of
//
//     dL_t = sum_j (P dP)_tj + r_t q_t . S do_t + sum of, for its rows i,
//                sum_j (N M)_ij - sum_j (N M)_ji - sum_s (P dP)_si - read_i G_i . S^T k_i - w_i k_i . dS U_i
//
// without the pairs of rows of the same token, on which no gate acts, plus <state after the chunk, dS>.
//
// If dz holds dv instead of G (dz_holds_dv), the factor beta_i is omitted from N and dk, and dbeta_i is
// divided by it.
//
// A slab is 64 or 128 columns of V. A warpgroup computes half of the columns of D of dq and dk (at D = 64 all
// columns), and 64 columns of U of each slab. The first warpgroup computes N, the second (or the only one)
// dP. Loads are not pipelined within a block; latency is hidden by the other resident blocks, so shared
// memory and registers are the limit: with one slab four blocks at D = 64, two at D = 128.
//
// Shared memory is used twice. At D = 64 with one slab q replaces dS, and N stays in registers for the
// product N K. At D = 128 dS replaces S; up to 32 rows of q are stored below the half tile of do, more rows
// replace U. With one slab at D = 128 dq is stored in the memory of G while N and dP are computed, because
// registers do not suffice (loading S again instead was a sixth of the global loads).
#pragma once

#include "delta_product/gradient_finish.cuh"
#include "tile/launch.h"

namespace girih::kernels::delta_product {

template <typename T, int D, bool OneSlab, Factors factors>
__device__ inline bool GradientBlock<T, D, OneSlab, factors>::start(const GradientGrid& grid) {
  const uint32_t chunk = grid.output_heads.divide(blockIdx.x),
                 output_head = blockIdx.x - chunk * grid.output_heads.by,
                 head = grid.members.divide(output_head), chunk_and_head = chunk * p.shape.heads + head;
  // Starts all first loads except S.
  const auto start = [&](const ChunkInfo& chunk_info) {
    loads.start_keys(chunk_info);
    is_query_late ? loads.prefetch_queries(chunk_info) : loads.template start_queries<kThreads>(chunk_info);
    loads.start_values(chunk_info, 0);
  };
  if (threadIdx.x == 0) {
    if (kHasTma) {
      // The copy of S does not depend on the tokens, so it starts before they are known.
      loads.init();
      loads.start_states(chunk_and_head, 0);
    }
    ChunkInfo chunk_info;
    chunk_info.output_head = static_cast<int>(output_head);
    chunk_info.head = static_cast<int>(head);
    chunk_info.number = chunk_and_head;
    chunk_info.is_first_head = output_head == head * grid.members.by;
    chunk_info.many_tokens = many_tokens;
    chunk_info.range = chunk_at(p.shape.tokens, chunk, grid.tokens, grid.sequence_chunks);
    chunk_info.rows = chunk_info.range.length * p.shape.n;
    *tile.chunk_info = chunk_info;
    // (Letting the other threads continue to their own wait meanwhile is slower.)
    if (kHasTma && chunk_info.rows > 0) start(chunk_info);
  }
  tile.origin.store();
  __syncthreads();
  if (chunk_info.rows == 0) {
    if (kHasTma) wait(&tile.barriers->states, 0);
    return false;
  }
  if (!kHasTma) {
    loads.start_states(chunk_info.number, 0);
    start(chunk_info);
  }
  has_tokens = many_tokens || coord.band < kChunkTiles / 2;
  has_values = Sizes::kValueGroups == Sizes::kGroups || coord.group < Sizes::kValueGroups;
  has_state_dot = gated && chunk_info.is_first_head;
  if (has_state_dot) state_dot_loads.load(p, chunk_info, 0);
  return true;
}

template <typename T, int D, bool OneSlab, Factors factors>
__global__ void __launch_bounds__(GradientSizes<D>::kThreads, GradientSizes<D>::blocks(OneSlab))
    gradients(const __grid_constant__ DeltaGradients p, const __grid_constant__ GradientGrid grid,
              const __grid_constant__ GradientTensorMaps maps) {
  using Sizes = GradientSizes<D>;
  GIRIH_DYNAMIC_SHARED(unsigned char, shared_start, 1024);
  const bool many_tokens = has_many_tokens(grid.tokens);
  const GradientTiles<T, D, OneSlab> tile(shared_start, many_tokens);
  GradientBlock<T, D, OneSlab, factors> block(p, maps, tile, many_tokens);
  if (!block.start(grid)) return;
  if constexpr (OneSlab) {
    block.process_slab(0);
  } else {
    fill(block.dq, 0.f);
    fill(block.dk, 0.f);
#pragma unroll 1
    for (int v = 0; v < p.shape.V; v += Sizes::kSlab) block.process_slab(v);
  }
  AFragment<kChunkTiles> left;
  block.compute_operands(grid.steps, left);
  block.start_dq(left);
  many_tokens ? block.template add_queries<4>(left) : block.template add_queries<2>(left);
  block.add_keys(left);
  block.finish_lengths();
  block.store();
}

// Minimal shared memory of a block in bytes.
template <typename T, int D>
constexpr int gradients_min_bytes() {
  return std::max(D <= 128 ? GradientTiles<T, D, true>::bytes(true) : 0,
                  GradientTiles<T, D, false>::bytes(true));
}

template <typename T, int D, bool OneSlab, Factors factors = Factors::any>
cudaError_t launch_gradients_instance(const DeltaGradients& p, cudaStream_t stream) {
  constexpr auto kernel = gradients<T, D, OneSlab, factors>;
  using Tiles = GradientTiles<T, D, OneSlab>;
  static_assert(!OneSlab || Tiles::bytes(true) <= (D == 64 ? 56 : 113) * 1024,
                "four blocks or two share 228 KB, of which each reserves 1 KB");
  if (const cudaError_t error = allow_shared<kernel>(Tiles::bytes(true)); error != cudaSuccess) {
    return error;
  }
  const int tokens = delta_chunk_tokens(p.shape.n);
  const int64_t blocks = token_range_count(p.shape.tokens, tokens) * p.shape.output_heads;
  if (blocks == 0 || p.shape.tokens.tokens == 0) return cudaSuccess;
  GradientTensorMaps maps{};
  bool has = false;
  if (const cudaError_t error = has_tma<kernel>(has); error != cudaSuccess) return error;
  if (has) {
    if (const cudaError_t error = encode_tensor_map(maps, p); error != cudaSuccess) return error;
  }
  constexpr int kThreads = GradientSizes<D>::kThreads;
  const int bytes = Tiles::bytes(has_many_tokens(tokens));
  return launch_grid<kernel>(blocks, kThreads, bytes, stream, p, GradientGrid(p.shape), maps);
}

template <typename T, int D>
cudaError_t launch_gradients(const DeltaGradients& p, cudaStream_t stream) {
  if constexpr (D <= 128) {
    if (p.shape.V <= GradientSizes<D>::kSlab) {
      // (At D = 64 these instances are slower: the compiler serialises the products.)
      if constexpr (D == 128) {
        if (!p.gated) {
          return p.shape.unit ? launch_gradients_instance<T, D, true, Factors::lengths>(p, stream)
                              : launch_gradients_instance<T, D, true, Factors::none>(p, stream);
        }
      }
      return launch_gradients_instance<T, D, true>(p, stream);
    }
  }
  return launch_gradients_instance<T, D, false>(p, stream);
}

}  // namespace girih::kernels::delta_product
