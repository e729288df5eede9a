// Registry of the mixers that a configuration can name. The file of a layer registers the layer's mixers:
//
//   const MixerRegistration trellis({"trellis", [](const Config& c) -> AnyLayer { ... }, {"num_slots",
//   ...}});
#pragma once

#include <girih/language_model.h>

#include <map>
#include <string>
#include <vector>

#include "fields.h"

namespace girih::nn {

// A field that a mixer reads; every mixer also reads hidden_size and num_heads. least, most: the range of the
// field, if it is narrower than the range that for_each_field allows.
struct MixerField {
  // NOLINTBEGIN(google-explicit-constructor): fields are listed by name
  MixerField(const char* name) : name(name) {}
  MixerField(const char* name, int64_t least, int64_t most) : name(name), least(least), most(most) {}
  // NOLINTEND(google-explicit-constructor)

  std::string name;
  std::optional<int64_t> least = {}, most = {};
};

struct Mixer {
  std::string name;
  // Builds the layer from a completed configuration.
  AnyLayer (*build)(const Config& config);
  std::vector<MixerField> fields;
  // Checks conditions on several fields; throws c10::ValueError.
  void (*check)(const Config& config) = [](const Config&) {};
  // For error messages about tensors with other shapes: how the mixer differed in earlier versions.
  const char* earlier = "";
  // Whether blocks with this mixer have a feed-forward layer.
  bool has_mlp = true;
};

// Registers a mixer; a static object in the layer's file.
struct MixerRegistration {
  explicit MixerRegistration(Mixer mixer);
};

// Assigns a field to an option or an option to a field; an empty optional leaves the target unchanged.
template <class To, class From>
void assign_if_set(To& to, const From& from) {
  if constexpr (requires { to = from; }) {
    to = from;
  } else if (from) {
    to = *from;
  }
}

// A layer's options from a configuration. An empty field leaves the value of `defaults`.
template <class Options>
Options options_from_config(const Config& config, Options defaults = {}) {
  for_each_option(config, defaults, [](const auto& field, auto& option) { assign_if_set(option, field); });
  return defaults;
}

// Config::completed without the check of options that no mixer reads: the options of a layer include some
// that the mixer's name determines in a configuration.
Config complete_for_layer(const Config& config);

// Completes and checks the options of a layer that is constructed directly: fills in num_kv_heads and
// head_dim, and throws the errors of a configuration of `mixer`.
template <class Options>
Options completed(const char* mixer, int64_t hidden_size, int64_t num_heads, Options options) {
  Config config{.hidden_size = hidden_size, .num_hidden_layers = 1, .num_heads = num_heads};
  config.hybrid = {mixer};
  for_each_option(config, options, [](auto& field, const auto& option) { assign_if_set(field, option); });
  return options_from_config(complete_for_layer(config), std::move(options));
}

// Indices of the layers that an injection changes.
std::vector<int64_t> injected_layers(const Config& config, const Injection& injection);

// Attention of a completed configuration, with a linear path in parallel.
AnyLayer make_injected(const Config& config, const Injection& injection);

// All mixers by name.
const std::map<std::string, Mixer>& mixers();

// Suffix of the error for a folder whose tensors do not match its configuration: Mixer::earlier of its
// mixers.
std::string earlier_mixers(const Config& config);

// The field "chunk" with the operator's bounds, minus `headers` rows of a chunk that hold no token.
MixerField chunk_field(const char* op, int64_t headers = 0);

// Throws unless num_kv_heads equals num_heads: the mixer has one memory for each query head.
void check_ungrouped(const Config& config, const char* mixer);

// Throws unless head_dim is even: rotary positions rotate pairs of channels.
void check_even_head_dim(const Config& config);

// Channels of the keys and the values of a head: head_dim times expand_k and expand_v of the configuration,
// or times the arguments where these fields are empty. Throws c10::ValueError unless both are whole numbers.
struct HeadWidths {
  int64_t key, value;
};
HeadWidths head_widths(const Config& config, double expand_k, double expand_v);
template <class Options>
HeadWidths head_widths(const Options& options) {
  Config config;
  config.head_dim = options.head_dim;
  return head_widths(config, options.expand_k, options.expand_v);
}

// Throws if a lower bound of the number of parameters exceeds `most`: a size is probably a typing error. why:
// the end of the error message, which states the limit.
void check_parameter_count(const Config& config, double most, const char* why);

// Throws if the model's parameters, of `element_size` bytes each, exceed the memory of this machine. Called
// before anything is allocated.
void check_memory_size(const Config& config, int64_t element_size);

// The chunk lengths of the CAT model: `chunks`, or `chunk` alone.
inline std::vector<int64_t> chunk_lengths(const Config& config) {
  return config.chunks.value_or(std::vector<int64_t>{config.chunk});
}

// Checks the fields of the CAT model, which is chosen by mixer = "cat" (not by a list).
void check_cat_model(const Config& config);

}  // namespace girih::nn
