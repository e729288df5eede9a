// The gradient of the gates. A block has one chunk, one head and 64 slots; a slot has four threads, each
// with every fourth row of the states and 16 tokens.
//
// The gate of token t scales all earlier writes for reads from t on. With c = w - s ds and H G, the sum over
// d and v of the states times their gradients,
//
//     dg_t = (H G before the chunk) - sum_{j<t} c_j = (H G after the chunk) + sum_{j>=t} c_j
//
// Both forms cancel, for different tokens. The kernel uses the form whose terms have the smaller sum of
// magnitudes. This also makes zero gradients exactly zero, such as those after the last read or before the
// first write.
#include "exact/tiles.cuh"

namespace girih::kernels {
namespace exact {
namespace {

constexpr int kShares = kThreads / kTile;
constexpr int kShare = kTile / kShares;  // tokens of a thread

// A sum and the sum of the magnitudes of its terms.
struct Sum {
  float value = 0.f, size = 0.f;

  __device__ void add(float term) {
    value += term;
    size += fabsf(term);
  }
  __device__ void add(const Sum& other) {
    value += other.value;
    size += other.size;
  }
  __device__ void subtract(const Sum& other) {
    value -= other.value;
    size += other.size;
  }
};

// The column of a slot in a matrix.
struct Column {
  const float* data;
  int64_t stride;
};

__device__ inline Column column_of(const In<4>& x, int64_t n, int head, int m) {
  return {static_cast<const float*>(x.data) + offset_of(x, n, head, 0, m), x.stride[2]};
}

__global__ void __launch_bounds__(kThreads) gate_gradient(const __grid_constant__ ExactGateGradient p) {
  __shared__ float2 parts[3][kShares][kTile];
  const unsigned tiles = (p.M + kTile - 1) / kTile;
  const int head = static_cast<int>(blockIdx.x / tiles % p.heads);
  const int64_t number = blockIdx.x / tiles / p.heads;
  const Piece piece = piece_at(p.tokens, number, kChunk);
  if (piece.length == 0) return;
  const int slot = threadIdx.x % kTile, share = static_cast<int>(threadIdx.x) / kTile;
  const int m = static_cast<int>(blockIdx.x % tiles) * kTile + slot;
  const bool exists = m < p.M;

  Sum before, after;
  const bool first_chunk = piece.index == 0, last_chunk = piece.start + piece.length == piece.sequence.end;
  const int64_t rows = p.width[0] + p.width[1];
  for (int memory = 0, first_row = 0; exists && memory < 2; first_row = p.width[memory++]) {
    if (p.width[memory] == 0) continue;
    const auto published = [&](const float* states, int64_t chunk) -> Column {
      return {states + ((chunk * p.heads + head) * rows + first_row) * p.M + m, p.M};
    };
    const auto add = [&](Sum& sum, const Column& state, const Column& gradient) {
#pragma unroll 8
      for (int row = share; row < p.width[memory]; row += kShares) {
        sum.add(state.data[row * state.stride] * gradient.data[row * gradient.stride]);
      }
    };
    add(before, published(p.states, number),
        first_chunk ? column_of(p.start[memory], piece.sequence.index, head, m)
                    : published(p.gradients, number - 1));
    add(after,
        last_chunk ? column_of(p.final[memory], piece.sequence.index, head, m)
                   : published(p.states, number + 1),
        published(p.gradients, number));
  }

  const int first = share * kShare, group = p.query_heads / p.heads;
  const auto element = [&](const auto& x, int row, int of) -> auto& {
    return *at<float>(x, piece.sequence.batch, piece.start + row, of, m);
  };
  Sum c[kShare], mine;
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    if (!exists || first + i >= piece.length) continue;
    for (int member = 0; member < group; ++member) c[i].add(element(p.w, first + i, head * group + member));
    c[i].add(-element(p.s, first + i, head) * element(p.ds, first + i, head));
  }
#pragma unroll
  for (int i = 0; i < kShare; ++i) mine.add(c[i]);

  const auto put = [&](int what, const Sum& sum) { parts[what][share][slot] = {sum.value, sum.size}; };
  const auto part = [&](int what, int of) -> Sum {
    return {parts[what][of][slot].x, parts[what][of][slot].y};
  };
  put(0, before), put(1, after), put(2, mine);
  __syncthreads();
  if (!exists) return;

  // The sums from the end for every token of the thread; then the sums from the start.
  Sum later;
#pragma unroll
  for (int other = 0; other < kShares; ++other) later.add(part(1, other));
  for (int other = kShares - 1; other > share; --other) later.add(part(2, other));
  Sum from_end[kShare];
#pragma unroll
  for (int i = kShare - 1; i >= 0; --i) {
    later.add(c[i]);
    from_end[i] = later;
  }
  Sum earlier;
#pragma unroll
  for (int other = 0; other < kShares; ++other) earlier.add(part(0, other));
  for (int other = 0; other < share; ++other) earlier.subtract(part(2, other));
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    if (first + i < piece.length) {
      float dg = earlier.size <= from_end[i].size ? earlier.value : from_end[i].value;
      if (p.g.data != nullptr) {
        dg -= expf(element(p.g, first + i, head)) * element(p.ds, first + i, head);
      }
      element(p.dg, first + i, head) = dg;
    }
    earlier.subtract(c[i]);
  }
}

}  // namespace
}  // namespace exact

cudaError_t exact_gate_gradient(const ExactGateGradient& p, cudaStream_t stream) {
  const int64_t blocks = piece_count(p.tokens, kChunk) * p.heads * divide_up(p.M, exact::kTile);
  return launch_kernel<exact::gate_gradient>(p, blocks, exact::kThreads, 0, stream);
}

}  // namespace girih::kernels
