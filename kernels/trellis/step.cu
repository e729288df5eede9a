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
constexpr int kRowsInFlight = 4;

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
__device__ inline MapStats compute_stats_of_warp_row(const Map& map, const float* y, const float* a, int M) {
  const auto sum_of = [&](const auto& term) {
    float sum = 0.f;
    for (int m = lane(); m < M; m += 32) sum += term(y[m], a[m]);
    return sum_over_warp(sum);
  };
  if constexpr (Map::softmax) {
    float max_y = -1e30f;
    for (int m = lane(); m < M; m += 32) max_y = fmaxf(max_y, y[m]);
    max_y = max_over_warp(max_y);
    const auto e = [&](float x) { return expf(x - max_y); };
    const Moments whole[1] = {{max_y, sum_of([&](float x, float) { return e(x); }),
                               sum_of([&](float x, float) { return e(x) * e(x); }),
                               sum_of([&](float x, float t) { return t * e(x); })}};
    return compute_stats(map, whole, 0.f);
  } else {
    const float mean = sum_of([](float x, float) { return x; }) * map.mean_factor;
    return stats_about_mean(map, mean, sum_of([&](float x, float) { return (x - mean) * (x - mean); }),
                            sum_of([&](float x, float t) { return t * (x - mean); }),
                            sum_of([](float, float t) { return t; }));
  }
}

// Replaces y = silu(z) or z, whose slope is `slope`, by u = J_phi(z)^T (w * (w * phi(z) - a)); called by one
// warp. With n = phi(z), e = w * (w * n - a), s = n.e / N and r the root of n's norm: u = slope * (e -
// mean(e) - s n) / r; softmax: u = n * (e - n.e).
template <class Map>
__device__ inline void compute_weighted_residual(const Map& map, float* y, const float* slope, const float* a,
                                                 const float* w, int M) {
  const MapStats stats = compute_stats_of_warp_row(map, y, a, M);
  const auto image = [&](int m) {
    if constexpr (Map::softmax) return softmax_of(map, stats, y[m]);
    return (y[m] - stats.mean) * stats.inverse;
  };
  float n_dot_e = 0.f, sum_e = 0.f;
  for (int m = lane(); m < M; m += 32) {
    const float n = image(m), e = w[m] * (w[m] * n - a[m]);
    n_dot_e = fmaf(n, e, n_dot_e), sum_e += e;
  }
  n_dot_e = sum_over_warp(n_dot_e), sum_e = sum_over_warp(sum_e);
  for (int m = lane(); m < M; m += 32) {
    const float n = image(m), e = w[m] * (w[m] * n - a[m]);
    if constexpr (Map::softmax) {
      y[m] = n * (e - n_dot_e);
    } else {
      y[m] = slope[m] * (e - sum_e * map.mean_factor - n_dot_e * map.norm_factor * n) * stats.inverse;
    }
  }
}

// The token of a block: its sequence, head and vectors in shared memory, and the phases of the update in
// their order. A barrier separates two phases.
template <int N, int MemoryCount>
struct StepBlock {
  using ColumnPack = Pack<N>;
  using ThreadRows = LaneGroups<N, kThreads>;

  const TrellisStep& p;
  const int64_t sequence;
  const int head, group;  // group: number of query heads of a memory
  const int thread, warp;
  const bool completes;                // whether the token completes its chunk
  const ThreadRows thread_rows_of[2];  // of each memory
  float gamma, decay;
  float *q, *k, *v, *a, *z[2], *slope[2], *r, *parts;  // in shared memory
  float* w;  // weight of phi; needs one memory, and uses the storage of z[1]

  __device__ StepBlock(float* shared, const TrellisStep& p)
      : p(p),
        sequence(blockIdx.x / static_cast<unsigned>(p.heads)),
        head(static_cast<int>(blockIdx.x % static_cast<unsigned>(p.heads))),
        group(p.query_heads / p.heads),
        thread(threadIdx.x),
        warp(warp_index()),
        completes(clamp(p.position[sequence], 0, p.chunk - 1) == p.chunk - 1),
        thread_rows_of{ThreadRows(p.D), ThreadRows(p.V)} {
    // Arrays that are accessed in packs precede the others, because M may be odd.
    q = shared, k = q + p.D, v = k + p.D, parts = v + p.V, a = parts + kWarps * p.V;
    z[0] = a + p.M, z[1] = z[0] + p.M, slope[0] = z[1] + p.M, slope[1] = slope[0] + p.M, r = slope[1] + p.M;
    w = z[1];
  }

  __device__ float* row(const OutputTensor<4>& state, int m) const {
    return static_cast<float*>(state.data) + offset_of(state, sequence, head, m);
  }

  // Calls f(m) with the thread's row of every kRowsInFlight, until M. All threads make the same number of
  // calls.
  template <int Memory, class F>
  __device__ void for_rows(const F& f) const {
    const ThreadRows& thread_rows = thread_rows_of[Memory];
    for (int m = 0; m < p.M; m += kRowsInFlight * thread_rows.rows) f(m + thread_rows.row);
  }
  template <int Memory>
  __device__ int width() const {
    return Memory == 0 ? p.D : p.V;
  }
  __device__ ColumnPack load_pack(const OutputTensor<4>& state, int m, int col) const {
    return load<N>(row(state, m) + col * state.stride[3]);
  }
  __device__ void store_pack(const OutputTensor<4>& state, int m, int col, const ColumnPack& x) const {
    store<N>(row(state, m) + col * state.stride[3], x);
  }
  // Loads columns of the thread's rows from m on; 0 for rows that do not exist.
  template <int Memory>
  __device__ void load_rows(ColumnPack (&to)[kRowsInFlight], const OutputTensor<4>& state, int m,
                            int col) const {
#pragma unroll
    for (int j = 0; j < kRowsInFlight; ++j) {
      const int at = m + j * thread_rows_of[Memory].rows;
      to[j] = at < p.M ? load_pack(state, at, col) : zeros<N>();
    }
  }
  // A <- e^g A - gamma u x^T for these columns, in registers and in global memory.
  template <int Memory>
  __device__ void update_rows(ColumnPack (&now)[kRowsInFlight], int m, int col, const ColumnPack& x) const {
#pragma unroll
    for (int j = 0; j < kRowsInFlight; ++j) {
      const int at = m + j * thread_rows_of[Memory].rows;
      if (at >= p.M) continue;
      const float step = gamma * z[Memory][at];
#pragma unroll
      for (int i = 0; i < N; ++i) now[j].at[i] = fmaf(decay, now[j].at[i], -step * x.at[i]);
      store_pack(p.memory[Memory], at, col, now[j]);
      if (completes) store_pack(p.chunk_start[Memory], at, col, now[j]);
    }
  }
  __device__ static void add_dots(float (&sums)[kRowsInFlight], const ColumnPack (&a)[kRowsInFlight],
                                  const ColumnPack& x) {
#pragma unroll
    for (int j = 0; j < kRowsInFlight; ++j) {
#pragma unroll
      for (int i = 0; i < N; ++i) sums[j] = fmaf(a[j].at[i], x.at[i], sums[j]);
    }
  }
  // Prefetches A, which is accessed later, to the L2 cache.
  template <int Memory>
  __device__ void prefetch_memory() const {
    const ThreadRows& thread_rows = thread_rows_of[Memory];
    const bool begins_line = p.memory[Memory].stride[3] == 1 && thread_rows.col % 32 == 0;
    if (!begins_line || p.chunk == 1) return;  // with chunks of one token A is read immediately
    for (int m = thread_rows.row; m < p.M; m += thread_rows.rows) {
      for (int col = thread_rows.col; col < width<Memory>(); col += thread_rows.cols)
        prefetch(row(p.memory[Memory], m) + col);
    }
  }

  __device__ void load_vector(float* to, const InputTensor<3>& x, int at, int width) const {
    for (int i = thread; i < width; i += kThreads) to[i] = load_element(x, sequence, at, i);
  }
  __device__ void load_query(int member) const { load_vector(q, p.q, head * group + member, p.D); }
  __device__ void load_token() {
    load_vector(k, p.k, head, p.D);
    if (MemoryCount == 2) load_vector(v, p.v, head, p.V);
    if (MemoryCount == 1 && p.weight.data != nullptr) {
      for (int m = thread; m < p.M; m += kThreads) w[m] = load_element(p.weight, head, m);
    }
    load_vector(a, p.a, head, p.M);
    load_query(0);
    gamma = load_element(p.gamma, sequence, head);
    decay = p.g.data == nullptr ? 1.f : expf(load_element(p.g, sequence, head));
  }

  // z = A' x, then y = silu(z) or z and its slope. In a chunk of one token A' is A.
  template <int Memory>
  __device__ void compute_z() const {
    const ThreadRows& thread_rows = thread_rows_of[Memory];
    const float* const x = Memory == 0 ? k : v;
    const OutputTensor<4>& first = p.chunk == 1 ? p.memory[Memory] : p.chunk_start[Memory];
    for_rows<Memory>([&](int m) {
      float sums[kRowsInFlight] = {};
      for (int col = thread_rows.col; col < width<Memory>(); col += thread_rows.cols) {
        ColumnPack A[kRowsInFlight];
        load_rows<Memory>(A, first, m, col);
        add_dots(sums, A, load<N>(x + col));
      }
      thread_rows.reduce(sums);
#pragma unroll
      for (int j = 0; j < kRowsInFlight; ++j) {
        const int at = m + j * thread_rows.rows;
        if (thread_rows.col > 0 || at >= p.M) continue;
        const float s = 1.f / (1.f + expf(-sums[j])), y = sums[j] * s;
        z[Memory][at] = p.phi.silu ? y : sums[j];
        slope[Memory][at] = p.phi.silu ? fmaf(y, 1.f - s, s) : 1.f;
      }
    });
  }

  // Replaces y by u = J_phi(z)^T (phi(z) - a); one warp for each memory.
  __device__ void compute_u() const {
    if (warp >= MemoryCount) return;
    float *const y = warp == 0 ? z[0] : z[1], *const y_slope = warp == 0 ? slope[0] : slope[1];
    dispatch_map(p.phi, p.M, [&](const auto& phi) {
      if (MemoryCount == 1 && p.weight.data != nullptr) {
        compute_weighted_residual(phi, y, y_slope, a, w, p.M);
        return;
      }
      const MapStats stats = compute_stats_of_warp_row(phi, y, a, p.M);
      const Residual residual(stats);
      for (int m = lane(); m < p.M; m += 32) {
        if constexpr (phi.softmax) {
          const float image = softmax_of(phi, stats, y[m]);
          y[m] = image * (image - a[m] - (stats.beta - stats.mean_a));
        } else {
          y[m] = y_slope[m] * residual(y[m], a[m]);
        }
      }
    });
  }

  // If updates_memory: A <- e^g A - gamma u k^T. Then y = A q, and r = silu(y) or y.
  __device__ void update_keys(bool updates_memory) const {
    const ThreadRows& thread_rows = thread_rows_of[0];
    for_rows<0>([&](int m) {
      float sums[kRowsInFlight] = {};
      for (int col = thread_rows.col; col < p.D; col += thread_rows.cols) {
        ColumnPack A[kRowsInFlight];
        load_rows<0>(A, p.memory[0], m, col);
        if (updates_memory) update_rows<0>(A, m, col, load<N>(k + col));
        add_dots(sums, A, load<N>(q + col));
      }
      thread_rows.reduce(sums);
#pragma unroll
      for (int j = 0; j < kRowsInFlight; ++j) {
        const int at = m + j * thread_rows.rows;
        if (thread_rows.col == 0 && at < p.M) r[at] = p.f.silu ? sums[j] / (1.f + expf(-sums[j])) : sums[j];
      }
    });
  }

  // Replaces y by r = f(y); called by one warp.
  __device__ void apply_f() const {
    dispatch_map(p.f, p.M, [&](const auto& f) {
      const MapStats stats = compute_stats_of_warp_row(f, r, r, p.M);
      for (int m = lane(); m < p.M; m += 32) {
        if constexpr (f.softmax) {
          r[m] = softmax_of(f, stats, r[m]);
        } else {
          r[m] = (r[m] - stats.mean) * stats.inverse;
        }
      }
    });
  }

  // If updates_memory: A <- e^g A - gamma u v^T. Then o = A^T r, as one sum over rows for each warp.
  __device__ void update_values(bool updates_memory) const {
    const ThreadRows& thread_rows = thread_rows_of[1];
    // uniform in a warp, because reduce() needs all lanes
    for (int first = 0; first < p.V; first += thread_rows.cols) {
      const int col = first + thread_rows.col;
      ColumnPack o = zeros<N>();
      if (col < p.V) {
        for_rows<1>([&](int m) {
          ColumnPack A[kRowsInFlight];
          load_rows<1>(A, p.memory[1], m, col);
          if (updates_memory) update_rows<1>(A, m, col, load<N>(v + col));
#pragma unroll
          for (int j = 0; j < kRowsInFlight; ++j) {
            const int at = m + j * thread_rows.rows;
            const float r_m = at < p.M ? r[at] : 0.f;
#pragma unroll
            for (int i = 0; i < N; ++i) o.at[i] = fmaf(A[j].at[i], r_m, o.at[i]);
          }
        });
      }
      thread_rows.reduce(o);
      if (lane() < thread_rows.lanes && col < p.V) store<N>(parts + warp * p.V + col, o);
    }
  }
  __device__ void store_output(int member) const {
    const int width = MemoryCount == 2 ? p.V : p.M;
    for (int i = thread; i < width; i += kThreads) {
      const float x = MemoryCount == 2 ? ThreadRows::sum_over_warps(parts + i, p.V) : r[i];
      store_element(p.o, x, sequence, head * group + member, i);
    }
  }

  // Processes a query head. The first one of a memory updates the memory.
  __device__ void process_query(int member) const {
    update_keys(member == 0);
    __syncthreads();
    if (warp == 0) apply_f();
    __syncthreads();
    if constexpr (MemoryCount == 2) {
      update_values(member == 0);
      __syncthreads();
    }
    store_output(member);
  }
};

template <int N, int MemoryCount>
__global__ void __launch_bounds__(kThreads, 4) trellis_step_kernel(const __grid_constant__ TrellisStep p) {
  GIRIH_DYNAMIC_SHARED(float, shared, 16);
  StepBlock<N, MemoryCount> block(shared, p);
  block.template prefetch_memory<0>();
  if constexpr (MemoryCount == 2) block.template prefetch_memory<1>();
  block.load_token();
  __syncthreads();
  block.template compute_z<0>();
  if constexpr (MemoryCount == 2) block.template compute_z<1>();
  __syncthreads();
  block.compute_u();
  __syncthreads();
  for (int member = 0; member < block.group; ++member) {
    if (member > 0) {
      __syncthreads();
      block.load_query(member);
      __syncthreads();
    }
    block.process_query(member);
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
    packs = packs && is_pack_aligned(p.memory[i], 4, 4) && is_pack_aligned(p.chunk_start[i], 4, 4);
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
