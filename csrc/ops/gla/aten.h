// The ATen implementation of gla, for any device, dtype and size.
#pragma once

#include "../arguments/check.h"

namespace girih::gla {

// o, the final state, the saved states
using Results = std::tuple<Tensor, Tensor, Tensor>;

Results forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                const OptionalTensor& state_s, const OptionalTensor& cu_seqlens, std::optional<double> scale,
                bool save);

}  // namespace girih::gla
