// Building blocks of the fp32 kernels: a block of 256 threads works on one chunk of 64 tokens, with tiles of
// 64 x 64 in shared memory, in either order of time.
//
// Thread 16 b + a has rows 4b to 4b + 3 of a 64 x 64 result, so half a warp has four rows. The thread has
// columns 4a to 4a + 3, or a, a + 16, a + 32, a + 48 in products x y^T: there neighbouring lanes read
// neighbouring rows of y, which the pitch of a tile puts in different banks.
#pragma once

#include "fp32/fp32.h"
#include "tile/gates.h"
#include "tile/grid.h"
#include "tile/launch.h"
#include "tile/pack.h"

namespace girih::kernels::fp32 {

constexpr int kThreads = 256;
constexpr int kTile = 64;
constexpr int kPitch = kTile + 4;  // floats from row to row of a tile
constexpr int kTileFloats = kTile * kPitch;
constexpr int kRowBlocks = kTile / 4;  // of four rows
constexpr int kTotalsFloats = kRowBlocks * kPitch;

__device__ inline int row_block() { return static_cast<int>(threadIdx.x) / 16; }  // b
__device__ inline int row_lane() { return static_cast<int>(threadIdx.x) % 16; }   // a

__device__ inline Pack<4> load_four(const float* tile, int row, int col) {
  return load<4>(tile + row * kPitch + col);
}
__device__ inline void store_four(float* tile, int row, int col, const Pack<4>& pack) {
  store<4>(tile + row * kPitch + col, pack);
}

// Calls f(T()) with the element type T.
template <class F>
__device__ inline void dispatch_dtype_device(DType type, const F& f) {
  switch (type) {
    case DType::f16:
      f(__half());
      return;
    case DType::bf16:
      f(__nv_bfloat16());
      return;
    default:
      f(float());
  }
}

// The rows of a chunk in the order of time, or with Reverse from the last token to the first. Rows beyond the
// length of the chunk are zero.
template <bool Reverse>
struct ChunkRows {
  TokenRange range;

  __device__ int64_t token(int row) const {
    return Reverse ? range.start + range.length - 1 - row : range.start + row;
  }

  // Loads rows(i), i = 0..3, columns col..col+3 of one head; zero for col >= cols.
  template <class Rows>
  __device__ void load_rows(Pack<4> (&to)[4], const InputTensor<4>& from, int head, int col, int cols,
                            const Rows& rows) const {
    dispatch_dtype_device(from.dtype, [&](auto element) {
      const auto* data = static_cast<const decltype(element)*>(from.data) +
                         range.sequence.batch * from.stride[0] + head * from.stride[2] + col;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = rows(i);
        to[i] = row < range.length && col < cols ? load<4>(data + token(row) * from.stride[1]) : zeros<4>();
      }
    });
  }
  // Loads the rows of the thread, columns col + 4a to col + 4a + 3.
  __device__ void load_own(Pack<4> (&to)[4], const InputTensor<4>& from, int head, int col, int cols) const {
    load_rows(to, from, head, col + 4 * row_lane(), cols, [](int i) { return 4 * row_block() + i; });
  }
  // Loads columns col..col+63 of all rows to a tile.
  __device__ void load_tile(float* tile, const InputTensor<4>& from, int head, int col, int cols) const {
    Pack<4> rows[4];
    const auto row = [](int i) { return row_block() + 16 * i; };
    load_rows(rows, from, head, col + 4 * row_lane(), cols, row);
#pragma unroll
    for (int i = 0; i < 4; ++i) store_four(tile, row(i), 4 * row_lane(), rows[i]);
  }
  // Stores the rows of the thread, columns col + 4a to col + 4a + 3.
  __device__ void store_own(const OutputTensor<4>& to, int head, int col, int cols,
                            const Pack<4> (&rows)[4]) const {
    dispatch_dtype_device(to.dtype, [&](auto element) {
      col += 4 * row_lane();
      auto* data = static_cast<decltype(element)*>(to.data) + range.sequence.batch * to.stride[0] +
                   head * to.stride[2] + col;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 4 * row_block() + i;
        if (row < range.length && col < cols) store<4>(data + token(row) * to.stride[1], rows[i]);
      }
    });
  }

  // Loads the gates between each row of the thread and the row before it. In reversed time these are the
  // gates of the row before: the write of a token is decayed by all later gates but not by its own, and no
  // gate lies between the last token of the chunk and the state after the chunk.
  __device__ void load_gates(Pack<4> (&g)[4], const InputTensor<4>& from, int head, int col, int cols) const {
    load_rows(g, from, head, col + 4 * row_lane(), cols, [&](int i) {
      const int row = 4 * row_block() + i;
      if constexpr (!Reverse) return row;
      return row > 0 && row < range.length ? row - 1 : kTile;
    });
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) g[i].at[c] = clamp_gate(g[i].at[c]);
    }
  }
};

// Loads 64 x 64 elements of an fp32 matrix to a tile, zero outside of rows x cols.
__device__ inline void load_matrix(float* tile, const float* from, int64_t stride, int rows, int cols) {
  Pack<4> pack[4];
  const int col = 4 * row_lane();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = row_block() + 16 * i;
    pack[i] = row < rows && col < cols ? load<4>(from + row * stride + col) : zeros<4>();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) store_four(tile, row_block() + 16 * i, col, pack[i]);
}

__device__ inline void clear(Pack<4> (&sums)[4]) {
#pragma unroll
  for (int r = 0; r < 4; ++r) sums[r] = zeros<4>();
}

// sum += x . y
__device__ inline void add_dot(float& sum, const Pack<4>& x, const Pack<4>& y) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sum = fmaf(x.at[i], y.at[i], sum);
}
// sum += x * y
__device__ inline void add_scaled(Pack<4>& sum, float x, const Pack<4>& y) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sum.at[i] = fmaf(x, y.at[i], sum.at[i]);
}
__device__ inline void multiply(Pack<4>& x, const Pack<4>& y) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x.at[i] *= y.at[i];
}

// Loads the four rows of the thread from a tile, columns col..col+3.
__device__ inline void load_own_rows(Pack<4> (&rows)[4], const float* tile, int col) {
#pragma unroll
  for (int r = 0; r < 4; ++r) rows[r] = load_four(tile, 4 * row_block() + r, col);
}

// sums += x y, where x is the four rows of the thread x 4 and y is rows row..row+3 of a tile.
__device__ inline void add_product(Pack<4> (&sums)[4], const Pack<4> (&x)[4], const float* tile, int row) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const Pack<4> y = load_four(tile, row + j, 4 * row_lane());
#pragma unroll
    for (int r = 0; r < 4; ++r) add_scaled(sums[r], x[r].at[j], y);
  }
}
// scores += x y^T, where y is columns col..col+3 of the rows a, a + 16, ... of a tile below `rows` (rounded
// up to a multiple of 16). add(sum, x, y) adds x . y to a sum.
template <class Add>
__device__ inline void add_scores(Pack<4> (&scores)[4], const Pack<4> (&x)[4], const float* tile, int col,
                                  int rows, const Add& add) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if (16 * c >= rows) break;
    const Pack<4> y = load_four(tile, row_lane() + 16 * c, col);
#pragma unroll
    for (int r = 0; r < 4; ++r) add(scores[r].at[c], x[r], y);
  }
}
__device__ inline void add_scores(Pack<4> (&scores)[4], const Pack<4> (&x)[4], const float* tile, int col,
                                  int rows) {
  add_scores(scores, x, tile, col, rows,
             [](float& sum, const Pack<4>& x, const Pack<4>& y) { add_dot(sum, x, y); });
}

// The decay e^g of each of the four rows of the thread in four columns, and the decay of all four rows.
struct RowDecays {
  Pack<4> row[4], total;

  __device__ explicit RowDecays(const Pack<4> (&g)[4]) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int r = 0; r < 4; ++r) row[r].at[c] = expf(g[r].at[c]);
      // Not the product of the rows: its rounding errors would accumulate over blocks of equal gates.
      total.at[c] = expf(g[0].at[c] + g[1].at[c] + g[2].at[c] + g[3].at[c]);
    }
  }
  // Decays x from row r to the last row of the block.
  __device__ void decay_to_end(Pack<4>& x, int r) const {
#pragma unroll
    for (int later = r + 1; later < 4; ++later) multiply(x, row[later]);
  }
  // Decays x from before the block to row r.
  __device__ void decay_from_start(Pack<4>& x, int r) const {
#pragma unroll
    for (int earlier = 0; earlier <= r; ++earlier) multiply(x, row[earlier]);
  }
};

// The head that reads, the head of the memory, and the heads that write.
template <bool Reverse>
struct Heads {
  int reader, memory, first_writer, writers;

  __device__ Heads(const Fp32ReadShape& shape, int reader_) : reader(reader_) {
    const int group = shape.query_heads / shape.heads;
    memory = Reverse ? reader : reader / group;
    first_writer = Reverse ? reader * group : memory;
    writers = Reverse ? group : 1;
  }
};

inline int readers(const Fp32ReadShape& shape) { return shape.reverse ? shape.heads : shape.query_heads; }

// Launches `tiles` blocks for every chunk and reader.
template <auto Kernel, class Problem>
cudaError_t launch(const Problem& p, int64_t tiles, int floats, cudaStream_t stream) {
  const int bytes = floats * static_cast<int>(sizeof(float));
  const int64_t blocks = token_range_count(p.shape.tokens, kChunk) * readers(p.shape) * tiles;
  return launch_kernel<Kernel>(p, blocks, kThreads, bytes, stream);
}

}  // namespace girih::kernels::fp32
