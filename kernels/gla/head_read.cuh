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
// have three roles, which meet in a ring of stages, each a chunk's q, k, v, and S as readers take it:
//   loaders   copy chunks ahead, and sum their gates
//   keepers   have S in registers in fp32, transposed, 16 values a warp: round it into the stage, then
//             S <- e^{L_C} S + (w v)^T k
//   readers   warpgroups that take chunks in turn: rows of o, and S on its way to global memory
// So the state never leaves the block for its readers, and only S itself goes from chunk to chunk.
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

template <typename T, int D>
struct HeadStage {
  SharedTile<T, kChunk, D> q, k, s;  // s: S^T, [64 values, D]
  SharedTile<T, kChunk, kSlab> v;

  static constexpr int kBytes = 3 * SharedTile<T, kChunk, D>::kBytes + SharedTile<T, kChunk, kSlab>::kBytes;

  __device__ explicit HeadStage(unsigned char* shared) { Layout(shared)(q)(k)(s)(v); }
};

// What lies before the stages.
struct HeadRing {
  float sums[kMaxStages][kChunk];  // L of a stage's chunk
  uint64_t full[kMaxStages];       // q, k, v and L are there
  uint64_t carried[kMaxStages];    // S is
  uint64_t free[kMaxStages];       // all of them have been used
};
constexpr int kHeadRingBytes = (sizeof(HeadRing) + 127) / 128 * 128;

// A turn's stage and the parity of its phase.
struct Turn {
  int slot = 0;
  unsigned parity = 0;

  __device__ void next(int stages) {
    if (++slot == stages) slot = 0, parity ^= 1;
  }
};

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
  constexpr Side kSide = Reverse ? Side::later : Side::earlier;
  extern __shared__ __align__(128) unsigned char shared[];
  HeadRing& ring = *reinterpret_cast<HeadRing*>(shared);
  const HeadRead& p = pass.read;
  const HeadShape& shape = p.shape;
  const int warp = threadIdx.x / 32;
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

  if (threadIdx.x < static_cast<unsigned>(pass.stages)) {
    // A loader arrives twice: for its copies, and for the sums.
    init_barrier(&ring.full[threadIdx.x], 2 * 32 * kLoaders);
    init_barrier(&ring.carried[threadIdx.x], 32 * kKeepers<D>);
    init_barrier(&ring.free[threadIdx.x], 32 * kKeepers<D> + (alone ? 0 : 128));
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
      if (turn >= pass.stages) wait(&ring.free[at.slot], at.parity ^ 1);
      const Stage stage = stage_at(at.slot);
      const int token = token_of(turn), rows = min(kChunk, length - token);
      k.start(stage.k, token, rows);
      v.start(stage.v, token, rows);
      if (!alone) q.start(stage.q, token, rows);
      arrive_after_copies(&ring.full[at.slot]);
      if (warp == 0) {
        gates.put_sums(ring.sums[at.slot]);
        gates = gates_of(turn + 1);  // a turn ahead
      }
      arrive(&ring.full[at.slot]);
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
    Turn at;
    for (int turn = 0; turn < chunks; ++turn) {
      const Stage stage = stage_at(at.slot);
      const float* sums = ring.sums[at.slot];
      wait(&ring.full[at.slot], at.parity);
      if (!alone) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            *reinterpret_cast<uint32_t*>(&lane_at(stage.s, first_value + 8 * i, first_key + 8 * n)) =
                pair_of<T>(state.at[n][2 * i], state.at[n][2 * i + 1]);
          }
        }
        arrive(&ring.carried[at.slot]);
      }

      // S^T <- e^{L_C} S^T + (w v)^T k, w = e^{L_C - L}, in reverse scale e^L
      const float whole = sums[kChunk - 1], decay = exp2_fast(whole);
      total += whole;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) state.at[n][i] *= decay;
      }
#pragma unroll
      for (int token = 0; token < kChunk; token += 16) {
        uint32_t a[4];
        load_block_transposed(a, stage.v, first_value, token);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 sum = *reinterpret_cast<const float2*>(sums + token + 8 * half + lane_col());
          const float2 w = Reverse ? float2{shape.scale * exp2_fast(sum.x), shape.scale * exp2_fast(sum.y)}
                                   : float2{exp2_fast(whole - sum.x), exp2_fast(whole - sum.y)};
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float2 x = unpaired<T>(a[2 * half + i]);
            a[2 * half + i] = pair_of<T>(w.x * x.x, w.y * x.y);
          }
        }
        add_product<T>(state, a, stage.k, token, first_key);
      }
      arrive(&ring.free[at.slot]);
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
  const int reader = (warp - kLoaders - kKeepers<D>) / 4;
  // Scores are a triangle: the rows with the most meet another scheduler in the other warpgroup.
  const int row_block = reader % 2 == 0 ? thread / 32 : 3 - thread / 32;
  if (alone || reader >= pass.readers) return;
  const int64_t first_chunk = first_piece(shape.tokens, sequence, kChunk) + (start - sequence.start) / kChunk;
  const bool publishes = p.states != nullptr && (Reverse || query_head % group == 0);
  // A reader that skips turns never sees a barrier two phases on: the S that it saw last came after all
  // before.
  Turn at;
  for (int turn = 0; turn < chunks; ++turn, at.next(pass.stages)) {
    if (turn % pass.readers != reader) continue;
    const Stage stage = stage_at(at.slot);
    const float* sums = ring.sums[at.slot];
    wait(&ring.full[at.slot], at.parity);
    // near_ij = scale (q_i . k_j) e^{-|L_i - L_j|}
    Scores scores;
    zero(scores);
#pragma unroll 4
    for (int key = 0; key < D; key += 16) {
      uint32_t x[4];
      load_block(x, stage.q, kRows * row_block, key);
      add_scores<kSide, T>(scores, x, stage.k, key, row_block);
    }
    decay_scores<kSide>(scores, sums, shape.scale, row_block);
    Operand<2> near[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) round_to<T>(near[h], scores.half[h]);

    // o = r (q S) + near v, r = scale e^L, in reverse e^{L_C - L}
    Sums<8> o;
    fill(o, 0.f);
    wait(&ring.carried[at.slot], at.parity);
#pragma unroll 4
    for (int key = 0; key < D; key += 16) {
      uint32_t x[4];
      load_block(x, stage.q, kRows * row_block, key);
      add_product_transposed<T>(o, x, stage.s, 0, key);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = sums[kRows * row_block + lane_row() + 8 * i];
      const float r = Reverse ? exp2_fast(sums[kChunk - 1] - sum) : shape.scale * exp2_fast(sum);
#pragma unroll
      for (int n = 0; n < 8; ++n) o.at[n][2 * i] *= r, o.at[n][2 * i + 1] *= r;
    }
    add_scored<kSide, T>(o, near, stage.v, row_block);

    const int token = token_of(turn);
    if (publishes) {
      T* to = static_cast<T*>(p.states) +
              (((first_chunk + token / kChunk) * state_heads(p) + state_head) * shape.V + col) *
                  static_cast<int64_t>(shape.D);
#pragma unroll 4
      for (int i = thread; i < kSlab * D / 8; i += 128) {
        const int row = i / (D / 8), at_key = i % (D / 8) * 8;
        if (row < cols && at_key < shape.D) {
          *reinterpret_cast<uint4*>(to + row * static_cast<int64_t>(shape.D) + at_key) =
              *reinterpret_cast<const uint4*>(&stage.s.at(row, at_key));
        }
      }
    }
    // The warp's rows of q are its room for rows on their way out.
    const SharedTile<T, kChunk, kSlab> out{reinterpret_cast<T*>(rows_of(stage.q, row_block)) -
                                           row_block * kRows * kSlab};
    const Piece piece{sequence, 0, start + token, min(kChunk, length - token)};
    store_rows_of<T>(o, out, row_block, p.o, piece, query_head, col, shape.V);
    arrive(&ring.free[at.slot]);
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
  pass.stages = std::min((limit - kHeadRingBytes) / HeadStage<T, D>::kBytes, kMaxStages);
  if (pass.stages == 0) return cudaErrorInvalidConfiguration;
  // A reader that skips a turn may only do so when the stage it comes back to is another turn's by then.
  pass.readers = std::min(kReaders<D> / 4, pass.stages);
  const int bytes = kHeadRingBytes + pass.stages * HeadStage<T, D>::kBytes;
  const cudaError_t error = allow_shared<head_read_kernel<T, D, Reverse>>(bytes);
  if (error != cudaSuccess) return error;
  head_read_kernel<T, D, Reverse><<<static_cast<unsigned>(blocks), kHeadReadThreads, bytes, stream>>>(pass);
  return cudaGetLastError();
}

}  // namespace girih::kernels
