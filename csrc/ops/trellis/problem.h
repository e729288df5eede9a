// The arguments of trellis, their conditions beyond the declaration, the path, and the saved tensors. The
// structs of ttt are derived from these, with one memory and V = 0.
#pragma once

#include "../arguments/path.h"
#include "../chunks/touched_chunks.h"
#include "../registration/call.h"

namespace girih::trellis {

constexpr int64_t kMaxWidth = 128;      // M, D and V of the tensor-core kernels
constexpr int64_t kMaxFp32Width = 256;  // M, D and V of the fp32 kernels

// Arrays of two have an entry for each memory: 0 keys, 1 values. ttt has the memory of keys only.
struct Call {
  static constexpr const char* name = "trellis";
  static constexpr size_t data_count = 6;
  using StepState = Types<Tensor, Tensor, Tensor, Tensor, Tensor>;
  static auto arguments(auto& c) {
    return std::tie(c.q, c.x[0], c.x[1], c.a, c.gamma, c.g, c.chunk_start[0], c.memory[0], c.chunk_start[1],
                    c.memory[1], c.position, c.cu_seqlens, c.chunk, c.phi, c.f);
  }

  Tensor q, x[2], a, gamma;      // x: k and v; v is undefined in ttt
  OptionalTensor g, phi_weight;  // phi_weight: ttt only
  // State: A' at the start of the chunk of the first token, and A before the first token. A step writes both
  // in place.
  OptionalTensor chunk_start[2], memory[2];
  OptionalTensor position, cu_seqlens;
  int64_t chunk;
  std::string_view phi, f;

  int memory_count() const { return x[1].defined() ? 2 : 1; }
  int64_t width(int m) const { return x[m].defined() ? x[m].size(3) : 0; }
  int64_t output_width() const { return memory_count() == 2 ? width(1) : a.size(3); }
  // The position if the chunk is longer than one token. A chunk of one token always begins with its token, so
  // A' = A and chunk_start is not read.
  OptionalTensor position_in_chunk() const { return chunk > 1 ? position : std::nullopt; }
};

struct Problem {
  c10::SymInt B, T, HQ, H, D, V, M, N;
  int memory_count = 2;
  bool has_phi_weight = false;  // ttt only

  static Problem check(const Call& call) {
    const auto sizes = check_declaration(call);
    const bool has_k = is_defined(call.chunk_start[0]), has_v = is_defined(call.chunk_start[1]);
    GIRIH_CHECK(
        is_defined(call.memory[0]) && is_defined(call.memory[1]),
        "trellis: state is None but should be a TrellisState or the first memories A1 [H, M, D] and A2 "
        "[H, M, V]: there is no zero start");
    GIRIH_CHECK(has_k == has_v, "trellis: ", has_k ? "state_first_v" : "state_first_k",
                " is None but should be a tensor: a state has both state_first_k and state_first_v");
    GIRIH_CHECK(has_k || !is_defined(call.position),
                "trellis: state_first_k is None but should be the memory at the start of the chunk when "
                "state_position is a tensor");
    return {sizes["B"], sizes["T"], sizes["HQ"], sizes["H"], sizes["D"], sizes["V"], sizes["M"], sizes["N"]};
  }

  Path path(const Call& call) const {
    const auto type = call.q.scalar_type();
    if (type == at::kDouble) return aten(kNoFloat64Kernels);
    const bool has_values = memory_count == 2;
    if (is_wider_than(kMaxFp32Width)) {
      return aten(has_values ? "slots, keys or values wider than 256" : "slots or keys wider than 256");
    }
    if (type == at::kFloat) return fp32(kFloat32Reason);
    if (has_phi_weight && call.phi == "softmax") return fp32("phi_weight with phi='softmax'");
    if (!is_wider_than(kMaxWidth)) return tensor_cores();
    return fp32(has_values ? "slots, keys or values wider than 128" : "slots or keys wider than 128");
  }
  static Path step_path(const Call& call) {
    return call.q.scalar_type() == at::kDouble ? aten(kNoFloat64Kernels) : fp32(kMemoryBound);
  }

  bool is_wider_than(int64_t width) const { return M > width || D > width || V > width; }

  // The saved tensors of forward; {0} each without kernels.
  //   tensor cores, per query head: chunk_memories, the memory before every chunk in tiles; z and u of every
  //     token; map_stats, the statistics of the rows of z by which phi is computed again (saved as `fit`)
  //   fp32 kernels, per head, in fp32: chunk_memories, the transposed memory before every 64 tokens; z; and
  //   as
  //     u the products s = -gamma u
  // The second entry of chunk_memories is {0} with one memory.
  struct SavedShapes {
    std::vector<c10::SymInt> chunk_memories[2], token_rows, map_stats;  // token_rows: z and u
    at::ScalarType type;                                                // of all but map_stats
  };
  SavedShapes saved(const Call& call, bool save) const {
    const auto chosen = path(call);
    const auto& q = call.q;
    SavedShapes shapes{{{0}, {0}}, {0}, {0}, chosen == Path::Code::fp32 ? at::kFloat : q.scalar_type()};
    if (!save || chosen == Path::Code::aten) return shapes;
    if (chosen == Path::Code::fp32) {
      const auto ranges = count_chunks(q, N, call.cu_seqlens, kChunkTokens);
      shapes.chunk_memories[0] = {ranges, H, padded_width(D), padded_width(M)};
      if (memory_count == 2) shapes.chunk_memories[1] = {ranges, H, padded_width(V), padded_width(M)};
      shapes.token_rows = {memory_count, B, T, H, padded_width(M)};
    } else {
      const auto chunks = count_touched_chunks(q, N, call.position_in_chunk(), call.cu_seqlens, call.chunk);
      const int64_t tile = M <= 64 && D <= 64 && V <= 64 ? 64 : 128;
      shapes.chunk_memories[0] = {chunks, HQ, tile, tile};
      if (memory_count == 2) shapes.chunk_memories[1] = shapes.chunk_memories[0];
      shapes.token_rows = {memory_count, B, T, HQ, padded_width(M)};
      shapes.map_stats = {memory_count, B, T, HQ, has_phi_weight ? 8 : 4};
    }
    return shapes;
  }
};

}  // namespace girih::trellis
