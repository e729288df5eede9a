// Completes dk, dv, dgamma and dg with the terms of the memory after a chunk, from dX (reverse.cuh). One
// block for each chunk and head.
//
//     Y = (W E_C) dX^T          dW = E_C (H dX)          dgamma += sign c.dW
//     decode       dk += Y S - gamma dW,  dv -= Y
//     encode       dk += gamma dW,        dv += Y - gamma dW S^T
//     similarity   dk += gamma dW,        dv += Y
//     dl_t = at_floor_t - gamma_t dgamma_t          dg_t = sum of dl from t to the chunk's end
//
// Reads use unit vectors, and the memory after a complete chunk has unit vectors. So the terms of a decay
// that scales a whole row of X cancel. The remaining e^{L_t} occurs as W_t e^{-L_t}, which gives -W_t.dW_t =
// -gamma_t dgamma_t. The terms do not cancel where n is at its floor (ddecay_at_floor), nor at the end of an
// incomplete chunk.
//
// At the end of a chunk the cancelling sum of a vector is e^{L_C} Delta.dx + m_C s.dx + sum_t W_t dW_t = 0.
// If x consists mostly of steps, the last step dominates this sum, and the rounding of s' and dX exceeds the
// gradient of a decay near zero. In that case the computed sum is added to dl of the last token, which
// removes the rounding error of its term. If x consists mostly of s, s.dx would add more rounding error than
// it removes. Measured error of dg: with the sum 0.6%, 0.8% and 1% for gates of mean -1, -2.5 and -10,
// instead of 4%, 12% and 120%; with the sum added everywhere 1.3% instead of 0.5% at mean -0.05.
#pragma once

#include "lattice/intra_chunk.cuh"
#include "lattice/launch.h"

namespace girih::kernels::lattice {

template <class S>
struct DkvBlock {
  using T = typename S::T;
  static constexpr int kTable = (S::kWarps + 1) * S::R + S::kWarps;
  static constexpr int kBytes = 2 * S::Memory::kBytes + 3 * S::Keys::kBytes + 2 * S::Values::kBytes +
                                static_cast<int>(sizeof(ChunkTokens<S::R>)) + 4 * kTable;

  const LatticeDkv& p;
  const ChunkCoord& coord;
  IntraChunk<S> intra_chunk;
  typename S::Memory dX;
  typename S::Keys da;  // encode: -gamma dW
  typename S::Values y;
  float* table;  // c.dW for each warp, dl, and the cancelling sum for each warp

  __device__ DkvBlock(const LatticeDkv& p, const ChunkCoord& coord, unsigned char* shared)
      : p(p), coord(coord) {
    SharedAllocator layout(shared);
    layout(intra_chunk.memory)(dX)(intra_chunk.k)(intra_chunk.w)(da)(intra_chunk.h)(y)(intra_chunk.tokens, 1)(
        table, kTable);
  }

  __device__ bool is(LatticeObjective objective) const { return intra_chunk.objective == objective; }

  __device__ void start() {
    intra_chunk.load_inputs(p, coord);
    const LatticeShape& shape = p.shape;
    const int64_t place = (coord.number * shape.heads + coord.head) * shape.M * shape.D;
    load_by_block<S::kThreads>(dX, static_cast<const T*>(p.gradients) + place, shape.D, shape.M, shape.D);
    commit_copies();
    if (intra_chunk.warp == 0) store_tokens<T>(*intra_chunk.tokens, p, LatticeStart{}, coord);
    wait_copies<0>();
    __syncthreads();
    intra_chunk.make_h();
    if (is(LatticeObjective::decode)) __syncthreads();
    intra_chunk.make_w();
    __syncthreads();
  }

  __device__ float to_end(int t) const { return intra_chunk.tokens->decay(S::R - 1, t); }

  // dW, which becomes its term of dk. sums: W.dW of both vectors of the lane.
  __device__ void compute_dw(Accumulator<2>& dW, float (&sums)[2], int first) const {
    fill(dW, 0.f);
    add_tile_product_transposed<2>(dW, dX, intra_chunk.first_vector(), intra_chunk.h, first);
    const bool encode = is(LatticeObjective::encode);
    uint32_t x[4];
    Accumulator<2> c, a;
    load_block_transposed(x, intra_chunk.k, intra_chunk.first_vector(), first);
    unpack<T>(c, x);
    if (encode) intra_chunk.make_a(a, first);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int t = first + 8 * n + lane_col();
      const float2 step = *reinterpret_cast<const float2*>(&intra_chunk.tokens->step[t]);
      const float2 end = {to_end(t), to_end(t + 1)};
      float sum[2] = {0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float d = dW.at[n][i] * (i & 1 ? end.y : end.x);
        const float of_c = encode ? a.at[n][i] - c.at[n][i] : c.at[n][i];
        sum[i & 1] = fmaf(of_c, d, sum[i & 1]);
        dW.at[n][i] = d * (i & 1 ? step.y : step.x);
        sums[i >> 1] = fmaf(of_c, dW.at[n][i], sums[i >> 1]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum[i] = sum_over_col(sum[i]);
        if (lane_row() == 0) table[intra_chunk.warp * S::R + t + i] = sum[i];
      }
    }
    if (!encode) return;
    clamp_factor<T>(dW);
    pack<T>(x, dW);
    store_block_transposed(da, intra_chunk.first_vector(), first, x);
    for_each_register<2>([&](int n, int i) { dW.at[n][i] = -dW.at[n][i]; });
  }

  // Stores the cancelling sum over the warp's vectors that are mostly steps.
  __device__ void store_cancelling_sum(const float (&sums)[2]) const {
    if (p.dg.data == nullptr) return;
    const float* const cancelling_sums =
        p.cancelling_sums + (coord.number * p.shape.heads + coord.head) * 2 * p.shape.M;
    float total = 0.f;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int m = intra_chunk.first_vector() + lane_row() + 8 * j;
      if (m >= p.shape.M || cancelling_sums[p.shape.M + m] == 0.f) continue;
      total += sums[j] + ((lane() & 3) == 0 ? cancelling_sums[m] : 0.f);
    }
    total = sum_over_col(sum_over_row(total));
    if (lane() == 0) table[(S::kWarps + 1) * S::R + intra_chunk.warp] = total;
  }

  // Computes Y and stores dv.
  __device__ void compute_y() const {
    if (!intra_chunk.has_block()) return;
    constexpr int N = S::kWide / 8;
    const int row = intra_chunk.block_row(), col = intra_chunk.block_col();
    Accumulator<N> sums;
    fill(sums, 0.f);
    add_tile_product<2>(sums, intra_chunk.w, row, dX, col);
    const int t = row + lane_row();
    scale_rows(sums, {to_end(t) / intra_chunk.kFp16Scale, to_end(t + 8) / intra_chunk.kFp16Scale});
    if (is(LatticeObjective::decode)) {
      AFragment<S::kWide / 16> rounded;
      clamp_factor<T>(sums);
      round_to_a_fragment<T>(rounded, sums);
      store_blocks(y, row, col, rounded);
      scale_rows(sums, {-1.f, -1.f});
    } else if (is(LatticeObjective::encode)) {
      add_tile_product<2>(sums, da, row, intra_chunk.memory, col);
    }
    T* const to = row_of<T>(p.dv, coord.batch(), coord.chunk.start + row, coord.head) + col;
    const int rows = coord.chunk.length - row, cols = p.shape.D - col;
    add_rows<T>(sums, to, p.dv.stride[1], rows, cols);
    store_rows_global<T>(to, p.dv.stride[1], rows, cols, sums);
  }

  // Adds Y S and stores dk.
  __device__ void store_dk(Accumulator<2>& dk, int first) const {
    uint32_t x[4];
    if (is(LatticeObjective::decode)) {
      add_tile_product_transposed<2>(dk, intra_chunk.memory, intra_chunk.first_vector(), y, first);
    }
    T* const to =
        row_of<T>(p.dk, coord.batch(), coord.chunk.start + first, coord.head) + intra_chunk.first_vector();
    const int rows = coord.chunk.length - first, cols = p.shape.M - intra_chunk.first_vector();
    load_block_global(x, to, p.dk.stride[1], rows, cols);
    transpose_block(x);
    Accumulator<2> before;
    unpack<T>(before, x);
    add(dk, before);
    pack<T>(x, dk);
    transpose_block(x);
    store_block_global(to, p.dk.stride[1], rows, cols, x);
  }

  // Stores dgamma and dg; called by all threads.
  __device__ void store_gate_gradients() const {
    const int t = threadIdx.x, length = coord.chunk.length;
    float* const dl = table + S::kWarps * S::R;
    const float sign = sign_of(intra_chunk.objective);
    if (t < length) {
      float sum = 0.f;
      for (int w = 0; w < S::kWarps; ++w) sum += table[w * S::R + t];
      const int64_t token = coord.chunk.start + t;
      float& place =
          static_cast<float*>(p.dgamma.data)[offset_of(p.dgamma, coord.batch(), token, coord.head)];
      const float dgamma = fmaf(sign, sum, place);
      place = dgamma;
      if (p.dg.data != nullptr) {
        float d = load_element(p.ddecay_at_floor, coord.batch(), token, coord.head) -
                  sign * intra_chunk.tokens->step[t] * dgamma;
        for (int w = 0; t + 1 == length && w < S::kWarps; ++w) d += table[(S::kWarps + 1) * S::R + w];
        if (t + 1 == length && !coord.chunk.is_complete)
          d += load_element(p.dend_decay, coord.sequence(), coord.head);
        dl[t] = d;
      }
    }
    if (p.dg.data == nullptr) return;
    __syncthreads();
    if (t >= length) return;
    float sum = 0.f;
    for (int j = length - 1; j >= t; --j) sum += dl[j];
    store_element(p.dg, sum, coord.batch(), coord.chunk.start + t, coord.head);
  }
};

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) dkv_kernel(const __grid_constant__ LatticeDkv p) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  const ChunkCoord coord = chunk_coord(p.shape);
  if (coord.chunk.length == 0) return;
  DkvBlock<S> dkv(p, coord, shared);
  dkv.start();
  Accumulator<2> dk[S::kBlocks];
  float sums[2] = {0.f, 0.f};
#pragma unroll
  for (int b = 0; b < S::kBlocks; ++b) dkv.compute_dw(dk[b], sums, 16 * b);
  dkv.store_cancelling_sum(sums);
  if (dkv.is(LatticeObjective::encode)) __syncthreads();
  dkv.compute_y();
  __syncthreads();
#pragma unroll
  for (int b = 0; b < S::kBlocks; ++b) dkv.store_dk(dk[b], 16 * b);
  dkv.store_gate_gradients();
}

template <typename T>
cudaError_t launch_dkv(const LatticeDkv& p, cudaStream_t stream) {
  return dispatch_size(p.shape, [&](auto tokens, auto D, auto M) {
    using S = Sizes<T, tokens(), D(), M(), true>;
    return launch_chunks<dkv_kernel<S>>(p, S::kThreads, DkvBlock<S>::kBytes, 0, stream);
  });
}

}  // namespace girih::kernels::lattice
