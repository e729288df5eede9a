// What a chunk's gates come to for its tokens, and their gradients: a thread has a chunk's head, neighbours
// the next head, and goes through the tokens.
#include "tile/gates.h"
#include "tile/pack.h"
#include "trellis/trellis.h"

namespace girih::kernels {
namespace {

// The chunk's head of thread `index`, of all threads.
struct ChunkHead {
  int64_t batch;
  Chunk chunk;
  int head;

  __device__ ChunkHead(const TrellisShape& shape, int64_t index)
      : batch(0), chunk{0, 0, false}, head(static_cast<int>(index % shape.heads)) {
    if (index >= chunk_count(shape.grid) * shape.heads) return;
    const NumberedChunk at = chunk_at(shape.grid, index / shape.heads);
    chunk = chunk_of(shape.grid, at.of, at.index), batch = at.of.sequence.batch;
  }
  // Token t of the chunk in [B, T, H].
  __device__ int64_t place(const TrellisShape& shape, int t) const {
    return (batch * shape.grid.tokens.tokens + chunk.start + t) * shape.heads + head;
  }
};

__device__ inline float gate_of(const In<3>& g, const ChunkHead& of, int t) {
  return g.data == nullptr ? 0.f : kLog2E * summable(load_any(g, of.batch, of.chunk.start + t, of.head));
}

__global__ void trellis_gates_kernel(const __grid_constant__ TrellisGates p) {
  const ChunkHead of(p.shape, blockIdx.x * int64_t{blockDim.x} + threadIdx.x);
  float after = 0.f;
#pragma unroll 4
  for (int t = of.chunk.length - 1; t >= 0; --t) {
    p.tokens[of.place(p.shape, t)].after = after;
    after += gate_of(p.g, of, t);
  }
  // L_t, and what its rounding has lost: sums of gates that close and of others that do not lose the digits
  // of these, which differences of L_t are taken with.
  float sum = 0.f, lost = 0.f;
#pragma unroll 4
  for (int t = 0; t < of.chunk.length; ++t) {
    const float gate = gate_of(p.g, of, t), total = __fadd_rn(sum, gate), added = __fadd_rn(total, -sum);
    lost += __fadd_rn(__fadd_rn(sum, -__fadd_rn(total, -added)), __fadd_rn(gate, -added));
    sum = total;
    TokenGate& token = p.tokens[of.place(p.shape, t)];
    token.through = sum, token.lost = lost;
    token.gamma = load_any(p.gamma, of.batch, of.chunk.start + t, of.head);
  }
}

// dg_t is the sum of dL from t on.
__global__ void trellis_gate_gradients_kernel(const __grid_constant__ TrellisGateGradients p) {
  const ChunkHead of(p.shape, blockIdx.x * int64_t{blockDim.x} + threadIdx.x);
  const int64_t numbers = p.shape.grid.tokens.batch * p.shape.grid.tokens.tokens * p.shape.heads;
  const int tiles = (p.shape.grid.size + 15) / 16;
  float sum = 0.f;
  for (int t = of.chunk.length - 1; t >= 0; --t) {
    const int64_t at = of.place(p.shape, t);
    static_cast<float*>(p.dgamma.data)[offset_of(p.dgamma, of.batch, of.chunk.start + t, of.head)] =
        p.dgammas[at] + p.dgammas[numbers + at];
    if (p.dg.data == nullptr) continue;
    for (int memory = 0; memory < 2; ++memory) {
      for (int j = 0; j <= t / 16; ++j) sum += p.dL[(memory * tiles + j) * numbers + at];
    }
    static_cast<float*>(p.dg.data)[offset_of(p.dg, of.batch, of.chunk.start + t, of.head)] = sum;
  }
}

template <auto Kernel, class Problem>
cudaError_t launch(const Problem& p, cudaStream_t stream) {
  constexpr int kThreads = 128;
  const int64_t blocks = (chunk_count(p.shape.grid) * p.shape.heads + kThreads - 1) / kThreads;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  Kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t trellis_gates(const TrellisGates& problem, cudaStream_t stream) {
  return launch<trellis_gates_kernel>(problem, stream);
}
cudaError_t trellis_gate_gradients(const TrellisGateGradients& problem, cudaStream_t stream) {
  return launch<trellis_gate_gradients_kernel>(problem, stream);
}

}  // namespace girih::kernels
