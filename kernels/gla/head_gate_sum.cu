// dg for a gate for each head: dg_t = sum of dg_parts of its chunk's blocks + sum of partner_gate_terms of
// the partner's blocks, over query heads and tiles of keys, in a fixed order.
#include "gla/kernels.h"
#include "tile/grid.h"
#include "tile/launch.h"
#include "tile/pack.h"

namespace girih::kernels {
namespace {

constexpr int kThreads = 256;

// A thread has one gate.
__global__ void __launch_bounds__(kThreads)
    head_gate_sum(const __grid_constant__ HeadGradients p, int key_tiles) {
  const SequenceLayout& layout = p.shape.tokens;
  const int heads = p.shape.heads, terms_per_gate = p.shape.query_heads / heads * key_tiles;
  const int64_t gates = layout.batch * layout.tokens * heads,
                grid_threads = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < gates; i += grid_threads) {
    const int64_t row = i / heads, batch = row / layout.tokens, token = row - batch * layout.tokens;
    const int head = static_cast<int>(i - row * heads);
    const Sequence sequence = sequence_of(layout, batch, token);
    float sum = 0.f;
    if (sequence.is_owned) {
      const TokenRange partner = partner_chunk({sequence, (token - sequence.start) / kChunk, 0, 0});
      const int64_t chunk_number = first_token_range(layout, sequence, kChunk) + partner.index;
      const float* own = p.dg_parts + i * terms_per_gate;
      const float* partner_gate_terms = p.partner_gate_terms + (chunk_number * heads + head) * terms_per_gate;
      for (int part = 0; part < terms_per_gate; ++part)
        sum += own[part] + (partner.length > 0 ? partner_gate_terms[part] : 0.f);
    }
    store_element(p.dg, sum, batch, token, head);
  }
}

}  // namespace

cudaError_t sum_gate_gradients(const HeadGradients& p, cudaStream_t stream) {
  const int64_t gates = p.shape.tokens.batch * p.shape.tokens.tokens * p.shape.heads;
  if (gates == 0) return cudaSuccess;
  return launch_grid<head_gate_sum>(clamp_grid_blocks(divide_up(gates, kThreads)), kThreads, 0, stream, p,
                                    p.tiles());
}

}  // namespace girih::kernels
