// The exact scan's tiles of sixteen rows: how a sequence is walked through, and what a block has of one in
// shared memory.
#pragma once

#include "delta_product/pieces.h"
#include "tile/pack.h"
#include "tile/shared.h"

namespace girih::kernels::delta_product::by_tile {

constexpr int kRows = 16;
// Warps: a group of chains has sixteen columns of V, each of its warps half of D.
constexpr int kGroups = 2, kParts = 2, kChains = kGroups * kParts, kMakers = 4, kLoaders = 2;
constexpr int kThreads = 32 * (kChains + kMakers + kLoaders);
constexpr int kChainCols = 16, kBlockCols = kGroups * kChainCols;  // of V
constexpr int kMaxStages = 4;

// A block's sequence and head.
struct Walked {
  Sequence sequence;
  int64_t tokens;
  int head, group;

  __device__ Walked(const DeltaExactShape& shape, int64_t job)
      : sequence(sequence_at(shape.pieces.tokens, job / shape.heads)),
        tokens(sequence.end - sequence.start),
        head(static_cast<int>(job % shape.heads)),
        group(shape.query_heads / shape.heads) {}
};

// From tile to tile of a sequence, piece by piece; no tile is of two pieces. Reverse: from its end to its
// start.
template <bool Reverse>
class TileWalk {
  const DeltaPieces& pieces_;
  int64_t tokens_;
  int length_;  // rows of the piece that the sequence has

  __device__ void enter(int64_t count) {
    length_ = static_cast<int>(count) * n;
    if (Reverse) token -= count;
    first = Reverse && length_ > 0 ? (length_ - 1) / kRows * kRows : 0;
  }
  __device__ static int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }

 public:
  const int n;     // steps a token
  Place place;     // the piece
  int64_t token;   // its first, of the sequence
  int first;       // row of the tile, of the piece
  bool completed;  // forward: the piece before has all of its tokens

  __device__ TileWalk(const DeltaExactShape& shape, const Walked& here)
      : pieces_(shape.pieces),
        tokens_(here.tokens),
        n(shape.n),
        place(pieces_, first_piece(pieces_, here.sequence),
              position_of(pieces_, here.sequence) + (Reverse && tokens_ > 0 ? tokens_ - 1 : 0)),
        token(Reverse ? tokens_ : 0),
        completed(false) {
    enter(least(Reverse ? place.at + 1 : place.length - place.at, tokens_));
  }

  __device__ bool more() const { return length_ > 0; }
  __device__ int rows() const { return length_ - first < kRows ? length_ - first : kRows; }
  // The tile is the first of its piece that the walk comes to.
  __device__ bool enters() const { return Reverse ? first + kRows >= length_ : first == 0; }

  __device__ void next() {
    if (Reverse) {
      first -= kRows;
      if (first >= 0) return;
      place.retreat(pieces_);
      enter(least(place.length, token));
    } else {
      first += kRows;
      if (first < length_) return;
      const int count = length_ / n;
      completed = place.at + count == place.length;
      token += count;
      place.advance(pieces_);
      enter(least(place.length, tokens_ - token));
    }
  }

  // The sequence's step that the tile begins with.
  __device__ int64_t row() const { return token * n + first; }
  // Row i of the tile: which of its piece's tokens it is a step of, whether the first, or the last.
  __device__ int token_of_piece(int i) const {
    return n == 1 ? first + i : static_cast<int>(static_cast<unsigned>(first + i) / n);
  }
  __device__ bool begins_token(int i) const { return token_of_piece(i) * n == first + i; }
  __device__ bool ends_token(int i) const { return token_of_piece(i + 1) * n == first + i + 1; }
};

// Rows of fp32 in packs of four, which change places within 128 bytes so that neither a float4 of each of two
// rows and four packs, nor a float2 of each of four rows (2c, or 2c + 1) and four columns of two meet
// conflicts.
template <int Cols>
struct RowsOfTile {
  static constexpr int kBytes = kRows * Cols * static_cast<int>(sizeof(float));

  float* data;

  // row + lane_row, col + lane_col: row a multiple of 8, col of 16; lane_row below 16, lane_col below 16.
  __device__ float& at(int row, int col, int lane_row, int lane_col) const {
    const int turn = (lane_row & 6) ^ (lane_row & 1) << 2;
    return data[(row + lane_row) * Cols + (col & ~31) + (((col & 16) + lane_col) ^ 4 * turn)];
  }
};

// Four neighbours of a row, 16 bytes, one by one.
template <class To, class From>
__device__ inline void take_four(To (&to)[4], const From* from) {
  const auto four = *reinterpret_cast<const Elements<From, 4>*>(from);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = four.at[i];
}

// Values: w, or do; rows apart by 4 modulo 16 floats, so that a lane's (2c, or 2c + 1, r) meet no conflict.
constexpr int kValuePitch = kBlockCols + 4;

// What the makers leave of a tile for the chains. X and P are kept as right factors: row n of the product's
// columns, and of the rows that are summed over 2c, 2c + 1, 2c + 8, 2c + 9 beside each other. X is the sum of
// three tf32 numbers.
constexpr int kInverseParts = 3;
struct Weights {
  uint32_t x[kInverseParts][kRows][kRows];
  float p[kRows][kRows];
  // Of gates: up to row i; after it; of all rows.
  float through[kRows], after[kRows], whole;
  int token[kRows];  // that a row ends, of its piece's; else -1
};

// A maker's own.
struct MakerSpace {
  double gates[kRows];     // their sums
  double a[kRows][kRows];  // A
};

// What a group's warps hand each other, by two places in turns: each lane's sums over half of D.
struct Exchange {
  float4 of_lane[2][kParts][4][32];
};

struct TileBarriers {
  uint64_t full[kMaxStages], made[kMaxStages], empty[kMaxStages];
};

template <int Tile>
struct TileSpace {
  using Rows = RowsOfTile<Tile>;
  static constexpr int kValues = 3 * Rows::kBytes, kGates = kValues + kRows * kValuePitch * 4,
                       kWeights = kGates + kRows * 4,
                       kStageBytes = (kWeights + static_cast<int>(sizeof(Weights)) + 127) / 128 * 128;
  static constexpr int kMakerBytes = kGroups * static_cast<int>(sizeof(Exchange)),
                       kBarrierBytes = kMakerBytes + kMakers * static_cast<int>(sizeof(MakerSpace)),
                       kFixedBytes = kBarrierBytes + static_cast<int>(sizeof(TileBarriers));

  unsigned char* data;
  int stages;

  static constexpr int bytes(int stages) { return stages * kStageBytes + kFixedBytes; }

  __device__ Rows q(int i) const { return {floats(i, 0)}; }
  __device__ Rows k(int i) const { return {floats(i, Rows::kBytes)}; }
  __device__ Rows b(int i) const { return {floats(i, 2 * Rows::kBytes)}; }
  __device__ float* values(int i) const { return floats(i, kValues); }
  __device__ float* gates(int i) const { return floats(i, kGates); }  // of rows that begin a token, else 0
  __device__ Weights& weights(int i) const { return *reinterpret_cast<Weights*>(floats(i, kWeights)); }
  __device__ Exchange& exchange(int group) const {
    return reinterpret_cast<Exchange*>(floats(stages, 0))[group];
  }
  __device__ MakerSpace& maker(int i) const {
    return reinterpret_cast<MakerSpace*>(floats(stages, kMakerBytes))[i];
  }
  __device__ TileBarriers& barriers() const {
    return *reinterpret_cast<TileBarriers*>(floats(stages, kBarrierBytes));
  }

 private:
  __device__ float* floats(int stage, int byte) const {
    return reinterpret_cast<float*>(data + stage * kStageBytes + byte);
  }
};

}  // namespace girih::kernels::delta_product::by_tile
