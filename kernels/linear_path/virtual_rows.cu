// Virtual rows: u = silu(x) / |silu(x)| for q, and for k and v also the half differences r_m of u over time.
// With r_0 = u and du = e_0,
//
//     forward     r_m at t = (r_{m-1} at t - r_{m-1} at t - 1) / 2
//     backward    e_m at t = dr_m at t + (e_{m+1} at t - e_{m+1} at t + 1) / 2
//
// A few lanes loop over some tokens of a head, backward from the last to the first, and keep r (or e) of the
// previous iteration. The loop starts n - 1 tokens early, since a row depends on n tokens.
#include "linear_path/row.cuh"
#include "tile/silu.h"

namespace girih::kernels {
namespace linear_path {
namespace {

constexpr int kTokens = 16;  // tokens of a walk

// The tokens first, first + 1, ... of one head of q, k or v, and their addresses.
template <typename T>
struct TokenWalk {
  const VirtualRowsShape& shape;
  int64_t sequence, first;
  int head, heads;  // of `tensor`
  enum { kQ, kK, kV } tensor;
  int from, to;  // tokens first + i exist for from <= i < to; empty if the walk or the column does not exist

  __device__ TokenWalk(const VirtualRowsShape& shape, const RowIndex& index, int64_t number, int column)
      : shape(shape) {
    const bool exists = number < index.rows && column < shape.D;
    const auto [part, head_index] = index.heads.divmod(exists ? number : 0);
    const auto [sequence_index, walk_index] = index.tokens.divmod(part);
    sequence = sequence_index, first = static_cast<int64_t>(walk_index) * kTokens;
    tensor = head_index < shape.query_heads ? kQ : head_index < shape.query_heads + shape.heads ? kK : kV;
    heads = tensor == kQ ? shape.query_heads : shape.heads;
    head = tensor == kQ ? head_index : (head_index - shape.query_heads) % shape.heads;
    const int64_t left = shape.tokens - first;
    from = first == 0 ? 0 : -kTokens;
    to = !exists ? from : left < 2 * kTokens ? static_cast<int>(left) : 2 * kTokens;
  }
  __device__ bool has(int i) const { return i >= from && i < to; }
  template <typename P>
  __device__ P* select(P* q, P* k, P* v) const {
    return tensor == kQ ? q : tensor == kK ? k : v;
  }
  // The address of the row of token `first` in TokenRows; below, in a contiguous tensor with `rows` rows for
  // each token.
  __device__ const T* address(const TokenRows& rows) const {
    return static_cast<const T*>(rows.data) + sequence * rows.sequence + first * rows.token + head * shape.D;
  }
  template <typename P>
  __device__ P* address_contiguous(P* data, int rows) const {
    return data + ((sequence * shape.tokens + first) * rows * heads + head) * shape.D;
  }
  __device__ int64_t row_stride() const { return heads * shape.D; }
};

// A pack in the type of memory: for 16-bit types half the registers of a Pack while the load is in flight.
template <typename T>
struct Raw {
  AlignedArray<T, kPack> elements;

  Raw() = default;
  __device__ Raw(const T* from, bool is_read) {
    if (is_read) {
      elements = *reinterpret_cast<const AlignedArray<T, kPack>*>(from);
    } else {
#pragma unroll
      for (int c = 0; c < kPack; ++c) elements.at[c] = from_float<T>(0.f);
    }
  }
  __device__ float operator[](int c) const { return to_float(elements.at[c]); }
};

template <class R, int N>
__global__ void __launch_bounds__(kThreads)
    virtual_rows_kernel(const __grid_constant__ VirtualRows p, const __grid_constant__ RowIndex index) {
  using T = typename R::T;
  const int column = R::column();
  // All lanes of a warp run the same number of iterations, since R::sum() is a warp operation.
  for (int64_t round = 0; round * R::step() < index.rows; ++round) {
    const TokenWalk<T> walk(p.shape, index, round * R::step() + R::first(), column);
    const bool is_q = walk.tensor == TokenWalk<T>::kQ;
    const TokenRows& rows = *walk.select(&p.q, &p.k, &p.v);
    const T* const x = walk.address(rows) + column;
    T* const to =
        walk.address_contiguous(static_cast<T*>(walk.select(p.rows_q, p.rows_k, p.rows_v)), is_q ? 1 : N) +
        column;
    const int64_t row_stride = walk.row_stride(), token_stride = is_q ? row_stride : N * row_stride;
    const auto read = [&](int i) { return Raw<T>(x + i * rows.token, walk.has(i) && !(is_q && i < 0)); };
    [[maybe_unused]] Pack<kPack> previous[N] = {};  // r_0, ..., r_{N-2}
    auto next = read(1 - N);
#pragma unroll 1
    for (int i = 1 - N; i < kTokens; ++i) {
      Pack<kPack> r;
      float square = 0.f;
#pragma unroll
      for (int c = 0; c < kPack; ++c) r.at[c] = next[c];
      if (i + 1 < kTokens) next = read(i + 1);
#pragma unroll
      for (int c = 0; c < kPack; ++c) {
        r.at[c] *= sigmoid_for<T>(r.at[c]);
        square = fmaf(r.at[c], r.at[c], square);
      }
      const float scale = 1.f / fmaxf(sqrtf(R::sum(square)), kMinLength);
#pragma unroll
      for (int c = 0; c < kPack; ++c) r.at[c] *= scale;
      const bool is_written = i >= 0 && walk.has(i);
#pragma unroll
      for (int m = 0; m < N; ++m) {
        if (is_written && (m == 0 || !is_q)) store(to + i * token_stride + m * row_stride, r);
        if (m + 1 == N) break;
#pragma unroll
        for (int c = 0; c < kPack; ++c) {
          const float current = r.at[c];
          r.at[c] = .5f * (current - previous[m].at[c]);
          previous[m].at[c] = current;
        }
      }
    }
  }
}

// With y = silu(x): dy = (du - u <u, du>) / |y|, dx = dy silu'(x).
template <class R, int N>
__global__ void __launch_bounds__(kThreads)
    virtual_rows_backward_kernel(const __grid_constant__ VirtualRowsBackward p,
                                 const __grid_constant__ RowIndex index) {
  using T = typename R::T;
  const int column = R::column();
  struct Token {
    Raw<T> x, dr[N];
  };
  for (int64_t round = 0; round * R::step() < index.rows; ++round) {
    const TokenWalk<T> walk(p.shape, index, round * R::step() + R::first(), column);
    const bool is_q = walk.tensor == TokenWalk<T>::kQ;
    const TokenRows& rows = *walk.select(&p.q, &p.k, &p.v);
    const T* const x = walk.address(rows) + column;
    const auto* const drows = static_cast<const T*>(walk.select(p.rows_q, p.rows_k, p.rows_v));
    const T* const dr = walk.address_contiguous(drows, is_q ? 1 : N) + column;
    T* const to = walk.address_contiguous(static_cast<T*>(walk.select(p.dq, p.dk, p.dv)), 1) + column;
    const int64_t row_stride = walk.row_stride(), token_stride = is_q ? row_stride : N * row_stride;
    const auto read = [&](int i) {
      Token token;
      const bool has_token = walk.has(i), is_own = has_token && i < kTokens;
      token.x = Raw<T>(x + i * rows.token, is_own);
#pragma unroll
      for (int m = 0; m < N; ++m) {
        token.dr[m] = Raw<T>(dr + i * token_stride + m * row_stride, m == 0 ? is_own : has_token && !is_q);
      }
      return token;
    };
    [[maybe_unused]] Pack<kPack> following[N];  // following[m] is e_m of token t + 1, m = 1..N-1
#pragma unroll
    for (int m = 0; m < N; ++m) following[m] = zeros<kPack>();
    auto next = read(kTokens + N - 2);
#pragma unroll 1
    for (int i = kTokens + N - 2; i >= 0; --i) {
      const auto token = next;
      if (i > 0) next = read(i - 1);
      Pack<kPack> du;
#pragma unroll
      for (int c = 0; c < kPack; ++c) du.at[c] = token.dr[N - 1][c];
#pragma unroll
      for (int m = N - 1; m > 0; --m) {
#pragma unroll
        for (int c = 0; c < kPack; ++c) {
          const float e = du.at[c];
          du.at[c] = fmaf(.5f, e - following[m].at[c], token.dr[m - 1][c]);
          following[m].at[c] = e;
        }
      }
      float square = 0.f, dot = 0.f;
      Pack<kPack> s;
#pragma unroll
      for (int c = 0; c < kPack; ++c) {
        s.at[c] = sigmoid_for<T>(token.x[c]);
        const float y = token.x[c] * s.at[c];
        square = fmaf(y, y, square);
        dot = fmaf(y, du.at[c], dot);
      }
      const float length = sqrtf(R::sum(square)), scale = 1.f / fmaxf(length, kMinLength);
      // For |y| <= kMinLength, u = y / kMinLength.
      dot = R::sum(dot) * (length > kMinLength ? scale * scale : 0.f);
      if (i >= kTokens || !walk.has(i)) continue;
#pragma unroll
      for (int c = 0; c < kPack; ++c) {
        const float y = token.x[c] * s.at[c], slope = fmaf(y, 1.f - s.at[c], s.at[c]);
        du.at[c] = scale * fmaf(-y, dot, du.at[c]) * slope;
      }
      store(to + i * row_stride, du);
    }
  }
}

// Calls launch(RowLanes, Constant<N>, index of the walks) if there are tokens.
template <typename Launch>
cudaError_t dispatch_shape(const VirtualRowsShape& shape, const Launch& launch) {
  const int64_t heads = shape.query_heads + 2 * shape.heads;
  const RowIndex index(shape.batch, divide_up(shape.tokens, kTokens), static_cast<int>(heads));
  if (index.rows > 0 && (shape.n < 1 || shape.n > kMaxVirtualRows)) return cudaErrorInvalidValue;
  return dispatch_rows(index, shape.D, shape.dtype, [&](auto rows) {
    if (shape.n == 1) return launch(rows, Constant<1>(), index);
    if (shape.n == 2) return launch(rows, Constant<2>(), index);
    if (shape.n == 3) return launch(rows, Constant<3>(), index);
    return launch(rows, Constant<kMaxVirtualRows>(), index);
  });
}

}  // namespace
}  // namespace linear_path

cudaError_t virtual_rows(const VirtualRows& p, cudaStream_t stream) {
  using namespace linear_path;
  return dispatch_shape(p.shape, [&](auto rows, auto n, const RowIndex& index) {
    using R = decltype(rows);
    constexpr int kN = n();
    return launch_grid<virtual_rows_kernel<R, kN>>(index.template blocks<R>(), kThreads, 0, stream, p, index);
  });
}

cudaError_t virtual_rows_backward(const VirtualRowsBackward& p, cudaStream_t stream) {
  using namespace linear_path;
  return dispatch_shape(p.shape, [&](auto rows, auto n, const RowIndex& index) {
    using R = decltype(rows);
    constexpr int kN = n();
    return launch_grid<virtual_rows_backward_kernel<R, kN>>(index.template blocks<R>(), kThreads, 0, stream,
                                                            p, index);
  });
}

}  // namespace girih::kernels
