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
// -gamma_t dgamma_t. The terms do not cancel where n is at its floor (at_floor), nor at the end of an
// incomplete chunk.
//
// At the end of a chunk the cancelling sum of a vector is e^{L_C} Delta.dx + m_C s.dx + sum_t W_t dW_t = 0.
// If x consists mostly of steps, the last step dominates this sum, and the rounding of s' and dX exceeds the
// gradient of a decay near zero. In that case the computed sum is added to dl of the last token, which
// removes the rounding error of its term. If x consists mostly of s, s.dx would add more rounding error than
// it removes. Measured error of dg: with the sum 0.6%, 0.8% and 1% for gates of mean -1, -2.5 and -10,
// instead of 4%, 12% and 120%; with the sum added everywhere 1.3% instead of 0.5% at mean -0.05.
#pragma once

#include "lattice/launch.h"
#include "lattice/within.cuh"

namespace girih::kernels::lattice {

template <class S>
struct Columns {
  using T = typename S::T;
  static constexpr int kTable = (S::kWarps + 1) * S::R + S::kWarps;
  static constexpr int kBytes = 2 * S::Memory::kBytes + 3 * S::Keys::kBytes + 2 * S::Values::kBytes +
                                static_cast<int>(sizeof(ChunkTokens<S::R>)) + 4 * kTable;

  const LatticeColumns& p;
  const Part& part;
  Within<S> within;
  typename S::Memory dX;
  typename S::Keys da;  // encode: -gamma dW
  typename S::Values y;
  float* table;  // c.dW for each warp, dl, and the cancelling sum for each warp

  __device__ Columns(const LatticeColumns& p, const Part& part, unsigned char* shared) : p(p), part(part) {
    Layout layout(shared);
    layout(within.memory)(dX)(within.k)(within.w)(da)(within.h)(y)(within.tokens, 1)(table, kTable);
  }

  __device__ bool is(LatticeObjective objective) const { return within.objective == objective; }

  __device__ void start() {
    within.bring_all(p, part);
    const LatticeShape& shape = p.shape;
    const int64_t place = (part.number * shape.heads + part.head) * shape.M * shape.D;
    bring<S::kThreads>(dX, static_cast<const T*>(p.gradients) + place, shape.D, shape.M, shape.D);
    commit_copies();
    if (within.warp == 0) put_tokens<T>(*within.tokens, p, LatticeStart{}, part);
    wait_copies<0>();
    __syncthreads();
    within.make_h();
    if (is(LatticeObjective::decode)) __syncthreads();
    within.make_w();
    __syncthreads();
  }

  __device__ float to_end(int t) const { return within.tokens->decay(S::R - 1, t); }

  // dW, which becomes its term of dk. sums: W.dW of both vectors of the lane.
  __device__ void make_dw(Sums<2>& dW, float (&sums)[2], int first) const {
    fill(dW, 0.f);
    add_product_of_tile_rows<2>(dW, dX, within.vectors(), within.h, first);
    const bool encode = is(LatticeObjective::encode);
    uint32_t x[4];
    Sums<2> c, a;
    load_block_transposed(x, within.k, within.vectors(), first);
    unpack<T>(c, x);
    if (encode) within.make_a(a, first);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int t = first + 8 * n + lane_col();
      const float2 step = *reinterpret_cast<const float2*>(&within.tokens->step[t]);
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
        if (lane_row() == 0) table[within.warp * S::R + t + i] = sum[i];
      }
    }
    if (!encode) return;
    bound<T>(dW);
    pack<T>(x, dW);
    store_block_transposed(da, within.vectors(), first, x);
    each_sum<2>([&](int n, int i) { dW.at[n][i] = -dW.at[n][i]; });
  }

  // Stores the cancelling sum over the warp's vectors that are mostly steps.
  __device__ void put_end(const float (&sums)[2]) const {
    if (p.dg.data == nullptr) return;
    const float* const ends = p.ends + (part.number * p.shape.heads + part.head) * 2 * p.shape.M;
    float total = 0.f;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int m = within.vectors() + lane_row() + 8 * j;
      if (m >= p.shape.M || ends[p.shape.M + m] == 0.f) continue;
      total += sums[j] + ((lane() & 3) == 0 ? ends[m] : 0.f);
    }
    total = sum_over_col(sum_over_row(total));
    if (lane() == 0) table[(S::kWarps + 1) * S::R + within.warp] = total;
  }

  // Computes Y and stores dv.
  __device__ void make_y() const {
    if (!within.has_share()) return;
    constexpr int N = S::kWide / 8;
    const int row = within.share_row(), col = within.share_col();
    Sums<N> sums;
    fill(sums, 0.f);
    add_product_of_tiles<2>(sums, within.w, row, dX, col);
    const int t = row + lane_row();
    scale_rows(sums, {to_end(t) / within.kLift, to_end(t + 8) / within.kLift});
    if (is(LatticeObjective::decode)) {
      Operand<S::kWide / 16> rounded;
      bound<T>(sums);
      round_to<T>(rounded, sums);
      store_blocks(y, row, col, rounded);
      scale_rows(sums, {-1.f, -1.f});
    } else if (is(LatticeObjective::encode)) {
      add_product_of_tiles<2>(sums, da, row, within.memory, col);
    }
    T* const to = row_of<T>(p.dv, part.batch(), part.chunk.start + row, part.head) + col;
    const int rows = part.chunk.length - row, cols = p.shape.D - col;
    add_rows<T>(sums, to, p.dv.stride[1], rows, cols);
    put_rows<T>(to, p.dv.stride[1], rows, cols, sums);
  }

  // Adds Y S and stores dk.
  __device__ void put_dk(Sums<2>& dk, int first) const {
    uint32_t x[4];
    if (is(LatticeObjective::decode)) {
      add_product_of_tile_rows<2>(dk, within.memory, within.vectors(), y, first);
    }
    T* const to = row_of<T>(p.dk, part.batch(), part.chunk.start + first, part.head) + within.vectors();
    const int rows = part.chunk.length - first, cols = p.shape.M - within.vectors();
    get_block(x, to, p.dk.stride[1], rows, cols);
    transpose_block(x);
    Sums<2> before;
    unpack<T>(before, x);
    add(dk, before);
    pack<T>(x, dk);
    transpose_block(x);
    put_block(to, p.dk.stride[1], rows, cols, x);
  }

  // Stores dgamma and dg; called by all threads.
  __device__ void put_gates() const {
    const int t = threadIdx.x, length = part.chunk.length;
    float* const dl = table + S::kWarps * S::R;
    const float sign = sign_of(within.objective);
    if (t < length) {
      float sum = 0.f;
      for (int w = 0; w < S::kWarps; ++w) sum += table[w * S::R + t];
      const int64_t token = part.chunk.start + t;
      float& place = static_cast<float*>(p.dgamma.data)[offset_of(p.dgamma, part.batch(), token, part.head)];
      const float dgamma = fmaf(sign, sum, place);
      place = dgamma;
      if (p.dg.data != nullptr) {
        float d =
            load_any(p.at_floor, part.batch(), token, part.head) - sign * within.tokens->step[t] * dgamma;
        for (int w = 0; t + 1 == length && w < S::kWarps; ++w) d += table[(S::kWarps + 1) * S::R + w];
        if (t + 1 == length && !part.chunk.complete) d += load_any(p.dopen, part.sequence(), part.head);
        dl[t] = d;
      }
    }
    if (p.dg.data == nullptr) return;
    __syncthreads();
    if (t >= length) return;
    float sum = 0.f;
    for (int j = length - 1; j >= t; --j) sum += dl[j];
    store_any(p.dg, sum, part.batch(), part.chunk.start + t, part.head);
  }
};

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) columns_kernel(const __grid_constant__ LatticeColumns p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const Part part = chunk_part(p.shape);
  if (part.chunk.length == 0) return;
  Columns<S> columns(p, part, shared);
  columns.start();
  Sums<2> dk[S::kBlocks];
  float sums[2] = {0.f, 0.f};
#pragma unroll
  for (int b = 0; b < S::kBlocks; ++b) columns.make_dw(dk[b], sums, 16 * b);
  columns.put_end(sums);
  if (columns.is(LatticeObjective::encode)) __syncthreads();
  columns.make_y();
  __syncthreads();
#pragma unroll
  for (int b = 0; b < S::kBlocks; ++b) columns.put_dk(dk[b], 16 * b);
  columns.put_gates();
}

template <typename T>
cudaError_t columns_of(const LatticeColumns& p, cudaStream_t stream) {
  return by_size(p.shape, [&](auto tokens, auto D, auto M) {
    using S = Sizes<T, tokens(), D(), M(), true>;
    return launch_chunks<columns_kernel<S>>(p, S::kThreads, Columns<S>::kBytes, 0, stream);
  });
}

}  // namespace girih::kernels::lattice
