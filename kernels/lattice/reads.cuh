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
// Each warp has 16 vectors, as in within.cuh, so that running sums over tokens stay in a warp. A warp
// accumulates kappa, -dB q~ and dA^T q~ of all tokens in registers over the query heads, then computes the
// other terms from the last 16 tokens to the first. reads_memory.cuh continues with da, eta and dW.
#pragma once

#include "lattice/launch.h"
#include "lattice/within.cuh"

namespace girih::kernels::lattice {

constexpr int kSlab = 64;  // width of a slab of D in the gradients of the memory

template <class S>
struct Reads {
  using T = typename S::T;
  using Slab = SharedTile<T, S::R, kSlab>;
  enum Kind { gamma, floor, open, kKinds };  // sums over vectors, a value for each token
  static constexpr int kTable = kKinds * S::kWarps * S::R;
  static constexpr int kBytes = Within<S>::kBytes + 4 * S::Keys::kBytes + S::Values::kBytes +
                                2 * S::Scores::kBytes + Slab::kBytes + 4 * kTable;

  const LatticeReads& p;
  const Part& part;
  Within<S> within;
  typename S::Keys q, along, eta, da;  // q, then q~; q~ (m - sigma)
  typename S::Values dout;
  typename S::Scores scores, pairs;  // P; dA, then tril(eta W^T) E
  Slab dh;
  float* table;

  __device__ Reads(const LatticeReads& p, const Part& part, unsigned char* shared) : p(p), part(part) {
    Layout layout(shared);
    within.lay_out(layout);
    layout(q)(along)(eta)(da)(dout)(scores)(pairs)(dh)(table, kTable);
    within.step.data = reinterpret_cast<T*>(layout.next);
  }

  __device__ int group() const { return S::kPlain ? 1 : p.shape.query_heads / p.shape.heads; }
  __device__ int query_head(int member) const { return part.head * group() + member; }
  __device__ void bring_query(int member) const {
    const int head = query_head(member);
    bring<S::kThreads>(q, row_of<T>(p.q, part.batch(), part.chunk.start, head), p.q.stride[1],
                       part.chunk.length, p.shape.M);
    bring<S::kThreads>(dout, row_of<T>(p.dout, part.batch(), part.chunk.start, head), p.dout.stride[1],
                       part.chunk.length, p.shape.D);
    commit_copies();
  }

  // Loads the inputs and computes what does not depend on queries.
  __device__ void start() {
    within.bring_all(p, part);
    bring_query(0);
    if (within.warp == 0) put_tokens<T>(*within.tokens, p, p.start, part);
    if (within.resumed) within.bring_step(p.start.step, p.shape, part);
    wait_copies<0>();
    __syncthreads();
    within.make_h();
    within.make_step_squares();
    __syncthreads();
    within.make_w();
    within.make_products();
    __syncthreads();
  }

  // Values of a warp for all tokens, [16 vectors, tokens].
  struct Kept {
    Sums<2> y[S::kBlocks], sigma[S::kBlocks];  // y becomes nu
    Sums<2> kappa[S::kBlocks], zeta[S::kBlocks], dW[S::kBlocks];
  };

  // Loads the next query head in place of the current one.
  __device__ void next_query(int member) const {
    __syncthreads();
    bring_query(member);
    wait_copies<0>();
    __syncthreads();
  }

  __device__ void read(Kept& kept) const {
    typename Within<S>::Carries carries;
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) {
      typename Within<S>::Columns columns;
      within.make_columns(columns, 16 * b);
      within.make_read(kept.sigma[b], kept.y[b], columns, carries, 16 * b);
      fill(kept.kappa[b], 0.f);
      fill(kept.zeta[b], 0.f);
      fill(kept.dW[b], 0.f);
    }
#pragma unroll 1
    for (int member = 0; member < group(); ++member) {
      if (member > 0) next_query(member);
      decayed_scores(within, pairs, dout, within.h, 0);
#pragma unroll
      for (int b = 0; b < S::kBlocks; ++b) make_queries(within, q, along, kept.y[b], kept.sigma[b], 16 * b);
      __syncthreads();
      decayed_scores(within, scores, q, within.w, 1);
      T* const to = row_of<T>(p.dq, part.batch(), part.chunk.start, query_head(member)) + within.vectors();
#pragma unroll
      for (int b = 0; b < S::kBlocks; ++b) read_block(kept, b, to);
    }
  }

  // dq~ of 16 tokens, dq, and the terms of kappa, zeta and dW.
  __device__ void read_block(Kept& kept, int b, T* dq) const {
    const int first = 16 * b;
    uint32_t x[4];
    Sums<2> d, sum, queries;
    load_block_transposed(x, q, within.vectors(), first);
    unpack<T>(queries, x);
    scale_rows(queries, {within.kLift, within.kLift});

    // dA^T q~, scaled by 1 / lift()
#pragma unroll
    for (int j = 0; j <= b; ++j) add_product<T>(kept.dW[j], x, pairs, first, 16 * j);

    // dA W
    fill(sum, 0.f);
#pragma unroll 1
    for (int j = 0; j <= first; j += 16) {
      load_block_transposed(x, within.w, within.vectors(), j);
      add_product_transposed<T>(sum, x, pairs, first, j);
    }
    scale_rows(sum, {1.f / within.kLift, 1.f / within.kLift});

    // dB (m - sigma), -dB q~
    fill(d, 0.f);
#pragma unroll 2
    for (int col = 0; col < S::D; col += 16) {
      load_block(x, within.memory, within.vectors(), col);
      add_product_transposed<T>(d, x, dout, first, col);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 m = *reinterpret_cast<const float2*>(&within.tokens->kept[first + 8 * n + lane_col()]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        kept.zeta[b].at[n][i] -= d.at[n][i] * queries.at[n][i];
        sum.at[n][i] = fmaf(d.at[n][i], (i & 1 ? m.y : m.x) - kept.sigma[b].at[n][i], sum.at[n][i]);
      }
    }

    // e^{L} dO Delta
    if (within.resumed) {
      fill(d, 0.f);
#pragma unroll 1
      for (int col = 0; col < S::D; col += 16) {
        load_block(x, within.step, within.vectors(), col);
        add_product_transposed<T>(d, x, dout, first, col);
      }
      scale_columns(d, [&](int n) { return within.open(first, n); });
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
        kept.kappa[b].at[n][i] = fmaf(sum.at[n][i], queries.at[n][i], kept.kappa[b].at[n][i]);
        sum.at[n][i] *= fabsf(kept.y[b].at[n][i]);
      }
    }
    pack<T>(x, sum);
    transpose_block(x);
    put_block(dq + first * p.dq.stride[1], p.dq.stride[1], part.chunk.length - first,
              p.shape.M - within.vectors(), x);
  }

  // Stores the sums over the warp's vectors to the table.
  __device__ void put_sums(Kind kind, int first, const Sums<2>& x) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = sum_over_col(x.at[n][i] + x.at[n][i + 2]);
        if (lane_row() == 0)
          table[(kind * S::kWarps + within.warp) * S::R + first + 8 * n + lane_col() + i] = sum;
      }
    }
  }

  // Replaces y by nu. Also computes the gradient of a row's decay where n is at its floor, kappa y^2 n, and
  // for a resumed chunk the gradient of m where m is above its minimum, (dB q~) m - kappa y^2 m^2.
  __device__ void end_reads(Kept& kept) const {
    const float shut = exp2_fast(kLeastKept);
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) {
      Sums<2> floors, opens;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 ms = *reinterpret_cast<const float2*>(&within.tokens->kept[16 * b + 8 * n + lane_col()]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float m = i & 1 ? ms.y : ms.x, y = kept.y[b].at[n][i], kappa = kept.kappa[b].at[n][i];
          const float share = y * y * m * m;  // of m^2 in |x|^2
          floors.at[n][i] = y < 0.f ? kappa * fmaxf(1.f - share, 0.f) : 0.f;
          opens.at[n][i] = m > shut ? -kept.zeta[b].at[n][i] * m - kappa * share : 0.f;
          kept.y[b].at[n][i] = y < 0.f ? 0.f : -0.5f * y * y * kappa;
        }
      }
      put_sums(floor, 16 * b, floors);
      if (within.resumed) put_sums(open, 16 * b, opens);
    }
  }

  // z, eta, omega, dW and da, from the last 16 tokens to the first. dW becomes its term of dk. `before`: z at
  // the chunk's token 0.
  __device__ void go_back(Kept& kept, Carry& before) const {
    Carry omega_carry;
#pragma unroll
    for (int b = S::kBlocks - 1; b >= 0; --b) {
      const int first = 16 * b;
      typename Within<S>::Columns columns;
      within.make_columns(columns, first);
      Triangles triangles;
      make_triangles<Run::backward>(triangles, *within.tokens, first);
      const auto decay = [&](int col) { return block_decay<Run::backward>(*within.tokens, first, col); };

      Sums<2>& z = kept.y[b];
      add_up<Run::backward>(z, triangles.square, before, [&](int col) { return squared(decay(col)); });
      Sums<2> etas, omega = kept.zeta[b];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          etas.at[n][i] = 2.f * z.at[n][i] * columns.w.at[n][i];
          omega.at[n][i] -= etas.at[n][i] * columns.a.at[n][i];
        }
      }
      add_up<Run::backward>(omega, triangles.decay, omega_carry, decay);

      // (tril(G, -1) E)^T eta, scaled by 1 / lift()
      uint32_t x[4];
      Sums<2> lowered = etas;
      scale_rows(lowered, {1.f / within.kLift, 1.f / within.kLift});
      bound<T>(lowered);
      pack<T>(x, lowered);
      store_block_transposed(eta, within.vectors(), first, x);
#pragma unroll
      for (int j = 0; j <= b; ++j) add_product<T>(kept.dW[j], x, within.decayed, first, 16 * j);

      Sums<2> c, of_a;
      load_block_transposed(x, within.k, within.vectors(), first);
      unpack<T>(c, x);
      const bool encode = within.objective == LatticeObjective::encode;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int t = first + 8 * n + lane_col();
        const float2 square = *reinterpret_cast<const float2*>(&within.tokens->square[t]);
        const float2 steps = *reinterpret_cast<const float2*>(&within.tokens->step[t]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float W = columns.w.at[n][i], a = columns.a.at[n][i], sigma = kept.sigma[b].at[n][i];
          const float step = i & 1 ? steps.y : steps.x;
          float& dW = kept.dW[b].at[n][i];
          dW = within.kLift * dW + a * omega.at[n][i] +
               2.f * z.at[n][i] *
                   (W * ((i & 1 ? square.y : square.x) + a * a) + columns.N.at[n][i] - a * sigma);
          of_a.at[n][i] = W * omega.at[n][i] + etas.at[n][i] * (W * a - sigma);
          c.at[n][i] = (encode ? a - c.at[n][i] : c.at[n][i]) * dW;
          // dc = step dW, c = k or a - k
          dW *= step;
          if (encode) of_a.at[n][i] += dW, dW = -dW;
        }
      }
      put_sums(gamma, first, c);
      bound<T>(of_a);
      pack<T>(x, of_a);
      store_block_transposed(da, within.vectors(), first, x);
    }
  }

  // Sums the table over warps and stores the results; called by all threads.
  __device__ void put_table() const {
    __syncthreads();
    const float sign = sign_of(within.objective);
    const auto sum = [&](Kind kind, int t) {
      float total = 0.f;
      for (int w = 0; w < S::kWarps; ++w) total += table[(kind * S::kWarps + w) * S::R + t];
      return total;
    };
    const int t = threadIdx.x;
    if (t < S::R && t < part.chunk.length) {
      store_any(p.dgamma, sign * sum(gamma, t), part.batch(), part.chunk.start + t, part.head);
      if (p.at_floor.data != nullptr) {
        store_any(p.at_floor, sum(floor, t), part.batch(), part.chunk.start + t, part.head);
      }
    }
    if (within.resumed && p.ddecay.data != nullptr && t == 0) {
      float total = 0.f;
      for (int j = 0; j < part.chunk.length; ++j) total += sum(open, j);
      store_any(p.ddecay, total, part.sequence(), part.head);
    }
  }
};

}  // namespace girih::kernels::lattice
