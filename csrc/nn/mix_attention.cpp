#include "layer.h"

namespace girih::nn {

MixAttentionImpl::MixAttentionImpl(AnyLayer first, AnyLayer second, MixAttentionOptions given)
    : options(given),
      base(register_module("base", std::move(first))),
      mixer(register_module("mixer", std::move(second))) {
  const double m = options.weight;
  TORCH_CHECK_VALUE(m >= 0 && m <= 1 && !(options.learned && (m == 0 || m == 1)), "weight is ", m,
                    "; expected a number from 0 to 1, and between them if it is learned");
  if (options.learned) {
    logit = register_parameter("logit", at::empty({}));
    no_weight_decay({logit});
  } else {
    weight = register_buffer("weight", at::empty({}));
  }
  reset_parameters();
}

void MixAttentionImpl::reset_parameters() {
  const double m = options.weight;
  if (options.learned) {
    torch::nn::init::constant_(logit, std::log(m / (1 - m)));
  } else {
    torch::nn::init::constant_(weight, m);
  }
}

void MixAttentionImpl::set_weight(double m) {
  TORCH_CHECK_VALUE(!options.learned, "weight: this mixture learns it, a schedule cannot move it");
  weight.fill_(m);
}

Output MixAttentionImpl::run(const Tensor& x, const Call& call) {
  auto [b, base_state] = run_part(*base, x, call, 0);
  auto [y, mixer_state] = run_part(*mixer, x, call, 1);
  const auto m = (options.learned ? logit.sigmoid() : weight).to(b.scalar_type());
  b = (1 - m) * b;
  y = m * y;
  return {options.cross ? b + y + b * y : b + y, {{}, {base_state, mixer_state}}};
}

}  // namespace girih::nn
