// (a, b) -> (a cos - b sin, a sin + b cos) for the pairs (i, i + D/2) of q and k of a token; v is copied.
// backward rotates by the negative angle.
//
// A block has a token: some threads compute cos and sin of the angles, then all threads rotate packs of
// pairs.
#include "elementwise/elementwise.h"
#include "tile/grid.h"
#include "tile/instance.h"
#include "tile/launch.h"
#include "tile/pack.h"

namespace girih::kernels {
namespace elementwise {
namespace {

constexpr int kPack = kElementwisePack, kThreads = 256;

// The addresses of the heads of q, k and v of a token, in three tensors or in one.
template <typename T>
struct HeadPointers {
  T *q, *k, *v;

  __device__ T* head_address(int head, const RotaryShape& shape) const {
    const int k = head - shape.query_heads, v = k - shape.heads;
    return k < 0 ? q + head * shape.D : v < 0 ? this->k + k * shape.D : this->v + v * shape.D;
  }
};
template <typename T, typename P>
__device__ HeadPointers<T> separate_heads(const RotaryShape& shape, int64_t token, P* q, P* k, P* v) {
  const int64_t kv_offset = token * shape.heads * shape.D;
  return {static_cast<T*>(q) + token * shape.query_heads * shape.D, static_cast<T*>(k) + kv_offset,
          static_cast<T*>(v) + kv_offset};
}
template <typename T, typename P>
__device__ HeadPointers<T> joined_heads(const RotaryShape& shape, int64_t token, P* x) {
  T* const q = static_cast<T*>(x) + token * (shape.query_heads + 2 * shape.heads) * shape.D;
  T* const k = q + shape.query_heads * shape.D;
  return {q, k, k + shape.heads * shape.D};
}

// `sign`: the sign of the angle.
template <typename T>
__device__ void rotate(const RotaryShape& shape, int64_t token, float sign, const HeadPointers<const T>& from,
                       const HeadPointers<T>& to) {
  __shared__ float cosine[kRotaryMaxDim / 2];
  __shared__ float sine[kRotaryMaxDim / 2];
  const int half = shape.D / 2, packs = half / kPack;
  const int64_t position_index = shape.has_row_positions ? token : token % shape.tokens;
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    const float angle = static_cast<float>(shape.position[position_index]) * shape.rate[i];
    cosine[i] = to_float(from_float<T>(cosf(angle)));
    sine[i] = sign * to_float(from_float<T>(sinf(angle)));
  }
  __syncthreads();  // cosine and sine are stored
  const int rotated = (shape.query_heads + shape.heads) * packs, all = rotated + shape.heads * packs;
  for (int job = threadIdx.x; job < all; job += blockDim.x) {
    const int head = job / packs, i = (job - head * packs) * kPack;
    const T* const x = from.head_address(head, shape) + i;
    T* const y = to.head_address(head, shape) + i;
    auto a = load<kPack>(x), b = load<kPack>(x + half);
    if (job < rotated) {
#pragma unroll
      for (int c = 0; c < kPack; ++c) {
        const float own = a.at[c], cos = cosine[i + c], sin = sine[i + c];
        a.at[c] = fmaf(own, cos, -b.at[c] * sin);
        b.at[c] = fmaf(own, sin, b.at[c] * cos);
      }
    }
    store(y, a), store(y + half, b);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) rotary_kernel(const __grid_constant__ Rotary p) {
  const int64_t token = blockIdx.x;
  rotate<T>(p.shape, token, 1.f, joined_heads<const T>(p.shape, token, p.x),
            separate_heads<T>(p.shape, token, p.q, p.k, p.v));
}

template <typename T>
__global__ void __launch_bounds__(kThreads) rotary_backward_kernel(const __grid_constant__ RotaryBackward p) {
  const int64_t token = blockIdx.x;
  rotate<T>(p.shape, token, -1.f, separate_heads<const T>(p.shape, token, p.dq, p.dk, p.dv),
            joined_heads<T>(p.shape, token, p.dx));
}

// Calls launch(T(), blocks, threads) for the element type T if there are tokens.
template <typename Launch>
cudaError_t dispatch(const RotaryShape& shape, const Launch& launch) {
  const int64_t blocks = shape.batch * shape.tokens;
  const int64_t packs = static_cast<int64_t>(shape.query_heads + 2 * shape.heads) * (shape.D / 2 / kPack);
  if (blocks == 0 || packs == 0) return cudaSuccess;
  if (shape.D % (2 * kPack) != 0 || shape.D > kRotaryMaxDim || blocks > 0x7fffffff) {
    return cudaErrorInvalidValue;
  }
  const auto threads = static_cast<unsigned>(std::min<int64_t>(divide_up(packs, 32) * 32, kThreads));
  return dispatch_dtype(shape.dtype, [&](auto element) { return launch(element, blocks, threads); });
}

}  // namespace
}  // namespace elementwise

cudaError_t rotary(const Rotary& p, cudaStream_t stream) {
  return elementwise::dispatch(p.shape, [&](auto element, int64_t blocks, unsigned threads) {
    using T = decltype(element);
    return launch_grid<elementwise::rotary_kernel<T>>(blocks, threads, 0, stream, p);
  });
}

cudaError_t rotary_backward(const RotaryBackward& p, cudaStream_t stream) {
  return elementwise::dispatch(p.shape, [&](auto element, int64_t blocks, unsigned threads) {
    using T = decltype(element);
    return launch_grid<elementwise::rotary_backward_kernel<T>>(blocks, threads, 0, stream, p);
  });
}

}  // namespace girih::kernels
