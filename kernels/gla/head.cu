// gla_head_forward and gla_head_backward: the launches, and the choice of the instances and of segments.
//
//     S_t = e^{g_t} S_{t-1} + k_t v_t^T                [D, V]
//     o_t = scale * S_t^T q_t                          [V]
//
// A scalar decay commutes with keys and queries. Inside a chunk it multiplies the scores, so every exponent
// is a difference of sums of gates and no factorisation is needed. With G_t the gradient of S_t from its own
// token and all later tokens, the gradients of the values are the same read in reversed time:
//
//     G_t  = scale * q_t do_t^T + e^{g_{t+1}} G_{t+1}
//     dv_t = G_t^T k_t
//
//   forward    head_read: the state from chunk to chunk, and o of each chunk
//   backward   head_read in reverse: dv; then head_gradients, each chunk alone: dq, dk, dg
//
// Backward is bound by memory traffic. With one state for each chunk, a third of the traffic would be states.
// So only every second state is written to global memory: the state before a pair of chunks in forward, and
// the gradient of the state after the pair in reverse. The terms between the two chunks of a pair are
// computed from q, k, v and do of the other chunk, the partner.
#include <algorithm>
#include <utility>

#include "gla/gla.h"
#include "gla/kernels.h"
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

cudaError_t head_read(const HeadRead& problem, Workspace& workspace, cudaStream_t stream) {
  HeadReadParams params{};
  params.problem = problem;
  params.segmentation.segment_tokens = segment_tokens(problem.shape);
  if (params.segmentation.segment_tokens == 0) return run(params, stream);

  const HeadShape& shape = problem.shape;
  const int64_t heads = count_state_heads(problem), values = shape.values, keys = shape.keys;
  const int64_t segment_heads = params.segmentation.count_segments(shape.tokens) * heads;
  float* const states = workspace.array<float>(segment_heads * values * keys);
  float* const gate_sums = workspace.array<float>(segment_heads * keys);

  // 1. Scan every segment from zero.
  HeadReadParams local_scan = params;
  local_scan.segmentation.gate_sums = gate_sums;
  local_scan.problem.initial = {};
  local_scan.problem.final = {states, DType::f32, {heads * values * keys, values * keys, keys, 1}};
  GIRIH_TRY(run(local_scan, stream));

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
  GIRIH_TRY(join_segments(join, stream));

  // 3. Scan every segment from that state.
  params.problem.initial = as_input(local_scan.problem.final);
  return run(params, stream);
}

cudaError_t head_gradients(HeadGradients p, Workspace& workspace, cudaStream_t stream) {
  const HeadShape& shape = p.shape;
  GIRIH_TRY(head_gradient_tile(shape.D, p.tile));
  const bool has_gates = p.dg.data != nullptr;
  if (has_gates) {
    const int64_t terms = static_cast<int64_t>(shape.query_heads) * p.tiles();
    p.dg_parts = workspace.array<float>(shape.tokens.batch * shape.tokens.tokens * terms);
    p.partner_gate_terms = workspace.array<float>(token_range_count(shape.tokens, kChunk) * terms);
  }
  GIRIH_TRY(dispatch_tile(shape, p.tile, [&](auto element, auto keys) {
    return launch_head_gradients<decltype(element), std::min(keys(), 128)>(p, stream);
  }));
  return has_gates ? sum_gate_gradients(p, stream) : cudaSuccess;
}

// The states of all pairs of chunks, [pairs, heads, V, D].
void* new_pair_states(const HeadShape& shape, int heads, Workspace& workspace) {
  return workspace.bytes(token_range_count(shape.tokens, kHeadPair) * heads * shape.V * shape.D *
                         dtype_size(shape.dtype));
}

// `dinitial`, in the workspace if the caller does not ask for this result.
OutputTensor<4> dinitial_or_new(const OutputTensor<4>& dinitial, const HeadShape& shape,
                                Workspace& workspace) {
  if (dinitial.data != nullptr) return dinitial;
  auto result =
      workspace.tensor(DType::f32, shape.tokens.sequences, shape.query_heads, shape.keys, shape.values);
  std::swap(result.stride[2], result.stride[3]);
  return result;
}

}  // namespace

cudaError_t gla_head_forward(const GlaHeadForward& p, Workspace& workspace, cudaStream_t stream) {
  const GlaHeadInputs& in = p.inputs;
  return head_read({in.shape, false, in.q, in.k, in.v, in.initial, p.final, p.o, p.states}, workspace,
                   stream);
}

cudaError_t gla_head_backward(const GlaHeadBackward& p, Workspace& workspace, cudaStream_t stream) {
  const GlaHeadInputs& in = p.inputs;
  const HeadRead reverse{in.shape,
                         true,
                         in.k,
                         in.q,
                         p.dout,
                         p.dfinal,
                         dinitial_or_new(p.dinitial, in.shape, workspace),
                         p.dv,
                         new_pair_states(in.shape, in.shape.query_heads, workspace)};
  GIRIH_TRY(head_read(reverse, workspace, stream));
  return head_gradients({in.shape, in.q, in.k, in.v, p.dout, p.states, reverse.states, in.initial,
                         as_input(reverse.final), p.dq, p.dk, p.dg},
                        workspace, stream);
}

}  // namespace girih::kernels
