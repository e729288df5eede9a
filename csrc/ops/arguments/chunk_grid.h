// The chunks of a call whose chunk is part of the model, as the kernels read them.
#pragma once

#include "kernel_arguments.h"
#include "time/chunks.h"

namespace girih {

// cu_seqlens and position must be contiguous and outlive the launch; an undefined position is 0.
inline kernels::ChunkGrid make_chunk_grid(const Tensor& x, const Tensor& cu_seqlens, const Tensor& position,
                                          int64_t chunk) {
  return {sequence_layout(x, cu_seqlens), static_cast<int>(chunk),
          position.defined() ? position.const_data_ptr<int64_t>() : nullptr};
}

}  // namespace girih
