// Backward of one token from the results of forward, and the layout of these results (fp32.h).
#pragma once

#include "lattice/fp32_memory.cuh"
#include "lattice/launch.h"

namespace girih::kernels::lattice {

// A segment of a sequence: `length` tokens from `start` on. `begun`: tokens of its chunk that precede it.
struct Segment {
  int64_t number, start;
  int length, begun;
  bool first;

  __device__ Segment(const LatticeFp32Shape& shape, const Fp32SequenceCoord& coord, int64_t i)
      : number(coord.of.first + i), begun(i == 0 ? coord.begun : 0), first(i == 0) {
    const Chunk chunk = chunk_of(lattice_segment_grid(shape), coord.of, i);
    start = chunk.start, length = chunk.length;
  }
};

// A thread's packs of a memory that only this thread accesses; packs of neighbouring threads are adjacent.
template <class Sizes, class T>
__device__ inline T* thread_pack(T* memory, int j, int e) {
  return memory + ((4 * j + e) * Sizes::kThreads + threadIdx.x) * 4;
}
template <class Sizes>
__device__ inline void store_packs(float* to, const RegisterMemory<Sizes>& x) {
  each_row<Sizes>([&](int j, int e) { store<4>(thread_pack<Sizes>(to, j, e), x.at[j][e]); });
}
template <class Sizes>
__device__ inline void load_packs(RegisterMemory<Sizes>& x, const float* from) {
  each_row<Sizes>([&](int j, int e) { x.at[j][e] = load<4>(thread_pack<Sizes>(from, j, e)); });
}

// A token's row in shared memory: k, then h [D], a and 1 / |x| [M], gamma and g, then q and do of every query
// head. Its results: dq of every query head, dk, and the terms of each warp in dh.
template <class Sizes>
struct TokenRowLayout {
  static constexpr int kVectors = Sizes::D + 2 * Sizes::M;
  int group, in, out;

  __host__ __device__ explicit TokenRowLayout(int group)
      : group(group),
        in(Sizes::M + kVectors + 4 + group * (Sizes::M + Sizes::D)),
        out((group + 1) * Sizes::M + Sizes::kWarps * Sizes::D) {}

  static constexpr int kH = Sizes::M, kA = kH + Sizes::D, kInverse = kA + Sizes::M;
  static constexpr int kGamma = kInverse + Sizes::M, kMember = Sizes::M + Sizes::D;
  __device__ int q(int member) const { return kGamma + 4 + member * kMember; }
  __device__ int dout(int member) const { return q(member) + Sizes::M; }
  __device__ int dq(int member) const { return member * Sizes::M; }
  __device__ int dk() const { return group * Sizes::M; }
  __device__ int dh() const { return dk() + Sizes::M; }

  __device__ static void store_results(float* vectors, const TokenResults<Sizes>& results) {
    const ThreadTile place;
    if (place.warp == 0 && place.lane < 8) {
#pragma unroll
      for (int j = 0; j < Sizes::kPacks; ++j) store<4>(vectors + 32 * j + place.row, results.h.at[j]);
    }
    if (place.first) {
      store<4>(vectors + kA - kH + place.col, results.a);
      store<4>(vectors + kInverse - kH + place.col, results.inverse);
    }
  }
};

// Scalars of a segment's tokens: the sum of the chunk's gates, and for every warp its terms of dgamma, of
// dx.S, and of e^g dDelta.Delta of the token before.
template <class Sizes>
struct TokenScalars {
  static constexpr int kWarps = Sizes::kWarps;
  float* data;

  __device__ float* gates(int token) const { return data + token; }
  __device__ float* dgamma(int token, int warp) const {
    return data + kLatticeSegment + token * kWarps + warp;
  }
  __device__ float* along(int token, int warp) const {
    return dgamma(kLatticeSegment, 0) + token * kWarps + warp;
  }
  __device__ float* before(int token, int warp) const {
    return along(kLatticeSegment, 0) + token * kWarps + warp;
  }
  __device__ static float sum(const float* of) {
    float sum = 0.f;
    for (int w = 0; w < kWarps; ++w) sum += of[w];
    return sum;
  }
};

// If a call resumes a chunk, S and the earlier steps Delta_0 are tangent to each other. In the chunk form (n
// in csrc/ops/lattice/cpu.cpp) |x|^2 therefore does not depend on s.Delta_0, which is 0. Here x is computed
// directly, and |x|^2 has the term 2 (m - sigma) e^{L_t - L_0} s.Delta_0 with sigma = sum of E_tj W_j a_j.
// Its gradient is subtracted: for each column a sum over the tokens of the chunk, times Delta_0 and S:
//
//     c_t = e^{L_t - L_0} (y.dy) / |x|^2     C_j = c_j + e^{g_{j+1}} C_{j+1}     sum += c_j m_j - W_j a_j C_j
struct ResumeCorrection {
  Pack<4> sum = zeros<4>(), C = zeros<4>();
};

// A token in backward.
template <class Sizes>
struct TokenBackward {
  using Row = TokenRowLayout<Sizes>;
  const LatticeFp32Shape& shape;
  const Row& row;
  const float *in, *y, *S;  // inputs of the token; memories in the layout of store_packs()
  float* out;
  const TokenScalars<Sizes> scalars;
  int token;
  bool ends_chunk;               // it is the last token of its chunk
  ResumeCorrection* correction;  // null unless the token is in a resumed chunk
  float L_start;
  RegisterMemory<Sizes>&dS, &dDelta;  // on entry for the later token, on return for the earlier one
  const ThreadTile place = {};
  Pack<4> along, read_along, inverse;  // y.dy, its term of the read, 1 / |x|
  Pack<4> delta_h, delta_s, square;    // dDelta^T h, dDelta.phi, |s|^2
  float memory_decay, dkept, dthreshold;

  __device__ Pack<4> of(const float* memory, int j, int e) const {
    return load<4>(thread_pack<Sizes>(memory, j, e));
  }
  __device__ Pack<4> cols(int at) const { return load<4>(in + at + place.col); }
  __device__ Pack<4> rows(int at, int j) const { return load<4>(in + at + 32 * j + place.row); }

  // has_next_in_chunk: the next token is in the same chunk and has a gate.
  __device__ void back(bool has_next_in_chunk) {
    inverse = cols(row.kInverse), memory_decay = expf(fmaxf(*scalars.gates(token), -30.f));
    if (has_next_in_chunk) add_next_gate();
    compute_dq();
    compute_dx();
    step();
  }

  // Term of dg of the next token: (e^g dDelta).Delta with Delta = |x| y - m S.
  __device__ void add_next_gate() {
    Pack<4> length;
    each_col([&](int c) { length.at[c] = inverse.at[c] > 0.f ? __fdividef(1.f, inverse.at[c]) : 0.f; });
    float sum = 0.f;
    each_row<Sizes>([&](int j, int e) {
      const Pack<4> read = of(y, j, e), s = of(S, j, e);
      each_col([&](int c) {
        sum = fmaf(dDelta.at[j][e].at[c], fmaf(read.at[c], length.at[c], -memory_decay * s.at[c]), sum);
      });
    });
    sum = sum_lanes(sum);
    if (place.lane == 0) *scalars.before(token + 1, place.warp) = sum;
  }

  // dq = y^T do; y.dy
  __device__ void compute_dq() {
    along = zeros<4>();
    for (int member = 0; member < row.group; ++member) {
      const Pack<4> q = cols(row.q(member));
      Pack<4> dq = zeros<4>();
#pragma unroll
      for (int j = 0; j < Sizes::kPacks; ++j) {
        const Pack<4> dout = rows(row.dout(member), j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const Pack<4> read = of(y, j, e);
          each_col([&](int c) { dq.at[c] = fmaf(read.at[c], dout.at[e], dq.at[c]); });
        }
      }
      sum_rows(dq);
      if (place.first) store<4>(out + row.dq(member) + place.col, dq);
      each_col([&](int c) { along.at[c] = fmaf(q.at[c], dq.at[c], along.at[c]); });
    }
    read_along = along;
    if (!ends_chunk) return;
    Pack<4> next = zeros<4>();
    each_row<Sizes>([&](int j, int e) {
      const Pack<4> read = of(y, j, e);
      each_col([&](int c) { next.at[c] = fmaf(read.at[c], dS.at[j][e].at[c], next.at[c]); });
    });
    sum_rows(next);
    each_col([&](int c) { along.at[c] += next.at[c]; });
  }

  // dx = (dy - y (y.dy)) / |x|, dDelta <- dDelta + dx, dS <- dS + m dx
  __device__ void compute_dx() {
    if (!shape.normalize) along = zeros<4>();
    delta_h = delta_s = square = zeros<4>();
    dkept = dthreshold = 0.f;
#pragma unroll
    for (int j = 0; j < Sizes::kPacks; ++j) {
      Pack<4> dy[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) dy[e] = ends_chunk ? dS.at[j][e] : zeros<4>();
      for (int member = 0; member < row.group; ++member) {
        const Pack<4> dout = rows(row.dout(member), j), q = cols(row.q(member));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          each_col([&](int c) { dy[e].at[c] = fmaf(dout.at[e], q.at[c], dy[e].at[c]); });
        }
      }
      const Pack<4> h = rows(row.kH, j);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const Pack<4> read = of(y, j, e), s = of(S, j, e);
        each_col([&](int c) {
          float dx = inverse.at[c] * fmaf(-read.at[c], along.at[c], dy[e].at[c]);
          if (shape.shrinkage > 0.f) {
            dx = read.at[c] == 0.f ? 0.f : dx;
            dthreshold -= read.at[c] > 0.f ? dx : -dx;
          }
          const float stays = inverse.at[c] > 0.f ? 0.f : dy[e].at[c];  // a column of zeros
          float &to = dS.at[j][e].at[c], &d = dDelta.at[j][e].at[c];
          to = fmaf(memory_decay, dx, (ends_chunk ? 0.f : to) + stays);
          d = (ends_chunk ? 0.f : d) + dx;
          dkept = fmaf(dx, s.at[c], dkept);
          delta_h.at[c] = fmaf(d, h.at[e], delta_h.at[c]);
          delta_s.at[c] = fmaf(d, s.at[c], delta_s.at[c]);
          square.at[c] = fmaf(s.at[c], s.at[c], square.at[c]);
        });
      }
    }
    sum_rows(delta_h), sum_rows(delta_s);
    if (!shape.normalize) sum_rows(square);
  }

  // dW, da, dh, dphi and their terms; dDelta <- e^g dDelta
  __device__ void step() {
    const bool decode = shape.objective == LatticeObjective::decode,
               encode = shape.objective == LatticeObjective::encode;
    const Pack<4> k = cols(0), a = cols(row.kA), unit = unit_of(square, shape);
    const float sign = sign_of(shape.objective), step = sign * in[row.kGamma];
    Pack<4> W, dW, da, dk;
    float dstep = 0.f;
    each_col([&](int c) {
      delta_s.at[c] *= unit.at[c];
      const float by = encode ? a.at[c] - k.at[c] : k.at[c];
      W.at[c] = step * by * unit.at[c];
      dW.at[c] = fmaf(-a.at[c], delta_s.at[c], delta_h.at[c]);  // by W without 1 / l
      const float dby = step * unit.at[c] * dW.at[c];
      dstep = fmaf(dW.at[c] * unit.at[c], by, dstep);
      da.at[c] = (encode ? dby : 0.f) - W.at[c] * delta_s.at[c];
      dk.at[c] = encode ? -dby : dby;
    });
    const float dgamma = sum_lanes((place.first ? sign * dstep : 0.f) + shape.shrinkage * dthreshold);
    dkept = sum_lanes(dkept);
    if (place.lane == 0) {
      *scalars.dgamma(token, place.warp) = dgamma;
      *scalars.along(token, place.warp) = dkept;
    }

    // dh = dDelta W + phi da; decode also: phi^T dh
    RowPacks<Sizes> dh;
    each_row<Sizes>([&](int j, int e) {
      const Pack<4> s = of(S, j, e);
      float sum = 0.f;
      each_col([&](int c) {
        sum = fmaf(dDelta.at[j][e].at[c], W.at[c], fmaf(s.at[c], da.at[c] * unit.at[c], sum));
      });
      dh.at[j].at[e] = sum;
    });
    float* const parts = out + row.dh();
    store_row_sums<Sizes>(dh, parts + place.warp * Sizes::D);
    Pack<4> through = zeros<4>();
    if (decode) {
      memory_barrier<Sizes>();
      dh = sum_over_warps<Sizes>(parts);
      each_row<Sizes>([&](int j, int e) {
        const Pack<4> s = of(S, j, e);
        each_col([&](int c) { through.at[c] = fmaf(s.at[c], dh.at[j].at[e], through.at[c]); });
      });
      sum_rows(through);
      each_col([&](int c) { dk.at[c] += through.at[c] *= unit.at[c]; });
    }
    if (place.first) store<4>(out + row.dk() + place.col, dk);

    // dphi = -dDelta * (W a) + h da^T + dh k^T; dS <- dS + dphi, or (dphi - phi (phi.dphi + dW W)) / l
    Pack<4> delta_factor, h_factor, dh_factor, s_factor;
    each_col([&](int c) {
      const float Wa = W.at[c] * a.at[c], k_value = decode ? k.at[c] : 0.f;
      delta_factor.at[c] = -Wa * unit.at[c], h_factor.at[c] = da.at[c] * unit.at[c],
      dh_factor.at[c] = k_value * unit.at[c];
      const float to_phi = fmaf(-delta_s.at[c], Wa, fmaf(a.at[c], da.at[c], through.at[c] * k_value));
      s_factor.at[c] = -unit.at[c] * unit.at[c] * fmaf(dW.at[c], W.at[c], to_phi);
    });
    const float decay = expf(in[row.kGamma + 1]);
    if (correction != nullptr) {
      const float call_decay = expf(*scalars.gates(token) - L_start);
      each_col([&](int c) {
        const float read_term = call_decay * inverse.at[c] * inverse.at[c] * read_along.at[c];
        float& C = correction->C.at[c];
        C += read_term;
        correction->sum.at[c] =
            fmaf(read_term, memory_decay, fmaf(-W.at[c] * a.at[c], C, correction->sum.at[c]));
        C *= decay;
      });
    }
#pragma unroll
    for (int j = 0; j < Sizes::kPacks; ++j) {
      const Pack<4> h = rows(row.kH, j);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const Pack<4> s = shape.normalize ? zeros<4>() : of(S, j, e);
        each_col([&](int c) {
          float &to = dS.at[j][e].at[c], &d = dDelta.at[j][e].at[c];
          to = fmaf(d, delta_factor.at[c], fmaf(h.at[e], h_factor.at[c], to));
          to = fmaf(dh.at[j].at[e], dh_factor.at[c], fmaf(s.at[c], s_factor.at[c], to));
          d *= decay;
        });
      }
    }
  }
};

}  // namespace girih::kernels::lattice
