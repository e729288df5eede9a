// dk and dv of headers: the shares of their own chunk plus the sums over later chunks, in the order of the
// list. A warp has a header.
#pragma once

#include "cat_attention/header_list.h"
#include "cat_attention/keys.cuh"
#include "cat_attention/launch.h"
#include "cat_attention/sm90/launch.h"

namespace girih::kernels {

struct CatJoin {
  CatOwnGradients call;
  CatHeaderList list;
};

template <typename T, int Tile>
__global__ void __launch_bounds__(kCatThreads) cat_join_kernel(const __grid_constant__ CatJoin p) {
  const CatShape& shape = p.call.shape;
  const CatHeaderList& list = p.list;
  const int64_t chunks = shape.chunks.tokens, all = shape.chunks.batch * shape.heads * chunks,
                number = int64_t{blockIdx.x} * kCatWarps + warp_index();
  if (number >= all) return;
  const int64_t of = number / chunks, header = number - of * chunks, block = header / list.headers;
  constexpr int kEach = Tile / 32;  // columns of a lane
  const int col = lane() * kEach;
  const float* const share = p.call.partials + list.numbers() + number * 2 * Tile + col;
  auto keys = load<kEach>(share), values = load<kEach>(share + Tile);
  if (block < list.blocks) {
    const int64_t begin = of * list.each + list.before(block), end = begin + list.of(block);
    const int64_t first = begin / list.run, last = (end - 1) / list.run;
    const float* from = p.call.partials + list.place(first, of * list.blocks + block) +
                        (header - block * list.headers) * Tile + col;
#pragma unroll 2
    for (int64_t run = first; run <= last; ++run, from += list.size()) {
      const auto more_keys = load<kEach>(from), more_values = load<kEach>(from + list.headers * Tile);
#pragma unroll
      for (int i = 0; i < kEach; ++i) keys.at[i] += more_keys.at[i], values.at[i] += more_values.at[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) keys.at[i] *= shape.scale;
  const int64_t batch = of / shape.heads, row = header * shape.size;
  const int head = static_cast<int>(of - batch * shape.heads);
  if (col < shape.D) store<kEach>(row_of<T>(p.call.dk, batch, row, head) + col, keys);
  if (col < shape.V) store<kEach>(row_of<T>(p.call.dv, batch, row, head) + col, values);
}

template <typename T, int Tile>
cudaError_t launch_cat_join(const CatOwnGradients& call, cudaStream_t stream) {
  const CatShape& shape = call.shape;
  const CatJoin p{call, CatHeaderList(shape, Tile, group_header_tiles<Tile>())};
  const int64_t warps = shape.chunks.batch * shape.heads * shape.chunks.tokens;
  return launch_cat<cat_join_kernel<T, Tile>>(p, divide_up(warps, kCatWarps), kCatThreads, 0, stream);
}

}  // namespace girih::kernels
