// Shared by the functions of girih/ops.h: typed calls of the registered operators. An undefined tensor is
// passed as None.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <girih/ops.h>

#include "../arguments/check.h"

namespace girih::ops {

// The registered operator `name` with its C++ signature. Store the result in a static: the lookup takes a
// lock.
template <class Signature>
c10::TypedOperatorHandle<Signature> find_typed_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

using TensorArg = const Tensor&;
using OptionalTensorArg = const OptionalTensor&;
using OptionalFloatArg = std::optional<double>;
using OptionalIntArg = std::optional<int64_t>;
using StringArg = std::string_view;
using OptionalStringArg = std::optional<StringArg>;

inline OptionalTensor to_optional(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

inline OptionalStringArg to_string_view(const std::optional<std::string>& word) {
  return word ? OptionalStringArg(*word) : std::nullopt;
}

// A step writes the tensors of the state in place: a state is required. It reads one token per sequence, so
// sequences are not packed.
inline void check_step_state(const char* name, const Tensor& state, const Tensor& cu_seqlens) {
  GIRIH_CHECK(state.defined(), name,
              "_step: state is absent but is written in place: make the state of a first token with start()");
  GIRIH_CHECK(!cu_seqlens.defined(), name,
              "_step: cu_seqlens is a tensor but should be absent: a step reads one token per sequence");
}

// Expands a first memory [H, ...] to [N, H, ...]; a memory that already has N is returned unchanged.
inline OptionalTensor expand_to_sequences(const Tensor& memory, const Tensor& x, const Tensor& cu_seqlens) {
  if (!memory.defined() || memory.dim() != 3) return to_optional(memory);
  const auto N = is_packed(cu_seqlens) ? cu_seqlens.size(0) - 1 : x.size(0);
  return memory.expand({N, -1, -1, -1});
}

// Expands a first memory to [batch, H, ...] and copies it.
inline Tensor clone_to_batch(const Tensor& memory, int64_t batch) {
  return memory.detach().expand({batch, -1, -1, -1}).clone(at::MemoryFormat::Contiguous);
}

}  // namespace girih::ops
