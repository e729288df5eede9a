// A block of the gradients of queries, keys and gates: what it has, and what it loads.
#pragma once

#include "gla/head_gates.cuh"
#include "gla/launch.h"
#include "gsa/gradients.cuh"

namespace girih::kernels {

constexpr int kHeadGradientThreads = 256;

template <typename T, int D>
struct HeadGradientTiles {
  BlockTile<T, D> q, k;
  BlockTile<T, 2 * kSlab> s, ds;  // 64 keys of S and G: of 64 values, and of 64 more, [values, keys]
  BlockTile<T, 2 * kSlab> v, dout, partner;  // partner: of v' or do', then of k' or q'
  // L, L' and a row's part of dg: of all gates up to it, and of all after it.
  float *sums, *partner_sums, *of_row, *of_col;

  static constexpr int kFloats = 4 * kChunk;
  static constexpr int kBytes =
      2 * BlockTile<T, D>::kBytes + 5 * BlockTile<T, 2 * kSlab>::kBytes + kFloats * 4;

  __device__ explicit HeadGradientTiles(unsigned char* shared) {
    Layout(shared)(q)(k)(s)(ds)(v)(dout)(partner)(sums, kChunk)(partner_sums, kChunk)(of_row, kChunk)(of_col,
                                                                                                      kChunk);
  }
  // What every warp has for all own gates, and for all of the partner's. Two blocks of a multiprocessor leave
  // no room for these: they take that of L' once the scores are decayed, of which only the last is read then.
  __device__ float* own_edge() const { return partner_sums; }
  __device__ float* partner_edge() const { return partner_sums + kHeadGradientThreads / 32; }
  __device__ const float& partner_whole() const { return partner_sums[kChunk - 1]; }
};

template <typename T, int D>
struct HeadGradientBlock {
  using Tiles = HeadGradientTiles<T, D>;
  static constexpr int kThreads = kHeadGradientThreads, kWide = 2 * kSlab;
  using Wide = BlockTile<T, kWide>;
  // The states by slabs of 64 keys and 128 values, of the first keys all values first.
  struct Slab {
    int col, v;
  };

  const HeadGradients& p;
  const HeadShape& shape;
  const Tiles tile;
  const int thread;
  int warp;      // of the warpgroup
  bool of_keys;  // the warpgroup has dk, else dq
  bool crosses;  // the warpgroup has rows of the partner
  bool wants_gates, from_start;
  int key, keys, query_head, head, key_head, head_of_query;
  Piece piece, partner;
  const T *dout, *values, *s, *ds;
  const Out<4>* out;  // dq or dk

  // A warpgroup's x, y, H, z: dq of do, v, S, k; dk of v, do, G, q. The partner's y', then z'.
  Wide x, y, h;
  BlockTile<T, D> z, own, partner_z;
  // Of the lane's two rows.
  float2 read = {0.f, 0.f};          // a row's part of dg
  float edge = 0.f, of_state = 0.f;  // <S, G>; own . (gradient through H)
  Sums<8> near;                      // x y^T
  Operand<4> far{}, scores;          // x y'^T, near, weighed
  Sums<8> gradient;
  Operand<4> done{};  // the block of columns before

  __device__ HeadGradientBlock(const HeadGradients& p, unsigned char* shared)
      : p(p), shape(p.shape), tile(shared), thread(threadIdx.x) {}

  // False: the chunk has no tokens.
  __device__ bool find();
  __device__ void start();
  __device__ void make_scores();
  __device__ void cross_over(Sums<8>& cross);
  __device__ void read_pairs();
  __device__ void add_edge(bool both);
  __device__ void add_columns(int col);
  __device__ void make_gradient();
  __device__ void put_edges() const;
  __device__ void store() const;
  __device__ void put_gates() const;

  __device__ void put(const Sums<8>& sums, int room, int col) const {
    store_rows_of<T>(sums, x.block(room), worked_out_here(warp), *out, piece, worked_out_here(query_head),
                     key + col, shape.D);
  }
  __device__ int first() const { return kRows * warp + lane_row(); }  // of the lane's two rows
  // The chunk is its pair's second.
  __device__ bool is_second() const { return of_keys != crosses; }
  __device__ void group_barrier() const { of_keys ? barrier_wait(1, 128) : barrier_wait(2, 128); }
  __device__ static BlockTile<T, kSlab> half(const Wide& slab, int i) {
    return BlockTile<T, kSlab>{slab.data + i * kSlab * kSlab};
  }
  __device__ Slab next_of(const Slab& at) const {
    return at.v + kWide < shape.V ? Slab{at.col, at.v + kWide} : Slab{at.col + kSlab, 0};
  }

  __device__ void load_partner(int v) const {
    const T* const rows =
        is_second() ? chunk_rows<T>(p.v, partner, head) : chunk_rows<T>(p.dout, partner, query_head);
    load_async<kThreads>(tile.partner, rows + v, is_second() ? p.v.stride[1] : p.dout.stride[1],
                         partner.length, shape.V - v, thread);
  }
  // (What follows from a thread's number has no registers from slab to slab.)
  __device__ void load_rows(int v) const {
    const int thread = worked_out_here(this->thread);
    load_async<kThreads>(tile.dout, dout + v, p.dout.stride[1], piece.length, shape.V - v, thread);
    load_async<kThreads>(tile.v, values + v, p.v.stride[1], piece.length, shape.V - v, thread);
  }
  __device__ void load_states(const Slab& at) const {
    const int thread = worked_out_here(this->thread);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int v = at.v + i * kSlab;
      if (v >= shape.V) break;
      const int64_t first = static_cast<int64_t>(v) * shape.D + at.col;
      load_async<kThreads>(half(tile.s, i), s + first, shape.D, shape.V - v, keys - at.col, thread);
      load_async<kThreads>(half(tile.ds, i), ds + first, shape.D, shape.V - v, keys - at.col, thread);
    }
  }
  // There is room for one slab: the next waits in the L2 cache. A line of 128 bytes a thread.
  __device__ void prefetch_states(const Slab& at) const {
    const int v = at.v + thread % kWide;
    if (v < shape.V && at.col < keys)
      prefetch((of_keys ? ds : s) + static_cast<int64_t>(v) * shape.D + at.col);
  }
};

template <typename T, int D>
__device__ inline bool HeadGradientBlock<T, D>::find() {
  const int group = shape.query_heads / shape.heads;
  const int all_warps = warp_index();  // products of warpgroups bear no branch of single threads
  warp = all_warps % 4;
  of_keys = all_warps >= 4;
  const unsigned parts = (shape.D + D - 1) / D;
  unsigned job = blockIdx.x;
  key = static_cast<int>(job % parts) * D, keys = min(D, shape.D - key);
  job /= parts;
  query_head = static_cast<int>(job % shape.query_heads), head = query_head / group;
  key_head = head / shape.key_share, head_of_query = query_head / shape.query_share;
  piece = piece_at(shape.tokens, job / shape.query_heads, kChunk);
  wants_gates = p.dg.data != nullptr;
  if (piece.length == 0) {
    if (wants_gates && thread == 0) p.across[blockIdx.x] = 0.f;
    return false;
  }
  partner = partner_of(piece);
  const bool second = piece.index % 2 == 1;
  crosses = __shfl_sync(~0u, static_cast<int>(of_keys != second), 0) != 0;
  dout = chunk_rows<T>(p.dout, piece, query_head);
  values = chunk_rows<T>(p.v, piece, head);
  const int64_t state = static_cast<int64_t>(shape.V) * shape.D;
  const int64_t pair = first_piece(shape.tokens, piece.sequence, kHeadPair) + piece.index / 2;
  s = static_cast<const T*>(p.states) + (pair * shape.heads + head) * state + key;
  ds = static_cast<const T*>(p.gradients) + (pair * shape.query_heads + query_head) * state + key;

  return true;
}

// The first loads, and L and L'.
template <typename T, int D>
__device__ inline void HeadGradientBlock<T, D>::start() {
  load_rows(0);
  load_partner(0);
  load_async<kThreads>(tile.q, chunk_rows<T>(p.q, piece, head_of_query) + key, p.q.stride[1], piece.length,
                       keys, thread);
  load_async<kThreads>(tile.k, chunk_rows<T>(p.k, piece, key_head) + key, p.k.stride[1], piece.length, keys,
                       thread);
  commit_copies();
  load_states({0, 0});
  commit_copies();
  prefetch_states(next_of({0, 0}));
  if (warp == 0) {
    GatePair::load(shape.g, piece.sequence, of_keys ? partner.start : piece.start, head,
                   of_keys ? partner.length : piece.length)
        .put_sums(of_keys ? tile.partner_sums : tile.sums);
  }
  from_start = piece.index < 2 && p.initial.data != nullptr;
  x.data = of_keys ? tile.v.data : tile.dout.data, y.data = of_keys ? tile.dout.data : tile.v.data;
  h.data = of_keys ? tile.ds.data : tile.s.data;
  z.data = of_keys ? tile.q.data : tile.k.data, own.data = of_keys ? tile.k.data : tile.q.data;
  partner_z.data = tile.partner.data;
  out = of_keys ? &p.dk : &p.dq;
}

}  // namespace girih::kernels
