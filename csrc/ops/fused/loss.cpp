// Cross entropy of a linear layer: forward computes the gradients of x and of the weight too.
#include <torch/library.h>

#include "call.h"

namespace girih::fused {
namespace {

constexpr int64_t kRows = 64;  // rows of a part are a multiple of this; products along other sizes are slow

// The sum over rows of the cross entropy, and its gradient with respect to the logits, which may be
// overwritten.
std::pair<Tensor, Tensor> cross_entropy(Tensor logits, const Tensor& labels, int64_t ignored,
                                        at::ScalarType wide) {
#ifdef GIRIH_WITH_CUDA
  if (logits.is_cuda() && logits.scalar_type() != at::kDouble && logits.size(1) % kPack == 0) {
    static const auto op =
        find_typed_operator<Tensor(Tensor&, const Tensor&, int64_t)>("girih::cross_entropy_");
    const auto loss = op.call(logits, labels.to(at::kLong).contiguous(), ignored).sum();
    return {loss, logits};
  }
#endif
  const auto is_counted = labels.ne(ignored);
  const auto at = labels.to(at::kLong).masked_fill(is_counted.logical_not(), 0).unsqueeze(1);
  auto log_p = logits.to(wide).log_softmax(-1);
  const auto loss = -log_p.gather(1, at).squeeze(1).masked_fill(is_counted.logical_not(), 0).sum();
  const auto d = log_p.exp_().scatter_add_(1, at, at::full_like(at, -1, log_p.options()));
  return {loss, d.mul_(is_counted.unsqueeze(1)).to(logits.scalar_type())};
}

// sums += a b in fp32 or fp64. On a GPU the product is not rounded; in fp16, whose range it may exceed, it is
// computed in fp32.
void add_product(Tensor& sums, const Tensor& a, const Tensor& b) {
  const auto wide = sums.scalar_type();
  // A dispatch mode, such as the FLOP counter, may not support the arguments of addmm_out with a dtype.
  const bool has_dispatch_mode = c10::impl::TorchDispatchModeTLS::any_modes_set();
  if (a.is_cuda() && a.scalar_type() != wide && !has_dispatch_mode) {
    at::addmm_out(sums, sums, a, b, wide);
  } else {
    sums.add_(a.scalar_type() == at::kHalf ? a.to(wide).mm(b.to(wide)) : a.mm(b).to(wide));
  }
}

struct LinearCrossEntropy : Function<LinearCrossEntropy> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Tensor& labels,
                        int64_t ignored, int64_t logits) {
    TORCH_CHECK(weight.dim() == 2 && weight.size(0) > 0, "girih: linear_cross_entropy: weight has shape ",
                weight.sizes(), "; expected [classes, in] with at least one class");
    const auto rows = std::max<int64_t>(1, logits / weight.size(0) / kRows) * kRows;
    const bool needs_dx = x.requires_grad(), needs_dweight = weight.requires_grad();
    const auto wide = at::promote_types(x.scalar_type(), at::kFloat);
    auto loss = at::zeros({}, x.options().dtype(wide));
    auto dx = needs_dx ? at::empty_like(x) : Tensor();
    auto dweight = needs_dweight ? at::zeros(weight.sizes(), weight.options().dtype(wide)) : Tensor();
    Tensor weight_copy;  // the weight in 16 bits, rounded once for all parts
    for (int64_t i = 0; i < x.size(0); i += rows) {
      const auto part = x.slice(0, i, i + rows);
      const auto [sum, d] =
          cross_entropy(at::linear(part, weight), labels.slice(0, i, i + rows), ignored, wide);
      loss = loss + sum;
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      if (needs_dx) {
        if (!weight_copy.defined()) weight_copy = weight.to(d.scalar_type());
        dx.slice(0, i, i + rows).copy_(d.mm(weight_copy));
      }
      if (needs_dweight) add_product(dweight, d.t(), part.to(d.scalar_type()));
    }
    ctx->save_for_backward({dx, dweight, loss});
    ctx->saved_data["x"] = x.scalar_type();
    ctx->saved_data["weight"] = weight.scalar_type();
    return loss;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    TORCH_CHECK(!is_double_backward(), "girih: linear_cross_entropy: there is no second derivative; ",
                "call backward without create_graph");
    const auto saved = ctx->get_saved_variables();
    // Multiplies in fp32 and rounds once: a sum over many tokens may exceed the range of 16 bits, and its
    // mean does not. A label out of range makes the loss nan, and then the gradients are nan too.
    const auto dloss = grads[0].where(saved[2].isnan().logical_not(), NAN);
    const auto scale = [&](const Tensor& d, const char* of) {
      return d.defined() ? (d.to(dloss.scalar_type()) * dloss).to(ctx->saved_data[of].toScalarType()) : d;
    };
    return {scale(saved[0], "x"), scale(saved[1], "weight"), {}, {}, {}};
  }
};

}  // namespace

Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& labels, int64_t ignored,
                            int64_t logits) {
  if (at::GradMode::is_enabled()) return LinearCrossEntropy::apply(x, weight, labels, ignored, logits);
  return LinearCrossEntropy::apply(x.detach(), weight.detach(), labels, ignored, logits);
}

TORCH_LIBRARY_FRAGMENT(girih, m) {
  m.def("linear_cross_entropy(Tensor x, Tensor weight, Tensor labels, int ignored, int logits) -> Tensor",
        &linear_cross_entropy);
}

}  // namespace girih::fused
