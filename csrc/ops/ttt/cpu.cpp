// The ATen implementation of ttt: the first pass of Trellis (trellis/passes.h), whose read is the output.
#include "../registration/dispatch.h"
#include "../trellis/passes.h"
#include "aten.h"
#include "problem.h"

namespace girih::ttt {

using trellis::Passes, trellis::Phi, trellis::stacked;

Results forward(const Tensor& q, const Tensor& k, const Tensor& a, const Tensor& gamma,
                const OptionalTensor& g, const OptionalTensor& phi_weight,
                const OptionalTensor& state_first_k, const OptionalTensor& state_k,
                const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t chunk,
                std::string_view phi, std::string_view f, bool save) {
  const auto problem = Problem::check(q, k, a, gamma, g, phi_weight, state_first_k, state_k, state_position,
                                      cu_seqlens, chunk, phi, f);
  const auto B = q.size(0), T = q.size(1), M = a.size(3);
  const DefiningChunks chunks(q, B, T, chunk, cu_seqlens, state_position);
  const auto A = stacked(*state_k, {}, 1);
  Chunks::States initial{A};
  // Without a position the tokens begin a chunk, so A' = A.
  const bool within = given(trellis::within_chunk(state_position, chunk));
  if (!chunks.whole()) initial = {within ? stacked(*state_first_k, {}, 1) : A, A};

  const auto weight = given(phi_weight) ? phi_weight->expand({B, T, -1, -1}) : Tensor();
  const Phi phi_(phi), f_(f);  // backward runs a block again and may outlive the strings
  const auto run = chunks.run(
      {q, k, Tensor(), a, gamma, g.value_or(Tensor()), weight}, initial,
      [phi_, f_](const Tensors& inputs, const Tensor& complete) {
        return std::make_unique<Passes>(inputs, complete, phi_, f_);
      },
      q.scalar_type());
  // A step writes each state tensor in place, so each has separate memory.
  const auto own = [](const Tensor& memories) {
    return memories.squeeze(1).clone(at::MemoryFormat::Contiguous);
  };
  const auto kept = problem.saved(q, state_position, cu_seqlens, chunk, save);
  const auto room = [&](const std::vector<c10::SymInt>& sizes, at::ScalarType type) {
    return at::empty(C10_AS_INTARRAYREF_SLOW_ALLOC(sizes), q.options().dtype(type));
  };
  return {run.o.defined() ? run.o : at::zeros({B, T, q.size(2), M}, q.options()),
          own(run.finals.front()),
          own(run.finals.back()),
          chunks.next_position(),
          room(kept.memories[0], kept.type),
          room(kept.tokens, kept.type),
          room(kept.tokens, kept.type),
          room(kept.fit, A.scalar_type())};
}

TORCH_LIBRARY_IMPL(girih, CPU, m) { m.impl("ttt_forward", &forward); }
#ifndef GIRIH_WITH_CUDA  // with it, cuda.cpp serves CUDA tensors
TORCH_LIBRARY_IMPL(girih, CUDA, m) { m.impl("ttt_forward", TORCH_FN(InFullPrecision<&forward>::call)); }
#endif

}  // namespace girih::ttt
