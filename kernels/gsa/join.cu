// The kernel of join_segments. A thread has one element of the state and loops over the segments of its
// sequence.
#include "gsa/join.h"
#include "tile/grid.h"
#include "tile/launch.h"
#include "tile/pack.h"

namespace girih::kernels {
namespace gsa {
namespace {

constexpr int kThreads = 128;
// A segment costs one FMA; the loop is bound by memory latency, so the values of 8 segments are loaded at
// once.
constexpr int kPrefetch = 8;

__global__ void __launch_bounds__(kThreads) join(const SegmentJoin p) {
  const int width = p.width[0] + p.width[1];
  const int64_t elements = p.layout.sequences * p.heads * width * p.M;
  const int64_t grid_threads = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements;
       i += grid_threads) {
    const int64_t m = i % p.M;
    const int row = static_cast<int>(i / p.M % width);
    const int64_t head = i / p.M / width % p.heads;
    const Sequence sequence = sequence_at(p.layout, i / p.M / width / p.heads);
    const int64_t first = first_token_range(p.layout, sequence, p.segment_tokens);
    const int64_t segments_with_tokens = divide_up(sequence.end - sequence.start, p.segment_tokens);

    const int memory = row < p.width[0] ? 0 : 1;
    const InputTensor<4> initial = memory == 0 ? p.initial[0] : p.initial[1];
    const OutputTensor<4> final = memory == 0 ? p.final[0] : p.final[1];
    const auto offset = [&](const auto& tensor) {
      return offset_of(tensor, sequence.index, head, row - memory * p.width[0], m);
    };
    float state = initial.data == nullptr ? 0.f : static_cast<const float*>(initial.data)[offset(initial)];
    // An empty sequence has one segment without tokens, whose initial state the scan copies to its final
    // state. Without any tokens nothing is joined.
    const int64_t segment_count = segments_with_tokens > 0 || p.layout.tokens == 0 ? segments_with_tokens : 1;
    const int64_t end_count =
        final.data == nullptr ? segment_count - 1 : segments_with_tokens;  // segments whose S_end is read
    for (int64_t n = 0; n < segment_count; n += kPrefetch) {
      float end[kPrefetch], gate_sum[kPrefetch];
      int64_t segment_index[kPrefetch];
#pragma unroll
      for (int j = 0; j < kPrefetch; ++j) {
        segment_index[j] = first + (p.reverse ? segment_count - 1 - (n + j) : n + j);
        const bool has_end = n + j < end_count;
        end[j] = has_end ? p.states[((segment_index[j] * p.heads + head) * width + row) * p.M + m] : 0.f;
        gate_sum[j] = has_end ? p.gate_sums[(segment_index[j] * p.heads + head) * p.M + m] : 0.f;
      }
#pragma unroll
      for (int j = 0; j < kPrefetch; ++j) {
        if (n + j >= segment_count) break;
        p.states[((segment_index[j] * p.heads + head) * width + row) * p.M + m] = state;
        if (n + j < end_count) state = fmaf(expf(gate_sum[j]), state, end[j]);
      }
    }
    if (final.data != nullptr) static_cast<float*>(final.data)[offset(final)] = state;
  }
}

}  // namespace
}  // namespace gsa

cudaError_t join_segments(const SegmentJoin& p, cudaStream_t stream) {
  const int64_t elements = p.layout.sequences * p.heads * (p.width[0] + p.width[1]) * p.M;
  if (elements == 0) return cudaSuccess;
  return launch_grid<gsa::join>(clamp_grid_blocks(divide_up(elements, gsa::kThreads)), gsa::kThreads, 0,
                                stream, p);
}

}  // namespace girih::kernels
