// Rows of q, k and v: u = silu(x) / |silu(x)|, and for k and v the half differences r_m of u over time.
//
// A few lanes have a token's row of a head. Forward they form u of this token and of the n - 1 before it,
// which their neighbours have just read; backward they add up du from the gradients of this token's rows and
// of the n - 1 that follow.
#include "linear_path/row.cuh"
#include "tile/silu.h"

namespace girih::kernels {
namespace linear_path {
namespace {

// (-1)^j C(m, j) 2^-m
__host__ __device__ constexpr float coefficient(int m, int j) {
  float c = 1.f;
  for (int i = 0; i < j; ++i) c = -c * static_cast<float>(m - i) / static_cast<float>(i + 1);
  for (int i = 0; i < m; ++i) c /= 2.f;
  return c;
}
static_assert(coefficient(0, 0) == 1.f && coefficient(1, 0) == .5f && coefficient(1, 1) == -.5f);
static_assert(coefficient(2, 1) == -.5f && coefficient(3, 2) == .375f && coefficient(3, 3) == -.125f);

// Which sequence, token and head of x a row is.
struct Place {
  int64_t b;
  int t, head;

  __device__ Place(const RowIndex& index, int64_t row) {
    const auto [token, its_head] = index.heads.split(row);
    const auto [sequence, its_token] = index.tokens.split(token);
    b = sequence, t = its_token, head = its_head;
  }
  // Of x, `back` tokens before.
  __device__ int64_t of_x(const VirtualRowsShape& shape, int back) const {
    const int64_t heads = shape.query_heads + 2 * shape.heads;
    return ((b * shape.tokens + t - back) * heads + head) * shape.D;
  }
  __device__ int64_t of_q(const VirtualRowsShape& shape) const {
    return ((b * shape.tokens + t) * shape.query_heads + head) * shape.D;
  }
  // Of row m of the token `ahead` tokens after, in k, or in v.
  __device__ int64_t of_kv(const VirtualRowsShape& shape, int ahead, int m) const {
    const int64_t own = (head - shape.query_heads) % shape.heads;
    return (((b * shape.tokens + t + ahead) * shape.n + m) * shape.heads + own) * shape.D;
  }
  __device__ bool is_q(const VirtualRowsShape& shape) const { return head < shape.query_heads; }
  __device__ bool is_k(const VirtualRowsShape& shape) const { return head < shape.query_heads + shape.heads; }
};

template <class R, int N>
__global__ void __launch_bounds__(kThreads)
    virtual_rows_kernel(const __grid_constant__ VirtualRows p, const __grid_constant__ RowIndex index) {
  using T = typename R::T;
  const VirtualRowsShape& shape = p.shape;
  const int64_t rows = index.rows;
  const int column = R::column();
  // All rows of a warp go round as often: sums are of all lanes.
  for (int64_t round = 0; round * R::step() < rows; ++round) {
    const int64_t row = round * R::step() + R::first();
    const bool there = row < rows && column < shape.D;
    const Place at(index, row < rows ? row : 0);
    Pack<kPack> u[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const bool is_read = there && at.t >= j && (j == 0 || !at.is_q(shape));
      u[j] = is_read ? load<kPack>(static_cast<const T*>(p.x) + at.of_x(shape, j) + column) : zeros<kPack>();
      float square = 0.f;
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        u[j].at[i] = silu(u[j].at[i]);
        square = fmaf(u[j].at[i], u[j].at[i], square);
      }
      const float length = fmaxf(sqrtf(R::sum(square)), kShortestLength);
#pragma unroll
      for (int i = 0; i < kPack; ++i) u[j].at[i] /= length;
    }
    if (!there) continue;
    if (at.is_q(shape)) {
      store(static_cast<T*>(p.q) + at.of_q(shape) + column, u[0]);
      continue;
    }
    T* const to = static_cast<T*>(at.is_k(shape) ? p.k : p.v);
#pragma unroll
    for (int m = 0; m < N; ++m) {
      auto r = zeros<kPack>();
#pragma unroll
      for (int j = 0; j <= m; ++j) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) r.at[i] = fmaf(coefficient(m, j), u[j].at[i], r.at[i]);
      }
      store(to + at.of_kv(shape, 0, m) + column, r);
    }
  }
}

//     dy = (du - u <u, du>) / |y|        dx = dy silu'(x),    y = silu(x)
template <class R, int N>
__global__ void __launch_bounds__(kThreads)
    virtual_rows_backward_kernel(const __grid_constant__ VirtualRowsBackward p,
                                 const __grid_constant__ RowIndex index) {
  using T = typename R::T;
  const VirtualRowsShape& shape = p.shape;
  const int64_t rows = index.rows;
  const int column = R::column();
  for (int64_t round = 0; round * R::step() < rows; ++round) {
    const int64_t row = round * R::step() + R::first();
    const bool there = row < rows && column < shape.D;
    const Place at(index, row < rows ? row : 0);
    auto x = zeros<kPack>(), du = zeros<kPack>();
    if (there) {
      x = load<kPack>(static_cast<const T*>(p.x) + at.of_x(shape, 0) + column);
      if (at.is_q(shape)) {
        du = load<kPack>(static_cast<const T*>(p.dq) + at.of_q(shape) + column);
      } else {
        const T* const from = static_cast<const T*>(at.is_k(shape) ? p.dk : p.dv);
#pragma unroll
        for (int m = 0; m < N; ++m) {
#pragma unroll
          for (int j = 0; j <= m; ++j) {
            if (at.t + j >= shape.tokens) continue;
            const auto dr = load<kPack>(from + at.of_kv(shape, j, m) + column);
#pragma unroll
            for (int i = 0; i < kPack; ++i) du.at[i] = fmaf(coefficient(m, j), dr.at[i], du.at[i]);
          }
        }
      }
    }
    float square = 0.f, along = 0.f;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float y = silu(x.at[i]);
      square = fmaf(y, y, square);
      along = fmaf(y, du.at[i], along);
    }
    const float length = sqrtf(R::sum(square)), by = 1.f / fmaxf(length, kShortestLength);
    // A shorter one is only scaled.
    along = R::sum(along) * (length > kShortestLength ? by * by : 0.f);
    if (!there) continue;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      du.at[i] = by * fmaf(-silu(x.at[i]), along, du.at[i]) * silu_slope(x.at[i]);
    }
    store(static_cast<T*>(p.dx) + at.of_x(shape, 0) + column, du);
  }
}

// f(Rows, N)
template <typename F>
cudaError_t with_shape(const VirtualRowsShape& shape, const F& f) {
  return with_rows(shape.D, shape.dtype, [&](auto rows) {
    switch (shape.n) {
      case 1:
        return f(rows, std::integral_constant<int, 1>{});
      case 2:
        return f(rows, std::integral_constant<int, 2>{});
      case 3:
        return f(rows, std::integral_constant<int, 3>{});
      case kMostVirtualRows:
        return f(rows, std::integral_constant<int, kMostVirtualRows>{});
    }
    return cudaErrorInvalidValue;
  });
}

RowIndex index_of(const VirtualRowsShape& shape) {
  return RowIndex(shape.batch, shape.tokens, shape.query_heads + 2 * shape.heads);
}

}  // namespace
}  // namespace linear_path

cudaError_t virtual_rows(const VirtualRows& p, cudaStream_t stream) {
  using namespace linear_path;
  const RowIndex index = index_of(p.shape);
  if (index.rows == 0) return cudaSuccess;
  if (index.rows > kMostRows) return cudaErrorInvalidValue;
  return with_shape(p.shape, [&](auto rows, auto n) {
    using R = decltype(rows);
    constexpr int kN = decltype(n)::value;
    virtual_rows_kernel<R, kN><<<index.blocks<R>(), kThreads, 0, stream>>>(p, index);
    return cudaGetLastError();
  });
}

cudaError_t virtual_rows_backward(const VirtualRowsBackward& p, cudaStream_t stream) {
  using namespace linear_path;
  const RowIndex index = index_of(p.shape);
  if (index.rows == 0) return cudaSuccess;
  if (index.rows > kMostRows) return cudaErrorInvalidValue;
  return with_shape(p.shape, [&](auto rows, auto n) {
    using R = decltype(rows);
    constexpr int kN = decltype(n)::value;
    virtual_rows_backward_kernel<R, kN><<<index.blocks<R>(), kThreads, 0, stream>>>(p, index);
    return cudaGetLastError();
  });
}

}  // namespace girih::kernels
