// Growth of the key-value cache of ChunkAttention.
#pragma once

#include <girih/nn.h>

namespace girih::nn {

// cache [N, slots, ...] if it has slots for `headers` headers, else a copy padded with zeros.
Tensor with_room(const Tensor& cache, int64_t chunk, int64_t headers);

}  // namespace girih::nn
