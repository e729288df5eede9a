#include "recipe.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>
#include <sstream>

#include "recipes.h"  // kRecipes, the text; made by CMake

namespace girih::programs {
namespace {

constexpr int64_t kStep = 8;  // what the width of an MLP is a multiple of

// The configuration with MLPs of so many steps, or as many layers for each of its names where its blocks have
// no MLP.
nn::Config with_steps(nn::Config config, const std::vector<std::string>& names, int64_t steps) {
  const auto count = static_cast<int64_t>(names.size());
  if (config.reads("intermediate_size")) {
    config.intermediate_size = kStep * steps;
  } else {
    config.num_hidden_layers = count * steps;
  }
  if (count == 1) {
    config.mixer = names[0];
    return config;
  }
  config.hybrid.clear();
  for (int64_t i = 0; i < config.num_hidden_layers; ++i)
    config.hybrid.push_back(names[static_cast<size_t>(i % count)]);
  return config;
}

}  // namespace

int64_t count_parameters(const nn::LanguageModel& model) {
  int64_t count = 0;
  for (const auto& parameter : model->parameters()) count += parameter.numel();
  return count;
}

Recipe recipe_of(const std::string& size) {
  const auto all = nlohmann::json::parse(kRecipes);
  std::string known;
  for (const auto& [name, recipe] : all.items()) known += (known.empty() ? "" : ", ") + name;
  TORCH_CHECK_VALUE(all.contains(size), "size ", size, ": unknown, there are ", known);
  const auto& of = all.at(size);
  return {of.at("parameters"), of.at("layers"), of.at("heads"), of.at("head_dim"),      of.at("slots"),
          of.at("context"),    of.at("batch"),  of.at("steps"), of.at("learning_rate"), of.at("held_out")};
}

Recipe with_context(Recipe size, int64_t context) {
  const auto tokens = size.batch * size.context;
  TORCH_CHECK_VALUE(context >= 1 && tokens % context == 0, "context ", context,
                    ": expected a divisor of the ", tokens, " tokens of a step");
  size.held_out = std::max<int64_t>(1, size.held_out * size.context / context);
  size.batch = tokens / context;
  size.context = context;
  return size;
}

nn::Config config_of_size(const std::string& mixer, const Recipe& size, const std::vector<int64_t>& chunks,
                          const std::string& options) {
  std::vector<std::string> names;
  std::istringstream in(mixer);
  for (std::string name; std::getline(in, name, ',');) names.push_back(name);
  TORCH_CHECK_VALUE(!names.empty() && static_cast<int64_t>(names.size()) <= size.layers, "mixer ", mixer,
                    ": ", names.size(), " cannot take turns over ", size.layers, " layers");
  nn::Config config;
  config.vocab_size = 256;
  config.hidden_size = size.heads * size.head_dim;
  config.num_hidden_layers = size.layers;
  config.num_heads = size.heads;
  config.head_dim = size.head_dim;
  if (!chunks.empty()) {
    config.chunks = chunks;
    config.chunk = std::ranges::count(chunks, 16) > 0 ? 16 : chunks[0];
  }
  if (names.size() == 1) {
    config.mixer = mixer;
  } else {
    config.hybrid = names;  // what it reads; with_steps has one for each layer
  }
  config.max_position_embeddings = std::max(config.max_position_embeddings, size.context);
  const auto given = config.set_options(options);
  for (const auto& name : given) {
    for (const char* of_size : {"mixer", "vocab_size", "hidden_size", "num_hidden_layers", "num_heads",
                                "head_dim", "intermediate_size", "chunks"})
      TORCH_CHECK_VALUE(name != of_size, "options '", options, "': ", name,
                        " is not an option; the size or --", name, " sets it");
  }
  if (config.reads("num_slots") && std::ranges::count(given, "num_slots") == 0) config.num_slots = size.slots;
  // As the parameters grow with the width or the layers, by a line.
  const auto parameters = [&](int64_t steps) {
    return count_parameters(nn::LanguageModel(with_steps(config, names, steps)));
  };
  const auto least = parameters(1), a_step = parameters(2) - least;
  const auto more = std::lrint(static_cast<double>(size.parameters - least) / static_cast<double>(a_step));
  const auto steps = std::max<int64_t>(1, 1 + more);
  const auto found = with_steps(config, names, steps);
  const auto off = std::abs(least + (steps - 1) * a_step - size.parameters);
  const auto allowed =
      found.intermediate_size ? 0.02 * static_cast<double>(size.parameters) : static_cast<double>(a_step) / 2;
  TORCH_CHECK_VALUE(static_cast<double>(off) <= allowed, "mixer ", mixer, ": it has ", least,
                    " parameters or more, asked for ", size.parameters);
  return found;
}

double rate_at(int64_t step, int64_t steps) {
  const auto warm_up = std::max<int64_t>(1, steps / 20);
  if (step < warm_up) return static_cast<double>(step) / static_cast<double>(warm_up);
  const auto done =
      static_cast<double>(step - warm_up) / static_cast<double>(std::max<int64_t>(1, steps - warm_up));
  return 0.5 * (1 + std::cos(std::numbers::pi * done));
}

}  // namespace girih::programs
