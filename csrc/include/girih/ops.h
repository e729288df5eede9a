// The operators as C++ functions. They call torch.ops.girih.*, so autograd, autocast and all devices work as
// in Python.
//
// Letters: B batch, T tokens, H heads, D key width, V value width, M slots, N sequences (B, or the number in
// cu_seqlens). Gates are logs, at most 0. The number of heads of q, HQ, may be a multiple of H. An undefined
// tensor is absent. Data come first; options, state and packing are named fields of one struct:
//
//   auto [o, state] = girih::ops::gsa(q, k, v, {}, g, {.scale = 1.0});
//   auto [more, last] = girih::ops::gsa(q2, k2, v2, {}, g2, {.scale = 1.0, .state = state});
//
// A state is fp32 (fp64 if the inputs are), but for positions (int64) and the state of short_conv (as x). A
// default-constructed state is the start of a sequence. X_step reads one token (T = 1), writes the tensors of
// options.state in place and returns the output only; XState::start makes the state for a first token.
// cu_seqlens [N + 1] (int32 or int64, on the device) packs N sequences into B = 1; cu_seqlens [B, 2] has the
// begin and the end of the sequence of each row. Tokens outside of the sequences change no state and have the
// output 0. A wrong argument throws c10::ValueError, whose message names the argument, its value and the
// expected value.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace girih::ops {

using at::Tensor;

// ---- gated slot attention ----------------------------------------------------------------------

// The memories of gsa: k [N, H, D, M], v [N, H, M, V] and, for ABC only, z [N, H, M].
struct GSAState {
  Tensor k = {}, v = {}, z = {};

  static GSAState start(int64_t batch, int64_t heads, int64_t D, int64_t V, int64_t M, bool abc = false,
                        const at::TensorOptions& options = at::kFloat);
  auto tensors() { return std::tie(k, v, z); }
};

struct GSAOptions {
  std::optional<double> scale = {};  // D^-1/2
  std::string feature = "softmax";   // softmax, none, silu, relu, relu2
  GSAState state = {};
  Tensor cu_seqlens = {};
};

// Gated slot attention (Zhang et al. 2024); without g its ungated form ABC (Peng et al. 2021).
//   Hk_t = Hk_{t-1} Diag(e^{g_t}) + k_t s_t^T        p_t = feature(scale * Hk_t^T q_t)
//   Hv_t = Diag(e^{g_t}) Hv_{t-1} + s_t v_t^T        o_t = Hv_t^T p_t
// q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], s and g [B, T, H, M] -> o [B, T, HQ, V].
// Without s, s = 1 - e^g. Without g, s are logits, normalised over all tokens so far; -inf masks a token.
std::pair<Tensor, GSAState> gsa(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& s,
                                const Tensor& g, const GSAOptions& options = {});
Tensor gsa_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& s, const Tensor& g,
                const GSAOptions& options);

// ---- linear attention --------------------------------------------------------------------------

// The memory of gla: s [N, H, D, V].
struct GLAState {
  Tensor s = {};

  static GLAState start(int64_t batch, int64_t heads, int64_t D, int64_t V,
                        const at::TensorOptions& options = at::kFloat);
  auto tensors() { return std::tie(s); }
};

struct GLAOptions {
  std::optional<double> scale = {};  // D^-1/2
  GLAState state = {};
  Tensor cu_seqlens = {};
};

// Gated linear attention (Yang et al. 2024), without gates, with one gate per head, or with one gate per key
// channel.
//   S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T          o_t = scale * S_t^T q_t
// q [B, T, HQ, D], k [B, T, HK, D], v [B, T, H, V], g [B, T, H] or [B, T, H, D] -> o [B, T, max(HQ, H), V].
// HK divides H. HQ divides H or is a multiple of H. Memory h reads key head h / (H / HK).
std::pair<Tensor, GLAState> gla(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g = {},
                                const GLAOptions& options = {});
Tensor gla_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                const GLAOptions& options);

// ---- DeltaProduct ------------------------------------------------------------------------------

// The memory of delta_product: s [N, H, D, V] and, with between_chunks only, position [N] int64, the number
// of tokens of the current chunk that have been read.
struct DeltaProductState {
  Tensor s = {}, position = {};

  static DeltaProductState start(int64_t batch, int64_t heads, int64_t D, int64_t V,
                                 bool between_chunks = false, const at::TensorOptions& options = at::kFloat);
  auto tensors() { return std::tie(s, position); }
};

struct DeltaProductOptions {
  std::optional<int64_t> n = {};                   // default: rows of k / T
  std::optional<double> scale = {};                // D^-1/2
  bool l2norm_qk = false;                          // divide q and k by their length
  std::optional<int64_t> chunk = {};               // 1 to 64, with between_chunks only
  std::optional<std::string> between_chunks = {};  // gelu, tanh
  DeltaProductState state = {};
  Tensor cu_seqlens = {};
};

// DeltaProduct (Siems et al. 2025): n delta-rule updates per token. n = 1 is DeltaNet, with g Gated DeltaNet.
//   S <- e^{g_t} S                                    once per token
//   for j < n:  S <- S + k_{t,j} (w_{t,j} - S^T b_{t,j})^T        b = beta k, w = beta v
//   o_t = scale * S_t^T q_t
// q [B, T, HQ, D], k [B, T * n, HK, D], v [B, T * n, H, V], beta [B, T * n, H] or, with D = V, [B, T * n, H,
// D], g [B, T, H] -> o [B, T, max(HQ, H), V]. The n rows of a token are consecutive. Heads are as in gla.
// between_chunks is applied to S after every `chunk` tokens of a sequence.
std::pair<Tensor, DeltaProductState> delta_product(const Tensor& q, const Tensor& k, const Tensor& v,
                                                   const Tensor& beta, const Tensor& g = {},
                                                   const DeltaProductOptions& options = {});
Tensor delta_product_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                          const Tensor& g, const DeltaProductOptions& options);

// ---- Trellis -----------------------------------------------------------------------------------

// The memories of trellis: k (Ak) [N, H, M, D], v (Av) [N, H, M, V]; first_k and first_v, these memories at
// the start of the current chunk; position [N] int64. A state with only k and v ([H, M, D] and [H, M, V], or
// with a leading N) starts sequences from these memories. A sequence cannot start without them.
struct TrellisState {
  Tensor first_k = {}, k = {}, first_v = {}, v = {}, position = {};

  // Copies the initial memories, with or without a leading N.
  static TrellisState start(int64_t batch, const Tensor& k, const Tensor& v);
  auto tensors() { return std::tie(first_k, k, first_v, v, position); }
};

struct TrellisOptions {
  int64_t chunk = 0;            // required, 1 to 64; changing it changes the output
  std::string phi = "ln_silu";  // identity, silu, l2norm, layer_norm, l2_silu, ln_silu, softmax
  std::string f = "ln_silu";    // the same
  TrellisState state = {};
  Tensor cu_seqlens = {};
};

// Trellis (eq. 8-14): two memories A, Ak and Av, learn to map keys and values to the targets a. A' is A at
// the start of the chunk.
//   u_t = J_phi(A' x_t)^T (phi(A' x_t) - a_t)        A_t = e^{g_t} A_{t-1} - gamma_t u_t x_t^T
//   Ak has x = k, Av has x = v;                      o_t = Av_t^T f(Ak_t q_t)
// q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], a [B, T, H, M], gamma and g [B, T, H] -> o [B, T, HQ, V].
std::pair<Tensor, TrellisState> trellis(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a,
                                        const Tensor& gamma, const Tensor& g, const TrellisOptions& options);
Tensor trellis_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& gamma,
                    const Tensor& g, const TrellisOptions& options);

// ---- TTT ---------------------------------------------------------------------------------------

// The memory of ttt: k [N, H, M, D]; first_k, the memory at the start of the current chunk; position [N]
// int64. A state with only k ([H, M, D], or with a leading N) starts sequences from this memory. A sequence
// cannot start without it.
struct TTTState {
  Tensor first_k = {}, k = {}, position = {};

  // Copies the initial memory, with or without a leading N.
  static TTTState start(int64_t batch, const Tensor& k);
  auto tensors() { return std::tie(first_k, k, position); }
};

struct TTTOptions {
  Tensor phi_weight = {};          // w [H, M]; default: ones
  int64_t chunk = 0;               // required, 1 to 64; changing it changes the output
  std::string phi = "layer_norm";  // as in trellis
  std::string f = "identity";      // the same
  TTTState state = {};
  Tensor cu_seqlens = {};
};

// TTT (Sun et al. 2024, TTT-Linear): a memory A learns to map keys to the targets a, as in the first pass of
// Trellis; its read is the output. A' is A at the start of the chunk.
//   u_t = J_phi(A' k_t)^T (w * (w * phi(A' k_t) - a_t))        A_t = e^{g_t} A_{t-1} - gamma_t u_t k_t^T
//   o_t = f(A_t q_t)
// q [B, T, HQ, D], k [B, T, H, D], a [B, T, H, M], gamma and g [B, T, H] -> o [B, T, HQ, M].
std::pair<Tensor, TTTState> ttt(const Tensor& q, const Tensor& k, const Tensor& a, const Tensor& gamma,
                                const Tensor& g, const TTTOptions& options);
Tensor ttt_step(const Tensor& q, const Tensor& k, const Tensor& a, const Tensor& gamma, const Tensor& g,
                const TTTOptions& options);

// ---- Lattice -----------------------------------------------------------------------------------

// The memory of lattice: first [N, H, D, M], unit columns, the memory at the start of the current chunk; step
// [N, H, D, M], the sum of the updates of the chunk; decay [N, H], the sum of its gates, with g only;
// position [N] int64. A state with only `first` ([H, D, M], or with a leading N) starts sequences from this
// memory. A sequence cannot start without it.
struct LatticeState {
  Tensor first = {}, step = {}, decay = {}, position = {};

  // Copies the initial memory, with or without a leading N. `gated`: for calls with g.
  static LatticeState start(int64_t batch, const Tensor& first, bool gated = false);
  auto tensors() { return std::tie(first, step, decay, position); }
};

struct LatticeOptions {
  int64_t chunk = 0;                 // required, 1 to 64; changing it changes the output
  std::string objective = "decode";  // decode, encode, similarity
  bool normalize = true;             // false requires chunk = 1
  double shrinkage = 0.0;            // other values require chunk = 1
  LatticeState state = {};
  Tensor cu_seqlens = {};
};

// Lattice (eq. 10, 11, 15): M slots on the unit sphere; a slot moves only along directions that it does not
// store yet.
//   d_i = -gamma c_i (h - s_i (s_i . h))        s_i <- (e^g s_i + d_i) / |e^g s_i + d_i|        o = S q
// q [B, T, HQ, M], k [B, T, H, M], v [B, T, H, D], gamma and g [B, T, H] -> o [B, T, HQ, D].
std::pair<Tensor, LatticeState> lattice(const Tensor& q, const Tensor& k, const Tensor& v,
                                        const Tensor& gamma, const Tensor& g, const LatticeOptions& options);
Tensor lattice_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gamma, const Tensor& g,
                    const LatticeOptions& options);

// ---- short convolution -------------------------------------------------------------------------

// The state of short_conv: x [N, W - 1, channels], the last inputs, in the dtype of x.
struct ShortConvState {
  Tensor x = {};

  static ShortConvState start(int64_t batch, int64_t channels, int64_t W,
                              const at::TensorOptions& options = at::kFloat);
  auto tensors() { return std::tie(x); }
};

struct ShortConvOptions {
  std::optional<std::string> activation = {};  // silu
  ShortConvState state = {};
  Tensor cu_seqlens = {};
};

// Causal convolution over time, one filter per channel.
//   y_t = activation(bias + sum_j weight_j x_{t - (W - 1) + j})
// x [B, T, channels], weight [channels, W] with W from 1 to 4, bias [channels] -> y [B, T, channels].
std::pair<Tensor, ShortConvState> short_conv(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                                             const ShortConvOptions& options = {});
Tensor short_conv_step(const Tensor& x, const Tensor& weight, const Tensor& bias,
                       const ShortConvOptions& options);

// ---- gated RMS norm ----------------------------------------------------------------------------

struct GatedRMSNormOptions {
  std::string activation = "silu";  // silu, gelu (without the tanh approximation), sigmoid; of the gate
  double eps = 1e-6;
};

// RMS norm over the last dimension and the gate of the output of a mixer, in one pass.
//   y = x / sqrt(mean(x^2) + eps) * weight * activation(gate)
// x and gate [..., dim], weight [dim] -> y [..., dim], in the dtype of x. Without a gate the last factor is
// absent. There is no state.
Tensor gated_rms_norm(const Tensor& x, const Tensor& weight, const Tensor& gate = {},
                      const GatedRMSNormOptions& options = {});

// ---- CAT ---------------------------------------------------------------------------------------

struct CatAttentionOptions {
  int64_t chunk = 0;                 // required, 2 to 256: rows of a chunk, its header included
  std::optional<double> scale = {};  // D^-1/2
  Tensor cu_chunks = {};             // [N + 1], in chunks: packs sequences of whole chunks into B = 1
};

// Attention of CAT: row 0 of every chunk is its header. A row attends to the headers of its own and of all
// earlier chunks, and to the rows of its own chunk up to itself. q [B, T, HQ, D], k [B, T, H, D], v [B, T, H,
// V] -> o [B, T, HQ, V]. There is no state.
Tensor cat_attention(const Tensor& q, const Tensor& k, const Tensor& v, const CatAttentionOptions& options);

}  // namespace girih::ops
