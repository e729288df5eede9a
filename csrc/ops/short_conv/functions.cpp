// girih::ops::short_conv and girih::ops::short_conv_step.
#include "../registration/functions.h"

namespace girih::ops {

ShortConvState ShortConvState::start(int64_t batch, int64_t channels, int64_t W,
                                     const at::TensorOptions& options) {
  return {at::zeros({batch, W - 1, channels}, options)};
}

std::pair<Tensor, ShortConvState> short_conv(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                             const ShortConvOptions& options) {
  using Signature = std::tuple<Tensor, Tensor>(TensorArg, TensorArg, OptionalTensorArg, OptionalTensorArg,
                                               OptionalTensorArg, OptionalStringArg);
  static const auto op = find_typed_operator<Signature>("girih::short_conv");
  auto [y, state_x] = op.call(x, weight, to_optional(bias), to_optional(options.state.x),
                              to_optional(options.cu_seqlens), to_string_view(options.activation));
  return {y, {state_x}};
}

Tensor short_conv_step(const Tensor& x, const Tensor& weight, const Tensor& bias,
                       const ShortConvOptions& options) {
  using Signature = Tensor(TensorArg, TensorArg, OptionalTensorArg, TensorArg, OptionalStringArg);
  static const auto op = find_typed_operator<Signature>("girih::short_conv_step");
  check_step_state("short_conv", options.state.x, options.cu_seqlens);
  return op.call(x, weight, to_optional(bias), options.state.x, to_string_view(options.activation));
}

}  // namespace girih::ops
