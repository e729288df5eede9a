// The conditions of lattice beyond its declaration, its path, and its saved tensors.
#pragma once

#include "../arguments/path.h"
#include "../chunks/touched_chunks.h"

namespace girih::lattice {

constexpr int64_t kMaxWidth = 128;  // D and M of the kernels
// Tensor cores: for shorter chunks the saved memories would need many times the memory of the tokens.
constexpr int64_t kMinChunk = 8;

struct Problem {
  c10::SymInt B, T, HQ, H, M, D, N;

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gamma,
                       const OptionalTensor& g, const OptionalTensor& state_first,
                       const OptionalTensor& state_step, const OptionalTensor& state_decay,
                       const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t chunk,
                       std::string_view objective, bool normalize, double shrinkage) {
    static const auto& op = get_operator("lattice");
    const auto at = girih::check(op, {q, k, v, gamma, g, state_first, state_step, state_decay, state_position,
                                      cu_seqlens, chunk, objective, normalize, shrinkage});
    GIRIH_CHECK(normalize || chunk == 1, "lattice: normalize is False, so chunk should be 1 but is ", chunk);
    GIRIH_CHECK(shrinkage == 0 || chunk == 1, "lattice: shrinkage is ", shrinkage,
                ", so chunk should be 1 but is ", chunk);
    GIRIH_CHECK(
        is_defined(state_first),
        "lattice: state is None but should be a LatticeState or the first memory S [H, D, M]: there is no "
        "zero start");
    GIRIH_CHECK(is_defined(g) || !is_defined(state_decay),
                "lattice: state_decay is a tensor but should be None when g is None");
    if (is_defined(state_position)) {
      GIRIH_CHECK(
          is_defined(state_step),
          "lattice: state_step is None but should be a tensor, the sum of the steps of the chunk so far, "
          "when state_position is a tensor");
      GIRIH_CHECK(
          !is_defined(g) || is_defined(state_decay),
          "lattice: state_decay is None but should be a tensor, the sum of the gates of the chunk so far, "
          "when g and state_position are tensors");
    }
    return {at["B"], at["T"], at["HQ"], at["H"], at["M"], at["D"], at["N"]};
  }

  Path path(const Tensor& q, int64_t chunk, bool normalize, double shrinkage) const {
    if (q.scalar_type() == at::kDouble) return aten(kNoFloat64Kernels);
    if (D > kMaxWidth || M > kMaxWidth) return aten("values or slots wider than 128");
    if (q.scalar_type() == at::kFloat) return fp32(kFloat32Reason);
    if (!normalize) return fp32("normalize is False");
    if (shrinkage > 0) return fp32("shrinkage is not 0");
    if (chunk < kMinChunk) return fp32("chunks of fewer than 8 tokens");
    return tensor_cores();
  }
  static Path step_path(const Tensor& q, bool normalize, double shrinkage) {
    if (q.scalar_type() == at::kDouble) return aten(kNoFloat64Kernels);
    if (!normalize) return aten("normalize is False");
    return shrinkage > 0 ? aten("shrinkage is not 0") : fp32(kMemoryBound);
  }

  // The saved tensors of forward; {0} each without kernels.
  //   tensor cores: memories, the transposed memory before every chunk; ends, two numbers per column at the
  //     end of every chunk; last and last_step, the final state
  //   fp32 kernels: memories, the fp32 memory before every segment
  struct SavedShapes {
    std::vector<c10::SymInt> memories, ends, last;
    at::ScalarType memories_type;
  };
  SavedShapes saved(const Tensor& q, const OptionalTensor& position, const OptionalTensor& cu_seqlens,
                    int64_t chunk, bool normalize, double shrinkage, bool save) const {
    const auto by = path(q, chunk, normalize, shrinkage);
    SavedShapes saved_shapes{{0}, {0}, {0}, by == Path::Code::fp32 ? at::kFloat : q.scalar_type()};
    if (!save || by == Path::Code::aten) return saved_shapes;
    if (by == Path::Code::fp32) {
      const auto segments = count_touched_chunks(q, N, position, cu_seqlens, fp32_segment(chunk));
      saved_shapes.memories = {segments, H, D, (M + 3) / 4 * 4};
    } else {
      const auto chunks = count_touched_chunks(q, N, position, cu_seqlens, chunk);
      saved_shapes.memories = {chunks, H, padded_width(M), padded_width(D)};
      saved_shapes.ends = {chunks, H, 2, padded_width(M)};
      saved_shapes.last = {N, H, padded_width(D), padded_width(M)};
    }
    return saved_shapes;
  }

  // Tokens of a segment of the fp32 kernels: a multiple of the chunk.
  static constexpr int64_t fp32_segment(int64_t chunk) { return kChunkTokens / chunk * chunk; }
};

}  // namespace girih::lattice
