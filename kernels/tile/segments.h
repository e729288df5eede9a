// Segments of a scan. If a scan has too few states to fill the device, every sequence is cut into segments.
// The segments are scanned in parallel from zero, their results are joined to the state before each segment,
// and the segments are scanned again from these states.
#pragma once

#include <algorithm>

#include "tile/cuts.h"
#include "tile/grid.h"
#include "tile/sequence.h"

namespace girih::kernels {

// Tokens of a segment, a multiple of `chunk`; 0 if the sequences are not cut. `blocks` is the number of
// blocks without segments. With segments, most inputs are read twice and there are three launches instead of
// one: this pays for at least `min_segments` segments of kMinSegmentChunks, if all blocks still fit on the
// device at once.
inline int64_t segment_tokens(const SequenceLayout& layout, int64_t blocks, int64_t chunk,
                              int64_t min_segments = 3) {
  if (blocks == 0) return 0;
  const int64_t tokens =
      divide_up(layout.batch * layout.tokens, layout.sequences);  // mean length of a sequence
  const int64_t chunks = divide_up(tokens, chunk);
  const int64_t segments = std::min(kMultiprocessors / blocks, chunks / kMinSegmentChunks);
  return segments < min_segments ? 0 : divide_up(chunks, segments) * chunk;
}

}  // namespace girih::kernels
