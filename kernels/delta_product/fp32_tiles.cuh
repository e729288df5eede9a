// Tiles of sixteen rows of the fp32 scan: the iterator over a sequence, and the shared memory of a block.
#pragma once

#include "delta_product/fp32_segments.h"
#include "pipe/ring.h"
#include "tile/pack.h"
#include "tile/shared.h"

namespace girih::kernels::delta_product::fp32_scan {

constexpr int kRows = 16;
// Numbers of warps. A group of kParts state warps has sixteen columns of V; each of its warps has half of D.
constexpr int kGroups = 2, kParts = 2, kStateWarps = kGroups * kParts, kMatrixWarps = 4, kLoadWarps = 2;
constexpr int kThreads = 32 * (kStateWarps + kMatrixWarps + kLoadWarps);
constexpr int kGroupColumns = 16, kBlockColumns = kGroups * kGroupColumns;  // columns of V
constexpr int kMaxStages = 4;

// Sequence and head of a block.
struct HeadWork {
  Sequence sequence;
  int64_t tokens;
  int head, group;

  __device__ HeadWork(const DeltaFp32Shape& shape, int64_t job)
      : sequence(sequence_at(shape.segments.tokens, job / shape.heads)),
        tokens(sequence.end - sequence.start),
        head(static_cast<int>(job % shape.heads)),
        group(shape.query_heads / shape.heads) {}
};

// Iterates over the tiles of a sequence, segment by segment; a tile lies in one segment. Reverse: from the
// last to the first.
template <bool Reverse>
class TileIterator {
  const DeltaSegments& segments_;
  int64_t tokens_;
  int length_;  // rows of the segment that belong to the sequence

  __device__ void start_segment(int64_t count) {
    length_ = static_cast<int>(count) * n;
    if (Reverse) token -= count;
    first = Reverse && length_ > 0 ? (length_ - 1) / kRows * kRows : 0;
  }
  __device__ static int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }

 public:
  const int n;                // steps of a token
  SegmentPosition position;   // of the segment
  int64_t token;              // first token of the segment, from the start of the sequence
  int first;                  // first row of the tile, from the start of the segment
  bool is_previous_complete;  // forward: the previous segment has all of its tokens

  __device__ TileIterator(const DeltaFp32Shape& shape, const HeadWork& work)
      : segments_(shape.segments),
        tokens_(work.tokens),
        n(shape.n),
        position(segments_, first_segment(segments_, work.sequence),
                 initial_position(segments_, work.sequence) + (Reverse && tokens_ > 0 ? tokens_ - 1 : 0)),
        token(Reverse ? tokens_ : 0),
        is_previous_complete(false) {
    start_segment(least(Reverse ? position.at + 1 : position.length - position.at, tokens_));
  }

  __device__ bool has_tile() const { return length_ > 0; }
  __device__ int rows() const { return length_ - first < kRows ? length_ - first : kRows; }
  // The tile is the first of its segment in the order of the iteration.
  __device__ bool is_first_of_segment() const { return Reverse ? first + kRows >= length_ : first == 0; }

  __device__ void next() {
    if (Reverse) {
      first -= kRows;
      if (first >= 0) return;
      position.retreat(segments_);
      start_segment(least(position.length, token));
    } else {
      first += kRows;
      if (first < length_) return;
      const int count = length_ / n;
      is_previous_complete = position.at + count == position.length;
      token += count;
      position.advance(segments_);
      start_segment(least(position.length, tokens_ - token));
    }
  }

  // Index of the tile's first step in the sequence.
  __device__ int64_t row() const { return token * n + first; }
  // For row i of the tile: its token in the segment, and whether it is the first or the last step of that
  // token.
  __device__ int token_of_segment(int i) const {
    return n == 1 ? first + i : static_cast<int>(static_cast<unsigned>(first + i) / n);
  }
  __device__ bool begins_token(int i) const { return token_of_segment(i) * n == first + i; }
  __device__ bool ends_token(int i) const { return token_of_segment(i + 1) * n == first + i + 1; }
};

// Rows of fp32, in packs of four that are swizzled within 128 bytes. There are no bank conflicts for a float4
// of each of two rows and four packs, nor for a float2 of each of four rows (2c, or 2c + 1) and four pairs of
// columns.
template <int Cols>
struct RowTile {
  static constexpr int kBytes = kRows * Cols * static_cast<int>(sizeof(float));

  float* data;

  // Element (row + lane_row, col + lane_col): row is a multiple of 8, col of 16; lane_row and lane_col are
  // below 16.
  __device__ float& at(int row, int col, int lane_row, int lane_col) const {
    const int swizzle = (lane_row & 6) ^ (lane_row & 1) << 2;
    return data[(row + lane_row) * Cols + (col & ~31) + (((col & 16) + lane_col) ^ 4 * swizzle)];
  }
};

// Loads four neighbours of a row (16 bytes).
template <class To, class From>
__device__ inline void load_four(To (&to)[4], const From* from) {
  const auto four = *reinterpret_cast<const AlignedArray<From, 4>*>(from);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = four.at[i];
}

// Row pitch of w or do: 4 modulo 16 floats, so that reads of element (2c, or 2c + 1, r) have no bank
// conflicts.
constexpr int kValuePitch = kBlockColumns + 4;

// Results of the matrix warps for a tile. X and P are stored as B operands: row n is a column of the
// product, and terms 2c, 2c + 1, 2c + 8, 2c + 9 of the sum are neighbours. X is the sum of three tf32
// numbers.
constexpr int kInverseParts = 3;
struct TileMatrices {
  uint32_t x[kInverseParts][kRows][kRows];
  float p[kRows][kRows];
  // e^ of the sum of gates up to row i, after row i, and of all rows.
  float decay_from_block_start[kRows], decay_to_block_end[kRows], decay_total;
  int token[kRows];  // token that a row ends, in its segment; else -1
};

// Memory of a matrix warp.
struct MatrixStorage {
  double gates[kRows];     // prefix sums
  double a[kRows][kRows];  // A
};

// Partial sums of the two warps of a group, over half of D each; two alternating buffers.
struct PartialSums {
  float4 lane_sums[2][kParts][4][32];
};

struct TileBarriers {
  FullBarriers<kMaxStages> full, matrices_full;
  EmptyBarriers<kMaxStages> empty;
};

template <int Width>
struct TileStorage {
  using Rows = RowTile<Width>;
  static constexpr int kValuesOffset = 3 * Rows::kBytes,
                       kGatesOffset = kValuesOffset + kRows * kValuePitch * 4,
                       kMatricesOffset = kGatesOffset + kRows * 4,
                       kStageBytes =
                           (kMatricesOffset + static_cast<int>(sizeof(TileMatrices)) + 127) / 128 * 128;
  static constexpr int kMatrixStorageOffset = kGroups * static_cast<int>(sizeof(PartialSums)),
                       kBarriersOffset =
                           kMatrixStorageOffset + kMatrixWarps * static_cast<int>(sizeof(MatrixStorage)),
                       kFixedBytes = kBarriersOffset + static_cast<int>(sizeof(TileBarriers));

  unsigned char* data;
  int stages;

  static constexpr int bytes(int stages) { return stages * kStageBytes + kFixedBytes; }

  __device__ Rows q(int i) const { return {floats(i, 0)}; }
  __device__ Rows k(int i) const { return {floats(i, Rows::kBytes)}; }
  __device__ Rows b(int i) const { return {floats(i, 2 * Rows::kBytes)}; }
  __device__ float* values(int i) const { return floats(i, kValuesOffset); }
  // Zero except at the first rows of tokens.
  __device__ float* gates(int i) const { return floats(i, kGatesOffset); }
  __device__ TileMatrices& matrices(int i) const {
    return *reinterpret_cast<TileMatrices*>(floats(i, kMatricesOffset));
  }
  __device__ PartialSums& exchange(int group) const {
    return reinterpret_cast<PartialSums*>(floats(stages, 0))[group];
  }
  __device__ MatrixStorage& matrix_storage(int i) const {
    return reinterpret_cast<MatrixStorage*>(floats(stages, kMatrixStorageOffset))[i];
  }
  __device__ TileBarriers& barriers() const {
    return *reinterpret_cast<TileBarriers*>(floats(stages, kBarriersOffset));
  }

 private:
  __device__ float* floats(int stage, int byte) const {
    return reinterpret_cast<float*>(data + stage * kStageBytes + byte);
  }
};

}  // namespace girih::kernels::delta_product::fp32_scan
