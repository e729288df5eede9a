// The gates of ABC and their gradient (fp32.h). Both recurrences are parallel over chunks, in three
// launches: the part of every chunk from an empty state, a scan over the chunks that replaces every part by
// the state before the chunk, and every chunk from that state. A thread has one slot of one chunk, or of one
// sequence.
#include "fp32/fp32.h"
#include "tile/grid.h"
#include "tile/launch.h"
#include "tile/pack.h"

namespace girih::kernels {
namespace fp32 {
namespace {

constexpr int kThreads = 128;
constexpr int kPrefetch = 8;      // elements loaded at once: the scan is bound by the latency of memory
constexpr float kEmpty = -1e29f;  // logits up to this value are masked

// z = top + log(sum), stored as both parts to avoid the rounding of a logarithm after every token. sum = 0:
// empty.
struct Normaliser {
  float top, sum;

  __device__ void add(float other, float count) {
    if (count == 0.f) return;
    if (sum == 0.f) {
      top = other, sum = count;
    } else if (other <= top) {
      sum = fmaf(count, expf(other - top), sum);
    } else {
      sum = fmaf(sum, expf(top - other), count);
      top = other;
    }
  }
  __device__ float z() const { return sum == 0.f ? -INFINITY : top + logf(sum); }
};

// The map of a chunk from the gradient Z after it to the gradient before it: keep Z + add.
struct GradientMap {
  float keep, add;
};

struct Slot {
  int head, m;
};

template <template <int> class Array>
__device__ inline auto column_at(const Array<4>& x, const TokenRange& range, const Slot& slot) {
  return at<float>(x, range.sequence.batch, range.start, slot.head) + slot.m * x.stride[3];
}

// Calls f(job, index, slot) for the jobs of the thread; a job is one slot of one of `count` chunks or
// sequences, and index is the number of the chunk or sequence.
template <class Problem, class F>
__device__ inline void for_each_slot(const Problem& p, int64_t count, const F& f) {
  const int64_t jobs = count * p.heads * p.M, grid_threads = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t job = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; job < jobs;
       job += grid_threads) {
    const int64_t row = job / p.M;
    f(job, row / p.heads, Slot{static_cast<int>(row % p.heads), static_cast<int>(job % p.M)});
  }
}

// Calls f(row, logit) for the tokens of a chunk in the order of time.
template <class F>
__device__ inline void for_each_logit(const AbcGates& p, const TokenRange& range, const Slot& slot,
                                      const F& f) {
  const float* const logits = column_at(p.logits, range, slot);
  for (int first = 0; first < range.length; first += kPrefetch) {
    float logit[kPrefetch];
#pragma unroll
    for (int i = 0; i < kPrefetch; ++i) {
      logit[i] = first + i < range.length ? logits[(first + i) * p.logits.stride[1]] : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kPrefetch; ++i) {
      if (first + i < range.length) f(first + i, logit[i]);
    }
  }
}

template <bool Write>
__global__ void __launch_bounds__(kThreads) chunk_gates(const __grid_constant__ AbcGates p) {
  for_each_slot(p, token_range_count(p.tokens, kChunk), [&](int64_t job, int64_t chunk, const Slot& slot) {
    const TokenRange range = token_range_at(p.tokens, chunk, kChunk);
    Normaliser* const part = static_cast<Normaliser*>(p.workspace) + job;
    if constexpr (Write) {
      Normaliser before = *part;
      float *const s = column_at(p.s, range, slot), *const g = column_at(p.g, range, slot);
      for_each_logit(p, range, slot, [&](int row, float logit) {
        float weight = 0.f, gate = 0.f;
        if (logit > kEmpty) {
          if (before.sum == 0.f) {
            weight = 1.f;
          } else {
            // d = a_t - z_{t-1}:   s = sigmoid(d),   g = -log(1 + e^d)
            const float d = (logit - before.top) - logf(before.sum), e = expf(-fabsf(d));
            weight = (d > 0.f ? 1.f : e) / (1.f + e);
            gate = -(fmaxf(d, 0.f) + log1pf(e));
          }
          before.add(logit, 1.f);
        }
        s[row * p.s.stride[1]] = weight;
        g[row * p.g.stride[1]] = gate;
      });
    } else {
      Normaliser all{0.f, 0.f};
      for_each_logit(p, range, slot, [&](int, float logit) { all.add(logit, logit > kEmpty ? 1.f : 0.f); });
      *part = all;
    }
  });
}

// Replaces the part of every chunk of a sequence by f(part), from the first chunk to the last, or with
// Reverse from the last to the first.
template <bool Reverse, class Part, class F>
__device__ inline void replace_parts(void* parts, const SequenceLayout& tokens, const Sequence& sequence,
                                     int heads, int M, const Slot& slot, const F& f) {
  const int64_t count = divide_up(sequence.end - sequence.start, kChunk);
  const int64_t first = first_token_range(tokens, sequence, kChunk);
  const auto at = [&](int64_t i) {
    const int64_t chunk = first + (Reverse ? count - 1 - i : i);
    return static_cast<Part*>(parts) + (chunk * heads + slot.head) * M + slot.m;
  };
  for (int64_t i = 0; i < count; i += kPrefetch) {
    Part part[kPrefetch];
#pragma unroll
    for (int j = 0; j < kPrefetch; ++j) {
      if (i + j < count) part[j] = *at(i + j);
    }
#pragma unroll
    for (int j = 0; j < kPrefetch; ++j) {
      if (i + j < count) *at(i + j) = f(part[j]);
    }
  }
}

__global__ void __launch_bounds__(kThreads) join_gates(const __grid_constant__ AbcGates p) {
  for_each_slot(p, p.tokens.sequences, [&](int64_t, int64_t index, const Slot& slot) {
    const Sequence sequence = sequence_at(p.tokens, index);
    Normaliser state{0.f, 0.f};
    if (p.initial.data != nullptr) {
      const float z =
          static_cast<const float*>(p.initial.data)[offset_of(p.initial, index, slot.head, slot.m)];
      state.add(z, z > kEmpty ? 1.f : 0.f);
    }
    replace_parts<false, Normaliser>(p.workspace, p.tokens, sequence, p.heads, p.M, slot,
                                     [&](Normaliser part) {
                                       const Normaliser before = state;
                                       state.add(part.top, part.sum);
                                       return before;
                                     });
    static_cast<float*>(p.final.data)[offset_of(p.final, index, slot.head, slot.m)] = state.z();
  });
}

template <bool Write>
__global__ void __launch_bounds__(kThreads) chunk_gradient(const __grid_constant__ AbcGradient p) {
  for_each_slot(p, token_range_count(p.tokens, kChunk), [&](int64_t job, int64_t chunk, const Slot& slot) {
    const TokenRange range = token_range_at(p.tokens, chunk, kChunk);
    GradientMap* const part = static_cast<GradientMap*>(p.workspace) + job;
    const float *const s = column_at(p.s, range, slot), *const g = column_at(p.g, range, slot),
                       *const ds = column_at(p.ds, range, slot), *const dg = column_at(p.dg, range, slot);
    float* const dlogits = Write ? column_at(p.dlogits, range, slot) : nullptr;
    float keep = 1.f, Z = Write ? part->add : 0.f;
    for (int last = range.length - 1; last >= 0; last -= kPrefetch) {
      float weight[kPrefetch], gate[kPrefetch], dweight[kPrefetch], dgate[kPrefetch];
#pragma unroll
      for (int i = 0; i < kPrefetch; ++i) {
        const int row = last - i < 0 ? 0 : last - i;
        weight[i] = s[row * p.s.stride[1]], gate[i] = g[row * p.g.stride[1]];
        dweight[i] = ds[row * p.ds.stride[1]], dgate[i] = dg[row * p.dg.stride[1]];
      }
#pragma unroll
      for (int i = 0; i < kPrefetch; ++i) {
        if (last - i < 0) break;
        // The first token of an empty memory: z_t is its logit and does not depend on z_{t-1}.
        const bool is_first = weight[i] == 1.f && gate[i] == 0.f;
        const float decay = is_first ? 0.f : expf(gate[i]);
        const float own = is_first ? 0.f : weight[i] * (decay * dweight[i] - dgate[i]);
        if (Write) dlogits[(last - i) * p.dlogits.stride[1]] = fmaf(weight[i], Z, own);
        Z = fmaf(decay, Z, -own);
        keep *= decay;
      }
    }
    if (!Write) *part = {keep, Z};
  });
}

__global__ void __launch_bounds__(kThreads) join_gradient(const __grid_constant__ AbcGradient p) {
  for_each_slot(p, p.tokens.sequences, [&](int64_t, int64_t index, const Slot& slot) {
    const auto at = [&](const InputTensor<3>& x) {
      return static_cast<const float*>(x.data)[offset_of(x, index, slot.head, slot.m)];
    };
    float Z = p.final.data == nullptr ? 0.f : at(p.final);
    replace_parts<true, GradientMap>(p.workspace, p.tokens, sequence_at(p.tokens, index), p.heads, p.M, slot,
                                     [&](GradientMap part) {
                                       const GradientMap later{0.f, Z};
                                       Z = fmaf(part.keep, Z, part.add);
                                       return later;
                                     });
    if (p.initial.data != nullptr) {
      static_cast<float*>(p.dinitial.data)[offset_of(p.dinitial, index, slot.head, slot.m)] =
          at(p.initial) > kEmpty ? Z : 0.f;
    }
  });
}

template <auto Kernel, class Problem>
cudaError_t launch_jobs(const Problem& p, int64_t jobs, cudaStream_t stream) {
  if (jobs == 0) return cudaSuccess;
  return launch_grid<Kernel>(clamp_grid_blocks(divide_up(jobs, kThreads)), kThreads, 0, stream, p);
}

// Launches the parts of the chunks, the scan over the chunks, and the results of the chunks.
template <auto Part, auto Join, auto Write, class Problem>
cudaError_t launch_passes(const Problem& p, cudaStream_t stream) {
  const int64_t chunks = token_range_count(p.tokens, kChunk) * p.heads * p.M;
  const int64_t sequences = p.tokens.sequences * p.heads * p.M;
  if (const cudaError_t error = launch_jobs<Part>(p, chunks, stream); error != cudaSuccess) return error;
  if (const cudaError_t error = launch_jobs<Join>(p, sequences, stream); error != cudaSuccess) return error;
  return launch_jobs<Write>(p, chunks, stream);
}

}  // namespace
}  // namespace fp32

int64_t abc_workspace(const SequenceLayout& tokens, int heads, int M) {
  return token_range_count(tokens, kChunk) * heads * M * static_cast<int64_t>(sizeof(fp32::Normaliser));
}

cudaError_t abc_gates(const AbcGates& p, cudaStream_t stream) {
  return fp32::launch_passes<fp32::chunk_gates<false>, fp32::join_gates, fp32::chunk_gates<true>>(p, stream);
}

cudaError_t abc_gradient(const AbcGradient& p, cudaStream_t stream) {
  return fp32::launch_passes<fp32::chunk_gradient<false>, fp32::join_gradient, fp32::chunk_gradient<true>>(
      p, stream);
}

}  // namespace girih::kernels
