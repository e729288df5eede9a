// A block of the gradients: its warpgroups, what it has in shared memory, and where a warp stands in it.
#pragma once

#include "delta_product/gradient_products.cuh"
#include "delta_product/part.cuh"
#include "delta_product/tokens.cuh"

namespace girih::kernels::delta_product {

template <int D>
struct GradientSizes {
  static constexpr int kGroups = D == 64 ? 1 : 2;  // warpgroups
  static constexpr int kCols = D / kGroups;        // of dq and dk, a warpgroup's
  static constexpr int kThreads = 128 * kGroups;
  static constexpr int kSlab = D == 128 ? 128 : 64;  // columns of V at a time
  static constexpr int kParts = kSlab / 64;          // warpgroups that have some of them
  static constexpr bool kApart = D != 128;           // S and dS each have a room
  static constexpr int blocks(bool one_slab) {       // of a multiprocessor
    return D == 256 ? 1 : (D == 64 ? 2 : 1) * (one_slab ? 2 : 1);
  }
  static constexpr int kQueries = kGroups == 1 ? 0 : 1;  // the warpgroup that has dP
};

// What rows have beside beta: nothing, every rho 1 and every L 0; 1 / |k| and 1 / |q|; whatever there is.
// Left to run time, what has nothing of it waits for its branches and its registers: at n = 2, 4 x 4096
// tokens, 16 heads of 128, 380 us instead of 345.
enum class Factors { none, lengths, any };
// Whether dP has the scale in it for both of its products.
template <typename T, Factors factors>
constexpr bool kScalesBefore = factors == Factors::none&& kHasRange<T>;

// What warps add up for each other: a part from each warpgroup, or from each warp.
template <int D>
struct GradientSums {
  using Sizes = GradientSizes<D>;
  float beta[Sizes::kParts + 1][kDeltaRows];  // of dbeta; the last part is that of M
  float read[Sizes::kParts][kDeltaRows];      // G . S^T k
  float edge[Sizes::kThreads / 32];
};
// And once U is known, where X was.
template <int D>
struct LaterSums {
  using Sizes = GradientSizes<D>;
  float row[kDeltaRows], token[kDeltaRows];  // of N M and of P dP, and their columns
  float row_cols[kTilesDown][kDeltaRows], token_cols[kTilesDown][kDeltaRows];
  float state[Sizes::kGroups][kDeltaRows];     // k . dk through the states
  float query[Sizes::kGroups][kDeltaRows];     // q . dq through the state
  float square[2][kDeltaRows];                 // |k|^2, |q|^2
  float along[2][Sizes::kGroups][kDeltaRows];  // k . dk, q . dq
};

// What a block finds its chunk by, and rows' tokens. Divisions on the device, one after another before the
// first load, were a tenth of its time.
struct GradientGrid {
  Divider query_heads, members;  // query heads in all, of a memory head
  Divider each;                  // a sequence's chunks, where sequences are not packed
  Divider steps;                 // n
  int tokens;                    // of a chunk

  explicit GradientGrid(const DeltaShape& shape)
      : query_heads(shape.query_heads),
        members(shape.query_heads / shape.heads),
        each(chunks_of_each(shape)),
        steps(shape.n),
        tokens(delta_chunk(shape.n)) {}
};

// What a block knows of its chunk. It lies in shared memory: in registers it would be spilled, and the cache
// has little room to keep that beside shared memory.
struct Here {
  Piece piece;
  uint32_t number;  // of the chunk and memory head among all, less than there are blocks
  int head, query_head, rows;
  bool first;        // of the memory head's query heads
  bool many_tokens;  // a chunk may have more than 32
  uint32_t origin;

  __device__ int bands() const { return many_tokens ? kTilesDown : kTilesDown / 2; }  // of 16 tokens
  __device__ const unsigned char* prepared(const DeltaGradients& p) const {
    return prepared_at(p.prepared, uint64_t{number});
  }
  // The row of column `col` of the chunk's state.
  template <typename T>
  __device__ const T* state(const void* states, const DeltaShape& shape, int col) const {
    return state_at(static_cast<const T*>(states), shape, uint64_t{number}, col);
  }
  // Some of the 16 tokens come after some of the 16 rows.
  __device__ static bool follow(int of_tokens, int of_rows, int n) { return of_rows < (of_tokens + 1) * n; }
};

// That what boxes bring is there, by when it is needed: S; k and what was prepared; v, G and do, and dS where
// it has a room; dS where it has none; q.
struct GradientBarriers {
  uint64_t states, keys, values, gradients, queries;
};

// A warp's place in its block: 16 rows from `row` on, the lane's first is `mine`, and columns of D from `col`
// on.
struct WarpPlace {
  int group, band, row, mine, col;
};

// Blocks of 16 x 16 that become left factors, one after another.
struct Blocks {
  static constexpr int kBytes = kDeltaBlocks * 512;

  unsigned char* data;

  __device__ void put(int i, const uint32_t (&x)[4]) const { store_matrices(data + i * 512, x); }
  __device__ void load(uint32_t (&x)[4], int i) const { load_matrices(x, of_lane(i)); }
  __device__ void load_transposed(uint32_t (&x)[4], int i) const {
    uint32_t y[4];
    load_matrices_transposed(y, of_lane(i));
    x[0] = y[0], x[1] = y[2], x[2] = y[1], x[3] = y[3];
  }
  // Of tokens' rows there are fewer than ten: at most two bands of tokens, or as many as of rows.
  __device__ static int of_tokens(bool many_tokens, int band, int of_rows) {
    return many_tokens ? block_of(band, of_rows) : kTilesDown * band + of_rows;
  }

 private:
  __device__ uint32_t of_lane(int i) const { return shared_address(data + i * 512 + lane() * 16); }
};

// OneSlab: V is no wider than a slab.
template <typename T, int D, bool OneSlab>
struct GradientTiles {
  using Sizes = GradientSizes<D>;
  using Rows = BlockTile<T, D>;               // of k, q; 64 columns of a state
  using Values = BlockTile<T, Sizes::kSlab>;  // of G, do; of v, then Z, then U
  static constexpr int kStateBytes = Sizes::kParts * Rows::kBytes;
  static constexpr int kPreparedBytes = kDeltaFlag + 16;  // of what was prepared, with its flags
  static constexpr int kFactorBytes = kDeltaRows * 4, kPartialBytes = 2 * kDeltaRows * kDeltaRows * 4;
  // N and dP as they go into products: where S and dS were.
  enum { kStepCols, kOfTokens, kOfRows, kStepRows, kWeights };
  // But a lone warpgroup's rows of N stay in registers, the rest goes where G and U were, and queries come
  // where dS was.
  static constexpr bool kOwn = OneSlab && Sizes::kGroups == 1;
  // dq waits behind them, where G was and somewhat further, until they are through.
  static constexpr bool kAside = OneSlab && !Sizes::kApart;
  static constexpr int kAsideBytes = kAside ? kDeltaRows * D * 4 : 0;
  static constexpr int kLackBytes =
      kAside ? kWeights * Blocks::kBytes + kAsideBytes - kStateBytes - Values::kBytes : 0;
  static_assert(kLackBytes % 1024 == 0, "");

  // Queries in a room of their own; else where dS was, below the half tile of do, or where U was.
  __host__ __device__ static constexpr bool has_queries(bool many_tokens) {
    return !kOwn && (Sizes::kApart || (many_tokens && !OneSlab));
  }
  static constexpr int bytes(bool many_tokens) {
    return (Sizes::kApart ? 2 : 1) * kStateBytes + kLackBytes +
           (has_queries(many_tokens) ? 2 : 1) * Rows::kBytes + 3 * Values::kBytes + kPreparedBytes +
           kFactorBytes + static_cast<int>(sizeof(Here) + sizeof(GradientBarriers)) + Sizes::kThreads * 4 +
           static_cast<int>(sizeof(GradientSums<D>)) + (OneSlab ? 0 : kPartialBytes);
  }

  unsigned char *states, *gradients, *weights;
  Values u, g, dout;
  Rows k, q;
  unsigned char* prepared;
  float* factors;
  Here* here;
  GradientBarriers* barriers;
  GradientSums<D>* sums;
  LaterSums<D>* later;
  float* partial;  // N and dP of the slabs so far
  Origin origin;

  __device__ GradientTiles(unsigned char* next, bool many_tokens) {
    const unsigned char* const room = next;
    const auto take = [&](int bytes) {
      unsigned char* const here = next;
      next += bytes;
      return here;
    };
    states = take(kStateBytes);
    gradients = Sizes::kApart ? take(kStateBytes) : states;
    g.data = reinterpret_cast<T*>(take(Values::kBytes));
    take(kLackBytes);
    u.data = reinterpret_cast<T*>(take(Values::kBytes));
    weights = kOwn ? reinterpret_cast<unsigned char*>(g.data) : states;
    static_assert(kOwn || kWeights * Blocks::kBytes <=
                              (Sizes::kApart ? 2 : 1) * kStateBytes + (D == 64 ? Values::kBytes : 0),
                  "");
    static_assert(!kOwn || (kStepRows * Blocks::kBytes <= 2 * Values::kBytes && kLackBytes == 0 &&
                            Blocks::kBytes <= Values::kBytes),
                  "N leaves U where it is");
    k.data = reinterpret_cast<T*>(take(Rows::kBytes));
    dout.data = reinterpret_cast<T*>(take(Values::kBytes));
    // Products of 64 rows that start at row 32 run on into what follows: their last 32 rows are not used.
    q.data = has_queries(many_tokens) ? reinterpret_cast<T*>(take(Rows::kBytes))
             : kOwn                   ? reinterpret_cast<T*>(gradients)
             : many_tokens            ? u.data
                                      : dout.data + kDeltaRows / 2 * 64;
    prepared = take(kPreparedBytes);
    static_assert(sizeof(LaterSums<D>) <= kDeltaInverseBytes, "");
    later = reinterpret_cast<LaterSums<D>*>(prepared);
    factors = reinterpret_cast<float*>(take(kFactorBytes));
    here = reinterpret_cast<Here*>(take(sizeof(Here)));
    barriers = reinterpret_cast<GradientBarriers*>(take(sizeof(GradientBarriers)));
    uint32_t* const of_thread = reinterpret_cast<uint32_t*>(take(Sizes::kThreads * 4));
    sums = reinterpret_cast<GradientSums<D>*>(take(sizeof(GradientSums<D>)));
    partial = reinterpret_cast<float*>(next);
    origin = Origin(room, &here->origin, of_thread);
  }

  // 64 of a slab's columns from `col` on.
  __device__ static Rows part(unsigned char* states, int col) {
    return {reinterpret_cast<T*>(states + col / 64 * Rows::kBytes)};
  }
  __device__ Rows s(int col) const { return part(states, col); }
  __device__ Rows ds(int col) const { return part(gradients, col); }
  __device__ Blocks blocks(int i) const { return {weights + i * Blocks::kBytes}; }
  // Where the thread leaves eight times four of its sums, and how far from each other.
  __device__ float4* aside() const {
    return reinterpret_cast<float4*>(weights + kWeights * Blocks::kBytes) + threadIdx.x;
  }
};

}  // namespace girih::kernels::delta_product
