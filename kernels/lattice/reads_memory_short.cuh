// Continues reads_short.cuh: the gradients of H and S from its sums, da and dW (equations in
// reads_memory.cuh).
#pragma once

#include "lattice/reads_short.cuh"

namespace girih::kernels::lattice {

template <typename T>
struct ShortReadsMemory {
  using Reads = ShortReads<T>;
  using S = typename Reads::S;
  using Block = typename Reads::Block;

  const Reads& at;

  __device__ void run(typename Reads::Gathered& sums, const typename Reads::Inner& inner) const {
    const LatticeReads& p = at.p;
    put(p.dq, at.q, p.shape.M);
    Operand<4> dH;
    make_dh(dH, sums, inner);
    put_dv(dH);
    Operand<4> douts, hs, dvs;  // B fragments
    load_right(douts, at.dout);
    load_right(hs, at.h);
    load_right(dvs, at.q);
#pragma unroll 1
    for (int first = 0; first < S::M; first += 16) end_vectors(dH, douts, hs, dvs, first);
    put(p.dk, at.k, p.shape.M);
    put(p.dv, at.q, p.shape.D);
    put_memory();
  }

  // dH = P^T dO + (R + tril(R, -1)^T) H + da S^T
  __device__ void make_dh(Operand<4>& to, typename Reads::Gathered& all,
                          const typename Reads::Inner& inner) const {
    Sums<8> dH;
    fill(dH, 0.f);
    Block x, y;
#pragma unroll 1
    for (int first = 0; first < S::M; first += 16) {
      Reads::get(x, at.da, first);
      transpose_block(x);
      add_product<T>(dH, x, at.memory, first);
    }
    score(x, all.reads, inner);
    transpose_block(x);
    add_product<T>(dH, x, at.dout, 0);
    score(x, all.pairs, inner);
    apply(all.pairs, 0, 0, [&](float r, int t, int j) { return j < t ? r : 0.f; });
    pack<T>(y, all.pairs);
    transpose_block(y);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] |= y[i];
    add_product<T>(dH, x, at.h, 0);
    bound<T>(dH);
    round_to<T>(to, dH);
  }
  __device__ static void score(Block& to, Sums<2>& x, const typename Reads::Inner& inner) {
    multiply(x, inner.decays);
    scale_columns(x, [&](int n) {
      return float2{Reads::kLift * inner.steps[n].x, Reads::kLift * inner.steps[n].y};
    });
    // E is zero above the diagonal, but a product may be -0, whose sign bit the bitwise or with the transpose
    // would keep.
    apply(x, 0, 0, [&](float score, int t, int j) { return j <= t ? score : 0.f; });
    bound<T>(x);
    pack<T>(to, x);
  }

  // decode: dv = -dH
  __device__ uint32_t sign() const { return at.is(LatticeObjective::decode) ? 0x80008000u : 0u; }
  __device__ void put_dv(const Operand<4>& dH) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Block x;
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = dH.at[i][j] ^ sign();
      store_block(at.q, 0, 16 * i, x);
    }
    __syncwarp();
  }

  // dk and dS of 16 vectors.
  __device__ void end_vectors(const Operand<4>& dH, const Operand<4>& douts, const Operand<4>& hs,
                              const Operand<4>& dvs, int first) const {
    Sums<8> dS;
    fill(dS, 0.f);
    Block x;
    Reads::get(x, at.along, first);
    add_product<T>(dS, x, douts);
    Reads::get(x, at.da, first);
    add_product<T>(dS, x, hs);
    Block to;
    Reads::get(to, at.dW, first);  // the second rounding is below, after more terms
    if (at.is(LatticeObjective::decode)) {
      load_block_transposed(x, at.k, first, 0);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] ^= sign();
      add_product<T>(dS, x, dvs);
      Sums<2> sums;
      unpack<T>(sums, to);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        load_block(x, at.memory, first, 16 * i);
        add_product_of_rows<T>(sums, x, dH.at[i]);
      }
      pack<T>(to, sums);
    }
    Operand<4> rounded;
    bound<T>(dS);
    round_to<T>(rounded, dS);
    __syncwarp();
    store_block_transposed(at.k, first, 0, to);
    store_blocks(at.memory, first, 0, rounded);
  }

  // Stores a tile to the chunk's rows in global memory.
  __device__ void put(const Out<4>& to, const typename S::Keys& tile, int cols) const {
    __syncwarp();
    store_rows<1>(tile, row_of<T>(to, at.part.batch(), at.part.chunk.start, at.part.head), to.stride[1],
                  at.part.chunk.length, cols, 0);
  }

  __device__ void put_memory() const {
    T* const to = static_cast<T*>(at.p.gradients) + at.place();
    if (at.is_whole()) {
      store_rows<1>(at.memory, to, S::D, S::M, S::D, 0);
    } else {
      store_rows<1>(at.memory, to, at.p.shape.D, at.p.shape.M, at.p.shape.D, 0);
    }
  }
};

// Parameters of the kernel.
struct ShortReadsCall : LatticeReads {
  PartFinder parts;
};

template <typename T>
__global__ void __launch_bounds__(32, 8) reads_short_kernel(const __grid_constant__ ShortReadsCall p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const Part part = chunk_part(p.shape, p.parts);
  if (part.chunk.length == 0) return;
  const ShortReads<T> reads(p, part, shared);
  typename ShortReads<T>::Inner inner;
  typename ShortReads<T>::Gathered sums;
  reads.run(sums, inner);
  ShortReadsMemory<T>{reads}.run(sums, inner);
}

}  // namespace girih::kernels::lattice
