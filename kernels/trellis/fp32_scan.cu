// Updates the memories chunk by chunk (fp32_kernels.h). Also checks the shared memory of all fp32 kernels.
#include "trellis/fp32_maps.cuh"

namespace girih::kernels {
namespace trellis {
namespace {

template <class Sizes>
struct Scan {
  const TrellisFp32Scan& p;
  const TrellisFp32Shape& shape;
  const Fp32BlockCoord& coord;
  const int window_size;
  float *const x, *const a, *const z, *const gamma, *const decay;  // rows and scalars of tokens; s replaces z
  TokenWindow<int64_t> window;

  __device__ Scan(const TrellisFp32Scan& p, const Fp32BlockCoord& coord, int window_size, float* shared)
      : p(p),
        shape(p.shape),
        coord(coord),
        window_size(window_size),
        x(shared),
        a(x + window_size * Sizes::Tile),
        z(a + window_size * Sizes::Tile),
        gamma(z + window_size * Sizes::Tile),
        decay(gamma + window_size) {}

  __device__ bool load_window(int64_t from, int64_t to) {
    return window.load_window(from, to, [&](int64_t token, int count) {
      const int64_t at = coord.start() + token;
      const auto rows = [&](float* to, const InputTensor<4>& of, int width) {
        load_rows<Sizes>(to, of, coord.batch(), at, count, coord.head, width);
      };
      rows(x, p.x[coord.memory], shape.width(coord.memory)), rows(a, p.a, shape.M);
      const auto numbers = [&](float* to, const InputTensor<3>& of, const auto& f) {
        load_scalars<Sizes>(to, of, coord.batch(), at, count, coord.head, f);
      };
      numbers(gamma, p.gamma, [](float x) { return x; });
      numbers(decay, p.g, [](float x) { return expf(x); });
    });
  }
  __device__ InputTensor<4> rows_of(const float* data) const {
    return padded_rows(data, shape.grid.tokens, shape.heads, shape.M);
  }
  __device__ float* row_of(float* data, int64_t token) const {
    return data + offset_of(rows_of(data), coord.batch(), coord.start() + token, coord.head);
  }

  // z and s of the loaded tokens from..to-1; a warp has a row at a time.
  __device__ void compute_z_and_s(const Fp32Matrix<Sizes>& A, int64_t from, int64_t to) {
#pragma unroll 1
    for (int64_t t = from; t < to; ++t) {
      const int at = window.row_of_token(t) * Sizes::Tile;
      A.multiply(x + at, z + at);
    }
    __syncthreads();
    const Fp32Row<Sizes> row{shape.M};
    dispatch_map<true>(shape.phi, shape.M, [&](const auto& phi) {
#pragma unroll 1
      for (int64_t t = from + warp_index(); t < to; t += Sizes::kWarps) {
        const int row_index = window.row_of_token(t);
        float* const own = z + row_index * Sizes::Tile;
        float *const to_z = p.z[coord.memory] == nullptr ? nullptr : row_of(p.z[coord.memory], t),
                     *const to_s = row_of(p.s[coord.memory], t);
        const auto finish = [&](int first, const SlotPair& of, SlotPair u) {
          if (to_z != nullptr) row.store(to_z, first, of);
          row.for_pair(first, [&](int m, int i) {
            u.at[0][i] = m < shape.M ? -gamma[row_index] * u.at[0][i] : 0.f;
            own[m] = u.at[0][i];
          });
          row.store(to_s, first, u);
        };
        if (p.weight == nullptr) {
          row.residual(phi, own, a + row_index * Sizes::Tile, finish);
        } else {
          row.residual(phi, own, a + row_index * Sizes::Tile,
                       p.weight + coord.head * trellis_fp32_padded_width(shape.M), finish);
        }
      }
    });
  }

  // Updates A over the tokens of a chunk. A is A' before the call. `is_resumed`: A is loaded after z and s
  // are computed from A'.
  __device__ void run_chunk(Fp32Matrix<Sizes>& A, int64_t from, int64_t to, bool is_resumed) {
    for (int64_t t = from; t < to; t += window_size) {
      const int64_t end = t + window_size < to ? t + window_size : to;
      load_window(t, end);
      compute_z_and_s(A, t, end);
    }
    if (is_resumed) load_state(A, p.initial[coord.memory], shape, coord.memory, coord.index(), coord.head);
    __syncthreads();
    for (int64_t t = from; t < to; t += window_size) {
      const int64_t end = t + window_size < to ? t + window_size : to;
      if (load_window(t, end)) {
        load_rows<Sizes>(z, rows_of(p.s[coord.memory]), coord.batch(), coord.start() + t,
                         static_cast<int>(end - t), coord.head, shape.M);
        __syncthreads();
      }
#pragma unroll 1
      for (int64_t now = t; now < end; ++now) {
        if (now % kChunk == 0) {
          const int64_t segment =
              first_token_range(shape.grid.tokens, coord.chunked.sequence, kChunk) + now / kChunk;
          store_segment_state(p.states[coord.memory], A, shape, coord.memory, segment, coord.head);
        }
        const int at = window.row_of_token(now);
        A.add(decay[at], z + at * Sizes::Tile, x + at * Sizes::Tile);
      }
    }
  }
};

template <class Sizes>
__global__ void __launch_bounds__(Sizes::kThreads, Sizes::kBlocks)
    trellis_fp32_scan_kernel(const __grid_constant__ TrellisFp32Scan p, const int window_size) {
  GIRIH_DYNAMIC_SHARED(float, shared, 16);
  const TrellisFp32Shape& shape = p.shape;
  const Fp32BlockCoord coord(shape, blockIdx.x);
  const int memory = coord.memory, head = coord.head;
  const int64_t n = coord.index(), chunks = coord.chunked.chunks;
  Fp32Matrix<Sizes> A(shared);
  Scan<Sizes> scan(p, coord, window_size, shared + Sizes::kShared);
  load_state(A, coord.resumed ? p.chunk_start[memory] : p.initial[memory], shape, memory, n, head);

  // Loads the tokens of several chunks together if they fit.
  const int chunks_per_window = max(window_size / shape.grid.size, 1);
  bool is_complete = chunks > 0;
  for (int64_t i = 0; i < chunks; ++i) {
    const Chunk chunk = chunk_of(shape.grid, coord.chunked, i);
    const int64_t from = chunk.start - coord.start(), to = from + chunk.length;
    if (i % chunks_per_window == 0) {
      const Chunk last = chunk_of(shape.grid, coord.chunked, min(i + chunks_per_window, chunks) - 1);
      const int64_t end = last.start + last.length - coord.start();
      if (end - from <= window_size) scan.load_window(from, end);
    }
    is_complete = chunk.is_complete;
    if (!is_complete) store_state(p.last_chunk_start[memory], A, shape, memory, n, head);
    scan.run_chunk(A, from, to, coord.resumed && i == 0);
  }
  if (chunks == 0) {
    store_state(p.last_chunk_start[memory], A, shape, memory, n, head);
    if (coord.resumed) load_state(A, p.initial[memory], shape, memory, n, head);
  } else if (is_complete) {
    store_state(p.last_chunk_start[memory], A, shape, memory, n, head);
  }
  store_state(p.last[memory], A, shape, memory, n, head);
  if (threadIdx.x == 0 && memory == 0 && head == 0) {
    p.last_position[n] = (coord.chunked.prior_tokens + coord.length()) % shape.grid.size;
  }
}

}  // namespace
}  // namespace trellis

cudaError_t trellis_fp32_scan(const TrellisFp32Scan& p, cudaStream_t stream) {
  using namespace trellis;
  const int64_t blocks = p.shape.memories * p.shape.grid.tokens.sequences * p.shape.heads;
  return dispatch_fp32_size(p.shape, [&](auto sizes) {
    using Sizes = decltype(sizes);
    return launch_fp32<trellis_fp32_scan_kernel<Sizes>, Sizes>(p, blocks, scan_arrays(), stream);
  });
}

cudaError_t trellis_fp32_fits(const TrellisFp32Shape& shape, bool& fits) {
  using namespace trellis;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  return dispatch_fp32_size(shape, [&](auto sizes) {
    using Sizes = decltype(sizes);
    fits = window_tokens<Sizes>(limit, scan_arrays()) > 0 &&
           window_tokens<Sizes>(limit, reverse_arrays(shape)) > 0 &&
           window_tokens<Sizes>(limit, dkv_arrays(shape)) > 0;
    return cudaSuccess;
  });
}

}  // namespace girih::kernels
