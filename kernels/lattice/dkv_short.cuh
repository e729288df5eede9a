// dkv.cuh by a single warp, with the chunk's 16 tokens as rows: products stay in registers as factors of
// the next products, and sums over vectors stay within four lanes.
#pragma once

#include "lattice/reverse_short_ring.cuh"

namespace girih::kernels::lattice {

template <typename T>
class ShortDkvWarp {
  using Ring = ShortReverseRing<T>;
  using TokenRows = Accumulator<2>;  // [tokens, 16 columns of D or M]
  using Factor = AFragment<4>;       // [tokens, D or M]

  const LatticeDkv& p;
  const InputTensor<2>& dlast_decay;
  const int shares;
  const Ring& ring;

 public:
  __device__ ShortDkvWarp(const ShortReverseArguments& p, const Ring& ring)
      : p(p.dkv), dlast_decay(p.reverse.dlast_decay), shares(p.shares), ring(ring) {}

  // Processes chunks of the block's share, counted from the last one, round-robin with the other dkv warps.
  __device__ void run(int dkv_warp) const {
    const SequenceCoord& block = ring.block();
    const ChunkedSequence& of = block.of;
    const int dkv_warps = Ring::dkv_warps(shares), step = dkv_warps * shares,
              first = dkv_warp * shares + block.share;
    if (dkv_warp >= dkv_warps) return;
    PipelineState pipe;
    pipe.skip(first, Ring::kStages);
#pragma unroll 1
    for (int64_t n = first; n < of.chunks; n += step, pipe.skip(step, Ring::kStages)) {
      const ChunkCoord coord = chunk_coord(p.shape, of, of.chunks - 1 - n, block.head);
      const int64_t token = coord.chunk.start + lane();
      const bool exists = lane() < coord.chunk.length;
      const float dgamma = exists ? stored_value(p.dgamma, coord, token) : 0.f,
                  ddecay_at_floor = exists && p.dg.data != nullptr
                                        ? load_element(p.ddecay_at_floor, coord.batch(), token, coord.head)
                                        : 0.f;
      ring.barriers().full.wait(pipe);
      // Overlaps with the state warps, which do not use the tile that this changes.
      if (!is(LatticeObjective::similarity)) compute_h_or_c(pipe.stage);
      ring.barriers().dx_full.wait(pipe);
      float sums[2], end = 0.f;
      store_dk_dv(coord, pipe.stage, dkv_warp, sums, end);
      store_gate_gradients(coord, pipe.stage, sums, end, dgamma, ddecay_at_floor);
      ring.barriers().empty.arrive_warp(pipe.stage);
    }
  }

 private:
  __device__ bool is(LatticeObjective objective) const { return p.shape.objective == objective; }
  __device__ static float stored_value(const OutputTensor<3>& out, const ChunkCoord& coord, int64_t token) {
    return static_cast<const float*>(out.data)[offset_of(out, coord.batch(), token, coord.head)];
  }

  // x += factor * the tile's columns.
  template <class Tile>
  __device__ static void add_columns(TokenRows& x, const Tile& tile, int col, float factor) {
    TokenRows y;
    load_columns(y, tile, col);
    for_each_register<2>([&](int n, int i) { x.at[n][i] = fmaf(factor, y.at[n][i], x.at[n][i]); });
  }
  template <class Tile>
  __device__ static void load_columns(TokenRows& x, const Tile& tile, int col) {
    uint32_t a[4];
    load_block(a, tile, 0, col);
    unpack<T>(x, a);
  }
  template <class Tile>
  __device__ static void store_columns(const Tile& tile, int col, const TokenRows& x) {
    uint32_t a[4];
    pack<T>(a, x);
    store_block(tile, 0, col, a);
  }
  // Values of rows lane_row() and lane_row() + 8.
  __device__ static float2 row_pair(const float* scalars) {
    return {scalars[lane_row()], scalars[lane_row() + 8]};
  }

  // Calls f(col) for blocks of 16 columns. A loop, to save instruction cache (row_source.h).
  template <class F>
  __device__ static void for_columns(const F& f) {
#pragma unroll 1
    for (int col = 0; col < 64; col += 16) f(col);
    __syncwarp();
  }

  // decode: H = K S^T - V, which replaces V; encode: c = V S - K, which replaces K. Otherwise H = V and c =
  // K.
  __device__ void compute_h_or_c(int stage) const {
    const auto k = ring.tokens(stage, Ring::k), v = ring.tokens(stage, Ring::v);
    const bool decode = is(LatticeObjective::decode);
    const auto to = decode ? v : k;
    Factor left;
    load_blocks(left, decode ? k : v);
    for_columns([&](int col) {
      TokenRows x;
      fill(x, 0.f);
      add_product_of(x, left, ring.memory(stage), col, !decode);
      add_columns(x, to, col, -1.f);
      store_columns(to, col, x);
    });
  }

  // x += product of `left` with 16 columns, or 16 rows, of a memory. One loop for both saves instruction
  // cache (row_source.h).
  __device__ static void add_product_of(TokenRows& x, const Factor& left,
                                        const typename Ring::S::Memory& memory, int first, bool use_rows) {
    uint32_t right[4][4];
    if (use_rows) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ldmatrix(right[i], memory.address(first, 16 * i, lane() % 8 + lane() / 16 * 8, lane() & 8));
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ldmatrix_trans(right[i], memory.address(16 * i, first, lane() % 16, lane() / 16 * 8));
      }
    }
    // Two accumulators halve the chain of dependent products.
    TokenRows half;
    fill(half, 0.f);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mma<T>((i % 2 ? half : x).at[0], left.at[i], right[i][0], right[i][1]);
      mma<T>((i % 2 ? half : x).at[1], left.at[i], right[i][2], right[i][3]);
    }
    add(x, half);
  }

  // Stores dk and dv. sums: c.dW of the lane's rows; end: the cancelling sum at the chunk's end. decode
  // computes Y first, and encode dW: the other one needs a product with it, rounded.
  __device__ void store_dk_dv(const ChunkCoord& coord, int stage, int dkv_warp, float (&sums)[2],
                              float& end) const {
    const bool decode = is(LatticeObjective::decode), similarity = is(LatticeObjective::similarity);
    sums[0] = sums[1] = 0.f;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      const bool is_dk = (pass == 0) != decode;
      const auto to = ring.tokens(stage, is_dk ? Ring::dk : Ring::dv);
      compute_dk_or_dv(to, stage, dkv_warp, is_dk, pass == 0 && !similarity, pass == 1 && !similarity, sums,
                       end);
      store_tile(is_dk ? p.dk : p.dv, coord, to, is_dk ? p.shape.M : p.shape.D);
    }
  }

  // With step = sign gamma:
  //     dW = E_C (H dX)           dk: decode step dW + Y S, encode -step dW, similarity step dW
  //     Y = (W E_C) dX^T          dv: decode -Y, encode Y + step dW S^T, similarity Y
  __device__ void compute_dk_or_dv(const typename Ring::S::Keys& to, int stage, int dkv_warp, bool is_dk,
                                   bool stores_operand, bool adds_product, float (&sums)[2],
                                   float& end) const {
    const auto& scalars = ring.scalars(stage);
    const auto c = ring.tokens(stage, Ring::k), rounded = ring.rounded(dkv_warp);
    const float2 by = row_pair(is_dk ? scalars.to_end : scalars.weights), step = row_pair(scalars.step);
    const bool gated = p.dg.data != nullptr;
    Factor left, other;
    load_blocks(left, is_dk ? ring.tokens(stage, Ring::v) : c);
    if (adds_product) load_blocks(other, rounded);
    for_columns([&](int col) {
      TokenRows x;
      fill(x, 0.f);
      add_product_of(x, left, ring.gradient(stage), col, is_dk);
      scale_rows(x, by);
      if (is_dk) {
        TokenRows cs;
        load_columns(cs, c, col);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float* const steps = scalars.steps + col + 8 * n + lane_col();
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& d = x.at[n][i];
            sums[i / 2] = fmaf(cs.at[n][i], d, sums[i / 2]);
            d *= i / 2 ? step.y : step.x;
            if (gated) end = fmaf(steps[i % 2] * cs.at[n][i], d, end);
          }
        }
      }
      if (adds_product) add_product_of(x, other, ring.memory(stage), col, is_dk);
      if (stores_operand) {
        clamp_factor<T>(x);
        store_columns(rounded, col, x);
        scale_rows(x, {-1.f, -1.f});
      }
      add_columns(x, to, col, 1.f);
      store_columns(to, col, x);
    });
  }

  // Stores a tile to the chunk's rows in global memory.
  template <class Tile>
  __device__ void store_tile(const OutputTensor<4>& to, const ChunkCoord& coord, const Tile& tile,
                             int cols) const {
    store_rows<1>(tile, row_of<T>(to, coord.batch(), coord.chunk.start, coord.head), to.stride[1],
                  coord.chunk.length, cols, 0);
  }

  // Stores dgamma and dg; a lane has a token.
  __device__ void store_gate_gradients(const ChunkCoord& coord, int stage, const float (&sums)[2], float end,
                                       float dgamma, float ddecay_at_floor) const {
    const auto& scalars = ring.scalars(stage);
    const int t = lane(), source = t % 8 * 4;
    const float first = __shfl_sync(~0u, sum_over_row(sums[0]), source),
                second = __shfl_sync(~0u, sum_over_row(sums[1]), source);
    const bool exists = t < coord.chunk.length;
    const int64_t token = coord.chunk.start + t;
    dgamma = fmaf(sign_of(p.shape.objective), t < 8 ? first : second, dgamma);
    if (exists) store_element(p.dgamma, dgamma, coord.batch(), token, coord.head);
    if (p.dg.data == nullptr) return;

      // dl_t = at_floor_t - gamma_t dgamma_t, plus the cancelling sum at the end; dg_t sums dl from t on
#pragma unroll
    for (int i = 0; i < 2; ++i)
      end = fmaf(scalars.steps[t + 32 * i], scalars.cancelling_sum[t + 32 * i], end);
    end = sum_over_col(sum_over_row(end));
    float d = 0.f;
    if (exists) d = ddecay_at_floor - sign_of(p.shape.objective) * scalars.step[t] * dgamma;
    if (t + 1 == coord.chunk.length) {
      d += end;
      if (!coord.chunk.is_complete) d += end_decay_gradient(coord);
    }
#pragma unroll
    for (int by = 1; by < 16; by *= 2) {
      const float later = __shfl_down_sync(~0u, d, by);
      if (t + by < 32) d += later;
    }
    if (exists) store_element(p.dg, d, coord.batch(), token, coord.head);
  }

  // Gradient of the decay at the end of an incomplete chunk.
  __device__ float end_decay_gradient(const ChunkCoord& coord) const {
    float sum = dlast_decay.data == nullptr ? 0.f : load_element(dlast_decay, coord.sequence(), coord.head);
    for (int w = 0; w < Ring::S::kWarps; ++w) sum += ring.sums()[w];
    return sum;
  }
};

}  // namespace girih::kernels::lattice
