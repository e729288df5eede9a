#include "step.h"

#include <ATen/autocast_mode.h>

#include <algorithm>

#include "../ops/registration/functions.h"
#include "fused.h"

namespace girih::nn {
namespace {

// Limits of the few_rows kernel.
constexpr int64_t kRows = 16, kMatrices = 8, kWidest = 8192, kElements = 96 * 1024;

using FewRows = std::vector<Tensor>(const Tensor&, at::TensorList, const std::vector<std::string>&,
                                    const c10::List<OptionalTensor>&, const c10::List<OptionalTensor>&,
                                    at::ArrayRef<double>, std::string_view, const OptionalTensor&, double,
                                    const OptionalTensor&);

// The operator's handle; empty if the library was built without CUDA.
const std::optional<c10::TypedOperatorHandle<FewRows>>& few_rows() {
  static const auto op = [] {
    const auto found = c10::Dispatcher::singleton().findSchema({"girih::few_rows", ""});
    return found ? std::optional(found->typed<FewRows>()) : std::nullopt;
  }();
  return op;
}

std::vector<Tensor> by_kernel(const Tensor& x, const std::vector<Product>& wanted, const RowInput& given,
                              const Tensor& residual) {
  std::vector<Tensor> weights;
  std::vector<std::string> gates;
  std::vector<double> scales;
  c10::List<OptionalTensor> biases, rates;
  for (const auto& product : wanted) {
    weights.push_back(product.weight);
    gates.push_back(product.gate);
    scales.push_back(product.scale);
    biases.push_back(ops::none_if_absent(product.bias));
    rates.push_back(ops::none_if_absent(product.rate));
  }
  return few_rows()->call(x, weights, gates, biases, rates, scales, given.kind,
                          ops::none_if_absent(given.other), given.eps, ops::none_if_absent(residual));
}

}  // namespace

Tensor made_of(const Tensor& x, const RowInput& given) {
  const auto& [kind, other, eps] = given;
  if (kind == "plain") return x;
  if (kind == "rms_norm") return rms_norm(x, other, eps);
  if (kind == "silu_rms_norm") return silu_rms_norm(x, other, eps);
  TORCH_CHECK_VALUE(kind == "silu_product", "kind is '", kind,
                    "'; expected plain, rms_norm, silu_rms_norm or silu_product");
  return silu_product(x, other);
}

bool are_few(const Tensor& x) { return !at::GradMode::is_enabled() && x.numel() <= kRows * x.size(-1); }

bool has_kernel(const Tensor& x, const std::vector<Product>& wanted, const RowInput& given,
                const Tensor& residual) {
  if (!x.is_cuda() || at::GradMode::is_enabled()) return false;
  if (x.scalar_type() != at::kBFloat16 && x.scalar_type() != at::kHalf) return false;
  const auto width = x.size(-1), rows = x.numel() / std::max<int64_t>(width, 1);
  const auto dense = [&](const Tensor& m) {
    return !m.defined() || (m.scalar_type() == x.scalar_type() && m.is_contiguous() &&
                            reinterpret_cast<uintptr_t>(m.const_data_ptr()) % 16 == 0);
  };
  const auto numbers = [](const Tensor& part) {
    return !part.defined() || (part.scalar_type() == at::kFloat && part.is_contiguous());
  };
  return few_rows() && !at::autocast::is_autocast_enabled(at::kCUDA) && 1 <= rows && rows <= kRows &&
         width % 8 == 0 && width <= kWidest && rows * width <= kElements && wanted.size() <= kMatrices &&
         dense(x) && dense(given.other) && dense(residual) &&
         std::ranges::all_of(wanted, [&](const Product& product) {
           return dense(product.weight) && numbers(product.bias) && numbers(product.rate) &&
                  (product.gate != "none" || !product.bias.defined());
         });
}

std::vector<Tensor> products(const Tensor& x, const std::vector<Product>& wanted, const RowInput& given,
                             const Tensor& residual) {
  if (has_kernel(x, wanted, given, residual)) return by_kernel(x, wanted, given, residual);
  auto results = given.kind == "silu_product" && wanted.size() == 1
                     ? std::vector{silu_product_linear(x, given.other, wanted[0])}
                     : together(made_of(x, given), wanted);
  if (residual.defined()) results[0] = residual + results[0];
  return results;
}

}  // namespace girih::nn
