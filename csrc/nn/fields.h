// Lists of the fields of a configuration, with names and allowed values. Reading, writing and checking
// iterate over these lists.
#pragma once

#include <girih/language_model.h>

#include <string>
#include <vector>

#include "../ops/registration/operator.h"

namespace girih::nn {

// The values that a field may have: numbers from least to most, or one of `words`.
struct AllowedValues {
  double least = 0, most = 0;
  std::vector<std::string> words = {};
};

inline AllowedValues between(double least, double most) { return {least, most}; }
inline AllowedValues allowed_words(const char* op, const char* option) {
  return {.words = get_operator(op).option(option).words};
}

// Width of a short convolution; 0: no convolution.
inline AllowedValues conv_width_range() {
  const auto& conv = get_operator("short_conv");
  return between(0, double(conv.letters[conv.letter("W")].most));
}

// Throws an error that names the field unless the value is allowed.
void check_value(const char* name, int64_t value, const AllowedValues& allowed);
void check_value(const char* name, const std::string& value, const AllowedValues& allowed);

// Calls visit(name, field, allowed) for every field except mixer. The upper bounds of sizes only catch typing
// errors, which could allocate all memory.
template <class AnyConfig, class Visit>
void for_each_field(AnyConfig& c, Visit&& visit) {
  const auto size = between(1, 1 << 20), layers = between(1, 4096), id = between(-1, 0x7fffffff),
             unrestricted = AllowedValues{};
  visit("vocab_size", c.vocab_size, between(1, 0x7fffffff));
  visit("hidden_size", c.hidden_size, size);
  visit("num_hidden_layers", c.num_hidden_layers, layers);
  visit("num_heads", c.num_heads, size);
  visit("num_kv_heads", c.num_kv_heads, size);
  visit("head_dim", c.head_dim, size);
  visit("intermediate_size", c.intermediate_size, between(1, 1 << 24));
  visit("num_slots", c.num_slots, size);
  visit("chunk", c.chunk, between(1, get_operator("cat_attention").option("chunk").most));
  visit("chunks", c.chunks, between(1, get_operator("cat_attention").option("chunk").most));
  visit("n", c.n, between(get_operator("delta_product").option("n").least, 4096));
  visit("gated", c.gated, unrestricted);
  visit("conv_size", c.conv_size, conv_width_range());
  visit("expand_k", c.expand_k, between(1e-3, 1e3));
  visit("expand_v", c.expand_v, between(1e-3, 1e3));
  visit("state_size", c.state_size, size);
  visit("num_groups", c.num_groups, size);
  visit("topk", c.topk, size);
  visit("slot_decay", c.slot_decay, unrestricted);
  visit("router_score", c.router_score, AllowedValues{.words = {"sigmoid", "softmax"}});
  visit("router_mlp", c.router_mlp, unrestricted);
  visit("router_bias", c.router_bias, unrestricted);
  visit("router_noise", c.router_noise, unrestricted);
  visit("output_gate", c.output_gate, unrestricted);
  visit("phi", c.phi, allowed_words("trellis", "phi"));
  visit("f", c.f, allowed_words("trellis", "f"));
  visit("objective", c.objective, allowed_words("lattice", "objective"));
  visit("feature", c.feature, allowed_words("gsa", "feature"));
  visit("between_chunks", c.between_chunks, allowed_words("delta_product", "between_chunks"));
  visit("allow_neg_eigval", c.allow_neg_eigval, unrestricted);
  visit("normalize", c.normalize, unrestricted);
  visit("shrinkage", c.shrinkage, between(0, 1e30));
  visit("post_norm", c.post_norm, unrestricted);
  visit("shared_qk", c.shared_qk, unrestricted);
  visit("normalize_kv", c.normalize_kv, unrestricted);
  visit("value_read", c.value_read, AllowedValues{.words = {"linear", "phi"}});
  visit("data_dependent_decay", c.data_dependent_decay, unrestricted);
  visit("window", c.window, between(1, 0x7fffffff));
  visit("rotary", c.rotary, unrestricted);
  visit("mag_base", c.mag_base, unrestricted);
  visit("mag_mixer", c.mag_mixer, unrestricted);
  visit("mag_weight", c.mag_weight, between(0, 1));
  visit("mag_learned", c.mag_learned, unrestricted);
  visit("mag_cross", c.mag_cross, unrestricted);
  visit("compressor_hidden_size", c.compressor_hidden_size, size);
  visit("compressor_layers", c.compressor_layers, layers);
  visit("running_positions", c.running_positions, unrestricted);
  visit("max_position_embeddings", c.max_position_embeddings, between(1, 0x7fffffff));
  visit("rope_theta", c.rope_theta, between(1e-6, 1e30));
  visit("norm_eps", c.norm_eps, between(0, 1e30));
  visit("initializer_range", c.initializer_range, between(0, 1e30));
  visit("tie_word_embeddings", c.tie_word_embeddings, unrestricted);
  visit("bos_token_id", c.bos_token_id, id);
  visit("eos_token_id", c.eos_token_id, id);
  visit("pad_token_id", c.pad_token_id, id);
}

// Calls visit(name, option, allowed) for every option of a linear path.
template <class AnyOptions, class Visit>
void for_each_path_option(AnyOptions& o, Visit&& visit) {
  visit("n", o.n, between(1, 4));
  visit("virtual_tokens", o.virtual_tokens, AllowedValues{.words = {"derivative", "rotary", "both"}});
  visit("gate", o.gate, AllowedValues{.words = {"k", "v", "kv"}});
  visit("gate_per", o.gate_per, AllowedValues{.words = {"channel", "head"}});
  visit("pool", o.pool, AllowedValues{.words = {"past", "window"}});
  visit("between_chunks", o.between_chunks, allowed_words("delta_product", "between_chunks"));
  visit("chunk", o.chunk, between(1, get_operator("delta_product").option("chunk").most));
  visit("norm_eps", o.norm_eps, between(0, 1e30));
}
void check_path_options(const LinearPathOptions& options);

// Calls visit(name, field, allowed) for every field of an injection.
template <class AnyInjection, class Visit>
void for_each_injection_field(AnyInjection& i, Visit&& visit) {
  visit("layers", i.layers, between(0, 0x7fffffff));
  for_each_path_option(i.path, visit);
  visit("weight", i.mix.weight, between(0, 1));
  visit("learned", i.mix.learned, AllowedValues{});
  visit("cross", i.mix.cross, AllowedValues{});
}

// Calls visit(field, option) for every field of a configuration that `Options` has too.
template <class AnyConfig, class Options, class Visit>
void for_each_option(AnyConfig& c, Options& o, Visit&& visit) {
#define GIRIH_OPTION(name) \
  if constexpr (requires { o.name; }) visit(c.name, o.name)
  GIRIH_OPTION(num_kv_heads);
  GIRIH_OPTION(head_dim);
  GIRIH_OPTION(num_slots);
  GIRIH_OPTION(chunk);
  GIRIH_OPTION(n);
  GIRIH_OPTION(gated);
  GIRIH_OPTION(conv_size);
  GIRIH_OPTION(expand_k);
  GIRIH_OPTION(expand_v);
  GIRIH_OPTION(state_size);
  GIRIH_OPTION(num_groups);
  GIRIH_OPTION(topk);
  GIRIH_OPTION(slot_decay);
  GIRIH_OPTION(router_score);
  GIRIH_OPTION(router_mlp);
  GIRIH_OPTION(router_bias);
  GIRIH_OPTION(router_noise);
  GIRIH_OPTION(output_gate);
  GIRIH_OPTION(phi);
  GIRIH_OPTION(f);
  GIRIH_OPTION(objective);
  GIRIH_OPTION(feature);
  GIRIH_OPTION(between_chunks);
  GIRIH_OPTION(allow_neg_eigval);
  GIRIH_OPTION(normalize);
  GIRIH_OPTION(shrinkage);
  GIRIH_OPTION(post_norm);
  GIRIH_OPTION(shared_qk);
  GIRIH_OPTION(normalize_kv);
  GIRIH_OPTION(value_read);
  GIRIH_OPTION(data_dependent_decay);
  GIRIH_OPTION(window);
  GIRIH_OPTION(rotary);
  GIRIH_OPTION(running_positions);
  GIRIH_OPTION(rope_theta);
  GIRIH_OPTION(norm_eps);
#undef GIRIH_OPTION
}

}  // namespace girih::nn
