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
#include "fp32/tiles.cuh"

namespace girih::kernels {
namespace fp32 {
namespace {

constexpr int kTokenGroups = kThreads / kTile;
constexpr int kGroupTokens = kTile / kTokenGroups;  // tokens of a thread

// A sum and the sum of the magnitudes of its terms.
struct SignedSum {
  float value = 0.f, magnitude = 0.f;

  __device__ void add(float term) {
    value += term;
    magnitude += fabsf(term);
  }
  __device__ void add(const SignedSum& other) {
    value += other.value;
    magnitude += other.magnitude;
  }
  __device__ void subtract(const SignedSum& other) {
    value -= other.value;
    magnitude += other.magnitude;
  }
};

// The column of a slot in a matrix.
struct Column {
  const float* data;
  int64_t stride;
};

__device__ inline Column column_of(const InputTensor<4>& x, int64_t n, int head, int m) {
  return {static_cast<const float*>(x.data) + offset_of(x, n, head, 0, m), x.stride[2]};
}

__global__ void __launch_bounds__(kThreads) gate_gradient(const __grid_constant__ Fp32GateGradient p) {
  __shared__ float2 parts[3][kTokenGroups][kTile];
  const unsigned tiles = (p.M + kTile - 1) / kTile;
  const int head = static_cast<int>(blockIdx.x / tiles % p.heads);
  const int64_t chunk_number = blockIdx.x / tiles / p.heads;
  const TokenRange range = token_range_at(p.tokens, chunk_number, kChunk);
  if (range.length == 0) return;
  const int slot = threadIdx.x % kTile, token_group = static_cast<int>(threadIdx.x) / kTile;
  const int m = static_cast<int>(blockIdx.x % tiles) * kTile + slot;
  const bool exists = m < p.M;

  SignedSum before, after;
  const bool is_first_chunk = range.index == 0,
             is_last_chunk = range.start + range.length == range.sequence.end;
  const int64_t rows = p.width[0] + p.width[1];
  for (int memory = 0, first_row = 0; exists && memory < 2; first_row = p.width[memory++]) {
    if (p.width[memory] == 0) continue;
    const auto state_column = [&](const float* states, int64_t chunk) -> Column {
      return {states + ((chunk * p.heads + head) * rows + first_row) * p.M + m, p.M};
    };
    const auto add = [&](SignedSum& sum, const Column& state, const Column& gradient) {
#pragma unroll 8
      for (int row = token_group; row < p.width[memory]; row += kTokenGroups) {
        sum.add(state.data[row * state.stride] * gradient.data[row * gradient.stride]);
      }
    };
    add(before, state_column(p.states, chunk_number),
        is_first_chunk ? column_of(p.initial_gradient[memory], range.sequence.index, head, m)
                       : state_column(p.gradients, chunk_number - 1));
    add(after,
        is_last_chunk ? column_of(p.final_state[memory], range.sequence.index, head, m)
                      : state_column(p.states, chunk_number + 1),
        state_column(p.gradients, chunk_number));
  }

  const int first = token_group * kGroupTokens, group = p.query_heads / p.heads;
  const auto element = [&](const auto& x, int row, int of_head) -> auto& {
    return *at<float>(x, range.sequence.batch, range.start + row, of_head, m);
  };
  SignedSum c[kGroupTokens], own_sum;
#pragma unroll
  for (int i = 0; i < kGroupTokens; ++i) {
    if (!exists || first + i >= range.length) continue;
    for (int query_index = 0; query_index < group; ++query_index) {
      const int query_head = head * group + query_index;
      float w = element(p.w, first + i, query_head);
      // A rounded product, not contracted with the sum.
      if (p.w_factor.data != nullptr) w = __fmul_rn(w, element(p.w_factor, first + i, query_head));
      c[i].add(w);
    }
    const float s = load_element(p.s, range.sequence.batch, range.start + first + i, head, m);
    c[i].add(-s * element(p.ds, first + i, head));
  }
#pragma unroll
  for (int i = 0; i < kGroupTokens; ++i) own_sum.add(c[i]);

  const auto store_part = [&](int kind, const SignedSum& sum) {
    parts[kind][token_group][slot] = {sum.value, sum.magnitude};
  };
  const auto load_part = [&](int kind, int part_group) -> SignedSum {
    return {parts[kind][part_group][slot].x, parts[kind][part_group][slot].y};
  };
  store_part(0, before), store_part(1, after), store_part(2, own_sum);
  __syncthreads();
  if (!exists) return;

  // The sums from the end for every token of the thread; then the sums from the start.
  SignedSum later;
#pragma unroll
  for (int other = 0; other < kTokenGroups; ++other) later.add(load_part(1, other));
  for (int other = kTokenGroups - 1; other > token_group; --other) later.add(load_part(2, other));
  SignedSum from_end[kGroupTokens];
#pragma unroll
  for (int i = kGroupTokens - 1; i >= 0; --i) {
    later.add(c[i]);
    from_end[i] = later;
  }
  SignedSum earlier;
#pragma unroll
  for (int other = 0; other < kTokenGroups; ++other) earlier.add(load_part(0, other));
  for (int other = 0; other < token_group; ++other) earlier.subtract(load_part(2, other));
#pragma unroll
  for (int i = 0; i < kGroupTokens; ++i) {
    if (first + i < range.length) {
      float dg = earlier.magnitude <= from_end[i].magnitude ? earlier.value : from_end[i].value;
      if (p.g.data != nullptr) {
        dg -= expf(element(p.g, first + i, head)) * element(p.ds, first + i, head);
      }
      element(p.dg, first + i, head) = dg;
    }
    earlier.subtract(c[i]);
  }
}

}  // namespace
}  // namespace fp32

cudaError_t fp32_gate_gradient(const Fp32GateGradient& p, cudaStream_t stream) {
  const int64_t blocks = token_range_count(p.tokens, kChunk) * p.heads * divide_up(p.M, fp32::kTile);
  return launch_kernel<fp32::gate_gradient>(p, blocks, fp32::kThreads, 0, stream);
}

}  // namespace girih::kernels
