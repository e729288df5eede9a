// The autograd functions of residual_norm and silu_norm.
#include <torch/library.h>

#include "call.h"

namespace girih::fused {
namespace {

using Norm = std::tuple<Tensor, Tensor>(const Tensor&, const OptionalTensor&, const OptionalTensor&, double,
                                        at::ScalarType);
using NormBackward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&, const Tensor&,
                                                        const OptionalTensor&, double, bool, bool);
using SiluNormBackward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, double,
                                                    bool);

// ds and dweight of an RMS norm, by PyTorch.
std::pair<Tensor, Tensor> gradients(const Tensor& dy, const Tensor& s, const Tensor& weight, double eps) {
  const auto wide = s.to(at::kFloat), of_y = dy.to(at::kFloat);
  const auto u = weight.defined() ? of_y * weight.to(at::kFloat) : of_y / std::sqrt(double(s.size(-1)));
  const auto r = (wide.square().mean(-1, /*keepdim=*/true) + eps).rsqrt(), n = r * wide;
  const auto ds = r * (u - n * (u * n).mean(-1, /*keepdim=*/true));
  return {ds.to(s.scalar_type()),
          weight.defined() ? (of_y * n).sum_to_size(weight.sizes()).to(weight.scalar_type()) : Tensor()};
}

struct ResidualNorm : Function<ResidualNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& branch,
                               const OptionalTensor& weight, double eps, at::ScalarType rows) {
    static const auto op = find<Norm>("girih::residual_norm");
    const auto [s, y] = run(op, x, branch, weight, eps, rows);
    ctx->save_for_backward({s, weight.value_or(Tensor())});
    ctx->saved_data = {{"eps", eps}, {"rows", rows}, {"of_branch", given(branch)}};
    ctx->set_materialize_grads(false);
    return {s, y};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find<NormBackward>("girih::residual_norm_backward");
    const auto saved = ctx->get_saved_variables();
    const auto &after = grads[0], &dy = grads[1], &s = saved[0], &weight = saved[1];
    const double eps = ctx->saved_data["eps"].toDouble();
    const auto rows = ctx->saved_data["rows"].toScalarType();
    const bool of_branch = ctx->saved_data["of_branch"].toBool();
    const bool of_weight = weight.defined() && ctx->needs_input_grad(of_branch ? 2 : 1);
    const bool rounded = of_branch && s.scalar_type() != rows;
    Tensor ds = after, dbranch, dweight;
    if (dy.defined() && once_more()) {
      std::tie(ds, dweight) = gradients(dy, s, weight, eps);
      if (after.defined()) ds = ds + after;
    } else if (dy.defined()) {
      std::tie(ds, dbranch, dweight) =
          op.call(dy, none_if_absent(after), s, none_if_absent(weight), eps, rounded, of_weight);
    }
    const bool is_there = rounded && dy.defined() && !once_more();
    if (of_branch && ds.defined() && !is_there) dbranch = ds.to(rows);
    return {ds, of_branch ? dbranch : Tensor(), of_weight ? dweight : Tensor(), {}, {}};
  }
};

struct SiluNorm : Function<SiluNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, double eps) {
    static const auto op = find<Tensor(const Tensor&, const Tensor&, double)>("girih::silu_norm");
    ctx->save_for_backward({x, weight});
    ctx->saved_data["eps"] = eps;
    return run(op, x, weight, eps);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find<SiluNormBackward>("girih::silu_norm_backward");
    const auto saved = ctx->get_saved_variables();
    const auto &dy = grads[0], &x = saved[0], &weight = saved[1];
    const double eps = ctx->saved_data["eps"].toDouble();
    const bool of_weight = ctx->needs_input_grad(1);
    Tensor dx, dweight;
    if (once_more()) {
      const auto wide = x.to(at::kFloat), sigmoid = wide.sigmoid(), silu = wide * sigmoid;
      std::tie(dx, dweight) = gradients(dy, silu, weight, eps);
      dx = (dx * (sigmoid + silu * (1 - sigmoid))).to(x.scalar_type());
    } else {
      std::tie(dx, dweight) = op.call(dy, x, weight, eps, of_weight);
    }
    return {dx, of_weight ? dweight : Tensor(), {}};
  }
};

}  // namespace

std::tuple<Tensor, Tensor> residual_norm(const Tensor& x, const OptionalTensor& branch,
                                         const OptionalTensor& weight, double eps, at::ScalarType rows) {
  auto made = ResidualNorm::apply(x, branch, weight, eps, rows);
  return {std::move(made[0]), std::move(made[1])};
}

Tensor silu_norm(const Tensor& x, const Tensor& weight, double eps) {
  return SiluNorm::apply(x, weight, eps);
}

TORCH_LIBRARY_IMPL(girih, Autograd, m) {
  m.impl("residual_norm", &residual_norm);
  m.impl("silu_norm", &silu_norm);
}

}  // namespace girih::fused
