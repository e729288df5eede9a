// The load warps of the fp32 scan.
#pragma once

#include "delta_product/fp32_tiles.cuh"

namespace girih::kernels::delta_product::fp32_scan {

// The thread's packs of the sixteen rows of a tile.
template <int Width>
struct RowCopier {
  static constexpr int kPacks = Width / 4, kStep = 32 * kLoadWarps / kPacks;  // kStep: rows
  static_assert(kStep > 0 && kRows % kStep == 0);
  using Rows = RowTile<Width>;

  const float* from;  // first row of the sequence, at the thread's pack
  int64_t stride;
  int row, col;
  bool valid;

  // rows: rows of the array for a token.
  __device__ RowCopier(const InputTensor<4>& x, const HeadWork& work, int rows, int head, int cols,
                       int thread)
      : stride(x.stride[1]), row(thread / kPacks), col(thread % kPacks * 4), valid(col < cols) {
    from = at<float>(x, work.sequence.batch, work.sequence.start * rows, head, col);
  }
  __device__ uint32_t address(const Rows& to, int i) const {
    return shared_address(&to.at(0, col & ~15, i, col & 15));
  }
  // Starts the copies of rows first..first+rows-1, `offset` elements further.
  __device__ void start(const Rows& to, int64_t first, int rows, int64_t offset = 0) const {
    const float* x = from + (first + row) * stride + offset;
#pragma unroll
    for (int i = 0; i < kRows; i += kStep, x += kStep * stride) {
      copy_async(address(to, row + i), x, valid && row + i < rows);
    }
  }
  // Copies the row of a token to the row of the tile that ends the token.
  template <bool Reverse>
  __device__ void start_tokens(const Rows& to, const TileIterator<Reverse>& tile_iterator,
                               int64_t offset) const {
#pragma unroll 1
    for (int i = row; i < kRows; i += kStep) {
      copy_async(address(to, i),
                 from + (tile_iterator.token + tile_iterator.token_of_segment(i)) * stride + offset,
                 valid && i < tile_iterator.rows() && tile_iterator.ends_token(i));
    }
  }
};

// A tile has one visit for each query head of the memory. Each visit loads k and the q of one head, at the
// rows of the last steps of their tokens. Forward: the first visit also loads b and w. Reverse: every visit
// loads do, the last also b. Rows and columns that do not exist are zero.
template <int Width, bool Reverse>
__device__ inline void run_load_warps(const DeltaFp32Scan& p, const HeadWork& work,
                                      const TileStorage<Width>& storage, int first_block_col, int thread) {
  constexpr int kValuePacks = kBlockColumns / 4, kValueStep = 32 * kLoadWarps / kValuePacks;
  static_assert(kRows % kValueStep == 0);
  const DeltaFp32Shape& shape = p.shape;
  const int n = shape.n, query_head = work.head * work.group, D = round_up_to_4(shape.D);
  const RowCopier<Width> q(p.q, work, 1, query_head, D, thread), k(p.k, work, n, work.head, D, thread),
      b(p.b, work, n, work.head, D, thread);
  const int value_row = thread / kValuePacks, value_col = thread % kValuePacks * 4;
  const bool value_valid = first_block_col + value_col < round_up_to_4(shape.V);
  const float* const value = at<float>(p.value, work.sequence.batch, work.sequence.start * (Reverse ? 1 : n),
                                       Reverse ? query_head : work.head, first_block_col + value_col);
  const float* const gates = static_cast<const float*>(p.g.data) +
                             offset_of(p.g, work.sequence.batch, work.sequence.start, work.head);
  TileBarriers& barriers = storage.barriers();
  PipelineState pipe;
#pragma unroll 1
  for (TileIterator<Reverse> tile_iterator(shape, work); tile_iterator.has_tile(); tile_iterator.next()) {
    const int rows = tile_iterator.rows();
#pragma unroll 1
    for (int member = 0; member < work.group; ++member, pipe.next(storage.stages)) {
      const int stage = pipe.stage;
      const bool steps = member == (Reverse ? work.group - 1 : 0);
      barriers.empty.wait(pipe);
      k.start(storage.k(stage), tile_iterator.row(), rows);
      if (steps) b.start(storage.b(stage), tile_iterator.row(), rows);
      if (n == 1) {
        q.start(storage.q(stage), tile_iterator.row(), rows, member * p.q.stride[2]);
      } else {
        q.start_tokens(storage.q(stage), tile_iterator, member * p.q.stride[2]);
      }
      if (Reverse || steps) {
        const float* const from = value +
                                  (Reverse ? tile_iterator.token : tile_iterator.row()) * p.value.stride[1] +
                                  (Reverse ? member * p.value.stride[2] : 0);
#pragma unroll 1
        for (int i = value_row; i < kRows; i += kValueStep) {
          copy_async(shared_address(storage.values(stage) + i * kValuePitch + value_col),
                     from + (Reverse ? tile_iterator.token_of_segment(i) : i) * p.value.stride[1],
                     value_valid && i < rows && (!Reverse || tile_iterator.ends_token(i)));
        }
      }
      if (p.g.data != nullptr && thread < kRows) {
        copy_async_4(shared_address(storage.gates(stage) + thread),
                     gates + (tile_iterator.token + tile_iterator.token_of_segment(thread)) * p.g.stride[1],
                     thread < rows && tile_iterator.begins_token(thread));
      }
      barriers.full.arrive_after_copies(stage);
    }
  }
  commit_copies();
  wait_copies<0>();
}

}  // namespace girih::kernels::delta_product::fp32_scan
