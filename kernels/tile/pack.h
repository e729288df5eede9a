// A pack: N neighbouring elements of one row, in registers as fp32, loaded or stored in one access.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "tile/array.h"

namespace girih::kernels {

template <int N>
struct Pack {
  float at[N];
};

template <int N>
__device__ inline Pack<N> zeros() {
  Pack<N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.at[i] = 0.f;
  return pack;
}

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float to_float(double value) { return static_cast<float>(value); }

template <typename T>
__device__ inline T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ inline double from_float<double>(float value) {
  return static_cast<double>(value);
}

template <typename T, int N>
struct alignas(N * sizeof(T)) AlignedArray {
  T at[N];
};

// The address must be a multiple of N * sizeof(T); is_pack_aligned() checks this.
template <int N, typename T>
__device__ inline Pack<N> load(const T* from) {
  const auto raw = *reinterpret_cast<const AlignedArray<T, N>*>(from);
  Pack<N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.at[i] = to_float(raw.at[i]);
  return pack;
}

template <int N, typename T>
__device__ inline void store(T* to, const Pack<N>& pack) {
  AlignedArray<T, N> raw;
#pragma unroll
  for (int i = 0; i < N; ++i) raw.at[i] = from_float<T>(pack.at[i]);
  *reinterpret_cast<AlignedArray<T, N>*>(to) = raw;
}

// The offset of the element with these indices; missing trailing indices are 0.
template <template <int> class Array, int Rank, class... Index>
__device__ inline int64_t offset_of(const Array<Rank>& array, Index... index) {
  static_assert(sizeof...(index) <= Rank);
  int64_t offset = 0;
  int d = 0;
  ((offset += index * array.stride[d++]), ...);
  return offset;
}

// The address of the element at (batch, row, head, col).
template <typename T, template <int> class Array>
__device__ inline auto at(const Array<4>& array, int64_t batch, int64_t row, int64_t head, int64_t col = 0) {
  using Pointer = std::conditional_t<std::is_same_v<Array<4>, InputTensor<4>>, const T*, T*>;
  return static_cast<Pointer>(array.data) + batch * array.stride[0] + row * array.stride[1] +
         head * array.stride[2] + col;
}

// One element in its type of memory, which is known at run time only. decode_element() waits for the load:
// load all elements before the first call of decode_element(). An fp64 element is rounded at once, which
// waits for its load.
struct RawElement {
  uint32_t bits = 0;  // zero in every type
};

template <typename Stored>
__device__ inline RawElement load_raw(const void* data, int64_t at) {
  const Stored stored = static_cast<const Stored*>(data)[at];
  if constexpr (sizeof(Stored) == 8) {
    return {__float_as_uint(to_float(stored))};
  } else {
    return {stored};
  }
}

// Calls f(zero of the type that load_raw() reads): one branch on the type for many elements.
template <class F>
__device__ inline auto dispatch_storage(DType dtype, const F& f) {
  if (dtype == DType::f64) return f(double{});
  if (dtype == DType::f32) return f(uint32_t{});
  return f(uint16_t{});
}

template <int Rank, class... Index>
__device__ inline RawElement load_raw_element(const InputTensor<Rank>& array, Index... index) {
  static_assert(sizeof...(index) == Rank);
  const int64_t at = offset_of(array, index...);
  return dispatch_storage(array.dtype, [&](auto zero) { return load_raw<decltype(zero)>(array.data, at); });
}

__device__ inline float decode_element(RawElement raw, DType dtype) {
  const float half = to_float(__ushort_as_half(static_cast<unsigned short>(raw.bits)));
  const float other = __uint_as_float(raw.bits << (dtype == DType::bf16 ? 16 : 0));
  return dtype == DType::f16 ? half : other;
}

// Loads one element of any type, for small tensors that are read once.
template <int Rank, class... Index>
__device__ inline float load_element(const InputTensor<Rank>& array, Index... index) {
  return decode_element(load_raw_element(array, index...), array.dtype);
}

template <int Rank, class... Index>
__device__ inline void store_element(const OutputTensor<Rank>& array, float value, Index... index) {
  static_assert(sizeof...(index) == Rank);
  const int64_t at = offset_of(array, index...);
  switch (array.dtype) {
    case DType::f16:
      static_cast<__half*>(array.data)[at] = from_float<__half>(value);
      return;
    case DType::bf16:
      static_cast<__nv_bfloat16*>(array.data)[at] = from_float<__nv_bfloat16>(value);
      return;
    case DType::f64:
      static_cast<double*>(array.data)[at] = from_float<double>(value);
      return;
    case DType::f32:
      static_cast<float*>(array.data)[at] = value;
      return;
  }
}

// Whether every row of a tensor can be accessed in packs of n elements along its last dimension.
template <template <int> class Array, int Rank>
bool is_pack_aligned(const Array<Rank>& array, int n, int64_t element_size) {
  if (array.data == nullptr) return true;
  bool fits =
      array.stride[Rank - 1] == 1 && reinterpret_cast<uintptr_t>(array.data) % (n * element_size) == 0;
  for (int d = 0; d + 1 < Rank; ++d) fits = fits && array.stride[d] % n == 0;
  return fits;
}

}  // namespace girih::kernels
