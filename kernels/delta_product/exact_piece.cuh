// A block of the exact gradients: what it has of a piece, and its phases.
#pragma once

#include "delta_product/exact_products.cuh"
#include "delta_product/pieces.h"

namespace girih::kernels::delta_product::by_piece {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kBlocks = kTile / kBlock;        // of rows
constexpr int kHalf = kTile / 2;               // columns of dk of a warp
constexpr int kTokenLanes = kThreads / kTile;  // that add up the dg of a token

// What the tiles have: of either reader rows do or du, then its E * A; u, S and dS, and after them the
// readers' rows, q or b, and k, which stays.
enum PiecePlace : int {
  kReads = 0,
  kWrites = 2,
  kStates,
  kGradients,
  kPlaces,
  kReaderRows = kWrites,
  kKeys = kGradients
};

struct GradientSpace {
  int token[kTile];  // of a row
  // Of the piece; here for want of registers.
  int64_t batch, start, states;  // row of x, first token, where its states begin
  int head, tokens;
  int readers;  // the steps, and the query heads that share the memory
  bool opens;
};
struct GateSpace {
  // Of the piece's tokens: its gate, e^{gates through it}, e^{those after it}.
  float gate[kTile], through[kTile], after[kTile];
  // What the gates up to a query or a step scale of S, and those after a row of dS; by team.
  float queries[2][kTile], steps[kTile], writes[2][kTile];
  // Pairs of a row before the row at [.] and a read there or later, by the warps that have the reads.
  float pairs[kWarps][kTile];
  float parts[kWarps];  // S * dS, added up by the warps
};
template <class Space>
constexpr int kSpaceFloats = (static_cast<int>(sizeof(Space)) + 15) / 16 * 4;
// Of E the sixteens of rows and columns up to the diagonal.
constexpr int kDecayFloats = kBlocks * (kBlocks + 1) / 2 * kBlock * kBlock;

constexpr int gradient_floats(bool gated) {
  return kPlaces * PieceTile::kFloats + kSpaceFloats<GradientSpace> +
         gated * (kDecayFloats + kSpaceFloats<GateSpace>);
}

// A block: of its memory head the rows of one piece, and 64 columns of D. Two readers at a time, one of four
// warps each (a team): a warp has sixteen of its rows, and of dk sixteen rows and half of the columns.
template <bool Gated>
struct PieceGradients {
  const DeltaExactGradients& p;
  const DeltaExactShape& shape;
  float* const shared;
  GradientSpace& space;
  GateSpace& gates;
  float* const decays;
  const int D, V, n;
  const int slab, col;  // of D
  const int thread, team, block, from;
  int reader;  // the warp's

  __device__ PieceGradients(const DeltaExactGradients& p, float* shared, int slab)
      : p(p),
        shape(p.shape),
        shared(shared),
        space(*reinterpret_cast<GradientSpace*>(shared + kPlaces * PieceTile::kFloats)),
        gates(*reinterpret_cast<GateSpace*>(shared + kPlaces * PieceTile::kFloats +
                                            kSpaceFloats<GradientSpace>)),
        decays(reinterpret_cast<float*>(&gates) + kSpaceFloats<GateSpace>),
        D(in_fours(p.shape.D)),
        V(in_fours(p.shape.V)),
        n(p.shape.n),
        slab(slab),
        col(slab * kTile),
        thread(static_cast<int>(threadIdx.x)),
        team(warp_index() / kBlocks),
        // A scheduler's two warps have as much to do together as any other's: rows read those before them.
        block(team == 0 ? warp_index() : kWarps - 1 - warp_index()),
        from(kBlock * block) {}

  // False: the piece has no tokens. By one warp: where a piece lies takes long divisions.
  __device__ bool find(unsigned piece_head) {
    if (thread < 32) {
      const unsigned number = piece_head / shape.heads;
      const int head = static_cast<int>(piece_head % shape.heads);
      const DeltaPiece piece = piece_at(shape.pieces, number);
      if (thread == 0) {
        space.batch = piece.sequence.batch, space.start = piece.start;
        space.states = static_cast<int64_t>(piece_head) * shape.V * D;
        space.head = head, space.tokens = piece.length;
        space.opens = piece.opens;
        space.readers = 1 + shape.query_heads / shape.heads;
      }
      for (int i = thread; i < kTile; i += 32) {
        space.token[i] = i / n;
        if constexpr (Gated) {
          const int64_t at = offset_of(p.g, piece.sequence.batch, piece.start + i, head);
          gates.gate[i] = i < piece.length ? static_cast<const float*>(p.g.data)[at] : 0.f;
        }
      }
    }
    if constexpr (Gated) clear_gates();
    __syncthreads();
    return space.tokens > 0;
  }

  // The gradients of readers `first_reader` and the next, and what their rows give dk.
  __device__ void add_readers(int first_reader);
  __device__ void put_gates() const;

  __device__ int readers() const { return space.readers; }

 private:
  // exact_gates.cuh
  __device__ void clear_gates() const;
  __device__ void sum_gates() const;
  __device__ void sum_far_writes(Sums<4>& dk) const;
  __device__ void sum_far(const Sums<8>& sums) const;
  __device__ void sum_pairs() const;

  __device__ PieceTile tile(int place) const { return {shared + place * PieceTile::kFloats}; }
  __device__ int rows_of(bool of_steps) const { return of_steps ? space.tokens * n : space.tokens; }
  __device__ int head_of(int of) const { return space.head * (readers() - 1) + of - 1; }
  // Of the warp's reader: its rows, none past the last reader; the token of one; how many sixteens of rows of
  // the steps there are up to the last that the warp's rows read. Worked out anew where they are asked for:
  // the products need the registers.
  __device__ bool steps() const { return reader == 0; }
  __device__ int rows() const { return reader < readers() ? rows_of(steps()) : 0; }
  __device__ int token_of(int row) const { return steps() ? space.token[row] : row; }
  __device__ int blocks() const {
    const int before = (block + 1) * (steps() ? 1 : n), all = (rows_of(true) + kBlock - 1) / kBlock;
    return before < all ? before : all;
  }

  // There is something of the warp's part of dk.
  __device__ bool has_keys() const { return from < rows_of(true) && col + kHalf * team < D; }

  // Where the piece's rows of an array begin, of a head the columns from `at` on.
  template <class Array>
  __device__ auto rows_at(const Array& x, bool of_steps, int head, int at) const {
    return kernels::at<float>(x, space.batch, space.start * (of_steps ? n : 1), head, at);
  }
  // Of an array the piece's rows, columns at..at+63 of `width`, to a tile.
  __device__ void load_rows(int place, const In<4>& x, bool of_steps, int head, int at, int width) const {
    load_async<kThreads>(tile(place), rows_at(x, of_steps, head, at), x.stride[1], rows_of(of_steps),
                         width - at, thread);
  }
  // The columns v..v+63 of S or dS, [V, D], to a tile.
  __device__ void load_state(int place, const float* states, int v) const {
    load_async<kThreads>(tile(place), states + space.states + static_cast<int64_t>(v) * D + col, D,
                         shape.V - v, D - col, thread);
  }

  // Columns v..v+63 of the readers' rows do, or du.
  __device__ void load_reads(int first_reader, int v) const {
    if (first_reader == 0) {
      load_rows(kReads, p.du, true, space.head, v, V);
    } else {
      load_rows(kReads, p.dout, false, head_of(first_reader), v, V);
    }
    if (first_reader + 1 < readers()) load_rows(kReads + 1, p.dout, false, head_of(first_reader + 1), v, V);
  }

  // S as it is after the function between chunks, and S * dS, of what the thread has brought.
  __device__ void finish_states(int first_reader, float& both) const {
    const bool sums = Gated && first_reader == 0;
    if (!space.opens && !sums) return;
#pragma unroll 1
    for (int i = 0; i < kTile; i += kThreads * 4 / kTile) {
      const int row = i + thread * 4 / kTile, at = thread * 4 % kTile;
      Pack<4> state = load<4>(&tile(kStates).at(row, at));
      if (space.opens) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state.at[e] = between(shape.pieces.between, state.at[e]);
        store<4>(&tile(kStates).at(row, at), state);
      }
      if (sums) both = add_dot(both, state, load<4>(&tile(kGradients).at(row, at)));
    }
  }

  // F = do S, or du S, over V. Of up to 64 columns all tiles stay until the other sums over V.
  __device__ void sum_states(Sums<8>& sums, int first_reader) const {
    float both = 0.f;
#pragma unroll 1
    for (int v = 0; v < V; v += kTile) {
      __syncthreads();
      load_reads(first_reader, v);
      load_state(kStates, p.states, v);
      if (V <= kTile) load_rows(kWrites, p.u, true, space.head, v, V);
      if (first_reader == 0 && (Gated || V <= kTile)) load_state(kGradients, p.gradients, v);
      commit_copies();
      if constexpr (Gated) {
        if (first_reader + v == 0) sum_gates();
      }
      wait_copies<0>();
      finish_states(first_reader, both);
      __syncthreads();
      if (from >= rows()) continue;
#pragma unroll 1
      for (int c = 0; c < kTile && v + c < V; c += kBlock) {
        SplitBlock a;
        a.load(tile(kReads + team), from, c);
        add_product(sums, a, tile(kStates), c, 0, D - col);
      }
    }
    if constexpr (Gated) {
      if (first_reader > 0) return;
#pragma unroll
      for (int other = 1; other < 32; other *= 2) both += __shfl_xor_sync(~0u, both, other);
      if (lane() == 0) gates.parts[thread / 32] = both;
    }
  }

  // f(c) for every sixteen columns, c..c+15 of a tile, of V, of which load(v) brings what is needed beside u,
  // unless it is there. Sums over V follow each other so that registers do not have to hold all at a time.
  template <class Load, class F>
  __device__ void each_tile(const Load& load, const F& f) const {
#pragma unroll 1
    for (int v = 0; v < V; v += kTile) {
      if (V > kTile) {
        __syncthreads();
        load(v);
        load_rows(kWrites, p.u, true, space.head, v, V);
        commit_copies();
        wait_copies<0>();
        __syncthreads();
      }
#pragma unroll 1
      for (int c = 0; c < kTile && v + c < V; c += kBlock) f(c);
    }
  }

  // E * A in place of the warp's rows do or du, and e^L F.
  __device__ void weigh(const Sums<8>& scores, Sums<8>& sums) const {
    const float factor = steps() ? -1.f : shape.scale;
    const int reads = blocks();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = from + lane_row() + 8 * i;
      const int seen = steps() ? row : (row + 1) * n;           // rows that it reads
      const int at = steps() || seen > kTile ? row : seen - 1;  // the last token's E of the tile's row
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
          weight.at[e] = kBlock * m + lane_four() + e < seen ? by * weight.at[e] : 0.f;
        }
        put(tile(kReads + team), from + 8 * i, kBlock * m, weight);
      }
    }
    float2 by = {factor, factor};
    if constexpr (Gated) {
      by.x *= gates.through[token_of(from + lane_row())];
      by.y *= gates.through[token_of(from + lane_row() + 8)];
    }
    scale_rows(sums, by);
  }

  // The readers' own rows, and once the keys.
  __device__ void load_keys(int first_reader) const {
    if (first_reader == 0) {
      load_rows(kKeys, p.k, true, space.head, col, D);
      load_rows(kReaderRows, p.b, true, space.head, col, D);
    } else {
      load_rows(kReaderRows, p.q, false, head_of(first_reader), col, D);
    }
    if (first_reader + 1 < readers())
      load_rows(kReaderRows + 1, p.q, false, head_of(first_reader + 1), col, D);
    commit_copies();
  }

  __device__ void store_reader(const Sums<8>& sums) const {
    float* const data =
        steps() ? rows_at(p.db, true, space.head, col) : rows_at(p.dq, false, head_of(reader), col);
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
  __device__ void sum_columns(Sums<4>& dk, int first_reader) const {
#pragma unroll 1
    for (int i = 0; i < 2 && first_reader + i < readers(); ++i) {
      const bool of_steps = first_reader + i == 0;
      // From the first that reads one of the warp's rows on.
#pragma unroll 1
      for (int b = of_steps ? block : space.token[from] / kBlock; kBlock * b < rows_of(of_steps); ++b) {
        SplitBlock a;
        load_transposed(a, tile(kReads + i), kBlock * b, from);
        add_product(dk, a, tile(kReaderRows + i), kBlock * b, kHalf * team);
      }
    }
  }

  // f(pack, its place) for the warp's part of dk.
  template <class F>
  __device__ void each_key(const F& f) const {
    const int at = col + kHalf * team + lane_four();
    float* const data = rows_at(p.dk, true, space.head, at);
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

}  // namespace girih::kernels::delta_product::by_piece
