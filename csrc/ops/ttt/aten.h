// The results of ttt, and its ATen implementation, for any device, dtype and size.
#pragma once

#include "../trellis/aten.h"
#include "problem.h"

namespace girih::ttt {

struct SavedTensors : trellis::SavedTensors {
  static auto arguments(auto& saved) {
    return std::tie(saved.chunk_memories[0], saved.z, saved.u, saved.map_stats);
  }
};

struct OutputGradients : trellis::OutputGradients {
  static auto arguments(auto& g) { return std::tie(g.o, g.chunk_start[0], g.memory[0], g.position); }
};

// o, the final state (first_k, k, position), the saved tensors (memories_k, z, u, fit)
using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
inline Results to_results(const trellis::Outputs& out) {
  const auto& saved = out.saved;
  return {out.o,   out.chunk_start[0], out.memory[0], out.position, saved.chunk_memories[0], saved.z,
          saved.u, saved.map_stats};
}

Results forward(const Call& call, bool save);

}  // namespace girih::ttt
