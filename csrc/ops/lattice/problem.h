// The arguments of lattice, their conditions beyond the declaration, the path, and the saved tensors.
#pragma once

#include "../arguments/path.h"
#include "../chunks/touched_chunks.h"
#include "../registration/call.h"

namespace girih::lattice {

constexpr int64_t kMaxWidth = 128;  // D and M of the kernels
// Tensor cores: for shorter chunks the saved memories would need many times the memory of the tokens.
constexpr int64_t kMinChunk = 8;

struct Call {
  static constexpr const char* name = "lattice";
  static constexpr size_t data_count = 5;
  using StepState = Types<Tensor, Tensor, OptionalTensor, Tensor>;
  static auto arguments(auto& c) {
    return std::tie(c.q, c.k, c.v, c.gamma, c.g, c.state_first, c.state_step, c.state_decay, c.state_position,
                    c.cu_seqlens, c.chunk, c.objective, c.normalize, c.shrinkage);
  }

  Tensor q, k, v, gamma;
  OptionalTensor g, state_first, state_step, state_decay, state_position, cu_seqlens;
  int64_t chunk;
  std::string_view objective;
  bool normalize;
  double shrinkage;
};

struct Problem {
  c10::SymInt B, T, HQ, H, M, D, N;

  static Problem check(const Call& call) {
    const auto sizes = check_declaration(call);
    GIRIH_CHECK(call.normalize || call.chunk == 1,
                "lattice: normalize is False, so chunk should be 1 but is ", call.chunk);
    GIRIH_CHECK(call.shrinkage == 0 || call.chunk == 1, "lattice: shrinkage is ", call.shrinkage,
                ", so chunk should be 1 but is ", call.chunk);
    GIRIH_CHECK(
        is_defined(call.state_first),
        "lattice: state is None but should be a LatticeState or the first memory S [H, D, M]: there is no "
        "zero start");
    GIRIH_CHECK(is_defined(call.g) || !is_defined(call.state_decay),
                "lattice: state_decay is a tensor but should be None when g is None");
    if (is_defined(call.state_position)) {
      GIRIH_CHECK(
          is_defined(call.state_step),
          "lattice: state_step is None but should be a tensor, the sum of the steps of the chunk so far, "
          "when state_position is a tensor");
      GIRIH_CHECK(
          !is_defined(call.g) || is_defined(call.state_decay),
          "lattice: state_decay is None but should be a tensor, the sum of the gates of the chunk so far, "
          "when g and state_position are tensors");
    }
    return {sizes["B"], sizes["T"], sizes["HQ"], sizes["H"], sizes["M"], sizes["D"], sizes["N"]};
  }

  Path path(const Call& call) const {
    if (call.q.scalar_type() == at::kDouble) return aten(kNoFloat64Kernels);
    if (D > kMaxWidth || M > kMaxWidth) return aten("values or slots wider than 128");
    if (call.q.scalar_type() == at::kFloat) return fp32(kFloat32Reason);
    if (!call.normalize) return fp32("normalize is False");
    if (call.shrinkage > 0) return fp32("shrinkage is not 0");
    if (call.chunk < kMinChunk) return fp32("chunks of fewer than 8 tokens");
    return tensor_cores();
  }
  static Path step_path(const Call& call) {
    if (call.q.scalar_type() == at::kDouble) return aten(kNoFloat64Kernels);
    if (!call.normalize) return aten("normalize is False");
    return call.shrinkage > 0 ? aten("shrinkage is not 0") : fp32(kMemoryBound);
  }

  // The saved tensors of forward; {0} each without kernels.
  //   tensor cores: memories, the transposed memory before every chunk; ends, two numbers per column at the
  //     end of every chunk; last and last_step, the final state
  //   fp32 kernels: memories, the fp32 memory before every segment
  struct SavedShapes {
    std::vector<c10::SymInt> memories, ends, last;
    at::ScalarType memories_type;
  };
  SavedShapes saved(const Call& call, bool save) const {
    const auto chosen = path(call);
    SavedShapes saved_shapes{{0}, {0}, {0}, chosen == Path::Code::fp32 ? at::kFloat : call.q.scalar_type()};
    if (!save || chosen == Path::Code::aten) return saved_shapes;
    if (chosen == Path::Code::fp32) {
      const auto segments =
          count_touched_chunks(call.q, N, call.state_position, call.cu_seqlens, fp32_segment(call.chunk));
      saved_shapes.memories = {segments, H, D, (M + 3) / 4 * 4};
    } else {
      const auto chunks = count_touched_chunks(call.q, N, call.state_position, call.cu_seqlens, call.chunk);
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
