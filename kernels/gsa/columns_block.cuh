// A block of gated_columns_kernel: its shared memory, its members, and its phases in the order of their
// calls.
#pragma once

#include "gsa/gradients.cuh"
#include "gsa/writes.cuh"

namespace girih::kernels {

// The block has one warpgroup for each 64 slots.
template <typename T, int M, int Memories>
struct GatedColumnTiles {
  static constexpr int kGroups = M / 64;

  using Slots = SharedTile<T, kChunk, M>;

  SharedTile<float, kChunk, M> g;
  Slots s, end, first_y, gradient;
  SharedTile<T, kChunk, kSlab> x, read;
  float *totals, *decay, *edge, *own;

  static constexpr int kBytes =
      SharedTile<float, kChunk, M>::kBytes + (3 + Memories) * SharedTile<T, kChunk, M>::kBytes +
      2 * SharedTile<T, kChunk, kSlab>::kBytes + (4 + 1 + 4 * kGroups) * M * 4 + Memories * kChunk * 4;

  __device__ explicit GatedColumnTiles(unsigned char* shared) {
    Layout layout(shared);
    layout(g)(s)(end)(first_y);
    layout.next += (Memories - 1) * Slots::kBytes;
    layout(gradient)(x)(read)(totals, 4 * M)(decay, M)(edge, 4 * kGroups * M)(own, Memories * kChunk);
  }
  __device__ Slots y(int i) const { return {first_y.data + i * kChunk * M}; }
};

// A block has a chunk and a query head. Memory indices count from the first memory that exists. Accumulators
// are local variables of the callers: as members, arrays would keep the whole object out of registers until
// every loop over them is unrolled.
template <typename T, int M, int Memories>
struct GatedColumnBlock {
  using Tiles = GatedColumnTiles<T, M, Memories>;
  using Beyond = SharedTile<float, kChunk, M>;
  static constexpr int kGroups = Tiles::kGroups, kThreads = kGroup * kGroups;
  using Edge = EdgeSum<kThreads, M>;
  using EdgeRows = typename Edge::Rows[Memories][2];  // for each memory both halves of its first slab

  const GatedColumns& p;
  const Tiles tile;
  const GsaShape& shape;
  const int warp, group, query_head, head;
  const bool first;  // whether this is the first query head of the memory head
  const int64_t chunk;
  const Piece piece;
  RowWrites<T, M> writes;

  __device__ GatedColumnBlock(const GatedColumns& p, unsigned char* shared)
      : p(p),
        tile(shared),
        shape(p.shape),
        warp(threadIdx.x / 32 % 4),
        group(threadIdx.x / kGroup),
        query_head(static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.query_heads))),
        head(query_head / (shape.query_heads / shape.heads)),
        first(query_head % (shape.query_heads / shape.heads) == 0),
        chunk(blockIdx.x / static_cast<unsigned>(shape.query_heads)),
        piece(piece_at(shape.tokens, chunk, kChunk)) {}

  // Starts the copies of g and s, then of the first slab of the first memory.
  __device__ void start_loads() const;
  __device__ void start_writes();
  // Loads the rows for the edge for which comes_late is `late`.
  __device__ void load_edges(EdgeRows& rows, bool late) const;
  __device__ void put_edge(const EdgeRows& rows) const;
  __device__ void load_unscaled() const;

  // Adds the terms of all memories to u and stores dx.
  template <bool Factored>
  __device__ void take_memories(Sums<8>& u, const float* w_rows) const;
  __device__ void prefetch_w(const float* w_rows) const;
  __device__ void multiply(int i, Scores& a, Sums<8>& sums) const;
  template <bool Factored>
  __device__ void write(int i, const Scores& a, Sums<8>& u, Sums<8>& part, Operand<2> (&first_scores)[2],
                        Operand<2> (&w)[2]) const;
  template <bool Factored>
  __device__ void put_dx(int i, const Operand<2> (&w)[2]) const;

  __device__ void load_w(float2 (&w)[8][2], const float* w_rows) const;
  template <bool Factored>
  __device__ void finish(Sums<8>& u, const float2 (&w)[8][2]) const;
  __device__ void put(const Sums<8>& u) const;

  __device__ const ColumnMemory& memory(int i) const { return p.memory[i + 2 - Memories]; }
  // The first row of the memory in the states [D + V, M].
  __device__ int first_row(int i) const { return i + 2 - Memories == 0 ? 0 : shape.D; }
  __device__ bool has_edge() const { return first && piece.index > 0; }

  template <class Tile>
  __device__ void load(const Tile& to, const In<4>& from, int of, int col, int width) const {
    load_async<kThreads>(to, chunk_rows<T>(from, piece, of) + col, from.stride[1], piece.length, width - col,
                         threadIdx.x);
  }
  __device__ void load_slab(int i, int col, bool with_x = true) const {
    const ColumnMemory& m = memory(i);
    if (with_x) load(tile.x, m.x, head, col, m.width);
    load(tile.read, m.read, query_head, col, m.width);
    load_async<kThreads>(tile.gradient, state_rows<T>(p.gradients, shape, chunk, head, first_row(i) + col),
                         shape.M, first ? m.width - col : 0, shape.M, threadIdx.x);
    commit_copies();
  }
  __device__ typename Edge::Rows load_edge(int i, int half, int slab) const {
    return Edge::load(state_rows<T>(p.states, shape, chunk, head, first_row(i) + slab),
                      state_rows<T>(p.gradients, shape, chunk - 1, head, first_row(i) + slab),
                      min(kSlab, memory(i).width - slab), shape.M, threadIdx.x, half);
  }
  // The last of the four halves is loaded later: there are no registers for it. If it went to local memory,
  // its store would wait for it and for all loads issued before it.
  __device__ static bool comes_late(int i, int half) { return M == 64 && i == 1 && half == 1; }

  // Calls f(n, i, row, column) for the thread's pairs of the accumulator.
  template <class F>
  __device__ void each_pair(const F& f) const {
    kernels::each_pair<8>([&](int n, int i) {
      f(n, i, kRows * warp + lane_row() + 8 * i, writes.first_column() + 8 * n + lane_col());
    });
  }
};

template <typename T, int M, int Memories>
__device__ inline void GatedColumnBlock<T, M, Memories>::start_loads() const {
  load_rows<kThreads>(tile.g, p.g, piece, head, 0, shape.M);
  load_weights<kThreads>(tile.s, p.s, p.g, piece, head, shape.M);
  commit_copies();
#pragma unroll
  for (int i = 0; i < Memories; ++i) load(tile.y(i), memory(i).y_scan, query_head, 0, shape.M);
  load_slab(0, 0);
}

template <typename T, int M, int Memories>
__device__ inline void GatedColumnBlock<T, M, Memories>::start_writes() {
  writes.at = {{tile.g, tile.decay, tile.totals, warp},         tile.s, tile.end,
               {rows_of(tile.x, warp) + group * kRows * kRows}, group,  p.y_scale};
  writes.template start<4 * kGroups>();
}

template <typename T, int M, int Memories>
__device__ inline void GatedColumnBlock<T, M, Memories>::load_edges(EdgeRows& rows, bool late) const {
#pragma unroll
  for (int i = 0; i < Memories; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (comes_late(i, half) == late) rows[i][half] = load_edge(i, half, 0);
    }
  }
}

// edge = sum over the rows of the memories of H * (gradient of H) for each warp, H the state before the
// chunk.
template <typename T, int M, int Memories>
__device__ inline void GatedColumnBlock<T, M, Memories>::put_edge(const EdgeRows& rows) const {
  Edge edge;
#pragma unroll
  for (int i = 0; i < Memories; ++i) {
    const ColumnMemory& m = memory(i);
    if (has_edge()) {
      edge.template add<T>(rows[i][0]);
      edge.template add<T>(rows[i][1]);
      for (int slab = kSlab; slab < m.width; slab += kSlab) {
        const auto one = load_edge(i, 0, slab), two = load_edge(i, 1, slab);
        edge.template add<T>(one);
        edge.template add<T>(two);
      }
    } else if (first) {
      edge.add_start(m.initial, m.start, piece, head, m.width, shape.M, threadIdx.x);
    }
  }
  edge.put(tile.edge + threadIdx.x / 32 * M);
}

// Without factors: loads y in place of y_scan.
template <typename T, int M, int Memories>
__device__ inline void GatedColumnBlock<T, M, Memories>::load_unscaled() const {
  wait_copies<0>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < Memories; ++i) load(tile.y(i), memory(i).y, query_head, 0, shape.M);
  commit_copies();
}

template <typename T, int M, int Memories>
__device__ inline void GatedColumnBlock<T, M, Memories>::prefetch_w(const float* w_rows) const {
  for (int j = threadIdx.x; j < piece.length * (M / 32); j += kThreads) {
    const int col = j % (M / 32) * 32;
    if (col < shape.M) prefetch(w_rows + j / (M / 32) * p.w.stride[1] + col);
  }
}

// a = X Read^T,   sums += X G
template <typename T, int M, int Memories>
__device__ inline void GatedColumnBlock<T, M, Memories>::multiply(int i, Scores& a, Sums<8>& sums) const {
  zero(a);
  each_slab(
      memory(i).width, [&](int col) { load_slab(i, col); },
      [&](int) {
        add_slab<Side::later, T>(a, sums, tile.x, tile.read, tile.gradient, warp, writes.first_column());
      });
  if (group == 0) put_diagonal(tile.own + i * kChunk, a, warp);
  __syncwarp();
}

// u += [a_jt e^{L_t - L_j} y_t, t > j],   w = W = [s_j . e^{L_t - L_j} y_t, t >= j]
//
// With factors u contains X G, and the terms of all memories are added with the last memory; the scores of
// the first memory stay in `first_scores` until then. Without factors `part` contains X G of this memory.
template <typename T, int M, int Memories>
template <bool Factored>
__device__ inline void GatedColumnBlock<T, M, Memories>::write(int i, const Scores& a, Sums<8>& u,
                                                               Sums<8>& part, Operand<2> (&first_scores)[2],
                                                               Operand<2> (&w)[2]) const {
  if constexpr (Factored) {
    Operand<2> scores[2];
    round_scores<Side::later, false, T>(scores, a, warp);
    if (i + 1 < Memories) {
#pragma unroll
      for (int h = 0; h < 2; ++h) first_scores[h] = scores[h];
    } else {
      shift<T, true>(u);  // X G is multiplied by s~ and 1 / r
      writes.keep_rounding(u);
      if (i > 0) writes.value_write(u, first_scores, tile.y(0));
      writes.value_write(u, scores, tile.y(i));
    }
    writes.key_write(w, tile.y(i));
  } else {
    __syncthreads();  // the scratch overlaps the tile x
    writes.write_by_blocks(part, w, a, tile.y(i));
    add(u, part);
  }
}

// dX = f G^T + W Read, from the last slab to the first; the last slab is still in the tiles.
template <typename T, int M, int Memories>
template <bool Factored>
__device__ inline void GatedColumnBlock<T, M, Memories>::put_dx(int i, const Operand<2> (&w)[2]) const {
  constexpr int kEights = 8 / kGroups;  // tiles of 8 columns of the warpgroup
  const int width = memory(i).width, of_group = 8 * kEights * group;
  const int last = (width - 1) / kSlab * kSlab;
  for (int col = last; col >= 0; col -= kSlab) {
    if (kGroups > 1 || col < last)
      __syncthreads();  // the stores use x as their buffer, which both warpgroups read
    if (col < last) {
      load_slab(i, col, false);
      wait_copies<0>();
      __syncthreads();
    }
    Sums<kEights> dx;
    fill(dx, 0.f);
    add_scored<Side::later, T>(dx, w, tile.read, warp, of_group);
    if (Factored) shift<T>(dx);  // the product with s~ below contains 2^factor_shift
    add_product_of_tile_rows<2>(dx, tile.end, kRows * warp, tile.gradient, of_group);
    if (Factored) shift<T, true>(dx);
    store_rows_of<T, kEights>(dx, tile.x, warp, memory(i).dx, piece, query_head, col + of_group, width,
                              of_group);
  }
}

// u = sum over the memories of X G + [a_jt e^{L_t - L_j} y_t, t > j]; with factors without e^X.
template <typename T, int M, int Memories>
template <bool Factored>
__device__ inline void GatedColumnBlock<T, M, Memories>::take_memories(Sums<8>& u,
                                                                       const float* w_rows) const {
  Operand<2> first_scores[2];
#pragma unroll 1
  for (int i = 0; i < Memories; ++i) {
    if (i + 1 == Memories) prefetch_w(w_rows);  // earlier, L2 would evict the lines before their use
    Scores a;
    Sums<8> part;
    fill(part, 0.f);
    multiply(i, a, Factored ? u : part);
    Operand<2> w[2];
    write<Factored>(i, a, u, part, first_scores, w);
    put_dx<Factored>(i, w);
    if (i + 1 < Memories) {
      __syncthreads();
      load_slab(i + 1, 0);
      wait_copies<0>();
      __syncthreads();
    }
  }
}

// Loads the thread's pairs of w. Rows and columns outside of the array are clamped and ignored by finish().
template <typename T, int M, int Memories>
__device__ inline void GatedColumnBlock<T, M, Memories>::load_w(float2 (&w)[8][2],
                                                                const float* w_rows) const {
  each_pair([&](int n, int i, int row, int col) {
    w[n][i] = *reinterpret_cast<const float2*>(w_rows + min(row, piece.length - 1) * p.w.stride[1] +
                                               min(col, shape.M - 2));
  });
}

// Writes c = w - s u in place of g, then
//
//     u_j = ds_j = (u_j + sum over the memories of a_jj y_j) e^X,    e^X with factors only
template <typename T, int M, int Memories>
template <bool Factored>
__device__ inline void GatedColumnBlock<T, M, Memories>::finish(Sums<8>& u, const float2 (&w)[8][2]) const {
  each_pair([&](int n, int i, int row, int col) {
    const int tile_row = kRows * warp + 8 * i, tile_col = writes.first_column() + 8 * n;
    auto& c = *reinterpret_cast<float2*>(&lane_at(tile.g, tile_row, tile_col));
    const bool exists = row < piece.length && col < shape.M;
    float2 ds = {u.at[n][2 * i], u.at[n][2 * i + 1]};
    const float2 s = lane_pair<T>(Factored ? tile.end : tile.s, tile_row, tile_col);
    const float2 r = Factored ? c : float2{1.f, 1.f};
    c = {w[n][i].x - s.x * ds.x, w[n][i].y - s.y * ds.y};
    if (Factored) {
      const float2 lost = lane_pair<T>(tile.s, tile_row, tile_col);
      c.x -= lost.x, c.y -= lost.y;
    }
    if (!exists) c = {0.f, 0.f};
      // The terms of the row's own token.
#pragma unroll
    for (int j = 0; j < Memories; ++j) {
      float2 y = {0.f, 0.f};
      float own = tile.own[j * kChunk + row];
      if (Factored) {
        y = lane_pair<T>(tile.y(j), tile_row, tile_col);
      } else if (exists) {
        y = unpaired<T>(*reinterpret_cast<const uint32_t*>(chunk_rows<T>(memory(j).y, piece, query_head) +
                                                           row * memory(j).y.stride[1] + col));
        own *= p.y_scale;
      }
      ds.x += own * y.x, ds.y += own * y.y;
    }
    if (Factored) ds = {divide_fast(ds.x, r.x), divide_fast(ds.y, r.y)};
    u.at[n][2 * i] = ds.x, u.at[n][2 * i + 1] = ds.y;
  });
}

// Stores ds and dg_t = edge - sum_{j<t} c_j. If s = 1 - e^g, ds is not stored and dg_t gets -e^{g_t} ds_t.
template <typename T, int M, int Memories>
__device__ inline void GatedColumnBlock<T, M, Memories>::put(const Sums<8>& u) const {
  const Beyond beyond{reinterpret_cast<float*>(tile.gradient.data)};
  static_assert(Beyond::kBytes <=
                SharedTile<T, kChunk, M>::kBytes + 2 * SharedTile<T, kChunk, kSlab>::kBytes);
  if (p.s.data == nullptr) {
    __syncthreads();
    const float* g = chunk_rows<float>(p.g, piece, head);
    each_pair([&](int n, int i, int row, int col) {
      if (row >= piece.length || col >= shape.M) return;
      const float2 gate = *reinterpret_cast<const float2*>(g + row * p.g.stride[1] + col);
      beyond.at(row, col) = -exp2_fast(kLog2E * gate.x) * u.at[n][2 * i];
      beyond.at(row, col + 1) = -exp2_fast(kLog2E * gate.y) * u.at[n][2 * i + 1];
    });
  }
  if (p.s.data != nullptr) {
    store_rows_of<T>(u, group == 0 ? tile.x : tile.read, warp, p.ds, piece, query_head, writes.first_column(),
                     shape.M);
  }
  __syncthreads();
  const auto put_dg = [&](const auto& rest) {
    put_gate_gradients<kThreads, 4 * kGroups>(tile.g, tile.edge, p.dg, piece, query_head, shape.M, rest);
  };
  if (p.s.data != nullptr) {
    put_dg([](int, int) { return 0.f; });
  } else {
    put_dg([&](int row, int m) { return beyond.at(row, m); });
  }
}

}  // namespace girih::kernels
