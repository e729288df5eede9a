// The kernels of gla: argument structs and launch functions.
#pragma once

#include "gla/gla.h"
#include "gsa/kernels.h"
#include "gsa/range.cuh"

namespace girih::kernels {

// A gate for each channel. The scan and the dkv kernel are those of gsa with memory[1] alone: (x, s) = (v,
// k), in reverse (do, q), and (x, read, y) = (v, do, q). The kernels below process single chunks.
struct GlaOutput {
  GsaShape shape;
  InputTensor<4> q, k, v;  // [B, T, HQ, M], [B, T, H, M], [B, T, H, V]
  InputTensor<4> g;        // [B, T, H, M] fp32
  const void* states;      // from the scan of v
  OutputTensor<4> o;       // [B, T, HQ, V]
};

struct GlaDq {
  GsaShape shape;
  InputTensor<4> q, k, v, g;
  const void* states;
  InputTensor<4> dout;           // [B, T, HQ, V]
  OutputTensor<4> dq;            // [B, T, HQ, M]
  GateGradientTerms gate_terms;  // with y = scale * q
  OutputTensor<4> q_scan;        // y_scan of GateGradientTerms, [B, T, HQ, M]
};

// A gate for each head, or no gate.
//
// Forward: o of (q, k, v); states[n] is the state before pair n.
//
// Reverse: o is dv; the arguments q, k, v are the keys, the queries and do. states[n] is the gradient of the
// state after pair n, from later tokens; initial is the gradient of the final state; final is the gradient of
// the initial state.
struct HeadRead {
  HeadShape shape;
  bool reverse;
  InputTensor<4> q, k;     // [B, T, HQ, D], [B, T, HK, D]; swapped in reverse
  InputTensor<4> v;        // [B, T, H, V]; in reverse [B, T, HO, V]
  InputTensor<4> initial;  // [N, H, V, D] fp32, in reverse HO heads; absent: zero
  OutputTensor<4> final;   // the same
  OutputTensor<4> o;       // [B, T, HO, V], dtype or fp32
  void* states;  // dtype [token_range_count(tokens, kHeadPair), H, V, D], in reverse HO heads; null: not
                 // written
};

struct HeadGradients {
  HeadShape shape;
  InputTensor<4> q, k, v, dout;  // [B, T, HQ, D], [B, T, HK, D], [B, T, H, V], [B, T, HO, V]
  const void* states;            // [pairs, H, V, D], from the forward head_read
  const void* gradients;         // [pairs, HO, V, D], from the reverse head_read
  // Before a sequence's first token: the state (optional) and its gradient, [N, H or HO, V, D] fp32.
  InputTensor<4> initial, dinitial;
  OutputTensor<4> dq;  // [B, T, HO, D], the terms of each output head
  OutputTensor<4> dk;  // [B, T, HO, D], dtype or fp32, the terms of each output head
  OutputTensor<3> dg;  // [B, T, H], any type; optional, with dg_parts and partner_gate_terms
  // fp32, the terms of each tile of keys. dg_parts [B, T, HO, tiles]: the terms of a block for the gates of
  // its own tokens. partner_gate_terms [token_range_count(tokens, 64), HO, tiles]: the term of a block that
  // is common to all gates of its partner.
  float *dg_parts = nullptr, *partner_gate_terms = nullptr;
  int tile = 64;  // keys of a tile, from head_gradient_tile()

  int tiles() const { return (shape.D + tile - 1) / tile; }
};

// The arguments of one launch of head_read_kernel.
struct HeadReadParams {
  HeadRead problem;
  Segmentation segmentation;
  int stages;        // of q and k
  int value_stages;  // of v
  int state_stages, output_warpgroups;
};

// Number of heads with a state.
__host__ __device__ inline int count_state_heads(const HeadRead& read) {
  return read.reverse ? read.shape.query_heads : read.shape.heads;
}

// The other chunk of the pair; its length is 0 if the sequence ends before it.
__device__ inline TokenRange partner_chunk(const TokenRange& range) {
  const int64_t index = range.index ^ 1, start = range.sequence.start + index * kChunk;
  return {range.sequence, index, start, static_cast<int>(clamp(range.sequence.end - start, 0, kChunk))};
}

// tile: 64 or 128, depending on the shared memory of the current device.
cudaError_t head_gradient_tile(int D, int& tile);

// Launch functions for each element type and tile of channels or keys. Each instance is compiled in its own
// file.
template <typename T, int M>
cudaError_t launch_gla_output(const GlaOutput& problem, cudaStream_t stream);
template <typename T, int M>
cudaError_t launch_gla_dq(const GlaDq& problem, cudaStream_t stream);

template <typename T, int D, bool Reverse>
cudaError_t launch_head_read(HeadReadParams params, cudaStream_t stream);
template <typename T, int D>
cudaError_t launch_head_gradients(const HeadGradients& problem, cudaStream_t stream);
// Sums dg_parts and partner_gate_terms to dg.
cudaError_t sum_gate_gradients(const HeadGradients& problem, cudaStream_t stream);

}  // namespace girih::kernels
