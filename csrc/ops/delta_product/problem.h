// What delta_product accepts: sizes in the paper's letters.
#pragma once

#include "../kept_states.h"

namespace girih::delta_product {

constexpr KernelSizes kDelta{256, 256};
constexpr int64_t kMostSteps = 16, kPreparedBytes = 11648;  // of the kernels: n; a chunk of a head

struct Problem {
  c10::SymInt B, T, HQ, H, D, V, N;

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                       const OptionalTensor& g, const OptionalTensor& state_s,
                       const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t n,
                       std::optional<int64_t> chunk, std::optional<std::string_view> between_chunks) {
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

  // Whether the kernels of the tensor cores take a call of these sizes and options.
  bool has_kernel(const Tensor& q, const Tensor& beta, int64_t n,
                  const std::optional<std::string_view>& between_chunks) const {
    return c10::isReducedFloatingType(q.scalar_type()) && beta.dim() == 3 && !between_chunks &&
           n <= kMostSteps && D <= kDelta.columns && V <= kDelta.rows;
  }

  // What forward keeps for backward: the state before every chunk of 64 / n tokens, transposed, and what the
  // kernels prepare of every chunk, in bytes; {0} each without them.
  struct Saved {
    std::vector<c10::SymInt> states, prepared;
  };
  Saved saved(const Tensor& q, const Tensor& beta, const OptionalTensor& cu_seqlens, int64_t n,
              const std::optional<std::string_view>& between_chunks, bool save) const {
    if (!save || !has_kernel(q, beta, n, between_chunks)) return {{0}, {0}};
    const auto chunk = kKeptChunk / n;
    return {kept_states(q, N, H, {V}, D, cu_seqlens, kDelta, chunk),
            {kept_chunks(q, N, cu_seqlens, chunk), H, kPreparedBytes}};
  }
};

}  // namespace girih::delta_product
