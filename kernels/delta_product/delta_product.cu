// Chooses the instance for a shape, and cuts scans into segments if there are too few heads to fill the GPU.
#include <algorithm>

#include "delta_product/delta_product.h"
#include "delta_product/join.h"
#include "delta_product/pass.h"
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
  return by_short_element(shape.dtype, [&](auto element) {
    return by_width<64, 128, kDeltaMaxWidth>(shape.D, [&](auto width) { return launch(element, width); });
  });
}

cudaError_t run(const ScanPass& pass, cudaStream_t stream) {
  return by_instance(pass.scan.shape, [&](auto element, auto width) {
    return launch_scan<decltype(element), width()>(pass, stream);
  });
}
cudaError_t run(const ReversePass& pass, cudaStream_t stream) {
  return by_instance(pass.scan.shape, [&](auto element, auto width) {
    return launch_reverse<decltype(element), width()>(pass, stream);
  });
}

// With two segments the first end state is the second start state, so no join product is needed. The scan at
// D = 128 gains from two segments (2 x 16384 tokens, 16 heads: 0.42 ms instead of 0.49). At D = 64, and in
// reverse, two segments are slower than one.
int64_t segment_tokens(const DeltaShape& shape, bool reverse) {
  const int64_t blocks = shape.tokens.sequences * shape.heads * divide_up(shape.V, kScanColumns);
  return kernels::segment_tokens(shape.tokens, blocks, delta_chunk(shape.n),
                                 reverse || shape.D <= 64 ? 3 : 2);
}

// Columns of the end state of a segment; the scan also stores the D columns of the transition.
int64_t end_columns(const DeltaShape& shape, bool reverse) { return shape.V + (reverse ? 0 : shape.D); }

int64_t segments(const DeltaShape& shape, bool reverse) {
  const int64_t segment = segment_tokens(shape, reverse);
  return segment == 0 ? 0 : piece_count(shape.tokens, segment);
}

int64_t workspace(const DeltaShape& shape, bool reverse) {
  return segments(shape, reverse) * shape.heads * end_columns(shape, reverse) * shape.D *
         static_cast<int64_t>(sizeof(float));
}

// The scan uses the transitions of its first launch, column-major. Reverse uses the saved transitions,
// row-major, because its transition is the transpose.
const float* transitions(const DeltaScan& p) {
  return static_cast<const float*>(p.workspace) + int64_t{p.shape.V} * p.shape.D;
}
const float* transitions(const DeltaReverse& p) { return p.transitions; }

// Launches the scan or reverse: one launch, or with segments the three launches of kernels/README.md.
template <class Pass, class Problem>
cudaError_t walk(const Problem& problem, bool reverse, cudaStream_t stream) {
  const DeltaShape& shape = problem.shape;
  Pass pass{problem, Walk(shape, segment_tokens(shape, reverse), reverse)};
  if (pass.walk.segment == 0) return run(pass, stream);

  // 1. Scan every segment on its own: the first from the initial state, the others from zero. The scan also
  // computes the transitions.
  float* const states = static_cast<float*>(problem.workspace);
  const int64_t D = shape.D, cols = end_columns(shape, reverse);
  const int64_t stride[] = {shape.heads * cols * D, cols * D, 1, D};
  Pass alone = pass;
  alone.walk.alone = true;
  alone.scan.final.data = states;
  std::copy(stride, stride + 4, alone.scan.final.stride);
  if (const cudaError_t error = run(alone, stream); error != cudaSuccess) return error;

  // 2. Join: the state before every segment.
  const TransitionJoin join{shape.tokens,   pass.walk.segment,
                            shape.heads,    shape.D,
                            shape.V,        reverse,
                            states,         transitions(problem),
                            cols * D,       reverse ? D * D : cols * D,
                            problem.initial};
  if (const cudaError_t error = join_transitions(join, stream); error != cudaSuccess) return error;

  // 3. Scan every segment from that state.
  pass.scan.initial.data = states;
  std::copy(stride, stride + 4, pass.scan.initial.stride);
  return run(pass, stream);
}

}  // namespace
}  // namespace delta_product

cudaError_t delta_prepare(const DeltaPrepare& p, cudaStream_t stream) {
  return by_short_element(p.shape.dtype, [&](auto element) {
    return delta_product::launch_prepare<decltype(element)>(p, stream);
  });
}

int64_t delta_kept_segments(const DeltaShape& shape) { return delta_product::segments(shape, true); }
int64_t delta_scan_workspace(const DeltaScan& problem) {
  return delta_product::workspace(problem.shape, false);
}
int64_t delta_reverse_workspace(const DeltaReverse& problem) {
  return delta_product::workspace(problem.shape, true);
}

cudaError_t delta_scan(const DeltaScan& problem, cudaStream_t stream) {
  return delta_product::walk<delta_product::ScanPass>(problem, false, stream);
}
cudaError_t delta_reverse(const DeltaReverse& problem, cudaStream_t stream) {
  return delta_product::walk<delta_product::ReversePass>(problem, true, stream);
}

cudaError_t delta_gradients(const DeltaGradients& p, cudaStream_t stream) {
  return delta_product::by_instance(p.shape, [&](auto element, auto width) {
    return delta_product::launch_gradients<decltype(element), width()>(p, stream);
  });
}

cudaError_t delta_vector_gradients(const DeltaVectorGradients& p, cudaStream_t stream) {
  using namespace delta_product;
  if (p.shape.D != p.shape.V || p.shape.unit) return cudaErrorInvalidValue;
  return by_instance(p.shape, [&](auto element, auto width) {
    if constexpr (width() <= kDeltaVectorMaxWidth) {
      return launch_vector_gradients<decltype(element), width()>(p, stream);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace girih::kernels
