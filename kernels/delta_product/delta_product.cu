// Chooses the instance for a shape, and cuts scans into segments if there are too few heads to fill the GPU.
#include <algorithm>

#include "delta_product/join.h"
#include "delta_product/kernels.h"
#include "delta_product/params.h"
#include "tile/grid.h"
#include "tile/instance.h"
#include "tile/launch.h"
#include "tile/segments.h"

namespace girih::kernels {
namespace delta_product {
namespace {

// Calls launch(a value of the element type, the tile width of D).
template <class Launch>
cudaError_t by_instance(const DeltaShape& shape, const Launch& launch) {
  return dispatch_16bit(shape.dtype, [&](auto element) {
    return dispatch_width<64, 128, kDeltaMaxWidth>(shape.D,
                                                   [&](auto width) { return launch(element, width); });
  });
}

cudaError_t launch_instance(const ScanParams& params, cudaStream_t stream) {
  return by_instance(params.problem.shape, [&](auto element, auto width) {
    return launch_scan<decltype(element), width()>(params, stream);
  });
}
cudaError_t launch_instance(const ReverseParams& params, cudaStream_t stream) {
  return by_instance(params.problem.shape, [&](auto element, auto width) {
    return launch_reverse<decltype(element), width()>(params, stream);
  });
}

// With two segments the first end state is the second start state, so no join product is needed. The scan at
// D = 128 gains from two segments (2 x 16384 tokens, 16 heads: 0.42 ms instead of 0.49). At D = 64, and in
// reverse, two segments are slower than one.
int64_t segment_tokens(const DeltaShape& shape, bool reverse) {
  const int64_t blocks = shape.tokens.sequences * shape.heads * divide_up(shape.V, kScanColumns);
  return kernels::segment_tokens(shape.tokens, blocks, delta_chunk_tokens(shape.n),
                                 reverse || shape.D <= 64 ? 3 : 2);
}

// Columns of the end state of a segment; the scan also stores the D columns of the transition.
int64_t end_columns(const DeltaShape& shape, bool reverse) { return shape.V + (reverse ? 0 : shape.D); }

int64_t segment_count(const DeltaShape& shape, bool reverse) {
  const int64_t tokens = segment_tokens(shape, reverse);
  return tokens == 0 ? 0 : token_range_count(shape.tokens, tokens);
}

// `ends`: the end states of the first launch. The scan uses the transitions of that launch, column-major.
// Reverse uses the saved transitions, row-major, because its transition is the transpose.
const float* transitions(const DeltaScan& p, const float* ends) {
  return ends + int64_t{p.shape.V} * p.shape.D;
}
const float* transitions(const DeltaReverse& p, const float*) { return p.transitions; }

// Launches the scan or reverse: one launch, or with segments the three launches of kernels/README.md.
template <class Params, class Problem>
cudaError_t launch_scans(const Problem& problem, bool reverse, Workspace& workspace, cudaStream_t stream) {
  const DeltaShape& shape = problem.shape;
  Params params{problem, ScanGrid(shape, segment_tokens(shape, reverse), reverse)};
  if (params.grid.segment_tokens == 0) return launch_instance(params, stream);

  // 1. Scan every segment on its own: the first from the initial state, the others from zero. The scan also
  // computes the transitions.
  const int64_t D = shape.D, cols = end_columns(shape, reverse);
  auto* const states = workspace.array<float>(segment_count(shape, reverse) * shape.heads * cols * D);
  const int64_t stride[] = {shape.heads * cols * D, cols * D, 1, D};
  Params local_params = params;
  local_params.grid.is_local = true;
  local_params.problem.final.data = states;
  std::copy(stride, stride + 4, local_params.problem.final.stride);
  GIRIH_TRY(launch_instance(local_params, stream));

  // 2. Join: the state before every segment.
  const TransitionJoin join{shape.tokens,   params.grid.segment_tokens,
                            shape.heads,    shape.D,
                            shape.V,        reverse,
                            states,         transitions(problem, states),
                            cols * D,       reverse ? D * D : cols * D,
                            problem.initial};
  GIRIH_TRY(join_transitions(join, stream));

  // 3. Scan every segment from that state.
  params.problem.initial.data = states;
  std::copy(stride, stride + 4, params.problem.initial.stride);
  return launch_instance(params, stream);
}

}  // namespace
}  // namespace delta_product

cudaError_t delta_prepare(const DeltaPrepare& p, cudaStream_t stream) {
  return dispatch_16bit(p.shape.dtype, [&](auto element) {
    return delta_product::launch_prepare<decltype(element)>(p, stream);
  });
}

int64_t delta_saved_segments(const DeltaShape& shape) { return delta_product::segment_count(shape, true); }

cudaError_t delta_scan(const DeltaScan& problem, Workspace& workspace, cudaStream_t stream) {
  return delta_product::launch_scans<delta_product::ScanParams>(problem, false, workspace, stream);
}
cudaError_t delta_reverse(const DeltaReverse& problem, Workspace& workspace, cudaStream_t stream) {
  return delta_product::launch_scans<delta_product::ReverseParams>(problem, true, workspace, stream);
}

cudaError_t delta_gradients(const DeltaGradients& p, cudaStream_t stream) {
  return delta_product::by_instance(p.shape, [&](auto element, auto width) {
    return delta_product::launch_gradients<decltype(element), width()>(p, stream);
  });
}

cudaError_t delta_channel_beta_gradients(const DeltaChannelBetaGradients& p, cudaStream_t stream) {
  using namespace delta_product;
  if (p.shape.D != p.shape.V || p.shape.unit) return cudaErrorInvalidValue;
  return by_instance(p.shape, [&](auto element, auto width) {
    if constexpr (width() <= kDeltaChannelBetaMaxWidth) {
      return launch_channel_beta_gradients<decltype(element), width()>(p, stream);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace girih::kernels
