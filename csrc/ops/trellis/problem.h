// The conditions of trellis beyond its declaration, its path, and its saved tensors. The problem of ttt is
// derived from it, with one memory and V = 0.
#pragma once

#include "../arguments/path.h"
#include "../chunks/saved_memories.h"

namespace girih::trellis {

constexpr int64_t kWidest = 128;       // M, D and V of the tensor-core kernels
constexpr int64_t kExactWidest = 256;  // M, D and V of the fp32 kernels

// The position if the chunk is longer than one token. A chunk of one token always begins with its token, so
// A' = A and the first memories of the state are not read.
inline OptionalTensor within_chunk(const OptionalTensor& position, int64_t chunk) {
  return chunk > 1 ? position : std::nullopt;
}

struct Problem {
  c10::SymInt B, T, HQ, H, D, V, M, N;
  int memories = 2;
  bool weighted = false, softmax = false;  // ttt: phi has a weight; phi is softmax

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a,
                       const Tensor& gamma, const OptionalTensor& g, const OptionalTensor& state_first_k,
                       const OptionalTensor& state_k, const OptionalTensor& state_first_v,
                       const OptionalTensor& state_v, const OptionalTensor& state_position,
                       const OptionalTensor& cu_seqlens, int64_t chunk, std::string_view phi,
                       std::string_view f) {
    static const auto& op = describe("trellis");
    const auto at = girih::check(op, {q, k, v, a, gamma, g, state_first_k, state_k, state_first_v, state_v,
                                      state_position, cu_seqlens, chunk, phi, f});
    GIRIH_CHECK(
        given(state_k) && given(state_v),
        "trellis: state is None but should be a TrellisState or the first memories A1 [H, M, D] and A2 "
        "[H, M, V]: there is no zero start");
    GIRIH_CHECK(given(state_first_k) == given(state_first_v),
                "trellis: state_first_k and state_first_v come together; only ",
                given(state_first_k) ? "state_first_k" : "state_first_v", " is given");
    GIRIH_CHECK(given(state_first_k) || !given(state_position),
                "trellis: state_first_k is None but should be the memory at the start of the chunk when "
                "state_position is given");
    return {at["B"], at["T"], at["HQ"], at["H"], at["D"], at["V"], at["M"], at["N"]};
  }

  Path path(const Tensor& q) const {
    if (q.scalar_type() == at::kDouble) return aten(kFloat64);
    const bool values = memories == 2;
    if (wider_than(kExactWidest)) {
      return aten(values ? "slots, keys or values wider than 256" : "slots or keys wider than 256");
    }
    if (q.scalar_type() == at::kFloat) return exact(kFloat32);
    if (weighted && softmax) return exact("phi_weight is given with phi='softmax'");
    if (!wider_than(kWidest)) return tensor_cores();
    return exact(values ? "slots, keys or values wider than 128" : "slots or keys wider than 128");
  }
  static Path step_path(const Tensor& q) {
    return q.scalar_type() == at::kDouble ? aten(kFloat64) : exact(kMemoryBound);
  }

  bool wider_than(int64_t width) const { return M > width || D > width || V > width; }

  // The saved tensors of forward; {0} each without kernels.
  //   tensor cores, per query head: memories, the memory before every chunk in tiles; z and u of every token;
  //     fit, the statistics of the rows of z
  //   fp32 kernels, per head, in fp32: memories, the transposed memory before every 64 tokens; z; s = -gamma
  //     u
  // The second entry of memories is {0} with one memory.
  struct Kept {
    std::vector<c10::SymInt> memories[2], tokens, fit;
    at::ScalarType type;  // of all but fit
  };
  Kept saved(const Tensor& q, const OptionalTensor& position, const OptionalTensor& cu_seqlens, int64_t chunk,
             bool save) const {
    const auto by = path(q);
    Kept kept{{{0}, {0}}, {0}, {0}, by == Path::Code::exact ? at::kFloat : q.scalar_type()};
    if (!save || by == Path::Code::aten) return kept;
    if (by == Path::Code::exact) {
      const auto pieces = kept_chunks(q, N, cu_seqlens, kKeptChunk);
      kept.memories[0] = {pieces, H, kept_width(D), kept_width(M)};
      if (memories == 2) kept.memories[1] = {pieces, H, kept_width(V), kept_width(M)};
      kept.tokens = {memories, B, T, H, kept_width(M)};
    } else {
      const auto chunks = kept_within(q, N, within_chunk(position, chunk), cu_seqlens, chunk);
      const int64_t tile = M <= 64 && D <= 64 && V <= 64 ? 64 : 128;
      kept.memories[0] = {chunks, HQ, tile, tile};
      if (memories == 2) kept.memories[1] = kept.memories[0];
      kept.tokens = {memories, B, T, HQ, kept_width(M)};
      kept.fit = {memories, B, T, HQ, weighted ? 8 : 4};
    }
    return kept;
  }
};

}  // namespace girih::trellis
