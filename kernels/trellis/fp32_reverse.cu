// Gradients of the memories chunk by chunk, from the end (fp32_kernels.h).
#include "trellis/fp32_maps.cuh"

namespace girih::kernels {
namespace trellis {
namespace {

template <class Sizes>
struct Reverse {
  const TrellisFp32Reverse& p;
  const TrellisFp32Shape& shape;
  const Fp32BlockCoord& coord;
  const int window_size, group;
  // Rows and scalars of tokens in shared memory. dz replaces ds. l and w have rows for each query head of the
  // group.
  float *const x, *const z, *const a, *const ds, *const l, *const w, *const gamma, *const decay;
  TokenWindow<int64_t> window;
  float pending_decay = 1.f;  // decay that is not yet applied to G

  __device__ Reverse(const TrellisFp32Reverse& p, const Fp32BlockCoord& coord, int window_size, float* shared)
      : p(p),
        shape(p.shape),
        coord(coord),
        window_size(window_size),
        group(p.shape.query_heads / p.shape.heads),
        x(shared),
        z(x + window_size * Sizes::Tile),
        a(z + window_size * Sizes::Tile),
        ds(a + window_size * Sizes::Tile),
        l(ds + window_size * Sizes::Tile),
        w(l + group * window_size * Sizes::Tile),
        gamma(w + group * window_size * Sizes::Tile),
        decay(gamma + window_size) {}

  __device__ bool load_window(int64_t from, int64_t to) {
    return window.load_window(from, to, [&](int64_t token, int count) {
      const int64_t at = coord.start() + token;
      const int memory = coord.memory, width = shape.width(memory);
      const auto rows = [&](float* to, const InputTensor<4>& of, int head, int width) {
        load_rows<Sizes>(to, of, coord.batch(), at, count, head, width);
      };
      rows(x, p.x[memory], coord.head, width), rows(a, p.a, coord.head, shape.M);
      rows(z, padded_rows(p.z[memory], shape.grid.tokens, shape.heads, shape.M), coord.head, shape.M);
      for (int member = 0; member < group; ++member) {
        const int head = coord.head * group + member;
        rows(l + member * window_size * Sizes::Tile, p.l[memory], head, shape.M);
        rows(w + member * window_size * Sizes::Tile, p.w[memory], head, width);
      }
      const auto numbers = [&](float* to, const InputTensor<3>& of, const auto& f) {
        load_scalars<Sizes>(to, of, coord.batch(), at, count, coord.head, f);
      };
      numbers(gamma, p.gamma, [](float x) { return x; });
      numbers(decay, p.g, [](float x) { return expf(x); });
    });
  }
  __device__ float* row_of(float* data, int64_t token) const {
    const InputTensor<4> rows = padded_rows(data, shape.grid.tokens, shape.heads, shape.M);
    return data + offset_of(rows, coord.batch(), coord.start() + token, coord.head);
  }

  // G_t and ds_t for tokens to - 1 down to `from`. `stores_ds`: the chunk does not fit in shared memory, so
  // the global array of dz temporarily holds ds.
  __device__ void add_reads(Fp32Matrix<Sizes>& G, int64_t from, int64_t to, bool stores_ds) {
#pragma unroll 1
    for (int64_t t = to - 1; t >= from; --t) {
      if ((t + 1) % kChunk == 0 || t + 1 == coord.length()) {
        G.scale(pending_decay), pending_decay = 1.f;
        const int64_t segment =
            first_token_range(shape.grid.tokens, coord.chunked.sequence, kChunk) + t / kChunk;
        store_segment_state(p.gradients[coord.memory], G, shape, coord.memory, segment, coord.head);
      }
      const int at = window.row_of_token(t) * Sizes::Tile;
      for (int member = 0; member < group; ++member) {
        G.add(pending_decay, l + member * window_size * Sizes::Tile + at,
              w + member * window_size * Sizes::Tile + at),
            pending_decay = 1.f;
      }
      pending_decay = decay[window.row_of_token(t)];
      G.multiply(x + at, ds + at);
    }
    __syncthreads();
    if (!stores_ds) return;
    const Fp32Row<Sizes> row{shape.M};
    for (int64_t t = from + warp_index(); t < to; t += Sizes::kWarps) {
      float* const to = row_of(p.dz[coord.memory], t);
      const float* const own = ds + window.row_of_token(t) * Sizes::Tile;
      row.each([&](int first) { row.store(to, first, row.load(own, first)); });
    }
  }

  // dz, da, dgamma and z.dz of tokens; a warp has a row at a time.
  __device__ void compute_dz(int64_t from, int64_t to) {
    const Fp32Row<Sizes> row{shape.M};
    dispatch_map<true>(shape.phi, shape.M, [&](const auto& phi) {
#pragma unroll 1
      for (int64_t t = from + warp_index(); t < to; t += Sizes::kWarps) {
        const int row_index = window.row_of_token(t);
        float* const own = ds + row_index * Sizes::Tile;
        const float* const at = z + row_index * Sizes::Tile;
        float *const to_dz = row_of(p.dz[coord.memory], t), *const to_da = row_of(p.da[coord.memory], t);
        float dgamma = 0.f, dz_dot_z = 0.f;
        const float* const targets = a + row_index * Sizes::Tile;
        const auto finish = [&](int first, const SlotPair& u, const SlotPair& dz, SlotPair da) {
          const SlotPair of = row.load(own, first), before = row.load(at, first);
          row.for_pair(first, [&](int m, int i) {
            const bool exists = m < shape.M;
            dgamma -= exists ? u.at[0][i] * of.at[0][i] : 0.f;
            dz_dot_z += exists ? before.at[0][i] * dz.at[0][i] : 0.f;
            own[m] = exists ? dz.at[0][i] : 0.f;
            da.at[0][i] = -da.at[0][i];
          });
          row.store(to_dz, first, dz), row.store(to_da, first, da);
        };
        if (p.weight == nullptr) {
          row.gradients(phi, at, targets, own, -gamma[row_index], finish);
        } else {
          float* const to_dw = row_of(p.dweight, t);
          row.gradients(
              phi, at, targets, p.weight + coord.head * trellis_fp32_padded_width(shape.M), own,
              -gamma[row_index],
              [&](int first, const SlotPair& u, const SlotPair& dz, const SlotPair& da, const SlotPair& dw) {
                finish(first, u, dz, da);
                row.store(to_dw, first, dw);
              });
        }
        dgamma = sum_over_warp(dgamma), dz_dot_z = sum_over_warp(dz_dot_z);
        if (lane() == 0) {
          const int64_t number = token_index(shape.grid.tokens, shape.heads, coord.memory, coord.batch(),
                                             coord.start() + t, coord.head);
          p.dgamma[number] = dgamma, p.dz_dot_z[number] = dz_dot_z;
        }
      }
    });
    __syncthreads();
  }

  // Processes the tokens of a chunk. Afterwards G is the gradient of the token before the chunk.
  // `is_resumed`: A' is not an A of this call, and G is then dA'.
  __device__ void run_chunk(Fp32Matrix<Sizes>& G, int64_t from, int64_t to, bool is_resumed) {
    const int64_t tiles = divide_up(to - from, window_size);
    const auto end_of = [&](int64_t t) { return t + window_size < to ? t + window_size : to; };
    for (int64_t t = from + (tiles - 1) * window_size; t >= from; t -= window_size) {
      load_window(t, end_of(t));
      add_reads(G, t, end_of(t), tiles > 1);
    }
    if (is_resumed) {
      G.scale(pending_decay);
      store_state(p.dinitial[coord.memory], G, shape, coord.memory, coord.index(), coord.head);
      G.clear(), pending_decay = 1.f;
    }
    for (int64_t t = from; t < to; t += window_size) {
      if (load_window(t, end_of(t))) {
        load_rows<Sizes>(ds, padded_rows(p.dz[coord.memory], shape.grid.tokens, shape.heads, shape.M),
                         coord.batch(), coord.start() + t, static_cast<int>(end_of(t) - t), coord.head,
                         shape.M);
        __syncthreads();
      }
      compute_dz(t, end_of(t));
#pragma unroll 1
      for (int64_t now = t; now < end_of(t); ++now) {
        const int at = window.row_of_token(now) * Sizes::Tile;
        G.add(pending_decay, ds + at, x + at), pending_decay = 1.f;
      }
    }
  }
};

template <class Sizes>
__global__ void __launch_bounds__(Sizes::kThreads, Sizes::kBlocks)
    trellis_fp32_reverse_kernel(const __grid_constant__ TrellisFp32Reverse p, const int window_size) {
  GIRIH_DYNAMIC_SHARED(float, shared, 16);
  const TrellisFp32Shape& shape = p.shape;
  const Fp32BlockCoord coord(shape, blockIdx.x);
  const int memory = coord.memory, head = coord.head;
  const int64_t n = coord.index(), chunks = coord.chunked.chunks;
  Fp32Matrix<Sizes> G(shared);
  Reverse<Sizes> reverse(p, coord, window_size, shared + Sizes::kShared);
  load_state(G, p.dlast[memory], shape, memory, n, head);
  // The final A' is A if the last chunk is complete, else A' of the last chunk.
  const bool is_complete = chunks > 0 && chunk_of(shape.grid, coord.chunked, chunks - 1).is_complete;
  if (chunks == 0 ? !coord.resumed : is_complete)
    add_state(G, p.dlast_chunk_start[memory], shape, memory, n, head);

  const int chunks_per_window = max(window_size / shape.grid.size, 1);
  for (int64_t i = chunks - 1; i >= 0; --i) {
    const Chunk chunk = chunk_of(shape.grid, coord.chunked, i);
    const int64_t from = chunk.start - coord.start(), to = from + chunk.length;
    if (i == chunks - 1 || (i + 1) % chunks_per_window == 0) {
      const int64_t first =
          chunk_of(shape.grid, coord.chunked, i / chunks_per_window * chunks_per_window).start -
          coord.start();
      if (to - first <= window_size) reverse.load_window(first, to);
    }
    const bool is_resumed = coord.resumed && i == 0;
    reverse.run_chunk(G, from, to, is_resumed);
    if (i == chunks - 1 && !is_complete) add_state(G, p.dlast_chunk_start[memory], shape, memory, n, head);
    if (is_resumed) store_state(p.dchunk_start[memory], G, shape, memory, n, head);
  }
  if (chunks > 0 && coord.resumed) return;
  store_state(p.dinitial[memory], G, shape, memory, n, head);
  if (!coord.resumed) return;
  load_state(G, p.dlast_chunk_start[memory], shape, memory, n, head);
  store_state(p.dchunk_start[memory], G, shape, memory, n, head);
}

}  // namespace
}  // namespace trellis

cudaError_t trellis_fp32_reverse(const TrellisFp32Reverse& p, cudaStream_t stream) {
  using namespace trellis;
  const int64_t blocks = p.shape.memories * p.shape.grid.tokens.sequences * p.shape.heads;
  return dispatch_fp32_size(p.shape, [&](auto sizes) {
    using Sizes = decltype(sizes);
    return launch_fp32<trellis_fp32_reverse_kernel<Sizes>, Sizes>(p, blocks, reverse_arrays(p.shape), stream);
  });
}

}  // namespace girih::kernels
