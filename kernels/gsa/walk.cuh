// The tokens of a launch (sequences or segments) and of a block that scans them chunk by chunk.
#pragma once

#include "gsa/gsa.h"

namespace girih::kernels {

// A launch scans whole sequences, or segments of sequences.
struct Segments {
  // Tokens of a segment, a multiple of 64; 0: whole sequences. With segments, the initial states are those of
  // the segments.
  int64_t tokens;
  // If not null, every segment starts from zero. The launch writes the final state of each segment and, here,
  // the sum of its gates [segments, heads, slots or keys], and nothing else. The last segment of a sequence
  // is skipped.
  float* decay;

  int64_t count(const Tokens& all) const { return tokens == 0 ? all.sequences : piece_count(all, tokens); }
};

// The tokens of a sequence or of a segment. Reverse: from the last chunk to the first.
template <bool Reverse>
struct Walk {
  Sequence sequence;
  int64_t start;
  int length, chunks;
  bool nothing_follows;  // no segment of the sequence is later in scan order

  // segment: tokens of a segment, or 0 for whole sequences. Returns false if segment `number` does not exist,
  // or if `alone` and the segment is the last of its sequence in scan order.
  __device__ bool find(const Tokens& tokens, int64_t segment, int64_t number, bool alone) {
    int64_t end;
    if (segment == 0) {
      sequence = sequence_at(tokens, number);
      start = sequence.start;
      end = sequence.end;
    } else {
      const Piece piece = piece_at(tokens, number, segment);
      if (piece.length == 0 && piece.index != 0) return false;
      sequence = piece.sequence;
      start = piece.start;
      end = start + piece.length;
    }
    nothing_follows = Reverse ? start == sequence.start : end == sequence.end;
    if (alone && nothing_follows) return false;
    length = static_cast<int>(end - start), chunks = (length + kChunk - 1) / kChunk;
    return true;
  }
  __device__ int chunk_of(int turn) const { return Reverse ? chunks - 1 - turn : turn; }
  __device__ int token_of(int turn) const { return chunk_of(turn) * kChunk; }
  __device__ int rows_from(int token) const { return min(kChunk, length - token); }
};

}  // namespace girih::kernels
