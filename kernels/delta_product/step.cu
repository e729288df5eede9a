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
#include "tile/ptx.h"

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
  __device__ void for_each_row(const float* x, const F& f) {
#pragma unroll
    for (int r = 0; r < Rows; r += 4) {
      const Pack<4> four = load<4>(x + first_row() + r);
#pragma unroll
      for (int i = 0; i < 4; ++i) f(at[r + i], four.at[i]);
    }
  }

  // Sum over rows d of S[d, c] x[d], for the columns of the thread. partial_sums: kStepWarps * kStepCols
  // floats of shared memory that no thread reads any more.
  __device__ Pack<Pack_> read(const float* x, float* partial_sums) {
    Pack<Pack_> sum = zeros<Pack_>();
    for_each_row(x, [&](const Pack<Pack_>& s, float of_row) {
#pragma unroll
      for (int i = 0; i < Pack_; ++i) sum.at[i] = fmaf(s.at[i], of_row, sum.at[i]);
    });
#pragma unroll
    for (int distance = 16; distance >= kPacks; distance /= 2) {
#pragma unroll
      for (int i = 0; i < Pack_; ++i) sum.at[i] += __shfl_xor_sync(~0u, sum.at[i], distance);
    }
    if (threadIdx.x % 32 < kPacks) store(partial_sums + threadIdx.x / 32 * kStepCols + first_col(), sum);
    __syncthreads();
    sum = load<Pack_>(partial_sums + first_col());
#pragma unroll
    for (int w = 1; w < kStepWarps; ++w) {
      const auto other = load<Pack_>(partial_sums + w * kStepCols + first_col());
#pragma unroll
      for (int i = 0; i < Pack_; ++i) sum.at[i] += other.at[i];
    }
    return sum;
  }
};

// The thread's elements of k, v and beta of a step, loaded on construction.
template <int Each>
struct StepInputs {
  RawElement k[Each], beta_k[Each], v, beta_v;

  __device__ StepInputs(const DeltaStep& p, int64_t n, int j, int head, int block_col) {
    const int thread = static_cast<int>(threadIdx.x), c = block_col + thread;
#pragma unroll
    for (int e = 0; e < Each; ++e) {
      const int d = thread + e * kStepThreads;
      if (d < p.D) {
        k[e] = load_raw_element(p.k, n, j, head / p.key_share, d);
        beta_k[e] = load_raw_element(p.beta, n, j, head, d);
      }
    }
    if (thread < kStepCols && c < p.V) {
      v = load_raw_element(p.v, n, j, head, c), beta_v = load_raw_element(p.beta, n, j, head, c);
    }
  }
};

// The thread's elements of a query, loaded on construction.
template <int Each>
struct QueryInputs {
  RawElement at[Each];

  __device__ QueryInputs(const DeltaStep& p, int64_t n, int head) {
#pragma unroll
    for (int e = 0; e < Each; ++e) {
      const int d = static_cast<int>(threadIdx.x) + e * kStepThreads;
      if (d < p.D) at[e] = load_raw_element(p.q, n, head, d);
    }
  }
};

// 16 blocks a multiprocessor if registers suffice: 4 us less at the shape above.
template <int Pack_, int Rows>
__global__ void __launch_bounds__(kStepThreads, Pack_ == 4 && Rows <= 8 ? 16 : 1)
    delta_step_kernel(const __grid_constant__ DeltaStep p) {
  using State = StepState<Pack_, Rows>;
  constexpr int kRows = State::kRows, kEach = kRows / kStepThreads;
  GIRIH_DYNAMIC_SHARED(float, shared, 16);
  const int D = p.D, group = p.output_heads / p.heads, slices = (p.V + kStepCols - 1) / kStepCols;
  const int head = static_cast<int>(blockIdx.x / slices % p.heads);
  const int64_t n = blockIdx.x / slices / p.heads;
  const int block_col = static_cast<int>(blockIdx.x % slices) * kStepCols;
  const int thread = static_cast<int>(threadIdx.x), col = State::first_col();

  float* partial_sums = shared;                                // two buffers in turn
  float* const k = partial_sums + 2 * kStepWarps * kStepCols;  // [n, kRows], zeros beyond D
  float* const b = k + p.n * kRows;                            // beta k
  float* const w = b + p.n * kRows;                            // beta v, [n, kStepCols]
  float* const q = w + p.n * kStepCols;                        // [group, kRows]
  const auto next_buffer = [&] {
    float* const current = partial_sums;
    partial_sums = partial_sums == shared ? shared + kStepWarps * kStepCols : shared;
    return current;
  };

  using Step = StepInputs<kEach>;
  using Query = QueryInputs<kEach>;
  Step step(p, n, 0, head, block_col);
  Query query(p, n, head * group / p.query_share);
  RawElement g;
  if (p.g.data != nullptr) g = load_raw_element(p.g, n, head);

  State s;
  const bool is_inside = block_col + col < p.V;  // V is a multiple of the pack
  float* const S = static_cast<float*>(p.state.data) + offset_of(p.state, n, head, 0, block_col + col);
  // (With a pointer that advances by rows the compiler stores a pack element by element.)
  const auto row_at = [&](int r) { return S + (State::first_row() + r) * p.state.stride[2]; };
  const int rows = is_inside ? D - State::first_row() : 0;  // rows of the thread that exist
#pragma unroll
  for (int r = 0; r < Rows; ++r) s.at[r] = r < rows ? load<Pack_>(row_at(r)) : zeros<Pack_>();

  for (int j = 0; j < p.n; ++j) {
    const Step current = step;
    if (j + 1 < p.n) step = Step(p, n, j + 1, head, block_col);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int at = j * kRows + thread + e * kStepThreads;
      k[at] = decode_element(current.k[e], p.k.dtype);
      b[at] = decode_element(current.beta_k[e], p.beta.dtype) * k[at];
    }
    if (thread < kStepCols) {
      w[j * kStepCols + thread] =
          decode_element(current.beta_v, p.beta.dtype) * decode_element(current.v, p.v.dtype);
    }
  }
  for (int member = 0; member < group; ++member) {
    const Query current = query;
    if (member + 1 < group) query = Query(p, n, (head * group + member + 1) / p.query_share);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      q[member * kRows + thread + e * kStepThreads] = decode_element(current.at[e], p.q.dtype);
    }
  }
  __syncthreads();

  // S <- e^g S
  if (p.g.data != nullptr) {
    const float decay = expf(decode_element(g, p.g.dtype));
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
#pragma unroll
      for (int i = 0; i < Pack_; ++i) s.at[r].at[i] *= decay;
    }
  }

  // S <- S + k (beta v - S^T (beta k))^T
  for (int j = 0; j < p.n; ++j) {
    const float unit = p.unit ? inverse_length<kRows>(k + j * kRows) : 1.f;
    Pack<Pack_> error = s.read(b + j * kRows, next_buffer());
#pragma unroll
    for (int i = 0; i < Pack_; ++i) error.at[i] = unit * (w[j * kStepCols + col + i] - unit * error.at[i]);
    s.for_each_row(k + j * kRows, [&](Pack<Pack_>& row, float of_row) {
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
    const Pack<Pack_> o = s.read(q + member * kRows, next_buffer());
    if (thread < State::kPacks && is_inside) {
#pragma unroll
      for (int i = 0; i < Pack_; ++i) {
        store_element(p.o, factor * o.at[i], n, head * group + member, block_col + col + i);
      }
    }
  }
}

template <int Pack_, int Rows>
cudaError_t launch(const DeltaStep& p, cudaStream_t stream) {
  const int64_t blocks = p.sequences * p.heads * divide_up(p.V, kStepCols);
  constexpr int kRows = StepState<Pack_, Rows>::kRows;
  const int floats =
      2 * kStepWarps * kStepCols + p.n * (2 * kRows + kStepCols) + p.output_heads / p.heads * kRows;
  const int bytes = floats * static_cast<int>(sizeof(float));
  return launch_grid<delta_step_kernel<Pack_, Rows>>(blocks, kStepThreads, bytes, stream, p);
}

// The registers depend on D: fewer registers allow more resident blocks.
template <int Pack_>
cudaError_t launch_rows(const DeltaStep& p, cudaStream_t stream) {
  constexpr int kGroups = Pack_ * kStepThreads / kStepCols;  // groups of threads with the same columns
  return dispatch_width<64, 128, kDeltaMaxWidth>(
      p.D, [&](auto width) { return launch<Pack_, width() / kGroups>(p, stream); });
}

}  // namespace

cudaError_t delta_step(const DeltaStep& p, cudaStream_t stream) {
  if (p.D > kDeltaMaxWidth || p.n > kDeltaStepLimit || p.output_heads / p.heads > kDeltaStepLimit) {
    return cudaErrorInvalidValue;
  }
  return p.V % 4 == 0 && is_pack_aligned(p.state, 4, sizeof(float)) ? launch_rows<4>(p, stream)
                                                                    : launch_rows<1>(p, stream);
}

}  // namespace girih::kernels
