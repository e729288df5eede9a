// The language models for LibTorch, the same as girih.models in Python. Folders of save_pretrained are
// interchangeable.
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

// One token id or several.
using TokenIds = std::variant<int64_t, std::vector<int64_t>>;
// The ids as a list; empty if absent.
std::vector<int64_t> list_of(const std::optional<TokenIds>& ids);

// The options of girih.inject: a linear path beside attention, and their mixture (LiZA and MaG of TPTT).
struct Injection {
  std::optional<std::vector<int64_t>> layers = {};  // default: all layers whose mixer is attention
  LinearPathOptions path = {};
  MixAttentionOptions mix = {};
};

// girih.models.GirihConfig, with the same fields, defaults and errors.
struct Config {
  int64_t vocab_size = 256;
  int64_t hidden_size = 256;
  int64_t num_hidden_layers = 4;
  // The mixer of all layers, one of mixer_names(). Here "cat" is the whole CAT model; in `hybrid` "cat" is
  // CAT as a layer.
  std::string mixer = "gsa";
  std::vector<std::string> hybrid = {};  // one mixer per layer; replaces `mixer`
  int64_t num_heads = 4;
  std::optional<int64_t> num_kv_heads = {}, head_dim = {}, intermediate_size = {};
  int64_t num_slots = 64;
  int64_t chunk = 16;
  // The CAT model: the chunk lengths that set_chunk may choose, ascending multiples of the first.
  std::optional<std::vector<int64_t>> chunks = {};
  int64_t n = 2;  // delta-rule updates of a token in delta_product
  bool gated = true;
  std::optional<int64_t> conv_size = {};
  // Widths of keys and values as multiples of head_dim; the defaults are those of the paper of each mixer.
  std::optional<double> expand_k = {}, expand_v = {};
  int64_t state_size = 128;          // mamba2, gated_delta_product
  int64_t num_groups = 1;            // gated_delta_product; divides num_heads
  std::optional<int64_t> topk = {};  // raven, like the next fields; default: min(32, num_slots)
  bool slot_decay = false;
  std::string router_score = "sigmoid";
  bool router_mlp = false, router_bias = false, router_noise = false;
  bool output_gate = false;
  std::string phi = "ln_silu", f = "ln_silu";
  std::string objective = "decode";
  std::string feature = "softmax";
  std::optional<std::string> between_chunks = {};
  bool allow_neg_eigval = false;
  bool normalize = true;  // lattice; false, or shrinkage > 0, requires chunk = 1
  double shrinkage = 0.0;
  std::optional<bool> post_norm = {};           // default: true for trellis, false for lattice
  bool shared_qk = false, normalize_kv = true;  // trellis, like value_read
  std::string value_read = "linear";
  bool data_dependent_decay = true;    // gsa
  std::optional<int64_t> window = {};  // attention
  bool rotary = true;                  // retnet
  std::string mag_base = "attention", mag_mixer = "delta_product";
  double mag_weight = 0.5;
  bool mag_learned = false, mag_cross = false;
  std::optional<int64_t> compressor_hidden_size = {}, compressor_layers = {};
  bool running_positions = false;
  int64_t max_position_embeddings = 8192;
  double rope_theta = 10000.0;
  double norm_eps = 1e-6;
  std::optional<double> initializer_range = {};  // default: hidden_size^-1/2
  bool tie_word_embeddings = true;
  std::optional<int64_t> bos_token_id = {};
  std::optional<TokenIds> eos_token_id = {};
  std::optional<int64_t> pad_token_id = {};
  // One entry per set of layers; the entry `girih` of config.json, as girih.inject writes it.
  std::vector<Injection> injections = {};

  // The mixer of each layer.
  std::vector<std::string> mixers() const;
  bool is_whole_cat() const { return hybrid.empty() && mixer == "cat"; }
  // The configuration with all defaults that depend on other fields. Throws c10::ValueError for sizes that do
  // not fit, and for an option that differs from its default and that no mixer of the configuration reads.
  Config completed() const;

  // Whether a mixer of the configuration reads a field; unknown mixer names count as reading no field.
  bool reads(const std::string& field) const;
  // Sets fields from text, "chunk=1 phi=identity", with JSON values or plain words. Returns the names; throws
  // c10::ValueError for a name that is no field.
  std::vector<std::string> set_options(const std::string& options);

  // Options that differ from their default and that no mixer reads.
  std::vector<std::string> unread_options() const;
  // The configuration with these options reset to their defaults, for files of earlier versions.
  Config without_unread() const;

  // config.json of Hugging Face, as text. Unknown fields are skipped; a name similar to a field throws
  // c10::ValueError.
  static Config from_json(const std::string& text);
  std::string to_json() const;
};

// The names of all mixers.
std::vector<std::string> mixer_names();

// The mixer `name` of a configuration; the configuration must be completed.
AnyLayer make_mixer(const std::string& name, const Config& config);
// The mixer of a layer, with an injected path if the configuration has one for it.
AnyLayer make_mixer(int64_t layer, const Config& config);

// Embedding, blocks, RMS norm: ids [B, T] -> [B, T, hidden_size].
class ModelImpl : public LayerImpl {
 public:
  explicit ModelImpl(const Config& config);
  bool stepped(State& state, std::vector<int64_t>& kind) const override;

  torch::nn::Embedding embed_tokens{nullptr};
  torch::nn::ModuleList layers{nullptr};  // Block
  RMSNorm norm{nullptr};

 protected:
  Output run(const Tensor& ids, const Call& call) override;
};

// The compressor f(c): a chunk of C tokens as one vector of the width of the decoder. chunks [B, K, C], index
// [K] or [B, K] -> [B, K, hidden_size]. With several chunk lengths each length has its own columns of `proj`,
// and positions are counted in the shortest chunk, so that a position is the same token for all lengths.
class CompressorImpl : public Module {
 public:
  explicit CompressorImpl(const Config& config);
  Tensor forward(const Tensor& chunks, const Tensor& index);

  torch::nn::Embedding embed_tokens{nullptr}, position{nullptr};
  torch::nn::ModuleList layers{nullptr};  // Block
  RMSNorm norm{nullptr};
  torch::nn::Linear proj{nullptr};

 private:
  std::vector<int64_t> lengths_;
};
TORCH_MODULE(Compressor);

// CAT, the compress and attend transformer, as a whole model. Chunk k has the rows [header_k, x_{kC}, ...,
// x_{kC+C-2}], header_k = f(c_{k-1}), header_0 learned; the output of token t is row t + 1. The state of each
// layer has slots for K headers and one chunk. A decoding step computes one row, and a step that completes a
// chunk calls the compressor once. A cached call with a mask waits for the device to read the number of valid
// tokens.
class CatModelImpl : public LayerImpl {
 public:
  explicit CatModelImpl(const Config& config);
  void reset_parameters();
  // Sets the chunk of sequences that begin after this call, one of `chunks` of the configuration.
  void set_chunk(int64_t chunk);
  bool stepped(State& state, std::vector<int64_t>& kind) const override;
  void expect_state(const State& state, const Tensor& ids, const Tensor& cu_seqlens = {}) const override;

  torch::nn::Embedding embed_tokens{nullptr};
  Tensor header;
  Compressor compressor{nullptr};
  torch::nn::ModuleList layers{nullptr};  // Block
  RMSNorm norm{nullptr};

 protected:
  Output run(const Tensor& ids, const Call& call) override;

 private:
  Tensor first_header(int64_t chunk) const;
  Tensor headers(const Tensor& chunks, const Tensor& first, const Tensor& index, const Tensor& where);
  Tensor decode(Tensor x, const ChunkRows& rows, std::vector<State>& cache, const Tensor& cu_chunks = {});
  Tensor rows_of(const Tensor& headers, const Tensor& chunks);
  Output step(const Tensor& ids, const State& state);
  std::vector<int64_t> lengths_;
  int64_t chunk_, max_position_embeddings_;
  double initializer_range_;
};

struct GenerateOptions {
  int64_t max_new_tokens = 64;
  double temperature = 0.0;           // 0: greedy
  std::optional<int64_t> top_k = {};  // samples from the k most likely tokens
  std::optional<double> top_p = {};   // samples from the smallest set with this probability, in (0, 1]
  std::optional<at::Generator> generator = {};  // of the device of the model
  // The tokens that end a sequence; default: those of the configuration; empty: none. The rest of a finished
  // sequence is pad_token_id, or else the first of these tokens.
  std::optional<TokenIds> eos_token_id = {};
  Tensor attention_mask = {};  // mask of the prompt, padded on the left
  // Called with the next token of every sequence, [B, 1], when it is available.
  std::function<void(const Tensor&)> on_token = {};
};

// A language model with any mixer: ids [B, T], int64 or int32, -> logits [B, T, vocab_size]. forward has the
// arguments of every layer. The constructor throws c10::ValueError for an invalid configuration and for a
// model that does not fit into the memory of this machine.
class LanguageModelImpl : public LayerImpl {
 public:
  explicit LanguageModelImpl(const Config& config);

  // The mean cross entropy of every token after the first, in nats. labels [B, T], default ids; -100 is
  // ignored. At most 2^26 logits exist at a time, and gradients are computed with the loss: call it under
  // NoGradGuard if no gradient is needed. No second derivative.
  Tensor loss(const Tensor& ids, const Tensor& labels = {});
  // ids [B, T], T at least 1 -> the prompt and the new tokens, [B, T + at most max_new_tokens]. On a GPU each
  // decoding step is a CUDA graph on the current stream that reads the weights at their addresses. Therefore
  // on_token must not change the current stream and must not replace weight tensors. Without eos tokens, NaN
  // probabilities raise an error only after the last token.
  Tensor generate(const Tensor& ids, const GenerateOptions& options = {});
  // Adaptive CAT: sets the chunk of sequences that begin after this call, one of config.chunks; config.chunk
  // before the first call.
  void set_chunk(int64_t chunk);
  // Writes config.json and model.safetensors, which from_pretrained of Python reads.
  void save_pretrained(const std::string& folder) const;

  const Config config;
  AnyLayer model;                      // ModelImpl or CatModelImpl
  torch::nn::Linear lm_head{nullptr};  // absent when the word embeddings are tied

 protected:
  Output run(const Tensor& ids, const Call& call) override;

 private:
  friend class Decoder;  // runs generate token by token
  const Tensor& head_weight() const;
  Tensor head(const Tensor& x) const;
  torch::nn::Embedding embed_tokens_{nullptr};  // shared with the model
};
TORCH_MODULE(LanguageModel);

// The model with a linear path in parallel to the attention of some layers. All other weights share memory
// with `model`. Throws the c10::ValueError of a wrong configuration.
LanguageModel inject(const LanguageModel& model, const Injection& injection = {});

// Loads the model of a folder that save_pretrained wrote, here or in Python, in eval mode. The tokens bos,
// eos and pad are those of generation_config.json if it has them. Throws c10::ValueError for a parameter that
// is missing, unknown, duplicate or of another shape, and std::runtime_error for a file that cannot be read.
// Allocates no more memory than the files have.
LanguageModel from_pretrained(const std::string& folder, at::Device device = at::kCPU);

}  // namespace girih::nn
