// dg for a gate for each head: dg_t = sum of dg_parts of its chunk's blocks + sum of across of the partner's
// blocks, over query heads and tiles of keys, in a fixed order.
#include "gla/launch.h"
#include "tile/grid.h"
#include "tile/pack.h"

namespace girih::kernels {
namespace {

constexpr int kThreads = 256;

// A thread has one gate.
__global__ void __launch_bounds__(kThreads)
    head_gate_sum(const __grid_constant__ HeadGradients p, int parts) {
  const Tokens& all = p.shape.tokens;
  const int heads = p.shape.heads, each = p.shape.query_heads / heads * parts;  // terms of a gate
  const int64_t gates = all.batch * all.tokens * heads, grid = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < gates; i += grid) {
    const int64_t row = i / heads, batch = row / all.tokens, token = row - batch * all.tokens;
    const int head = static_cast<int>(i - row * heads);
    const Sequence sequence = sequence_of(all, batch, token);
    float sum = 0.f;
    if (sequence.inside) {
      const Piece partner = partner_of({sequence, (token - sequence.start) / kChunk, 0, 0});
      const int64_t number = first_piece(all, sequence, kChunk) + partner.index;
      const float* own = p.dg_parts + i * each;
      const float* across = p.across + (number * heads + head) * each;
      for (int part = 0; part < each; ++part) sum += own[part] + (partner.length > 0 ? across[part] : 0.f);
    }
    store_any(p.dg, sum, batch, token, head);
  }
}

}  // namespace

cudaError_t sum_head_gates(const HeadGradients& p, cudaStream_t stream) {
  const int64_t gates = p.shape.tokens.batch * p.shape.tokens.tokens * p.shape.heads;
  if (gates == 0) return cudaSuccess;
  head_gate_sum<<<blocks_for(divide_up(gates, kThreads)), kThreads, 0, stream>>>(p, p.tiles());
  return cudaGetLastError();
}

}  // namespace girih::kernels
