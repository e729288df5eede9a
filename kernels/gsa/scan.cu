// gated_scan: the choice of the blocks, and of segments if there are too few blocks.
#include <algorithm>

#include "exact/exact.h"
#include "gsa/join.h"
#include "gsa/scan.cuh"
#include "tile/instance.h"
#include "tile/launch.h"
#include "tile/segments.h"

namespace girih::kernels {
namespace gsa {
namespace {

bool same(const In<4>& a, const In<4>& b) {
  return a.data == b.data && std::equal(a.stride, a.stride + 4, b.stride);
}

// Slabs and columns of the state of one block. 2 slabs x 32 columns reads the same gates for twice the rows
// of 1 slab x 64 columns, but needs two slabs with the same s. A state of a single slab uses 32 columns, for
// twice the blocks.
struct BlockPart {
  int slabs, columns;
};

BlockPart block_part(const ScanPass& pass) {
  const int first = pass.scan.memory[0].width, second = pass.scan.memory[1].width;
  if (first + second <= kSlab && (first == 0 || second == 0)) return {1, 32};
  if (std::max(first, second) > kSlab || pass.shared_s || pass.scan.M <= 32) return {2, 32};
  return {1, 64};
}

// Number of blocks for one sequence.
int64_t blocks_a_sequence(const ScanPass& pass) {
  const BlockPart part = block_part(pass);
  return static_cast<int64_t>(pass.scan.heads) * slab_groups(pass, part.slabs) *
         divide_up(pass.scan.M, part.columns);
}

ScanPass pass_of(const GatedScan& problem) {
  ScanPass pass{};
  pass.scan = problem;
  pass.shared_s = problem.memory[0].width == 0 || problem.memory[1].width == 0 ||
                  same(problem.memory[0].s, problem.memory[1].s);
  const Tokens& all = problem.tokens;
  pass.cut.tokens = segment_tokens(all, all.sequences * blocks_a_sequence(pass), kChunk);
  return pass;
}

int rows(const GatedScan& p) { return p.memory[0].width + p.memory[1].width; }

template <typename T, int Slabs, int Slots, bool Reverse>
cudaError_t launch_one_way(ScanPass pass, cudaStream_t stream) {
  // Three warpgroups with two stages each, 190 to 213 KB. Two warpgroups are as fast in forward and 7% slower
  // in reverse. With less shared memory: as many as fit.
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  constexpr int kStage = Stage<T, Slabs, Slots>::kBytes, kCarried = kCarriedBytes<Slabs, Slots>;
  const int stages = (limit - kCarried) / kStage;
  pass.warpgroups = stages >= 6 ? 3 : 2;
  pass.stages = std::min(stages / pass.warpgroups, 2);
  if (pass.stages == 0) return cudaErrorInvalidConfiguration;
  const int bytes = kCarried + pass.warpgroups * pass.stages * kStage;
  const int64_t blocks = pass.cut.count(pass.scan.tokens) * blocks_a_sequence(pass);
  return launch_kernel<scan<T, Slabs, Slots, Reverse>>(pass, blocks, pass.warpgroups * kWarpgroup, bytes,
                                                       stream);
}

template <typename T, int Slabs, int Slots>
cudaError_t launch(const ScanPass& pass, cudaStream_t stream) {
  return pass.scan.reverse ? launch_one_way<T, Slabs, Slots, true>(pass, stream)
                           : launch_one_way<T, Slabs, Slots, false>(pass, stream);
}

cudaError_t run(const ScanPass& pass, cudaStream_t stream) {
  return by_short_element(pass.scan.dtype, [&](auto element) {
    using T = decltype(element);
    const BlockPart part = block_part(pass);
    if (part.slabs == 2) return launch<T, 2, 32>(pass, stream);
    return part.columns == 32 ? launch<T, 1, 32>(pass, stream) : launch<T, 1, 64>(pass, stream);
  });
}

}  // namespace
}  // namespace gsa

int64_t gated_scan_workspace(const GatedScan& problem) {
  if (problem.dtype == DType::f32) return exact_scan_workspace(problem);
  const gsa::ScanPass pass = gsa::pass_of(problem);
  if (pass.cut.tokens == 0) return 0;
  return pass.cut.count(problem.tokens) * problem.heads * (gsa::rows(problem) + 1) * problem.M *
         static_cast<int64_t>(sizeof(float));
}

cudaError_t gated_scan(const GatedScan& problem, cudaStream_t stream) {
  if (problem.dtype == DType::f32) return exact_scan(problem, stream);
  gsa::ScanPass pass = gsa::pass_of(problem);
  if (pass.cut.tokens == 0) return gsa::run(pass, stream);

  const int64_t rows = gsa::rows(problem), M = problem.M;
  float* const states = static_cast<float*>(problem.workspace);
  float* const decay = states + pass.cut.count(problem.tokens) * problem.heads * rows * M;

  // 1. Scan every segment from zero.
  gsa::ScanPass alone = pass;
  alone.cut.decay = decay;
  for (int i = 0; i < 2; ++i) {
    const int64_t first_row = i * problem.memory[0].width;
    const int64_t stride[] = {problem.heads * rows * M, rows * M, M, 1};
    In<4>& from = pass.scan.memory[i].initial;
    Out<4>& to = alone.scan.memory[i].final;
    to.data = states + first_row * M;
    from.data = to.data;
    std::copy(stride, stride + 4, to.stride);
    std::copy(stride, stride + 4, from.stride);
    alone.scan.memory[i].initial = {};
  }
  if (const cudaError_t error = gsa::run(alone, stream); error != cudaSuccess) return error;

  // 2. Compute the state before each segment.
  const SegmentJoin join{problem.tokens,
                         pass.cut.tokens,
                         problem.heads,
                         problem.M,
                         problem.reverse,
                         states,
                         decay,
                         {problem.memory[0].width, problem.memory[1].width},
                         {problem.memory[0].initial, problem.memory[1].initial},
                         {}};
  if (const cudaError_t error = join_segments(join, stream); error != cudaSuccess) return error;

  // 3. Scan every segment from that state.
  return gsa::run(pass, stream);
}

}  // namespace girih::kernels
