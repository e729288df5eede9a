// The ATen implementation of lattice, for any device, dtype and size.
#pragma once

#include "../arguments/check.h"

namespace girih::lattice {

// o, the final state (first, step, decay, position), the saved tensors (memories, ends, last, last_step)
using Results = std::tuple<Tensor, Tensor, Tensor, OptionalTensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Results forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gamma,
                const OptionalTensor& g, const OptionalTensor& state_first, const OptionalTensor& state_step,
                const OptionalTensor& state_decay, const OptionalTensor& state_position,
                const OptionalTensor& cu_seqlens, int64_t chunk, std::string_view objective, bool normalize,
                double shrinkage, bool save);

}  // namespace girih::lattice
