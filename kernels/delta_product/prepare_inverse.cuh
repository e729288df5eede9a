// X = (I - N)^-1 for the 64 rows of a chunk, N = -A below the diagonal. The 8 x 8 diagonal blocks are
// inverted by forward substitution in fp32, one column a lane. Pairs of inverted blocks are then joined to
// blocks of 16, 32 and 64 rows:
//
//     (  X_0        )
//     ( X_1 S   X_1 )        S = N_10 X_0
//
// Every factor is split into two bf16 numbers, hi + lo: nearly parallel keys make X large, and later products
// cancel most of it, so that one bf16 number is not enough. S is computed transposed, so that its accumulator
// is the next operand without a shuffle.
#pragma once

#include "delta_product/prepare_loads.cuh"
#include "delta_product/split_products.cuh"

namespace girih::kernels::delta_product {

// Output of the inversion in global memory. A block is stored as four 8 x 8 matrices in the order of an A
// fragment, so that ldmatrix can load it as either operand. If `has_inverse_lo`, the rounding errors of the
// block are stored too.
template <typename T>
struct InverseOutput {
  unsigned char* data;
  bool has_inverse_lo;

  __device__ void store(int i, int j, const Block& x) const {
    AFragment<1> block;
    round_to_a_fragment<T>(block, x);
    auto* const to = reinterpret_cast<uint32_t*>(data + inverse_block_index(i, j) * 512) + lane();
#pragma unroll
    for (int m = 0; m < 4; ++m) to[32 * m] = block.at[0][m];
    if (!has_inverse_lo) return;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float2 back = unpack_pair<T>(block.at[0][m]);
      to[kDeltaInverseLoOffset / 4 + 32 * m] =
          pack_pair<T>(x.at[m / 2][m % 2 * 2] - back.x, x.at[m / 2][m % 2 * 2 + 1] - back.y);
    }
  }
};

// Inverts the 8 x 8 diagonal blocks of N in place: x_i = [i = column] + sum_{j<i} n_ij x_j. A lane has one
// column of blocks l / 8 and l / 8 + 4, and stores it as a row. The order of the stored rows is 0, 2, 4, 6,
// 1, 3, 5, 7, so that loads of pairs have no bank conflicts.
template <class Storage>
__device__ inline void invert_8x8_blocks(const Storage& storage) {
  const int column = lane() % kSubstitutionRows;
  float columns[2][kSubstitutionRows];
#pragma unroll
  for (int i = 0; i < kSubstitutionRows; ++i) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float* const row =
          storage.substitution_block(lane() / kSubstitutionRows + 4 * b) + i * kSubstitutionRows;
      float even = column == i ? 1.f : 0.f, odd = 0.f;
#pragma unroll
      for (int j = 0; j < i; j += 4) {
        const float4 four = *reinterpret_cast<const float4*>(row + j);
        even = fmaf(four.x, columns[b][j], even);
        if (j + 1 < i) odd = fmaf(four.y, columns[b][j + 1], odd);
        if (j + 2 < i) even = fmaf(four.z, columns[b][j + 2], even);
        if (j + 3 < i) odd = fmaf(four.w, columns[b][j + 3], odd);
      }
      columns[b][i] = even + odd;
    }
  }
  __syncwarp();
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    auto* const to =
        reinterpret_cast<float4*>(storage.substitution_block(lane() / kSubstitutionRows + 4 * b) +
                                  (column / 2 + column % 2 * 4) * kSubstitutionRows);
    to[0] = {columns[b][0], columns[b][1], columns[b][2], columns[b][3]};
    to[1] = {columns[b][4], columns[b][5], columns[b][6], columns[b][7]};
  }
}

// Diagonal blocks i and i + 1 of X, 16 x 16 each, from their 8 x 8 blocks: ( X_0, 0; X_1 N_10 X_0, X_1 ).
// Returned as A fragments, as they are and transposed.
template <class Storage, typename T>
__device__ inline void join_8x8_blocks(Split (&x)[kChunkTiles], Split (&x_transposed)[kChunkTiles],
                                       const Block (&n)[kDeltaInverseBlocks], const Storage& storage,
                                       const InverseOutput<T>& out, int i) {
  Block block_x[2];
  Parts upper[2], left[2], lower[2];
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    Block& block = block_x[b];
    fill(block, 0.f);
    const float* const first =
        storage.substitution_block(2 * (i + b)) + lane() % 4 * kSubstitutionRows + lane_row();
    const float* const second = first + kSubstitutionRows * kSubstitutionRows;
#pragma unroll
    for (int y = 0; y < 2; ++y) {
      block.at[0][y] = first[y * 4 * kSubstitutionRows];
      block.at[1][2 + y] = second[y * 4 * kSubstitutionRows];
    }
    const float(&below)[4] = n[inverse_block_index(i + b, i + b)].at[0];
    upper[b] = split(block.at[0][0], block.at[0][1]);
    left[b] = split(below[2], below[3]);
    lower[b] = split(block.at[1][2], block.at[1][3]);
  }
  const Parts none = {0, 0};
  float s[4] = {0.f, 0.f, 0.f, 0.f}, product[4] = {0.f, 0.f, 0.f, 0.f};
  add_split_product(s, triangle(transpose_parts(upper[0]), none, transpose_parts(upper[1])), left[0],
                    left[1]);
  add_split_product(product, triangle(lower[0], none, lower[1]), split(s[0], s[1]), split(s[2], s[3]));
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    const Parts between = split(product[2 * b], product[2 * b + 1]);
    block_x[b].at[0][2] = product[2 * b], block_x[b].at[0][3] = product[2 * b + 1];
    out.store(i + b, i + b, block_x[b]);
    x[i + b] = triangle(upper[b], between, lower[b]);
    x_transposed[i + b] = transposed_triangle(upper[b], between, lower[b]);
  }
}

// Inverts I - N; the warp has the blocks of N on and below the diagonal in registers.
template <class Storage, typename T>
__device__ inline void invert(const Block (&n)[kDeltaInverseBlocks], const Storage& storage,
                              const InverseOutput<T>& out) {
  // 8 x 8 blocks
#pragma unroll
  for (int i = 0; i < kDeltaChunkRows / kSubstitutionRows; ++i) {
    const float* const two = n[inverse_block_index(i / 2, i / 2)].at[i % 2] + i % 2 * 2;
    reinterpret_cast<float2*>(storage.substitution_block(i))[lane()] = {two[0], two[1]};
  }
  __syncwarp();
  invert_8x8_blocks(storage);
  __syncwarp();

  // 16 x 16 blocks, two diagonal blocks at a time
  Split x[kChunkTiles], x_transposed[kChunkTiles];
#pragma unroll
  for (int i = 0; i < kChunkTiles; i += 2) join_8x8_blocks(x, x_transposed, n, storage, out, i);

  // 32 x 32 blocks
  const Split s10 = split(split_product(x_transposed[0], split(n[inverse_block_index(1, 0)]))),
              s32 = split(split_product(x_transposed[2], split(n[inverse_block_index(3, 2)])));
  const Block x10 = split_product(x[1], s10), x32 = split_product(x[3], s32);
  const Split x10_transposed = split(split_product(s10, x[1])), x32_split = split(x32);
  out.store(1, 0, x10);
  out.store(3, 2, x32);

  // 64 x 64, 16 columns at a time
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    Block s[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      s[i] = split_product(x_transposed[j], split(n[inverse_block_index(i + 2, j)]));
      if (j == 0) add_split_product(s[i], x10_transposed, split(n[inverse_block_index(i + 2, 1)]));
    }
    const Split upper = split(s[0]);
    Block block_x = split_product(x32_split, upper);
    add_split_product(block_x, x[3], split(s[1]));
    out.store(3, j, block_x);
    out.store(2, j, split_product(x[2], upper));
  }
}

}  // namespace girih::kernels::delta_product
