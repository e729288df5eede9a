// dq and the records CatQueryRecord on sm_90. As forward, with the queries and the gradients of their outputs
// as left factors in registers.
//
//     delta = do.o        P = e^{scale S - lse}, S = Q K^T        dA = P * (dO V^T - delta)        dQ += dA K
//
// dQ of a block is in flight together with S and dO V^T of the next block.
#pragma once

#include "cat_attention/header_list.h"
#include "cat_attention/sm90/query_storage.cuh"

namespace girih::kernels {

template <typename T, int Tile>
struct CatSm90QueryMainloop : CatRingConsumer<CatSm90QueryStorage<T, Tile>> {
  using Storage = CatSm90QueryStorage<T, Tile>;
  using CatRingConsumer<Storage>::rest, CatRingConsumer<Storage>::tile;
  using CatRingConsumer<Storage>::next, CatRingConsumer<Storage>::done;
  using Scores = Accumulator<kCatSm90Keys / 8>;
  using Weights = AFragment<kCatSm90Keys / 16>;

  const CatSm90QueryGradients& p;
  const Storage& space;
  const float scale;  // in units of log2
  int from;           // first row of the warp in the tile
  CatSm90TilePlan plan;
  const float* lse_rows;  // lse of the warp's rows, in shared memory
  AFragment<Tile / 16> q, dout;
  Accumulator<Tile / 8> dq;
  float lse[2], delta[2];  // lse in units of log2
  CatLaneRows rows;

  __device__ CatSm90QueryMainloop(const CatSm90QueryGradients& p, const Storage& space)
      : CatRingConsumer<Storage>{space.rest(), {}, {}},
        p(p),
        space(space),
        scale(p.call.shape.scale * kLog2E),
        from(16 * warp_index()) {}

  // Loads the left factors; computes delta.
  __device__ void begin() {
    const int at_o = next();
    const CatSm90QueryTile& of = rest.tiles[tile.stage];
    plan = of.tile.read();
    rows = of.tile.rows(p.call.shape, plan, from);
    lse_rows = of.lse + from;
    tile.next(Storage::kTiles);
    const int at_dout = next();
    float sum[2] = {0.f, 0.f};
#pragma unroll
    for (int k = 0; k < Tile / 16; ++k) {
      uint32_t o[4];
      load_block(dout.at[k], space.own(at_dout), from, 16 * k);
      load_block(o, space.own(at_o), from, 16 * k);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = unpack_pair<T>(dout.at[k][i]), y = unpack_pair<T>(o[i]);
        sum[i & 1] = fmaf(x.x, y.x, fmaf(x.y, y.y, sum[i & 1]));
      }
    }
    done(at_o), done(at_dout);
    const int at_q = next();
    load_blocks(q, space.own(at_q), from);
    done(at_q);
    delta[0] = sum_over_row(sum[0]), delta[1] = sum_over_row(sum[1]);
    fill(dq, 0.f);
  }

  // Computes lse in units of log2; writes the records of the queries.
  __device__ void store_query_records() {
    const CatShape& shape = p.call.shape;
    CatQueryRecord* const queries =
        p.call.queries + (int64_t{plan.batch} * shape.query_heads + plan.head) * shape.rows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      lse[i] = lse_rows[lane_row() + 8 * i] * kLog2E;
      const int row = plan.row + from + lane_row() + 8 * i;
      if (lane_col() == 0 && row < shape.rows)
        queries[row] = {lse[i], delta[i], rows.first[i], rows.chunk[i]};
    }
  }

  // S becomes P * (dP - delta).
  template <int N>
  __device__ void gradients(Accumulator<N>& s, const Accumulator<N>& dp) const {
    for_each_register<N>([&](int n, int e) { s.at[n][e] *= dp.at[n][e] - delta[e >> 1]; });
  }
  // S becomes P.
  template <int N>
  __device__ void weights(Accumulator<N>& s) const {
    for_each_register<N>(
        [&](int n, int e) { s.at[n][e] = exp2_fast(fmaf(scale, s.at[n][e], -lse[e >> 1])); });
  }

  // The terms of the warp's rows from each other: dK = dA^T Q for keys, dV = P^T dO for values. Written to
  // the tile of the keys or of the values. Terms of headers are written to global memory without scale: later
  // chunks add to them. The right factors are transposed in registers, because their stages in shared memory
  // are in use again.
  template <int IsValues>
  __device__ void compute_own_terms(const uint32_t (&left)[4], int place) const {
    const CatShape& shape = p.call.shape;
    const AFragment<Tile / 16>& right = IsValues ? dout : q;
    const auto to = space.own(place);
    const float by = IsValues ? 1.f : shape.scale;
    const uint32_t transposed[4] = {transpose_pairs(left[0]), transpose_pairs(left[2]),
                                    transpose_pairs(left[1]), transpose_pairs(left[3])};
    float* share[2];  // for the lane's two rows, if these are headers
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = plan.row + from + lane_row() + 8 * i;
      const int64_t head = int64_t{plan.batch} * shape.heads + plan.head;
      share[i] = (row & (shape.size - 1)) == 0 && row < shape.rows
                     ? p.header_shares +
                           ((head * shape.chunks.tokens + plan.chunk_index(row)) * 2 + IsValues) * Tile +
                           lane_col()
                     : nullptr;
    }
#pragma unroll
    for (int k = 0; k < Tile / 16; ++k) {
      Accumulator<2> x;
      fill(x, 0.f);
#pragma unroll
      for (int n = 0; n < 2; ++n)
        mma<T>(x.at[n], transposed, transpose_pairs(right.at[k][2 * n]),
               transpose_pairs(right.at[k][2 * n + 1]));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (share[i] == nullptr) continue;
#pragma unroll
        for (int n = 0; n < 2; ++n)
          *reinterpret_cast<float2*>(share[i] + 16 * k + 8 * n) = {x.at[n][2 * i], x.at[n][2 * i + 1]};
      }
      scale_rows(x, {by, by});
      AFragment<1> rounded;
      round_to_a_fragment<T>(rounded, x);
      store_blocks(to, from, 16 * k, rounded);
    }
  }
  // Stores the tile to global memory in full rows, except rows of headers.
  __device__ void store_own_rows(const OutputTensor<4>& to, int width, int place) const {
    constexpr int kPacks = Tile / 8, kStep = 32 / kPacks;
    const CatShape& shape = p.call.shape;
    const int col = lane() % kPacks * 8, at = from + lane() / kPacks;
    const auto tile = space.own(place);
    T* row = row_of<T>(to, plan.batch, plan.row + at, plan.head) + col;
#pragma unroll
    for (int i = 0; i < 16; i += kStep) {
      const int t = plan.row + at + i;
      const auto pack = *reinterpret_cast<const uint4*>(&tile.at(at + i, col));
      if (t < shape.rows && col < width && (t & (shape.size - 1)) != 0)
        store_pack(row, {pack.x, pack.y, pack.z, pack.w});
      row += kStep * to.stride[1];
    }
  }

  // The rows of the warp's own chunks, in blocks of 16 x 16.
  __device__ void own() {
    const CatShape& shape = p.call.shape;
    const int at_keys = next(), at_values = next();
    const auto keys = space.own(at_keys), values = space.own(at_values);
    store_query_records();
#pragma unroll 1
    for (int key = from & -max(shape.size, 16); key <= from; key += 16) {
      Accumulator<2> s, dp;
      fill(s, 0.f), fill(dp, 0.f);
      add_product_transposed<T>(s, q, keys, key);
      add_product_transposed<T>(dp, dout, values, key);
      weights(s);
      for_each_score(rows, shape, plan.row + from, plan.row + key, [&](int n, int e, bool visible) {
        if (!visible) s.at[n][e] = 0.f;
      });
      AFragment<1> value_weights, key_weights;
      round_to_a_fragment<T>(value_weights, s);
      gradients(s, dp);
      round_to_a_fragment<T>(key_weights, s);
      add_product<T>(dq, key_weights, keys, key);
      if (p.header_shares != nullptr) {
        __syncwarp();  // keys and values have been read
        compute_own_terms<1>(value_weights.at[0], at_values);
        compute_own_terms<0>(key_weights.at[0], at_keys);
      }
    }
    if (p.header_shares != nullptr) {
      __syncwarp();
      store_own_rows(p.call.dv, shape.V, at_values);
      store_own_rows(p.call.dk, shape.D, at_keys);
      fence_async_proxy();
    }
    done(at_keys), done(at_values);
  }

  // Starts the products of the next block. dP is in flight while S becomes P.
  __device__ void start_scores(Scores& s, Scores& dp, int place) const {
    wgmma_start_transposed<T, false>(s, q, space.keys(place));
    wgmma_commit();
    wgmma_start_transposed<T, false>(dp, dout, space.values(place));
    wgmma_commit();
  }
  __device__ void finish_scores(Weights& rounded, Scores& s, Scores& dp, int block_order) {
    wgmma_wait<1>(s);
    weights(s);
    if (block_order < plan.masked_blocks()) {
      const int first = plan.first_header(block_order) + lane_col();
      for_each_register<kCatSm90Keys / 8>([&](int n, int e) {
        if (!rows.header(e >> 1, first + 8 * n + (e & 1))) s.at[n][e] = 0.f;
      });
    }
    wgmma_wait<0>(dp);
    gradients(s, dp);
    round_to_a_fragment<T>(rounded, s);
  }

  // The product of dQ of a block is started before the products of the next block.
  __device__ void headers() {
    if (plan.blocks == 0) return;
    Weights rounded;
    Scores s, dp;
    int before = next();
    wgmma_fence(s, dp);
    start_scores(s, dp, before);
    finish_scores(rounded, s, dp, 0);
#pragma unroll 1
    for (int block_order = 1; block_order < plan.blocks; ++block_order) {
      const int place = next();
      wgmma_fence(s, dp, dq);
      wgmma_start<T>(dq, rounded, space.keys(before));
      wgmma_commit();
      start_scores(s, dp, place);
      wgmma_wait<2>(dq);
      keep_registers(rounded);
      done(before);
      finish_scores(rounded, s, dp, block_order);
      before = place;
    }
    wgmma_fence(dq);
    wgmma_start<T>(dq, rounded, space.keys(before));
    wgmma_commit();
    wgmma_wait<0>(dq);
    keep_registers(rounded);
    done(before);
  }

  __device__ void store() const {
    const CatShape& shape = p.call.shape;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = plan.row + from + lane_row() + 8 * i;
      T* const to = row_of<T>(p.call.dq, plan.batch, row, plan.head);
      store_row(to, dq, i, shape.scale, shape.D, row < shape.rows);
    }
  }

  __device__ void run() {
    const unsigned tile_count = CatSm90TilePlan::tile_count(p.call.shape);
#pragma unroll 1
    for (unsigned item = blockIdx.x; item < tile_count; item += gridDim.x) {
      begin();
      own();
      headers();
      store();
    }
  }
};

template <typename T, int Tile>
__global__ void __launch_bounds__(kCatSm90Threads, 1)
    cat_query_gradients_sm90_kernel(const __grid_constant__ CatSm90QueryGradients p) {
  if constexpr (kIsCatSm90Compiled) {
    GIRIH_DYNAMIC_SHARED(unsigned char, shared, 1024);
    const CatSm90QueryStorage<T, Tile> space{shared};
    run_warp_roles<CatSm90Registers<240, 24>>([&] { space.init(); }, [&] { run_query_loader(p, space); },
                                              [&] { CatSm90QueryMainloop<T, Tile>(p, space).run(); });
  }
}

template <typename T, int Tile>
cudaError_t launch_cat_query_gradients_sm90(const CatQueryGradients& call, cudaStream_t stream) {
  constexpr auto kKernel = cat_query_gradients_sm90_kernel<T, Tile>;
  using Storage = CatSm90QueryStorage<T, Tile>;
  const CatShape& shape = call.shape;
  CatSm90QueryGradients p{call, {}, {}, {}, {}, {}, {}, {}, nullptr};
  if (cat_has_fused_own_gradients(shape)) {
    p.header_shares =
        call.partials + CatHeaderList(shape, Tile, sm90_header_list_sizes<Tile>()).float_count();
  }
  for (const cudaError_t error : {describe_tile(p.q, call.q, shape, shape.query_heads, shape.D),
                                  describe_tile(p.dout, call.dout, shape, shape.query_heads, shape.V),
                                  describe_tile(p.k, call.k, shape, shape.heads, shape.D),
                                  describe_tile(p.v, call.v, shape, shape.heads, shape.V),
                                  describe_tile(p.o, call.o, shape, shape.query_heads, shape.V),
                                  describe_headers(p.header_k, call.k, shape, shape.D),
                                  describe_headers(p.header_v, call.v, shape, shape.V)}) {
    if (error != cudaSuccess) return error;
  }
  return launch_persistent<kKernel>(p, count_query_tiles(shape), Storage::kBytes, stream);
}

}  // namespace girih::kernels
