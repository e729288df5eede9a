// Shared by forward and backward: the distribution of a row over threads, sums over a row, the activations,
// and the choice of an instance.
//
// A group of `Lanes` threads has a row, each thread `PerThread` of its elements. A block has several groups
// and loops over rows. Neighbouring lanes have neighbouring packs of 16 bytes. The weights are in shared
// memory.
#pragma once

#include <type_traits>

#include "gated_rms_norm/gated_rms_norm.h"
#include "tile/grid.h"
#include "tile/instance.h"
#include "tile/matrix.h"
#include "tile/pack.h"

namespace girih::kernels::gated_rms_norm {

constexpr int kWarp = 32;

template <typename Element, int Lanes, int PerThread>
struct RowLayout {
  using T = Element;
  static constexpr int kLanes = Lanes;
  static constexpr int kThreads = Lanes < 256 ? 256 : Lanes;
  static constexpr int kGroups = kThreads / Lanes;     // rows of a block at once
  static constexpr int kPack = 16 / int(sizeof(T));    // elements of a pack
  static constexpr int kPacks = PerThread / kPack;     // packs of a thread
  static constexpr int kFours = kPack / 4;             // groups of four elements in a pack
  static constexpr int kWarps = (Lanes + 31) / kWarp;  // warps of a row
  static constexpr int kWidth = Lanes * PerThread;     // the largest dim

  // The elements of a thread in the type of memory: three tensors in fp32 would not fit in the registers.
  using Raw = uint4[kPacks];
  // The same in fp32.
  using Part = Pack<4>[kPacks][kFours];

  __device__ static int lane() { return threadIdx.x % Lanes; }
  __device__ static int group() { return threadIdx.x / Lanes; }
  // The first column of pack p of this thread.
  __device__ static int column(int p) { return (p * Lanes + lane()) * kPack; }
};

// Whether rows can be accessed in packs of 16 bytes.
template <typename... Pointers>
bool are_pack_aligned(const GatedRmsNormShape& shape, const Pointers*... tensors) {
  const int pack = shape.dtype == DType::f32 ? 4 : 8;
  return shape.dim % pack == 0 && ((reinterpret_cast<uintptr_t>(tensors) % 16 == 0) && ...);
}

// Loads the 32-bit word of a row at `column` with accesses of one element; zero beyond the end of the row.
template <typename T>
__device__ inline uint32_t load_word(const T* row, int column, int dim) {
  if constexpr (sizeof(T) == 4) {
    return column < dim ? reinterpret_cast<const uint32_t*>(row)[column] : 0u;
  } else {
    const auto* halves = reinterpret_cast<const uint16_t*>(row);
    const uint32_t low = column < dim ? halves[column] : 0u;
    return column + 1 < dim ? low | static_cast<uint32_t>(halves[column + 1]) << 16 : low;
  }
}

// Loads the elements of this thread in a row; zero beyond the end of the row.
template <class R>
__device__ inline void load_row(typename R::Raw& to, const typename R::T* row, int dim, bool use_packs) {
#pragma unroll
  for (int p = 0; p < R::kPacks; ++p) to[p] = {0u, 0u, 0u, 0u};
  if (use_packs) {
#pragma unroll
    for (int p = 0; p < R::kPacks; ++p) {
      if (R::column(p) < dim) to[p] = *reinterpret_cast<const uint4*>(row + R::column(p));
    }
    return;
  }
  constexpr int kWord = R::kPack / 4;  // elements
#pragma unroll
  for (int p = 0; p < R::kPacks; ++p) {
    const int column = R::column(p);
    to[p] = {load_word(row, column, dim), load_word(row, column + kWord, dim),
             load_word(row, column + 2 * kWord, dim), load_word(row, column + 3 * kWord, dim)};
  }
}

// Elements 4f to 4f + 3 of a pack in fp32.
template <class R>
__device__ inline Pack<4> unpack_four(const uint4& pack, int f) {
  if constexpr (R::kFours == 1) {
    return {__uint_as_float(pack.x), __uint_as_float(pack.y), __uint_as_float(pack.z),
            __uint_as_float(pack.w)};
  } else {
    const float2 a = unpack_pair<typename R::T>(f == 0 ? pack.x : pack.z);
    const float2 b = unpack_pair<typename R::T>(f == 0 ? pack.y : pack.w);
    return {a.x, a.y, b.x, b.y};
  }
}

template <class R>
__device__ inline void pack_four(uint4& pack, int f, const Pack<4>& value) {
  if constexpr (R::kFours == 1) {
    pack = {__float_as_uint(value.at[0]), __float_as_uint(value.at[1]), __float_as_uint(value.at[2]),
            __float_as_uint(value.at[3])};
  } else {
    (f == 0 ? pack.x : pack.z) = pack_pair<typename R::T>(value.at[0], value.at[1]);
    (f == 0 ? pack.y : pack.w) = pack_pair<typename R::T>(value.at[2], value.at[3]);
  }
}

// Stores pack p of this thread.
template <class R>
__device__ inline void store_pack(typename R::T* row, int p, const uint4& pack, int dim, bool use_packs) {
  const int column = R::column(p);
  if (use_packs) {
    if (column < dim) *reinterpret_cast<uint4*>(row + column) = pack;
    return;
  }
  using Bits = std::conditional_t<sizeof(typename R::T) == 4, uint32_t, uint16_t>;
  const uint32_t words[4] = {pack.x, pack.y, pack.z, pack.w};
#pragma unroll
  for (int i = 0; i < R::kPack; ++i) {
    const uint32_t word = R::kFours == 1 ? words[i] : words[i / 2] >> 16 * (i % 2);
    if (column + i < dim) reinterpret_cast<Bits*>(row)[column + i] = static_cast<Bits>(word);
  }
}

// The weights in shared memory, zero beyond dim. Groups of four elements of neighbouring lanes are
// neighbours, since packs of eight elements for each lane would have bank conflicts.
template <class R>
class Weight {
 public:
  // Loads the weights to `buffer`, which has R::kWidth floats. Ends with __syncthreads().
  __device__ Weight(float* buffer, const InputTensor<1>& weight, int dim) : buffer_(buffer) {
    for (int column = threadIdx.x; column < R::kWidth; column += R::kThreads) {
      const int pack = column / R::kPack, i = column % R::kPack;
      buffer[offset(pack / R::kLanes, pack % R::kLanes, i) + i % 4] =
          column < dim ? load_element(weight, column) : 0.f;
    }
    __syncthreads();
  }

  // The weights of elements 4f to 4f + 3 in pack p of this thread.
  __device__ Pack<4> operator()(int p, int f) const { return load<4>(buffer_ + offset(p, R::lane(), 4 * f)); }

 private:
  __device__ static int offset(int p, int lane, int i) {
    return ((p * R::kFours + i / 4) * R::kLanes + lane) * 4;
  }

  const float* buffer_;
};

// Sums of `Count` numbers over the threads of a row; all threads of the block call sum(). The warps of a wide
// row use two buffers in shared memory in turn, so that no warp overwrites sums that a slower warp still
// reads.
template <class R, int Count>
class RowSums {
 public:
  __device__ void sum(float (&value)[Count]) {
#pragma unroll
    for (int offset = (R::kLanes < kWarp ? R::kLanes : kWarp) / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int i = 0; i < Count; ++i) value[i] += __shfl_xor_sync(~0u, value[i], offset);
    }
    if constexpr (R::kWarps > 1) {
      __shared__ float parts[2][R::kThreads / kWarp][Count];
      const int first = R::group() * R::kWarps;
      if (threadIdx.x % kWarp == 0) {
#pragma unroll
        for (int i = 0; i < Count; ++i) parts[buffer_index_][threadIdx.x / kWarp][i] = value[i];
      }
      named_barrier_sync(1 + R::group(), R::kLanes);  // the parts of all warps are stored
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        value[i] = parts[buffer_index_][first][i];
#pragma unroll
        for (int w = 1; w < R::kWarps; ++w) value[i] += parts[buffer_index_][first + w][i];
      }
      buffer_index_ ^= 1;
    } else {
      __syncwarp();  // forces a reload of the weights after the sum: otherwise they spill
    }
  }

 private:
  int buffer_index_ = 0;
};

// Phi(g) = (1 + erf(g / sqrt(2))) / 2, with gaussian = e^{-g^2 / 2}:
//
//     g < 0: Phi = gaussian Q(t)        g >= 0: Phi = 1 - gaussian Q(t)        t = 1 / (1 + 0.28 |g|)
//
// with a fitted polynomial Q. The error of Phi is at most 1.8e-7, and that of gelu is smaller than with erf
// in fp32. Where 1 + erf cancels, the relative error is 0.3%. erff takes twice as many instructions, and the
// kernel would be bound by instructions instead of memory.
__device__ inline float normal_cdf(float g, float gaussian) {
  const float t = reciprocal(1.f + 0.28f * fabsf(g));
  float q = -0.1064387783f;
  q = q * t + 0.3925175965f;
  q = q * t - 0.2414017618f;
  q = q * t + 0.2725635469f;
  q = q * t + 0.0659923851f;
  q = q * t + 0.1167669371f;
  const float tail = q * t * gaussian;
  return g < 0.f ? tail : 1.f - tail;
}

// act(gate), and with ComputeSlope act'(gate).
template <GateActivation Activation, bool ComputeSlope>
__device__ inline void activate(const Pack<4>& gate, Pack<4>& act, Pack<4>& slope) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float g = gate.at[i];
    if constexpr (Activation == GateActivation::gelu) {
      const float gaussian = exp2_fast(-0.5f * kLog2E * g * g), phi = normal_cdf(g, gaussian);
      act.at[i] = g * phi;
      if (ComputeSlope) slope.at[i] = phi + g * 0.39894228f * gaussian;
    } else {
      const float s = reciprocal(1.f + exp2_fast(-kLog2E * g));
      constexpr bool kSilu = Activation == GateActivation::silu;
      act.at[i] = kSilu ? g * s : s;
      // s (1 + g (1 - s)), or s (1 - s)
      if (ComputeSlope) slope.at[i] = kSilu ? s + act.at[i] * (1.f - s) : s * (1.f - s);
    }
  }
}

// Calls body(std::integral_constant<GateActivation, ...>): one branch for each row, not for every four
// elements.
template <typename Body>
__device__ inline void dispatch_activation(GateActivation activation, Body body) {
  switch (activation) {
    case GateActivation::none:
      return body(std::integral_constant<GateActivation, GateActivation::none>{});
    case GateActivation::silu:
      return body(std::integral_constant<GateActivation, GateActivation::silu>{});
    case GateActivation::gelu:
      return body(std::integral_constant<GateActivation, GateActivation::gelu>{});
    case GateActivation::sigmoid:
      return body(std::integral_constant<GateActivation, GateActivation::sigmoid>{});
  }
}

// Calls launch(RowLayout) for the smallest width that holds dim. A thread has two packs: with one, too few
// loads are in flight to saturate memory; with more, the sums of the gradient do not fit in registers.
template <typename T, typename Launch>
cudaError_t dispatch_dim(int dim, const Launch& launch) {
  constexpr int kTwo = 32 / int(sizeof(T));  // packs
  if (dim > 512 * kTwo && dim <= kGatedRmsNormMaxDim) return launch(RowLayout<T, 512, 16>{});
  return dispatch_width<4, 8, 16, 32, 64, 128, 256, 512>(
      divide_up(dim, kTwo), [&](auto threads) { return launch(RowLayout<T, threads(), kTwo>{}); });
}

// Calls launch(RowLayout) for the type and width of the shape.
template <typename Launch>
cudaError_t dispatch_rows(const GatedRmsNormShape& shape, const Launch& launch) {
  return dispatch_dtype(shape.dtype,
                        [&](auto element) { return dispatch_dim<decltype(element)>(shape.dim, launch); });
}

}  // namespace girih::kernels::gated_rms_norm
