// y = gate(z), z = x + b        dx = dy gate'(z)        db = sum of dx over rows        dA = sum of dy y
// (decay)
//
// Neighbouring threads share a row. A thread has a pack of columns, or one column, of several rows and sums
// db and dA of its columns over these rows. Another kernel adds the sums of the blocks.
#include "row_gates/row_gates.h"
#include "tile/grid.h"
#include "tile/instance.h"
#include "tile/pack.h"
#include "tile/partials.h"

namespace girih::kernels {
namespace row_gates_of {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBlocks = 8 * 132;  // blocks that are resident on an H100 or H200 at once

template <typename Row, int N>
struct Tile {
  using T = Row;
  static constexpr int kPack = N;
};

// `lanes` threads (a power of two) have a row. A row with more columns than a block is split into `parts`
// parts in different blocks.
struct Grid {
  int lanes = 1, parts;
  int64_t row_blocks;

  Grid(const RowGates& p, int pack) {
    const int64_t packs = divide_up(p.columns, pack);
    while (lanes < packs && lanes < kThreads) lanes *= 2;
    parts = static_cast<int>(divide_up(packs, lanes));
    row_blocks = std::min(divide_up(p.rows, kThreads / lanes), std::max<int64_t>(kBlocks / parts, 1));
  }
  unsigned blocks() const { return blocks_for(row_blocks * parts); }
};

// The columns of a thread, and its rows: row, row + step, ...
template <int N>
struct Columns {
  int first;
  bool there;
  int64_t row, step;
  Pack<N> bias, factor;

  __device__ Columns(const RowGates& p, const Grid& grid) {
    const int tid = static_cast<int>(threadIdx.x), rows = kThreads / grid.lanes;
    first = (static_cast<int>(blockIdx.x) % grid.parts * grid.lanes + tid % grid.lanes) * N;
    there = first < p.columns;
    row = static_cast<int64_t>(blockIdx.x) / grid.parts * rows + tid / grid.lanes;
    step = grid.row_blocks * rows;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      bias.at[i] = there && p.bias != nullptr ? p.bias[first + i] : 0.f;
      factor.at[i] = there ? factor_of(p.gate, p.scale, p.rate, first + i) : 0.f;
    }
  }
};

template <class R>
__global__ void __launch_bounds__(kThreads)
    row_gates_kernel(const __grid_constant__ RowGates p, const __grid_constant__ Grid grid) {
  constexpr int N = R::kPack;
  const Columns<N> own(p, grid);
  if (!own.there) return;
  for (int64_t row = own.row; row < p.rows; row += own.step) {
    auto y = load<N>(static_cast<const typename R::T*>(p.x) + row * p.stride + own.first);
#pragma unroll
    for (int i = 0; i < N; ++i) y.at[i] = gate_of(p.gate, y.at[i] + own.bias.at[i], own.factor.at[i]);
    store(p.y + row * p.columns + own.first, y);
  }
}

// to[column] = sum over the rows of the block, in a fixed order.
template <int N>
__device__ inline void add_rows(const Pack<N>& sum, float* to, int columns, const Grid& grid) {
  __shared__ float parts[kThreads * N];
  const int tid = static_cast<int>(threadIdx.x), wide = grid.lanes * N;
  __syncthreads();  // the parts of the previous call have been read
#pragma unroll
  for (int i = 0; i < N; ++i) parts[tid * N + i] = sum.at[i];
  __syncthreads();  // the sums of all threads are stored
  for (int c = tid; c < wide; c += kThreads) {
    float all = 0.f;
    for (int at = c; at < kThreads * N; at += wide) all += parts[at];
    const int column = static_cast<int>(blockIdx.x) % grid.parts * wide + c;
    if (column < columns) to[column] = all;
  }
}

template <class R>
__global__ void __launch_bounds__(kThreads)
    row_gates_backward_kernel(const __grid_constant__ RowGatesBackward p, const __grid_constant__ Grid grid) {
  using T = typename R::T;
  constexpr int N = R::kPack;
  const RowGates& of = p.of;
  const Columns<N> own(of, grid);
  auto of_bias = zeros<N>(), of_rate = zeros<N>();
  for (int64_t row = own.row; own.there && row < of.rows; row += own.step) {
    const auto x = load<N>(static_cast<const T*>(of.x) + row * of.stride + own.first);
    auto dy = load<N>(p.dy + row * of.columns + own.first);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float z = x.at[i] + own.bias.at[i];
      if (of.gate == RowGate::decay) {
        of_rate.at[i] = fmaf(dy.at[i], gate_of(of.gate, z, own.factor.at[i]), of_rate.at[i]);
      }
      dy.at[i] *= gate_slope(of.gate, z, own.factor.at[i]);
      of_bias.at[i] += dy.at[i];
    }
    store(static_cast<T*>(p.dx) + row * of.columns + own.first, dy);
  }
  if (p.sums == nullptr) return;
  float* const to = p.partials + static_cast<int64_t>(blockIdx.x) / grid.parts * 2 * of.columns;
  add_rows(of_bias, to, of.columns, grid);
  add_rows(of_rate, to + of.columns, of.columns, grid);
}

// Calls f(Tile) for the type and pack of p; an error for RowGate::none and for types without a Tile.
template <typename F>
cudaError_t with_tile(const RowGates& p, const F& f) {
  if (p.gate == RowGate::none) return cudaErrorInvalidValue;
  return by_element(p.dtype, [&](auto element) {
    using T = decltype(element);
    p.in_packs ? f(Tile<T, kRowGatesPack>{}) : f(Tile<T, 1>{});
    return cudaGetLastError();
  });
}

}  // namespace
}  // namespace row_gates_of

cudaError_t row_gates(const RowGates& p, cudaStream_t stream) {
  using namespace row_gates_of;
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  return with_tile(p, [&](auto tile) {
    using R = decltype(tile);
    const Grid grid(p, R::kPack);
    row_gates_kernel<R><<<grid.blocks(), kThreads, 0, stream>>>(p, grid);
  });
}

int64_t row_gates_partials(const RowGates& p) {
  return row_gates_of::Grid(p, p.in_packs ? kRowGatesPack : 1).row_blocks * 2 * p.columns;
}

cudaError_t row_gates_backward(const RowGatesBackward& p, cudaStream_t stream) {
  using namespace row_gates_of;
  if (p.of.columns == 0) return cudaSuccess;
  int64_t partials = 0;
  const cudaError_t error = with_tile(p.of, [&](auto tile) {
    using R = decltype(tile);
    const Grid grid(p.of, R::kPack);
    partials = grid.row_blocks;
    if (p.of.rows == 0) return;
    row_gates_backward_kernel<R><<<grid.blocks(), kThreads, 0, stream>>>(p, grid);
  });
  if (error != cudaSuccess || p.sums == nullptr) return error;
  const Out<1> sums{p.sums, DType::f32, {1}};
  return launch_sum_partials(p.partials, partials, 2 * p.of.columns, sums, stream);
}

}  // namespace girih::kernels
