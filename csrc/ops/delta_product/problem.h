// What delta_product accepts: sizes in the paper's letters.
#pragma once

#include <algorithm>

#include "../kept_states.h"

namespace girih::delta_product {

constexpr KernelSizes kDelta{256, 256};
constexpr int64_t kMostSteps = 16, kPreparedBytes = 11648;  // on the tensor cores: n; a chunk of a head

using Between = std::optional<std::string_view>;

struct Problem {
  c10::SymInt B, T, HQ, H, D, V, N;

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                       const OptionalTensor& g, const OptionalTensor& state_s,
                       const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t n,
                       std::optional<int64_t> chunk, const Between& between_chunks) {
    const Check check("delta_product", "q", q);
    check.at_least_one("n", n);
    const auto s = check.qkv(q, k, v, cu_seqlens, {.rows = "T * n"}, n);
    const Problem p{s.B, s.T, s.HQ, s.H, s.key, s.value, s.N};
    const auto rows = p.T * n;
    check.floating("beta", beta);
    if (beta.dim() == 4) {
      check.shape("beta", beta, {p.B, rows, p.H, p.D}, "[B, T * n, H] or [B, T * n, H, D]");
      GIRIH_CHECK(p.D.sym_eq(p.V).expect_true(__FILE__, __LINE__),
                  "delta_product: beta is a vector [B, T * n, H, D], so v's width V should be D = ", p.D,
                  " but is ", p.V);
    } else {
      check.shape("beta", beta, {p.B, rows, p.H}, "[B, T * n, H] or [B, T * n, H, D]");
    }
    check.per_head("g", g, s);
    if (between_chunks) {
      check.one_of("between_chunks", *between_chunks, {"gelu", "tanh"});
      GIRIH_CHECK(
          chunk,
          "delta_product: chunk is None but should be 1 to 64 with between_chunks: it is part of the model");
      GIRIH_CHECK(*chunk >= 1 && *chunk <= 64, "delta_product: chunk is ", *chunk, " but should be 1 to 64");
    } else {
      GIRIH_CHECK(!chunk, "delta_product: chunk is ", *chunk,
                  " but should be None without between_chunks: it cannot change the result");
    }
    check.state("state_s", state_s, {p.N, p.H, p.D, p.V}, "[N, H, D, V]");
    GIRIH_CHECK(given(state_position) == (between_chunks.has_value() && given(state_s)),
                "delta_product: state_position is ", given(state_position) ? "given" : "None",
                " but should be given exactly when state_s and between_chunks are");
    if (given(state_position)) check.position(*state_position, p.N);
    return p;
  }

  // Which kernels take a call of these sizes and options on a GPU. The exact ones have more than 64 rows of a
  // token nowhere to put.
  enum class Kernels { none, tensor_cores, exact };
  Kernels kernels(const Tensor& q, const Tensor& beta, int64_t n, const Between& between_chunks) const {
    if (D > kDelta.columns || V > kDelta.rows || n > kKeptChunk) return Kernels::none;
    if (c10::isReducedFloatingType(q.scalar_type()) && beta.dim() == 3 && !between_chunks && n <= kMostSteps)
      return Kernels::tensor_cores;
    return q.scalar_type() == at::kDouble ? Kernels::none : Kernels::exact;
  }

  // What forward keeps for backward, {0} each without kernels. Those of the tensor cores keep the state
  // before every chunk of 64 / n tokens, transposed, and what they prepare of every chunk, in bytes; the
  // exact ones the states in fp32, before every piece (exact_pieces), and u, the rows that the steps write.
  struct Saved {
    std::vector<c10::SymInt> states, prepared;
    at::ScalarType states_type, prepared_type;
  };
  Saved saved(const Tensor& q, const Tensor& beta, const OptionalTensor& cu_seqlens, int64_t n,
              std::optional<int64_t> chunk, const Between& between_chunks, bool save) const {
    const auto which = kernels(q, beta, n, between_chunks);
    const auto chunk_of_kernels = n > kKeptChunk ? 1 : kKeptChunk / n;
    Saved kept{{0}, {0}, q.scalar_type(), at::kByte};
    if (which == Kernels::exact) kept.states_type = kept.prepared_type = at::kFloat;
    if (!save || which == Kernels::none) return kept;
    if (which == Kernels::tensor_cores) {
      kept.states = kept_states(q, N, H, {V}, D, cu_seqlens, kDelta, chunk_of_kernels);
      kept.prepared = {kept_chunks(q, N, cu_seqlens, chunk_of_kernels), H, kPreparedBytes};
    } else {
      kept.states = {exact_pieces(cu_seqlens, chunk_of_kernels, between_chunks ? chunk : std::nullopt), H, V,
                     in_fours(D)};
      kept.prepared = {B, T * n, H, in_fours(V)};
    }
    return kept;
  }

 private:
  static c10::SymInt in_fours(const c10::SymInt& width) { return (width + 3) / 4 * 4; }

  // Pieces of up to `tokens` tokens. With a function between chunks they are pieces of chunks, a sequence may
  // begin in the middle of one, and there is one more state, after its last.
  c10::SymInt exact_pieces(const OptionalTensor& cu_seqlens, int64_t tokens,
                           std::optional<int64_t> chunk) const {
    const bool packed = given(cu_seqlens) && cu_seqlens->dim() == 1;
    if (!chunk) return packed ? T / tokens + N : B * ((T + tokens - 1) / tokens);
    const auto pieces = (*chunk + std::min(tokens, *chunk) - 1) / std::min(tokens, *chunk);
    return (packed ? T / *chunk + N * 3 : B * ((T + 2 * *chunk - 2) / *chunk + 1)) * pieces;
  }
};

}  // namespace girih::delta_product
