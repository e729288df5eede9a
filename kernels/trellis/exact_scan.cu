// Updates the memories chunk by chunk (exact.h). Also checks the shared memory of all fp32 kernels.
#include "trellis/exact_maps.cuh"

namespace girih::kernels {
namespace trellis {
namespace {

template <class Sizes>
struct Scan {
  const TrellisExactScan& p;
  const TrellisExactShape& shape;
  const ExactPart& part;
  const int run;
  float *const x, *const a, *const z, *const gamma, *const decay;  // rows and scalars of tokens; s replaces z
  Window<int64_t> window;

  __device__ Scan(const TrellisExactScan& p, const ExactPart& part, int run, float* shared)
      : p(p),
        shape(p.shape),
        part(part),
        run(run),
        x(shared),
        a(x + run * Sizes::Tile),
        z(a + run * Sizes::Tile),
        gamma(z + run * Sizes::Tile),
        decay(gamma + run) {}

  __device__ bool hold(int64_t from, int64_t to) {
    return window.hold(from, to, [&](int64_t token, int count) {
      const int64_t at = part.start() + token;
      const auto rows = [&](float* to, const In<4>& of, int width) {
        bring<Sizes>(to, of, part.batch(), at, count, part.head, width);
      };
      rows(x, p.x[part.memory], shape.width(part.memory)), rows(a, p.a, shape.M);
      const auto numbers = [&](float* to, const In<3>& of, const auto& f) {
        bring_numbers<Sizes>(to, of, part.batch(), at, count, part.head, f);
      };
      numbers(gamma, p.gamma, [](float x) { return x; });
      numbers(decay, p.g, [](float x) { return expf(x); });
    });
  }
  __device__ In<4> rows_of(const float* data) const {
    return packed_rows(data, shape.grid.tokens, shape.heads, shape.M);
  }
  __device__ float* row_of(float* data, int64_t token) const {
    return data + offset_of(rows_of(data), part.batch(), part.start() + token, part.head);
  }

  // z and s of the loaded tokens from..to-1; a warp has a row at a time.
  __device__ void update(const ExactMatrix<Sizes>& A, int64_t from, int64_t to) {
#pragma unroll 1
    for (int64_t t = from; t < to; ++t) {
      const int at = window.place(t) * Sizes::Tile;
      A.multiply(x + at, z + at);
    }
    __syncthreads();
    const ExactRow<Sizes> row{shape.M};
    with_map<true>(shape.phi, shape.M, [&](const auto& phi) {
#pragma unroll 1
      for (int64_t t = from + warp_index(); t < to; t += Sizes::kWarps) {
        const int place = window.place(t);
        float* const own = z + place * Sizes::Tile;
        float *const to_z = p.z[part.memory] == nullptr ? nullptr : row_of(p.z[part.memory], t),
                     *const to_s = row_of(p.s[part.memory], t);
        const auto finish = [&](int first, const Two& of, Two u) {
          if (to_z != nullptr) row.store(to_z, first, of);
          row.two(first, [&](int m, int i) {
            u.at[0][i] = m < shape.M ? -gamma[place] * u.at[0][i] : 0.f;
            own[m] = u.at[0][i];
          });
          row.store(to_s, first, u);
        };
        if (p.weight == nullptr) {
          row.residual(phi, own, a + place * Sizes::Tile, finish);
        } else {
          row.residual(phi, own, a + place * Sizes::Tile,
                       p.weight + part.head * trellis_exact_packed(shape.M), finish);
        }
      }
    });
  }

  // Updates A over the tokens of a chunk. A is A' before the call; in a chunk that `goes_on`, A is then
  // loaded.
  __device__ void run_chunk(ExactMatrix<Sizes>& A, int64_t from, int64_t to, bool goes_on) {
    for (int64_t t = from; t < to; t += run) {
      const int64_t end = t + run < to ? t + run : to;
      hold(t, end);
      update(A, t, end);
    }
    if (goes_on) load_state(A, p.initial[part.memory], shape, part.memory, part.index(), part.head);
    __syncthreads();
    for (int64_t t = from; t < to; t += run) {
      const int64_t end = t + run < to ? t + run : to;
      if (hold(t, end)) {
        bring<Sizes>(z, rows_of(p.s[part.memory]), part.batch(), part.start() + t, static_cast<int>(end - t),
                     part.head, shape.M);
        __syncthreads();
      }
#pragma unroll 1
      for (int64_t now = t; now < end; ++now) {
        if (now % kChunk == 0) {
          const int64_t piece = first_piece(shape.grid.tokens, part.of.sequence, kChunk) + now / kChunk;
          publish(p.states[part.memory], A, shape, part.memory, piece, part.head);
        }
        const int at = window.place(now);
        A.add(decay[at], z + at * Sizes::Tile, x + at * Sizes::Tile);
      }
    }
  }
};

template <class Sizes>
__global__ void __launch_bounds__(Sizes::kThreads, Sizes::kBlocks)
    trellis_exact_scan_kernel(const __grid_constant__ TrellisExactScan p, const int run) {
  extern __shared__ __align__(16) float shared[];
  const TrellisExactShape& shape = p.shape;
  const ExactPart part(shape, blockIdx.x);
  const int memory = part.memory, head = part.head;
  const int64_t n = part.index(), chunks = part.of.chunks;
  ExactMatrix<Sizes> A(shared);
  Scan<Sizes> scan(p, part, run, shared + Sizes::kShared);
  load_state(A, part.resumed ? p.first[memory] : p.initial[memory], shape, memory, n, head);

  // Loads the tokens of several chunks together if they fit.
  const int group = max(run / shape.grid.size, 1);
  bool whole = chunks > 0;
  for (int64_t i = 0; i < chunks; ++i) {
    const Chunk chunk = chunk_of(shape.grid, part.of, i);
    const int64_t from = chunk.start - part.start(), to = from + chunk.length;
    if (i % group == 0) {
      const Chunk last = chunk_of(shape.grid, part.of, min(i + group, chunks) - 1);
      const int64_t end = last.start + last.length - part.start();
      if (end - from <= run) scan.hold(from, end);
    }
    whole = chunk.complete;
    if (!whole) store_state(p.last_first[memory], A, shape, memory, n, head);
    scan.run_chunk(A, from, to, part.resumed && i == 0);
  }
  if (chunks == 0) {
    store_state(p.last_first[memory], A, shape, memory, n, head);
    if (part.resumed) load_state(A, p.initial[memory], shape, memory, n, head);
  } else if (whole) {
    store_state(p.last_first[memory], A, shape, memory, n, head);
  }
  store_state(p.last[memory], A, shape, memory, n, head);
  if (threadIdx.x == 0 && memory == 0 && head == 0) {
    p.last_position[n] = (part.of.begun + part.length()) % shape.grid.size;
  }
}

}  // namespace
}  // namespace trellis

cudaError_t trellis_exact_scan(const TrellisExactScan& p, cudaStream_t stream) {
  using namespace trellis;
  const int64_t blocks = p.shape.memories * p.shape.grid.tokens.sequences * p.shape.heads;
  return by_exact_size(p.shape, [&](auto sizes) {
    using Sizes = decltype(sizes);
    return launch_exact<trellis_exact_scan_kernel<Sizes>, Sizes>(p, blocks, scan_arrays(), stream);
  });
}

cudaError_t trellis_exact_fits(const TrellisExactShape& shape, bool& fits) {
  using namespace trellis;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  return by_exact_size(shape, [&](auto sizes) {
    using Sizes = decltype(sizes);
    fits = run_of<Sizes>(limit, scan_arrays()) > 0 && run_of<Sizes>(limit, reverse_arrays(shape)) > 0 &&
           run_of<Sizes>(limit, columns_arrays(shape)) > 0;
    return cudaSuccess;
  });
}

}  // namespace girih::kernels
