// Room for more headers in what a ChunkAttention keeps.
#pragma once

#include <girih/nn.h>

namespace girih::nn {

// kept [N, slots, ...], or a copy of it with slots for at least so many headers.
Tensor with_room(const Tensor& kept, int64_t chunk, int64_t headers);

}  // namespace girih::nn
