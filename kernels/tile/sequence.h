// Sequences of a batch in three forms: every row is a sequence; cu_seqlens packs several sequences into one
// row; or every row has one sequence between two bounds in cu_seqlens.
#pragma once

#include <cstdint>

namespace girih::kernels {

struct Tokens {
  int64_t batch;           // batch rows; 1 if packed
  int64_t tokens;          // T, tokens of a batch row
  int64_t sequences;       // N: batch rows, or packed sequences
  const void* cu_seqlens;  // [N + 1], or with `rows` [batch, 2]; null: every row is a sequence
  bool cu_seqlens_64;      // cu_seqlens is int64, else int32
  bool rows;
};

// Whether one row holds several sequences.
__host__ __device__ inline bool is_packed(const Tokens& all) {
  return all.cu_seqlens != nullptr && !all.rows;
}

struct Sequence {
  int64_t index;  // row of the state, 0..N-1
  int64_t batch;  // batch row of the tokens
  int64_t start;  // first token
  int64_t end;    // one past the last token
  bool inside;    // false: the tokens belong to no sequence
};

__device__ inline int64_t clamp(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

// Entry n of cu_seqlens, clamped to 0..tokens so that invalid contents stay in bounds.
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

// The sequence of a token. start <= token < end holds for any contents of cu_seqlens, so that a loop over
// sequences terminates and accesses between start and end lie in the tensor.
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

// Sequences cut into chunks of `size` tokens. Chunk numbers have a bound that depends on sizes only: the
// chunks of sequence n of a packed row have the numbers from start / size + n, which leaves every sequence at
// least as many numbers as it has chunks. Some numbers have no tokens.
__host__ __device__ inline int64_t piece_count(const Tokens& all, int64_t size) {
  return is_packed(all) ? all.tokens / size + all.sequences : all.batch * ((all.tokens + size - 1) / size);
}

struct Piece {
  Sequence sequence;
  int64_t index;  // of the chunk in its sequence
  int64_t start;  // first token
  int length;     // tokens, 0..size
};

// The number of the first chunk of a sequence.
__device__ inline int64_t first_piece(const Tokens& all, const Sequence& sequence, int64_t size) {
  return is_packed(all) ? sequence.start / size + sequence.index
                        : sequence.index * ((all.tokens + size - 1) / size);
}

__device__ inline Piece piece_at(const Tokens& all, int64_t number, int64_t size) {
  Sequence sequence;
  if (!is_packed(all)) {
    // A 32-bit division costs a third of a 64-bit one, and chunk numbers are block indices.
    const auto each = static_cast<uint32_t>((all.tokens + size - 1) / size);
    sequence = sequence_at(all, static_cast<uint32_t>(number) / each);
  } else {
    int64_t low = 0, high = all.sequences - 1;  // find the last n whose first chunk is at most `number`
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
