// The memory's gradient dS from chunk to chunk, from the end, one block a sequence and head; rows of S^T by
// themselves but for the last term:
//
//     dx = rho (dS' - s' (s'.dS')), x = s' / rho          s' = x rho the memory after the chunk
//     c = s.dx          dX = dx - s c                     dX written for columns.cuh
//     dS = (gradient of the chunk's reads) + alpha dx - (x - alpha s - e^{L_C} Delta) c
//          + decode: dX (W E_C)^T K, encode: -V^T (gamma E_C (V dX))
//
// since x = alpha s + u + e^{L_C} Delta: no product is needed for u. A last chunk that is not complete left x
// as Delta, and S as it was: dx is Delta's gradient there, S's is added to dS. A vector that stayed because x
// was zero (rho = 0) hands its gradient on.
//
// A warp has 16 vectors, dS in fp32. For decode dX goes through shared memory: Y = (W E_C) dX^T, then K^T Y.
#pragma once

#include "lattice/reverse_ends.cuh"

namespace girih::kernels::lattice {

// A stage has a chunk's K or V, its memory, which dX replaces, the gradient of its reads, alpha and rho.
template <class S>
struct ReverseRing {
  using T = typename S::T;
  static constexpr int kTokens = S::Keys::kBytes > S::Values::kBytes ? S::Keys::kBytes : S::Values::kBytes;
  static constexpr int kStage = kTokens + 2 * S::Memory::kBytes;
  static constexpr int kStages = kStage <= 18432 ? 8 : kStage <= 36864 ? 4 : 2;
  static constexpr int kLoaders = kStages < 4 ? kStages : 4;
  static constexpr int kThreads = S::kThreads + 32 * kLoaders;
  static constexpr int kFloats = S::R + 4 + 2 * S::M;
  static constexpr int kBytes = kStages * (kStage + 4 * kFloats + 16);

  unsigned char* base;

  __device__ typename S::Keys k(int stage) const { return {reinterpret_cast<T*>(base + stage * kStage)}; }
  __device__ typename S::Values v(int stage) const { return {reinterpret_cast<T*>(base + stage * kStage)}; }
  __device__ typename S::Memory memory(int stage) const {
    return {reinterpret_cast<T*>(base + stage * kStage + kTokens)};
  }
  __device__ typename S::Memory gradient(int stage) const {
    return {reinterpret_cast<T*>(base + stage * kStage + kTokens + S::Memory::kBytes)};
  }
  __device__ float* ends(int stage) const {  // alpha, rho
    return reinterpret_cast<float*>(base + kStages * kStage) + stage * kFloats;
  }
  __device__ float* weights(int stage) const { return ends(stage) + 2 * S::M; }
  __device__ uint64_t* full() const {
    return reinterpret_cast<uint64_t*>(base + kStages * (kStage + 4 * kFloats));
  }
  __device__ uint64_t* empty() const { return full() + kStages; }

  __device__ void load(const LatticeReverse& p, const ChunkedSequence& of, int head, int loader) const {
    const LatticeShape& shape = p.shape;
#pragma unroll 1
    for (int64_t turn = loader; turn < of.chunks; turn += kLoaders) {
      const Part part = chunk_part(shape, of, of.chunks - 1 - turn, head);
      const auto raw = load_tokens<S::R>(p.gamma, p.g, part);
      const int stage = static_cast<int>(turn % kStages);
      wait(empty() + stage, (turn / kStages & 1) ^ 1);
      const int64_t place = memory_place(shape, part.number, head);
      bring_by_warp(memory(stage), static_cast<const T*>(p.memories) + place, shape.D, shape.M, shape.D);
      bring_by_warp(gradient(stage), static_cast<const T*>(p.gradients) + place, shape.D, shape.M, shape.D);
      if (shape.objective == LatticeObjective::decode) {
        bring_by_warp(k(stage), row_of<T>(p.k, part.batch(), part.chunk.start, head), p.k.stride[1],
                      part.chunk.length, shape.M);
      } else if (shape.objective == LatticeObjective::encode) {
        bring_by_warp(v(stage), row_of<T>(p.v, part.batch(), part.chunk.start, head), p.v.stride[1],
                      part.chunk.length, shape.D);
      }
      const float* const from = p.ends + (part.number * shape.heads + head) * 2 * shape.M;
#pragma unroll
      for (int i = 0; i < S::M / 64; ++i) {
        const int pack = lane() + 32 * i, of_rho = pack >= S::M / 4, m = pack * 4 - of_rho * S::M;
        copy_async(shared_address(ends(stage) + 4 * pack), from + of_rho * shape.M + m, m < shape.M);
      }
      put_weights(weights(stage), raw, p, part);
      arrive_after_copies(full() + stage);
      arrive_once(full() + stage);
    }
  }
};

// Of dX, which is a tile's rows.
template <class S>
__device__ inline void add_objective(Sums<S::D / 8>& dS, const ReverseRing<S>& ring, int stage,
                                     const typename S::Values& exchange, LatticeObjective objective,
                                     int warp) {
  using T = typename S::T;
  const auto dX = ring.memory(stage);
  const float* const weights = ring.weights(stage);
  const int first = 16 * warp;
  uint32_t a[4];
  if (objective == LatticeObjective::encode) {
    const auto v = ring.v(stage);
#pragma unroll 1
    for (int t = 0; t < S::R; t += 16) {
      Sums<2> read;
      fill(read, 0.f);
#pragma unroll 2
      for (int d = 0; d < S::D; d += 16) {
        load_block(a, dX, first, d);
        add_product_transposed<T>(read, a, v, t, d);
      }
      scale_columns(
          read, [&](int n) { return *reinterpret_cast<const float2*>(weights + t + 8 * n + lane_col()); });
      bound<T>(read);
      pack<T>(a, read);
      add_product<T>(dS, a, v, t);
    }
  } else if (objective == LatticeObjective::decode) {
    const auto k = ring.k(stage);
    const int row = warp % S::kBlocks * 16, col = warp / S::kBlocks * S::kWide;
    barrier_wait(1, S::kThreads);  // dX is there
    if (col < S::D) {
      Sums<S::kWide / 8> y;
      fill(y, 0.f);
#pragma unroll 1
      for (int m = 0; m < S::M; m += 16) {
        load_block(a, k, row, m);
        add_product<T>(y, a, dX, m, col);
      }
      scale_rows(y, {weights[row + lane_row()], weights[row + lane_row() + 8]});
      Operand<S::kWide / 16> rounded;
      bound<T>(y);
      round_to<T>(rounded, y);
      store_blocks(exchange, row, col, rounded);
    }
    barrier_wait(1, S::kThreads);  // Y is there
#pragma unroll 1
    for (int t = 0; t < S::R; t += 16) {
      load_block_transposed(a, k, first, t);
      add_product<T>(dS, a, exchange, t);
    }
  }
}

// S' of a warp's vectors, from one chunk to the one before: in registers, or where they are too few in shared
// memory.
template <class S, bool Held>
struct After {
  using T = typename S::T;
  Operand<S::D / 16> held;
  __device__ After(unsigned char*, int) {}
  __device__ void get(uint32_t (&a)[4], int k) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = held.at[k][i];
  }
  __device__ void put(int k, const uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) held.at[k][i] = a[i];
  }
};
template <class S>
struct After<S, false> {
  using T = typename S::T;
  typename S::Memory tile;
  int first;
  __device__ After(unsigned char* space, int first) : tile{reinterpret_cast<T*>(space)}, first(first) {}
  __device__ void get(uint32_t (&a)[4], int k) const { load_block(a, tile, first, 16 * k); }
  __device__ void put(int k, const uint32_t (&a)[4]) { store_block(tile, first, 16 * k, a); }
};

template <class S>
struct ReverseSpace {
  static constexpr bool kHeld = S::D == 64;
  static constexpr int kAfter = kHeld ? 0 : S::Memory::kBytes;
  static constexpr int kBytes = S::Values::kBytes + kAfter + ReverseRing<S>::kBytes + 2 * S::kWarps * 4;
};

template <class S>
__global__ void __launch_bounds__(ReverseRing<S>::kThreads, 1)
    reverse_kernel(const __grid_constant__ LatticeReverse p) {
  using T = typename S::T;
  using Ring = ReverseRing<S>;
  constexpr int N = S::D / 8;
  extern __shared__ __align__(128) unsigned char shared[];
  const LatticeShape& shape = p.shape;
  const typename S::Values exchange{reinterpret_cast<T*>(shared)};
  using Space = ReverseSpace<S>;
  const Ring ring{shared + S::Values::kBytes + Space::kAfter};
  // Two sums over all elements, each warp's: Delta' dDelta', and of a resumed chunk m_C c.
  float* const sums = reinterpret_cast<float*>(ring.base + Ring::kBytes);
  const Carried block = carried(shape);
  const ChunkedSequence& of = block.of;
  const int warp = warp_index(), head = block.head, first = 16 * warp;
  start_ring<S::kWarps, Ring::kStages>(ring.full());
  if (warp >= S::kWarps) {
    ring.load(p, of, head, warp - S::kWarps);
    wait_copies<0>();
    return;
  }

  const int64_t sequence = of.sequence.index;
  Sums<N> dS;
  After<S, Space::kHeld> after(shared + S::Values::kBytes, first);  // S after the chunk
  float opens = 0.f;
  const float within =
      begin_reverse<T>(dS, p, of, head, first, [&](int k, const uint32_t(&a)[4]) { after.put(k, a); });

  Turn turn;
#pragma unroll 1
  for (int64_t i = of.chunks - 1; i >= 0; --i, turn.next(Ring::kStages)) {
    const Part part = chunk_part(shape, of, i, head);
    const bool complete = part.chunk.complete;
    const int stage = turn.place;
    wait(ring.full() + stage, turn.parity);
    const auto memory = ring.memory(stage);
    const float* const ends = ring.ends(stage) + first + lane_row();
    const float alpha[2] = {ends[0], ends[8]}, rho[2] = {ends[S::M], ends[S::M + 8]};

    // dx = rho (dS' - s' (s'.dS')), in the place of dS'. `by`: what is kept of dS' where x was zero.
    float length[2] = {1.f, 1.f}, by[2] = {0.f, 0.f};
    if (complete) {
      float along[2] = {0.f, 0.f};
      for_blocks(dS, [&](int k, float(&d)[2][4]) {
        uint32_t s[4];
        after.get(s, k);
        with_block<T>(d, s, [&](float& at, float x, int j) { along[j] = fmaf(x, at, along[j]); });
      });
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        along[j] = sum_over_row(along[j]);
        length[j] = rho[j] > 0.f ? 1.f / rho[j] : 0.f;
        by[j] = rho[j] > 0.f ? 0.f : 1.f;
      }
      for_blocks(dS, [&](int k, float(&d)[2][4]) {
        uint32_t s[4];
        after.get(s, k);
        with_block<T>(d, s, [&](float& at, float x, int j) {
          if (rho[j] > 0.f) at = rho[j] * fmaf(-x, along[j], at);
        });
      });
    }

    // c = s.dx
    float c[2] = {0.f, 0.f};
    for_blocks(dS, [&](int k, float(&d)[2][4]) {
      uint32_t s[4];
      load_block(s, memory, first, 16 * k);
      with_block<T>(d, s, [&](float& dx, float x, int j) { c[j] = fmaf(x, dx, c[j]); });
    });
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      c[j] = sum_over_row(c[j]);
      if (by[j] > 0.f) c[j] = 0.f;
    }

    const float open = ring.weights(stage)[S::R + 1], sum = ring.weights(stage)[S::R + 2];
    WithStep with;
    if (part.resumed) {
      if (complete && sum > kLeastKept && (lane() & 3) == 0)
        opens = ring.weights(stage)[S::R] * (c[0] + c[1]);
      with = through_step(p, dS, sequence, head, first, open, rho);
    }

    // Whether most of x is steps of these tokens, for columns.cuh.
    if (p.g.data != nullptr && (lane() & 3) == 0) {
      const float kept = ring.weights(stage)[S::R];
      float* const to = p.ends + (part.number * shape.heads + head) * 2 * shape.M;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int m = first + lane_row() + 8 * j;
        if (m >= shape.M) continue;
        const bool steps =
            complete && rho[j] > 0.f && fmaf(kept, kept, with.square[j]) * rho[j] * rho[j] < 0.5f;
        to[m] = fmaf(kept, c[j], with.ahead[j]);
        to[shape.M + m] = steps ? 1.f : 0.f;
      }
    }

    // dX = dx - s c in the place of s, dS = alpha dx - (x - alpha s) c
    __syncwarp();
    for_blocks(dS, [&](int k, float(&d)[2][4]) {
      uint32_t s[4], s_after[4], dX[4];
      load_block(s, memory, first, 16 * k);
      after.get(s_after, k);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = unpaired<T>(s[i]), x_after = unpaired<T>(s_after[i]);
        const int j = i % 2;
        float &d0 = d[i / 2][2 * j], &d1 = d[i / 2][2 * j + 1];
        dX[i] =
            by[j] > 0.f ? 0u : pair_of<T>(bounded<T>(fmaf(-x.x, c[j], d0)), bounded<T>(fmaf(-x.y, c[j], d1)));
        if (by[j] > 0.f) continue;
        d0 = alpha[j] * fmaf(x.x, c[j], d0), d1 = alpha[j] * fmaf(x.y, c[j], d1);
        if (complete)
          d0 = fmaf(-length[j] * c[j], x_after.x, d0), d1 = fmaf(-length[j] * c[j], x_after.y, d1);
      }
      __syncwarp();
      store_block(memory, first, 16 * k, dX);
      after.put(k, s);
    });
    __syncwarp();
    if (!complete) {
      for_elements(dS, p.last_step, sequence, head, shape, first,
                   [&](float& d, const float& x, int j) { d = fmaf(-c[j], x, d); });
      if (p.dlast.data != nullptr) {
        for_elements(dS, p.dlast, sequence, head, shape, first,
                     [](float& d, const float& x, int) { d += x; });
      }
    }
    if (part.resumed) {
      for_elements(dS, p.start.step, sequence, head, shape, first,
                   [&](float& d, const float& step, int j) { d = fmaf(open * c[j], step, d); });
    }
    for_blocks(dS, [&](int k, float(&d)[2][4]) {
      uint32_t a[4];
      load_block(a, ring.gradient(stage), first, 16 * k);
      with_block<T>(d, a, [](float& at, float x, int) { at += x; });
    });
    add_objective(dS, ring, stage, exchange, shape.objective, warp);
    store_tile_rows(static_cast<T*>(p.gradients) + memory_place(shape, part.number, head), memory, first,
                    shape);
    arrive_once(ring.empty() + stage);
  }

  put_sum(sums + warp, within);
  put_sum(sums + S::kWarps + warp, opens);
  end_reverse<S::kWarps>(p, dS, of, head, first, sums);
}

}  // namespace girih::kernels::lattice
