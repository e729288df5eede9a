// What forward, backward and step share: the filter of a thread's channels, the inputs under it, the choice
// of an instance. A thread owns N neighbouring channels.
#pragma once

#include "short_conv/short_conv.h"
#include "tile/pack.h"

namespace girih::kernels::short_conv {

template <int W, int N>
struct Filter {
  Pack<N> weight[W];
  Pack<N> bias;
  bool silu;

  __device__ Filter(const In<2>& weights, const In<1>& biases, int64_t channel, bool with_silu)
      : silu(with_silu) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int j = 0; j < W; ++j) {
        weight[j].at[i] =
            load_any(weights.data, weights.dtype, (channel + i) * weights.stride[0] + j * weights.stride[1]);
      }
      bias.at[i] = biases.data == nullptr
                       ? 0.f
                       : load_any(biases.data, biases.dtype, (channel + i) * biases.stride[0]);
    }
  }

  // z_t = bias + sum_j weight_j x_{t - (W-1) + j}
  __device__ Pack<N> apply(const Pack<N> (&window)[W]) const {
    Pack<N> z = bias;
#pragma unroll
    for (int j = 0; j < W; ++j) {
#pragma unroll
      for (int i = 0; i < N; ++i) z.at[i] += weight[j].at[i] * window[j].at[i];
    }
    return z;
  }

  // y = z / (1 + e^-z)
  __device__ Pack<N> activate(Pack<N> z) const {
    if (!silu) return z;
#pragma unroll
    for (int i = 0; i < N; ++i) z.at[i] = z.at[i] / (1.f + expf(-z.at[i]));
    return z;
  }

  // dz = dy s (1 + z (1 - s)), s = sigmoid(z)
  __device__ Pack<N> activation_gradient(const Pack<N>& z, Pack<N> dy) const {
    if (!silu) return dy;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float s = 1.f / (1.f + expf(-z.at[i]));
      dy.at[i] *= s * (1.f + z.at[i] * (1.f - s));
    }
    return dy;
  }
};

// Drops the oldest input to make room for the next.
template <int W, int N>
__device__ inline void shift(Pack<N> (&window)[W]) {
#pragma unroll
  for (int j = 0; j + 1 < W; ++j) window[j] = window[j + 1];
}

template <typename T, int N>
__device__ inline Pack<N> load_at(const In<3>& array, int64_t a, int64_t b, int64_t c) {
  return load<N>(static_cast<const T*>(array.data) + a * array.stride[0] + b * array.stride[1] +
                 c * array.stride[2]);
}

template <typename T, int N>
__device__ inline void store_at(const Out<3>& array, int64_t a, int64_t b, int64_t c, const Pack<N>& value) {
  store(static_cast<T*>(array.data) + a * array.stride[0] + b * array.stride[1] + c * array.stride[2], value);
}

// The input at a token of a sequence; the W - 1 positions before its start are its state's rows.
template <typename T, int W, int N>
__device__ inline Pack<N> input_at(const In<3>& x, const In<3>& state, const Sequence& sequence,
                                   int64_t token, int64_t channel) {
  if (token >= sequence.start) return load_at<T, N>(x, sequence.batch, token, channel);
  if (state.data == nullptr) return zeros<N>();
  return load_at<T, N>(state, sequence.index, token - sequence.start + (W - 1), channel);
}

template <typename Element, int Width, int Channels>
struct Instance {
  using T = Element;
  static constexpr int W = Width;
  static constexpr int N = Channels;
};

// Four channels a thread: 8 or 16 bytes an access, and the gradient's sums still fit in registers.
constexpr int kPack = 4;

inline int64_t element_size(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

template <typename T, int N, typename Launch>
cudaError_t with_width(int width, Launch launch) {
  switch (width) {
    case 1:
      return launch(Instance<T, 1, N>{});
    case 2:
      return launch(Instance<T, 2, N>{});
    case 3:
      return launch(Instance<T, 3, N>{});
    case 4:
      return launch(Instance<T, 4, N>{});
    default:
      return cudaErrorInvalidValue;
  }
}

template <typename T, typename Launch>
cudaError_t with_pack(int width, bool packs, Launch launch) {
  return packs ? with_width<T, kPack>(width, launch) : with_width<T, 1>(width, launch);
}

// Calls launch(Instance) with the type, the width and the channels a thread; packs: every tensor fits them.
template <typename Launch>
cudaError_t with_instance(const ShortConvShape& shape, bool packs, Launch launch) {
  switch (shape.dtype) {
    case DType::f32:
      return with_pack<float>(shape.width, packs, launch);
    case DType::f16:
      return with_pack<__half>(shape.width, packs, launch);
    case DType::bf16:
      return with_pack<__nv_bfloat16>(shape.width, packs, launch);
    case DType::f64:
      break;
  }
  return cudaErrorInvalidValue;
}

template <typename... Arrays>
bool all_fit_packs(const ShortConvShape& shape, const Arrays&... arrays) {
  return shape.channels % kPack == 0 && (fits_packs(arrays, kPack, element_size(shape.dtype)) && ...);
}

}  // namespace girih::kernels::short_conv
