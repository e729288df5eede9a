// CUDA implementation of short_conv. float64: the ATen form.
#include "../arguments/kernel_arguments.h"
#include "../registration/dispatch.h"
#include "aten.h"
#include "problem.h"
#include "short_conv/short_conv.h"

namespace girih::short_conv {
namespace {

using Activation = std::optional<std::string_view>;

kernels::ShortConvShape shape_of(const Tensor& x, const Tensor& weight, const Tensor& cu_seqlens,
                                 const Activation& activation) {
  return {sequence_layout(x, cu_seqlens), x.size(2), static_cast<int>(weight.size(1)), activation.has_value(),
          kernel_dtype(x)};
}

Results forward_cuda(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                     const OptionalTensor& state_x, const OptionalTensor& cu_seqlens, Activation activation,
                     bool save) {
  if (Problem::path(x) == Path::Code::aten)
    return forward(x, weight, bias, state_x, cu_seqlens, activation, save);
  Problem::check(x, weight, bias, state_x, cu_seqlens, activation);
  const c10::cuda::CUDAGuard device(x.device());
  const auto cu = contiguous_or_undefined(cu_seqlens);
  kernels::ShortConvForward p;
  p.shape = shape_of(x, weight, cu, activation);
  const auto y = at::empty(x.sizes(), x.options());
  const auto last = at::empty({p.shape.tokens.sequences, weight.size(1) - 1, x.size(2)}, x.options());
  p.x = input<3>(x);
  p.weight = input<2>(weight);
  p.bias = input<1>(bias);
  p.state = input<3>(state_x);
  p.y = output<3>(y);
  p.final_state = output<3>(last);
  GIRIH_LAUNCH(short_conv_forward, p);
  return {y, last};
}

Gradients backward_cuda(const OptionalTensor& grad_y, const OptionalTensor& grad_state_x, const Tensor& x,
                        const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& state_x,
                        const OptionalTensor& cu_seqlens, Activation activation) {
  if (Problem::path(x) == Path::Code::aten) {
    return backward(grad_y, grad_state_x, x, weight, bias, state_x, cu_seqlens, activation);
  }
  Problem::check(x, weight, bias, state_x, cu_seqlens, activation);
  const c10::cuda::CUDAGuard device(x.device());
  const auto cu = contiguous_or_undefined(cu_seqlens);
  const auto new_gradient = [](const Tensor& tensor) { return at::empty(tensor.sizes(), tensor.options()); };
  const auto new_gradient_if_defined = [&](const OptionalTensor& tensor) {
    return is_defined(tensor) ? OptionalTensor(new_gradient(*tensor)) : std::nullopt;
  };
  kernels::ShortConvBackward p;
  p.shape = shape_of(x, weight, cu, activation);
  const auto dx = new_gradient(x), dweight = new_gradient(weight);
  const auto dbias = new_gradient_if_defined(bias), dstate = new_gradient_if_defined(state_x);
  p.dy = input<3>(grad_y);
  p.dfinal_state = input<3>(grad_state_x);
  p.x = input<3>(x);
  p.weight = input<2>(weight);
  p.bias = input<1>(bias);
  p.state = input<3>(state_x);
  p.dx = output<3>(dx);
  p.dweight = output<2>(dweight);
  p.dbias = output<1>(dbias.value_or(Tensor()));
  p.dstate = output<3>(dstate.value_or(Tensor()));
  GIRIH_RUN(short_conv_backward, p, x);
  return {dx, dweight, dbias, dstate, std::nullopt};
}

Tensor step_cuda(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& state_x,
                 Activation activation) {
  check_step(get_operator("short_conv"), x, {state_x});
  Problem::check(x, weight, bias, state_x, std::nullopt, activation);
  if (Problem::path(x) == Path::Code::aten) {
    const auto [y, last] = forward(x, weight, bias, state_x, std::nullopt, activation, false);
    state_x.copy_(last);
    return y;
  }
  const c10::cuda::CUDAGuard device(x.device());
  const auto y = at::empty(x.sizes(), x.options());
  kernels::ShortConvStep p;
  p.shape = shape_of(x, weight, Tensor(), activation);
  p.x = input<3>(x);
  p.weight = input<2>(weight);
  p.bias = input<1>(bias);
  p.state = output<3>(state_x);
  p.y = output<3>(y);
  GIRIH_LAUNCH(short_conv_step, p);
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  m.impl("short_conv_forward", &forward_cuda);
  m.impl("short_conv_backward", &backward_cuda);
  m.impl("short_conv_step", &step_cuda);
}

}  // namespace girih::short_conv
