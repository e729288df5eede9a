// dk and dv: the terms of keys from the rows of their own chunk, and for headers the sums over later chunks,
// added in the order of the list.
#pragma once

#include "cat_attention/header_list.h"
#include "cat_attention/key_tile.cuh"

namespace girih::kernels {

// If the chunks of a tile of keys end with the tile, the tile has one tile of queries and needs one stage:
// three blocks a multiprocessor instead of two.
template <typename T, int Tile>
__host__ __device__ inline int own_stages(const CatShape& shape) {
  return kCatQueries<T, Tile> == kCatBlock && shape.group() == 1 && kCatBlock % shape.size == 0 ? 1 : 2;
}

struct CatOwnParams {
  CatOwnGradients call;
  CatHeaderList list;
};

template <typename T, int Tile>
struct CatOwnMainloop {
  using Keys = CatKeyTile<T, Tile>;
  static constexpr int kQueries = Keys::kQueries;

  const CatOwnGradients& p;
  const CatHeaderList& list;
  Keys& tile;
  int64_t batch;
  int head, part;
  int row, rows;    // first key row, number of key rows
  int tiles;        // number of tiles of queries of a query head
  int first, last;  // rows whose queries attend to the warp's keys

  // Blocks are in the order of tiles of 64 rows; the blocks of the column parts of a head are adjacent.
  __device__ CatOwnMainloop(const CatOwnParams& params, Keys& tile)
      : p(params.call), list(params.list), tile(tile) {
    const auto parts = static_cast<unsigned>(list.parts), heads = static_cast<unsigned>(p.shape.heads),
               all = parts * heads * static_cast<unsigned>(p.shape.chunks.batch), of = blockIdx.x % all;
    part = static_cast<int>(of % parts), head = static_cast<int>(of / parts % heads);
    batch = of / parts / heads;
    tile.column = part * Keys::kColumns;
    row = static_cast<int>(blockIdx.x / all) * kCatBlock;
    rows = min(kCatBlock, p.shape.rows - row);
    tiles = static_cast<int>(divide_up(chunk_end(row + rows - 1) - row, kQueries));
    first = row + 16 * warp_index();
    last = chunk_end(min(first + 15, p.shape.rows - 1)) - 1;
  }

  // One past the last row of the chunk of row `at`.
  __device__ int chunk_end(int at) const { return min((at / p.shape.size + 1) * p.shape.size, p.shape.rows); }
  __device__ int row_at(int i) const { return row + i % tiles * kQueries; }
  __device__ void load(int i) const {
    tile.load_queries(i, p.q, p.dout, p.queries, batch, row_at(i), head * p.shape.group() + i / tiles);
  }

  // In blocks of 16 x 16. With chunks of 16 rows, 16 keys have one block.
  __device__ void process_queries(int i) const {
    if (first >= p.shape.rows) return;
    const int end[2] = {chunk_end(first + lane_row()), chunk_end(first + lane_row() + 8)};
#pragma unroll 1
    for (int j = 0; j < kQueries; j += 16) {
      const int query = row_at(i) + j;
      if (query + 15 < first || query > last) continue;
      tile.template add<2>(i, j, [&](int half, int at, const CatQueryRecord&) {
        return first + lane_row() + 8 * half <= query + at && query + at < end[half];
      });
    }
  }

  __device__ void add() {
    const int all = tiles * p.shape.group();
    tile.begin();
    tile.load_keys(p.k, p.v, batch, row, 1, rows, head);
    load(0);
    for (int i = 0; i < all; ++i) {
      if (i + 1 < all) {
        load(i + 1);
        wait_copies<1>();
      } else {
        wait_copies<0>();
      }
      __syncthreads();
      process_queries(i);
      __syncthreads();
    }
  }

  // Adds the sums of header h, row lane_row() + 8 i of the warp.
  __device__ void add_header_sums(int i, int h) const {
    const int64_t block = h / list.headers;
    if (block >= list.blocks) return;
    const int64_t of = (batch * p.shape.heads + head) * list.parts + part, item = of * list.blocks + block;
    const int64_t begin = of * list.each + list.before(block), end = begin + list.of(block);
    for (int64_t run = begin / list.run; run * list.run < end; ++run) {
      const float* at = p.partials + list.place(run, item) + h % list.headers * Keys::kColumns + lane_col();
#pragma unroll
      for (int n = 0; n < Keys::kColumns / 8; ++n) {
        const auto k = *reinterpret_cast<const float2*>(at + 8 * n),
                   v = *reinterpret_cast<const float2*>(at + 8 * n + list.size() / 2);
        tile.dk.at[n][2 * i] += k.x, tile.dk.at[n][2 * i + 1] += k.y;
        tile.dv.at[n][2 * i] += v.x, tile.dv.at[n][2 * i + 1] += v.y;
      }
    }
  }

  __device__ void store() const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = first + lane_row() + 8 * i;
      if (at < p.shape.rows && at % p.shape.size == 0) add_header_sums(i, at / p.shape.size);
    }
    scale_rows(tile.dk, {p.shape.scale, p.shape.scale});
    // Through the warp's rows of keys and values, which have been read.
    store_gradient(tile.keys(), tile.dk, p.dk, p.shape.D);
    store_gradient(tile.values(), tile.dv, p.dv, p.shape.V);
  }

 private:
  __device__ void store_gradient(const typename Keys::KeyRows& by,
                                 const Accumulator<Keys::kColumns / 8>& sums, const OutputTensor<4>& to,
                                 int width) const {
    store_accumulator(by, 16 * warp_index(), sums);
    __syncwarp();
    store_tile<kCatWarps>(by, row_of<T>(to, batch, row, head) + tile.column, to.stride[1], rows,
                          min(width - tile.column, Keys::kColumns), warp_index());
  }
};

template <typename T, int Tile>
__global__ void __launch_bounds__(kCatThreads)
    cat_own_gradients_kernel(const __grid_constant__ CatOwnParams p) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  CatKeyTile<T, Tile> tile(p.call.shape, shared, own_stages<T, Tile>(p.call.shape));
  CatOwnMainloop<T, Tile> mainloop(p, tile);
  mainloop.add();
  mainloop.store();
}

template <typename T, int Tile>
cudaError_t launch_cat_own_gradients(const CatOwnGradients& call, cudaStream_t stream) {
  const auto& shape = call.shape;
  const CatOwnParams p{
      call, CatHeaderList(shape, Tile,
                          call.is_sm90 ? sm90_header_list_sizes<Tile>() : header_list_sizes<T, Tile>())};
  const int64_t blocks =
      divide_up(shape.rows, kCatBlock) * shape.chunks.batch * shape.heads * (Tile / kCatColumns<Tile>);
  return launch_cat<cat_own_gradients_kernel<T, Tile>>(
      p, blocks, kCatThreads, CatKeyTile<T, Tile>::bytes(own_stages<T, Tile>(shape)), stream);
}

}  // namespace girih::kernels
