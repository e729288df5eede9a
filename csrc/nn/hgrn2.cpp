// HGRN2: gla with g = log f and k = 1 - f.
#include "mixers.h"
#include "step.h"

namespace girih::nn {

HGRN2Impl::HGRN2Impl(int64_t hidden_size, int64_t num_heads, HGRN2Options settings)
    : options(completed("hgrn2", hidden_size, num_heads, settings)),
      heads_(3, num_heads),
      key_dim_(head_widths(options).key),
      value_dim_(head_widths(options).value) {
  set_lower_bound(options.lower_bound);
  const auto width = num_heads * value_dim_;
  qfv_proj = register_module("qfv_proj", linear(hidden_size, 2 * num_heads * key_dim_ + width));
  norm = register_module("norm", RMSNorm(width, options.norm_eps));
  o_proj = register_module("o_proj", linear(width, hidden_size));
}

void HGRN2Impl::set_lower_bound(double lower_bound) {
  TORCH_CHECK_VALUE(lower_bound >= 0 && lower_bound < 1, "lower_bound is ", lower_bound,
                    "; expected at least 0 and less than 1");
  options.lower_bound = lower_bound;
}

void HGRN2Impl::set_depth(int64_t layer, int64_t num_layers) {
  set_lower_bound(double(layer) / double(num_layers));
}

std::vector<Product> HGRN2Impl::products() const { return {make_product(qfv_proj)}; }

Product HGRN2Impl::output() const { return make_product(o_proj); }

void HGRN2Impl::expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens) const {
  check_recurrent_state(state, x, cu_seqlens, {}, {{"s", {heads_[0], key_dim_, value_dim_}}});
}

Output HGRN2Impl::core(const std::vector<Tensor>& projected, const Call& call) {
  const auto [q, f, v] = split_heads(projected[0], heads_, key_dim_, value_dim_);
  const auto logits = promote_to_fp32(f);
  const auto bound = options.lower_bound;
  // g = log f. sigmoid(logits) may underflow: without a bound use log_sigmoid.
  const auto g = bound > 0 ? at::log(bound + (1 - bound) * logits.sigmoid()) : at::log_sigmoid(logits);
  const auto k = ((1 - bound) * at::sigmoid(-logits)).to(v.scalar_type());  // 1 - f
  const ops::GLAOptions gla{
      .scale = 1.0, .state = call.part(0).as<ops::GLAState>(), .cu_seqlens = call.cu_seqlens};
  const auto query = at::silu(q);
  auto [o, memory] = call.is_step(projected[0]) ? std::pair(ops::gla_step(query, k, v, g, gla), gla.state)
                                                : ops::gla(query, k, v, g, gla);
  return {o.flatten(-2), {{}, {State::of(memory)}}};
}

namespace {

const MixerRegistration hgrn2({
    "hgrn2",
    [](const Config& c) -> AnyLayer {
      return std::make_shared<HGRN2Impl>(c.hidden_size, c.num_heads, options_from_config<HGRN2Options>(c));
    },
    {"head_dim", "expand_k", "expand_v", "norm_eps"},
    [](const Config& c) {
      if (!c.reads("num_kv_heads")) check_ungrouped(c, "hgrn2");  // else a field of other layers
      head_widths(c, 1, 1);
    },
});

}  // namespace

}  // namespace girih::nn
