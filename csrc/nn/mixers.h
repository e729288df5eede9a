// The mixers that a configuration can name. Each registers itself beside its layer:
//
//   const Registered trellis({"trellis", [](const Config& c) -> AnyLayer { ... }, {"num_slots", ...}});
#pragma once

#include <girih/language_model.h>

#include <map>
#include <string>
#include <vector>

#include "fields.h"

namespace girih::nn {

// A field that a mixer reads beside hidden_size and num_heads, with bounds of its own where the
// configuration's are wider.
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
  // The layer of a completed configuration.
  AnyLayer (*build)(const Config& config);
  std::vector<MixerField> fields;
  // What it asks of several fields together; throws c10::ValueError.
  void (*check)(const Config& config) = [](const Config&) {};
  // What the mixer of this name was in earlier versions, where its tensors had other shapes.
  const char* earlier = "";
  // Whether its blocks have a feed-forward layer.
  bool has_mlp = true;
};

// One of these in a layer's file makes its mixer known.
struct Registered {
  explicit Registered(Mixer mixer);
};

// A field from an option or the other way round; what is not given leaves it.
template <class To, class From>
void take(To& to, const From& from) {
  if constexpr (requires { to = from; }) {
    to = from;
  } else if (from) {
    to = *from;
  }
}

// A layer's options from a configuration: `otherwise` where it says nothing.
template <class Options>
Options options_of(const Config& config, Options otherwise = {}) {
  for_each_option(config, otherwise, [](const auto& field, auto& option) { take(option, field); });
  return otherwise;
}

// Config::completed but for the options that no mixer reads: a layer has options that its mixer's name sets.
Config completed_for_layer(const Config& config);

// The options of a layer that is made directly, with num_kv_heads and head_dim: refused where a configuration
// of `mixer` would be, in the same words.
template <class Options>
Options completed(const char* mixer, int64_t hidden_size, int64_t num_heads, Options options) {
  Config config{.hidden_size = hidden_size, .num_hidden_layers = 1, .num_heads = num_heads};
  config.hybrid = {mixer};
  for_each_option(config, options, [](auto& field, const auto& option) { take(field, option); });
  return options_of(completed_for_layer(config), std::move(options));
}

// The layers that an injection names.
std::vector<int64_t> injected_layers(const Config& config, const Injection& injection);

// Attention as a completed configuration has it, with a linear path beside it.
AnyLayer make_injected(const Config& config, const Injection& injection);

// Every mixer, by name.
const std::map<std::string, Mixer>& mixers();

// Behind the error for a folder whose tensors are not those of its configuration: `earlier` of its mixers.
std::string earlier_mixers(const Config& config);

// "chunk" as an operator bounds it, less the rows of a chunk that are no tokens.
MixerField chunk_of(const char* op, int64_t headers = 0);

// q and k share a projection, so there are as many memories as queries.
void expect_ungrouped(const Config& config, const char* mixer);

// Rotary positions turn pairs of channels.
void expect_pairs(const Config& config);

// The channels of a head's keys and values: head_dim times expand_k and expand_v, or times the mixer's own
// where the configuration has none. Throws c10::ValueError where these are not whole numbers.
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

// Refuses a completed configuration whose model has more than `most` parameters for certain: its sizes may be
// a slip of the pen. why: what bounds them.
void expect_parameters(const Config& config, double most, const char* why);

// Refuses a completed configuration whose model, in numbers of `element_size` bytes, there is no memory for,
// before any is asked for.
void expect_memory(const Config& config, int64_t element_size);

// The chunk lengths of the whole CAT model: `chunks`, or `chunk` alone.
inline std::vector<int64_t> chunk_lengths(const Config& config) {
  return config.chunks.value_or(std::vector<int64_t>{config.chunk});
}

// What the whole CAT model asks, where `mixer` is "cat" and not a list.
void check_cat_model(const Config& config);

}  // namespace girih::nn
