// A block of the fp32 gradients: its data of a segment, and its phases.
#pragma once

#include "delta_product/fp32_products.cuh"
#include "delta_product/fp32_segments.h"

namespace girih::kernels::delta_product::fp32_gradients {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kBlocks = kTile / kBlock;        // blocks of 16 rows
constexpr int kHalf = kTile / 2;               // columns of dk of a warp
constexpr int kTokenLanes = kThreads / kTile;  // threads that sum the dg of a token

// Contents of the tiles. First: do or du of two readers, later their E * A; u, S and dS. After the sums over
// V: q or b of two readers, and k, which stays for all readers.
enum TileIndex : int {
  kReaderTiles = 0,
  kUTile = 2,
  kStates,
  kGradients,
  kTileCount,
  kReaderRows = kUTile,
  kKeys = kGradients
};

struct SegmentInfo {
  int token[kTile];  // token of a row
  // Segment data, in shared memory to save registers.
  int64_t batch, start, states;  // batch row, first token, offset of its states
  int head, tokens;
  int readers;  // the steps, and the query heads of the memory head
  bool has_between;
};
struct GateStorage {
  // Per token: its gate, e^{sum of gates through it}, e^{sum of gates after it}.
  float gate[kTile], decay_from_block_start[kTile], decay_to_block_end[kTile];
  // Per row: the term of S, on which the gates up to a query or a step act; the term of dS, on which the
  // gates after a row act; one entry for each team.
  float queries[2][kTile], steps[kTile], writes[2][kTile];
  // Per row: sum over pairs of an earlier row and a reading row at this row or later; one entry for each
  // reading warp.
  float pairs[kWarps][kTile];
  float parts[kWarps];  // partial sums of S * dS
};
template <class Storage>
constexpr int kStorageFloats = (static_cast<int>(sizeof(Storage)) + 15) / 16 * 4;
// Floats of E: 16 x 16 blocks on and below the diagonal.
constexpr int kDecayFloats = kBlocks * (kBlocks + 1) / 2 * kBlock * kBlock;

constexpr int gradient_floats(bool gated) {
  return kTileCount * SwizzledTile::kFloats + kStorageFloats<SegmentInfo> +
         gated * (kDecayFloats + kStorageFloats<GateStorage>);
}

// A block has one segment of a memory head and 64 columns of D. It processes two readers at a time, each by a
// team of four warps. A warp has sixteen rows of its reader, and sixteen rows and half of the columns of dk.
template <bool Gated>
struct SegmentGradients {
  const DeltaFp32Gradients& p;
  const DeltaFp32Shape& shape;
  float* const shared;
  SegmentInfo& segment_info;
  GateStorage& gates;
  float* const decays;
  const int D, V, n;
  const int slab, col;  // slab of D
  const int thread, team, block, from;
  int reader;  // reader of the warp

  __device__ SegmentGradients(const DeltaFp32Gradients& p, float* shared, int slab)
      : p(p),
        shape(p.shape),
        shared(shared),
        segment_info(*reinterpret_cast<SegmentInfo*>(shared + kTileCount * SwizzledTile::kFloats)),
        gates(*reinterpret_cast<GateStorage*>(shared + kTileCount * SwizzledTile::kFloats +
                                              kStorageFloats<SegmentInfo>)),
        decays(reinterpret_cast<float*>(&gates) + kStorageFloats<GateStorage>),
        D(round_up_to_4(p.shape.D)),
        V(round_up_to_4(p.shape.V)),
        n(p.shape.n),
        slab(slab),
        col(slab * kTile),
        thread(static_cast<int>(threadIdx.x)),
        team(warp_index() / kBlocks),
        // Reversed order of team 1 balances the triangles of the two warps of a scheduler.
        block(team == 0 ? warp_index() : kWarps - 1 - warp_index()),
        from(kBlock * block) {}

  // Finds the segment. Returns false if it has no tokens. Only one warp computes it because of the 64-bit
  // divisions.
  __device__ bool find_segment(unsigned segment_head) {
    if (thread < 32) {
      const unsigned number = segment_head / shape.heads;
      const int head = static_cast<int>(segment_head % shape.heads);
      const DeltaSegment segment = segment_at(shape.segments, number);
      if (thread == 0) {
        segment_info.batch = segment.sequence.batch, segment_info.start = segment.start;
        segment_info.states = static_cast<int64_t>(segment_head) * shape.V * D;
        segment_info.head = head, segment_info.tokens = segment.length;
        segment_info.has_between = segment.has_between;
        segment_info.readers = 1 + shape.query_heads / shape.heads;
      }
      for (int i = thread; i < kTile; i += 32) {
        segment_info.token[i] = i / n;
        if constexpr (Gated) {
          const int64_t at = offset_of(p.g, segment.sequence.batch, segment.start + i, head);
          gates.gate[i] = i < segment.length ? static_cast<const float*>(p.g.data)[at] : 0.f;
        }
      }
    }
    if constexpr (Gated) clear_gates();
    __syncthreads();
    return segment_info.tokens > 0;
  }

  // The gradients of readers `first_reader` and the next, and their terms of dk.
  __device__ void add_readers(int first_reader);
  __device__ void store_gates() const;

  __device__ int readers() const { return segment_info.readers; }

 private:
  // fp32_gates.cuh
  __device__ void clear_gates() const;
  __device__ void sum_gates() const;
  __device__ void sum_state_writes(Accumulator<4>& dk) const;
  __device__ void sum_state_reads(const Accumulator<8>& sums) const;
  __device__ void sum_pairs() const;

  __device__ SwizzledTile tile(int tile_index) const { return {shared + tile_index * SwizzledTile::kFloats}; }
  __device__ int rows_of(bool of_steps) const {
    return of_steps ? segment_info.tokens * n : segment_info.tokens;
  }
  __device__ int head_of(int of) const { return segment_info.head * (readers() - 1) + of - 1; }
  // For the reader of the warp: rows (0 past the last reader), the token of a row, and the number of blocks
  // of 16 steps that its rows read. Recomputed at each use, because the products need the registers.
  __device__ bool steps() const { return reader == 0; }
  __device__ int rows() const { return reader < readers() ? rows_of(steps()) : 0; }
  __device__ int token_of(int row) const { return steps() ? segment_info.token[row] : row; }
  __device__ int blocks() const {
    const int before = (block + 1) * (steps() ? 1 : n), all = (rows_of(true) + kBlock - 1) / kBlock;
    return before < all ? before : all;
  }

  // The warp's part of dk is not empty.
  __device__ bool has_keys() const { return from < rows_of(true) && col + kHalf * team < D; }

  // Pointer to the rows of the segment, of a head, from column `at` on.
  template <class Array>
  __device__ auto rows_at(const Array& x, bool of_steps, int head, int at) const {
    return kernels::at<float>(x, segment_info.batch, segment_info.start * (of_steps ? n : 1), head, at);
  }
  // Loads the rows of the segment to a tile, columns at..at+63 of `width`.
  __device__ void load_rows(int tile_index, const InputTensor<4>& x, bool of_steps, int head, int at,
                            int width) const {
    load_async<kThreads>(tile(tile_index), rows_at(x, of_steps, head, at), x.stride[1], rows_of(of_steps),
                         width - at, thread);
  }
  // Loads rows v..v+63 of S^T or dS^T, [V, D], to a tile.
  __device__ void load_state(int tile_index, const float* states, int v) const {
    load_async<kThreads>(tile(tile_index), states + segment_info.states + static_cast<int64_t>(v) * D + col,
                         D, shape.V - v, D - col, thread);
  }

  // Loads columns v..v+63 of do or du of the two readers.
  __device__ void load_reads(int first_reader, int v) const {
    if (first_reader == 0) {
      load_rows(kReaderTiles, p.du, true, segment_info.head, v, V);
    } else {
      load_rows(kReaderTiles, p.dout, false, head_of(first_reader), v, V);
    }
    if (first_reader + 1 < readers())
      load_rows(kReaderTiles + 1, p.dout, false, head_of(first_reader + 1), v, V);
  }

  // Applies the function between chunks to S, and sums S * dS, on the elements that the thread has loaded
  // itself.
  __device__ void finish_states(int first_reader, float& state_dot) const {
    const bool sums = Gated && first_reader == 0;
    if (!segment_info.has_between && !sums) return;
#pragma unroll 1
    for (int i = 0; i < kTile; i += kThreads * 4 / kTile) {
      const int row = i + thread * 4 / kTile, at = thread * 4 % kTile;
      Pack<4> state = load<4>(&tile(kStates).at(row, at));
      if (segment_info.has_between) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state.at[e] = phi(shape.segments.between, state.at[e]);
        store<4>(&tile(kStates).at(row, at), state);
      }
      if (sums) state_dot = add_dot(state_dot, state, load<4>(&tile(kGradients).at(row, at)));
    }
  }

  // F = do S, or du S, summed over V. If V <= 64, all tiles stay for the other sums over V.
  __device__ void sum_states(Accumulator<8>& sums, int first_reader) const {
    float state_dot = 0.f;
#pragma unroll 1
    for (int v = 0; v < V; v += kTile) {
      __syncthreads();
      load_reads(first_reader, v);
      load_state(kStates, p.states, v);
      if (V <= kTile) load_rows(kUTile, p.u, true, segment_info.head, v, V);
      if (first_reader == 0 && (Gated || V <= kTile)) load_state(kGradients, p.gradients, v);
      commit_copies();
      if constexpr (Gated) {
        if (first_reader + v == 0) sum_gates();
      }
      wait_copies<0>();
      finish_states(first_reader, state_dot);
      __syncthreads();
      if (from >= rows()) continue;
#pragma unroll 1
      for (int c = 0; c < kTile && v + c < V; c += kBlock) {
        SplitAFragment a;
        a.load(tile(kReaderTiles + team), from, c);
        add_product(sums, a, tile(kStates), c, 0, D - col);
      }
    }
    if constexpr (Gated) {
      if (first_reader > 0) return;
#pragma unroll
      for (int other = 1; other < 32; other *= 2) state_dot += __shfl_xor_sync(~0u, state_dot, other);
      if (lane() == 0) gates.parts[thread / 32] = state_dot;
    }
  }

  // Calls f(c) for every sixteen columns c..c+15 of a tile of V. load(v) loads the operands besides u if they
  // are not in shared memory. Sums over V run one after another to save registers.
  template <class Load, class F>
  __device__ void for_each_column_block(const Load& load, const F& f) const {
#pragma unroll 1
    for (int v = 0; v < V; v += kTile) {
      if (V > kTile) {
        __syncthreads();
        load(v);
        load_rows(kUTile, p.u, true, segment_info.head, v, V);
        commit_copies();
        wait_copies<0>();
        __syncthreads();
      }
#pragma unroll 1
      for (int c = 0; c < kTile && v + c < V; c += kBlock) f(c);
    }
  }

  // E * A replaces the rows do or du of the warp; sums becomes e^L F.
  __device__ void apply_decay(const Accumulator<8>& scores, Accumulator<8>& sums) const {
    const float factor = steps() ? -1.f : shape.scale;
    const int reads = blocks();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = from + lane_row() + 8 * i;
      const int row_limit = steps() ? row : (row + 1) * n;  // rows that it reads
      // The row of E: that of the token's last row.
      const int at = steps() || row_limit > kTile ? row : row_limit - 1;
      [[maybe_unused]] const float* const decay =
          decays + (at / kBlock * (at / kBlock + 1) / 2 * kBlock + at % kBlock) * kBlock + lane_four();
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        if (m >= reads) break;
        Pack<4> weight = four(scores, i, m), decayed;
        if constexpr (Gated) decayed = load<4>(decay + m * kBlock * kBlock);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float by = factor;
          if constexpr (Gated) by *= decayed.at[e];
          weight.at[e] = kBlock * m + lane_four() + e < row_limit ? by * weight.at[e] : 0.f;
        }
        store_four(tile(kReaderTiles + team), from + 8 * i, kBlock * m, weight);
      }
    }
    float2 by = {factor, factor};
    if constexpr (Gated) {
      by.x *= gates.decay_from_block_start[token_of(from + lane_row())];
      by.y *= gates.decay_from_block_start[token_of(from + lane_row() + 8)];
    }
    scale_rows(sums, by);
  }

  // Loads the rows of the two readers, and for the first readers the keys.
  __device__ void load_keys(int first_reader) const {
    if (first_reader == 0) {
      load_rows(kKeys, p.k, true, segment_info.head, col, D);
      load_rows(kReaderRows, p.b, true, segment_info.head, col, D);
    } else {
      load_rows(kReaderRows, p.q, false, head_of(first_reader), col, D);
    }
    if (first_reader + 1 < readers())
      load_rows(kReaderRows + 1, p.q, false, head_of(first_reader + 1), col, D);
    commit_copies();
  }

  __device__ void store_reader(const Accumulator<8>& sums) const {
    float* const data =
        steps() ? rows_at(p.db, true, segment_info.head, col) : rows_at(p.dq, false, head_of(reader), col);
    const int64_t stride = steps() ? p.db.stride[1] : p.dq.stride[1];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = from + lane_row() + 8 * i;
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        const int at = kBlock * m + lane_four();
        if (row < rows() && col + at < D) store<4>(data + row * stride + at, four(sums, i, m));
      }
    }
  }

  // dk <- dk + (E * A)^T (Q, or B)
  __device__ void sum_columns(Accumulator<4>& dk, int first_reader) const {
#pragma unroll 1
    for (int i = 0; i < 2 && first_reader + i < readers(); ++i) {
      const bool of_steps = first_reader + i == 0;
      // Starts at the first block that reads a row of the warp.
#pragma unroll 1
      for (int b = of_steps ? block : segment_info.token[from] / kBlock; kBlock * b < rows_of(of_steps);
           ++b) {
        SplitAFragment a;
        load_transposed(a, tile(kReaderTiles + i), kBlock * b, from);
        add_product(dk, a, tile(kReaderRows + i), kBlock * b, kHalf * team);
      }
    }
  }

  // Calls f(i, m, pointer to a pack) for the warp's part of dk.
  template <class F>
  __device__ void for_each_dk_pack(const F& f) const {
    const int at = col + kHalf * team + lane_four();
    float* const data = rows_at(p.dk, true, segment_info.head, at);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = from + lane_row() + 8 * i;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if (row < rows_of(true) && at + kBlock * m < D) f(i, m, data + row * p.dk.stride[1] + kBlock * m);
      }
    }
  }
};

}  // namespace girih::kernels::delta_product::fp32_gradients
