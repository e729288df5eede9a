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
