// y = silu(gate) up        dgate = dy up silu'(gate)        dup = dy silu(gate)
//
// backward can also recompute y. A thread has packs of every tensor.
#include "elementwise/elementwise.h"
#include "tile/grid.h"
#include "tile/instance.h"
#include "tile/launch.h"
#include "tile/pack.h"
#include "tile/silu.h"

namespace girih::kernels {
namespace elementwise {
namespace {

constexpr int kPack = kElementwisePack, kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) silu_product_kernel(const __grid_constant__ SiluProduct p) {
  const int64_t packs = p.elements / kPack, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < packs; i += step) {
    const auto gate = load<kPack>(static_cast<const T*>(p.gate) + i * kPack);
    auto y = load<kPack>(static_cast<const T*>(p.up) + i * kPack);
#pragma unroll
    for (int e = 0; e < kPack; ++e) y.at[e] *= silu(gate.at[e]);
    store(static_cast<T*>(p.y) + i * kPack, y);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    silu_product_backward_kernel(const __grid_constant__ SiluProductBackward p) {
  const int64_t packs = p.elements / kPack, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < packs; i += step) {
    auto gate = load<kPack>(static_cast<const T*>(p.gate) + i * kPack);
    auto up = load<kPack>(static_cast<const T*>(p.up) + i * kPack);
    auto dy = load<kPack>(static_cast<const T*>(p.dy) + i * kPack);
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      const float x = gate.at[e], y = up.at[e] * silu(x);
      gate.at[e] = dy.at[e] * up.at[e] * silu_slope(x);
      up.at[e] = dy.at[e] * silu(x);
      dy.at[e] = y;
    }
    if (p.y != nullptr) store(static_cast<T*>(p.y) + i * kPack, dy);
    store(static_cast<T*>(p.dgate) + i * kPack, gate);
    store(static_cast<T*>(p.dup) + i * kPack, up);
  }
}

}  // namespace
}  // namespace elementwise

cudaError_t silu_product(const SiluProduct& p, cudaStream_t stream) {
  using namespace elementwise;
  if (p.elements == 0) return cudaSuccess;
  const unsigned blocks = clamp_grid_blocks(divide_up(p.elements / kPack, kThreads));
  return dispatch_dtype(p.dtype, [&](auto element) {
    return launch_grid<silu_product_kernel<decltype(element)>>(blocks, kThreads, 0, stream, p);
  });
}

cudaError_t silu_product_backward(const SiluProductBackward& p, cudaStream_t stream) {
  using namespace elementwise;
  if (p.elements == 0) return cudaSuccess;
  const unsigned blocks = clamp_grid_blocks(divide_up(p.elements / kPack, kThreads));
  return dispatch_dtype(p.dtype, [&](auto element) {
    return launch_grid<silu_product_backward_kernel<decltype(element)>>(blocks, kThreads, 0, stream, p);
  });
}

}  // namespace girih::kernels
