// The conditions of delta_product beyond its declaration, its path, and its saved tensors.
#pragma once

#include <algorithm>

#include "../arguments/path.h"
#include "../chunks/saved_states.h"

namespace girih::delta_product {

constexpr int64_t kMaxWidth = 256;  // D and V of the kernels
constexpr int64_t kMaxSteps = 16,
                  kPreparedBytes = 11648;      // tensor cores: largest n; bytes per chunk and head
constexpr int64_t kMaxChannelBetaWidth = 128;  // D of the tensor-core kernels with one beta per channel
constexpr int64_t kMaxStepRows = 8;  // step kernel: largest n, and largest number of query heads per memory
// Segments of a scan: multiprocessors of a device, chunks of the shortest segment, and the smallest number of
// segments.
constexpr int64_t kMultiprocessors = 132, kMinChunks = 16, kMinSegments = 3;

using Between = std::optional<std::string_view>;

struct Problem {
  c10::SymInt B, T, HQ, H, D, V, N;

  c10::SymInt output_heads() const { return HQ.max(H); }

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                       const OptionalTensor& g, const OptionalTensor& state_s,
                       const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t n,
                       std::optional<double> scale, bool l2norm_qk, std::optional<int64_t> chunk,
                       const Between& between_chunks) {
    static const auto& op = get_operator("delta_product");
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
    GIRIH_CHECK(
        is_defined(state_position) == (between_chunks.has_value() && is_defined(state_s)),
        "delta_product: state_position is ",
        is_defined(state_position) ? "a tensor but should be None: " : "None but should be a tensor: ",
        "it belongs to a state if and only if between_chunks is set");
    return p;
  }

  Path path(const Tensor& q, const Tensor& beta, const OptionalTensor& g, int64_t n, bool l2norm_qk,
            const Between& between_chunks) const {
    static_assert(kMaxWidth == 256 && kMaxSteps == 16 && kChunkTokens == 64 && kMaxChannelBetaWidth == 128);
    if (q.scalar_type() == at::kDouble) return aten(kNoFloat64Kernels);
    if (D > kMaxWidth || V > kMaxWidth) return aten("keys or values wider than 256");
    if (n > kChunkTokens) return aten("more than 64 steps a token");  // a block has 64 rows
    if (q.scalar_type() == at::kFloat) return fp32(k3xTF32);
    if (between_chunks) return fp32("between_chunks is set");
    if (n > kMaxSteps) return fp32("more than 16 steps a token");
    if (beta.dim() == 4) {
      if (is_defined(g)) return fp32("a beta for every channel with gates");
      if (l2norm_qk) return fp32("a beta for every channel with l2norm_qk");
      if (D > kMaxChannelBetaWidth) return fp32("a beta for every channel and keys wider than 128");
    }
    return tensor_cores();
  }
  Path step_path(const Tensor& q, int64_t n, const Between& between_chunks) const {
    static_assert(kMaxWidth == 256 && kMaxStepRows == 8);
    if (q.scalar_type() == at::kDouble) return aten(kNoFloat64Kernels);
    if (between_chunks) return aten("between_chunks is set");
    if (D > kMaxWidth) return aten("keys wider than 256");
    if (n > kMaxStepRows || HQ > kMaxStepRows * H)
      return aten("more than 8 steps per token or 8 queries per memory");
    return fp32(kMemoryBound);
  }

  // The saved tensors of forward; {0} each without kernels.
  //   tensor cores: states, the transposed state before every chunk of 64 / n tokens; prepared, what
  //     delta_prepare writes per chunk; transitions of the segments in fp32, if the sequences are cut into
  //     segments
  //   fp32 kernels: states, the fp32 state before every chunk (count_fp32_states); prepared, u, the rows that
  //   the
  //     steps write
  struct SavedShapes {
    std::vector<c10::SymInt> states, prepared, transitions;
    at::ScalarType states_type, prepared_type;
    bool has_saved = false;
  };
  SavedShapes saved(const Tensor& q, const Tensor& beta, const OptionalTensor& g,
                    const OptionalTensor& cu_seqlens, int64_t n, bool l2norm_qk, std::optional<int64_t> chunk,
                    const Between& between_chunks, bool save) const {
    const auto by = path(q, beta, g, n, l2norm_qk, between_chunks);
    const auto kernel_chunk = n > kChunkTokens ? 1 : kChunkTokens / n;
    SavedShapes saved_shapes{{0}, {0}, {0}, q.scalar_type(), at::kByte};
    if (by == Path::Code::fp32) saved_shapes.states_type = saved_shapes.prepared_type = at::kFloat;
    if (!save || by == Path::Code::aten) return saved_shapes;
    saved_shapes.has_saved = true;
    if (by == Path::Code::tensor_cores) {
      saved_shapes.states = saved_states_shape(q, N, H, {V}, D, cu_seqlens, kernel_chunk);
      saved_shapes.prepared = {count_chunks(q, N, cu_seqlens, kernel_chunk), H, kPreparedBytes};
      saved_shapes.transitions = {segments(cu_seqlens, kernel_chunk), H, padded_width(D), padded_width(D)};
    } else {
      saved_shapes.states = {
          count_fp32_states(cu_seqlens, kernel_chunk, between_chunks ? chunk : std::nullopt), H, V,
          round_up_to_4(D)};
      saved_shapes.prepared = {B, T * n, H, round_up_to_4(V)};
    }
    return saved_shapes;
  }

 private:
  // The number of segments of all sequences, as kernels/tile/segments.h computes it; 0 if the cut has too few
  // segments. Without a branch on sizes: torch.compile would guard on it.
  c10::SymInt segments(const OptionalTensor& cu_seqlens, int64_t chunk) const {
    const auto up = [](const c10::SymInt& x, const c10::SymInt& by) { return (x + by - 1) / by; };
    const auto sequences = N.max(1), chunks = up(up(B * T, sequences), chunk);
    const auto each = (chunks / kMinChunks).min(c10::SymInt(kMultiprocessors) / (sequences * H * up(V, 64)));
    const auto tokens = (up(chunks, each.max(1)) * chunk).max(chunk);
    return (each / kMinSegments).min(1) * count_chunks_of(cu_seqlens, tokens);
  }

  static c10::SymInt round_up_to_4(const c10::SymInt& width) { return (width + 3) / 4 * 4; }

  static bool is_packed(const OptionalTensor& cu_seqlens) {
    return is_defined(cu_seqlens) && cu_seqlens->dim() == 1;
  }

  // The number of chunks of `tokens` tokens of all sequences; with cu_seqlens [N + 1] an upper bound.
  c10::SymInt count_chunks_of(const OptionalTensor& cu_seqlens, const c10::SymInt& tokens) const {
    return is_packed(cu_seqlens) ? T / tokens + N : B * ((T + tokens - 1) / tokens);
  }

  // The number of states of the fp32 kernels. With between_chunks, every chunk of the model is cut into
  // chunks of at most `tokens` tokens, a sequence may begin inside a chunk, and there is one more state,
  // after the last chunk.
  c10::SymInt count_fp32_states(const OptionalTensor& cu_seqlens, int64_t tokens,
                                std::optional<int64_t> chunk) const {
    if (!chunk) return count_chunks_of(cu_seqlens, tokens);
    const auto states_per_chunk = (*chunk + std::min(tokens, *chunk) - 1) / std::min(tokens, *chunk);
    return (is_packed(cu_seqlens) ? T / *chunk + N * 3 : B * ((T + 2 * *chunk - 2) / *chunk + 1)) *
           states_per_chunk;
  }
};

}  // namespace girih::delta_product
