// Forward scan of the memory, one block for each sequence and head:
//
//     H, W from S (decode: H = K S^T - V, encode: W = sign gamma (V S - K))          U = H^T (W E_C)
//     x_i = alpha_i s_i + u_i + e^{L_C} Delta_i,  alpha_i = m_C - s_i.u_i
//     S <- x_i rho_i,  rho_i = 1 / |x_i|
//
// An incomplete chunk stores x with alpha_i = -s_i.u_i as Delta, and does not change S. If x_i is exactly
// zero, s_i does not change and rho_i = 0.
//
// A warp has 16 vectors in fp32, with whole rows. encode and similarity need no other vectors. For decode the
// rounded S passes through shared memory to the warps that compute H.
#pragma once

#include "lattice/scan_common.cuh"

namespace girih::kernels::lattice {

// U^T = (W E_C)^T H for the warp's 16 vectors. overlapped() runs before the wait for H.
template <class S, class Overlapped>
__device__ inline void compute_u(Accumulator<S::D / 8>& U, const IntraChunk<S>& intra_chunk,
                                 const float* weights, const Overlapped& overlapped) {
  uint32_t w[4];
  intra_chunk.compute_w_block(w, 0, weights);
  if (intra_chunk.objective == LatticeObjective::decode) {
    typename IntraChunk<S>::HBlock h_block;
    intra_chunk.load_h_operands(h_block);
    named_barrier_sync(1, S::kThreads);  // S is stored
    intra_chunk.finish_h(h_block);
    overlapped();
    named_barrier_sync(1, S::kThreads);  // H is stored, and S may be overwritten
  } else {
    overlapped();
  }
  fill(U, 0.f);
#pragma unroll 1
  for (int t = 0;; t += 16) {
    add_product<typename S::T>(U, w, intra_chunk.h, t);
    if (t + 16 >= S::R) break;
    intra_chunk.compute_w_block(w, t + 16, weights);
  }
}

template <class S>
__global__ void __launch_bounds__(Ring<S>::kThreads, 1) scan_kernel(const __grid_constant__ LatticeScan p) {
  using T = typename S::T;
  constexpr int N = S::D / 8;
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  const LatticeShape& shape = p.shape;
  const Ring<S> ring{shared + S::Memory::kBytes};
  const SequenceCoord block = sequence_coord(shape);
  const ChunkedSequence& of = block.of;
  const int warp = warp_index(), head = block.head, first = 16 * warp;
  ring.barriers().init(S::kWarps);
  if (warp >= S::kWarps) {
    ring.load(p, of, head, warp - S::kWarps);
    wait_copies<0>();
    return;
  }

  const int64_t sequence = of.sequence.index;
  IntraChunk<S> intra_chunk;
  intra_chunk.memory.data = reinterpret_cast<T*>(shared);
  intra_chunk.warp = warp, intra_chunk.objective = shape.objective;
  Accumulator<N> X, U;
  load_vectors(X, p.start.memory, sequence, head, shape, first);
  bool complete = true;
  float decay = 0.f;
  PipelineState pipe;
#pragma unroll 1
  for (int64_t i = 0; i < of.chunks; ++i, pipe.next(Ring<S>::kStages)) {
    const ChunkCoord coord = chunk_coord(shape, of, i, head);
    complete = coord.chunk.is_complete;
    AFragment<S::D / 16> rounded;
    round_to_a_fragment<T>(rounded, X);
    store_blocks(intra_chunk.memory, first, 0, rounded);
    __syncwarp();
    ring.barriers().full.wait(pipe);
    intra_chunk.k = ring.k(pipe.stage), intra_chunk.h = ring.v(pipe.stage);
    compute_u(U, intra_chunk, ring.weights(pipe.stage), [&] {
      store_tile_rows(static_cast<T*>(p.memories) + memory_offset(shape, coord.number, head),
                      intra_chunk.memory, first, shape);
    });

    // x = alpha s + u + e^{L_C} Delta
    const float2 sigma = row_dots(X, U);
    const float memory_decay = complete ? ring.memory_decay(pipe.stage) : 0.f,
                call_decay = ring.call_decay(pipe.stage);
    decay = ring.sum(pipe.stage);
    ring.barriers().empty.arrive_warp(pipe.stage);
    const float2 alpha = {memory_decay - sigma.x, memory_decay - sigma.y};
    if (coord.resumed) {
      for_each_element(U, p.start.step, sequence, head, shape, first,
                       [&](float& u, const float& step, int) { u = fmaf(call_decay, step, u); });
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) U.at[n][e] = fmaf(e < 2 ? alpha.x : alpha.y, X.at[n][e], U.at[n][e]);
    }

    // S <- x / |x|
    float2 rho = {1.f, 1.f};
    if (complete) {
      const float2 square = row_dots(U, U);
      rho = {square.x > 0.f ? rsqrtf(square.x) : 0.f, square.y > 0.f ? rsqrtf(square.y) : 0.f};
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float by = e < 2 ? rho.x : rho.y;
          X.at[n][e] = by > 0.f ? U.at[n][e] * by : X.at[n][e];
        }
      }
    }
    if ((lane() & 3) == 0) {
      float* const ends = p.ends + (coord.number * shape.heads + head) * 2 * shape.M;
      const int m = first + lane_row();
      if (m < shape.M) ends[m] = alpha.x, ends[shape.M + m] = rho.x;
      if (m + 8 < shape.M) ends[m + 8] = alpha.y, ends[shape.M + m + 8] = rho.y;
    }
  }

  // Stores the final state: in a chunk, after a complete chunk, or without tokens.
  store_vectors(p.end.memory, X, sequence, head, shape, first);
  if (of.chunks == 0) {
    if (p.start.step.data != nullptr) {
      load_vectors(U, p.start.step, sequence, head, shape, first);
    } else {
      fill(U, 0.f);
    }
    decay = p.start.decay.data == nullptr ? 0.f
                                          : load_element(p.start.decay, sequence, static_cast<int64_t>(head));
  } else if (complete) {
    fill(U, 0.f);
    decay = 0.f;
  } else {
    decay *= 1.f / kLog2E;
  }
  if (p.end.step.data != nullptr) store_vectors(p.end.step, U, sequence, head, shape, first);
  if (threadIdx.x == 0) {
    if (p.end.decay.data != nullptr) store_element(p.end.decay, decay, sequence, static_cast<int64_t>(head));
    if (head == 0 && p.last_position != nullptr) {
      p.last_position[sequence] = (of.prior_tokens + of.sequence.end - of.sequence.start) % shape.grid.size;
    }
  }
}

template <typename T>
cudaError_t launch_scan(const LatticeScan& p, cudaStream_t stream) {
  return dispatch_size(p.shape, [&](auto tokens, auto D, auto M) {
    using S = Sizes<T, tokens(), D(), M()>;
    return launch_sequences<scan_kernel<S>>(p, Ring<S>::kThreads, ScanStorage<S>::kBytes, p.shape, stream);
  });
}

}  // namespace girih::kernels::lattice
