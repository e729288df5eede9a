// The ATen implementation of ttt: the first pass of Trellis (trellis/passes.h), whose read is the output.
#include "../registration/dispatch.h"
#include "../trellis/passes.h"
#include "aten.h"
#include "problem.h"

namespace girih::ttt {

using trellis::TrellisBlock, trellis::Phi, trellis::stack_memories;

Results forward(const Tensor& q, const Tensor& k, const Tensor& a, const Tensor& gamma,
                const OptionalTensor& g, const OptionalTensor& phi_weight,
                const OptionalTensor& state_first_k, const OptionalTensor& state_k,
                const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t chunk,
                std::string_view phi, std::string_view f, bool save) {
  const auto problem = Problem::check(q, k, a, gamma, g, phi_weight, state_first_k, state_k, state_position,
                                      cu_seqlens, chunk, phi, f);
  const auto B = q.size(0), T = q.size(1), M = a.size(3);
  const ChunkDefiningScan chunks(q, B, T, chunk, cu_seqlens, state_position);
  const auto A = stack_memories(*state_k, {}, 1);
  Chunks::States initial{A};
  // Without a position the tokens begin a chunk, so A' = A.
  const bool is_resumed = is_defined(trellis::position_in_chunk(state_position, chunk));
  if (!chunks.has_whole_chunks()) initial = {is_resumed ? stack_memories(*state_first_k, {}, 1) : A, A};

  const auto weight = is_defined(phi_weight) ? phi_weight->expand({B, T, -1, -1}) : Tensor();
  const Phi phi_(phi), f_(f);  // backward runs a block again and may outlive the strings
  const auto run = chunks.run(
      {q, k, Tensor(), a, gamma, g.value_or(Tensor()), weight}, initial,
      [phi_, f_](const Tensors& inputs, const Tensor& complete) {
        return std::make_unique<TrellisBlock>(inputs, complete, phi_, f_);
      },
      q.scalar_type());
  // A step writes each state tensor in place, so each has separate memory.
  const auto clone_memory = [](const Tensor& memories) {
    return memories.squeeze(1).clone(at::MemoryFormat::Contiguous);
  };
  const auto saved_shapes = problem.saved(q, state_position, cu_seqlens, chunk, save);
  const auto new_saved = [&](const std::vector<c10::SymInt>& sizes, at::ScalarType type) {
    return at::empty(C10_AS_INTARRAYREF_SLOW_ALLOC(sizes), q.options().dtype(type));
  };
  return {run.o.defined() ? run.o : at::zeros({B, T, q.size(2), M}, q.options()),
          clone_memory(run.finals.front()),
          clone_memory(run.finals.back()),
          chunks.next_position(),
          new_saved(saved_shapes.memories[0], saved_shapes.type),
          new_saved(saved_shapes.tokens, saved_shapes.type),
          new_saved(saved_shapes.tokens, saved_shapes.type),
          new_saved(saved_shapes.fit, A.scalar_type())};
}

TORCH_LIBRARY_IMPL(girih, CPU, m) { m.impl("ttt_forward", &forward); }
#ifndef GIRIH_WITH_CUDA  // with it, cuda.cpp serves CUDA tensors
TORCH_LIBRARY_IMPL(girih, CUDA, m) { m.impl("ttt_forward", TORCH_FN(WithoutTF32<&forward>::call)); }
#endif

}  // namespace girih::ttt
