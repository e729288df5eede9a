// Tokens cut into chunks, on the device and without a wait: one layout for batches, packed sequences and
// sequences that go on in the middle of a chunk.
#pragma once

#include <functional>

#include "../arguments/check.h"

namespace girih {

class Chunks {
 public:
  using States = std::vector<Tensor>;

  // B rows of T tokens in chunks of C. cu_seqlens [N + 1]: the one row holds N sequences; [B, 2]: where each
  // row's one sequence begins and ends. Other tokens belong to none. position [N]: where in its chunk each
  // sequence's first token falls (0 when absent); with it, chunk boundaries keep their place. Where the
  // chunk length cannot change the result, rows may be cut anywhere: then bounds move no token.
  enum class Cut { anywhere, at_start };
  Chunks(const Tensor& like, int64_t B, int64_t T, int64_t C, const OptionalTensor& cu_seqlens,
         const OptionalTensor& position = std::nullopt, Cut cut = Cut::anywhere);

  int64_t count() const { return count_; }    // chunks in a row (a bound when packed: the rest is empty)
  int64_t length() const { return length_; }  // C
  int64_t sequences() const { return N_; }

  // [B, T * rows, H, ...] -> [B, count, H, C * rows, ...] in `dtype`; zero where there is no token.
  Tensor split(const Tensor& x, at::ScalarType dtype, int64_t rows = 1) const;
  // [B, count, H, C, ...] -> [B, T, H, ...], contiguous, in `dtype`.
  Tensor join(const Tensor& x, at::ScalarType dtype) const;

  // [B, count, C]: a token stands there.
  const Tensor& valid() const { return valid_; }
  // [B, count]: the chunk's last token has been read.
  Tensor complete() const;
  // [N]: the position after the last token, 0..C-1.
  Tensor next_position() const;

  // Runs step(c, states) -> states over the chunks in order. States are [B, ...] inside and [N, ...] outside;
  // each sequence begins with its own initial state. `before[i]` holds state i before every chunk,
  // `finals[i]` [N, ...] after each sequence's last token.
  struct Scan {
    std::vector<States> before;
    States finals;
  };
  Scan scan(const States& initial, const std::function<States(int64_t, const States&)>& step) const;
  // State i of a scan before every chunk, [B, count, ...].
  Tensor starts(const Scan& scan, size_t i) const;

 private:
  int64_t B_, T_, N_, length_, count_;
  bool table_ = false, packed_ = false;
  Tensor valid_;
  Tensor covered_;  // [B, T]  the token belongs to a sequence; undefined where all do
  // Only with a table:
  Tensor token_;             // [B * count * C]   which of the B * T tokens stands there
  Tensor place_;             // [B * T]           where in [B * count * C] a token went
  Tensor sequence_, first_;  // [B, count]        whose chunk it is; it is that sequence's first
  Tensor end_, held_;        // [N]               chunks up to and including the sequence; it has at least one
  Tensor position_, size_;   // [N]               first position; tokens
};

}  // namespace girih
