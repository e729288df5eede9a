// A configuration: its text, what it allows, and the values that follow from others. Python's GirihConfig
// asks here, so both accept the same and refuse in the same words.
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "fields.h"
#include "layer.h"
#include "mixers.h"

namespace girih::nn {
namespace {

using nlohmann::json;

// A value as a message shows it: never more than a line, however large or deep it is.
std::string shown(const json& value) {
  if (value.is_structured()) return value.is_array() ? "a list" : "an object";
  const auto text = value.dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace);
  return text.size() <= 60 ? text : text.substr(0, 57) + "...";
}

// A word that is none of those expected.
std::string quoted_word(const std::string& word) {
  const auto text = shown(word);
  return "'" + text.substr(1, text.size() - (text.ends_with('"') ? 2 : 1)) + "'";
}

[[noreturn]] void refuse_type(const char* name, const json& value, const char* type) {
  TORCH_CHECK_VALUE(false, name, " is ", shown(value), "; expected ", type);
}

void read_value(const char* name, const json& value, int64_t& field) {
  if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX))
    refuse_type(name, value, "an integer");
  field = value.get<int64_t>();
}
void read_value(const char* name, const json& value, double& field) {
  if (!value.is_number()) refuse_type(name, value, "a number");
  field = value.get<double>();
}
void read_value(const char* name, const json& value, bool& field) {
  if (!value.is_boolean()) refuse_type(name, value, "true or false");
  field = value.get<bool>();
}
void read_value(const char* name, const json& value, std::string& field) {
  if (!value.is_string()) refuse_type(name, value, "a string");
  field = value.get<std::string>();
}
void read_value(const char* name, const json& value, TokenIds& field) {
  if (!value.is_array()) return read_value(name, value, field.emplace<int64_t>());
  auto& ids = field.emplace<std::vector<int64_t>>();
  for (const auto& id : value) read_value(name, id, ids.emplace_back());
}
void read_value(const char* name, const json& value, std::vector<int64_t>& field) {
  if (!value.is_array() || value.empty()) refuse_type(name, value, "a list of integers");
  for (const auto& item : value) read_value(name, item, field.emplace_back());
}
template <class T>
void read_value(const char* name, const json& value, std::optional<T>& field) {
  field = std::nullopt;
  if (!value.is_null()) read_value(name, value, field.emplace());
}

template <class T>
json written(const T& field) {
  return field;
}
json written(const TokenIds& field) {
  return std::visit([](const auto& ids) { return json(ids); }, field);
}
template <class T>
json written(const std::optional<T>& field) {
  return field ? written(*field) : json();
}

}  // namespace

void check_value(const char* name, int64_t value, const Allowed& allowed) {
  TORCH_CHECK_VALUE(double(value) >= allowed.least && double(value) <= allowed.most, name, " is ", value,
                    "; expected ", int64_t(allowed.least), " to ", int64_t(allowed.most));
}
void check_value(const char* name, const std::string& value, const Allowed& allowed) {
  TORCH_CHECK_VALUE(allowed.words.empty() || std::ranges::count(allowed.words, value) > 0, name, " is ",
                    quoted_word(value), "; expected one of ", c10::Join(", ", allowed.words));
}

namespace {

void check_value(const char* name, double value, const Allowed& allowed) {
  TORCH_CHECK_VALUE(value >= allowed.least && value <= allowed.most, name, " is ", value, "; expected ",
                    allowed.least, " to ", allowed.most);
}
void check_value(const char*, bool, const Allowed&) {}
void check_value(const char* name, const std::vector<int64_t>& value, const Allowed& allowed) {
  for (const auto item : value) check_value(name, item, allowed);
}
void check_value(const char* name, const TokenIds& value, const Allowed& allowed) {
  if (const auto* id = std::get_if<int64_t>(&value)) return check_value(name, *id, allowed);
  for (const auto id : std::get<std::vector<int64_t>>(value)) check_value(name, id, allowed);
}
template <class T>
void check_value(const char* name, const std::optional<T>& value, const Allowed& allowed) {
  if (value) check_value(name, *value, allowed);
}

// The bounds of one mixer's fields, and what it asks of them together.
void check_mixer(const Config& c, const Mixer& mixer) {
  for (const auto& field : mixer.fields) {
    if (!field.least) continue;
    for_each_field(c, [&](const char* name, const auto& value, const Allowed&) {
      if constexpr (std::is_same_v<std::decay_t<decltype(value)>, int64_t>) {
        TORCH_CHECK_VALUE(field.name != name || (value >= *field.least && value <= *field.most), name, " is ",
                          value, "; expected ", *field.least, " to ", *field.most, " for ", mixer.name);
      }
    });
  }
  mixer.check(c);
}

void check_names(const Config& c) {
  for (const auto& name : c.mixers()) {
    TORCH_CHECK_VALUE(mixers().contains(name), "mixer is ", quoted_word(name), "; expected one of ",
                      c10::Join(", ", mixer_names()));
  }
}

void check_mixers(const Config& c) {
  auto used = c.mixers();
  mixers().at("mag").check(c);  // names that exist, used or not
  if (std::ranges::count(used, "mag") > 0) used.insert(used.end(), {c.mag_base, c.mag_mixer});
  std::ranges::sort(used);
  used.erase(std::unique(used.begin(), used.end()), used.end());
  TORCH_CHECK_VALUE(!c.chunks || c.is_whole_cat(), "chunks is [", c10::Join(", ", *c.chunks),
                    "]; expected none: it is for the whole CAT model, mixer 'cat', to choose from");
  for (const auto& name : used) {
    if (c.is_whole_cat() && name == "cat") {
      check_cat_model(c);
    } else {
      check_mixer(c, mixers().at(name));
    }
  }
}

}  // namespace

std::vector<std::string> Config::mixers() const {
  return hybrid.empty() ? std::vector<std::string>(std::max<int64_t>(num_hidden_layers, 0), mixer) : hybrid;
}

Config Config::completed() const {
  for_each_field(*this, [](const char* name, const auto& field, const Allowed& allowed) {
    check_value(name, field, allowed);
  });
  auto c = *this;
  const auto layers = c.mixers();
  TORCH_CHECK_VALUE(int64_t(layers.size()) == num_hidden_layers, "mixer names ", layers.size(),
                    " layers; expected num_hidden_layers, ", num_hidden_layers);
  check_names(c);
  if (!c.num_kv_heads) c.num_kv_heads = num_heads;
  TORCH_CHECK_VALUE(num_heads % *c.num_kv_heads == 0, "num_kv_heads is ", *c.num_kv_heads,
                    "; expected a divisor of num_heads ", num_heads);
  TORCH_CHECK_VALUE(c.head_dim || hidden_size % num_heads == 0, "num_heads is ", num_heads,
                    ", which does not divide hidden_size ", hidden_size, "; give head_dim");
  if (!c.head_dim) c.head_dim = hidden_size / num_heads;
  // A gated layer of 8/3 has the parameters of a plain one of 4.
  if (!c.intermediate_size) c.intermediate_size = (8 * hidden_size + 95) / 96 * 32;
  if (!c.compressor_hidden_size)
    c.compressor_hidden_size = std::max(*c.head_dim, hidden_size / 2 / *c.head_dim * *c.head_dim);
  if (!c.compressor_layers) c.compressor_layers = std::max<int64_t>(1, num_hidden_layers / 2);
  if (!c.initializer_range) c.initializer_range = 1 / std::sqrt(double(hidden_size));
  check_mixers(c);
  return c;
}

Config Config::from_json(const std::string& text) {
  Config config;
  const auto values = json::parse(text, nullptr, /*allow_exceptions=*/false);
  TORCH_CHECK_VALUE(values.is_object(), "config: not a JSON object");
  for_each_field(config, [&](const char* name, auto& field, const Allowed&) {
    if (const auto value = values.find(name); value != values.end()) read_value(name, *value, field);
  });
  const auto mixer = values.find("mixer");
  if (mixer == values.end()) return config;
  if (!mixer->is_array()) {
    read_value("mixer", *mixer, config.mixer);
    return config;
  }
  TORCH_CHECK_VALUE(!mixer->empty(), "mixer is an empty list; expected a name, or one for each layer");
  for (const auto& name : *mixer) read_value("mixer", name, config.hybrid.emplace_back());
  return config;
}

std::string Config::to_json() const {
  json values = {{"model_type", "girih"}, {"architectures", {"GirihForCausalLM"}}};
  for_each_field(*this,
                 [&](const char* name, const auto& field, const Allowed&) { values[name] = written(field); });
  values["mixer"] = hybrid.empty() ? json(mixer) : json(hybrid);
  return values.dump(2) + "\n";
}

namespace {

// For Python: a configuration's text -> the same with every value that follows from others.
std::string complete_configuration(const std::string& text) {
  return Config::from_json(text).completed().to_json();
}

// For Python: refuses a configuration whose model there is no memory for.
void check_memory(const std::string& text, int64_t element_size) {
  expect_memory(Config::from_json(text).completed(), element_size);
}

// {"gsa": ["num_kv_heads", ...], ...}: the fields that each mixer reads.
std::string describe_mixers() {
  json all = json::object();
  for (const auto& [name, mixer] : mixers()) {
    auto& fields = all[name] = json::array();
    for (const auto& field : mixer.fields) fields.push_back(field.name);
  }
  return all.dump();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(girih, m) {
  m.def("complete_configuration(str text) -> str", &complete_configuration);
  m.def("check_memory(str configuration, int element_size) -> ()", &check_memory);
  m.def("describe_mixers() -> str", &describe_mixers);
}

}  // namespace girih::nn
