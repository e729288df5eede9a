// Which tokens a launch, and a block of it that goes from chunk to chunk, has.
#pragma once

#include "gsa/gsa.h"

namespace girih::kernels {

// A launch over whole sequences, or over segments of them.
struct Segments {
  // Of one, a multiple of 64; 0: whole sequences. The initial states are then the segments', not the
  // sequences'.
  int64_t tokens;
  // Not null: every segment from zero, for what it adds to the state. The final states are the segments', the
  // sums of their gates go here, [segments, heads, slots or keys]; nothing else is written, and segments that
  // nothing follows are left out.
  float* decay;

  int64_t count(const Tokens& all) const { return tokens == 0 ? all.sequences : piece_count(all, tokens); }
};

// A sequence's tokens, or a segment's of one. Reverse: from the last chunk to the first.
template <bool Reverse>
struct Walk {
  Sequence sequence;
  int64_t start;
  int length, chunks;
  bool nothing_follows;  // in the order of the walk

  // Of `segment` tokens each, or 0: whole sequences. False: there is no such segment, or where what follows
  // alone counts (`alone`), none follows.
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
