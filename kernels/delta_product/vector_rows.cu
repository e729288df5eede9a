// Element-wise kernels of a beta for every channel. A thread has a pack of eight channels of one row of one
// head.
#include "delta_product/vector.h"
#include "tile/grid.h"
#include "tile/instance.h"
#include "tile/launch.h"
#include "tile/pack.h"

namespace girih::kernels {
namespace delta_product::vector {
namespace {

constexpr int kThreads = 256, kPack = 8;

// Rows are aligned to 16 bytes, so an fp32 pack is two accesses of 16 bytes.
template <typename T>
__device__ inline Pack<kPack> load_pack(const T* from) {
  if constexpr (sizeof(T) == 2) {
    return load<kPack>(from);
  } else {
    const auto low = load<4>(from), high = load<4>(from + 4);
    return {{low.at[0], low.at[1], low.at[2], low.at[3], high.at[0], high.at[1], high.at[2], high.at[3]}};
  }
}
template <typename T>
__device__ inline void store_pack(T* to, const Pack<kPack>& pack) {
  if constexpr (sizeof(T) == 2) {
    store<kPack>(to, pack);
  } else {
    store<4>(to, {{pack.at[0], pack.at[1], pack.at[2], pack.at[3]}});
    store<4>(to + 4, {{pack.at[4], pack.at[5], pack.at[6], pack.at[7]}});
  }
}

struct Place {
  int64_t batch, row;
  int head, col;

  __device__ Place(const DeltaShape& shape, int64_t pack) {
    const int packs = shape.D / kPack;
    const int64_t of_head = pack / packs, of_row = of_head / shape.heads,
                  rows = shape.tokens.tokens * shape.n;
    col = static_cast<int>(pack - of_head * packs) * kPack;
    head = static_cast<int>(of_head - of_row * shape.heads);
    batch = of_row / rows, row = of_row - batch * rows;
  }
  template <typename T, template <int> class Array>
  __device__ auto in(const Array<4>& x, int its_head) const {
    return at<T>(x, batch, row, its_head, col);
  }
  template <typename T>
  __device__ Pack<kPack> load(const In<4>& x, int its_head) const {
    return load_pack(in<T>(x, its_head));
  }
  template <typename T>
  __device__ void store(const Out<4>& x, const Pack<kPack>& pack) const {
    store_pack(in<T>(x, head), pack);
  }
};

__device__ inline Pack<kPack> operator*(const Pack<kPack>& x, const Pack<kPack>& y) {
  Pack<kPack> product;
#pragma unroll
  for (int i = 0; i < kPack; ++i) product.at[i] = x.at[i] * y.at[i];
  return product;
}
// x y + z
__device__ inline Pack<kPack> multiplied(const Pack<kPack>& x, const Pack<kPack>& y, const Pack<kPack>& z) {
  Pack<kPack> sum;
#pragma unroll
  for (int i = 0; i < kPack; ++i) sum.at[i] = fmaf(x.at[i], y.at[i], z.at[i]);
  return sum;
}

// Calls f(pack) for every pack.
template <class F>
__device__ inline void for_each_pack(int64_t packs, const F& f) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t pack = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; pack < packs; pack += step)
    f(pack);
}

// T: type of the rows; B: type of beta.
template <typename T, typename B>
__global__ void __launch_bounds__(kThreads)
    make_rows(const __grid_constant__ DeltaVectorRows p, int64_t packs) {
  for_each_pack(packs, [&](int64_t pack) {
    const Place place(p.shape, pack);
    const auto beta = place.load<B>(p.beta, place.head);
    place.store<T>(p.b, beta * place.load<T>(p.k, place.head / p.shape.key_share));
    place.store<T>(p.w, beta * place.load<T>(p.v, place.head));
  });
}

template <typename T, typename B>
__global__ void __launch_bounds__(kThreads)
    row_gradients(const __grid_constant__ DeltaVectorRowGradients p, int64_t packs) {
  for_each_pack(packs, [&](int64_t pack) {
    const Place place(p.shape, pack);
    // Rows outside of all sequences are not read: they may hold any value.
    if (!sequence_of(p.shape.tokens, place.batch, place.row / p.shape.n).inside) return;
    const auto beta = place.load<B>(p.beta, place.head), db = place.load<T>(p.db, place.head),
               dw = place.load<T>(p.dw, place.head), k = place.load<T>(p.k, place.head / p.shape.key_share),
               v = place.load<T>(p.v, place.head), dk = load_pack<T>(place.in<T>(p.dk, place.head));
    place.store<T>(p.dk, multiplied(beta, db, dk));
    place.store<T>(p.dv, beta * dw);
    place.store<B>(p.dbeta, multiplied(k, db, v * dw));
  });
}

// Calls launch(a value of the row type, a value of the beta type, number of packs).
template <class Problem, class Launch>
cudaError_t by_types(const Problem& p, const Launch& launch) {
  const DeltaShape& shape = p.shape;
  const int64_t packs = shape.tokens.batch * shape.tokens.tokens * shape.n * shape.heads * (shape.D / kPack);
  if (packs == 0) return cudaSuccess;
  if (shape.D % kPack != 0 || shape.V != shape.D) return cudaErrorInvalidValue;
  return by_short_element(shape.dtype, [&](auto row) {
    return by_element(p.beta.dtype, [&](auto beta) { return launch(row, beta, packs); });
  });
}

}  // namespace
}  // namespace delta_product::vector

cudaError_t delta_vector_rows(const DeltaVectorRows& p, cudaStream_t stream) {
  using namespace delta_product::vector;
  return by_types(p, [&](auto row, auto beta, int64_t packs) {
    constexpr auto kKernel = make_rows<decltype(row), decltype(beta)>;
    return launch_grid<kKernel>(blocks_for(divide_up(packs, kThreads)), kThreads, 0, stream, p, packs);
  });
}

cudaError_t delta_vector_row_gradients(const DeltaVectorRowGradients& p, cudaStream_t stream) {
  using namespace delta_product::vector;
  return by_types(p, [&](auto row, auto beta, int64_t packs) {
    constexpr auto kKernel = row_gradients<decltype(row), decltype(beta)>;
    return launch_grid<kKernel>(blocks_for(divide_up(packs, kThreads)), kThreads, 0, stream, p, packs);
  });
}

}  // namespace girih::kernels
