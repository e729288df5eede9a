// What a block of the exact scan walks through, and how its slots are filled.
#pragma once

#include "delta_product/exact.h"
#include "tile/pack.h"
#include "tile/shared.h"

namespace girih::kernels::delta_product::by_token {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kLanes = 8;  // of two columns
constexpr int kCols = 2;
constexpr int kWarpCols = 32 / kLanes * kCols;
constexpr int kBlockCols = kWarps * kWarpCols;
constexpr int kStages = 3;  // batches of slots

// Tile: D rounded up.
template <int Tile>
struct ScanSizes {
  static constexpr int kPacks = Tile / (4 * kLanes);  // a lane's of a row
  static constexpr int kBatch = Tile <= 128 ? 16 : 8;
  static constexpr int kKey = Tile, kWrite = 2 * Tile, kValue = 3 * Tile, kDecay = kValue + kBlockCols;
  static constexpr int kSlot = kDecay + 4;  // floats
  static constexpr int kBytes = kStages * kBatch * kSlot * static_cast<int>(sizeof(float));
};

// A block's sequence and head.
struct Walked {
  Sequence sequence;
  int head, group;
  unsigned tokens, turns;  // of the sequence, of a token

  __device__ Walked(const DeltaExactShape& shape, int64_t job)
      : sequence(sequence_at(shape.pieces.tokens, job / shape.heads)),
        head(static_cast<int>(job % shape.heads)),
        group(shape.query_heads / shape.heads),
        tokens(static_cast<unsigned>(sequence.end - sequence.start)),
        turns(group - 1 + shape.n) {}

  // Forward the last token's reads come after it.
  template <bool Reverse>
  __device__ int64_t all_turns() const {
    return tokens == 0 ? 0 : static_cast<int64_t>(tokens) * turns + (Reverse ? 0 : group);
  }
};

// Which turn of which token, in the order of the walk.
struct Turn {
  unsigned token, at;

  // By `by` turns: `tokens` times a token's, and the rest.
  __device__ void advance(unsigned whole, unsigned rest, unsigned turns) {
    token += whole, at += rest;
    if (at >= turns) at -= turns, ++token;
  }
};

// A warp's share in filling batches of slots, every fourth. Its lanes have packs of four columns.
template <int Tile, bool Reverse>
class Fetcher {
  using Sizes = ScanSizes<Tile>;

  const DeltaExactScan& p_;
  const Walked& here_;
  const float *q_, *k_, *b_, *value_;  // the lane's pack, of the sequence's first row
  int pack_;
  bool in_slab_;
  Turn turn_;
  unsigned whole_, rest_;  // of the turns from slot to slot

  __device__ const float* from(const In<4>& x, int rows, int head, int col) const {
    return kernels::at<float>(x, here_.sequence.batch, here_.sequence.start * rows, head, col);
  }

 public:
  __device__ Fetcher(const DeltaExactScan& p, const Walked& here, int slab)
      : p_(p), here_(here), pack_(4 * (static_cast<int>(threadIdx.x) % 32)) {
    const int n = p.shape.n, first = here.head * here.group;
    q_ = from(p.q, 1, first, pack_);
    k_ = from(p.k, n, here.head, pack_);
    b_ = from(p.b, n, here.head, pack_);
    value_ = Reverse ? from(p.value, 1, first, slab + pack_) : from(p.value, n, here.head, slab + pack_);
    in_slab_ = pack_ < kBlockCols && slab + pack_ < in_fours(p.shape.V);
    const unsigned warp = threadIdx.x / 32;
    turn_ = {warp / here.turns, warp % here.turns};
    whole_ = kWarps / here.turns, rest_ = kWarps % here.turns;
  }

  __device__ void fill(float* batch) {
    const DeltaExactShape& shape = p_.shape;
    const int D = in_fours(shape.D);
#pragma unroll 1
    for (int slot = static_cast<int>(threadIdx.x) / 32; slot < Sizes::kBatch; slot += kWarps) {
      const unsigned first = here_.group - 1, step = turn_.at - first;  // of the steps
      const unsigned token = Reverse ? here_.tokens - 1 - turn_.token : turn_.token;
      const unsigned read = Reverse ? token : token - 1;
      const bool steps = turn_.at >= first && token < here_.tokens;
      const bool reads = turn_.at <= first && read < here_.tokens;
      const uint64_t row = static_cast<uint64_t>(token) * shape.n + (Reverse ? shape.n - 1 - step : step);
      const float* const q = q_ + read * p_.q.stride[1] + turn_.at * p_.q.stride[2];
      const float* const k = k_ + row * p_.k.stride[1];
      const float* const b = b_ + row * p_.b.stride[1];
      float* const to = batch + slot * Sizes::kSlot;
      const uint32_t at = shared_address(to + pack_);
#pragma unroll
      for (int d = 0; d < Tile; d += 128) {
        if (Tile < 128 && pack_ >= Tile) break;
        const bool exists = pack_ + d < D;
        copy_async(at + 4 * d, q + d, reads && exists);
        copy_async(at + 4 * (Sizes::kKey + d), k + d, steps && exists);
        copy_async(at + 4 * (Sizes::kWrite + d), b + d, steps && exists);
      }
      if (pack_ < kBlockCols) {
        const float* const value =
            value_ +
            (Reverse ? read * p_.value.stride[1] + turn_.at * p_.value.stride[2] : row * p_.value.stride[1]);
        copy_async(at + 4 * Sizes::kValue, value, (Reverse ? reads : steps) && in_slab_);
      }
      // Forward the decay before the token's steps; reverse that after the token, the next one's.
      if (p_.decay != nullptr && pack_ == 124) {
        const unsigned decays = Reverse ? token + 1 : token;
        const int64_t place =
            here_.sequence.batch * shape.pieces.tokens.tokens + here_.sequence.start + decays;
        copy_async_4(shared_address(to + Sizes::kDecay), p_.decay + place * shape.heads + here_.head,
                     decays < here_.tokens);
      }
      turn_.advance(whole_, rest_, here_.turns);
    }
    commit_copies();
  }
};

}  // namespace girih::kernels::delta_product::by_token
