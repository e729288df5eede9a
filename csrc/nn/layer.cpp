// The base classes of layers: dtypes, weight decay groups, masks and packed sequences, states, rotary
// positions.
#include "layer.h"

#include <algorithm>
#include <cmath>

#include "step.h"

namespace girih::nn {

thread_local bool SkipInitGuard::is_enabled_ = false;

torch::nn::Linear linear(int64_t in, int64_t out, bool bias) {
  const auto options = torch::nn::LinearOptions(in, out).bias(bias);
  if (!SkipInitGuard::on()) return torch::nn::Linear(options);
  torch::nn::Linear layer(torch::nn::LinearOptions(1, 1).bias(bias));
  layer->options = options;
  layer->weight.set_data(at::empty({out, in}));
  if (bias) layer->bias.set_data(at::empty({out}));
  return layer;
}

torch::nn::Embedding embedding(int64_t count, int64_t width) {
  torch::nn::EmbeddingOptions options(count, width);
  if (!SkipInitGuard::on()) return torch::nn::Embedding(options);
  torch::nn::Embedding layer(options._weight(at::empty({count, width})));
  layer->options._weight({});  // a clone would share this tensor
  return layer;
}

void reset_decay(Tensor A_log, Tensor dt_bias, double smallest_rate) {
  A_log.uniform_(smallest_rate, 16).log_();
  const auto dt = at::empty_like(dt_bias).uniform_(std::log(1e-3), std::log(1e-1)).exp_();
  dt_bias.copy_(dt + at::log(-at::expm1(-dt)));  // the inverse of softplus
}

State State::map(const std::function<Tensor(const Tensor&)>& f) const {
  State mapped;
  for (const auto& tensor : tensors) mapped.tensors.push_back(tensor.defined() ? f(tensor) : Tensor());
  for (const auto& part : parts) mapped.parts.push_back(part.map(f));
  mapped.tokens = tokens;
  mapped.slots = slots;
  return mapped;
}

namespace {

// Keeps the fp32 data of tensors, and restores it after `to` has rounded the tensors.
struct Fp32Restorer {
  std::vector<Tensor> tensors, previous;

  explicit Fp32Restorer(const std::vector<Tensor>& fp32_tensors) : tensors(fp32_tensors) {
    for (const auto& tensor : tensors) previous.push_back(tensor.detach());
  }
  void restore() {
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (at::isReducedFloatingType(tensors[i].scalar_type()))
        tensors[i].set_data(promote_to_fp32(previous[i].to(tensors[i].device())));
    }
  }
};

}  // namespace

void Module::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  Fp32Restorer fp32_restorer(fp32_tensors_);
  torch::nn::Module::to(device, dtype, non_blocking);
  fp32_restorer.restore();
}

void Module::to(torch::Dtype dtype, bool non_blocking) {
  Fp32Restorer fp32_restorer(fp32_tensors_);
  torch::nn::Module::to(dtype, non_blocking);
  fp32_restorer.restore();
}

WeightDecayGroups weight_decay_groups(const torch::nn::Module& model) {
  std::vector<Tensor> undecayed_parameters;
  for (const auto& module : model.modules()) {
    if (const auto* girih_module = dynamic_cast<const Module*>(module.get()))
      undecayed_parameters.insert(undecayed_parameters.end(), girih_module->undecayed().begin(),
                                  girih_module->undecayed().end());
  }
  WeightDecayGroups groups;
  for (const auto& parameter : model.parameters()) {
    const bool undecayed = std::ranges::any_of(undecayed_parameters,
                                               [&](const Tensor& other) { return other.is_same(parameter); });
    (undecayed ? groups.undecayed : groups.decayed).push_back(parameter);
  }
  return groups;
}

Output LayerImpl::forward(const Tensor& x, const Tensor& attention_mask, const State& state, bool use_cache,
                          const Tensor& cu_seqlens) {
  TORCH_CHECK_VALUE(!attention_mask.defined() || !cu_seqlens.defined(),
                    "attention_mask and cu_seqlens: give one; packed sequences have no padding to mask");
  auto output = run(x, {attention_mask, state, use_cache, cu_seqlens});
  if (!use_cache) output.second = {};
  return output;
}

Output LayerImpl::run_part(LayerImpl& layer, const Tensor& x, const Call& call, size_t part) const {
  return layer.forward(x, call.attention_mask, call.part(part), call.use_cache, call.cu_seqlens);
}

Output LayerImpl::core(const std::vector<Tensor>&, const Call&) {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "core: not implemented; a layer that overrides products overrides core too");
}

Output LayerImpl::run_products(const Tensor& x, const Call& call, const RowInput& prologue,
                               const Tensor& residual) {
  expect_state(call.state, x, call.cu_seqlens);
  auto [o, state] = core(nn::products(x, products(), prologue), call);
  if (!call.use_cache) state = {};
  return {nn::products(o, {output()}, output_prologue(), residual)[0], state};
}

Output LayerImpl::run_with_residual(const Tensor& x, LayerImpl& layer, const RowInput& prologue,
                                    const Call& call) const {
  // `forward` checks masks and packed sequences, and RecurrentLayerImpl::run sorts valid tokens. Calls with
  // either go through `forward`.
  if (!call.attention_mask.defined() && !call.cu_seqlens.defined() && !layer.products().empty())
    return layer.run_products(x, call, prologue, x);
  auto [y, state] = layer.forward(apply_prologue(x, prologue), call.attention_mask, call.state,
                                  call.use_cache, call.cu_seqlens);
  return {x + y, state};
}

bool LayerImpl::stepped(State&, std::vector<int64_t>&) const { return false; }

bool LayerImpl::Call::is_step(const Tensor& x) const {
  return use_cache && !state.empty() && !cu_seqlens.defined() && x.size(1) == 1 &&
         !at::GradMode::is_enabled();
}

void check_mask(const Tensor& x, const Tensor& attention_mask) {
  const auto tokens = x.sizes().slice(0, 2);
  TORCH_CHECK_VALUE(!attention_mask.defined() || attention_mask.sizes() == tokens,
                    "attention_mask has shape ", attention_mask.sizes(), "; expected [B, T] = ", tokens);
}

void check_state(const State& state, size_t tensors, size_t parts) {
  TORCH_CHECK_VALUE(state.empty() || (state.tensors.size() == tensors && state.parts.size() == parts),
                    "state has ", state.tensors.size(), " tensors and ", state.parts.size(),
                    " parts; expected ", tensors, " and ", parts,
                    "; pass the state that this layer returned");
}

bool has_tensors(const State& state) {
  return std::ranges::any_of(state.tensors, [](const Tensor& tensor) { return tensor.defined(); }) ||
         std::ranges::any_of(state.parts, has_tensors);
}

void check_present(const std::string& name, const LayerImpl& layer, const State& part) {
  TORCH_CHECK_VALUE(has_tensors(part) || !layer.has_state(), "state: ", name,
                    " is missing; pass the state that this layer returned");
}

int64_t count_sequences(const Tensor& x, const Tensor& cu_seqlens) {
  return cu_seqlens.defined() && cu_seqlens.dim() == 1 ? cu_seqlens.size(0) - 1 : x.size(0);
}

void check_batch(const Tensor& part, int64_t sequences) {
  TORCH_CHECK_VALUE(part.defined() && part.dim() > 0, "state: a tensor is missing");
  TORCH_CHECK_VALUE(part.size(0) == sequences, "state has ", part.size(0), " sequences; expected ",
                    sequences);
}

void check_state_tensor(const char* name, const Tensor& part, at::IntArrayRef shape,
                        std::optional<at::ScalarType> dtype) {
  TORCH_CHECK_VALUE(part.defined(), "state: ", name, " is missing; pass the state that this layer returned");
  check_batch(part, shape[0]);
  const bool fits = dtype ? part.scalar_type() == *dtype : part.is_floating_point();
  TORCH_CHECK_VALUE(fits && part.sizes() == shape, "state: ", name, " is ", part.scalar_type(), " of shape ",
                    part.sizes(), "; expected ", dtype ? c10::toString(*dtype) : "a floating dtype",
                    " and shape ", shape, "; pass the state that this layer returned");
}

void check_conv_state(const char* name, const State& state, const ShortConvImpl& conv, int64_t sequences) {
  const auto width = conv.options.kernel_size;
  check_state(state, width > 0 ? 1 : 0, 0);
  if (!state.empty()) check_state_tensor(name, state.tensors[0], {sequences, width - 1, conv.weight.size(0)});
}

void check_recurrent_state(const State& state, const Tensor& x, const Tensor& cu_seqlens,
                           std::initializer_list<std::pair<const char*, ShortConv>> convolutions,
                           std::initializer_list<MemoryTensor> memory, size_t tensors) {
  check_state(state, tensors, convolutions.size() + 1);
  if (state.empty()) return;
  const auto N = count_sequences(x, cu_seqlens);
  const auto memory_dtype = at::promote_types(x.scalar_type(), at::kFloat);
  auto part = state.parts.begin();
  for (const auto& [name, conv] : convolutions) {
    check_present(name, *conv, *part);
    check_conv_state(name, *part++, *conv, N);
  }
  TORCH_CHECK_VALUE(!part->empty(), "state: memory is missing; pass the state that this layer returned");
  check_state(*part, memory.size(), 0);
  auto tensor = part->tensors.begin();
  for (const auto& expected : memory) {
    const auto& found = *tensor++;
    TORCH_CHECK_VALUE(expected.is_present || !found.defined(), "state: ", expected.name,
                      " is defined; expected none; pass the state that this layer returned");
    if (!expected.is_present) continue;
    auto shape = expected.sizes;
    shape.insert(shape.begin(), N);
    check_state_tensor(expected.name, found, shape, expected.is_position ? at::kLong : memory_dtype);
  }
}

void check_packing(const Tensor& x, const Tensor& cu_seqlens) {
  TORCH_CHECK_VALUE(!cu_seqlens.defined() || (cu_seqlens.dim() == 1 && x.size(0) == 1),
                    "cu_seqlens has shape ", cu_seqlens.sizes(), " and x has ", x.size(0),
                    " rows; expected [N + 1] and one row, which packs N sequences");
}

std::tuple<Tensor, Tensor, Tensor> sort_valid_first(const Tensor& valid) {
  const auto count = valid.sum(1);
  const auto inverse_order =
      at::where(valid, valid.cumsum(1) - 1, count.unsqueeze(-1) + valid.logical_not().cumsum(1) - 1);
  const auto token = at::arange(valid.size(1), inverse_order.options()).expand_as(inverse_order);
  return {at::empty_like(inverse_order).scatter_(1, inverse_order, token), inverse_order, count};
}

Output RecurrentLayerImpl::run(const Tensor& x, const Call& call) {
  if (!call.attention_mask.defined()) return mix(x, call);
  check_mask(x, call.attention_mask);
  const auto [order, inverse_order, count] = sort_valid_first(call.attention_mask.to(at::kBool));
  const auto bounds = at::stack({at::zeros_like(count), count}, 1);
  auto [y, state] = mix(x.take_along_dim(order.unsqueeze(-1), 1), {{}, call.state, call.use_cache, bounds});
  return {y.take_along_dim(inverse_order.unsqueeze(-1), 1), state};
}

Tensor join_masks(const Tensor& previous, const Tensor& current, int64_t past, const Tensor& x) {
  check_mask(x, current);
  if (!previous.defined() && !current.defined()) return {};
  const auto or_ones = [&](const Tensor& mask, int64_t tokens) {
    return mask.defined() ? mask.to(at::kBool) : at::ones({x.size(0), tokens}, x.options().dtype(at::kBool));
  };
  return at::cat({or_ones(previous, past), or_ones(current, x.size(1))}, 1);
}

std::pair<Tensor, Tensor> token_positions(const Tensor& x, Tensor previous, const Tensor& cu_seqlens) {
  const auto integer = x.options().dtype(at::kLong);
  const auto token = at::arange(x.size(1), integer);
  const bool is_packed = cu_seqlens.defined() && cu_seqlens.dim() == 1;
  const auto count = count_sequences(x, cu_seqlens);
  if (!previous.defined()) previous = at::zeros({count}, integer);
  check_batch(previous, count);
  if (!cu_seqlens.defined()) return {previous.unsqueeze(-1) + token, previous + x.size(1)};
  const auto first = is_packed ? cu_seqlens.slice(0, 0, -1) : cu_seqlens.select(1, 0);
  const auto last = is_packed ? cu_seqlens.slice(0, 1) : cu_seqlens.select(1, 1);
  const auto shift = previous - first, after = previous + last - first;
  if (!is_packed) return {shift.unsqueeze(-1) + token, after};
  const auto sequence = (at::searchsorted(cu_seqlens, token, /*out_int32=*/false, /*right=*/true) - 1)
                            .clamp(0, std::max<int64_t>(count - 1, 0));
  return {(shift.index_select(0, sequence) + token).unsqueeze(0), after};
}

Tensor rotary_frequencies(int64_t head_dim, double theta, const at::TensorOptions& options) {
  const auto half = head_dim / 2;
  return at::pow(theta, at::arange(half, options) / -half);
}

std::pair<Tensor, Tensor> rotary_cos_sin(const Tensor& position, int64_t head_dim, double theta,
                                         at::ScalarType dtype) {
  const auto angle_dtype = position.options().dtype(at::promote_types(dtype, at::kFloat));
  const auto angle = position.unsqueeze(-1) * rotary_frequencies(head_dim, theta, angle_dtype);
  return {angle.cos().to(dtype), angle.sin().to(dtype)};
}

Tensor rotary_factors(const Tensor& position, int64_t head_dim, double theta, at::ScalarType dtype) {
  const auto [cos, sin] = rotary_cos_sin(position, head_dim, theta, dtype);
  return at::stack({at::cat({cos, cos}, -1), at::cat({-sin, sin}, -1)});
}

std::array<Tensor, 3> rotate_row(const Tensor& qkv, at::IntArrayRef heads, const Tensor& factors) {
  const auto p = qkv.split_with_sizes({heads[0] + heads[1], heads[2]}, 2);
  const auto qk = at::addcmul(p[0] * factors[0], p[0].roll(qkv.size(-1) / 2, -1), factors[1])
                      .split_with_sizes({heads[0], heads[1]}, 2);
  return {qk[0], qk[1], p[1]};
}

Tensor attend_row(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask) {
  return at::scaled_dot_product_attention(q.select(1, 0).unflatten(1, {k.size(2), -1}), k.transpose(1, 2),
                                          v.transpose(1, 2), mask)
      .flatten(1, 2)
      .unsqueeze(1);
}

Tensor rotary(const Tensor& x, const Tensor& position, double theta) {
  auto [cos, sin] = rotary_cos_sin(position, x.size(-1), theta, x.scalar_type());
  cos = cos.unsqueeze(-2), sin = sin.unsqueeze(-2);
  const auto pair = x.chunk(2, -1);
  return at::cat({pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos}, -1);
}

}  // namespace girih::nn
