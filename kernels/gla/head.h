// Linear attention whose gate is one a head, or absent.
//
//     S_t = e^{g_t} S_{t-1} + k_t v_t^T                [D, V]
//     o_t = scale * S_t^T q_t                          [V]
//
// A decay that is one number leaves keys and queries as they are: inside a chunk it goes on the scores, so
// that every exponent is a difference of sums of gates, and nothing needs factors. With G_t the gradient that
// reaches S_t, of its own token and all later ones, the gradients of values are a read too, in reversed time:
//
//     G_t  = scale * q_t do_t^T + e^{g_{t+1}} G_{t+1}
//     dv_t = G_t^T k_t
//
//   forward    one read: the state from chunk to chunk, and every chunk's rows as soon as it has it
//   backward   the same for dv in reverse, then every chunk: dq, dk, dg
//
// Backward takes the time of its memory traffic, and with one a chunk states would be a third of that: only
// every second one goes to global memory, before a pair of chunks in forward and after it in reverse. What a
// chunk's rows exchange with those of the pair's other chunk, its partner, they take from these.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/sequence.h"

namespace girih::kernels {

constexpr int kHeadMaxKeys = 256;      // D
constexpr int kHeadPair = 2 * kChunk;  // tokens from one state in global memory to the next

// Rows of 16-bit arrays start at 16 bytes. D and V are their widths, in packs of 8; those that exist in a
// state are keys and values. Every output's head walks by itself; what it gives to a memory, a key or a query
// that serves several is its part of a sum.
struct HeadShape {
  Tokens tokens;
  int heads, query_heads;  // H, the memory's; of outputs, a multiple of H
  int key_share;           // memory heads that one head of k serves: k has H / key_share
  int query_share;         // outputs that one head of q serves, 1 where a memory has several of them
  int D, V, keys, values;
  DType dtype;  // fp16 or bf16
  float scale;
  In<3> g;  // [B, T, H], any type; absent: no decay
};

// Forward: o of (q, k, v); states[n] is the state before pair n.
// Reverse: o is dv, q the keys, k the queries and v do; states[n] is the gradient that reaches the state
// after pair n from later tokens, `initial` the final state's gradient, `final` the initial state's.
struct HeadRead {
  HeadShape shape;
  bool reverse;
  In<4> q, k;       // [B, T, HQ, D], [B, T, HK, D]; in reverse the other way round
  In<4> v;          // [B, T, H, V]; in reverse [B, T, HO, V]
  In<4> initial;    // [N, H, V, D] fp32, in reverse HO heads; optional: zero
  Out<4> final;     // the same
  Out<4> o;         // [B, T, HO, V], dtype or fp32
  void* states;     // dtype [piece_count(tokens, kHeadPair), H, V, D], in reverse HO heads; null: not wanted
  void* workspace;  // head_read_workspace() bytes, may be null when that is 0
};

int64_t head_read_workspace(const HeadRead& problem);
cudaError_t head_read(const HeadRead& problem, cudaStream_t stream);

struct HeadGradients {
  HeadShape shape;
  In<4> q, k, v, dout;    // [B, T, HQ, D], [B, T, HK, D], [B, T, H, V], [B, T, HO, V]
  const void* states;     // [pairs, H, V, D] of the read of o
  const void* gradients;  // [pairs, HO, V, D] of the read of dv
  // Before a sequence's first token: the state, optional, and its gradient, [N, H or HO, V, D] fp32.
  In<4> initial, start;
  Out<4> dq;  // [B, T, HO, D], a part from each output's head
  Out<4> dk;  // [B, T, HO, D], dtype or fp32, likewise
  Out<3> dg;  // [B, T, H], any type; optional, and the rest with it
  // fp32, a part of sums from each tile of keys: [B, T, HO, tiles] what a chunk's block has for the gates of
  // its tokens, and [piece_count(tokens, 64), HO, tiles] for every gate of its partner.
  float *dg_parts = nullptr, *across = nullptr;
  int tile = 64;  // keys of one: head_gradient_tile()

  int tiles() const { return (shape.D + tile - 1) / tile; }
};

// 64 or 128, as the current device has shared memory for.
cudaError_t head_gradient_tile(int D, int& tile);
cudaError_t head_gradients(const HeadGradients& problem, cudaStream_t stream);

// Whether the current device has the shared memory for these kernels at D.
cudaError_t head_fits(int D, bool& fits);

}  // namespace girih::kernels
