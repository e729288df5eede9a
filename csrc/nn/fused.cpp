// Choice between the fused functions of ops/fused and PyTorch.
#include "fused.h"

#include <ATen/autocast_mode.h>

#include <algorithm>

#include "../ops/fused/fused.h"
#include "../ops/registration/functions.h"

namespace girih::nn {
namespace {

using girih::fused::kPack;
constexpr int64_t kMaxRowWidth = 8192;  // elements of the widest row that the kernels support

bool has_fused_kernel(const Tensor& x, bool needs_contiguous = true) {
#ifdef GIRIH_WITH_CUDA
  const auto dtype = x.scalar_type();
  return x.is_cuda() && (dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16) &&
         (x.is_contiguous() || !needs_contiguous);
#else
  return false;
#endif
}

bool has_norm_kernel(const Tensor& x, const Tensor& weight, at::ScalarType row_dtype) {
  const auto width = x.size(-1);
  return has_fused_kernel(x) && has_fused_kernel(weight) && weight.dim() == 1 && weight.size(0) == width &&
         width % kPack == 0 && width <= kMaxRowWidth &&
         (x.scalar_type() == row_dtype || x.scalar_type() == at::kFloat);
}

Tensor aten_rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  return at::rms_norm(x, {x.size(-1)}, weight.to(x.scalar_type()), eps);
}

bool has_silu_product_kernel(const Tensor& gate, const Tensor& up) {
  return has_fused_kernel(gate) && has_fused_kernel(up) && gate.sizes() == up.sizes() &&
         gate.scalar_type() == up.scalar_type() && gate.numel() % kPack == 0;
}

bool is_plain_linear(const Product& product) { return product.gate == "none" && !product.bias.defined(); }

bool has_linears_kernel(const Tensor& x, const std::vector<Product>& specs) {
  const auto dtype = specs[0].weight.scalar_type();
  return at::GradMode::is_enabled() && x.dim() > 1 && has_fused_kernel(x) &&
         x.scalar_type() == autocast_dtype(x, dtype) &&
         std::ranges::all_of(specs, [&](const Product& product) {
           return has_fused_kernel(product.weight) && product.weight.scalar_type() == dtype &&
                  (product.gate != "none" || !product.bias.defined());
         });
}

}  // namespace

Tensor apply_gate(const Tensor& r, const Product& product) {
  const auto& [weight, gate, bias, rate, scale] = product;
  if (gate == "none") return r;
  const auto is_feature_vector = [&](const Tensor& x) {
    return !x.defined() || (has_fused_kernel(x) && x.scalar_type() == at::kFloat &&
                            x.sizes() == r.sizes().slice(r.dim() - 1));
  };
  if ((gate != "linear" || bias.defined()) && has_fused_kernel(r, /*needs_contiguous=*/false) &&
      is_feature_vector(bias) && is_feature_vector(rate)) {
    return girih::fused::row_gates(r, gate, ops::to_optional(bias), ops::to_optional(rate), scale);
  }
  auto z = promote_to_fp32(r);
  if (bias.defined()) z = z + bias;
  if (gate == "linear") return z;
  if (gate == "decay") return -promote_to_fp32(rate).exp() * at::softplus(z);
  TORCH_CHECK_VALUE(gate == "sigmoid" || gate == "logsigmoid", "gate is '", gate,
                    "'; expected none, linear, sigmoid, logsigmoid or decay");
  z = gate == "sigmoid" ? z.sigmoid() : at::log_sigmoid(z);
  return scale == 1.0 ? z : scale * z;
}

at::ScalarType autocast_dtype(const Tensor& x, at::ScalarType other) {
  const auto device = x.device().type();
  if (device == at::kMeta || x.scalar_type() == at::kDouble) return other;  // autocast does not cast these
  return at::autocast::is_autocast_enabled(device) ? at::autocast::get_autocast_dtype(device) : other;
}

std::pair<Tensor, Tensor> residual_norm(const Tensor& x, const Tensor& branch, const Tensor& weight,
                                        double eps) {
  const auto row_dtype = autocast_dtype(x, x.scalar_type());
  if (has_norm_kernel(x, weight, row_dtype) &&
      (!branch.defined() ||
       (has_fused_kernel(branch) && branch.scalar_type() == row_dtype && branch.sizes() == x.sizes()))) {
    const auto [s, y] = girih::fused::residual_norm(x, ops::to_optional(branch), weight, eps, row_dtype);
    return {s, y};
  }
  if (branch.defined()) return residual_norm(x + branch, {}, weight, eps);
  return {x, aten_rms_norm(x, weight, eps)};
}

Tensor silu_rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  if (has_norm_kernel(x, weight, x.scalar_type())) return girih::fused::silu_norm(x, weight, eps);
  return aten_rms_norm(at::silu(x), weight, eps);
}

Tensor unit_rows(const Tensor& x) {
  constexpr double kMinNorm = 1e-12;  // lower bound of |x|
  const auto width = x.size(-1);
  if (!has_fused_kernel(x) || width % kPack != 0 || width > kMaxRowWidth) return unit(x, -1);
  const double eps = kMinNorm * kMinNorm / double(width);
  return std::get<1>(girih::fused::residual_norm(x, std::nullopt, std::nullopt, eps, x.scalar_type()));
}

std::array<Tensor, 3> split_and_rotate(const Tensor& qkv, at::IntArrayRef heads, const Tensor& position,
                                       double theta) {
  constexpr int64_t kMaxHeadDim = 256;
  const auto D = qkv.size(-1);
  if (at::GradMode::is_enabled() && has_fused_kernel(qkv, /*needs_contiguous=*/false) &&
      D % (2 * kPack) == 0 && D <= kMaxHeadDim && qkv.size(0) * qkv.size(1) < int64_t{1} << 31) {
    auto [q, k, v] = girih::fused::rotary(qkv, heads[0], position,
                                          rotary_frequencies(D, theta, qkv.options().dtype(at::kFloat)));
    return {std::move(q), std::move(k), std::move(v)};
  }
  const auto p = qkv.split_with_sizes(heads, 2);
  return {rotary(p[0], position, theta), rotary(p[1], position, theta), p[2]};
}

Tensor silu_product(const Tensor& gate, const Tensor& up) {
  const bool has_same_type = gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type();
  return has_same_type ? girih::fused::silu_product(gate, up) : at::silu(gate) * up;
}

std::vector<Tensor> apply_linears(const Tensor& x, const std::vector<Product>& specs) {
  std::vector<Tensor> results;
  if (has_linears_kernel(x, specs)) {
    std::vector<Tensor> weights;
    for (const auto& product : specs) weights.push_back(product.weight);
    results = girih::fused::linears(x, weights);
  } else {
    for (const auto& product : specs) {
      const bool use_bias = product.gate == "none";  // apply_gate adds the bias of other gates in fp32
      results.push_back(at::linear(x, product.weight, ops::to_optional(use_bias ? product.bias : Tensor())));
    }
  }
  for (size_t i = 0; i < specs.size(); ++i) results[i] = apply_gate(results[i], specs[i]);
  return results;
}

Tensor silu_product_linear(const Tensor& gate, const Tensor& up, const Product& product) {
  if (at::GradMode::is_enabled() && is_plain_linear(product) && has_silu_product_kernel(gate, up) &&
      has_fused_kernel(product.weight))
    return girih::fused::silu_product_linear(gate, up, product.weight);
  return apply_linears(silu_product(gate, up), {product})[0];
}

}  // namespace girih::nn
