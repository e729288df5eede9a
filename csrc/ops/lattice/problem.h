// The conditions of lattice beyond its declaration, its path, and its saved tensors.
#pragma once

#include "../arguments/path.h"
#include "../chunks/saved_memories.h"

namespace girih::lattice {

constexpr int64_t kWidest = 128;  // D and M of the kernels
// Tensor cores: for shorter chunks the saved memories would need many times the memory of the tokens.
constexpr int64_t kShortestChunk = 8;

struct Problem {
  c10::SymInt B, T, HQ, H, M, D, N;

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gamma,
                       const OptionalTensor& g, const OptionalTensor& state_first,
                       const OptionalTensor& state_step, const OptionalTensor& state_decay,
                       const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t chunk,
                       std::string_view objective, bool normalize, double shrinkage) {
    static const auto& op = describe("lattice");
    const auto at = girih::check(op, {q, k, v, gamma, g, state_first, state_step, state_decay, state_position,
                                      cu_seqlens, chunk, objective, normalize, shrinkage});
    GIRIH_CHECK(normalize || chunk == 1, "lattice: normalize is False, so chunk should be 1 but is ", chunk);
    GIRIH_CHECK(shrinkage == 0 || chunk == 1, "lattice: shrinkage is ", shrinkage,
                ", so chunk should be 1 but is ", chunk);
    GIRIH_CHECK(
        given(state_first),
        "lattice: state is None but should be a LatticeState or the first memory S [H, D, M]: there is no "
        "zero start");
    GIRIH_CHECK(given(g) || !given(state_decay),
                "lattice: state_decay is a tensor but should be None when g is None");
    if (given(state_position)) {
      GIRIH_CHECK(
          given(state_step),
          "lattice: state_step is None but should be a tensor, the sum of the steps of the chunk so far, "
          "when state_position is a tensor");
      GIRIH_CHECK(
          !given(g) || given(state_decay),
          "lattice: state_decay is None but should be a tensor, the sum of the gates of the chunk so far, "
          "when g and state_position are tensors");
    }
    return {at["B"], at["T"], at["HQ"], at["H"], at["M"], at["D"], at["N"]};
  }

  Path path(const Tensor& q, int64_t chunk, bool normalize, double shrinkage) const {
    if (q.scalar_type() == at::kDouble) return aten(kFloat64);
    if (D > kWidest || M > kWidest) return aten("values or slots wider than 128");
    if (q.scalar_type() == at::kFloat) return exact(kFloat32);
    if (!normalize) return exact("normalize is False");
    if (shrinkage > 0) return exact("shrinkage is not 0");
    if (chunk < kShortestChunk) return exact("chunks of fewer than 8 tokens");
    return tensor_cores();
  }
  static Path step_path(const Tensor& q, bool normalize, double shrinkage) {
    if (q.scalar_type() == at::kDouble) return aten(kFloat64);
    if (!normalize) return aten("normalize is False");
    return shrinkage > 0 ? aten("shrinkage is not 0") : exact(kMemoryBound);
  }

  // The saved tensors of forward; {0} each without kernels.
  //   tensor cores: memories, the transposed memory before every chunk; ends, two numbers per column at the
  //     end of every chunk; last and last_step, the final state
  //   fp32 kernels: memories, the fp32 memory before every segment
  struct Kept {
    std::vector<c10::SymInt> memories, ends, last;
    at::ScalarType memories_type;
  };
  Kept saved(const Tensor& q, const OptionalTensor& position, const OptionalTensor& cu_seqlens, int64_t chunk,
             bool normalize, double shrinkage, bool save) const {
    const auto by = path(q, chunk, normalize, shrinkage);
    Kept kept{{0}, {0}, {0}, by == Path::Code::exact ? at::kFloat : q.scalar_type()};
    if (!save || by == Path::Code::aten) return kept;
    if (by == Path::Code::exact) {
      const auto segments = kept_within(q, N, position, cu_seqlens, exact_segment(chunk));
      kept.memories = {segments, H, D, (M + 3) / 4 * 4};
    } else {
      const auto chunks = kept_within(q, N, position, cu_seqlens, chunk);
      kept.memories = {chunks, H, kept_width(M), kept_width(D)};
      kept.ends = {chunks, H, 2, kept_width(M)};
      kept.last = {N, H, kept_width(D), kept_width(M)};
    }
    return kept;
  }

  // Tokens of a segment of the fp32 kernels: a multiple of the chunk.
  static constexpr int64_t exact_segment(int64_t chunk) { return kKeptChunk / chunk * chunk; }
};

}  // namespace girih::lattice
