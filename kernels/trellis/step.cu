// One token of decoding. A is read and written once; A' is read once, and written if the token completes its
// chunk. A block has a sequence and head; tile/row_groups.h assigns rows to threads.
#include "tile/grid.h"
#include "tile/launch.h"
#include "tile/pack.h"
#include "tile/row_groups.h"
#include "tile/shared.h"
#include "trellis/maps.cuh"

namespace girih::kernels {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
// Rows of a thread whose loads are in flight before the stores. The block is bound by memory latency.
constexpr int kTogether = 4;

__device__ inline float sum_over_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
__device__ inline float max_over_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// Statistics of y = silu(z) or z [M] and of a, computed by one warp.
template <class Map>
__device__ inline Fit fit_row(const Map& map, const float* y, const float* a, int M) {
  const auto sum_of = [&](const auto& term) {
    float sum = 0.f;
    for (int m = lane(); m < M; m += 32) sum += term(y[m], a[m]);
    return sum_over_warp(sum);
  };
  if constexpr (Map::softmax) {
    float most = -1e30f;
    for (int m = lane(); m < M; m += 32) most = fmaxf(most, y[m]);
    most = max_over_warp(most);
    const auto e = [&](float x) { return expf(x - most); };
    const Moments whole[1] = {{most, sum_of([&](float x, float) { return e(x); }),
                               sum_of([&](float x, float) { return e(x) * e(x); }),
                               sum_of([&](float x, float t) { return t * e(x); })}};
    return fit(map, whole, 0.f);
  } else {
    const float mean = sum_of([](float x, float) { return x; }) * map.centre;
    return fit_about(map, mean, sum_of([&](float x, float) { return (x - mean) * (x - mean); }),
                     sum_of([&](float x, float t) { return t * (x - mean); }),
                     sum_of([](float, float t) { return t; }));
  }
}

// Replaces y = silu(z) or z, whose slope is `slope`, by u = J_phi(z)^T (w * (w * phi(z) - a)); called by one
// warp. With n = phi(z), e = w * (w * n - a), s = n.e / N and r the root of n's norm: u = slope * (e -
// mean(e) - s n) / r; softmax: u = n * (e - n.e).
template <class Map>
__device__ inline void to_weighted_residual(const Map& map, float* y, const float* slope, const float* a,
                                            const float* w, int M) {
  const Fit found = fit_row(map, y, a, M);
  const auto image = [&](int m) {
    if constexpr (Map::softmax) return softmax_of(map, found, y[m]);
    return (y[m] - found.mean) * found.inverse;
  };
  float along = 0.f, all = 0.f;
  for (int m = lane(); m < M; m += 32) {
    const float n = image(m), e = w[m] * (w[m] * n - a[m]);
    along = fmaf(n, e, along), all += e;
  }
  along = sum_over_warp(along), all = sum_over_warp(all);
  for (int m = lane(); m < M; m += 32) {
    const float n = image(m), e = w[m] * (w[m] * n - a[m]);
    if constexpr (Map::softmax) {
      y[m] = n * (e - along);
    } else {
      y[m] = slope[m] * (e - all * map.centre - along * map.unit * n) * found.inverse;
    }
  }
}

// The token of a block: its sequence, head and vectors in shared memory, and the phases of the update in
// their order. A barrier separates two phases.
template <int N, int Memories>
struct StepBlock {
  using Columns = Pack<N>;
  using Share = RowGroups<N, kThreads>;

  const TrellisStep& p;
  const int64_t sequence;
  const int head, group;  // group: query heads of a memory
  const int thread, warp;
  const bool completes;   // whether the token completes its chunk
  const Share shares[2];  // of each memory
  float gamma, decay;
  float *q, *k, *v, *a, *z[2], *slope[2], *r, *parts;  // in shared memory
  float* w;  // weight of phi; needs one memory, and uses the storage of z[1]

  __device__ StepBlock(float* at, const TrellisStep& p)
      : p(p),
        sequence(blockIdx.x / static_cast<unsigned>(p.heads)),
        head(static_cast<int>(blockIdx.x % static_cast<unsigned>(p.heads))),
        group(p.query_heads / p.heads),
        thread(threadIdx.x),
        warp(warp_index()),
        completes(clamp(p.position[sequence], 0, p.chunk - 1) == p.chunk - 1),
        shares{Share(p.D), Share(p.V)} {
    // Arrays that are accessed in packs precede the others, because M may be odd.
    q = at, k = q + p.D, v = k + p.D, parts = v + p.V, a = parts + kWarps * p.V;
    z[0] = a + p.M, z[1] = z[0] + p.M, slope[0] = z[1] + p.M, slope[1] = slope[0] + p.M, r = slope[1] + p.M;
    w = z[1];
  }

  __device__ float* row(const Out<4>& state, int m) const {
    return static_cast<float*>(state.data) + offset_of(state, sequence, head, m);
  }

  // Calls f(m) with the thread's row of every kTogether, until M. All threads make the same number of calls.
  template <int Memory, class F>
  __device__ void for_rows(const F& f) const {
    const Share& share = shares[Memory];
    for (int m = 0; m < p.M; m += kTogether * share.rows) f(m + share.row);
  }
  template <int Memory>
  __device__ int width() const {
    return Memory == 0 ? p.D : p.V;
  }
  __device__ Columns get(const Out<4>& state, int m, int col) const {
    return load<N>(row(state, m) + col * state.stride[3]);
  }
  __device__ void put(const Out<4>& state, int m, int col, const Columns& x) const {
    store<N>(row(state, m) + col * state.stride[3], x);
  }
  // Loads columns of the thread's rows from m on; 0 for rows that do not exist.
  template <int Memory>
  __device__ void load_rows(Columns (&to)[kTogether], const Out<4>& state, int m, int col) const {
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int at = m + j * shares[Memory].rows;
      to[j] = at < p.M ? get(state, at, col) : zeros<N>();
    }
  }
  // A <- e^g A - gamma u x^T for these columns, in registers and in global memory.
  template <int Memory>
  __device__ void write_rows(Columns (&now)[kTogether], int m, int col, const Columns& x) const {
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int at = m + j * shares[Memory].rows;
      if (at >= p.M) continue;
      const float step = gamma * z[Memory][at];
#pragma unroll
      for (int i = 0; i < N; ++i) now[j].at[i] = fmaf(decay, now[j].at[i], -step * x.at[i]);
      put(p.memory[Memory], at, col, now[j]);
      if (completes) put(p.first[Memory], at, col, now[j]);
    }
  }
  __device__ static void add_dots(float (&sums)[kTogether], const Columns (&a)[kTogether], const Columns& x) {
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
#pragma unroll
      for (int i = 0; i < N; ++i) sums[j] = fmaf(a[j].at[i], x.at[i], sums[j]);
    }
  }
  // Prefetches A, which is accessed later, to the L2 cache.
  template <int Memory>
  __device__ void prefetch_memory() const {
    const Share& share = shares[Memory];
    const bool begins_line = p.memory[Memory].stride[3] == 1 && share.col % 32 == 0;
    if (!begins_line || p.chunk == 1) return;  // with chunks of one token A is read immediately
    for (int m = share.row; m < p.M; m += share.rows) {
      for (int col = share.col; col < width<Memory>(); col += share.cols)
        prefetch(row(p.memory[Memory], m) + col);
    }
  }

  __device__ void fetch(float* to, const In<3>& x, int at, int width) const {
    for (int i = thread; i < width; i += kThreads) to[i] = load_any(x, sequence, at, i);
  }
  __device__ void fetch_query(int member) const { fetch(q, p.q, head * group + member, p.D); }
  __device__ void fetch_token() {
    fetch(k, p.k, head, p.D);
    if (Memories == 2) fetch(v, p.v, head, p.V);
    if (Memories == 1 && p.weight.data != nullptr) {
      for (int m = thread; m < p.M; m += kThreads) w[m] = load_any(p.weight, head, m);
    }
    fetch(a, p.a, head, p.M);
    fetch_query(0);
    gamma = load_any(p.gamma, sequence, head);
    decay = p.g.data == nullptr ? 1.f : expf(load_any(p.g, sequence, head));
  }

  // z = A' x, then y = silu(z) or z and its slope. In a chunk of one token A' is A.
  template <int Memory>
  __device__ void products() const {
    const Share& share = shares[Memory];
    const float* const x = Memory == 0 ? k : v;
    const Out<4>& first = p.chunk == 1 ? p.memory[Memory] : p.first[Memory];
    for_rows<Memory>([&](int m) {
      float sums[kTogether] = {};
      for (int col = share.col; col < width<Memory>(); col += share.cols) {
        Columns A[kTogether];
        load_rows<Memory>(A, first, m, col);
        add_dots(sums, A, load<N>(x + col));
      }
      share.add_up(sums);
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int at = m + j * share.rows;
        if (share.col > 0 || at >= p.M) continue;
        const float s = 1.f / (1.f + expf(-sums[j])), y = sums[j] * s;
        z[Memory][at] = p.phi.silu ? y : sums[j];
        slope[Memory][at] = p.phi.silu ? fmaf(y, 1.f - s, s) : 1.f;
      }
    });
  }

  // Replaces y by u = J_phi(z)^T (phi(z) - a); one warp for each memory.
  __device__ void residuals() const {
    if (warp >= Memories) return;
    float *of = warp == 0 ? z[0] : z[1], *by = warp == 0 ? slope[0] : slope[1];
    with_map(p.phi, p.M, [&](const auto& phi) {
      if (Memories == 1 && p.weight.data != nullptr) {
        to_weighted_residual(phi, of, by, a, w, p.M);
        return;
      }
      const Fit found = fit_row(phi, of, a, p.M);
      const Residual residual(found);
      for (int m = lane(); m < p.M; m += 32) {
        if constexpr (phi.softmax) {
          const float at = softmax_of(phi, found, of[m]);
          of[m] = at * (at - a[m] - (found.beta - found.mean_a));
        } else {
          of[m] = by[m] * residual(of[m], a[m]);
        }
      }
    });
  }

  // If `steps`: A <- e^g A - gamma u k^T. Then y = A q, and r = silu(y) or y.
  __device__ void pass_keys(bool steps) const {
    const Share& share = shares[0];
    for_rows<0>([&](int m) {
      float sums[kTogether] = {};
      for (int col = share.col; col < p.D; col += share.cols) {
        Columns A[kTogether];
        load_rows<0>(A, p.memory[0], m, col);
        if (steps) write_rows<0>(A, m, col, load<N>(k + col));
        add_dots(sums, A, load<N>(q + col));
      }
      share.add_up(sums);
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int at = m + j * share.rows;
        if (share.col == 0 && at < p.M) r[at] = p.f.silu ? sums[j] / (1.f + expf(-sums[j])) : sums[j];
      }
    });
  }

  // Replaces y by r = f(y); called by one warp.
  __device__ void map_read() const {
    with_map(p.f, p.M, [&](const auto& f) {
      const Fit found = fit_row(f, r, r, p.M);
      for (int m = lane(); m < p.M; m += 32) {
        if constexpr (f.softmax) {
          r[m] = softmax_of(f, found, r[m]);
        } else {
          r[m] = (r[m] - found.mean) * found.inverse;
        }
      }
    });
  }

  // If `steps`: A <- e^g A - gamma u v^T. Then o = A^T r, as one sum over rows for each warp.
  __device__ void pass_values(bool steps) const {
    const Share& share = shares[1];
    // uniform in a warp, because add_up() needs all lanes
    for (int first = 0; first < p.V; first += share.cols) {
      const int col = first + share.col;
      Columns o = zeros<N>();
      if (col < p.V) {
        for_rows<1>([&](int m) {
          Columns A[kTogether];
          load_rows<1>(A, p.memory[1], m, col);
          if (steps) write_rows<1>(A, m, col, load<N>(v + col));
#pragma unroll
          for (int j = 0; j < kTogether; ++j) {
            const int at = m + j * share.rows;
            const float by = at < p.M ? r[at] : 0.f;
#pragma unroll
            for (int i = 0; i < N; ++i) o.at[i] = fmaf(A[j].at[i], by, o.at[i]);
          }
        });
      }
      share.add_up(o);
      if (lane() < share.lanes && col < p.V) store<N>(parts + warp * p.V + col, o);
    }
  }
  __device__ void store_read(int member) const {
    const int width = Memories == 2 ? p.V : p.M;
    for (int i = thread; i < width; i += kThreads) {
      const float x = Memories == 2 ? Share::sum_of_warps(parts + i, p.V) : r[i];
      store_any(p.o, x, sequence, head * group + member, i);
    }
  }

  // Processes a query head. The first one of a memory updates the memory.
  __device__ void pass(int member) const {
    pass_keys(member == 0);
    __syncthreads();
    if (warp == 0) map_read();
    __syncthreads();
    if constexpr (Memories == 2) {
      pass_values(member == 0);
      __syncthreads();
    }
    store_read(member);
  }
};

template <int N, int Memories>
__global__ void __launch_bounds__(kThreads, 4) trellis_step_kernel(const __grid_constant__ TrellisStep p) {
  extern __shared__ __align__(16) float shared[];
  StepBlock<N, Memories> block(shared, p);
  block.template prefetch_memory<0>();
  if constexpr (Memories == 2) block.template prefetch_memory<1>();
  block.fetch_token();
  __syncthreads();
  block.template products<0>();
  if constexpr (Memories == 2) block.template products<1>();
  __syncthreads();
  block.residuals();
  __syncthreads();
  for (int member = 0; member < block.group; ++member) {
    if (member > 0) {
      __syncthreads();
      block.fetch_query(member);
      __syncthreads();
    }
    block.pass(member);
  }
}

// Runs after all heads have read the position.
__global__ void advance_kernel(int64_t* position, int64_t sequences, int chunk) {
  const int64_t n = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (n < sequences) position[n] = (clamp(position[n], 0, chunk - 1) + 1) % chunk;
}

}  // namespace

cudaError_t trellis_step(const TrellisStep& p, cudaStream_t stream) {
  const int64_t blocks = p.sequences * p.heads, floats = 2 * p.D + (1 + kWarps) * int64_t{p.V} + 6 * p.M,
                bytes = floats * sizeof(float);
  if (blocks == 0) return cudaSuccess;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  if (bytes > limit) return cudaErrorInvalidValue;
  bool packs = p.D % 4 == 0 && p.V % 4 == 0;
  for (int i = 0; i < p.memories; ++i)
    packs = packs && fits_packs(p.memory[i], 4, 4) && fits_packs(p.first[i], 4, 4);
  const auto two = packs ? launch_kernel<trellis_step_kernel<4, 2>, TrellisStep>
                         : launch_kernel<trellis_step_kernel<1, 2>, TrellisStep>;
  const auto one = packs ? launch_kernel<trellis_step_kernel<4, 1>, TrellisStep>
                         : launch_kernel<trellis_step_kernel<1, 1>, TrellisStep>;
  const auto launch = p.memories == 1 ? one : two;
  const cudaError_t error = launch(p, blocks, kThreads, static_cast<int>(bytes), stream, limit);
  if (error != cudaSuccess) return error;
  return launch_grid<advance_kernel>(divide_up(p.sequences, kThreads), kThreads, 0, stream, p.position,
                                     p.sequences, p.chunk);
}

}  // namespace girih::kernels
