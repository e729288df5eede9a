// value_read: a block has one chunk, one reading head and 64 slots.
//
// Rows decay by blocks of four, relative to the last row of a block. y starts as x H, and every earlier block
// decays y and adds its scores a times its decayed rows s~:
//
//     y <- (... ((x H) e^{total 0} + a_0 s~_0) e^{total 1} + a_1 s~_1 ...)       s~_j = s_j e^{gates after j}
//
// Within the own block of rows, the decays are applied row by row. No exponent is positive, and no factor is
// divided out again.
#include "fp32/tiles.cuh"

namespace girih::kernels {
namespace fp32 {
namespace {

constexpr int kFloats = 3 * kTileFloats + kTotalsFloats;

template <bool Reverse>
__global__ void __launch_bounds__(kThreads, 2) value_read(const __grid_constant__ ValueRead p) {
  GIRIH_DYNAMIC_SHARED(float, shared, 16);
  float *const x_tile = shared, *const y_tile = x_tile + kTileFloats, *const h_tile = y_tile + kTileFloats,
               *const totals = h_tile + kTileFloats;
  const Fp32ReadShape& shape = p.shape;
  const unsigned tiles = (shape.M + kTile - 1) / kTile,
                 reader_count = Reverse ? shape.heads : shape.query_heads;
  const int col = static_cast<int>(blockIdx.x % tiles) * kTile;
  const Heads<Reverse> heads(shape, static_cast<int>(blockIdx.x / tiles % reader_count));
  const int64_t chunk_number = blockIdx.x / tiles / reader_count;
  const ChunkRows<Reverse> chunk{token_range_at(shape.tokens, chunk_number, kChunk)};
  if (chunk.range.length == 0) return;
  const int a = row_lane(), b = row_block();

  Pack<4> g[4];
  chunk.load_gates(g, shape.g, heads.memory, col, shape.M);
  const RowDecays decays(g);
  store_four(totals, b, 4 * a, decays.total);

  Pack<4> out[4];
  clear(out);
#pragma unroll 1
  for (int term = 0; term < 2; ++term) {
    const ValueRead::Term& t = p.term[term];
    const float* states = shape.states +
                          ((chunk_number * shape.heads + heads.memory) * shape.rows + t.first_row) * shape.M +
                          col;
#pragma unroll 1
    for (int writer = 0; writer < (t.width > 0 ? heads.writers : 0); ++writer) {
      // a = X Y^T in columns a + 16 c,   y = X H
      Pack<4> scores[4], y[4];
      clear(scores);
      clear(y);
      const bool from_state = writer == 0;
#pragma unroll 1
      for (int slab = 0; slab < t.width; slab += kTile) {
        __syncthreads();
        chunk.load_tile(x_tile, t.x, heads.reader, slab, t.width);
        chunk.load_tile(y_tile, t.y, heads.first_writer + writer, slab, t.width);
        if (from_state) {
          load_matrix(h_tile, states + static_cast<int64_t>(slab) * shape.M, shape.M, t.width - slab,
                      shape.M - col);
        }
        __syncthreads();
#pragma unroll 2
        for (int k = 0; k < kTile; k += 4) {
          Pack<4> x[4];
          load_own_rows(x, x_tile, k);
          add_scores(scores, x, y_tile, k, 4 * b + 4);  // further rows are later than the rows of the thread
          if (from_state) add_product(y, x, h_tile, k);
        }
      }

      Pack<4> s[4];
      chunk.load_own(s, t.s, heads.first_writer + writer, col, shape.M);
      __syncthreads();
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        Pack<4> weighted = s[r];
        decays.decay_to_end(weighted, r);
        store_four(y_tile, 4 * b + r, 4 * a, weighted);
#pragma unroll
        for (int c = 0; c < 4; ++c) x_tile[(4 * b + r) * kPitch + a + 16 * c] = scores[r].at[c];
      }
      __syncthreads();
#pragma unroll 1
      for (int block = 0; block < b; ++block) {
        const Pack<4> total = load_four(totals, block, 4 * a);
        Pack<4> score[4];
        load_own_rows(score, x_tile, 4 * block);
#pragma unroll
        for (int r = 0; r < 4; ++r) multiply(y[r], total);
        add_product(y, score, y_tile, 4 * block);
      }
      Pack<4> score[4];
      load_own_rows(score, x_tile, 4 * b);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int j = 0; j <= r; ++j) {
          multiply(y[r], decays.row[j]);
          add_scaled(y[r], score[r].at[j], s[j]);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) out[r].at[c] += y[r].at[c];
      }
    }
  }
  chunk.store_own(p.out, heads.reader, col, shape.M, out);
}

}  // namespace
}  // namespace fp32

cudaError_t fp32_value_read(const ValueRead& p, cudaStream_t stream) {
  const int64_t tiles = divide_up(p.shape.M, fp32::kTile);
  return p.shape.reverse ? fp32::launch<fp32::value_read<true>>(p, tiles, fp32::kFloats, stream)
                         : fp32::launch<fp32::value_read<false>>(p, tiles, fp32::kFloats, stream);
}

}  // namespace girih::kernels
