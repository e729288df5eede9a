#include "step.h"

#include <ATen/autocast_mode.h>

#include <algorithm>

#include "../../kernels/skinny_gemm/limits.h"
#include "../ops/registration/functions.h"
#include "fused.h"

namespace girih::nn {
namespace {

using SkinnyGemmSignature = std::vector<Tensor>(const Tensor&, at::TensorList,
                                                const std::vector<std::string>&,
                                                const c10::List<OptionalTensor>&,
                                                const c10::List<OptionalTensor>&, at::ArrayRef<double>,
                                                std::string_view, const OptionalTensor&, double,
                                                const OptionalTensor&);

// The operator's handle; empty if the library was built without CUDA.
const std::optional<c10::TypedOperatorHandle<SkinnyGemmSignature>>& find_skinny_gemm_op() {
  static const auto op = [] {
    const auto found = c10::Dispatcher::singleton().findSchema({"girih::few_rows", ""});
    return found ? std::optional(found->typed<SkinnyGemmSignature>()) : std::nullopt;
  }();
  return op;
}

std::vector<Tensor> launch_skinny_gemm(const Tensor& x, const std::vector<Product>& specs,
                                       const RowInput& prologue, const Tensor& residual) {
  std::vector<Tensor> weights;
  std::vector<std::string> gates;
  std::vector<double> scales;
  c10::List<OptionalTensor> biases, rates;
  for (const auto& product : specs) {
    weights.push_back(product.weight);
    gates.push_back(product.gate);
    scales.push_back(product.scale);
    biases.push_back(ops::to_optional(product.bias));
    rates.push_back(ops::to_optional(product.rate));
  }
  return find_skinny_gemm_op()->call(x, weights, gates, biases, rates, scales, prologue.kind,
                                     ops::to_optional(prologue.other), prologue.eps,
                                     ops::to_optional(residual));
}

}  // namespace

Tensor apply_prologue(const Tensor& x, const RowInput& prologue) {
  const auto& [kind, other, eps] = prologue;
  if (kind == "plain") return x;
  if (kind == "rms_norm") return rms_norm(x, other, eps);
  if (kind == "silu_rms_norm") return silu_rms_norm(x, other, eps);
  TORCH_CHECK_VALUE(kind == "silu_product", "kind is '", kind,
                    "'; expected plain, rms_norm, silu_rms_norm or silu_product");
  return silu_product(x, other);
}

bool is_decode_sized(const Tensor& x) {
  return !at::GradMode::is_enabled() && x.numel() <= kernels::kSkinnyGemmMaxRows * x.size(-1);
}

bool has_skinny_gemm(const Tensor& x, const std::vector<Product>& specs, const RowInput& prologue,
                     const Tensor& residual) {
  if (!x.is_cuda() || at::GradMode::is_enabled()) return false;
  if (x.scalar_type() != at::kBFloat16 && x.scalar_type() != at::kHalf) return false;
  const auto width = x.size(-1), rows = x.numel() / std::max<int64_t>(width, 1);
  const auto is_kernel_operand = [&](const Tensor& m) {
    return !m.defined() || (m.scalar_type() == x.scalar_type() && m.is_contiguous() &&
                            reinterpret_cast<uintptr_t>(m.const_data_ptr()) % 16 == 0);
  };
  const auto is_fp32_vector = [](const Tensor& part) {
    return !part.defined() || (part.scalar_type() == at::kFloat && part.is_contiguous());
  };
  return find_skinny_gemm_op() && !at::autocast::is_autocast_enabled(at::kCUDA) && 1 <= rows &&
         rows <= kernels::kSkinnyGemmMaxRows && width % 8 == 0 && width <= kernels::kSkinnyGemmMaxWidth &&
         rows * width <= kernels::kSkinnyGemmMaxElements && specs.size() <= kernels::kSkinnyGemmMaxMatrices &&
         is_kernel_operand(x) && is_kernel_operand(prologue.other) && is_kernel_operand(residual) &&
         std::ranges::all_of(specs, [&](const Product& product) {
           return is_kernel_operand(product.weight) && is_fp32_vector(product.bias) &&
                  is_fp32_vector(product.rate) && (product.gate != "none" || !product.bias.defined());
         });
}

std::vector<Tensor> products(const Tensor& x, const std::vector<Product>& specs, const RowInput& prologue,
                             const Tensor& residual) {
  if (has_skinny_gemm(x, specs, prologue, residual)) return launch_skinny_gemm(x, specs, prologue, residual);
  auto results = prologue.kind == "silu_product" && specs.size() == 1
                     ? std::vector{silu_product_linear(x, prologue.other, specs[0])}
                     : apply_linears(apply_prologue(x, prologue), specs);
  if (residual.defined()) results[0] = residual + results[0];
  return results;
}

}  // namespace girih::nn
