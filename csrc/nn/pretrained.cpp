// Reads and writes a model as a Hugging Face folder: config.json and model.safetensors.
#include <girih/language_model.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "layer.h"
#include "mixers.h"
#include "safetensors.h"

namespace girih::nn {
namespace {

using nlohmann::json;
using std::filesystem::path;

std::string read_text(const path& file) {
  std::error_code error;
  if (!is_regular_file(file, error)) throw std::runtime_error(file.string() + ": is not a file");
  std::ifstream in(file, std::ios::binary);
  if (!in) throw std::runtime_error(file.string() + ": cannot be opened");
  return {std::istreambuf_iterator<char>(in), {}};
}

Config read_config(const path& file) {
  const auto text = read_text(file);
  try {
    return Config::from_json(text);
  } catch (const c10::ValueError& error) {
    TORCH_CHECK_VALUE(false, file.string(), ": ", error.what_without_backtrace());
  }
}

// Throws for a model of transformers, converted or not: its config.json has other fields.
void check_model_type(const path& file) {
  const auto values = json::parse(read_text(file), nullptr, /*allow_exceptions=*/false);
  const auto type = values.is_object() ? values.value("model_type", json("girih")) : json("girih");
  TORCH_CHECK_VALUE(type == "girih", file.string(), ": model_type is ",
                    type.is_string() ? quote(type.get<std::string>()) : "no string",
                    "; expected girih: only Python reads other models, converted models included");
}

// The configuration, with the special tokens of generation_config.json, which Python's generate reads.
Config read_model_config(const path& folder) {
  check_model_type(folder / "config.json");
  auto config = read_config(folder / "config.json").without_unread();
  const auto file = folder / "generation_config.json";
  if (!exists(file)) return config;
  const auto tokens = read_config(file);
  if (tokens.bos_token_id) config.bos_token_id = tokens.bos_token_id;
  if (tokens.eos_token_id) config.eos_token_id = tokens.eos_token_id;
  if (tokens.pad_token_id) config.pad_token_id = tokens.pad_token_id;
  return config;
}

// The files with a model's tensors: model.safetensors, or the files that the index names.
std::set<path> find_tensor_files(const path& folder) {
  const auto index = folder / "model.safetensors.index.json";
  if (!exists(index)) return {folder / "model.safetensors"};
  const auto refuse = [&](const char* why) { throw std::runtime_error(index.string() + ": " + why); };
  const auto names = json::parse(read_text(index), nullptr, /*allow_exceptions=*/false);
  const auto map = names.is_object() ? names.find("weight_map") : names.end();
  if (map == names.end() || !map->is_object()) refuse("has no weight_map, an object");
  std::set<path> files;
  for (const auto& file : *map) {
    if (!file.is_string()) refuse("weight_map should name a file for each tensor");
    const path name = file.get<std::string>();
    if (name != name.filename() || name.native().size() > 255)
      refuse("weight_map should name files of its own folder");
    files.insert(folder / name);
  }
  return files;
}

NamedTensors collect_tensors(const LanguageModelImpl& model) {
  NamedTensors all;
  for (const auto& item : model.named_parameters()) all.emplace(item.key(), item.value());
  for (const auto& item : model.named_buffers()) all.emplace(item.key(), item.value());
  return all;
}

}  // namespace

void LanguageModelImpl::save_pretrained(const std::string& folder) const {
  std::filesystem::create_directories(folder);
  write_safetensors(path(folder) / "model.safetensors", collect_tensors(*this));
  write_atomically(path(folder) / "config.json", [&](std::ostream& out) { out << config.to_json(); });
}

namespace {

// Throws unless the files hold exactly the tensors of the model.
void check_tensors(const std::string& folder, const LanguageModelImpl& model,
                   const std::vector<SafetensorsFile>& files) {
  const auto all = collect_tensors(model);
  const auto earlier = earlier_mixers(model.config);
  auto missing = all;
  for (const auto& file : files) {
    for (const auto& [name, entry] : file.entries()) {
      const auto wanted = all.find(name);
      if (wanted == all.end() && name == "lm_head.weight" && model.config.tie_word_embeddings) continue;
      TORCH_CHECK_VALUE(wanted != all.end(), file.file().string(), ": ", quote(name),
                        " is unknown to this model", earlier);
      TORCH_CHECK_VALUE(wanted->second.sizes() == entry.shape, file.file().string(), ": ", name,
                        " has shape ", at::IntArrayRef(entry.shape), "; expected ", wanted->second.sizes(),
                        earlier);
      TORCH_CHECK_VALUE(at::isFloatingType(entry.dtype), file.file().string(), ": ", name, " is ",
                        entry.dtype, "; expected a floating dtype");
      TORCH_CHECK_VALUE(missing.erase(name) == 1, file.file().string(), ": ", name,
                        " is in another file too");
    }
  }
  TORCH_CHECK_VALUE(missing.empty(), folder, ": ", missing.size(), " parameters are missing, ",
                    missing.begin()->first, " among them", earlier);
}

}  // namespace

LanguageModel from_pretrained(const std::string& folder, at::Device device) {
  const auto config = read_model_config(folder).completed();
  std::vector<SafetensorsFile> files;
  double num_elements = 0;
  for (const auto& file : find_tensor_files(folder)) {
    files.emplace_back(file);
    for (const auto& [name, entry] : files.back().entries())
      num_elements += double(c10::multiply_integers(entry.shape));
  }
  check_parameter_count(config, num_elements, "its files hold");
  LanguageModel model = [&] {
    const SkipInitGuard guard;
    return LanguageModel(config);
  }();
  check_tensors(folder, *model, files);
  const auto all = collect_tensors(*model);
  const at::NoGradGuard no_grad;
  for (const auto& file : files) {
    for (const auto& [name, entry] : file.entries()) {
      if (const auto found = all.find(name); found != all.end())
        found->second.set_data(file.read(entry).to(device));
    }
  }
  model->eval();
  return model;
}

}  // namespace girih::nn
