#include "layer.h"
#include "mixers.h"

namespace girih::nn {

AttentionImpl::AttentionImpl(int64_t hidden_size, int64_t num_heads, AttentionOptions given)
    : options(std::move(given)), head_dim_(head_dim_of(hidden_size, num_heads, options.head_dim)) {
  const auto kv_heads = options.num_kv_heads.value_or(num_heads);
  heads_ = {num_heads, kv_heads, kv_heads};
  qkv_proj = register_module("qkv_proj", linear(hidden_size, (num_heads + 2 * kv_heads) * head_dim_));
  o_proj = register_module("o_proj", linear(num_heads * head_dim_, hidden_size));
}

// Which keys a query sees, [T, past + T] or [B, 1, T, past + T]; undefined: all, or all up to itself. A query
// always sees its own token, so that a masked one has something to attend to.
Tensor AttentionImpl::visible(int64_t past, int64_t T, const Tensor& valid, const Tensor& cu_seqlens,
                              at::Device device) const {
  if (!valid.defined() && !cu_seqlens.defined() && (past == 0 || T == 1 || !options.causal)) return {};
  const auto key = at::arange(past + T, at::TensorOptions(device).dtype(at::kLong));
  const auto query = key.slice(0, past).unsqueeze(-1);
  auto see = key <= query;
  if (!options.causal) see = at::ones_like(see);
  if (cu_seqlens.defined()) {
    const auto sequence = at::searchsorted(cu_seqlens, key, /*out_int32=*/false, /*right=*/true);
    see = see & (sequence == sequence.slice(0, past).unsqueeze(-1));
  }
  return valid.defined() ? ((see & valid.unsqueeze(1)) | (key == query)).unsqueeze(1) : see;
}

Output AttentionImpl::run(const Tensor& x, const Call& call) {
  check_packing(x, call.cu_seqlens);
  TORCH_CHECK_VALUE(
      !call.cu_seqlens.defined() || (!call.use_cache && call.state.empty()),
      "cu_seqlens: attention keeps no cache of packed sequences; call it with use_cache = false");
  const auto p = qkv_proj(x).unflatten(-1, {-1, head_dim_}).split_with_sizes(heads_, 2);
  const State& before = call.state;
  const auto past = before.empty() ? 0 : before.tensors[0].size(1), T = x.size(1);
  const auto position = at::arange(past, past + T, x.options().dtype(at::kLong));
  const auto q = rotary(p[0], position, options.rope_theta);
  const Extended k(rotary(p[1], position, options.rope_theta), call.attention_mask,
                   before.empty() ? State() : State{{before.tensors[0], before.tensors[2]}});
  const auto v = before.empty() ? p[2] : at::cat({before.tensors[1], p[2]}, 1);
  const auto see = visible(past, T, k.valid, call.cu_seqlens, x.device());
  const auto o = at::scaled_dot_product_attention(
      q.transpose(1, 2), k.x.transpose(1, 2), v.transpose(1, 2),
      see.defined() ? std::optional<Tensor>(see) : std::nullopt, /*dropout_p=*/0.0,
      /*is_causal=*/options.causal && !see.defined() && past == 0, /*scale=*/std::nullopt,
      /*enable_gqa=*/heads_[0] != heads_[1]);
  return {o_proj(o.transpose(1, 2).flatten(-2)), {{k.x, v, k.valid}}};
}

namespace {

const Registered attention({
    "attention",
    [](const Config& c) -> AnyLayer {
      return std::make_shared<AttentionImpl>(
          c.hidden_size, c.num_heads,
          AttentionOptions{
              .num_kv_heads = c.num_kv_heads, .head_dim = c.head_dim, .rope_theta = c.rope_theta});
    },
    {"num_kv_heads", "head_dim", "rope_theta"},
    expect_pairs,
});

}  // namespace

}  // namespace girih::nn
