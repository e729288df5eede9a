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
constexpr int kLanes = 8;                      // of two columns
constexpr int kCols = 2;
constexpr int kWarpCols = 32 / kLanes * kCols;
constexpr int kBlockCols = kWarps * kWarpCols;
constexpr int kStages = 3;                     // batches of slots

// Tile: D rounded up.
template <int Tile>
struct ScanSizes {
  static constexpr int kPacks = Tile / (4 * kLanes);  // a lane's of a row
  static constexpr int kBatch = Tile <= 128 ? 16 : 8;
  static constexpr int kKey = Tile, kWrite = 2 * Tile, kValue = 3 * Tile, kDecay = kValue + kBlockCols;
  static constexpr int kSlot = kDecay + 4;            // floats
  static constexpr int kBytes = kStages * kBatch * kSlot * static_cast<int>(sizeof(float));
};

template <int Rank>
__device__ inline const float* row_of(const In<Rank>& x, int64_t batch, int64_t row, int64_t head) {
  return static_cast<const float*>(x.data) + batch * x.stride[0] + row * x.stride[1] + head * x.stride[2];
}

// Which turn of which token, in the order of the walk.
struct Turn {
  int64_t token;  // from where the walk begins
  int at;

  __device__ void advance(int by, int turns) {
    at += by;
    while (at >= turns) at -= turns, ++token;
  }
};

// What the walk needs of its place.
struct Walked {
  Sequence sequence;
  int head, group, turns;
  int64_t tokens;  // of the sequence
};

// A warp's share of a batch of slots, from its own next turn on.
template <int Tile, bool Reverse>
__device__ inline void fetch(const DeltaExactScan& p, const Walked& here, float* batch, Turn& turn, int col) {
  using Sizes = ScanSizes<Tile>;
  const int D = (p.shape.D + 3) & ~3, V = (p.shape.V + 3) & ~3, n = p.shape.n;
  const int lane = static_cast<int>(threadIdx.x) % 32, pack = 4 * lane;
  for (int slot = static_cast<int>(threadIdx.x) / 32; slot < Sizes::kBatch; slot += kWarps) {
    const int step = turn.at - (here.group - 1);
    const int64_t token = Reverse ? here.tokens - 1 - turn.token : turn.token;
    const int64_t read = Reverse ? token : token - 1;
    const bool steps = step >= 0 && turn.token < here.tokens;
    const bool reads = step <= 0 && read >= 0 && read < here.tokens;
    const int64_t batch_row = here.sequence.batch;
    const int query_head = here.head * here.group + turn.at;
    const int64_t row = (here.sequence.start + token) * n + (Reverse ? n - 1 - step : step);
    const float* const q = row_of(p.q, batch_row, here.sequence.start + read, query_head);
    const float* const k = row_of(p.k, batch_row, row, here.head);
    const float* const b = row_of(p.b, batch_row, row, here.head);
    const float* const value = Reverse ? row_of(p.value, batch_row, here.sequence.start + read, query_head)
                                       : row_of(p.value, batch_row, row, here.head);
    float* const to = batch + slot * Sizes::kSlot;
#pragma unroll
    for (int d = pack; d < Tile; d += 128) {
      copy_async(shared_address(to + d), q + d, reads && d < D);
      copy_async(shared_address(to + Sizes::kKey + d), k + d, steps && d < D);
      copy_async(shared_address(to + Sizes::kWrite + d), b + d, steps && d < D);
    }
    if (pack < kBlockCols) {
      copy_async(shared_address(to + Sizes::kValue + pack), value + col + pack,
                 (Reverse ? reads : steps) && col + pack < V);
    }
    // Forward the decay before the token's first step; reverse that after the token, which the next one has.
    const int64_t decays = Reverse ? token + 1 : token;
    if (lane == 31 && p.decay != nullptr) {
      copy_async_4(shared_address(to + Sizes::kDecay),
                   p.decay + (batch_row * p.shape.pieces.tokens.tokens + here.sequence.start + decays) *
                                 p.shape.heads + here.head,
                   decays >= 0 && decays < here.tokens);
    }
    turn.advance(kWarps, here.turns);
  }
}

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
  const int slabs = (shape.V + kBlockCols - 1) / kBlockCols, padded = (shape.D + 3) & ~3;
  const int slab = static_cast<int>(blockIdx.x % slabs) * kBlockCols;
  Walked here;
  here.head = static_cast<int>(blockIdx.x / slabs % shape.heads);
  here.sequence = sequence_at(pieces.tokens, blockIdx.x / slabs / shape.heads);
  here.group = shape.query_heads / shape.heads;
  here.turns = here.group - 1 + shape.n;
  here.tokens = here.sequence.end - here.sequence.start;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int own = static_cast<int>(threadIdx.x) / kLanes * kCols, col = slab + own;  // of the thread's columns
  const auto row_at = [&](int i, int e) { return 4 * lane + 4 * kLanes * i + e; };

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
  // A piece's state in `states`, the thread's part: f(pack, where it is).
  const auto each_kept = [&](auto* states, int64_t number, const auto& f) {
    auto* const at = states + ((number * shape.heads + here.head) * shape.V + col) * padded;
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
#pragma unroll
      for (int i = 0; i < Sizes::kPacks; ++i) {
        if (col + c < shape.V && row_at(i, 0) < padded) f(S.at[c][i], at + c * padded + row_at(i, 0));
      }
    }
  };
  const auto keep = [](const Pack<4>& part, float* at) { store<4>(at, part); };

  // Forward the last token's reads come after it.
  const auto goes_on = [&](const Turn& turn) {
    return turn.token < here.tokens ||
           (!Reverse && turn.token == here.tokens && here.tokens > 0 && turn.at < here.group);
  };
  const int64_t position = position_of(pieces, here.sequence);
  Place place(pieces, delta_product::first_piece(pieces, here.sequence),
              position + (Reverse && here.tokens > 0 ? here.tokens - 1 : 0));
  bool begins = true;  // the token, the walk or a piece

  Turn ahead{0, 0}, turn{0, 0};
  ahead.advance(static_cast<int>(threadIdx.x) / 32, here.turns);
#pragma unroll
  for (int stage = 0; stage + 1 < kStages; ++stage) {
    fetch<Tile, Reverse>(p, here, shared + stage * Sizes::kBatch * Sizes::kSlot, ahead, slab);
    commit_copies();
  }

  // forward   o = scale S^T q            reverse   S <- S + scale q do^T
  // forward   u = w - e^g S^T b,         S <- e^g S + k u^T
  // reverse   du = S^T k,                S <- S - b du^T
  const auto visit = [&](auto reads, auto steps, const Row& q, const Row& factor, const float* slot,
                         float decay) {
    const float2 given = *reinterpret_cast<const float2*>(slot + Sizes::kValue + own);
    const float value[kCols] = {given.x, given.y};
    const int64_t token = Reverse ? here.tokens - 1 - turn.token : turn.token;
    float read[kCols] = {0.f, 0.f}, sum[kCols] = {0.f, 0.f};
    if constexpr (reads && Reverse) {
      const float scaled[kCols] = {shape.scale * value[0], shape.scale * value[1]};
      S.add(q, scaled);
    }
    if constexpr (steps) S.dot(sum, factor);
    if constexpr (reads && !Reverse) S.dot(read, q);
    if constexpr (steps) {
      Row to;
      take(to, slot + (Reverse ? Sizes::kWrite : Sizes::kKey));
      if constexpr (!Reverse) S.scale(decay);
      float u[kCols], change[kCols];
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        sum[c] = over_lanes(sum[c]);
        u[c] = Reverse ? sum[c] : fmaf(-decay, sum[c], value[c]);
        change[c] = Reverse ? -u[c] : u[c];
      }
      S.add(to, change);
      if (p.u.data != nullptr && lane == 0 && col < ((shape.V + 3) & ~3)) {
        const int step = turn.at - (here.group - 1);
        const int64_t row = (here.sequence.start + token) * shape.n + (Reverse ? shape.n - 1 - step : step);
        *reinterpret_cast<float2*>(static_cast<float*>(p.u.data) + here.sequence.batch * p.u.stride[0] +
                                   row * p.u.stride[1] + here.head * p.u.stride[2] + col) =
            make_float2(u[0], u[1]);
      }
    }
    if constexpr (reads && !Reverse) {
      // Lanes 0 and 1 get the sum of a column each.
      const bool odd = (lane & 1) != 0;
      float o = (odd ? read[1] : read[0]) + __shfl_xor_sync(~0u, odd ? read[0] : read[1], 1);
      o += __shfl_xor_sync(~0u, o, 2);
      o += __shfl_xor_sync(~0u, o, 4);
      if (lane < kCols && col + lane < shape.V && token > 0) {
        store_any(p.o.data, p.o.dtype,
                  here.sequence.batch * p.o.stride[0] + (here.sequence.start + token - 1) * p.o.stride[1] +
                      (here.head * here.group + turn.at) * p.o.stride[2] + (col + lane) * p.o.stride[3],
                  shape.scale * o);
      }
    }
  };
  constexpr std::true_type kYes;
  constexpr std::false_type kNo;

  int stage = 0;
  while (goes_on(turn)) {
    wait_copies<kStages - 2>();
    __syncthreads();
    fetch<Tile, Reverse>(p, here, shared + (stage + kStages - 1) % kStages * Sizes::kBatch * Sizes::kSlot,
                         ahead, slab);
    commit_copies();
    const float* slot = shared + stage * Sizes::kBatch * Sizes::kSlot;
    stage = (stage + 1) % kStages;
    Row q, factor;
    take(q, slot);
    take(factor, slot + (Reverse ? Sizes::kKey : Sizes::kWrite));
#pragma unroll 1
    for (int i = 0; i < Sizes::kBatch && goes_on(turn); ++i) {
      Row next_q, next_factor;
      const float* const next = i + 1 < Sizes::kBatch ? slot + Sizes::kSlot : slot;
      take(next_q, next);
      take(next_factor, next + (Reverse ? Sizes::kKey : Sizes::kWrite));
      bool applies = false;  // the function between chunks, after the reads of the token before
      if (turn.at == 0) {
        if (Reverse) {
          if (p.decay != nullptr && turn.token > 0) S.scale(slot[Sizes::kDecay]);
          if (pieces.between != Between::none && place.completes_chunk(pieces)) {
            each_kept(p.states, place.number + 1, [&](Pack<4>& part, const float* at) {
              const Pack<4> before = load<4>(at);
#pragma unroll
              for (int e = 0; e < 4; ++e) part.at[e] *= between_slope(pieces.between, before.at[e]);
            });
          }
          if (begins || place.ends()) each_kept(p.published, place.number, keep);
          begins = false;
          place.retreat(pieces);
        } else if (p.published != nullptr && (begins || place.begins()) &&
                   (turn.token < here.tokens || pieces.between != Between::none)) {
          each_kept(p.published, place.number, keep);
        }
      }
      if (!Reverse && turn.at == here.group - 1) {
        applies = pieces.between != Between::none && !begins && place.begins() && place.part == 0;
        begins = false;
        place.advance(pieces);
      }
      const float decay = p.decay != nullptr && turn.at == here.group - 1 && turn.token < here.tokens
                              ? slot[Sizes::kDecay]
                              : 1.f;
      if (turn.at < here.group - 1) {
        visit(kYes, kNo, q, factor, slot, 1.f);
      } else if (turn.at > here.group - 1) {
        visit(kNo, kYes, q, factor, slot, 1.f);
      } else if (applies || (!Reverse && turn.token == here.tokens)) {
        visit(kYes, kNo, q, factor, slot, 1.f);
        if (applies) S.each([&](float& s, int, int, int) { s = between(pieces.between, s); });
        if (turn.token < here.tokens) visit(kNo, kYes, q, factor, slot, decay);
      } else {
        visit(kYes, kYes, q, factor, slot, decay);
      }
      turn.advance(1, here.turns);
#pragma unroll
      for (int j = 0; j < Sizes::kPacks; ++j) q[j] = next_q[j], factor[j] = next_factor[j];
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
    p.position[here.sequence.index] = (position + here.tokens) % pieces.chunk;
  }
}

template <int Tile, bool Reverse>
cudaError_t launch(const DeltaExactScan& p, cudaStream_t stream) {
  constexpr int kBytes = ScanSizes<Tile>::kBytes;
  if (const cudaError_t error = allow_shared<scan<Tile, Reverse>>(kBytes); error != cudaSuccess) return error;
  const int64_t blocks =
      p.shape.pieces.tokens.sequences * p.shape.heads * divide_up(p.shape.V, kBlockCols);
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
