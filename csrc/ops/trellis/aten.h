// The ATen implementation of trellis, for any device, dtype and size.
#pragma once

#include "../arguments/check.h"

namespace girih::trellis {

// o, the final state (first_k, k, first_v, v, position), the saved tensors (memories_k, memories_v, z, u,
// fit)
using Results =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Results forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& gamma,
                const OptionalTensor& g, const OptionalTensor& state_first_k, const OptionalTensor& state_k,
                const OptionalTensor& state_first_v, const OptionalTensor& state_v,
                const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t chunk,
                std::string_view phi, std::string_view f, bool save);

}  // namespace girih::trellis
