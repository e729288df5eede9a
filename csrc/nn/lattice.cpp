// Lattice: slots on the unit sphere, updated along the tangent space.
#include "fused.h"
#include "mixers.h"
#include "step.h"

namespace girih::nn {

LatticeImpl::LatticeImpl(int64_t hidden_size, int64_t num_heads, LatticeOptions settings)
    : options(completed("lattice", hidden_size, num_heads, std::move(settings))), num_heads_(num_heads) {
  const auto head_dim = *options.head_dim, width = num_heads * head_dim;
  const auto qk_width = num_heads * options.num_slots;
  const ShortConvOptions conv{.kernel_size = options.conv_size};
  qk_proj = register_module("qk_proj", linear(hidden_size, qk_width));
  q_conv = register_module("q_conv", ShortConv(qk_width, conv));
  k_conv = register_module("k_conv", ShortConv(qk_width, conv));
  v_proj = register_module("v_proj", linear(hidden_size, width));
  gamma_proj = register_module("gamma_proj", linear(hidden_size, num_heads, true));
  if (options.gated) decay = register_module("decay", DecayGate(hidden_size, num_heads, 0.01));
  memory = register_parameter("memory", at::empty({num_heads, head_dim, options.num_slots}));
  g_proj = register_module("g_proj", linear(hidden_size, width));
  if (options.post_norm) norm = register_module("norm", GatedRMSNorm(head_dim, options.norm_eps, "gelu"));
  o_proj = register_module("o_proj", linear(width, hidden_size));
  no_weight_decay({memory, gamma_proj->bias});
  keep_fp32({memory, gamma_proj->bias});
  reset_parameters();
}

void LatticeImpl::reset_parameters() {
  at::NoGradGuard no_grad;
  for (auto& slots : memory.unbind(0)) torch::nn::init::orthogonal_(slots);  // [D, M] of one head
  torch::nn::init::constant_(gamma_proj->bias, initial_step_size_bias(options.chunk));
}

std::vector<Product> LatticeImpl::products() const {
  std::vector<Product> all = {make_product(qk_proj), make_product(v_proj), make_product(g_proj),
                              make_product(gamma_proj, "sigmoid")};
  if (decay) all.push_back(decay->product());
  return all;
}

Product LatticeImpl::output() const { return make_product(o_proj); }

void LatticeImpl::expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens) const {
  const std::vector<int64_t> sizes = {num_heads_, *options.head_dim, options.num_slots};
  check_recurrent_state(state, x, cu_seqlens, {{"q_conv", q_conv}, {"k_conv", k_conv}},
                        {{"first", sizes},
                         {"step", sizes},
                         {.name = "decay", .sizes = {num_heads_}, .is_present = options.gated},
                         {.name = "position", .is_position = true}});
}

Output LatticeImpl::core(const std::vector<Tensor>& projected, const Call& call) {
  const auto &qk = projected[0], &gamma = projected[3];
  auto [q, q_state] = run_part(*q_conv, qk, call, 0);
  auto [k, k_state] = run_part(*k_conv, qk, call, 1);
  q = to_heads(q, num_heads_);
  k = to_heads(k, num_heads_);
  auto v = to_heads(projected[1], num_heads_);
  if (options.objective == "encode") v = unit_rows(v);
  const auto g = decay ? projected[4] : Tensor();
  auto past = call.part(2).as<ops::LatticeState>();
  if (call.state.empty())
    past.first = options.normalize ? unit(promote_to_fp32(memory), -2) : promote_to_fp32(memory);
  const ops::LatticeOptions op_options{.chunk = options.chunk,
                                       .objective = options.objective,
                                       .normalize = options.normalize,
                                       .shrinkage = options.shrinkage,
                                       .state = past,
                                       .cu_seqlens = call.cu_seqlens};
  auto [o, state] = call.is_step(qk)
                        ? std::pair(ops::lattice_step(q, k, v, gamma, g, op_options), op_options.state)
                        : ops::lattice(q, k, v, gamma, g, op_options);
  return {apply_output_gate(norm, o, to_heads(projected[2], num_heads_)).flatten(-2),
          {{}, {q_state, k_state, State::of(state)}}};
}

namespace {

const MixerRegistration lattice({
    "lattice",
    [](const Config& c) -> AnyLayer {
      return std::make_shared<LatticeImpl>(c.hidden_size, c.num_heads,
                                           options_from_config<LatticeOptions>(c));
    },
    {"head_dim", "num_slots", chunk_field("lattice"), "objective", "normalize", "shrinkage", "gated",
     "post_norm", "conv_size", "norm_eps"},
    [](const Config& c) {
      check_ungrouped(c, "lattice");
      TORCH_CHECK_VALUE(c.normalize || c.chunk == 1, "normalize is false, so chunk should be 1 but is ",
                        c.chunk);
      TORCH_CHECK_VALUE(c.shrinkage == 0 || c.chunk == 1, "shrinkage is ", c.shrinkage,
                        ", so chunk should be 1 but is ", c.chunk);
    },
});

}  // namespace

}  // namespace girih::nn
