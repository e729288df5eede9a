// columns.cuh by a single warp, which has all of a chunk's 16 tokens as rows: what one product leaves in
// registers is the next one's factor, and sums over vectors stay within four lanes.
#pragma once

#include "lattice/short_ring.cuh"

namespace girih::kernels::lattice {

template <typename T>
class ShortColumns {
  using Ring = ShortRing<T>;
  using Rows = Sums<8>;       // [tokens, D or M]
  using Factor = Operand<4>;  // of T

  const LatticeColumns& p;
  const In<2>& dlast_decay;
  const int shares;
  const Ring& ring;

 public:
  __device__ ShortColumns(const ShortReverse& p, const Ring& ring)
      : p(p.columns), dlast_decay(p.reverse.dlast_decay), shares(p.shares), ring(ring) {}

  // Chunks of the block's share, counted from the last, in turn with the others that do.
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
      wait(ring.done() + turn.place, turn.parity);
      float sums[2], end = 0.f;
      put_rows(part, turn.place, sums, end);
      put_gates(part, turn.place, sums, end, dgamma, at_floor);
      arrive_once(ring.empty() + turn.place);
    }
  }

 private:
  __device__ bool is(LatticeObjective objective) const { return p.shape.objective == objective; }
  __device__ static float before(const Out<3>& out, const Part& part, int64_t token) {
    return static_cast<const float*>(out.data)[offset_of(out, part.batch(), token, part.head)];
  }

  template <class Tile>
  __device__ static void load_rows(Factor& to, const Tile& from) {
#pragma unroll
    for (int i = 0; i < 4; ++i) load_block(to.at[i], from, 0, 16 * i);
  }
  // sums += by * x
  __device__ static void add(Rows& sums, const Factor& x, float by) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 y = unpaired<T>(x.at[k][i]);
        float* const at = &sums.at[2 * k + i / 2][i % 2 * 2];
        at[0] = fmaf(by, y.x, at[0]), at[1] = fmaf(by, y.y, at[1]);
      }
    }
  }
  __device__ static void round(Factor& to, Rows& from) {
    bound<T>(from);
    round_to<T>(to, from);
  }
  // Row lane_row() and the one 8 below it.
  __device__ static float2 of_rows(const float* numbers) {
    return {numbers[lane_row()], numbers[lane_row() + 8]};
  }

  // dk and dv. sums: c.dW of the lane's rows; end: what cancels at the chunk's end.
  __device__ void put_rows(const Part& part, int stage, float (&sums)[2], float& end) const {
    const auto memory = ring.memory(stage), dX = ring.gradient(stage);
    const auto& numbers = ring.numbers(stage);
    Factor h, c;
    Rows dW, y;

    // H = K S^T - V, c = K or H = V, c = V S - K or K
    load_rows(h, ring.tokens(stage, Ring::v));
    load_rows(c, ring.tokens(stage, Ring::k));
    if (is(LatticeObjective::decode)) {
      fill(y, 0.f);
      add(y, h, -1.f);
      add_product<T>(y, c, memory);
      round_to<T>(h, y);
    } else if (is(LatticeObjective::encode)) {
      fill(y, 0.f);
      add(y, c, -1.f);
      add_product_transposed<T>(y, h, memory);
      round_to<T>(c, y);
    }

    // dW = E_C (H dX)
    fill(dW, 0.f);
    add_product_transposed<T>(dW, h, dX);
    scale_rows(dW, of_rows(numbers.to_end));
    sums[0] = sums[1] = 0.f;
    const bool gated = p.dg.data != nullptr;
    const float2 step = of_rows(numbers.step);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = unpaired<T>(c.at[k][i]);
        float* const d = &dW.at[2 * k + i / 2][i % 2 * 2];
        sums[i % 2] = fmaf(x.x, d[0], fmaf(x.y, d[1], sums[i % 2]));
        const float by = i % 2 ? step.y : step.x;
        d[0] *= by, d[1] *= by;
        if (gated) {
          const float* const steps = numbers.steps + 16 * k + i / 2 * 8 + lane_col();
          end = fmaf(steps[0] * x.x, d[0], fmaf(steps[1] * x.y, d[1], end));
        }
      }
    }

    // Y = (W E_C) dX^T
    fill(y, 0.f);
    add_product<T>(y, c, dX);
    scale_rows(y, of_rows(numbers.weights));
    if (is(LatticeObjective::decode)) {
      round(h, y);
      add_product_transposed<T>(dW, h, memory);
      scale_rows(y, {-1.f, -1.f});
    } else if (is(LatticeObjective::encode)) {
      round(h, dW);
      add_product<T>(y, h, memory);
      scale_rows(dW, {-1.f, -1.f});
    }
    put(p.dk, part, ring.tokens(stage, Ring::dk), dW, p.shape.M);
    put(p.dv, part, ring.tokens(stage, Ring::dv), y, p.shape.D);
  }

  // The tile and what is added to it, to the tile's rows in global memory.
  template <class Tile>
  __device__ void put(const Out<4>& to, const Part& part, const Tile& tile, Rows& rows, int cols) const {
    Factor x;
    load_rows(x, tile);
    add(rows, x, 1.f);
    round_to<T>(x, rows);
    __syncwarp();
    store_blocks(tile, 0, 0, x);
    __syncwarp();
    store_rows<1>(tile, row_of<T>(to, part.batch(), part.chunk.start, part.head), to.stride[1],
                  part.chunk.length, cols, 0);
  }

  // dgamma and dg, a token a lane.
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

      // dl_t = at_floor_t - gamma_t dgamma_t and at the end what cancels there, dg its sum from t on
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

  // Of the decay of the end of a chunk that is not complete.
  __device__ float open_end(const Part& part) const {
    float sum = dlast_decay.data == nullptr ? 0.f : load_any(dlast_decay, part.sequence(), part.head);
    for (int w = 0; w < Ring::S::kWarps; ++w) sum += ring.sums()[w];
    return sum;
  }
};

}  // namespace girih::kernels::lattice
