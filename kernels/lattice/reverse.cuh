// Reverse scan: the gradient dS of the memory chunk by chunk, from the end, one block for each sequence and
// head. Rows of S^T are independent except in the last term:
//
//     dx = rho (dS' - s' (s'.dS')), x = s' / rho          s' = x rho: the next memory
//     c = s.dx          dX = dx - s c                     dX is stored for columns.cuh
//     dS = (gradient of the chunk's reads) + alpha dx - (x - alpha s - e^{L_C} Delta) c
//          + decode: dX (W E_C)^T K, encode: -V^T (gamma E_C (V dX))
//
// x - alpha s - e^{L_C} Delta is u, so u needs no product. An incomplete last chunk has stored x as Delta and
// has not changed S: there dx is the gradient of Delta, and the gradient of S is added to dS. A vector whose
// x is zero (rho = 0) passes its gradient on unchanged.
//
// A warp has 16 vectors of dS in fp32. For decode dX passes through shared memory: Y = (W E_C) dX^T, then K^T
// Y.
#pragma once

#include "lattice/reverse_ends.cuh"

namespace girih::kernels::lattice {

// A stage of the ring: K or V of a chunk, its memory, which dX replaces, the gradient of its reads, alpha and
// rho.
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

// Adds the term of the objective to dS; dX is in shared memory.
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
      add_product_of_tile_rows<2>(read, dX, first, v, t);
      scale_columns(
          read, [&](int n) { return *reinterpret_cast<const float2*>(weights + t + 8 * n + lane_col()); });
      bound<T>(read);
      pack<T>(a, read);
      add_product<T>(dS, a, v, t);
    }
  } else if (objective == LatticeObjective::decode) {
    const auto k = ring.k(stage);
    const int row = warp % S::kBlocks * 16, col = warp / S::kBlocks * S::kWide;
    barrier_wait(1, S::kThreads);  // dX is stored
    if (col < S::D) {
      Sums<S::kWide / 8> y;
      fill(y, 0.f);
      add_product_of_tiles<1>(y, k, row, dX, col);
      scale_rows(y, {weights[row + lane_row()], weights[row + lane_row() + 8]});
      Operand<S::kWide / 16> rounded;
      bound<T>(y);
      round_to<T>(rounded, y);
      store_blocks(exchange, row, col, rounded);
    }
    barrier_wait(1, S::kThreads);  // Y is stored
#pragma unroll 1
    for (int t = 0; t < S::R; t += 16) {
      load_block_transposed(a, k, first, t);
      add_product<T>(dS, a, exchange, t);
    }
  }
}

// S' of a warp's vectors, for the chunk before: in registers, or in shared memory if registers do not
// suffice.
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

// State warps of the reverse scan; each has 16 vectors of dS.
template <class S>
class ReverseChain {
  using T = typename S::T;
  using Ring = ReverseRing<S>;
  using Space = ReverseSpace<S>;

  // A chunk, and the values of both vectors of the lane in it.
  struct Pass {
    const Part part;
    const int stage;
    const float alpha[2], rho[2];
    float length[2] = {1.f, 1.f};  // |x|
    float by[2] = {0.f, 0.f};      // 1 where x is zero: dS' passes on unchanged
    float c[2] = {0.f, 0.f};

    __device__ Pass(const Part& part, int stage, const float* ends)
        : part(part), stage(stage), alpha{ends[0], ends[8]}, rho{ends[S::M], ends[S::M + 8]} {}
    __device__ bool complete() const { return part.chunk.complete; }
  };

  const LatticeReverse& p;
  const Ring ring;
  const ChunkedSequence of;
  const int head, warp, first;
  const typename S::Values exchange;
  float* const sums;  // sums of each warp: Delta'.dDelta', and m_C c of a resumed chunk
  Sums<S::D / 8> dS;
  After<S, Space::kHeld> after;  // S of the next chunk
  float opens = 0.f;

 public:
  __device__ ReverseChain(const LatticeReverse& p, const Ring& ring, const ChunkedSequence& of, int head,
                          int warp, unsigned char* space)
      : p(p),
        ring(ring),
        of(of),
        head(head),
        warp(warp),
        first(16 * warp),
        exchange{reinterpret_cast<T*>(space)},
        sums(reinterpret_cast<float*>(ring.base + Ring::kBytes)),
        after(space + S::Values::kBytes, first) {}

  __device__ void run() {
    const float within =
        begin_reverse<T>(dS, p, of, head, first, [&](int k, const uint32_t(&a)[4]) { after.put(k, a); });
    Turn turn;
#pragma unroll 1
    for (int64_t i = of.chunks - 1; i >= 0; --i, turn.next(Ring::kStages)) {
      const Part part = chunk_part(p.shape, of, i, head);
      wait(ring.full() + turn.place, turn.parity);
      step(part, turn.place);
      arrive_once(ring.empty() + turn.place);
    }
    put_sum(sums + warp, within);
    put_sum(sums + S::kWarps + warp, opens);
    end_reverse<S::kWarps>(p, dS, of, head, first, sums);
  }

 private:
  __device__ void step(const Part& part, int stage) {
    Pass pass(part, stage, ring.ends(stage) + first + lane_row());
    if (pass.complete()) through_length(pass);
    along_memory(pass);
    const float open = ring.weights(stage)[S::R + 1], sum = ring.weights(stage)[S::R + 2];
    WithStep with;
    if (part.resumed) {
      if (pass.complete() && sum > kLeastKept && (lane() & 3) == 0)
        opens = ring.weights(stage)[S::R] * (pass.c[0] + pass.c[1]);
      with = through_step(p, dS, of.sequence.index, head, first, open, pass.rho);
    }
    if (p.g.data != nullptr && (lane() & 3) == 0) hand_to_gates(pass, with);
    __syncwarp();
    through_turn(pass);
    __syncwarp();
    add_states(dS, p, of.sequence.index, head, first, pass.c, pass.complete(), part.resumed, open);
    add_reads(stage);
    add_objective(dS, ring, stage, exchange, p.shape.objective, warp);
    store_tile_rows(static_cast<T*>(p.gradients) + memory_place(p.shape, part.number, head),
                    ring.memory(stage), first, p.shape);
  }

  // dx = rho (dS' - s' (s'.dS')), which replaces dS'; dS' stays where x is zero.
  __device__ void through_length(Pass& pass) {
    const float(&rho)[2] = pass.rho;
    float along[2] = {0.f, 0.f};
    for_blocks(dS, [&](int k, float(&d)[2][4]) {
      uint32_t s[4];
      after.get(s, k);
      with_block<T>(d, s, [&](float& at, float x, int j) { along[j] = fmaf(x, at, along[j]); });
    });
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      along[j] = sum_over_row(along[j]);
      pass.length[j] = rho[j] > 0.f ? 1.f / rho[j] : 0.f;
      pass.by[j] = rho[j] > 0.f ? 0.f : 1.f;
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
  __device__ void along_memory(Pass& pass) {
    const auto memory = ring.memory(pass.stage);
    for_blocks(dS, [&](int k, float(&d)[2][4]) {
      uint32_t s[4];
      load_block(s, memory, first, 16 * k);
      with_block<T>(d, s, [&](float& dx, float x, int j) { pass.c[j] = fmaf(x, dx, pass.c[j]); });
    });
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      pass.c[j] = sum_over_row(pass.c[j]);
      if (pass.by[j] > 0.f) pass.c[j] = 0.f;
    }
  }

  // Stores m_C c + e^{L_C} Delta.dx, and whether x consists mostly of this call's steps, for columns.cuh.
  __device__ void hand_to_gates(const Pass& pass, const WithStep& with) const {
    const int M = p.shape.M;
    const float kept = ring.weights(pass.stage)[S::R];
    float* const to = p.ends + (pass.part.number * p.shape.heads + head) * 2 * M;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int m = first + lane_row() + 8 * j;
      if (m >= M) continue;
      const float rho = pass.rho[j];
      const bool steps = pass.complete() && rho > 0.f && fmaf(kept, kept, with.square[j]) * rho * rho < 0.5f;
      to[m] = fmaf(kept, pass.c[j], with.ahead[j]);
      to[M + m] = steps ? 1.f : 0.f;
    }
  }

  // dX = dx - s c, which replaces s in shared memory; dS = alpha dx - (x - alpha s) c; s becomes s' of the
  // chunk before.
  __device__ void through_turn(const Pass& pass) {
    const auto memory = ring.memory(pass.stage);
    for_blocks(dS, [&](int k, float(&d)[2][4]) {
      uint32_t s[4], s_after[4], dX[4];
      load_block(s, memory, first, 16 * k);
      after.get(s_after, k);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = unpaired<T>(s[i]), x_after = unpaired<T>(s_after[i]);
        const int j = i % 2;
        const float c = pass.c[j], alpha = pass.alpha[j], length = pass.length[j];
        float &d0 = d[i / 2][2 * j], &d1 = d[i / 2][2 * j + 1];
        dX[i] =
            pass.by[j] > 0.f ? 0u : pair_of<T>(bounded<T>(fmaf(-x.x, c, d0)), bounded<T>(fmaf(-x.y, c, d1)));
        if (pass.by[j] > 0.f) continue;
        d0 = alpha * fmaf(x.x, c, d0), d1 = alpha * fmaf(x.y, c, d1);
        if (pass.complete()) d0 = fmaf(-length * c, x_after.x, d0), d1 = fmaf(-length * c, x_after.y, d1);
      }
      __syncwarp();
      store_block(memory, first, 16 * k, dX);
      after.put(k, s);
    });
  }

  // Adds the gradient of the chunk's reads.
  __device__ void add_reads(int stage) {
    for_blocks(dS, [&](int k, float(&d)[2][4]) {
      uint32_t a[4];
      load_block(a, ring.gradient(stage), first, 16 * k);
      with_block<T>(d, a, [](float& at, float x, int) { at += x; });
    });
  }
};

template <class S>
__global__ void __launch_bounds__(ReverseRing<S>::kThreads, 1)
    reverse_kernel(const __grid_constant__ LatticeReverse p) {
  using Ring = ReverseRing<S>;
  extern __shared__ __align__(128) unsigned char shared[];
  const Ring ring{shared + S::Values::kBytes + ReverseSpace<S>::kAfter};
  const Carried block = carried(p.shape);
  const int warp = warp_index();
  start_ring<S::kWarps, Ring::kStages>(ring.full());
  if (warp >= S::kWarps) {
    ring.load(p, block.of, block.head, warp - S::kWarps);
    wait_copies<0>();
    return;
  }
  ReverseChain<S>(p, ring, block.of, block.head, warp, shared).run();
}

}  // namespace girih::kernels::lattice
