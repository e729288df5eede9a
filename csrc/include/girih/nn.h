// The layers for LibTorch. Modules, parameters, shapes and initialisation are those of girih.nn in Python;
// state_dicts are interchangeable.
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

struct Slots;  // tables that decoding steps of attention read, shared by all sequences

// The state of a layer between calls: its own tensors, and the states of its sublayers. A default-constructed
// state is the start of a sequence.
struct State {
  std::vector<Tensor> tensors = {};  // undefined where absent
  std::vector<State> parts = {};
  // Attention only: the number of used slots of the keys, and the tables of a decoding step.
  int64_t tokens = 0;
  std::shared_ptr<const Slots> slots = {};

  bool empty() const { return tensors.empty() && parts.empty(); }
  // The state with f applied to every tensor, for example to reorder a batch or to copy the state.
  State map(const std::function<Tensor(const Tensor&)>& f) const;

  // Conversion from and to the state of an operator, such as ops::GSAState.
  template <class OpState>
  static State of(OpState state) {
    return std::apply([](auto&... tensor) { return State{{tensor...}}; }, state.tensors());
  }
  template <class OpState>
  OpState as() const {
    OpState state;
    constexpr auto count = std::tuple_size_v<decltype(state.tensors())>;
    TORCH_CHECK_VALUE(tensors.empty() || tensors.size() == count, "state has ", tensors.size(),
                      " tensors; expected ", count, "; pass the state that this layer returned");
    if (!tensors.empty()) {
      auto from = tensors.begin();
      std::apply([&](auto&... tensor) { ((tensor = *from++), ...); }, state.tensors());
    }
    return state;
  }
};

using Output = std::pair<Tensor, State>;

// ---- what layers have in common ----------------------------------------------------------------

// A module with a list of parameters without weight decay (`undecayed`), and a list of tensors (time scales
// and memories) that stay in fp32 when the module is converted to bf16 or fp16, because their rounding error
// would grow with the length of the sequence.
class Module : public torch::nn::Module {
 public:
  const std::vector<Tensor>& undecayed() const { return undecayed_; }

  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  using torch::nn::Module::to;

 protected:
  void no_weight_decay(std::vector<Tensor> parameters) { undecayed_ = std::move(parameters); }
  void keep_fp32(std::vector<Tensor> tensors) { fp32_tensors_ = std::move(tensors); }

 private:
  std::vector<Tensor> undecayed_, fp32_tensors_;
};

// The parameters of a model in two groups for an optimizer, with and without weight decay. Memories, gate
// biases, time scales and norms have none.
struct WeightDecayGroups {
  std::vector<Tensor> decayed, undecayed;
};
WeightDecayGroups weight_decay_groups(const torch::nn::Module& model);

// LibTorch's AdamW with an optimizer step of a few kernels, like fused=True in Python, instead of a dozen per
// parameter. State files are interchangeable with LibTorch's class. If a tensor is not contiguous, or differs
// in layout from its weight, LibTorch's step runs.
class AdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  Tensor step(LossClosure closure = nullptr) override;
};

// While an object exists, matrix products of its thread on this device type run in `dtype`, and the operators
// of girih cast their data to it; weights are unchanged, gates and states are fp32. Like torch.autocast in
// Python; the default is bf16.
class Autocast {
 public:
  [[nodiscard]] explicit Autocast(at::Device device, at::ScalarType dtype = at::kBFloat16,
                                  bool enabled = true);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  at::DeviceType device_;
  at::ScalarType previous_dtype_;
  bool was_enabled_;
};

// A linear product r = x W^T, W [features, width], and its gate:
//   none        r + bias, in the dtype of x         the fused kernels require no bias
//   linear      r + bias                            in fp32 or fp64, like the following gates
//   sigmoid     scale sigmoid(r + bias)
//   logsigmoid  scale log(sigmoid(r + bias))
//   decay       -exp(rate) softplus(r + bias)       rate: the log rate, A_log of Mamba-2
// bias, rate: [features].
struct Product {
  Tensor weight;
  std::string gate = "none";
  Tensor bias = {}, rate = {};
  double scale = 1.0;
};

// The prologue of products: a function of their input x that is applied first.
//   plain          x (no prologue)
//   rms_norm       RMSNorm(x) with weight `other`
//   silu_rms_norm  RMSNorm(silu(x)) with weight `other`
//   silu_product   silu(x) * other, `other` with the shape of x
struct RowInput {
  std::string kind = "plain";
  Tensor other = {};
  double eps = 0.0;
};

// A layer of a block maps x [B, T, hidden_size] to the same shape. attention_mask [B, T] is 0 at tokens to
// ignore. `state` is the state of an earlier call with use_cache; a call of one token with use_cache, without
// mask, cu_seqlens and gradient, writes it in place. cu_seqlens [N + 1] packs N sequences into B = 1 and
// cannot be combined with a mask. The returned state is empty without use_cache.
class LayerImpl : public Module {
 public:
  Output forward(const Tensor& x, const Tensor& attention_mask = {}, const State& state = {},
                 bool use_cache = false, const Tensor& cu_seqlens = {});
  // Predicts a decoding step of one token after `state` (not empty, with use_cache, without mask and
  // gradient), without computing it. Returns whether the step can be captured in a CUDA graph: it runs on the
  // device only and reads and writes only the tensors of `state`. If true, the host numbers of `state` are
  // advanced by one token, and the numbers that select the step's kernels are appended to `kind`; layers
  // whose kernels are always the same append none. If false, `state` and `kind` are unspecified.
  virtual bool stepped(State& state, std::vector<int64_t>& kind) const;
  // Throws unless `state` is empty or a state of this layer for the sequences of x [B, T, ...]. A call checks
  // all of its state before it writes any part in place.
  virtual void expect_state(const State& /*state*/, const Tensor& /*x*/,
                            const Tensor& /*cu_seqlens*/ = {}) const {}
  // Whether a call with use_cache returns a state that the next call requires. A mixture or a model refuses a
  // state without the part of such a layer.
  virtual bool has_state() const { return false; }
  // A model calls set_depth once for each of its layers, from 0: for options that depend on the depth.
  virtual void set_depth(int64_t /*layer*/, int64_t /*num_layers*/) {}

 protected:
  struct Call {
    const Tensor& attention_mask;
    const State& state;
    bool use_cache;
    const Tensor& cu_seqlens;

    // Whether the call is a decoding step: one token after a state that may be overwritten, without gradient.
    bool is_step(const Tensor& x) const;
    State part(size_t i) const {
      TORCH_CHECK_VALUE(state.empty() || i < state.parts.size(), "state has ", state.parts.size(),
                        " parts; expected more; pass the state that this layer returned");
      return state.empty() ? State() : state.parts[i];
    }
  };
  virtual Output run(const Tensor& x, const Call& call) = 0;
  Output run_part(LayerImpl& layer, const Tensor& x, const Call& call, size_t part) const;

  // The products of a layer of the form output(output_prologue(core(products of x))); empty for other layers.
  // In decoding a block fuses its norm and its residual sum with these products. Such a layer implements
  // `run`, or `mix` of RecurrentLayerImpl, as run_products.
  virtual std::vector<Product> products() const { return {}; }
  // The input of output_prologue, and the state.
  virtual Output core(const std::vector<Tensor>& projected, const Call& call);
  virtual RowInput output_prologue() const { return {}; }
  virtual Product output() const { return {}; }
  // output(output_prologue(core(products of prologue(x)))) + residual.
  Output run_products(const Tensor& x, const Call& call, const RowInput& prologue = {},
                      const Tensor& residual = {});
  // x + layer(prologue(x)).
  Output run_with_residual(const Tensor& x, LayerImpl& layer, const RowInput& prologue,
                           const Call& call) const;
};
using AnyLayer = std::shared_ptr<LayerImpl>;  // of a module holder such as GatedSlotAttention: ptr()

// A layer that reads tokens in order and has a state; `mix` does not handle masks. With a mask, `run` moves
// the valid tokens of each row to the front and passes the bounds of the rows as cu_seqlens. Masked tokens
// are outside of the bounds: they do not change states, positions in a chunk or windows of convolutions. The
// outputs at masked tokens are unspecified.
class RecurrentLayerImpl : public LayerImpl {
 public:
  bool stepped(State& /*state*/, std::vector<int64_t>& /*kind*/) const override { return true; }
  bool has_state() const override { return true; }

 protected:
  Output run(const Tensor& x, const Call& call) final;
  // `run` without a mask; cu_seqlens may be [B, 2] with the first and last + 1 valid token of each row.
  virtual Output mix(const Tensor& x, const Call& call) = 0;
};

// Rotary embedding: rotates the pairs (i, i + D/2) of x [B, T, H, D], D even, by position * theta^(-2i/D);
// position [T] or [B, T].
Tensor rotary(const Tensor& x, const Tensor& position, double theta = 10000.0);

// ---- small modules -----------------------------------------------------------------------------

// RMS norm over the last dimension, in the dtype of x.
class RMSNormImpl : public Module {
 public:
  explicit RMSNormImpl(int64_t dim, double eps = 1e-6);
  Tensor forward(const Tensor& x);
  RowInput input() const { return {"rms_norm", weight, eps}; }  // this norm as a prologue

  Tensor weight;
  double eps;
};
TORCH_MODULE(RMSNorm);

// RMSNorm(x) * act(gate) in the dtype of x; act: silu, gelu or sigmoid.
class GatedRMSNormImpl : public RMSNormImpl {
 public:
  explicit GatedRMSNormImpl(int64_t dim, double eps = 1e-6, std::string activation = "silu");
  Tensor forward(const Tensor& x, const Tensor& gate);

  std::string activation;
};
TORCH_MODULE(GatedRMSNorm);

// RMSNorm(x * silu(gate)), over each of `groups` equal parts of the last dimension, computed by ATen in fp32
// or fp64 with one rounding to the dtype of x. gated_rms_norm has the norm before the gate.
class GatedInputRMSNormImpl : public RMSNormImpl {
 public:
  explicit GatedInputRMSNormImpl(int64_t dim, int64_t groups = 1, double eps = 1e-6);
  Tensor forward(const Tensor& x, const Tensor& gate);

  int64_t groups;
};
TORCH_MODULE(GatedInputRMSNorm);

// down(silu(gate(x)) * up(x)).
class SwiGLUImpl : public Module {
 public:
  SwiGLUImpl(int64_t hidden_size, int64_t intermediate_size);
  Tensor forward(const Tensor& x);
  // residual + this(prologue(x)).
  Tensor onto(const Tensor& residual, const Tensor& x, const RowInput& prologue);

  torch::nn::Linear gate_proj{nullptr}, up_proj{nullptr}, down_proj{nullptr};
};
TORCH_MODULE(SwiGLU);

// dt = softplus(x W + dt_bias), g = -exp(A_log) dt: [B, T, hidden_size] -> g, dt [B, T, num_heads], in fp32
// or fp64.
class DecayGateImpl : public Module {
 public:
  DecayGateImpl(int64_t hidden_size, int64_t num_heads, double largest_step = 0.1);
  void reset_parameters();
  std::pair<Tensor, Tensor> forward(const Tensor& x);
  Product product() const;  // the product that computes g

  double largest_step;  // the largest initial dt
  torch::nn::Linear proj{nullptr};
  Tensor A_log, dt_bias;
};
TORCH_MODULE(DecayGate);

struct ShortConvOptions {
  int64_t kernel_size = 4;  // 0: activation only, without parameters and state
  std::optional<std::string> activation = "silu";
  bool bias = false;
};

// Depthwise causal convolution over the last kernel_size tokens, then SiLU. x, y [B, T, channels].
class ShortConvImpl : public RecurrentLayerImpl {
 public:
  explicit ShortConvImpl(int64_t channels, ShortConvOptions options = {});
  void reset_parameters();
  void expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens = {}) const override;
  bool has_state() const override { return options.kernel_size > 0; }

  ShortConvOptions options;
  Tensor weight, bias;

 protected:
  Output mix(const Tensor& x, const Call& call) override;
};
TORCH_MODULE(ShortConv);

// ---- mixers ------------------------------------------------------------------------------------
// num_heads query heads read num_kv_heads memories; num_kv_heads defaults to num_heads and divides it.
// head_dim defaults to hidden_size / num_heads. Keys have expand_k * head_dim channels, values expand_v *
// head_dim; both must be integers.

struct GatedSlotAttentionOptions {
  int64_t num_slots = 64;
  std::optional<int64_t> num_kv_heads = {}, head_dim = {};
  bool gated = true;                 // false: ABC
  bool data_dependent_decay = true;  // false: g is learned, the same for all tokens
  double gate_logit_normalizer = 8.0;
  std::string feature = "softmax";  // as in ops::GSAOptions
  int64_t conv_size = 0;
  double norm_eps = 1e-6;
};

// Gated slot attention (GSA; Zhang et al. 2024, eq. 9): M memory slots with one forget gate each, read by
// softmax attention.
//   g = logsigmoid(x W_f) / gate_logit_normalizer,  s = 1 - e^g
//   Hk <- Hk Diag(e^g) + k s^T,  Hv <- Diag(e^g) Hv + s v^T,  o = Hv^T softmax(Hk^T q)
//   y = W_o RMSNorm(silu(o)),    q, k, v = silu(x W)
// Without data_dependent_decay, decay_logits [memories, M] replaces x W_f.
class GatedSlotAttentionImpl : public RecurrentLayerImpl {
 public:
  GatedSlotAttentionImpl(int64_t hidden_size, int64_t num_heads, GatedSlotAttentionOptions options = {});
  void reset_parameters();
  void expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens = {}) const override;

  GatedSlotAttentionOptions options;
  torch::nn::Linear qkv_proj{nullptr};
  ShortConv conv{nullptr};
  torch::nn::Linear f_proj{nullptr};
  Tensor decay_logits;
  RMSNorm norm{nullptr};
  torch::nn::Linear o_proj{nullptr};

 protected:
  Output mix(const Tensor& x, const Call& call) final { return run_products(x, call); }
  std::vector<Product> products() const override;
  Output core(const std::vector<Tensor>& projected, const Call& call) override;
  RowInput output_prologue() const override;
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
  double rope_theta = 10000.0;  // used with rotary only
  int64_t conv_size = 0;
  double norm_eps = 1e-6;
};

// Linear attention (Katharopoulos et al. 2020): one matrix memory per head, with an additive update and a
// gate.
//   S <- e^g S + k v^T,   o = S^T q / sqrt(D),   y = W_o (RMSNorm(o) * silu(x W_g))
// gate: none, linear attention with q and k through elu + 1; fixed, the decays of RetNet; scalar, the decay
// of Mamba-2, with v scaled by its time step dt and a skip; vector, GLA, one decay per key channel.
// rotary: q and k are rotated by `rotary` at the position of each token in its sequence (RetNet); the state
// has the position of the next token, [N].
class GatedLinearAttentionImpl : public RecurrentLayerImpl {
 public:
  GatedLinearAttentionImpl(int64_t hidden_size, int64_t num_heads, GatedLinearAttentionOptions options = {});
  void reset_parameters();
  void expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens = {}) const override;

  GatedLinearAttentionOptions options;
  torch::nn::Linear qkv_proj{nullptr};
  ShortConv conv{nullptr};
  DecayGate decay_scalar{nullptr};              // "decay" if gate is scalar
  torch::nn::ModuleList decay_vector{nullptr};  // "decay" if gate is vector: two products of low rank
  torch::nn::Linear gate_proj{nullptr};         // the second product of "decay"
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

// The mixer of Mamba-2 (Dao and Gu 2024): expand_v * num_heads heads of head_dim channels, which share B and
// C of state_size channels.
//   x, B, C = silu(conv(u W)),   dt = softplus(u W_dt + dt_bias)
//   S <- e^{-exp(A_log) dt} S + dt B x^T,   o = S^T C + skip x,   y = W_o RMSNorm(o * silu(u W_z))
class Mamba2Impl : public RecurrentLayerImpl {
 public:
  Mamba2Impl(int64_t hidden_size, int64_t num_heads, Mamba2Options options = {});
  void reset_parameters();
  void expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens = {}) const override;

  Mamba2Options options;
  torch::nn::Linear in_proj{nullptr};
  ShortConv conv{nullptr};
  torch::nn::Linear dt_proj{nullptr}, z_proj{nullptr};
  Tensor A_log, dt_bias, skip;
  RMSNorm norm{nullptr};
  torch::nn::Linear o_proj{nullptr};

 protected:
  Output mix(const Tensor& x, const Call& call) final { return run_products(x, call); }
  std::vector<Product> products() const override;
  Output core(const std::vector<Tensor>& projected, const Call& call) override;
  RowInput output_prologue() const override { return norm->input(); }
  Product output() const override;

 private:
  int64_t heads_;
};
TORCH_MODULE(Mamba2);

struct GatedDeltaProductOptions {
  int64_t n = 2;           // delta-rule updates of a token
  int64_t num_groups = 1;  // groups of heads, which share queries and keys; divides num_heads
  std::optional<int64_t> head_dim = {};
  int64_t state_size = 128;
  int64_t conv_size = 4;
  double norm_eps = 1e-6;
};

// Gated DeltaProduct whose heads share queries and keys in groups, as in Megatron-LM: num_heads memories of
// state_size key channels and head_dim value channels. The norm is taken over the channels of a group. The
// parts of in_proj's output, in Megatron's order: z [num_heads, head_dim], v [n, num_heads, head_dim],
// k [n, num_groups, state_size], q [num_groups, state_size], beta [n, num_heads], a [num_heads].
//   z, (v, k, q), beta, a = x W;   v, k, q = silu(conv(v, k, q));   q, k are l2-normalized
//   g = -exp(A_log) softplus(a + dt_bias),   beta = sigmoid(beta)
//   S <- e^g S;  for j < n:  S <- S + beta_j k_j (v_j - S^T k_j)^T;   o = S^T q / sqrt(state_size)
//   y = W_o RMSNorm(o * silu(z))
class GatedDeltaProductImpl : public RecurrentLayerImpl {
 public:
  GatedDeltaProductImpl(int64_t hidden_size, int64_t num_heads, GatedDeltaProductOptions options = {});
  void reset_parameters();
  void expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens = {}) const override;

  GatedDeltaProductOptions options;
  torch::nn::Linear in_proj{nullptr};
  ShortConv conv{nullptr};
  Tensor A_log, dt_bias;  // [num_heads]
  GatedInputRMSNorm norm{nullptr};
  torch::nn::Linear o_proj{nullptr};

 protected:
  Output mix(const Tensor& x, const Call& call) final { return run_products(x, call); }
  std::vector<Product> products() const override;
  Output core(const std::vector<Tensor>& projected, const Call& call) override;
  Product output() const override;

 private:
  int64_t num_heads_;
  std::vector<int64_t> channels_, parts_;  // of v, k and q; of z, of v, k and q together, of beta, of a
};
TORCH_MODULE(GatedDeltaProduct);

struct RavenOptions {
  int64_t num_slots = 64;
  std::optional<int64_t> topk = {};  // 1 to num_slots; default: min(32, num_slots)
  std::optional<int64_t> num_kv_heads = {}, head_dim = {};
  double expand_k = 1.0, expand_v = 1.0;
  bool slot_decay = false;               // a decay for each slot, not for each memory
  double gate_logit_normalizer = 8.0;    // of slot_decay
  std::string router_score = "sigmoid";  // softmax
  bool router_mlp = false;               // a layer of hidden_size channels with GELU before W_r
  bool router_bias = false;              // r_bias, a buffer, is added to r to choose R
  bool router_noise = false;             // in training, Gumbel noise is added to the router's logits
  bool output_gate = false;
  double norm_eps = 1e-6;
};

// Raven: gated slot attention in which a router chooses the topk slots R that a token changes.
//   r = sigmoid(x W_r);   w = r / (sum of r over R) in R, 0 in the other slots; softmax: w = r in R
//   g = -w exp(A_log) softplus(x W_a + dt_bias), or with slot_decay w logsigmoid(x W_f) /
//   gate_logit_normalizer Hk <- Hk Diag(e^g) + k s^T,  Hv <- Diag(e^g) Hv + s v^T,  s = 1 - e^g,   o = Hv^T
//   softmax(Hk^T q) y = W_o RMSNorm(silu(o)), or with output_gate W_o (RMSNorm(silu(o)) * silu(x W_g)) with a
//   norm a head q, k = RMSNorm(silu(x W)) for each head,   v = silu(x W)
class RavenImpl : public RecurrentLayerImpl {
 public:
  RavenImpl(int64_t hidden_size, int64_t num_heads, RavenOptions options = {});
  void reset_parameters();
  void expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens = {}) const override;

  RavenOptions options;
  torch::nn::Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr};
  torch::nn::Linear r_proj{nullptr};                          // the router
  torch::nn::Linear router_in{nullptr}, router_out{nullptr};  // with router_mlp: r_proj.0, r_proj.2
  torch::nn::Linear a_proj{nullptr}, f_proj{nullptr};         // of the decay; f_proj with slot_decay
  Tensor A_log, dt_bias;                                      // [memories]
  Tensor r_bias;                                              // [memories, slots]
  RMSNorm q_norm{nullptr}, k_norm{nullptr}, g_norm{nullptr};  // g_norm: without output_gate
  torch::nn::Linear o_gate_proj{nullptr};
  GatedRMSNorm o_norm{nullptr};
  torch::nn::Linear o_proj{nullptr};

 protected:
  Output mix(const Tensor& x, const Call& call) final { return run_products(x, call); }
  std::vector<Product> products() const override;
  Output core(const std::vector<Tensor>& projected, const Call& call) override;
  RowInput output_prologue() const override;
  Product output() const override;

 private:
  Tensor write_weights(Tensor logits) const;
  Tensor log_decay(Tensor router, const Tensor& decay);
  int64_t num_heads_, key_dim_, value_dim_;
};
TORCH_MODULE(Raven);

struct HGRN2Options {
  std::optional<int64_t> head_dim = {};
  double expand_k = 1.0, expand_v = 1.0;
  double lower_bound = 0.0;  // lower bound of f, in [0, 1)
  double norm_eps = 1e-6;
};

// HGRN2 (Qin et al. 2024): the keys are 1 - f, with f the forget gate. The width of the keys is the state
// expansion.
//   f = lower_bound + (1 - lower_bound) sigmoid(x W_f),   q = silu(x W_q),   v = x W_v
//   S <- Diag(f) S + (1 - f) v^T,   o = S^T q,   y = W_o RMSNorm(o)
// A model sets the bound of layer i of L to i / L, the initial value of the learned bounds of the paper.
class HGRN2Impl : public RecurrentLayerImpl {
 public:
  HGRN2Impl(int64_t hidden_size, int64_t num_heads, HGRN2Options options = {});
  void set_lower_bound(double lower_bound);
  void set_depth(int64_t layer, int64_t num_layers) override;
  void expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens = {}) const override;

  HGRN2Options options;
  torch::nn::Linear qfv_proj{nullptr};
  RMSNorm norm{nullptr};
  torch::nn::Linear o_proj{nullptr};

 protected:
  Output mix(const Tensor& x, const Call& call) final { return run_products(x, call); }
  std::vector<Product> products() const override;
  Output core(const std::vector<Tensor>& projected, const Call& call) override;
  RowInput output_prologue() const override { return norm->input(); }
  Product output() const override;

 private:
  std::vector<int64_t> heads_;
  int64_t key_dim_, value_dim_;
};
TORCH_MODULE(HGRN2);

struct DeltaProductOptions {
  int64_t n = 1;  // delta-rule updates of a token
  std::optional<int64_t> num_kv_heads = {}, head_dim = {};
  double expand_k = 1.0, expand_v = 1.0;
  bool gated = false;
  bool allow_neg_eigval = false;
  std::optional<std::string> between_chunks = {};  // gelu, tanh
  std::optional<int64_t> chunk = {};               // used with between_chunks only
  int64_t conv_size = 4;
  double norm_eps = 1e-6;
};

// DeltaProduct (Siems et al. 2025): a matrix memory S with n delta-rule updates per token. n = 1 is DeltaNet,
// with `gated` Gated DeltaNet. q, k and v pass through a short convolution with SiLU; q and k are
// l2-normalized; beta = sigmoid(x W), doubled with allow_neg_eigval. between_chunks is applied to S after
// every `chunk` tokens (TPTT, eq. 24).
//   S <- e^g S;  for j < n:  S <- S + beta_j k_j (v_j - S^T k_j)^T;   o = S^T q / sqrt(D)
//   y = W_o (RMSNorm(o) * silu(x W_g))
class DeltaProductImpl : public RecurrentLayerImpl {
 public:
  DeltaProductImpl(int64_t hidden_size, int64_t num_heads, DeltaProductOptions options = {});
  void expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens = {}) const override;

  DeltaProductOptions options;
  torch::nn::Linear qkv_proj{nullptr};
  ShortConv conv{nullptr};
  torch::nn::Linear beta_proj{nullptr};
  DecayGate decay{nullptr};
  torch::nn::Linear g_proj{nullptr};
  GatedRMSNorm norm{nullptr};
  torch::nn::Linear o_proj{nullptr};

 protected:
  Output mix(const Tensor& x, const Call& call) final { return run_products(x, call); }
  std::vector<Product> products() const override;
  Output core(const std::vector<Tensor>& projected, const Call& call) override;
  Product output() const override;

 private:
  std::vector<int64_t> heads_;
  int64_t key_dim_, value_dim_;
};
TORCH_MODULE(DeltaProduct);

struct TrellisOptions {
  int64_t num_slots = 64;
  std::optional<int64_t> head_dim = {};
  int64_t chunk = 16;
  std::string phi = "ln_silu", f = "ln_silu";  // as in ops::TrellisOptions
  bool gated = true;
  bool shared_qk = false;             // one projection for q and k, as in Lattice
  bool normalize_kv = true;           // k and v are unit vectors
  std::string value_read = "linear";  // phi: o = phi(A_v^T f(A_k q))
  bool post_norm = true;              // false: y = W_o (o * gelu(x W_g))
  int64_t conv_size = 4;
  double norm_eps = 1e-6;
};

// Trellis (eq. 8-14): two memories of M slots that learn to map keys and values to one target. A' is A at the
// start of the chunk.
//   A <- e^g A - gamma J_phi(A' x)^T (phi(A' x) - a) x^T      A_k with x = k, A_v with x = v
//   o = A_v^T f(A_k q),   y = W_o (RMSNorm(o) * gelu(x W_g))
class TrellisImpl : public RecurrentLayerImpl {
 public:
  TrellisImpl(int64_t hidden_size, int64_t num_heads, TrellisOptions options = {});
  void reset_parameters();
  void expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens = {}) const override;

  TrellisOptions options;
  torch::nn::Linear qk_proj{nullptr};  // with shared_qk
  torch::nn::Linear q_proj{nullptr}, k_proj{nullptr};
  ShortConv q_conv{nullptr}, k_conv{nullptr};
  torch::nn::Linear v_proj{nullptr}, a_proj{nullptr}, gamma_proj{nullptr};
  DecayGate decay{nullptr};
  Tensor key_memory, value_memory;
  torch::nn::Linear g_proj{nullptr};
  GatedRMSNorm norm{nullptr};
  torch::nn::Linear o_proj{nullptr};

 protected:
  Output mix(const Tensor& x, const Call& call) final { return run_products(x, call); }
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

// TTT-Linear (Sun et al. 2024): a memory that learns to map keys to values while it reads. A' is A at the
// start of the chunk, f' is f with A'; q and k are unit vectors.
//   f(x) = x + w * LayerNorm(A x) + b,   A <- A - gamma d|f'(k) - v|^2 / 2 dA'
//   o = f(q),   y = W_o (RMSNorm(o) * gelu(x W_g))
class TTTLinearImpl : public RecurrentLayerImpl {
 public:
  TTTLinearImpl(int64_t hidden_size, int64_t num_heads, TTTLinearOptions options = {});
  void reset_parameters();
  void expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens = {}) const override;

  TTTLinearOptions options;
  torch::nn::Linear q_proj{nullptr}, k_proj{nullptr};
  ShortConv q_conv{nullptr}, k_conv{nullptr};
  torch::nn::Linear v_proj{nullptr}, gamma_proj{nullptr};
  Tensor memory, inner_weight, inner_bias;
  torch::nn::Linear g_proj{nullptr};
  GatedRMSNorm norm{nullptr};
  torch::nn::Linear o_proj{nullptr};

 protected:
  Output mix(const Tensor& x, const Call& call) final { return run_products(x, call); }
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
  std::string objective = "decode";  // as in ops::LatticeOptions, like the next two
  bool normalize = true;
  double shrinkage = 0.0;
  bool gated = true;
  bool post_norm = false;  // true: y = W_o (RMSNorm(o) * gelu(x W_g))
  int64_t conv_size = 4;
  double norm_eps = 1e-6;
};

// Lattice (eq. 10-11, 15): M slots on the unit sphere; a slot moves only along directions that it does not
// store yet.
//   d_i = -gamma c_i (h - s_i (s_i . h)),   s_i <- (e^g s_i + d_i) / |e^g s_i + d_i|,   o = S q
//   y = W_o (o * gelu(x W_g))
// For objective encode v has unit length, because the updates grow with |v|^2.
class LatticeImpl : public RecurrentLayerImpl {
 public:
  LatticeImpl(int64_t hidden_size, int64_t num_heads, LatticeOptions options = {});
  void reset_parameters();
  void expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens = {}) const override;

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
  Output mix(const Tensor& x, const Call& call) final { return run_products(x, call); }
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
  std::optional<int64_t> window = {};  // tokens that a query attends to, itself included; requires causal
};

// Softmax attention with rotary positions. The state is {k, v, valid, place}: keys (rotated) and values [N,
// slots, heads, head_dim], of which the first `tokens` slots are used; valid [N, slots], undefined if all
// tokens are valid; place [N], the slot of the next token (`tokens` on the device). Without gradients there
// are free slots for later tokens, and a decoding step writes its token to one of them in place.
class AttentionImpl : public LayerImpl {
 public:
  AttentionImpl(int64_t hidden_size, int64_t num_heads, AttentionOptions options = {});
  bool stepped(State& state, std::vector<int64_t>& kind) const override;
  void expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens = {}) const override;
  bool has_state() const override { return true; }

  AttentionOptions options;
  torch::nn::Linear qkv_proj{nullptr}, o_proj{nullptr};

 protected:
  Output run(const Tensor& x, const Call& call) override;
  // Throws if cu_seqlens does not pack x, or if packed sequences are used with a cache.
  void check_packed(const Tensor& x, const Call& call) const;
  std::vector<Product> products() const override;
  Output core(const std::vector<Tensor>& projected, const Call& call) override;
  Product output() const override;

 private:
  Tensor make_mask(int64_t past, int64_t T, const Tensor& valid, const Tensor& cu_seqlens,
                   at::Device device) const;
  Output step(const Tensor& qkv, State state) const;
  std::vector<int64_t> heads_;
  int64_t head_dim_;
};
TORCH_MODULE(Attention);

struct ChunkAttentionOptions {
  int64_t chunk = 16;  // rows of a chunk, the header included
  std::optional<int64_t> num_kv_heads = {}, head_dim = {};
  double rope_theta = 10000.0;
  bool running_positions = false;  // chunk k starts at position k, not at 0
};

// The positions of the rows of a call, and the sizes of its state. Without `first` each sequence begins with
// this call and no state is stored.
struct ChunkRows {
  int64_t chunk;        // rows of a chunk, the header included
  Tensor first = {};    // [N]: the position of the first row; a chunk boundary if there are several rows
  Tensor end = {};      // [N]: the position after the last row that is stored
  int64_t headers = 0;  // largest number of headers of a sequence after the call
  // For a call of a single row, computed once for all layers:
  Tensor slot = {};  // [N]: the slot of the row's key
  Tensor see = {};   // additive mask [N, 1, 1, slots] of the row's scores, -inf at masked slots
  Tensor turn = {};  // rotary factors [2, N, 1, 1, D]: rotary(x) = x turn[0] + x.roll(D / 2) turn[1]
};

// Attention of rows in chunks; row 0 of each chunk is its header (ops::cat_attention). As a layer it has no
// mask and no state; cu_seqlens counts rows and has chunk boundaries only.
class ChunkAttentionImpl : public LayerImpl {
 public:
  ChunkAttentionImpl(int64_t hidden_size, int64_t num_heads, ChunkAttentionOptions options = {});

  // x [N, rows, hidden_size] -> y. cache: {k (rotated), v} [N, slots, heads, head_dim]: chunk - 1 slots for
  // the rows after the header of the current chunk, then one slot per header; empty at the start. A single
  // row writes its slot in place. prologue, residual: as in run_products.
  Tensor attend(const Tensor& x, const ChunkRows& rows, State& cache, const Tensor& cu_chunks = {},
                const RowInput& prologue = {}, const Tensor& residual = {});
  // Throws unless `cache` is empty or a cache of `attend` for N sequences and chunks of `chunk` rows.
  void expect_cache(const State& cache, int64_t N, int64_t chunk) const;
  // Queries, keys and values of x [N, rows, hidden_size]; queries and keys are rotated.
  std::vector<Tensor> project(const Tensor& x, const ChunkRows& rows);
  // The ChunkRows of one row per sequence. place [N]: its position in the sequence. The row reads the keys k
  // [N, slots, heads, head_dim] and writes its own key there.
  ChunkRows prepare_row(int64_t chunk, const Tensor& place, const Tensor& k) const;

  ChunkAttentionOptions options;
  torch::nn::Linear qkv_proj{nullptr}, o_proj{nullptr};

 protected:
  Output run(const Tensor& x, const Call& call) override;

 private:
  std::vector<Tensor> rotate_qk(const Tensor& qkv, const ChunkRows& rows, const Tensor& cu_chunks) const;
  Tensor position(const Tensor& row, int64_t chunk, const Tensor& first = {}) const;
  Tensor step(const Tensor& qkv, const ChunkRows& rows, const State& cache) const;
  Tensor extend(const std::vector<Tensor>& qkv, const ChunkRows& rows, const State& cache) const;
  std::vector<int64_t> heads_;
  int64_t head_dim_;
};
TORCH_MODULE(ChunkAttention);

// Compress and attend (CAT) as a layer: a chunk of C tokens is compressed to one header for all later chunks.
//   header_0 learned,   header_k = W_c [x_{(k-1)C} ... x_{kC-1}]
//   rows of chunk k: [header_k, x_{kC}, ..., x_{kC+C-1}]
// options.chunk is C. The state has a slot for each header and for each token of one chunk. A decoding step
// attends to these slots, and compresses a complete chunk by one product with W_c.
class CompressAttendImpl : public LayerImpl {
 public:
  CompressAttendImpl(int64_t hidden_size, int64_t num_heads, ChunkAttentionOptions options = {});
  void reset_parameters();
  bool stepped(State& state, std::vector<int64_t>& kind) const override;
  void expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens = {}) const override;
  bool has_state() const override { return true; }

  ChunkAttentionOptions options;
  Tensor header;
  torch::nn::Linear compress{nullptr};
  ChunkAttention attention{nullptr};

 protected:
  Output run(const Tensor& x, const Call& call) override;

 private:
  Tensor headers(const Tensor& tokens, const Tensor& first, const Tensor& where);
  Tensor attend(const Tensor& headers, const Tensor& tokens, const ChunkRows& rows, State& cache,
                const Tensor& cu_chunks);
  Output step(const Tensor& x, const State& state);
};
TORCH_MODULE(CompressAttend);

struct MixAttentionOptions {
  double weight = 0.5;
  bool learned = false;
  bool cross = false;
};

// The weight m of the mixture (1 - m) base + m mixed; with `cross` also + [(1 - m) base] * [m mixed] (MaG;
// TPTT eq. 7, 8). m is the buffer `weight`, or with `learned` the sigmoid of the parameter `logit`.
class MemoryAsGateImpl : public LayerImpl {
 public:
  explicit MemoryAsGateImpl(MixAttentionOptions options = {});
  void reset_parameters();
  // Sets m, without waiting for the device. Throws c10::ValueError if the weight is learned or not from 0
  // to 1.
  void set_weight(double weight);
  Tensor current_weight() const;
  // base, mixed and the result have the same shape.
  Tensor mixture(const Tensor& base, const Tensor& mixed) const;

  MixAttentionOptions options;
  Tensor logit, weight;
};

// y = (1 - m) base(x) + m mixer(x), as in MemoryAsGate.
class MixAttentionImpl : public MemoryAsGateImpl {
 public:
  MixAttentionImpl(AnyLayer base, AnyLayer mixer, MixAttentionOptions options = {});
  bool stepped(State& state, std::vector<int64_t>& kind) const override;
  void expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens = {}) const override;
  bool has_state() const override { return base->has_state() || mixer->has_state(); }

  AnyLayer base, mixer;

 protected:
  Output run(const Tensor& x, const Call& call) override;
};
TORCH_MODULE(MixAttention);

struct LinearPathOptions {
  int64_t n = 2;                                   // updates per token, 1 to 4
  std::string virtual_tokens = "derivative";       // rotary, both; used with n > 1 only
  std::string gate = "k";                          // v, kv: the product of both gates
  std::string gate_per = "channel";                // head: the mean over channels
  std::string pool = "past";                       // window: the last three tokens
  std::optional<std::string> between_chunks = {};  // gelu, tanh
  int64_t chunk = 64;                              // used with between_chunks only
  double norm_eps = 1e-6;
};

// DeltaProduct of q, k and v of an attention layer, without further projections (LiZA; TPTT, section 3).
//   beta = sigmoid(mean of k over the past),   q, k, v <- silu(.) / |silu(.)|                    eq. 5, 4
//   k_0 = k, v_0 = v;   k_m, v_m: their m-th differences over tokens, or rotated by 2 pi m / n   eq. 22, 23
//   for m < n:  S <- S + k_m (beta * v_m - S^T (beta * k_m))^T
//   o = RMSNorm(S^T q)                                                                           eq. 6
// x [B, T, (heads + 2 kv_heads) head_dim], q, k and v concatenated -> o [B, T, heads head_dim]. The state
// {count} has the number of tokens of the pool, [N], if pool is past. Its parts are the pool (a sum of
// tokens, or the last two tokens), the memory, and for each difference the previous row.
class LinearPathImpl : public RecurrentLayerImpl {
 public:
  LinearPathImpl(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, LinearPathOptions options = {});
  void expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens = {}) const override;

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

// A linear path, and the weight m of its mixture with attention. As a layer it is the path.
class LizaImpl : public MemoryAsGateImpl {
 public:
  LizaImpl(LinearPath path, MixAttentionOptions options = {});
  bool stepped(State& state, std::vector<int64_t>& kind) const override;
  void expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens = {}) const override;

  LinearPath path{nullptr};

 protected:
  Output run(const Tensor& x, const Call& call) override;
};
TORCH_MODULE(Liza);

// Attention with a linear path that reads the same q, k and v before rotary positions and shares the output
// projection.
//   y = (1 - m) W_o attention(q, k, v) + m W_o path(q, k, v)      TPTT eq. 7; with `cross`, eq. 8
// With m = 0 the result is bitwise that of attention. The parts of the state are those of attention, which
// grows, and of the path.
class InjectedAttentionImpl : public AttentionImpl {
 public:
  InjectedAttentionImpl(int64_t hidden_size, int64_t num_heads, AttentionOptions attention = {},
                        LinearPathOptions path = {}, MixAttentionOptions mix = {});
  bool stepped(State& state, std::vector<int64_t>& kind) const override;
  void expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens = {}) const override;

  Liza girih{nullptr};

 protected:
  Output run(const Tensor& x, const Call& call) override;
  std::vector<Product> products() const override;
  Output core(const std::vector<Tensor>& projected, const Call& call) override;
};
TORCH_MODULE(InjectedAttention);

// Each schedule reads some of these options; an absent option has the default in the comment.
struct MixScheduleOptions {
  std::optional<double> first = {};                // gradual: 0.01
  std::optional<double> final = {};                // constant, gradual: 0.5
  std::optional<int64_t> steps = {};               // gradual, cyclic: 100
  std::optional<std::vector<double>> levels = {};  // cyclic: 0, 0.5, 1
};

// The weight m of the mixtures of a model by training step (TPTT, section 4).
//   constant  `final`
//   gradual   linear from `first` to `final` over `steps` steps
//   cyclic    the next of `levels` every `steps` steps, repeated
// Throws c10::ValueError for an unknown schedule, an option that the schedule does not read, and a weight
// that is not from 0 to 1.
//
//   const MixSchedule schedule("gradual", {.first = 0.0, .final = 0.5, .steps = 100});
//   for (int64_t step = 0; step < steps; ++step) { schedule.set_weights(*model, step); ... }
class MixSchedule {
 public:
  explicit MixSchedule(std::string schedule = "gradual", MixScheduleOptions options = {});
  double weight(int64_t step) const;
  // Sets the weight of every mixture of the model. Throws c10::ValueError if there is none, or if one is
  // learned.
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
  void expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens = {}) const override;
  bool has_state() const override { return mixer->has_state(); }
  // The block with a function as its mixer: mix(x, prologue, residual) returns mixer(prologue(x)) + residual;
  // the residual may be undefined.
  Tensor around(const Tensor& x,
                const std::function<Tensor(const Tensor&, const RowInput&, const Tensor&)>& mix);
  // The block for x + branch (an undefined branch is 0) without its last sum: the output is parts.x +
  // parts.branch, which the norm of the next block adds.
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
