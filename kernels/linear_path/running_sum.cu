// total at t = x at 0 + ... + x at t, or with from_end x at t + ... + x at T - 1
//
// A block has a few columns of a sequence, and a group of lanes has a run of tokens. A group sums the run,
// gets the sum of the earlier runs, and reads the run again, from the cache, to write the running sums.
#include "linear_path/linear_path.h"
#include "tile/grid.h"
#include "tile/launch.h"
#include "tile/pack.h"

namespace girih::kernels {
namespace linear_path {
namespace {

constexpr int kPack = kLinearPathPack, kThreads = 256;
constexpr int kLanes = 4, kRuns = kThreads / kLanes, kColumns = kLanes * kPack;
constexpr int kPrefetch = 8;  // tokens loaded at once

template <typename X, typename Total>
class TokenRun {
 public:
  __device__ TokenRun(const RunningSum& p, int64_t sequence, int column)
      : p_(p),
        x_(static_cast<const X*>(p.x.data) + sequence * p.x.sequence + column),
        total_(static_cast<Total*>(p.total) + sequence * p.tokens * p.columns + column),
        exists_(column < p.columns) {
    const int64_t length = divide_up(p.tokens, kRuns), run_index = threadIdx.x / kLanes;
    first_ = run_index * length < p.tokens ? run_index * length : p.tokens;
    last_ = first_ + length < p.tokens ? first_ + length : p.tokens;
    if (!exists_) last_ = first_;
  }

  __device__ Pack<kPack> sum() const {
    auto sum = zeros<kPack>();
    for_each_token([&](int64_t, const Pack<kPack>& x) { add(sum, x); });
    return sum;
  }
  __device__ void write(Pack<kPack> sum) const {
    for_each_token([&](int64_t token, const Pack<kPack>& x) {
      add(sum, x);
      store(total_ + token * p_.columns, sum);
    });
  }

 private:
  __device__ static void add(Pack<kPack>& to, const Pack<kPack>& x) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) to.at[i] += x.at[i];
  }
  template <typename F>
  __device__ void for_each_token(const F& f) const {
    for (int64_t i = first_; i < last_; i += kPrefetch) {
      Pack<kPack> x[kPrefetch];
#pragma unroll
      for (int j = 0; j < kPrefetch; ++j) {
        x[j] = i + j < last_ ? load<kPack>(x_ + token(i + j) * p_.x.token) : zeros<kPack>();
      }
#pragma unroll
      for (int j = 0; j < kPrefetch; ++j) {
        if (i + j < last_) f(token(i + j), x[j]);
      }
    }
  }
  __device__ int64_t token(int64_t i) const { return p_.from_end ? p_.tokens - 1 - i : i; }

  const RunningSum& p_;
  const X* const x_;
  Total* const total_;
  const bool exists_;
  int64_t first_, last_;
};

template <typename X, typename Total>
__global__ void __launch_bounds__(kThreads) running_sum_kernel(const __grid_constant__ RunningSum p) {
  __shared__ float sums[kRuns][kColumns + 1];
  const int64_t slabs = divide_up(p.columns, kColumns);
  const int lane = static_cast<int>(threadIdx.x) % kLanes, run_index = static_cast<int>(threadIdx.x) / kLanes;
  for (int64_t job = blockIdx.x; job < p.batch * slabs; job += gridDim.x) {
    const int64_t sequence = job / slabs;
    const TokenRun<X, Total> run(p, sequence,
                                 static_cast<int>(job - sequence * slabs) * kColumns + lane * kPack);
    auto sum = run.sum();
#pragma unroll
    for (int i = 0; i < kPack; ++i) sums[run_index][lane * kPack + i] = sum.at[i];
    __syncthreads();  // the sums of all runs are stored
    if (threadIdx.x < kColumns) {
      float before = 0.f;
#pragma unroll 8
      for (int r = 0; r < kRuns; ++r) {
        const float run_sum = sums[r][threadIdx.x];
        sums[r][threadIdx.x] = before;
        before += run_sum;
      }
    }
    __syncthreads();  // sums holds the sum of the earlier runs
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum.at[i] = sums[run_index][lane * kPack + i];
    run.write(sum);
    __syncthreads();  // sums have been read
  }
}

}  // namespace
}  // namespace linear_path

cudaError_t running_sum(const RunningSum& p, cudaStream_t stream) {
  using namespace linear_path;
  const int64_t jobs = p.batch * divide_up(p.columns, kColumns);
  if (jobs == 0 || p.tokens == 0) return cudaSuccess;
  if (p.columns % kPack != 0) return cudaErrorInvalidValue;
  const auto launch = [&](auto x, auto total) {
    using X = decltype(x);
    using Total = decltype(total);
    return launch_grid<running_sum_kernel<X, Total>>(clamp_grid_blocks(jobs), kThreads, 0, stream, p);
  };
  const auto pair = [&](DType x, DType total) { return p.x_dtype == x && p.total_dtype == total; };
  if (pair(DType::f32, DType::f32)) return launch(0.f, 0.f);
  if (pair(DType::bf16, DType::bf16)) return launch(__nv_bfloat16{}, __nv_bfloat16{});
  if (pair(DType::f16, DType::f32)) return launch(__half{}, 0.f);
  if (pair(DType::f32, DType::f16)) return launch(0.f, __half{});
  return cudaErrorInvalidValue;
}

}  // namespace girih::kernels
