// CUDA implementation of gated_rms_norm. float64 and rows wider than a block holds: the ATen form.
#include "../arguments/kernel_arguments.h"
#include "../registration/dispatch.h"
#include "aten.h"
#include "gated_rms_norm/gated_rms_norm.h"
#include "problem.h"

namespace girih::gated_rms_norm {
namespace {

static_assert(kMaxWidth == kernels::kGatedRmsNormMaxDim);

kernels::GatedRmsNormShape shape_of(const Tensor& x, const OptionalTensor& gate, std::string_view activation,
                                    double eps) {
  using Activation = kernels::GateActivation;
  const auto act = !is_defined(gate)      ? Activation::none
                   : activation == "silu" ? Activation::silu
                   : activation == "gelu" ? Activation::gelu
                                          : Activation::sigmoid;
  return {x.numel() / x.size(-1), static_cast<int>(x.size(-1)), static_cast<float>(eps), act,
          kernel_dtype(x)};
}

const void* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

Tensor forward_cuda(const Tensor& x, const Tensor& weight, const OptionalTensor& gate,
                    std::string_view activation, double eps, bool save) {
  Problem::check(x, weight, gate, activation, eps);
  if (Problem::path(x) == Path::Code::aten) return forward(x, weight, gate, activation, eps, save);
  const c10::cuda::CUDAGuard device(x.device());
  const auto rows = contiguous_or_undefined(x), gates = contiguous_or_undefined(gate),
             y = at::empty(x.sizes(), x.options());
  kernels::GatedRmsNormForward p;
  p.shape = shape_of(x, gate, activation, eps);
  p.x = data_or_null(rows);
  p.weight = input<1>(weight);
  p.gate = data_or_null(gates);
  p.y = y.mutable_data_ptr();
  GIRIH_LAUNCH(gated_rms_norm_forward, p);
  return y;
}

Gradients backward_cuda(const OptionalTensor& grad_y, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& gate, std::string_view activation, double eps) {
  Problem::check(x, weight, gate, activation, eps);
  if (Problem::path(x) == Path::Code::aten || !is_defined(grad_y))
    return backward(grad_y, x, weight, gate, activation, eps);
  const c10::cuda::CUDAGuard device(x.device());
  const auto rows = contiguous_or_undefined(x), gates = contiguous_or_undefined(gate),
             dy = contiguous_or_undefined(grad_y);
  const auto dx = at::empty(x.sizes(), x.options()), dweight = at::empty(weight.sizes(), weight.options());
  const auto dgate = if_defined(gate, [&] { return at::empty(x.sizes(), x.options()); });
  kernels::GatedRmsNormBackward p;
  p.shape = shape_of(x, gate, activation, eps);
  p.dy = data_or_null(dy);
  p.x = data_or_null(rows);
  p.weight = input<1>(weight);
  p.gate = data_or_null(gates);
  p.dx = dx.mutable_data_ptr();
  p.dweight = output<1>(dweight);
  p.dgate = dgate ? dgate->mutable_data_ptr() : nullptr;
  GIRIH_RUN(gated_rms_norm_backward, p, x);
  return {dx, dweight, dgate};
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  m.impl("gated_rms_norm_forward", &forward_cuda);
  m.impl("gated_rms_norm_backward", &backward_cuda);
}

}  // namespace girih::gated_rms_norm
