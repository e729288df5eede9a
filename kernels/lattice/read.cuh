// O = (q~ (m - sigma)) S^T + (tril(q~ W^T) E) H + (q~ e^{L}) Delta^T with q~ = q y. One block for each chunk
// and head, with all query heads of the head.
#pragma once

#include "lattice/intra_chunk.cuh"
#include "lattice/launch.h"

namespace girih::kernels::lattice {

template <class S>
struct ReadTiles {
  static constexpr int kBytes = IntraChunk<S>::kBytes + 2 * S::Keys::kBytes + S::Scores::kBytes;
};

// Resident blocks of a multiprocessor. A chunk of 16 tokens has many short waits, which overlap with other
// blocks.
template <class S>
constexpr int resident_read_blocks() {
  return S::R == 16 && S::M == 64 && S::kPlain ? 6 : 1;
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, resident_read_blocks<S>())
    read_kernel(const __grid_constant__ LatticeRead p) {
  using T = typename S::T;
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  const ChunkCoord coord = chunk_coord(p.shape);
  if (coord.chunk.length == 0) return;
  const LatticeShape& shape = p.shape;

  constexpr bool kOwn = S::kBlocks == 1;
  IntraChunk<S, kOwn> intra_chunk;
  typename S::Keys q, along;  // q, then q~; q~ (m - sigma)
  typename S::Scores scores;
  SharedAllocator layout(shared);
  intra_chunk.set_layout(layout);
  layout(q)(along)(scores);
  intra_chunk.step.data = reinterpret_cast<T*>(layout.next);

  const int group = S::kPlain ? 1 : shape.query_heads / shape.heads, first_head = coord.head * group;
  const auto load_q = [&](int head) {
    load_by_block<S::kThreads>(q, row_of<T>(p.q, coord.batch(), coord.chunk.start, head), p.q.stride[1],
                               coord.chunk.length, shape.M);
    commit_copies();
  };
  intra_chunk.load_inputs(p, coord);
  load_q(first_head);
  if (intra_chunk.warp == 0) store_tokens<T>(*intra_chunk.tokens, p, p.start, coord);
  if (intra_chunk.resumed) intra_chunk.load_step(p.start.step, shape, coord);
  wait_copies<0>();
  __syncthreads();

  intra_chunk.make_h();
  intra_chunk.make_step_squares();
  __syncthreads();
  intra_chunk.make_w();
  intra_chunk.compute_gram();
  if (!kOwn) __syncthreads();

  Accumulator<2> y[S::kBlocks], sigma[S::kBlocks];
  typename IntraChunk<S, kOwn>::Carries carries;
#pragma unroll
  for (int b = 0; b < S::kBlocks; ++b) {
    typename IntraChunk<S, kOwn>::TokenBlock token_block;
    intra_chunk.compute_token_block(token_block, 16 * b);
    intra_chunk.compute_lengths_of_reads(sigma[b], y[b], token_block, carries, 16 * b);
  }

#pragma unroll 1
  for (int member = 0;; ++member) {
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) scale_queries(intra_chunk, q, along, y[b], sigma[b], 16 * b);
    __syncthreads();
    if constexpr (!kOwn) {
      compute_decayed_scores(intra_chunk, scores, q, intra_chunk.w, 0);
      __syncthreads();
    }

    if (intra_chunk.has_block()) {
      const int row = intra_chunk.block_row(), col = intra_chunk.block_col();
      Accumulator<S::kWide / 8> o;
      fill(o, 0.f);
      if (intra_chunk.resumed) {
        add_tile_product<1>(o, q, row, intra_chunk.step, col);
        const int t = row + lane_row();
        scale_rows(o, {intra_chunk.kFp16Scale * intra_chunk.tokens->call_decay[t],
                       intra_chunk.kFp16Scale * intra_chunk.tokens->call_decay[t + 8]});
      }
      add_tile_product<4>(o, along, row, intra_chunk.memory, col);
      uint32_t a[4];
      if constexpr (kOwn) {
        compute_own_scores(a, intra_chunk, q, intra_chunk.w);
        add_product<T>(o, a, intra_chunk.h, 0, col);
      } else {
#pragma unroll 1
        for (int j = 0; j <= row; j += 16) {
          load_block(a, scores, row, j);
          add_product<T>(o, a, intra_chunk.h, j, col);
        }
      }
      store_rows_global<T>(row_of<T>(p.o, coord.batch(), coord.chunk.start + row, first_head + member) + col,
                           p.o.stride[1], coord.chunk.length - row, shape.D - col, o);
    }
    if (member + 1 == group) break;
    __syncthreads();
    load_q(first_head + member + 1);
    wait_copies<0>();
    __syncthreads();
  }
}

template <typename T>
cudaError_t launch_read(const LatticeRead& p, cudaStream_t stream) {
  return dispatch_size(p.shape, [&](auto tokens, auto D, auto M) {
    using S = Sizes<T, tokens(), D(), M()>;
    using Plain = Sizes<T, tokens(), D(), M(), true>;
    if (is_plain_call(p.shape))
      return launch_chunks<read_kernel<Plain>>(p, S::kThreads, ReadTiles<S>::kBytes, 0, stream);
    return launch_chunks<read_kernel<S>>(p, S::kThreads, ReadTiles<S>::kBytes, IntraChunk<S>::kResumedBytes,
                                         stream);
  });
}

}  // namespace girih::kernels::lattice
