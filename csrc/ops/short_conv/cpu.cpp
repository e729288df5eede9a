// Short convolution, depthwise and causal:
//   z_t = bias + sum_j weight_j x_{t - (W-1) + j}        y_t = act(z_t)
// The state of a sequence has the W - 1 inputs before its first token; the new state has the final W - 1
// inputs. Backward computes z again:
//   dz_t = dy_t act'(z_t)        dx_{t - (W-1) + j} += weight_j dz_t
//   dweight_j = sum_t dz_t x_{t - (W-1) + j}        dbias = sum_t dz_t
#include "../registration/dispatch.h"
#include "aten.h"
#include "problem.h"

namespace girih::short_conv {
namespace {

using Activation = std::optional<std::string_view>;

// States and tokens in one tensor, and for each tap the index of its inputs.
//   batch        [B, W-1 + T, channels]        per row: the state, then the tokens
//   with bounds  [1, N (W-1) + B T, channels]  all states, then all tokens
class ConvInputs {
 public:
  ConvInputs(const Tensor& x, const OptionalTensor& state_x, const OptionalTensor& cu_seqlens, int64_t W)
      : T_(x.size(1)), state_length_(W - 1), N_(is_packed(cu_seqlens) ? cu_seqlens->size(0) - 1 : x.size(0)) {
    const auto channels = x.size(2);
    const auto state = is_defined(state_x) ? *state_x : at::zeros({N_, state_length_, channels}, x.options());
    if (!is_defined(cu_seqlens)) {
      inputs_ = at::cat({state, x}, 1);
      return;
    }
    build_indices(*cu_seqlens);
    inputs_ = at::cat({state.reshape({1, N_ * state_length_, channels}), flatten_if_bounded(x)}, 1);
  }

  // With bounds: [B, T, channels] -> [1, B T, channels]; else x.
  Tensor flatten_if_bounded(const Tensor& x) const {
    return has_bounds() ? x.reshape({1, x.size(0) * x.size(1), x.size(2)}) : x;
  }

  // x_{t - (W-1) + j} of every token; zero at tokens outside of the sequences
  Tensor tap(int64_t j) const {
    return has_bounds() ? at::where(in_sequence_, inputs_.index_select(1, tap_indices_[j]),
                                    at::zeros({}, inputs_.options()))
                        : inputs_.narrow(1, j, T_);
  }

  // the final W - 1 inputs of every sequence, [N, W-1, channels]
  Tensor final_inputs() const {
    return has_bounds() ? inputs_.index_select(1, final_index_).view({N_, state_length_, inputs_.size(2)})
                        : inputs_.narrow(1, T_, state_length_).clone();
  }

  // A zero gradient of all inputs.
  Tensor zeros(at::ScalarType type) const {
    return at::zeros(inputs_.sizes(), inputs_.options().dtype(type));
  }

  // Each input is read by one token per tap, so the order of the sums is the same on every device.
  void add_to_tap(const Tensor& grad, int64_t j, const Tensor& dz, const Tensor& weight) const {
    if (has_bounds()) {
      grad.index_add_(1, tap_indices_[j], dz * weight);
    } else {
      grad.narrow(1, j, T_).addcmul_(dz, weight);
    }
  }

  void add_to_final(const Tensor& grad, const Tensor& grad_last) const {
    if (has_bounds()) {
      grad.index_add_(1, final_index_,
                      grad_last.to(grad.scalar_type()).reshape({1, N_ * state_length_, inputs_.size(2)}));
    } else {
      grad.narrow(1, T_, state_length_).add_(grad_last);
    }
  }

  Tensor token_rows(const Tensor& grad) const { return grad.narrow(1, grad.size(1) - T_, T_); }
  Tensor state_rows(const Tensor& grad) const {
    return grad.narrow(1, 0, grad.size(1) - T_).reshape({N_, state_length_, inputs_.size(2)});
  }

  bool has_bounds() const { return in_sequence_.defined(); }
  // [1, B T, 1]: the token belongs to a sequence; defined with bounds
  const Tensor& in_sequence() const { return in_sequence_; }

 private:
  void build_indices(const Tensor& cu_seqlens) {
    const auto index = cu_seqlens.options().dtype(at::kLong);
    auto cuts = cu_seqlens.to(at::kLong).clamp(0, T_);
    Tensor start, end;
    if (cuts.dim() == 2) {
      cuts = cuts + at::arange(N_, index).unsqueeze(1) * T_;
      T_ *= N_;
      start = cuts.select(1, 0);
      end = cuts.select(1, 1);
    } else {
      start = cuts.slice(0, 0, N_);
      end = cuts.slice(0, 1);
    }
    if (N_ == 0) start = end = at::zeros({1}, index);  // searchsorted needs at least one sequence
    end = at::maximum(end, start);
    const auto num_sequences = start.size(0);
    // The row of the input of `sequence` at `token`, which may be one of the W - 1 tokens before `first`.
    const auto row = [&](const Tensor& token, const Tensor& sequence, const Tensor& first) {
      return at::where(token >= first, token + N_ * state_length_,
                       sequence * state_length_ + token - first + state_length_);
    };

    const auto token = at::arange(T_, index), none = at::zeros({}, index);
    const auto sequence = at::searchsorted(end, token, false, /*right=*/true).clamp_max(num_sequences - 1);
    const auto first = start.index_select(0, sequence);
    const auto in_sequence = (token >= first) & (token < end.index_select(0, sequence));
    in_sequence_ = in_sequence.view({1, T_, 1});
    for (int64_t j = 0; j <= state_length_; ++j) {
      tap_indices_.push_back(at::where(in_sequence, row(token - state_length_ + j, sequence, first), none));
    }
    const auto from_end = at::arange(-state_length_, 0, index), n = at::arange(N_, index).unsqueeze(1);
    final_index_ =
        row(end.narrow(0, 0, N_).unsqueeze(1) + from_end, n, start.narrow(0, 0, N_).unsqueeze(1)).flatten();
  }

  int64_t T_, state_length_, N_;  // T_: tokens of a row, or with bounds of all rows
  Tensor inputs_;
  Tensor in_sequence_;
  std::vector<Tensor> tap_indices_;  // W tensors [T]: rows of inputs_
  Tensor final_index_;               // [N (W-1)]
};

Tensor convolve(const ConvInputs& inputs, const std::vector<Tensor>& taps, const OptionalTensor& bias) {
  const auto type = taps[0].scalar_type();
  const auto z = inputs.tap(0).to(type) * taps[0];
  for (size_t j = 1; j < taps.size(); ++j) z.addcmul_(inputs.tap(j).to(type), taps[j]);
  if (is_defined(bias)) z.add_(bias->to(type));
  return z;
}

}  // namespace

Results forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                const OptionalTensor& state_x, const OptionalTensor& cu_seqlens, Activation activation,
                bool) {
  Problem::check(x, weight, bias, state_x, cu_seqlens, activation);
  const ConvInputs inputs(x, state_x, cu_seqlens, weight.size(1));
  auto y = convolve(inputs, weight.to(accumulate_type(x)).unbind(1), bias);
  if (activation) at::silu_(y);
  if (inputs.has_bounds()) y.masked_fill_(~inputs.in_sequence(), 0);
  return {y.to(x.scalar_type()).view(x.sizes()), inputs.final_inputs()};
}

Gradients backward(const OptionalTensor& grad_y, const OptionalTensor& grad_state_x, const Tensor& x,
                   const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& state_x,
                   const OptionalTensor& cu_seqlens, Activation activation) {
  Problem::check(x, weight, bias, state_x, cu_seqlens, activation);
  const ConvInputs inputs(x, state_x, cu_seqlens, weight.size(1));
  const auto type = accumulate_type(x);
  const auto taps = weight.to(type).unbind(1);
  const auto grad = inputs.zeros(type);
  auto dweight = at::zeros(weight.sizes(), weight.options().dtype(type));
  auto dbias = at::zeros({x.size(2)}, dweight.options());
  if (is_defined(grad_y)) {
    auto dz = inputs.flatten_if_bounded(grad_y->to(type));
    if (activation) dz = at::silu_backward(dz, convolve(inputs, taps, bias));
    if (inputs.has_bounds()) dz = dz.masked_fill(~inputs.in_sequence(), 0);
    const std::vector<int64_t> over_tokens{0, 1};
    auto product = at::empty_like(dz);
    std::vector<Tensor> sums;
    for (size_t j = 0; j < taps.size(); ++j) {
      inputs.add_to_tap(grad, j, dz, taps[j]);
      sums.push_back(at::mul_out(product, dz, inputs.tap(j)).sum(over_tokens));
    }
    dweight = at::stack(sums, 1);
    dbias = dz.sum(over_tokens);
  }
  if (is_defined(grad_state_x)) inputs.add_to_final(grad, *grad_state_x);

  // Tokens and states are views of one tensor; the gradients must not share memory.
  const auto to_dtype_of = [](const Tensor& tensor, const Tensor& x) {
    return tensor.to(x.scalar_type(), false, /*copy=*/true, at::MemoryFormat::Contiguous);
  };
  return {to_dtype_of(inputs.token_rows(grad), x).view(x.sizes()), to_dtype_of(dweight, weight),
          is_defined(bias) ? OptionalTensor(to_dtype_of(dbias, *bias)) : std::nullopt,
          is_defined(state_x) ? OptionalTensor(to_dtype_of(inputs.state_rows(grad), *state_x)) : std::nullopt,
          std::nullopt};
}

GIRIH_IMPL_ATEN(m) {
  m.impl("short_conv_forward", &forward);
  m.impl("short_conv_backward", &backward);
}

}  // namespace girih::short_conv
