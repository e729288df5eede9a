// The load warps of reverse.
#pragma once

#include "delta_product/reverse_storage.cuh"

namespace girih::kernels::delta_product {

// Loads the chunks from the last to the first: k, prepared data and b, then q and do of every query head of
// the memory head.
template <typename T, int D, int Rows, bool HasB>
__device__ inline void run_reverse_load_warps(const ReverseParams& params, const BlockWork& work,
                                              const ReverseStorage<T, D, Rows, HasB>& storage, int thread) {
  using Query = typename ReverseStorage<T, D, Rows, HasB>::Query;
  using Keys = BlockTile<T, D>;
  const DeltaReverse& p = params.problem;
  const int n = p.shape.n, tokens = delta_chunk_tokens(n), group = p.shape.output_heads / p.shape.heads;
  const int64_t batch = work.range.sequence.batch, token = work.range.start, row = token * n,
                first_head = static_cast<int64_t>(work.head) * group;  // query_share is 1 if group > 1
  const StageCopier<Keys> keys(at<T>(p.k, batch, row, work.head / p.shape.key_share, 0), p.k.stride[1],
                               p.shape.D, thread);
  const StageCopier<typename Query::Q> q(at<T>(p.q, batch, token, first_head / p.shape.query_share, 0),
                                         p.q.stride[1], p.shape.D, thread);
  const StageCopier<typename Query::DOut> dout(at<T>(p.dout, batch, token, first_head, work.col),
                                               p.dout.stride[1], p.shape.V - work.col, thread);
  const StageCopier<Keys> b(at<T>(p.b, batch, row, work.head, 0), p.b.stride[1], p.shape.D, thread);
  ReverseBarriers& barriers = storage.barriers();
  PipelineState key_pipe, query_pipe;
#pragma unroll 1
  for (int i = 0; i < work.chunks; ++i) {
    const int c = work.chunks - 1 - i, length = chunk_length(work, tokens, c);
    barriers.empty.wait(key_pipe);
    const unsigned char* const prepared = prepared_at(p.prepared, p.shape, work.first_chunk + c, work.head);
    const auto stage = storage.stage(key_pipe.stage);
    keys.start(stage.k(), c * tokens * n, length * n);
    stage.start_prepared(prepared, thread);
    if (HasB) b.start(storage.b_or_k(key_pipe.stage), c * tokens * n, length * n);
    barriers.full.arrive_after_copies(key_pipe.stage);
    key_pipe.next(params.stages);
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      barriers.query_empty.wait(query_pipe);
      const Query query = storage.query(query_pipe.stage);
      q.start(query.q(), c * tokens, length, member * p.q.stride[2]);
      dout.start(query.dout(), c * tokens, length, member * p.dout.stride[2]);
      barriers.query_full.arrive_after_copies(query_pipe.stage);
      query_pipe.next(params.stages);
    }
  }
  // A thread does not exit before its copies are complete.
  commit_copies();
  wait_copies<0>();
}

}  // namespace girih::kernels::delta_product
