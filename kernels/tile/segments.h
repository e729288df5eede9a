// How a scan is cut where few states leave the card idle: every sequence into segments that run at once, each
// from zero, are joined, and run again from what they start from.
#pragma once

#include <algorithm>

#include "tile/grid.h"
#include "tile/sequence.h"

namespace girih::kernels {

// Multiprocessors of the card that tuning was done on. Its size, not the device's: sizes alone decide which
// kernels run, and how work is cut.
constexpr int64_t kCard = 132;

// Tokens of a segment, a multiple of `chunk`; 0 where sequences are not cut. `blocks` would walk them uncut.
// Cut, most is read twice and there are three launches for one: that pays from `least` segments of 16 chunks
// on, as long as their blocks fill no more than the card.
inline int64_t segment_tokens(const Tokens& all, int64_t blocks, int64_t chunk, int64_t least = 3) {
  constexpr int64_t kLeastChunks = 16;
  if (blocks == 0) return 0;
  const int64_t tokens = divide_up(all.batch * all.tokens, all.sequences);  // a sequence's, about
  const int64_t chunks = divide_up(tokens, chunk);
  const int64_t segments = std::min(kCard / blocks, chunks / kLeastChunks);
  return segments < least ? 0 : divide_up(chunks, segments) * chunk;
}

}  // namespace girih::kernels
