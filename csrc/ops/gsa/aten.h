// The ATen implementation of gsa, for any device, dtype and size.
#pragma once

#include "problem.h"

namespace girih::gsa {

// o, the final state (k, v, z), the saved states
using Results = std::tuple<Tensor, Tensor, Tensor, OptionalTensor, Tensor>;

Results forward(const Call& call, bool save);

}  // namespace girih::gsa
