// The layers for LibTorch. Modules, parameters, shapes and initialisation are those of girih.nn in Python:
// one state_dict serves both.
//
//   girih::nn::GatedSlotAttention layer(256, 4, girih::nn::GatedSlotAttentionOptions{.num_slots = 32});
//   auto [y, state] = layer(x);
#pragma once

#include <girih/ops.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/adamw.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace girih::nn {

using at::Tensor;

struct Slots;  // what attention's steps read that belongs to no sequence

// What a layer carries from one call to the next: its own tensors, and the states of the layers that it is
// made of. A default-made one is the start of a sequence.
struct State {
  std::vector<Tensor> tensors = {};  // undefined where absent
  std::vector<State> parts = {};
  // Of attention: how many of the keys' slots are taken.
  int64_t tokens = 0;
  std::shared_ptr<const Slots> slots = {};

  bool empty() const { return tensors.empty() && parts.empty(); }
  // The same state with f applied to every tensor: to reorder a batch, to copy, to move.
  State map(const std::function<Tensor(const Tensor&)>& f) const;

  // From and to an operator's state, as ops::GSAState.
  template <class OpState>
  static State of(OpState state) {
    return std::apply([](auto&... tensor) { return State{{tensor...}}; }, state.tensors());
  }
  template <class OpState>
  OpState as() const {
    OpState state;
    constexpr auto count = std::tuple_size_v<decltype(state.tensors())>;
    TORCH_CHECK_VALUE(tensors.empty() || tensors.size() == count, "state has ", tensors.size(),
                      " tensors; expected ", count, ", as this layer returns it");
    if (!tensors.empty()) {
      auto from = tensors.begin();
      std::apply([&](auto&... tensor) { ((tensor = *from++), ...); }, state.tensors());
    }
    return state;
  }
};

using Output = std::pair<Tensor, State>;

// ---- what layers have in common ----------------------------------------------------------------

// A module that knows which of its parameters weight decay must leave alone, and which of them, time scales
// and memories, stay in fp32 when it goes to bf16 or fp16, as their rounding grows with the sequence.
class Module : public torch::nn::Module {
 public:
  const std::vector<Tensor>& undecayed() const { return undecayed_; }

  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  using torch::nn::Module::to;

 protected:
  void no_weight_decay(std::vector<Tensor> parameters) { undecayed_ = std::move(parameters); }
  void keep_fp32(std::vector<Tensor> tensors) { fp32_ = std::move(tensors); }

 private:
  std::vector<Tensor> undecayed_, fp32_;
};

// The parameters of a model for two groups of an optimizer: memories, gate biases and norms are not decayed.
struct WeightDecayGroups {
  std::vector<Tensor> decayed, undecayed;
};
WeightDecayGroups weight_decay_groups(const torch::nn::Module& model);

// LibTorch's AdamW, whose step is a few kernels instead of a dozen for every parameter, as Python's with
// fused=True. What one class saves the other loads. A step of tensors that are not dense, or do not lie as
// their weight does, is LibTorch's own.
class AdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  Tensor step(LossClosure closure = nullptr) override;
};

// While one lives, its thread's matrix products on this kind of device are in `dtype`, and girih's operators
// read their data in it: weights stay as they are, gates and states in fp32. Python's torch.autocast, by
// default in bf16.
class Autocast {
 public:
  [[nodiscard]] explicit Autocast(at::Device device, at::ScalarType dtype = at::kBFloat16,
                                  bool enabled = true);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  at::DeviceType device_;
  at::ScalarType before_;
  bool was_enabled_;
};

// x W^T, W [features, width], and what becomes of r, its sums:
//   none        r + bias, in the dtype of x
//   linear      r + bias                            in fp32 at least, as all that follow
//   sigmoid     scale sigmoid(r + bias)
//   logsigmoid  scale log(sigmoid(r + bias))
//   decay       -exp(rate) softplus(r + bias)
// bias, rate: [features].
struct Product {
  Tensor weight;
  std::string gate = "none";
  Tensor bias = {}, rate = {};
  double scale = 1.0;
};

// What is made of rows x before their products: plain, x; rms_norm, the RMS norm of x with weight `other`;
// silu_rms_norm, that of silu(x); silu_product, silu(x) * other, `other` of the shape of x.
struct RowInput {
  std::string kind = "plain";
  Tensor other = {};
  double eps = 0.0;
};

// Every layer takes and returns [B, T, hidden_size]. attention_mask [B, T] is 0 at tokens that do nothing.
// `state` is what an earlier call with use_cache returned; with use_cache again, one token without mask or
// gradient writes it in place. cu_seqlens [N + 1] packs N sequences into B = 1 and excludes a mask. The
// returned state is empty without use_cache.
class LayerImpl : public Module {
 public:
  Output forward(const Tensor& x, const Tensor& attention_mask = {}, const State& state = {},
                 bool use_cache = false, const Tensor& cu_seqlens = {});
  // Whether one token after `state`, which is none of a start, runs on the device alone, with use_cache and
  // without mask or gradient, in tensors that stay where `state` has them and say all of how far it has come:
  // done again there, it reads the next token. If so `state` becomes what the host knows of it after the
  // token, and `kind` gets what runs where that is not always the same; if not, neither means anything.
  virtual bool stepped(State& state, std::vector<int64_t>& kind) const;
  // A model calls this once for every layer in it, which may depend on where it is: `layer` of `num_layers`,
  // from 0.
  virtual void set_depth(int64_t /*layer*/, int64_t /*num_layers*/) {}

 protected:
  struct Call {
    const Tensor& attention_mask;
    const State& state;
    bool use_cache;
    const Tensor& cu_seqlens;

    // One token extends a past that the caller gives up, and no gradient is asked: the state is written in
    // place.
    bool steps(const Tensor& x) const;
    State part(size_t i) const {
      TORCH_CHECK_VALUE(state.empty() || i < state.parts.size(), "state has ", state.parts.size(),
                        " parts; expected more, as this layer returns it");
      return state.empty() ? State() : state.parts[i];
    }
  };
  virtual Output run(const Tensor& x, const Call& call) = 0;
  Output run_part(LayerImpl& layer, const Tensor& x, const Call& call, size_t part) const;

  // A layer that is output(core(products of x)) says here what these are. A block then has its norm and its
  // sum computed with them where a token is decoded, and `run` is by_products too.
  virtual std::vector<Product> products() const { return {}; }
  // What `output` takes, but for before_output, and the state.
  virtual Output core(const std::vector<Tensor>& projected, const Call& call);
  virtual RowInput before_output() const { return {}; }
  virtual Product output() const { return {}; }
  // The layer of what `input` makes of x, and the residual on top.
  Output by_products(const Tensor& x, const Call& call, const RowInput& input = {},
                     const Tensor& residual = {});
  // x + layer(what `input` makes of x).
  Output run_onto(const Tensor& x, LayerImpl& layer, const RowInput& input, const Call& call) const;
};
using AnyLayer = std::shared_ptr<LayerImpl>;  // a GatedSlotAttention's is its ptr()

// A layer that reads tokens in order and carries a state; `mix` is written without masks. Each row's valid
// tokens move to its front and its bounds go to the operators, so that the rest belongs to no sequence: it
// moves no state, no position in a chunk and no window of a convolution, wherever it stood. What comes out at
// masked tokens means nothing.
class RecurrentLayerImpl : public LayerImpl {
 public:
  bool stepped(State& /*state*/, std::vector<int64_t>& /*kind*/) const override { return true; }

 protected:
  Output run(const Tensor& x, const Call& call) final;
  // `run` on valid tokens; cu_seqlens may be [B, 2], the rows' bounds.
  virtual Output mix(const Tensor& x, const Call& call) = 0;
};

// x [B, T, H, D], D even, with the pairs (i, i + D/2) turned by position * theta^(-2i/D); position [T] or [B,
// T].
Tensor rotary(const Tensor& x, const Tensor& position, double theta = 10000.0);

// ---- small modules -----------------------------------------------------------------------------

// RMS norm over the last dimension, in the dtype of x.
class RMSNormImpl : public Module {
 public:
  explicit RMSNormImpl(int64_t dim, double eps = 1e-6);
  Tensor forward(const Tensor& x);
  RowInput input() const { return {"rms_norm", weight, eps}; }  // the same, before products

  Tensor weight;
  double eps;
};
TORCH_MODULE(RMSNorm);

// RMSNorm(x) * act(gate) in the dtype of x, act: silu, gelu or sigmoid.
class GatedRMSNormImpl : public RMSNormImpl {
 public:
  explicit GatedRMSNormImpl(int64_t dim, double eps = 1e-6, std::string activation = "silu");
  Tensor forward(const Tensor& x, const Tensor& gate);

  std::string activation;
};
TORCH_MODULE(GatedRMSNorm);

// down(silu(gate(x)) * up(x)).
class SwiGLUImpl : public Module {
 public:
  SwiGLUImpl(int64_t hidden_size, int64_t intermediate_size);
  Tensor forward(const Tensor& x);
  // residual + this of what `input` makes of x.
  Tensor onto(const Tensor& residual, const Tensor& x, const RowInput& input);

  torch::nn::Linear gate_proj{nullptr}, up_proj{nullptr}, down_proj{nullptr};
};
TORCH_MODULE(SwiGLU);

// dt = softplus(x W + dt_bias), g = -exp(A_log) dt: [B, T, hidden_size] -> g, dt [B, T, num_heads], fp32 at
// least.
class DecayGateImpl : public Module {
 public:
  DecayGateImpl(int64_t hidden_size, int64_t num_heads, double largest_step = 0.1);
  void reset_parameters();
  std::pair<Tensor, Tensor> forward(const Tensor& x);
  Product product() const;  // g's

  double largest_step;
  torch::nn::Linear proj{nullptr};
  Tensor A_log, dt_bias;
};
TORCH_MODULE(DecayGate);

struct ShortConvOptions {
  int64_t kernel_size = 4;  // 0: only the activation, no parameters, no state
  std::optional<std::string> activation = "silu";
  bool bias = false;
};

// Depthwise causal convolution over the last kernel_size tokens, then SiLU. x, y [B, T, channels].
class ShortConvImpl : public RecurrentLayerImpl {
 public:
  explicit ShortConvImpl(int64_t channels, ShortConvOptions options = {});
  void reset_parameters();

  ShortConvOptions options;
  Tensor weight, bias;

 protected:
  Output mix(const Tensor& x, const Call& call) override;
};
TORCH_MODULE(ShortConv);

// ---- mixers ------------------------------------------------------------------------------------
// num_kv_heads, the number of memories, is num_heads unless given; head_dim is hidden_size / num_heads. Keys
// have expand_k * head_dim channels, values expand_v * head_dim, both whole numbers.

struct GatedSlotAttentionOptions {
  int64_t num_slots = 64;
  std::optional<int64_t> num_kv_heads = {}, head_dim = {};
  bool gated = true;                 // false: ABC
  bool data_dependent_decay = true;  // false: g is learned, the same for all tokens
  double gate_logit_normalizer = 8.0;
  std::string feature = "softmax";  // of ops::GSAOptions
  int64_t conv_size = 0;
  double norm_eps = 1e-6;
};

// M memory slots with one forget gate each, read by softmax attention (GSA; Zhang et al. 2024, eq. 9).
//   g = logsigmoid(x W_f) / gate_logit_normalizer,  s = 1 - e^g
//   Hk <- Hk Diag(e^g) + k s^T,  Hv <- Diag(e^g) Hv + s v^T,  o = Hv^T softmax(Hk^T q)
//   y = W_o RMSNorm(silu(o)),    q, k, v = silu(x W)
// Without data_dependent_decay: decay_logits [memories, M] in place of x W_f.
class GatedSlotAttentionImpl : public RecurrentLayerImpl {
 public:
  GatedSlotAttentionImpl(int64_t hidden_size, int64_t num_heads, GatedSlotAttentionOptions options = {});
  void reset_parameters();

  GatedSlotAttentionOptions options;
  torch::nn::Linear qkv_proj{nullptr};
  ShortConv conv{nullptr};
  torch::nn::Linear f_proj{nullptr};
  Tensor decay_logits;
  RMSNorm norm{nullptr};
  torch::nn::Linear o_proj{nullptr};

 protected:
  Output mix(const Tensor& x, const Call& call) final { return by_products(x, call); }
  std::vector<Product> products() const override;
  Output core(const std::vector<Tensor>& projected, const Call& call) override;
  RowInput before_output() const override;
  Product output() const override;

 private:
  std::vector<int64_t> heads_;  // of q, k and v
};
TORCH_MODULE(GatedSlotAttention);

struct GatedLinearAttentionOptions {
  std::optional<int64_t> num_kv_heads = {}, head_dim = {};
  double expand_k = 1.0, expand_v = 1.0;
  std::string gate = "vector";
  int64_t gate_low_rank = 16;
  double gate_logit_normalizer = 16.0;
  bool rotary = false;
  double rope_theta = 10000.0;  // read with rotary alone
  int64_t conv_size = 0;
  double norm_eps = 1e-6;
};

// One matrix memory a head that only ever adds (Katharopoulos et al. 2020) and forgets by a gate.
//   S <- e^g S + k v^T,   o = S^T q / sqrt(D),   y = W_o (RMSNorm(o) * silu(x W_g))
// gate none: linear attention, q and k through elu + 1; fixed: RetNet's decays; scalar: Mamba-2's decay, v
// scaled by its step and a skip; vector: GLA, one decay a key channel.
// rotary: q and k turned by `rotary` at each token's place in its sequence (RetNet); the state has the place
// of the next token, [N].
class GatedLinearAttentionImpl : public RecurrentLayerImpl {
 public:
  GatedLinearAttentionImpl(int64_t hidden_size, int64_t num_heads, GatedLinearAttentionOptions options = {});
  void reset_parameters();

  GatedLinearAttentionOptions options;
  torch::nn::Linear qkv_proj{nullptr};
  ShortConv conv{nullptr};
  DecayGate decay_scalar{nullptr};              // "decay" of gate = scalar
  torch::nn::ModuleList decay_vector{nullptr};  // "decay" of gate = vector: a low rank, and
  torch::nn::Linear gate_proj{nullptr};         // its second part
  Tensor skip;
  torch::nn::Linear g_proj{nullptr};
  GatedRMSNorm norm{nullptr};
  torch::nn::Linear o_proj{nullptr};

 protected:
  Output mix(const Tensor& x, const Call& call) override;

 private:
  std::pair<Tensor, Tensor> log_decay(const Tensor& x);
  std::vector<int64_t> heads_;
  int64_t key_dim_, value_dim_;
};
TORCH_MODULE(GatedLinearAttention);

struct Mamba2Options {
  std::optional<int64_t> head_dim = {};
  double expand_v = 2.0;
  int64_t state_size = 128;
  int64_t conv_size = 4;
  double norm_eps = 1e-6;
};

// Mamba-2's mixer (Dao and Gu 2024): expand_v * num_heads heads of head_dim channels, which share B and C of
// state_size channels.
//   x, B, C = silu(conv(u W)),   dt = softplus(u W_dt + dt_bias)
//   S <- e^{-exp(A_log) dt} S + dt B x^T,   o = S^T C + skip x,   y = W_o RMSNorm(o * silu(u W_z))
class Mamba2Impl : public RecurrentLayerImpl {
 public:
  Mamba2Impl(int64_t hidden_size, int64_t num_heads, Mamba2Options options = {});
  void reset_parameters();

  Mamba2Options options;
  torch::nn::Linear in_proj{nullptr};
  ShortConv conv{nullptr};
  torch::nn::Linear dt_proj{nullptr}, z_proj{nullptr};
  Tensor A_log, dt_bias, skip;
  RMSNorm norm{nullptr};
  torch::nn::Linear o_proj{nullptr};

 protected:
  Output mix(const Tensor& x, const Call& call) final { return by_products(x, call); }
  std::vector<Product> products() const override;
  Output core(const std::vector<Tensor>& projected, const Call& call) override;
  RowInput before_output() const override { return norm->input(); }
  Product output() const override;

 private:
  int64_t heads_;
};
TORCH_MODULE(Mamba2);

struct HGRN2Options {
  std::optional<int64_t> head_dim = {};
  double expand_k = 1.0, expand_v = 1.0;
  double lower_bound = 0.0;  // of f, in [0, 1)
  double norm_eps = 1e-6;
};

// A memory whose keys are what its gate forgets (HGRN2; Qin et al. 2024). Its keys' width is the state
// expansion.
//   f = lower_bound + (1 - lower_bound) sigmoid(x W_f),   q = silu(x W_q),   v = x W_v
//   S <- Diag(f) S + (1 - f) v^T,   o = S^T q,   y = W_o RMSNorm(o)
// A model gives layer i of L the bound i / L, where the paper's learned bounds begin.
class HGRN2Impl : public RecurrentLayerImpl {
 public:
  HGRN2Impl(int64_t hidden_size, int64_t num_heads, HGRN2Options options = {});
  void set_lower_bound(double lower_bound);
  void set_depth(int64_t layer, int64_t num_layers) override;

  HGRN2Options options;
  torch::nn::Linear qfv_proj{nullptr};
  RMSNorm norm{nullptr};
  torch::nn::Linear o_proj{nullptr};

 protected:
  Output mix(const Tensor& x, const Call& call) final { return by_products(x, call); }
  std::vector<Product> products() const override;
  Output core(const std::vector<Tensor>& projected, const Call& call) override;
  RowInput before_output() const override { return norm->input(); }
  Product output() const override;

 private:
  std::vector<int64_t> heads_;
  int64_t key_dim_, value_dim_;
};
TORCH_MODULE(HGRN2);

struct DeltaProductOptions {
  int64_t n = 1;  // Householder steps a token
  std::optional<int64_t> num_kv_heads = {}, head_dim = {};
  double expand_k = 1.0, expand_v = 1.0;
  bool gated = false;
  bool allow_neg_eigval = false;
  std::optional<std::string> between_chunks = {};  // gelu, tanh
  std::optional<int64_t> chunk = {};               // read with between_chunks alone
  int64_t conv_size = 4;
  double norm_eps = 1e-6;
};

// A matrix memory corrected n times a token, each time along one key. n = 1 is DeltaNet, with `gated` Gated
// DeltaNet.
//   S <- e^g S;  for j < n:  S <- S + beta_j k_j (v_j - S^T k_j)^T;   o = S^T q / sqrt(D)
//   y = W_o (RMSNorm(o) * silu(x W_g))
class DeltaProductImpl : public RecurrentLayerImpl {
 public:
  DeltaProductImpl(int64_t hidden_size, int64_t num_heads, DeltaProductOptions options = {});

  DeltaProductOptions options;
  torch::nn::Linear qkv_proj{nullptr};
  ShortConv conv{nullptr};
  torch::nn::Linear beta_proj{nullptr};
  DecayGate decay{nullptr};
  torch::nn::Linear g_proj{nullptr};
  GatedRMSNorm norm{nullptr};
  torch::nn::Linear o_proj{nullptr};

 protected:
  Output mix(const Tensor& x, const Call& call) final { return by_products(x, call); }
  std::vector<Product> products() const override;
  Output core(const std::vector<Tensor>& projected, const Call& call) override;
  Product output() const override;

 private:
  Tensor per_step(const Tensor& x) const;
  std::vector<int64_t> heads_;
  int64_t key_dim_, value_dim_;
};
TORCH_MODULE(DeltaProduct);

struct TrellisOptions {
  int64_t num_slots = 64;
  std::optional<int64_t> head_dim = {};
  int64_t chunk = 16;
  std::string phi = "ln_silu", f = "ln_silu";  // of ops::TrellisOptions
  bool gated = true;
  bool shared_qk = false;             // one projection for q and k, as Lattice has
  bool normalize_kv = true;           // k and v are unit vectors
  std::string value_read = "linear";  // phi: o = phi(A_v^T f(A_k q))
  bool post_norm = true;              // false: y = W_o (o * gelu(x W_g))
  int64_t conv_size = 4;
  double norm_eps = 1e-6;
};

// Two memories of M slots that learn to map keys and values onto one target (Trellis, eq. 8-14). A' is A at
// the start of the chunk.
//   A <- e^g A - gamma J_phi(A' x)^T (phi(A' x) - a) x^T      A_k for x = k, A_v for x = v
//   o = A_v^T f(A_k q),   y = W_o (RMSNorm(o) * gelu(x W_g))
class TrellisImpl : public RecurrentLayerImpl {
 public:
  TrellisImpl(int64_t hidden_size, int64_t num_heads, TrellisOptions options = {});
  void reset_parameters();

  TrellisOptions options;
  torch::nn::Linear qk_proj{nullptr};  // with shared_qk, else
  torch::nn::Linear q_proj{nullptr}, k_proj{nullptr};
  ShortConv q_conv{nullptr}, k_conv{nullptr};
  torch::nn::Linear v_proj{nullptr}, a_proj{nullptr}, gamma_proj{nullptr};
  DecayGate decay{nullptr};
  Tensor key_memory, value_memory;
  torch::nn::Linear g_proj{nullptr};
  GatedRMSNorm norm{nullptr};
  torch::nn::Linear o_proj{nullptr};

 protected:
  Output mix(const Tensor& x, const Call& call) final { return by_products(x, call); }
  std::vector<Product> products() const override;
  Output core(const std::vector<Tensor>& projected, const Call& call) override;
  Product output() const override;

 private:
  int64_t num_heads_;
};
TORCH_MODULE(Trellis);

struct TTTLinearOptions {
  std::optional<int64_t> head_dim = {};
  int64_t chunk = 16;
  int64_t conv_size = 4;
  double norm_eps = 1e-6;
};

// A memory that learns, while it reads, to map keys to values (TTT-Linear, Sun et al. 2024). A' is A at the
// start of the chunk, f' is f with A'; q and k are unit vectors.
//   f(x) = x + w * LayerNorm(A x) + b,   A <- A - gamma d|f'(k) - v|^2 / 2 dA'
//   o = f(q),   y = W_o (RMSNorm(o) * gelu(x W_g))
class TTTLinearImpl : public RecurrentLayerImpl {
 public:
  TTTLinearImpl(int64_t hidden_size, int64_t num_heads, TTTLinearOptions options = {});
  void reset_parameters();

  TTTLinearOptions options;
  torch::nn::Linear q_proj{nullptr}, k_proj{nullptr};
  ShortConv q_conv{nullptr}, k_conv{nullptr};
  torch::nn::Linear v_proj{nullptr}, gamma_proj{nullptr};
  Tensor memory, inner_weight, inner_bias;
  torch::nn::Linear g_proj{nullptr};
  GatedRMSNorm norm{nullptr};
  torch::nn::Linear o_proj{nullptr};

 protected:
  Output mix(const Tensor& x, const Call& call) final { return by_products(x, call); }
  std::vector<Product> products() const override;
  Output core(const std::vector<Tensor>& projected, const Call& call) override;
  Product output() const override;

 private:
  int64_t num_heads_;
};
TORCH_MODULE(TTTLinear);

struct LatticeOptions {
  int64_t num_slots = 64;
  std::optional<int64_t> head_dim = {};
  int64_t chunk = 16;
  std::string objective = "decode";  // of ops::LatticeOptions, as the next two
  bool normalize = true;
  double shrinkage = 0.0;
  bool gated = true;
  bool post_norm = false;  // true: y = W_o (RMSNorm(o) * gelu(x W_g))
  int64_t conv_size = 4;
  double norm_eps = 1e-6;
};

// M slots on the unit sphere, each moved only along what it does not hold yet (Lattice, eq. 10-11, 15).
//   d_i = -gamma c_i (h - s_i (s_i . h)),   s_i <- (e^g s_i + d_i) / |e^g s_i + d_i|,   o = S q
//   y = W_o (o * gelu(x W_g))
// v is of unit length for objective encode, whose steps grow with |v|^2.
class LatticeImpl : public RecurrentLayerImpl {
 public:
  LatticeImpl(int64_t hidden_size, int64_t num_heads, LatticeOptions options = {});
  void reset_parameters();

  LatticeOptions options;
  torch::nn::Linear qk_proj{nullptr};
  ShortConv q_conv{nullptr}, k_conv{nullptr};
  torch::nn::Linear v_proj{nullptr}, gamma_proj{nullptr};
  DecayGate decay{nullptr};
  Tensor memory;
  torch::nn::Linear g_proj{nullptr};
  GatedRMSNorm norm{nullptr};
  torch::nn::Linear o_proj{nullptr};

 protected:
  Output mix(const Tensor& x, const Call& call) final { return by_products(x, call); }
  std::vector<Product> products() const override;
  Output core(const std::vector<Tensor>& projected, const Call& call) override;
  Product output() const override;

 private:
  int64_t num_heads_;
};
TORCH_MODULE(Lattice);

struct AttentionOptions {
  std::optional<int64_t> num_kv_heads = {}, head_dim = {};
  double rope_theta = 10000.0;
  bool causal = true;
  std::optional<int64_t> window = {};  // a query sees so many tokens, itself the last; causal alone
};

// Softmax attention with rotary positions. The state {k, v, valid, place} has turned keys and values [N,
// slots, heads, head_dim], of which the first `tokens` are there, which of them were valid, [N, slots],
// undefined where all were, and `tokens` on the device, [N]. Without gradients there are slots for tokens
// that come, and a single one is written there.
class AttentionImpl : public LayerImpl {
 public:
  AttentionImpl(int64_t hidden_size, int64_t num_heads, AttentionOptions options = {});
  bool stepped(State& state, std::vector<int64_t>& kind) const override;

  AttentionOptions options;
  torch::nn::Linear qkv_proj{nullptr}, o_proj{nullptr};

 protected:
  Output run(const Tensor& x, const Call& call) override;
  // Refuses what is no packing of x, and packed sequences with a cache.
  void check_packed(const Tensor& x, const Call& call) const;
  std::vector<Product> products() const override;
  Output core(const std::vector<Tensor>& projected, const Call& call) override;
  Product output() const override;

 private:
  Tensor visible(int64_t past, int64_t T, const Tensor& valid, const Tensor& cu_seqlens,
                 at::Device device) const;
  // Refuses a state that is not this layer's after tokens of as many sequences as x has.
  void expect_state(const State& state, const Tensor& x) const;
  Output step(const Tensor& qkv, State state) const;
  std::vector<int64_t> heads_;
  int64_t head_dim_;
};
TORCH_MODULE(Attention);

struct ChunkAttentionOptions {
  int64_t chunk = 16;  // rows, the header among them
  std::optional<int64_t> num_kv_heads = {}, head_dim = {};
  double rope_theta = 10000.0;
  bool running_positions = false;  // chunk k starts at position k, not at 0
};

// Where the rows of a call stand, and what their sequences keep. Without `first` each sequence begins here
// and nothing is kept.
struct ChunkRows {
  int64_t chunk;        // rows of a chunk, the header among them
  Tensor first = {};    // [N]: the place of each one's first row; the start of a chunk if there are several
  Tensor end = {};      // [N]: the place after the last row that stays
  int64_t headers = 0;  // how many headers the sequences have at most after the call
  // For a single row, computed once for all layers.
  Tensor slot = {};  // [N]: where its key goes
  Tensor see = {};   // [N, 1, 1, slots]: what is added to its scores, -inf at slots that it does not read
  Tensor turn = {};  // [2, N, 1, 1, D]: x turn[0] + x.roll(D / 2) turn[1] is `rotary` at its position
};

// Attention of rows in chunks, row 0 of each its header (ops::cat_attention). As a layer it has no mask and
// no state; cu_seqlens counts rows and cuts between chunks.
class ChunkAttentionImpl : public LayerImpl {
 public:
  ChunkAttentionImpl(int64_t hidden_size, int64_t num_heads, ChunkAttentionOptions options = {});

  // x [N, rows, hidden_size] -> y. kept: turned keys and values {k, v} [N, slots, heads, head_dim], chunk - 1
  // slots for the rows that follow the current chunk's header, then one slot for each header; empty at the
  // start. A single row writes them in place. input, residual: as of by_products.
  Tensor attend(const Tensor& x, const ChunkRows& rows, State& kept, const Tensor& cu_chunks = {},
                const RowInput& input = {}, const Tensor& residual = {});
  // Queries, keys and values of x [N, rows, hidden_size], queries and keys turned to their places.
  std::vector<Tensor> project(const Tensor& x, const ChunkRows& rows);
  // One row of each sequence, at `place` [N], that reads keys k [N, slots, heads, head_dim] and writes its
  // own there.
  ChunkRows prepare_row(int64_t chunk, const Tensor& place, const Tensor& k) const;

  ChunkAttentionOptions options;
  torch::nn::Linear qkv_proj{nullptr}, o_proj{nullptr};

 protected:
  Output run(const Tensor& x, const Call& call) override;

 private:
  std::vector<Tensor> rotate_qk(const Tensor& qkv, const ChunkRows& rows, const Tensor& cu_chunks) const;
  Tensor position(const Tensor& row, int64_t chunk, const Tensor& first = {}) const;
  Tensor step(const Tensor& qkv, const ChunkRows& rows, const State& kept) const;
  Tensor extend(const std::vector<Tensor>& qkv, const ChunkRows& rows, const State& kept) const;
  std::vector<int64_t> heads_;
  int64_t head_dim_;
};
TORCH_MODULE(ChunkAttention);

// A chunk of C tokens becomes one header for all later ones: compress and attend (CAT), as a layer.
//   header_0 learned,   header_k = W_c [x_{(k-1)C} ... x_{kC-1}],   chunk k: [header_k, x_{kC}, ...,
//   x_{kC+C-1}]
// options.chunk is C. The state has a slot for each header and for each token of one chunk; a token is one
// row over them, and a finished chunk one product with W_c.
class CompressAttendImpl : public LayerImpl {
 public:
  CompressAttendImpl(int64_t hidden_size, int64_t num_heads, ChunkAttentionOptions options = {});
  void reset_parameters();
  bool stepped(State& state, std::vector<int64_t>& kind) const override;

  ChunkAttentionOptions options;
  Tensor header;
  torch::nn::Linear compress{nullptr};
  ChunkAttention attention{nullptr};

 protected:
  Output run(const Tensor& x, const Call& call) override;

 private:
  Tensor headers(const Tensor& tokens, const Tensor& first, const Tensor& where);
  Tensor attend(const Tensor& headers, const Tensor& tokens, const ChunkRows& rows, State& kept,
                const Tensor& cu_chunks);
  Output step(const Tensor& x, const State& state);
};
TORCH_MODULE(CompressAttend);

struct MixAttentionOptions {
  double weight = 0.5;
  bool learned = false;
  bool cross = false;
};

// The weight m of (1 - m) base + m mixed, with `cross` also + [(1 - m) base] * [m mixed] (MaG; TPTT eq. 7,
// 8). m is the buffer `weight`, or with `learned` the sigmoid of the parameter `logit`.
class MemoryAsGateImpl : public LayerImpl {
 public:
  explicit MemoryAsGateImpl(MixAttentionOptions options = {});
  void reset_parameters();
  // Moves m, without waiting for the device. Throws c10::ValueError for a learned weight, and for one that is
  // not from 0 to 1.
  void set_weight(double weight);
  Tensor current_weight() const;
  // base and mixed have one shape, which is the mixture's.
  Tensor mixture(const Tensor& base, const Tensor& mixed) const;

  MixAttentionOptions options;
  Tensor logit, weight;
};

// y = (1 - m) base(x) + m mixer(x), as MemoryAsGate mixes them.
class MixAttentionImpl : public MemoryAsGateImpl {
 public:
  MixAttentionImpl(AnyLayer base, AnyLayer mixer, MixAttentionOptions options = {});
  bool stepped(State& state, std::vector<int64_t>& kind) const override;

  AnyLayer base, mixer;

 protected:
  Output run(const Tensor& x, const Call& call) override;
};
TORCH_MODULE(MixAttention);

struct LinearPathOptions {
  int64_t n = 2;                                   // steps a token, 1 to 4
  std::string virtual_tokens = "derivative";       // rotary, both: read with n above 1 alone
  std::string gate = "k";                          // v, kv: the product of both gates
  std::string gate_per = "channel";                // head: the mean over channels
  std::string pool = "past";                       // window: the last three tokens
  std::optional<std::string> between_chunks = {};  // gelu, tanh
  int64_t chunk = 64;                              // read with between_chunks alone
  double norm_eps = 1e-6;
};

// DeltaProduct of an attention's q, k and v, without a projection of its own (LiZA; TPTT, section 3).
//   beta = sigmoid(mean of k over the past),   q, k, v <- silu(.) / |silu(.)|                    eq. 5, 4
//   k_0 = k, v_0 = v;   k_m, v_m: their m-th differences over tokens, or turned by 2 pi m / n    eq. 22, 23
//   for m < n:  S <- S + k_m (beta * v_m - S^T (beta * k_m))^T
//   o = RMSNorm(S^T q)                                                                           eq. 6
// x [B, T, (heads + 2 kv_heads) head_dim], q, k and v one after the other -> o [B, T, heads head_dim]. The
// state {count} has how many tokens the pool has, [N], of pool = past; its parts are the pool, a sum of
// tokens or the last two, the memory, and for each difference the row before.
class LinearPathImpl : public RecurrentLayerImpl {
 public:
  LinearPathImpl(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, LinearPathOptions options = {});
  // Refuses a state that is not this path's after tokens of as many sequences as x has.
  void expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens = {}) const;

  LinearPathOptions options;
  RMSNorm norm{nullptr};

 protected:
  Output mix(const Tensor& x, const Call& call) override;

 private:
  bool has_differences() const { return options.virtual_tokens != "rotary"; }
  Tensor pool(const Tensor& x, const Call& call, State& after) const;
  Tensor step_sizes(const Tensor& k, const Tensor& v, const Call& call, State& after) const;
  Tensor virtual_rows(const Tensor& kv, const Call& call, State& after) const;
  std::vector<int64_t> heads_;  // of q, k and v
  int64_t head_dim_;
};
TORCH_MODULE(LinearPath);

// A linear path, and the weight m that mixes it with the attention beside it. As a layer it is the path.
class LizaImpl : public MemoryAsGateImpl {
 public:
  LizaImpl(LinearPath path, MixAttentionOptions options = {});
  bool stepped(State& state, std::vector<int64_t>& kind) const override;

  LinearPath path{nullptr};

 protected:
  Output run(const Tensor& x, const Call& call) override;
};
TORCH_MODULE(Liza);

// Attention, and a linear path beside it that reads the same q, k and v before rotary positions and shares
// the output projection.
//   y = (1 - m) W_o attention(q, k, v) + m W_o path(q, k, v)      TPTT eq. 7; with `cross`, eq. 8
// At m = 0 it is attention, bit for bit. The state's parts are attention's, which grows, and the path's.
class InjectedAttentionImpl : public AttentionImpl {
 public:
  InjectedAttentionImpl(int64_t hidden_size, int64_t num_heads, AttentionOptions attention = {},
                        LinearPathOptions path = {}, MixAttentionOptions mix = {});
  bool stepped(State& state, std::vector<int64_t>& kind) const override;

  Liza girih{nullptr};

 protected:
  Output run(const Tensor& x, const Call& call) override;
  std::vector<Product> products() const override;
  Output core(const std::vector<Tensor>& projected, const Call& call) override;
};
TORCH_MODULE(InjectedAttention);

// Each schedule has the options that it reads; without one it takes the default.
struct MixScheduleOptions {
  std::optional<double> first = {};                // of gradual: 0.01
  std::optional<double> final = {};                // of constant and gradual: 0.5
  std::optional<int64_t> steps = {};               // of gradual and cyclic: 100
  std::optional<std::vector<double>> levels = {};  // of cyclic: 0, 0.5, 1
};

// The weight m of a model's mixtures by the number of the training step (TPTT, section 4).
//   constant: `final`.  gradual: from `first` to `final` in a line over `steps` steps.  cyclic: the next of
//   `levels` every `steps` steps, round and round.
// Throws c10::ValueError for an unknown schedule, an option that the schedule does not read, and a weight
// that is not from 0 to 1.
//
//   const MixSchedule schedule("gradual", {.first = 0.0, .final = 0.5, .steps = 100});
//   for (int64_t step = 0; step < steps; ++step) { schedule.set_weights(*model, step); ... }
class MixSchedule {
 public:
  explicit MixSchedule(std::string schedule = "gradual", MixScheduleOptions options = {});
  double weight(int64_t step) const;
  // Moves every mixture of the model. Throws c10::ValueError where there is none, and where one is learned.
  void set_weights(const torch::nn::Module& model, int64_t step) const;

 private:
  std::string schedule_;
  double first_, final_;
  int64_t steps_;
  std::vector<double> levels_;
};

// The Llama block: x + mixer(RMSNorm(x)), then x + SwiGLU(RMSNorm(x)). Without intermediate_size the second
// part is absent, as in Mamba-2.
class BlockImpl : public LayerImpl {
 public:
  BlockImpl(AnyLayer mixer, int64_t hidden_size, std::optional<int64_t> intermediate_size,
            double norm_eps = 1e-6);
  bool stepped(State& state, std::vector<int64_t>& kind) const override;
  // The block around mix(x, input, residual): what a mixer makes of what `input` makes of x, and the residual
  // on top, which may be undefined.
  Tensor around(const Tensor& x,
                const std::function<Tensor(const Tensor&, const RowInput&, const Tensor&)>& mix);
  // `forward` of x + branch, or of x, whose last sum is left to the norm that comes next and adds: the two
  // parts of the result, and the state.
  struct Parts {
    Tensor x, branch;
    State state;
  };
  Parts parts(const Tensor& x, const Tensor& branch, const Tensor& attention_mask, const State& state,
              bool use_cache, const Tensor& cu_seqlens);

  RMSNorm mixer_norm{nullptr};
  AnyLayer mixer;
  RMSNorm mlp_norm{nullptr};
  SwiGLU mlp{nullptr};

 protected:
  Output run(const Tensor& x, const Call& call) override;
};
TORCH_MODULE(Block);

}  // namespace girih::nn
