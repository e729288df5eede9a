// The tokens of a launch (sequences or segments) and of a block that scans them chunk by chunk.
#pragma once

#include "gsa/gsa.h"

namespace girih::kernels {

// A launch scans whole sequences, or segments of sequences.
struct Segmentation {
  // A multiple of 64; 0: whole sequences. With segments, and unless the scan is local, there is an initial
  // state for every segment.
  int64_t segment_tokens;
  // Not null: a local scan, in which every segment starts from zero; needs segment_tokens > 0. The launch
  // writes the final state of each segment and, here, the sum of its gates [segments, heads, M],
  // and nothing else; M is the number of slots, or the width of keys if gla calls. The last segment of a
  // sequence is skipped: no other segment needs its final state.
  float* gate_sums;

  int64_t count_segments(const SequenceLayout& layout) const {
    return segment_tokens == 0 ? layout.sequences : token_range_count(layout, segment_tokens);
  }
};

// The tokens of a sequence or of a segment, and its chunks in scan order: step 0 is the first chunk, or with
// Reverse the last.
template <bool Reverse>
struct ChunkRange {
  Sequence sequence;
  int64_t start;
  int length, chunks;    // number of tokens and of chunks
  bool is_last_segment;  // no segment of the sequence is later in scan order

  // segment_index: among the segments of all sequences, or the sequence if segment_tokens is 0. Returns false
  // if the segment has no tokens, or in a local scan if it is the last of its sequence. The first segment of
  // an empty sequence exists: its initial state is the final state of the sequence.
  __device__ bool init(const SequenceLayout& layout, int64_t segment_tokens, int64_t segment_index,
                       bool is_local_scan) {
    int64_t end;
    if (segment_tokens == 0) {
      sequence = sequence_at(layout, segment_index);
      start = sequence.start;
      end = sequence.end;
    } else {
      const TokenRange range = token_range_at(layout, segment_index, segment_tokens);
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
  // The chunk of a step: its index in the range, and its first token relative to `start`.
  __device__ int chunk_index(int step) const { return Reverse ? chunks - 1 - step : step; }
  __device__ int first_token(int step) const { return chunk_index(step) * kChunk; }
  // Tokens of the chunk that starts at `token`.
  __device__ int count_rows(int token) const { return min(kChunk, length - token); }
};

}  // namespace girih::kernels
