// The language models for LibTorch, those of girih.models in Python: one folder of save_pretrained serves
// both.
//
//   auto model = girih::nn::from_pretrained("folder");
//   auto text = model->generate(ids, {.max_new_tokens = 100});
//
//   girih::nn::LanguageModel fresh(girih::nn::Config{.hidden_size = 512, .mixer = "trellis"});
//   fresh->loss(ids).backward();
#pragma once

#include <girih/nn.h>
#include <torch/nn/modules/embedding.h>

#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace girih::nn {

// One token, or any of several.
using TokenIds = std::variant<int64_t, std::vector<int64_t>>;
// All of them; without any, none.
std::vector<int64_t> list_of(const std::optional<TokenIds>& ids);

// What girih.inject does to attention: a linear path beside it, and their mixture (LiZA and MaG of TPTT).
struct Injection {
  std::optional<std::vector<int64_t>> layers = {};  // by default all whose mixer is attention
  LinearPathOptions path = {};
  MixAttentionOptions mix = {};
};

// girih.models.GirihConfig: the same fields, the same defaults, the same errors.
struct Config {
  int64_t vocab_size = 256;
  int64_t hidden_size = 256;
  int64_t num_hidden_layers = 4;
  // One name for every layer, or one for each: mixer_names() has them. "cat" alone is the whole CAT model, in
  // a list it is CAT as a layer.
  std::string mixer = "gsa";
  std::vector<std::string> hybrid = {};  // the list; `mixer` is not read then
  int64_t num_heads = 4;
  std::optional<int64_t> num_kv_heads = {}, head_dim = {}, intermediate_size = {};
  int64_t num_slots = 64;
  int64_t chunk = 16;
  // Of the CAT model, the chunk lengths that a call may choose, ascending multiples of the first.
  std::optional<std::vector<int64_t>> chunks = {};
  int64_t n = 2;
  bool gated = true;
  std::optional<int64_t> conv_size = {};
  // Widths of keys and values as multiples of head_dim, by default those of each mixer's paper.
  std::optional<double> expand_k = {}, expand_v = {};
  int64_t state_size = 128;  // of mamba2
  std::string phi = "ln_silu", f = "ln_silu";
  std::string objective = "decode";
  std::string feature = "softmax";
  std::optional<std::string> between_chunks = {};
  bool allow_neg_eigval = false;
  bool normalize = true;  // of lattice, as the next; false and others than 0 at chunk = 1 alone
  double shrinkage = 0.0;
  std::optional<bool> post_norm = {};           // of trellis (true) and lattice (false)
  bool shared_qk = false, normalize_kv = true;  // of trellis, as the next
  std::string value_read = "linear";
  bool data_dependent_decay = true;    // of gsa
  std::optional<int64_t> window = {};  // of attention
  bool rotary = true;                  // of retnet
  std::string mag_base = "attention", mag_mixer = "delta_product";
  double mag_weight = 0.5;
  bool mag_learned = false, mag_cross = false;
  std::optional<int64_t> compressor_hidden_size = {}, compressor_layers = {};
  bool running_positions = false;
  int64_t max_position_embeddings = 8192;
  double rope_theta = 10000.0;
  double norm_eps = 1e-6;
  std::optional<double> initializer_range = {};  // hidden_size^-1/2
  bool tie_word_embeddings = true;
  std::optional<int64_t> bos_token_id = {};
  std::optional<TokenIds> eos_token_id = {};
  std::optional<int64_t> pad_token_id = {};
  // Each of other layers; the entry `girih` of config.json, as girih.inject writes it.
  std::vector<Injection> injections = {};

  // The mixer of each layer.
  std::vector<std::string> mixers() const;
  bool is_whole_cat() const { return hybrid.empty() && mixer == "cat"; }
  // With every default that depends on other fields filled in. Throws c10::ValueError for a size that does
  // not fit, and for an option that is not at its default and that no mixer of the configuration reads.
  Config completed() const;

  // Whether one of its mixers reads a field; of names that are no mixer's, false.
  bool reads(const std::string& field) const;
  // Sets fields from text, "chunk=1 phi=identity", with values as in JSON or words. Throws c10::ValueError
  // for a name that is no field; returns the names.
  std::vector<std::string> set_options(const std::string& options);

  // Its options that no mixer reads and that are not at their defaults.
  std::vector<std::string> unread_options() const;
  // The same model's configuration with these at their defaults, as files of earlier versions need it.
  Config without_unread() const;

  // Hugging Face's config.json, as text. Fields of others are skipped; a name that is nearly one of these
  // throws c10::ValueError.
  static Config from_json(const std::string& text);
  std::string to_json() const;
};

// What a configuration can name.
std::vector<std::string> mixer_names();

// The mixer that a configuration calls `name`; the configuration must be completed.
AnyLayer make_mixer(const std::string& name, const Config& config);
// The mixer of a layer, injected where the configuration says so.
AnyLayer make_mixer(int64_t layer, const Config& config);

// Embedding, blocks, RMS norm: ids [B, T] -> [B, T, hidden_size].
class ModelImpl : public LayerImpl {
 public:
  explicit ModelImpl(const Config& config);
  bool stepped(State& state, std::vector<int64_t>& kind) const override;

  torch::nn::Embedding embed_tokens{nullptr};
  torch::nn::ModuleList layers{nullptr};  // of Block
  RMSNorm norm{nullptr};

 protected:
  Output run(const Tensor& ids, const Call& call) override;
};

// f(c): a chunk of C tokens as one vector of the decoder's width. chunks [B, K, C], index [K] or [B, K] ->
// [B, K, hidden_size]. With several chunk lengths each has columns of its own in `proj`, and places are
// counted in the shortest, so that a place means the same token in all.
class CompressorImpl : public Module {
 public:
  explicit CompressorImpl(const Config& config);
  Tensor forward(const Tensor& chunks, const Tensor& index);

  torch::nn::Embedding embed_tokens{nullptr}, position{nullptr};
  torch::nn::ModuleList layers{nullptr};  // of Block
  RMSNorm norm{nullptr};
  torch::nn::Linear proj{nullptr};

 private:
  std::vector<int64_t> lengths_;
};
TORCH_MODULE(Compressor);

// CAT, the compress and attend transformer, as a whole model. Chunk k is the rows [header_k, x_{kC}, ...,
// x_{kC+C-2}], header_k = f(c_{k-1}), header_0 learned; token t's output is row t + 1. The state has slots
// for K headers and one chunk in each layer: a token is one row over them, and a chunk that it ends one call
// of the compressor. A cached call with a mask waits for how many tokens are valid.
class CatModelImpl : public LayerImpl {
 public:
  explicit CatModelImpl(const Config& config);
  void reset_parameters();
  // The chunk of the calls that begin sequences from now on, one of the configuration's `chunks`.
  void set_chunk(int64_t chunk);
  bool stepped(State& state, std::vector<int64_t>& kind) const override;

  torch::nn::Embedding embed_tokens{nullptr};
  Tensor header;
  Compressor compressor{nullptr};
  torch::nn::ModuleList layers{nullptr};  // of Block
  RMSNorm norm{nullptr};

 protected:
  Output run(const Tensor& ids, const Call& call) override;

 private:
  Tensor first_header(int64_t chunk) const;
  Tensor headers(const Tensor& chunks, const Tensor& first, const Tensor& index, const Tensor& where);
  Tensor decode(Tensor x, const ChunkRows& rows, std::vector<State>& kept, const Tensor& cu_chunks = {});
  Tensor rows_of(const Tensor& headers, const Tensor& chunks);
  Output step(const Tensor& ids, const State& state);
  std::vector<int64_t> lengths_;
  int64_t chunk_, max_position_embeddings_;
  double initializer_range_;
};

struct GenerateOptions {
  int64_t max_new_tokens = 64;
  double temperature = 0.0;           // 0: the most likely token
  std::optional<int64_t> top_k = {};  // sample among these many
  std::optional<double> top_p = {};  // and among the fewest that have this much of the probability, in (0, 1]
  std::optional<at::Generator> generator = {};  // what samples are drawn by, of the model's device
  // What ends a sequence, the configuration's if absent; an empty list for nothing. The rest of it is
  // pad_token_id, or without one the first of these.
  std::optional<TokenIds> eos_token_id = {};
  Tensor attention_mask = {};  // of the prompt, padded on the left
  // Called with the next token of every sequence, [B, 1], as soon as it is there.
  std::function<void(const Tensor&)> on_token = {};
};

// A language model of any mixer and a head: ids [B, T], int64 or int32, -> logits [B, T, vocab_size]. Takes
// what every layer takes. Making one throws c10::ValueError for a configuration that does not fit, or a model
// that this machine has no memory for.
class LanguageModelImpl : public LayerImpl {
 public:
  explicit LanguageModelImpl(const Config& config);

  // Mean cross entropy of every token after the first, in nats; labels [B, T], -100 not counted, are ids
  // unless given. At most 2^26 logits are there at a time, and gradients are made with them: to measure
  // alone, call it under NoGradGuard. No second derivative.
  Tensor loss(const Tensor& ids, const Tensor& labels = {});
  // ids [B, T], T at least 1 -> the prompt and what follows, [B, T + at most max_new_tokens]. On a GPU a
  // token is one CUDA graph, which reads the weights where they are, on the stream of the call: on_token must
  // leave both there. Where no eos is looked for, chances that are no numbers are told at the text's end.
  Tensor generate(const Tensor& ids, const GenerateOptions& options = {});
  // Of an adaptive CAT: the chunk of the calls that begin sequences from now on, one of config.chunks, and
  // config.chunk before the first call of this.
  void set_chunk(int64_t chunk);
  // config.json and model.safetensors, which Python's from_pretrained reads.
  void save_pretrained(const std::string& folder) const;

  const Config config;
  AnyLayer model;                      // ModelImpl or CatModelImpl
  torch::nn::Linear lm_head{nullptr};  // absent when the word embeddings are tied

 protected:
  Output run(const Tensor& ids, const Call& call) override;

 private:
  friend class Decoder;  // generate's, token by token
  const Tensor& head_weight() const;
  Tensor head(const Tensor& x) const;
  torch::nn::Embedding embed_tokens_{nullptr};  // the model's
};
TORCH_MODULE(LanguageModel);

// The model with a linear path beside the attention of some layers. Its other weights are the model's, in the
// same memory. Throws c10::ValueError as a configuration does.
LanguageModel inject(const LanguageModel& model, const Injection& injection = {});

// The model in a folder that save_pretrained wrote, here or in Python, for inference (eval mode). Its tokens
// bos, eos and pad are those of generation_config.json where that names them. Throws c10::ValueError for a
// parameter that is missing, unknown, there twice or of another shape, std::runtime_error for a file that
// cannot be read; no more memory is asked for than the files have.
LanguageModel from_pretrained(const std::string& folder, at::Device device = at::kCPU);

}  // namespace girih::nn
