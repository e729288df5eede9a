// A block has a few columns of the state of one head and loops over the segments of a sequence. It reads M of
// each segment once, from the L2 cache; the threads share the columns of M. The loads of the next M and S_end
// overlap with the product, because the loop is bound by memory latency.
#include "delta_product/delta_product.h"
#include "delta_product/join.h"
#include "tile/grid.h"
#include "tile/instance.h"
#include "tile/launch.h"
#include "tile/pack.h"

namespace girih::kernels {
namespace delta_product {
namespace {

constexpr int kJoinCols = 8;   // columns of V of a block; 4 would double the reads of M
constexpr int kJoinTerms = 4;  // terms of a sum that are read together

// Wide: D rounded up to a power of two. A thread serves two rows: first a share of the terms for all columns,
// then the complete sums of one column or two.
template <int Wide>
struct JoinShape {
  static constexpr int kThreads = Wide <= 64 ? 256 : 512, kParts = 2 * kThreads / Wide,
                       kOwn = kJoinCols / kParts, kTerms = Wide / kParts,
                       kAhead = kTerms < 16 ? kTerms : 16;  // pairs of M in flight
};

template <int Wide>
__global__ void __launch_bounds__(JoinShape<Wide>::kThreads, 1) join(const TransitionJoin p) {
  using Shape = JoinShape<Wide>;
  constexpr int kParts = Shape::kParts, kOwn = Shape::kOwn, kTerms = Shape::kTerms, kAhead = Shape::kAhead;
  // Column-major: four neighbouring rows are read at a time, and writes have no bank conflicts.
  __shared__ __align__(16) float state[kJoinCols][Wide];
  __shared__ __align__(16) float parts[kParts][kJoinCols][Wide];
  const int row = static_cast<int>(threadIdx.x) % (Wide / 2) * 2,
            part = static_cast<int>(threadIdx.x) / (Wide / 2);
  const unsigned groups = (p.V + kJoinCols - 1) / kJoinCols, heads = p.heads;
  const int first_col = static_cast<int>(blockIdx.x % groups) * kJoinCols;
  const int64_t head = blockIdx.x / groups % heads;
  const Sequence sequence = sequence_at(p.tokens, blockIdx.x / groups / heads);
  const int64_t first = first_piece(p.tokens, sequence, p.segment);
  const int64_t segments = divide_up(sequence.end - sequence.start, p.segment);
  // An empty sequence has one segment, whose end state is its initial state.
  const int64_t count = segments > 0 ? segments : 1;

  // Offsets from a segment to the next, and the first segment.
  const int64_t D = p.D, heads_on = p.reverse ? -p.heads : p.heads, step = heads_on * p.states_apart,
                matrix_step = heads_on * p.transitions_apart,
                number = (first + (p.reverse ? count - 1 : 0)) * p.heads + head;
  float* const states = p.states + number * p.states_apart;

  // The thread's columns of M begin at `d`; `terms` of them exist. Rows beyond D repeat the last pair.
  const int d = part * kTerms, terms = p.D - d;
  const float* matrix =
      p.transitions + number * p.transitions_apart + matrix_step + d * D + (row < p.D ? row : p.D - 2);
  float2 ahead[kAhead];
  const auto fetch = [&](int at, const float* from, bool exist) {
#pragma unroll
    for (int j = 0; j < kJoinTerms; ++j) {
      ahead[at + j] = exist ? *reinterpret_cast<const float2*>(from + j * D) : float2{0.f, 0.f};
    }
  };
#pragma unroll
  for (int t = 0; t < kAhead; t += kJoinTerms) fetch(t, matrix + t * D, count > 2 && t < terms);

  // The thread's elements of the state: columns kParts apart; zero beyond V.
  float* here[kOwn];
  bool has[kOwn];
  float2 in[kOwn], end[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int at = part + i * kParts, col = first_col + at;
    here[i] = states + col * D + row;
    has[i] = row < p.D && col < p.V;
    float2 start = {0.f, 0.f};
    in[i] = end[i] = {0.f, 0.f};
    if (has[i] && count > 1) in[i] = *reinterpret_cast<const float2*>(here[i]);
    if (has[i] && count > 2) end[i] = *reinterpret_cast<const float2*>(here[i] + step);
    if (has[i] && p.initial.data != nullptr) {
      const float* from =
          static_cast<const float*>(p.initial.data) + offset_of(p.initial, sequence.index, head, row, col);
      start = {from[0], from[p.initial.stride[2]]};
    }
    if (has[i]) *reinterpret_cast<float2*>(here[i]) = start;
    *reinterpret_cast<float2*>(&state[at][row]) = {0.f, 0.f};
  }
#pragma unroll 1
  for (int64_t n = 1; n < count; ++n) {
    const bool followed = n + 1 < count, reads = n + 2 < count;
    float2 next[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      here[i] += step;
      next[i] = end[i];
      if (!has[i]) continue;
      *reinterpret_cast<float2*>(&state[part + i * kParts][row]) = in[i];
      if (reads) end[i] = *reinterpret_cast<const float2*>(here[i] + step);
      *reinterpret_cast<float2*>(here[i]) = in[i];
    }
    if (!followed) return;
    __syncthreads();
    float2 sums[kJoinCols] = {};
#pragma unroll 1
    for (int batch = 0; batch < kTerms; batch += kAhead) {
      const bool last = batch + kAhead == kTerms;
      const float* from = matrix + (last ? matrix_step : (batch + kAhead) * D);
      const int left = !last ? terms - (batch + kAhead) : reads ? terms : 0;
#pragma unroll
      for (int t = 0; t < kAhead; t += kJoinTerms) {
#pragma unroll
        for (int col = 0; col < kJoinCols; ++col) {
          const float4 x = *reinterpret_cast<const float4*>(&state[col][d + batch + t]);
          const float s[] = {x.x, x.y, x.z, x.w};
#pragma unroll
          for (int j = 0; j < kJoinTerms; ++j) {
            sums[col].x = fmaf(ahead[t + j].x, s[j], sums[col].x);
            sums[col].y = fmaf(ahead[t + j].y, s[j], sums[col].y);
          }
        }
        fetch(t, from, t < left);
        from += kJoinTerms * D;
      }
    }
    matrix += matrix_step;
#pragma unroll
    for (int col = 0; col < kJoinCols; ++col) {
      *reinterpret_cast<float2*>(&parts[part][col][row]) = sums[col];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      in[i] = next[i];
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        const float2 x = *reinterpret_cast<const float2*>(&parts[j][part + i * kParts][row]);
        in[i].x += x.x, in[i].y += x.y;
      }
    }
  }
}

template <int Wide>
cudaError_t launch(const TransitionJoin& p, cudaStream_t stream) {
  const int64_t blocks = p.tokens.sequences * p.heads * divide_up(p.V, kJoinCols);
  if (piece_count(p.tokens, p.segment) == 0) return cudaSuccess;
  return launch_grid<join<Wide>>(blocks, JoinShape<Wide>::kThreads, 0, stream, p);
}

}  // namespace
}  // namespace delta_product

cudaError_t join_transitions(const TransitionJoin& p, cudaStream_t stream) {
  using namespace delta_product;
  return by_width<64, 128, kDeltaMaxWidth>(p.D, [&](auto wide) { return launch<wide()>(p, stream); });
}

}  // namespace girih::kernels
