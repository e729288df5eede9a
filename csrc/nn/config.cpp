// Config: conversion from and to JSON, checks, and defaults that depend on other fields. Python's GirihConfig
// calls the functions registered below, so C++ and Python have the same checks and messages.
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <sstream>

#include "fields.h"
#include "layer.h"
#include "mixers.h"

namespace girih::nn {
namespace {

using nlohmann::json;

// A value for an error message: escaped, at most 60 characters; lists and objects by their kind.
std::string format_value(const json& value) {
  if (value.is_structured()) return value.is_array() ? "a list" : "an object";
  const auto text = value.dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace);
  return text.size() <= 60 ? text : text.substr(0, 57) + "...";
}

// A string value for an error message, in single quotes.
std::string quote_word(const std::string& word) {
  const auto text = format_value(word);
  return "'" + text.substr(1, text.size() - (text.ends_with('"') ? 2 : 1)) + "'";
}

[[noreturn]] void refuse_type(const char* name, const json& value, const char* type) {
  TORCH_CHECK_VALUE(false, name, " is ", format_value(value), "; expected ", type);
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
json to_json_value(const T& field) {
  return field;
}
json to_json_value(const TokenIds& field) {
  return std::visit([](const auto& ids) { return json(ids); }, field);
}
template <class T>
json to_json_value(const std::optional<T>& field) {
  return field ? to_json_value(*field) : json();
}

}  // namespace

void check_value(const char* name, int64_t value, const AllowedValues& allowed) {
  TORCH_CHECK_VALUE(double(value) >= allowed.least && double(value) <= allowed.most, name, " is ", value,
                    "; expected ", int64_t(allowed.least), " to ", int64_t(allowed.most));
}
void check_value(const char* name, const std::string& value, const AllowedValues& allowed) {
  TORCH_CHECK_VALUE(allowed.words.empty() || std::ranges::count(allowed.words, value) > 0, name, " is ",
                    quote_word(value), "; expected one of ", c10::Join(", ", allowed.words));
}

namespace {

void check_value(const char* name, double value, const AllowedValues& allowed) {
  TORCH_CHECK_VALUE(value >= allowed.least && value <= allowed.most, name, " is ", value, "; expected ",
                    allowed.least, " to ", allowed.most);
}
void check_value(const char*, bool, const AllowedValues&) {}
void check_value(const char* name, const std::vector<int64_t>& value, const AllowedValues& allowed) {
  for (const auto item : value) check_value(name, item, allowed);
}
void check_value(const char* name, const TokenIds& value, const AllowedValues& allowed) {
  if (const auto* id = std::get_if<int64_t>(&value)) return check_value(name, *id, allowed);
  for (const auto id : std::get<std::vector<int64_t>>(value)) check_value(name, id, allowed);
}
template <class T>
void check_value(const char* name, const std::optional<T>& value, const AllowedValues& allowed) {
  if (value) check_value(name, *value, allowed);
}

// Checks the fields that a mixer reads: its bounds, then Mixer::check.
void check_mixer(const Config& c, const Mixer& mixer) {
  for (const auto& field : mixer.fields) {
    if (!field.least) continue;
    for_each_field(c, [&](const char* name, const auto& value, const AllowedValues&) {
      if constexpr (std::is_same_v<std::decay_t<decltype(value)>, int64_t>) {
        TORCH_CHECK_VALUE(field.name != name || (value >= *field.least && value <= *field.most), name, " is ",
                          value, "; expected ", *field.least, " to ", *field.most, " for ", mixer.name);
      }
    });
  }
  mixer.check(c);
}

void check_mixer_names(const Config& c) {
  for (const auto& name : c.mixers()) {
    TORCH_CHECK_VALUE(mixers().contains(name), "mixer is ", quote_word(name), "; expected one of ",
                      c10::Join(", ", mixer_names()));
  }
}

void check_mixers(const Config& c) {
  auto used = c.mixers();
  mixers().at("mag").check(c);  // mag_base and mag_mixer must be mixers in every configuration
  if (std::ranges::count(used, "mag") > 0) used.insert(used.end(), {c.mag_base, c.mag_mixer});
  std::ranges::sort(used);
  used.erase(std::unique(used.begin(), used.end()), used.end());
  for (const auto& name : used) {
    if (c.is_whole_cat() && name == "cat") {
      check_cat_model(c);
    } else {
      check_mixer(c, mixers().at(name));
    }
  }
}

// Indices of the layers whose mixer is attention; attention inside mag or CAT does not count.
std::vector<int64_t> find_attention_layers(const Config& c) {
  std::vector<int64_t> found;
  const auto names = c.mixers();
  for (size_t i = 0; i < names.size(); ++i)
    if (names[i] == "attention") found.push_back(int64_t(i));
  return found;
}

void check_injections(const Config& c) {
  const auto attention = find_attention_layers(c);
  std::set<int64_t> injected;
  for (const auto& injection : c.injections) {
    for_each_injection_field(injection,
                             [](const char* name, const auto& field, const AllowedValues& allowed) {
                               check_value((std::string("girih.") + name).c_str(), field, allowed);
                             });
    check_path_options(injection.path);
    check_mixture(injection.mix);
    TORCH_CHECK_VALUE(!attention.empty(), "girih: the model has no attention to inject into; expected mixer ",
                      "'attention', or a list with it");
    const auto layers = injected_layers(c, injection);
    TORCH_CHECK_VALUE(!layers.empty(),
                      "girih.layers is an empty list; expected one index at least, or none for all layers");
    for (const auto layer : std::set(layers.begin(), layers.end())) {
      TORCH_CHECK_VALUE(std::ranges::count(attention, layer) > 0, "girih.layers has ", layer,
                        "; attention that can be converted is at ", c10::Join(", ", attention));
      TORCH_CHECK_VALUE(injected.insert(layer).second, "girih.layers has ", layer,
                        ", which has a linear path already");
    }
  }
}

// Whether only some mixers read the field. num_kv_heads, head_dim and norm_eps belong to every model.
bool is_option(const std::string& field) {
  static const std::set<std::string> all = [] {
    std::set<std::string> found = {"compressor_hidden_size", "compressor_layers", "intermediate_size"};
    for (const auto& [name, mixer] : mixers())
      for (const auto& option : mixer.fields) found.insert(option.name);
    for (const char* shared : {"num_kv_heads", "head_dim", "norm_eps"}) found.erase(shared);
    return found;
  }();
  return all.contains(field);
}

std::map<std::string, json> fields_to_json(const Config& c) {
  std::map<std::string, json> fields;
  for_each_field(c, [&](const char* name, const auto& field, const AllowedValues&) {
    fields[name] = to_json_value(field);
  });
  return fields;
}

// Levenshtein distance of two words.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t(0));
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const auto replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row.back();
}

const std::set<std::string>& field_names() {
  static const std::set<std::string> all = [] {
    std::set<std::string> found = {"mixer"};
    for (const auto& [name, value] : fields_to_json(Config{})) found.insert(name);
    return found;
  }();
  return all;
}

// The field with the smallest edit distance.
std::string nearest_field(const std::string& word) {
  std::string found = "mixer";
  for (const auto& name : field_names())
    if (edit_distance(word, name) < edit_distance(word, found)) found = name;
  return found;
}

bool is_field(const std::string& name) { return field_names().contains(name); }

// Whether a name of config.json is within two edits of a field's name. Other names belong to Hugging Face
// libraries and other tools, which also have further *_token_id fields.
bool is_misspelt(const std::string& word) {
  if (is_field(word) || word.ends_with("_token_id") || word.ends_with("_token") || word == "num_beams")
    return false;
  const auto name = nearest_field(word);
  return name.size() >= 5 && edit_distance(word, name) <= 2;
}

void check_spelling(const json& values) {
  for (const auto& [word, value] : values.items())
    TORCH_CHECK_VALUE(!is_misspelt(word), word, " is not a field of a configuration; did you mean ",
                      nearest_field(word), "?");
}

void read_mixer(const json& value, Config& config) {
  if (!value.is_array()) {
    read_value("mixer", value, config.mixer);
    return;
  }
  TORCH_CHECK_VALUE(!value.empty(), "mixer is an empty list; expected a name, or one for each layer");
  for (const auto& name : value) read_value("mixer", name, config.hybrid.emplace_back());
}

// Reads an entry of the list `girih`. Throws for a field that this version does not have.
Injection read_injection(const json& entry) {
  TORCH_CHECK_VALUE(entry.is_object() && entry.contains("how"), "girih holds ", format_value(entry),
                    "; expected what girih.inject saved");
  TORCH_CHECK_VALUE(entry["how"] == "inject", "girih.how is ", format_value(entry["how"]),
                    "; expected inject: only Python reads replaced attention");
  const auto mixer = entry.value("mixer", json("delta_product"));
  TORCH_CHECK_VALUE(mixer == "delta_product", "girih.mixer is ", format_value(mixer),
                    "; expected delta_product: only Python reads other paths");
  const auto window = entry.value("max_self_attn_length", json());
  TORCH_CHECK_VALUE(window.is_null(), "girih.max_self_attn_length is ", format_value(window),
                    "; expected null: girih's own attention keeps all keys");
  std::set<std::string> known_names = {"how", "mixer", "max_self_attn_length"};
  Injection injection;
  for_each_injection_field(injection, [&](const char* name, auto& field, const AllowedValues&) {
    known_names.insert(name);
    if (const auto value = entry.find(name); value != entry.end())
      read_value((std::string("girih.") + name).c_str(), *value, field);
  });
  for (const auto& [name, value] : entry.items())
    TORCH_CHECK_VALUE(known_names.contains(name), "girih has ", quote_word(name),
                      ", which this version of girih does not know");
  return injection;
}

json to_json_value(const Injection& injection) {
  json entry = {{"how", "inject"}, {"mixer", "delta_product"}, {"max_self_attn_length", nullptr}};
  for_each_injection_field(injection, [&](const char* name, const auto& field, const AllowedValues&) {
    entry[name] = to_json_value(field);
  });
  return entry;
}

void read_fields(const json& values, Config& config) {
  for_each_field(config, [&](const char* name, auto& field, const AllowedValues&) {
    if (const auto value = values.find(name); value != values.end()) read_value(name, *value, field);
  });
  if (const auto mixer = values.find("mixer"); mixer != values.end()) read_mixer(*mixer, config);
  const auto injections = values.find("girih");
  if (injections == values.end() || injections->is_null()) return;
  if (!injections->is_array()) refuse_type("girih", *injections, "a list of what girih.inject saved");
  for (const auto& entry : *injections) config.injections.push_back(read_injection(entry));
}

// "chunk=1 phi=identity" -> {"chunk": 1, "phi": "identity"}.
json parse_options(const std::string& options) {
  json values = json::object();
  std::istringstream in(options);
  for (std::string option; in >> option;) {
    const auto equals = option.find('=');
    TORCH_CHECK_VALUE(equals != std::string::npos && equals > 0, "options: ", quote_word(option),
                      " is not name=value");
    const auto name = option.substr(0, equals), text = option.substr(equals + 1);
    TORCH_CHECK_VALUE(is_field(name), name, " is not a field of a configuration; did you mean ",
                      nearest_field(name), "?");
    TORCH_CHECK_VALUE(!values.contains(name), name, " is given twice");
    auto value = json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (value.is_discarded())
      value = text == "True" ? json(true) : text == "False" ? json(false) : json(text);
    values[name] = std::move(value);
  }
  return values;
}

// Config::completed without check_unread_options and the checks of mixers.
Config complete(const Config& config) {
  if (config.between_chunks) {  // before the range of the field, which is wider
    const auto& range = get_operator("delta_product").option("chunk");
    TORCH_CHECK_VALUE(double(config.chunk) >= range.least && double(config.chunk) <= range.most, "chunk is ",
                      config.chunk, "; expected ", int64_t(range.least), " to ", int64_t(range.most),
                      " for between_chunks");
  }
  for_each_field(config, [](const char* name, const auto& field, const AllowedValues& allowed) {
    check_value(name, field, allowed);
  });
  auto c = config;
  const auto layers = c.mixers();
  TORCH_CHECK_VALUE(int64_t(layers.size()) == c.num_hidden_layers, "mixer names ", layers.size(),
                    " layers; expected num_hidden_layers, ", c.num_hidden_layers);
  check_mixer_names(c);
  TORCH_CHECK_VALUE(!c.chunks || c.is_whole_cat(), "chunks is [", c10::Join(", ", *c.chunks),
                    "]; expected none: only the CAT model, mixer 'cat', has a choice of chunks");
  if (!c.num_kv_heads) c.num_kv_heads = c.num_heads;
  TORCH_CHECK_VALUE(c.num_heads % *c.num_kv_heads == 0, "num_kv_heads is ", *c.num_kv_heads,
                    "; expected a divisor of num_heads ", c.num_heads);
  TORCH_CHECK_VALUE(c.head_dim || c.hidden_size % c.num_heads == 0, "num_heads is ", c.num_heads,
                    ", which does not divide hidden_size ", c.hidden_size, "; give head_dim");
  if (!c.head_dim) c.head_dim = c.hidden_size / c.num_heads;
  // SwiGLU of width 8/3 hidden_size has as many parameters as an MLP of width 4 hidden_size.
  if (!c.intermediate_size && c.reads("intermediate_size"))
    c.intermediate_size = (8 * c.hidden_size + 95) / 96 * 32;
  if (c.is_whole_cat()) {
    if (!c.compressor_hidden_size)
      c.compressor_hidden_size = std::max(*c.head_dim, c.hidden_size / 2 / *c.head_dim * *c.head_dim);
    if (!c.compressor_layers) c.compressor_layers = std::max<int64_t>(1, c.num_hidden_layers / 2);
  }
  if (!c.initializer_range) c.initializer_range = 1 / std::sqrt(double(c.hidden_size));
  return c;
}

// Throws for an option that differs from its default and that no mixer reads: it would have no effect.
void check_unread_options(const Config& c) {
  const auto unread = c.unread_options();
  if (unread.empty()) return;
  auto used = c.mixers();
  std::ranges::sort(used);
  used.erase(std::unique(used.begin(), used.end()), used.end());
  const auto& name = unread[0];
  auto between = c;
  between.between_chunks = "tanh";
  TORCH_CHECK_VALUE(false, name, " is ", format_value(fields_to_json(c).at(name)), ", which mixer",
                    used.size() > 1 ? "s " : " ", c10::Join(", ", used),
                    used.size() > 1 ? " do not read" : " does not read",
                    between.reads(name) ? " without between_chunks" : "", "; expected its default, ",
                    format_value(fields_to_json(Config{}).at(name)));
}

}  // namespace

void check_path_options(const LinearPathOptions& options) {
  for_each_path_option(options, [](const char* name, const auto& option, const AllowedValues& allowed) {
    check_value(name, option, allowed);
  });
  TORCH_CHECK_VALUE(options.between_chunks || options.chunk == LinearPathOptions{}.chunk, "chunk is ",
                    options.chunk, "; expected none: it is for between_chunks");
  TORCH_CHECK_VALUE(options.n > 1 || options.virtual_tokens == LinearPathOptions{}.virtual_tokens,
                    "virtual_tokens is ", options.virtual_tokens, "; expected none: it is for n above 1");
}

std::vector<int64_t> injected_layers(const Config& config, const Injection& injection) {
  return injection.layers.value_or(find_attention_layers(config));
}

Config complete_for_layer(const Config& config) {
  const auto c = complete(config);
  check_mixers(c);
  return c;
}

std::vector<std::string> Config::mixers() const {
  return hybrid.empty() ? std::vector<std::string>(std::max<int64_t>(num_hidden_layers, 0), mixer) : hybrid;
}

Config Config::completed() const {
  const auto c = complete(*this);
  nn::mixers().at("mag").check(c);  // mag_base and mag_mixer must be mixers in every configuration
  check_unread_options(c);
  check_mixers(c);
  check_injections(c);
  return c;
}

std::vector<std::string> Config::unread_options() const {
  std::vector<std::string> unread;
  const auto defaults = fields_to_json(Config{});
  for (const auto& [name, value] : fields_to_json(*this))
    if (is_option(name) && value != defaults.at(name) && !reads(name)) unread.push_back(name);
  return unread;
}

Config Config::without_unread() const {
  auto values = json::parse(to_json());
  for (const auto& name : unread_options()) values.erase(name);
  return from_json(values.dump());
}

std::vector<std::string> Config::set_options(const std::string& options) {
  const auto values = parse_options(options);
  read_fields(values, *this);
  std::vector<std::string> names;
  for (const auto& [name, value] : values.items()) names.push_back(name);
  return names;
}

Config Config::from_json(const std::string& text) {
  Config config;
  const auto values = json::parse(text, nullptr, /*allow_exceptions=*/false);
  TORCH_CHECK_VALUE(values.is_object(), "config: not a JSON object");
  check_spelling(values);
  read_fields(values, config);
  return config;
}

std::string Config::to_json() const {
  json values = {{"model_type", "girih"}, {"architectures", {"GirihForCausalLM"}}};
  for_each_field(*this, [&](const char* name, const auto& field, const AllowedValues&) {
    values[name] = to_json_value(field);
  });
  values["mixer"] = hybrid.empty() ? json(mixer) : json(hybrid);
  for (const auto& injection : injections) values["girih"].push_back(to_json_value(injection));
  return values.dump(2) + "\n";
}

namespace {

// For Python: completes a configuration, JSON -> JSON. for_layer: by complete_for_layer.
std::string complete_configuration(const std::string& text, bool for_layer) {
  const auto config = Config::from_json(text);
  return (for_layer ? complete_for_layer(config) : config.completed()).to_json();
}

// For Python: throws if the model's parameters exceed the memory of this machine.
void check_memory(const std::string& text, int64_t element_size) {
  check_memory_size(Config::from_json(text).completed(), element_size);
}

// For Python: options that differ from their defaults and that no mixer reads.
std::vector<std::string> unread_options(const std::string& text) {
  return Config::from_json(text).unread_options();
}

// For Python: the suffix of errors about a folder of an earlier version.
std::string describe_earlier_mixers(const std::string& text) {
  return earlier_mixers(Config::from_json(text));
}

// For Python: the field whose name is nearest, and whether `name` is a misspelling of it.
std::tuple<std::string, bool> nearest(const std::string& name) {
  return {nearest_field(name), is_misspelt(name)};
}

// For Python: options in the format of girih-train -> JSON object.
std::string read_options(const std::string& options) {
  Config{}.set_options(options);  // types
  return parse_options(options).dump();
}

// For Python: the fields that each mixer reads, {"gsa": ["num_kv_heads", ...], ...}.
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
  m.def("complete_configuration(str text, *, bool for_layer=False) -> str", &complete_configuration);
  m.def("check_memory(str configuration, int element_size) -> ()", &check_memory);
  m.def("read_options(str options) -> str", &read_options);
  m.def("unread_options(str text) -> str[]", &unread_options);
  m.def("earlier_mixers(str text) -> str", &describe_earlier_mixers);
  m.def("nearest_field(str name) -> (str, bool)", &nearest);
  m.def("describe_mixers() -> str", &describe_mixers);
}

}  // namespace girih::nn
