// Choice between the fused functions of ops/fused and PyTorch.
#include "fused.h"

#include <ATen/autocast_mode.h>

#include <algorithm>

#include "../ops/fused/fused.h"
#include "../ops/registration/functions.h"

namespace girih::nn {
namespace {

using girih::fused::kPack;
constexpr int64_t kWidestRow = 8192;  // elements of the widest row that the kernels support

bool takes(const Tensor& x, bool dense = true) {
#ifdef GIRIH_WITH_CUDA
  const auto dtype = x.scalar_type();
  return x.is_cuda() && (dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16) &&
         (x.is_contiguous() || !dense);
#else
  return false;
#endif
}

bool takes_norm(const Tensor& x, const Tensor& weight, at::ScalarType rows) {
  const auto width = x.size(-1);
  return takes(x) && takes(weight) && weight.dim() == 1 && weight.size(0) == width && width % kPack == 0 &&
         width <= kWidestRow && (x.scalar_type() == rows || x.scalar_type() == at::kFloat);
}

Tensor norm_by_aten(const Tensor& x, const Tensor& weight, double eps) {
  return at::rms_norm(x, {x.size(-1)}, weight.to(x.scalar_type()), eps);
}

bool takes_product(const Tensor& gate, const Tensor& up) {
  return takes(gate) && takes(up) && gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type() &&
         gate.numel() % kPack == 0;
}

bool is_matrix_alone(const Product& product) { return product.gate == "none" && !product.bias.defined(); }

bool takes_together(const Tensor& x, const std::vector<Product>& wanted) {
  const auto dtype = wanted[0].weight.scalar_type();
  return at::GradMode::is_enabled() && x.dim() > 1 && takes(x) &&
         x.scalar_type() == autocast_dtype(x, dtype) &&
         std::ranges::all_of(wanted, [&](const Product& product) {
           return takes(product.weight) && product.weight.scalar_type() == dtype &&
                  (product.gate != "none" || !product.bias.defined());
         });
}

Tensor gated(const Tensor& r, const Product& product) {
  const auto& [weight, gate, bias, rate, scale] = product;
  if (gate == "none") return r;
  const auto is_number = [&](const Tensor& x) {
    return !x.defined() ||
           (takes(x) && x.scalar_type() == at::kFloat && x.sizes() == r.sizes().slice(r.dim() - 1));
  };
  if ((gate != "linear" || bias.defined()) && takes(r, /*dense=*/false) && is_number(bias) &&
      is_number(rate)) {
    return girih::fused::row_gates(r, gate, ops::none_if_absent(bias), ops::none_if_absent(rate), scale);
  }
  auto z = at_least_fp32(r);
  if (bias.defined()) z = z + bias;
  if (gate == "linear") return z;
  if (gate == "decay") return -at_least_fp32(rate).exp() * at::softplus(z);
  TORCH_CHECK_VALUE(gate == "sigmoid" || gate == "logsigmoid", "gate is '", gate,
                    "'; expected none, linear, sigmoid, logsigmoid or decay");
  z = gate == "sigmoid" ? z.sigmoid() : at::log_sigmoid(z);
  return scale == 1.0 ? z : scale * z;
}

}  // namespace

at::ScalarType autocast_dtype(const Tensor& x, at::ScalarType other) {
  const auto device = x.device().type();
  if (device == at::kMeta || x.scalar_type() == at::kDouble) return other;  // autocast does not cast these
  return at::autocast::is_autocast_enabled(device) ? at::autocast::get_autocast_dtype(device) : other;
}

std::pair<Tensor, Tensor> residual_norm(const Tensor& x, const Tensor& branch, const Tensor& weight,
                                        double eps) {
  const auto rows = autocast_dtype(x, x.scalar_type());
  if (takes_norm(x, weight, rows) &&
      (!branch.defined() || (takes(branch) && branch.scalar_type() == rows && branch.sizes() == x.sizes()))) {
    const auto [s, y] = girih::fused::residual_norm(x, ops::none_if_absent(branch), weight, eps, rows);
    return {s, y};
  }
  if (branch.defined()) return residual_norm(x + branch, {}, weight, eps);
  return {x, norm_by_aten(x, weight, eps)};
}

Tensor silu_rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  if (takes_norm(x, weight, x.scalar_type())) return girih::fused::silu_norm(x, weight, eps);
  return norm_by_aten(at::silu(x), weight, eps);
}

Tensor unit_rows(const Tensor& x) {
  constexpr double kZero = 1e-12;  // lower bound of |x|
  const auto width = x.size(-1);
  if (!takes(x) || width % kPack != 0 || width > kWidestRow) return unit(x, -1);
  const double eps = kZero * kZero / double(width);
  return std::get<1>(girih::fused::residual_norm(x, std::nullopt, std::nullopt, eps, x.scalar_type()));
}

std::array<Tensor, 3> turned(const Tensor& qkv, at::IntArrayRef heads, const Tensor& position, double theta) {
  constexpr int64_t kWidestHead = 256;
  const auto D = qkv.size(-1);
  if (at::GradMode::is_enabled() && takes(qkv, /*dense=*/false) && D % (2 * kPack) == 0 && D <= kWidestHead &&
      qkv.size(0) * qkv.size(1) < int64_t{1} << 31) {
    auto [q, k, v] =
        girih::fused::rotary(qkv, heads[0], position, rates(D, theta, qkv.options().dtype(at::kFloat)));
    return {std::move(q), std::move(k), std::move(v)};
  }
  const auto p = qkv.split_with_sizes(heads, 2);
  return {rotary(p[0], position, theta), rotary(p[1], position, theta), p[2]};
}

Tensor silu_product(const Tensor& gate, const Tensor& up) {
  const bool alike = gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type();
  return alike ? girih::fused::silu_product(gate, up) : at::silu(gate) * up;
}

std::vector<Tensor> together(const Tensor& x, const std::vector<Product>& wanted) {
  std::vector<Tensor> results;
  if (takes_together(x, wanted)) {
    std::vector<Tensor> weights;
    for (const auto& product : wanted) weights.push_back(product.weight);
    results = girih::fused::linears(x, weights);
  } else {
    for (const auto& product : wanted) {
      const bool added = product.gate == "none";  // `gated` adds the bias of a gate in fp32
      results.push_back(at::linear(x, product.weight, ops::none_if_absent(added ? product.bias : Tensor())));
    }
  }
  for (size_t i = 0; i < wanted.size(); ++i) results[i] = gated(results[i], wanted[i]);
  return results;
}

Tensor silu_product_linear(const Tensor& gate, const Tensor& up, const Product& product) {
  if (at::GradMode::is_enabled() && is_matrix_alone(product) && takes_product(gate, up) &&
      takes(product.weight))
    return girih::fused::silu_product_linear(gate, up, product.weight);
  return together(silu_product(gate, up), {product})[0];
}

}  // namespace girih::nn
