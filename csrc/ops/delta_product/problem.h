// What delta_product asks of a call beyond its description, which kernels take it, and what forward keeps.
#pragma once

#include <algorithm>

#include "../arguments/path.h"
#include "../chunks/saved_states.h"

namespace girih::delta_product {

constexpr int64_t kWidest = 256;                            // D and V of all kernels
constexpr int64_t kMostSteps = 16, kPreparedBytes = 11648;  // on the tensor cores: n; a chunk of a head
constexpr int64_t kWidestVector = 128;                      // D of those with a beta for every channel
constexpr int64_t kStepMost = 8;  // of the kernel for one token: n, and query heads a memory head
// Where sequences are cut into segments: a card's multiprocessors, chunks of the shortest segment, and how
// many there are at least.
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
                "delta_product: state_position is ", given(state_position) ? "given" : "None",
                " but should be given exactly when state_s and between_chunks are");
    return p;
  }

  Path path(const Tensor& q, const Tensor& beta, const OptionalTensor& g, int64_t n, bool l2norm_qk,
            const Between& between_chunks) const {
    static_assert(kWidest == 256 && kMostSteps == 16 && kKeptChunk == 64 && kWidestVector == 128);
    if (q.scalar_type() == at::kDouble) return aten(kFloat64);
    if (D > kWidest || V > kWidest) return aten("keys or values wider than 256");
    if (n > kKeptChunk) return aten("more than 64 steps a token");  // their rows fit no block
    if (q.scalar_type() == at::kFloat) return exact(kSplitFloat32);
    if (between_chunks) return exact("between_chunks is given");
    if (n > kMostSteps) return exact("more than 16 steps a token");
    if (beta.dim() == 4) {
      if (given(g)) return exact("a beta for every channel with gates");
      if (l2norm_qk) return exact("a beta for every channel with l2norm_qk");
      if (D > kWidestVector) return exact("a beta for every channel of more than 128");
    }
    return tensor_cores();
  }
  Path step_path(const Tensor& q, int64_t n, const Between& between_chunks) const {
    static_assert(kWidest == 256 && kStepMost == 8);
    if (q.scalar_type() == at::kDouble) return aten(kFloat64);
    if (between_chunks) return aten("between_chunks is given");
    if (D > kWidest) return aten("keys wider than 256");
    if (n > kStepMost || HQ > kStepMost * H) return aten("more than 8 steps a token or 8 queries a memory");
    return exact(kMemoryBound);
  }

  // What forward keeps for backward, {0} each without kernels. Those of the tensor cores keep the state
  // before every chunk of 64 / n tokens, transposed, what they prepare of every chunk, in bytes, and where
  // few heads cut sequences into segments these segments' transitions, in fp32; the exact ones the states in
  // fp32, before every piece (exact_pieces), and u, the rows that the steps write.
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
  // Segments of all sequences, as kernels/tile/segments.h cuts them: 0 where one would have too few. Without
  // a branch on sizes, which a compiler would hold to.
  c10::SymInt segments(const OptionalTensor& cu_seqlens, int64_t chunk) const {
    const auto up = [](const c10::SymInt& x, const c10::SymInt& by) { return (x + by - 1) / by; };
    const auto sequences = N.max(1), chunks = up(up(B * T, sequences), chunk);
    const auto each = (chunks / kLeastChunks).min(c10::SymInt(kCard) / (sequences * H * up(V, 64)));
    const auto tokens = (up(chunks, each.max(1)) * chunk).max(chunk);
    return (each / kLeastSegments).min(1) * pieces(cu_seqlens, tokens);
  }

  static c10::SymInt in_fours(const c10::SymInt& width) { return (width + 3) / 4 * 4; }

  static bool packed(const OptionalTensor& cu_seqlens) { return given(cu_seqlens) && cu_seqlens->dim() == 1; }

  // Pieces of up to `tokens` tokens, of all sequences; packed, room for as many as there can be.
  c10::SymInt pieces(const OptionalTensor& cu_seqlens, const c10::SymInt& tokens) const {
    return packed(cu_seqlens) ? T / tokens + N : B * ((T + tokens - 1) / tokens);
  }

  // Those of the exact kernels. With a function between chunks they are pieces of chunks, a sequence may
  // begin in the middle of one, and there is one more state, after its last.
  c10::SymInt exact_pieces(const OptionalTensor& cu_seqlens, int64_t tokens,
                           std::optional<int64_t> chunk) const {
    if (!chunk) return pieces(cu_seqlens, tokens);
    const auto of_a_chunk = (*chunk + std::min(tokens, *chunk) - 1) / std::min(tokens, *chunk);
    return (packed(cu_seqlens) ? T / *chunk + N * 3 : B * ((T + 2 * *chunk - 2) / *chunk + 1)) * of_a_chunk;
  }
};

}  // namespace girih::delta_product
