// MemoryAsGate: (1 - m) base + m mixed, and MixAttention, two mixers combined by it.
#include <algorithm>

#include "layer.h"
#include "mixers.h"

namespace girih::nn {

void check_mixture(const MixAttentionOptions& options) {
  const double m = options.weight;
  TORCH_CHECK_VALUE(is_weight(m) && !(options.learned && (m == 0 || m == 1)), "weight is ", m,
                    "; expected a number from 0 to 1, and between them if it is learned");
}

MemoryAsGateImpl::MemoryAsGateImpl(MixAttentionOptions settings) : options(settings) {
  check_mixture(options);
  if (options.learned) {
    logit = register_parameter("logit", at::empty({1}));
    no_weight_decay({logit});
    keep_fp32({logit});
  } else {
    weight = register_buffer("weight", at::empty({}));
    keep_fp32({weight});
  }
  reset_parameters();
}

void MemoryAsGateImpl::reset_parameters() {
  const double m = options.weight;
  if (options.learned) {
    torch::nn::init::constant_(logit, std::log(m / (1 - m)));
  } else {
    torch::nn::init::constant_(weight, m);
  }
}

void MemoryAsGateImpl::set_weight(double m) {
  TORCH_CHECK_VALUE(!options.learned, "weight is learned by this mixture; a schedule cannot set it");
  TORCH_CHECK_VALUE(is_weight(m), "weight is ", m, "; expected a number from 0 to 1");
  weight.fill_(m);
}

Tensor MemoryAsGateImpl::current_weight() const { return options.learned ? logit.sigmoid() : weight; }

Tensor MemoryAsGateImpl::mixture(const Tensor& base, const Tensor& mixed) const {
  const auto m = current_weight();
  if (!options.cross) {
    const auto type = at::promote_types(base.scalar_type(), mixed.scalar_type());
    return at::lerp(base.to(type), mixed.to(type), m.to(type));
  }
  const auto mixed_weight = m.to(base.scalar_type());
  const auto b = at::rsub(mixed_weight, 1) * base, y = mixed_weight * mixed;
  return b + y + b * y;
}

MixAttentionImpl::MixAttentionImpl(AnyLayer first, AnyLayer second, MixAttentionOptions settings)
    : MemoryAsGateImpl(settings),
      base(register_module("base", std::move(first))),
      mixer(register_module("mixer", std::move(second))) {}

bool MixAttentionImpl::stepped(State& state, std::vector<int64_t>& kind) const {
  check_state(state, 0, 2);
  return base->stepped(state.parts[0], kind) && mixer->stepped(state.parts[1], kind);
}

void MixAttentionImpl::expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens) const {
  check_state(state, 0, 2);
  if (state.empty()) return;
  base->expect_state(state.parts[0], x, cu_seqlens);
  mixer->expect_state(state.parts[1], x, cu_seqlens);
  if (!has_tensors(state)) return;
  check_present("base", *base, state.parts[0]);
  check_present("mixer", *mixer, state.parts[1]);
}

Output MixAttentionImpl::run(const Tensor& x, const Call& call) {
  expect_state(call.state, x, call.cu_seqlens);  // before base writes its state
  const auto [b, base_state] = run_part(*base, x, call, 0);
  const auto [y, mixer_state] = run_part(*mixer, x, call, 1);
  return {mixture(b, y), {{}, {base_state, mixer_state}}};
}

namespace {

void check_mag_mixers(const Config& c) {
  for (const auto& [field, name] : {std::pair("mag_base", c.mag_base), std::pair("mag_mixer", c.mag_mixer)}) {
    auto names = mixer_names();
    std::erase(names, "mag");
    TORCH_CHECK_VALUE(std::ranges::find(names, name) != names.end(), field, " is '", name.substr(0, 60),
                      "'; expected one of ", c10::Join(", ", names));
  }
  TORCH_CHECK_VALUE(!c.mag_learned || (c.mag_weight > 0 && c.mag_weight < 1), "mag_weight is ", c.mag_weight,
                    "; expected a number between 0 and 1 when it is learned");
}

const MixerRegistration mag({
    "mag",
    [](const Config& c) -> AnyLayer {
      return std::make_shared<MixAttentionImpl>(
          make_mixer(c.mag_base, c), make_mixer(c.mag_mixer, c),
          MixAttentionOptions{.weight = c.mag_weight, .learned = c.mag_learned, .cross = c.mag_cross});
    },
    {"mag_base", "mag_mixer", "mag_weight", "mag_learned", "mag_cross"},
    check_mag_mixers,
});

}  // namespace

}  // namespace girih::nn
