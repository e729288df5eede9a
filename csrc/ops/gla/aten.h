// The ATen implementation of gla, for any device, dtype and size.
#pragma once

#include "problem.h"

namespace girih::gla {

// o, the final state, the saved states
using Results = std::tuple<Tensor, Tensor, Tensor>;

Results forward(const Call& call, bool save);

}  // namespace girih::gla
