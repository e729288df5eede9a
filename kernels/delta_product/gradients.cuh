// gradients: a block has a chunk and a query head. S is the state before the chunk, dS the gradient of the
// state after it. With a_i = rho_i e^{L_i}, D_ij = rho_i rho_j e^{L_i - L_j}, M_ij = D_ij k_i . k_j (j < i),
// and r, w, read as in the scan and reverse:
//
//     E_i  = v_i - a_i S^T k_i - sum_j M_ij U_j                       the residual (prediction error): U =
//     beta E dv_i = beta_i G_i dbeta_i = G_i . E_i = G_i . (v_i - a_i S^T k_i) - sum_j M_ij G_i . U_j dP_tj =
//     do_t . U_j      N_ij = -beta_i G_i . U_j (j < i) dq_t = r_t S do_t + sum_j scale rho_t rho_j e^{L_t -
//     L_j} dP_tj k_j dk_j = w_j dS U_j - read_j S G_j + sum_t scale rho_t rho_j e^{L_t - L_j} dP_tj q_t
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
// If reverse has stored dv instead of G, the factor beta_i is omitted from N and dk, and dbeta_i is divided
// by it.
//
// A warpgroup has half of the columns of D of dq and dk (at D = 64 all of them), and of each slab 64 columns
// of U. The first warpgroup has N, the second (or the only one) dP. Loads are not pipelined within a block;
// latency is hidden by the other resident blocks, so shared memory and registers are the limit: with one slab
// four blocks at D = 64, two at D = 128.
//   D = 64    Queries replace dS, and N K takes N from registers.
//   D = 128   dS replaces S. Up to 32 queries are stored below the half tile of do, more replace U. With one
//   slab dq is
//             stored in the memory of G while N and dP are computed, because registers do not suffice
//             (loading S again instead was a sixth of the global loads).
#pragma once

#include "delta_product/gradient_finish.cuh"
#include "tile/launch.h"

namespace girih::kernels::delta_product {

template <typename T, int D, bool OneSlab, Factors factors>
__device__ inline bool GradientBlock<T, D, OneSlab, factors>::start(const GradientGrid& grid) {
  const uint32_t chunk = grid.query_heads.divide(blockIdx.x),
                 query_head = blockIdx.x - chunk * grid.query_heads.by,
                 head = grid.members.divide(query_head), chunk_and_head = chunk * p.shape.heads + head;
  // Starts all first loads except S.
  const auto start = [&](const Here& here) {
    loads.start_keys(here);
    late ? loads.prefetch_queries(here) : loads.template start_queries<kThreads>(here);
    loads.start_values(here, 0);
  };
  if (threadIdx.x == 0) {
    if (kBoxes) {
      // The copy of S does not depend on the tokens, so it starts before they are known.
      loads.init();
      loads.start_states(chunk_and_head, 0);
    }
    Here here;
    here.query_head = static_cast<int>(query_head);
    here.head = static_cast<int>(head);
    here.number = chunk_and_head;
    here.first = query_head == head * grid.members.by;
    here.many_tokens = many_tokens;
    here.piece = chunk_at(p.shape.tokens, chunk, grid.tokens, grid.each);
    here.rows = here.piece.length * p.shape.n;
    *tile.here = here;
    // (Letting the other threads continue to their own wait meanwhile is slower.)
    if (kBoxes && here.rows > 0) start(here);
  }
  tile.origin.put();
  __syncthreads();
  if (here.rows == 0) {
    if (kBoxes) wait(&tile.barriers->states, 0);
    return false;
  }
  if (!kBoxes) {
    loads.start_states(here.number, 0);
    start(here);
  }
  has_tokens = many_tokens || place.band < kTilesDown / 2;
  has_values = Sizes::kParts == Sizes::kGroups || place.group < Sizes::kParts;
  has_edge = gated && here.first;
  if (has_edge) of_states.load(p, here, 0);
  return true;
}

template <typename T, int D, bool OneSlab, Factors factors>
__global__ void __launch_bounds__(GradientSizes<D>::kThreads, GradientSizes<D>::blocks(OneSlab))
    gradients(const __grid_constant__ DeltaGradients p, const __grid_constant__ GradientGrid grid,
              const __grid_constant__ GradientBoxes boxes) {
  using Sizes = GradientSizes<D>;
  extern __shared__ __align__(1024) unsigned char room[];
  const bool many_tokens = has_many(grid.tokens);
  const GradientTiles<T, D, OneSlab> tile(room, many_tokens);
  GradientBlock<T, D, OneSlab, factors> block(p, boxes, tile, many_tokens);
  if (!block.start(grid)) return;
  if constexpr (OneSlab) {
    block.take_slab(0);
  } else {
    fill(block.dq, 0.f);
    fill(block.dk, 0.f);
#pragma unroll 1
    for (int v = 0; v < p.shape.V; v += Sizes::kSlab) block.take_slab(v);
  }
  Operand<kTilesDown> left;
  block.weigh(grid.steps, left);
  block.start_dq(left);
  many_tokens ? block.template add_queries<4>(left) : block.template add_queries<2>(left);
  block.add_keys(left);
  block.finish_lengths();
  block.put();
}

// Minimal shared memory of a block in bytes.
template <typename T, int D>
constexpr int gradients_least() {
  return std::max(D <= 128 ? GradientTiles<T, D, true>::bytes(true) : 0,
                  GradientTiles<T, D, false>::bytes(true));
}

template <typename T, int D, bool OneSlab, Factors factors = Factors::any>
cudaError_t launch_gradients_of(const DeltaGradients& p, cudaStream_t stream) {
  constexpr auto kernel = gradients<T, D, OneSlab, factors>;
  using Tiles = GradientTiles<T, D, OneSlab>;
  static_assert(!OneSlab || Tiles::bytes(true) <= (D == 64 ? 56 : 113) * 1024,
                "four blocks or two have 228 KB, of which each gives away one");
  if (const cudaError_t error = allow_shared<kernel>(Tiles::bytes(true)); error != cudaSuccess) {
    return error;
  }
  const int tokens = delta_chunk(p.shape.n);
  const int64_t blocks = piece_count(p.shape.tokens, tokens) * p.shape.query_heads;
  if (blocks == 0 || p.shape.tokens.tokens == 0) return cudaSuccess;
  GradientBoxes boxes{};
  bool has = false;
  if (const cudaError_t error = has_boxes<kernel>(has); error != cudaSuccess) return error;
  if (has) {
    if (const cudaError_t error = describe(boxes, p); error != cudaSuccess) return error;
  }
  constexpr int kThreads = GradientSizes<D>::kThreads;
  const int bytes = Tiles::bytes(has_many(tokens));
  return launch_grid<kernel>(blocks, kThreads, bytes, stream, p, GradientGrid(p.shape), boxes);
}

template <typename T, int D>
cudaError_t launch_gradients(const DeltaGradients& p, cudaStream_t stream) {
  if constexpr (D <= 128) {
    if (p.shape.V <= GradientSizes<D>::kSlab) {
      // (At D = 64 these instances are slower: the compiler serialises the products.)
      if constexpr (D == 128) {
        if (!p.gated) {
          return p.shape.unit ? launch_gradients_of<T, D, true, Factors::lengths>(p, stream)
                              : launch_gradients_of<T, D, true, Factors::none>(p, stream);
        }
      }
      return launch_gradients_of<T, D, true>(p, stream);
    }
  }
  return launch_gradients_of<T, D, false>(p, stream);
}

}  // namespace girih::kernels::delta_product
