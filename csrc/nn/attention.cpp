// Softmax attention with rotary positions and a key-value cache.
#include <algorithm>
#include <limits>

#include "fused.h"
#include "mixers.h"
#include "slots.h"
#include "step.h"

namespace girih::nn {
namespace {

// Number of slots of a cache for `tokens` tokens and later ones. A decoding step reads all slots, so spare
// slots cost time. A full cache is copied and its CUDA graph captured again. The result is a multiple of 256,
// because cuDNN builds a plan for each size in tens of milliseconds.
int64_t choose_capacity(int64_t tokens) {
  return (tokens + std::max<int64_t>(64, tokens / 8) + 255) / 256 * 256;
}

// A new tensor with at least `slots` slots: the first `tokens` slots of `cached` (may be undefined), then
// x [N, T, heads, head_dim].
Tensor append_tokens(const Tensor& cached, int64_t tokens, const Tensor& x, int64_t slots) {
  const auto end = tokens + x.size(1);
  if (slots <= end) return cached.defined() ? at::cat({cached.slice(1, 0, tokens), x}, 1) : x;
  const auto padded = x.new_zeros({x.size(0), slots, x.size(2), x.size(3)});
  if (cached.defined()) padded.slice(1, 0, tokens).copy_(cached.slice(1, 0, tokens));
  padded.slice(1, tokens, end).copy_(x);
  return padded;
}

// The tables of a decoding step for keys k [N, slots, heads, head_dim].
std::shared_ptr<const Slots> make_slots(const Tensor& k, const AttentionOptions& options) {
  const auto theta = options.rope_theta;
  const auto window = options.window.value_or(0);
  const auto slots = k.size(1);
  const auto position = at::arange(slots, k.options().dtype(at::kLong));
  const auto factors = rotary_factors(position, k.size(3), theta, k.scalar_type());
  auto see = at::zeros({2 * slots - 1}, k.options());
  see.slice(0, slots).fill_(-std::numeric_limits<double>::infinity());
  if (window > 0 && window < slots)
    see.slice(0, 0, slots - window).fill_(-std::numeric_limits<double>::infinity());
  return std::make_shared<const Slots>(Slots{factors.transpose(0, 1).contiguous(), see, theta, window});
}

// The state padded to `slots` slots, with the tables of a step.
State grow_cache(const State& state, int64_t slots, const AttentionOptions& options) {
  const auto padded = [&](const Tensor& x, double value) {
    if (x.size(1) == slots) return x;
    std::vector<int64_t> padding(2 * (x.dim() - 2), 0);
    padding.insert(padding.end(), {0, slots - x.size(1)});
    return at::constant_pad_nd(x, padding, value);
  };
  auto more = state;
  for (const size_t i : {0, 1}) more.tensors[i] = padded(state.tensors[i], 0);
  if (const auto& valid = state.tensors[2]; valid.defined()) more.tensors[2] = padded(valid, 1);
  more.slots = make_slots(more.tensors[0], options);
  return more;
}

// Whether the state's tables fit its keys and a slot is free for one more token.
bool has_room(const State& state) {
  const auto& k = state.tensors[0];
  return state.slots && state.tokens < k.size(1) && state.slots->turn.size(0) == k.size(1) &&
         state.slots->turn.scalar_type() == k.scalar_type() && state.slots->turn.device() == k.device();
}

void share_slots(State& state, std::vector<std::shared_ptr<const Slots>>& cached) {
  for (auto& part : state.parts) share_slots(part, cached);
  if (!state.slots) return;
  const auto same = std::ranges::find_if(cached, [&](const auto& other) {
    const auto &a = other->turn, &b = state.slots->turn;
    return other->theta == state.slots->theta && other->window == state.slots->window &&
           a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && a.device() == b.device();
  });
  if (same == cached.end()) {
    cached.push_back(state.slots);
  } else {
    state.slots = *same;
  }
}

}  // namespace

void share_slots(State& state) {
  std::vector<std::shared_ptr<const Slots>> cached;
  share_slots(state, cached);
}

AttentionImpl::AttentionImpl(int64_t hidden_size, int64_t num_heads, AttentionOptions settings)
    : options(completed("attention", hidden_size, num_heads, settings)), head_dim_(*options.head_dim) {
  TORCH_CHECK_VALUE(!options.window || options.causal, "window is ", options.window.value_or(0),
                    "; expected none where causal is false");
  const auto kv_heads = *options.num_kv_heads;
  heads_ = {num_heads, kv_heads, kv_heads};
  qkv_proj = register_module("qkv_proj", linear(hidden_size, (num_heads + 2 * kv_heads) * head_dim_));
  o_proj = register_module("o_proj", linear(num_heads * head_dim_, hidden_size));
}

// The mask of attention, true where a query attends to a key: [T, past + T] or [B, 1, T, past + T].
// Undefined: no mask beside causality. A query always attends to its own token, so that the softmax of a
// masked query is defined.
Tensor AttentionImpl::make_mask(int64_t past, int64_t T, const Tensor& valid, const Tensor& cu_seqlens,
                                at::Device device) const {
  const bool has_window = options.window && *options.window < past + T;
  if (!valid.defined() && !cu_seqlens.defined() && !has_window && (past == 0 || T == 1 || !options.causal))
    return {};
  const auto key = at::arange(past + T, at::TensorOptions(device).dtype(at::kLong));
  const auto query = key.slice(0, past).unsqueeze(-1);
  auto see = key <= query;
  if (!options.causal) see = at::ones_like(see);
  if (has_window) see = see & (key > query - *options.window);
  if (cu_seqlens.defined()) {
    const auto sequence = at::searchsorted(cu_seqlens, key, /*out_int32=*/false, /*right=*/true);
    see = see & (sequence == sequence.slice(0, past).unsqueeze(-1));
  }
  return valid.defined() ? ((see & valid.unsqueeze(1)) | (key == query)).unsqueeze(1) : see;
}

namespace {

void refuse_packed_cache(bool is_packed, bool has_cache) {
  TORCH_CHECK_VALUE(
      !is_packed || !has_cache,
      "cu_seqlens: attention has no cache for packed sequences; call it with use_cache = false");
}

}  // namespace

void AttentionImpl::check_packed(const Tensor& x, const Call& call) const {
  check_packing(x, call.cu_seqlens);
  refuse_packed_cache(call.cu_seqlens.defined(), call.use_cache || !call.state.empty());
}

void AttentionImpl::expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens) const {
  check_state(state, 4, 0);
  if (state.empty()) return;
  refuse_packed_cache(cu_seqlens.defined(), true);
  const auto &k = state.tensors[0], &v = state.tensors[1], &valid = state.tensors[2],
             &place = state.tensors[3];
  TORCH_CHECK_VALUE(k.defined() && k.dim() == 4, "state: attention has keys [N, slots, heads, head_dim]");
  const auto N = x.size(0), slots = k.size(1);
  TORCH_CHECK_VALUE(state.tokens <= slots && (state.tokens > 0 || state.slots || slots == 0),
                    "state.tokens is ", state.tokens, "; expected 0 to ", slots, ", the slots of the keys");
  check_state_tensor("k", k, {N, slots, heads_[1], head_dim_});
  check_state_tensor("v", v, {N, slots, heads_[2], head_dim_}, k.scalar_type());
  if (valid.defined()) check_state_tensor("valid", valid, {N, slots}, at::kBool);
  if (place.defined()) check_state_tensor("place", place, {N}, at::kLong);
}

Output AttentionImpl::run(const Tensor& x, const Call& call) {
  check_packed(x, call);
  return run_products(x, call);
}

std::vector<Product> AttentionImpl::products() const { return {make_product(qkv_proj)}; }

Product AttentionImpl::output() const { return make_product(o_proj); }

Output AttentionImpl::core(const std::vector<Tensor>& projected, const Call& call) {
  const auto& x = projected[0];
  const auto qkv = x.unflatten(-1, {-1, head_dim_});
  const State before = call.state.empty() ? State{std::vector<Tensor>(4)} : call.state;
  const auto past = before.tokens, T = x.size(1);
  if (call.is_step(x) && past > 0 && !call.attention_mask.defined() && qkv.numel() > 0 &&
      before.tensors[0].scalar_type() == qkv.scalar_type())
    return step(qkv, before);
  const auto position = at::arange(past, past + T, x.options().dtype(at::kLong));
  const auto [q, own_k, own_v] = split_and_rotate(qkv, heads_, position, options.rope_theta);
  const bool in_place = call.use_cache && !at::GradMode::is_enabled();
  const auto slots = in_place ? choose_capacity(past + T) : past + T;
  const auto k = append_tokens(before.tensors[0], past, own_k, slots),
             v = append_tokens(before.tensors[1], past, own_v, slots);
  const auto &past_valid = before.tensors[2],
             valid = join_masks(past_valid.defined() ? past_valid.slice(1, 0, past) : past_valid,
                                call.attention_mask, past, x);
  const auto see = make_mask(past, T, valid, call.cu_seqlens, x.device());
  // Without tokens PyTorch's attention returns an undefined tensor (CUDA, 16-bit types).
  const auto o = q.numel() == 0 ? q
                                : at::scaled_dot_product_attention(
                                      q.transpose(1, 2), k.slice(1, 0, past + T).transpose(1, 2),
                                      v.slice(1, 0, past + T).transpose(1, 2),
                                      see.defined() ? std::optional<Tensor>(see) : std::nullopt,
                                      /*dropout_p=*/0.0,
                                      /*is_causal=*/options.causal && !see.defined() && past == 0,
                                      /*scale=*/std::nullopt, /*enable_gqa=*/heads_[0] != heads_[1])
                                      .transpose(1, 2);
  const auto flat = o.flatten(-2);
  if (!call.use_cache) return {flat, {}};
  const auto place = at::full({x.size(0)}, past + T, position.options());
  State after{{k, v, valid, place}, {}, past + T};
  return {flat, in_place ? grow_cache(after, slots, options) : after};
}

// One token of each sequence, qkv [N, 1, heads, head_dim]. Writes the state's tensors in place. Device work
// does not depend on the host's token count, so that a CUDA graph can replay it.
Output AttentionImpl::step(const Tensor& qkv, State state) const {
  if (!has_room(state)) state = grow_cache(state, choose_capacity(state.tokens + 1), options);
  auto k = state.tensors[0], v = state.tensors[1], place = state.tensors[3];
  const auto& valid = state.tensors[2];
  const auto N = k.size(0), slots = k.size(1);
  const auto at = place.slice(0, 0, 1);
  // [1, 2, D] -> [2, 1, 1, 1, D]
  const auto turn = state.slots->turn.index_select(0, at).unsqueeze(1).unsqueeze(1).movedim(3, 0);
  const auto [q, new_k, new_v] = rotate_row(qkv, heads_, turn);
  k.index_copy_(1, at, new_k);
  v.index_copy_(1, at, new_v);
  auto see = state.slots->see.unfold(0, slots, 1).index_select(0, at::rsub(at, slots - 1)).expand({N, slots});
  if (valid.defined()) see = at::where(valid, see, -std::numeric_limits<double>::infinity());
  const auto o = attend_row(q, k, v, see.unsqueeze(1).unsqueeze(1));
  place.add_(1);
  ++state.tokens;
  return {o.flatten(2), state};
}

bool AttentionImpl::stepped(State& state, std::vector<int64_t>&) const {
  check_state(state, 4, 0);
  if (!has_room(state)) return false;
  ++state.tokens;
  return true;
}

namespace {

const MixerRegistration attention({
    "attention",
    [](const Config& c) -> AnyLayer {
      return std::make_shared<AttentionImpl>(c.hidden_size, c.num_heads,
                                             options_from_config<AttentionOptions>(c));
    },
    {"num_kv_heads", "head_dim", "rope_theta", "window"},
    check_even_head_dim,
});

}  // namespace

}  // namespace girih::nn
