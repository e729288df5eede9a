// CUDA implementation of gate activations (y = gate(x)) in training; see ../fused/fused.h for the equations
// and the gradients.
#include <torch/library.h>

#include "../arguments/contiguous.h"
#include "../arguments/gate_function.h"
#include "gate_activations/gate_activations.h"

namespace girih::gate_activations {
namespace {

// x as [rows, columns] with one distance between rows; columns of a wider product are not copied.
Tensor as_rows(const char* op, const Tensor& x) {
  TORCH_CHECK(x.dim() >= 1 && has_kernel_dtype(x.scalar_type()), "girih: ", op, ": x is ", x.scalar_type(),
              " ", x.sizes(), "; expected float32, float16 or bfloat16 [..., columns]");
  const auto columns = x.size(-1);
  TORCH_CHECK(columns <= 0x3fffffff, "girih: ", op, ": x has ", columns, " columns; expected less than 2^30");
  const auto rows = columns == 0 ? 0 : x.numel() / columns;
  const auto sizes = std::vector<int64_t>{rows, columns};
  const auto strides = at::detail::computeStride(x.sizes(), x.strides(), sizes);
  return strides && (columns == 1 || strides->back() == 1) ? x.view(sizes) : x.reshape(sizes).contiguous();
}

kernels::GateActivations fill_arguments(const char* op, const Tensor& x, std::string_view gate,
                                        const OptionalTensor& bias, const OptionalTensor& rate,
                                        double scale) {
  kernels::GateActivations p{};
  p.rows = x.size(0), p.columns = static_cast<int>(x.size(1));
  p.gate = parse_gate_function(op, gate);
  TORCH_CHECK(p.gate != kernels::GateFunction::none, "girih: ", op,
              ": gate is 'none'; expected linear, sigmoid, logsigmoid or decay");
  TORCH_CHECK(is_defined(rate) == (p.gate == kernels::GateFunction::decay), "girih: ", op,
              ": rate should be a tensor for the gate decay, and None for other gates");
  p.dtype = kernel_dtype(x);
  p.x = x.const_data_ptr();
  p.stride = x.size(0) == 1 ? x.size(1) : x.stride(0);
  constexpr int kPack = kernels::kGateActivationsPack;
  p.use_packs = p.columns % kPack == 0 && p.stride % kPack == 0 &&
                reinterpret_cast<uintptr_t>(p.x) % (kPack * x.element_size()) == 0;
  p.bias = feature_data(op, bias, "bias", p.columns, x),
  p.rate = feature_data(op, rate, "rate", p.columns, x);
  p.scale = static_cast<float>(scale);
  return p;
}

Tensor forward(const Tensor& x_, std::string_view gate, const OptionalTensor& bias,
               const OptionalTensor& rate, double scale) {
  const c10::cuda::CUDAGuard device(x_.device());
  const auto x = as_rows("row_gates", x_);
  auto p = fill_arguments("row_gates", x, gate, bias, rate, scale);
  const auto y = at::empty(x_.sizes(), x.options().dtype(at::kFloat));
  p.y = y.mutable_data_ptr<float>();
  GIRIH_LAUNCH(gate_activations, p);
  return y;
}

std::tuple<Tensor, Tensor> backward(const Tensor& dy_, const Tensor& x_, std::string_view gate,
                                    const OptionalTensor& bias, const OptionalTensor& rate, double scale,
                                    bool of_sums) {
  constexpr const char* kOp = "row_gates_backward";
  const c10::cuda::CUDAGuard device(x_.device());
  const auto x = as_rows(kOp, x_);
  kernels::GateActivationsBackward p{};
  p.forward = fill_arguments(kOp, x, gate, bias, rate, scale);
  const auto dy = contiguous_argument(kOp, dy_, "dy", x_.sizes(), at::kFloat, x_);
  const auto dx = at::empty(x_.sizes(), x.options());
  const auto wide = x.options().dtype(at::kFloat);
  const auto sums = of_sums ? at::empty({2, x.size(1)}, wide) : at::empty({0}, wide);
  p.dy = dy.const_data_ptr<float>();
  p.dx = dx.mutable_data_ptr();
  p.sums = of_sums ? sums.mutable_data_ptr<float>() : nullptr;
  GIRIH_RUN(gate_activations_backward, p, x);
  return {dx, sums};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(girih, m) {
  // y [..., columns] in fp32; bias and rate [columns]
  m.def("row_gates(Tensor x, str gate, Tensor? bias, Tensor? rate, float scale) -> Tensor");
  // sums [2, columns]: gradients of bias and rate; empty without of_sums
  m.def(
      "row_gates_backward(Tensor dy, Tensor x, str gate, Tensor? bias, Tensor? rate, float scale,"
      " bool of_sums) -> (Tensor dx, Tensor sums)");
}
TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  m.impl("row_gates", &forward);
  m.impl("row_gates_backward", &backward);
}

}  // namespace girih::gate_activations
