// Products of a few rows in a decoding step, with the norm or activation before them and the gate after them.
// Not a public operator (torch.nn.functional.linear is): it requires contiguous aligned tensors, and has no
// gradients and no other device. `girih.nn.functional.step` and csrc/nn/step.cpp call it, and have the same
// computation in PyTorch.
#include <torch/library.h>

#include "../arguments/gate_function.h"
#include "../arguments/kernel_arguments.h"
#include "skinny_gemm/skinny_gemm.h"

namespace girih::skinny_gemm {
namespace {

using kernels::GateFunction;
using kernels::GemmInput;

GemmInput parse_input(std::string_view name) {
  if (name == "plain") return GemmInput::plain;
  if (name == "rms_norm") return GemmInput::rms_norm;
  if (name == "silu_rms_norm") return GemmInput::silu_rms_norm;
  TORCH_CHECK(name == "silu_product", "girih: few_rows: input is '", name,
              "'; expected plain, rms_norm, silu_rms_norm or silu_product");
  return GemmInput::silu_product;
}

const void* aligned(const Tensor& tensor, const char* name, at::IntArrayRef sizes, const Tensor& x) {
  TORCH_CHECK(tensor.sizes() == sizes, "girih: few_rows: ", name, " has shape ", tensor.sizes(),
              "; expected ", sizes);
  TORCH_CHECK(tensor.scalar_type() == x.scalar_type() && tensor.device() == x.device(),
              "girih: few_rows: ", name, " is ", tensor.scalar_type(), " on ", tensor.device(), "; expected ",
              x.scalar_type(), " on ", x.device());
  const auto* data = tensor.const_data_ptr();
  TORCH_CHECK(tensor.is_contiguous() && reinterpret_cast<uintptr_t>(data) % 16 == 0,
              "girih: few_rows: ", name, " has strides ", tensor.strides(),
              "; expected a contiguous tensor aligned to 16 bytes");
  return data;
}

std::vector<Tensor> few_rows(const Tensor& x, at::TensorList weights, const std::vector<std::string>& gates,
                             const c10::List<OptionalTensor>& biases, const c10::List<OptionalTensor>& rates,
                             at::ArrayRef<double> scales, std::string_view input, const OptionalTensor& other,
                             double eps, const OptionalTensor& residual) {
  TORCH_CHECK(x.dim() >= 1 && (x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16),
              "girih: few_rows: x is ", x.scalar_type(), " ", x.sizes(),
              "; expected bf16 or fp16 [..., width]");
  const int64_t width = x.size(-1), rows = width == 0 ? 0 : x.numel() / width;
  TORCH_CHECK(1 <= rows && rows <= kernels::kSkinnyGemmMaxRows && width % 8 == 0 &&
                  width <= kernels::kSkinnyGemmMaxWidth && rows * width <= kernels::kSkinnyGemmMaxElements,
              "girih: few_rows: x has shape ", x.sizes(), "; expected 1 to ", kernels::kSkinnyGemmMaxRows,
              " rows of a multiple of 8 up to ", kernels::kSkinnyGemmMaxWidth, ", ",
              kernels::kSkinnyGemmMaxElements, " elements at most");
  const auto count = weights.size();
  TORCH_CHECK(1 <= count && count <= kernels::kSkinnyGemmMaxMatrices && gates.size() == count &&
                  biases.size() == count && rates.size() == count && scales.size() == count,
              "girih: few_rows: ", count, " weights, ", gates.size(), " gates, ", biases.size(), " biases, ",
              rates.size(), " rates, ", scales.size(), " scales; expected 1 to ",
              kernels::kSkinnyGemmMaxMatrices, " of each");
  const c10::cuda::CUDAGuard device(x.device());
  kernels::SkinnyGemm p{};
  p.dtype = kernel_dtype(x);
  p.rows = static_cast<int>(rows), p.width = static_cast<int>(width);
  p.x = aligned(x, "x", x.sizes(), x);
  p.input = parse_input(input);
  p.eps = static_cast<float>(eps);
  TORCH_CHECK(is_defined(other) == (p.input != GemmInput::plain),
              "girih: few_rows: other should be None for input plain, and a tensor for other inputs");
  if (p.input == GemmInput::silu_product)
    p.other = aligned(*other, "other", x.sizes(), x);
  else if (is_defined(other))
    p.other = aligned(*other, "other", {width}, x);
  p.count = static_cast<int>(count);
  std::vector<Tensor> results;
  for (size_t i = 0; i < count; ++i) {
    TORCH_CHECK(weights[i].dim() == 2, "girih: few_rows: a weight has shape ", weights[i].sizes(),
                "; expected [features, ", width, "]");
    const int64_t features = weights[i].size(0);
    auto& m = p.matrices[i];
    m.weight = aligned(weights[i], "a weight", {features, width}, x);
    m.features = static_cast<int>(features);
    m.gate = parse_gate_function("few_rows", gates[i]);
    m.bias = feature_data("few_rows", biases[i], "a bias", features, x);
    m.rate = feature_data("few_rows", rates[i], "a rate", features, x);
    TORCH_CHECK(
        (m.rate != nullptr) == (m.gate == GateFunction::decay) &&
            !(m.gate == GateFunction::none && m.bias != nullptr),
        "girih: few_rows: expected a rate for the gate decay and for no other gate, and no bias for the gate "
        "none");
    m.scale = static_cast<float>(scales[i]);
    auto sizes = x.sizes().vec();
    sizes.back() = features;
    results.push_back(
        at::empty(sizes, m.gate == GateFunction::none ? x.options() : x.options().dtype(at::kFloat)));
    m.y = results.back().mutable_data_ptr();
  }
  if (is_defined(residual)) {
    TORCH_CHECK(
        count == 1 && p.matrices[0].gate == GateFunction::none,
        "girih: few_rows: residual is a tensor; expected None unless there is one weight with the gate none");
    p.residual = aligned(*residual, "residual", results[0].sizes(), x);
  }
  GIRIH_LAUNCH(skinny_gemm, p);
  return results;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(girih, m) {
  m.def(
      "few_rows(Tensor x, Tensor[] weights, str[] gates, Tensor?[] biases, Tensor?[] rates, float[] scales, "
      "str input, Tensor? other, float eps, Tensor? residual) -> Tensor[]");
}
TORCH_LIBRARY_IMPL(girih, CUDA, m) { m.impl("few_rows", &few_rows); }

}  // namespace girih::skinny_gemm
