// Short convolution, depthwise and causal (maths.md section 6):
//   z_t = bias + sum_j weight_j x_{t - (W-1) + j}        y_t = act(z_t)
// The W - 1 inputs before a sequence's first token are its state; its last W - 1 inputs are the next one.
#include "../dispatch.h"
#include "aten.h"
#include "problem.h"

namespace girih::short_conv {
namespace {

// The inputs in a row, those of the states included, and where the taps find theirs.
struct Inputs {
  std::vector<Tensor> taps;  // W of [B, T, channels]: x_{t - (W-1) + j}
  Tensor last;               // [N, W-1, channels]
  Tensor inside;             // [1, T, 1]: a sequence owns the token; only when packed
};

Inputs of_batch(const Tensor& x, const Tensor& state, int64_t W) {
  const auto all = at::cat({state, x}, 1);
  Inputs inputs;
  for (int64_t j = 0; j < W; ++j) inputs.taps.push_back(all.narrow(1, j, x.size(1)));
  inputs.last = all.narrow(1, x.size(1), W - 1).clone();
  return inputs;
}

Inputs of_packed(const Tensor& x, const Tensor& state, const Tensor& cu_seqlens, int64_t W) {
  const auto T = x.size(1), N = state.size(0), channels = x.size(2), before = W - 1;
  const auto all = at::cat({state.reshape({N * before, channels}), x.squeeze(0)});
  const auto index = cu_seqlens.options().dtype(at::kLong);

  // [N], one empty sequence when there is none
  const auto cuts = cu_seqlens.to(at::kLong).clamp(0, T);
  const auto sequences = std::max<int64_t>(N, 1);
  const auto start = cuts.narrow(0, 0, sequences);
  const auto end = at::maximum(cuts.narrow(0, cuts.size(0) - sequences, sequences), start);
  // Where in `all` a sequence's input at a token is found.
  const auto place = [&](const Tensor& token, const Tensor& sequence, const Tensor& first) {
    return at::where(token >= first, token + N * before, sequence * before + token - first + before);
  };

  Inputs inputs;
  const auto token = at::arange(T, index);
  const auto sequence =
      at::searchsorted(end.contiguous(), token, false, /*right=*/true).clamp_max(sequences - 1);
  const auto first = start.index_select(0, sequence);
  const auto inside = (token >= first) & (token < end.index_select(0, sequence));
  inputs.inside = inside.view({1, T, 1});
  const auto nothing = at::zeros({}, x.options());
  for (int64_t j = 0; j < W; ++j) {
    const auto from = at::where(inside, place(token - before + j, sequence, first), at::zeros({}, index));
    inputs.taps.push_back(at::where(inputs.inside, all.index_select(0, from).unsqueeze(0), nothing));
  }
  const auto row = at::arange(before, index), n = at::arange(N, index).unsqueeze(1);
  const auto from =
      place(end.narrow(0, 0, N).unsqueeze(1) - before + row, n, start.narrow(0, 0, N).unsqueeze(1));
  inputs.last = all.index_select(0, from.flatten()).view({N, before, channels});
  return inputs;
}

}  // namespace

std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                   const OptionalTensor& state_x, const OptionalTensor& cu_seqlens,
                                   std::optional<std::string_view> activation, bool) {
  Problem::check(x, weight, bias, state_x, cu_seqlens, activation);
  const auto W = weight.size(1), N = given(cu_seqlens) ? cu_seqlens->size(0) - 1 : x.size(0);
  const auto type = accumulate_type(x);
  const auto state = given(state_x) ? *state_x : at::zeros({N, W - 1, x.size(2)}, x.options());
  const auto inputs = given(cu_seqlens) ? of_packed(x, state, *cu_seqlens, W) : of_batch(x, state, W);

  const auto taps = weight.to(type).unbind(1);
  auto z = inputs.taps[0].to(type) * taps[0];
  for (int64_t j = 1; j < W; ++j) z = at::addcmul(z, inputs.taps[j].to(type), taps[j]);
  if (given(bias)) z = z + bias->to(type);
  auto y = activation ? at::silu(z) : z;
  if (inputs.inside.defined()) y = at::where(inputs.inside, y, at::zeros({}, y.options()));
  return {y.to(x.scalar_type()), inputs.last};
}

#ifdef GIRIH_WITH_CUDA  // CUDA tensors have cuda.cpp.
TORCH_LIBRARY_IMPL(girih, CPU, m) {
  m.impl("short_conv_forward", &forward);
}
#else
GIRIH_IMPL_ATEN("short_conv_forward", forward)
#endif

}  // namespace girih::short_conv
