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
constexpr int64_t kStepMaxSharedFloats = 8192;

// The thread's packs of a memory with `packs` packs a row, counted from pack `first`: one column of packs, in
// every thread_rows-th row from row thread_row.
struct StepThreadPacks {
  int row_packs;    // packs of a row that the threads cover at once
  int thread_rows;  // rows that the threads cover at once
  int thread_row, pack;

  __device__ StepThreadPacks(int packs, int first)
      : row_packs(min(packs - first, kStepThreads)),
        thread_rows(kStepThreads / row_packs),
        thread_row(static_cast<int>(threadIdx.x) / row_packs),
        pack(first + static_cast<int>(threadIdx.x) % row_packs) {}
  __device__ bool is_active() const { return thread_row < thread_rows; }
};

// The block's memory H [rows, cols]; cols is a multiple of Pack. `InShared`: the constructor starts the copy
// to shared memory. A thread copies the packs that it updates, so it waits for its own copies only and needs
// no barrier.
template <int Pack_, bool InShared>
struct StepMemory {
  float* H;
  int64_t row_stride, col_stride;
  int rows, cols;
  float* shared_copy;  // rows * cols floats, aligned to 16 bytes
  bool is_read_again;  // further queries read the memory too

  __device__ StepMemory(const OutputTensor<4>& state, int64_t n, int head, int rows, int cols,
                        float* shared_copy, bool is_read_again)
      : H(static_cast<float*>(state.data) + offset_of(state, n, head)),
        row_stride(state.stride[2]),
        col_stride(state.stride[3]),
        rows(rows),
        cols(cols),
        shared_copy(shared_copy),
        is_read_again(is_read_again) {
    if constexpr (InShared) {
      static_assert(Pack_ == 4, "copies of 16 bytes");
      for (int first = 0; first < cols / Pack_; first += kStepThreads) {
        const StepThreadPacks packs_of_thread(cols / Pack_, first);
        const int c = packs_of_thread.pack * Pack_;
        for (int r = packs_of_thread.thread_row; packs_of_thread.is_active() && r < rows;
             r += packs_of_thread.thread_rows) {
          copy_async(shared_address(shared_copy_at(r, c)), at(r, c), true);
        }
      }
      commit_copies();
    }
  }

  __device__ Pack<Pack_> load_pack(int r, int c) const {
    return load<Pack_>(InShared ? shared_copy_at(r, c) : at(r, c));
  }
  __device__ void store_pack(int r, int c, const Pack<Pack_>& h) const {
    store<Pack_>(at(r, c), h);
    if constexpr (InShared) {
      if (is_read_again) store<Pack_>(shared_copy_at(r, c), h);
    }
  }

 private:
  __device__ float* at(int r, int c) const { return H + r * row_stride + c * col_stride; }
  __device__ float* shared_copy_at(int r, int c) const { return shared_copy + r * cols + c; }
};

// The dimension of the decay: one element for each row or for each column.
enum class DecayAxis { rows, columns };

// If `update`, H[r, c] <- decay[r or c] H[r, c] + row[r] col[c]. Then calls out(c, sum over r of read[r] *
// H[r, c]) for every column. Called by all threads of the block. col, and decay for columns, are aligned to a
// pack. partials: kStepThreads * Pack floats of scratch.
template <DecayAxis Axis, int Pack_, bool InShared, class Result>
__device__ inline void update_and_read(const StepMemory<Pack_, InShared>& H, bool update, const float* decay,
                                       const float* row, const float* col, const float* read, float* partials,
                                       const Result& out) {
  const int packs = H.cols / Pack_;
  for (int first = 0; first < packs; first += kStepThreads) {
    const StepThreadPacks packs_of_thread(packs, first);
    Pack<Pack_> sum = zeros<Pack_>();
    if (packs_of_thread.is_active()) {
      const int c = packs_of_thread.pack * Pack_;
      const Pack<Pack_> column_values = load<Pack_>(col + c);
      Pack<Pack_> column_decay = zeros<Pack_>();
      if (Axis == DecayAxis::columns) column_decay = load<Pack_>(decay + c);
      // Four rows are loaded before the first is stored: the compiler cannot know that a store does not alias
      // a later load.
      constexpr int kRowsInFlight = 4;
      for (int first_row = packs_of_thread.thread_row; first_row < H.rows;
           first_row += kRowsInFlight * packs_of_thread.thread_rows) {
        Pack<Pack_> h[kRowsInFlight];
        const auto row_at = [&](int j) { return first_row + j * packs_of_thread.thread_rows; };
#pragma unroll
        for (int j = 0; j < kRowsInFlight; ++j) {
          if (row_at(j) < H.rows) h[j] = H.load_pack(row_at(j), c);
        }
#pragma unroll
        for (int j = 0; j < kRowsInFlight; ++j) {
          const int r = row_at(j);
          if (r >= H.rows) break;
          if (update) {
#pragma unroll
            for (int i = 0; i < Pack_; ++i) {
              const float by = Axis == DecayAxis::columns ? column_decay.at[i] : decay[r];
              h[j].at[i] = fmaf(h[j].at[i], by, row[r] * column_values.at[i]);
            }
            H.store_pack(r, c, h[j]);
          }
#pragma unroll
          for (int i = 0; i < Pack_; ++i) sum.at[i] = fmaf(read[r], h[j].at[i], sum.at[i]);
        }
      }
    }
    store(partials + threadIdx.x * Pack_, sum);
    __syncthreads();
    for (int i = threadIdx.x; i < packs_of_thread.row_packs * Pack_; i += kStepThreads) {
      float total = 0.f;
      for (int t = 0; t < packs_of_thread.thread_rows; ++t)
        total += partials[t * packs_of_thread.row_packs * Pack_ + i];
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
