// y_i = gate_i(u W_i^T) + residual for up to 16 rows (skinny_gemm.h). A block has 8 features of one matrix,
// and its warps split the width. mma m16n8k16 multiplies 16 rows by 8 features. The order of the elements
// along the width is arbitrary, if it is the same in both factors: a lane loads 16 contiguous bytes of a row,
// and the registers are mma operands without an exchange between lanes.
#include "skinny_gemm/skinny_gemm.h"
#include "tile/instance.h"
#include "tile/launch.h"
#include "tile/matrix.h"
#include "tile/pack.h"
#include "tile/silu.h"

namespace girih::kernels {
namespace skinny_gemm_detail {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kFeatures = 8;  // features of a block
constexpr int kPack = 8;      // elements in 16 bytes
constexpr int kStep = 32;     // columns of a step: packs of four lanes

// The row stride of u in shared memory. Neighbouring rows differ by 64 bytes modulo 128, so that the packs of
// eight lanes are in different banks.
__host__ __device__ inline int row_stride(int width) { return (width + 63) / 64 * 64 + 32; }

__device__ inline uint4 load_streaming(const void* from) { return ptx::ld_global_nc_no_allocate(from); }

template <typename T>
__device__ inline float round_as(float x) {
  return to_float(from_float<T>(x));
}

// Loads a pack of u before the norm: x, silu(x) or silu(x) other.
template <typename T, GemmInput Input>
__device__ inline Pack<kPack> load_input(const SkinnyGemm& p, int row, int col) {
  const int64_t offset = static_cast<int64_t>(row) * p.width + col;
  auto x = load<kPack>(static_cast<const T*>(p.x) + offset);
  if constexpr (Input == GemmInput::silu_rms_norm || Input == GemmInput::silu_product) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) x.at[i] = round_as<T>(silu(x.at[i]));
  }
  if constexpr (Input == GemmInput::silu_product) {
    const auto other = load<kPack>(static_cast<const T*>(p.other) + offset);
#pragma unroll
    for (int i = 0; i < kPack; ++i) x.at[i] *= other.at[i];
  }
  return x;
}

// Computes u [rows, stride] in shared memory, with zeros up to a multiple of kStep columns.
template <typename T, GemmInput Input>
__device__ inline void compute_input(const SkinnyGemm& p, T* u) {
  const int stride = row_stride(p.width), end = (p.width + kStep - 1) / kStep * kStep;
  if constexpr (Input == GemmInput::rms_norm || Input == GemmInput::silu_rms_norm) {
    const int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < p.rows; row += kWarps) {
      float squares = 0.f;
      for (int col = lane * kPack; col < p.width; col += 32 * kPack) {
        const auto x = load_input<T, Input>(p, row, col);
#pragma unroll
        for (int i = 0; i < kPack; ++i) squares += x.at[i] * x.at[i];
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
      const float r = rsqrtf(squares / p.width + p.eps);
      for (int col = lane * kPack; col < end; col += 32 * kPack) {
        auto x = zeros<kPack>();
        if (col < p.width) {
          x = load_input<T, Input>(p, row, col);
          const auto weight = load<kPack>(static_cast<const T*>(p.other) + col);
#pragma unroll
          for (int i = 0; i < kPack; ++i) x.at[i] = x.at[i] * r * weight.at[i];
        }
        store<kPack>(u + row * stride + col, x);
      }
    }
  } else {
    const int packs = end / kPack;
    for (int i = threadIdx.x; i < p.rows * packs; i += kThreads) {
      const int row = i / packs, col = i % packs * kPack;
      store<kPack>(u + row * stride + col,
                   col < p.width ? load_input<T, Input>(p, row, col) : zeros<kPack>());
    }
  }
}

template <typename T>
__device__ inline void store_result(const SkinnyGemm& p, const SkinnyGemmMatrix& m, int row, int feature,
                                    float r) {
  const int64_t offset = static_cast<int64_t>(row) * m.features + feature;
  if (m.gate == GateFunction::none) {
    if (p.residual != nullptr) r += to_float(static_cast<const T*>(p.residual)[offset]);
    static_cast<T*>(m.y)[offset] = from_float<T>(r);
    return;
  }
  if (m.bias != nullptr) r += m.bias[feature];
  static_cast<float*>(m.y)[offset] = apply_gate(m.gate, r, gate_factor(m.gate, m.scale, m.rate, feature));
}

// PrefetchSteps: steps whose weights a warp loads before u is computed, so that the latencies of both loads
// overlap.
template <typename T, GemmInput Input, int PrefetchSteps>
__global__ void __launch_bounds__(kThreads, 2) skinny_gemm_kernel(const __grid_constant__ SkinnyGemm p) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 16);
  T* const u = reinterpret_cast<T*>(shared);
  __shared__ float parts[kWarps][kSkinnyGemmMaxRows][kFeatures];

  int matrix_index = 0;
  while (matrix_index + 1 < p.count &&
         static_cast<int>(blockIdx.x) >= p.matrices[matrix_index + 1].first_tile)
    ++matrix_index;
  const SkinnyGemmMatrix& m = p.matrices[matrix_index];
  const int first = (static_cast<int>(blockIdx.x) - m.first_tile) * kFeatures;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const bool is_feature = first + group < m.features;
  const T* const weight =
      static_cast<const T*>(m.weight) + static_cast<int64_t>(is_feature ? first + group : 0) * p.width;
  const int stride = row_stride(p.width);

  float sums[4] = {};
  const auto column = [&](int i) { return (warp + i * kWarps) * kStep + quad * kPack; };
  for (int from = 0; from * kWarps * kStep < p.width; from += PrefetchSteps) {
    uint4 w[PrefetchSteps];
#pragma unroll
    for (int i = 0; i < PrefetchSteps; ++i) {
      const int col = column(from + i);
      w[i] = is_feature && col < p.width ? load_streaming(weight + col) : uint4{0u, 0u, 0u, 0u};
    }
    if (from == 0) {
      compute_input<T, Input>(p, u);
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < PrefetchSteps; ++i) {
      const int col = column(from + i);
      if (col - quad * kPack >= p.width) break;  // uniform over the warp
      const auto row = [&](int r) {
        return r < p.rows ? *reinterpret_cast<const uint4*>(u + r * stride + col) : uint4{0u, 0u, 0u, 0u};
      };
      const uint4 above = row(group), below = row(group + 8);
      mma<T>(sums, {above.x, below.x, above.y, below.y}, w[i].x, w[i].y);
      mma<T>(sums, {above.z, below.z, above.w, below.w}, w[i].z, w[i].w);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) parts[warp][group + i / 2 * 8][quad * 2 + i % 2] = sums[i];
  __syncthreads();
  const int row = threadIdx.x / kFeatures, feature = threadIdx.x % kFeatures;
  if (row >= p.rows || first + feature >= m.features) return;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += parts[i][row][feature];
  store_result<T>(p, m, row, first + feature, sum);
}

template <typename T, GemmInput Input, int PrefetchSteps>
cudaError_t launch(const SkinnyGemm& p, int tiles, cudaStream_t stream) {
  constexpr auto kernel = skinny_gemm_kernel<T, Input, PrefetchSteps>;
  const int bytes = p.rows * row_stride(p.width) * static_cast<int>(sizeof(T));
  constexpr int max_bytes = (kSkinnyGemmMaxElements + kSkinnyGemmMaxRows * 96) * static_cast<int>(sizeof(T));
  if (bytes > 40 * 1024) {
    if (const cudaError_t error = allow_shared<kernel>(max_bytes); error != cudaSuccess) return error;
  }
  return launch_grid<kernel>(tiles, kThreads, bytes, stream, p);
}

template <typename T, GemmInput Input>
cudaError_t launch(const SkinnyGemm& p, int tiles, cudaStream_t stream) {
  return p.width <= 4 * kWarps * kStep ? launch<T, Input, 4>(p, tiles, stream)
                                       : launch<T, Input, 12>(p, tiles, stream);
}

template <typename T>
cudaError_t launch(const SkinnyGemm& p, int tiles, cudaStream_t stream) {
  switch (p.input) {
    case GemmInput::plain:
      return launch<T, GemmInput::plain>(p, tiles, stream);
    case GemmInput::rms_norm:
      return launch<T, GemmInput::rms_norm>(p, tiles, stream);
    case GemmInput::silu_rms_norm:
      return launch<T, GemmInput::silu_rms_norm>(p, tiles, stream);
    case GemmInput::silu_product:
      return launch<T, GemmInput::silu_product>(p, tiles, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace skinny_gemm_detail

cudaError_t skinny_gemm(SkinnyGemm p, cudaStream_t stream) {
  int tiles = 0;
  for (int i = 0; i < p.count; ++i) {
    p.matrices[i].first_tile = tiles;
    tiles += (p.matrices[i].features + skinny_gemm_detail::kFeatures - 1) / skinny_gemm_detail::kFeatures;
  }
  if (tiles == 0) return cudaSuccess;
  return dispatch_16bit(
      p.dtype, [&](auto element) { return skinny_gemm_detail::launch<decltype(element)>(p, tiles, stream); });
}

}  // namespace girih::kernels
