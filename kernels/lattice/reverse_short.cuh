// reverse.cuh and dkv.cuh in one kernel, for short chunks (at most 16 tokens) and memories of at most 64
// x 64. A block has a sequence and head. Roles of its warps:
//
//     state     computes dX, which replaces the gradient of the reads, and dS, chunk by chunk, from the end
//     producers load K, V, S, the gradient of the reads, and the terms of the reads in dk and dv
//     dkv       compute dk, dv, dgamma and dg, one warp for each chunk (dkv_short.cuh)
//
// If multiprocessors would be idle, two blocks have the same sequence and head: both compute the whole state
// recurrence, and each computes dk and dv of every other chunk.
//
// The critical path is from dS' to dS. Steps are tangent at s, so s.x = m_C. Since x = s' / rho, two dot
// products of dS' suffice:
//
//     p = s'.dS'          c = s.dx = rho (s.dS' - m_C rho p)
//     dX = rho dS' - rho p s' - c s
//     dS = (gradient of the reads) + alpha rho dS' - (alpha rho p + c / rho) s' + alpha c s
//          + decode: K^T Y, Y = (W E_C) dX^T, encode: -V^T (gamma E_C (V dX))
//
// An incomplete chunk has stored Delta' = x: there dx = dS', c = s.dS', and dS has the term -c Delta' instead
// of -(c / rho) s'. Where x is zero (rho = 0), dX = 0 and dS = dS' + (gradient of the reads).
#pragma once

#include "lattice/dkv_short.cuh"
#include "lattice/reverse_common.cuh"
#include "tile/warpgroup.h"

namespace girih::kernels::lattice {

// Coefficients of dS', s' and s in dX or in dS, for both vectors of the lane.
struct Coefficients {
  float d_coefficient[2], next_coefficient[2], s_coefficient[2];
};

template <typename T>
class ShortReverseStateWarp {
  using Ring = ShortReverseRing<T>;
  using S = typename Ring::S;
  using Factor = AFragment<4>;

  const LatticeReverse& p;
  const Ring& ring;
  const ChunkedSequence& of;
  const int head, warp, first;
  const bool stores;  // whether this block stores the gradients of the initial state
  Accumulator<8> dS;
  Factor next_memory, s, reads;  // s' of the next chunk, s, gradient of the reads

 public:
  __device__ ShortReverseStateWarp(const LatticeReverse& p, const Ring& ring, int warp)
      : p(p),
        ring(ring),
        of(ring.block().of),
        head(ring.block().head),
        warp(warp),
        first(16 * warp),
        stores(ring.block().share == 0) {}

  __device__ void run() {
    const float delta_dot = load_final_gradient<T>(dS, p, of, head, first, [&](int i, const uint32_t(&a)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) next_memory.at[i][j] = a[j];
    });
    store_sum(ring.sums() + warp, delta_dot);
    store_sum(ring.sums() + S::kWarps + warp, 0.f);
    bool is_incomplete = has_incomplete_end(p.shape, of);  // of the current chunk
    const int chunks = static_cast<int>(of.chunks);
    PipelineState pipe;
    if (chunks > 0) {
      ring.barriers().full.wait({});
      load_s(0);
    }
    const auto process = [&](auto special, int left, bool complete, bool resumed) {
      PipelineState next = pipe;
      next.next(Ring::kStages);
      step<decltype(special)::value>(pipe.stage, complete, resumed, left > 1, next);
      pipe = next;
    };
    const int resumed = of.prior_tokens > 0 ? 1 : 0;  // number of resumed chunks: the first one, if any
#pragma unroll 1
    for (int left = chunks; left > 0; --left) {
      if (!is_incomplete) {
        // Complete chunks that are not resumed have their own loop without conditions.
#pragma unroll 1
        for (; left > resumed; --left) process(std::false_type(), left, true, false);
        if (left == 0) break;
      }
      process(std::true_type(), left, !is_incomplete, left == resumed);
      is_incomplete = false;
    }
    if (stores) store_initial_gradients<S::kWarps>(p, dS, of, head, first, ring.sums());
  }

 private:
  // Loads s of a chunk.
  __device__ void load_s(int stage) {
    const int first = opaque(this->first);
    load_blocks(s, ring.memory(stage), first);
  }

  // The lane's terms of the dot products of its rows.
  __device__ static void dots(float (&to)[2], const Accumulator<8>& x, const Factor& y) {
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 b = unpack_pair<T>(y.at[i / 4][i % 4]);
      const float* const a = &x.at[i / 2][i % 2 * 2];
      sum[i % 2] = fmaf(a[0], b.x, sum[i % 2]), sum[2 + i % 2] = fmaf(a[1], b.y, sum[2 + i % 2]);
    }
    to[0] = sum[0] + sum[2], to[1] = sum[1] + sum[3];
  }

  // Special: the chunk is incomplete or resumed.
  template <bool Special>
  __device__ void step(int stage, bool complete, bool resumed, bool more, const PipelineState& next) {
    auto& scalars = ring.scalars(stage);
    const int first = opaque(this->first), row = first + lane_row();
    const float rho[2] = {scalars.rho[row], scalars.rho[row + 8]}, memory_decay = scalars.memory_decay;

    // p, c
    float along[2], c[2];
    dots(along, dS, next_memory);
    dots(c, dS, s);
#pragma unroll
    for (int j = 0; j < 2; ++j) along[j] = sum_over_row(along[j]), c[j] = sum_over_row(c[j]);
    Coefficients dx;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      along[j] = complete ? rho[j] * along[j] : 0.f;
      c[j] = rho[j] * fmaf(-memory_decay, along[j], c[j]);
      dx.d_coefficient[j] = rho[j], dx.next_coefficient[j] = -along[j], dx.s_coefficient[j] = -c[j];
    }
    StepSums step_sums;
    if (Special && resumed) apply_resumed_step(step_sums, dx, along, c, scalars, rho, complete);

    // dX
    Factor dX;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 x = combine(dx, i);
      dX.at[i / 4][i % 4] = pack_pair<T>(clamp_to_type<T>(x.x), clamp_to_type<T>(x.y));
    }
    load_blocks(reads, ring.gradient(stage), first);
    __syncwarp();
    store_blocks(ring.gradient(stage), first, 0, dX);

    const bool decode = p.shape.objective == LatticeObjective::decode;
    const auto keys = ring.tokens(stage, Ring::k);
    uint32_t own_k[4];
    if (decode) {
      Factor k;
      load_blocks(k, keys);
      named_barrier_sync(1, S::kThreads);  // dX is stored
      Accumulator<2> y[2];
      multiply_y(y, k, stage);
      update_ds<Special>(scalars, rho, along, c, complete, resumed);
      store_y(y, scalars);
      load_block_transposed(own_k, keys, first, 0);
    } else {
      update_ds<Special>(scalars, rho, along, c, complete, resumed);
      if (p.shape.objective == LatticeObjective::encode) add_encode_term(dX, stage);
    }
    if (p.g.data != nullptr && (lane() & 3) == 0) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const bool steps = complete && rho[j] > 0.f &&
                           fmaf(memory_decay, memory_decay, step_sums.square[j]) * rho[j] * rho[j] < 0.5f;
        scalars.cancelling_sum[row + 8 * j] = fmaf(memory_decay, c[j], step_sums.ahead[j]);
        scalars.steps[row + 8 * j] = steps ? 1.f : 0.f;
      }
    }
    ring.barriers().dx_full.arrive_warp(stage);
    if (more) ring.barriers().full.wait(next);
    next_memory = s;
    if (more) load_s(next.stage);
    if (decode) {
      named_barrier_sync(1, S::kThreads);  // Y is stored
      add_product<T>(dS, own_k, ring.y_tile(), 0);
    }
  }

  // Linear combination for pair i of the lane's 16 pairs, plus `other`.
  __device__ float2 combine(const Coefficients& of, int i, float2 other = {0.f, 0.f}) const {
    const int j = i % 2;
    const float2 x = unpack_pair<T>(next_memory.at[i / 4][i % 4]), y = unpack_pair<T>(s.at[i / 4][i % 4]);
    const float* const d = &dS.at[i / 2][2 * j];
    return {fmaf(of.s_coefficient[j], y.x,
                 fmaf(of.next_coefficient[j], x.x, fmaf(of.d_coefficient[j], d[0], other.x))),
            fmaf(of.s_coefficient[j], y.y,
                 fmaf(of.next_coefficient[j], x.y, fmaf(of.d_coefficient[j], d[1], other.y)))};
  }

  // dS without the term of the objective. alpha is loaded here, and s and s' are unpacked again, so that the
  // compiler neither computes this before the barrier of dX nor keeps the unpacked values in registers.
  template <bool Special>
  __device__ void update_ds(const typename Ring::StageScalars& scalars, const float (&rho)[2],
                            const float (&along)[2], const float (&c)[2], bool complete, bool resumed) {
    Coefficients coefficients;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float alpha = scalars.alpha[first + lane_row() + 8 * j];
      const bool moved = rho[j] > 0.f;
      const float length = complete && moved ? reciprocal(rho[j]) : 0.f;
      coefficients.d_coefficient[j] = moved ? alpha * (Special && resumed ? 1.f : rho[j]) : 1.f;
      coefficients.next_coefficient[j] = -fmaf(alpha, along[j], length * c[j]),
      coefficients.s_coefficient[j] = alpha * c[j];
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      make_opaque(next_memory.at[i / 4][i % 4]);
      make_opaque(s.at[i / 4][i % 4]);
      const float2 x = combine(coefficients, i, unpack_pair<T>(reads.at[i / 4][i % 4]));
      float* const d = &dS.at[i / 2][i % 2 * 2];
      d[0] = x.x, d[1] = x.y;
    }
    if (Special) {
      add_state_terms(dS, p, of.sequence.index, head, first, c, complete, resumed, scalars.call_decay);
    }
  }

  // Y = (W E_C) dX^T, 16 columns a warp, in two accumulators.
  __device__ void multiply_y(Accumulator<2> (&y)[2], const Factor& k, int stage) const {
    fill(y[0], 0.f);
    fill(y[1], 0.f);
#pragma unroll
    for (int i = 0; i < 4; ++i) add_product<T>(y[i % 2], k.at[i], ring.gradient(stage), 16 * i, 16 * warp);
  }
  __device__ void store_y(Accumulator<2> (&y)[2], const typename Ring::StageScalars& scalars) const {
    const float weights[2] = {scalars.weights[lane_row()], scalars.weights[lane_row() + 8]};
    for_each_register<2>(
        [&](int n, int i) { y[0].at[n][i] = weights[i / 2] * (y[0].at[n][i] + y[1].at[n][i]); });
    clamp_factor<T>(y[0]);
    uint32_t x[4];
    pack<T>(x, y[0]);
    store_block(ring.y_tile(), 0, 16 * warp, x);
  }

  // -V^T (gamma E_C (V dX)), for the warp's vectors.
  __device__ void add_encode_term(const Factor& dX, int stage) {
    const auto v = ring.tokens(stage, Ring::v);
    Accumulator<2> read;
    fill(read, 0.f);
    add_product_transposed<T>(read, dX, v);
    scale_columns(read, [&](int n) {
      return *reinterpret_cast<const float2*>(ring.scalars(stage).weights + 8 * n + lane_col());
    });
    clamp_factor<T>(read);
    uint32_t x[4];
    pack<T>(x, read);
    add_product<T>(dS, x, v, 0);
  }

  // Replaces dS' by dx, for the gradient of a resumed chunk's Delta.
  __device__ void apply_resumed_step(StepSums& step_sums, Coefficients& dx, float (&along)[2], float (&c)[2],
                                     const typename Ring::StageScalars& scalars, const float (&rho)[2],
                                     bool complete) {
    dx.s_coefficient[0] = dx.s_coefficient[1] = 0.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 x = combine(dx, i);
      if (rho[i % 2] > 0.f) dS.at[i / 2][i % 2 * 2] = x.x, dS.at[i / 2][i % 2 * 2 + 1] = x.y;
    }
    dots(c, dS, s);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const bool moved = rho[j] > 0.f;
      const float sum = sum_over_row(c[j]);
      c[j] = moved ? sum : 0.f, along[j] = 0.f;
      dx.d_coefficient[j] = moved ? 1.f : 0.f, dx.next_coefficient[j] = 0.f, dx.s_coefficient[j] = -c[j];
    }
    const bool has_term = complete && scalars.sum > kMinLogDecay && (lane() & 3) == 0;
    store_sum(ring.sums() + S::kWarps + warp, has_term ? scalars.memory_decay * (c[0] + c[1]) : 0.f);
    step_sums = apply_step_gradient(p, dS, of.sequence.index, head, first, scalars.call_decay, rho, stores);
  }
};

template <typename T>
__global__ void __launch_bounds__(ShortReverseRing<T>::kThreads, 1)
    reverse_short_kernel(const __grid_constant__ ShortReverseArguments p) {
  using Ring = ShortReverseRing<T>;
  constexpr int kStateWarps = Ring::S::kWarps;
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  const Ring ring{shared};
  const int warp = warp_index();
  ring.init(p);
  // Three warpgroups: the state warps, the producer warps and the dkv warps.
  constexpr int kStateRegisters = 208, kOtherRegisters = 144;
  static_assert(fit_registers(Ring::kThreads, {{1, kStateRegisters}, {2, kOtherRegisters}}));
  if (warp < kStateWarps) {
    setmaxnreg_inc<kStateRegisters>();
    ShortReverseStateWarp<T>(p.reverse, ring, warp).run();
    return;
  }
  setmaxnreg_dec<kOtherRegisters>();
  if (warp < kStateWarps + Ring::kProducerWarps) {
    ring.load(p, warp - kStateWarps);
    wait_copies<0>();
  } else {
    ShortDkvWarp<T>(p, ring).run(warp - kStateWarps - Ring::kProducerWarps);
  }
}

template <typename T>
cudaError_t launch_short_reverse(const LatticeReverse& reverse, const LatticeDkv& dkv, cudaStream_t stream) {
  using Ring = ShortReverseRing<T>;
  int shares = 1;
  GIRIH_TRY(choose_shares(reverse.shape, Ring::kMostShares, shares));
  return launch_sequences<reverse_short_kernel<T>>(ShortReverseArguments{reverse, dkv, shares},
                                                   Ring::kThreads, Ring::kBytes, reverse.shape, stream,
                                                   shares);
}

}  // namespace girih::kernels::lattice
