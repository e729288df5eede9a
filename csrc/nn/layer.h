// What the layers' implementations share.
#pragma once

#include <ATen/ATen.h>
#include <girih/nn.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/embedding.h>

#include <array>
#include <utility>

namespace girih::nn {

// While one lives, the linear layers and embeddings that its thread makes have no values: those of a file
// take their place, and to draw others first would take longer than to read them.
class WithoutValues {
 public:
  WithoutValues() : before_(std::exchange(on_, true)) {}
  ~WithoutValues() { on_ = before_; }
  WithoutValues(const WithoutValues&) = delete;
  WithoutValues& operator=(const WithoutValues&) = delete;

  static bool on() { return on_; }

 private:
  static thread_local bool on_;
  bool before_;
};

torch::nn::Linear linear(int64_t in, int64_t out, bool bias = false);
torch::nn::Embedding embedding(int64_t count, int64_t width);

// Gates and step sizes are activated in fp32, or in fp64 when they come in fp64.
inline Tensor at_least_fp32(const Tensor& x) { return x.to(at::promote_types(x.scalar_type(), at::kFloat)); }

// x / |x| along a dimension. Zeros stay zeros, in fp16 too, where 1e-12 is 0.
inline Tensor unit(const Tensor& x, int64_t dim) {
  return x / x.norm(2, dim, true).clamp_min(x.scalar_type() == at::kHalf ? 0x1p-24 : 1e-12);
}

// x W^T in the dtype of x, plus b in fp32 at least: a gate's bias is its time scale.
inline Tensor gate(const torch::nn::Linear& proj, const Tensor& x) {
  return at_least_fp32(at::linear(x, proj->weight)) + proj->bias;
}

// b with sigmoid(b) = 1 / (4 max(chunk, 16)), where step sizes start: all steps of a chunk follow gradients
// at its first state, so it is their sum that must not overshoot.
double first_step_bias(int64_t chunk);

// norm(o, gate), or o * gelu(gate) without a norm.
Tensor gated_output(GatedRMSNorm norm, const Tensor& o, const Tensor& gate);

// [..., heads * width] -> [..., heads, width]
inline Tensor to_heads(const Tensor& x, int64_t heads) { return x.unflatten(-1, {heads, -1}); }

// q, k and v, [..., heads, width] each, of qkv [..., channels].
inline std::array<Tensor, 3> split_heads(const Tensor& qkv, at::IntArrayRef heads, int64_t key_dim,
                                         int64_t value_dim) {
  const auto p = qkv.split_with_sizes({heads[0] * key_dim, heads[1] * key_dim, heads[2] * value_dim}, -1);
  return {to_heads(p[0], heads[0]), to_heads(p[1], heads[1]), to_heads(p[2], heads[2])};
}

// Refuses a mask that is not x's [B, T], and cu_seqlens that do not pack sequences into the one row of x.
void check_mask(const Tensor& x, const Tensor& attention_mask);
void check_packing(const Tensor& x, const Tensor& cu_seqlens);
// The sequences of x [B, T, ...]: those that cu_seqlens [N + 1] packs into one row, or else one in each row.
int64_t count_sequences(const Tensor& x, const Tensor& cu_seqlens = {});
// Refuses a state of another number of sequences; part: a tensor of it, [N, ...].
void check_batch(const Tensor& part, int64_t sequences);
// Refuses a state that another layer returned; an empty one is a start.
void check_state(const State& state, size_t tensors, size_t parts);
// Refuses a tensor of a state that has another shape, [N, ...], or dtype; without dtype any floating one
// fits.
void check_part(const char* name, const Tensor& part, at::IntArrayRef shape,
                std::optional<at::ScalarType> dtype = {});

// A state of rows that a convolution of x reads, in the dtype in which x is convolved: one call may be under
// autocast and another one not.
State convolution_state(const State& state, const Tensor& x);

inline bool is_weight(double m) { return m >= 0 && m <= 1; }
// Refuses a weight that is none, and a learned one that a sigmoid does not reach.
void check_mixture(const MixAttentionOptions& options);

// The order [B, T] that moves each row's valid tokens to its front, each token's place in it, and how many
// are valid, [B]. Both parts keep their order.
std::tuple<Tensor, Tensor, Tensor> valid_first(const Tensor& valid);

// Each token's place in its sequence, [B, T], and the length of each sequence after x [B, T, ...], [N].
// before: their lengths before x, [N] int64, or undefined. cu_seqlens: [N + 1], rows' bounds [B, 2], or
// undefined.
std::pair<Tensor, Tensor> token_positions(const Tensor& x, Tensor before, const Tensor& cu_seqlens);

// theta^(-2i/D), [D/2].
Tensor rates(int64_t head_dim, double theta, const at::TensorOptions& options);

// cos and sin of position * theta^(-2i/D), [..., D/2] in this dtype; the angles are fp32, fp64 for fp64.
std::pair<Tensor, Tensor> angles(const Tensor& position, int64_t head_dim, double theta,
                                 at::ScalarType dtype);

// [2, ..., D]: x factors[0] + x.roll(D / 2) factors[1] is `rotary` at these positions.
Tensor rotary_factors(const Tensor& position, int64_t head_dim, double theta, at::ScalarType dtype);

// q, k and v of qkv [N, 1, sum of heads, D], q and k by `rotary_factors` that broadcast with them.
std::array<Tensor, 3> rotate_row(const Tensor& qkv, at::IntArrayRef heads, const Tensor& factors);

// Attention of one query row [N, 1, heads, D] to k and v [N, slots, kv_heads, D], of q's shape. mask [N, 1,
// 1, slots] is added to the scores. The queries of one key head are rows of one product, so no key is
// repeated.
Tensor attend_row(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask);

// The masks of `past` tokens and of x's [B, T, ...] as one, [B, past + T]; a mask on one side only is
// completed by ones on the other. Undefined: there is none.
Tensor joined_masks(const Tensor& before, const Tensor& now, int64_t past, const Tensor& x);

}  // namespace girih::nn
