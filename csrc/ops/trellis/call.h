// Arguments and results of the kernels of trellis and ttt. ttt has one memory, of keys: it has no v and no
// state of values, and its output is r.
#pragma once

#include "../arguments/kernel_arguments.h"
#include "problem.h"
#include "trellis/trellis.h"

namespace girih::trellis {

struct Call {
  Tensor q, x[2], a, gamma;      // x: k and v; v is undefined in ttt
  OptionalTensor g, phi_weight;  // phi_weight: ttt only
  OptionalTensor first[2], state[2], position, cu_seqlens;
  int64_t chunk;
  std::string_view phi, f;

  int memories() const { return x[1].defined() ? 2 : 1; }
  int64_t width(int memory) const { return x[memory].defined() ? x[memory].size(3) : 0; }
  int64_t output_width() const { return memories() == 2 ? width(1) : a.size(3); }
};

// The saved tensors, with the shapes of Problem::saved().
struct Saved {
  Tensor memories[2], z, u, fit;
};
struct Outputs {
  Tensor o, last_first[2], last[2], position;
  Saved saved;
};
// An absent gradient is zero.
struct OutputGradients {
  OptionalTensor o, first[2], last[2];
};
struct InputGradients {
  Tensor q, x[2], a, gamma;
  OptionalTensor g, phi_weight, first[2], initial[2];
};

inline kernels::TrellisMap map_of(std::string_view name) {
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
inline Tensor packed_weight(const Call& call, int64_t heads) {
  if (!given(call.phi_weight)) return {};
  const auto& weight = *call.phi_weight;
  const auto own = weight.to(at::kFloat).repeat_interleave(heads / weight.size(0), 0);
  return at::constant_pad_nd(own, {0, (8 - weight.size(1) % 8) % 8}).contiguous();
}
inline const float* data_of(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr;
}

// The gradient of the output in the dtype of q, with aligned rows.
inline Tensor output_gradient(const Call& call, const OptionalTensor& gradient) {
  if (given(gradient)) return in_packs(gradient->to(call.q.scalar_type()));
  const auto width = (call.output_width() + 7) / 8 * 8;
  return at::zeros({call.q.size(0), call.q.size(1), call.q.size(2), width}, call.q.options());
}

// Checks the shapes and dtypes of the saved tensors of a backward call.
inline void check_saved(std::string_view op, const Problem& problem, const Call& call, const Saved& saved) {
  const auto kept = problem.saved(call.q, call.position, call.cu_seqlens, call.chunk, true);
  check_kept(op, "memories_k", saved.memories[0], kept.memories[0], kept.type);
  if (call.memories() == 2) check_kept(op, "memories_v", saved.memories[1], kept.memories[1], kept.type);
  check_kept(op, "z", saved.z, kept.tokens, kept.type);
  check_kept(op, "u", saved.u, kept.tokens, kept.type);
  check_kept(op, "fit", saved.fit, kept.fit, at::kFloat);
}

}  // namespace girih::trellis
