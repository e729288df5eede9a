// Block, Model (embedding, blocks, norm), LanguageModel (with head), and generation.
#include <girih/language_model.h>

#include <algorithm>
#include <cmath>

#include "../ops/fused/fused.h"
#include "decoding.h"
#include "fused.h"
#include "layer.h"
#include "mixers.h"
#include "slots.h"
#include "step.h"

namespace girih::nn {

BlockImpl::BlockImpl(AnyLayer inner, int64_t hidden_size, std::optional<int64_t> intermediate_size,
                     double norm_eps)
    : mixer_norm(register_module("mixer_norm", RMSNorm(hidden_size, norm_eps))),
      mixer(register_module("mixer", std::move(inner))) {
  if (!intermediate_size) return;
  mlp_norm = register_module("mlp_norm", RMSNorm(hidden_size, norm_eps));
  mlp = register_module("mlp", SwiGLU(hidden_size, *intermediate_size));
}

// The state of the block is the state of its mixer.
Output BlockImpl::run(const Tensor& x, const Call& call) {
  if (!is_decode_sized(x)) {
    const auto after = parts(x, {}, call.attention_mask, call.state, call.use_cache, call.cu_seqlens);
    return {after.x + after.branch, after.state};
  }
  auto [h, state] = run_with_residual(x, *mixer, mixer_norm->input(), call);
  return {mlp ? mlp->onto(h, h, mlp_norm->input()) : h, state};
}

BlockImpl::Parts BlockImpl::parts(const Tensor& x, const Tensor& branch, const Tensor& attention_mask,
                                  const State& state, bool use_cache, const Tensor& cu_seqlens) {
  const auto [sum, normed] = residual_norm(x, branch, mixer_norm->weight, mixer_norm->eps);
  auto [y, after] = mixer->forward(normed, attention_mask, state, use_cache, cu_seqlens);
  if (!mlp) return {sum, y, std::move(after)};
  const auto [h, u] = residual_norm(sum, y, mlp_norm->weight, mlp_norm->eps);
  return {h, mlp->forward(u), std::move(after)};
}

bool BlockImpl::stepped(State& state, std::vector<int64_t>& kind) const {
  return mixer->stepped(state, kind);
}

void BlockImpl::expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens) const {
  mixer->expect_state(state, x, cu_seqlens);
}

Tensor BlockImpl::around(const Tensor& x,
                         const std::function<Tensor(const Tensor&, const RowInput&, const Tensor&)>& mix) {
  if (is_decode_sized(x)) {
    const auto h = mix(x, mixer_norm->input(), x);
    return mlp ? mlp->onto(h, h, mlp_norm->input()) : h;
  }
  const auto y = mix(mixer_norm(x), {}, {});
  if (!mlp) return x + y;
  const auto [h, u] = residual_norm(x, y, mlp_norm->weight, mlp_norm->eps);
  return h + mlp->forward(u);
}

ModelImpl::ModelImpl(const Config& config)
    : embed_tokens(register_module("embed_tokens", embedding(config.vocab_size, config.hidden_size))),
      layers(register_module("layers", torch::nn::ModuleList())) {
  const auto names = config.mixers();
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const auto inner = mixers().at(names[size_t(i)]).has_mlp ? config.intermediate_size : std::nullopt;
    layers->push_back(Block(make_mixer(i, config), config.hidden_size, inner, config.norm_eps));
    for (const auto& module : layers->ptr(size_t(i))->modules())
      if (auto* layer = dynamic_cast<LayerImpl*>(module.get())) layer->set_depth(i, config.num_hidden_layers);
  }
  norm = register_module("norm", RMSNorm(config.hidden_size, config.norm_eps));
}

Output ModelImpl::run(const Tensor& ids, const Call& call) {
  check_packing(ids, call.cu_seqlens);
  auto x = embed_tokens(ids), branch = Tensor();
  const bool has_few = is_decode_sized(x);
  check_state(call.state, 0, layers->size());
  const bool has_past = has_tensors(call.state);
  for (size_t i = 0; i < layers->size(); ++i) {  // before the first layer writes its state
    const auto& layer = layers->at<LayerImpl>(i);
    layer.expect_state(call.part(i), x, call.cu_seqlens);
    if (has_past) check_present("layer " + std::to_string(i), layer, call.part(i));
  }
  State after;
  for (size_t i = 0; i < layers->size(); ++i) {
    auto& block = layers->at<BlockImpl>(i);
    if (has_few) {
      std::tie(x, after.parts.emplace_back()) = run_part(block, x, call, i);
    } else {
      auto parts = block.parts(x, branch, call.attention_mask, call.part(i), call.use_cache, call.cu_seqlens);
      x = parts.x, branch = parts.branch;
      after.parts.push_back(std::move(parts.state));
    }
  }
  share_slots(after);
  return {residual_norm(x, branch, norm->weight, norm->eps).second, after};
}

bool ModelImpl::stepped(State& state, std::vector<int64_t>& kind) const {
  check_state(state, 0, layers->size());
  for (size_t i = 0; i < layers->size(); ++i) {
    if (!layers->at<LayerImpl>(i).stepped(state.parts[i], kind)) return false;
  }
  return true;
}

namespace {

Config require_memory(Config config) {
  check_memory_size(config, int64_t(c10::elementSize(c10::get_default_dtype_as_scalartype())));
  return config;
}

Tensor to_token_ids(const Tensor& tensor, const char* name) {
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_VALUE(tensor.dim() == 2 && (dtype == at::kLong || dtype == at::kInt), name, " is ", dtype,
                    " of shape ", tensor.sizes(), "; expected int64 or int32, [batch, tokens]");
  return tensor.to(at::kLong);
}

}  // namespace

LanguageModelImpl::LanguageModelImpl(const Config& settings) : config(require_memory(settings.completed())) {
  if (config.is_whole_cat()) {
    const auto cat = std::make_shared<CatModelImpl>(config);
    embed_tokens_ = cat->embed_tokens;
    model = cat;
  } else {
    const auto blocks = std::make_shared<ModelImpl>(config);
    embed_tokens_ = blocks->embed_tokens;
    model = blocks;
  }
  register_module("model", model);
  if (!config.tie_word_embeddings)
    lm_head = register_module("lm_head", linear(config.hidden_size, config.vocab_size));
  if (SkipInitGuard::on()) return;
  for (const auto& module : modules(/*include_self=*/false)) {
    if (auto* layer = module->as<torch::nn::Linear>()) {
      torch::nn::init::normal_(layer->weight, 0.0, *config.initializer_range);  // layers set biases
    } else if (auto* embedding = module->as<torch::nn::Embedding>()) {
      torch::nn::init::normal_(embedding->weight, 0.0, *config.initializer_range);
    }
  }
}

LanguageModel inject(const LanguageModel& model, const Injection& injection) {
  auto config = model->config;
  config.injections.push_back(injection);
  LanguageModel injected = [&] {
    const SkipInitGuard guard;
    return LanguageModel(config);
  }();
  const auto weight = model->parameters()[0];
  injected->to(weight.device(), weight.scalar_type());
  const at::NoGradGuard no_grad;
  const auto share = [](auto to, const auto& from) {
    for (const auto& item : from) {
      to[item.key()].set_data(item.value().detach());
      to[item.key()].set_requires_grad(item.value().requires_grad());
    }
  };
  share(injected->named_parameters(), model->named_parameters());
  share(injected->named_buffers(), model->named_buffers());
  injected->train(model->is_training());
  return injected;
}

void LanguageModelImpl::set_chunk(int64_t chunk) {
  auto* cat = dynamic_cast<CatModelImpl*>(model.get());
  TORCH_CHECK_VALUE(cat != nullptr, "chunk is ", chunk,
                    "; expected none: only the CAT model has a choice of chunks");
  cat->set_chunk(chunk);
}

const Tensor& LanguageModelImpl::head_weight() const {
  return lm_head ? lm_head->weight : embed_tokens_->weight;
}

Tensor LanguageModelImpl::head(const Tensor& x) const { return at::linear(x, head_weight()); }

// The state of the language model is the state of `model`.
Output LanguageModelImpl::run(const Tensor& input, const Call& call) {
  const auto ids = to_token_ids(input, "ids");
  auto mask = call.attention_mask;
  if (mask.defined()) {
    TORCH_CHECK_VALUE(mask.dim() == 2 && mask.size(1) >= ids.size(1), "attention_mask has shape ",
                      mask.sizes(), "; expected [batch, tokens] with at least ", ids.size(1), " tokens");
    mask = mask.slice(1, mask.size(1) - ids.size(1)).to(at::kBool);
  }
  auto [x, state] = model->forward(ids, mask, call.state, call.use_cache, call.cu_seqlens);
  return {head(x), state};
}

Tensor LanguageModelImpl::loss(const Tensor& ids, const Tensor& labels) {
  TORCH_CHECK_VALUE(!labels.defined() || labels.sizes() == ids.sizes(), "labels has shape ", labels.sizes(),
                    "; expected that of ids, ", ids.sizes());
  constexpr int64_t kIgnoreIndex = -100, kMaxLogits = int64_t{1} << 26;
  const auto tokens = to_token_ids(ids, "ids");
  const auto next = (labels.defined() ? to_token_ids(labels, "labels") : tokens).slice(1, 1).flatten();
  const auto x = model->forward(tokens).first.slice(1, 0, -1).flatten(0, 1);
  const auto sum = fused::linear_cross_entropy(x, head_weight(), next, kIgnoreIndex, kMaxLogits);
  const auto num_labels = next.ne(kIgnoreIndex).sum();  // without labels: NaN, with gradients of 0
  return (sum / num_labels.clamp_min(1)).masked_fill(num_labels == 0, NAN);
}

std::vector<int64_t> list_of(const std::optional<TokenIds>& ids) {
  if (!ids) return {};
  const auto* id = std::get_if<int64_t>(&*ids);
  return id != nullptr ? std::vector<int64_t>{*id} : std::get<std::vector<int64_t>>(*ids);
}

namespace {

// Samples: probabilities [B, vocab_size] -> [B, 1]. multinomial checks the probabilities and waits for the
// device, so on a GPU this function computes the formula of multinomial without the check. is_valid,
// initially undefined, becomes false on the device if any probability is not a number in [0, 1].
Tensor sample(const Tensor& probabilities, const std::optional<at::Generator>& generator, Tensor& is_valid) {
  if (!probabilities.is_cuda()) return probabilities.multinomial(1, /*replacement=*/false, generator);
  const auto numbers = (probabilities <= 1).all();
  is_valid = is_valid.defined() ? is_valid & numbers : numbers;
  return (probabilities / at::empty_like(probabilities).exponential_(1, generator))
      .argmax(-1, /*keepdim=*/true);
}

void check_probabilities(const Tensor& is_valid) {
  TORCH_CHECK(!is_valid.defined() || is_valid.item<bool>(),
              "probability tensor contains either `inf`, `nan` or element < 0");  // as multinomial
}

// logits [B, vocab_size] -> [B, 1]
Tensor select_token(const Tensor& logits, const GenerateOptions& options, Tensor& is_valid) {
  if (options.temperature == 0) return logits.argmax(-1, /*keepdim=*/true);
  auto scores = logits.to(at::kFloat) / options.temperature;
  if (options.top_k) {
    const auto least = std::get<0>(scores.topk(std::min(*options.top_k, scores.size(-1)))).slice(-1, -1);
    scores = scores.masked_fill(scores < least, -INFINITY);
  }
  auto probabilities = scores.softmax(-1);
  if (options.top_p) {
    const auto [sorted, order] = probabilities.sort(/*dim=*/-1, /*descending=*/true);
    // Sum of the probabilities of more likely tokens.
    const auto before = sorted.cumsum(-1) - sorted;
    probabilities =
        at::zeros_like(probabilities).scatter(-1, order, sorted.masked_fill(before >= *options.top_p, 0.0));
  }
  return sample(probabilities, options.generator, is_valid);
}

}  // namespace

Tensor LanguageModelImpl::generate(const Tensor& prompt, const GenerateOptions& options) {
  const auto ids = to_token_ids(prompt, "ids");
  TORCH_CHECK_VALUE(ids.size(1) > 0, "ids has shape ", ids.sizes(),
                    "; expected [batch, tokens] with at least one token");
  TORCH_CHECK_VALUE(options.max_new_tokens >= 0, "max_new_tokens is ", options.max_new_tokens,
                    "; expected at least 0");
  TORCH_CHECK_VALUE(options.temperature >= 0 && std::isfinite(options.temperature), "temperature is ",
                    options.temperature, "; expected a number, at least 0");
  TORCH_CHECK_VALUE(!options.top_k || *options.top_k > 0, "top_k is ", options.top_k.value_or(0),
                    "; expected at least 1");
  TORCH_CHECK_VALUE(!options.top_p || (*options.top_p > 0 && *options.top_p <= 1), "top_p is ",
                    options.top_p.value_or(0), "; expected more than 0 and at most 1");
  const at::NoGradGuard no_grad;
  const auto eos_ids = list_of(options.eos_token_id ? options.eos_token_id : config.eos_token_id);
  const auto end = at::tensor(eos_ids, ids.options());
  auto next = ids, mask = options.attention_mask, is_valid = Tensor();
  auto has_ended = at::zeros({ids.size(0), 1}, ids.options().dtype(at::kBool));
  std::vector<Tensor> text{ids};
  Decoder decode(*this, make_recorder(ids));
  for (int64_t i = 0; i < options.max_new_tokens; ++i) {
    next = select_token(decode(next, mask), options, is_valid);
    mask = Tensor();  // generated tokens are valid
    if (!eos_ids.empty()) {
      next = next.masked_fill(has_ended, config.pad_token_id.value_or(eos_ids[0]));
      has_ended = has_ended | at::isin(next, end);
    }
    text.push_back(next);
    if (options.on_token) options.on_token(next);
    if (eos_ids.empty()) continue;  // the host does not wait for the device
    const bool all_ended = has_ended.all().item<bool>();
    check_probabilities(is_valid);
    if (all_ended) break;
  }
  check_probabilities(is_valid);
  return at::cat(text, 1);
}

}  // namespace girih::nn
