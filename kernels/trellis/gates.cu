// L and L_C - L of every token from the gates of its chunk, and the gradients of gamma and g.
//
// A column is a head of a chunk. A block has 32 columns, in the order of heads. All threads load the columns
// to shared memory, one warp (two in forward) sums along the tokens of the 32 columns, and all threads store.
// So no thread waits for global memory token by token.
#include "tile/gates.h"
#include "tile/launch.h"
#include "tile/pack.h"
#include "trellis/kernels.h"

namespace girih::kernels {
namespace {

constexpr int kChunkHeads = 32, kWarps = 8;  // warp w loads tokens w, w + 8, ...

// The column of the thread.
struct ChunkHead {
  int64_t batch;
  Chunk chunk;
  int head, index, warp;

  __device__ explicit ChunkHead(const TrellisShape& shape)
      : batch(0),
        chunk{0, 0, false},
        head(0),
        index(static_cast<int>(threadIdx.x) % kChunkHeads),
        warp(static_cast<int>(threadIdx.x) / kChunkHeads) {
    const int64_t column = blockIdx.x * int64_t{kChunkHeads} + index;
    if (column >= chunk_count(shape.grid) * shape.heads) return;
    head = static_cast<int>(column % shape.heads);
    const NumberedChunk at = chunk_at(shape.grid, column / shape.heads);
    chunk = chunk_of(shape.grid, at.of, at.index), batch = at.of.sequence.batch;
  }
  // Index of token t of the chunk in [B, T, H].
  __device__ int64_t token_index(const TrellisShape& shape, int t) const {
    return (batch * shape.grid.tokens.tokens + chunk.start + t) * shape.heads + head;
  }
  // Index in shared memory of token t.
  __device__ int shared_index(int t) const { return t * kChunkHeads + index; }
};

__global__ void __launch_bounds__(kChunkHeads* kWarps)
    trellis_gates_kernel(const __grid_constant__ TrellisGates p) {
  GIRIH_DYNAMIC_SHARED(float, shared, 16);
  const int size = p.shape.grid.size * kChunkHeads;
  float *const gate = shared, *const log_decay_to_end = gate + size,
               *const log_decay = log_decay_to_end + size, *const log_decay_error = log_decay + size;
  const ChunkHead column(p.shape);
  const int length = column.chunk.length;
  if (p.g.data != nullptr) {
    for (int t = column.warp; t < length; t += kWarps) {
      gate[column.shared_index(t)] =
          kLog2E * clamp_gate(load_element(p.g, column.batch, column.chunk.start + t, column.head));
    }
  } else {
    for (int t = column.warp; t < length; t += kWarps) gate[column.shared_index(t)] = 0.f;
  }
  __syncthreads();
  if (column.warp == 0) {
    // L_t and its rounding error. Where large gates precede small ones, the rounding of the sum loses digits
    // that the differences of L_t need.
    float sum = 0.f, sum_error = 0.f;
    for (int t = 0; t < length; ++t) {
      const float g = gate[column.shared_index(t)], total = __fadd_rn(sum, g), added = __fadd_rn(total, -sum);
      sum_error += __fadd_rn(__fadd_rn(sum, -__fadd_rn(total, -added)), __fadd_rn(g, -added));
      sum = total;
      log_decay[column.shared_index(t)] = sum, log_decay_error[column.shared_index(t)] = sum_error;
    }
  } else if (column.warp == 1) {
    float sum = 0.f;
    for (int t = length - 1; t >= 0; --t) {
      log_decay_to_end[column.shared_index(t)] = sum;
      sum += gate[column.shared_index(t)];
    }
  }
  __syncthreads();
  for (int t = column.warp; t < length; t += kWarps) {
    const int shared_index = column.shared_index(t);
    const float gamma = load_element(p.gamma, column.batch, column.chunk.start + t, column.head);
    p.tokens[column.token_index(p.shape, t)] = {log_decay[shared_index], log_decay_error[shared_index],
                                                log_decay_to_end[shared_index], gamma};
  }
}

// dg_t is the sum of dL over the tokens from t on.
__global__ void __launch_bounds__(kChunkHeads* kWarps)
    trellis_gate_gradients_kernel(const __grid_constant__ TrellisGateGradients p) {
  GIRIH_DYNAMIC_SHARED(float, shared, 16);
  const ChunkHead column(p.shape);
  const int64_t token_count = p.shape.grid.tokens.batch * p.shape.grid.tokens.tokens * p.shape.heads;
  const int tiles = (p.shape.grid.size + 15) / 16, length = column.chunk.length;
  for (int t = column.warp; t < length; t += kWarps) {
    const int64_t at = column.token_index(p.shape, t);
    float dgamma = p.dgammas[at];
    if (p.shape.memories == 2) dgamma += p.dgammas[token_count + at];
    static_cast<float*>(
        p.dgamma.data)[offset_of(p.dgamma, column.batch, column.chunk.start + t, column.head)] = dgamma;
    if (p.dg.data == nullptr) continue;
    float sum = 0.f;
    for (int memory = 0; memory < p.shape.memories; ++memory) {
      for (int j = 0; j <= t / 16; ++j) sum += p.dL[(memory * tiles + j) * token_count + at];
    }
    shared[column.shared_index(t)] = sum;
  }
  if (p.dg.data == nullptr) return;
  __syncthreads();
  if (column.warp == 0) {
    float sum = 0.f;
    for (int t = length - 1; t >= 0; --t)
      shared[column.shared_index(t)] = sum += shared[column.shared_index(t)];
  }
  __syncthreads();
  for (int t = column.warp; t < length; t += kWarps) {
    static_cast<float*>(p.dg.data)[offset_of(p.dg, column.batch, column.chunk.start + t, column.head)] =
        shared[column.shared_index(t)];
  }
}

// Launches a block for every 32 columns, with shared memory for each token and column.
template <auto Kernel, class Problem>
cudaError_t launch(const Problem& p, int floats_per_token, cudaStream_t stream) {
  const int64_t blocks = (chunk_count(p.shape.grid) * p.shape.heads + kChunkHeads - 1) / kChunkHeads;
  const int threads = kChunkHeads * kWarps, bytes = floats_per_token * p.shape.grid.size * kChunkHeads * 4;
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
