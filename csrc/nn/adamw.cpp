// AdamW by torch._fused_adamw_: one call for all parameters of a device and dtype.
#include <ATen/ops/_fused_adamw.h>
#include <girih/nn.h>

#include <map>

namespace girih::nn {
namespace {

using torch::optim::AdamWParamState;

// Arguments of _fused_adamw_ for the parameters of one device and dtype.
struct Lists {
  std::vector<Tensor> weights, gradients, means, squares, largest, steps;
};

// Whether element i of x's memory corresponds to element i of y's memory, as the fused kernels assume.
bool lie_alike(const Tensor& x, const Tensor& y) {
  return x.defined() && x.layout() == at::kStrided && x.scalar_type() == y.scalar_type() &&
         x.device() == y.device() && x.sizes() == y.sizes() && x.strides() == y.strides();
}
bool fits(const Tensor& weight, const AdamWParamState* state, bool amsgrad) {
  return (weight.is_cpu() || weight.is_cuda()) && weight.is_floating_point() &&
         weight.is_non_overlapping_and_dense() && lie_alike(weight.grad(), weight) &&
         (state == nullptr ||
          (lie_alike(state->exp_avg(), weight) && lie_alike(state->exp_avg_sq(), weight) &&
           (!amsgrad || lie_alike(state->max_exp_avg_sq(), weight))));
}

}  // namespace

Tensor AdamW::step(LossClosure closure) {
  const at::NoGradGuard no_grad;
  Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  const auto kept = [&](const Tensor& weight) {
    const auto found = state_.find(weight.unsafeGetTensorImpl());
    return found == state_.end() ? nullptr : static_cast<AdamWParamState*>(found->second.get());
  };
  const auto options_of = [](const torch::optim::OptimizerParamGroup& group) -> auto& {
    return static_cast<const torch::optim::AdamWOptions&>(group.options());
  };
  // If any parameter is unsupported, LibTorch's step updates all: check before the first write.
  for (const auto& group : param_groups()) {
    for (const auto& weight : group.params()) {
      if (weight.grad().defined() && !fits(weight, kept(weight), options_of(group).amsgrad())) {
        torch::optim::AdamW::step();
        return loss;
      }
    }
  }
  for (const auto& group : param_groups()) {
    const auto& options = options_of(group);
    std::map<std::pair<std::string, at::ScalarType>, Lists> all;
    std::map<std::pair<std::string, int64_t>, Tensor> counts;  // step counts by device and value
    std::vector<AdamWParamState*> states;
    for (const auto& weight : group.params()) {
      if (!weight.grad().defined()) continue;
      auto* state = kept(weight);
      if (state == nullptr) {
        auto made = std::make_unique<AdamWParamState>();
        made->step(0).exp_avg(at::zeros_like(weight)).exp_avg_sq(at::zeros_like(weight));
        if (options.amsgrad()) made->max_exp_avg_sq(at::zeros_like(weight));
        state = made.get();
        state_[weight.unsafeGetTensorImpl()] = std::move(made);
      }
      states.push_back(state);
      const auto device = weight.device().str();
      auto& count = counts[{device, state->step()}];
      if (!count.defined())
        count = at::full({}, static_cast<double>(state->step() + 1), weight.options().dtype(at::kFloat));
      auto& lists = all[{device, weight.scalar_type()}];
      lists.weights.push_back(weight), lists.gradients.push_back(weight.grad());
      lists.means.push_back(state->exp_avg()), lists.squares.push_back(state->exp_avg_sq());
      if (options.amsgrad()) lists.largest.push_back(state->max_exp_avg_sq());
      lists.steps.push_back(count);
    }
    const auto [of_mean, of_square] = options.betas();
    for (const auto& [kind, lists] : all) {
      at::_fused_adamw_(lists.weights, lists.gradients, lists.means, lists.squares, lists.largest,
                        lists.steps, options.lr(), of_mean, of_square, options.weight_decay(), options.eps(),
                        options.amsgrad(), /*maximize=*/false);
      // The operator does not bump versions; autograd needs them to detect a backward with overwritten
      // weights.
      for (const auto* written : {&lists.weights, &lists.means, &lists.squares, &lists.largest})
        for (const auto& x : *written) x.unsafeGetTensorImpl()->bump_version();
    }
    for (auto* state : states) state->step(state->step() + 1);
  }
  return loss;
}

}  // namespace girih::nn
