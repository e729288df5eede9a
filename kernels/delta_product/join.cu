// A block has a few columns of one head's state and walks its sequence's segments. M is read once a block and
// segment, from the L2 cache: its rows are split among the threads, and while one segment's are used, the
// next one's are under way, for what the walk waits for is memory.
#include "delta_product/join.h"
#include "tile/grid.h"
#include "tile/launch.h"

namespace girih::kernels {
namespace delta_product {
namespace {

constexpr int kJoinThreads = 512;
constexpr int kJoinCols = 8;  // of V, a block's: with 4 the blocks read twice as much of M

// Wide: D rounded up to a power of two; kJoinThreads / Wide threads share a row of the state, of the sums a
// part of the terms each and of the row some of the columns.
template <int Wide>
__global__ void __launch_bounds__(kJoinThreads) join(const TransitionJoin p) {
  constexpr int kParts = kJoinThreads / Wide, kOwn = kJoinCols / kParts;
  constexpr int kAhead = Wide / kParts < 32 ? Wide / kParts : 32;  // elements of M under way
  __shared__ float4 state[Wide][2];
  __shared__ float4 parts[kParts][2][Wide];
  const int row = threadIdx.x % Wide, part = threadIdx.x / Wide, own = part * kOwn;
  const int groups = (p.V + kJoinCols - 1) / kJoinCols;
  const int col = static_cast<int>(blockIdx.x % groups) * kJoinCols + own;
  const int64_t head = blockIdx.x / groups % p.heads;
  const Sequence sequence = sequence_at(p.tokens, blockIdx.x / groups / p.heads);
  const int64_t first = first_piece(p.tokens, sequence, p.segment);
  const int64_t segments = divide_up(sequence.end - sequence.start, p.segment);
  // An empty sequence has one segment, and that one hands on what it starts from.
  const int64_t count = segments > 0 ? segments : 1;

  const auto states_of = [&](int64_t n) {
    const int64_t number = first + (p.reverse ? count - 1 - n : n);
    return p.states + (number * p.heads + head) * (p.V + p.D) * p.D + row;
  };
  const auto transition = [&](int64_t n, int d) {
    const bool has = row < p.D && d < p.D && n + 1 < count;
    return has ? states_of(n)[(static_cast<int64_t>(p.V) + d) * p.D] : 0.f;
  };
  float next[kOwn] = {}, ahead[kAhead];
  if (row < p.D && p.initial.data != nullptr) {
    const float* from = static_cast<const float*>(p.initial.data) + sequence.index * p.initial.stride[0] +
                        head * p.initial.stride[1] + row * p.initial.stride[2];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (col + i < p.V) next[i] = from[(col + i) * p.initial.stride[3]];
    }
  }
#pragma unroll
  for (int i = 0; i < kAhead; ++i) ahead[i] = transition(1, part + i * kParts);
  for (int64_t n = 0; n < count; ++n) {
    float* const here = states_of(n);
    const bool followed = n + 1 < count;
    float end[kOwn] = {};
    if (row < p.D) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        reinterpret_cast<float*>(state[row])[own + i] = next[i];
        if (col + i >= p.V) continue;
        float& element = here[static_cast<int64_t>(col + i) * p.D];
        if (followed) end[i] = element;
        element = next[i];
      }
    }
    if (!followed) return;
    if (n == 0) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) next[i] = end[i];
      continue;
    }
    __syncthreads();
    float sum[kJoinCols] = {};
    const auto add = [&](float of, int d) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 x = state[d][half];
        float* const to = sum + 4 * half;
        to[0] = fmaf(of, x.x, to[0]), to[1] = fmaf(of, x.y, to[1]);
        to[2] = fmaf(of, x.z, to[2]), to[3] = fmaf(of, x.w, to[3]);
      }
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int d = part + i * kParts;
      if (d < p.D) add(ahead[i], d);
      ahead[i] = transition(n + 1, d);
    }
#pragma unroll 16
    for (int d = part + kAhead * kParts; d < p.D; d += kParts) add(transition(n, d), d);
    parts[part][0][row] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    parts[part][1][row] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      next[i] = end[i];
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        next[i] += reinterpret_cast<const float*>(&parts[j][(own + i) / 4][row])[(own + i) % 4];
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
