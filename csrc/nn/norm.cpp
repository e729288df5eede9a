// RMSNorm, GatedRMSNorm, SwiGLU and DecayGate.
#include <algorithm>

#include "fields.h"
#include "step.h"

namespace girih::nn {

RMSNormImpl::RMSNormImpl(int64_t dim, double eps)
    : weight(register_parameter("weight", at::ones({dim}))), eps(eps) {
  no_weight_decay({weight});
}

Tensor RMSNormImpl::forward(const Tensor& x) { return apply_prologue(x, input()); }

GatedRMSNormImpl::GatedRMSNormImpl(int64_t dim, double eps, std::string activation)
    : RMSNormImpl(dim, eps), activation(std::move(activation)) {
  check_value("activation", this->activation, allowed_words("gated_rms_norm", "activation"));
}

Tensor GatedRMSNormImpl::forward(const Tensor& x, const Tensor& gate) {
  return ops::gated_rms_norm(x, weight, gate.to(x.scalar_type()), {.activation = activation, .eps = eps});
}

GatedInputRMSNormImpl::GatedInputRMSNormImpl(int64_t dim, int64_t groups, double eps)
    : RMSNormImpl(dim, eps), groups(groups) {
  TORCH_CHECK_VALUE(groups >= 1 && dim % groups == 0, "groups is ", groups, "; expected a divisor of ", dim);
}

Tensor GatedInputRMSNormImpl::forward(const Tensor& x, const Tensor& gate) {
  const auto y = to_heads(promote_to_fp32(x) * at::silu(promote_to_fp32(gate)), groups);
  const auto unit = at::rms_norm(y, {y.size(-1)}, {}, eps).flatten(-2);
  return (unit * promote_to_fp32(weight)).to(x.scalar_type());
}

SwiGLUImpl::SwiGLUImpl(int64_t hidden_size, int64_t intermediate_size)
    : gate_proj(register_module("gate_proj", linear(hidden_size, intermediate_size))),
      up_proj(register_module("up_proj", linear(hidden_size, intermediate_size))),
      down_proj(register_module("down_proj", linear(intermediate_size, hidden_size))) {}

Tensor SwiGLUImpl::forward(const Tensor& x) { return onto({}, x, {}); }

Tensor SwiGLUImpl::onto(const Tensor& residual, const Tensor& x, const RowInput& prologue) {
  const auto p = products(x, {make_product(gate_proj), make_product(up_proj)}, prologue);
  return products(p[0], {make_product(down_proj)}, {"silu_product", p[1]}, residual)[0];
}

DecayGateImpl::DecayGateImpl(int64_t hidden_size, int64_t num_heads, double largest_step)
    : largest_step(largest_step),
      proj(register_module("proj", linear(hidden_size, num_heads))),
      A_log(register_parameter("A_log", at::empty({num_heads}))),
      dt_bias(register_parameter("dt_bias", at::empty({num_heads}))) {
  no_weight_decay({A_log, dt_bias});
  keep_fp32({A_log, dt_bias});
  reset_parameters();
}

// Initializes rates exp(A_log) log-uniformly in [1, 16] and softplus(dt_bias) log-uniformly in
// [largest_step / 100, largest_step].
void DecayGateImpl::reset_parameters() {
  torch::nn::init::uniform_(A_log, 0.0, std::log(16.0));
  const double max_log_dt = std::log(largest_step);  // softplus(b) is close to exp(b) for b << 0
  torch::nn::init::uniform_(dt_bias, max_log_dt - std::log(100.0), max_log_dt);
}

double initial_step_size_bias(int64_t chunk) {
  return -std::log(4.0 * double(std::max<int64_t>(chunk, 16)) - 1.0);
}

Tensor apply_output_gate(GatedRMSNorm norm, const Tensor& o, const Tensor& gate) {
  return norm ? norm(o, gate) : o * at::gelu(gate.to(o.scalar_type()));
}

Product DecayGateImpl::product() const { return {proj->weight, "decay", dt_bias, A_log}; }

std::pair<Tensor, Tensor> DecayGateImpl::forward(const Tensor& x) {
  const auto dt = at::softplus(promote_to_fp32(proj(x)) + dt_bias);
  return {-promote_to_fp32(A_log).exp() * dt, dt};
}

}  // namespace girih::nn
