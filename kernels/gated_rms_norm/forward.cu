// r = (mean(x^2) + eps)^-1/2        y = r x weight act(gate)
//
// x and gate are read once, y is written once.
#include "gated_rms_norm/rows.h"
#include "tile/cuts.h"
#include "tile/launch.h"

namespace girih::kernels {
namespace gated_rms_norm {
namespace {

// The blocks that are resident on an H100 or H200 at once, 4 of 256 threads for each multiprocessor. With
// more blocks, a block has fewer rows, and its weights are a larger part of its reads.
constexpr int64_t kResidentBlocks = 4 * kH100Multiprocessors;

template <class R>
__global__ void __launch_bounds__(R::kThreads, (R::kPacks > 2 ? 512 : 1024) / R::kThreads)
    forward(const GatedRmsNormForward p, const bool use_packs) {
  using T = typename R::T;
  __shared__ __align__(16) float buffer[R::kWidth];
  const int dim = p.shape.dim;
  const float per_dim = 1.f / dim;
  const bool has_gate = p.shape.activation != GateActivation::none;
  const int64_t step = static_cast<int64_t>(gridDim.x) * R::kGroups;
  // A group past the last row reads the last row.
  const auto load = [&](typename R::Raw& x, typename R::Raw& gate, int64_t row) {
    row = min(row, p.shape.rows - 1);
    load_row<R>(x, static_cast<const T*>(p.x) + row * dim, dim, use_packs);
    if (has_gate) load_row<R>(gate, static_cast<const T*>(p.gate) + row * dim, dim, use_packs);
  };
  typename R::Raw x{}, gate{};
  load(x, gate, static_cast<int64_t>(blockIdx.x) * R::kGroups + R::group());
  const Weight<R> weight(buffer, p.weight, dim);
  RowSums<R, 1> row_sums;

  // All groups of a block run the same number of iterations. The next row is loaded during the work on this
  // row.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * R::kGroups; first < p.shape.rows; first += step) {
    const int64_t row = first + R::group();
    typename R::Raw next_x, next_gate{};
    load(next_x, next_gate, row + step);

    float square[1] = {0.f};
#pragma unroll
    for (int k = 0; k < R::kPacks; ++k) {
#pragma unroll
      for (int f = 0; f < R::kFours; ++f) {
        const Pack<4> xs = unpack_four<R>(x[k], f);
#pragma unroll
        for (int i = 0; i < 4; ++i) square[0] += xs.at[i] * xs.at[i];
      }
    }
    row_sums.sum(square);
    const float r = rsqrtf(square[0] * per_dim + p.shape.eps);

    if (row < p.shape.rows)
      dispatch_activation(p.shape.activation, [&](auto activation) {
        constexpr GateActivation kActivation = decltype(activation)::value;
#pragma unroll
        for (int k = 0; k < R::kPacks; ++k) {
          uint4 pack;
#pragma unroll
          for (int f = 0; f < R::kFours; ++f) {
            Pack<4> y = unpack_four<R>(x[k], f);
            const Pack<4> w = weight(k, f);
#pragma unroll
            for (int i = 0; i < 4; ++i) y.at[i] *= r * w.at[i];
            if constexpr (kActivation != GateActivation::none) {
              Pack<4> act, slope;
              activate<kActivation, false>(unpack_four<R>(gate[k], f), act, slope);
#pragma unroll
              for (int i = 0; i < 4; ++i) y.at[i] *= act.at[i];
            }
            pack_four<R>(pack, f, y);
          }
          store_pack<R>(static_cast<T*>(p.y) + row * dim, k, pack, dim, use_packs);
        }
      });
#pragma unroll
    for (int k = 0; k < R::kPacks; ++k) x[k] = next_x[k], gate[k] = next_gate[k];
  }
}

}  // namespace
}  // namespace gated_rms_norm

cudaError_t gated_rms_norm_forward(const GatedRmsNormForward& p, cudaStream_t stream) {
  using namespace gated_rms_norm;
  if (p.shape.rows == 0) return cudaSuccess;
  const bool use_packs = are_pack_aligned(p.shape, p.x, p.gate, p.y);
  return dispatch_rows(p.shape, [&](auto rows) {
    using R = decltype(rows);
    const auto blocks = static_cast<unsigned>(std::min(divide_up(p.shape.rows, R::kGroups), kResidentBlocks));
    return launch_grid<forward<R>>(blocks, R::kThreads, 0, stream, p, use_packs);
  });
}

}  // namespace girih::kernels
