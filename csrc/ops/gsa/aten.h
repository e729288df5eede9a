// The ATen implementation of gsa, for any device, dtype and size.
#pragma once

#include "../arguments/check.h"

namespace girih::gsa {

// o, the final state (k, v, z), the saved states
using Results = std::tuple<Tensor, Tensor, Tensor, OptionalTensor, Tensor>;

Results forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& s,
                const OptionalTensor& g, const OptionalTensor& state_k, const OptionalTensor& state_v,
                const OptionalTensor& state_z, const OptionalTensor& cu_seqlens, std::optional<double> scale,
                std::string_view feature, bool save);

}  // namespace girih::gsa
