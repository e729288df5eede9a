// What a configuration allows, and the mixer behind each name.
#include <girih/language_model.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "layer.h"

namespace girih::nn {
namespace {

using Names = std::vector<std::string>;

const Names kMixers = {"gsa",           "abc",      "linear_attention", "retnet",  "gla",     "mamba2",
                       "delta_product", "deltanet", "gated_deltanet",   "trellis", "lattice", "attention",
                       "cat",           "mag"};
const Names kMaps = {"identity", "silu", "l2norm", "layer_norm", "l2_silu", "ln_silu", "softmax"};

bool contains(const Names& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

void check_one_of(const char* field, const std::string& value, const Names& allowed) {
  TORCH_CHECK_VALUE(contains(allowed, value), field, " is '", value, "'; expected one of ",
                    c10::Join(", ", allowed));
}

void check(const Config& c) {
  const auto mixers = c.mixers();
  TORCH_CHECK_VALUE(int64_t(mixers.size()) == c.num_hidden_layers, "mixer names ", mixers.size(),
                    " layers; expected num_hidden_layers, ", c.num_hidden_layers);
  for (const auto& name : mixers) check_one_of("mixer", name, kMixers);
  auto used = mixers;
  if (contains(mixers, "mag")) {
    auto inner = kMixers;
    std::erase(inner, "mag");
    check_one_of("mag_base", c.mag_base, inner);
    check_one_of("mag_mixer", c.mag_mixer, inner);
    used.insert(used.end(), {c.mag_base, c.mag_mixer});
  }
  check_one_of("phi", c.phi, kMaps);
  check_one_of("f", c.f, kMaps);
  check_one_of("objective", c.objective, {"decode", "encode", "similarity"});
  check_one_of("feature", c.feature, {"softmax", "none", "silu", "relu", "relu2"});
  if (c.between_chunks) check_one_of("between_chunks", *c.between_chunks, {"gelu", "tanh"});
  TORCH_CHECK_VALUE(c.num_heads % *c.num_kv_heads == 0, "num_kv_heads is ", *c.num_kv_heads,
                    "; expected a divisor of num_heads ", c.num_heads);
  for (const char* name : {"trellis", "lattice"}) {
    TORCH_CHECK_VALUE(!contains(used, name) || *c.num_kv_heads == c.num_heads, "num_kv_heads is ",
                      *c.num_kv_heads, "; ", name, " projects q and k together: expected num_heads, ",
                      c.num_heads);
  }
  const bool cat = contains(used, "cat");
  const bool defining = contains(used, "trellis") || contains(used, "lattice") || c.between_chunks;
  const int64_t least = c.is_whole_cat() ? 2 : 1;
  const int64_t most = defining ? 64 : c.is_whole_cat() ? 256 : cat ? 255 : 64;
  TORCH_CHECK_VALUE(c.chunk >= least && c.chunk <= most, "chunk is ", c.chunk, "; expected ", least, " to ",
                    most, " for ", c10::Join(", ", std::set<std::string>(used.begin(), used.end())));
  TORCH_CHECK_VALUE(*c.head_dim % 2 == 0 || !(cat || contains(used, "attention")), "head_dim is ",
                    *c.head_dim, "; rotary positions turn pairs and need an even one");
  TORCH_CHECK_VALUE(!c.is_whole_cat() || *c.compressor_hidden_size % *c.head_dim == 0,
                    "compressor_hidden_size is ", *c.compressor_hidden_size,
                    "; expected a multiple of head_dim ", *c.head_dim);
}

AnyLayer slots(const Config& c, bool gated) {
  return std::make_shared<GatedSlotAttentionImpl>(
      c.hidden_size, c.num_heads,
      GatedSlotAttentionOptions{.num_slots = c.num_slots,
                                .num_kv_heads = c.num_kv_heads,
                                .head_dim = c.head_dim,
                                .gated = gated,
                                .feature = c.feature,
                                .conv_size = c.conv_size.value_or(0),
                                .norm_eps = c.norm_eps});
}

AnyLayer linear_mixer(const Config& c, const char* gate, int64_t conv_size) {
  return std::make_shared<GatedLinearAttentionImpl>(
      c.hidden_size, c.num_heads,
      GatedLinearAttentionOptions{.num_kv_heads = c.num_kv_heads,
                                  .head_dim = c.head_dim,
                                  .gate = gate,
                                  .conv_size = c.conv_size.value_or(conv_size),
                                  .norm_eps = c.norm_eps});
}

AnyLayer delta_rule(const Config& c, int64_t n, bool gated) {
  return std::make_shared<DeltaProductImpl>(c.hidden_size, c.num_heads,
                                            DeltaProductOptions{.n = n,
                                                                .num_kv_heads = c.num_kv_heads,
                                                                .head_dim = c.head_dim,
                                                                .gated = gated,
                                                                .allow_neg_eigval = c.allow_neg_eigval,
                                                                .between_chunks = c.between_chunks,
                                                                .chunk = c.chunk,
                                                                .conv_size = c.conv_size.value_or(4),
                                                                .norm_eps = c.norm_eps});
}

}  // namespace

AnyLayer make_mixer(const std::string& name, const Config& c) {
  if (name == "gsa" || name == "abc") return slots(c, name == "gsa");
  if (name == "linear_attention") return linear_mixer(c, "none", 0);
  if (name == "retnet") return linear_mixer(c, "fixed", 0);
  if (name == "gla") return linear_mixer(c, "vector", 0);
  if (name == "mamba2") return linear_mixer(c, "scalar", 4);
  if (name == "delta_product") return delta_rule(c, c.n, c.gated);
  if (name == "deltanet" || name == "gated_deltanet") return delta_rule(c, 1, name == "gated_deltanet");
  if (name == "trellis") {
    return std::make_shared<TrellisImpl>(c.hidden_size, c.num_heads,
                                         TrellisOptions{.num_slots = c.num_slots,
                                                        .head_dim = c.head_dim,
                                                        .chunk = c.chunk,
                                                        .phi = c.phi,
                                                        .f = c.f,
                                                        .gated = c.gated,
                                                        .conv_size = c.conv_size.value_or(4),
                                                        .norm_eps = c.norm_eps});
  }
  if (name == "lattice") {
    return std::make_shared<LatticeImpl>(c.hidden_size, c.num_heads,
                                         LatticeOptions{.num_slots = c.num_slots,
                                                        .head_dim = c.head_dim,
                                                        .chunk = c.chunk,
                                                        .objective = c.objective,
                                                        .gated = c.gated,
                                                        .conv_size = c.conv_size.value_or(4),
                                                        .norm_eps = c.norm_eps});
  }
  if (name == "attention") {
    return std::make_shared<AttentionImpl>(
        c.hidden_size, c.num_heads,
        AttentionOptions{.num_kv_heads = c.num_kv_heads, .head_dim = c.head_dim, .rope_theta = c.rope_theta});
  }
  if (name == "cat") {
    return std::make_shared<CompressAttendImpl>(
        c.hidden_size, c.num_heads,
        ChunkAttentionOptions{.chunk = c.chunk,
                              .num_kv_heads = c.num_kv_heads,
                              .head_dim = c.head_dim,
                              .rope_theta = c.rope_theta,
                              .running_positions = c.running_positions});
  }
  check_one_of("mixer", name, kMixers);
  return std::make_shared<MixAttentionImpl>(
      make_mixer(c.mag_base, c), make_mixer(c.mag_mixer, c),
      MixAttentionOptions{.weight = c.mag_weight, .learned = c.mag_learned, .cross = c.mag_cross});
}

std::vector<std::string> Config::mixers() const {
  return hybrid.empty() ? Names(std::max<int64_t>(num_hidden_layers, 0), mixer) : hybrid;
}

Config Config::completed() const {
  auto c = *this;
  for (const auto& [name, value] :
       {std::pair("vocab_size", vocab_size), std::pair("hidden_size", hidden_size),
        std::pair("num_hidden_layers", num_hidden_layers), std::pair("num_heads", num_heads),
        std::pair("num_slots", num_slots), std::pair("chunk", chunk), std::pair("n", n)}) {
    TORCH_CHECK_VALUE(value >= 1, name, " is ", value, "; expected at least 1");
  }
  if (!c.num_kv_heads) c.num_kv_heads = num_heads;
  TORCH_CHECK_VALUE(c.head_dim || hidden_size % num_heads == 0, "num_heads is ", num_heads,
                    ", which does not divide hidden_size ", hidden_size, "; give head_dim");
  if (!c.head_dim) c.head_dim = hidden_size / num_heads;
  // A gated layer of 8/3 has the parameters of a plain one of 4.
  if (!c.intermediate_size) c.intermediate_size = (8 * hidden_size + 95) / 96 * 32;
  if (!c.compressor_hidden_size)
    c.compressor_hidden_size = std::max(*c.head_dim, hidden_size / 2 / *c.head_dim * *c.head_dim);
  if (!c.compressor_layers) c.compressor_layers = std::max<int64_t>(1, num_hidden_layers / 2);
  if (!c.initializer_range) c.initializer_range = 1 / std::sqrt(double(hidden_size));
  check(c);
  return c;
}

}  // namespace girih::nn
