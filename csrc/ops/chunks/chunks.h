// Tokens in chunks, computed on the device without a synchronisation. One layout covers batches, packed
// sequences and sequences that continue in the middle of a chunk.
#pragma once

#include <functional>

#include "../arguments/check.h"

namespace girih {

class Chunks {
 public:
  using States = std::vector<Tensor>;

  // B rows of T tokens in chunks of C. cu_seqlens [N + 1] packs N sequences into one row; cu_seqlens [B, 2]
  // has the begin and the end of the sequence of each row. Other tokens belong to no sequence. position [N]
  // (default 0): the place of the first token of each sequence in its chunk. Cut::at_start: chunks begin at
  // the start of each sequence. Cut::anywhere: with bounds [B, 2] chunks begin at the start of each row, so
  // that no token moves; for operators whose result does not depend on where chunks begin. The index tables
  // are on the device of x.
  enum class Cut { anywhere, at_start };
  Chunks(const Tensor& x, int64_t B, int64_t T, int64_t C, const OptionalTensor& cu_seqlens,
         const OptionalTensor& position = std::nullopt, Cut cut = Cut::anywhere);

  // Chunks of a row; an upper bound if packed: the remaining chunks are empty.
  int64_t count() const { return count_; }
  int64_t length() const { return chunk_length_; }  // C
  int64_t sequences() const { return N_; }

  // [B, T * rows, H, ...] -> [B, count, H, C * rows, ...] in `dtype`, zero in rows without a token.
  Tensor split(const Tensor& x, at::ScalarType dtype, int64_t rows = 1) const;
  // [B, count, H, C, ...] -> [B, T, H, ...], contiguous, in `dtype`.
  Tensor join(const Tensor& x, at::ScalarType dtype) const;

  // [B, count, C]: the row has a token.
  const Tensor& valid() const { return valid_; }
  // [B, count]: the last token of the chunk is one of the tokens of this call.
  Tensor has_chunk_end() const;
  // [N]: the position after the last token, 0..C-1.
  Tensor next_position() const;

  // Runs step(c, states) -> states over the chunks in order. States are [B, ...] inside and [N, ...] outside;
  // each sequence starts from its initial state. `before[i]` has state i before every chunk, `finals[i]` [N,
  // ...] the state after the last token of each sequence.
  struct Scan {
    std::vector<States> before;
    States finals;
  };
  Scan scan(const States& initial, const std::function<States(int64_t, const States&)>& step) const;
  // State i of a scan before every chunk, [B, count, ...].
  Tensor starts(const Scan& scan, size_t i) const;

 private:
  int64_t B_, T_, N_, chunk_length_, count_;
  bool has_index_ = false, is_packed_ = false;
  Tensor valid_;
  Tensor in_sequence_;  // [B, T]: the token belongs to a sequence; undefined if all tokens do
  // Defined if has_index_ is true:
  Tensor split_index_;                 // [B * count * C]: index of the token, in B * T
  Tensor join_index_;                  // [B * T]: index of the row, in B * count * C
  Tensor sequence_, is_first_;         // [B, count]: sequence of the chunk; whether the chunk is its first
  Tensor chunk_end_;                   // [N]: chunks up to and including the sequence
  Tensor has_tokens_;                  // [N]: whether the sequence has tokens
  Tensor position_, sequence_length_;  // [N]: position of the first token; number of tokens
};

}  // namespace girih
