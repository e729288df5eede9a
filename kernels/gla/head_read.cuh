// The read's kernel. A chunk of C = 64 tokens, L its gates' running sums, S the state before it:
//
//     o_i = scale e^{L_i} q_i S + scale sum_{j<=i} (q_i . k_j) e^{L_i - L_j} v_j
//     S  <- e^{L_C} S + sum_j e^{L_C - L_j} k_j v_j^T
//
// and in reverse, the last chunk first, S the gradient that comes from later chunks:
//
//     o_i = e^{L_C - L_i} q_i S + scale sum_{j>=i} (q_i . k_j) e^{L_j - L_i} v_j
//     S  <- e^{L_C} S + scale sum_j e^{L_j} k_j v_j^T
//
// A block walks a sequence, or a segment of one, with 64 columns of the values of one query head. Its warps
// have four roles:
//   loaders     copy chunks of q, k, v ahead into rings of stages, and sum their gates
//   keepers     warpgroups that have S in registers in fp32, transposed, 16 values a warp: round it into a
//               slot of another ring, then S <- e^{L_C} S + (w v)^T k
//   readers     warpgroups that take chunks in turn: rows of o
//   publishers  bring S to global memory, once in a pair of chunks
// So the state never leaves the block for its readers, and only S itself goes from chunk to chunk. The
// products are warpgroups': warp by warp, reads of shared memory would be most of a chunk's time. What
// keepers and readers have in registers is read from there once; a keeper weighs the next chunk's values
// while its product is under way. (Registers are given out for sm_90a; on sm_80 some spill.)
#pragma once

#include <algorithm>

#include "gla/head_gates.cuh"
#include "gla/head_launch.h"
#include "gsa/gradients.cuh"
#include "tile/grid.h"
#include "tile/row_store.h"

namespace girih::kernels {

// Warps by role; a thread of each has so many registers: 480 for the five warpgroups together, which start
// with 96 each. A keeper has 16 values and up to 128 keys of the state.
constexpr int kLoaders = 4;
constexpr int kPublishers = 4;
template <int D>
constexpr int kKeepers = D <= 128 ? 4 : 8;
template <int D>
constexpr int kReaders = 12 - kKeepers<D>;
constexpr int kFirstKeeper = kLoaders + kPublishers;
constexpr int kHeadReadThreads = 32 * 20;
constexpr int kLoaderRegisters = 64, kPublisherRegisters = 32, kProductRegisters = 128;
static_assert(kLoaderRegisters + kPublisherRegisters + 3 * kProductRegisters <= 5 * 96);
constexpr int kGatesAhead = 4;  // turns that gates are brought to the L2 cache before
constexpr int kMaxStages = 6, kMaxValues = 6;
constexpr int kMaxSlots = 4;

template <typename T, int D>
using HeadState = BlockTile<T, D>;  // S^T, [64 values, D]

template <typename T, int D>
struct HeadStage {
  BlockTile<T, D> q, k;

  static constexpr int kBytes = 2 * BlockTile<T, D>::kBytes;

  __device__ explicit HeadStage(unsigned char* shared) { Layout(shared)(q)(k); }
};

template <typename T>
using HeadValues = BlockTile<T, kSlab>;

// Whether readers have q in registers: its rows are read once for two products, and its stage is free once
// the scores are there, a turn and a half before the chunk's values are. Its place is not theirs then for
// rows on their way out: they have their own.
template <int D>
constexpr bool kHoldsQueries = D <= 128;
template <typename T, int D>
constexpr int kOutBytes = kHoldsQueries<D> ? kReaders<D> / 4 * HeadValues<T>::kBytes : 0;

// What lies before the rest: stages, values, slots, rows on their way out.
struct HeadRing {
  float sums[kMaxValues][kChunk];     // L of a chunk
  float weights[kMaxValues][kChunk];  // w
  uint64_t full[kMaxValues];          // q, k, v, L and w are there
  uint64_t values_free[kMaxValues];   // v, L and w have been used
  uint64_t stage_free[kMaxStages];    // q and k have been used
  uint64_t carried[kMaxSlots];        // S is there
  uint64_t used[kMaxSlots];
};
constexpr int kHeadRingBytes = (sizeof(HeadRing) + 1023) / 1024 * 1024;

// Without one of each there is no read.
template <typename T, int D>
constexpr int kLeastHeadReadBytes = kHeadRingBytes + HeadStage<T, D>::kBytes + HeadValues<T>::kBytes +
                                    HeadState<T, D>::kBytes + kOutBytes<T, D>;

template <typename T>
__device__ inline const T* first_row(const In<4>& in, const Sequence& sequence, int64_t start, int head,
                                     int col = 0) {
  return static_cast<const T*>(in.data) + sequence.batch * in.stride[0] + start * in.stride[1] +
         head * in.stride[2] + col;
}

template <typename T, int D, bool Reverse>
__global__ void __launch_bounds__(kHeadReadThreads, 1)
    head_read_kernel(const __grid_constant__ HeadPass pass) {
  using Stage = HeadStage<T, D>;
  using Values = HeadValues<T>;
  using State = HeadState<T, D>;
  extern __shared__ __align__(1024) unsigned char shared[];
  HeadRing& ring = *reinterpret_cast<HeadRing*>(shared);
  const HeadRead& p = pass.read;
  const HeadShape& shape = p.shape;
  const int warp = warp_index();  // products of warpgroups bear no branch of single threads
  const bool alone = pass.segment_decay != nullptr;

  // Which columns of which head.
  const int walkers = alone ? state_heads(p) : shape.query_heads, group = shape.query_heads / shape.heads;
  const unsigned slabs = (shape.V + kSlab - 1) / kSlab;
  unsigned job = blockIdx.x;
  const int col = static_cast<int>(job % slabs) * kSlab, cols = min(kSlab, shape.V - col);
  job /= slabs;
  const int query_head = static_cast<int>(job % walkers) * (shape.query_heads / walkers);
  const int64_t number = job / walkers;
  const int head = query_head / group, state_head = Reverse ? query_head : head;

  // Which tokens.
  Sequence sequence;
  int64_t start, end;
  if (pass.segment == 0) {
    sequence = sequence_at(shape.tokens, number);
    start = sequence.start;
    end = sequence.end;
  } else {
    const Piece piece = piece_at(shape.tokens, number, pass.segment);
    if (piece.length == 0 && piece.index != 0) return;
    sequence = piece.sequence;
    start = piece.start;
    end = start + piece.length;
  }
  const bool nothing_follows = Reverse ? start == sequence.start : end == sequence.end;
  if (alone && nothing_follows) return;
  const int length = static_cast<int>(end - start), chunks = (length + kChunk - 1) / kChunk;
  const auto token_of = [&](int turn) { return (Reverse ? chunks - 1 - turn : turn) * kChunk; };
  const auto stage_at = [&](int slot) { return Stage(shared + kHeadRingBytes + slot * Stage::kBytes); };
  unsigned char* const after_stages = shared + kHeadRingBytes + pass.stages * Stage::kBytes;
  const auto values_at = [&](int place) {
    return Values{reinterpret_cast<T*>(after_stages + place * Values::kBytes)};
  };
  unsigned char* const after_values = after_stages + pass.values * Values::kBytes;
  const auto state_at = [&](int slot) {
    return State{reinterpret_cast<T*>(after_values + slot * State::kBytes)};
  };

  // Query heads that share a state have the same one; the first publishes it.
  const bool publishes = !alone && p.states != nullptr && (Reverse || query_head % group == 0);
  const int users = 32 * (kKeepers<D> + (alone ? 0 : 4));  // of a chunk's q, k, v
  if (threadIdx.x < static_cast<unsigned>(pass.values)) {
    // Every loader for its copies, and one warp for the sums.
    init_barrier(&ring.full[threadIdx.x], 32 * (kLoaders + 1));
    init_barrier(&ring.values_free[threadIdx.x], users);
  }
  if (threadIdx.x < static_cast<unsigned>(pass.stages)) init_barrier(&ring.stage_free[threadIdx.x], users);
  if (threadIdx.x < static_cast<unsigned>(pass.slots)) {
    init_barrier(&ring.carried[threadIdx.x], 32 * kKeepers<D>);
    init_barrier(&ring.used[threadIdx.x], 32 * (4 + (publishes ? kPublishers : 0)));
  }
  __syncthreads();

  if (warp < kLoaders) {
    const int key_head = head / shape.key_share, head_of_query = query_head / shape.query_share;
    const TileCopier<32 * kLoaders, decltype(Stage::q)> q(
        first_row<T>(p.q, sequence, start, Reverse ? key_head : head_of_query), p.q.stride[1], shape.D,
        threadIdx.x);
    const TileCopier<32 * kLoaders, decltype(Stage::k)> k(
        first_row<T>(p.k, sequence, start, Reverse ? head_of_query : key_head), p.k.stride[1], shape.D,
        threadIdx.x);
    const TileCopier<32 * kLoaders, Values> v(
        first_row<T>(p.v, sequence, start, Reverse ? query_head : head, col), p.v.stride[1], cols,
        threadIdx.x);
    leave_registers<kLoaderRegisters>();
    const auto gates_of = [&](int turn) {
      const int token = token_of(turn);
      return GatePair::load(shape.g, sequence, start + token, head, turn < chunks ? length - token : 0);
    };
    const auto prefetch_gates = [&](int turn) {
      const int token = token_of(turn);
      if (turn < chunks) GatePair::prefetch(shape.g, sequence, start + token, head, length - token);
    };
    GatePair gates = gates_of(0);
    if (warp == 0) {
      for (int turn = 1; turn < kGatesAhead; ++turn) prefetch_gates(turn);
    }
    Turn at, of_values;
#pragma unroll 1
    for (int turn = 0; turn < chunks; ++turn) {
      wait(&ring.stage_free[at.place], at.parity ^ 1);
      wait(&ring.values_free[of_values.place], of_values.parity ^ 1);
      const Stage stage = stage_at(at.place);
      const int token = token_of(turn), rows = min(kChunk, length - token);
      k.start(stage.k, token, rows);
      v.start(values_at(of_values.place), token, rows);
      if (!alone) q.start(stage.q, token, rows);
      arrive_after_copies(&ring.full[of_values.place]);
      if (warp == 0) {
        float* sums = ring.sums[of_values.place];
        gates.put_sums(sums);
        __syncwarp();
        // w = e^{L_C - L}, in reverse scale e^L
        const float2 sum = *reinterpret_cast<const float2*>(sums + 2 * lane());
        const float whole = sums[kChunk - 1];
        *reinterpret_cast<float2*>(ring.weights[of_values.place] + 2 * lane()) =
            Reverse ? float2{shape.scale * exp2_fast(sum.x), shape.scale * exp2_fast(sum.y)}
                    : float2{exp2_fast(whole - sum.x), exp2_fast(whole - sum.y)};
        arrive(&ring.full[of_values.place]);
        gates = gates_of(turn + 1);
        prefetch_gates(turn + kGatesAhead);
      }
      at.next(pass.stages), of_values.next(pass.values);
    }
    return;
  }

  if (warp < kFirstKeeper) {
    leave_registers<kPublisherRegisters>();
    if (!publishes) return;
    constexpr int kPublished = 32 * kPublishers * 8 / D;  // rows at once
    const int thread = static_cast<int>(threadIdx.x) % 128, row = thread / (D / 8),
              key = thread % (D / 8) * 8;
    // Chunks are counted from the sequence's start: a segment may begin inside of a pair.
    const int64_t first_chunk = (start - sequence.start) / kChunk,
                  last_chunk = (sequence.end - sequence.start - 1) / kChunk,
                  first_pair = first_piece(shape.tokens, sequence, kHeadPair);
    Turn from;
#pragma unroll 1
    for (int turn = 0; turn < chunks; ++turn, from.next(pass.slots)) {
      const int64_t chunk = first_chunk + token_of(turn) / kChunk;
      // Before a pair's first chunk, in reverse before its last. The others are waited for as well: two turns
      // of a slot must not become one.
      const bool published = Reverse ? chunk % 2 == 1 || chunk == last_chunk : chunk % 2 == 0;
      wait(&ring.carried[from.place], from.parity);
      if (published) {
        T* to = static_cast<T*>(p.states) +
                ((first_pair + chunk / 2) * state_heads(p) + state_head) * shape.V * shape.D +
                (col + row) * static_cast<int64_t>(shape.D) + key;
        const State carried = state_at(from.place);
#pragma unroll 2
        for (int i = 0; i < kSlab; i += kPublished) {
          const uint4 x = *reinterpret_cast<const uint4*>(&carried.at(row + i, key));
          const uint32_t pack[4] = {x.x, x.y, x.z, x.w};
          if (row + i < cols && key < shape.D) store_pack(to, pack);
          to += kPublished * shape.D;
        }
      }
      arrive(&ring.used[from.place]);
    }
    return;
  }

  take_registers<kProductRegisters>();
  if (warp < kFirstKeeper + kKeepers<D>) {
    constexpr int kKeys = D <= 128 ? D : 128, kN = kKeys / 8;
    const int first_value = (warp - kFirstKeeper) % 4 * kRows, first_key = (warp - kFirstKeeper) / 4 * kKeys;
    // f(element, its place) of those that exist in an array of states. Places move on from one to the next:
    // with each worked out by itself, a block's end waited for 1400 instructions that are run once.
    const auto for_each_element = [&](Sums<kN>& state, auto* first, int64_t by_value, int64_t by_key,
                                      const auto& f) {
      const int value = first_value + lane_row(), key = first_key + lane_col();
      const bool has[2] = {col + value < shape.values, col + value + 8 < shape.values};
      const int keys = shape.keys - key;
      first += (col + value) * by_value + key * by_key;
      auto* next = first + by_key;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        if (has[0] && 8 * n < keys) f(state.at[n][0], first[0]);
        if (has[0] && 8 * n + 1 < keys) f(state.at[n][1], next[0]);
        if (has[1] && 8 * n < keys) f(state.at[n][2], first[8 * by_value]);
        if (has[1] && 8 * n + 1 < keys) f(state.at[n][3], next[8 * by_value]);
        first += 8 * by_key, next += 8 * by_key;
      }
    };
    const int64_t of_initial = pass.segment == 0 ? sequence.index : number;
    Sums<kN> state;
    fill(state, 0.f);
    if (p.initial.data != nullptr) {
      const float* from = static_cast<const float*>(p.initial.data) + of_initial * p.initial.stride[0] +
                          state_head * p.initial.stride[1];
      for_each_element(state, from, p.initial.stride[2], p.initial.stride[3],
                       [](float& element, const float& at) { element = at; });
    }
    float total = 0.f;
    // (w v)^T of a chunk, the warp's rows: made while the product before is under way.
    Operand<4> weighted;
    const auto weigh = [&](Operand<4>& to, const Turn& of) {
      wait(&ring.full[of.place], of.parity);
      const Values v = values_at(of.place);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        load_weighed_transposed<T>(to.at[k], v, first_value, 16 * k, ring.weights[of.place] + 16 * k);
      }
    };
    Turn at, of_values, to;
    if (chunks > 0) weigh(weighted, of_values);
#pragma unroll 1
    for (int turn = 0; turn < chunks; ++turn) {
      if (!alone) {
        wait(&ring.used[to.place], to.parity ^ 1);
        const State carried = state_at(to.place);
        Operand<kN / 2> rounded;
        round_to<T>(rounded, state);
        // (By store_blocks, with one address for all, ptxas spills twice as much.)
#pragma unroll
        for (int k = 0; k < kN / 2; ++k) {
          store_block(carried, first_value, first_key + 16 * k, rounded.at[k]);
        }
        fence_tiles();
        arrive(&ring.carried[to.place]);
        to.next(pass.slots);
      }

      // S^T <- e^{L_C} S^T + (w v)^T k
      const float whole = ring.sums[of_values.place][kChunk - 1], decay = exp2_fast(whole);
      arrive(&ring.values_free[of_values.place]);
      total += whole;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) state.at[n][i] *= decay;
      }
      fence_tiles();
      fence_products(state);
      start_product<T>(state, weighted, stage_at(at.place).k, first_key);
      commit_products();
      of_values.next(pass.values);
      Operand<4> next;
      const bool follows = turn + 1 < chunks, ahead = pass.stages > 1;
      if (follows && ahead) weigh(next, of_values);
      wait_products<0>(state);
      keep(weighted);
      arrive(&ring.stage_free[at.place]);
      at.next(pass.stages);
      if (follows && !ahead) weigh(next, of_values);
      if (follows) weighted = next;
    }

    if (alone && warp == kFirstKeeper) {
      for (int key = lane(); key < shape.keys; key += 32) {
        pass.segment_decay[(number * walkers + state_head) * shape.keys + key] = total / kLog2E;
      }
    }
    // Query heads that share a state give the same one; the first writes it.
    const bool mine = Reverse || query_head % group == 0;
    if (p.final.data != nullptr && mine && (alone || nothing_follows)) {
      float* to = static_cast<float*>(p.final.data) + (alone ? number : sequence.index) * p.final.stride[0] +
                  state_head * p.final.stride[1];
      for_each_element(state, to, p.final.stride[2], p.final.stride[3],
                       [](float element, float& at) { at = element; });
    }
    return;
  }

  const int reader = (warp - kFirstKeeper - kKeepers<D>) / 4, row_block = warp % 4;
  if (alone || reader >= pass.readers) return;
  // A reader that skips turns never sees a barrier two phases on: the S that it saw last came after all
  // before.
  constexpr bool kHolds = kHoldsQueries<D>;
  Turn at, of_values, from;
  at.skip(reader, pass.stages), of_values.skip(reader, pass.values), from.skip(reader, pass.slots);
#pragma unroll 1
  for (int turn = reader; turn < chunks; turn += pass.readers) {
    const Stage stage = stage_at(at.place);
    const State carried = state_at(from.place);
    const float* sums = ring.sums[of_values.place];
    const int token = token_of(turn);

    // near_ij = scale (q_i . k_j) e^{-|L_i - L_j|}, o = r (q S) + near v, r = scale e^L, in reverse
    // e^{L_C - L}
    Sums<8> scores, o;
    fill(scores, 0.f);
    fill(o, 0.f);
    wait(&ring.full[of_values.place], of_values.parity);
    Operand<kHolds ? D / 16 : 1> q;
    if constexpr (kHolds) {
#pragma unroll
      for (int k = 0; k < D / 16; ++k) load_block(q.at[k], stage.q, kRows * row_block, 16 * k);
    }
    fence_tiles();
    fence_products(scores);
    if constexpr (kHolds) {
      start_product_transposed<T>(scores, q, stage.k);
    } else {
      start_product_transposed(scores, stage.q, stage.k);
    }
    commit_products();
    wait(&ring.carried[from.place], from.parity);
    fence_products(o);
    if constexpr (kHolds) {
      start_product_transposed<T>(o, q, carried);
    } else {
      start_product_transposed(o, stage.q, carried);
    }
    commit_products();
    wait_products<1>(scores);
    if (kHolds) arrive(&ring.stage_free[at.place]);
    decay_scores(scores, sums, shape.scale, row_block, Reverse);
    Operand<4> near;
    round_to<T>(near, scores);
    wait_products<0>(o);
    if constexpr (kHolds) keep(q);
    arrive(&ring.used[from.place]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = sums[kRows * row_block + lane_row() + 8 * i];
      const float r = Reverse ? exp2_fast(sums[kChunk - 1] - sum) : shape.scale * exp2_fast(sum);
#pragma unroll
      for (int n = 0; n < 8; ++n) o.at[n][2 * i] *= r, o.at[n][2 * i + 1] *= r;
    }
    fence_products(o);
    start_product<T>(o, near, values_at(of_values.place));
    commit_products();
    wait_products<0>(o);
    keep(near);

    arrive(&ring.values_free[of_values.place]);

    // Without rows of their own they take those of q, which the products of all four warps have left.
    if (!kHolds) barrier_wait(1, 128);
    const SharedTile<T, kChunk, kSlab> out =
        kHolds ? Values{reinterpret_cast<T*>(after_values + pass.slots * State::kBytes +
                                             reader * Values::kBytes)}
                     .block(0)
               : stage.q.block(0);
    const Piece piece{sequence, 0, start + token, min(kChunk, length - token)};
    store_rows_of<T>(o, out, row_block, p.o, piece, query_head, col, shape.V);
    if (!kHolds) arrive(&ring.stage_free[at.place]);
    at.skip(pass.readers, pass.stages), of_values.skip(pass.readers, pass.values);
    from.skip(pass.readers, pass.slots);
  }
}

template <typename T, int D, bool Reverse>
cudaError_t launch_head_read(HeadPass pass, cudaStream_t stream) {
  const HeadShape& shape = pass.read.shape;
  const int64_t pieces = pass.segment == 0 ? shape.tokens.sequences : piece_count(shape.tokens, pass.segment);
  const int walkers = pass.segment_decay != nullptr ? state_heads(pass.read) : shape.query_heads;
  const int64_t blocks = pieces * walkers * divide_up(shape.V, kSlab);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;

  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  constexpr int kStage = HeadStage<T, D>::kBytes, kState = HeadState<T, D>::kBytes,
                kPlace = HeadValues<T>::kBytes;
  if (limit < kLeastHeadReadBytes<T, D>) return cudaErrorInvalidConfiguration;
  // One of each, then another of each in turn while there is room: slots of S, stages, places for values, of
  // which there are no fewer than stages.
  int room = limit - kLeastHeadReadBytes<T, D>;
  const auto take = [&](int bytes) {
    if (bytes <= room) return room -= bytes, true;
    return false;
  };
  pass.stages = pass.values = pass.slots = 1;
  if (take(kState)) ++pass.slots;
  while (pass.stages < kMaxStages && take(kStage + kPlace)) ++pass.stages, ++pass.values;
  while (pass.values < kMaxValues && take(kPlace)) ++pass.values;
  while (pass.slots < kMaxSlots && take(kState)) ++pass.slots;
  // Readers that take turns need two places of everything.
  pass.readers = std::min({kReaders<D> / 4, pass.stages, pass.slots});
  const int bytes = limit - room;
  const cudaError_t error = allow_shared<head_read_kernel<T, D, Reverse>>(bytes);
  if (error != cudaSuccess) return error;
  head_read_kernel<T, D, Reverse><<<static_cast<unsigned>(blocks), kHeadReadThreads, bytes, stream>>>(pass);
  return cudaGetLastError();
}

}  // namespace girih::kernels
