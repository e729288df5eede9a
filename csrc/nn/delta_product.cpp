// DeltaProduct, and with n = 1 DeltaNet and Gated DeltaNet.
#include "../ops/registration/operator.h"
#include "mixers.h"
#include "step.h"

namespace girih::nn {

DeltaProductImpl::DeltaProductImpl(int64_t hidden_size, int64_t num_heads, DeltaProductOptions settings)
    : options(completed("delta_product", hidden_size, num_heads, settings)),
      key_dim_(head_widths(options).key),
      value_dim_(head_widths(options).value) {
  // completed() has filled options.chunk from Config::chunk, so the caller's value is tested.
  const auto& range = get_operator("delta_product").option("chunk");
  TORCH_CHECK_VALUE(!options.between_chunks || settings.chunk, "chunk is None; expected ",
                    int64_t(range.least), " to ", int64_t(range.most), " with between_chunks");
  TORCH_CHECK_VALUE(options.between_chunks || !settings.chunk, "chunk is ", settings.chunk.value_or(0),
                    "; expected none: it is for between_chunks");
  if (!options.between_chunks) options.chunk = {};
  const auto kv_heads = *options.num_kv_heads, n = options.n;
  const auto width = num_heads * value_dim_,
             channels = num_heads * key_dim_ + n * kv_heads * (key_dim_ + value_dim_);
  heads_ = {num_heads, n * kv_heads, n * kv_heads};  // of q, k and v: n keys and values for each memory
  qkv_proj = register_module("qkv_proj", linear(hidden_size, channels));
  conv = register_module("conv", ShortConv(channels, ShortConvOptions{.kernel_size = options.conv_size}));
  beta_proj = register_module("beta_proj", linear(hidden_size, n * kv_heads));
  // With the default initial dt, up to 0.1, the memory forgets a key before its query
  // (girih.nn.DeltaProduct).
  if (options.gated)
    decay = register_module("decay", DecayGate(hidden_size, kv_heads, /*largest_step=*/0.01));
  g_proj = register_module("g_proj", linear(hidden_size, width));
  norm = register_module("norm", GatedRMSNorm(value_dim_, options.norm_eps));
  o_proj = register_module("o_proj", linear(width, hidden_size));
}

std::vector<Product> DeltaProductImpl::products() const {
  std::vector<Product> all = {make_product(qkv_proj),
                              make_product(beta_proj, "sigmoid", options.allow_neg_eigval ? 2 : 1),
                              make_product(g_proj)};
  if (decay) all.push_back(decay->product());
  return all;
}

Product DeltaProductImpl::output() const { return make_product(o_proj); }

void DeltaProductImpl::expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens) const {
  const bool has_position = options.between_chunks.has_value();
  check_recurrent_state(state, x, cu_seqlens, {{"conv", conv}},
                        {{"s", {*options.num_kv_heads, key_dim_, value_dim_}},
                         {.name = "position", .is_present = has_position, .is_position = true}});
}

Output DeltaProductImpl::core(const std::vector<Tensor>& projected, const Call& call) {
  auto [qkv, conv_state] = run_part(*conv, projected[0], call, 0);
  auto [q, k, v] = split_heads(qkv, heads_, key_dim_, value_dim_);
  k = split_steps(k, options.n);
  v = split_steps(v, options.n);
  // For n > 1 split_steps copies k and v. A copy of q too frees qkv: autograd saves q, not qkv.
  if (options.n > 1 && at::GradMode::is_enabled()) q = q.contiguous();
  qkv.reset();
  const auto beta = split_steps(projected[1], options.n), g = decay ? projected[3] : Tensor();
  const ops::DeltaProductOptions op_options{.n = options.n,
                                            .l2norm_qk = true,
                                            .chunk = options.chunk,
                                            .between_chunks = options.between_chunks,
                                            .state = call.part(1).as<ops::DeltaProductState>(),
                                            .cu_seqlens = call.cu_seqlens};
  auto [o, memory] = call.is_step(q)
                         ? std::pair(ops::delta_product_step(q, k, v, beta, g, op_options), op_options.state)
                         : ops::delta_product(q, k, v, beta, g, op_options);
  const auto gate = to_heads(projected[2], heads_[0]);
  return {norm(o, gate).flatten(-2), {{}, {conv_state, State::of(memory)}}};
}

namespace {

// expand_v: the default of the mixer.
AnyLayer make_delta_rule(const Config& c, int64_t n, bool gated, double expand_v = 1) {
  auto options = options_from_config(c, DeltaProductOptions{.expand_v = expand_v});
  options.n = n;
  options.gated = gated;
  if (!options.between_chunks) options.chunk = {};
  return std::make_shared<DeltaProductImpl>(c.hidden_size, c.num_heads, options);
}

// Mixer::check of the mixers of this file. expand_v: the default of the mixer.
template <int expand_v = 1>
void check_delta_rule(const Config& c) {
  head_widths(c, 1, expand_v);
}

// The configuration fields of a mixer of this file: `specific` ones and those that all read.
std::vector<MixerField> delta_fields(std::initializer_list<MixerField> specific) {
  std::vector<MixerField> all = {"num_kv_heads",   "head_dim", "expand_k",  "expand_v", "allow_neg_eigval",
                                 "between_chunks", "chunk",    "conv_size", "norm_eps"};
  all.insert(all.begin(), specific);
  return all;
}

const MixerRegistration delta_product({"delta_product",
                                       [](const Config& c) { return make_delta_rule(c, c.n, c.gated); },
                                       delta_fields({"n", "gated"}), check_delta_rule<>});
const MixerRegistration deltanet({"deltanet", [](const Config& c) { return make_delta_rule(c, 1, false); },
                                  delta_fields({}), check_delta_rule<>});
// expand_v = 2 (Yang et al. 2025, Gated Delta Networks, appendix).
const MixerRegistration gated_deltanet({"gated_deltanet",
                                        [](const Config& c) { return make_delta_rule(c, 1, true, 2); },
                                        delta_fields({}), check_delta_rule<2>, "had expand_v = 1"});

}  // namespace

}  // namespace girih::nn
