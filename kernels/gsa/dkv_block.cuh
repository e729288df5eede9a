// A block of gated_dkv_kernel: its shared memory, its members, and its phases in the order of their
// calls.
#pragma once

#include "gsa/gate_gradients.cuh"
#include "gsa/writes.cuh"

namespace girih::kernels {

// Shared memory. s and decayed_s: see RowWrites. first_y: y of every memory, see y(). gradient: G of 64 rows
// of a memory. own [Memories, 64]: scores of rows with themselves. The block has one warpgroup for each 64
// slots.
template <typename T, int M, int Memories>
struct GatedDkvTiles {
  static constexpr int kWarpgroups = M / 64;

  using Slots = SharedTile<T, kChunk, M>;

  SharedTile<float, kChunk, M> g;
  Slots s, decayed_s, first_y, gradient;
  SharedTile<T, kChunk, kSlab> x, read;
  float *totals, *decay, *state_dot, *own;

  static constexpr int kBytes =
      SharedTile<float, kChunk, M>::kBytes + (3 + Memories) * SharedTile<T, kChunk, M>::kBytes +
      2 * SharedTile<T, kChunk, kSlab>::kBytes + (4 + 1 + 4 * kWarpgroups) * M * 4 + Memories * kChunk * 4;

  __device__ explicit GatedDkvTiles(unsigned char* shared) {
    SharedAllocator layout(shared);
    layout(g)(s)(decayed_s)(first_y);
    layout.next += (Memories - 1) * Slots::kBytes;
    layout(gradient)(x)(read)(totals, 4 * M)(decay, M)(state_dot, 4 * kWarpgroups * M)(own,
                                                                                       Memories * kChunk);
  }
  __device__ Slots y(int i) const { return {first_y.data + i * kChunk * M}; }
};

// A block has a chunk and a query head. Memory indices count from the first memory that exists. Accumulators
// are local variables of the callers: as members, arrays would keep the whole object out of registers until
// every loop over them is unrolled.
template <typename T, int M, int Memories>
struct GatedDkvBlock {
  using Tiles = GatedDkvTiles<T, M, Memories>;
  using WeightTerms = SharedTile<float, kChunk, M>;
  static constexpr int kWarpgroups = Tiles::kWarpgroups, kThreads = kWarpgroupThreads * kWarpgroups;
  using Dot = StateDot<kThreads, M>;
  using StateDotRows = typename Dot::Rows[Memories][2];  // for each memory both halves of its first slab

  const GatedDkv& p;
  const Tiles tile;
  const GsaShape& shape;
  const int warp, warpgroup, query_head, head;
  const bool is_group_leader;  // whether this is the first query head of the memory head
  const int64_t chunk;
  const TokenRange range;
  RowWrites<T, M> writes;

  __device__ GatedDkvBlock(const GatedDkv& p, unsigned char* shared)
      : p(p),
        tile(shared),
        shape(p.shape),
        warp(threadIdx.x / 32 % 4),
        warpgroup(threadIdx.x / kWarpgroupThreads),
        query_head(static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.query_heads))),
        head(query_head / (shape.query_heads / shape.heads)),
        is_group_leader(query_head % (shape.query_heads / shape.heads) == 0),
        chunk(blockIdx.x / static_cast<unsigned>(shape.query_heads)),
        range(token_range_at(shape.tokens, chunk, kChunk)) {}

  // Starts the copies of g and s, then of the first slab of the first memory.
  __device__ void start_loads() const;
  __device__ void start_writes();
  // Loads the rows for the state dot whose is_loaded_late() is `is_late`.
  __device__ void load_state_dot_rows(StateDotRows& rows, bool is_late) const;
  __device__ void store_state_dot(const StateDotRows& rows) const;
  __device__ void load_unscaled() const;

  // Adds the terms of all memories to u and stores dx.
  template <bool IsFactored>
  __device__ void accumulate_memories(Accumulator<8>& u, const float* w_rows) const;
  __device__ void prefetch_w(const float* w_rows) const;
  __device__ void multiply(int i, Scores& a, Accumulator<8>& sums) const;
  template <bool IsFactored>
  __device__ void write(int i, const Scores& a, Accumulator<8>& u, Accumulator<8>& product,
                        AFragment<2> (&first_scores)[2], AFragment<2> (&w)[2]) const;
  template <bool IsFactored>
  __device__ void store_dx(int i, const AFragment<2> (&w)[2]) const;

  __device__ void load_w(float2 (&w)[8][2], const float* w_rows) const;
  template <bool IsFactored>
  __device__ void compute_ds(Accumulator<8>& u, const float2 (&w)[8][2]) const;
  __device__ void store(const Accumulator<8>& u) const;

  __device__ const DkvMemory& memory(int i) const { return p.memory[i + 2 - Memories]; }
  // The first row of the memory in the states [D + V, M].
  __device__ int first_row(int i) const { return i + 2 - Memories == 0 ? 0 : shape.D; }
  __device__ bool has_state_dot() const { return is_group_leader && range.index > 0; }

  template <class Tile>
  __device__ void load(const Tile& to, const InputTensor<4>& from, int from_head, int col, int width) const {
    load_async<kThreads>(to, chunk_rows<T>(from, range, from_head) + col, from.stride[1], range.length,
                         width - col, threadIdx.x);
  }
  __device__ void load_slab(int i, int col, bool with_x = true) const {
    const DkvMemory& m = memory(i);
    if (with_x) load(tile.x, m.x, head, col, m.width);
    load(tile.read, m.read, query_head, col, m.width);
    load_async<kThreads>(tile.gradient, state_rows<T>(p.gradients, shape, chunk, head, first_row(i) + col),
                         shape.M, is_group_leader ? m.width - col : 0, shape.M, threadIdx.x);
    commit_copies();
  }
  __device__ typename Dot::Rows load_state_dot_half(int i, int half, int slab) const {
    return Dot::load(state_rows<T>(p.states, shape, chunk, head, first_row(i) + slab),
                     state_rows<T>(p.gradients, shape, chunk - 1, head, first_row(i) + slab),
                     min(kSlab, memory(i).width - slab), shape.M, threadIdx.x, half);
  }
  // The last of the four halves is loaded later: there are no registers for it. If it went to local memory,
  // its store would wait for it and for all loads issued before it.
  __device__ static bool is_loaded_late(int i, int half) { return M == 64 && i == 1 && half == 1; }

  // Calls f(n, i, row, column) for the thread's pairs of the accumulator.
  template <class F>
  __device__ void for_each_register_pair(const F& f) const {
    kernels::for_each_register_pair<8>([&](int n, int i) {
      f(n, i, kWarpRows * warp + lane_row() + 8 * i, writes.first_column() + 8 * n + lane_col());
    });
  }
};

template <typename T, int M, int Memories>
__device__ inline void GatedDkvBlock<T, M, Memories>::start_loads() const {
  load_rows<kThreads>(tile.g, p.g, range, head, 0, shape.M);
  load_weights<kThreads>(tile.s, p.s, p.g, range, head, shape.M);
  commit_copies();
#pragma unroll
  for (int i = 0; i < Memories; ++i) load(tile.y(i), memory(i).y_scan, query_head, 0, shape.M);
  load_slab(0, 0);
}

template <typename T, int M, int Memories>
__device__ inline void GatedDkvBlock<T, M, Memories>::start_writes() {
  writes.operands = {{tile.g, tile.decay, tile.totals, warp},
                     tile.s,
                     tile.decayed_s,
                     {warp_scratch(tile.x, warp) + warpgroup * kWarpRows * kWarpRows},
                     warpgroup,
                     p.y_scale};
  writes.template start<4 * kWarpgroups>();
}

template <typename T, int M, int Memories>
__device__ inline void GatedDkvBlock<T, M, Memories>::load_state_dot_rows(StateDotRows& rows,
                                                                          bool is_late) const {
#pragma unroll
  for (int i = 0; i < Memories; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (is_loaded_late(i, half) == is_late) rows[i][half] = load_state_dot_half(i, half, 0);
    }
  }
}

// Writes the sum of H * (gradient of H) over the warp's rows of the memories, H the state before the chunk.
template <typename T, int M, int Memories>
__device__ inline void GatedDkvBlock<T, M, Memories>::store_state_dot(const StateDotRows& rows) const {
  Dot state_dot;
#pragma unroll
  for (int i = 0; i < Memories; ++i) {
    const DkvMemory& m = memory(i);
    if (has_state_dot()) {
      state_dot.template add<T>(rows[i][0]);
      state_dot.template add<T>(rows[i][1]);
      for (int slab = kSlab; slab < m.width; slab += kSlab) {
        const auto one = load_state_dot_half(i, 0, slab), two = load_state_dot_half(i, 1, slab);
        state_dot.template add<T>(one);
        state_dot.template add<T>(two);
      }
    } else if (is_group_leader) {
      state_dot.add_start(m.initial, m.dinitial, range, head, m.width, shape.M, threadIdx.x);
    }
  }
  state_dot.store(tile.state_dot + threadIdx.x / 32 * M);
}

// Without factors: loads y in place of y_scan.
template <typename T, int M, int Memories>
__device__ inline void GatedDkvBlock<T, M, Memories>::load_unscaled() const {
  wait_copies<0>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < Memories; ++i) load(tile.y(i), memory(i).y, query_head, 0, shape.M);
  commit_copies();
}

template <typename T, int M, int Memories>
__device__ inline void GatedDkvBlock<T, M, Memories>::prefetch_w(const float* w_rows) const {
  for (int j = threadIdx.x; j < range.length * (M / 32); j += kThreads) {
    const int col = j % (M / 32) * 32;
    if (col < shape.M) prefetch(w_rows + j / (M / 32) * p.w.stride[1] + col);
  }
}

// a = X Read^T,   sums += X G
template <typename T, int M, int Memories>
__device__ inline void GatedDkvBlock<T, M, Memories>::multiply(int i, Scores& a, Accumulator<8>& sums) const {
  zero(a);
  for_each_slab(
      memory(i).width, [&](int col) { load_slab(i, col); },
      [&](int) {
        add_slab<Side::later, T>(a, sums, tile.x, tile.read, tile.gradient, warp, writes.first_column());
      });
  if (warpgroup == 0) store_diagonal(tile.own + i * kChunk, a, warp);
  __syncwarp();
}

// u += [a_jt e^{L_t - L_j} y_t, t > j],   w = W = [s_j . e^{L_t - L_j} y_t, t >= j]
//
// With factors u contains X G, and the terms of all memories are added with the last memory; the scores of
// the first memory stay in `first_scores` until then. Without factors `product` contains X G of
// this memory.
template <typename T, int M, int Memories>
template <bool IsFactored>
__device__ inline void GatedDkvBlock<T, M, Memories>::write(int i, const Scores& a, Accumulator<8>& u,
                                                            Accumulator<8>& product,
                                                            AFragment<2> (&first_scores)[2],
                                                            AFragment<2> (&w)[2]) const {
  if constexpr (IsFactored) {
    AFragment<2> scores[2];
    round_scores<Side::later, false, T>(scores, a, warp);
    if (i + 1 < Memories) {
#pragma unroll
      for (int h = 0; h < 2; ++h) first_scores[h] = scores[h];
    } else {
      apply_shift<T, true>(u);  // X G is multiplied by s~ and 1 / r
      writes.store_rounding_error(u);
      if (i > 0) writes.value_write(u, first_scores, tile.y(0));
      writes.value_write(u, scores, tile.y(i));
    }
    writes.key_write(w, tile.y(i));
  } else {
    __syncthreads();  // the scratch overlaps the tile x
    writes.write_by_subchunks(product, w, a, tile.y(i));
    add(u, product);
  }
}

// dX = f G^T + W Read, from the last slab to the first; the last slab is still in the tiles.
template <typename T, int M, int Memories>
template <bool IsFactored>
__device__ inline void GatedDkvBlock<T, M, Memories>::store_dx(int i, const AFragment<2> (&w)[2]) const {
  constexpr int kEights = 8 / kWarpgroups;  // tiles of 8 columns of the warpgroup
  const int width = memory(i).width, warpgroup_col = 8 * kEights * warpgroup;
  const int last = (width - 1) / kSlab * kSlab;
  for (int col = last; col >= 0; col -= kSlab) {
    if (kWarpgroups > 1 || col < last)
      __syncthreads();  // the stores use x as their buffer, which both warpgroups read
    if (col < last) {
      load_slab(i, col, false);
      wait_copies<0>();
      __syncthreads();
    }
    Accumulator<kEights> dx;
    fill(dx, 0.f);
    add_score_product<Side::later, T>(dx, w, tile.read, warp, warpgroup_col);
    if (IsFactored) apply_shift<T>(dx);  // the product with s~ below contains 2^factor_shift
    add_tile_product_transposed<2>(dx, tile.decayed_s, kWarpRows * warp, tile.gradient, warpgroup_col);
    if (IsFactored) apply_shift<T, true>(dx);
    store_rows_as<T, kEights>(dx, tile.x, warp, memory(i).dx, range, query_head, col + warpgroup_col, width,
                              warpgroup_col);
  }
}

// u = sum over the memories of X G + [a_jt e^{L_t - L_j} y_t, t > j]; with factors without e^X.
template <typename T, int M, int Memories>
template <bool IsFactored>
__device__ inline void GatedDkvBlock<T, M, Memories>::accumulate_memories(Accumulator<8>& u,
                                                                          const float* w_rows) const {
  AFragment<2> first_scores[2];
#pragma unroll 1
  for (int i = 0; i < Memories; ++i) {
    if (i + 1 == Memories) prefetch_w(w_rows);  // earlier, L2 would evict the lines before their use
    Scores a;
    Accumulator<8> product;
    fill(product, 0.f);
    multiply(i, a, IsFactored ? u : product);
    AFragment<2> w[2];
    write<IsFactored>(i, a, u, product, first_scores, w);
    store_dx<IsFactored>(i, w);
    if (i + 1 < Memories) {
      __syncthreads();
      load_slab(i + 1, 0);
      wait_copies<0>();
      __syncthreads();
    }
  }
}

// Loads the thread's pairs of w. Rows and columns outside of the array are clamped, and compute_ds() ignores
// them.
template <typename T, int M, int Memories>
__device__ inline void GatedDkvBlock<T, M, Memories>::load_w(float2 (&w)[8][2], const float* w_rows) const {
  for_each_register_pair([&](int n, int i, int row, int col) {
    w[n][i] = *reinterpret_cast<const float2*>(w_rows + min(row, range.length - 1) * p.w.stride[1] +
                                               min(col, shape.M - 2));
  });
}

// Writes c = w - s u in place of g, then
//
//     u_j = ds_j = (u_j + sum over the memories of a_jj y_j) e^X,    e^X with factors only
template <typename T, int M, int Memories>
template <bool IsFactored>
__device__ inline void GatedDkvBlock<T, M, Memories>::compute_ds(Accumulator<8>& u,
                                                                 const float2 (&w)[8][2]) const {
  for_each_register_pair([&](int n, int i, int row, int col) {
    const int tile_row = kWarpRows * warp + 8 * i, tile_col = writes.first_column() + 8 * n;
    auto& c = *reinterpret_cast<float2*>(&lane_element(tile.g, tile_row, tile_col));
    const bool exists = row < range.length && col < shape.M;
    float2 ds = {u.at[n][2 * i], u.at[n][2 * i + 1]};
    const float2 s = load_lane_pair<T>(IsFactored ? tile.decayed_s : tile.s, tile_row, tile_col);
    const float2 r = IsFactored ? c : float2{1.f, 1.f};
    c = {w[n][i].x - s.x * ds.x, w[n][i].y - s.y * ds.y};
    if (IsFactored) {
      const float2 rounding = load_lane_pair<T>(tile.s, tile_row, tile_col);
      c.x -= rounding.x, c.y -= rounding.y;
    }
    if (!exists) c = {0.f, 0.f};
      // The terms of the row's own token.
#pragma unroll
    for (int j = 0; j < Memories; ++j) {
      float2 y = {0.f, 0.f};
      float own = tile.own[j * kChunk + row];
      if (IsFactored) {
        y = load_lane_pair<T>(tile.y(j), tile_row, tile_col);
      } else if (exists) {
        y = unpack_pair<T>(*reinterpret_cast<const uint32_t*>(chunk_rows<T>(memory(j).y, range, query_head) +
                                                              row * memory(j).y.stride[1] + col));
        own *= p.y_scale;
      }
      ds.x += own * y.x, ds.y += own * y.y;
    }
    if (IsFactored) ds = {divide_fast(ds.x, r.x), divide_fast(ds.y, r.y)};
    u.at[n][2 * i] = ds.x, u.at[n][2 * i + 1] = ds.y;
  });
}

// Stores ds and dg_t = state dot - sum_{j<t} c_j. If s = 1 - e^g, ds is not stored and dg_t gets -e^{g_t}
// ds_t.
template <typename T, int M, int Memories>
__device__ inline void GatedDkvBlock<T, M, Memories>::store(const Accumulator<8>& u) const {
  const WeightTerms weight_term{reinterpret_cast<float*>(tile.gradient.data)};
  static_assert(WeightTerms::kBytes <=
                SharedTile<T, kChunk, M>::kBytes + 2 * SharedTile<T, kChunk, kSlab>::kBytes);
  if (p.s.data == nullptr) {
    __syncthreads();
    const float* g = chunk_rows<float>(p.g, range, head);
    for_each_register_pair([&](int n, int i, int row, int col) {
      if (row >= range.length || col >= shape.M) return;
      const float2 gate = *reinterpret_cast<const float2*>(g + row * p.g.stride[1] + col);
      weight_term.at(row, col) = -exp2_fast(kLog2E * gate.x) * u.at[n][2 * i];
      weight_term.at(row, col + 1) = -exp2_fast(kLog2E * gate.y) * u.at[n][2 * i + 1];
    });
  }
  if (p.s.data != nullptr) {
    store_rows_as<T>(u, warpgroup == 0 ? tile.x : tile.read, warp, p.ds, range, query_head,
                     writes.first_column(), shape.M);
  }
  __syncthreads();
  const auto store_dg = [&](const auto& rest) {
    store_gate_gradients<kThreads, 4 * kWarpgroups>(tile.g, tile.state_dot, p.dg, range, query_head, shape.M,
                                                    rest);
  };
  if (p.s.data != nullptr) {
    store_dg([](int, int) { return 0.f; });
  } else {
    store_dg([&](int row, int m) { return weight_term.at(row, m); });
  }
}

}  // namespace girih::kernels
