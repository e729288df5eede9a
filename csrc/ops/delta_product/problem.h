// The conditions of delta_product beyond its declaration, its path, and its saved tensors.
#pragma once

#include <algorithm>

#include "../arguments/path.h"
#include "../chunks/saved_states.h"

namespace girih::delta_product {

constexpr int64_t kWidest = 256;  // D and V of the kernels
constexpr int64_t kMostSteps = 16,
                  kPreparedBytes = 11648;  // tensor cores: largest n; bytes per chunk and head
constexpr int64_t kWidestVector = 128;     // D of the tensor-core kernels with one beta per channel
constexpr int64_t kStepMost = 8;  // step kernel: largest n, and largest number of query heads per memory
// Segments of a scan: multiprocessors of a device, chunks of the shortest segment, and the smallest number of
// segments.
constexpr int64_t kCard = 132, kLeastChunks = 16, kLeastSegments = 3;

using Between = std::optional<std::string_view>;

struct Problem {
  c10::SymInt B, T, HQ, H, D, V, N;

  c10::SymInt output_heads() const { return HQ.max(H); }

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                       const OptionalTensor& g, const OptionalTensor& state_s,
                       const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t n,
                       std::optional<double> scale, bool l2norm_qk, std::optional<int64_t> chunk,
                       const Between& between_chunks) {
    static const auto& op = describe("delta_product");
    const auto at = girih::check(op, {q, k, v, beta, g, state_s, state_position, cu_seqlens, n, scale,
                                      l2norm_qk, chunk, between_chunks});
    const Problem p{at["B"], at["T"], at["HQ"], at["H"], at["D"], at["V"], at["N"]};
    GIRIH_CHECK(beta.dim() == 3 || p.D.sym_eq(p.V).expect_true(__FILE__, __LINE__),
                "delta_product: beta is a vector [B, T * n, H, D], so v's width V should be D = ", p.D,
                " but is ", p.V);
    GIRIH_CHECK(!between_chunks || chunk,
                "delta_product: chunk is None but should be 1 to 64 with between_chunks: it is part of the "
                "model");
    GIRIH_CHECK(between_chunks || !chunk, "delta_product: chunk is ", chunk.value_or(0),
                " but should be None without between_chunks: it cannot change the result");
    GIRIH_CHECK(given(state_position) == (between_chunks.has_value() && given(state_s)),
                "delta_product: state_position is ",
                given(state_position) ? "a tensor but should be None: " : "None but should be a tensor: ",
                "it belongs to a state if and only if between_chunks is set");
    return p;
  }

  Path path(const Tensor& q, const Tensor& beta, const OptionalTensor& g, int64_t n, bool l2norm_qk,
            const Between& between_chunks) const {
    static_assert(kWidest == 256 && kMostSteps == 16 && kKeptChunk == 64 && kWidestVector == 128);
    if (q.scalar_type() == at::kDouble) return aten(kFloat64);
    if (D > kWidest || V > kWidest) return aten("keys or values wider than 256");
    if (n > kKeptChunk) return aten("more than 64 steps a token");  // a block has 64 rows
    if (q.scalar_type() == at::kFloat) return exact(kSplitFloat32);
    if (between_chunks) return exact("between_chunks is set");
    if (n > kMostSteps) return exact("more than 16 steps a token");
    if (beta.dim() == 4) {
      if (given(g)) return exact("a beta for every channel with gates");
      if (l2norm_qk) return exact("a beta for every channel with l2norm_qk");
      if (D > kWidestVector) return exact("a beta for every channel and keys wider than 128");
    }
    return tensor_cores();
  }
  Path step_path(const Tensor& q, int64_t n, const Between& between_chunks) const {
    static_assert(kWidest == 256 && kStepMost == 8);
    if (q.scalar_type() == at::kDouble) return aten(kFloat64);
    if (between_chunks) return aten("between_chunks is set");
    if (D > kWidest) return aten("keys wider than 256");
    if (n > kStepMost || HQ > kStepMost * H)
      return aten("more than 8 steps per token or 8 queries per memory");
    return exact(kMemoryBound);
  }

  // The saved tensors of forward; {0} each without kernels.
  //   tensor cores: states, the transposed state before every chunk of 64 / n tokens; prepared, what
  //     delta_prepare writes per chunk; transitions of the segments in fp32, if the sequences are cut into
  //     segments
  //   fp32 kernels: states, the fp32 state before every chunk (exact_pieces); prepared, u, the rows that the
  //     steps write
  struct Saved {
    std::vector<c10::SymInt> states, prepared, transitions;
    at::ScalarType states_type, prepared_type;
    bool any = false;
  };
  Saved saved(const Tensor& q, const Tensor& beta, const OptionalTensor& g, const OptionalTensor& cu_seqlens,
              int64_t n, bool l2norm_qk, std::optional<int64_t> chunk, const Between& between_chunks,
              bool save) const {
    const auto by = path(q, beta, g, n, l2norm_qk, between_chunks);
    const auto chunk_of_kernels = n > kKeptChunk ? 1 : kKeptChunk / n;
    Saved kept{{0}, {0}, {0}, q.scalar_type(), at::kByte};
    if (by == Path::Code::exact) kept.states_type = kept.prepared_type = at::kFloat;
    if (!save || by == Path::Code::aten) return kept;
    kept.any = true;
    if (by == Path::Code::tensor_cores) {
      kept.states = kept_states(q, N, H, {V}, D, cu_seqlens, chunk_of_kernels);
      kept.prepared = {kept_chunks(q, N, cu_seqlens, chunk_of_kernels), H, kPreparedBytes};
      kept.transitions = {segments(cu_seqlens, chunk_of_kernels), H, kept_width(D), kept_width(D)};
    } else {
      kept.states = {exact_pieces(cu_seqlens, chunk_of_kernels, between_chunks ? chunk : std::nullopt), H, V,
                     in_fours(D)};
      kept.prepared = {B, T * n, H, in_fours(V)};
    }
    return kept;
  }

 private:
  // The number of segments of all sequences, as kernels/tile/segments.h computes it; 0 if the cut has too few
  // segments. Without a branch on sizes: torch.compile would guard on it.
  c10::SymInt segments(const OptionalTensor& cu_seqlens, int64_t chunk) const {
    const auto up = [](const c10::SymInt& x, const c10::SymInt& by) { return (x + by - 1) / by; };
    const auto sequences = N.max(1), chunks = up(up(B * T, sequences), chunk);
    const auto each = (chunks / kLeastChunks).min(c10::SymInt(kCard) / (sequences * H * up(V, 64)));
    const auto tokens = (up(chunks, each.max(1)) * chunk).max(chunk);
    return (each / kLeastSegments).min(1) * pieces(cu_seqlens, tokens);
  }

  static c10::SymInt in_fours(const c10::SymInt& width) { return (width + 3) / 4 * 4; }

  static bool packed(const OptionalTensor& cu_seqlens) { return given(cu_seqlens) && cu_seqlens->dim() == 1; }

  // The number of chunks of `tokens` tokens of all sequences; with cu_seqlens [N + 1] an upper bound.
  c10::SymInt pieces(const OptionalTensor& cu_seqlens, const c10::SymInt& tokens) const {
    return packed(cu_seqlens) ? T / tokens + N : B * ((T + tokens - 1) / tokens);
  }

  // The number of states of the fp32 kernels. With between_chunks, every chunk of the model is cut into
  // chunks of at most `tokens` tokens, a sequence may begin inside a chunk, and there is one more state,
  // after the last chunk.
  c10::SymInt exact_pieces(const OptionalTensor& cu_seqlens, int64_t tokens,
                           std::optional<int64_t> chunk) const {
    if (!chunk) return pieces(cu_seqlens, tokens);
    const auto of_a_chunk = (*chunk + std::min(tokens, *chunk) - 1) / std::min(tokens, *chunk);
    return (packed(cu_seqlens) ? T / *chunk + N * 3 : B * ((T + 2 * *chunk - 2) / *chunk + 1)) * of_a_chunk;
  }
};

}  // namespace girih::delta_product
