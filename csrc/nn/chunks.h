// Tokens on whole chunks: of packed sequences, and of sequences that go on from call to call.
#pragma once

#include "layer.h"

namespace girih::nn {

// Every packed sequence on chunks of its own, the sequences one after the other, with `room` free rows after
// each one's last token. Never waits for the device.
struct ChunkTable {
  Tensor row;        // [T]: where in the table's chunks * chunk rows a token stands; of none: after the last
  Tensor index;      // [chunks]: how many chunks of its sequence came before
  Tensor cu_chunks;  // [N + 1]: the sequences' chunks; chunks that no sequence needs belong to the last one
  int64_t chunk;

  // For x [1, T, ...].
  ChunkTable(const Tensor& x, int64_t chunk, const Tensor& cu_seqlens, int64_t room = 0);
  // x [1, T, ...] -> [1, chunks, chunk, ...], zero where no token stands.
  Tensor spread(const Tensor& x) const;
  // y [1, chunks, chunk, ...] -> [1, T, ...]: the row `shift` after each token's.
  Tensor gather(const Tensor& y, int64_t shift = 0) const;
};

// The chunks that a step compresses.
struct Compressions {
  Tensor sequences;    // int64 [K]: which of N, on the device
  Tensor is_complete;  // [K]: whose chunk has ended; undefined: all of them

  // fresh [K, ...] where a chunk has ended, else old; in old's dtype.
  Tensor select(const Tensor& fresh, const Tensor& old) const;
};

// How many tokens each of N sequences has, int64 [N]: on the device for what is computed, and known to the
// host, which decides what runs.
struct Reached {
  Tensor tokens, known;

  int64_t most() const { return known.numel() > 0 ? known.max().item<int64_t>() : 0; }
  // Whether all sequences are as long.
  bool level() const { return known.numel() > 0 && (known == known[0]).all().item<bool>(); }
  // Number of chunks that the last step compresses. Equal lengths: 0 or N. Otherwise the number of chunks
  // that have ended, rounded up to a power of two, at most N: a CUDA graph has fixed sizes, and the extra
  // rows are computed and discarded.
  int64_t count_compressions(int64_t chunk) const;
  // The chunks of count_compressions, found on the device; none: no chunk has ended.
  std::optional<Compressions> find_compressions(int64_t chunk) const;
};

// T more tokens of N sequences on chunks: the chunk that each had begun, from its start, and those after.
// Masked tokens go behind the valid ones, where nothing that is asked for sees them. With `keep` the
// sequences go on after this call, and how far they have come is read here: a mask is waited for.
class Continuation {
 public:
  // past.tokens is undefined at the start of the sequences.
  Continuation(const Tensor& x, int64_t chunk, const Tensor& attention_mask, const Reached& past, bool keep);

  // x [N, T, ...] after the tokens of the begun chunk, [N, chunk, ...] -> [N, chunks, chunk, ...]. What
  // stands after the last token means nothing.
  Tensor spread(const Tensor& x, const Tensor& before) const;
  // y [N, chunks, chunk, ...] -> [N, T, ...]: the row `shift` after each token's, and for a masked token that
  // of the last valid one, wherever it stood.
  Tensor gather(const Tensor& y, int64_t shift = 0) const;
  // table [N, chunks, ...] -> [N, ...]: what belongs to the chunk of the token after the last.
  Tensor last(const Tensor& table) const;

  Tensor begun;     // [N]: the chunks that lie behind the table's first
  int64_t chunks;   // how many the table has, one of which holds the token after the last
  Reached reached;  // after the call, with `keep`

 private:
  int64_t chunk_, T_;
  Tensor order_, row_, phase_, passed_;
};

// index [N, T] as take_along_dim wants it of x [N, ?, ...].
inline Tensor along(const Tensor& index, const Tensor& x) {
  auto sizes = index.sizes().vec();
  sizes.resize(x.dim(), 1);
  return index.view(sizes);
}

}  // namespace girih::nn
