// s = x + branch, x or silu(x)        r = (mean(s^2) + eps)^-1/2        y = r s weight
//
// Without a weight, weight = dim^-1/2: y has length 1. The gradients, with n = r s recomputed:
//
//     ds = after + r (dy weight - n mean(dy weight n))        for silu(x) the second term times silu'(x)
//     dweight = sum over rows of dy n
//
// A block loops over rows and has one wide row, or several narrow rows, in its registers; a thread has packs
// of a row and of the weight. Every tensor is read or written once. A thread sums dweight of its columns over
// its rows, and another kernel adds the sums of the blocks.
#include "elementwise/elementwise.h"
#include "tile/cuts.h"
#include "tile/grid.h"
#include "tile/instance.h"
#include "tile/launch.h"
#include "tile/pack.h"
#include "tile/partials.h"
#include "tile/silu.h"

namespace girih::kernels {
namespace elementwise {
namespace {

constexpr int kPack = kElementwisePack;
constexpr int64_t kResidentBlocks =
    8 * kH100Multiprocessors;  // blocks of 128 threads of backward, on an H100 or H200

// Lanes threads have a row. Sum is the type of x and s, Row the type of branch and y. UseSilu: s = silu(x).
template <typename Sum, typename Row, bool UseSilu, int Threads, int Packs, int Lanes = Threads>
struct RowTile {
  using S = Sum;
  using T = Row;
  static constexpr bool kUseSilu = UseSilu;
  static constexpr int kThreads = Threads, kPacks = Packs, kLanes = Lanes, kRows = Threads / Lanes;
  using Part = Pack<kPack>[Packs];

  __device__ static int column(int k) { return (k * Lanes + static_cast<int>(threadIdx.x) % Lanes) * kPack; }
  // Calls f(row, whether the row exists). All lanes of a block make the same number of calls, since sums over
  // a row involve all lanes.
  template <typename F>
  __device__ static void for_each_row(int64_t rows, const F& f) {
    const int own = static_cast<int>(threadIdx.x) / Lanes;
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * kRows; first < rows; first += gridDim.x * kRows) {
      f(first + own, kRows == 1 || first + own < rows);
    }
  }
};

// Sums of two numbers over the lanes of a row. Calls alternate between two buffers, so that no warp
// overwrites sums that a slower warp still reads.
template <int Lanes>
class RowSums {
 public:
  __device__ float2 sum(float a, float b) {
#pragma unroll
    for (int offset = Lanes / kWarps / 2; offset > 0; offset /= 2) {
      a += __shfl_xor_sync(~0u, a, offset), b += __shfl_xor_sync(~0u, b, offset);
    }
    if constexpr (kWarps == 1) return {a, b};
    __shared__ float2 parts[2][kWarps];
    if (threadIdx.x % 32 == 0) parts[buffer_][threadIdx.x / 32] = {a, b};
    __syncthreads();  // the parts of all warps are stored
    float2 sum = parts[buffer_][0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum.x += parts[buffer_][w].x, sum.y += parts[buffer_][w].y;
    buffer_ ^= 1;
    return sum;
  }

 private:
  static constexpr int kWarps = Lanes > 32 ? Lanes / 32 : 1;
  int buffer_ = 0;
};

template <class R>
__device__ inline void load_weight(typename R::Part& to, const InputTensor<1>& weight, int dim) {
  const float unit_weight = rsqrtf(static_cast<float>(dim));
#pragma unroll
  for (int k = 0; k < R::kPacks; ++k) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (weight.data == nullptr) {
        to[k].at[i] = unit_weight;
      } else {
        to[k].at[i] = R::column(k) < dim ? load_element(weight, R::column(k) + i) : 0.f;
      }
    }
  }
}

// Loads the elements of the thread in a row; zero beyond the end of the row and for a row that does not
// exist.
template <class R, typename T>
__device__ inline void load_row(typename R::Part& to, const void* from, int64_t row, int dim, bool exists) {
#pragma unroll
  for (int k = 0; k < R::kPacks; ++k) {
    to[k] = exists && R::column(k) < dim ? load<kPack>(static_cast<const T*>(from) + row * dim + R::column(k))
                                         : zeros<kPack>();
  }
}
template <class R, typename T>
__device__ inline void store_row(void* to, const typename R::Part& from, int64_t row, int dim, bool exists) {
#pragma unroll
  for (int k = 0; k < R::kPacks; ++k) {
    if (exists && R::column(k) < dim) store(static_cast<T*>(to) + row * dim + R::column(k), from[k]);
  }
}

// Calls body(pack, element) for every element of the thread.
template <class R, typename Body>
__device__ inline void for_each_element(const Body& body) {
#pragma unroll
  for (int k = 0; k < R::kPacks; ++k) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) body(k, i);
  }
}

template <class R>
__global__ void __launch_bounds__(R::kThreads) residual_norm_kernel(const __grid_constant__ ResidualNorm p) {
  const int dim = p.shape.dim;
  typename R::Part weight, s;
  load_weight<R>(weight, p.weight, dim);
  RowSums<R::kLanes> sums;
  R::for_each_row(p.shape.rows, [&](int64_t row, bool exists) {
    load_row<R, typename R::S>(s, p.x, row, dim, exists);
    if (p.branch != nullptr) {
      typename R::Part branch;
      load_row<R, typename R::T>(branch, p.branch, row, dim, exists);
      // Rounded to the type of s, which backward reads.
      for_each_element<R>([&](int k, int i) {
        s[k].at[i] = to_float(from_float<typename R::S>(s[k].at[i] + branch[k].at[i]));
      });
      store_row<R, typename R::S>(p.s, s, row, dim, exists);
    }
    if constexpr (R::kUseSilu) for_each_element<R>([&](int k, int i) { s[k].at[i] = silu(s[k].at[i]); });
    float square = 0.f;
    for_each_element<R>([&](int k, int i) { square = fmaf(s[k].at[i], s[k].at[i], square); });
    const float r = rsqrtf(sums.sum(square, 0.f).x / dim + p.shape.eps);
    for_each_element<R>([&](int k, int i) { s[k].at[i] *= r * weight[k].at[i]; });
    store_row<R, typename R::T>(p.y, s, row, dim, exists);
  });
}

// Sums x over all rows of the block; the lanes of the first row get the sum.
template <class R>
__device__ inline void sum_over_rows(typename R::Part& x) {
  if constexpr (R::kRows > 1) {
    constexpr int kWarps = R::kThreads / 32;
    __shared__ float parts[kWarps][32][kPack + 1];  // padded against bank conflicts
    static_assert(R::kPacks == 1);
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
#pragma unroll
      for (int offset = R::kLanes; offset < 32; offset *= 2) {
        x[0].at[i] += __shfl_xor_sync(~0u, x[0].at[i], offset);
      }
      parts[warp][lane][i] = x[0].at[i];
    }
    __syncthreads();  // the sums of all warps are stored
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
#pragma unroll
      for (int w = 1; w < kWarps; ++w) x[0].at[i] += parts[(warp + w) % kWarps][lane][i];
    }
  }
}

template <class R>
__global__ void __launch_bounds__(R::kThreads)
    residual_norm_backward_kernel(const __grid_constant__ ResidualNormBackward p, float* const partials) {
  const int dim = p.shape.dim;
  typename R::Part weight, s, dy, dweight;
  load_weight<R>(weight, p.weight, dim);
  for_each_element<R>([&](int k, int i) { dweight[k].at[i] = 0.f; });
  RowSums<R::kLanes> sums;
  R::for_each_row(p.shape.rows, [&](int64_t row, bool exists) {
    load_row<R, typename R::S>(s, p.s, row, dim, exists);
    load_row<R, typename R::T>(dy, p.dy, row, dim, exists);
    [[maybe_unused]] typename R::Part slope;
    if constexpr (R::kUseSilu) {
      for_each_element<R>([&](int k, int i) {
        slope[k].at[i] = silu_slope(s[k].at[i]);
        s[k].at[i] = silu(s[k].at[i]);
      });
    }
    float square = 0.f, dot = 0.f;
    for_each_element<R>([&](int k, int i) {
      square = fmaf(s[k].at[i], s[k].at[i], square);
      dot = fmaf(dy[k].at[i] * weight[k].at[i], s[k].at[i], dot);
    });
    const float2 both = sums.sum(square, dot);
    // r = 0 for a row that does not exist: with eps = 0, rsqrtf(0) would make dweight NaN.
    const float r = exists ? rsqrtf(both.x / dim + p.shape.eps) : 0.f, mean = r * both.y / dim;
    for_each_element<R>([&](int k, int i) {
      const float n = r * s[k].at[i];
      s[k].at[i] = r * fmaf(dy[k].at[i], weight[k].at[i], -n * mean);
      if constexpr (R::kUseSilu) s[k].at[i] *= slope[k].at[i];
      dweight[k].at[i] = fmaf(dy[k].at[i], n, dweight[k].at[i]);
    });
    if (p.after != nullptr) {
      load_row<R, typename R::S>(dy, p.after, row, dim, exists);
      for_each_element<R>([&](int k, int i) { s[k].at[i] += dy[k].at[i]; });
    }
    store_row<R, typename R::S>(p.ds, s, row, dim, exists);
    if (p.dbranch != nullptr) store_row<R, typename R::T>(p.dbranch, s, row, dim, exists);
  });
  if (p.dweight.data == nullptr) return;
  sum_over_rows<R>(dweight);
  store_row<R, float>(partials, dweight, blockIdx.x, dim, threadIdx.x < R::kLanes);
}

// Calls launch(RowTile) for the types and dim of the shape.
template <typename Launch>
cudaError_t dispatch_tile(const ResidualNormShape& shape, const Launch& launch) {
  const auto dispatch_dim = [&](auto s, auto t, auto use_silu) {
    using S = decltype(s);
    using T = decltype(t);
    constexpr bool kUseSilu = decltype(use_silu)::value;
    if (shape.dim <= 8 * kPack) return launch(RowTile<S, T, kUseSilu, 128, 1, 8>{});
    if (shape.dim <= 16 * kPack) return launch(RowTile<S, T, kUseSilu, 128, 1, 16>{});
    if (shape.dim <= 32 * kPack) return launch(RowTile<S, T, kUseSilu, 128, 1, 32>{});
    if (shape.dim <= 128 * kPack) return launch(RowTile<S, T, kUseSilu, 128, 1>{});
    if (shape.dim <= 256 * kPack) return launch(RowTile<S, T, kUseSilu, 256, 1>{});
    if (shape.dim <= 512 * kPack) return launch(RowTile<S, T, kUseSilu, 256, 2>{});
    if (shape.dim <= kResidualNormMaxDim) return launch(RowTile<S, T, kUseSilu, 256, 4>{});
    return cudaErrorInvalidValue;
  };
  if (shape.sum_dtype != shape.row_dtype) {
    if (shape.sum_dtype != DType::f32 || shape.use_silu) return cudaErrorInvalidValue;
    return dispatch_16bit(shape.row_dtype, [&](auto t) { return dispatch_dim(0.f, t, std::false_type()); });
  }
  return dispatch_dtype(shape.row_dtype, [&](auto t) {
    return shape.use_silu ? dispatch_dim(t, t, std::true_type()) : dispatch_dim(t, t, std::false_type());
  });
}

// A function of the sizes only, since every block of backward writes a partial.
template <class R>
unsigned block_count(const ResidualNormShape& shape) {
  return static_cast<unsigned>(
      std::min(divide_up(shape.rows, R::kRows), kResidentBlocks * 128 / R::kThreads));
}

}  // namespace
}  // namespace elementwise

cudaError_t residual_norm(const ResidualNorm& p, cudaStream_t stream) {
  if (p.shape.rows == 0) return cudaSuccess;
  return elementwise::dispatch_tile(p.shape, [&](auto tile) {
    using R = decltype(tile);
    const unsigned blocks = 2 * elementwise::block_count<R>(p.shape);
    return launch_grid<elementwise::residual_norm_kernel<R>>(blocks, R::kThreads, 0, stream, p);
  });
}

cudaError_t residual_norm_backward(const ResidualNormBackward& p, Workspace& workspace, cudaStream_t stream) {
  return elementwise::dispatch_tile(p.shape, [&](auto tile) {
    using R = decltype(tile);
    const unsigned blocks = elementwise::block_count<R>(p.shape);
    const bool has_sum = p.dweight.data != nullptr;
    auto* const partials = workspace.array<float>(has_sum ? int64_t{blocks} * p.shape.dim : 0);
    GIRIH_TRY(launch_grid<elementwise::residual_norm_backward_kernel<R>>(blocks, R::kThreads, 0, stream, p,
                                                                         partials));
    return has_sum ? launch_sum_partials(partials, blocks, p.shape.dim, p.dweight, stream) : cudaSuccess;
  });
}

}  // namespace girih::kernels
