#include "mixers.h"

#include <algorithm>

#include "../ops/operator.h"

namespace girih::nn {
namespace {

std::map<std::string, Mixer>& registry() {
  static std::map<std::string, Mixer> all;
  return all;
}

}  // namespace

Registered::Registered(Mixer mixer) {
  const auto name = mixer.name;
  TORCH_INTERNAL_ASSERT(registry().emplace(name, std::move(mixer)).second, name, " is registered twice");
}

const std::map<std::string, Mixer>& mixers() { return registry(); }

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

MixerField chunk_of(const char* op, int64_t headers) {
  const auto& chunk = describe(op).option("chunk");
  return {"chunk", std::max<int64_t>(1, int64_t(chunk.least) - headers), int64_t(chunk.most) - headers};
}

void expect_ungrouped(const Config& config, const char* mixer) {
  TORCH_CHECK_VALUE(config.num_kv_heads == config.num_heads, "num_kv_heads is ", *config.num_kv_heads, "; ",
                    mixer, " projects q and k together: expected num_heads, ", config.num_heads);
}

void expect_pairs(const Config& config) {
  TORCH_CHECK_VALUE(*config.head_dim % 2 == 0, "head_dim is ", *config.head_dim,
                    "; rotary positions turn pairs and need an even one");
}

}  // namespace girih::nn
