// Rows of D elements distributed over a few lanes; each lane has one pack of a row.
#pragma once

#include "linear_path/linear_path.h"
#include "tile/grid.h"
#include "tile/instance.h"
#include "tile/launch.h"
#include "tile/pack.h"

namespace girih::kernels {
namespace linear_path {

constexpr int kPack = kLinearPathPack, kThreads = 256;

// Rows of up to Lanes_ packs, and the rows of a thread: first(), first() + step(), ...
template <typename Element, int Lanes_>
struct RowLanes {
  using T = Element;
  static constexpr int kLanes = Lanes_, kRows = kThreads / Lanes_;

  __device__ static int column() { return static_cast<int>(threadIdx.x) % kLanes * kPack; }
  __device__ static int64_t first() {
    return static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kLanes;
  }
  __device__ static int64_t step() { return static_cast<int64_t>(gridDim.x) * kRows; }

  // The sum over the lanes of a row; all lanes of the warp call sum().
  __device__ static float sum(float x) {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
    return x;
  }
};

constexpr int64_t kMaxRows = 0x7fffffff;  // the limit of a Divider

struct QuotientRemainder {
  int quotient, remainder;
};

struct DivMod {
  Divider divider;

  __device__ QuotientRemainder divmod(int64_t x) const {
    const auto quotient = static_cast<int>(divider.divide(static_cast<uint32_t>(x)));
    return {quotient, static_cast<int>(x) - quotient * static_cast<int>(divider.by)};
  }
};

// The index of a row is (sequence * tokens + token) * heads + head.
struct RowIndex {
  int64_t rows;
  DivMod heads, tokens;

  RowIndex(int64_t batch, int64_t tokens_, int heads_)
      : rows(batch * tokens_ * heads_),
        heads{Divider(heads_ > 0 ? heads_ : 1)},
        tokens{Divider(tokens_ > 0 ? tokens_ : 1)} {}

  __device__ int token_of(int64_t row) const { return tokens.divmod(heads.divmod(row).quotient).remainder; }

  template <class R>
  unsigned blocks() const {
    return clamp_grid_blocks(divide_up(rows, R::kRows));
  }
};

// Calls launch(RowLanes) for this width and type if there are rows; an error if there is no such instance.
template <typename Launch>
cudaError_t dispatch_rows(const RowIndex& index, int D, DType dtype, const Launch& launch) {
  if (index.rows == 0) return cudaSuccess;
  if (index.rows > kMaxRows || D < kPack || D % kPack != 0) return cudaErrorInvalidValue;
  return dispatch_dtype(dtype, [&](auto element) {
    return dispatch_width<4, 8, 16, kLinearPathMaxWidth / kPack>(
        D / kPack, [&](auto lanes) { return launch(RowLanes<decltype(element), lanes()>{}); });
  });
}

}  // namespace linear_path
}  // namespace girih::kernels
