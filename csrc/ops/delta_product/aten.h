// The ATen implementation of delta_product, for any device, dtype and size.
#pragma once

#include "../arguments/check.h"

namespace girih::delta_product {

// o, the final state (s, position), the saved tensors (states, prepared, transitions)
using Results = std::tuple<Tensor, Tensor, OptionalTensor, Tensor, Tensor, Tensor>;

// gradients of q, k, v, beta, g, the state (s, position), cu_seqlens
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor,
                             OptionalTensor>;

Results forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                const OptionalTensor& g, const OptionalTensor& state_s, const OptionalTensor& state_position,
                const OptionalTensor& cu_seqlens, int64_t n, std::optional<double> scale, bool l2norm_qk,
                std::optional<int64_t> chunk, std::optional<std::string_view> between_chunks, bool save);

}  // namespace girih::delta_product
