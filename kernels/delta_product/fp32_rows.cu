// A group of lanes has one row of one head: k, v and beta, or q.
//
//     k <- k / |k|       b = beta k       w = beta v       q <- q / |q|
//
// Lengths are computed in fp64: an error of |k| is the same at every step that repeats a key; if beta is 2,
// the steps are reflections and the error grows with their number.
#include <algorithm>

#include "delta_product/fp32.h"
#include "tile/grid.h"
#include "tile/instance.h"
#include "tile/launch.h"
#include "tile/pack.h"

namespace girih::kernels {
namespace delta_product {
namespace {

constexpr int kThreads = 256;

// x / y; 32-bit division, where possible, takes a fifth of the time.
__device__ inline int64_t quotient(int64_t x, int64_t y) {
  return (x | y) >> 32 == 0 ? static_cast<uint32_t>(x) / static_cast<uint32_t>(y) : x / y;
}

struct RowPosition {
  int64_t batch, row;
  int head;
};

// Rows of steps, or of queries.
__host__ __device__ inline int64_t rows_of(const DeltaFp32Shape& shape, bool queries) {
  const SequenceLayout& tokens = shape.segments.tokens;
  return tokens.batch * tokens.tokens * (queries ? shape.query_heads : int64_t{shape.n} * shape.heads);
}

// Row `number` of the `each` rows of a warp, of steps or of queries. If the row does not exist, its lanes
// process row 0, so that they take part in shuffles.
struct RowWork {
  bool query, exists;
  RowPosition at;

  __device__ RowWork(const DeltaFp32Shape& shape, int64_t warp, int each, int number) {
    const int64_t of_steps = divide_up(rows_of(shape, false), each);
    query = warp >= of_steps;
    int64_t row_index = (query ? warp - of_steps : warp) * each + number;
    exists = row_index < rows_of(shape, query);
    if (!exists) row_index = 0;
    const int heads = query ? shape.query_heads : shape.heads;
    const int64_t rows = shape.segments.tokens.tokens * (query ? 1 : shape.n),
                  row = quotient(row_index, heads), batch = quotient(row, rows);
    at = {batch, row - batch * rows, static_cast<int>(row_index - row * heads)};
  }
};

// Calls f(a value of the type).
template <class F>
__device__ inline void with_type(DType type, const F& f) {
  switch (type) {
    case DType::f16:
      return f(__half());
    case DType::bf16:
      return f(__nv_bfloat16());
    case DType::f64:
      return f(double());
    case DType::f32:
      return f(float());
  }
}

// A row of up to 8 Lanes elements. Lane l has packs l and l + Lanes of four elements; elements beyond the
// width are zero.
template <int Lanes>
struct Row {
  float at[8];

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % Lanes; }
  // Calls f(index i of the lane's element, column) for both packs.
  template <class F>
  __device__ static void each_pack(const F& f) {
#pragma unroll
    for (int i = 0; i < 2; ++i) f(4 * i, 4 * (lane() + i * Lanes));
  }

  __device__ Row(const InputTensor<4>& x, const RowPosition& row, int width) {
#pragma unroll
    for (int i = 0; i < 8; ++i) at[i] = 0.f;
    const int64_t from = offset_of(x, row.batch, row.row, row.head), stride = x.stride[3];
    with_type(x.dtype, [&](auto element) {
      using T = decltype(element);
      const T* const data = static_cast<const T*>(x.data) + from;
      const bool packed = stride == 1 && reinterpret_cast<uintptr_t>(data) % (4 * sizeof(T)) == 0;
      each_pack([&](int i, int d) {
        if (packed && d + 4 <= width) {
          set_pack(i, load<4>(data + d));
        } else if (stride == 0 && d < width) {
          const float one = to_float(data[0]);
          set_pack(i, {one, d + 1 < width ? one : 0.f, d + 2 < width ? one : 0.f, d + 3 < width ? one : 0.f});
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (d + e < width) at[i + e] = to_float(data[(d + e) * stride]);
          }
        }
      });
    });
  }
  __device__ double dot(const Row& other) const {
    double sum = 0.;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += static_cast<double>(at[i]) * static_cast<double>(other.at[i]);
    return over_lanes(sum);
  }
  __device__ static double over_lanes(double x) {
#pragma unroll
    for (int other = Lanes / 2; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
    return x;
  }
  // x <- x / |x|; returns 1 / |x|.
  __device__ float to_unit() {
    const double by = rsqrt(dot(*this) + 1e-6);
#pragma unroll
    for (int i = 0; i < 8; ++i) at[i] = static_cast<float>(static_cast<double>(at[i]) * by);
    return static_cast<float>(by);
  }
  // The gradient of y = x / |x| becomes that of x:   (dy - y (y . dy)) / |x|
  __device__ void gradient_of_unit(const Row& y, float by) {
    const double along = y.dot(*this);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      at[i] = by * static_cast<float>(static_cast<double>(at[i]) - static_cast<double>(y.at[i]) * along);
    }
  }
  __device__ Row operator*(const Row& other) const {
    Row product = *this;
#pragma unroll
    for (int i = 0; i < 8; ++i) product.at[i] *= other.at[i];
    return product;
  }
  __device__ Row operator+(const Row& other) const {
    Row sum = *this;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum.at[i] += other.at[i];
    return sum;
  }
  __device__ void store(const OutputTensor<4>& x, const RowPosition& row, int width) const {
    const int64_t from = offset_of(x, row.batch, row.row, row.head), stride = x.stride[3];
    with_type(x.dtype, [&](auto element) {
      using T = decltype(element);
      T* const data = static_cast<T*>(x.data) + from;
      const bool packed = stride == 1 && reinterpret_cast<uintptr_t>(data) % (4 * sizeof(T)) == 0;
      each_pack([&](int i, int d) {
        if (packed && d + 4 <= width) {
          kernels::store<4>(data + d, pack(i));
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (d + e < width) data[(d + e) * stride] = from_float<T>(at[i + e]);
          }
        }
      });
    });
  }
  // Stores fp32 with zeros up to a multiple of 4 elements.
  __device__ void store_padded(const OutputTensor<4>& x, const RowPosition& row, int width) const {
    float* const to = static_cast<float*>(x.data) + offset_of(x, row.batch, row.row, row.head);
    each_pack([&](int i, int d) {
      if (d < width) kernels::store<4>(to + d, pack(i));
    });
  }

 private:
  __device__ Pack<4> pack(int i) const { return {{at[i], at[i + 1], at[i + 2], at[i + 3]}}; }
  __device__ void set_pack(int i, const Pack<4>& four) {
#pragma unroll
    for (int e = 0; e < 4; ++e) at[i + e] = four.at[e];
  }
};

// Calls f(row_work) for the rows of this warp. All lanes of a warp call f equally often, so shuffles are
// convergent.
template <int Lanes, class F>
__device__ inline void each_row(const DeltaFp32Shape& shape, int64_t warps, const F& f) {
  constexpr int kEach = 32 / Lanes;
  const int64_t grid = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; i < warps;
       i += grid) {
    f(RowWork(shape, i, kEach, static_cast<int>(threadIdx.x) % 32 / Lanes));
  }
}

template <int Lanes>
__global__ void __launch_bounds__(kThreads)
    make_rows(const __grid_constant__ DeltaFp32Rows p, int64_t warps) {
  using Row = delta_product::Row<Lanes>;
  each_row<Lanes>(p.shape, warps, [&](const RowWork& row_work) {
    const int D = row_work.exists ? p.shape.D : 0, V = row_work.exists ? p.shape.V : 0;
    Row x(row_work.query ? p.q : p.k, row_work.at, D);
    if (p.unit) x.to_unit();
    if (row_work.query) return x.store_padded(p.unit_q, row_work.at, D);
    if (p.unit_k.data != nullptr) x.store_padded(p.unit_k, row_work.at, D);
    // With a beta for every channel D = V.
    (x * Row(p.beta, row_work.at, D)).store_padded(p.b, row_work.at, D);
    if (p.w.data != nullptr)
      (Row(p.v, row_work.at, V) * Row(p.beta, row_work.at, V)).store_padded(p.w, row_work.at, V);
  });
}

// dk = dk + beta db, through the length;   dv = beta dw;   dbeta = db k + dw v, summed over columns if beta
// is one number a step.
template <int Lanes>
__global__ void __launch_bounds__(kThreads)
    row_gradients(const __grid_constant__ DeltaFp32RowGradients p, int64_t warps) {
  using Row = delta_product::Row<Lanes>;
  const DeltaFp32Shape& shape = p.shape;
  each_row<Lanes>(shape, warps, [&](const RowWork& row_work) {
    // Rows outside of all sequences are not read: they may hold any value.
    const bool owned =
        row_work.exists && sequence_of(shape.segments.tokens, row_work.at.batch,
                                       row_work.query ? row_work.at.row : quotient(row_work.at.row, shape.n))
                               .is_owned;
    const int D = owned ? shape.D : 0, V = owned ? shape.V : 0;
    const int to_D = row_work.exists ? shape.D : 0, to_V = row_work.exists ? shape.V : 0;
    Row x(row_work.query ? p.q : p.k, row_work.at, D);
    const float by = p.unit ? x.to_unit() : 1.f;
    Row dx(row_work.query ? p.dunit_q : p.dunit_k, row_work.at, D);
    if (row_work.query) {
      if (p.unit) dx.gradient_of_unit(x, by);
      return dx.store(p.dq, row_work.at, to_D);
    }
    const Row db(p.db, row_work.at, D), dw(p.dw, row_work.at, V), v(p.v, row_work.at, V),
        beta_of_k(p.beta, row_work.at, D), beta_of_v(p.beta, row_work.at, V), of_k = db * x, of_v = dw * v;
    if (p.has_channel_beta) {
      (of_k + of_v).store(p.dbeta, row_work.at, to_D);
    } else {
      double sum = 0.;
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += static_cast<double>(of_k.at[i]) + static_cast<double>(of_v.at[i]);
      sum = Row::over_lanes(sum);
      if (row_work.exists && Row::lane() == 0) {
        store_element(p.dbeta, static_cast<float>(sum), row_work.at.batch, row_work.at.row, row_work.at.head,
                      0);
      }
    }
    (dw * beta_of_v).store(p.dv, row_work.at, to_V);
    dx = dx + db * beta_of_k;
    if (p.unit) dx.gradient_of_unit(x, by);
    dx.store(p.dk, row_work.at, to_D);
  });
}

template <auto Kernel, int Lanes, class Problem>
cudaError_t launch(const Problem& p, bool queries, cudaStream_t stream) {
  constexpr int kEach = 32 / Lanes;
  const int64_t warps =
      divide_up(rows_of(p.shape, false), kEach) + (queries ? divide_up(rows_of(p.shape, true), kEach) : 0);
  if (warps == 0) return cudaSuccess;
  return launch_grid<Kernel>(clamp_grid_blocks(divide_up(warps, kThreads / 32)), kThreads, 0, stream, p,
                             warps);
}

}  // namespace
}  // namespace delta_product

cudaError_t delta_fp32_rows(const DeltaFp32Rows& p, cudaStream_t stream) {
  using namespace delta_product;
  return dispatch_width<64, 128, kDeltaMaxWidth>(std::max(p.shape.D, p.shape.V), [&](auto width) {
    constexpr int kLanes = width() / 8;
    return launch<make_rows<kLanes>, kLanes>(p, p.unit_q.data != nullptr, stream);
  });
}
cudaError_t delta_fp32_row_gradients(const DeltaFp32RowGradients& p, cudaStream_t stream) {
  using namespace delta_product;
  return dispatch_width<64, 128, kDeltaMaxWidth>(std::max(p.shape.D, p.shape.V), [&](auto width) {
    constexpr int kLanes = width() / 8;
    return launch<row_gradients<kLanes>, kLanes>(p, p.dq.data != nullptr, stream);
  });
}

}  // namespace girih::kernels
