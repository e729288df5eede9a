// A memory [D, M] in the registers of a block's warps, sums over it, and the update by one token (fp32.h).
//
// A warp has 16 columns; a lane has 4 of these and 4 of every 32 rows. Sums over rows stay in a warp; sums
// over columns pass through shared memory. Helper warps load the rows of the next tile of tokens to shared
// memory and store the results of the previous tile, so that conversions, strides and global memory are not
// on the critical path from token to token.
#pragma once

#include "lattice/fp32.h"
#include "lattice/tokens.cuh"
#include "tile/launch.h"
#include "tile/pack.h"
#include "tile/shared.h"

namespace girih::kernels::lattice {

template <int D_, int M_>
struct Fp32Sizes {
  static constexpr int D = D_, M = M_;   // including padding
  static constexpr int kPacks = D / 32;  // packs of 4 rows of a lane
  static constexpr int kWarps = M / 16;  // warps that hold the memory
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kHelpers = M == 64 ? 64 : 128;  // threads; setmaxnreg works on 4 warps
  static constexpr int kAll = kThreads + kHelpers;
  static constexpr int kMemory = D * M;
};

// Elements of a memory that a thread holds: rows 32 j + row + (0..3), columns col + (0..3).
struct ThreadTile {
  int thread, warp, lane, row, col;
  bool first;  // lane 0 of the 8 lanes with the same columns

  __device__ ThreadTile()
      : thread(threadIdx.x),
        warp(thread / 32),
        lane(thread % 32),
        row(4 * (lane % 8)),
        col(16 * warp + 4 * (lane / 8)),
        first(lane % 8 == 0) {}
};

template <class Sizes>
struct RegisterMemory {
  Pack<4> at[Sizes::kPacks][4];  // [j][row], of 4 columns
};
template <class Sizes>
struct RowPacks {
  Pack<4> at[Sizes::kPacks];

  __device__ static RowPacks from(const float* x) {
    const ThreadTile place;
    RowPacks rows;
#pragma unroll
    for (int j = 0; j < Sizes::kPacks; ++j) rows.at[j] = load<4>(x + 32 * j + place.row);
    return rows;
  }
};

// Calls f(j, e) for every row: pack j, row e of the pack.
template <class Sizes, class F>
__device__ inline void each_row(const F& f) {
#pragma unroll
  for (int j = 0; j < Sizes::kPacks; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) f(j, e);
  }
}
template <class F>
__device__ inline void each_col(const F& f) {
#pragma unroll
  for (int c = 0; c < 4; ++c) f(c);
}
// Calls f(j, e, c) for every element.
template <class Sizes, class F>
__device__ inline void each_entry(const F& f) {
  each_row<Sizes>([&](int j, int e) { each_col([&](int c) { f(j, e, c); }); });
}

// Sums each column over all rows; every lane gets the sums of its columns.
__device__ inline void sum_rows(Pack<4>& x) {
#pragma unroll
  for (int other = 1; other < 8; other *= 2) {
    each_col([&](int c) { x.at[c] += __shfl_xor_sync(~0u, x.at[c], other); });
  }
}
__device__ inline float sum_lanes(float x) {
#pragma unroll
  for (int other = 1; other < 32; other *= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

// to[row] = the sum over the warp's columns. In each of two steps a lane sends half of its rows to another
// lane.
template <class Sizes>
__device__ inline void store_row_sums(const RowPacks<Sizes>& x, float* to) {
  const ThreadTile place;
  constexpr int kAll = 4 * Sizes::kPacks, kHalf = kAll / 2, kLeft = kAll / 4;
  const bool upper = place.lane & 8, second = place.lane & 16;
  float half[kHalf];
  Pack<kLeft> left;
  const auto row = [&](int i) { return x.at[i / 4].at[i % 4]; };
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float got = __shfl_xor_sync(~0u, upper ? row(i) : row(i + kHalf), 8);
    half[i] = (upper ? row(i + kHalf) : row(i)) + got;
  }
#pragma unroll
  for (int i = 0; i < kLeft; ++i) {
    const float got = __shfl_xor_sync(~0u, second ? half[i] : half[i + kLeft], 16);
    left.at[i] = (second ? half[i + kLeft] : half[i]) + got;
  }
  const int from = (upper ? kHalf : 0) + (second ? kLeft : 0);
  store<kLeft>(to + from / 4 * 32 + place.row + from % 4, left);
}
// Adds the sums of all warps; `of` is [warps, D].
template <class Sizes>
__device__ inline RowPacks<Sizes> sum_over_warps(const float* of) {
  auto sum = RowPacks<Sizes>::from(of);
#pragma unroll
  for (int w = 1; w < Sizes::kWarps; ++w) {
    const auto part = RowPacks<Sizes>::from(of + w * Sizes::D);
    each_row<Sizes>([&](int j, int e) { sum.at[j].at[e] += part.at[j].at[e]; });
  }
  return sum;
}
// A barrier of the warps that hold the memory.
template <class Sizes>
__device__ inline void memory_barrier() {
  named_barrier_sync(1, Sizes::kThreads);
}

// Executes as many barriers in the helper warps as the memory's warps for `tokens` tokens
// (kHasEqualBarrierCounts).
template <class Sizes>
__device__ inline void match_barriers(const LatticeFp32Shape& shape, int tokens) {
  const bool as_many = kHasEqualBarrierCounts && shape.objective == LatticeObjective::decode;
  for (int i = 0; as_many && i < tokens; ++i) named_barrier_sync(2, Sizes::kHelpers);
}

// A caller's memory [D, M], fp32 with any strides; absent: zeros.
template <class Sizes>
__device__ inline void load_memory(RegisterMemory<Sizes>& x, const InputTensor<4>& from, int64_t n, int head,
                                   const LatticeFp32Shape& shape) {
  const ThreadTile place;
  const float* const data = static_cast<const float*>(from.data);
  each_entry<Sizes>([&](int j, int e, int c) {
    const int d = 32 * j + place.row + e, m = place.col + c;
    const bool there = data != nullptr && d < shape.D && m < shape.M;
    x.at[j][e].at[c] = there ? data[offset_of(from, n, head, d, m)] : 0.f;
  });
}
template <class Sizes>
__device__ inline void store_memory(const OutputTensor<4>& to, const RegisterMemory<Sizes>& x, int64_t n,
                                    int head, const LatticeFp32Shape& shape) {
  const ThreadTile place;
  float* const data = static_cast<float*>(to.data);
  each_entry<Sizes>([&](int j, int e, int c) {
    const int d = 32 * j + place.row + e, m = place.col + c;
    if (d < shape.D && m < shape.M) data[offset_of(to, n, head, d, m)] = x.at[j][e].at[c];
  });
}
// Calls f(j, row, offset) for the thread's packs of a stored memory.
template <class Sizes, class F>
__device__ inline void for_each_stored_pack(const LatticeFp32Shape& shape, int64_t number, int head,
                                            const F& f) {
  const ThreadTile place;
  const int columns = lattice_stored_columns(shape);
  const int64_t memory = (number * shape.heads + head) * shape.D * columns;
  each_row<Sizes>([&](int j, int e) {
    const int d = 32 * j + place.row + e;
    if (d < shape.D && place.col < columns) f(j, e, memory + d * columns + place.col);
  });
}

// A tile of tokens of one head, and the index of the helper thread.
template <class Sizes>
struct TokenTile {
  int64_t batch, first;
  int count, head, helper;

  // Loads rows to shared memory as fp32, `stride` floats apart. Zeros between `width` and `Room`, and for an
  // absent tensor.
  template <int Room>
  __device__ void load_rows(float* to, int stride, const InputTensor<4>& x, int of_head, int width) const {
    constexpr int kAtOnce = 8, kStep = Sizes::kHelpers;
    const int64_t from = offset_of(x, batch, first, of_head);
    dispatch_storage(x.dtype, [&](auto zero) {
      for (int begin = helper; begin < count * Room; begin += kAtOnce * kStep) {
        RawElement raw[kAtOnce];
#pragma unroll
        for (int b = 0; b < kAtOnce; ++b) {
          const int u = (begin + b * kStep) / Room, c = (begin + b * kStep) % Room;
          if (u < count && c < width && x.data != nullptr) {
            raw[b] = load_raw<decltype(zero)>(x.data, from + u * x.stride[1] + c * x.stride[3]);
          }
        }
#pragma unroll
        for (int b = 0; b < kAtOnce; ++b) {
          const int u = (begin + b * kStep) / Room, c = (begin + b * kStep) % Room;
          if (u < count) to[u * stride + c] = decode_element(raw[b], x.dtype);
        }
      }
    });
  }
  // Loads a scalar of each token.
  __device__ void load_rows(float* to, int stride, const InputTensor<3>& x) const {
    for (int u = helper; u < count; u += Sizes::kHelpers)
      to[u * stride] = x.data == nullptr ? 0.f : load_element(x, batch, first + u, head);
  }
  // Calls f(token of the tile, i) for i < size; `Room` is a bound of size known at compile time.
  template <int Room, class F>
  __device__ void each(int size, const F& f) const {
    for (int x = helper; x < count * Room; x += Sizes::kHelpers) {
      if (x % Room < size) f(x / Room, x % Room);
    }
  }
};

// A token's row in shared memory: k, v, gamma and g, in this order.
template <class Sizes>
struct TokenInputs {
  static constexpr int kFloats = Sizes::M + Sizes::D + 4;
  const float *k, *v;
  float gamma, g;

  __device__ explicit TokenInputs(const float* row)
      : k(row), v(row + Sizes::M), gamma(v[Sizes::D]), g(v[Sizes::D + 1]) {}

  __device__ static void load_rows(float* to, int stride, const LatticeFp32Inputs& of,
                                   const TokenTile<Sizes>& tile) {
    tile.template load_rows<Sizes::M>(to, stride, of.k, tile.head, of.shape.M);
    tile.template load_rows<Sizes::D>(to + Sizes::M, stride, of.v, tile.head, of.shape.D);
    tile.load_rows(to + Sizes::M + Sizes::D, stride, of.gamma);
    tile.load_rows(to + Sizes::M + Sizes::D + 1, stride, of.g);
  }
};

// The state within a chunk.
template <class Sizes>
struct ChunkState {
  RegisterMemory<Sizes> S, Delta;
  float L;  // sum of the chunk's gates so far
};

// Results of a token: h, a of the lane's columns, and 1 / |x| (1 without normalisation, 0 for a column of
// zeros). kept: m.
template <class Sizes>
struct TokenResults {
  RowPacks<Sizes> h;
  Pack<4> a, inverse;
  float memory_decay, threshold;
};

// An element of x.
template <class Sizes>
__device__ inline float updated_element(const ChunkState<Sizes>& state, const TokenResults<Sizes>& results,
                                        const LatticeFp32Shape& shape, int j, int e, int c) {
  const float x = fmaf(results.memory_decay, state.S.at[j][e].at[c], state.Delta.at[j][e].at[c]);
  if (shape.shrinkage == 0.f) return x;
  return x == 0.f ? 0.f : copysignf(fmaxf(fabsf(x) - results.threshold, 0.f), x);
}
// 1 / |x| with an error of one or two ulp, without the branches of a root and a division; 0 for 0.
__device__ inline float inverse_norm(float square) {
  const float y = rsqrtf(square);
  return square > 0.f ? y * fmaf(-0.5f * square * y, y, 1.5f) : 0.f;
}
// 1 / l from |s|^2.
__device__ inline Pack<4> unit_of(const Pack<4>& square, const LatticeFp32Shape& shape) {
  Pack<4> unit;
  each_col([&](int c) { unit.at[c] = shape.normalize ? 1.f : inverse_norm(square.at[c]); });
  return unit;
}

// Updates Delta by a token; S of the chunk does not change. `parts`: [2, warps, D]; `buffer_index`
// alternates between the two by token.
template <class Sizes>
__device__ inline TokenResults<Sizes> apply_token(ChunkState<Sizes>& state, const LatticeFp32Shape& shape,
                                                  const TokenInputs<Sizes>& token, float* parts,
                                                  int buffer_index) {
  const ThreadTile place;
  auto &S = state.S, &Delta = state.Delta;
  TokenResults<Sizes> results;
  const Pack<4> k = load<4>(token.k + place.col);
  Pack<4> square = zeros<4>();
  if (!shape.normalize) {
    each_entry<Sizes>(
        [&](int j, int e, int c) { square.at[c] = fmaf(S.at[j][e].at[c], S.at[j][e].at[c], square.at[c]); });
    sum_rows(square);
  }
  const Pack<4> unit = unit_of(square, shape);

  // decode: h = phi k - v, else h = v
  results.h = RowPacks<Sizes>::from(token.v);
  if (shape.objective == LatticeObjective::decode) {
    RowPacks<Sizes> read;
    each_row<Sizes>([&](int j, int e) {
      float sum = 0.f;
      each_col([&](int c) { sum = fmaf(S.at[j][e].at[c], k.at[c] * unit.at[c], sum); });
      read.at[j].at[e] = sum;
    });
    float* const mine = parts + buffer_index * Sizes::kWarps * Sizes::D;
    store_row_sums<Sizes>(read, mine + place.warp * Sizes::D);
    memory_barrier<Sizes>();
    read = sum_over_warps<Sizes>(mine);
    each_row<Sizes>([&](int j, int e) { results.h.at[j].at[e] = read.at[j].at[e] - results.h.at[j].at[e]; });
  }

  // a = phi^T h, W = step c / l
  Pack<4>& a = results.a;
  a = zeros<4>();
  each_entry<Sizes>(
      [&](int j, int e, int c) { a.at[c] = fmaf(results.h.at[j].at[e], S.at[j][e].at[c], a.at[c]); });
  sum_rows(a);
  const float step = sign_of(shape.objective) * token.gamma;
  Pack<4> W, along;
  each_col([&](int c) {
    a.at[c] *= unit.at[c];
    const float by = shape.objective == LatticeObjective::encode ? a.at[c] - k.at[c] : k.at[c];
    W.at[c] = step * by * unit.at[c];
    along.at[c] = a.at[c] * unit.at[c];
  });

  // Delta <- e^g Delta + (h - phi a) W, x = m S + Delta; |x|
  state.L += token.g;
  const float decay = expf(token.g);
  results.memory_decay = expf(fmaxf(state.L, -30.f)), results.threshold = shape.shrinkage * token.gamma;
  square = zeros<4>();
  each_entry<Sizes>([&](int j, int e, int c) {
    float& d = Delta.at[j][e].at[c];
    d = fmaf(W.at[c], fmaf(-S.at[j][e].at[c], along.at[c], results.h.at[j].at[e]), decay * d);
    const float x = updated_element(state, results, shape, j, e, c);
    square.at[c] = shape.normalize ? fmaf(x, x, square.at[c]) : square.at[c] + fabsf(x);
  });
  sum_rows(square);
  each_col([&](int c) {
    const float inverse = inverse_norm(square.at[c]);
    results.inverse.at[c] = shape.normalize || inverse == 0.f ? inverse : 1.f;
  });
  return results;
}

// An element of y.
template <class Sizes>
__device__ inline float element_of_y(const ChunkState<Sizes>& state, const TokenResults<Sizes>& results,
                                     const LatticeFp32Shape& shape, int j, int e, int c) {
  const float inverse = results.inverse.at[c];
  return inverse > 0.f ? updated_element(state, results, shape, j, e, c) * inverse : state.S.at[j][e].at[c];
}
// At the end of a chunk: S <- y, Delta <- 0. Later reads of y load S, so that y needs no registers beside S
// and Delta.
template <class Sizes>
__device__ inline void end_chunk(ChunkState<Sizes>& state, TokenResults<Sizes>& results,
                                 const LatticeFp32Shape& shape) {
  each_entry<Sizes>([&](int j, int e, int c) {
    state.S.at[j][e].at[c] = element_of_y(state, results, shape, j, e, c);
    state.Delta.at[j][e].at[c] = 0.f;
  });
  results.inverse = zeros<4>();
  state.L = 0.f;
}

// Sequence and head of a block, and its position.
struct Fp32SequenceCoord {
  ChunkedSequence of;  // cut into segments
  int head, begun;     // tokens of the chunk before this call
  bool resumed;        // positions exist and chunks have more than one token

  __device__ Fp32SequenceCoord(const LatticeFp32Inputs& in, int64_t item)
      : of(chunked_sequence(lattice_segment_grid(in.shape), item / in.shape.heads)),
        head(static_cast<int>(item % in.shape.heads)),
        begun(of.prior_tokens % in.shape.chunk),
        resumed(in.shape.position != nullptr && in.shape.chunk > 1) {}

  __device__ int64_t batch() const { return of.sequence.batch; }
  __device__ int64_t index() const { return of.sequence.index; }
  __device__ int64_t length() const { return of.sequence.end - of.sequence.start; }
};

// Calls launch(Sizes) with the smallest size that holds D and M.
template <class Launch>
inline cudaError_t dispatch_fp32_size(const LatticeFp32Shape& shape, const Launch& launch) {
  if (shape.D > kLatticeMaxWidth || shape.M > kLatticeMaxWidth || shape.chunk > kMaxChunk) {
    return cudaErrorInvalidValue;
  }
  if (shape.D <= 64) return shape.M <= 64 ? launch(Fp32Sizes<64, 64>()) : launch(Fp32Sizes<64, 128>());
  return shape.M <= 64 ? launch(Fp32Sizes<128, 64>()) : launch(Fp32Sizes<128, 128>());
}

// Tokens of a tile, such that two buffers fit in `floats`.
inline int tile_tokens(int64_t floats, int64_t a_token) {
  const int64_t tokens = floats / (2 * a_token);
  return static_cast<int>(tokens < 8 ? tokens : 8);
}

}  // namespace girih::kernels::lattice
