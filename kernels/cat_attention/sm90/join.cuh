// dk and dv of headers: what their own chunk has given, and after it the sums of later chunks in the list's
// order. A warp has a header's keys or its values.
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
                number = (int64_t{blockIdx.x} * kCatWarps + warp_index()) / 2;
  const int of_values = warp_index() % 2;
  if (number >= all) return;
  const int64_t of = number / chunks, header = number - of * chunks, block = header / list.headers;
  constexpr int kEach = Tile / 32;  // columns of a lane
  const int col = lane() * kEach;
  auto sum = load<kEach>(p.call.partials + list.numbers() + (number * 2 + of_values) * Tile + col);
  if (block < list.blocks) {
    const int64_t begin = of * list.each + list.before(block), end = begin + list.of(block);
    for (int64_t run = begin / list.run; run * list.run < end; ++run) {
      const float* from = p.call.partials + list.place(run, of * list.blocks + block) +
                          (of_values * list.headers + header - block * list.headers) * Tile + col;
      const auto more = load<kEach>(from);
#pragma unroll
      for (int i = 0; i < kEach; ++i) sum.at[i] += more.at[i];
    }
  }
  if (col >= (of_values ? shape.V : shape.D)) return;
  if (!of_values) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum.at[i] *= shape.scale;
  }
  const Out<4>& to = of_values ? p.call.dv : p.call.dk;
  store<kEach>(row_of<T>(to, of / shape.heads, header * shape.size, static_cast<int>(of % shape.heads)) + col,
               sum);
}

template <typename T, int Tile>
cudaError_t launch_cat_join(const CatOwnGradients& call, cudaStream_t stream) {
  const CatShape& shape = call.shape;
  const CatJoin p{call, CatHeaderList(shape, Tile, group_header_tiles<Tile>())};
  const int64_t warps = shape.chunks.batch * shape.heads * shape.chunks.tokens * 2;
  return launch_cat<cat_join_kernel<T, Tile>>(p, divide_up(warps, kCatWarps), kCatThreads, 0, stream);
}

}  // namespace girih::kernels
