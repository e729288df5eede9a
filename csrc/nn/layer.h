// Functions that the implementations of several layers use: initialization, gates, heads, checks of states
// and masks, positions, and attention of one query.
#pragma once

#include <ATen/ATen.h>
#include <girih/nn.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/embedding.h>

#include <array>
#include <initializer_list>
#include <utility>

namespace girih::nn {

// While an object exists, `linear` and `embedding` of this thread return uninitialized weights.
// from_pretrained overwrites the weights, and drawing random values takes longer than reading the file.
class SkipInitGuard {
 public:
  SkipInitGuard() : previous_(std::exchange(is_enabled_, true)) {}
  ~SkipInitGuard() { is_enabled_ = previous_; }
  SkipInitGuard(const SkipInitGuard&) = delete;
  SkipInitGuard& operator=(const SkipInitGuard&) = delete;

  static bool on() { return is_enabled_; }

 private:
  static thread_local bool is_enabled_;
  bool previous_;
};

torch::nn::Linear linear(int64_t in, int64_t out, bool bias = false);
torch::nn::Embedding embedding(int64_t count, int64_t width);

// x in fp32, or in fp64 when x is fp64: the dtype in which gates and step sizes are activated.
inline Tensor promote_to_fp32(const Tensor& x) {
  return x.to(at::promote_types(x.scalar_type(), at::kFloat));
}

// x / |x| along dim. A zero vector stays zero. 1e-12 underflows in fp16, which needs a larger bound.
inline Tensor unit(const Tensor& x, int64_t dim) {
  return x / x.norm(2, dim, true).clamp_min(x.scalar_type() == at::kHalf ? 0x1p-24 : 1e-12);
}

// x W^T in the dtype of x, plus b in fp32 or fp64: the bias of a gate sets its time scale.
inline Tensor linear_with_fp32_bias(const torch::nn::Linear& proj, const Tensor& x) {
  return promote_to_fp32(at::linear(x, proj->weight)) + proj->bias;
}

// The initial bias b of step sizes: sigmoid(b) = 1 / (4 max(chunk, 16)). All updates of a chunk are
// computed with the memory at the start of the chunk, so the sum of its step sizes must not overshoot.
double initial_step_size_bias(int64_t chunk);

// Initializes a decay of Mamba-2, -exp(A_log) softplus(r + dt_bias): rates exp(A_log) uniformly in
// [smallest_rate, 16], softplus(dt_bias) log-uniformly in [0.001, 0.1]. Call it without gradients.
void reset_decay(Tensor A_log, Tensor dt_bias, double smallest_rate);

// norm(o, gate); without a norm, o * gelu(gate).
Tensor apply_output_gate(GatedRMSNorm norm, const Tensor& o, const Tensor& gate);

// [..., heads * width] -> [..., heads, width]
inline Tensor to_heads(const Tensor& x, int64_t heads) { return x.unflatten(-1, {heads, -1}); }

// qkv [..., channels] -> q, k and v, each [..., heads, width].
inline std::array<Tensor, 3> split_heads(const Tensor& qkv, at::IntArrayRef heads, int64_t key_dim,
                                         int64_t value_dim) {
  const auto p = qkv.split_with_sizes({heads[0] * key_dim, heads[1] * key_dim, heads[2] * value_dim}, -1);
  return {to_heads(p[0], heads[0]), to_heads(p[1], heads[1]), to_heads(p[2], heads[2])};
}

// [B, T, n * heads, ...] -> [B, T * n, heads, ...]: the n keys, values or betas of a token are adjacent rows.
inline Tensor split_steps(const Tensor& x, int64_t n) { return x.unflatten(2, {n, -1}).flatten(1, 2); }

// Throws unless attention_mask has x's shape [B, T]; throws unless cu_seqlens is [N + 1] and x has one row.
void check_mask(const Tensor& x, const Tensor& attention_mask);
void check_packing(const Tensor& x, const Tensor& cu_seqlens);
// Number of sequences of x [B, T, ...]: N for cu_seqlens [N + 1], else B.
int64_t count_sequences(const Tensor& x, const Tensor& cu_seqlens = {});
// Throws unless `part`, a tensor [N, ...] of a state, has this number of sequences.
void check_batch(const Tensor& part, int64_t sequences);
// Throws unless the state is empty or has this number of tensors and parts.
void check_state(const State& state, size_t tensors, size_t parts);
// Whether the state has a defined tensor, in any of its parts.
bool has_tensors(const State& state);
// Throws if the state of a layer is missing: `part` has no tensors, although other parts of the state do.
void check_present(const std::string& name, const LayerImpl& layer, const State& part);
// Throws unless a tensor of a state has this shape [N, ...] and this dtype. Without dtype, any floating dtype
// is accepted.
void check_state_tensor(const char* name, const Tensor& part, at::IntArrayRef shape,
                        std::optional<at::ScalarType> dtype = {});

// Throws unless the state of a convolution is empty or has its last inputs for this number of sequences, in
// any floating dtype.
void check_conv_state(const char* name, const State& state, const ShortConvImpl& conv, int64_t sequences);

// A tensor [N, ...] of a memory's state, as a layer expects it.
struct MemoryTensor {
  const char* name;
  std::vector<int64_t> sizes = {};  // after N
  bool is_present = true;           // false: the state has an undefined tensor in this place
  bool is_position = false;         // int64; otherwise fp32, or fp64 if x is fp64
};
// Throws unless `state` is empty or the state of a recurrent layer for the sequences of x [B, T, ...]: its
// parts are the states of the convolutions, by name, and the memory; it has `tensors` tensors of its own.
void check_recurrent_state(const State& state, const Tensor& x, const Tensor& cu_seqlens,
                           std::initializer_list<std::pair<const char*, ShortConv>> convolutions,
                           std::initializer_list<MemoryTensor> memory, size_t tensors = 0);

// The state of a convolution, in the dtype in which x is convolved. The dtype differs between calls when only
// some of the calls run under autocast.
State cast_conv_state(const State& state, const Tensor& x);

inline bool is_weight(double m) { return m >= 0 && m <= 1; }
// Throws unless 0 <= weight <= 1; a learned weight is a sigmoid and cannot be 0 or 1.
void check_mixture(const MixAttentionOptions& options);

// A stable permutation [B, T] that moves the valid tokens of each row to the front, the inverse permutation
// [B, T], and the number of valid tokens [B].
std::tuple<Tensor, Tensor, Tensor> sort_valid_first(const Tensor& valid);

// Position of each token of x [B, T, ...] in its sequence, [B, T], and length of each sequence after x, [N].
// previous: lengths of the sequences before x, int64 [N]; undefined: 0. cu_seqlens: [N + 1], or [B, 2] with
// the first and last + 1 valid token of each row, or undefined.
std::pair<Tensor, Tensor> token_positions(const Tensor& x, Tensor previous, const Tensor& cu_seqlens);

// Rotary frequencies theta^(-2i/D), [D/2].
Tensor rotary_frequencies(int64_t head_dim, double theta, const at::TensorOptions& options);

// cos and sin of position * theta^(-2i/D), [..., D/2], computed in fp32 (fp64 for fp64) and rounded to dtype.
std::pair<Tensor, Tensor> rotary_cos_sin(const Tensor& position, int64_t head_dim, double theta,
                                         at::ScalarType dtype);

// factors [2, ..., D]: rotary(x, position) = x factors[0] + x.roll(D / 2) factors[1].
Tensor rotary_factors(const Tensor& position, int64_t head_dim, double theta, at::ScalarType dtype);

// qkv [N, 1, sum of heads, D] -> q and k rotated by `rotary_factors`, which broadcast with q and k, and v.
std::array<Tensor, 3> rotate_row(const Tensor& qkv, at::IntArrayRef heads, const Tensor& factors);

// Attention of one query q [N, 1, heads, D] to k and v [N, slots, kv_heads, D] -> [N, 1, heads, D]. mask
// [N, 1, 1, slots] is added to the scores. The queries of one key head are rows of one product, so keys are
// not repeated.
Tensor attend_row(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask);

// Concatenates the mask `previous` of `past` tokens and the mask `current` of x [B, T, ...]: [B, past + T].
// An undefined mask counts as ones; the result is undefined if both are undefined.
Tensor join_masks(const Tensor& previous, const Tensor& current, int64_t past, const Tensor& x);

}  // namespace girih::nn
