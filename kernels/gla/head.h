// Linear attention with a gate for each head, or no gate.
//
//     S_t = e^{g_t} S_{t-1} + k_t v_t^T                [D, V]
//     o_t = scale * S_t^T q_t                          [V]
//
// A scalar decay commutes with keys and queries. Inside a chunk it multiplies the scores, so every exponent
// is a difference of sums of gates and no factorisation is needed. With G_t the gradient of S_t from its own
// token and all later tokens, the gradients of the values are the same read in reversed time:
//
//     G_t  = scale * q_t do_t^T + e^{g_{t+1}} G_{t+1}
//     dv_t = G_t^T k_t
//
//   forward    head_read: the state from chunk to chunk, and o of each chunk
//   backward   head_read in reverse: dv; then head_gradients, each chunk alone: dq, dk, dg
//
// Backward is bound by memory traffic. With one state for each chunk, a third of the traffic would be states.
// So only every second state is written to global memory: the state before a pair of chunks in forward, and
// the gradient of the state after the pair in reverse. The terms between the two chunks of a pair are
// computed from q, k, v and do of the other chunk, the partner.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/sequence.h"

namespace girih::kernels {

constexpr int kHeadMaxKeys = 256;      // D
constexpr int kHeadPair = 2 * kChunk;  // tokens of a pair of chunks

// Rows of 16-bit arrays are aligned to 16 bytes. D and V are the padded widths, multiples of 8; keys and
// values are the widths without padding. Every output head is processed independently. If several output
// heads share a memory head, a key head or a query head, each output head writes its own terms and the caller
// sums them.
struct HeadShape {
  Tokens tokens;
  int heads, query_heads;  // H: heads of the memory; HO: heads of the outputs, a multiple of H
  int key_share;           // memory heads that share one head of k: k has H / key_share heads
  int query_share;         // output heads that share one head of q; 1 if HO > H
  int D, V, keys, values;
  DType dtype;  // fp16 or bf16
  float scale;
  In<3> g;  // [B, T, H], any type; absent: no decay
};

// Forward: o of (q, k, v); states[n] is the state before pair n.
//
// Reverse: o is dv; the arguments q, k, v are the keys, the queries and do. states[n] is the gradient of the
// state after pair n, from later tokens; initial is the gradient of the final state; final is the gradient of
// the initial state.
struct HeadRead {
  HeadShape shape;
  bool reverse;
  In<4> q, k;       // [B, T, HQ, D], [B, T, HK, D]; swapped in reverse
  In<4> v;          // [B, T, H, V]; in reverse [B, T, HO, V]
  In<4> initial;    // [N, H, V, D] fp32, in reverse HO heads; absent: zero
  Out<4> final;     // the same
  Out<4> o;         // [B, T, HO, V], dtype or fp32
  void* states;     // dtype [piece_count(tokens, kHeadPair), H, V, D], in reverse HO heads; null: not written
  void* workspace;  // head_read_workspace() bytes; may be null if this is 0
};

int64_t head_read_workspace(const HeadRead& problem);
cudaError_t head_read(const HeadRead& problem, cudaStream_t stream);

struct HeadGradients {
  HeadShape shape;
  In<4> q, k, v, dout;    // [B, T, HQ, D], [B, T, HK, D], [B, T, H, V], [B, T, HO, V]
  const void* states;     // [pairs, H, V, D], from the forward head_read
  const void* gradients;  // [pairs, HO, V, D], from the reverse head_read
  // Before a sequence's first token: the state (optional) and its gradient, [N, H or HO, V, D] fp32.
  In<4> initial, start;
  Out<4> dq;  // [B, T, HO, D], the terms of each output head
  Out<4> dk;  // [B, T, HO, D], dtype or fp32, the terms of each output head
  Out<3> dg;  // [B, T, H], any type; optional, with dg_parts and across
  // fp32, the terms of each tile of keys. dg_parts [B, T, HO, tiles]: the terms of a block for the gates of
  // its own tokens. across [piece_count(tokens, 64), HO, tiles]: the term of a block that is common to all
  // gates of its partner.
  float *dg_parts = nullptr, *across = nullptr;
  int tile = 64;  // keys of a tile, from head_gradient_tile()

  int tiles() const { return (shape.D + tile - 1) / tile; }
};

// tile: 64 or 128, depending on the shared memory of the current device.
cudaError_t head_gradient_tile(int D, int& tile);
cudaError_t head_gradients(const HeadGradients& problem, cudaStream_t stream);

// fits: whether the current device has enough shared memory for these kernels at D.
cudaError_t head_fits(int D, bool& fits);

}  // namespace girih::kernels
