// gated_scan: the choice of the blocks, and of segments if there are too few blocks.
#include <algorithm>

#include "gsa/join.h"
#include "gsa/scan.cuh"
#include "pipe/fit.h"
#include "tile/instance.h"
#include "tile/launch.h"
#include "tile/segments.h"

namespace girih::kernels {
namespace gsa {
namespace {

bool is_same(const InputTensor<4>& a, const InputTensor<4>& b) {
  return a.data == b.data && std::equal(a.stride, a.stride + 4, b.stride);
}

// Slabs and slots of the state of one block. {2, 32} loads each gate once for 128 rows, {1, 64} once for 64
// rows, but {2, 32} needs two slabs with the same s: of one memory, or of two that share s. {1, 32} has twice
// the blocks of {1, 64} and serves a state of a single slab. For M <= 32, half of the columns of {1, 64}
// would be padding.
struct BlockShape {
  int slabs, slots;
};

BlockShape choose_block_shape(const ScanParams& params) {
  const int width0 = params.problem.memory[0].width, width1 = params.problem.memory[1].width;
  if (width0 + width1 <= kSlab && (width0 == 0 || width1 == 0)) return {1, 32};
  if (std::max(width0, width1) > kSlab || params.shared_s) return {2, 32};
  return {1, params.problem.M <= 32 ? 32 : 64};
}

// Number of blocks for one sequence.
int64_t blocks_per_sequence(const ScanParams& params) {
  const BlockShape block_shape = choose_block_shape(params);
  return static_cast<int64_t>(params.problem.heads) * count_row_tiles(params, block_shape.slabs) *
         divide_up(params.problem.M, block_shape.slots);
}

ScanParams make_params(const GatedScan& problem) {
  ScanParams params{};
  params.problem = problem;
  params.shared_s = problem.memory[0].width == 0 || problem.memory[1].width == 0 ||
                    is_same(problem.memory[0].s, problem.memory[1].s);
  const SequenceLayout& layout = problem.tokens;
  params.segmentation.segment_tokens =
      segment_tokens(layout, layout.sequences * blocks_per_sequence(params), kChunk);
  return params;
}

template <typename T, int Slabs, int Slots, bool Reverse>
cudaError_t launch_direction(ScanParams params, cudaStream_t stream) {
  // Three warpgroups with two stages each use 129 KiB for {1, 32}, 185 for {2, 32} and 209 for {1, 64}. Two
  // warpgroups are as fast in forward and 7% slower in reverse. With less shared memory: as many as fit.
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  constexpr int kStageBytes = Stage<T, Slabs, Slots>::kBytes, kStateBytes = kSharedStateBytes<Slabs, Slots>;
  const auto fit = [&](int warpgroups) {
    return fit_stages(limit, 2, [&](int stages) { return kStateBytes + warpgroups * stages * kStageBytes; });
  };
  params.warpgroups = fit(3) == 2 ? 3 : 2;
  params.stages_per_warpgroup = fit(params.warpgroups);
  if (params.stages_per_warpgroup == 0) return cudaErrorInvalidConfiguration;
  const int bytes = kStateBytes + params.warpgroups * params.stages_per_warpgroup * kStageBytes;
  const int64_t blocks =
      params.segmentation.count_segments(params.problem.tokens) * blocks_per_sequence(params);
  return launch_kernel<scan<T, Slabs, Slots, Reverse>>(params, blocks, params.warpgroups * kWarpgroupThreads,
                                                       bytes, stream);
}

template <typename T, int Slabs, int Slots>
cudaError_t launch(const ScanParams& params, cudaStream_t stream) {
  return params.problem.reverse ? launch_direction<T, Slabs, Slots, true>(params, stream)
                                : launch_direction<T, Slabs, Slots, false>(params, stream);
}

cudaError_t run(const ScanParams& params, cudaStream_t stream) {
  return dispatch_16bit(params.problem.dtype, [&](auto element) {
    using T = decltype(element);
    const BlockShape block_shape = choose_block_shape(params);
    if (block_shape.slabs == 2) return launch<T, 2, 32>(params, stream);
    return block_shape.slots == 32 ? launch<T, 1, 32>(params, stream) : launch<T, 1, 64>(params, stream);
  });
}

}  // namespace
}  // namespace gsa

cudaError_t gated_scan(const GatedScan& problem, Workspace& workspace, cudaStream_t stream) {
  gsa::ScanParams params = gsa::make_params(problem);
  if (params.segmentation.segment_tokens == 0) return gsa::run(params, stream);

  const int64_t rows = problem.memory[0].width + problem.memory[1].width, M = problem.M;
  const int64_t segment_heads = params.segmentation.count_segments(problem.tokens) * problem.heads;
  float* const states = workspace.array<float>(segment_heads * rows * M);
  float* const gate_sums = workspace.array<float>(segment_heads * M);

  // 1. Scan every segment from zero.
  gsa::ScanParams local_scan = params;
  local_scan.segmentation.gate_sums = gate_sums;
  for (int i = 0; i < 2; ++i) {
    const int64_t first_row = i * problem.memory[0].width;
    const int64_t stride[] = {problem.heads * rows * M, rows * M, M, 1};
    InputTensor<4>& from = params.problem.memory[i].initial;
    OutputTensor<4>& to = local_scan.problem.memory[i].final;
    to.data = states + first_row * M;
    from.data = to.data;
    std::copy(stride, stride + 4, to.stride);
    std::copy(stride, stride + 4, from.stride);
    local_scan.problem.memory[i].initial = {};
  }
  GIRIH_TRY(gsa::run(local_scan, stream));

  // 2. Compute the state before each segment.
  const SegmentJoin join{problem.tokens,
                         params.segmentation.segment_tokens,
                         problem.heads,
                         problem.M,
                         problem.reverse,
                         states,
                         gate_sums,
                         {problem.memory[0].width, problem.memory[1].width},
                         {problem.memory[0].initial, problem.memory[1].initial},
                         {}};  // final is absent: step 3 writes the final state
  GIRIH_TRY(join_segments(join, stream));

  // 3. Scan every segment from that state.
  return gsa::run(params, stream);
}

}  // namespace girih::kernels
