// Saved tensors of the tensor-core kernels: the states before every chunk or before every pair of chunks.
#pragma once

#include <limits>

#include "../arguments/check.h"

namespace girih {

// Tokens of a range with one saved state, where the length of a chunk is no part of the model: gsa, gla, and
// the fp32 kernels of trellis and ttt. Also the rows of a chunk of delta_product.
constexpr int64_t kChunkTokens = 64;
constexpr int64_t kChunkPairTokens = 2 * kChunkTokens;  // gla with a gate per head or without gates

// The largest sizes of the tensor-core kernels: columns of a state, rows of a memory.
struct KernelLimits {
  int64_t columns, rows;
};
constexpr KernelLimits kChannelGateLimits{128, 512};  // a gate per column
constexpr KernelLimits kHeadGateLimits{256, std::numeric_limits<int64_t>::max()};

// The number of chunks of `tokens` tokens of all sequences; for packed sequences an upper bound.
inline c10::SymInt count_chunks(const Tensor& q, const c10::SymInt& sequences,
                                const OptionalTensor& cu_seqlens, int64_t tokens) {
  const auto B = q.sym_size(0), T = q.sym_size(1);
  if (is_packed(cu_seqlens)) return T / tokens + sequences;
  return B * ((T + tokens - 1) / tokens);
}

// Rounds up to a multiple of 8.
inline c10::SymInt padded_width(const c10::SymInt& width) { return (width + 7) / 8 * 8; }

// [chunks, H, rows, columns]: the rows of all memories; widths are rounded up to multiples of 8.
inline std::vector<c10::SymInt> saved_states_shape(const Tensor& q, const c10::SymInt& sequences,
                                                   const c10::SymInt& heads,
                                                   std::initializer_list<c10::SymInt> memories,
                                                   const c10::SymInt& columns,
                                                   const OptionalTensor& cu_seqlens,
                                                   int64_t tokens = kChunkTokens) {
  c10::SymInt rows = 0;
  for (const auto& width : memories) rows = rows + padded_width(width);
  return {count_chunks(q, sequences, cu_seqlens, tokens), heads, rows, padded_width(columns)};
}

// Allocates a saved tensor. The ATen form saves nothing: it returns tensors of the shapes that Meta predicts,
// which are not read.
inline Tensor new_saved(const std::vector<c10::SymInt>& sizes, const at::TensorOptions& options) {
  return at::empty(C10_AS_INTARRAYREF_SLOW_ALLOC(sizes), options);
}

// Checks that `name` of a backward call has the shape and the dtype that forward saved.
inline void check_saved_tensor(std::string_view op, std::string_view name, const Tensor& saved,
                               const std::vector<c10::SymInt>& expected, at::ScalarType type) {
  GIRIH_CHECK(saved.sym_sizes().equals(expected) && saved.scalar_type() == type, op, "_backward: ", name,
              " has shape ", saved.sym_sizes(), " and dtype ", saved.scalar_type(), " but should have shape ",
              c10::SymIntArrayRef(expected), " and dtype ", type, ", as ", op,
              "_forward saves it with save=True");
}

}  // namespace girih
