// A block of head_gradients_kernel: its shared memory, its members, and its loads.
#pragma once

#include "gla/head_gates.cuh"
#include "gla/kernels.h"
#include "gsa/gate_gradients.cuh"

namespace girih::kernels {

constexpr int kHeadGradientThreads = 256;

template <typename T, int D>
struct HeadGradientTiles {
  BlockTile<T, D> q, k;
  BlockTile<T, 2 * kSlab> s, ds;             // 64 keys of S and G, for two times 64 values, [values, keys]
  BlockTile<T, 2 * kSlab> v, dout, partner;  // partner: v' or do', then k' or q'
  // L, L', and the terms of each row in dg: row_terms for the gates up to the row, col_terms for the gates
  // after it.
  float *sums, *partner_sums, *row_terms, *col_terms;

  static constexpr int kFloats = 4 * kChunk;
  static constexpr int kBytes =
      2 * BlockTile<T, D>::kBytes + 5 * BlockTile<T, 2 * kSlab>::kBytes + kFloats * 4;

  __device__ explicit HeadGradientTiles(unsigned char* shared) {
    SharedAllocator{shared}(q)(k)(s)(ds)(v)(dout)(partner)(sums, kChunk)(partner_sums, kChunk)(
        row_terms, kChunk)(col_terms, kChunk);
  }
  // The sums of every warp that are common to all gates of the chunk, and to all gates of the partner. They
  // overlap L', of which only the last element is read after the decay of the scores; otherwise two blocks
  // would not fit on a multiprocessor.
  __device__ float* own_state_dots() const { return partner_sums; }
  __device__ float* partner_state_dots() const { return partner_sums + kHeadGradientThreads / 32; }
  __device__ const float& partner_chunk_sum() const { return partner_sums[kChunk - 1]; }
};

template <typename T, int D>
struct HeadGradientBlock {
  using Tiles = HeadGradientTiles<T, D>;
  static constexpr int kThreads = kHeadGradientThreads, kWide = 2 * kSlab;
  using Wide = BlockTile<T, kWide>;
  // A slab of the states: 64 keys and 128 values, from key `col` and value `v`. Slabs are in the order of
  // keys, then values.
  struct Slab {
    int col, v;
  };

  const HeadGradients& p;
  const HeadShape& shape;
  const Tiles tile;
  const int thread;
  int warp;                // index in the warpgroup
  bool is_dk;              // the warpgroup computes dk, else dq
  bool has_partner_terms;  // the warpgroup has terms with rows of the partner
  bool has_gates, is_at_start;
  int key, keys, query_head, head, key_head, q_head;
  TokenRange range, partner;
  const T *dout, *values, *s, *ds;
  const OutputTensor<4>* out;  // the output, dq or dk

  // The operands x, y, H, z of a warpgroup: do, v, S, k for dq; v, do, G, q for dk. partner_z: y' of the
  // partner, then z'.
  Wide x, y, h;
  BlockTile<T, D> z, own, partner_z;
  // Values of the lane's two rows.
  float2 gate_terms = {0.f, 0.f};              // the row's terms of dg
  float state_dot = 0.f, through_state = 0.f;  // the thread's part of <S, G>; of own . (gradient through H)
  Accumulator<8> near;                         // x y^T
  AFragment<4> cross_scores{}, scores;         // x y'^T and near, weighted and rounded
  Accumulator<8> gradient;
  AFragment<4> previous_columns{};  // the previous 64 columns of the gradient

  __device__ HeadGradientBlock(const HeadGradients& p, unsigned char* shared)
      : p(p), shape(p.shape), tile(shared), thread(threadIdx.x) {}

  // Maps the block index to the block's work. Returns false if the chunk has no tokens.
  __device__ bool init();
  __device__ void start();
  __device__ void compute_scores();
  __device__ void compute_cross_scores(Accumulator<8>& cross);
  __device__ void compute_pair_terms();
  __device__ void add_state_dot(bool has_second_half);
  __device__ void finish_columns(int col);
  __device__ void compute_gradient();
  __device__ void store_gate_terms() const;
  __device__ void store() const;
  __device__ void store_dg_parts() const;

  __device__ void store_columns(const Accumulator<8>& sums, int buffer_col, int col) const {
    store_rows_as<T>(sums, x.block(buffer_col), opaque_value(warp), *out, range, opaque_value(query_head),
                     key + col, shape.D);
  }
  __device__ int first() const { return kWarpRows * warp + lane_row(); }  // first of the lane's two rows
  // Whether the chunk is the second of its pair.
  __device__ bool is_second() const { return is_dk != has_partner_terms; }
  __device__ void sync_warpgroup() const { is_dk ? named_barrier_sync(1, 128) : named_barrier_sync(2, 128); }
  __device__ static BlockTile<T, kSlab> half(const Wide& slab, int i) {
    return BlockTile<T, kSlab>{slab.data + i * kSlab * kSlab};
  }
  __device__ Slab next_slab(const Slab& at) const {
    return at.v + kWide < shape.V ? Slab{at.col, at.v + kWide} : Slab{at.col + kSlab, 0};
  }

  __device__ void load_partner(int v) const {
    const T* const rows =
        is_second() ? chunk_rows<T>(p.v, partner, head) : chunk_rows<T>(p.dout, partner, query_head);
    load_async<kThreads>(tile.partner, rows + v, is_second() ? p.v.stride[1] : p.dout.stride[1],
                         partner.length, shape.V - v, thread);
  }
  // (Values derived from the thread index are recomputed for each slab, as there are no registers for them.)
  __device__ void load_rows(int v) const {
    const int thread = opaque_value(this->thread);
    load_async<kThreads>(tile.dout, dout + v, p.dout.stride[1], range.length, shape.V - v, thread);
    load_async<kThreads>(tile.v, values + v, p.v.stride[1], range.length, shape.V - v, thread);
  }
  __device__ void load_states(const Slab& at) const {
    const int thread = opaque_value(this->thread);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int v = at.v + i * kSlab;
      if (v >= shape.V) break;
      const int64_t first = static_cast<int64_t>(v) * shape.D + at.col;
      load_async<kThreads>(half(tile.s, i), s + first, shape.D, shape.V - v, keys - at.col, thread);
      load_async<kThreads>(half(tile.ds, i), ds + first, shape.D, shape.V - v, keys - at.col, thread);
    }
  }
  // Shared memory holds one slab: prefetches the next slab to the L2 cache, one line of 128 bytes for each
  // thread.
  __device__ void prefetch_states(const Slab& at) const {
    const int v = at.v + thread % kWide;
    if (v < shape.V && at.col < keys) prefetch((is_dk ? ds : s) + static_cast<int64_t>(v) * shape.D + at.col);
  }
};

template <typename T, int D>
__device__ inline bool HeadGradientBlock<T, D>::init() {
  const int group = shape.query_heads / shape.heads;
  const int warp_in_block = warp_index();  // warp-uniform, as wgmma requires
  warp = warp_in_block % 4;
  is_dk = warp_in_block >= 4;
  const unsigned parts = (shape.D + D - 1) / D;
  unsigned block_index = blockIdx.x;
  key = static_cast<int>(block_index % parts) * D, keys = min(D, shape.D - key);
  block_index /= parts;
  query_head = static_cast<int>(block_index % shape.query_heads), head = query_head / group;
  key_head = head / shape.key_share, q_head = query_head / shape.query_share;
  range = token_range_at(shape.tokens, block_index / shape.query_heads, kChunk);
  has_gates = p.dg.data != nullptr;
  if (range.length == 0) {
    if (has_gates && thread == 0) p.partner_gate_terms[blockIdx.x] = 0.f;
    return false;
  }
  partner = partner_chunk(range);
  const bool is_second_chunk = range.index % 2 == 1;
  has_partner_terms = __shfl_sync(~0u, static_cast<int>(is_dk != is_second_chunk), 0) != 0;
  dout = chunk_rows<T>(p.dout, range, query_head);
  values = chunk_rows<T>(p.v, range, head);
  const int64_t state = static_cast<int64_t>(shape.V) * shape.D;
  const int64_t pair = first_token_range(shape.tokens, range.sequence, kHeadPair) + range.index / 2;
  s = static_cast<const T*>(p.states) + (pair * shape.heads + head) * state + key;
  ds = static_cast<const T*>(p.gradients) + (pair * shape.query_heads + query_head) * state + key;

  return true;
}

// Starts the first loads; computes L and L'.
template <typename T, int D>
__device__ inline void HeadGradientBlock<T, D>::start() {
  load_rows(0);
  load_partner(0);
  load_async<kThreads>(tile.q, chunk_rows<T>(p.q, range, q_head) + key, p.q.stride[1], range.length, keys,
                       thread);
  load_async<kThreads>(tile.k, chunk_rows<T>(p.k, range, key_head) + key, p.k.stride[1], range.length, keys,
                       thread);
  commit_copies();
  load_states({0, 0});
  commit_copies();
  prefetch_states(next_slab({0, 0}));
  if (warp == 0) {
    GatePair::load(shape.g, range.sequence, is_dk ? partner.start : range.start, head,
                   is_dk ? partner.length : range.length)
        .store_prefix_sums(is_dk ? tile.partner_sums : tile.sums);
  }
  is_at_start = range.index < 2 && p.initial.data != nullptr;
  x.data = is_dk ? tile.v.data : tile.dout.data, y.data = is_dk ? tile.dout.data : tile.v.data;
  h.data = is_dk ? tile.ds.data : tile.s.data;
  z.data = is_dk ? tile.q.data : tile.k.data, own.data = is_dk ? tile.k.data : tile.q.data;
  partner_z.data = tile.partner.data;
  out = is_dk ? &p.dk : &p.dq;
}

}  // namespace girih::kernels
