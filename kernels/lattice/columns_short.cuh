// columns.cuh by a single warp, with the chunk's 16 tokens as rows: products stay in registers as factors of
// the next products, and sums over vectors stay within four lanes.
#pragma once

#include "lattice/short_ring.cuh"

namespace girih::kernels::lattice {

template <typename T>
class ShortColumns {
  using Ring = ShortRing<T>;
  using Columns = Sums<2>;    // [tokens, 16 columns of D or M]
  using Factor = Operand<4>;  // [tokens, D or M]

  const LatticeColumns& p;
  const In<2>& dlast_decay;
  const int shares;
  const Ring& ring;

 public:
  __device__ ShortColumns(const ShortReverse& p, const Ring& ring)
      : p(p.columns), dlast_decay(p.reverse.dlast_decay), shares(p.shares), ring(ring) {}

  // Processes chunks of the block's share, counted from the last one, round-robin with the other dkv warps.
  __device__ void run(int worker) const {
    const Carried& block = ring.block();
    const ChunkedSequence& of = block.of;
    const int workers = Ring::columns(shares), step = workers * shares, first = worker * shares + block.share;
    if (worker >= workers) return;
    Turn turn;
    turn.skip(first, Ring::kStages);
#pragma unroll 1
    for (int64_t n = first; n < of.chunks; n += step, turn.skip(step, Ring::kStages)) {
      const Part part = chunk_part(p.shape, of, of.chunks - 1 - n, block.head);
      const int64_t token = part.chunk.start + lane();
      const bool exists = lane() < part.chunk.length;
      const float dgamma = exists ? before(p.dgamma, part, token) : 0.f,
                  at_floor = exists && p.dg.data != nullptr
                                 ? load_any(p.at_floor, part.batch(), token, part.head)
                                 : 0.f;
      wait(ring.full() + turn.place, turn.parity);
      // Overlaps with the state warps, which do not use the tile that this changes.
      if (!is(LatticeObjective::similarity)) make_difference(turn.place);
      wait(ring.done() + turn.place, turn.parity);
      float sums[2], end = 0.f;
      put_rows(part, turn.place, worker, sums, end);
      put_gates(part, turn.place, sums, end, dgamma, at_floor);
      arrive_once(ring.empty() + turn.place);
    }
  }

 private:
  __device__ bool is(LatticeObjective objective) const { return p.shape.objective == objective; }
  __device__ static float before(const Out<3>& out, const Part& part, int64_t token) {
    return static_cast<const float*>(out.data)[offset_of(out, part.batch(), token, part.head)];
  }

  // x += by * the tile's columns.
  template <class Tile>
  __device__ static void add_columns(Columns& x, const Tile& tile, int col, float by) {
    Columns y;
    load_columns(y, tile, col);
    each_sum<2>([&](int n, int i) { x.at[n][i] = fmaf(by, y.at[n][i], x.at[n][i]); });
  }
  template <class Tile>
  __device__ static void load_columns(Columns& x, const Tile& tile, int col) {
    uint32_t a[4];
    load_block(a, tile, 0, col);
    unpack<T>(x, a);
  }
  template <class Tile>
  __device__ static void store_columns(const Tile& tile, int col, const Columns& x) {
    uint32_t a[4];
    pack<T>(a, x);
    store_block(tile, 0, col, a);
  }
  // Values of rows lane_row() and lane_row() + 8.
  __device__ static float2 of_rows(const float* numbers) {
    return {numbers[lane_row()], numbers[lane_row() + 8]};
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
  __device__ void make_difference(int stage) const {
    const auto k = ring.tokens(stage, Ring::k), v = ring.tokens(stage, Ring::v);
    const bool decode = is(LatticeObjective::decode);
    const auto to = decode ? v : k;
    Factor left;
    load_blocks(left, decode ? k : v);
    for_columns([&](int col) {
      Columns x;
      fill(x, 0.f);
      add_product_of(x, left, ring.memory(stage), col, !decode);
      add_columns(x, to, col, -1.f);
      store_columns(to, col, x);
    });
  }

  // x += product of `left` with 16 columns, or 16 rows, of a memory. One loop for both saves instruction
  // cache (row_source.h).
  __device__ static void add_product_of(Columns& x, const Factor& left,
                                        const typename Ring::S::Memory& memory, int first, bool of_rows) {
    uint32_t right[4][4];
    if (of_rows) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        load_matrices(right[i], memory.address(first, 16 * i, lane() % 8 + lane() / 16 * 8, lane() & 8));
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        load_matrices_transposed(right[i], memory.address(16 * i, first, lane() % 16, lane() / 16 * 8));
      }
    }
    // Two accumulators halve the chain of dependent products.
    Columns half;
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
  __device__ void put_rows(const Part& part, int stage, int worker, float (&sums)[2], float& end) const {
    const bool decode = is(LatticeObjective::decode), similarity = is(LatticeObjective::similarity);
    sums[0] = sums[1] = 0.f;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      const bool of_k = (pass == 0) != decode;
      const auto to = ring.tokens(stage, of_k ? Ring::dk : Ring::dv);
      make(to, stage, worker, of_k, pass == 0 && !similarity, pass == 1 && !similarity, sums, end);
      put(of_k ? p.dk : p.dv, part, to, of_k ? p.shape.M : p.shape.D);
    }
  }

  // With step = sign gamma:
  //     dW = E_C (H dX)           dk: decode step dW + Y S, encode -step dW, similarity step dW
  //     Y = (W E_C) dX^T          dv: decode -Y, encode Y + step dW S^T, similarity Y
  __device__ void make(const typename Ring::S::Keys& to, int stage, int worker, bool of_k, bool is_crossed,
                       bool crosses, float (&sums)[2], float& end) const {
    const auto& numbers = ring.numbers(stage);
    const auto c = ring.tokens(stage, Ring::k), rounded = ring.rounded(worker);
    const float2 by = of_rows(of_k ? numbers.to_end : numbers.weights), step = of_rows(numbers.step);
    const bool gated = p.dg.data != nullptr;
    Factor left, other;
    load_blocks(left, of_k ? ring.tokens(stage, Ring::v) : c);
    if (crosses) load_blocks(other, rounded);
    for_columns([&](int col) {
      Columns x;
      fill(x, 0.f);
      add_product_of(x, left, ring.gradient(stage), col, of_k);
      scale_rows(x, by);
      if (of_k) {
        Columns cs;
        load_columns(cs, c, col);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float* const steps = numbers.steps + col + 8 * n + lane_col();
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& d = x.at[n][i];
            sums[i / 2] = fmaf(cs.at[n][i], d, sums[i / 2]);
            d *= i / 2 ? step.y : step.x;
            if (gated) end = fmaf(steps[i % 2] * cs.at[n][i], d, end);
          }
        }
      }
      if (crosses) add_product_of(x, other, ring.memory(stage), col, of_k);
      if (is_crossed) {
        bound<T>(x);
        store_columns(rounded, col, x);
        scale_rows(x, {-1.f, -1.f});
      }
      add_columns(x, to, col, 1.f);
      store_columns(to, col, x);
    });
  }

  // Stores a tile to the chunk's rows in global memory.
  template <class Tile>
  __device__ void put(const Out<4>& to, const Part& part, const Tile& tile, int cols) const {
    store_rows<1>(tile, row_of<T>(to, part.batch(), part.chunk.start, part.head), to.stride[1],
                  part.chunk.length, cols, 0);
  }

  // Stores dgamma and dg; a lane has a token.
  __device__ void put_gates(const Part& part, int stage, const float (&sums)[2], float end, float dgamma,
                            float at_floor) const {
    const auto& numbers = ring.numbers(stage);
    const int t = lane(), source = t % 8 * 4;
    const float first = __shfl_sync(~0u, sum_over_row(sums[0]), source),
                second = __shfl_sync(~0u, sum_over_row(sums[1]), source);
    const bool exists = t < part.chunk.length;
    const int64_t token = part.chunk.start + t;
    dgamma = fmaf(sign_of(p.shape.objective), t < 8 ? first : second, dgamma);
    if (exists) store_any(p.dgamma, dgamma, part.batch(), token, part.head);
    if (p.dg.data == nullptr) return;

      // dl_t = at_floor_t - gamma_t dgamma_t, plus the cancelling sum at the end; dg_t sums dl from t on
#pragma unroll
    for (int i = 0; i < 2; ++i) end = fmaf(numbers.steps[t + 32 * i], numbers.cancels[t + 32 * i], end);
    end = sum_over_col(sum_over_row(end));
    float d = 0.f;
    if (exists) d = at_floor - sign_of(p.shape.objective) * numbers.step[t] * dgamma;
    if (t + 1 == part.chunk.length) {
      d += end;
      if (!part.chunk.complete) d += open_end(part);
    }
#pragma unroll
    for (int by = 1; by < 16; by *= 2) {
      const float later = __shfl_down_sync(~0u, d, by);
      if (t + by < 32) d += later;
    }
    if (exists) store_any(p.dg, d, part.batch(), token, part.head);
  }

  // Gradient of the decay at the end of an incomplete chunk.
  __device__ float open_end(const Part& part) const {
    float sum = dlast_decay.data == nullptr ? 0.f : load_any(dlast_decay, part.sequence(), part.head);
    for (int w = 0; w < Ring::S::kWarps; ++w) sum += ring.sums()[w];
    return sum;
  }
};

}  // namespace girih::kernels::lattice
