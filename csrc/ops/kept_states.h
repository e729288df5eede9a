// What the forward of gsa and gla keeps for backward: the states before every chunk, of the kernels that run
// on the tensor cores.
#pragma once

#include <c10/core/ScalarType.h>

#include "check.h"

namespace girih {

constexpr int64_t kKeptChunk = 64;   // tokens
constexpr int64_t kKeptSlots = 128;  // columns of a state, at most
constexpr int64_t kKeptWidth = 512;  // rows of a memory, at most

// [chunks, H, rows, columns], with the rows of every memory and the columns in packs of 8; {0}, nothing,
// where those kernels have no instance.
inline std::vector<c10::SymInt> kept_states(const Tensor& q, const c10::SymInt& sequences,
                                            const c10::SymInt& heads,
                                            std::initializer_list<c10::SymInt> memories,
                                            const c10::SymInt& columns, const OptionalTensor& cu_seqlens) {
  const auto padded = [](const c10::SymInt& width) { return (width + 7) / 8 * 8; };
  if (!c10::isReducedFloatingType(q.scalar_type()) || columns > kKeptSlots) return {0};
  c10::SymInt rows = 0;
  for (const auto& width : memories) {
    if (width > kKeptWidth) return {0};
    rows = rows + padded(width);
  }
  const auto B = q.sym_size(0), T = q.sym_size(1);
  const bool packed = given(cu_seqlens) && cu_seqlens->dim() == 1;
  const auto chunks = packed ? T / kKeptChunk + sequences : B * ((T + kKeptChunk - 1) / kKeptChunk);
  return {chunks, heads, rows, padded(columns)};
}

}  // namespace girih
