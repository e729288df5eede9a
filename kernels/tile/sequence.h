// Which sequence a token belongs to, alike for a batch of equal lengths, for sequences packed by cu_seqlens
// and for rows of which cu_seqlens says where their one sequence begins and ends.
#pragma once

#include <cstdint>

namespace girih::kernels {

struct Tokens {
  int64_t batch;           // 1 when packed
  int64_t tokens;          // a batch row's
  int64_t sequences;       // N: the batch, or what cu_seqlens packs
  const void* cu_seqlens;  // [N + 1], or with `rows` [batch, 2]; null: every row is a sequence
  bool cu_seqlens_64;      // int64, else int32
  bool rows;
};

// One row holds several sequences; else a row is a sequence or has one.
__host__ __device__ inline bool is_packed(const Tokens& all) {
  return all.cu_seqlens != nullptr && !all.rows;
}

struct Sequence {
  int64_t index;  // row of the state
  int64_t batch;  // row of x
  int64_t start;  // first token
  int64_t end;    // one past the last token
  bool inside;    // false: tokens that no sequence owns
};

__device__ inline int64_t clamp(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

// Entry n of cu_seqlens, whatever its contents a position in 0..tokens.
__device__ inline int64_t boundary(const Tokens& all, int64_t n) {
  const int64_t value = all.cu_seqlens_64 ? static_cast<const int64_t*>(all.cu_seqlens)[n]
                                          : static_cast<const int32_t*>(all.cu_seqlens)[n];
  return clamp(value, 0, all.tokens);
}

__device__ inline Sequence sequence_at(const Tokens& all, int64_t index) {
  if (all.cu_seqlens == nullptr) return {index, index, 0, all.tokens, true};
  if (all.rows) {
    const int64_t start = boundary(all, 2 * index);
    return {index, index, start, clamp(boundary(all, 2 * index + 1), start, all.tokens), true};
  }
  const int64_t start = boundary(all, index);
  return {index, 0, start, clamp(boundary(all, index + 1), start, all.tokens), true};
}

// The sequence of a token. Its start <= token < its end holds for any contents of cu_seqlens, so a walk from
// end to end stops, and what is read between start and end lies in the tensor.
__device__ inline Sequence sequence_of(const Tokens& all, int64_t batch, int64_t token) {
  if (all.cu_seqlens == nullptr) return {batch, batch, 0, all.tokens, true};
  if (all.rows) {
    const Sequence row = sequence_at(all, batch);
    if (token < row.start) return {batch, batch, token, row.start, false};
    if (token >= row.end) return {batch, batch, token, all.tokens, false};
    return row;
  }
  int64_t low = 0, high = all.sequences;  // the first n with cu_seqlens[n + 1] > token
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (boundary(all, middle + 1) > token) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  if (low == all.sequences) return {low, 0, token, all.tokens, false};
  const int64_t start = boundary(all, low);
  if (start > token) return {low, 0, token, start, false};
  return {low, 0, start, boundary(all, low + 1), true};
}

constexpr int kChunk = 64;  // tokens

// Sequences cut into pieces of `size` tokens, each with a number that sizes alone bound: sequence n of a
// packed row takes the numbers from start / size + n on, which leaves it at least as many as it needs. Some
// stay without tokens.
__host__ __device__ inline int64_t piece_count(const Tokens& all, int64_t size) {
  return is_packed(all) ? all.tokens / size + all.sequences : all.batch * ((all.tokens + size - 1) / size);
}

struct Piece {
  Sequence sequence;
  int64_t index;  // in its sequence
  int64_t start;  // first token
  int length;     // tokens, 0..size
};

// The number of a sequence's first piece.
__device__ inline int64_t first_piece(const Tokens& all, const Sequence& sequence, int64_t size) {
  return is_packed(all) ? sequence.start / size + sequence.index
                        : sequence.index * ((all.tokens + size - 1) / size);
}

__device__ inline Piece piece_at(const Tokens& all, int64_t number, int64_t size) {
  Sequence sequence;
  if (!is_packed(all)) {
    // Both fit in 32 bits, where a division costs a third: numbers are blocks of a grid.
    const auto each = static_cast<uint32_t>((all.tokens + size - 1) / size);
    sequence = sequence_at(all, static_cast<uint32_t>(number) / each);
  } else {
    int64_t low = 0, high = all.sequences - 1;  // the last n whose first piece is at most `number`
    while (low < high) {
      const int64_t middle = low + (high - low + 1) / 2;
      if (boundary(all, middle) / size + middle <= number) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    sequence = sequence_at(all, low);
  }
  const int64_t index = number - first_piece(all, sequence, size);
  const int64_t start = sequence.start + index * size;
  const int64_t length = index < 0 ? 0 : clamp(sequence.end - start, 0, size);
  return {sequence, index, start, static_cast<int>(length)};
}

}  // namespace girih::kernels
