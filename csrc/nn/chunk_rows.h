// Growth of the key-value cache of ChunkAttention.
#pragma once

#include <girih/nn.h>

namespace girih::nn {

// kept [N, slots, ...] if it has slots for `headers` headers, else a zero-padded copy that has.
Tensor with_room(const Tensor& kept, int64_t chunk, int64_t headers);

}  // namespace girih::nn
