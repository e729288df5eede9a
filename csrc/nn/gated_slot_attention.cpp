// GatedSlotAttention: the mixers gsa and abc, its form without gates.
#include "mixers.h"
#include "step.h"

namespace girih::nn {

GatedSlotAttentionImpl::GatedSlotAttentionImpl(int64_t hidden_size, int64_t num_heads,
                                               GatedSlotAttentionOptions settings)
    : options(completed("gsa", hidden_size, num_heads, std::move(settings))) {
  const auto kv_heads = *options.num_kv_heads;
  const auto width = num_heads * *options.head_dim, channels = width + 2 * kv_heads * *options.head_dim;
  heads_ = {num_heads, kv_heads, kv_heads};
  qkv_proj = register_module("qkv_proj", linear(hidden_size, channels));
  conv = register_module("conv", ShortConv(channels, ShortConvOptions{.kernel_size = options.conv_size}));
  TORCH_CHECK_VALUE(options.gated || options.data_dependent_decay,
                    "data_dependent_decay is false; expected true where gated is false: ABC has no decay");
  if (options.data_dependent_decay) {
    f_proj = register_module("f_proj", linear(hidden_size, kv_heads * options.num_slots));
  } else {
    decay_logits = register_parameter("decay_logits", at::empty({kv_heads, options.num_slots}));
    no_weight_decay({decay_logits});
    keep_fp32({decay_logits});
  }
  norm = register_module("norm", RMSNorm(width, options.norm_eps));
  o_proj = register_module("o_proj", linear(width, hidden_size));
  reset_parameters();
}

// Initializes the time constants -1 / g of the slots log-spaced from 4 to 4096 tokens, because slots with
// equal time constants would always hold equal values.
void GatedSlotAttentionImpl::reset_parameters() {
  if (!decay_logits.defined()) return;
  at::NoGradGuard no_grad;
  const auto tokens = at::logspace(2, 12, options.num_slots, /*base=*/2, decay_logits.options());
  const auto y =
      -options.gate_logit_normalizer / tokens;     // logsigmoid(decay_logits) = g gate_logit_normalizer
  decay_logits.copy_(y - at::log(-at::expm1(y)));  // the inverse of logsigmoid: y - log(1 - e^y)
}

std::vector<Product> GatedSlotAttentionImpl::products() const {
  if (!f_proj) return {make_product(qkv_proj)};
  return {make_product(qkv_proj), options.gated
                                      ? make_product(f_proj, "logsigmoid", 1 / options.gate_logit_normalizer)
                                      : make_product(f_proj, "linear")};
}

RowInput GatedSlotAttentionImpl::output_prologue() const {
  return {"silu_rms_norm", norm->weight, norm->eps};
}

Product GatedSlotAttentionImpl::output() const { return make_product(o_proj); }

void GatedSlotAttentionImpl::expect_state(const State& state, const Tensor& x,
                                          const Tensor& cu_seqlens) const {
  const auto H = heads_[1], D = *options.head_dim, M = options.num_slots;
  check_recurrent_state(
      state, x, cu_seqlens, {{"conv", conv}},
      {{"k", {H, D, M}}, {"v", {H, M, D}}, {.name = "z", .sizes = {H, M}, .is_present = !options.gated}});
}

Output GatedSlotAttentionImpl::core(const std::vector<Tensor>& projected, const Call& call) {
  auto [qkv, conv_state] = run_part(*conv, projected[0], call, 0);
  const auto parts = to_heads(qkv, heads_[0] + 2 * heads_[1]).split_with_sizes(heads_, 2);
  const auto &q = parts[0], &k = parts[1], &v = parts[2];
  // The log decay, or for abc the logits: [B, T, memories, slots].
  const auto per_slot = f_proj
                            ? projected[1].unflatten(-1, {-1, options.num_slots})
                            : (at::log_sigmoid(promote_to_fp32(decay_logits)) / options.gate_logit_normalizer)
                                  .expand({qkv.size(0), qkv.size(1), -1, -1});
  const auto s = options.gated ? Tensor() : per_slot, g = options.gated ? per_slot : Tensor();
  const ops::GSAOptions gsa{.scale = 1.0,
                            .feature = options.feature,
                            .state = call.part(1).as<ops::GSAState>(),
                            .cu_seqlens = call.cu_seqlens};
  auto [o, memory] = call.is_step(qkv) ? std::pair(ops::gsa_step(q, k, v, s, g, gsa), gsa.state)
                                       : ops::gsa(q, k, v, s, g, gsa);
  return {o.flatten(-2), {{}, {conv_state, State::of(memory)}}};
}

namespace {

AnyLayer make_slot_attention(const Config& c, bool gated) {
  auto options = options_from_config<GatedSlotAttentionOptions>(c);
  options.gated = gated;
  // abc does not read data_dependent_decay, which gsa layers of the model may set.
  if (!gated) options.data_dependent_decay = true;
  return std::make_shared<GatedSlotAttentionImpl>(c.hidden_size, c.num_heads, options);
}

std::vector<MixerField> slot_fields(std::initializer_list<MixerField> own) {
  std::vector<MixerField> all = {"num_kv_heads", "head_dim", "num_slots", "feature", "conv_size", "norm_eps"};
  all.insert(all.begin(), own);
  return all;
}

const MixerRegistration gsa({"gsa", [](const Config& c) { return make_slot_attention(c, true); },
                             slot_fields({"data_dependent_decay"})});
const MixerRegistration abc({"abc", [](const Config& c) { return make_slot_attention(c, false); },
                             slot_fields({})});

}  // namespace

}  // namespace girih::nn
