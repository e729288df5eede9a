// The ATen implementation of trellis; passes.h has the equations.
#include "../registration/dispatch.h"
#include "aten.h"
#include "passes.h"
#include "problem.h"

namespace girih::trellis {

Results forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& gamma,
                const OptionalTensor& g, const OptionalTensor& state_first_k, const OptionalTensor& state_k,
                const OptionalTensor& state_first_v, const OptionalTensor& state_v,
                const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t chunk,
                std::string_view phi, std::string_view f, bool save) {
  const auto problem = Problem::check(q, k, v, a, gamma, g, state_first_k, state_k, state_first_v, state_v,
                                      state_position, cu_seqlens, chunk, phi, f);
  const auto B = q.size(0), T = q.size(1), D = k.size(3), V = v.size(3);
  const DefiningChunks chunks(q, B, T, chunk, cu_seqlens, state_position);
  const auto A = stacked(*state_k, *state_v, 1);
  Chunks::States initial{A};
  // Without a position the tokens begin a chunk, so A' = A.
  const bool within = given(within_chunk(state_position, chunk));
  if (!chunks.whole()) initial = {within ? stacked(*state_first_k, *state_first_v, 1) : A, A};

  const Phi phi_(phi), f_(f);  // backward runs a block again and may outlive the strings
  const auto run = chunks.run(
      {q, k, v, a, gamma, g.value_or(Tensor()), Tensor()}, initial,
      [phi_, f_](const Tensors& inputs, const Tensor& complete) {
        return std::make_unique<Passes>(inputs, complete, phi_, f_);
      },
      q.scalar_type());
  // A step writes each state tensor in place, so each has its own memory.
  const auto part = [](const Tensor& memories, int64_t pass, int64_t width) {
    return memories.select(1, pass).narrow(-1, 0, width).clone(at::MemoryFormat::Contiguous);
  };
  const auto &first = run.finals.front(), &last = run.finals.back();
  const auto kept = problem.saved(q, state_position, cu_seqlens, chunk, save);
  const auto room = [&](const std::vector<c10::SymInt>& sizes, const at::TensorOptions& options) {
    return at::empty(C10_AS_INTARRAYREF_SLOW_ALLOC(sizes), options);
  };
  return {run.o.defined() ? run.o : at::zeros({B, T, q.size(2), V}, q.options()),
          part(first, 0, D),
          part(last, 0, D),
          part(first, 1, V),
          part(last, 1, V),
          chunks.next_position(),
          room(kept.memories[0], q.options().dtype(kept.type)),
          room(kept.memories[1], q.options().dtype(kept.type)),
          room(kept.tokens, q.options().dtype(kept.type)),
          room(kept.tokens, q.options().dtype(kept.type)),
          room(kept.fit, A.options())};
}

TORCH_LIBRARY_IMPL(girih, CPU, m) { m.impl("trellis_forward", &forward); }
#ifndef GIRIH_WITH_CUDA  // with it, cuda.cpp serves CUDA tensors
TORCH_LIBRARY_IMPL(girih, CUDA, m) { m.impl("trellis_forward", TORCH_FN(InFullPrecision<&forward>::call)); }
#endif

}  // namespace girih::trellis
