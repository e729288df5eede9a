// The ATen implementation of ttt, for any device, dtype and size.
#pragma once

#include "../arguments/check.h"

namespace girih::ttt {

// o, the final state (first_k, k, position), the saved tensors (memories_k, z, u, fit)
using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Results forward(const Tensor& q, const Tensor& k, const Tensor& a, const Tensor& gamma,
                const OptionalTensor& g, const OptionalTensor& phi_weight,
                const OptionalTensor& state_first_k, const OptionalTensor& state_k,
                const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t chunk,
                std::string_view phi, std::string_view f, bool save);

}  // namespace girih::ttt
