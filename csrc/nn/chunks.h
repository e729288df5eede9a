// Layouts that place tokens in whole chunks: for packed sequences, and for sequences continued over calls.
#pragma once

#include "layer.h"

namespace girih::nn {

// Layout of packed sequences in chunks: every sequence starts a new chunk. At least `room` rows after the
// last token of a sequence are free. Sizes are bounds computed from shapes, so the host does not wait for the
// device.
struct ChunkTable {
  Tensor row;    // [T]: row of a token among chunks * chunk rows; chunks * chunk for a token of no sequence
  Tensor index;  // [chunks]: index of the chunk in its sequence
  Tensor cu_chunks;  // [N + 1]: first chunk of each sequence; unused chunks belong to the last sequence
  int64_t chunk;

  // For x [1, T, ...].
  ChunkTable(const Tensor& x, int64_t chunk, const Tensor& cu_seqlens, int64_t room = 0);
  // x [1, T, ...] -> [1, chunks, chunk, ...]; rows without a token are zero.
  Tensor scatter(const Tensor& x) const;
  // y [1, chunks, chunk, ...] -> [1, T, ...]: for each token the row at offset `shift` from its row.
  Tensor gather(const Tensor& y, int64_t shift = 0) const;
};

// The K chunks that a decoding step compresses.
struct Compressions {
  Tensor sequences;    // int64 [K] on the device: index of the chunk's sequence, 0 to N - 1
  Tensor is_complete;  // [K]: whether the chunk is complete; undefined: all are

  // fresh [K, ...] where the chunk is complete, else old; in the dtype of old.
  Tensor select(const Tensor& fresh, const Tensor& old) const;
};

// Number of tokens of each of N sequences, int64 [N]: `tokens` on the device, for computations;
// `host_tokens`, the same numbers on the CPU, for the host's choice of kernels and sizes.
struct SequenceLengths {
  Tensor tokens, host_tokens;

  int64_t most() const { return host_tokens.numel() > 0 ? host_tokens.max().item<int64_t>() : 0; }
  // Whether all sequences have the same length.
  bool is_uniform() const {
    return host_tokens.numel() > 0 && (host_tokens == host_tokens[0]).all().item<bool>();
  }
  // Number of chunks that the last step compresses. Equal lengths: 0 or N. Otherwise the number of complete
  // chunks, rounded up to a power of two, at most N: a CUDA graph has fixed sizes, and the extra rows are
  // computed and discarded.
  int64_t count_compressions(int64_t chunk) const;
  // The chunks of count_compressions, found on the device; nullopt: no chunk is complete.
  std::optional<Compressions> find_compressions(int64_t chunk) const;
};

// Layout of T further tokens of N sequences in chunks. The first chunk of a row is the sequence's incomplete
// chunk, with its earlier tokens. Masked tokens are moved behind the valid tokens, which do not attend to
// them. use_cache: whether the sequences continue after this call. Then the host reads the lengths, and waits
// for the device if there is a mask.
class Continuation {
 public:
  // past: lengths before the call; past.tokens is undefined at the start of the sequences.
  Continuation(const Tensor& x, int64_t chunk, const Tensor& attention_mask, const SequenceLengths& past,
               bool use_cache);

  // x [N, T, ...], placed after the tokens `before` [N, chunk, ...] of the incomplete chunk ->
  // [N, chunks, chunk, ...]. Rows after the last token are unspecified.
  Tensor scatter(const Tensor& x, const Tensor& before) const;
  // y [N, chunks, chunk, ...] -> [N, T, ...]: for each token the row at offset `shift` from its row; a masked
  // token gets the row of the sequence's last valid token.
  Tensor gather(const Tensor& y, int64_t shift = 0) const;
  // table [N, chunks, ...] -> [N, ...]: the entry of the chunk that the next token belongs to.
  Tensor last(const Tensor& table) const;

  Tensor first_chunk;           // [N]: index of the table's first chunk in the sequence
  int64_t chunks;               // chunks of the table; the next token's chunk is one of them
  SequenceLengths seq_lengths;  // lengths after the call, with use_cache

 private:
  int64_t chunk_, T_;
  Tensor order_, row_, position_, current_chunk_;
};

// index [N, T] -> [N, T, 1, ...], with as many dimensions as x, for take_along_dim.
inline Tensor broadcast_index(const Tensor& index, const Tensor& x) {
  auto sizes = index.sizes().vec();
  sizes.resize(x.dim(), 1);
  return index.view(sizes);
}

}  // namespace girih::nn
