// reverse.cuh and columns.cuh in one, for chunks of at most 16 tokens and memories of at most 64 x 64: one
// block a sequence and head, whose warps are
//
//     chain     dX, in the place of the gradient of the chunk's reads, and dS: chunk by chunk, from the end
//     loaders   bring K, V, S, the gradient of the reads and their parts of dk and dv
//     columns   dk, dv, dgamma and dg of a chunk, a warp each (columns_short.cuh)
//
// The chain has the time of one chunk after another, so it does no more than has to be between dS' and dS.
// Steps are tangent at s, so s.x = m_C, and with x = s' / rho all that it needs of dS' is there at once:
//
//     p = s'.dS'          c = s.dx = rho (s.dS' - m_C rho p)
//     dX = rho dS' - rho p s' - c s
//     dS = (gradient of the reads) + alpha rho dS' - (alpha rho p + c / rho) s' + alpha c s
//          + decode: K^T Y, Y = (W E_C) dX^T, encode: -V^T (gamma E_C (V dX))
//
// A chunk that is not complete left Delta' = x: dx = dS', c = s.dS', and dS has -c Delta' for -(c / rho) s'.
// Where x was zero (rho = 0), dX = 0 and dS = dS' + (gradient of the reads).
#pragma once

#include "lattice/columns_short.cuh"
#include "lattice/reverse.cuh"

namespace girih::kernels::lattice {

// What a vector has of dS', s' and s in dX and in dS; for the lane's two.
struct Mixture {
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
  Sums<8> dS;
  // S after the chunk, S, the gradient of the reads, and for decode K and the warp's of K^T.
  Factor after, s, reads, k;
  uint32_t own_k[4];
  float opens = 0.f;

 public:
  __device__ ShortChain(const LatticeReverse& p, const Ring& ring, const Carried& block, int warp)
      : p(p), ring(ring), of(block.of), head(block.head), warp(warp), first(16 * warp) {}

  __device__ void run() {
    const float within = begin_reverse<T>(dS, p, of, head, first, [&](int i, const uint32_t(&a)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) after.at[i][j] = a[j];
    });
    put_sum(ring.sums() + warp, within);
    const bool ends_within = ends_in_chunk(p.shape, of);
    const int chunks = static_cast<int>(of.chunks);
    Turn turn;
    if (chunks > 0) {
      wait(ring.full(), 0);
      fetch(0);
    }
#pragma unroll 1
    for (int left = chunks; left > 0; --left) {
      Turn next = turn;
      next.next(Ring::kStages);
      step(turn.place, left < chunks || !ends_within, left == 1 && of.begun > 0, left > 1, next);
      turn = next;
    }
    put_sum(ring.sums() + S::kWarps + warp, opens);
    end_reverse<S::kWarps>(p, dS, of, head, first, ring.sums());
  }

 private:
  __device__ bool decode() const { return p.shape.objective == LatticeObjective::decode; }

  // A chunk's own, of what is there before the gradient comes to it.
  __device__ void fetch(int stage) {
#pragma unroll
    for (int i = 0; i < 4; ++i) load_block(s.at[i], ring.memory(stage), first, 16 * i);
#pragma unroll
    for (int i = 0; i < 4; ++i) load_block(reads.at[i], ring.gradient(stage), first, 16 * i);
    if (!decode()) return;
    const auto keys = ring.tokens(stage, Ring::k);
#pragma unroll
    for (int i = 0; i < 4; ++i) load_block(k.at[i], keys, 0, 16 * i);
    load_block_transposed(own_k, keys, first, 0);
  }

  // The lane's part of its rows' products.
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

  __device__ void step(int stage, bool complete, bool resumed, bool more, const Turn& next) {
    auto& numbers = ring.numbers(stage);
    const int row = first + lane_row();
    const float alpha[2] = {numbers.alpha[row], numbers.alpha[row + 8]},
                rho[2] = {numbers.rho[row], numbers.rho[row + 8]}, kept = numbers.kept;
    const float2 weights = {numbers.weights[lane_row()], numbers.weights[lane_row() + 8]};

    float along[2], own[2], c[2];
    dots(along, dS, after);
    dots(own, dS, s);
#pragma unroll
    for (int j = 0; j < 2; ++j) along[j] = sum_over_row(along[j]), own[j] = sum_over_row(own[j]);
    Mixture dx, to;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float length = complete && rho[j] > 0.f ? reciprocal(rho[j]) : 0.f;
      along[j] = complete ? rho[j] * along[j] : 0.f;
      c[j] = rho[j] * fmaf(-kept, along[j], own[j]);
      dx.of_d[j] = rho[j], dx.of_after[j] = -along[j], dx.of_s[j] = -c[j];
      to.of_d[j] = rho[j] > 0.f ? alpha[j] * rho[j] : 1.f;
      to.of_after[j] = -fmaf(alpha[j], along[j], length * c[j]), to.of_s[j] = alpha[j] * c[j];
    }
    WithStep with;
    if (resumed) begin_resumed(with, dx, to, numbers, alpha, rho, c, complete);

    Factor dX;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int j = i % 2;
      const float2 x = unpaired<T>(after.at[i / 4][i % 4]), y = unpaired<T>(s.at[i / 4][i % 4]);
      const float* const d = &dS.at[i / 2][2 * j];
      const float low = fmaf(dx.of_s[j], y.x, fmaf(dx.of_after[j], x.x, dx.of_d[j] * d[0])),
                  high = fmaf(dx.of_s[j], y.y, fmaf(dx.of_after[j], x.y, dx.of_d[j] * d[1]));
      dX.at[i / 4][i % 4] = pair_of<T>(bounded<T>(low), bounded<T>(high));
    }
    __syncwarp();
    store_blocks(ring.gradient(stage), first, 0, dX);
    if (p.g.data != nullptr && (lane() & 3) == 0) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const bool steps =
            complete && rho[j] > 0.f && fmaf(kept, kept, with.square[j]) * rho[j] * rho[j] < 0.5f;
        numbers.cancels[row + 8 * j] = fmaf(kept, c[j], with.ahead[j]);
        numbers.steps[row + 8 * j] = steps ? 1.f : 0.f;
      }
    }
    if (decode()) barrier_wait(1, S::kThreads);  // dX is there

#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int j = i % 2;
      const float2 x = unpaired<T>(after.at[i / 4][i % 4]), y = unpaired<T>(s.at[i / 4][i % 4]),
                   r = unpaired<T>(reads.at[i / 4][i % 4]);
      float* const d = &dS.at[i / 2][2 * j];
      d[0] = fmaf(to.of_s[j], y.x, fmaf(to.of_after[j], x.x, fmaf(to.of_d[j], d[0], r.x)));
      d[1] = fmaf(to.of_s[j], y.y, fmaf(to.of_after[j], x.y, fmaf(to.of_d[j], d[1], r.y)));
    }
    if (!complete || resumed) end_special(complete, resumed, numbers.open, c);

    if (decode()) {
      put_y(stage, weights);
    } else if (p.shape.objective == LatticeObjective::encode) {
      add_values(stage, dX);
    }
    arrive_once(ring.done() + stage);
    if (more) wait(ring.full() + next.place, next.parity);
    if (decode()) {
      barrier_wait(1, S::kThreads);  // Y is there
      add_product<T>(dS, own_k, ring.exchange(), 0);
    }
    after = s;
    if (more) fetch(next.place);
  }

  // Y = (W E_C) dX^T, 16 columns a warp.
  __device__ void put_y(int stage, float2 weights) const {
    Sums<2> y, half;
    fill(y, 0.f);
    fill(half, 0.f);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      add_product<T>(i % 2 ? half : y, k.at[i], ring.gradient(stage), 16 * i, 16 * warp);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) y.at[n][i] += half.at[n][i];
    }
    scale_rows(y, weights);
    bound<T>(y);
    uint32_t x[4];
    pack<T>(x, y);
    store_block(ring.exchange(), 0, 16 * warp, x);
  }

  // -V^T (gamma E_C (V dX)), the warp's vectors
  __device__ void add_values(int stage, const Factor& dX) {
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

  // dx in the place of dS', for what a resumed chunk's Delta has of it.
  __device__ void begin_resumed(WithStep& with, Mixture& dx, Mixture& to, const typename Ring::Numbers& numbers,
                                const float (&alpha)[2], const float (&rho)[2], float (&c)[2], bool complete) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int j = i % 2;
      const float2 x = unpaired<T>(after.at[i / 4][i % 4]);
      float* const d = &dS.at[i / 2][2 * j];
      if (rho[j] > 0.f) {
        d[0] = fmaf(dx.of_after[j], x.x, rho[j] * d[0]), d[1] = fmaf(dx.of_after[j], x.y, rho[j] * d[1]);
      }
    }
    dots(c, dS, s);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const bool moved = rho[j] > 0.f;
      const float all = sum_over_row(c[j]);
      c[j] = moved ? all : 0.f;
      dx.of_d[j] = moved ? 1.f : 0.f, dx.of_after[j] = 0.f, dx.of_s[j] = -c[j];
      to.of_d[j] = moved ? alpha[j] : 1.f, to.of_s[j] = alpha[j] * c[j];
      to.of_after[j] = complete && moved ? -c[j] * reciprocal(rho[j]) : 0.f;
    }
    if (complete && numbers.sum > kLeastKept && (lane() & 3) == 0) opens = numbers.kept * (c[0] + c[1]);
    with = through_step(p, dS, of.sequence.index, head, first, numbers.open, rho);
  }

  // What dS has of Delta' where a chunk is not complete, and of Delta where it is resumed.
  __device__ void end_special(bool complete, bool resumed, float open, const float (&c)[2]) {
    const int64_t sequence = of.sequence.index;
    if (!complete) {
      for_elements(dS, p.last_step, sequence, head, p.shape, first,
                   [&](float& d, const float& x, int j) { d = fmaf(-c[j], x, d); });
      if (p.dlast.data != nullptr) {
        for_elements(dS, p.dlast, sequence, head, p.shape, first,
                     [](float& d, const float& x, int) { d += x; });
      }
    }
    if (resumed) {
      for_elements(dS, p.start.step, sequence, head, p.shape, first,
                   [&](float& d, const float& step, int j) { d = fmaf(open * c[j], step, d); });
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(ShortRing<T>::kThreads, 1)
    reverse_short_kernel(const __grid_constant__ ShortReverse p) {
  using Ring = ShortRing<T>;
  constexpr int kChain = Ring::S::kWarps;
  extern __shared__ __align__(128) unsigned char shared[];
  const Ring ring{shared};
  const Carried block = carried(p.reverse.shape);
  const int warp = warp_index();
  ring.start();
  if (warp < kChain) {
    ShortChain<T>(p.reverse, ring, block, warp).run();
  } else if (warp < kChain + Ring::kLoaders) {
    ring.load(p, block.of, block.head, warp - kChain);
    wait_copies<0>();
  } else {
    ShortColumns<T>(p, ring).run(block.of, block.head, warp - kChain - Ring::kLoaders);
  }
}

// Whether chunks, memories and the card are such.
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
    return launch_scan<reverse_short_kernel<T>>(ShortReverse{p, columns}, Ring::kThreads, Ring::kBytes,
                                                p.shape, stream);
  }
  const cudaError_t error = by_size(p.shape, [&](auto tokens, auto D, auto M) {
    using S = Sizes<T, tokens(), D(), M()>;
    return launch_scan<reverse_kernel<S>>(p, ReverseRing<S>::kThreads, ReverseSpace<S>::kBytes, p.shape, stream);
  });
  return error == cudaSuccess ? columns_of<T>(columns, stream) : error;
}

}  // namespace girih::kernels::lattice
