// Small language models of every mixer.
#pragma once

#include <girih/girih.h>

#include <string>
#include <vector>

namespace girih::test {

constexpr int64_t kHidden = 16, kChunk = 4;

// Sets these sizes where the configuration's mixers read them, and the defaults elsewhere.
inline nn::Config with_sizes(nn::Config config, int64_t num_slots, int64_t chunk = kChunk) {
  config.num_slots = config.reads("num_slots") ? num_slots : nn::Config{}.num_slots;
  config.chunk = config.reads("chunk") ? chunk : nn::Config{}.chunk;
  return config;
}

// Small configurations of every mixer.
inline std::vector<nn::Config> configurations() {
  std::vector<nn::Config> all;
  for (const auto& mixer : nn::mixer_names()) {
    nn::Config config{
        .vocab_size = 11, .hidden_size = kHidden, .num_hidden_layers = 2, .mixer = mixer, .num_heads = 2};
    all.push_back(config);
  }
  auto hybrid = all[0];
  hybrid.hybrid = {"cat", "gsa"};
  all.push_back(hybrid);
  auto nonlinear = all[0];
  nonlinear.mixer = "delta_product";
  nonlinear.between_chunks = "gelu";
  all.push_back(nonlinear);
  for (auto& config : all) config = with_sizes(config, 5);
  // Options of the papers' ablations.
  const auto with = [&](const auto& change) {
    auto config = all[0];
    config.num_slots = nn::Config{}.num_slots;
    change(config);
    all.push_back(config);
  };
  with([](auto& c) { c.mixer = "attention", c.window = 3; });
  with([](auto& c) { c.mixer = "attention", c.injections = {nn::Injection{}}; });
  with([](auto& c) {
    c.mixer = "attention", c.num_kv_heads = 1;
    c.injections = {nn::Injection{.layers = std::vector<int64_t>{1},
                                  .path = {.n = 3,
                                           .virtual_tokens = "both",
                                           .gate = "kv",
                                           .gate_per = "head",
                                           .pool = "window",
                                           .between_chunks = "tanh",
                                           .chunk = kChunk},
                                  .mix = {.weight = 0.7, .learned = true, .cross = true}}};
  });
  with([](auto& c) { c.mixer = "gsa", c.num_slots = 5, c.data_dependent_decay = false; });
  with([](auto& c) {
    c.mixer = "trellis", c.num_slots = 5, c.chunk = kChunk, c.shared_qk = true, c.normalize_kv = false;
    c.value_read = "phi", c.post_norm = false;
  });
  with([](auto& c) {
    c.mixer = "lattice", c.num_slots = 5, c.chunk = 1, c.objective = "encode", c.shrinkage = 0.01;
    c.post_norm = true;
  });
  with([](auto& c) { c.mixer = "lattice", c.num_slots = 5, c.chunk = 1, c.normalize = false; });
  return all;
}

inline std::string name_of(const nn::Config& config) {
  std::string name = config.mixer;
  for (const auto& part : config.hybrid) name += " " + part;
  if (!config.injections.empty()) name += ", injected";
  return name;
}

inline void collect_tensors(nn::State& state, std::vector<at::Tensor*>& found) {
  for (auto& tensor : state.tensors) {
    if (tensor.defined()) found.push_back(&tensor);
  }
  for (auto& part : state.parts) collect_tensors(part, found);
}

// The defined tensors of a state and of its parts.
inline std::vector<at::Tensor*> tensors_of(nn::State& state) {
  std::vector<at::Tensor*> found;
  collect_tensors(state, found);
  return found;
}

inline at::Tensor ids(int64_t B, int64_t T) { return at::randint(11, {B, T}, at::kLong); }

inline nn::LanguageModel in_double(const nn::Config& config) {
  at::manual_seed(0);
  nn::LanguageModel model(config);
  model->to(at::kDouble);
  return model;
}

}  // namespace girih::test
