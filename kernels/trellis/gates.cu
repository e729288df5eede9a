// L and L_C - L of every token from the gates of its chunk, and the gradients of gamma and g.
//
// A column is a head of a chunk. A block has 32 columns, in the order of heads. All threads load the columns
// to shared memory, one warp sums along the tokens of the 32 columns, and all threads store. So no thread
// waits for global memory token by token.
#include "tile/gates.h"
#include "tile/launch.h"
#include "tile/pack.h"
#include "trellis/trellis.h"

namespace girih::kernels {
namespace {

constexpr int kColumns = 32, kWarps = 8;  // a warp has every eighth token

// The column of the thread.
struct Column {
  int64_t batch;
  Chunk chunk;
  int head, index, warp;

  __device__ explicit Column(const TrellisShape& shape)
      : batch(0),
        chunk{0, 0, false},
        head(0),
        index(static_cast<int>(threadIdx.x) % kColumns),
        warp(static_cast<int>(threadIdx.x) / kColumns) {
    const int64_t column = blockIdx.x * int64_t{kColumns} + index;
    if (column >= chunk_count(shape.grid) * shape.heads) return;
    head = static_cast<int>(column % shape.heads);
    const NumberedChunk at = chunk_at(shape.grid, column / shape.heads);
    chunk = chunk_of(shape.grid, at.of, at.index), batch = at.of.sequence.batch;
  }
  // Index of token t of the chunk in [B, T, H].
  __device__ int64_t place(const TrellisShape& shape, int t) const {
    return (batch * shape.grid.tokens.tokens + chunk.start + t) * shape.heads + head;
  }
  // Index in shared memory of token t.
  __device__ int slot(int t) const { return t * kColumns + index; }
};

__global__ void __launch_bounds__(kColumns* kWarps)
    trellis_gates_kernel(const __grid_constant__ TrellisGates p) {
  extern __shared__ __align__(16) float shared[];
  const int size = p.shape.grid.size * kColumns;
  float *const gate = shared, *const after = gate + size, *const through = after + size,
               *const lost = through + size;
  const Column of(p.shape);
  const int length = of.chunk.length;
  if (p.g.data != nullptr) {
    for (int t = of.warp; t < length; t += kWarps) {
      gate[of.slot(t)] = kLog2E * summable(load_any(p.g, of.batch, of.chunk.start + t, of.head));
    }
  } else {
    for (int t = of.warp; t < length; t += kWarps) gate[of.slot(t)] = 0.f;
  }
  __syncthreads();
  if (of.warp == 0) {
    // L_t and its rounding error. Where large gates precede small ones, the rounding of the sum loses digits
    // that the differences of L_t need.
    float sum = 0.f, rest = 0.f;
    for (int t = 0; t < length; ++t) {
      const float g = gate[of.slot(t)], total = __fadd_rn(sum, g), added = __fadd_rn(total, -sum);
      rest += __fadd_rn(__fadd_rn(sum, -__fadd_rn(total, -added)), __fadd_rn(g, -added));
      sum = total;
      through[of.slot(t)] = sum, lost[of.slot(t)] = rest;
    }
  } else if (of.warp == 1) {
    float sum = 0.f;
    for (int t = length - 1; t >= 0; --t) {
      after[of.slot(t)] = sum;
      sum += gate[of.slot(t)];
    }
  }
  __syncthreads();
  for (int t = of.warp; t < length; t += kWarps) {
    const int slot = of.slot(t);
    const float gamma = load_any(p.gamma, of.batch, of.chunk.start + t, of.head);
    p.tokens[of.place(p.shape, t)] = {through[slot], lost[slot], after[slot], gamma};
  }
}

// dg_t is the sum of dL over the tokens from t on.
__global__ void __launch_bounds__(kColumns* kWarps)
    trellis_gate_gradients_kernel(const __grid_constant__ TrellisGateGradients p) {
  extern __shared__ __align__(16) float shared[];
  const Column of(p.shape);
  const int64_t numbers = p.shape.grid.tokens.batch * p.shape.grid.tokens.tokens * p.shape.heads;
  const int tiles = (p.shape.grid.size + 15) / 16, length = of.chunk.length;
  for (int t = of.warp; t < length; t += kWarps) {
    const int64_t at = of.place(p.shape, t);
    float dgamma = p.dgammas[at];
    if (p.shape.memories == 2) dgamma += p.dgammas[numbers + at];
    static_cast<float*>(p.dgamma.data)[offset_of(p.dgamma, of.batch, of.chunk.start + t, of.head)] = dgamma;
    if (p.dg.data == nullptr) continue;
    float sum = 0.f;
    for (int memory = 0; memory < p.shape.memories; ++memory) {
      for (int j = 0; j <= t / 16; ++j) sum += p.dL[(memory * tiles + j) * numbers + at];
    }
    shared[of.slot(t)] = sum;
  }
  if (p.dg.data == nullptr) return;
  __syncthreads();
  if (of.warp == 0) {
    float sum = 0.f;
    for (int t = length - 1; t >= 0; --t) shared[of.slot(t)] = sum += shared[of.slot(t)];
  }
  __syncthreads();
  for (int t = of.warp; t < length; t += kWarps) {
    static_cast<float*>(p.dg.data)[offset_of(p.dg, of.batch, of.chunk.start + t, of.head)] =
        shared[of.slot(t)];
  }
}

// Launches a block for every 32 columns, with shared memory for each token and column.
template <auto Kernel, class Problem>
cudaError_t launch(const Problem& p, int numbers, cudaStream_t stream) {
  const int64_t blocks = (chunk_count(p.shape.grid) * p.shape.heads + kColumns - 1) / kColumns;
  const int threads = kColumns * kWarps, bytes = numbers * p.shape.grid.size * kColumns * 4;
  return launch_grid<Kernel>(blocks, threads, bytes, stream, p);
}

}  // namespace

cudaError_t trellis_gates(const TrellisGates& problem, cudaStream_t stream) {
  return launch<trellis_gates_kernel>(problem, 4, stream);
}
cudaError_t trellis_gate_gradients(const TrellisGateGradients& problem, cudaStream_t stream) {
  return launch<trellis_gate_gradients_kernel>(problem, 1, stream);
}

}  // namespace girih::kernels
