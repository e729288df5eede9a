// The arguments of delta_product, their conditions beyond those of csrc/schema.cpp, the path, and the saved
// tensors. A step is one of the n delta-rule updates of a token. delta_product_step is another step: it reads
// one token in decoding.
#pragma once

#include <algorithm>

#include "../../../kernels/tile/cuts.h"
#include "../arguments/path.h"
#include "../chunks/saved_states.h"
#include "../registration/call.h"

namespace girih::delta_product {

constexpr int64_t kMaxWidth = 256;             // largest D and V of the kernels
constexpr int64_t kMaxSteps = 16;              // largest n of the tensor-core kernels
constexpr int64_t kMaxChannelBetaWidth = 128;  // largest D of the tensor-core kernels with a beta per channel
constexpr int64_t kPreparedBytes = 11648;  // tensor cores: bytes that delta_prepare writes per chunk and head
constexpr int64_t kStepLimit = 8;    // kernel of delta_product_step: largest n, and query heads per memory
constexpr int64_t kMinSegments = 3;  // the least number of segments of a sequence that the scan cuts

struct Call {
  static constexpr const char* name = "delta_product";
  static constexpr size_t data_count = 5;
  using StepState = Types<Tensor, OptionalTensor>;
  static auto arguments(auto& c) {
    return std::tie(c.q, c.k, c.v, c.beta, c.g, c.state_s, c.state_position, c.cu_seqlens, c.n, c.scale,
                    c.l2norm_qk, c.chunk, c.between_chunks);
  }

  Tensor q, k, v, beta;
  OptionalTensor g, state_s, state_position, cu_seqlens;
  int64_t n;
  std::optional<double> scale;
  bool l2norm_qk;
  std::optional<int64_t> chunk;
  std::optional<std::string_view> between_chunks;

  // Whether beta is [B, T * n, H, D], one value per channel, and not [B, T * n, H], one per step.
  bool has_channel_beta() const { return beta.dim() == 4; }
  double query_scale() const { return scale_or_default(scale, q.size(3)); }
};

struct Problem {
  c10::SymInt B, T, HQ, H, D, V, N;

  c10::SymInt output_heads() const { return HQ.max(H); }

  static Problem check(const Call& call) {
    const auto sizes = check_declaration(call);
    const Problem p{sizes["B"], sizes["T"], sizes["HQ"], sizes["H"], sizes["D"], sizes["V"], sizes["N"]};
    const bool has_position = is_defined(call.state_position);
    GIRIH_CHECK(!call.has_channel_beta() || p.D.sym_eq(p.V).expect_true(__FILE__, __LINE__),
                "delta_product: beta is a vector [B, T * n, H, D], so v's width V should be D = ", p.D,
                " but is ", p.V);
    GIRIH_CHECK(!call.between_chunks || call.chunk,
                "delta_product: chunk is None but should be 1 to 64 with between_chunks, which is applied to "
                "the memory after every chunk");
    GIRIH_CHECK(call.between_chunks || !call.chunk, "delta_product: chunk is ", call.chunk.value_or(0),
                " but should be None without between_chunks: it cannot change the result");
    GIRIH_CHECK(has_position == (call.between_chunks.has_value() && is_defined(call.state_s)),
                "delta_product: state_position is ",
                has_position ? "a tensor but should be None: " : "None but should be a tensor: ",
                "it belongs to a state if and only if between_chunks is set");
    return p;
  }

  Path path(const Call& call) const {
    // The numbers in the texts below.
    static_assert(kMaxWidth == 256 && kMaxSteps == 16 && kChunkTokens == 64 && kMaxChannelBetaWidth == 128);
    if (call.q.scalar_type() == at::kDouble) return aten(kNoFloat64Kernels);
    if (D > kMaxWidth || V > kMaxWidth) return aten("keys or values wider than 256");
    // The kernels have chunks of 64 rows, one row per step, and do not split a token.
    if (call.n > kChunkTokens) return aten("more than 64 steps a token");
    if (call.q.scalar_type() == at::kFloat) return fp32(k3xTF32);
    if (call.between_chunks) return fp32("between_chunks is set");
    if (call.n > kMaxSteps) return fp32("more than 16 steps a token");
    if (call.has_channel_beta()) {
      if (is_defined(call.g)) return fp32("a beta for every channel with gates");
      if (call.l2norm_qk) return fp32("a beta for every channel with l2norm_qk");
      if (D > kMaxChannelBetaWidth) return fp32("a beta for every channel and keys wider than 128");
    }
    return tensor_cores();
  }
  Path step_path(const Call& call) const {
    static_assert(kMaxWidth == 256 && kStepLimit == 8);  // the numbers in the texts below
    if (call.q.scalar_type() == at::kDouble) return aten(kNoFloat64Kernels);
    if (call.between_chunks) return aten("between_chunks is set");
    if (D > kMaxWidth) return aten("keys wider than 256");
    if (call.n > kStepLimit || HQ > kStepLimit * H)
      return aten("more than 8 steps per token or 8 queries per memory");
    return fp32(kMemoryBound);
  }

  // Shapes and dtypes of the tensors that forward saves; shape {0} where nothing is saved.
  //   tensor cores
  //     states       the transposed state before every chunk of 64 / n tokens, in the dtype of q
  //     prepared     the bytes that delta_prepare writes per chunk
  //     transitions  the matrix [D, D] by which a segment multiplies the state, in fp32; {0} without
  //                  segments
  //   fp32 kernels
  //     states       the state before every chunk, in fp32 (count_fp32_states)
  //     prepared     u = w - S^T b of every step, in fp32
  struct SavedShapes {
    std::vector<c10::SymInt> states, prepared, transitions;
    at::ScalarType states_type, prepared_type;
    bool has_saved = false;
  };
  SavedShapes saved(const Call& call, bool save) const {
    const auto call_path = path(call);
    const auto kernel_chunk = call.n > kChunkTokens ? 1 : kChunkTokens / call.n;
    SavedShapes saved_shapes{{0}, {0}, {0}, call.q.scalar_type(), at::kByte};
    if (call_path == Path::Code::fp32) saved_shapes.states_type = saved_shapes.prepared_type = at::kFloat;
    if (!save || call_path == Path::Code::aten) return saved_shapes;
    saved_shapes.has_saved = true;
    if (call_path == Path::Code::tensor_cores) {
      saved_shapes.states = saved_states_shape(call.q, N, H, {V}, D, call.cu_seqlens, kernel_chunk);
      saved_shapes.prepared = {count_chunks(call.q, N, call.cu_seqlens, kernel_chunk), H, kPreparedBytes};
      saved_shapes.transitions = {count_segments(call.cu_seqlens, kernel_chunk), H, padded_width(D),
                                  padded_width(D)};
    } else {
      saved_shapes.states = {
          count_fp32_states(call.cu_seqlens, kernel_chunk, call.between_chunks ? call.chunk : std::nullopt),
          H, V, round_up_to_4(D)};
      saved_shapes.prepared = {B, T * call.n, H, round_up_to_4(V)};
    }
    return saved_shapes;
  }

 private:
  // The number of segments of all sequences, as kernels/tile/segments.h computes it; 0 if a sequence would
  // have fewer than kMinSegments segments. There is no branch on sizes, because torch.compile would guard on
  // it.
  c10::SymInt count_segments(const OptionalTensor& cu_seqlens, int64_t chunk) const {
    const auto ceil_div = [](const c10::SymInt& a, const c10::SymInt& b) { return (a + b - 1) / b; };
    const auto sequences = N.max(1), chunks = ceil_div(ceil_div(B * T, sequences), chunk);
    // Segments of a sequence: at least kMinSegmentChunks chunks each, and blocks for all multiprocessors.
    const auto segments =
        (chunks / kernels::kMinSegmentChunks)
            .min(c10::SymInt(kernels::kMultiprocessors) / (sequences * H * ceil_div(V, 64)));
    const auto segment_tokens = (ceil_div(chunks, segments.max(1)) * chunk).max(chunk);
    const auto is_cut = (segments / kMinSegments).min(1);  // 0 or 1
    return is_cut * count_chunks_of(cu_seqlens, segment_tokens);
  }

  static c10::SymInt round_up_to_4(const c10::SymInt& width) { return (width + 3) / 4 * 4; }

  // The number of chunks of `tokens` tokens of all sequences; with cu_seqlens [N + 1] an upper bound.
  c10::SymInt count_chunks_of(const OptionalTensor& cu_seqlens, const c10::SymInt& tokens) const {
    return is_packed(cu_seqlens) ? T / tokens + N : B * ((T + tokens - 1) / tokens);
  }

  // The number of states of the fp32 kernels, an upper bound. Without between_chunks: one per chunk of
  // `tokens` tokens. With between_chunks: the option `chunk` defines the chunks, and the kernels split each
  // into smaller chunks of at most `tokens` tokens, one state per smaller chunk. A sequence of T tokens that
  // begins inside a chunk touches at most (T + 2 chunk - 2) / chunk chunks, and has one more state after the
  // last chunk: at most T / chunk + 3 in total.
  c10::SymInt count_fp32_states(const OptionalTensor& cu_seqlens, int64_t tokens,
                                std::optional<int64_t> chunk) const {
    if (!chunk) return count_chunks_of(cu_seqlens, tokens);
    const auto states_per_chunk = (*chunk + std::min(tokens, *chunk) - 1) / std::min(tokens, *chunk);
    return (is_packed(cu_seqlens) ? T / *chunk + N * 3 : B * ((T + 2 * *chunk - 2) / *chunk + 1)) *
           states_per_chunk;
  }
};

}  // namespace girih::delta_product
