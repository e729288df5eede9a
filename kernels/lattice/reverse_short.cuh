// reverse.cuh and columns.cuh in one kernel, for chunks of at most 16 tokens and memories of at most 64 x 64.
// A block has a sequence and head. Roles of its warps:
//
//     state     computes dX, which replaces the gradient of the reads, and dS, chunk by chunk, from the end
//     producers load K, V, S, the gradient of the reads, and the terms of the reads in dk and dv
//     dkv       compute dk, dv, dgamma and dg, one warp for each chunk (columns_short.cuh)
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

#include "lattice/columns_short.cuh"
#include "lattice/reverse.cuh"
#include "tile/warpgroup.h"

namespace girih::kernels::lattice {

// Coefficients of dS', s' and s in dX or in dS, for both vectors of the lane.
struct Shares {
  float of_d[2], of_after[2], of_s[2];
};

template <typename T>
class ShortChain {
  using Ring = ShortRing<T>;
  using S = typename Ring::S;
  using Factor = Operand<4>;

  const LatticeReverse& p;
  const Ring& ring;
  const ChunkedSequence& of;
  const int head, warp, first;
  const bool stores;  // whether this block stores the gradients of the initial state
  Sums<8> dS;
  Factor after, s, reads;  // s' of the next chunk, s, gradient of the reads

 public:
  __device__ ShortChain(const LatticeReverse& p, const Ring& ring, int warp)
      : p(p),
        ring(ring),
        of(ring.block().of),
        head(ring.block().head),
        warp(warp),
        first(16 * warp),
        stores(ring.block().share == 0) {}

  __device__ void run() {
    const float within = begin_reverse<T>(dS, p, of, head, first, [&](int i, const uint32_t(&a)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) after.at[i][j] = a[j];
    });
    put_sum(ring.sums() + warp, within);
    put_sum(ring.sums() + S::kWarps + warp, 0.f);
    bool open = ends_in_chunk(p.shape, of);  // the chunk is incomplete
    const int chunks = static_cast<int>(of.chunks);
    Turn turn;
    if (chunks > 0) {
      wait(ring.full(), 0);
      fetch(0);
    }
    const auto pass = [&](auto special, int left, bool complete, bool resumed) {
      Turn next = turn;
      next.next(Ring::kStages);
      step<decltype(special)::value>(turn.place, complete, resumed, left > 1, next);
      turn = next;
    };
    const int resumed = of.begun > 0 ? 1 : 0;  // 1: the chunk at the start is resumed
#pragma unroll 1
    for (int left = chunks; left > 0; --left) {
      if (!open) {
        // Complete chunks that are not resumed have their own loop without conditions.
#pragma unroll 1
        for (; left > resumed; --left) pass(std::false_type(), left, true, false);
        if (left == 0) break;
      }
      pass(std::true_type(), left, !open, left == resumed);
      open = false;
    }
    if (stores) end_reverse<S::kWarps>(p, dS, of, head, first, ring.sums());
  }

 private:
  // Loads s of a chunk.
  __device__ void fetch(int stage) {
    const int first = opaque(this->first);
    load_blocks(s, ring.memory(stage), first);
  }

  // The lane's terms of the dot products of its rows.
  __device__ static void dots(float (&to)[2], const Sums<8>& x, const Factor& y) {
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 b = unpaired<T>(y.at[i / 4][i % 4]);
      const float* const a = &x.at[i / 2][i % 2 * 2];
      sum[i % 2] = fmaf(a[0], b.x, sum[i % 2]), sum[2 + i % 2] = fmaf(a[1], b.y, sum[2 + i % 2]);
    }
    to[0] = sum[0] + sum[2], to[1] = sum[1] + sum[3];
  }

  // Special: the chunk is incomplete or resumed.
  template <bool Special>
  __device__ void step(int stage, bool complete, bool resumed, bool more, const Turn& next) {
    auto& numbers = ring.numbers(stage);
    const int first = opaque(this->first), row = first + lane_row();
    const float rho[2] = {numbers.rho[row], numbers.rho[row + 8]}, kept = numbers.kept;

    // p, c
    float along[2], c[2];
    dots(along, dS, after);
    dots(c, dS, s);
#pragma unroll
    for (int j = 0; j < 2; ++j) along[j] = sum_over_row(along[j]), c[j] = sum_over_row(c[j]);
    Shares dx;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      along[j] = complete ? rho[j] * along[j] : 0.f;
      c[j] = rho[j] * fmaf(-kept, along[j], c[j]);
      dx.of_d[j] = rho[j], dx.of_after[j] = -along[j], dx.of_s[j] = -c[j];
    }
    WithStep with;
    if (Special && resumed) begin_resumed(with, dx, along, c, numbers, rho, complete);

    // dX
    Factor dX;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 x = mixed(dx, i);
      dX.at[i / 4][i % 4] = pair_of<T>(bounded<T>(x.x), bounded<T>(x.y));
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
      barrier_wait(1, S::kThreads);  // dX is stored
      Sums<2> y[2];
      begin_y(y, k, stage);
      mix<Special>(numbers, rho, along, c, complete, resumed);
      end_y(y, numbers);
      load_block_transposed(own_k, keys, first, 0);
    } else {
      mix<Special>(numbers, rho, along, c, complete, resumed);
      if (p.shape.objective == LatticeObjective::encode) add_values(dX, stage);
    }
    if (p.g.data != nullptr && (lane() & 3) == 0) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const bool steps =
            complete && rho[j] > 0.f && fmaf(kept, kept, with.square[j]) * rho[j] * rho[j] < 0.5f;
        numbers.cancels[row + 8 * j] = fmaf(kept, c[j], with.ahead[j]);
        numbers.steps[row + 8 * j] = steps ? 1.f : 0.f;
      }
    }
    arrive_once(ring.done() + stage);
    if (more) wait(ring.full() + next.place, next.parity);
    after = s;
    if (more) fetch(next.place);
    if (decode) {
      barrier_wait(1, S::kThreads);  // Y is stored
      add_product<T>(dS, own_k, ring.exchange(), 0);
    }
  }

  // Linear combination for pair i of the lane's 16 pairs, plus `other`.
  __device__ float2 mixed(const Shares& of, int i, float2 other = {0.f, 0.f}) const {
    const int j = i % 2;
    const float2 x = unpaired<T>(after.at[i / 4][i % 4]), y = unpaired<T>(s.at[i / 4][i % 4]);
    const float* const d = &dS.at[i / 2][2 * j];
    return {fmaf(of.of_s[j], y.x, fmaf(of.of_after[j], x.x, fmaf(of.of_d[j], d[0], other.x))),
            fmaf(of.of_s[j], y.y, fmaf(of.of_after[j], x.y, fmaf(of.of_d[j], d[1], other.y)))};
  }

  // dS without the term of the objective. alpha is loaded here, and s and s' are unpacked again, so that the
  // compiler neither computes this before the barrier of dX nor keeps the unpacked values in registers.
  template <bool Special>
  __device__ void mix(const typename Ring::Numbers& numbers, const float (&rho)[2], const float (&along)[2],
                      const float (&c)[2], bool complete, bool resumed) {
    Shares shares;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float alpha = numbers.alpha[first + lane_row() + 8 * j];
      const bool moved = rho[j] > 0.f;
      const float length = complete && moved ? reciprocal(rho[j]) : 0.f;
      shares.of_d[j] = moved ? alpha * (Special && resumed ? 1.f : rho[j]) : 1.f;
      shares.of_after[j] = -fmaf(alpha, along[j], length * c[j]), shares.of_s[j] = alpha * c[j];
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      hide(after.at[i / 4][i % 4]);
      hide(s.at[i / 4][i % 4]);
      const float2 x = mixed(shares, i, unpaired<T>(reads.at[i / 4][i % 4]));
      float* const d = &dS.at[i / 2][i % 2 * 2];
      d[0] = x.x, d[1] = x.y;
    }
    if (Special) {
      add_states(dS, p, of.sequence.index, head, first, c, complete, resumed, numbers.open);
    }
  }

  // Y = (W E_C) dX^T, 16 columns a warp, in two accumulators.
  __device__ void begin_y(Sums<2> (&y)[2], const Factor& k, int stage) const {
    fill(y[0], 0.f);
    fill(y[1], 0.f);
#pragma unroll
    for (int i = 0; i < 4; ++i) add_product<T>(y[i % 2], k.at[i], ring.gradient(stage), 16 * i, 16 * warp);
  }
  __device__ void end_y(Sums<2> (&y)[2], const typename Ring::Numbers& numbers) const {
    const float weights[2] = {numbers.weights[lane_row()], numbers.weights[lane_row() + 8]};
    each_sum<2>([&](int n, int i) { y[0].at[n][i] = weights[i / 2] * (y[0].at[n][i] + y[1].at[n][i]); });
    bound<T>(y[0]);
    uint32_t x[4];
    pack<T>(x, y[0]);
    store_block(ring.exchange(), 0, 16 * warp, x);
  }

  // -V^T (gamma E_C (V dX)), for the warp's vectors.
  __device__ void add_values(const Factor& dX, int stage) {
    const auto v = ring.tokens(stage, Ring::v);
    Sums<2> read;
    fill(read, 0.f);
    add_product_transposed<T>(read, dX, v);
    scale_columns(read, [&](int n) {
      return *reinterpret_cast<const float2*>(ring.numbers(stage).weights + 8 * n + lane_col());
    });
    bound<T>(read);
    uint32_t x[4];
    pack<T>(x, read);
    add_product<T>(dS, x, v, 0);
  }

  // Replaces dS' by dx, for the gradient of a resumed chunk's Delta.
  __device__ void begin_resumed(WithStep& with, Shares& dx, float (&along)[2], float (&c)[2],
                                const typename Ring::Numbers& numbers, const float (&rho)[2], bool complete) {
    dx.of_s[0] = dx.of_s[1] = 0.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 x = mixed(dx, i);
      if (rho[i % 2] > 0.f) dS.at[i / 2][i % 2 * 2] = x.x, dS.at[i / 2][i % 2 * 2 + 1] = x.y;
    }
    dots(c, dS, s);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const bool moved = rho[j] > 0.f;
      const float sum = sum_over_row(c[j]);
      c[j] = moved ? sum : 0.f, along[j] = 0.f;
      dx.of_d[j] = moved ? 1.f : 0.f, dx.of_after[j] = 0.f, dx.of_s[j] = -c[j];
    }
    const bool open = complete && numbers.sum > kLeastKept && (lane() & 3) == 0;
    put_sum(ring.sums() + S::kWarps + warp, open ? numbers.kept * (c[0] + c[1]) : 0.f);
    with = through_step(p, dS, of.sequence.index, head, first, numbers.open, rho, stores);
  }
};

template <typename T>
__global__ void __launch_bounds__(ShortRing<T>::kThreads, 1)
    reverse_short_kernel(const __grid_constant__ ShortReverse p) {
  using Ring = ShortRing<T>;
  constexpr int kChain = Ring::S::kWarps;
  extern __shared__ __align__(128) unsigned char shared[];
  const Ring ring{shared};
  const int warp = warp_index();
  ring.start(p);
  // Warpgroups: the state warps and two others. Each starts at 168 registers a thread.
  if (warp < kChain) {
    take_registers<208>();
    ShortChain<T>(p.reverse, ring, warp).run();
    return;
  }
  leave_registers<144>();
  if (warp < kChain + Ring::kLoaders) {
    ring.load(p, warp - kChain);
    wait_copies<0>();
  } else {
    ShortColumns<T>(p, ring).run(warp - kChain - Ring::kLoaders);
  }
}

// Whether the short kernel supports the chunks, the memory and the device.
template <typename T>
inline cudaError_t takes_short(const LatticeShape& shape, bool& takes) {
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  takes = shape.grid.size <= 16 && shape.D <= 64 && shape.M <= 64 && ShortRing<T>::kBytes <= limit;
  return cudaSuccess;
}

template <typename T>
cudaError_t reverse_of(const LatticeReverse& p, const LatticeColumns& columns, cudaStream_t stream) {
  bool takes = false;
  if (const cudaError_t error = takes_short<T>(p.shape, takes); error != cudaSuccess) return error;
  if (takes) {
    using Ring = ShortRing<T>;
    int shares = 1;
    if (const cudaError_t error = shares_of(p.shape, Ring::kMostShares, shares); error != cudaSuccess) {
      return error;
    }
    return launch_scan<reverse_short_kernel<T>>(ShortReverse{p, columns, shares}, Ring::kThreads,
                                                Ring::kBytes, p.shape, stream, shares);
  }
  const cudaError_t error = by_size(p.shape, [&](auto tokens, auto D, auto M) {
    using S = Sizes<T, tokens(), D(), M()>;
    return launch_scan<reverse_kernel<S>>(p, ReverseRing<S>::kThreads, ReverseSpace<S>::kBytes, p.shape,
                                          stream);
  });
  return error == cudaSuccess ? columns_of<T>(columns, stream) : error;
}

}  // namespace girih::kernels::lattice
