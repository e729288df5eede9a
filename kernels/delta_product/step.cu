// One token of DeltaProduct; the state is updated in place: one read and one write.
//
// A block has 32 columns of the state of one head, in registers for all steps; columns are independent. A
// thread has `Pack` neighbouring columns of `Rows` neighbouring rows. Loads of the gate, of a query and of a
// step are issued before the loads of the state, and loads of the next step or query before the current one
// is used (128 sequences of 16 heads, 64 x 64: 23.4 us instead of 26.1).
#include "delta_product/delta_product.h"
#include "tile/grid.h"
#include "tile/instance.h"
#include "tile/launch.h"
#include "tile/pack.h"

namespace girih::kernels {
namespace {

constexpr int kStepThreads = 64;
constexpr int kStepCols = 32;
constexpr int kStepWarps = kStepThreads / 32;

// 1 / |x| of `width` elements; every warp computes it.
template <int width>
__device__ float inverse_length(const float* x) {
  float sum = 0.f;
  for (int d = threadIdx.x % 32; d < width; d += 32) sum = fmaf(x[d], x[d], sum);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  return rsqrtf(sum + 1e-6f);
}

// The thread's elements of the state; rows beyond D are zero.
template <int Pack_, int Rows>
struct StepState {
  static constexpr int kPacks = kStepCols / Pack_;
  static constexpr int kRows = Rows * kStepThreads / kPacks;  // rows of the block
  static_assert(Rows % 4 == 0 && kRows % kStepThreads == 0);

  Pack<Pack_> at[Rows];

  static __device__ int first_row() { return static_cast<int>(threadIdx.x) / kPacks * Rows; }
  static __device__ int first_col() { return static_cast<int>(threadIdx.x % kPacks) * Pack_; }

  // Calls f(pack of a row, x of the row) for the rows of the thread.
  template <class F>
  __device__ void with(const float* x, const F& f) {
#pragma unroll
    for (int r = 0; r < Rows; r += 4) {
      const Pack<4> four = load<4>(x + first_row() + r);
#pragma unroll
      for (int i = 0; i < 4; ++i) f(at[r + i], four.at[i]);
    }
  }

  // Sum over rows d of S[d, c] x[d], for the columns of the thread. parts: kStepWarps * kStepCols floats of
  // shared memory that no thread reads any more.
  __device__ Pack<Pack_> read(const float* x, float* parts) {
    Pack<Pack_> sum = zeros<Pack_>();
    with(x, [&](const Pack<Pack_>& s, float of_row) {
#pragma unroll
      for (int i = 0; i < Pack_; ++i) sum.at[i] = fmaf(s.at[i], of_row, sum.at[i]);
    });
#pragma unroll
    for (int distance = 16; distance >= kPacks; distance /= 2) {
#pragma unroll
      for (int i = 0; i < Pack_; ++i) sum.at[i] += __shfl_xor_sync(~0u, sum.at[i], distance);
    }
    if (threadIdx.x % 32 < kPacks) store(parts + threadIdx.x / 32 * kStepCols + first_col(), sum);
    __syncthreads();
    sum = load<Pack_>(parts + first_col());
#pragma unroll
    for (int w = 1; w < kStepWarps; ++w) {
      const auto other = load<Pack_>(parts + w * kStepCols + first_col());
#pragma unroll
      for (int i = 0; i < Pack_; ++i) sum.at[i] += other.at[i];
    }
    return sum;
  }
};

// The thread's elements of k, v and beta of a step, loaded on construction.
template <int Each>
struct StepElements {
  RawElement k[Each], beta_k[Each], v, beta_v;

  __device__ StepElements(const DeltaStep& p, int64_t n, int j, int head, int block_col) {
    const int thread = static_cast<int>(threadIdx.x), c = block_col + thread;
#pragma unroll
    for (int e = 0; e < Each; ++e) {
      const int d = thread + e * kStepThreads;
      if (d < p.D) {
        k[e] = element(p.k, n, j, head / p.key_share, d);
        beta_k[e] = element(p.beta, n, j, head, d);
      }
    }
    if (thread < kStepCols && c < p.V) {
      v = element(p.v, n, j, head, c), beta_v = element(p.beta, n, j, head, c);
    }
  }
};

// The thread's elements of a query, loaded on construction.
template <int Each>
struct QueryElements {
  RawElement at[Each];

  __device__ QueryElements(const DeltaStep& p, int64_t n, int head) {
#pragma unroll
    for (int e = 0; e < Each; ++e) {
      const int d = static_cast<int>(threadIdx.x) + e * kStepThreads;
      if (d < p.D) at[e] = element(p.q, n, head, d);
    }
  }
};

// 16 blocks a multiprocessor if registers suffice: 4 us less at the shape above.
template <int Pack_, int Rows>
__global__ void __launch_bounds__(kStepThreads, Pack_ == 4 && Rows <= 8 ? 16 : 1)
    delta_step_kernel(const __grid_constant__ DeltaStep p) {
  using State = StepState<Pack_, Rows>;
  constexpr int kRows = State::kRows, kEach = kRows / kStepThreads;
  extern __shared__ __align__(16) float shared[];
  const int D = p.D, group = p.query_heads / p.heads, slices = (p.V + kStepCols - 1) / kStepCols;
  const int head = static_cast<int>(blockIdx.x / slices % p.heads);
  const int64_t n = blockIdx.x / slices / p.heads;
  const int block_col = static_cast<int>(blockIdx.x % slices) * kStepCols;
  const int thread = static_cast<int>(threadIdx.x), col = State::first_col();

  float* parts = shared;                                // two buffers in turn
  float* const k = parts + 2 * kStepWarps * kStepCols;  // [n, kRows], zeros beyond D
  float* const b = k + p.n * kRows;                     // beta k
  float* const w = b + p.n * kRows;                     // beta v, [n, kStepCols]
  float* const q = w + p.n * kStepCols;                 // [group, kRows]
  const auto next_parts = [&] {
    float* const now = parts;
    parts = parts == shared ? shared + kStepWarps * kStepCols : shared;
    return now;
  };

  using Step = StepElements<kEach>;
  using Query = QueryElements<kEach>;
  Step step(p, n, 0, head, block_col);
  Query query(p, n, head * group / p.query_share);
  RawElement g;
  if (p.g.data != nullptr) g = element(p.g, n, head);

  State s;
  const bool mine = block_col + col < p.V;  // V is a multiple of the pack
  float* const S = static_cast<float*>(p.state.data) + offset_of(p.state, n, head, 0, block_col + col);
  // (With a pointer that advances by rows the compiler stores a pack element by element.)
  const auto row_at = [&](int r) { return S + (State::first_row() + r) * p.state.stride[2]; };
  const int rows = mine ? D - State::first_row() : 0;  // rows of the thread that exist
#pragma unroll
  for (int r = 0; r < Rows; ++r) s.at[r] = r < rows ? load<Pack_>(row_at(r)) : zeros<Pack_>();

  for (int j = 0; j < p.n; ++j) {
    const Step now = step;
    if (j + 1 < p.n) step = Step(p, n, j + 1, head, block_col);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int at = j * kRows + thread + e * kStepThreads;
      k[at] = value_of(now.k[e], p.k.dtype);
      b[at] = value_of(now.beta_k[e], p.beta.dtype) * k[at];
    }
    if (thread < kStepCols) {
      w[j * kStepCols + thread] = value_of(now.beta_v, p.beta.dtype) * value_of(now.v, p.v.dtype);
    }
  }
  for (int member = 0; member < group; ++member) {
    const Query now = query;
    if (member + 1 < group) query = Query(p, n, (head * group + member + 1) / p.query_share);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      q[member * kRows + thread + e * kStepThreads] = value_of(now.at[e], p.q.dtype);
    }
  }
  __syncthreads();

  // S <- e^g S
  if (p.g.data != nullptr) {
    const float decay = expf(value_of(g, p.g.dtype));
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
#pragma unroll
      for (int i = 0; i < Pack_; ++i) s.at[r].at[i] *= decay;
    }
  }

  // S <- S + k (beta v - S^T (beta k))^T
  for (int j = 0; j < p.n; ++j) {
    const float unit = p.unit ? inverse_length<kRows>(k + j * kRows) : 1.f;
    Pack<Pack_> error = s.read(b + j * kRows, next_parts());
#pragma unroll
    for (int i = 0; i < Pack_; ++i) error.at[i] = unit * (w[j * kStepCols + col + i] - unit * error.at[i]);
    s.with(k + j * kRows, [&](Pack<Pack_>& row, float of_row) {
#pragma unroll
      for (int i = 0; i < Pack_; ++i) row.at[i] = fmaf(of_row, error.at[i], row.at[i]);
    });
  }
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    if (r < rows) store<Pack_>(row_at(r), s.at[r]);
  }

  // o = scale * S^T q
  for (int member = 0; member < group; ++member) {
    const float factor = p.scale * (p.unit ? inverse_length<kRows>(q + member * kRows) : 1.f);
    const Pack<Pack_> o = s.read(q + member * kRows, next_parts());
    if (thread < State::kPacks && mine) {
#pragma unroll
      for (int i = 0; i < Pack_; ++i) {
        store_any(p.o, factor * o.at[i], n, head * group + member, block_col + col + i);
      }
    }
  }
}

template <int Pack_, int Rows>
cudaError_t launch(const DeltaStep& p, cudaStream_t stream) {
  const int64_t blocks = p.sequences * p.heads * divide_up(p.V, kStepCols);
  constexpr int kRows = StepState<Pack_, Rows>::kRows;
  const int floats =
      2 * kStepWarps * kStepCols + p.n * (2 * kRows + kStepCols) + p.query_heads / p.heads * kRows;
  const int bytes = floats * static_cast<int>(sizeof(float));
  return launch_grid<delta_step_kernel<Pack_, Rows>>(blocks, kStepThreads, bytes, stream, p);
}

// The registers depend on D: fewer registers allow more resident blocks.
template <int Pack_>
cudaError_t launch_rows(const DeltaStep& p, cudaStream_t stream) {
  constexpr int kGroups = Pack_ * kStepThreads / kStepCols;  // groups of threads with the same columns
  return by_width<64, 128, kDeltaMaxWidth>(
      p.D, [&](auto width) { return launch<Pack_, width() / kGroups>(p, stream); });
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
