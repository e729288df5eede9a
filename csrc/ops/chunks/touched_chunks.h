// Saved tensors of operators whose chunk is part of the model: the memory before every chunk.
#pragma once

#include "saved_states.h"

namespace girih {

// The largest number of chunks that the sequences can touch. With a position a sequence may begin inside a
// chunk.
inline c10::SymInt count_touched_chunks(const Tensor& q, const c10::SymInt& sequences,
                                        const OptionalTensor& position, const OptionalTensor& cu_seqlens,
                                        int64_t chunk) {
  const auto B = q.sym_size(0), T = q.sym_size(1);
  const int64_t partial_chunks = is_defined(position) ? 2 : 1;
  if (is_packed(cu_seqlens)) return T / chunk + partial_chunks * sequences;
  return B * ((T + partial_chunks * (chunk - 1)) / chunk);
}

}  // namespace girih
