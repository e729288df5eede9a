// Folders as Hugging Face lays them out: config.json and model.safetensors.
#include <girih/language_model.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "layer.h"
#include "safetensors.h"

namespace girih::nn {
namespace {

using nlohmann::json;
using std::filesystem::path;

// Every field of a configuration but the mixer, for reading and for writing.
template <class AnyConfig, class Visit>
void for_each_field(AnyConfig& c, Visit&& visit) {
  visit("vocab_size", c.vocab_size);
  visit("hidden_size", c.hidden_size);
  visit("num_hidden_layers", c.num_hidden_layers);
  visit("num_heads", c.num_heads);
  visit("num_kv_heads", c.num_kv_heads);
  visit("head_dim", c.head_dim);
  visit("intermediate_size", c.intermediate_size);
  visit("num_slots", c.num_slots);
  visit("chunk", c.chunk);
  visit("n", c.n);
  visit("gated", c.gated);
  visit("conv_size", c.conv_size);
  visit("phi", c.phi);
  visit("f", c.f);
  visit("objective", c.objective);
  visit("feature", c.feature);
  visit("between_chunks", c.between_chunks);
  visit("allow_neg_eigval", c.allow_neg_eigval);
  visit("mag_base", c.mag_base);
  visit("mag_mixer", c.mag_mixer);
  visit("mag_weight", c.mag_weight);
  visit("mag_learned", c.mag_learned);
  visit("mag_cross", c.mag_cross);
  visit("compressor_hidden_size", c.compressor_hidden_size);
  visit("compressor_layers", c.compressor_layers);
  visit("running_positions", c.running_positions);
  visit("max_position_embeddings", c.max_position_embeddings);
  visit("rope_theta", c.rope_theta);
  visit("norm_eps", c.norm_eps);
  visit("initializer_range", c.initializer_range);
  visit("tie_word_embeddings", c.tie_word_embeddings);
  visit("bos_token_id", c.bos_token_id);
  visit("eos_token_id", c.eos_token_id);
  visit("pad_token_id", c.pad_token_id);
}

template <class T>
void read_value(const json& value, T& field) {
  value.get_to(field);
}
template <class T>
void read_value(const json& value, std::optional<T>& field) {
  field = value.is_null() ? std::nullopt : std::optional<T>(value.get<T>());
}
template <class T>
json written(const T& field) {
  return field;
}
template <class T>
json written(const std::optional<T>& field) {
  return field ? json(*field) : json();
}

std::string text_of(const path& file) {
  std::ifstream in(file, std::ios::binary);
  if (!in) throw std::runtime_error(file.string() + ": cannot be opened");
  return {std::istreambuf_iterator<char>(in), {}};
}

// The files that hold a model's tensors: one, or those that an index names.
std::set<path> tensor_files(const path& folder) {
  const auto index = folder / "model.safetensors.index.json";
  if (!exists(index)) return {folder / "model.safetensors"};
  std::set<path> files;
  const auto names = json::parse(text_of(index), nullptr, /*allow_exceptions=*/false);
  if (!names.contains("weight_map")) throw std::runtime_error(index.string() + ": has no weight_map");
  for (const auto& file : names["weight_map"]) files.insert(folder / file.get<std::string>());
  return files;
}

NamedTensors parameters_and_buffers(const LanguageModelImpl& model) {
  NamedTensors all;
  for (const auto& item : model.named_parameters()) all.emplace(item.key(), item.value());
  for (const auto& item : model.named_buffers()) all.emplace(item.key(), item.value());
  return all;
}

}  // namespace

Config Config::from_json(const std::string& text) {
  Config config;
  const auto values = json::parse(text, nullptr, /*allow_exceptions=*/false);
  TORCH_CHECK_VALUE(values.is_object(), "config: not a JSON object");
  const auto read_field = [&](const char* name, auto& field) {
    if (!values.contains(name)) return;
    try {
      read_value(values[name], field);
    } catch (const json::exception&) {
      TORCH_CHECK_VALUE(false, "config: ", name, " is ", values[name].dump(), ", which is of the wrong type");
    }
  };
  for_each_field(config, read_field);
  if (values.contains("mixer") && values["mixer"].is_array()) {
    read_field("mixer", config.hybrid);
  } else {
    read_field("mixer", config.mixer);
  }
  return config;
}

std::string Config::to_json() const {
  json values = {{"model_type", "girih"}, {"architectures", {"GirihForCausalLM"}}};
  for_each_field(*this, [&](const char* name, const auto& field) { values[name] = written(field); });
  values["mixer"] = hybrid.empty() ? json(mixer) : json(hybrid);
  return values.dump(2) + "\n";
}

void LanguageModelImpl::save_pretrained(const std::string& folder) const {
  std::filesystem::create_directories(folder);
  write_safetensors(path(folder) / "model.safetensors", parameters_and_buffers(*this));
  std::ofstream out(path(folder) / "config.json");
  out << config.to_json();
  out.close();
  if (!out) throw std::runtime_error(folder + "/config.json: cannot be written");
}

LanguageModel from_pretrained(const std::string& folder, at::Device device) {
  LanguageModel model(Config::from_json(text_of(path(folder) / "config.json")));
  auto missing = parameters_and_buffers(*model);
  const at::NoGradGuard no_grad;
  for (const auto& file : tensor_files(folder)) {
    for (const auto& [name, tensor] : read_safetensors(file)) {
      const auto found = missing.find(name);
      if (found == missing.end() && name == "lm_head.weight" && model->config.tie_word_embeddings) continue;
      TORCH_CHECK_VALUE(found != missing.end(), file.string(), ": ", name, " is unknown to this model");
      TORCH_CHECK_VALUE(found->second.sizes() == tensor.sizes(), file.string(), ": ", name, " has shape ",
                        tensor.sizes(), "; expected ", found->second.sizes());
      found->second.set_data(tensor.to(device));
      missing.erase(found);
    }
  }
  TORCH_CHECK_VALUE(missing.empty(), folder, ": ", missing.size(), " parameters are missing, ",
                    missing.begin()->first, " among them");
  model->eval();
  return model;
}

}  // namespace girih::nn
