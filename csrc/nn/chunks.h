// Whole chunks out of padded or packed sequences.
#pragma once

#include "layer.h"

namespace girih::nn {

// Every sequence on chunks of its own, the sequences one after the other, with `room` free rows after each
// one's last token. Never waits for the device.
struct ChunkTable {
  Tensor row;    // [B * T]: where in the table's chunks * chunk rows a token stands; masked ones: after the
                 // last row
  Tensor index;  // [chunks]: how many chunks of its sequence came before
  Tensor cu_chunks;  // [N + 1]: the sequences' chunks; chunks that no sequence needs belong to the last one
  int64_t chunk, B, T;

  // For x [B, T, ...].
  ChunkTable(const Tensor& x, int64_t chunk, const Tensor& valid, const Tensor& cu_seqlens, int64_t room = 0);
  // x [B, T, ...] -> [1, chunks, chunk, ...], zero where no token stands.
  Tensor spread(const Tensor& x) const;
  // y [1, chunks, chunk, ...] -> [B, T, ...]: the row `shift` after each token's; any row for masked tokens.
  Tensor gather(const Tensor& y, int64_t shift = 0) const;
};

}  // namespace girih::nn
