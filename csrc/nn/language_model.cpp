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
  if (!are_few(x)) {
    const auto after = parts(x, {}, call.attention_mask, call.state, call.use_cache, call.cu_seqlens);
    return {after.x + after.branch, after.state};
  }
  auto [h, state] = run_onto(x, *mixer, mixer_norm->input(), call);
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

Tensor BlockImpl::around(const Tensor& x,
                         const std::function<Tensor(const Tensor&, const RowInput&, const Tensor&)>& mix) {
  if (are_few(x)) {
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
  const bool few = are_few(x);
  State after;
  for (size_t i = 0; i < layers->size(); ++i) {
    auto& block = layers->at<BlockImpl>(i);
    if (few) {
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

Config affordable(Config config) {
  expect_memory(config, int64_t(c10::elementSize(c10::get_default_dtype_as_scalartype())));
  return config;
}

Tensor tokens_of(const Tensor& tensor, const char* name) {
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_VALUE(tensor.dim() == 2 && (dtype == at::kLong || dtype == at::kInt), name, " is ", dtype,
                    " of shape ", tensor.sizes(), "; expected int64 or int32, [batch, tokens]");
  return tensor.to(at::kLong);
}

}  // namespace

LanguageModelImpl::LanguageModelImpl(const Config& settings) : config(affordable(settings.completed())) {
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
  if (WithoutValues::on()) return;
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
    const WithoutValues all_are_the_models;
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
  const auto ids = tokens_of(input, "ids");
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
  constexpr int64_t kIgnored = -100, kLogits = int64_t{1} << 26;
  const auto tokens = tokens_of(ids, "ids");
  const auto next = (labels.defined() ? tokens_of(labels, "labels") : tokens).slice(1, 1).flatten();
  const auto x = model->forward(tokens).first.slice(1, 0, -1).flatten(0, 1);
  const auto sum = fused::linear_cross_entropy(x, head_weight(), next, kIgnored, kLogits);
  const auto counted = next.ne(kIgnored).sum();  // without labels: NaN, with gradients of 0
  return (sum / counted.clamp_min(1)).masked_fill(counted == 0, NAN);
}

std::vector<int64_t> list_of(const std::optional<TokenIds>& ids) {
  if (!ids) return {};
  const auto* id = std::get_if<int64_t>(&*ids);
  return id != nullptr ? std::vector<int64_t>{*id} : std::get<std::vector<int64_t>>(*ids);
}

namespace {

// Samples: chances [B, vocab_size] -> [B, 1]. multinomial checks the chances and waits for the device, so on
// a GPU this is its formula without the check. `sound`, initially undefined, becomes false on the device if
// any chance is not a number in [0, 1].
Tensor draw(const Tensor& chances, const std::optional<at::Generator>& generator, Tensor& sound) {
  if (!chances.is_cuda()) return chances.multinomial(1, /*replacement=*/false, generator);
  const auto numbers = (chances <= 1).all();
  sound = sound.defined() ? sound & numbers : numbers;
  return (chances / at::empty_like(chances).exponential_(1, generator)).argmax(-1, /*keepdim=*/true);
}

void check_sound(const Tensor& sound) {
  TORCH_CHECK(!sound.defined() || sound.item<bool>(),
              "probability tensor contains either `inf`, `nan` or element < 0");  // as multinomial
}

// logits [B, vocab_size] -> [B, 1]
Tensor choose(const Tensor& logits, const GenerateOptions& options, Tensor& sound) {
  if (options.temperature == 0) return logits.argmax(-1, /*keepdim=*/true);
  auto scores = logits.to(at::kFloat) / options.temperature;
  if (options.top_k) {
    const auto least = std::get<0>(scores.topk(std::min(*options.top_k, scores.size(-1)))).slice(-1, -1);
    scores = scores.masked_fill(scores < least, -INFINITY);
  }
  auto chances = scores.softmax(-1);
  if (options.top_p) {
    const auto [sorted, order] = chances.sort(/*dim=*/-1, /*descending=*/true);
    // Sum of the chances of more likely tokens.
    const auto before = sorted.cumsum(-1) - sorted;
    chances = at::zeros_like(chances).scatter(-1, order, sorted.masked_fill(before >= *options.top_p, 0.0));
  }
  return draw(chances, options.generator, sound);
}

}  // namespace

Tensor LanguageModelImpl::generate(const Tensor& prompt, const GenerateOptions& options) {
  const auto ids = tokens_of(prompt, "ids");
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
  const auto ends = list_of(options.eos_token_id ? options.eos_token_id : config.eos_token_id);
  const auto end = at::tensor(ends, ids.options());
  auto next = ids, mask = options.attention_mask, sound = Tensor();
  auto ended = at::zeros({ids.size(0), 1}, ids.options().dtype(at::kBool));
  std::vector<Tensor> text{ids};
  Decoder decode(*this, recorder_for(ids));
  for (int64_t i = 0; i < options.max_new_tokens; ++i) {
    next = choose(decode(next, mask), options, sound);
    mask = Tensor();  // generated tokens are valid
    if (!ends.empty()) {
      next = next.masked_fill(ended, config.pad_token_id.value_or(ends[0]));
      ended = ended | at::isin(next, end);
    }
    text.push_back(next);
    if (options.on_token) options.on_token(next);
    if (ends.empty()) continue;  // the host does not wait for the device
    const bool all_ended = ended.all().item<bool>();
    check_sound(sound);
    if (all_ended) break;
  }
  check_sound(sound);
  return at::cat(text, 1);
}

}  // namespace girih::nn
