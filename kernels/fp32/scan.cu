// The scan of gsa and gla in fp32. The update of a chunk does not depend on the state. One kernel computes
// the updates of all chunks in parallel and stores each in the place of the state before the chunk.
// join_segments then scans the chunks and replaces the updates by the states.
#include "fp32/tiles.cuh"
#include "gsa/join.h"

namespace girih::kernels {
namespace fp32 {
namespace {

struct UpdateParams {
  GatedScan problem;
  float* gate_sums;  // [chunks, heads, M]: the sum of the gates of a chunk
};

constexpr int kFloats = 2 * kTileFloats + kTotalsFloats;

inline __host__ __device__ int slab_count(int width) { return (width + kTile - 1) / kTile; }

// forward   U = x^T (s * e^{L_C - L})      reverse   U = x^T (s * e^{L})
// A block computes 64 rows and 64 columns of U.
template <bool Reverse>
__global__ void __launch_bounds__(kThreads, 2) update_kernel(const __grid_constant__ UpdateParams params) {
  GIRIH_DYNAMIC_SHARED(float, shared, 16);
  float *const x_tile = shared, *const s_tile = x_tile + kTileFloats, *const totals = s_tile + kTileFloats;
  const GatedScan& p = params.problem;
  const unsigned tiles = (p.M + kTile - 1) / kTile, first_slabs = slab_count(p.memory[0].width),
                 slabs = first_slabs + slab_count(p.memory[1].width);
  unsigned block_index = blockIdx.x;
  const int col = static_cast<int>(block_index % tiles) * kTile;
  block_index /= tiles;
  const unsigned slab = block_index % slabs;
  block_index /= slabs;
  const int head = static_cast<int>(block_index % p.heads);
  const int64_t chunk_number = block_index / p.heads;
  // A chunk without tokens stores zeros: with overlapping bounds in cu_seqlens, join_segments reads it.
  const ChunkRows<false> chunk{token_range_at(p.tokens, chunk_number, kChunk)};
  const int memory_index = slab >= first_slabs,
            first = static_cast<int>(slab - memory_index * first_slabs) * kTile;
  const ScannedMemory& memory = p.memory[memory_index];
  const int a = row_lane(), b = row_block();

  // The decay between a token and the end (Reverse: the start) of the chunk.
  Pack<4> weight[4];
  {
    Pack<4> g[4], total = zeros<4>();
    chunk.load_gates(g, p.g, head, col, p.M);
#pragma unroll
    for (int r = 0; r < 4; ++r) add_scaled(total, 1.f, g[r]);
    store_four(totals, b, 4 * a, total);
    __syncthreads();
    Pack<4> sum = zeros<4>();
    if (Reverse) {
      for (int block = b - 1; block >= 0; --block) add_scaled(sum, 1.f, load_four(totals, block, 4 * a));
    } else {
      for (int block = b + 1; block < kRowBlocks; ++block)
        add_scaled(sum, 1.f, load_four(totals, block, 4 * a));
    }
    if (slab == 0 && b == (Reverse ? kRowBlocks - 1 : 0) && col + 4 * a < p.M) {
      add_scaled(total, 1.f, sum);
      store<4>(params.gate_sums + (chunk_number * p.heads + head) * p.M + col + 4 * a, total);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = Reverse ? i : 3 - i;
      if (Reverse) add_scaled(sum, 1.f, g[r]);
#pragma unroll
      for (int c = 0; c < 4; ++c) weight[r].at[c] = expf(sum.at[c]);
      if (!Reverse) add_scaled(sum, 1.f, g[r]);
    }
  }

  Pack<4> u[4];
  clear(u);
#pragma unroll 1
  for (int query_index = 0; query_index < (chunk.range.length > 0 ? p.group : 0); ++query_index) {
    Pack<4> s[4];
    chunk.load_own(s, memory.s, head * p.group + query_index, col, p.M);
    __syncthreads();
    chunk.load_tile(x_tile, memory.x, head * p.group + query_index, first, memory.width);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      multiply(s[r], weight[r]);
      store_four(s_tile, 4 * b + r, 4 * a, s[r]);
    }
    __syncthreads();
#pragma unroll 4
    for (int t = 0; t < kTile; ++t) {
      const Pack<4> x = load_four(x_tile, t, 4 * b), weighted = load_four(s_tile, t, 4 * a);
#pragma unroll
      for (int r = 0; r < 4; ++r) add_scaled(u[r], x.at[r], weighted);
    }
  }

  const int rows = p.memory[0].width + p.memory[1].width;
  float* to = static_cast<float*>(p.states) +
              ((chunk_number * p.heads + head) * rows + memory_index * p.memory[0].width + first) *
                  static_cast<int64_t>(p.M) +
              col + 4 * a;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int row = 4 * b + r;
    if (first + row < memory.width && col + 4 * a < p.M) store<4>(to + static_cast<int64_t>(row) * p.M, u[r]);
  }
}

template <bool Reverse>
cudaError_t launch_updates(const UpdateParams& params, cudaStream_t stream) {
  const GatedScan& p = params.problem;
  constexpr int kBytes = kFloats * static_cast<int>(sizeof(float));
  const int64_t blocks = token_range_count(p.tokens, kChunk) * p.heads *
                         (slab_count(p.memory[0].width) + slab_count(p.memory[1].width)) *
                         divide_up(p.M, kTile);
  return launch_kernel<update_kernel<Reverse>>(params, blocks, kThreads, kBytes, stream);
}

}  // namespace
}  // namespace fp32

cudaError_t fp32_scan(const GatedScan& p, Workspace& workspace, cudaStream_t stream) {
  float* const gate_sums = workspace.array<float>(token_range_count(p.tokens, kChunk) * p.heads * p.M);
  const fp32::UpdateParams params{p, gate_sums};
  GIRIH_TRY(p.reverse ? fp32::launch_updates<true>(params, stream)
                      : fp32::launch_updates<false>(params, stream));
  const SegmentJoin join{p.tokens,
                         kChunk,
                         p.heads,
                         p.M,
                         p.reverse,
                         static_cast<float*>(p.states),
                         gate_sums,
                         {p.memory[0].width, p.memory[1].width},
                         {p.memory[0].initial, p.memory[1].initial},
                         {p.memory[0].final, p.memory[1].final}};
  return join_segments(join, stream);
}

}  // namespace girih::kernels
