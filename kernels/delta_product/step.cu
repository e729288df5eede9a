// One token of delta_product, the state in place: it is read and written once.
//
// A block has 32 columns of one head's state, in registers through all steps: columns do not need each other.
// A thread has `Pack` neighbouring columns of every kGroups-th row, Rows of them. What the steps and the
// reads need of k, q, v and beta is fetched at once, beside the state.
#include "delta_product/delta_product.h"
#include "tile/grid.h"
#include "tile/launch.h"
#include "tile/pack.h"

namespace girih::kernels {
namespace {

constexpr int kStepThreads = 64;
constexpr int kStepCols = 32;
constexpr int kStepWarps = kStepThreads / 32;

template <int Rank>
__device__ float element(const In<Rank>& x, int64_t n, int64_t i, int64_t j, int64_t k = 0) {
  int64_t at = n * x.stride[0] + i * x.stride[1] + j * x.stride[2];
  if constexpr (Rank == 4) at += k * x.stride[3];
  return load_any(x.data, x.dtype, at);
}

// 1 / |x| of D elements, by every warp for itself.
__device__ float inverse_length(const float* x, int D) {
  float sum = 0.f;
  for (int d = threadIdx.x % 32; d < D; d += 32) sum = fmaf(x[d], x[d], sum);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  return rsqrtf(sum + 1e-6f);
}

// A block's part of the state, in its threads' registers.
template <int Pack_, int Rows>
struct StepState {
  static constexpr int kPacks = kStepCols / Pack_;
  static constexpr int kGroups = kStepThreads / kPacks;

  Pack<Pack_> at[Rows];

  // f(a row's pack, its row) for those of the thread's rows that exist.
  template <class F>
  __device__ void for_each_row(int D, const F& f) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      const int d = static_cast<int>(threadIdx.x) / kPacks + r * kGroups;
      if (d < D) f(at[r], d);
    }
  }

  // sum over rows d of S[d, c] x[d], for the thread's columns. parts: kStepWarps * kStepCols floats that
  // nobody reads.
  __device__ Pack<Pack_> read(const float* x, int D, float* parts) {
    Pack<Pack_> sum = zeros<Pack_>();
    for_each_row(D, [&](const Pack<Pack_>& s, int d) {
#pragma unroll
      for (int i = 0; i < Pack_; ++i) sum.at[i] = fmaf(s.at[i], x[d], sum.at[i]);
    });
#pragma unroll
    for (int distance = 16; distance >= kPacks; distance /= 2) {
#pragma unroll
      for (int i = 0; i < Pack_; ++i) sum.at[i] += __shfl_xor_sync(~0u, sum.at[i], distance);
    }
    const int col = static_cast<int>(threadIdx.x) % kPacks * Pack_;
    if (threadIdx.x % 32 < kPacks) {
#pragma unroll
      for (int i = 0; i < Pack_; ++i) parts[threadIdx.x / 32 * kStepCols + col + i] = sum.at[i];
    }
    __syncthreads();
    sum = zeros<Pack_>();
#pragma unroll
    for (int w = 0; w < kStepWarps; ++w) {
#pragma unroll
      for (int i = 0; i < Pack_; ++i) sum.at[i] += parts[w * kStepCols + col + i];
    }
    return sum;
  }
};

// 16 blocks a multiprocessor where the state leaves registers for that: 26.7 us instead of 30.7 at 128
// sequences of 16 heads, 64 x 64.
template <int Pack_, int Rows>
__global__ void __launch_bounds__(kStepThreads, Pack_ == 4 && Rows <= 8 ? 16 : 1)
    delta_step_kernel(const __grid_constant__ DeltaStep p) {
  using State = StepState<Pack_, Rows>;
  extern __shared__ float shared[];
  const int D = p.D, group = p.query_heads / p.heads, slices = (p.V + kStepCols - 1) / kStepCols;
  const int head = static_cast<int>(blockIdx.x / slices % p.heads);
  const int64_t n = blockIdx.x / slices / p.heads;
  const int first_col = static_cast<int>(blockIdx.x % slices) * kStepCols;
  const int pack = static_cast<int>(threadIdx.x) % State::kPacks, col = first_col + pack * Pack_;
  const bool mine = col < p.V;  // V is a multiple of the pack

  float* parts = shared;  // two sets, in turns
  float* const k = parts + 2 * kStepWarps * kStepCols;
  float* const b = k + p.n * D;  // beta k
  float* const w = b + p.n * D;  // beta v, [n, kStepCols]
  float* const q = w + p.n * kStepCols;
  const auto next_parts = [&] {
    float* const now = parts;
    parts = parts == shared ? shared + kStepWarps * kStepCols : shared;
    return now;
  };

  State s;
  float* const S = static_cast<float*>(p.state.data) + n * p.state.stride[0] + head * p.state.stride[1] +
                   col * p.state.stride[3];
  s.for_each_row(D, [&](Pack<Pack_>& row, int d) {
    row = mine ? load<Pack_>(S + d * p.state.stride[2]) : zeros<Pack_>();
  });
  for (int j = 0; j < p.n; ++j) {
    for (int d = threadIdx.x; d < D; d += kStepThreads) {
      k[j * D + d] = element(p.k, n, j, head, d);
      b[j * D + d] = element(p.beta, n, j, head, d) * k[j * D + d];
    }
    if (threadIdx.x < kStepCols) {
      const int v = first_col + static_cast<int>(threadIdx.x);
      w[j * kStepCols + threadIdx.x] =
          v < p.V ? element(p.beta, n, j, head, v) * element(p.v, n, j, head, v) : 0.f;
    }
  }
  for (int i = threadIdx.x; i < group * D; i += kStepThreads)
    q[i] = element(p.q, n, head * group + i / D, i % D);
  __syncthreads();

  // S <- e^g S
  if (p.g.data != nullptr) {
    const float decay = expf(load_any(p.g.data, p.g.dtype, n * p.g.stride[0] + head * p.g.stride[1]));
    s.for_each_row(D, [&](Pack<Pack_>& row, int) {
#pragma unroll
      for (int i = 0; i < Pack_; ++i) row.at[i] *= decay;
    });
  }

  // S <- S + k (beta v - S^T (beta k))^T
  for (int j = 0; j < p.n; ++j) {
    const float unit = p.unit ? inverse_length(k + j * D, D) : 1.f;
    Pack<Pack_> error = s.read(b + j * D, D, next_parts());
#pragma unroll
    for (int i = 0; i < Pack_; ++i) {
      error.at[i] = unit * (w[j * kStepCols + pack * Pack_ + i] - unit * error.at[i]);
    }
    s.for_each_row(D, [&](Pack<Pack_>& row, int d) {
#pragma unroll
      for (int i = 0; i < Pack_; ++i) row.at[i] = fmaf(k[j * D + d], error.at[i], row.at[i]);
    });
  }
  s.for_each_row(D, [&](const Pack<Pack_>& row, int d) {
    if (mine) store<Pack_>(S + d * p.state.stride[2], row);
  });

  // o = scale * S^T q
  for (int member = 0; member < group; ++member) {
    const float factor = p.scale * (p.unit ? inverse_length(q + member * D, D) : 1.f);
    const Pack<Pack_> o = s.read(q + member * D, D, next_parts());
    if (threadIdx.x < State::kPacks && mine) {
#pragma unroll
      for (int i = 0; i < Pack_; ++i) {
        store_any(p.o.data, p.o.dtype,
                  n * p.o.stride[0] + (head * group + member) * p.o.stride[1] + (col + i) * p.o.stride[2],
                  factor * o.at[i]);
      }
    }
  }
}

template <int Pack_, int Rows>
cudaError_t launch(const DeltaStep& p, cudaStream_t stream) {
  const int64_t blocks = p.sequences * p.heads * divide_up(p.V, kStepCols);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const int floats = 2 * kStepWarps * kStepCols + p.n * (2 * p.D + kStepCols) + p.query_heads / p.heads * p.D;
  delta_step_kernel<Pack_, Rows>
      <<<static_cast<unsigned>(blocks), kStepThreads, floats * sizeof(float), stream>>>(p);
  return cudaGetLastError();
}

// Registers for as many rows as D needs: the fewer, the more blocks are under way.
template <int Pack_>
cudaError_t launch_rows(const DeltaStep& p, cudaStream_t stream) {
  constexpr int kEach = Pack_ * kStepThreads / kStepCols;  // rows that one of each thread covers: 8 or 32
  if (p.D <= 64) return launch<Pack_, 64 / kEach>(p, stream);
  if (p.D <= 128) return launch<Pack_, 128 / kEach>(p, stream);
  return launch<Pack_, kDeltaMaxWidth / kEach>(p, stream);
}

}  // namespace

cudaError_t delta_step(const DeltaStep& p, cudaStream_t stream) {
  if (p.D > kDeltaMaxWidth || p.n > kDeltaStepMost || p.query_heads / p.heads > kDeltaStepMost) {
    return cudaErrorInvalidValue;
  }
  return p.V % 4 == 0 && fits_packs(p.state, 4, sizeof(float)) ? launch_rows<4>(p, stream)
                                                               : launch_rows<1>(p, stream);
}

}  // namespace girih::kernels
