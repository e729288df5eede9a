// The registry of mixers, and checks that depend on all mixers of a configuration.
#include "mixers.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "../ops/registration/operator.h"

namespace girih::nn {
namespace {

std::map<std::string, Mixer>& registry() {
  static std::map<std::string, Mixer> all;
  return all;
}

}  // namespace

MixerRegistration::MixerRegistration(Mixer mixer) {
  const auto name = mixer.name;
  TORCH_INTERNAL_ASSERT(registry().emplace(name, std::move(mixer)).second, name, " is registered twice");
}

const std::map<std::string, Mixer>& mixers() { return registry(); }

bool Config::reads(const std::string& field) const {
  auto used = mixers();
  if (std::ranges::count(used, "mag") > 0) used.insert(used.end(), {mag_base, mag_mixer});
  const bool is_cat_field = field == "chunks" || field.starts_with("compressor_");
  if (is_whole_cat() && is_cat_field) return true;
  if (field == "intermediate_size") {
    return std::ranges::any_of(used, [](const std::string& name) {
      const auto known = nn::mixers().find(name);
      return known == nn::mixers().end() || known->second.has_mlp;
    });
  }
  return std::ranges::any_of(used, [&](const std::string& name) {
    const auto known = nn::mixers().find(name);
    if (known == nn::mixers().end()) return false;
    const auto has = [&](const std::string& one) {
      return std::ranges::find(known->second.fields, one, &MixerField::name) != known->second.fields.end();
    };
    // `chunk` of the delta rule is read with between_chunks only, `rope_theta` of retnet with rotary only.
    const bool is_unused = (field == "chunk" && !between_chunks && has("between_chunks")) ||
                           (field == "rope_theta" && !rotary && has("rotary"));
    return !is_unused && has(field);
  });
}

std::string earlier_mixers(const Config& config) {
  auto used = config.mixers();
  if (std::ranges::count(used, "mag") > 0) used.insert(used.end(), {config.mag_base, config.mag_mixer});
  std::string all;
  for (const auto& [name, mixer] : mixers()) {
    if (*mixer.earlier != '\0' && std::ranges::count(used, name) > 0)
      all += "; " + name + " of earlier versions " + mixer.earlier;
  }
  return all;
}

std::vector<std::string> mixer_names() {
  std::vector<std::string> names;
  for (const auto& [name, mixer] : mixers()) names.push_back(name);
  return names;
}

AnyLayer make_mixer(const std::string& name, const Config& config) {
  const auto found = mixers().find(name);
  TORCH_CHECK_VALUE(found != mixers().end(), "mixer is '", name, "'; expected one of ",
                    c10::Join(", ", mixer_names()));
  return found->second.build(config);
}

AnyLayer make_mixer(int64_t layer, const Config& config) {
  for (const auto& injection : config.injections) {
    if (std::ranges::count(injected_layers(config, injection), layer) > 0)
      return make_injected(config, injection);
  }
  return make_mixer(config.mixers().at(size_t(layer)), config);
}

MixerField chunk_field(const char* op, int64_t headers) {
  const auto& chunk = get_operator(op).option("chunk");
  return {"chunk", std::max<int64_t>(1, int64_t(chunk.least) - headers), int64_t(chunk.most) - headers};
}

void check_ungrouped(const Config& config, const char* mixer) {
  TORCH_CHECK_VALUE(config.num_kv_heads == config.num_heads, "num_kv_heads is ", *config.num_kv_heads, "; ",
                    mixer, " has a memory for each query head: expected num_heads, ", config.num_heads);
}

namespace {

// Lower bound of the number of parameters of a layer: the projections to and from heads, and the parameters
// that depend on fields that the mixer reads.
double layer_lower_bound(const Config& c, const std::string& name) {
  if (name == "mag") return layer_lower_bound(c, c.mag_base) + layer_lower_bound(c, c.mag_mixer);
  const auto& fields = mixers().at(name).fields;
  const auto reads = [&](const char* field) {
    return std::ranges::find(fields, field, &MixerField::name) != fields.end();
  };
  const double h = c.hidden_size, heads = c.num_heads, memories = *c.num_kv_heads, D = *c.head_dim,
               M = c.num_slots;
  // 0.5 is the smallest default of expand_k (gla).
  const double keys = reads("expand_k") ? c.expand_k.value_or(0.5) : 1,
               values = reads("expand_v") ? c.expand_v.value_or(1) : 1;
  if (reads("num_groups"))
    return h * (double(c.n + 2) * heads * D + double((c.n + 1) * c.num_groups) * double(c.state_size));
  if (reads("state_size")) return h * (3 * c.expand_v.value_or(2) * heads * D + 2 * double(c.state_size));
  double count = h * (heads * (keys + values) + memories * std::min(1.0, keys + values)) * D;
  if (reads("num_slots")) count += h * memories * M;
  if (reads("num_slots") && !reads("num_kv_heads")) count += heads * D * M;  // learned initial memory
  if (reads("n")) count += h * (keys + values) * double(c.n - 1) * memories * D;
  if (name == "cat") count += double(c.chunk) * h * h;
  return count;
}

double parameter_lower_bound(const Config& c) {
  const double V = c.vocab_size, h = c.hidden_size, inner = double(c.intermediate_size.value_or(0));
  double count = V * h * (c.tie_word_embeddings ? 1 : 2);
  if (c.is_whole_cat()) {
    const double w = *c.compressor_hidden_size;
    const auto lengths = chunk_lengths(c);
    const double all = double(std::accumulate(lengths.begin(), lengths.end(), int64_t(0)));
    count += V * w + w * (double(c.max_position_embeddings) / double(lengths[0])) + all * w * h +
             double(*c.compressor_layers) * (4 * w * w + 3 * w * std::floor(inner * w / h)) +
             double(c.num_hidden_layers) * (layer_lower_bound(c, "attention") + 3 * h * inner);
  } else {
    for (const auto& name : c.mixers())
      count += layer_lower_bound(c, name) + (mixers().at(name).has_mlp ? 3 * h * inner : 0);
  }
  return count;
}

}  // namespace

void check_parameter_count(const Config& config, double most, const char* why) {
  const auto count = parameter_lower_bound(config);
  TORCH_CHECK_VALUE(count <= most,
                    "the sizes (vocab_size, hidden_size, num_hidden_layers, ...) give at least ", count,
                    " parameters; expected at most the ", most, " that ", why);
}

void check_memory_size(const Config& config, int64_t element_size) {
  rlimit address_limit{};
  getrlimit(RLIMIT_AS, &address_limit);
  const double available_bytes = std::min(double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGE_SIZE)),
                                          double(address_limit.rlim_cur));
  check_parameter_count(config, available_bytes / double(element_size), "fit into this machine's memory");
}

HeadWidths head_widths(const Config& config, double expand_k, double expand_v) {
  const auto width = [&](const char* name, const std::optional<double>& expand, double otherwise) {
    const auto factor = expand.value_or(otherwise), channels = factor * double(*config.head_dim);
    const auto whole = std::round(channels);
    TORCH_CHECK_VALUE(whole >= 1 && std::abs(channels - whole) < 1e-6 * channels, name, " is ", factor,
                      " and head_dim is ", *config.head_dim, ", which makes ", channels,
                      " channels; expected a whole number");
    return int64_t(whole);
  };
  return {width("expand_k", config.expand_k, expand_k), width("expand_v", config.expand_v, expand_v)};
}

void check_even_head_dim(const Config& config) {
  TORCH_CHECK_VALUE(*config.head_dim % 2 == 0, "head_dim is ", *config.head_dim,
                    "; rotary positions turn pairs and need an even one");
}

}  // namespace girih::nn
