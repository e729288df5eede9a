// Continues read_backward.cuh: the gradients of H and S from da, eta and dW, for a slab of 64 of D at a time.
//
//     R = tril(eta W^T) E
//     dH = P^T dO + (R + tril(R, -1)^T) H + e^{L} eta Delta^T + da S^T
//     dS = dO^T (q~ (m - sigma)) + H^T da, decode: + dH^T K
//     decode       dk = dH S - gamma dW,  dv = -dH
//     else         dk = gamma dW,         dv = dH
//     dDelta = dO^T (q~ e^{L}) + H^T (e^{L} eta) + 2 Delta sum_t e^{2 L_t} nu_t
#pragma once

#include "lattice/read_backward.cuh"
#include "lattice/read_backward_memory_short.cuh"

namespace girih::kernels::lattice {

template <class S>
struct ReadBackwardMemory {
  using T = typename S::T;
  // A warp has 16 rows of dH by kWide of a slab.
  static constexpr int kWide = kSlab * S::kBlocks / S::kWarps < 16 ? 16 : kSlab * S::kBlocks / S::kWarps;
  using DhBlock = Accumulator<kWide / 8>;

  const ReadBackward<S>& reads;
  const IntraChunk<S>& intra_chunk;

  __device__ explicit ReadBackwardMemory(const ReadBackward<S>& reads)
      : reads(reads), intra_chunk(reads.intra_chunk) {}

  __device__ int row() const { return intra_chunk.warp % S::kBlocks * 16; }
  __device__ int col() const { return intra_chunk.warp / S::kBlocks * kWide; }
  __device__ bool has_block() const { return col() < kSlab; }
  __device__ bool decode() const { return intra_chunk.objective == LatticeObjective::decode; }

  // Recomputes q~ and the scores of a query head. With several query heads the tiles hold only one at a time.
  __device__ void recompute_query(int member) const {
    reads.next_query(member);
    typename IntraChunk<S>::Carries carries;
#pragma unroll 1
    for (int first = opaque(0); first < S::R; first += 16) {
      typename IntraChunk<S>::TokenBlock token_block;
      Accumulator<2> sigma, y;
      intra_chunk.compute_token_block(token_block, first);
      intra_chunk.compute_lengths_of_reads(sigma, y, token_block, carries, first);
      scale_queries(intra_chunk, reads.q, reads.along, y, sigma, first);
    }
    __syncthreads();
    compute_decayed_scores(intra_chunk, reads.scores, reads.q, intra_chunk.w, 0);
    __syncthreads();
  }

  // sums += x^T y for the vectors of the warp.
  template <int N, class X, class Y>
  __device__ void add_tokens(Accumulator<N>& sums, const X& x, const Y& y, int col,
                             const float* weights = nullptr) const {
#pragma unroll 1
    for (int first = 0; first < S::R; first += 16) {
      uint32_t a[4];
      if (weights == nullptr) {
        load_block_transposed(a, x, intra_chunk.first_vector(), first);
      } else {
        load_scaled_transposed<T>(a, x, intra_chunk.first_vector(), first, weights + first);
      }
      add_product<T>(sums, a, y, first, col);
    }
  }

  // Loads a 16 x 16 block of R + tril(R, -1)^T.
  __device__ void load_symmetric(uint32_t (&a)[4], int j) const {
    if (j < row()) {
      load_block(a, reads.pairs, row(), j);
    } else {
      load_block_transposed(a, reads.pairs, row(), j);
    }
    if (j != row()) return;
    uint32_t lower[4];
    load_block(lower, reads.pairs, j, j);
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
  __device__ void add_reads(DhBlock& dH, int slab) const {
    if (!has_block()) return;
#pragma unroll 1
    for (int t = row(); t < S::R; t += 16) {
      uint32_t a[4];
      load_block_transposed(a, reads.scores, row(), t);
      add_product<T>(dH, a, reads.dout, t, slab + col());
    }
  }

  // Adds the other terms of dH, stores dv and, for decode, the tile of dH.
  __device__ void finish_dh(DhBlock& dH, int slab) const {
    if (!has_block()) return;
    const int first = slab + col();
    uint32_t a[4];
#pragma unroll 1
    for (int j = 0; j < S::R; j += 16) {
      load_symmetric(a, j);
      add_product<T>(dH, a, intra_chunk.h, j, first);
    }
#pragma unroll 2
    for (int m = 0; m < S::M; m += 16) {
      load_block(a, reads.da, row(), m);
      add_product<T>(dH, a, intra_chunk.memory, m, first);
    }
    if (intra_chunk.resumed) {
      DhBlock more;
      fill(more, 0.f);
#pragma unroll 1
      for (int m = 0; m < S::M; m += 16) {
        load_block(a, reads.eta, row(), m);
        add_product<T>(more, a, intra_chunk.step, m, first);
      }
      const int t = row() + lane_row();
      const float2 by = {intra_chunk.kFp16Scale * intra_chunk.tokens->call_decay[t],
                         intra_chunk.kFp16Scale * intra_chunk.tokens->call_decay[t + 8]};
#pragma unroll
      for (int n = 0; n < kWide / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) dH.at[n][i] = fmaf(i < 2 ? by.x : by.y, more.at[n][i], dH.at[n][i]);
      }
    }
    if (decode()) {
      AFragment<kWide / 16> rounded;
      clamp_factor<T>(dH);
      round_to_a_fragment<T>(rounded, dH);
      store_blocks(reads.dh, row(), col(), rounded);
      scale_rows(dH, {-1.f, -1.f});
    }
    const auto& dv = reads.p.dv;
    store_rows_global<T>(
        row_of<T>(dv, reads.coord.batch(), reads.coord.chunk.start + row(), reads.coord.head) + first,
        dv.stride[1], reads.coord.chunk.length - row(), reads.p.shape.D - first, dH);
  }

  // Stores dDelta; member 0 overwrites, the others add. `square` is sum_t e^{2 L_t} nu_t of the lane's rows.
  __device__ void store_dstep(int member, int slab, const float (&square)[2]) const {
    const ChunkCoord& coord = reads.coord;
    const LatticeShape& shape = reads.p.shape;
    const InputTensor<4>& step = reads.p.start.step;
    const OutputTensor<4>& dstep = reads.p.dstep;
    const float* const from =
        static_cast<const float*>(step.data) + offset_of(step, coord.sequence(), coord.head);
    float* const to = static_cast<float*>(dstep.data) + offset_of(dstep, coord.sequence(), coord.head);
#pragma unroll 1
    for (int col = opaque(slab); col < slab + kSlab; col += 16) {
      Accumulator<2> sums;
      fill(sums, 0.f);
      add_tokens(sums, reads.q, reads.dout, col, intra_chunk.tokens->call_decay);
      if (member == 0) add_tokens(sums, reads.eta, intra_chunk.h, col, intra_chunk.tokens->call_decay);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int m = intra_chunk.first_vector() + lane_row() + (i >> 1) * 8,
                    d = col + 8 * n + lane_col() + (i & 1);
          if (m >= shape.M || d >= shape.D) continue;
          float& place = to[d * dstep.stride[2] + m * dstep.stride[3]];
          const float before =
              member == 0 ? 2.f * square[i >> 1] * from[d * step.stride[2] + m * step.stride[3]] : place;
          place = fmaf(intra_chunk.kFp16Scale, sums.at[n][i], before);
        }
      }
    }
  }

  // dW is gamma dW, or -gamma dW for decode.
  __device__ void run(Accumulator<2> (&dW)[S::kBlocks], const float (&square)[2]) const {
    const LatticeShape& shape = reads.p.shape;
    const ChunkCoord& coord = reads.coord;
    compute_decayed_scores(intra_chunk, reads.pairs, reads.eta, intra_chunk.w, 0);
    __syncthreads();
#pragma unroll 1
    for (int slab = 0; slab < S::D; slab += kSlab) {
      Accumulator<8> dS;
      DhBlock dH;
      fill(dS, 0.f);
      fill(dH, 0.f);
#pragma unroll 1
      for (int member = 0; member < reads.group(); ++member) {
        if (reads.group() > 1) recompute_query(member);
        add_reads(dH, slab);
        add_tokens(dS, reads.along, reads.dout, slab);
        if (intra_chunk.resumed) store_dstep(member, slab, square);
      }
      add_tokens(dS, reads.da, intra_chunk.h, slab);
      finish_dh(dH, slab);
      if (decode()) {
        __syncthreads();
        add_tokens(dS, intra_chunk.k, reads.dh, 0);
        // (dH S)^T
#pragma unroll 1
        for (int d = 0; d < kSlab; d += 16) {
          uint32_t a[4];
          load_block(a, intra_chunk.memory, intra_chunk.first_vector(), slab + d);
#pragma unroll
          for (int b = 0; b < S::kBlocks; ++b) add_product_transposed<T>(dW[b], a, reads.dh, 16 * b, d);
        }
      }
      T* const to =
          static_cast<T*>(reads.p.gradients) +
          ((coord.number * shape.heads + coord.head) * shape.M + intra_chunk.first_vector()) * shape.D;
      clamp_factor<T>(dS);
      store_rows_global<T>(to + slab, shape.D, shape.M - intra_chunk.first_vector(), shape.D - slab, dS);
      if (slab + kSlab < S::D) __syncthreads();
    }

    const auto& dk = reads.p.dk;
    T* const to = row_of<T>(dk, coord.batch(), coord.chunk.start, coord.head) + intra_chunk.first_vector();
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) {
      uint32_t x[4];
      pack<T>(x, dW[b]);
      transpose_block(x);
      store_block_global(to + 16 * b * dk.stride[1], dk.stride[1], coord.chunk.length - 16 * b,
                         shape.M - intra_chunk.first_vector(), x);
    }
  }
};

// Resident blocks of a multiprocessor, for kernels that registers limit.
template <class S>
constexpr int resident_blocks() {
  return S::R > 16 ? 1 : (S::kPlain ? 512 : 256) / S::kThreads;
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, resident_blocks<S>())
    read_backward_kernel(const __grid_constant__ LatticeReadBackward p) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  const ChunkCoord coord = chunk_coord(p.shape);
  if (coord.chunk.length == 0) return;
  ReadBackward<S> reads(p, coord, shared);
  reads.start();
  typename ReadBackward<S>::TokenAccumulators accumulators;
  reads.read(accumulators);
  reads.finish_reads(accumulators);
  Carry before;
  reads.run_backward_tokens(accumulators, before);
  reads.store_table();  // also the barrier after da and eta
  // z at the first token is sum_t e^{2 (L_t - L_0)} nu_t.
  const float call_decay = reads.intra_chunk.tokens->call_decay[0];
  const float square[2] = {before.at[0] * call_decay * call_decay, before.at[1] * call_decay * call_decay};
  ReadBackwardMemory<S>(reads).run(accumulators.dW, square);
}

template <typename T>
cudaError_t launch_read_backward(const LatticeReadBackward& p, cudaStream_t stream) {
  return dispatch_size(p.shape, [&](auto tokens, auto D, auto M) {
    using S = Sizes<T, tokens(), D(), M()>;
    using Plain = Sizes<T, tokens(), D(), M(), true>;
    if (is_plain_call(p.shape)) {
      if constexpr (std::is_same_v<Plain, typename ShortReadBackward<T>::S>) {
        using Short = ShortReadBackward<T>;
        return launch_chunks<read_backward_short_kernel<T>>(
            ShortReadBackwardArguments{p, ChunkDividers(p.shape)}, Short::kThreads, Short::kBytes, 0, stream);
      } else {
        return launch_chunks<read_backward_kernel<Plain>>(p, S::kThreads, ReadBackward<S>::kBytes, 0, stream);
      }
    }
    return launch_chunks<read_backward_kernel<S>>(p, S::kThreads, ReadBackward<S>::kBytes,
                                                  IntraChunk<S>::kResumedBytes, stream);
  });
}

}  // namespace girih::kernels::lattice
