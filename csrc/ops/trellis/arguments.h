// Conversions of the arguments of trellis and ttt for the kernels.
#pragma once

#include "../arguments/chunk_grid.h"
#include "aten.h"
#include "trellis/trellis.h"

namespace girih::trellis {

struct InputGradients {
  Tensor q, x[2], a, gamma;
  OptionalTensor g, phi_weight, chunk_start[2], memory[2];
};

inline kernels::TrellisMap parse_activation(std::string_view name) {
  using kernels::Norm;
  if (name == "silu") return {true, Norm::none};
  if (name == "l2norm") return {false, Norm::l2};
  if (name == "layer_norm") return {false, Norm::layer};
  if (name == "l2_silu") return {true, Norm::l2};
  if (name == "ln_silu") return {true, Norm::layer};
  if (name == "softmax") return {false, Norm::softmax};
  return {false, Norm::none};
}

// The weight of phi as the kernels read it: [heads, M] in fp32, zero-padded to a multiple of 8; undefined if
// absent.
inline Tensor pad_weight(const Call& call, int64_t heads) {
  if (!is_defined(call.phi_weight)) return {};
  const auto& weight = *call.phi_weight;
  const auto own = weight.to(at::kFloat).repeat_interleave(heads / weight.size(0), 0);
  return at::constant_pad_nd(own, {0, (8 - weight.size(1) % 8) % 8}).contiguous();
}
inline const float* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr;
}

// The gradient of the output in the dtype of q, with aligned rows.
inline Tensor prepare_output_gradient(const Call& call, const OptionalTensor& gradient) {
  return align_output_gradient(gradient, call.q, call.q.size(2), call.output_width(), call.q.scalar_type());
}

// Checks the shapes and dtypes of the saved tensors of a backward call.
inline void check_saved(std::string_view op, const Problem& problem, const Call& call,
                        const SavedTensors& saved) {
  const auto shapes = problem.saved(call, true);
  check_saved_tensor(op, "memories_k", saved.chunk_memories[0], shapes.chunk_memories[0], shapes.type);
  if (call.memory_count() == 2)
    check_saved_tensor(op, "memories_v", saved.chunk_memories[1], shapes.chunk_memories[1], shapes.type);
  check_saved_tensor(op, "z", saved.z, shapes.token_rows, shapes.type);
  check_saved_tensor(op, "u", saved.u, shapes.token_rows, shapes.type);
  check_saved_tensor(op, "fit", saved.map_stats, shapes.map_stats, at::kFloat);
}

}  // namespace girih::trellis
