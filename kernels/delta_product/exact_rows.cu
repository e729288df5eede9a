// A warp has one row of one head: of k, v and beta, or of q.
//
//     k <- k / |k|       b = beta k       w = beta v       q <- q / |q|
//
// Lengths are made in fp64: an error in |k| is the same at every step that repeats a key, and where beta is 2
// the steps reflect and it grows with their number.
#include "delta_product/exact.h"
#include "tile/grid.h"
#include "tile/pack.h"

namespace girih::kernels {
namespace delta_product {
namespace {

constexpr int kThreads = 256;
constexpr int kPerLane = kDeltaMaxWidth / 32;  // elements of a row, at most

struct RowOf {
  int64_t batch, row;
  int head;
};

// The warp's row: jobs 0..steps-1 have steps' rows, the others queries'.
struct Job {
  bool query;
  RowOf at;

  __device__ Job(const DeltaExactShape& shape, int64_t job) {
    const Tokens& tokens = shape.pieces.tokens;
    const int64_t steps = tokens.batch * tokens.tokens * shape.n * shape.heads;
    query = job >= steps;
    if (query) job -= steps;
    const int heads = query ? shape.query_heads : shape.heads;
    const int64_t rows = query ? tokens.tokens : tokens.tokens * shape.n, row = job / heads;
    at = {row / rows, row % rows, static_cast<int>(job % heads)};
  }
};

int64_t jobs_of(const DeltaExactShape& shape) {
  const Tokens& tokens = shape.pieces.tokens;
  return tokens.batch * tokens.tokens * (static_cast<int64_t>(shape.n) * shape.heads + shape.query_heads);
}

__device__ inline double over_warp(double x) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

// A row in a warp's registers: lane l has the elements l, l + 32, ...; zero beyond its width.
struct Elements32 {
  float at[kPerLane];

  template <class F>
  __device__ static void each(int width, const F& f) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int d = static_cast<int>(threadIdx.x) % 32 + 32 * i;
      if (d < width) f(i, d);
    }
  }
  __device__ Elements32(const In<4>& x, const RowOf& row, int width) {
    const int64_t from = offset_of(x, row.batch, row.row, row.head);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) at[i] = 0.f;
    switch (x.dtype) {
      case DType::f16:
        read<__half>(x, from, width);
        break;
      case DType::bf16:
        read<__nv_bfloat16>(x, from, width);
        break;
      case DType::f64:
        read<double>(x, from, width);
        break;
      case DType::f32:
        read<float>(x, from, width);
        break;
    }
  }
  __device__ double dot(const Elements32& other) const {
    double sum = 0.;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) sum += static_cast<double>(at[i]) * static_cast<double>(other.at[i]);
    return over_warp(sum);
  }
  // x <- x / |x|; what x was multiplied by.
  __device__ float to_unit() {
    const double by = rsqrt(dot(*this) + 1e-6);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) at[i] = static_cast<float>(static_cast<double>(at[i]) * by);
    return static_cast<float>(by);
  }
  // Its gradient becomes that of x:   (dy - y (y . dy)) / |x|
  __device__ void gradient_of_unit(const Elements32& y, float by) {
    const double along = y.dot(*this);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      at[i] = by * static_cast<float>(static_cast<double>(at[i]) - static_cast<double>(y.at[i]) * along);
    }
  }
  __device__ void store(const Out<4>& x, const RowOf& row, int width) const {
    each(width, [&](int i, int d) { store_any(x, at[i], row.batch, row.row, row.head, d); });
  }
  // fp32, and zeros up to a multiple of 4.
  __device__ void store_padded(const Out<4>& x, const RowOf& row, int width) const {
    float* const to = static_cast<float*>(x.data) + offset_of(x, row.batch, row.row, row.head);
    each(in_fours(width), [&](int i, int d) { to[d] = at[i]; });
  }

 private:
  template <typename T>
  __device__ void read(const In<4>& x, int64_t from, int width) {
    each(width,
         [&](int i, int d) { at[i] = to_float(static_cast<const T*>(x.data)[from + d * x.stride[3]]); });
  }
};

__device__ inline Elements32 operator*(const Elements32& x, const Elements32& y) {
  Elements32 product = x;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) product.at[i] *= y.at[i];
  return product;
}

__global__ void __launch_bounds__(kThreads)
    make_rows(const __grid_constant__ DeltaExactRows p, int64_t jobs) {
  const DeltaExactShape& shape = p.shape;
  const int64_t grid = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; i < jobs;
       i += grid) {
    const Job job(shape, i);
    if (job.query && p.unit_q.data == nullptr) return;
    Elements32 x(job.query ? p.q : p.k, job.at, shape.D);
    if (p.unit) x.to_unit();
    if (job.query) {
      x.store_padded(p.unit_q, job.at, shape.D);
      continue;
    }
    if (p.unit_k.data != nullptr) x.store_padded(p.unit_k, job.at, shape.D);
    // A beta for every channel: D = V.
    (x * Elements32(p.beta, job.at, shape.D)).store_padded(p.b, job.at, shape.D);
    if (p.w.data != nullptr) {
      (Elements32(p.v, job.at, shape.V) * Elements32(p.beta, job.at, shape.V))
          .store_padded(p.w, job.at, shape.V);
    }
  }
}

// dk = dk + beta db, through the length;   dv = beta dw;   dbeta = db k + dw v, in sum if it is one
__global__ void __launch_bounds__(kThreads)
    row_gradients(const __grid_constant__ DeltaExactRowGradients p, int64_t jobs) {
  const DeltaExactShape& shape = p.shape;
  const Tokens& tokens = shape.pieces.tokens;
  const int64_t grid = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; i < jobs;
       i += grid) {
    const Job job(shape, i);
    // Rows that no sequence owns are not read: they may hold anything.
    const bool owned =
        sequence_of(tokens, job.at.batch, job.query ? job.at.row : job.at.row / shape.n).inside;
    const int D = owned ? shape.D : 0, V = owned ? shape.V : 0;
    Elements32 x(job.query ? p.q : p.k, job.at, D);
    const float by = p.unit ? x.to_unit() : 1.f;
    Elements32 dx(job.query ? p.dunit_q : p.dunit_k, job.at, D);
    if (job.query) {
      if (p.unit) dx.gradient_of_unit(x, by);
      dx.store(p.dq, job.at, shape.D);
      continue;
    }
    Elements32 db(p.db, job.at, D), dw(p.dw, job.at, V);
    const Elements32 v(p.v, job.at, V), beta_of_k(p.beta, job.at, D), beta_of_v(p.beta, job.at, V);
    const Elements32 of_k = db * x, of_v = dw * v;
    if (p.vector) {
      Elements32 dbeta = of_k;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) dbeta.at[j] += of_v.at[j];
      dbeta.store(p.dbeta, job.at, shape.D);
    } else {
      double sum = 0.;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        sum += static_cast<double>(of_k.at[j]) + static_cast<double>(of_v.at[j]);
      }
      sum = over_warp(sum);
      if (threadIdx.x % 32 == 0) {
        store_any(p.dbeta, static_cast<float>(sum), job.at.batch, job.at.row, job.at.head, 0);
      }
    }
    (dw * beta_of_v).store(p.dv, job.at, shape.V);
    db = db * beta_of_k;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) dx.at[j] += db.at[j];
    if (p.unit) dx.gradient_of_unit(x, by);
    dx.store(p.dk, job.at, shape.D);
  }
}

template <auto Kernel, class Problem>
cudaError_t launch(const Problem& p, cudaStream_t stream) {
  if (p.shape.D > kDeltaMaxWidth || p.shape.V > kDeltaMaxWidth) return cudaErrorInvalidValue;
  const int64_t jobs = jobs_of(p.shape);
  if (jobs == 0) return cudaSuccess;
  Kernel<<<blocks_for(divide_up(jobs, kThreads / 32)), kThreads, 0, stream>>>(p, jobs);
  return cudaGetLastError();
}

}  // namespace
}  // namespace delta_product

cudaError_t delta_exact_rows(const DeltaExactRows& p, cudaStream_t stream) {
  return delta_product::launch<delta_product::make_rows>(p, stream);
}
cudaError_t delta_exact_row_gradients(const DeltaExactRowGradients& p, cudaStream_t stream) {
  return delta_product::launch<delta_product::row_gradients>(p, stream);
}

}  // namespace girih::kernels
