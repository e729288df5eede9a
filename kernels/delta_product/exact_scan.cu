// A block has 32 columns of one head's state, in registers, and walks its sequence: eight lanes share two
// columns, each with every eighth pack of four of their D rows. What a step waits for is the sum over D, a
// chain of products and three shuffles. So all else lies beside it: rows arrive in shared memory two batches
// ahead, the next step's factors are in registers before this one's sum is, and a token's last read is made
// along with the next token's first step, of the same state.
//
// A slot of shared memory has what one turn takes: a query, a step's k and b, and the block's columns of w or
// do. A token has G - 1 + n turns, G queries a memory: the first G - 1 read, the next reads and steps, the
// others step. Forward the reads are the token's before, so there is a turn after the last token.
#include <type_traits>

#include "delta_product/between.h"
#include "delta_product/pieces.h"
#include "tile/grid.h"
#include "tile/launch.h"
#include "tile/pack.h"
#include "tile/shared.h"

namespace girih::kernels {
namespace delta_product {
namespace {

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

template <int Rank>
__device__ inline const float* row_of(const In<Rank>& x, int64_t batch, int64_t row, int64_t head) {
  return static_cast<const float*>(x.data) + batch * x.stride[0] + row * x.stride[1] + head * x.stride[2];
}

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

  template <int Rank>
  __device__ const float* from(const In<Rank>& x, int rows, int head, int col) const {
    return row_of(x, here_.sequence.batch, here_.sequence.start * rows, head) + col;
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

// x summed over the lanes that share columns, for all of them.
__device__ inline float over_lanes(float x) {
#pragma unroll
  for (int other = 1; other < kLanes; other *= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

// The thread's part of the state: two columns, kPacks packs of their rows.
template <int Tile>
struct Columns {
  static constexpr int kPacks = ScanSizes<Tile>::kPacks;
  using Row = Pack<4>[kPacks];

  Pack<4> at[kCols][kPacks];

  template <class F>
  __device__ void each(const F& f) {
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) f(at[c][i].at[e], c, i, e);
      }
    }
  }
  // The lane's terms of S^T x, in two sums at a time: one alone is a chain twice as long.
  __device__ void dot(float (&sums)[kCols], const Row& x) const {
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      float sum[2] = {0.f, 0.f};
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e & 1] = fmaf(at[c][i].at[e], x[i].at[e], sum[e & 1]);
      }
      sums[c] = sum[0] + sum[1];
    }
  }
  // S <- S + x y^T
  __device__ void add(const Row& x, const float (&y)[kCols]) {
    each([&](float& s, int c, int i, int e) { s = fmaf(x[i].at[e], y[c], s); });
  }
  __device__ void scale(float by) {
    each([&](float& s, int, int, int) { s *= by; });
  }
};

// A row's packs of the thread.
template <int Packs>
__device__ inline void take(Pack<4> (&row)[Packs], const float* from) {
#pragma unroll
  for (int i = 0; i < Packs; ++i) {
    row[i] = load<4>(from + 4 * (static_cast<int>(threadIdx.x) % kLanes) + 4 * kLanes * i);
  }
}

template <int Tile, bool Reverse>
__global__ void __launch_bounds__(kThreads) scan(const __grid_constant__ DeltaExactScan p) {
  using Sizes = ScanSizes<Tile>;
  using State = Columns<Tile>;
  using Row = typename State::Row;
  extern __shared__ __align__(16) float shared[];
  const DeltaExactShape& shape = p.shape;
  const DeltaPieces& pieces = shape.pieces;
  const int slabs = (shape.V + kBlockCols - 1) / kBlockCols, D = in_fours(shape.D);
  const int slab = static_cast<int>(blockIdx.x % slabs) * kBlockCols;
  const Walked here(shape, blockIdx.x / slabs);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int own = static_cast<int>(threadIdx.x) / kLanes * kCols,
            col = slab + own;  // of the thread's columns
  const auto row_at = [&](int i, int e) { return 4 * lane + 4 * kLanes * i + e; };

  // Without gates every decay is 1.
  if (p.decay == nullptr && threadIdx.x < kStages * Sizes::kBatch) {
    shared[threadIdx.x * Sizes::kSlot + Sizes::kDecay] = 1.f;
  }
  Fetcher<Tile, Reverse> fetcher(p, here, slab);
#pragma unroll 1
  for (int stage = 0; stage + 1 < kStages; ++stage) {
    fetcher.fill(shared + stage * Sizes::kBatch * Sizes::kSlot);
  }

  State S;
  {
    const float* from = static_cast<const float*>(p.initial.data) +
                        here.sequence.index * p.initial.stride[0] + here.head * p.initial.stride[1];
    S.each([&](float& s, int c, int i, int e) {
      const int d = row_at(i, e);
      s = 0.f;
      if (p.initial.data != nullptr && d < shape.D && col + c < shape.V) {
        s = from[d * p.initial.stride[2] + (col + c) * p.initial.stride[3]];
      }
    });
  }
  // A piece's state among those of all, the thread's part: f(pack, where it is).
  const auto each_kept = [&](auto* states, int64_t number, const auto& f) {
    auto* const at = states + ((number * shape.heads + here.head) * shape.V + col) * D;
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
#pragma unroll
      for (int i = 0; i < Sizes::kPacks; ++i) {
        if (col + c < shape.V && row_at(i, 0) < D) f(S.at[c][i], at + c * D + row_at(i, 0));
      }
    }
  };
  const auto publish = [&](int64_t number) {
    if (p.published == nullptr) return;
    each_kept(p.published, number, [](const Pack<4>& part, float* at) { store<4>(at, part); });
  };

  // Where the walk is: the piece, and how many of its tokens are to come.
  const int position = position_of(pieces, here.sequence);
  Place place(pieces, delta_product::first_piece(pieces, here.sequence),
              position + static_cast<int64_t>(Reverse && here.tokens > 0 ? here.tokens - 1 : 0));
  int left = Reverse ? place.at + 1 : place.length - place.at;
  bool begins = true;  // the walk

  // Rows to write, of the turn's token: forward of the one before for o.
  const int64_t first_token = here.sequence.start + (Reverse ? here.tokens - 1 : 0);
  float *o = nullptr, *u = nullptr;
  if (!Reverse) {
    o = static_cast<float*>(p.o.data) + here.sequence.batch * p.o.stride[0] +
        (first_token - 1) * p.o.stride[1] + here.head * here.group * p.o.stride[2] + col + (lane & 1);
  }
  if (p.u.data != nullptr) {
    u = static_cast<float*>(p.u.data) + here.sequence.batch * p.u.stride[0] +
        (first_token * shape.n + (Reverse ? shape.n - 1 : 0)) * p.u.stride[1] + here.head * p.u.stride[2] +
        col;
  }
  const int64_t next_u = Reverse ? -p.u.stride[1] : p.u.stride[1];
  const bool writes_o = lane < kCols && col + lane < shape.V;
  const bool writes_u = p.u.data != nullptr && lane == 0 && col < in_fours(shape.V);

  // forward   o = scale S^T q            reverse   S <- S + scale q do^T
  // forward   u = w - e^g S^T b,         S <- e^g S + k u^T
  // reverse   du = S^T k,                S <- S - b du^T
  // In place of q and of the factor of the sum come those of `next`.
  Row q, factor;
  const auto take_both = [&](const float* slot) {
    take(q, slot);
    take(factor, slot + (Reverse ? Sizes::kKey : Sizes::kWrite));
  };
  const auto visit = [&](auto reading, auto stepping, const float* slot, const float* next, unsigned member,
                         bool has_read, float decay) {
    constexpr bool reads = decltype(reading)::value, steps = decltype(stepping)::value;
    const float2 given = *reinterpret_cast<const float2*>(slot + Sizes::kValue + own);
    const float value[kCols] = {given.x, given.y};
    [[maybe_unused]] float read[kCols], sum[kCols];
    [[maybe_unused]] Row to;
    if constexpr (steps) take(to, slot + (Reverse ? Sizes::kWrite : Sizes::kKey));
    if constexpr (reads && Reverse) {
      const float scaled[kCols] = {shape.scale * value[0], shape.scale * value[1]};
      S.add(q, scaled);
    }
    if constexpr (steps) S.dot(sum, factor);
    if constexpr (reads && !Reverse) S.dot(read, q);
    take_both(next);
    if constexpr (steps) {
      if constexpr (!Reverse) S.scale(decay);
      float rows[kCols], change[kCols];
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        sum[c] = over_lanes(sum[c]);
        rows[c] = Reverse ? sum[c] : fmaf(-decay, sum[c], value[c]);
        change[c] = Reverse ? -rows[c] : rows[c];
      }
      S.add(to, change);
      if (writes_u) *reinterpret_cast<float2*>(u) = make_float2(rows[0], rows[1]);
      u += next_u;
    }
    if constexpr (reads && !Reverse) {
      // Lanes 0 and 1 get the sum of a column each.
      const bool odd = (lane & 1) != 0;
      float sum_of = (odd ? read[1] : read[0]) + __shfl_xor_sync(~0u, odd ? read[0] : read[1], 1);
      sum_of += __shfl_xor_sync(~0u, sum_of, 2);
      sum_of += __shfl_xor_sync(~0u, sum_of, 4);
      if (writes_o && has_read) o[member * p.o.stride[2]] = shape.scale * sum_of;
    }
  };
  constexpr std::true_type kYes;
  constexpr std::false_type kNo;

  Turn turn{0, 0};
  const unsigned first_step = here.group - 1;  // the turn of a token's last read and first step
  bool applies = false;                        // the function between chunks, after the last token's reads
  int stage = 0;
#pragma unroll 1
  for (int64_t all = here.template all_turns<Reverse>(); all > 0; all -= Sizes::kBatch) {
    wait_copies<kStages - 2>();
    __syncthreads();
    fetcher.fill(shared + (stage + kStages - 1) % kStages * Sizes::kBatch * Sizes::kSlot);
    const float* slot = shared + stage * Sizes::kBatch * Sizes::kSlot;
    stage = (stage + 1) % kStages;
    take_both(slot);
    const int count = all < Sizes::kBatch ? static_cast<int>(all) : Sizes::kBatch;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const float* const next = i + 1 < Sizes::kBatch ? slot + Sizes::kSlot : slot;
      const float decay = slot[Sizes::kDecay];
      if (turn.at == 0) {
        if (Reverse) {
          if (p.decay != nullptr && turn.token > 0) S.scale(decay);
          if (begins || left == 0) {
            if (!begins) {
              place.retreat(pieces);
              left = place.length;
            }
            if (pieces.between != Between::none && place.completes_chunk(pieces)) {
              each_kept(p.states, place.number + 1, [&](Pack<4>& part, const float* at) {
                const Pack<4> before = load<4>(at);
#pragma unroll
                for (int e = 0; e < 4; ++e) part.at[e] *= between_slope(pieces.between, before.at[e]);
              });
            }
            publish(place.number);
            begins = false;
          }
        } else if (begins || left == 0) {
          if (!begins) {
            place.advance(pieces);
            left = place.length;
            applies = pieces.between != Between::none && place.part == 0;
          }
          if (turn.token < here.tokens || applies) publish(place.number);
          begins = false;
        }
        --left;
      }
      if (turn.at < first_step) {
        visit(kYes, kNo, slot, next, turn.at, turn.token > 0, 1.f);
      } else if (turn.at > first_step) {
        visit(kNo, kYes, slot, next, 0, false, 1.f);
      } else if (!Reverse && (applies || turn.token == here.tokens)) {
        visit(kYes, kNo, slot, slot, turn.at, true, 1.f);
        if (applies) S.each([&](float& s, int, int, int) { s = between(pieces.between, s); });
        applies = false;
        if (turn.token < here.tokens) visit(kNo, kYes, slot, next, 0, false, decay);
      } else {
        visit(kYes, kYes, slot, next, turn.at, turn.token > 0, decay);
      }
      if (turn.at == first_step && !Reverse) o += p.o.stride[1];
      turn.advance(0, 1, here.turns);
      slot += Sizes::kSlot;
    }
  }
  wait_copies<0>();

  if (Reverse && p.decay != nullptr && here.tokens > 0) {
    S.scale(p.decay[(here.sequence.batch * pieces.tokens.tokens + here.sequence.start) * shape.heads +
                    here.head]);
  }
  float* const to = static_cast<float*>(p.final.data) + here.sequence.index * p.final.stride[0] +
                    here.head * p.final.stride[1];
  S.each([&](float& s, int c, int i, int e) {
    const int d = row_at(i, e);
    if (d < shape.D && col + c < shape.V) to[d * p.final.stride[2] + (col + c) * p.final.stride[3]] = s;
  });
  if (!Reverse && p.position != nullptr && here.head == 0 && slab == 0 && threadIdx.x == 0) {
    p.position[here.sequence.index] = (position + static_cast<int64_t>(here.tokens)) % pieces.chunk;
  }
}

template <int Tile, bool Reverse>
cudaError_t launch(const DeltaExactScan& p, cudaStream_t stream) {
  constexpr int kBytes = ScanSizes<Tile>::kBytes;
  if (const cudaError_t error = allow_shared<scan<Tile, Reverse>>(kBytes); error != cudaSuccess) return error;
  const int64_t blocks = p.shape.pieces.tokens.sequences * p.shape.heads * divide_up(p.shape.V, kBlockCols);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  scan<Tile, Reverse><<<static_cast<unsigned>(blocks), kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

template <bool Reverse>
cudaError_t launch(const DeltaExactScan& p, cudaStream_t stream) {
  if (p.shape.D <= 64) return launch<64, Reverse>(p, stream);
  if (p.shape.D <= 128) return launch<128, Reverse>(p, stream);
  if (p.shape.D <= kDeltaMaxWidth) return launch<256, Reverse>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace delta_product

cudaError_t delta_exact_scan(const DeltaExactScan& p, cudaStream_t stream) {
  return p.reverse ? delta_product::launch<true>(p, stream) : delta_product::launch<false>(p, stream);
}

}  // namespace girih::kernels
