// ShortConv: depthwise causal convolution, then SiLU.
#include "fields.h"
#include "fused.h"
#include "layer.h"

namespace girih::nn {

ShortConvImpl::ShortConvImpl(int64_t channels, ShortConvOptions settings) : options(std::move(settings)) {
  check_value("kernel_size", options.kernel_size, conv_width_range());
  if (options.activation)
    check_value("activation", *options.activation, allowed_words("short_conv", "activation"));
  if (options.kernel_size == 0) return;
  weight = register_parameter("weight", at::empty({channels, options.kernel_size}));
  if (options.bias) {
    bias = register_parameter("bias", at::empty({channels}));
    no_weight_decay({bias});
  }
  reset_parameters();
}

void ShortConvImpl::reset_parameters() {
  if (!weight.defined()) return;
  const double bound = 1 / std::sqrt(double(weight.size(1)));
  torch::nn::init::uniform_(weight, -bound, bound);
  if (bias.defined()) torch::nn::init::zeros_(bias);
}

void ShortConvImpl::expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens) const {
  check_conv_state("x", state, *this, count_sequences(x, cu_seqlens));
}

State cast_conv_state(const State& state, const Tensor& x) {
  const auto dtype = autocast_dtype(x, x.scalar_type());
  return state.map([&](const Tensor& rows) { return rows.to(dtype); });
}

Output ShortConvImpl::mix(const Tensor& x, const Call& call) {
  if (!weight.defined()) return {options.activation ? at::silu(x) : x, {}};
  expect_state(call.state, x, call.cu_seqlens);
  const auto before = cast_conv_state(call.state, x);
  const ops::ShortConvOptions conv{.activation = options.activation,
                                   .state = before.as<ops::ShortConvState>(),
                                   .cu_seqlens = call.cu_seqlens};
  if (call.is_step(x)) return {ops::short_conv_step(x, weight, bias, conv), before};
  auto [y, state] = ops::short_conv(x, weight, bias, conv);
  return {y, State::of(state)};
}

}  // namespace girih::nn
