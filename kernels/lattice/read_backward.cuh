// The terms of a chunk's reads in all gradients, from S at the start of the chunk. One block for each chunk
// and head; sums run over the query heads of the head.
//
//     dB = dO S          dA = tril(dO H^T) E          P = tril(q~ W^T) E
//     dq~ = dB (m - sigma) + dA W + e^{L} dO Delta          dq = y dq~
//     kappa = dq~ q~          nu = -1/2 y^2 kappa, 0 where n is at its floor          z = tril(E E)^T nu
//     eta = 2 z W             zeta = -dB q~ - eta a                                   omega = tril(E)^T zeta
//     dW = dA^T q~ + a omega + (tril(G, -1) E)^T eta + 2 z (W G_jj + W a^2 + N - a sigma)
//     da = W omega + eta (W a - sigma), for encode - gamma dW too
//     dgamma = sign c.dW
//
// Each warp has 16 vectors, as in intra_chunk.cuh, so that running sums over tokens stay in a warp. A warp
// accumulates kappa, -dB q~ and dA^T q~ of all tokens in registers over the query heads, then computes the
// other terms from the last 16 tokens to the first. read_backward_memory.cuh continues with da, eta and dW.
#pragma once

#include "lattice/intra_chunk.cuh"
#include "lattice/launch.h"

namespace girih::kernels::lattice {

constexpr int kSlab = 64;  // width of a slab of D in the gradients of the memory

template <class S>
struct ReadBackward {
  using T = typename S::T;
  using Slab = SharedTile<T, S::R, kSlab>;
  // Sums over vectors for each token: of dgamma, of ddecay_at_floor, and of ddecay of a resumed chunk.
  enum Kind { gamma, floor, resumed, kKinds };
  static constexpr int kTable = kKinds * S::kWarps * S::R;
  static constexpr int kBytes = IntraChunk<S>::kBytes + 4 * S::Keys::kBytes + S::Values::kBytes +
                                2 * S::Scores::kBytes + Slab::kBytes + 4 * kTable;

  const LatticeReadBackward& p;
  const ChunkCoord& coord;
  IntraChunk<S> intra_chunk;
  typename S::Keys q, along, eta, da;  // q, then q~; q~ (m - sigma)
  typename S::Values dout;
  typename S::Scores scores, pairs;  // P; dA, then tril(eta W^T) E
  Slab dh;
  float* table;

  __device__ ReadBackward(const LatticeReadBackward& p, const ChunkCoord& coord, unsigned char* shared)
      : p(p), coord(coord) {
    SharedAllocator layout(shared);
    intra_chunk.set_layout(layout);
    layout(q)(along)(eta)(da)(dout)(scores)(pairs)(dh)(table, kTable);
    intra_chunk.step.data = reinterpret_cast<T*>(layout.next);
  }

  __device__ int group() const { return S::kPlain ? 1 : p.shape.query_heads / p.shape.heads; }
  __device__ int query_head(int member) const { return coord.head * group() + member; }
  __device__ void load_query(int member) const {
    const int head = query_head(member);
    load_by_block<S::kThreads>(q, row_of<T>(p.q, coord.batch(), coord.chunk.start, head), p.q.stride[1],
                               coord.chunk.length, p.shape.M);
    load_by_block<S::kThreads>(dout, row_of<T>(p.dout, coord.batch(), coord.chunk.start, head),
                               p.dout.stride[1], coord.chunk.length, p.shape.D);
    commit_copies();
  }

  // Loads the inputs and computes what does not depend on queries.
  __device__ void start() {
    intra_chunk.load_inputs(p, coord);
    load_query(0);
    if (intra_chunk.warp == 0) store_tokens<T>(*intra_chunk.tokens, p, p.start, coord);
    if (intra_chunk.resumed) intra_chunk.load_step(p.start.step, p.shape, coord);
    wait_copies<0>();
    __syncthreads();
    intra_chunk.make_h();
    intra_chunk.make_step_squares();
    __syncthreads();
    intra_chunk.make_w();
    intra_chunk.compute_gram();
    __syncthreads();
  }

  // Values of a warp for all tokens, [16 vectors, tokens].
  struct TokenAccumulators {
    Accumulator<2> y[S::kBlocks], sigma[S::kBlocks];  // y becomes nu
    Accumulator<2> kappa[S::kBlocks], zeta[S::kBlocks], dW[S::kBlocks];
  };

  // Loads the next query head in place of the current one.
  __device__ void next_query(int member) const {
    __syncthreads();
    load_query(member);
    wait_copies<0>();
    __syncthreads();
  }

  __device__ void read(TokenAccumulators& accumulators) const {
    typename IntraChunk<S>::Carries carries;
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) {
      typename IntraChunk<S>::TokenBlock token_block;
      intra_chunk.compute_token_block(token_block, 16 * b);
      intra_chunk.compute_lengths_of_reads(accumulators.sigma[b], accumulators.y[b], token_block, carries,
                                           16 * b);
      fill(accumulators.kappa[b], 0.f);
      fill(accumulators.zeta[b], 0.f);
      fill(accumulators.dW[b], 0.f);
    }
#pragma unroll 1
    for (int member = 0; member < group(); ++member) {
      if (member > 0) next_query(member);
      compute_decayed_scores(intra_chunk, pairs, dout, intra_chunk.h, 0);
#pragma unroll
      for (int b = 0; b < S::kBlocks; ++b)
        scale_queries(intra_chunk, q, along, accumulators.y[b], accumulators.sigma[b], 16 * b);
      __syncthreads();
      compute_decayed_scores(intra_chunk, scores, q, intra_chunk.w, 1);
      T* const to =
          row_of<T>(p.dq, coord.batch(), coord.chunk.start, query_head(member)) + intra_chunk.first_vector();
#pragma unroll
      for (int b = 0; b < S::kBlocks; ++b) read_block(accumulators, b, to);
    }
  }

  // dq~ of 16 tokens, dq, and the terms of kappa, zeta and dW.
  __device__ void read_block(TokenAccumulators& accumulators, int b, T* dq) const {
    const int first = 16 * b;
    uint32_t x[4];
    Accumulator<2> d, sum, queries;
    load_block_transposed(x, q, intra_chunk.first_vector(), first);
    unpack<T>(queries, x);
    scale_rows(queries, {intra_chunk.kFp16Scale, intra_chunk.kFp16Scale});

    // dA^T q~, scaled by 1 / fp16_scale()
#pragma unroll
    for (int j = 0; j <= b; ++j) add_product<T>(accumulators.dW[j], x, pairs, first, 16 * j);

    // dA W
    fill(sum, 0.f);
#pragma unroll 1
    for (int j = 0; j <= first; j += 16) {
      load_block_transposed(x, intra_chunk.w, intra_chunk.first_vector(), j);
      add_product_transposed<T>(sum, x, pairs, first, j);
    }
    scale_rows(sum, {1.f / intra_chunk.kFp16Scale, 1.f / intra_chunk.kFp16Scale});

    // dB (m - sigma), -dB q~
    fill(d, 0.f);
#pragma unroll 2
    for (int col = 0; col < S::D; col += 16) {
      load_block(x, intra_chunk.memory, intra_chunk.first_vector(), col);
      add_product_transposed<T>(d, x, dout, first, col);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 m =
          *reinterpret_cast<const float2*>(&intra_chunk.tokens->memory_decay[first + 8 * n + lane_col()]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        accumulators.zeta[b].at[n][i] -= d.at[n][i] * queries.at[n][i];
        sum.at[n][i] = fmaf(d.at[n][i], (i & 1 ? m.y : m.x) - accumulators.sigma[b].at[n][i], sum.at[n][i]);
      }
    }

    // e^{L} dO Delta
    if (intra_chunk.resumed) {
      fill(d, 0.f);
#pragma unroll 1
      for (int col = 0; col < S::D; col += 16) {
        load_block(x, intra_chunk.step, intra_chunk.first_vector(), col);
        add_product_transposed<T>(d, x, dout, first, col);
      }
      scale_columns(d, [&](int n) { return intra_chunk.call_decay(first, n); });
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum.at[n][i] += d.at[n][i];
      }
    }

    // kappa += dq~ q~, dq = y dq~
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        accumulators.kappa[b].at[n][i] = fmaf(sum.at[n][i], queries.at[n][i], accumulators.kappa[b].at[n][i]);
        sum.at[n][i] *= fabsf(accumulators.y[b].at[n][i]);
      }
    }
    pack<T>(x, sum);
    transpose_block(x);
    store_block_global(dq + first * p.dq.stride[1], p.dq.stride[1], coord.chunk.length - first,
                       p.shape.M - intra_chunk.first_vector(), x);
  }

  // Stores the sums over the warp's vectors to the table.
  __device__ void store_sums(Kind kind, int first, const Accumulator<2>& x) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = sum_over_col(x.at[n][i] + x.at[n][i + 2]);
        if (lane_row() == 0)
          table[(kind * S::kWarps + intra_chunk.warp) * S::R + first + 8 * n + lane_col() + i] = sum;
      }
    }
  }

  // Replaces y by nu. Also computes the gradient of a row's decay where n is at its floor, kappa y^2 n, and
  // for a resumed chunk the gradient of m where m is above its minimum, (dB q~) m - kappa y^2 m^2.
  __device__ void finish_reads(TokenAccumulators& accumulators) const {
    const float min_decay = exp2_fast(kMinLogDecay);
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) {
      Accumulator<2> floors, resumed_terms;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 ms =
            *reinterpret_cast<const float2*>(&intra_chunk.tokens->memory_decay[16 * b + 8 * n + lane_col()]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float m = i & 1 ? ms.y : ms.x, y = accumulators.y[b].at[n][i],
                      kappa = accumulators.kappa[b].at[n][i];
          const float share = y * y * m * m;  // of m^2 in |x|^2
          floors.at[n][i] = y < 0.f ? kappa * fmaxf(1.f - share, 0.f) : 0.f;
          resumed_terms.at[n][i] = m > min_decay ? -accumulators.zeta[b].at[n][i] * m - kappa * share : 0.f;
          accumulators.y[b].at[n][i] = y < 0.f ? 0.f : -0.5f * y * y * kappa;
        }
      }
      store_sums(floor, 16 * b, floors);
      if (intra_chunk.resumed) store_sums(resumed, 16 * b, resumed_terms);
    }
  }

  // z, eta, omega, dW and da, from the last 16 tokens to the first. dW becomes its term of dk. `before`: z at
  // the chunk's token 0.
  __device__ void run_backward_tokens(TokenAccumulators& accumulators, Carry& before) const {
    Carry omega_carry;
#pragma unroll
    for (int b = S::kBlocks - 1; b >= 0; --b) {
      const int first = 16 * b;
      typename IntraChunk<S>::TokenBlock token_block;
      intra_chunk.compute_token_block(token_block, first);
      Triangles triangles;
      make_triangles<Direction::backward>(triangles, *intra_chunk.tokens, first);
      const auto decay = [&](int col) {
        return block_decay<Direction::backward>(*intra_chunk.tokens, first, col);
      };

      Accumulator<2>& z = accumulators.y[b];
      compute_running_sums<Direction::backward>(z, triangles.square, before,
                                                [&](int col) { return squared(decay(col)); });
      Accumulator<2> etas, omega = accumulators.zeta[b];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          etas.at[n][i] = 2.f * z.at[n][i] * token_block.w.at[n][i];
          omega.at[n][i] -= etas.at[n][i] * token_block.a.at[n][i];
        }
      }
      compute_running_sums<Direction::backward>(omega, triangles.decay, omega_carry, decay);

      // (tril(G, -1) E)^T eta, scaled by 1 / fp16_scale()
      uint32_t x[4];
      Accumulator<2> lowered = etas;
      scale_rows(lowered, {1.f / intra_chunk.kFp16Scale, 1.f / intra_chunk.kFp16Scale});
      clamp_factor<T>(lowered);
      pack<T>(x, lowered);
      store_block_transposed(eta, intra_chunk.first_vector(), first, x);
#pragma unroll
      for (int j = 0; j <= b; ++j) add_product<T>(accumulators.dW[j], x, intra_chunk.decayed, first, 16 * j);

      Accumulator<2> c, of_a;
      load_block_transposed(x, intra_chunk.k, intra_chunk.first_vector(), first);
      unpack<T>(c, x);
      const bool encode = intra_chunk.objective == LatticeObjective::encode;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int t = first + 8 * n + lane_col();
        const float2 square = *reinterpret_cast<const float2*>(&intra_chunk.tokens->square[t]);
        const float2 steps = *reinterpret_cast<const float2*>(&intra_chunk.tokens->step[t]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float W = token_block.w.at[n][i], a = token_block.a.at[n][i],
                      sigma = accumulators.sigma[b].at[n][i];
          const float step = i & 1 ? steps.y : steps.x;
          float& dW = accumulators.dW[b].at[n][i];
          dW = intra_chunk.kFp16Scale * dW + a * omega.at[n][i] +
               2.f * z.at[n][i] *
                   (W * ((i & 1 ? square.y : square.x) + a * a) + token_block.N.at[n][i] - a * sigma);
          of_a.at[n][i] = W * omega.at[n][i] + etas.at[n][i] * (W * a - sigma);
          c.at[n][i] = (encode ? a - c.at[n][i] : c.at[n][i]) * dW;
          // dc = step dW, c = k or a - k
          dW *= step;
          if (encode) of_a.at[n][i] += dW, dW = -dW;
        }
      }
      store_sums(gamma, first, c);
      clamp_factor<T>(of_a);
      pack<T>(x, of_a);
      store_block_transposed(da, intra_chunk.first_vector(), first, x);
    }
  }

  // Sums the table over warps and stores the results; called by all threads.
  __device__ void store_table() const {
    __syncthreads();
    const float sign = sign_of(intra_chunk.objective);
    const auto sum = [&](Kind kind, int t) {
      float total = 0.f;
      for (int w = 0; w < S::kWarps; ++w) total += table[(kind * S::kWarps + w) * S::R + t];
      return total;
    };
    const int t = threadIdx.x;
    if (t < S::R && t < coord.chunk.length) {
      store_element(p.dgamma, sign * sum(gamma, t), coord.batch(), coord.chunk.start + t, coord.head);
      if (p.ddecay_at_floor.data != nullptr) {
        store_element(p.ddecay_at_floor, sum(floor, t), coord.batch(), coord.chunk.start + t, coord.head);
      }
    }
    if (intra_chunk.resumed && p.ddecay.data != nullptr && t == 0) {
      float total = 0.f;
      for (int j = 0; j < coord.chunk.length; ++j) total += sum(resumed, j);
      store_element(p.ddecay, total, coord.sequence(), coord.head);
    }
  }
};

}  // namespace girih::kernels::lattice
