// A block of the gradients: its warpgroups, what it has in shared memory, and where a warp stands in it.
#pragma once

#include "delta_product/tokens.cuh"

namespace girih::kernels::delta_product {

template <int D>
struct GradientSizes {
  static constexpr int kGroups = D == 64 ? 1 : 2;  // warpgroups
  static constexpr int kCols = D / kGroups;        // of dq and dk, a warpgroup's
  static constexpr int kThreads = 128 * kGroups;
  static constexpr int kSlab = D == 128 ? 128 : 64;  // columns of V at a time
  static constexpr int kParts = kSlab / 64;          // warpgroups that have some of them
  static constexpr bool kApart = D != 128;           // S and dS, and do and q, each have a room
  static constexpr int blocks(bool one_slab) {       // of a multiprocessor
    return D == 256 ? 1 : (D == 64 ? 2 : 1) + (one_slab ? 1 : 0);
  }
  static constexpr int kQueries = kGroups == 1 ? 0 : 1;  // the warpgroup that has dP
};

// What warps add up for each other: a part from each warpgroup, or from each warp.
template <int D>
struct GradientSums {
  using Sizes = GradientSizes<D>;
  float beta[Sizes::kParts + 1][kDeltaRows];  // of dbeta; the last part is that of M
  float read[Sizes::kParts][kDeltaRows];      // G . S^T k
  float state[Sizes::kGroups][kDeltaRows];    // k . dk through the states
  float query[Sizes::kGroups][kDeltaRows];    // q . dq through the state
  float edge[Sizes::kThreads / 32];
};
// And once U is known, where X was.
template <int D>
struct LaterSums {
  using Sizes = GradientSizes<D>;
  float row[kDeltaRows], token[kDeltaRows];  // of N M and of P dP, and their columns
  float row_cols[kTilesDown][kDeltaRows], token_cols[kTilesDown][kDeltaRows];
  float square[2][Sizes::kGroups][kDeltaRows];  // |k|^2, |q|^2
  float along[2][Sizes::kGroups][kDeltaRows];   // k . dk, q . dq
};

// OneSlab: V is no wider than a slab.
template <typename T, int D, bool OneSlab>
struct GradientTiles {
  using Sizes = GradientSizes<D>;
  using Rows = BlockTile<T, D>;               // of k, q; 64 columns of a state
  using Values = BlockTile<T, Sizes::kSlab>;  // of G, do; of v, then Z, then U
  using Square = BlockTile<T, kDeltaRows>;
  static constexpr int kStateBytes = Sizes::kParts * Rows::kBytes;
  static constexpr int kFactorBytes = kDeltaRows * 4, kPartialBytes = 2 * kDeltaRows * kDeltaRows * 4;
  // N and dP as they go into products: where dS, U and G were, and where S was if it is not read again.
  enum { kStepRows, kStepCols, kOfTokens, kOfRows, kSquares };
  static constexpr int kLackBytes = D == 64 && OneSlab ? Square::kBytes : 0;

  static constexpr int bytes(bool many_tokens) {
    return (Sizes::kApart ? 2 : 1) * kStateBytes + kLackBytes +
           (Sizes::kApart || many_tokens ? 2 : 1) * Rows::kBytes + 3 * Values::kBytes + kDeltaLost +
           kFactorBytes + static_cast<int>(sizeof(GradientSums<D>)) + (OneSlab ? 0 : kPartialBytes);
  }

  unsigned char *states, *gradients, *squares;
  Values u, g, dout;
  Rows k, q;
  unsigned char* prepared;
  float* factors;
  GradientSums<D>* sums;
  LaterSums<D>* later;
  float* partial;  // N and dP of the slabs so far

  __device__ GradientTiles(unsigned char* next, bool many_tokens) {
    const auto take = [&](int bytes) {
      unsigned char* const here = next;
      next += bytes;
      return here;
    };
    states = take(kStateBytes);
    gradients = Sizes::kApart ? take(kStateBytes) : states;
    take(kLackBytes);
    u.data = reinterpret_cast<T*>(take(Values::kBytes));
    g.data = reinterpret_cast<T*>(take(Values::kBytes));
    squares = OneSlab ? gradients : states;
    static_assert(kSquares * Square::kBytes <= (Sizes::kApart && !OneSlab ? 2 : 1) * kStateBytes +
                                                   kLackBytes + (D == 64 ? 2 * Values::kBytes : 0),
                  "");
    k.data = reinterpret_cast<T*>(take(Rows::kBytes));
    if (Sizes::kApart) q.data = reinterpret_cast<T*>(take(Rows::kBytes));
    dout.data = reinterpret_cast<T*>(take(Values::kBytes));
    if (!Sizes::kApart) {
      // Products of 64 rows that start at row 32 run on into what follows: their last 32 rows are not used.
      q.data = many_tokens ? reinterpret_cast<T*>(take(Rows::kBytes)) : dout.data + kDeltaRows / 2 * 64;
    }
    prepared = take(kDeltaLost);
    static_assert(sizeof(LaterSums<D>) <= kDeltaInverseBytes, "");
    later = reinterpret_cast<LaterSums<D>*>(prepared);
    factors = reinterpret_cast<float*>(take(kFactorBytes));
    sums = reinterpret_cast<GradientSums<D>*>(take(sizeof(GradientSums<D>)));
    partial = reinterpret_cast<float*>(next);
  }

  // 64 of a slab's columns from `col` on.
  __device__ static Rows part(unsigned char* states, int col) {
    return {reinterpret_cast<T*>(states + col / 64 * Rows::kBytes)};
  }
  __device__ Rows s(int col) const { return part(states, col); }
  __device__ Rows ds(int col) const { return part(gradients, col); }
  // S once more, where U and G were.
  __device__ unsigned char* again() const { return reinterpret_cast<unsigned char*>(u.data); }
  __device__ Square square(int i) const { return {reinterpret_cast<T*>(squares + i * Square::kBytes)}; }
};

// What a block knows of its chunk, and a warp of its place: 16 rows, and columns of D from `col` on.
struct Here {
  Piece piece;
  int64_t chunk;
  int head, query_head, rows;
  bool first;        // of the memory head's query heads
  bool many_tokens;  // a chunk may have more than 32
  int group, band, row, mine, col;

  __device__ int bands() const { return many_tokens ? kTilesDown : kTilesDown / 2; }  // of 16 tokens
  // Some of the 16 tokens come after some of the 16 rows.
  __device__ static bool follow(int of_tokens, int of_rows, int n) { return of_rows < (of_tokens + 1) * n; }
};

}  // namespace girih::kernels::delta_product
