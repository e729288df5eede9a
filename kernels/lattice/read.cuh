// O = (q~ (m - sigma)) S^T + (tril(q~ W^T) E) H + (q~ e^{L}) Delta^T with q~ = q y. One block for each chunk
// and head, with all query heads of the head.
#pragma once

#include "lattice/launch.h"
#include "lattice/within.cuh"

namespace girih::kernels::lattice {

template <class S>
struct ReadTiles {
  static constexpr int kBytes = Within<S>::kBytes + 2 * S::Keys::kBytes + S::Scores::kBytes;
};

// Resident blocks of a multiprocessor. A chunk of 16 tokens has many short waits, which overlap with other
// blocks.
template <class S>
constexpr int read_blocks() {
  return S::R == 16 && S::M == 64 && S::kPlain ? 6 : 1;
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, read_blocks<S>())
    read_kernel(const __grid_constant__ LatticeRead p) {
  using T = typename S::T;
  extern __shared__ __align__(128) unsigned char shared[];
  const Part part = chunk_part(p.shape);
  if (part.chunk.length == 0) return;
  const LatticeShape& shape = p.shape;

  constexpr bool kOwn = S::kBlocks == 1;
  Within<S, kOwn> within;
  typename S::Keys q, along;  // q, then q~; q~ (m - sigma)
  typename S::Scores scores;
  Layout layout(shared);
  within.lay_out(layout);
  layout(q)(along)(scores);
  within.step.data = reinterpret_cast<T*>(layout.next);

  const int group = S::kPlain ? 1 : shape.query_heads / shape.heads, first_head = part.head * group;
  const auto bring_q = [&](int head) {
    bring<S::kThreads>(q, row_of<T>(p.q, part.batch(), part.chunk.start, head), p.q.stride[1],
                       part.chunk.length, shape.M);
    commit_copies();
  };
  within.bring_all(p, part);
  bring_q(first_head);
  if (within.warp == 0) put_tokens<T>(*within.tokens, p, p.start, part);
  if (within.resumed) within.bring_step(p.start.step, shape, part);
  wait_copies<0>();
  __syncthreads();

  within.make_h();
  within.make_step_squares();
  __syncthreads();
  within.make_w();
  within.make_products();
  if (!kOwn) __syncthreads();

  Sums<2> y[S::kBlocks], sigma[S::kBlocks];
  typename Within<S, kOwn>::Carries carries;
#pragma unroll
  for (int b = 0; b < S::kBlocks; ++b) {
    typename Within<S, kOwn>::Columns columns;
    within.make_columns(columns, 16 * b);
    within.make_read(sigma[b], y[b], columns, carries, 16 * b);
  }

#pragma unroll 1
  for (int member = 0;; ++member) {
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) make_queries(within, q, along, y[b], sigma[b], 16 * b);
    __syncthreads();
    if constexpr (!kOwn) {
      decayed_scores(within, scores, q, within.w, 0);
      __syncthreads();
    }

    if (within.has_share()) {
      const int row = within.share_row(), col = within.share_col();
      Sums<S::kWide / 8> o;
      fill(o, 0.f);
      if (within.resumed) {
        add_product_of_tiles<1>(o, q, row, within.step, col);
        const int t = row + lane_row();
        scale_rows(o, {within.kLift * within.tokens->open[t], within.kLift * within.tokens->open[t + 8]});
      }
      add_product_of_tiles<4>(o, along, row, within.memory, col);
      uint32_t a[4];
      if constexpr (kOwn) {
        own_scores(a, within, q, within.w);
        add_product<T>(o, a, within.h, 0, col);
      } else {
#pragma unroll 1
        for (int j = 0; j <= row; j += 16) {
          load_block(a, scores, row, j);
          add_product<T>(o, a, within.h, j, col);
        }
      }
      put_rows<T>(row_of<T>(p.o, part.batch(), part.chunk.start + row, first_head + member) + col,
                  p.o.stride[1], part.chunk.length - row, shape.D - col, o);
    }
    if (member + 1 == group) break;
    __syncthreads();
    bring_q(first_head + member + 1);
    wait_copies<0>();
    __syncthreads();
  }
}

template <typename T>
cudaError_t read_of(const LatticeRead& p, cudaStream_t stream) {
  return by_size(p.shape, [&](auto tokens, auto D, auto M) {
    using S = Sizes<T, tokens(), D(), M()>;
    using Plain = Sizes<T, tokens(), D(), M(), true>;
    if (is_plain(p.shape))
      return launch_chunks<read_kernel<Plain>>(p, S::kThreads, ReadTiles<S>::kBytes, 0, stream);
    return launch_chunks<read_kernel<S>>(p, S::kThreads, ReadTiles<S>::kBytes, Within<S>::kResumedBytes,
                                         stream);
  });
}

}  // namespace girih::kernels::lattice
