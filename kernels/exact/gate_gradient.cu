// A block has one chunk, one head and 64 slots: four threads a slot, each with every fourth row of the states
// and 16 tokens.
#include <type_traits>

#include "exact/tiles.cuh"

namespace girih::kernels {
namespace exact {
namespace {

constexpr int kShares = kThreads / kTile;
constexpr int kShare = kTile / kShares;  // tokens

// The shares of one slot, to all of its threads in the order of shares.
struct Shares {
  float of[kShares][kTile];
};

__global__ void __launch_bounds__(kThreads) gate_gradient(const __grid_constant__ ExactGateGradient p) {
  __shared__ Shares edges, sums;
  const unsigned tiles = (p.M + kTile - 1) / kTile;
  const int head = static_cast<int>(blockIdx.x / tiles % p.heads);
  const int64_t number = blockIdx.x / tiles / p.heads;
  const Piece piece = piece_at(p.tokens, number, kChunk);
  if (piece.length == 0) return;
  const int slot = threadIdx.x % kTile, share = static_cast<int>(threadIdx.x) / kTile;
  const int m = static_cast<int>(blockIdx.x % tiles) * kTile + slot;
  const bool exists = m < p.M;

  // H * G
  float edge = 0.f;
  const int rows = p.width[0] + p.width[1];
  if (exists && piece.index > 0) {
    const float* state = p.states + (number * p.heads + head) * rows * static_cast<int64_t>(p.M) + m;
    const float* gradient =
        p.gradients + ((number - 1) * p.heads + head) * rows * static_cast<int64_t>(p.M) + m;
#pragma unroll 8
    for (int row = share; row < rows; row += kShares) {
      const int64_t offset = static_cast<int64_t>(row) * p.M;
      edge = fmaf(state[offset], gradient[offset], edge);
    }
  } else if (exists) {
    for (int memory = 0; memory < 2; ++memory) {
      if (p.initial[memory].data == nullptr) continue;
      const auto at = [&](const In<4>& x, int row) {
        return static_cast<const float*>(x.data)[piece.sequence.index * x.stride[0] + head * x.stride[1] +
                                                 row * x.stride[2] + m * x.stride[3]];
      };
      for (int row = share; row < p.width[memory]; row += kShares) {
        edge = fmaf(at(p.initial[memory], row), at(p.start[memory], row), edge);
      }
    }
  }
  edges.of[share][slot] = edge;

  // c = w - s ds
  const int first = share * kShare, group = p.query_heads / p.heads;
  float c[kShare], sum = 0.f;
  const auto element = [&](const auto& x, int row, int of) -> auto& {
    using Pointer =
        std::conditional_t<std::is_same_v<std::decay_t<decltype(x)>, In<4>>, const float*, float*>;
    return static_cast<Pointer>(x.data)[piece.sequence.batch * x.stride[0] +
                                        (piece.start + row) * x.stride[1] + of * x.stride[2] + m];
  };
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    c[i] = 0.f;
    if (!exists || first + i >= piece.length) continue;
    for (int member = 0; member < group; ++member) c[i] += element(p.w, first + i, head * group + member);
    c[i] -= element(p.s, first + i, head) * element(p.ds, first + i, head);
  }
#pragma unroll
  for (int i = 0; i < kShare; ++i) sum += c[i];
  sums.of[share][slot] = sum;
  __syncthreads();
  if (!exists) return;

  sum = 0.f;
#pragma unroll
  for (int other = 0; other < kShares; ++other) sum += edges.of[other][slot];
  for (int other = 0; other < share; ++other) sum -= sums.of[other][slot];
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    if (first + i >= piece.length) break;
    float gradient = sum;
    if (p.g.data != nullptr) {
      gradient -= expf(element(p.g, first + i, head)) * element(p.ds, first + i, head);
    }
    element(p.dg, first + i, head) = gradient;
    sum -= c[i];
  }
}

}  // namespace
}  // namespace exact

cudaError_t exact_gate_gradient(const ExactGateGradient& p, cudaStream_t stream) {
  const int64_t blocks = piece_count(p.tokens, kChunk) * p.heads * divide_up(p.M, exact::kTile);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  exact::gate_gradient<<<static_cast<unsigned>(blocks), exact::kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace girih::kernels
