// y = gate(z), z = x + b        dx = dy gate'(z)        db = sum of dx over rows        dA = sum of dy y
// (decay)
//
// Neighbouring threads share a row. A thread has a pack of columns, or one column, of several rows and sums
// db and dA of its columns over these rows. Another kernel adds the sums of the blocks.
#include "gate_activations/gate_activations.h"
#include "tile/cuts.h"
#include "tile/grid.h"
#include "tile/instance.h"
#include "tile/launch.h"
#include "tile/pack.h"
#include "tile/partials.h"

namespace girih::kernels {
namespace gate_activations_detail {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kResidentBlocks = 8 * kH100Multiprocessors;

template <typename Row, int N>
struct Tile {
  using T = Row;
  static constexpr int kPack = N;
};

// `lanes` threads (a power of two) have a row. A row with more columns than a block is split into `parts`
// parts in different blocks.
struct LaunchGrid {
  int lanes = 1, parts;
  int64_t row_blocks;

  LaunchGrid(const GateActivations& p, int pack) {
    const int64_t packs = divide_up(p.columns, pack);
    while (lanes < packs && lanes < kThreads) lanes *= 2;
    parts = static_cast<int>(divide_up(packs, lanes));
    row_blocks = std::min(divide_up(p.rows, kThreads / lanes), std::max<int64_t>(kResidentBlocks / parts, 1));
  }
  unsigned blocks() const { return clamp_grid_blocks(row_blocks * parts); }
};

// The columns of a thread, and its rows: row, row + step, ...
template <int N>
struct ThreadColumns {
  int first;
  bool exists;
  int64_t row, step;
  Pack<N> bias, factor;

  __device__ ThreadColumns(const GateActivations& p, const LaunchGrid& grid) {
    const int tid = static_cast<int>(threadIdx.x), rows = kThreads / grid.lanes;
    first = (static_cast<int>(blockIdx.x) % grid.parts * grid.lanes + tid % grid.lanes) * N;
    exists = first < p.columns;
    row = static_cast<int64_t>(blockIdx.x) / grid.parts * rows + tid / grid.lanes;
    step = grid.row_blocks * rows;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      bias.at[i] = exists && p.bias != nullptr ? p.bias[first + i] : 0.f;
      factor.at[i] = exists ? gate_factor(p.gate, p.scale, p.rate, first + i) : 0.f;
    }
  }
};

template <class R>
__global__ void __launch_bounds__(kThreads) gate_activations_kernel(const __grid_constant__ GateActivations p,
                                                                    const __grid_constant__ LaunchGrid grid) {
  constexpr int N = R::kPack;
  const ThreadColumns<N> own(p, grid);
  if (!own.exists) return;
  for (int64_t row = own.row; row < p.rows; row += own.step) {
    auto y = load<N>(static_cast<const typename R::T*>(p.x) + row * p.stride + own.first);
#pragma unroll
    for (int i = 0; i < N; ++i) y.at[i] = apply_gate(p.gate, y.at[i] + own.bias.at[i], own.factor.at[i]);
    store(p.y + row * p.columns + own.first, y);
  }
}

// to[column] = sum over the rows of the block, in a fixed order.
template <int N>
__device__ inline void sum_block_rows(const Pack<N>& sum, float* to, int columns, const LaunchGrid& grid) {
  __shared__ float parts[kThreads * N];
  const int tid = static_cast<int>(threadIdx.x), row_width = grid.lanes * N;
  __syncthreads();  // the parts of the previous call have been read
#pragma unroll
  for (int i = 0; i < N; ++i) parts[tid * N + i] = sum.at[i];
  __syncthreads();  // the sums of all threads are stored
  for (int c = tid; c < row_width; c += kThreads) {
    float all = 0.f;
    for (int at = c; at < kThreads * N; at += row_width) all += parts[at];
    const int column = static_cast<int>(blockIdx.x) % grid.parts * row_width + c;
    if (column < columns) to[column] = all;
  }
}

template <class R>
__global__ void __launch_bounds__(kThreads)
    gate_activations_backward_kernel(const __grid_constant__ GateActivationsBackward p, float* const partials,
                                     const __grid_constant__ LaunchGrid grid) {
  using T = typename R::T;
  constexpr int N = R::kPack;
  const GateActivations& forward = p.forward;
  const ThreadColumns<N> own(forward, grid);
  auto dbias = zeros<N>(), drate = zeros<N>();
  for (int64_t row = own.row; own.exists && row < forward.rows; row += own.step) {
    const auto x = load<N>(static_cast<const T*>(forward.x) + row * forward.stride + own.first);
    auto dy = load<N>(p.dy + row * forward.columns + own.first);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float z = x.at[i] + own.bias.at[i];
      if (forward.gate == GateFunction::decay) {
        drate.at[i] = fmaf(dy.at[i], apply_gate(forward.gate, z, own.factor.at[i]), drate.at[i]);
      }
      dy.at[i] *= gate_derivative(forward.gate, z, own.factor.at[i]);
      dbias.at[i] += dy.at[i];
    }
    store(static_cast<T*>(p.dx) + row * forward.columns + own.first, dy);
  }
  if (p.sums == nullptr) return;
  float* const to = partials + static_cast<int64_t>(blockIdx.x) / grid.parts * 2 * forward.columns;
  sum_block_rows(dbias, to, forward.columns, grid);
  sum_block_rows(drate, to + forward.columns, forward.columns, grid);
}

// Calls f(Tile) for the type and pack of p; an error for GateFunction::none and for types without a Tile.
template <typename F>
cudaError_t dispatch_tile(const GateActivations& p, const F& f) {
  if (p.gate == GateFunction::none) return cudaErrorInvalidValue;
  return dispatch_dtype(p.dtype, [&](auto element) {
    using T = decltype(element);
    return p.use_packs ? f(Tile<T, kGateActivationsPack>{}) : f(Tile<T, 1>{});
  });
}

}  // namespace
}  // namespace gate_activations_detail

cudaError_t gate_activations(const GateActivations& p, cudaStream_t stream) {
  using namespace gate_activations_detail;
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  return dispatch_tile(p, [&](auto tile) {
    using R = decltype(tile);
    const LaunchGrid grid(p, R::kPack);
    return launch_grid<gate_activations_kernel<R>>(grid.blocks(), kThreads, 0, stream, p, grid);
  });
}

cudaError_t gate_activations_backward(const GateActivationsBackward& p, Workspace& workspace,
                                      cudaStream_t stream) {
  using namespace gate_activations_detail;
  const GateActivations& forward = p.forward;
  if (forward.columns == 0) return cudaSuccess;
  return dispatch_tile(forward, [&](auto tile) {
    using R = decltype(tile);
    const LaunchGrid grid(forward, R::kPack);
    const int columns = p.sums == nullptr ? 0 : 2 * forward.columns;
    auto* const partials = workspace.array<float>(grid.row_blocks * columns);
    if (forward.rows > 0) {
      GIRIH_TRY(launch_grid<gate_activations_backward_kernel<R>>(grid.blocks(), kThreads, 0, stream, p,
                                                                 partials, grid));
    }
    if (p.sums == nullptr) return cudaSuccess;
    const OutputTensor<1> sums{p.sums, DType::f32, {1}};
    return launch_sum_partials(partials, grid.row_blocks, columns, sums, stream);
  });
}

}  // namespace girih::kernels
