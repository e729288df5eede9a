// The autograd functions of residual_norm and silu_norm.
#include <torch/library.h>

#include "call.h"

namespace girih::fused {
namespace {

using NormSignature = std::tuple<Tensor, Tensor>(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                                 double, at::ScalarType);
using NormBackwardSignature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&,
                                                                 const Tensor&, const OptionalTensor&, double,
                                                                 bool, bool);
using SiluNormBackwardSignature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                             double, bool);

// ds and dweight of an RMS norm, by PyTorch.
std::pair<Tensor, Tensor> norm_gradients(const Tensor& dy, const Tensor& s, const Tensor& weight,
                                         double eps) {
  const auto wide = s.to(at::kFloat), dy_fp32 = dy.to(at::kFloat);
  const auto u = weight.defined() ? dy_fp32 * weight.to(at::kFloat) : dy_fp32 / std::sqrt(double(s.size(-1)));
  const auto r = (wide.square().mean(-1, /*keepdim=*/true) + eps).rsqrt(), n = r * wide;
  const auto ds = r * (u - n * (u * n).mean(-1, /*keepdim=*/true));
  return {ds.to(s.scalar_type()),
          weight.defined() ? (dy_fp32 * n).sum_to_size(weight.sizes()).to(weight.scalar_type()) : Tensor()};
}

struct ResidualNorm : Function<ResidualNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& branch,
                               const OptionalTensor& weight, double eps, at::ScalarType rows) {
    static const auto op = find_typed_operator<NormSignature>("girih::residual_norm");
    const auto [s, y] = call_below_autograd(op, x, branch, weight, eps, rows);
    ctx->save_for_backward({s, weight.value_or(Tensor())});
    ctx->saved_data = {{"eps", eps}, {"rows", rows}, {"of_branch", is_defined(branch)}};
    ctx->set_materialize_grads(false);
    return {s, y};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_typed_operator<NormBackwardSignature>("girih::residual_norm_backward");
    const auto saved = ctx->get_saved_variables();
    const auto &ds_next = grads[0], &dy = grads[1], &s = saved[0], &weight = saved[1];
    const double eps = ctx->saved_data["eps"].toDouble();
    const auto rows = ctx->saved_data["rows"].toScalarType();
    const bool has_branch = ctx->saved_data["of_branch"].toBool();
    const bool needs_dweight = weight.defined() && ctx->needs_input_grad(has_branch ? 2 : 1);
    const bool has_cast_branch = has_branch && s.scalar_type() != rows;
    Tensor ds = ds_next, dbranch, dweight;
    if (dy.defined() && is_double_backward()) {
      std::tie(ds, dweight) = norm_gradients(dy, s, weight, eps);
      if (ds_next.defined()) ds = ds + ds_next;
    } else if (dy.defined()) {
      std::tie(ds, dbranch, dweight) =
          op.call(dy, to_optional(ds_next), s, to_optional(weight), eps, has_cast_branch, needs_dweight);
    }
    const bool has_dbranch = has_cast_branch && dy.defined() && !is_double_backward();
    if (has_branch && ds.defined() && !has_dbranch) dbranch = ds.to(rows);
    return {ds, has_branch ? dbranch : Tensor(), needs_dweight ? dweight : Tensor(), {}, {}};
  }
};

struct SiluNorm : Function<SiluNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, double eps) {
    static const auto op =
        find_typed_operator<Tensor(const Tensor&, const Tensor&, double)>("girih::silu_norm");
    ctx->save_for_backward({x, weight});
    ctx->saved_data["eps"] = eps;
    return call_below_autograd(op, x, weight, eps);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_typed_operator<SiluNormBackwardSignature>("girih::silu_norm_backward");
    const auto saved = ctx->get_saved_variables();
    const auto &dy = grads[0], &x = saved[0], &weight = saved[1];
    const double eps = ctx->saved_data["eps"].toDouble();
    const bool needs_dweight = ctx->needs_input_grad(1);
    Tensor dx, dweight;
    if (is_double_backward()) {
      const auto wide = x.to(at::kFloat), sigmoid = wide.sigmoid(), silu = wide * sigmoid;
      std::tie(dx, dweight) = norm_gradients(dy, silu, weight, eps);
      dx = (dx * (sigmoid + silu * (1 - sigmoid))).to(x.scalar_type());
    } else {
      std::tie(dx, dweight) = op.call(dy, x, weight, eps, needs_dweight);
    }
    return {dx, needs_dweight ? dweight : Tensor(), {}};
  }
};

}  // namespace

std::tuple<Tensor, Tensor> residual_norm(const Tensor& x, const OptionalTensor& branch,
                                         const OptionalTensor& weight, double eps, at::ScalarType rows) {
  auto outputs = ResidualNorm::apply(x, branch, weight, eps, rows);
  return {std::move(outputs[0]), std::move(outputs[1])};
}

Tensor silu_norm(const Tensor& x, const Tensor& weight, double eps) {
  return SiluNorm::apply(x, weight, eps);
}

TORCH_LIBRARY_IMPL(girih, Autograd, m) {
  m.impl("residual_norm", &residual_norm);
  m.impl("silu_norm", &silu_norm);
}

}  // namespace girih::fused
