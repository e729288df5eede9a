// Small language models of every mixer.
#pragma once

#include <girih/girih.h>

#include <string>
#include <vector>

namespace girih::test {

constexpr int64_t kHidden = 16, kChunk = 4;

// Configurations of every mixer, small.
inline std::vector<nn::Config> configurations() {
  std::vector<nn::Config> all;
  for (const auto& mixer : nn::mixer_names()) {
    nn::Config config{.vocab_size = 11,
                      .hidden_size = kHidden,
                      .num_hidden_layers = 2,
                      .mixer = mixer,
                      .num_heads = 2,
                      .num_slots = 5,
                      .chunk = kChunk};
    all.push_back(config);
  }
  auto hybrid = all[0];
  hybrid.hybrid = {"cat", "gsa"};
  all.push_back(hybrid);
  auto bent = all[0];
  bent.mixer = "delta_product";
  bent.between_chunks = "gelu";
  all.push_back(bent);
  return all;
}

inline std::string name_of(const nn::Config& config) {
  std::string name = config.mixer;
  for (const auto& part : config.hybrid) name += " " + part;
  return name;
}

inline at::Tensor ids(int64_t B, int64_t T) { return at::randint(11, {B, T}, at::kLong); }

inline nn::LanguageModel in_double(const nn::Config& config) {
  at::manual_seed(0);
  nn::LanguageModel model(config);
  model->to(at::kDouble);
  return model;
}

}  // namespace girih::test
