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
// have three roles:
//   loaders   copy chunks of q, k, v ahead into a ring of stages, and sum their gates
//   keepers   warpgroups that have S in registers in fp32, transposed, 16 values a warp: round it into a slot
//             of a second ring, then S <- e^{L_C} S + (w v)^T k
//   readers   warpgroups that take chunks in turn: rows of o, and S on its way to global memory
// So the state never leaves the block for its readers, and only S itself goes from chunk to chunk. Warp by
// warp the products took 3000 of a chunk's 3900 cycles of shared memory: they are warpgroups'. With q, k, v
// and S in one ring there was room for two stages, too few to load ahead.
#pragma once

#include <algorithm>

#include "gla/head_gates.cuh"
#include "gla/head_launch.h"
#include "gsa/gradients.cuh"
#include "tile/grid.h"

namespace girih::kernels {

// Warps: 16 in all, so that each thread has 128 registers. A keeper has 16 values and up to 128 keys of the
// state, which is half of them.
constexpr int kLoaders = 4;
template <int D>
constexpr int kKeepers = D <= 128 ? 4 : 8;
template <int D>
constexpr int kReaders = 12 - kKeepers<D>;
constexpr int kHeadReadThreads = 32 * 16;
constexpr int kMaxStages = 6;
constexpr int kMaxSlots = 4;

template <typename T, int D>
using HeadState = BlockTile<T, D>;  // S^T, [64 values, D]

template <typename T, int D>
struct HeadStage {
  BlockTile<T, D> q, k;
  BlockTile<T, kSlab> v;

  static constexpr int kBytes = 2 * BlockTile<T, D>::kBytes + BlockTile<T, kSlab>::kBytes;

  __device__ explicit HeadStage(unsigned char* shared) { Layout(shared)(q)(k)(v); }
};

// What lies before the stages, and they before the slots.
struct HeadRing {
  float sums[kMaxStages][kChunk];     // L of a stage's chunk
  float weights[kMaxStages][kChunk];  // w, what the keepers make of it
  uint64_t full[kMaxStages];          // q, k, v, L and w are there
  uint64_t free[kMaxStages];          // all of them have been used
  uint64_t carried[kMaxSlots];        // S is there
  uint64_t used[kMaxSlots];
};
constexpr int kHeadRingBytes = (sizeof(HeadRing) + 1023) / 1024 * 1024;

// Without one stage and one slot there is no read.
template <typename T, int D>
constexpr int kLeastHeadReadBytes = kHeadRingBytes + HeadStage<T, D>::kBytes + HeadState<T, D>::kBytes;

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
  const auto state_at = [&](int slot) {
    return State{
        reinterpret_cast<T*>(shared + kHeadRingBytes + pass.stages * Stage::kBytes + slot * State::kBytes)};
  };

  if (threadIdx.x < static_cast<unsigned>(pass.stages)) {
    // Every loader for its copies, and one warp for the sums.
    init_barrier(&ring.full[threadIdx.x], 32 * (kLoaders + 1));
    init_barrier(&ring.free[threadIdx.x], 32 * (kKeepers<D> + (alone ? 0 : 4)));
  }
  if (threadIdx.x < static_cast<unsigned>(pass.slots)) {
    init_barrier(&ring.carried[threadIdx.x], 32 * kKeepers<D>);
    init_barrier(&ring.used[threadIdx.x], 32 * 4);
  }
  __syncthreads();

  if (warp < kLoaders) {
    const int heads_of_q = Reverse ? head : query_head, heads_of_k = Reverse ? query_head : head;
    const TileCopier<32 * kLoaders, decltype(Stage::q)> q(first_row<T>(p.q, sequence, start, heads_of_q),
                                                          p.q.stride[1], shape.D, threadIdx.x);
    const TileCopier<32 * kLoaders, decltype(Stage::k)> k(first_row<T>(p.k, sequence, start, heads_of_k),
                                                          p.k.stride[1], shape.D, threadIdx.x);
    const TileCopier<32 * kLoaders, decltype(Stage::v)> v(first_row<T>(p.v, sequence, start, heads_of_k, col),
                                                          p.v.stride[1], cols, threadIdx.x);
    const auto gates_of = [&](int turn) {
      const int token = token_of(turn);
      return GatePair::load(shape.g, sequence, start + token, head, turn < chunks ? length - token : 0);
    };
    GatePair gates = gates_of(0);
    Turn at;
    for (int turn = 0; turn < chunks; ++turn) {
      if (turn >= pass.stages) wait(&ring.free[at.place], at.parity ^ 1);
      const Stage stage = stage_at(at.place);
      const int token = token_of(turn), rows = min(kChunk, length - token);
      k.start(stage.k, token, rows);
      v.start(stage.v, token, rows);
      if (!alone) q.start(stage.q, token, rows);
      arrive_after_copies(&ring.full[at.place]);
      if (warp == 0) {
        float* sums = ring.sums[at.place];
        gates.put_sums(sums);
        __syncwarp();
        // w = e^{L_C - L}, in reverse scale e^L
        const float2 sum = *reinterpret_cast<const float2*>(sums + 2 * lane());
        const float whole = sums[kChunk - 1];
        *reinterpret_cast<float2*>(ring.weights[at.place] + 2 * lane()) =
            Reverse ? float2{shape.scale * exp2_fast(sum.x), shape.scale * exp2_fast(sum.y)}
                    : float2{exp2_fast(whole - sum.x), exp2_fast(whole - sum.y)};
        arrive(&ring.full[at.place]);
        gates = gates_of(turn + 1);  // a turn ahead
      }
      at.next(pass.stages);
    }
    return;
  }

  if (warp < kLoaders + kKeepers<D>) {
    constexpr int kKeys = D <= 128 ? D : 128, kN = kKeys / 8;
    const int first_value = (warp - kLoaders) % 4 * kRows, first_key = (warp - kLoaders) / 4 * kKeys;
    // f(element, value, key) of those that exist.
    const auto for_each_element = [&](Sums<kN>& state, const auto& f) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int value = col + first_value + lane_row() + 8 * (i >> 1);
          const int key = first_key + 8 * n + lane_col() + (i & 1);
          if (value < shape.values && key < shape.keys) f(state.at[n][i], value, key);
        }
      }
    };
    const int64_t of_initial = pass.segment == 0 ? sequence.index : number;
    Sums<kN> state;
    fill(state, 0.f);
    if (p.initial.data != nullptr) {
      const float* from = static_cast<const float*>(p.initial.data) + of_initial * p.initial.stride[0] +
                          state_head * p.initial.stride[1];
      for_each_element(state, [&](float& element, int value, int key) {
        element = from[value * p.initial.stride[2] + key * p.initial.stride[3]];
      });
    }
    float total = 0.f;
    Turn at, to;
    for (int turn = 0; turn < chunks; ++turn) {
      if (!alone) {
        if (turn >= pass.slots) wait(&ring.used[to.place], to.parity ^ 1);
        const State carried = state_at(to.place);
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            *reinterpret_cast<uint32_t*>(&lane_at(carried, first_value + 8 * i, first_key + 8 * n)) =
                pair_of<T>(state.at[n][2 * i], state.at[n][2 * i + 1]);
          }
        }
        fence_tiles();
        arrive(&ring.carried[to.place]);
        to.next(pass.slots);
      }

      // S^T <- e^{L_C} S^T + (w v)^T k
      const Stage stage = stage_at(at.place);
      wait(&ring.full[at.place], at.parity);
      fence_tiles();
      const float whole = ring.sums[at.place][kChunk - 1], decay = exp2_fast(whole);
      total += whole;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) state.at[n][i] *= decay;
      }
      Operand<4> weighted;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t(&a)[4] = weighted.at[k];
        load_block_transposed(a, stage.v, first_value, 16 * k);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 w =
              *reinterpret_cast<const float2*>(ring.weights[at.place] + 16 * k + 8 * half + lane_col());
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float2 x = unpaired<T>(a[2 * half + i]);
            a[2 * half + i] = pair_of<T>(w.x * x.x, w.y * x.y);
          }
        }
      }
      fence_products(state);
      start_product<T>(state, weighted, stage.k, first_key);
      commit_products();
      wait_products<0>(state);
      arrive(&ring.free[at.place]);
      at.next(pass.stages);
    }

    if (alone && warp == kLoaders) {
      for (int key = lane(); key < shape.keys; key += 32) {
        pass.segment_decay[(number * walkers + state_head) * shape.keys + key] = total / kLog2E;
      }
    }
    // Query heads that share a state give the same one; the first writes it.
    const bool mine = Reverse || query_head % group == 0;
    if (p.final.data != nullptr && mine && (alone || nothing_follows)) {
      float* to = static_cast<float*>(p.final.data) + (alone ? number : sequence.index) * p.final.stride[0] +
                  state_head * p.final.stride[1];
      for_each_element(state, [&](float element, int value, int key) {
        to[value * p.final.stride[2] + key * p.final.stride[3]] = element;
      });
    }
    return;
  }

  const int thread = (static_cast<int>(threadIdx.x) - 32 * (kLoaders + kKeepers<D>)) % 128;
  const int reader = (warp - kLoaders - kKeepers<D>) / 4, row_block = warp % 4;
  if (alone || reader >= pass.readers) return;
  const int64_t first_chunk = first_piece(shape.tokens, sequence, kChunk) + (start - sequence.start) / kChunk;
  const bool publishes = p.states != nullptr && (Reverse || query_head % group == 0);
  // A reader that skips turns never sees a barrier two phases on: the S that it saw last came after all
  // before.
  Turn at, from;
  for (int turn = 0; turn < chunks; ++turn, at.next(pass.stages), from.next(pass.slots)) {
    if (turn % pass.readers != reader) continue;
    const Stage stage = stage_at(at.place);
    const State carried = state_at(from.place);
    const float* sums = ring.sums[at.place];
    const int token = token_of(turn);

    // near_ij = scale (q_i . k_j) e^{-|L_i - L_j|}, o = r (q S) + near v, r = scale e^L, in reverse
    // e^{L_C - L}
    Sums<8> scores, o;
    fill(scores, 0.f);
    fill(o, 0.f);
    wait(&ring.full[at.place], at.parity);
    fence_tiles();
    fence_products(scores);
    start_product_transposed(scores, stage.q, stage.k);
    commit_products();
    wait(&ring.carried[from.place], from.parity);
    fence_products(o);
    start_product_transposed(o, stage.q, carried);
    commit_products();
    if (publishes) {
      T* to = static_cast<T*>(p.states) +
              (((first_chunk + token / kChunk) * state_heads(p) + state_head) * shape.V + col) *
                  static_cast<int64_t>(shape.D);
#pragma unroll 4
      for (int i = thread; i < kSlab * D / 8; i += 128) {
        const int row = i / (D / 8), at_key = i % (D / 8) * 8;
        if (row < cols && at_key < shape.D) {
          *reinterpret_cast<uint4*>(to + row * static_cast<int64_t>(shape.D) + at_key) =
              *reinterpret_cast<const uint4*>(&carried.at(row, at_key));
        }
      }
    }
    wait_products<1>(scores);
    decay_scores(scores, sums, shape.scale, row_block, Reverse);
    Operand<4> near;
    round_to<T>(near, scores);
    wait_products<0>(o);
    arrive(&ring.used[from.place]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = sums[kRows * row_block + lane_row() + 8 * i];
      const float r = Reverse ? exp2_fast(sums[kChunk - 1] - sum) : shape.scale * exp2_fast(sum);
#pragma unroll
      for (int n = 0; n < 8; ++n) o.at[n][2 * i] *= r, o.at[n][2 * i + 1] *= r;
    }
    fence_products(o);
    start_product<T>(o, near, stage.v);
    commit_products();
    wait_products<0>(o);

    // q, which the products of all four warps have left, is the room for rows on their way out.
    reader == 0 ? barrier_wait(1, 128) : barrier_wait(2, 128);
    const Piece piece{sequence, 0, start + token, min(kChunk, length - token)};
    store_rows_of<T>(o, stage.q.block(0), row_block, p.o, piece, query_head, col, shape.V);
    arrive(&ring.free[at.place]);
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
  constexpr int kStage = HeadStage<T, D>::kBytes, kState = HeadState<T, D>::kBytes;
  if (limit < kLeastHeadReadBytes<T, D>) return cudaErrorInvalidConfiguration;
  const int room = limit - kHeadRingBytes;
  // Two of both, then stages; what they leave is slots'.
  pass.stages = std::min((room - (room < 2 * (kStage + kState) ? 1 : 2) * kState) / kStage, kMaxStages);
  pass.slots = std::min((room - pass.stages * kStage) / kState, kMaxSlots);
  // A reader that skips a turn may only do so when the place it comes back to is another turn's by then.
  pass.readers = std::min({kReaders<D> / 4, pass.stages, pass.slots});
  const int bytes = kHeadRingBytes + pass.stages * kStage + pass.slots * kState;
  const cudaError_t error = allow_shared<head_read_kernel<T, D, Reverse>>(bytes);
  if (error != cudaSuccess) return error;
  head_read_kernel<T, D, Reverse><<<static_cast<unsigned>(blocks), kHeadReadThreads, bytes, stream>>>(pass);
  return cudaGetLastError();
}

}  // namespace girih::kernels
