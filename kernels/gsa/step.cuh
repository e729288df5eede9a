// The update and the read of a memory in a decoding step of gsa and gla. The memory is read and written once.
// If a memory head has several query heads and the memory is too large for shared memory, each further query
// head reads it once more.
//
// A block has one sequence and one memory head. The threads cover the rows of the memory in several
// iterations; each thread has `Pack` neighbouring columns. The sums over rows are added through shared memory
// in a fixed order.
#pragma once

#include "gsa/gsa.h"
#include "tile/launch.h"
#include "tile/pack.h"
#include "tile/shared.h"

namespace girih::kernels {

constexpr int kStepThreads = 128;

// Up to this many floats, the memories of a block are copied to shared memory. Six blocks of a multiprocessor
// with 228 KB, or two with 100 KB, then have all their loads in flight at once, if the vectors of the token
// are small beside the memories. With larger memories a thread has many iterations, whose loads keep the
// memory system busy. (128 sequences of 16 heads, 64 x 64, on an H200: gla 22.0 us instead of 25.0, gsa with
// its two memories 41.5 us instead of 43.2.)
constexpr int64_t kStepHeld = 8192;

// The thread's packs of a memory with `packs` packs a row, counted from pack `first`: one column of packs, in
// every `turns`th row from row `turn`.
struct StepShare {
  int wide, turns, turn, pack;

  __device__ StepShare(int packs, int first)
      : wide(min(packs - first, kStepThreads)),
        turns(kStepThreads / wide),
        turn(static_cast<int>(threadIdx.x) / wide),
        pack(first + static_cast<int>(threadIdx.x) % wide) {}
  __device__ bool exists() const { return turn < turns; }
};

// The block's memory H [rows, cols]; cols is a multiple of Pack. `Held`: the constructor starts the copy to
// shared memory. A thread copies the packs that it updates, so it waits for its own copies only and needs no
// barrier.
template <int Pack_, bool Held>
struct StepMemory {
  float* H;
  int64_t row_stride, col_stride;
  int rows, cols;
  float* held;  // rows * cols floats, aligned to 16 bytes
  bool again;   // further queries read the memory too

  __device__ StepMemory(const Out<4>& state, int64_t n, int head, int rows, int cols, float* held, bool again)
      : H(static_cast<float*>(state.data) + offset_of(state, n, head)),
        row_stride(state.stride[2]),
        col_stride(state.stride[3]),
        rows(rows),
        cols(cols),
        held(held),
        again(again) {
    if constexpr (Held) {
      static_assert(Pack_ == 4, "copies of 16 bytes");
      for (int first = 0; first < cols / Pack_; first += kStepThreads) {
        const StepShare share(cols / Pack_, first);
        const int c = share.pack * Pack_;
        for (int r = share.turn; share.exists() && r < rows; r += share.turns) {
          copy_async(shared_address(held_at(r, c)), at(r, c), true);
        }
      }
      commit_copies();
    }
  }

  __device__ Pack<Pack_> get(int r, int c) const { return load<Pack_>(Held ? held_at(r, c) : at(r, c)); }
  __device__ void put(int r, int c, const Pack<Pack_>& h) const {
    store<Pack_>(at(r, c), h);
    if constexpr (Held) {
      if (again) store<Pack_>(held_at(r, c), h);
    }
  }

 private:
  __device__ float* at(int r, int c) const { return H + r * row_stride + c * col_stride; }
  __device__ float* held_at(int r, int c) const { return held + r * cols + c; }
};

// The dimension of the decay: one element for each row or for each column.
enum class Decays { rows, columns };

// If `update`, H[r, c] <- decay[r or c] H[r, c] + row[r] col[c]. Then calls out(c, sum over r of read[r] *
// H[r, c]) for every column. Called by all threads of the block. col, and decay for columns, are aligned to a
// pack. parts: kStepThreads * Pack floats of scratch.
template <Decays Of, int Pack_, bool Held, class Result>
__device__ inline void update_and_read(const StepMemory<Pack_, Held>& H, bool update, const float* decay,
                                       const float* row, const float* col, const float* read, float* parts,
                                       const Result& out) {
  const int packs = H.cols / Pack_;
  for (int first = 0; first < packs; first += kStepThreads) {
    const StepShare share(packs, first);
    Pack<Pack_> sum = zeros<Pack_>();
    if (share.exists()) {
      const int c = share.pack * Pack_;
      const Pack<Pack_> of_col = load<Pack_>(col + c);
      Pack<Pack_> by_col = zeros<Pack_>();
      if (Of == Decays::columns) by_col = load<Pack_>(decay + c);
      // Four rows are loaded before the first is stored: the compiler cannot know that a store does not alias
      // a later load.
      constexpr int kAtOnce = 4;
      for (int first_row = share.turn; first_row < H.rows; first_row += kAtOnce * share.turns) {
        Pack<Pack_> h[kAtOnce];
        const auto row_at = [&](int j) { return first_row + j * share.turns; };
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (row_at(j) < H.rows) h[j] = H.get(row_at(j), c);
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int r = row_at(j);
          if (r >= H.rows) break;
          if (update) {
#pragma unroll
            for (int i = 0; i < Pack_; ++i) {
              const float by = Of == Decays::columns ? by_col.at[i] : decay[r];
              h[j].at[i] = fmaf(h[j].at[i], by, row[r] * of_col.at[i]);
            }
            H.put(r, c, h[j]);
          }
#pragma unroll
          for (int i = 0; i < Pack_; ++i) sum.at[i] = fmaf(read[r], h[j].at[i], sum.at[i]);
        }
      }
    }
    store(parts + threadIdx.x * Pack_, sum);
    __syncthreads();
    for (int i = threadIdx.x; i < share.wide * Pack_; i += kStepThreads) {
      float total = 0.f;
      for (int t = 0; t < share.turns; ++t) total += parts[t * share.wide * Pack_ + i];
      out(first * Pack_ + i, total);
    }
    __syncthreads();
  }
}

// Launches one block for each sequence and memory head, with `floats` floats of shared memory.
template <auto Kernel, class Problem>
cudaError_t launch_step(const Problem& p, int64_t floats, cudaStream_t stream) {
  const int64_t blocks = p.sequences * p.heads;
  if (blocks == 0) return cudaSuccess;  // for any sizes
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  if (floats > limit / static_cast<int64_t>(sizeof(float))) return cudaErrorInvalidValue;
  const int bytes = static_cast<int>(floats * sizeof(float));
  return launch_kernel<Kernel>(p, blocks, kStepThreads, bytes, stream, limit);
}

}  // namespace girih::kernels
