// key_read: a block has one chunk, one reading head and 64 columns of the result.
//
// W_ij = sum_m p_im s_jm e^{L_im - L_jm} is computed by blocks of four rows. For j in an earlier block
//
//     W_ij = (p_i e^{gates of i's block through i}) . (s_j e^{gates of j's block after j} * between)
//
// where `between` is the decay of the blocks between the two. Within a block of rows, the decays are applied
// row by row. No exponent is positive.
#include "fp32/tiles.cuh"

namespace girih::kernels {
namespace fp32 {
namespace {

// The decay between block b and each of the b blocks before it, in row b (b - 1) / 2 + block.
constexpr int kBetweenFloats = kRowBlocks * (kRowBlocks - 1) / 2 * kPitch;
constexpr int kFloats = 3 * kTileFloats + kBetweenFloats + 2 * kTotalsFloats;

// Stores W in place of the rows of p, which only this half of the warp reads. own: the part of W in the
// thread's own block of rows, summed over the columns m of the thread.
__device__ inline void store_weights(float* p_tile, const Pack<4> (&w)[4], Pack<4> (&own)[4], int a, int b) {
  __syncwarp();
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int j = 0; j <= r; ++j) {
#pragma unroll
      for (int other = 1; other < 16; other *= 2) {
        own[r].at[j] += __shfl_xor_sync(~0u, own[r].at[j], other);
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) p_tile[(4 * b + r) * kPitch + a + 16 * c] = w[r].at[c];
  }
  __syncwarp();
  if (a == 0) {
#pragma unroll
    for (int r = 0; r < 4; ++r) store_four(p_tile, 4 * b + r, 4 * b, own[r]);
  }
}

template <bool Reverse>
__global__ void __launch_bounds__(kThreads, 2) key_read(const __grid_constant__ KeyRead p) {
  GIRIH_DYNAMIC_SHARED(float, shared, 16);
  float *const p_tile = shared, *const s_tile = p_tile + kTileFloats, *const h_tile = s_tile + kTileFloats,
               *const all_between = h_tile + kTileFloats, *const totals = all_between + kBetweenFloats,
               *const from_start = totals + kTotalsFloats;
  const Fp32ReadShape& shape = p.shape;
  const unsigned slabs = (p.width + kTile - 1) / kTile,
                 reader_count = Reverse ? shape.heads : shape.query_heads;
  const int slab = static_cast<int>(blockIdx.x % slabs) * kTile;
  const Heads<Reverse> heads(shape, static_cast<int>(blockIdx.x / slabs % reader_count));
  const int64_t chunk_number = blockIdx.x / slabs / reader_count;
  const ChunkRows<Reverse> chunk{token_range_at(shape.tokens, chunk_number, kChunk)};
  if (chunk.range.length == 0) return;
  const int a = row_lane(), b = row_block();
  float* const between = all_between + b * (b - 1) / 2 * kPitch;
  const float* states =
      shape.states + ((chunk_number * shape.heads + heads.memory) * shape.rows + p.first_row + slab) *
                         static_cast<int64_t>(shape.M);

  Pack<4> far[4], near[4];  // (e^L * p) H^T in columns a + 16 c; W Y in columns 4a..4a+3
  clear(far);
  clear(near);
#pragma unroll 1
  for (int writer = 0; writer < heads.writers; ++writer) {
    const bool from_state = writer == 0;
    Pack<4> w[4], own[4];  // W in columns a + 16 c; W within the own block, a partial sum
    clear(w);
    clear(own);
#pragma unroll 1
    for (int col = 0; col < shape.M; col += kTile) {
      __syncthreads();
      {
        Pack<4> g[4], reads[4], s[4];
        chunk.load_gates(g, shape.g, heads.memory, col, shape.M);
        chunk.load_own(reads, p.p, heads.reader, col, shape.M);
        chunk.load_own(s, p.s, heads.first_writer + writer, col, shape.M);
        if (from_state) load_matrix(h_tile, states + col, shape.M, p.width - slab, shape.M - col);
        const RowDecays decays(g);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          Pack<4> weighted = s[j];
#pragma unroll
          for (int r = j; r < 4; ++r) {
            if (r > j) multiply(weighted, decays.row[r]);
            add_dot(own[r].at[j], reads[r], weighted);
          }
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          decays.decay_from_start(reads[r], r);
          decays.decay_to_end(s[r], r);
          store_four(p_tile, 4 * b + r, 4 * a, reads[r]);
          store_four(s_tile, 4 * b + r, 4 * a, s[r]);
        }
        store_four(totals, b, 4 * a, decays.total);
      }
      __syncthreads();
      // Decays from the nearest block to the first.
      {
        Pack<4> decay{{1.f, 1.f, 1.f, 1.f}};
#pragma unroll 1
        for (int block = b - 1; block >= 0; --block) {
          store_four(between, block, 4 * a, decay);
          multiply(decay, load_four(totals, block, 4 * a));
        }
        store_four(from_start, b, 4 * a, decay);
      }
      __syncwarp();
#pragma unroll 2
      for (int m = 0; m < kTile; m += 4) {
        Pack<4> reads[4];
        load_own_rows(reads, p_tile, m);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int block = a / 4 + 4 * c;
          if (4 * c > b) break;
          if (block >= b) continue;
          Pack<4> weighted = load_four(s_tile, a + 16 * c, m);
          multiply(weighted, load_four(between, block, m));
#pragma unroll
          for (int r = 0; r < 4; ++r) add_dot(w[r].at[c], reads[r], weighted);
        }
        if (!from_state) continue;
        const Pack<4> decay = load_four(from_start, b, m);
#pragma unroll
        for (int r = 0; r < 4; ++r) multiply(reads[r], decay);
        add_scores(far, reads, h_tile, m, kTile);
      }
    }

    store_weights(p_tile, w, own, a, b);
    __syncthreads();
    chunk.load_tile(h_tile, p.y, heads.first_writer + writer, slab, p.width);
    __syncthreads();
#pragma unroll 1
    for (int j = 0; j <= 4 * b; j += 4) {
      Pack<4> weights[4];
      load_own_rows(weights, p_tile, j);
      add_product(near, weights, h_tile, j);
    }
  }

  __syncwarp();
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int c = 0; c < 4; ++c) p_tile[(4 * b + r) * kPitch + a + 16 * c] = far[r].at[c];
  }
  __syncwarp();
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const Pack<4> part = load_four(p_tile, 4 * b + r, 4 * a);
#pragma unroll
    for (int c = 0; c < 4; ++c) near[r].at[c] += part.at[c];
  }
  chunk.store_own(p.out, heads.reader, slab, p.width, near);
}

}  // namespace
}  // namespace fp32

cudaError_t fp32_key_read(const KeyRead& p, cudaStream_t stream) {
  const int64_t slabs = divide_up(p.width, fp32::kTile);
  return p.shape.reverse ? fp32::launch<fp32::key_read<true>>(p, slabs, fp32::kFloats, stream)
                         : fp32::launch<fp32::key_read<false>>(p, slabs, fp32::kFloats, stream);
}

}  // namespace girih::kernels
