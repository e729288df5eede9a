// Trellis: two memories that learn to map keys and values to one target.
#include "../ops/trellis/phi.h"
#include "fused.h"
#include "mixers.h"
#include "step.h"

namespace girih::nn {

TrellisImpl::TrellisImpl(int64_t hidden_size, int64_t num_heads, TrellisOptions settings)
    : options(completed("trellis", hidden_size, num_heads, std::move(settings))), num_heads_(num_heads) {
  const auto head_dim = *options.head_dim, channels = num_heads * head_dim;
  const ShortConvOptions conv{.kernel_size = options.conv_size};
  if (options.shared_qk) {
    qk_proj = register_module("qk_proj", linear(hidden_size, channels));
  } else {
    q_proj = register_module("q_proj", linear(hidden_size, channels));
    k_proj = register_module("k_proj", linear(hidden_size, channels));
  }
  q_conv = register_module("q_conv", ShortConv(channels, conv));
  k_conv = register_module("k_conv", ShortConv(channels, conv));
  v_proj = register_module("v_proj", linear(hidden_size, channels));
  a_proj = register_module("a_proj", linear(hidden_size, num_heads * options.num_slots));
  gamma_proj = register_module("gamma_proj", linear(hidden_size, num_heads, true));
  if (options.gated) decay = register_module("decay", DecayGate(hidden_size, num_heads, 1e-4));
  key_memory = register_parameter("key_memory", at::empty({num_heads, options.num_slots, head_dim}));
  value_memory = register_parameter("value_memory", at::empty({num_heads, options.num_slots, head_dim}));
  g_proj = register_module("g_proj", linear(hidden_size, channels));
  if (options.post_norm) norm = register_module("norm", GatedRMSNorm(head_dim, options.norm_eps, "gelu"));
  o_proj = register_module("o_proj", linear(channels, hidden_size));
  no_weight_decay({key_memory, value_memory, gamma_proj->bias});
  keep_fp32({key_memory, value_memory, gamma_proj->bias});
  reset_parameters();
}

void TrellisImpl::reset_parameters() {
  torch::nn::init::normal_(key_memory);  // entries of size 1: normalizing phis divide by their size
  torch::nn::init::normal_(value_memory);
  torch::nn::init::constant_(gamma_proj->bias, initial_step_size_bias(options.chunk));
}

std::vector<Product> TrellisImpl::products() const {
  std::vector<Product> all = {make_product(v_proj), make_product(a_proj), make_product(g_proj),
                              make_product(gamma_proj, "sigmoid")};
  if (qk_proj) {
    all.push_back(make_product(qk_proj));
  } else {
    all.insert(all.end(), {make_product(q_proj), make_product(k_proj)});
  }
  if (decay) all.push_back(decay->product());
  return all;
}

Product TrellisImpl::output() const { return make_product(o_proj); }

void TrellisImpl::expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens) const {
  const std::vector<int64_t> sizes = {num_heads_, options.num_slots, *options.head_dim};
  check_recurrent_state(state, x, cu_seqlens, {{"q_conv", q_conv}, {"k_conv", k_conv}},
                        {{"first_k", sizes},
                         {"k", sizes},
                         {"first_v", sizes},
                         {"v", sizes},
                         {.name = "position", .is_position = true}});
}

Output TrellisImpl::core(const std::vector<Tensor>& projected, const Call& call) {
  const auto &gamma = projected[3], &k_projection = projected[qk_proj ? 4 : 5];
  auto [q, q_state] = run_part(*q_conv, projected[4], call, 0);
  auto [k, k_state] = run_part(*k_conv, k_projection, call, 1);
  q = to_heads(q, num_heads_);
  k = to_heads(k, num_heads_);
  auto v = to_heads(projected[0], num_heads_);
  if (options.normalize_kv) {
    k = unit_rows(k);
    v = unit_rows(v);
  }
  const auto a = to_heads(projected[1], num_heads_);
  const auto g = decay ? projected.back() : Tensor();
  auto past = call.part(2).as<ops::TrellisState>();
  if (call.state.empty()) {
    past.k = promote_to_fp32(key_memory);
    past.v = promote_to_fp32(value_memory);
  }
  const ops::TrellisOptions op_options{.chunk = options.chunk,
                                       .phi = options.phi,
                                       .f = options.f,
                                       .state = past,
                                       .cu_seqlens = call.cu_seqlens};
  auto [o, memory] = call.is_step(k_projection)
                         ? std::pair(ops::trellis_step(q, k, v, a, gamma, g, op_options), op_options.state)
                         : ops::trellis(q, k, v, a, gamma, g, op_options);
  if (options.value_read == "phi") o = trellis::Phi(options.phi)(promote_to_fp32(o)).to(o.scalar_type());
  return {apply_output_gate(norm, o, to_heads(projected[2], num_heads_)).flatten(-2),
          {{}, {q_state, k_state, State::of(memory)}}};
}

namespace {

const MixerRegistration trellis({
    "trellis",
    [](const Config& c) -> AnyLayer {
      return std::make_shared<TrellisImpl>(c.hidden_size, c.num_heads,
                                           options_from_config<TrellisOptions>(c));
    },
    {"head_dim", "num_slots", chunk_field("trellis"), "phi", "f", "gated", "shared_qk", "normalize_kv",
     "value_read", "post_norm", "conv_size", "norm_eps"},
    [](const Config& c) { check_ungrouped(c, "trellis"); },
});

// phi(x) for Python. It calls ATen operators, which autograd differentiates.
Tensor apply_phi(const Tensor& x, std::string_view phi) { return trellis::Phi(phi)(x); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(girih, m) { m.def("trellis_phi(Tensor x, str phi) -> Tensor", &apply_phi); }

}  // namespace girih::nn
