#include <ATen/ops/_fused_adamw.h>
#include <girih/nn.h>

#include <map>

namespace girih::nn {
namespace {

using torch::optim::AdamWParamState;

// What one call takes: parameters of a device and dtype.
struct Lists {
  std::vector<Tensor> weights, gradients, means, squares, largest, steps;
};

}  // namespace

Tensor AdamW::step(LossClosure closure) {
  const at::NoGradGuard no_grad;
  Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  for (const auto& group : param_groups()) {
    const auto& options = static_cast<const torch::optim::AdamWOptions&>(group.options());
    std::map<std::pair<std::string, at::ScalarType>, Lists> all;
    std::map<std::pair<std::string, int64_t>, Tensor> counts;  // of steps, on every device
    for (const auto& weight : group.params()) {
      const auto& gradient = weight.grad();
      if (!gradient.defined()) continue;
      TORCH_CHECK(!gradient.is_sparse(), "girih: AdamW: a gradient is sparse; expected dense ones");
      auto& kept = state_[weight.unsafeGetTensorImpl()];
      if (!kept) {
        auto made = std::make_unique<AdamWParamState>();
        made->step(0).exp_avg(at::zeros_like(weight)).exp_avg_sq(at::zeros_like(weight));
        if (options.amsgrad()) made->max_exp_avg_sq(at::zeros_like(weight));
        kept = std::move(made);
      }
      auto& state = static_cast<AdamWParamState&>(*kept);
      state.step(state.step() + 1);
      const auto device = weight.device().str();
      auto& count = counts[{device, state.step()}];
      if (!count.defined())
        count = at::full({}, static_cast<double>(state.step()), weight.options().dtype(at::kFloat));
      auto& lists = all[{device, weight.scalar_type()}];
      lists.weights.push_back(weight), lists.gradients.push_back(gradient.to(weight.scalar_type()));
      lists.means.push_back(state.exp_avg()), lists.squares.push_back(state.exp_avg_sq());
      if (options.amsgrad()) lists.largest.push_back(state.max_exp_avg_sq());
      lists.steps.push_back(count);
    }
    const auto [of_mean, of_square] = options.betas();
    for (const auto& [kind, lists] : all) {
      at::_fused_adamw_(lists.weights, lists.gradients, lists.means, lists.squares, lists.largest,
                        lists.steps, options.lr(), of_mean, of_square, options.weight_decay(), options.eps(),
                        options.amsgrad(), /*maximize=*/false);
    }
  }
  return loss;
}

}  // namespace girih::nn
