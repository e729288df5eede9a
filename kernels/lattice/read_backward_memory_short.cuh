// Continues read_backward_short.cuh: the gradients of H and S from its sums, da and dW (equations in
// read_backward_memory.cuh).
#pragma once

#include "lattice/read_backward_short.cuh"

namespace girih::kernels::lattice {

template <typename T>
struct ShortReadBackwardMemory {
  using ReadBackward = ShortReadBackward<T>;
  using S = typename ReadBackward::S;
  using Block = typename ReadBackward::Block;

  const ReadBackward& reads;

  __device__ void run(typename ReadBackward::VectorSums& sums,
                      const typename ReadBackward::TokenTerms& token_terms) const {
    const LatticeReadBackward& p = reads.p;
    store_tile(p.dq, reads.q, p.shape.M);
    AFragment<4> dH;
    make_dh(dH, sums, token_terms);
    store_dv_tile(dH);
    BFragment<4> douts, hs, dvs;  // B fragments
    load_b_fragment(douts, reads.dout);
    load_b_fragment(hs, reads.h);
    load_b_fragment(dvs, reads.q);
#pragma unroll 1
    for (int first = 0; first < S::M; first += 16) finish_vectors(dH, douts, hs, dvs, first);
    store_tile(p.dk, reads.k, p.shape.M);
    store_tile(p.dv, reads.q, p.shape.D);
    store_memory();
  }

  // dH = P^T dO + (R + tril(R, -1)^T) H + da S^T
  __device__ void make_dh(AFragment<4>& to, typename ReadBackward::VectorSums& all,
                          const typename ReadBackward::TokenTerms& token_terms) const {
    Accumulator<8> dH;
    fill(dH, 0.f);
    Block x, y;
#pragma unroll 1
    for (int first = 0; first < S::M; first += 16) {
      ReadBackward::load_fragment(x, reads.da, first);
      transpose_block(x);
      add_product<T>(dH, x, reads.memory, first);
    }
    score(x, all.reads, token_terms);
    transpose_block(x);
    add_product<T>(dH, x, reads.dout, 0);
    score(x, all.pairs, token_terms);
    map_elements(all.pairs, 0, 0, [&](float r, int t, int j) { return j < t ? r : 0.f; });
    pack<T>(y, all.pairs);
    transpose_block(y);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] |= y[i];
    add_product<T>(dH, x, reads.h, 0);
    clamp_factor<T>(dH);
    round_to_a_fragment<T>(to, dH);
  }
  __device__ static void score(Block& to, Accumulator<2>& x,
                               const typename ReadBackward::TokenTerms& token_terms) {
    multiply(x, token_terms.decays);
    scale_columns(x, [&](int n) {
      return float2{ReadBackward::kFp16Scale * token_terms.steps[n].x,
                    ReadBackward::kFp16Scale * token_terms.steps[n].y};
    });
    // E is zero above the diagonal, but a product may be -0, whose sign bit the bitwise or with the transpose
    // would keep.
    map_elements(x, 0, 0, [&](float score, int t, int j) { return j <= t ? score : 0.f; });
    clamp_factor<T>(x);
    pack<T>(to, x);
  }

  // decode: dv = -dH
  __device__ uint32_t sign() const { return reads.is(LatticeObjective::decode) ? 0x80008000u : 0u; }
  __device__ void store_dv_tile(const AFragment<4>& dH) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Block x;
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = dH.at[i][j] ^ sign();
      store_block(reads.q, 0, 16 * i, x);
    }
    __syncwarp();
  }

  // dk and dS of 16 vectors.
  __device__ void finish_vectors(const AFragment<4>& dH, const BFragment<4>& douts, const BFragment<4>& hs,
                                 const BFragment<4>& dvs, int first) const {
    Accumulator<8> dS;
    fill(dS, 0.f);
    Block x;
    ReadBackward::load_fragment(x, reads.along, first);
    add_product<T>(dS, x, douts);
    ReadBackward::load_fragment(x, reads.da, first);
    add_product<T>(dS, x, hs);
    Block to;
    ReadBackward::load_fragment(to, reads.dW, first);  // the second rounding is below, after more terms
    if (reads.is(LatticeObjective::decode)) {
      load_block_transposed(x, reads.k, first, 0);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] ^= sign();
      add_product<T>(dS, x, dvs);
      Accumulator<2> sums;
      unpack<T>(sums, to);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        load_block(x, reads.memory, first, 16 * i);
        add_product_of_rows<T>(sums, x, dH.at[i]);
      }
      pack<T>(to, sums);
    }
    AFragment<4> rounded;
    clamp_factor<T>(dS);
    round_to_a_fragment<T>(rounded, dS);
    __syncwarp();
    store_block_transposed(reads.k, first, 0, to);
    store_blocks(reads.memory, first, 0, rounded);
  }

  // Stores a tile to the chunk's rows in global memory.
  __device__ void store_tile(const OutputTensor<4>& to, const typename S::Keys& tile, int cols) const {
    __syncwarp();
    store_rows<1>(tile, row_of<T>(to, reads.coord.batch(), reads.coord.chunk.start, reads.coord.head),
                  to.stride[1], reads.coord.chunk.length, cols, 0);
  }

  __device__ void store_memory() const {
    T* const to = static_cast<T*>(reads.p.gradients) + reads.memory_offset_of_chunk();
    if (reads.is_whole()) {
      store_rows<1>(reads.memory, to, S::D, S::M, S::D, 0);
    } else {
      store_rows<1>(reads.memory, to, reads.p.shape.D, reads.p.shape.M, reads.p.shape.D, 0);
    }
  }
};

// Parameters of the kernel.
struct ShortReadBackwardArguments : LatticeReadBackward {
  ChunkDividers dividers;
};

template <typename T>
__global__ void __launch_bounds__(32, 8)
    read_backward_short_kernel(const __grid_constant__ ShortReadBackwardArguments p) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  const ChunkCoord coord = chunk_coord(p.shape, p.dividers);
  if (coord.chunk.length == 0) return;
  const ShortReadBackward<T> reads(p, coord, shared);
  typename ShortReadBackward<T>::TokenTerms token_terms;
  typename ShortReadBackward<T>::VectorSums sums;
  reads.run(sums, token_terms);
  ShortReadBackwardMemory<T>{reads}.run(sums, token_terms);
}

}  // namespace girih::kernels::lattice
