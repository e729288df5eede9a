// The gradients with a beta for every channel; a block has a chunk and a memory head. S is the state before
// the chunk, dS the gradient of the state after it.
//
//     Z = W - B S                                      U = X Z
//     P_tj = do_t . U_j  (rows j of tokens <= t)       N_ij = G_i . U_j  (j < i)
//     dq_t = scale (S do_t + sum_j P_tj k_j)           db_i = -(S G_i + sum_j N_ij k_j)
//     dk_j = dS U_j + scale sum_t P_tj q_t - sum_i N_ij b_i
//
// Each pass has operands `left` and `right`: (do, q) of each query head of the memory, then (G, b):
//
//     weights = tril(left U^T)    gradient of right ~ left S^T + weights K    dk ~ dk + weights^T right
//
// The accumulator of dk stays in registers and is sum_t P_tj q_t after the query heads. It is then multiplied
// by -scale. P is not scaled before: fp16 would lose digits of small elements.
//
// Loads are not pipelined within a block; latency is hidden by the other resident blocks, so shared memory is
// the limit. There are four tiles of rows: `left` and `right` are replaced in every pass, dS replaces S, and
// B is loaded twice. The first queries, G and dS are prefetched to the L2 cache. Tiles are padded rather than
// swizzled: the addresses of a product are then one address of the lane plus constants, while a swizzled tile
// needs an address for every 16 columns.
#pragma once

#include "delta_product/channel_beta_tiles.cuh"

namespace girih::kernels::delta_product {

// The rows of `left` in a pass: `count` rows; row t has weights for rows j < slope t + first of the chunk.
struct ReaderRows {
  int count, slope, first;

  // True if rows 16 band to 16 band + 15 have weights for rows 16 block to 16 block + 15.
  __device__ bool has_weights(int band, int block) const {
    return kTileRows * band < count && kTileRows * block < slope * (kTileRows * band + kTileRows - 1) + first;
  }
};

template <typename T, int D>
struct ChannelBetaBlock {
  using Sizes = ChannelBetaSizes<D>;
  using Tiles = ChannelBetaTiles<T, D>;
  using Gradient = Accumulator<Sizes::kCols / 8>;
  static constexpr int kThreads = Sizes::kThreads, kStateBlocks = D / 16;  // of 16 terms

  const DeltaChannelBetaGradients& p;
  const Tiles& tile;
  const int members;
  const ChannelBetaChunkInfo& chunk_info;
  int half, band, row,
      col;  // of the warp: tile `band` of 16 rows, from `row`; half of the columns, from `col`
  Gradient dk;

  __device__ ChannelBetaBlock(const DeltaChannelBetaGradients& p, const ChannelBetaGrid& grid,
                              const Tiles& tile)
      : p(p), tile(tile), members(grid.members), chunk_info(*tile.chunk_info) {
    // Warps w and w + 4 share a scheduler; one gets a long row of the triangle, the other a short one.
    const int warp = warp_index();
    half = warp / 4, band = half == 0 ? warp : 7 - warp;
    row = kTileRows * band, col = Sizes::kCols * half;
    fill(dk, 0.f);
  }

  // Head of the output of a pass; whether the pass has the rows of steps; chunk * H + memory head.
  __device__ int output_head(int pass) const { return chunk_info.head * members + pass; }
  __device__ bool is_steps(int pass) const { return pass == members; }
  __device__ static uint64_t number() { return blockIdx.x; }

  // Loads the rows of a head of the chunk: steps or tokens.
  __device__ void load(const typename Tiles::Rows& to, const InputTensor<4>& from, bool steps,
                       int head) const {
    const T* const first = at<T>(from, chunk_info.batch, steps ? chunk_info.step : chunk_info.token, head);
    load_async<kThreads>(to, first, from.stride[1], steps ? chunk_info.steps : chunk_info.tokens, p.shape.D,
                         static_cast<int>(threadIdx.x));
  }
  __device__ void load_state(const void* states) const {
    const T* const from = state_at(static_cast<const T*>(states), p.shape, number(), 0);
    load_async<kThreads>(tile.state, from, p.shape.D, p.shape.V, p.shape.D, static_cast<int>(threadIdx.x));
  }
  // (do, q) of a query head, or (G, b). If a memory has several query heads, HQ = HO.
  __device__ void load_left(int pass) const {
    const bool steps = is_steps(pass);
    load(tile.left, steps ? p.dz : p.dout, steps, steps ? chunk_info.head : output_head(pass));
  }
  __device__ void load_right(int pass) const {
    const bool steps = is_steps(pass);
    load(tile.right, steps ? p.b : p.q, steps, steps ? chunk_info.head : chunk_info.query_head + pass);
  }

  __device__ void half_barrier() const {
    half == 0 ? named_barrier_sync(1, Sizes::kHalfThreads) : named_barrier_sync(2, Sizes::kHalfThreads);
  }

  __device__ void prefetch_rows(const T* from, int64_t stride, int rows) const {
    constexpr int kLines = D / 64;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < rows * kLines; i += kThreads) {
      if (i % kLines * 64 < p.shape.D) prefetch(from + i / kLines * stride + i % kLines * 64);
    }
  }

  // Starts the first loads, those of U first. Returns false if the chunk has no tokens.
  __device__ bool start(const ChannelBetaGrid& grid) const {
    // Loads that do not depend on the tokens start before the tokens are known.
    load_state(p.states);
    const unsigned char* const prepared = prepared_at(p.prepared, number());
#pragma unroll
    for (int i = 0; i <= kDeltaHasInverseLoOffset; i += kThreads * 16) {
      const int at = i + static_cast<int>(threadIdx.x) * 16;
      if (at < kDeltaInverseBytes || at == kDeltaHasInverseLoOffset) {
        copy_async(shared_address(tile.prepared.data + at), prepared + at, true);
      }
    }
    if (threadIdx.x == 0) {
      const uint32_t chunk = grid.heads.divide(blockIdx.x), head = blockIdx.x - chunk * grid.heads.by;
      const TokenRange range = chunk_at(p.shape.tokens, chunk, grid.tokens, grid.sequence_chunks);
      ChannelBetaChunkInfo& to = *tile.chunk_info;
      to.batch = range.sequence.batch, to.token = range.start, to.step = range.start * p.shape.n;
      to.tokens = range.length, to.steps = range.length * p.shape.n;
      to.head = static_cast<int>(head), to.key_head = static_cast<int>(grid.key_share.divide(head));
      to.query_head = static_cast<int>(grid.query_share.divide(head * members));
    }
    __syncthreads();
    if (chunk_info.tokens == 0) {
      wait_copies<0>();
      return false;
    }
    load(tile.right, p.b, true, chunk_info.head);
    load(tile.u, p.w, true, chunk_info.head);
    commit_copies();
    load(tile.k, p.k, true, chunk_info.key_head);
    load_left(0);
    commit_copies();
    prefetch_rows(at<T>(p.q, chunk_info.batch, chunk_info.token, chunk_info.query_head), p.q.stride[1],
                  chunk_info.tokens);
    prefetch_rows(at<T>(p.dz, chunk_info.batch, chunk_info.step, chunk_info.head), p.dz.stride[1],
                  chunk_info.steps);
    prefetch_rows(state_at(static_cast<const T*>(p.gradients), p.shape, number(), 0), p.shape.D, p.shape.V);
    return true;
  }

  // Replaces W by U when its inputs are loaded. Four warps have the same columns and synchronise.
  __device__ void solve() const {
    // Z = W - B S
    Gradient sums;
    fill(sums, 0.f);
    add_tile_product_transposed<kStateBlocks>(sums, tile.right, row, tile.state, col);
#pragma unroll
    for (int n = 0; n < Sizes::kCols / 8; n += 2) {
      uint32_t w[4];
      load_block(w, tile.u, row, col + 8 * n);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float2 value = unpack_pair<T>(w[m]);
        const float(&read)[4] = sums.at[n + m / 2];
        w[m] = pack_pair<T>(value.x - read[m % 2 * 2], value.y - read[m % 2 * 2 + 1]);
      }
      store_block(tile.u, row, col + 8 * n, w);
    }
    half_barrier();
    // U = X Z
    fill(sums, 0.f);
#pragma unroll
    for (int j = 0; j < kChunkTiles; ++j) {
      if (j > band) continue;
      uint32_t x[4];
      tile.prepared.load_inverse(x, band, j);
      add_product<T>(sums, x, tile.u, kTileRows * j, col);
    }
    if (__builtin_expect(tile.prepared.has_inverse_lo(), false)) {
      const unsigned char* const all = prepared_at(p.prepared, number());
#pragma unroll 1
      for (int j = 0; j <= band; ++j) {
        uint32_t inverse_lo[4];
        load_inverse_lo(inverse_lo, all, band, j);
        add_product<T>(sums, inverse_lo, tile.u, kTileRows * j, col);
      }
    }
    AFragment<Sizes::kCols / 16> u;
    round_to_a_fragment<T>(u, sums);
    half_barrier();
    store_blocks(tile.u, row, col, u);
  }

  // weights = tril(left U^T), 16 x 32 of the warp, and gradient = left S^T, one after the other: the
  // registers of the first are free when the second starts.
  __device__ void compute_left_products(const ReaderRows& readers, Gradient& gradient) const {
    fill(gradient, 0.f);
    if (row >= readers.count) return;
    if (readers.has_weights(band, 2 * half)) {
      Accumulator<4> products;
      fill(products, 0.f);
      add_tile_product_transposed<kStateBlocks>(products, tile.left, row, tile.u, 32 * half);
      // Rows of U, counted from the lane's first column, for which the lane's first row has weights.
      const int visible_rows = readers.slope * (row + lane_row()) + readers.first - (32 * half + lane_col());
      for_each_register<4>([&](int n, int i) {
        if (8 * n + i % 2 >= visible_rows + i / 2 * 8 * readers.slope) products.at[n][i] = 0.f;
      });
      AFragment<2> weights;
      round_to_a_fragment<T>(weights, products);
      store_blocks(tile.weights, row, 32 * half, weights);
    }
    add_tile_product<kStateBlocks>(gradient, tile.left, row, tile.state, col);
  }

  // gradient += weights K, dk += weights^T right
  __device__ void add_rows(const ReaderRows& readers, Gradient& gradient) {
#pragma unroll
    for (int j = 0; j < kChunkTiles; ++j) {
      if (!readers.has_weights(band, j)) continue;
      uint32_t weights[4];
      load_block(weights, tile.weights, row, 16 * j);
      add_product<T>(gradient, weights, tile.k, 16 * j, col);
    }
#pragma unroll
    for (int t = 0; t < kChunkTiles; ++t) {
      if (!readers.has_weights(t, band)) continue;
      uint32_t weights[4];
      load_block_transposed(weights, tile.weights, row, 16 * t);
      add_product<T>(dk, weights, tile.right, 16 * t, col);
    }
  }

  // dk = -dk + U dS^T
  __device__ void add_state_writes() {
    scale_rows(dk, {-1.f, -1.f});
    add_tile_product<kStateBlocks>(dk, tile.u, row, tile.state, col);
  }

  // Stores the rows of the warp, times a factor: steps or tokens of the chunk.
  __device__ void store(Gradient gradient, const OutputTensor<4>& to, bool steps, int head,
                        float factor) const {
    scale_rows(gradient, {factor, factor});
    T* const first = at<T>(to, chunk_info.batch, steps ? chunk_info.step : chunk_info.token, head, col);
    store_rows<T>(gradient, first, to.stride[1], row, steps ? chunk_info.steps : chunk_info.tokens,
                  p.shape.D - col);
  }
};

template <typename T, int D>
__global__ void __launch_bounds__(ChannelBetaSizes<D>::kThreads, ChannelBetaSizes<D>::kBlocks)
    channel_beta_gradients(const __grid_constant__ DeltaChannelBetaGradients p,
                           const __grid_constant__ ChannelBetaGrid grid) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared_start, 1024);
  const ChannelBetaTiles<T, D> tile(shared_start);
  ChannelBetaBlock<T, D> block(p, grid, tile);
  if (!block.start(grid)) return;
  wait_copies<1>();
  __syncthreads();
  block.solve();
  const int n = p.shape.n;
#pragma unroll 1
  for (int pass = 0; pass <= grid.members; ++pass) {
    const bool steps = block.is_steps(pass);
    const ReaderRows readers =
        steps ? ReaderRows{block.chunk_info.steps, 1, 0} : ReaderRows{block.chunk_info.tokens, n, n};
    // `left`, K and U are loaded; all warps have finished with `right` and the weights of the previous pass.
    wait_copies<0>();
    __syncthreads();
    block.load_right(pass);
    commit_copies();
    typename ChannelBetaBlock<T, D>::Gradient gradient;
    block.compute_left_products(readers, gradient);
    if (steps) scale_rows(block.dk, {-p.shape.scale, -p.shape.scale});
    // `right` is loaded and the weights are stored; all warps have finished with `left`, and in the last pass
    // with S.
    wait_copies<0>();
    __syncthreads();
    steps ? block.load_state(p.gradients) : block.load_left(pass + 1);
    commit_copies();
    block.add_rows(readers, gradient);
    block.store(gradient, steps ? p.db : p.dq, steps, steps ? block.chunk_info.head : block.output_head(pass),
                steps ? -1.f : p.shape.scale);
  }
  wait_copies<0>();
  __syncthreads();
  block.add_state_writes();
  block.store(block.dk, p.dk, true, block.chunk_info.head, 1.f);
}

template <typename T, int D>
cudaError_t launch_channel_beta_gradients(const DeltaChannelBetaGradients& p, cudaStream_t stream) {
  constexpr auto kernel = channel_beta_gradients<T, D>;
  constexpr int kBytes = ChannelBetaTiles<T, D>::kBytes;
  if (const cudaError_t error = allow_shared<kernel>(kBytes); error != cudaSuccess) return error;
  const int64_t blocks = token_range_count(p.shape.tokens, delta_chunk_tokens(p.shape.n)) * p.shape.heads;
  if (p.shape.tokens.tokens == 0) return cudaSuccess;
  return launch_grid<kernel>(blocks, ChannelBetaSizes<D>::kThreads, kBytes, stream, p,
                             ChannelBetaGrid(p.shape));
}

}  // namespace girih::kernels::delta_product
