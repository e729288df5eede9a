// State warps of scan_short.cuh: S and H of a chunk, and the memory after it, chunk by chunk.
//
// The critical path is from one S to the next. So X is stored without normalisation, s_i = rho_i x_i, and the
// length of the next x_i follows from dot products of the step:
//
//     sigma_i = rho_i x_i.u_i          alpha_i = m_C - sigma_i          b_i = alpha_i rho_i
//     X <- b X + U          |x_i|^2 = b_i^2 x_i.x_i + 2 b_i x_i.u_i + u_i.u_i          rho_i <- 1 / |x_i|
//
// x_i.x_i is recomputed in every chunk while the block waits for H, so rounding errors do not accumulate.
// Where the terms of the length cancel, the length is computed from x_i.
#pragma once

#include "lattice/scan_short_addresses.cuh"
#include "pipe/rsqrt.h"

namespace girih::kernels::lattice {

template <class Ring>
class ShortScanStateWarp {
  using T = typename Ring::T;
  using S = typename Ring::S;
  using Factor = AFragment<4>;
  static constexpr bool kDecode = Ring::kObjective == LatticeObjective::decode,
                        kEncode = Ring::kObjective == LatticeObjective::encode;

  const LatticeScan& p;
  const Ring& ring;
  const ChunkedSequence& of;
  const int head, first;
  const AddressBuilder<Ring> addresses;
  TileAddresses stage_addresses;  // addresses in the chunk's stage
  Accumulator<8> X;
  float rho[2] = {1.f, 1.f};
  Factor rounded;  // encode: S of the warp's vectors
  // Inputs of a chunk, loaded before its S is known.
  Factor rows;         // decode: K; encode: V
  uint32_t values[4];  // decode: V, the warp's columns
  uint32_t keys[4];    // K^T of the warp's vectors, and the weights of its columns
  float2 weights[2];
  Accumulator<2> minus_v;  // decode: -V, the warp's columns
  uint32_t w[4];           // W^T E_C of the warp's vectors; encode: after make_a()
  // Results of the previous chunk, not yet stored; stage -1: none.
  struct {
    float alpha[2], rho[2];
    int stage = -1;
  } previous;

 public:
  __device__ ShortScanStateWarp(const LatticeScan& p, const Ring& ring, int warp)
      : p(p),
        ring(ring),
        of(ring.block().of),
        head(ring.block().head),
        first(16 * warp),
        addresses(ring, first) {}

  __device__ void run() {
    load_vectors(X, p.start.memory, of.sequence.index, head, p.shape, first);
    const int chunks = static_cast<int>(of.chunks);
    // 1: the last chunk is incomplete
    const int open = chunks > 0 && !chunk_of(p.shape.grid, of, chunks - 1).is_complete ? 1 : 0;
    bool resumed = of.prior_tokens > 0;
    PipelineState pipe;
    if (chunks > 0) {
      ring.barriers().full.wait({});
      stage_addresses = addresses.for_stage(0);
      store_s(stage_addresses);
      load_inputs(stage_addresses);
      prepare_operands();
    }
    const auto process = [&](auto special, int left, bool complete) {
      PipelineState next =
          pipe;  // after the last chunk: the same stage, whose inputs are loaded again and not used
      if (left > 1) next.next(Ring::kStages);
      step<decltype(special)::value>(complete, resumed, left > 1, next);
      pipe = next;
    };
#pragma unroll 1
    for (int left = chunks; left > 0; --left) {
      if (!resumed) {
        // Complete chunks that are not resumed have their own loop without conditions.
#pragma unroll 1
        for (; left > open; --left) process(std::false_type(), left, true);
        if (left == 0) break;
      }
      process(std::true_type(), left, left > open);
      resumed = false;
    }
    store_previous();
    end(chunks, open);
  }

 private:
  // Stores the rounded S.
  __device__ void store_s(const TileAddresses& at) {
    const auto to = addresses.vectors(at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Accumulator<2> s;
      for_each_register<2>([&](int n, int e) { s.at[n][e] = rho[e / 2] * X.at[2 * i + n][e]; });
      pack<T>(rounded.at[i], s);
      store_block(to, 0, 16 * i, rounded.at[i]);
      __syncwarp();  // otherwise the compiler delays all stores
    }
  }

  // Loads K and V of a chunk to registers.
  __device__ void load_inputs(const TileAddresses& at) {
    const float* const from = ring.scalars(at.stage).weights;
    if constexpr (kDecode || kEncode) {
      const auto tile = addresses.tokens(at, kDecode ? Ring::k : Ring::v);
#pragma unroll
      for (int i = 0; i < 4; ++i) load_block(rows.at[i], tile, 0, 16 * i);
    }
    if constexpr (kDecode) load_block(values, addresses.own_tokens(at, Ring::v), 0, first);
    // The four blocks are those of an A fragment of the transpose, in another order.
    ldmatrix_trans(keys, addresses.own_tokens(at, Ring::k).address(0, first, lane() & 15, (lane() >> 4) * 8));
    const uint32_t middle = keys[1];
    keys[1] = keys[2], keys[2] = middle;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      weights[n] = *reinterpret_cast<const float2*>(from + 8 * n + lane_col());
    }
  }
  // Prepares the operands of a chunk from its inputs.
  __device__ void prepare_operands() {
    if constexpr (kDecode) {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] ^= 0x80008000;  // both signs of a pair
      unpack<T>(minus_v, values);
    }
    if constexpr (!kEncode) {
      Accumulator<2> x;
      unpack<T>(x, keys);
      scale_columns(x, [&](int n) { return weights[n]; });
      pack<T>(w, x);
    }
  }

  // Special: the chunk is incomplete or resumed.
  template <bool Special>
  __device__ void step(bool complete, bool resumed, bool more, const PipelineState& next) {
    const int stage = stage_addresses.stage;
    if constexpr (kDecode) make_h();
    const auto h = addresses.tokens(stage_addresses, Ring::v);
    uint32_t right[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ldmatrix_trans(right[i], h.address(0, 16 * i, lane() & 15, (lane() >> 4) * 8));
    }
    Accumulator<2> a;  // encode: (H S)^T
    if constexpr (kEncode) make_a(a);
    const float memory_decay = !Special || complete ? ring.scalars(stage).memory_decay() : 0.f;
    // Overlaps with the computation of H or a: loads of the next chunk, x.x, and the stores of the previous
    // chunk. In this order, so that the next chunk's inputs are not used before this chunk's memory is
    // complete.
    ring.barriers().full.wait(next);
    const TileAddresses next_addresses = addresses.for_stage(next.stage);
    if constexpr (!kEncode) load_inputs(next_addresses);
    float square[2][2];
    lane_dots(square, X, X);
    store_previous();
    if constexpr (kEncode) make_w(a);
    // U^T = (W E_C)^T H
    Accumulator<8> U;
    fill(U, 0.f);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mma<T>(U.at[2 * i], w, right[i][0], right[i][1]);
      mma<T>(U.at[2 * i + 1], w, right[i][2], right[i][3]);
    }
    if constexpr (kEncode) load_inputs(next_addresses);

    float along[2], steps[2], squares[2], alpha[2], by[2], length[2], end[2];  // end: 1 / |x|, or 0
    sum_lane_dots(squares, square);
    dots(along, X, U);
    dots(steps, U, U);
    bool is_cancelling = false;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      alpha[j] = fmaf(-rho[j], along[j], memory_decay), by[j] = alpha[j] * rho[j];
      length[j] = fmaf(by[j], fmaf(by[j], squares[j], 2.f * along[j]), steps[j]);
      is_cancelling |= length[j] < kMinLengthRatio * fmaf(by[j] * by[j], squares[j], steps[j]);
    }
    if (Special) {
      update_special_chunk(end, U, by, stage, complete, resumed);
    } else {
      // The result of the vote is used later.
      const bool any = __any_sync(~0u, is_cancelling);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float root = rsqrt_fast(length[j]);  // computed before the comparison
        end[j] = rho[j] = length[j] > 0.f ? root : 0.f;
      }
      for_each_register<8>([&](int n, int e) { X.at[n][e] = fmaf(by[e / 2], X.at[n][e], U.at[n][e]); });
      if (any) compute_rho(end, U, alpha);
    }
    if (more) store_s(next_addresses);
    prepare_operands();  // overlaps with the stores of S
    stage_addresses = next_addresses;
#pragma unroll
    for (int j = 0; j < 2; ++j) previous.alpha[j] = alpha[j], previous.rho[j] = end[j];
    previous.stage = stage;
  }

  __device__ void store_previous() {
    if (previous.stage < 0) return;
    if (p.memories != nullptr && (lane() & 3) == 0) {
      auto& scalars = ring.scalars(previous.stage);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        scalars.alpha[first + lane_row() + 8 * j] = previous.alpha[j];
        scalars.rho[first + lane_row() + 8 * j] = previous.rho[j];
      }
    }
    ring.barriers().state_full.arrive_warp(previous.stage);
  }

  // Smallest ratio of the length to the sum of its terms for which the length is used: its rounding error is
  // then below 2^-13.
  static constexpr float kMinLengthRatio = 0x1p-8f;

  __device__ static void dots(float (&to)[2], const Accumulator<8>& x, const Accumulator<8>& y) {
    const float2 dots = row_dots(x, y);
    to[0] = dots.x, to[1] = dots.y;
  }

  // The lane's terms of x.y for both rows, and their sums over the quad.
  __device__ static void lane_dots(float (&to)[2][2], const Accumulator<8>& x, const Accumulator<8>& y) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i / 2][i % 2] = 0.f;
    for_each_register<8>(
        [&](int n, int i) { to[i / 2][i % 2] = fmaf(x.at[n][i], y.at[n][i], to[i / 2][i % 2]); });
  }
  __device__ static void sum_lane_dots(float (&to)[2], const float (&parts)[2][2]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) to[j] = sum_over_row(parts[j][0] + parts[j][1]);
  }

  // decode: H = K S^T - V, which replaces V; 16 columns a warp.
  __device__ void make_h() const {
    const auto memory = addresses.own_memory(stage_addresses);
    // Two accumulators halve the chain of dependent products.
    Accumulator<2> sum = minus_v, half;
    fill(half, 0.f);
    named_barrier_sync(1, S::kThreads);  // S is stored
    uint32_t s[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ldmatrix_trans(s[i], memory.address(16 * i, first, lane() & 15, (lane() >> 4) * 8));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mma<T>((i % 2 ? half : sum).at[0], rows.at[i], s[i][0], s[i][1]);
      mma<T>((i % 2 ? half : sum).at[1], rows.at[i], s[i][2], s[i][3]);
    }
    add(sum, half);
    uint32_t a[4];
    pack<T>(a, sum);
    store_block(addresses.own_tokens(stage_addresses, Ring::v), 0, first, a);
    named_barrier_sync(1, S::kThreads);  // H is stored
  }

  // encode: (H S)^T, from registers of the warp.
  __device__ void make_a(Accumulator<2>& a) const {
    Accumulator<2> half;
    fill(a, 0.f);
    fill(half, 0.f);
#pragma unroll
    for (int i = 0; i < 4; ++i) add_product_of_rows<T>(i % 2 ? half : a, rounded.at[i], rows.at[i]);
    add(a, half);
  }
  // W = w (a - k)
  __device__ void make_w(Accumulator<2>& a) {
    Accumulator<2> key;
    unpack<T>(key, keys);
    for_each_register<2>([&](int n, int i) { a.at[n][i] -= key.at[n][i]; });
    scale_columns(a, [&](int n) { return weights[n]; });
    pack<T>(w, a);
  }

  // Computes rho from X. Where x_i is 0, restores s_i: then U is -alpha s_i.
  __device__ void compute_rho(float (&end)[2], const Accumulator<8>& U, const float (&alpha)[2]) {
    float square[2], back[2];
    dots(square, X, X);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      end[j] = square[j] > 0.f ? rsqrtf(square[j]) : 0.f, rho[j] = square[j] > 0.f ? end[j] : 1.f;
      back[j] = -1.f / alpha[j];
    }
    for_each_register<8>([&](int n, int e) {
      if (!(square[e / 2] > 0.f)) X.at[n][e] = U.at[n][e] * back[e / 2];
    });
  }

  // Computes X and rho from x itself. An incomplete chunk changes neither, and stores x as Delta.
  __device__ void update_special_chunk(float (&end)[2], Accumulator<8>& U, const float (&by)[2], int stage,
                                       bool complete, bool resumed) {
    const auto& scalars = ring.scalars(stage);
    if (resumed) {
      const float open = scalars.call_decay();
      for_each_element(U, p.start.step, of.sequence.index, head, p.shape, first,
                       [&](float& u, const float& step, int) { u = fmaf(open, step, u); });
    }
    for_each_register<8>([&](int n, int e) { U.at[n][e] = fmaf(by[e / 2], X.at[n][e], U.at[n][e]); });
    if (!complete) {
      end[0] = end[1] = 1.f;
      if (p.end.step.data != nullptr) store_vectors(p.end.step, U, of.sequence.index, head, p.shape, first);
      if (threadIdx.x == 0 && p.end.decay.data != nullptr) {
        store_element(p.end.decay, scalars.sum() / kLog2E, of.sequence.index, static_cast<int64_t>(head));
      }
      return;
    }
    float square[2];
    dots(square, U, U);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      end[j] = square[j] > 0.f ? rsqrtf(square[j]) : 0.f;
      rho[j] = square[j] > 0.f ? end[j] : rho[j];
    }
    for_each_register<8>([&](int n, int e) { X.at[n][e] = square[e / 2] > 0.f ? U.at[n][e] : X.at[n][e]; });
  }

  // Stores the final state: in a chunk (update_special_chunk() has stored Delta), after a complete chunk, or
  // without tokens.
  __device__ void end(int chunks, int open) {
    const int64_t sequence = of.sequence.index;
    if (chunks > open) {
      float square[2];
      dots(square, X, X);
      scale_rows(X, {square[0] > 0.f ? rsqrtf(square[0]) : 0.f, square[1] > 0.f ? rsqrtf(square[1]) : 0.f});
    }
    store_vectors(p.end.memory, X, sequence, head, p.shape, first);
    if (open == 0 && p.end.step.data != nullptr) {
      fill(X, 0.f);
      if (chunks == 0) load_vectors(X, p.start.step, sequence, head, p.shape, first);
      store_vectors(p.end.step, X, sequence, head, p.shape, first);
    }
    if (threadIdx.x != 0) return;
    if (open == 0 && p.end.decay.data != nullptr) {
      float decay = 0.f;
      if (chunks == 0 && p.start.decay.data != nullptr) decay = load_element(p.start.decay, sequence, head);
      store_element(p.end.decay, decay, sequence, static_cast<int64_t>(head));
    }
    if (head == 0 && p.last_position != nullptr) {
      p.last_position[sequence] = (of.prior_tokens + of.sequence.end - of.sequence.start) % p.shape.grid.size;
    }
  }
};

}  // namespace girih::kernels::lattice
