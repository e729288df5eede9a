// The arguments of ttt, their conditions beyond the declaration, the path, and the saved tensors: those of
// trellis with one memory.
#pragma once

#include "../trellis/problem.h"

namespace girih::ttt {

struct Call : trellis::Call {
  static constexpr const char* name = "ttt";
  static constexpr size_t data_count = 6;
  using StepState = Types<Tensor, Tensor, Tensor>;
  static auto arguments(auto& c) {
    return std::tie(c.q, c.x[0], c.a, c.gamma, c.g, c.phi_weight, c.chunk_start[0], c.memory[0], c.position,
                    c.cu_seqlens, c.chunk, c.phi, c.f);
  }
};

struct Problem : trellis::Problem {
  static Problem check(const Call& call) {
    const auto sizes = check_declaration(call);
    GIRIH_CHECK(is_defined(call.memory[0]),
                "ttt: state is None but should be a TTTState or the first memory A [H, M, D]: there is no "
                "zero start");
    GIRIH_CHECK(is_defined(call.chunk_start[0]) || !is_defined(call.position),
                "ttt: state_first_k is None but should be the memory at the start of the chunk when "
                "state_position is a tensor");
    return {{sizes["B"], sizes["T"], sizes["HQ"], sizes["H"], sizes["D"], 0, sizes["M"], sizes["N"], 1,
             is_defined(call.phi_weight)}};
  }
};

}  // namespace girih::ttt
