// Sizes, shared memory and chunk data of a block of gradients.
#pragma once

#include "delta_product/gradient_products.cuh"
#include "delta_product/tokens.cuh"
#include "delta_product/work.cuh"

namespace girih::kernels::delta_product {

template <int D>
struct GradientSizes {
  static constexpr int kGroups = D == 64 ? 1 : 2;  // warpgroups
  static constexpr int kCols = D / kGroups;        // columns of dq and dk of a warpgroup
  static constexpr int kThreads = 128 * kGroups;
  static constexpr int kSlab = D == 128 ? 128 : 64;  // columns of V that are processed together
  static constexpr int kValueGroups = kSlab / 64;    // warpgroups that have columns of a slab
  static constexpr bool kHasBothStates = D != 128;   // S and dS have memory of their own
  static constexpr int blocks(bool one_slab) {       // resident blocks
    return D == 256 ? 1 : (D == 64 ? 2 : 1) * (one_slab ? 2 : 1);
  }
  static constexpr int kQueryGroup = kGroups == 1 ? 0 : 1;  // index of the warpgroup with dP
};

// Kinds of factors of the rows besides beta: none (every rho is 1, every L is 0), lengths (rho only), or any.
// A template parameter, because run-time branches cost time and registers: n = 2, 4 x 4096 tokens, 16 heads
// of 128, 380 us instead of 345.
enum class Factors { none, lengths, any };
// True if dP contains the scale in both of its products.
template <typename T, Factors factors>
constexpr bool kCanScaleDp = factors == Factors::none&& kHasFp32Range<T>;

// Partial sums of warpgroups or warps.
template <int D>
struct GradientSums {
  using Sizes = GradientSizes<D>;
  float beta[Sizes::kValueGroups + 1][kDeltaChunkRows];  // dbeta; the last entry has the term of M
  float read[Sizes::kValueGroups][kDeltaChunkRows];      // G . S^T k
  float state_dot[Sizes::kThreads / 32];
};
// Partial sums in the memory of X, after its last use.
template <int D>
struct FinishSums {
  using Sizes = GradientSizes<D>;
  // Sums of N M over the columns of each row, of P dP over the columns of each token, and of both over the
  // rows (tokens) of each column, by tiles of 16 rows or tokens.
  float row[kDeltaChunkRows], token[kDeltaChunkRows];
  float row_cols[kChunkTiles][kDeltaChunkRows], token_cols[kChunkTiles][kDeltaChunkRows];
  float state[Sizes::kGroups][kDeltaChunkRows];          // k . dk of the products with states
  float query[Sizes::kGroups][kDeltaChunkRows];          // q . dq of the product with the state
  float square[2][kDeltaChunkRows];                      // |k|^2, |q|^2
  float projection[2][Sizes::kGroups][kDeltaChunkRows];  // k . dk, q . dq
};

// Divisors and sizes from which a block computes its chunk and head, and the token of a row. Divisions on the
// device before the first load were a tenth of the time of a block.
struct GradientGrid {
  Divider output_heads, members;  // HO; query heads of a memory head
  Divider sequence_chunks;        // chunks of a sequence that is not packed
  Divider steps;                  // n
  int tokens;                     // tokens of a chunk

  explicit GradientGrid(const DeltaShape& shape)
      : output_heads(shape.output_heads),
        members(shape.output_heads / shape.heads),
        sequence_chunks(make_chunk_divider(shape)),
        steps(shape.n),
        tokens(delta_chunk_tokens(shape.n)) {}
};

// Chunk data of a block, in shared memory: in registers it would be spilled, and the L1 cache is small beside
// the shared memory.
struct ChunkInfo {
  TokenRange range;
  uint32_t number;  // chunk * H + memory head
  int head, output_head, rows;
  bool is_first_head;  // first query head of the memory head
  bool many_tokens;    // a chunk can have more than 32 tokens
  uint32_t origin;

  __device__ int bands() const { return many_tokens ? kChunkTiles : kChunkTiles / 2; }  // groups of 16 tokens
  __device__ const unsigned char* prepared(const DeltaGradients& p) const {
    return prepared_at(p.prepared, uint64_t{number});
  }
  // Row `col` of the transposed state of the chunk.
  template <typename T>
  __device__ const T* state(const void* states, const DeltaShape& shape, int col) const {
    return state_at(static_cast<const T*>(states), shape, uint64_t{number}, col);
  }
  // True if a token of tile `token_band` (16 tokens) reads a row of tile `row_band` (16 rows).
  __device__ static bool has_reads(int token_band, int row_band, int n) {
    return row_band < (token_band + 1) * n;
  }
};

// Full barriers of TMA copies: S; k and prepared data; v, G and do, and dS if it has memory of its own; dS
// otherwise; q.
struct GradientBarriers {
  uint64_t states, keys, values, gradients, queries;
};

// Rows and columns of a warp and lane: warpgroup `group`, tile `band` of 16 rows, its first row `row`, the
// lane's first row `thread_row`, columns of D from `col` on.
struct WarpCoord {
  int group, band, row, thread_row, col;
};

// 16 x 16 blocks that are loaded as A fragments.
struct OperandBlocks {
  static constexpr int kBytes = kDeltaInverseBlocks * 512;

  unsigned char* data;

  __device__ void store(int i, const uint32_t (&x)[4]) const { stmatrix_contiguous(data + i * 512, x); }
  __device__ void load(uint32_t (&x)[4], int i) const { ldmatrix(x, lane_address(i)); }
  __device__ void load_transposed(uint32_t (&x)[4], int i) const {
    uint32_t y[4];
    ldmatrix_trans(y, lane_address(i));
    x[0] = y[0], x[1] = y[2], x[2] = y[1], x[3] = y[3];
  }
  // Index of a block of tokens and rows. Up to 32 tokens have two bands, 64 tokens use the order of X.
  __device__ static int token_block_index(bool many_tokens, int band, int row_band) {
    return many_tokens ? inverse_block_index(band, row_band) : kChunkTiles * band + row_band;
  }

 private:
  __device__ uint32_t lane_address(int i) const { return shared_address(data + i * 512 + lane() * 16); }
};

// OneSlab: V is not wider than a slab.
template <typename T, int D, bool OneSlab>
struct GradientTiles {
  using Sizes = GradientSizes<D>;
  using Rows = BlockTile<T, D>;               // of k, q; 64 columns of a state
  using Values = BlockTile<T, Sizes::kSlab>;  // of G, do; of v, then Z, then U
  static constexpr int kStateBytes = Sizes::kValueGroups * Rows::kBytes;
  static constexpr int kPreparedBytes = kDeltaHasInverseLoOffset + 16;  // prepared data with the flags
  static constexpr int kFactorBytes = kDeltaChunkRows * 4,
                       kPartialBytes = 2 * kDeltaChunkRows * kDeltaChunkRows * 4;
  // Sets of blocks of N and dP as operands, in the memory of S and dS. kStepRows: N_ij rho_j, the left factor
  // of N K. kStepCols: N_ij rho_i, for N^T K. kTokenBlocks: dP_tj times the factor of token t, for dP^T Q.
  // kRowBlocks: dP_tj rho_j, for dP K. The accumulators are multiplied by the missing factor.
  enum { kStepCols, kTokenBlocks, kRowBlocks, kStepRows, kBlockSets };
  // With a lone warpgroup its rows of N stay in registers, the blocks replace G and U, and the queries
  // replace dS.
  static constexpr bool kHasNInRegisters = OneSlab && Sizes::kGroups == 1;
  // dq is stored behind these blocks, in the memory of G and kDqSpillExtraBytes more, while they are
  // computed.
  static constexpr bool kSpillsDq = OneSlab && !Sizes::kHasBothStates;
  static constexpr int kDqSpillBytes = kSpillsDq ? kDeltaChunkRows * D * 4 : 0;
  static constexpr int kDqSpillExtraBytes =
      kSpillsDq ? kBlockSets * OperandBlocks::kBytes + kDqSpillBytes - kStateBytes - Values::kBytes : 0;
  static_assert(kDqSpillExtraBytes % 1024 == 0, "");

  // True if queries have memory of their own. Otherwise they replace dS or U, or lie below the half tile of
  // do.
  __host__ __device__ static constexpr bool has_queries(bool many_tokens) {
    return !kHasNInRegisters && (Sizes::kHasBothStates || (many_tokens && !OneSlab));
  }
  static constexpr int bytes(bool many_tokens) {
    return (Sizes::kHasBothStates ? 2 : 1) * kStateBytes + kDqSpillExtraBytes +
           (has_queries(many_tokens) ? 2 : 1) * Rows::kBytes + 3 * Values::kBytes + kPreparedBytes +
           kFactorBytes + static_cast<int>(sizeof(ChunkInfo) + sizeof(GradientBarriers)) +
           Sizes::kThreads * 4 + static_cast<int>(sizeof(GradientSums<D>)) + (OneSlab ? 0 : kPartialBytes);
  }

  unsigned char *states, *gradients, *operand_data;
  Values u, g, dout;
  Rows k, q;
  unsigned char* prepared;
  float* factors;
  ChunkInfo* chunk_info;
  GradientBarriers* barriers;
  GradientSums<D>* sums;
  FinishSums<D>* finish_sums;
  float* partial;  // N and dP of the previous slabs
  Origin origin;

  __device__ GradientTiles(unsigned char* next, bool many_tokens) {
    const unsigned char* const shared_start = next;
    const auto allocate = [&](int bytes) {
      unsigned char* const start = next;
      next += bytes;
      return start;
    };
    states = allocate(kStateBytes);
    gradients = Sizes::kHasBothStates ? allocate(kStateBytes) : states;
    g.data = reinterpret_cast<T*>(allocate(Values::kBytes));
    allocate(kDqSpillExtraBytes);
    u.data = reinterpret_cast<T*>(allocate(Values::kBytes));
    operand_data = kHasNInRegisters ? reinterpret_cast<unsigned char*>(g.data) : states;
    static_assert(kHasNInRegisters ||
                      kBlockSets * OperandBlocks::kBytes <=
                          (Sizes::kHasBothStates ? 2 : 1) * kStateBytes + (D == 64 ? Values::kBytes : 0),
                  "");
    static_assert(!kHasNInRegisters || (kStepRows * OperandBlocks::kBytes <= 2 * Values::kBytes &&
                                        kDqSpillExtraBytes == 0 && OperandBlocks::kBytes <= Values::kBytes),
                  "N leaves U where it is");
    k.data = reinterpret_cast<T*>(allocate(Rows::kBytes));
    dout.data = reinterpret_cast<T*>(allocate(Values::kBytes));
    // Products of 64 rows that start at row 32 read 32 rows behind the tile; those results are not used.
    q.data = has_queries(many_tokens) ? reinterpret_cast<T*>(allocate(Rows::kBytes))
             : kHasNInRegisters       ? reinterpret_cast<T*>(gradients)
             : many_tokens            ? u.data
                                      : dout.data + kDeltaChunkRows / 2 * 64;
    prepared = allocate(kPreparedBytes);
    static_assert(sizeof(FinishSums<D>) <= kDeltaInverseBytes, "");
    finish_sums = reinterpret_cast<FinishSums<D>*>(prepared);
    factors = reinterpret_cast<float*>(allocate(kFactorBytes));
    chunk_info = reinterpret_cast<ChunkInfo*>(allocate(sizeof(ChunkInfo)));
    barriers = reinterpret_cast<GradientBarriers*>(allocate(sizeof(GradientBarriers)));
    uint32_t* const thread_offsets = reinterpret_cast<uint32_t*>(allocate(Sizes::kThreads * 4));
    sums = reinterpret_cast<GradientSums<D>*>(allocate(sizeof(GradientSums<D>)));
    partial = reinterpret_cast<float*>(next);
    origin = Origin(shared_start, &chunk_info->origin, thread_offsets);
  }

  // 64 columns of a slab, from `col` on.
  __device__ static Rows part(unsigned char* states, int col) {
    return {reinterpret_cast<T*>(states + col / 64 * Rows::kBytes)};
  }
  __device__ Rows s(int col) const { return part(states, col); }
  __device__ Rows ds(int col) const { return part(gradients, col); }
  __device__ OperandBlocks blocks(int i) const { return {operand_data + i * OperandBlocks::kBytes}; }
  // Memory of the thread for dq; packs of 16 bytes.
  __device__ float4* dq_spill() const {
    return reinterpret_cast<float4*>(operand_data + kBlockSets * OperandBlocks::kBytes) + threadIdx.x;
  }
};

}  // namespace girih::kernels::delta_product
