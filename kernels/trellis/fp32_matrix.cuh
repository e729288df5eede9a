// A matrix in the registers of a block, its rank-one updates and its products with vectors, and the rows of
// tokens in shared memory that these use (fp32_kernels.h).
//
// A warp has whole rows. A lane has four neighbouring columns of every 4 * kLanesPerRow, so a sum over a row
// stays in a warp. More than half of a 256 x 256 matrix is in shared memory, because it exceeds the registers
// of a multiprocessor.
#pragma once

#include "tile/grid.h"
#include "tile/instance.h"
#include "tile/launch.h"
#include "tile/matrix.h"
#include "tile/pack.h"
#include "trellis/fp32_kernels.h"

namespace girih::kernels::trellis {

template <int Tile_>
struct Fp32Sizes {
  static constexpr int Tile = Tile_;                                // rows and columns, including padding
  static constexpr int kLanesPerRow = Tile >= 128 ? 32 : Tile / 4;  // lanes that share a row
  static constexpr int kPacks = Tile / (4 * kLanesPerRow);  // packs of four columns in a row of a lane
  static constexpr int kRows = Tile == 64 ? 4 : Tile / 8;   // rows of a lane
  static constexpr int kWarps = Tile / (kRows * 32 / kLanesPerRow);  // warps of a block
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocks = Tile == 64 ? 2 : 1;               // blocks of a multiprocessor
  static constexpr int kRegisterPacks = Tile == 256 ? 28 : kRows;  // packs of a lane in registers
  // floats of the packs in shared memory
  static constexpr int kShared = (kPacks * kRows - kRegisterPacks) * 4 * kThreads;
  // maximum of tokens in shared memory
  static constexpr int kMaxWindow = 32;
};

__device__ inline float sum_over_warp(float x) {
#pragma unroll
  for (int other = 1; other < 32; other *= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

// Sums each of x[0..Count-1] over 2 * Mask lanes. In each step a lane sends half of its values to another
// lane. In the end it has one sum, in x[0], and the index of that sum is added to `row`.
template <int Count, int Mask, int N>
__device__ inline void reduce_scatter(float (&x)[N], int& row) {
  if constexpr (Mask > 0) {
    if constexpr (Count > 1) {
      const bool upper = lane() & Mask;
#pragma unroll
      for (int i = 0; i < Count / 2; ++i) {
        const float got = __shfl_xor_sync(~0u, upper ? x[i] : x[i + Count / 2], Mask);
        x[i] = (upper ? x[i + Count / 2] : x[i]) + got;
      }
      row += upper ? Count / 2 : 0;
      reduce_scatter<Count / 2, Mask / 2>(x, row);
    } else {
      x[0] += __shfl_xor_sync(~0u, x[0], Mask);
      reduce_scatter<1, Mask / 2>(x, row);
    }
  }
}

template <class Sizes>
struct Fp32Matrix {
  static constexpr int kRows = Sizes::kRows, kPacks = Sizes::kPacks, kRegisterPacks = Sizes::kRegisterPacks;
  Pack<4> at[kRegisterPacks];  // leading packs of the lane
  float* shared_packs;         // the other packs, [kPacks * kRows - kRegisterPacks][kThreads]
  int row, col;                // of the lane's pack 0

  __device__ explicit Fp32Matrix(float* shared)
      : shared_packs(shared + threadIdx.x * 4),
        row((warp_index() * (32 / Sizes::kLanesPerRow) + lane() / Sizes::kLanesPerRow) * kRows),
        col(4 * (lane() % Sizes::kLanesPerRow)) {}

  // Calls f(pack, row of the lane, four elements), which may modify the elements. Processes a few packs at a
  // time and rotates the register array: an unrolled loop over a large matrix needs too many registers.
  template <class F>
  __device__ void each(const F& f) {
    constexpr int kPacksAtOnce = kPacks > 1 ? 2 : 4;
#pragma unroll 1
    for (int first = 0; first < kRegisterPacks; first += kPacksAtOnce) {
      Pack<4> turn[kPacksAtOnce];
#pragma unroll
      for (int e = 0; e < kPacksAtOnce; ++e) f(0, first + e, turn[e] = at[e]);
#pragma unroll
      for (int e = 0; e + kPacksAtOnce < kRegisterPacks; ++e) at[e] = at[e + kPacksAtOnce];
#pragma unroll
      for (int e = 0; e < kPacksAtOnce; ++e) at[kRegisterPacks - kPacksAtOnce + e] = turn[e];
    }
#pragma unroll 1
    for (int i = kRegisterPacks; i < kPacks * kRows; ++i) {
      Pack<4> x = load<4>(shared_pack(i));
      f(i / kRows, i % kRows, x);
      store<4>(shared_pack(i), x);
    }
  }
  __device__ int column(int p) const { return col + 4 * Sizes::kLanesPerRow * p; }

  __device__ void clear() {
    each([](int, int, Pack<4>& x) { x = zeros<4>(); });
  }
  __device__ void scale(float factor) {
    each([&](int, int, Pack<4>& x) {
#pragma unroll
      for (int c = 0; c < 4; ++c) x.at[c] *= factor;
    });
  }

  // x <- decay x + r c^T, for vectors in shared memory.
  __device__ __forceinline__ void add(float decay, const float* r, const float* c) {
    Pack<4> cols[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) cols[p] = load<4>(c + column(p));
#pragma unroll
    for (int first = 0; first < kRows; first += 4) {
      const Pack<4> rows = load<4>(r + row + first);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = p * kRows + first + e;
          if (i < kRegisterPacks) {
            add(at[i < kRegisterPacks ? i : 0], decay, rows.at[e], cols[p]);
          } else {
            Pack<4> x = load<4>(shared_pack(i));
            add(x, decay, rows.at[e], cols[p]);
            store<4>(shared_pack(i), x);
          }
        }
      }
      if (kPacks > 1) fence_compiler();
    }
  }

  // to[row] = row.c, for vectors in shared memory. Processes kAtOnce rows at a time.
  __device__ __forceinline__ void multiply(const float* c, float* to) const {
    constexpr int kAtOnce = kPacks > 1 ? 8 : kRows;
#pragma unroll
    for (int first = 0; first < kRows; first += kAtOnce) {
      float sums[kAtOnce];
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Pack<4> cols = load<4>(c + column(p));
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e) {
          const int i = p * kRows + first + e;
          const float sum =
              dot(i < kRegisterPacks ? at[i < kRegisterPacks ? i : 0] : load<4>(shared_pack(i)), cols);
          sums[e] = p == 0 ? sum : sums[e] + sum;
          if (kPacks > 1 && e % 4 == 3) fence_compiler();
        }
      }
      int mine = row + first;
      reduce_scatter<kAtOnce, Sizes::kLanesPerRow / 2>(sums, mine);
      if (lane() % (Sizes::kLanesPerRow / kAtOnce) == 0) to[mine] = sums[0];
    }
  }

 private:
  __device__ float* shared_pack(int i) const {
    return shared_packs + (i - kRegisterPacks) * 4 * Sizes::kThreads;
  }
  // Stops the compiler from starting later loads early, which needs too many registers.
  __device__ static void fence_compiler() { ptx::fence_compiler(); }
  __device__ static void add(Pack<4>& x, float decay, float r, const Pack<4>& c) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x.at[i] = fmaf(r, c.at[i], decay * x.at[i]);
  }
  __device__ static float dot(const Pack<4>& x, const Pack<4>& c) {
    float sum = x.at[0] * c.at[0];
#pragma unroll
    for (int i = 1; i < 4; ++i) sum = fmaf(x.at[i], c.at[i], sum);
    return sum;
  }
};

// ---- memories ---------------------------------------------------------------------------------------------

// The functions below use matrices whose rows are slots, and a caller's state [M, X] in fp32 with any
// strides. An absent state is zero, and is not stored.
template <class Sizes, class F>
__device__ inline void for_each_element(Fp32Matrix<Sizes>& A, const TrellisFp32Shape& shape, int memory,
                                        const F& f) {
  const int width = shape.width(memory);
  A.each([&](int p, int e, Pack<4>& x) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int m = A.row + e, col = A.column(p) + c;
      f(x.at[c], m, col, m < shape.M && col < width);
    }
  });
}
template <class Sizes>
__device__ inline void load_state(Fp32Matrix<Sizes>& A, const InputTensor<4>& from,
                                  const TrellisFp32Shape& shape, int memory, int64_t n, int head) {
  const float* const data = static_cast<const float*>(from.data);
  for_each_element(A, shape, memory, [&](float& x, int m, int col, bool exists) {
    x = exists && data != nullptr ? data[offset_of(from, n, head, m, col)] : 0.f;
  });
}
template <class Sizes>
__device__ inline void add_state(Fp32Matrix<Sizes>& A, const InputTensor<4>& from,
                                 const TrellisFp32Shape& shape, int memory, int64_t n, int head) {
  const float* const data = static_cast<const float*>(from.data);
  if (data == nullptr) return;
  for_each_element(A, shape, memory, [&](float& x, int m, int col, bool exists) {
    if (exists) x += data[offset_of(from, n, head, m, col)];
  });
}
template <class Sizes>
__device__ inline void store_state(const OutputTensor<4>& to, Fp32Matrix<Sizes>& A,
                                   const TrellisFp32Shape& shape, int memory, int64_t n, int head) {
  float* const data = static_cast<float*>(to.data);
  if (data == nullptr) return;
  for_each_element(A, shape, memory, [&](float& x, int m, int col, bool exists) {
    if (exists) data[offset_of(to, n, head, m, col)] = x;
  });
}

// Offset of a segment's state [X, M], both padded.
__device__ inline int64_t segment_state_offset(const TrellisFp32Shape& shape, int memory, int64_t number,
                                               int head) {
  return (number * shape.heads + head) * trellis_fp32_padded_width(shape.width(memory)) *
         int64_t{trellis_fp32_padded_width(shape.M)};
}
// Stores a matrix whose rows are slots as a segment's state.
template <class Sizes>
__device__ inline void store_segment_state(float* states, Fp32Matrix<Sizes>& A, const TrellisFp32Shape& shape,
                                           int memory, int64_t number, int head) {
  const int columns = trellis_fp32_padded_width(shape.width(memory)),
            slots = trellis_fp32_padded_width(shape.M);
  float* const to = states + segment_state_offset(shape, memory, number, head);
  A.each([&](int p, int e, Pack<4>& x) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int m = A.row + e, col = A.column(p) + c;
      if (m < slots && col < columns) to[int64_t{col} * slots + m] = x.at[c];
    }
  });
}
// Calls f(elements, whether they exist, offset in a segment's state) for the packs of a matrix whose columns
// are slots.
template <class Sizes, class F>
__device__ inline void for_each_stored_pack(Fp32Matrix<Sizes>& A, const TrellisFp32Shape& shape, int memory,
                                            const F& f) {
  const int columns = trellis_fp32_padded_width(shape.width(memory)),
            slots = trellis_fp32_padded_width(shape.M);
  A.each([&](int p, int e, Pack<4>& x) {
    const int m = A.column(p), col = A.row + e;
    f(x, m < slots && col < columns, int64_t{col} * slots + m);
  });
}

// ---- rows of tokens ---------------------------------------------------------------------------------------

// Loads rows of Sizes::Tile floats to shared memory, for `count` tokens from `token` on; zeros from `width`
// on.
template <class Sizes>
__device__ inline void load_rows(float* to, const InputTensor<4>& x, int64_t batch, int64_t token, int count,
                                 int head, int width) {
  constexpr int kAtOnce = 4, kStep = Sizes::kThreads;
  if (x.data == nullptr) return;
  const int64_t from = offset_of(x, batch, token, head);
  dispatch_storage(x.dtype, [&](auto zero) {
    for (int begin = threadIdx.x; begin < count * Sizes::Tile; begin += kAtOnce * kStep) {
      RawElement raw[kAtOnce];
#pragma unroll
      for (int b = 0; b < kAtOnce; ++b) {
        const int u = (begin + b * kStep) / Sizes::Tile, c = (begin + b * kStep) % Sizes::Tile;
        if (u < count && c < width) {
          raw[b] = load_raw<decltype(zero)>(x.data, from + u * x.stride[1] + c * x.stride[3]);
        }
      }
#pragma unroll
      for (int b = 0; b < kAtOnce; ++b) {
        const int i = begin + b * kStep;
        if (i < count * Sizes::Tile) to[i] = decode_element(raw[b], x.dtype);
      }
    }
  });
}
// Loads a scalar of each token, and applies f.
template <class Sizes, class F>
__device__ inline void load_scalars(float* to, const InputTensor<3>& x, int64_t batch, int64_t token,
                                    int count, int head, const F& f) {
  for (int u = threadIdx.x; u < count; u += Sizes::kThreads) {
    to[u] = f(x.data == nullptr ? 0.f : load_element(x, batch, token + u, head));
  }
}

// The tokens whose rows are in shared memory.
template <class Token>
struct TokenWindow {
  Token first = 0;
  int count = 0;

  __device__ bool has(Token from, Token to) const { return from >= first && to <= first + count; }
  // Calls load_rows(first token, count) unless all tokens of from..to-1 are loaded; returns whether it did.
  // Called by all threads. A barrier before the loads protects other threads' reads of the old rows.
  template <class LoadRows>
  __device__ bool load_window(Token from, Token to, const LoadRows& load_rows) {
    if (has(from, to)) return false;
    first = from, count = static_cast<int>(to - from);
    __syncthreads();
    load_rows(from, count);
    __syncthreads();
    return true;
  }
  __device__ int row_of_token(Token token) const { return static_cast<int>(token - first); }
};

// The sequence, head and memory of a block.
struct Fp32BlockCoord {
  ChunkedSequence chunked;
  int head, memory;
  bool resumed;  // the call has positions, so A' of the first chunk is an argument

  __device__ Fp32BlockCoord(const TrellisFp32Shape& shape, int64_t block)
      : chunked(chunked_sequence(shape.grid, block / shape.memories / shape.heads)),
        head(static_cast<int>(block / shape.memories % shape.heads)),
        memory(static_cast<int>(block % shape.memories)),
        resumed(shape.grid.position != nullptr) {}

  __device__ int64_t batch() const { return chunked.sequence.batch; }
  __device__ int64_t index() const { return chunked.sequence.index; }
  __device__ int64_t start() const { return chunked.sequence.start; }
  __device__ int64_t length() const { return chunked.sequence.end - chunked.sequence.start; }
};
// Index in [memories, B, T, heads].
__device__ inline int64_t token_index(const SequenceLayout& all, int heads, int memory, int64_t batch,
                                      int64_t token, int head) {
  return ((memory * all.batch + batch) * all.tokens + token) * heads + head;
}

// Calls launch(Sizes) with the smallest size that holds the widths.
template <class Launch>
inline cudaError_t dispatch_fp32_size(const TrellisFp32Shape& shape, const Launch& launch) {
  const int memory = shape.D > shape.V ? shape.D : shape.V, widest = memory > shape.M ? memory : shape.M;
  return dispatch_width<64, 128, kTrellisFp32MaxWidth>(
      widest, [&](auto width) { return launch(Fp32Sizes<width()>()); });
}

constexpr int kSumFloats = 6;  // floats of shared memory for the sums of a warp
// Tokens whose rows fit in shared memory, with `arrays` rows for each token.
template <class Sizes>
inline int window_tokens(int limit, int arrays) {
  constexpr int kNumbers = 4;  // scalars of a token
  const int left = limit / 4 - Sizes::kShared - kSumFloats * Sizes::kWarps,
            each = arrays * Sizes::Tile + kNumbers;
  const int window_size = left < 0 ? 0 : left / each;
  return window_size < Sizes::kMaxWindow ? window_size : Sizes::kMaxWindow;
}
template <class Sizes>
inline int window_bytes(int window_size, int arrays) {
  return 4 * (Sizes::kShared + kSumFloats * Sizes::kWarps + window_size * (arrays * Sizes::Tile + 4));
}

// Rows in shared memory for each token, by kernel.
inline int scan_arrays() { return 3; }
inline int reverse_arrays(const TrellisFp32Shape& shape) { return 4 + 2 * (shape.query_heads / shape.heads); }
inline int dkv_arrays(const TrellisFp32Shape& shape) { return 4 + 2 * (shape.query_heads / shape.heads); }

template <auto Kernel, class Sizes, class Problem>
cudaError_t launch_fp32(const Problem& p, int64_t blocks, int arrays, cudaStream_t stream) {
  if (blocks == 0) return cudaSuccess;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  const int window_size = window_tokens<Sizes>(limit, arrays);
  if (window_size == 0) return cudaErrorInvalidValue;
  if (const cudaError_t error = allow_shared<Kernel>(limit); error != cudaSuccess) return error;
  return launch_grid<Kernel>(blocks, Sizes::kThreads, window_bytes<Sizes>(window_size, arrays), stream, p,
                             window_size);
}

}  // namespace girih::kernels::trellis
