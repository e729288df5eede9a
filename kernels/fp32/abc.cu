// The gates of ABC and their gradient (fp32.h). Both recurrences are parallel over chunks, in three
// launches: the part of every chunk from an empty state, a scan over the chunks that replaces every part by
// the state before the chunk, and every chunk from that state. A thread has one slot of one chunk, or of one
// sequence.
#include <type_traits>

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

// The arguments of a launch, with the parts of all chunks, [chunks, heads, slots].
struct GatesParams : AbcGates {
  Normaliser* parts;
};
struct GradientParams : AbcGradient {
  GradientMap* parts;
};

template <class Params>
__device__ inline auto& part_at(const Params& p, int64_t chunk, const Slot& slot) {
  return p.parts[(chunk * p.heads + slot.head) * p.slots + slot.m];
}

// Calls f(index, slot) for the jobs of the thread; a job is one of `columns` slots of one of `count` chunks
// or sequences, and index is the number of the chunk or sequence.
template <class F>
__device__ inline void for_each_slot(int64_t count, int heads, int columns, const F& f) {
  const int64_t jobs = count * heads * columns, grid_threads = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t job = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; job < jobs;
       job += grid_threads) {
    const int64_t row = job / columns;
    f(row / heads, Slot{static_cast<int>(row % heads), static_cast<int>(job % columns)});
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
__global__ void __launch_bounds__(kThreads) chunk_gates(const __grid_constant__ GatesParams p) {
  const int columns = Write ? p.M : p.slots;
  for_each_slot(token_range_count(p.tokens, kChunk), p.heads, columns, [&](int64_t chunk, const Slot& slot) {
    const TokenRange range = token_range_at(p.tokens, chunk, kChunk);
    if constexpr (Write) {
      float *const s = column_at(p.s, range, slot), *const g = column_at(p.g, range, slot);
      if (slot.m >= p.slots) {
        for (int row = 0; row < range.length; ++row) s[row * p.s.stride[1]] = g[row * p.g.stride[1]] = 0.f;
        return;
      }
      Normaliser before = part_at(p, chunk, slot);
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
      part_at(p, chunk, slot) = all;
    }
  });
}

// Replaces the part of every chunk of a sequence by f(part), from the first chunk to the last, or with
// Reverse from the last to the first.
template <bool Reverse, class Params, class F>
__device__ inline void replace_parts(const Params& p, const Sequence& sequence, const Slot& slot,
                                     const F& f) {
  const int64_t count = divide_up(sequence.end - sequence.start, kChunk);
  const int64_t first = first_token_range(p.tokens, sequence, kChunk);
  const auto at = [&](int64_t i) -> auto& { return part_at(p, first + (Reverse ? count - 1 - i : i), slot); };
  for (int64_t i = 0; i < count; i += kPrefetch) {
    std::decay_t<decltype(*p.parts)> part[kPrefetch];
#pragma unroll
    for (int j = 0; j < kPrefetch; ++j) {
      if (i + j < count) part[j] = at(i + j);
    }
#pragma unroll
    for (int j = 0; j < kPrefetch; ++j) {
      if (i + j < count) at(i + j) = f(part[j]);
    }
  }
}

__global__ void __launch_bounds__(kThreads) join_gates(const __grid_constant__ GatesParams p) {
  for_each_slot(p.tokens.sequences, p.heads, p.slots, [&](int64_t index, const Slot& slot) {
    const Sequence sequence = sequence_at(p.tokens, index);
    Normaliser state{0.f, 0.f};
    if (p.initial.data != nullptr) {
      const float z =
          static_cast<const float*>(p.initial.data)[offset_of(p.initial, index, slot.head, slot.m)];
      state.add(z, z > kEmpty ? 1.f : 0.f);
    }
    replace_parts<false>(p, sequence, slot, [&](Normaliser part) {
      const Normaliser before = state;
      state.add(part.top, part.sum);
      return before;
    });
    static_cast<float*>(p.final.data)[offset_of(p.final, index, slot.head, slot.m)] = state.z();
  });
}

template <bool Write>
__global__ void __launch_bounds__(kThreads) chunk_gradient(const __grid_constant__ GradientParams p) {
  for_each_slot(token_range_count(p.tokens, kChunk), p.heads, p.slots, [&](int64_t chunk, const Slot& slot) {
    const TokenRange range = token_range_at(p.tokens, chunk, kChunk);
    GradientMap& part = part_at(p, chunk, slot);
    const float *const s = column_at(p.s, range, slot), *const g = column_at(p.g, range, slot),
                       *const ds = column_at(p.ds, range, slot), *const dg = column_at(p.dg, range, slot);
    float* const dlogits = Write ? column_at(p.dlogits, range, slot) : nullptr;
    float keep = 1.f, Z = Write ? part.add : 0.f;
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
    if (!Write) part = {keep, Z};
  });
}

__global__ void __launch_bounds__(kThreads) join_gradient(const __grid_constant__ GradientParams p) {
  for_each_slot(p.tokens.sequences, p.heads, p.slots, [&](int64_t index, const Slot& slot) {
    const auto at = [&](const InputTensor<3>& x) {
      return static_cast<const float*>(x.data)[offset_of(x, index, slot.head, slot.m)];
    };
    float Z = p.final.data == nullptr ? 0.f : at(p.final);
    replace_parts<true>(p, sequence_at(p.tokens, index), slot, [&](GradientMap part) {
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

template <auto Kernel, class Params>
cudaError_t launch_jobs(const Params& p, int64_t jobs, cudaStream_t stream) {
  if (jobs == 0) return cudaSuccess;
  return launch_grid<Kernel>(clamp_grid_blocks(divide_up(jobs, kThreads)), kThreads, 0, stream, p);
}

}  // namespace
}  // namespace fp32

cudaError_t abc_gates(const AbcGates& problem, Workspace& workspace, cudaStream_t stream) {
  using namespace fp32;
  const int64_t chunk_heads = token_range_count(problem.tokens, kChunk) * problem.heads;
  const GatesParams p{problem, workspace.array<Normaliser>(chunk_heads * problem.slots)};
  GIRIH_TRY(launch_jobs<chunk_gates<false>>(p, chunk_heads * p.slots, stream));
  GIRIH_TRY(launch_jobs<join_gates>(p, p.tokens.sequences * p.heads * p.slots, stream));
  return launch_jobs<chunk_gates<true>>(p, chunk_heads * p.M, stream);
}

cudaError_t abc_gradient(const AbcGradient& problem, Workspace& workspace, cudaStream_t stream) {
  using namespace fp32;
  const int64_t chunk_slots = token_range_count(problem.tokens, kChunk) * problem.heads * problem.slots;
  const GradientParams p{problem, workspace.array<GradientMap>(chunk_slots)};
  GIRIH_TRY(launch_jobs<chunk_gradient<false>>(p, chunk_slots, stream));
  GIRIH_TRY(launch_jobs<join_gradient>(p, p.tokens.sequences * p.heads * p.slots, stream));
  return launch_jobs<chunk_gradient<true>>(p, chunk_slots, stream);
}

}  // namespace girih::kernels
