// Continues reads.cuh: the gradients of H and S from da, eta and dW, for a slab of 64 of D at a time.
//
//     R = tril(eta W^T) E
//     dH = P^T dO + (R + tril(R, -1)^T) H + e^{L} eta Delta^T + da S^T
//     dS = dO^T (q~ (m - sigma)) + H^T da, decode: + dH^T K
//     decode       dk = dH S - gamma dW,  dv = -dH
//     else         dk = gamma dW,         dv = dH
//     dDelta = dO^T (q~ e^{L}) + H^T (e^{L} eta) + 2 Delta sum_t e^{2 L_t} nu_t
#pragma once

#include "lattice/reads.cuh"
#include "lattice/reads_memory_short.cuh"

namespace girih::kernels::lattice {

template <class S>
struct ReadsMemory {
  using T = typename S::T;
  // A warp has 16 rows of dH by kWide of a slab.
  static constexpr int kWide = kSlab * S::kBlocks / S::kWarps < 16 ? 16 : kSlab * S::kBlocks / S::kWarps;
  using Share = Sums<kWide / 8>;

  const Reads<S>& at;
  const Within<S>& within;

  __device__ explicit ReadsMemory(const Reads<S>& at) : at(at), within(at.within) {}

  __device__ int row() const { return within.warp % S::kBlocks * 16; }
  __device__ int col() const { return within.warp / S::kBlocks * kWide; }
  __device__ bool has_share() const { return col() < kSlab; }
  __device__ bool decode() const { return within.objective == LatticeObjective::decode; }

  // Recomputes q~ and the scores of a query head. With several query heads the tiles hold only one at a time.
  __device__ void remake(int member) const {
    at.next_query(member);
    typename Within<S>::Carries carries;
#pragma unroll 1
    for (int first = opaque(0); first < S::R; first += 16) {
      typename Within<S>::Columns columns;
      Sums<2> sigma, y;
      within.make_columns(columns, first);
      within.make_read(sigma, y, columns, carries, first);
      make_queries(within, at.q, at.along, y, sigma, first);
    }
    __syncthreads();
    decayed_scores(within, at.scores, at.q, within.w, 0);
    __syncthreads();
  }

  // sums += x^T y for the vectors of the warp.
  template <int N, class X, class Y>
  __device__ void add_tokens(Sums<N>& sums, const X& x, const Y& y, int col,
                             const float* weights = nullptr) const {
#pragma unroll 1
    for (int first = 0; first < S::R; first += 16) {
      uint32_t a[4];
      if (weights == nullptr) {
        load_block_transposed(a, x, within.vectors(), first);
      } else {
        load_weighed_transposed<T>(a, x, within.vectors(), first, weights + first);
      }
      add_product<T>(sums, a, y, first, col);
    }
  }

  // Loads a 16 x 16 block of R + tril(R, -1)^T.
  __device__ void load_symmetric(uint32_t (&a)[4], int j) const {
    if (j < row()) {
      load_block(a, at.pairs, row(), j);
    } else {
      load_block_transposed(a, at.pairs, row(), j);
    }
    if (j != row()) return;
    uint32_t lower[4];
    load_block(lower, at.pairs, j, j);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = lane_row() + i % 2 * 8, c = lane_col() + i / 2 * 8;
      if (c + 1 <= r) {
        a[i] = lower[i];
      } else if (c <= r) {
        a[i] = (a[i] & 0xffff0000u) | (lower[i] & 0xffffu);
      }
    }
  }

  // P^T dO
  __device__ void add_reads(Share& dH, int slab) const {
    if (!has_share()) return;
#pragma unroll 1
    for (int t = row(); t < S::R; t += 16) {
      uint32_t a[4];
      load_block_transposed(a, at.scores, row(), t);
      add_product<T>(dH, a, at.dout, t, slab + col());
    }
  }

  // Adds the other terms of dH, stores dv and, for decode, the tile of dH.
  __device__ void end_dh(Share& dH, int slab) const {
    if (!has_share()) return;
    const int first = slab + col();
    uint32_t a[4];
#pragma unroll 1
    for (int j = 0; j < S::R; j += 16) {
      load_symmetric(a, j);
      add_product<T>(dH, a, within.h, j, first);
    }
#pragma unroll 2
    for (int m = 0; m < S::M; m += 16) {
      load_block(a, at.da, row(), m);
      add_product<T>(dH, a, within.memory, m, first);
    }
    if (within.resumed) {
      Share more;
      fill(more, 0.f);
#pragma unroll 1
      for (int m = 0; m < S::M; m += 16) {
        load_block(a, at.eta, row(), m);
        add_product<T>(more, a, within.step, m, first);
      }
      const int t = row() + lane_row();
      const float2 by = {within.kLift * within.tokens->open[t], within.kLift * within.tokens->open[t + 8]};
#pragma unroll
      for (int n = 0; n < kWide / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) dH.at[n][i] = fmaf(i < 2 ? by.x : by.y, more.at[n][i], dH.at[n][i]);
      }
    }
    if (decode()) {
      Operand<kWide / 16> rounded;
      bound<T>(dH);
      round_to<T>(rounded, dH);
      store_blocks(at.dh, row(), col(), rounded);
      scale_rows(dH, {-1.f, -1.f});
    }
    const auto& dv = at.p.dv;
    put_rows<T>(row_of<T>(dv, at.part.batch(), at.part.chunk.start + row(), at.part.head) + first,
                dv.stride[1], at.part.chunk.length - row(), at.p.shape.D - first, dH);
  }

  // Stores dDelta; member 0 overwrites, the others add. `square` is sum_t e^{2 L_t} nu_t of the lane's rows.
  __device__ void put_dstep(int member, int slab, const float (&square)[2]) const {
    const Part& part = at.part;
    const LatticeShape& shape = at.p.shape;
    const In<4>& step = at.p.start.step;
    const Out<4>& dstep = at.p.dstep;
    const float* const from =
        static_cast<const float*>(step.data) + offset_of(step, part.sequence(), part.head);
    float* const to = static_cast<float*>(dstep.data) + offset_of(dstep, part.sequence(), part.head);
#pragma unroll 1
    for (int col = opaque(slab); col < slab + kSlab; col += 16) {
      Sums<2> sums;
      fill(sums, 0.f);
      add_tokens(sums, at.q, at.dout, col, within.tokens->open);
      if (member == 0) add_tokens(sums, at.eta, within.h, col, within.tokens->open);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int m = within.vectors() + lane_row() + (i >> 1) * 8, d = col + 8 * n + lane_col() + (i & 1);
          if (m >= shape.M || d >= shape.D) continue;
          float& place = to[d * dstep.stride[2] + m * dstep.stride[3]];
          const float before =
              member == 0 ? 2.f * square[i >> 1] * from[d * step.stride[2] + m * step.stride[3]] : place;
          place = fmaf(within.kLift, sums.at[n][i], before);
        }
      }
    }
  }

  // dW is gamma dW, or -gamma dW for decode.
  __device__ void run(Sums<2> (&dW)[S::kBlocks], const float (&square)[2]) const {
    const LatticeShape& shape = at.p.shape;
    const Part& part = at.part;
    decayed_scores(within, at.pairs, at.eta, within.w, 0);
    __syncthreads();
#pragma unroll 1
    for (int slab = 0; slab < S::D; slab += kSlab) {
      Sums<8> dS;
      Share dH;
      fill(dS, 0.f);
      fill(dH, 0.f);
#pragma unroll 1
      for (int member = 0; member < at.group(); ++member) {
        if (at.group() > 1) remake(member);
        add_reads(dH, slab);
        add_tokens(dS, at.along, at.dout, slab);
        if (within.resumed) put_dstep(member, slab, square);
      }
      add_tokens(dS, at.da, within.h, slab);
      end_dh(dH, slab);
      if (decode()) {
        __syncthreads();
        add_tokens(dS, within.k, at.dh, 0);
        // (dH S)^T
#pragma unroll 1
        for (int d = 0; d < kSlab; d += 16) {
          uint32_t a[4];
          load_block(a, within.memory, within.vectors(), slab + d);
#pragma unroll
          for (int b = 0; b < S::kBlocks; ++b) add_product_transposed<T>(dW[b], a, at.dh, 16 * b, d);
        }
      }
      T* const to = static_cast<T*>(at.p.gradients) +
                    ((part.number * shape.heads + part.head) * shape.M + within.vectors()) * shape.D;
      bound<T>(dS);
      put_rows<T>(to + slab, shape.D, shape.M - within.vectors(), shape.D - slab, dS);
      if (slab + kSlab < S::D) __syncthreads();
    }

    const auto& dk = at.p.dk;
    T* const to = row_of<T>(dk, part.batch(), part.chunk.start, part.head) + within.vectors();
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) {
      uint32_t x[4];
      pack<T>(x, dW[b]);
      transpose_block(x);
      put_block(to + 16 * b * dk.stride[1], dk.stride[1], part.chunk.length - 16 * b,
                shape.M - within.vectors(), x);
    }
  }
};

// Resident blocks of a multiprocessor, for kernels that registers limit.
template <class S>
constexpr int blocks_at_once() {
  return S::R > 16 ? 1 : (S::kPlain ? 512 : 256) / S::kThreads;
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, blocks_at_once<S>())
    reads_kernel(const __grid_constant__ LatticeReads p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const Part part = chunk_part(p.shape);
  if (part.chunk.length == 0) return;
  Reads<S> reads(p, part, shared);
  reads.start();
  typename Reads<S>::Kept kept;
  reads.read(kept);
  reads.end_reads(kept);
  Carry before;
  reads.go_back(kept, before);
  reads.put_table();  // also the barrier after da and eta
  // z at the first token is sum_t e^{2 (L_t - L_0)} nu_t.
  const float open = reads.within.tokens->open[0];
  const float square[2] = {before.at[0] * open * open, before.at[1] * open * open};
  ReadsMemory<S>(reads).run(kept.dW, square);
}

template <typename T>
cudaError_t reads_of(const LatticeReads& p, cudaStream_t stream) {
  return by_size(p.shape, [&](auto tokens, auto D, auto M) {
    using S = Sizes<T, tokens(), D(), M()>;
    using Plain = Sizes<T, tokens(), D(), M(), true>;
    if (is_plain(p.shape)) {
      if constexpr (std::is_same_v<Plain, typename ShortReads<T>::S>) {
        using Short = ShortReads<T>;
        return launch_chunks<reads_short_kernel<T>>(ShortReadsCall{p, PartFinder(p.shape)}, Short::kThreads,
                                                    Short::kBytes, 0, stream);
      } else {
        return launch_chunks<reads_kernel<Plain>>(p, S::kThreads, Reads<S>::kBytes, 0, stream);
      }
    }
    return launch_chunks<reads_kernel<S>>(p, S::kThreads, Reads<S>::kBytes, Within<S>::kResumedBytes, stream);
  });
}

}  // namespace girih::kernels::lattice
