// The tokens of a launch (sequences or segments) and of a block that scans them chunk by chunk.
#pragma once

#include "gsa/gsa.h"

namespace girih::kernels {

// A launch scans whole sequences, or segments of sequences.
struct Segmentation {
  // Tokens of a segment, a multiple of 64; 0: whole sequences. With segments, the initial states are those of
  // the segments.
  int64_t tokens;
  // If not null, every segment starts from zero. The launch writes the final state of each segment and, here,
  // the sum of its gates [segments, heads, slots or keys], and nothing else. The last segment of a sequence
  // is skipped.
  float* decay;

  int64_t count(const SequenceLayout& all) const {
    return tokens == 0 ? all.sequences : token_range_count(all, tokens);
  }
};

// The tokens of a sequence or of a segment. Reverse: from the last chunk to the first.
template <bool Reverse>
struct ChunkRange {
  Sequence sequence;
  int64_t start;
  int length, chunks;
  bool is_last_segment;  // no segment of the sequence is later in scan order

  // segment: tokens of a segment, or 0 for whole sequences. Returns false if segment `number` does not exist,
  // or if `alone` and the segment is the last of its sequence in scan order.
  __device__ bool init(const SequenceLayout& tokens, int64_t segment, int64_t segment_index,
                       bool is_local_scan) {
    int64_t end;
    if (segment == 0) {
      sequence = sequence_at(tokens, segment_index);
      start = sequence.start;
      end = sequence.end;
    } else {
      const TokenRange range = token_range_at(tokens, segment_index, segment);
      if (range.length == 0 && range.index != 0) return false;
      sequence = range.sequence;
      start = range.start;
      end = start + range.length;
    }
    is_last_segment = Reverse ? start == sequence.start : end == sequence.end;
    if (is_local_scan && is_last_segment) return false;
    length = static_cast<int>(end - start), chunks = (length + kChunk - 1) / kChunk;
    return true;
  }
  __device__ int chunk_index(int step) const { return Reverse ? chunks - 1 - step : step; }
  __device__ int first_token(int step) const { return chunk_index(step) * kChunk; }
  __device__ int count_rows(int token) const { return min(kChunk, length - token); }
};

}  // namespace girih::kernels
