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
cudaError_t by_tile(const HeadShape& shape, int width, const Launch& launch) {
  if (shape.D > kHeadMaxKeys) return cudaErrorInvalidValue;
  return by_short_element(shape.dtype, [&](auto element) {
    return by_width<64, 128, kHeadMaxKeys>(width, [&](auto keys) { return launch(element, keys); });
  });
}

int64_t segment_tokens(const HeadShape& shape) {
  const int64_t blocks = shape.tokens.sequences * shape.query_heads * divide_up(shape.V, kSlab);
  return segment_tokens(shape.tokens, blocks, kChunk);
}

cudaError_t run(const HeadPass& pass, cudaStream_t stream) {
  return by_tile(pass.read.shape, pass.read.shape.D, [&](auto element, auto keys) {
    using T = decltype(element);
    return pass.read.reverse ? launch_head_read<T, keys(), true>(pass, stream)
                             : launch_head_read<T, keys(), false>(pass, stream);
  });
}

}  // namespace

cudaError_t head_gradients(const HeadGradients& p, cudaStream_t stream) {
  const cudaError_t error = by_tile(p.shape, p.tile, [&](auto element, auto keys) {
    return launch_head_gradients<decltype(element), std::min(keys(), 128)>(p, stream);
  });
  return error != cudaSuccess || p.dg.data == nullptr ? error : sum_head_gates(p, stream);
}

int64_t head_read_workspace(const HeadRead& p) {
  const int64_t segment = segment_tokens(p.shape);
  if (segment == 0) return 0;
  return piece_count(p.shape.tokens, segment) * state_heads(p) * (p.shape.values + 1) * p.shape.keys *
         static_cast<int64_t>(sizeof(float));
}

cudaError_t head_read(const HeadRead& problem, cudaStream_t stream) {
  HeadPass pass{};
  pass.read = problem;
  pass.cut.tokens = segment_tokens(problem.shape);
  if (pass.cut.tokens == 0) return run(pass, stream);

  const HeadShape& shape = problem.shape;
  const int64_t heads = state_heads(problem), values = shape.values, keys = shape.keys;
  float* const states = static_cast<float*>(problem.workspace);
  float* const decay = states + pass.cut.count(shape.tokens) * heads * values * keys;

  // 1. Scan every segment from zero.
  HeadPass alone = pass;
  alone.cut.decay = decay;
  alone.read.initial = {};
  alone.read.final = {states, DType::f32, {heads * values * keys, values * keys, keys, 1}};
  if (const cudaError_t error = run(alone, stream); error != cudaSuccess) return error;

  // 2. Compute the state before each segment.
  const SegmentJoin join{
      shape.tokens, pass.cut.tokens,   static_cast<int>(heads), shape.keys, problem.reverse, states,
      decay,        {shape.values, 0}, {problem.initial, {}},   {}};
  if (const cudaError_t error = join_segments(join, stream); error != cudaSuccess) return error;

  // 3. Scan every segment from that state.
  const Out<4>& ends = alone.read.final;
  pass.read.initial = {ends.data, ends.dtype, {ends.stride[0], ends.stride[1], ends.stride[2], 1}};
  return run(pass, stream);
}

}  // namespace girih::kernels
