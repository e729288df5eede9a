// What the layers' implementations share.
#pragma once

#include <ATen/ATen.h>
#include <girih/nn.h>
#include <torch/nn/init.h>

namespace girih::nn {

inline torch::nn::Linear linear(int64_t in, int64_t out, bool bias = false) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias));
}

inline int64_t head_dim_of(int64_t hidden_size, int64_t num_heads, std::optional<int64_t> head_dim) {
  return head_dim.value_or(hidden_size / num_heads);
}

// Gates and step sizes are activated in fp32, or in fp64 when they come in fp64.
inline Tensor at_least_fp32(const Tensor& x) { return x.to(at::promote_types(x.scalar_type(), at::kFloat)); }

// [..., heads * width] -> [..., heads, width]
inline Tensor to_heads(const Tensor& x, int64_t heads) { return x.unflatten(-1, {heads, -1}); }

// x [B, T, ...] with `value` in the rows of masked tokens; an undefined mask masks nothing.
Tensor masked(const Tensor& attention_mask, const Tensor& x, double value = 0.0);

// Position in the chunk, int64 [B], to start from so that the first valid token stands where it would without
// padding: masked tokens advance a position like any other, so it starts as many earlier, modulo `chunk`. An
// undefined position is the start of a chunk; without a mask it is returned as it is.
Tensor chunk_position(const Tensor& attention_mask, const Tensor& position, int64_t chunk);

// x [B, T, ...] and its mask behind those that an earlier call kept as {x, mask}; a mask on one side only is
// completed by ones on the other.
struct Extended {
  Tensor x, valid;

  Extended(const Tensor& x, const Tensor& attention_mask, const State& past);
  State state() const { return {{x, valid}}; }
};

}  // namespace girih::nn
