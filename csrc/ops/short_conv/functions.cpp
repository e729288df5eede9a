// girih::ops::short_conv and girih::ops::short_conv_step.
#include "../registration/functions.h"

namespace girih::ops {

ShortConvState ShortConvState::start(int64_t batch, int64_t channels, int64_t W,
                                     const at::TensorOptions& options) {
  return {at::zeros({batch, W - 1, channels}, options)};
}

std::pair<Tensor, ShortConvState> short_conv(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                             const ShortConvOptions& options) {
  using Signature = std::tuple<Tensor, Tensor>(Required, Required, Maybe, Maybe, Maybe, MaybeWord);
  static const auto op = find<Signature>("girih::short_conv");
  auto [y, state_x] = op.call(x, weight, none_if_absent(bias), none_if_absent(options.state.x),
                              none_if_absent(options.cu_seqlens), view(options.activation));
  return {y, {state_x}};
}

Tensor short_conv_step(const Tensor& x, const Tensor& weight, const Tensor& bias,
                       const ShortConvOptions& options) {
  using Signature = Tensor(Required, Required, Maybe, Required, MaybeWord);
  static const auto op = find<Signature>("girih::short_conv_step");
  refuse_start("short_conv", options.state.x, options.cu_seqlens);
  return op.call(x, weight, none_if_absent(bias), options.state.x, view(options.activation));
}

}  // namespace girih::ops
