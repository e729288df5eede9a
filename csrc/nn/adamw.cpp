// AdamW by torch._fused_adamw_: one call for all parameters of a device and dtype.
#include <ATen/ops/_fused_adamw.h>
#include <girih/nn.h>

#include <map>

namespace girih::nn {
namespace {

using torch::optim::AdamWParamState;

// Arguments of _fused_adamw_ for the parameters of one device and dtype.
struct TensorLists {
  std::vector<Tensor> weights, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps;
};

// Whether element i of x's memory corresponds to element i of y's memory, as the fused kernels assume.
bool has_same_layout(const Tensor& x, const Tensor& y) {
  return x.defined() && x.layout() == at::kStrided && x.scalar_type() == y.scalar_type() &&
         x.device() == y.device() && x.sizes() == y.sizes() && x.strides() == y.strides();
}
bool is_fusable(const Tensor& weight, const AdamWParamState* state, bool amsgrad) {
  return (weight.is_cpu() || weight.is_cuda()) && weight.is_floating_point() &&
         weight.is_non_overlapping_and_dense() && has_same_layout(weight.grad(), weight) &&
         (state == nullptr ||
          (has_same_layout(state->exp_avg(), weight) && has_same_layout(state->exp_avg_sq(), weight) &&
           (!amsgrad || has_same_layout(state->max_exp_avg_sq(), weight))));
}

}  // namespace

Tensor AdamW::step(LossClosure closure) {
  const at::NoGradGuard no_grad;
  Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  const auto find_state = [&](const Tensor& weight) {
    const auto found = state_.find(weight.unsafeGetTensorImpl());
    return found == state_.end() ? nullptr : static_cast<AdamWParamState*>(found->second.get());
  };
  const auto group_options = [](const torch::optim::OptimizerParamGroup& group) -> auto& {
    return static_cast<const torch::optim::AdamWOptions&>(group.options());
  };
  // If any parameter is unsupported, LibTorch's step updates all: check before the first write.
  for (const auto& group : param_groups()) {
    for (const auto& weight : group.params()) {
      if (weight.grad().defined() &&
          !is_fusable(weight, find_state(weight), group_options(group).amsgrad())) {
        torch::optim::AdamW::step();
        return loss;
      }
    }
  }
  for (const auto& group : param_groups()) {
    const auto& options = group_options(group);
    std::map<std::pair<std::string, at::ScalarType>, TensorLists> all;
    std::map<std::pair<std::string, int64_t>, Tensor> counts;  // step counts by device and value
    std::vector<AdamWParamState*> states;
    for (const auto& weight : group.params()) {
      if (!weight.grad().defined()) continue;
      auto* state = find_state(weight);
      if (state == nullptr) {
        auto new_state = std::make_unique<AdamWParamState>();
        new_state->step(0).exp_avg(at::zeros_like(weight)).exp_avg_sq(at::zeros_like(weight));
        if (options.amsgrad()) new_state->max_exp_avg_sq(at::zeros_like(weight));
        state = new_state.get();
        state_[weight.unsafeGetTensorImpl()] = std::move(new_state);
      }
      states.push_back(state);
      const auto device = weight.device().str();
      auto& count = counts[{device, state->step()}];
      if (!count.defined())
        count = at::full({}, static_cast<double>(state->step() + 1), weight.options().dtype(at::kFloat));
      auto& tensors = all[{device, weight.scalar_type()}];
      tensors.weights.push_back(weight), tensors.gradients.push_back(weight.grad());
      tensors.exp_avgs.push_back(state->exp_avg()), tensors.exp_avg_sqs.push_back(state->exp_avg_sq());
      if (options.amsgrad()) tensors.max_exp_avg_sqs.push_back(state->max_exp_avg_sq());
      tensors.steps.push_back(count);
    }
    const auto [beta1, beta2] = options.betas();
    for (const auto& [kind, tensors] : all) {
      at::_fused_adamw_(tensors.weights, tensors.gradients, tensors.exp_avgs, tensors.exp_avg_sqs,
                        tensors.max_exp_avg_sqs, tensors.steps, options.lr(), beta1, beta2,
                        options.weight_decay(), options.eps(), options.amsgrad(), /*maximize=*/false);
      // The operator does not bump versions; autograd needs them to detect a backward with overwritten
      // weights.
      for (const auto* updated :
           {&tensors.weights, &tensors.exp_avgs, &tensors.exp_avg_sqs, &tensors.max_exp_avg_sqs})
        for (const auto& x : *updated) x.unsafeGetTensorImpl()->bump_version();
    }
    for (auto* state : states) state->step(state->step() + 1);
  }
  return loss;
}

}  // namespace girih::nn
