// The gradients, with r and act(gate) recomputed:
//
//     u = dy act(gate)        n = r x
//     dx = r (u weight - n mean(u weight n))
//     dweight = sum over rows of u n        dgate = dy n weight act'(gate)
//
// dy, x and gate are read once, dx and dgate are written once. forward does not store r: one pass computes
// both sums of a row. A thread sums dweight of its columns over its rows, a block sums over its groups in a
// fixed order and writes one partial, and a second kernel sums the partials in a fixed order.
#include "gated_rms_norm/rows.h"
#include "tile/cuts.h"
#include "tile/launch.h"
#include "tile/partials.h"

namespace girih::kernels {
namespace gated_rms_norm {
namespace {

// The blocks that are resident on an H100 or H200 at once, 3 of 256 threads for each multiprocessor. More
// blocks would write more partials.
constexpr int64_t kResidentBlocks = 3 * kH100Multiprocessors;

// A function of the sizes only, since every block writes a partial.
int64_t block_count(int64_t rows, int groups) { return std::min(divide_up(rows, groups), kResidentBlocks); }

template <class R>
__global__ void __launch_bounds__(R::kThreads, 768 / R::kThreads)
    backward(const GatedRmsNormBackward p, float* const partials, const bool use_packs) {
  using T = typename R::T;
  __shared__ __align__(16) float buffer[R::kGroups * R::kWidth];  // the weights, later dweight
  const int dim = p.shape.dim;
  const float per_dim = 1.f / dim;
  const bool has_gate = p.shape.activation != GateActivation::none;
  const int64_t step = static_cast<int64_t>(gridDim.x) * R::kGroups;
  const Weight<R> weight(buffer, p.weight, dim);
  typename R::Part dweight = {};
  RowSums<R, 2> row_sums;

  // All groups of a block run the same number of iterations. A group past the last row reads the last row and
  // stores nothing.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * R::kGroups; first < p.shape.rows; first += step) {
    const bool exists = first + R::group() < p.shape.rows;
    const int64_t row = exists ? first + R::group() : p.shape.rows - 1;
    typename R::Raw x, gate, dy;
    load_row<R>(x, static_cast<const T*>(p.x) + row * dim, dim, use_packs);
    load_row<R>(dy, static_cast<const T*>(p.dy) + row * dim, dim, use_packs);
    if (has_gate) load_row<R>(gate, static_cast<const T*>(p.gate) + row * dim, dim, use_packs);

    // u, dgate / r, and the sums of x^2 and u weight x over the row
    typename R::Part u, dgate;
    float sums[2] = {0.f, 0.f};
    dispatch_activation(p.shape.activation, [&](auto activation) {
      constexpr GateActivation kActivation = decltype(activation)::value;
#pragma unroll
      for (int k = 0; k < R::kPacks; ++k) {
#pragma unroll
        for (int f = 0; f < R::kFours; ++f) {
          const Pack<4> xs = unpack_four<R>(x[k], f), w = weight(k, f), grad = unpack_four<R>(dy[k], f);
          Pack<4> act, slope;
          if constexpr (kActivation != GateActivation::none) {
            activate<kActivation, true>(unpack_four<R>(gate[k], f), act, slope);
          } else {
            act = {1.f, 1.f, 1.f, 1.f};
            slope = zeros<4>();
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float wx = w.at[i] * xs.at[i];
            u[k][f].at[i] = grad.at[i] * act.at[i];
            dgate[k][f].at[i] = grad.at[i] * slope.at[i] * wx;
            sums[0] += xs.at[i] * xs.at[i];
            sums[1] += u[k][f].at[i] * wx;
          }
        }
      }
    });
    row_sums.sum(sums);
    const float r = rsqrtf(sums[0] * per_dim + p.shape.eps);
    const float mean = r * sums[1] * per_dim;

    if (!exists) continue;
#pragma unroll
    for (int k = 0; k < R::kPacks; ++k) {
      uint4 pack;
#pragma unroll
      for (int f = 0; f < R::kFours; ++f) {
        Pack<4> n = unpack_four<R>(x[k], f), dx;
        const Pack<4> w = weight(k, f);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          n.at[i] *= r;
          dx.at[i] = r * (u[k][f].at[i] * w.at[i] - n.at[i] * mean);
          dweight[k][f].at[i] += u[k][f].at[i] * n.at[i];
        }
        pack_four<R>(pack, f, dx);
      }
      store_pack<R>(static_cast<T*>(p.dx) + row * dim, k, pack, dim, use_packs);
      if (!has_gate) continue;
#pragma unroll
      for (int f = 0; f < R::kFours; ++f) {
        Pack<4> dg = dgate[k][f];
#pragma unroll
        for (int i = 0; i < 4; ++i) dg.at[i] *= r;
        pack_four<R>(pack, f, dg);
      }
      store_pack<R>(static_cast<T*>(p.dgate) + row * dim, k, pack, dim, use_packs);
    }
  }

  // partials [blocks, dim]
  __syncthreads();  // the weights have been read
#pragma unroll
  for (int k = 0; k < R::kPacks; ++k) {
#pragma unroll
    for (int f = 0; f < R::kFours; ++f) {
      store(buffer + R::group() * R::kWidth + R::column(k) + 4 * f, dweight[k][f]);
    }
  }
  __syncthreads();  // the sums of all groups are stored
  for (int column = threadIdx.x; column < dim; column += R::kThreads) {
    float sum = 0.f;
#pragma unroll
    for (int g = 0; g < R::kGroups; ++g) sum += buffer[g * R::kWidth + column];
    partials[static_cast<int64_t>(blockIdx.x) * dim + column] = sum;
  }
}

}  // namespace
}  // namespace gated_rms_norm

cudaError_t gated_rms_norm_backward(const GatedRmsNormBackward& p, Workspace& workspace,
                                    cudaStream_t stream) {
  using namespace gated_rms_norm;
  const bool use_packs = are_pack_aligned(p.shape, p.dy, p.x, p.gate, p.dx, p.dgate);
  return dispatch_rows(p.shape, [&](auto rows) {
    using R = decltype(rows);
    const int64_t blocks = block_count(p.shape.rows, R::kGroups);
    auto* const partials = workspace.array<float>(blocks * p.shape.dim);
    GIRIH_TRY(launch_grid<backward<R>>(blocks, R::kThreads, 0, stream, p, partials, use_packs));
    return launch_sum_partials(partials, blocks, p.shape.dim, p.dweight, stream);
  });
}

}  // namespace girih::kernels
