// LiZA: LinearPath, which reads the q, k and v of an attention layer, and InjectedAttention, attention with a
// linear path in parallel.
#include <cmath>
#include <numbers>

#include "fields.h"
#include "fused.h"
#include "layer.h"
#include "mixers.h"
#include "step.h"

namespace girih::nn {
namespace {

constexpr int64_t kPoolWindow = 3;  // tokens of pool = window

// silu(x) / |silu(x)| (eq. 4) in the dtype of x, with lengths in fp32 or fp64. x [..., head_dim].
Tensor silu_normalize(const Tensor& x) {
  constexpr double kMinNorm = 1e-6;  // lower bound of |silu(x)|
  const auto y = at::silu(x);
  const auto wide = at::promote_types(x.scalar_type(), at::kFloat);
  const auto length = at::linalg_vector_norm(y, 2, at::IntArrayRef{-1}, /*keepdim=*/true, wide);
  return (y / length.clamp_min(kMinNorm)).to(x.scalar_type());
}

// The pairs (2i, 2i + 1) of x [..., D] rotated by `angle` (eq. 23).
Tensor rotate_pairs(const Tensor& x, double angle) {
  const auto pair = x.unflatten(-1, {-1, 2}).unbind(-1);
  const double cos = std::cos(angle), sin = std::sin(angle);
  return at::stack({pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos}, -1).flatten(-2);
}

}  // namespace

LinearPathImpl::LinearPathImpl(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                               LinearPathOptions settings)
    : options(std::move(settings)), heads_{num_heads, num_kv_heads, num_kv_heads}, head_dim_(head_dim) {
  check_path_options(options);
  TORCH_CHECK_VALUE(options.virtual_tokens == "derivative" || head_dim % 2 == 0, "virtual_tokens is ",
                    options.virtual_tokens, ", which turns pairs of channels; heads have ", head_dim);
  norm = register_module("norm", RMSNorm(head_dim, options.norm_eps));
}

namespace {

// Causal convolution of x [B, T, heads, head_dim] with one filter `taps` [W] for all channels; the state has
// the last W - 1 rows of x.
std::pair<Tensor, State> convolve(const Tensor& x, const Tensor& taps, const State& before,
                                  const Tensor& cu_seqlens, bool in_place) {
  const auto state = cast_conv_state(before, x);
  const ops::ShortConvOptions conv{.state = state.as<ops::ShortConvState>(), .cu_seqlens = cu_seqlens};
  const auto rows = x.flatten(2), weight = taps.expand({rows.size(2), -1});
  if (in_place) return {ops::short_conv_step(rows, weight, {}, conv).view_as(x), state};
  auto [y, after] = ops::short_conv(rows, weight, {}, conv);
  return {y.view_as(x), State::of(after)};
}

}  // namespace

void LinearPathImpl::expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens) const {
  const auto differences = size_t(has_differences() ? options.n - 1 : 0);
  check_state(state, 1, 2 + differences);
  if (state.empty()) return;
  const auto N = count_sequences(x, cu_seqlens), heads = heads_[1];
  const auto pooled = (options.gate == "kv" ? 2 : 1) * heads;
  const auto sum_dtype = at::promote_types(x.scalar_type(), at::kFloat);
  const auto expect_part = [&](const char* name, const State& part, size_t tensors) {
    check_state(part, tensors, 0);
    TORCH_CHECK_VALUE(!part.empty(), "state: ", name,
                      " is missing; expected the state that this layer returns");
  };
  const auto expect_absent = [](const char* name, const Tensor& part) {
    TORCH_CHECK_VALUE(!part.defined(), "state: ", name,
                      " is defined; expected the state that this layer returns, without it");
  };
  const auto &pool = state.parts[0], &memory = state.parts[1];
  expect_part("pool", pool, 1);
  expect_part("memory", memory, 2);
  if (options.pool == "past") {
    check_state_tensor("count", state.tensors[0], {N}, at::kLong);
    check_state_tensor("pool", pool.tensors[0], {N, pooled, 1, head_dim_}, sum_dtype);
  } else {
    expect_absent("count", state.tensors[0]);
    check_state_tensor("pool", pool.tensors[0], {N, kPoolWindow - 1, pooled * head_dim_});
  }
  check_state_tensor("memory", memory.tensors[0], {N, heads, head_dim_, head_dim_}, sum_dtype);
  if (options.between_chunks) {
    check_state_tensor("position", memory.tensors[1], {N}, at::kLong);
  } else {
    expect_absent("position", memory.tensors[1]);
  }
  for (size_t m = 0; m < differences; ++m) {
    const auto& row = state.parts[2 + m];
    expect_part("a difference's row", row, 1);
    check_state_tensor("a difference's row", row.tensors[0], {N, 1, 2 * heads * head_dim_});
  }
}

// Causal mean of x [B, T, heads, head_dim], in fp32 or fp64. pool = past: a running sum, computed as linear
// attention with k = q = 1. The sum may exceed the range of fp16: then x is converted to fp32.
Tensor LinearPathImpl::pool(const Tensor& x, const Call& call, State& after) const {
  const bool in_place = call.is_step(x);
  if (options.pool == "window") {
    const auto taps = at::full({kPoolWindow}, 1.0 / kPoolWindow, x.options());
    auto [mean, last] = convolve(x, taps, call.part(0), call.cu_seqlens, in_place);
    after = {{Tensor()}, {last}};
    return promote_to_fp32(mean);
  }
  const bool is_narrow = x.scalar_type() == at::kHalf || autocast_dtype(x, x.scalar_type()) == at::kHalf;
  std::optional<Autocast> in_fp32;
  if (is_narrow && !x.is_meta()) in_fp32.emplace(x.device(), at::kHalf, /*enabled=*/false);
  const auto wide = is_narrow ? x.to(at::kFloat) : x;
  const auto one = wide.new_ones({1}).expand({x.size(0), x.size(1), x.size(2), 1});
  const ops::GLAOptions sum{
      .scale = 1.0, .state = call.part(0).as<ops::GLAState>(), .cu_seqlens = call.cu_seqlens};
  auto before = call.state.empty() ? Tensor() : call.state.tensors[0];
  if (in_place) {
    const auto total = ops::gla_step(one, one, wide, {}, sum);
    before.add_(1);
    after = {{before}, {call.part(0)}};
    return total / before.to(at::kFloat).view({-1, 1, 1, 1});
  }
  auto [total, state] = ops::gla(one, one, wide, {}, sum);
  const auto [position, tokens] = token_positions(x, before, call.cu_seqlens);
  after = {{tokens}, {State::of(state)}};
  return total / (position + 1).to(at::kFloat).unsqueeze(-1).unsqueeze(-1);
}

// beta (eq. 5): [B, T n, kv_heads, head_dim], or [B, T n, kv_heads] for gate_per = head.
Tensor LinearPathImpl::step_sizes(const Tensor& k, const Tensor& v, const Call& call, State& after) const {
  const auto source = options.gate == "k" ? k : options.gate == "v" ? v : at::cat({k, v}, 2);
  auto beta = pool(source, call, after).sigmoid();
  if (options.gate == "kv") {
    const auto gates = beta.chunk(2, 2);
    beta = gates[0] * gates[1];
  }
  if (options.gate_per == "head") beta = beta.mean(-1);
  return options.n > 1 ? beta.repeat_interleave(options.n, 1) : beta;
}

// kv [B, T, 2 kv_heads, head_dim] -> k and v of the n steps of each token, [B, T n, 2 kv_heads, head_dim].
Tensor LinearPathImpl::virtual_rows(const Tensor& kv, const Call& call, State& after) const {
  const auto n = options.n;
  std::vector<Tensor> rows{kv};
  if (has_differences()) {
    // x^(m)_t = (x^(m-1)_t - x^(m-1)_{t-1}) / 2       eq. 22
    const auto taps = at::arange(-0.5, 1.0, 1.0, kv.options());
    for (int64_t m = 1; m < n; ++m) {
      auto [row, last] =
          convolve(rows.back(), taps, call.part(size_t(m) + 1), call.cu_seqlens, call.is_step(kv));
      rows.push_back(row);
      after.parts.push_back(std::move(last));
    }
  }
  if (options.virtual_tokens != "derivative") {
    rows.resize(size_t(n));
    for (int64_t m = 1; m < n; ++m) {
      const auto rotation = rotate_pairs(kv, 2 * std::numbers::pi * double(m) / double(n));
      auto& row = rows[size_t(m)];
      row = has_differences() ? (row + rotation) / 2 : rotation;
    }
  }
  return n > 1 ? at::stack(rows, 2).flatten(1, 2) : kv;
}

Output LinearPathImpl::mix(const Tensor& x, const Call& call) {
  expect_state(call.state, x, call.cu_seqlens);
  const auto parts = x.unflatten(-1, {-1, head_dim_}).split_with_sizes(heads_, 2);
  const auto &k = parts[1], &v = parts[2];
  State after;
  const auto beta = step_sizes(k, v, call, after);
  after.parts.emplace_back();  // parts[1], the memory, set below
  const auto kv = virtual_rows(silu_normalize(at::cat({k, v}, 2)), call, after)
                      .split_with_sizes({heads_[1], heads_[2]}, 2);
  const ops::DeltaProductOptions op_options{
      .n = options.n,
      .scale = 1.0,  // the norm removes any scale of o
      .chunk = options.between_chunks ? std::optional(options.chunk) : std::nullopt,
      .between_chunks = options.between_chunks,
      .state = call.part(1).as<ops::DeltaProductState>(),
      .cu_seqlens = call.cu_seqlens};
  const auto q = silu_normalize(parts[0]);
  auto [o, memory] =
      call.is_step(x)
          ? std::pair(ops::delta_product_step(q, kv[0], kv[1], beta, {}, op_options), op_options.state)
          : ops::delta_product(q, kv[0], kv[1], beta, {}, op_options);
  after.parts[1] = State::of(memory);
  return {norm(o).flatten(-2), std::move(after)};
}

LizaImpl::LizaImpl(LinearPath beside, MixAttentionOptions settings)
    : MemoryAsGateImpl(settings), path(register_module("path", std::move(beside))) {}

bool LizaImpl::stepped(State& state, std::vector<int64_t>& kind) const { return path->stepped(state, kind); }

void LizaImpl::expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens) const {
  path->expect_state(state, x, cu_seqlens);
}

Output LizaImpl::run(const Tensor& x, const Call& call) {
  return path->forward(x, call.attention_mask, call.state, call.use_cache, call.cu_seqlens);
}

InjectedAttentionImpl::InjectedAttentionImpl(int64_t hidden_size, int64_t num_heads,
                                             AttentionOptions settings, LinearPathOptions path,
                                             MixAttentionOptions mix)
    : AttentionImpl(hidden_size, num_heads, settings) {
  TORCH_CHECK_VALUE(options.causal, "causal is false; expected true: a linear path reads tokens in order");
  girih = register_module(
      "girih", Liza(LinearPath(num_heads, *options.num_kv_heads, *options.head_dim, std::move(path)), mix));
}

bool InjectedAttentionImpl::stepped(State& state, std::vector<int64_t>& kind) const {
  check_state(state, 0, 2);
  return AttentionImpl::stepped(state.parts[0], kind) && girih->stepped(state.parts[1], kind);
}

// With `cross` the output projection of the mixture is not the mixture of the output projections: no
// products.
std::vector<Product> InjectedAttentionImpl::products() const {
  return girih->options.cross ? std::vector<Product>() : AttentionImpl::products();
}

void InjectedAttentionImpl::expect_state(const State& state, const Tensor& x,
                                         const Tensor& cu_seqlens) const {
  check_state(state, 0, 2);
  if (state.empty()) return;
  TORCH_CHECK_VALUE(
      state.parts[0].empty() == state.parts[1].empty(),
      "state: one of attention's state and the linear path's state is empty; expected both or neither");
  AttentionImpl::expect_state(state.parts[0], x, cu_seqlens);
  girih->expect_state(state.parts[1], x, cu_seqlens);
}

// The mixture of both paths before the output projection. The mixture is linear, so one projection suffices.
// With `cross`: both paths, [2, B, T, heads head_dim].
Output InjectedAttentionImpl::core(const std::vector<Tensor>& projected, const Call& call) {
  const auto [a, attention] =
      AttentionImpl::core(projected, {call.attention_mask, call.part(0), call.use_cache, call.cu_seqlens});
  const auto [o, path] = run_part(*girih, projected[0], call, 1);
  return {girih->options.cross ? at::stack({a, o}) : girih->mixture(a, o), {{}, {attention, path}}};
}

Output InjectedAttentionImpl::run(const Tensor& x, const Call& call) {
  if (!girih->options.cross) return AttentionImpl::run(x, call);
  check_packed(x, call);
  expect_state(call.state, x, call.cu_seqlens);
  const auto [both, state] = core(nn::products(x, AttentionImpl::products()), call);
  const auto y = nn::products(both, {output()})[0];
  return {girih->mixture(y[0], y[1]), state};
}

AnyLayer make_injected(const Config& c, const Injection& injection) {
  return std::make_shared<InjectedAttentionImpl>(
      c.hidden_size, c.num_heads, options_from_config<AttentionOptions>(c), injection.path, injection.mix);
}

}  // namespace girih::nn
