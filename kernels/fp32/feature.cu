// fp32_feature: a warp has one row; lane l has slots l, l + 32, ...
#include "fp32/fp32.h"
#include "tile/grid.h"
#include "tile/launch.h"

namespace girih::kernels {
namespace fp32 {
namespace {

constexpr int kWarps = 8;  // warps of a block

template <class Combine>
__device__ inline float reduce_warp(float value, const Combine& combine) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) value = combine(value, __shfl_xor_sync(~0u, value, other));
  return value;
}

struct FeatureValue {
  float p, slope;  // feature(x), feature'(x)
};

__device__ inline FeatureValue apply_feature(Feature feature, float x) {
  const float positive = fmaxf(x, 0.f);
  switch (feature) {
    case Feature::silu: {
      const float sigmoid = 1.f / (1.f + expf(-x));
      return {x * sigmoid, sigmoid * (1.f + x * (1.f - sigmoid))};
    }
    case Feature::relu:
      return {positive, x > 0.f ? 1.f : 0.f};
    case Feature::relu2:
      return {positive * positive, 2.f * positive};
    default:
      return {x, 1.f};
  }
}

__global__ void __launch_bounds__(kWarps * 32) feature(const __grid_constant__ Fp32Feature p) {
  const int lane = threadIdx.x % 32;
  const int64_t grid_rows = static_cast<int64_t>(gridDim.x) * kWarps;
  const bool is_softmax = p.feature == Feature::softmax, has_gradient = p.dp != nullptr;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < p.rows;
       row += grid_rows) {
    float* const z = p.z + row * p.M;
    float* const dp = has_gradient ? p.dp + row * p.M : nullptr;
    float top = -INFINITY, sum = 0.f, delta = 0.f;
    // A rounded product: contracted with the subtraction below, the logit would differ between the sum and p
    // by |x| 2^-24.
    const auto scaled = [&](int m) { return __fmul_rn(p.scale, z[m]); };
    if (is_softmax) {
      for (int m = lane; m < p.slots; m += 32) top = fmaxf(top, scaled(m));
      top = reduce_warp(top, [](float x, float y) { return fmaxf(x, y); });
      for (int m = lane; m < p.slots; m += 32) {
        const float e = expf(scaled(m) - top);
        sum += e;
        if (has_gradient) delta = fmaf(e, dp[m], delta);
      }
      const auto add = [](float x, float y) { return x + y; };
      sum = reduce_warp(sum, add);
      if (has_gradient) delta = reduce_warp(delta, add) / sum;
    }
    for (int m = lane; m < p.M; m += 32) {
      // For softmax, dL/dx = p (dp - sum p dp).
      const float x = scaled(m);
      const FeatureValue slot =
          is_softmax ? FeatureValue{expf(x - top) / sum, expf(x - top) / sum} : apply_feature(p.feature, x);
      const bool exists = m < p.slots;
      z[m] = exists ? slot.p : 0.f;
      if (!has_gradient) continue;
      const float dx = slot.slope * (dp[m] - delta);
      p.w[row * p.M + m] = exists ? x * dx + slot.p * dp[m] : 0.f;
      dp[m] = exists ? p.scale * dx : 0.f;
    }
  }
}

}  // namespace
}  // namespace fp32

cudaError_t fp32_feature(const Fp32Feature& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  return launch_grid<fp32::feature>(clamp_grid_blocks(divide_up(p.rows, fp32::kWarps)), fp32::kWarps * 32, 0,
                                    stream, p);
}

}  // namespace girih::kernels
