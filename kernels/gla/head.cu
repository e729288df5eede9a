// Launches of the kernels of gla with a gate for each head: choice of the instance and of segments.
#include <algorithm>

#include "gla/launch.h"
#include "gsa/gsa.h"
#include "gsa/join.h"
#include "tile/instance.h"
#include "tile/segments.h"

namespace girih::kernels {
namespace {

// Calls launch(element, keys) with the smallest tile that holds `width` keys.
template <class Launch>
cudaError_t dispatch_tile(const HeadShape& shape, int width, const Launch& launch) {
  if (shape.D > kHeadMaxKeys) return cudaErrorInvalidValue;
  return dispatch_16bit(shape.dtype, [&](auto element) {
    return dispatch_width<64, 128, kHeadMaxKeys>(width, [&](auto keys) { return launch(element, keys); });
  });
}

int64_t segment_tokens(const HeadShape& shape) {
  const int64_t blocks = shape.tokens.sequences * shape.query_heads * divide_up(shape.V, kSlab);
  return segment_tokens(shape.tokens, blocks, kChunk);
}

cudaError_t run(const HeadReadParams& params, cudaStream_t stream) {
  return dispatch_tile(params.problem.shape, params.problem.shape.D, [&](auto element, auto keys) {
    using T = decltype(element);
    return params.problem.reverse ? launch_head_read<T, keys(), true>(params, stream)
                                  : launch_head_read<T, keys(), false>(params, stream);
  });
}

}  // namespace

cudaError_t head_gradients(const HeadGradients& p, cudaStream_t stream) {
  const cudaError_t error = dispatch_tile(p.shape, p.tile, [&](auto element, auto keys) {
    return launch_head_gradients<decltype(element), std::min(keys(), 128)>(p, stream);
  });
  return error != cudaSuccess || p.dg.data == nullptr ? error : sum_gate_gradients(p, stream);
}

int64_t head_read_workspace(const HeadRead& p) {
  const int64_t tokens = segment_tokens(p.shape);
  if (tokens == 0) return 0;
  return token_range_count(p.shape.tokens, tokens) * count_state_heads(p) * (p.shape.values + 1) *
         p.shape.keys * static_cast<int64_t>(sizeof(float));
}

cudaError_t head_read(const HeadRead& problem, cudaStream_t stream) {
  HeadReadParams params{};
  params.problem = problem;
  params.segmentation.segment_tokens = segment_tokens(problem.shape);
  if (params.segmentation.segment_tokens == 0) return run(params, stream);

  const HeadShape& shape = problem.shape;
  const int64_t heads = count_state_heads(problem), values = shape.values, keys = shape.keys;
  float* const states = static_cast<float*>(problem.workspace);
  float* const gate_sums = states + params.segmentation.count_segments(shape.tokens) * heads * values * keys;

  // 1. Scan every segment from zero.
  HeadReadParams local_scan = params;
  local_scan.segmentation.gate_sums = gate_sums;
  local_scan.problem.initial = {};
  local_scan.problem.final = {states, DType::f32, {heads * values * keys, values * keys, keys, 1}};
  if (const cudaError_t error = run(local_scan, stream); error != cudaSuccess) return error;

  // 2. Compute the state before each segment.
  const SegmentJoin join{shape.tokens,
                         params.segmentation.segment_tokens,
                         static_cast<int>(heads),
                         shape.keys,
                         problem.reverse,
                         states,
                         gate_sums,
                         {shape.values, 0},
                         {problem.initial, {}},
                         {}};
  if (const cudaError_t error = join_segments(join, stream); error != cudaSuccess) return error;

  // 3. Scan every segment from that state.
  const OutputTensor<4>& ends = local_scan.problem.final;
  params.problem.initial = {ends.data, ends.dtype, {ends.stride[0], ends.stride[1], ends.stride[2], 1}};
  return run(params, stream);
}

}  // namespace girih::kernels
