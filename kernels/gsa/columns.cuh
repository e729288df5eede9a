// The gradients of key rows, one block a chunk and query head, warp w of every four with rows 16 w to 16 w +
// 15. G: what later chunks and the final state give to the state after this one. For each memory, one after
// the other (gsa's keys and values; gla has the second alone, with k and q in s's and p's place):
//
//     dx_j = G_j s_j         ds_j = sum of G_j^T x_j over the memories
//     G_j = e^{L_C - L_j} G + sum_{t>=j} e^{L_t - L_j} read_t y_t^T
//     dg_t = sum over the memories' rows of G_t * e^{g_t} H_{t-1}
//
// with x, read, y: k, q, scale dz, or v, do, p. What a row gives to its own token crosses no gate. Without
// it, with w = z dz + p dp of reads and s ds of writes, in the chunk
//
//     dg_t = sum H * (gradient of H) - sum_{j<t} (w - s ds)_j
//
// (s as it is in G's part of ds, as the tensor cores saw it in the rows' part, so that pairs of rows cancel)
//
// H the states before the chunk: their gradient is what the reverse scan wrote for the chunk before. Of the
// query heads that share a memory only the first adds what G gives.
#pragma once

#include "gsa/gradients.cuh"
#include "gsa/writes.cuh"

namespace girih::kernels {

// A group of four warps for every 64 of M.
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

template <typename T, int M, int Memories>
__global__ void __launch_bounds__(kGroup*(M / 64), M == 64 ? 3 : 1)
    gated_columns_kernel(const __grid_constant__ GatedColumns p) {
  using Tiles = GatedColumnTiles<T, M, Memories>;
  constexpr int kGroups = Tiles::kGroups, kThreads = kGroup * kGroups;
  extern __shared__ __align__(128) unsigned char shared[];
  const Tiles tile(shared);
  const GsaShape& shape = p.shape;
  const int warp = threadIdx.x / 32 % 4, group = threadIdx.x / kGroup;
  const int query_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.query_heads));
  const int queries = shape.query_heads / shape.heads, head = query_head / queries;
  const bool first = query_head % queries == 0;
  const int64_t chunk = blockIdx.x / static_cast<unsigned>(shape.query_heads);
  const Piece piece = piece_at(shape.tokens, chunk, kChunk);
  if (piece.length == 0) return;

  const auto memory = [&](int i) -> const ColumnMemory& { return p.memory[i + 2 - Memories]; };
  const auto first_row = [&](int i) { return i + 2 - Memories == 0 ? 0 : shape.D; };
  const auto load = [&](const auto& to, const In<4>& from, int of, int col, int width) {
    load_async<kThreads>(to, chunk_rows<T>(from, piece, of) + col, from.stride[1], piece.length, width - col,
                         threadIdx.x);
  };
  const auto load_slab = [&](int i, int col, bool with_x = true) {
    const ColumnMemory& m = memory(i);
    if (with_x) load(tile.x, m.x, head, col, m.width);
    load(tile.read, m.read, query_head, col, m.width);
    load_async<kThreads>(tile.gradient, state_rows<T>(p.gradients, shape, chunk, head, first_row(i) + col),
                         shape.M, first ? m.width - col : 0, shape.M, threadIdx.x);
    commit_copies();
  };
  load_gates<kThreads>(tile.g, p.g, piece, head, shape.M);
  load_weights<kThreads>(tile.s, p.s, p.g, piece, head, shape.M);
  commit_copies();
#pragma unroll
  for (int i = 0; i < Memories; ++i) load(tile.y(i), memory(i).y_scan, query_head, 0, shape.M);
  load_slab(0, 0);
  // What the edge needs, while the copies are on their way: the block of the chunk before has just read it.
  EdgeSum<kThreads, M> edge;
  typename EdgeSum<kThreads, M>::Rows edge_rows[Memories][2];
  const auto load_edge = [&](int i, int half, int slab) {
    return edge.load(state_rows<T>(p.states, shape, chunk, head, first_row(i) + slab),
                     state_rows<T>(p.gradients, shape, chunk - 1, head, first_row(i) + slab),
                     min(kSlab, memory(i).width - slab), shape.M, threadIdx.x, half);
  };
  // Not the last of four halves where it has no registers: to go to memory it was waited for, and with it
  // all that was on its way before.
  const auto comes_late = [](int i, int half) { return M == 64 && i == 1 && half == 1; };
  const auto load_edges = [&](bool late) {
#pragma unroll
    for (int i = 0; i < Memories; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (comes_late(i, half) == late) edge_rows[i][half] = load_edge(i, half, 0);
      }
    }
  };
  const bool has_edge = first && piece.index > 0;
  if (has_edge) load_edges(false);

  wait_copies<1>();
  __syncthreads();
  RowWrites<T, M> writes;
  writes.at = {{tile.g, tile.decay, tile.totals, warp},         tile.s, tile.end,
               {rows_of(tile.x, warp) + group * kRows * kRows}, group,  p.y_scale};
  writes.template start<4 * kGroups>();
  if (has_edge) load_edges(true);
#pragma unroll
  for (int i = 0; i < Memories; ++i) {
    const ColumnMemory& m = memory(i);
    if (has_edge) {
      edge.template add<T>(edge_rows[i][0]);
      edge.template add<T>(edge_rows[i][1]);
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
  if (!writes.factored) {
    wait_copies<0>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Memories; ++i) load(tile.y(i), memory(i).y, query_head, 0, shape.M);
    commit_copies();
  }
  wait_copies<0>();
  __syncthreads();

  // u: ds, the group's 64 columns; where factors serve without e^X. What the chunk's own rows give comes
  // last.
  Sums<8> u;
  Operand<2> first_scores[2];
  fill(u, 0.f);
  const float* w_rows = chunk_rows<float>(p.w, piece, query_head);
  const auto take = [&](int i, auto serve) {
    constexpr bool factored = decltype(serve)::value;
    if (i + 1 == Memories) {  // not earlier: the L2 cache would not keep it
      for (int j = threadIdx.x; j < piece.length * (M / 32); j += kThreads) {
        const int col = j % (M / 32) * 32;
        if (col < shape.M) prefetch(w_rows + j / (M / 32) * p.w.stride[1] + col);
      }
    }
    const int width = memory(i).width;
    // a = X Read^T,   part = X G
    Scores a;
    Sums<8> part;
    zero(a);
    fill(part, 0.f);
    Sums<8>& sums = factored ? u : part;
    for (int slab = 0;; slab += kSlab) {
#pragma unroll 2
      for (int col = 0; col < kSlab; col += 16) {
        uint32_t x[4];
        load_block(x, tile.x, kRows * warp, col);
        add_scores<Side::later, T>(a, x, tile.read, col, warp);
        add_product<T>(sums, x, tile.gradient, col, writes.first_column());
      }
      if (slab + kSlab >= width) break;
      __syncthreads();
      load_slab(i, slab + kSlab);
      wait_copies<0>();
      __syncthreads();
    }
    if (group == 0) put_diagonal(tile.own + i * kChunk, a, warp);
    __syncwarp();

    // sums += [a_jt e^{L_t - L_j} y_t, t > j],   dX = f G^T + W Read
    Operand<2> w[2];
    if constexpr (factored) {
      Operand<2> scores[2];
      round_scores<Side::later, false, T>(scores, a, warp);
      if (i + 1 < Memories) {
#pragma unroll
        for (int h = 0; h < 2; ++h) first_scores[h] = scores[h];
      } else {
        writes.keep_rounding(u);
        if (i > 0) writes.value_write(u, first_scores, tile.y(0));
        writes.value_write(u, scores, tile.y(i));
      }
      writes.key_write(w, tile.y(i));
    } else {
      __syncthreads();  // the scratch is rows of x
      writes.write_by_blocks(part, w, a, tile.y(i));
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) u.at[n][j] += part.at[n][j];
      }
    }
    constexpr int kEights = 8 / kGroups;  // of the slab's columns, the group's
    const int of_group = 8 * kEights * group;
    const int last = (width - 1) / kSlab * kSlab;  // still in the tiles
    for (int col = last; col >= 0; col -= kSlab) {
      if (kGroups > 1 || col < last)
        __syncthreads();  // rows on their way out go through x: both groups read it
      if (col < last) {
        load_slab(i, col, false);
        wait_copies<0>();
        __syncthreads();
      }
      Sums<kEights> dx;
      fill(dx, 0.f);
      add_scored<Side::later, T>(dx, w, tile.read, warp, of_group);
#pragma unroll 2
      for (int m = 0; m < M; m += 16) {
        uint32_t weights[4];
        load_block(weights, tile.end, kRows * warp, m);
        add_product_transposed<T>(dx, weights, tile.gradient, of_group, m);
      }
      store_rows_of<T, kEights>(dx, tile.x, warp, memory(i).dx, piece, query_head, col + of_group, width,
                                of_group);
    }
    if (i + 1 < Memories) {
      __syncthreads();
      load_slab(i + 1, 0);
      wait_copies<0>();
      __syncthreads();
    }
  };
  if (writes.factored) {
#pragma unroll 1
    for (int i = 0; i < Memories; ++i) take(i, std::true_type());
  } else {
#pragma unroll 1
    for (int i = 0; i < Memories; ++i) take(i, std::false_type());
  }

  // f(n, i, row, column) of the thread's pairs of u.
  const auto each_pair = [&](const auto& f) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        f(n, i, kRows * warp + lane_row() + 8 * i, writes.first_column() + 8 * n + lane_col());
      }
    }
  };
  // Rows and columns that do not exist are left out later.
  float2 w[8][2];
  each_pair([&](int n, int i, int row, int col) {
    w[n][i] = *reinterpret_cast<const float2*>(w_rows + min(row, piece.length - 1) * p.w.stride[1] +
                                               min(col, shape.M - 2));
  });
  if (kGroups > 1) __syncthreads();  // rows on their way out go through read too

  // ds, and c = w - s ds in place of g.
  const auto finish = [&](auto serve) {
    constexpr bool factored = decltype(serve)::value;
    each_pair([&](int n, int i, int row, int col) {
      const int tile_row = kRows * warp + 8 * i, tile_col = writes.first_column() + 8 * n;
      auto& c = *reinterpret_cast<float2*>(&lane_at(tile.g, tile_row, tile_col));
      const bool exists = row < piece.length && col < shape.M;
      float2 ds = {u.at[n][2 * i], u.at[n][2 * i + 1]};
      const float2 s = lane_pair<T>(factored ? tile.end : tile.s, tile_row, tile_col);
      const float2 r = factored ? c : float2{1.f, 1.f};
      c = {w[n][i].x - s.x * ds.x, w[n][i].y - s.y * ds.y};
      if (factored) {
        const float2 lost = lane_pair<T>(tile.s, tile_row, tile_col);
        c.x -= lost.x, c.y -= lost.y;
      }
      if (!exists) c = {0.f, 0.f};
        // What the row gave to its own token.
#pragma unroll
      for (int j = 0; j < Memories; ++j) {
        float2 y = {0.f, 0.f};
        float own = tile.own[j * kChunk + row];
        if (factored) {
          y = lane_pair<T>(tile.y(j), tile_row, tile_col);
        } else if (exists) {
          y = unpaired<T>(*reinterpret_cast<const uint32_t*>(chunk_rows<T>(memory(j).y, piece, query_head) +
                                                             row * memory(j).y.stride[1] + col));
          own *= p.y_scale;
        }
        ds.x += own * y.x, ds.y += own * y.y;
      }
      if (factored) ds = {divide_fast(ds.x, r.x), divide_fast(ds.y, r.y)};
      u.at[n][2 * i] = ds.x, u.at[n][2 * i + 1] = ds.y;
    });
  };
  if (writes.factored) {
    finish(std::true_type());
  } else {
    finish(std::false_type());
  }
  const SharedTile<float, kChunk, M> beyond{reinterpret_cast<float*>(tile.gradient.data)};
  static_assert(SharedTile<float, kChunk, M>::kBytes <=
                SharedTile<T, kChunk, M>::kBytes + 2 * SharedTile<T, kChunk, kSlab>::kBytes);
  if (p.s.data == nullptr) {  // s = 1 - e^g: the rest of dg
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
  const auto put = [&](const auto& rest) {
    put_gate_gradients<kThreads, 4 * kGroups>(tile.g, tile.edge, p.dg, piece, query_head, shape.M, rest);
  };
  if (p.s.data != nullptr) {
    put([](int, int) { return 0.f; });
  } else {
    put([&](int row, int m) { return beyond.at(row, m); });
  }
}

template <typename T, int M, int Memories>
cudaError_t launch_gated_columns(const GatedColumns& p, cudaStream_t stream) {
  return launch_blocks<gated_columns_kernel<T, M, Memories>>(
      p, kGroup * (M / 64), GatedColumnTiles<T, M, Memories>::kBytes, stream);
}

}  // namespace girih::kernels
