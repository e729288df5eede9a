// A block has one segment, one memory head and 64 columns of D. It processes the readers of S two at a time:
// the steps and the first query head, then two more query heads. For each reader
//
//     F = do S, or -du S,      A_ij = do_i . u_j, or -du_i . u_j,      and once dk = u dS       over V
//     dq, db = e^{L_i} F + (E * A) K                                  dk <- dk + (E * A)^T (Q, or B)
//
// All products are tf32 products of split numbers (tile/tf32.h).
#include "delta_product/fp32_gates.cuh"
#include "tile/grid.h"
#include "tile/launch.h"

namespace girih::kernels {
namespace delta_product::fp32_gradients {

template <bool Gated>
__device__ inline void SegmentGradients<Gated>::add_readers(int first_reader) {
  reader = first_reader + team;
  Accumulator<8> sums;
  fill(sums, 0.f);
  sum_states(sums, first_reader);
  {
    // A_ij = do_i . u_j, or du_i . u_j
    Accumulator<8> scores;
    fill(scores, 0.f);
    const int reads = from < rows() ? blocks() : 0;
    for_each_column_block([&](int v) { load_reads(first_reader, v); },
                          [&](int c) {
                            if (reads == 0) return;
                            SplitAFragment a;
                            a.load(tile(kReaderTiles + team), from, c);
                            add_scores(scores, a, tile(kUTile), c, reads);
                          });
    if (reads > 0) apply_decay(scores, sums);
  }
  Accumulator<4> dk;
  fill(dk, 0.f);
  if (first_reader == 0) {
    // u dS
    for_each_column_block([&](int v) { load_state(kGradients, p.gradients, v); },
                          [&](int c) {
                            if (!has_keys()) return;
                            SplitAFragment a;
                            a.load(tile(kUTile), from, c);
                            add_product(dk, a, tile(kGradients), c, kHalf * team);
                          });
  }
  __syncthreads();
  load_keys(first_reader);
  // dk of the previous readers
  if (first_reader > 0)
    for_each_dk_pack([&](int i, int m, const float* at) { set_four(dk, i, m, load<4>(at)); });
  wait_copies<0>();
  __syncthreads();
  if constexpr (Gated) {
    if (first_reader == 0 && from < rows_of(true)) sum_state_writes(dk);
    if (from < rows()) sum_state_reads(sums);
  }
  if (from < rows()) {
    // dq, db = e^L F + (E * A) K
#pragma unroll 1
    for (int j = 0, reads = blocks(); j < reads; ++j) {
      SplitAFragment a;
      a.load(tile(kReaderTiles + team), from, kBlock * j);
      add_product(sums, a, tile(kKeys), kBlock * j, 0, D - col);
    }
    store_reader(sums);
    if constexpr (Gated) sum_pairs();
  }
  if (!has_keys()) return;
  sum_columns(dk, first_reader);
  for_each_dk_pack([&](int i, int m, float* at) { store<4>(at, four(dk, i, m)); });
}

namespace {

template <bool Gated>
__global__ void __launch_bounds__(kThreads, 2) gradients(const __grid_constant__ DeltaFp32Gradients p) {
  GIRIH_DYNAMIC_SHARED(float, shared, 128);
  const unsigned slabs = (p.shape.D + kTile - 1) / kTile;
  SegmentGradients<Gated> block(p, pin_address(shared), static_cast<int>(blockIdx.x % slabs));
  if (!block.find_segment(blockIdx.x / slabs)) return;
#pragma unroll 1
  for (int first_reader = 0; first_reader < block.readers(); first_reader += 2)
    block.add_readers(first_reader);
  if constexpr (Gated) block.store_gates();
}

template <bool Gated>
cudaError_t launch(const DeltaFp32Gradients& p, cudaStream_t stream) {
  constexpr int kBytes = gradient_floats(Gated) * static_cast<int>(sizeof(float));
  const int64_t blocks = segment_count(p.shape.segments) * p.shape.heads * divide_up(p.shape.D, kTile);
  return launch_kernel<gradients<Gated>>(p, blocks, kThreads, kBytes, stream);
}

}  // namespace
}  // namespace delta_product::fp32_gradients

cudaError_t delta_fp32_gradients(const DeltaFp32Gradients& p, cudaStream_t stream) {
  return p.g.data == nullptr ? delta_product::fp32_gradients::launch<false>(p, stream)
                             : delta_product::fp32_gradients::launch<true>(p, stream);
}

}  // namespace girih::kernels
