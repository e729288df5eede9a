// Reverse scan: the gradient dS of the memory chunk by chunk, from the end, one block for each sequence and
// head. Rows of S^T are independent except in the last term:
//
//     dx = rho (dS' - s' (s'.dS')), x = s' / rho          s' = x rho: the next memory
//     c = s.dx          dX = dx - s c                     dX is stored for dkv.cuh
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

#include "lattice/reverse_common.cuh"

namespace girih::kernels::lattice {

// A stage of the ring: K or V of a chunk, its memory, which dX replaces, the gradient of its reads, alpha and
// rho.
template <class S>
struct ReverseRing {
  using T = typename S::T;
  static constexpr int kTokenBytes =
      S::Keys::kBytes > S::Values::kBytes ? S::Keys::kBytes : S::Values::kBytes;
  static constexpr int kStageBytes = kTokenBytes + 2 * S::Memory::kBytes;
  static constexpr int kStages = kStageBytes <= 18432 ? 8 : kStageBytes <= 36864 ? 4 : 2;
  static constexpr int kProducerWarps = kStages < 4 ? kStages : 4;
  static constexpr int kThreads = S::kThreads + 32 * kProducerWarps;
  static constexpr int kFloats = S::R + 4 + 2 * S::M;
  static constexpr int kBytes = kStages * (kStageBytes + 4 * kFloats + 16);

  unsigned char* base;

  __device__ typename S::Keys k(int stage) const {
    return {reinterpret_cast<T*>(base + stage * kStageBytes)};
  }
  __device__ typename S::Values v(int stage) const {
    return {reinterpret_cast<T*>(base + stage * kStageBytes)};
  }
  __device__ typename S::Memory memory(int stage) const {
    return {reinterpret_cast<T*>(base + stage * kStageBytes + kTokenBytes)};
  }
  __device__ typename S::Memory gradient(int stage) const {
    return {reinterpret_cast<T*>(base + stage * kStageBytes + kTokenBytes + S::Memory::kBytes)};
  }
  __device__ float* ends(int stage) const {  // alpha, rho
    return reinterpret_cast<float*>(base + kStages * kStageBytes) + stage * kFloats;
  }
  __device__ float* weights(int stage) const { return ends(stage) + 2 * S::M; }
  __device__ LoadBarriers<kStages>& barriers() const {
    return *reinterpret_cast<LoadBarriers<kStages>*>(base + kStages * (kStageBytes + 4 * kFloats));
  }

  __device__ void load(const LatticeReverse& p, const ChunkedSequence& of, int head, int producer) const {
    const LatticeShape& shape = p.shape;
    PipelineState pipe;
    pipe.skip(producer, kStages);
#pragma unroll 1
    for (int64_t chunk_index = producer; chunk_index < of.chunks;
         chunk_index += kProducerWarps, pipe.skip(kProducerWarps, kStages)) {
      const ChunkCoord coord = chunk_coord(shape, of, of.chunks - 1 - chunk_index, head);
      const auto raw = load_tokens<S::R>(p.gamma, p.g, coord);
      const int stage = pipe.stage;
      barriers().empty.wait(pipe);
      const int64_t place = memory_offset(shape, coord.number, head);
      load_by_warp(memory(stage), static_cast<const T*>(p.memories) + place, shape.D, shape.M, shape.D);
      load_by_warp(gradient(stage), static_cast<const T*>(p.gradients) + place, shape.D, shape.M, shape.D);
      if (shape.objective == LatticeObjective::decode) {
        load_by_warp(k(stage), row_of<T>(p.k, coord.batch(), coord.chunk.start, head), p.k.stride[1],
                     coord.chunk.length, shape.M);
      } else if (shape.objective == LatticeObjective::encode) {
        load_by_warp(v(stage), row_of<T>(p.v, coord.batch(), coord.chunk.start, head), p.v.stride[1],
                     coord.chunk.length, shape.D);
      }
      const float* const from = p.ends + (coord.number * shape.heads + head) * 2 * shape.M;
#pragma unroll
      for (int i = 0; i < S::M / 64; ++i) {
        const int pack = lane() + 32 * i, is_rho = pack >= S::M / 4, m = pack * 4 - is_rho * S::M;
        copy_async(shared_address(ends(stage) + 4 * pack), from + is_rho * shape.M + m, m < shape.M);
      }
      store_weights(weights(stage), raw, p, coord);
      barriers().full.arrive_after_copies(stage);
      barriers().full.arrive_warp(stage);
    }
  }
};

// Adds the term of the objective to dS; dX is in shared memory.
template <class S>
__device__ inline void add_objective(Accumulator<S::D / 8>& dS, const ReverseRing<S>& ring, int stage,
                                     const typename S::Values& y_tile, LatticeObjective objective, int warp) {
  using T = typename S::T;
  const auto dX = ring.memory(stage);
  const float* const weights = ring.weights(stage);
  const int first = 16 * warp;
  uint32_t a[4];
  if (objective == LatticeObjective::encode) {
    const auto v = ring.v(stage);
#pragma unroll 1
    for (int t = 0; t < S::R; t += 16) {
      Accumulator<2> read;
      fill(read, 0.f);
      add_tile_product_transposed<2>(read, dX, first, v, t);
      scale_columns(
          read, [&](int n) { return *reinterpret_cast<const float2*>(weights + t + 8 * n + lane_col()); });
      clamp_factor<T>(read);
      pack<T>(a, read);
      add_product<T>(dS, a, v, t);
    }
  } else if (objective == LatticeObjective::decode) {
    const auto k = ring.k(stage);
    const int row = warp % S::kBlocks * 16, col = warp / S::kBlocks * S::kWide;
    named_barrier_sync(1, S::kThreads);  // dX is stored
    if (col < S::D) {
      Accumulator<S::kWide / 8> y;
      fill(y, 0.f);
      add_tile_product<1>(y, k, row, dX, col);
      scale_rows(y, {weights[row + lane_row()], weights[row + lane_row() + 8]});
      AFragment<S::kWide / 16> rounded;
      clamp_factor<T>(y);
      round_to_a_fragment<T>(rounded, y);
      store_blocks(y_tile, row, col, rounded);
    }
    named_barrier_sync(1, S::kThreads);  // Y is stored
#pragma unroll 1
    for (int t = 0; t < S::R; t += 16) {
      load_block_transposed(a, k, first, t);
      add_product<T>(dS, a, y_tile, t);
    }
  }
}

// S' of a warp's vectors, for the chunk before: in registers, or in shared memory if registers do not
// suffice.
template <class S, bool InRegisters>
struct NextMemory {
  using T = typename S::T;
  AFragment<S::D / 16> fragments;
  __device__ NextMemory(unsigned char*, int) {}
  __device__ void get(uint32_t (&a)[4], int k) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = fragments.at[k][i];
  }
  __device__ void put(int k, const uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) fragments.at[k][i] = a[i];
  }
};
template <class S>
struct NextMemory<S, false> {
  using T = typename S::T;
  typename S::Memory tile;
  int first;
  __device__ NextMemory(unsigned char* storage, int first)
      : tile{reinterpret_cast<T*>(storage)}, first(first) {}
  __device__ void get(uint32_t (&a)[4], int k) const { load_block(a, tile, first, 16 * k); }
  __device__ void put(int k, const uint32_t (&a)[4]) { store_block(tile, first, 16 * k, a); }
};

template <class S>
struct ReverseStorage {
  static constexpr bool kInRegisters = S::D == 64;
  static constexpr int kNextMemoryBytes = kInRegisters ? 0 : S::Memory::kBytes;
  static constexpr int kBytes =
      S::Values::kBytes + kNextMemoryBytes + ReverseRing<S>::kBytes + 2 * S::kWarps * 4;
};

// State warps of the reverse scan; each has 16 vectors of dS.
template <class S>
class ReverseStateWarp {
  using T = typename S::T;
  using Ring = ReverseRing<S>;
  using Storage = ReverseStorage<S>;

  // A chunk, and the values of both vectors of the lane in it.
  struct ChunkValues {
    const ChunkCoord coord;
    const int stage;
    const float alpha[2], rho[2];
    float length[2] = {1.f, 1.f};   // |x|
    float is_zero[2] = {0.f, 0.f};  // 1 where x is zero: dS' passes on unchanged
    float c[2] = {0.f, 0.f};

    __device__ ChunkValues(const ChunkCoord& coord, int stage, const float* ends)
        : coord(coord), stage(stage), alpha{ends[0], ends[8]}, rho{ends[S::M], ends[S::M + 8]} {}
    __device__ bool complete() const { return coord.chunk.is_complete; }
  };

  const LatticeReverse& p;
  const Ring ring;
  const ChunkedSequence of;
  const int head, warp, first;
  const typename S::Values y_tile;
  float* const sums;  // sums of each warp: Delta'.dDelta', and m_C c of a resumed chunk
  Accumulator<S::D / 8> dS;
  NextMemory<S, Storage::kInRegisters> next_memory;  // S of the next chunk
  float resumed_decay = 0.f;                         // the lane's terms of m_C c of a resumed chunk

 public:
  __device__ ReverseStateWarp(const LatticeReverse& p, const Ring& ring, const ChunkedSequence& of, int head,
                              int warp, unsigned char* storage)
      : p(p),
        ring(ring),
        of(of),
        head(head),
        warp(warp),
        first(16 * warp),
        y_tile{reinterpret_cast<T*>(storage)},
        sums(reinterpret_cast<float*>(ring.base + Ring::kBytes)),
        next_memory(storage + S::Values::kBytes, first) {}

  __device__ void run() {
    const float delta_dot = load_final_gradient<T>(
        dS, p, of, head, first, [&](int k, const uint32_t(&a)[4]) { next_memory.put(k, a); });
    PipelineState pipe;
#pragma unroll 1
    for (int64_t i = of.chunks - 1; i >= 0; --i, pipe.next(Ring::kStages)) {
      const ChunkCoord coord = chunk_coord(p.shape, of, i, head);
      ring.barriers().full.wait(pipe);
      step(coord, pipe.stage);
      ring.barriers().empty.arrive_warp(pipe.stage);
    }
    store_sum(sums + warp, delta_dot);
    store_sum(sums + S::kWarps + warp, resumed_decay);
    store_initial_gradients<S::kWarps>(p, dS, of, head, first, sums);
  }

 private:
  __device__ void step(const ChunkCoord& coord, int stage) {
    ChunkValues values(coord, stage, ring.ends(stage) + first + lane_row());
    if (values.complete()) apply_norm_gradient(values);
    compute_c(values);
    const float call_decay = ring.weights(stage)[S::R + 1], sum = ring.weights(stage)[S::R + 2];
    StepSums step_sums;
    if (coord.resumed) {
      if (values.complete() && sum > kMinLogDecay && (lane() & 3) == 0)
        resumed_decay = ring.weights(stage)[S::R] * (values.c[0] + values.c[1]);
      step_sums = apply_step_gradient(p, dS, of.sequence.index, head, first, call_decay, values.rho);
    }
    if (p.g.data != nullptr && (lane() & 3) == 0) store_cancelling_sums(values, step_sums);
    __syncwarp();
    compute_dx_and_ds(values);
    __syncwarp();
    add_state_terms(dS, p, of.sequence.index, head, first, values.c, values.complete(), coord.resumed,
                    call_decay);
    add_reads(stage);
    add_objective(dS, ring, stage, y_tile, p.shape.objective, warp);
    store_tile_rows(static_cast<T*>(p.gradients) + memory_offset(p.shape, coord.number, head),
                    ring.memory(stage), first, p.shape);
  }

  // dx = rho (dS' - s' (s'.dS')), which replaces dS'; dS' stays where x is zero.
  __device__ void apply_norm_gradient(ChunkValues& values) {
    const float(&rho)[2] = values.rho;
    float along[2] = {0.f, 0.f};
    for_each_block(dS, [&](int k, float(&d)[2][4]) {
      uint32_t s[4];
      next_memory.get(s, k);
      for_each_element_pair<T>(d, s, [&](float& at, float x, int j) { along[j] = fmaf(x, at, along[j]); });
    });
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      along[j] = sum_over_row(along[j]);
      values.length[j] = rho[j] > 0.f ? 1.f / rho[j] : 0.f;
      values.is_zero[j] = rho[j] > 0.f ? 0.f : 1.f;
    }
    for_each_block(dS, [&](int k, float(&d)[2][4]) {
      uint32_t s[4];
      next_memory.get(s, k);
      for_each_element_pair<T>(d, s, [&](float& at, float x, int j) {
        if (rho[j] > 0.f) at = rho[j] * fmaf(-x, along[j], at);
      });
    });
  }

  // c = s.dx
  __device__ void compute_c(ChunkValues& values) {
    const auto memory = ring.memory(values.stage);
    for_each_block(dS, [&](int k, float(&d)[2][4]) {
      uint32_t s[4];
      load_block(s, memory, first, 16 * k);
      for_each_element_pair<T>(d, s,
                               [&](float& dx, float x, int j) { values.c[j] = fmaf(x, dx, values.c[j]); });
    });
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      values.c[j] = sum_over_row(values.c[j]);
      if (values.is_zero[j] > 0.f) values.c[j] = 0.f;
    }
  }

  // Stores m_C c + e^{L_C} Delta.dx, and whether x consists mostly of this call's steps, for dkv.cuh.
  __device__ void store_cancelling_sums(const ChunkValues& values, const StepSums& step_sums) const {
    const int M = p.shape.M;
    const float memory_decay = ring.weights(values.stage)[S::R];
    float* const to = p.cancelling_sums + (values.coord.number * p.shape.heads + head) * 2 * M;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int m = first + lane_row() + 8 * j;
      if (m >= M) continue;
      const float rho = values.rho[j];
      const bool steps = values.complete() && rho > 0.f &&
                         fmaf(memory_decay, memory_decay, step_sums.square[j]) * rho * rho < 0.5f;
      to[m] = fmaf(memory_decay, values.c[j], step_sums.ahead[j]);
      to[M + m] = steps ? 1.f : 0.f;
    }
  }

  // dX = dx - s c, which replaces s in shared memory; dS = alpha dx - (x - alpha s) c; s becomes s' of the
  // chunk before.
  __device__ void compute_dx_and_ds(const ChunkValues& values) {
    const auto memory = ring.memory(values.stage);
    for_each_block(dS, [&](int k, float(&d)[2][4]) {
      uint32_t s[4], s_after[4], dX[4];
      load_block(s, memory, first, 16 * k);
      next_memory.get(s_after, k);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = unpack_pair<T>(s[i]), x_after = unpack_pair<T>(s_after[i]);
        const int j = i % 2;
        const float c = values.c[j], alpha = values.alpha[j], length = values.length[j];
        float &d0 = d[i / 2][2 * j], &d1 = d[i / 2][2 * j + 1];
        dX[i] = values.is_zero[j] > 0.f
                    ? 0u
                    : pack_pair<T>(clamp_to_type<T>(fmaf(-x.x, c, d0)), clamp_to_type<T>(fmaf(-x.y, c, d1)));
        if (values.is_zero[j] > 0.f) continue;
        d0 = alpha * fmaf(x.x, c, d0), d1 = alpha * fmaf(x.y, c, d1);
        if (values.complete()) d0 = fmaf(-length * c, x_after.x, d0), d1 = fmaf(-length * c, x_after.y, d1);
      }
      __syncwarp();
      store_block(memory, first, 16 * k, dX);
      next_memory.put(k, s);
    });
  }

  // Adds the gradient of the chunk's reads.
  __device__ void add_reads(int stage) {
    for_each_block(dS, [&](int k, float(&d)[2][4]) {
      uint32_t a[4];
      load_block(a, ring.gradient(stage), first, 16 * k);
      for_each_element_pair<T>(d, a, [](float& at, float x, int) { at += x; });
    });
  }
};

template <class S>
__global__ void __launch_bounds__(ReverseRing<S>::kThreads, 1)
    reverse_kernel(const __grid_constant__ LatticeReverse p) {
  using Ring = ReverseRing<S>;
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  const Ring ring{shared + S::Values::kBytes + ReverseStorage<S>::kNextMemoryBytes};
  const SequenceCoord block = sequence_coord(p.shape);
  const int warp = warp_index();
  ring.barriers().init(S::kWarps);
  if (warp >= S::kWarps) {
    ring.load(p, block.of, block.head, warp - S::kWarps);
    wait_copies<0>();
    return;
  }
  ReverseStateWarp<S>(p, ring, block.of, block.head, warp, shared).run();
}

template <typename T>
cudaError_t launch_reverse(const LatticeReverse& p, cudaStream_t stream) {
  return dispatch_size(p.shape, [&](auto tokens, auto D, auto M) {
    using S = Sizes<T, tokens(), D(), M()>;
    return launch_sequences<reverse_kernel<S>>(p, ReverseRing<S>::kThreads, ReverseStorage<S>::kBytes,
                                               p.shape, stream);
  });
}

}  // namespace girih::kernels::lattice
