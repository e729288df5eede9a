// The ATen implementation of trellis and ttt; memory_block.h has the equations.
#include "aten.h"
#include "memory_block.h"

namespace girih::trellis {

Outputs run_aten(const Problem& problem, const Call& call, bool save) {
  const auto& q = call.q;
  const auto B = q.size(0), T = q.size(1);
  const int memory_count = call.memory_count();
  const ChunkDefiningScan chunks(q, B, T, call.chunk, call.cu_seqlens, call.position);
  const auto stack_state = [&](const OptionalTensor* memories) {
    return stack_memories(*memories[0], memory_count == 2 ? *memories[1] : Tensor(), 1);
  };
  const auto A = stack_state(call.memory);
  Chunks::States initial{A};
  // Without a position the tokens begin a chunk, so A' = A.
  const bool is_resumed = is_defined(call.position_in_chunk());
  if (!chunks.has_whole_chunks()) initial = {is_resumed ? stack_state(call.chunk_start) : A, A};

  const auto phi_weight = is_defined(call.phi_weight) ? call.phi_weight->expand({B, T, -1, -1}) : Tensor();
  const Phi phi(call.phi), f(call.f);  // backward runs a block again and may outlive the strings
  const auto run = chunks.run(
      {q, call.x[0], call.x[1], call.a, call.gamma, call.g.value_or(Tensor()), phi_weight}, initial,
      [phi, f](const Tensors& inputs, const Tensor& has_chunk_end) {
        return std::make_unique<MemoryBlock>(inputs, has_chunk_end, phi, f);
      },
      q.scalar_type());

  Outputs out;
  out.o = run.o.defined() ? run.o : at::zeros({B, T, q.size(2), call.output_width()}, q.options());
  out.position = chunks.next_position();
  const auto shapes = problem.saved(call, save);
  const auto options = q.options().dtype(shapes.type);
  for (int m = 0; m < memory_count; ++m) {
    // A step writes each state tensor in place, so each has its own memory.
    const auto select = [&](const Tensor& memories) {
      return memories.select(1, m).narrow(-1, 0, call.width(m)).clone(at::MemoryFormat::Contiguous);
    };
    out.chunk_start[m] = select(run.finals.front()), out.memory[m] = select(run.finals.back());
    out.saved.chunk_memories[m] = new_saved(shapes.chunk_memories[m], options);
  }
  out.saved.z = new_saved(shapes.token_rows, options), out.saved.u = new_saved(shapes.token_rows, options);
  out.saved.map_stats = new_saved(shapes.map_stats, A.options());
  return out;
}

Results forward(const Call& call, bool save) {
  return to_results(run_aten(Problem::check(call), call, save));
}

GIRIH_IMPL_ATEN(m) { register_forward<&WithoutTF32<&forward>::call>(m); }

}  // namespace girih::trellis
