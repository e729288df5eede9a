// A block has a few columns of one head's state and walks its sequence's segments. M is read once a block and
// segment, from the L2 cache: its rows are split among the threads, many of them under way at once, for what
// the walk waits for is memory.
#include "delta_product/join.h"
#include "tile/grid.h"
#include "tile/launch.h"

namespace girih::kernels {
namespace delta_product {
namespace {

constexpr int kJoinThreads = 512;
constexpr int kJoinCols = 4;  // of V, a block's

// Wide: D rounded up to a power of two; kJoinThreads / Wide threads share an element of the state.
template <int Wide>
__global__ void __launch_bounds__(kJoinThreads) join(const TransitionJoin p) {
  constexpr int kParts = kJoinThreads / Wide;
  __shared__ float4 state[Wide];
  __shared__ float4 parts[kParts][Wide];
  const int row = threadIdx.x % Wide, part = threadIdx.x / Wide;
  const int groups = (p.V + kJoinCols - 1) / kJoinCols;
  const int col = static_cast<int>(blockIdx.x % groups) * kJoinCols;
  const int64_t head = blockIdx.x / groups % p.heads;
  const Sequence sequence = sequence_at(p.tokens, blockIdx.x / groups / p.heads);
  const int64_t first = first_piece(p.tokens, sequence, p.segment);
  const int64_t segments = divide_up(sequence.end - sequence.start, p.segment);
  // An empty sequence has one segment, and that one hands on what it starts from.
  const int64_t count = segments > 0 ? segments : 1;

  const bool own = part == 0 && row < p.D;
  float next[kJoinCols] = {};
  if (own && p.initial.data != nullptr) {
    const float* from = static_cast<const float*>(p.initial.data) + sequence.index * p.initial.stride[0] +
                        head * p.initial.stride[1] + row * p.initial.stride[2];
#pragma unroll
    for (int i = 0; i < kJoinCols; ++i) {
      if (col + i < p.V) next[i] = from[(col + i) * p.initial.stride[3]];
    }
  }
  for (int64_t n = 0; n < count; ++n) {
    const int64_t number = first + (p.reverse ? count - 1 - n : n);
    float* const here = p.states + (number * p.heads + head) * (p.V + p.D) * p.D + row;
    const bool followed = n + 1 < count;
    float end[kJoinCols] = {};
    if (own) {
      state[row] = make_float4(next[0], next[1], next[2], next[3]);
#pragma unroll
      for (int i = 0; i < kJoinCols; ++i) {
        if (col + i >= p.V) break;
        float& element = here[static_cast<int64_t>(col + i) * p.D];
        if (followed) end[i] = element;
        element = next[i];
      }
    }
    if (!followed) return;
    __syncthreads();
    float sum[kJoinCols] = {};
    if (row < p.D) {
      const float* const m = here + static_cast<int64_t>(p.V) * p.D;
#pragma unroll 16
      for (int d = part; d < p.D; d += kParts) {
        const float of = m[static_cast<int64_t>(d) * p.D];
        const float4 x = state[d];
        sum[0] = fmaf(of, x.x, sum[0]), sum[1] = fmaf(of, x.y, sum[1]);
        sum[2] = fmaf(of, x.z, sum[2]), sum[3] = fmaf(of, x.w, sum[3]);
      }
    }
    parts[part][row] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    __syncthreads();
    if (own) {
#pragma unroll
      for (int i = 0; i < kJoinCols; ++i) next[i] = end[i];
      for (int i = 0; i < kParts; ++i) {
        const float4 x = parts[i][row];
        next[0] += x.x, next[1] += x.y, next[2] += x.z, next[3] += x.w;
      }
    }
  }
}

template <int Wide>
cudaError_t launch(const TransitionJoin& p, cudaStream_t stream) {
  const int64_t blocks = p.tokens.sequences * p.heads * divide_up(p.V, kJoinCols);
  if (blocks == 0 || piece_count(p.tokens, p.segment) == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  join<Wide><<<static_cast<unsigned>(blocks), kJoinThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace
}  // namespace delta_product

cudaError_t join_transitions(const TransitionJoin& p, cudaStream_t stream) {
  if (p.D <= 64) return delta_product::launch<64>(p, stream);
  if (p.D <= 128) return delta_product::launch<128>(p, stream);
  return delta_product::launch<256>(p, stream);
}

}  // namespace girih::kernels
