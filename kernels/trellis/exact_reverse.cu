// Gradients of the memories chunk by chunk, from the end (exact.h).
#include "trellis/exact_maps.cuh"

namespace girih::kernels {
namespace trellis {
namespace {

template <class Sizes>
struct Reverse {
  const TrellisExactReverse& p;
  const TrellisExactShape& shape;
  const ExactPart& part;
  const int run, group;
  // Rows and scalars of tokens in shared memory. dz replaces ds. l and w have rows for each query head of the
  // group.
  float *const x, *const z, *const a, *const ds, *const l, *const w, *const gamma, *const decay;
  Window<int64_t> window;
  float left = 1.f;  // decay that is not yet applied to G

  __device__ Reverse(const TrellisExactReverse& p, const ExactPart& part, int run, float* shared)
      : p(p),
        shape(p.shape),
        part(part),
        run(run),
        group(p.shape.query_heads / p.shape.heads),
        x(shared),
        z(x + run * Sizes::Tile),
        a(z + run * Sizes::Tile),
        ds(a + run * Sizes::Tile),
        l(ds + run * Sizes::Tile),
        w(l + group * run * Sizes::Tile),
        gamma(w + group * run * Sizes::Tile),
        decay(gamma + run) {}

  __device__ bool hold(int64_t from, int64_t to) {
    return window.hold(from, to, [&](int64_t token, int count) {
      const int64_t at = part.start() + token;
      const int memory = part.memory, width = shape.width(memory);
      const auto rows = [&](float* to, const In<4>& of, int head, int width) {
        bring<Sizes>(to, of, part.batch(), at, count, head, width);
      };
      rows(x, p.x[memory], part.head, width), rows(a, p.a, part.head, shape.M);
      rows(z, packed_rows(p.z[memory], shape.grid.tokens, shape.heads, shape.M), part.head, shape.M);
      for (int member = 0; member < group; ++member) {
        const int head = part.head * group + member;
        rows(l + member * run * Sizes::Tile, p.l[memory], head, shape.M);
        rows(w + member * run * Sizes::Tile, p.w[memory], head, width);
      }
      const auto numbers = [&](float* to, const In<3>& of, const auto& f) {
        bring_numbers<Sizes>(to, of, part.batch(), at, count, part.head, f);
      };
      numbers(gamma, p.gamma, [](float x) { return x; });
      numbers(decay, p.g, [](float x) { return expf(x); });
    });
  }
  __device__ float* row_of(float* data, int64_t token) const {
    const In<4> rows = packed_rows(data, shape.grid.tokens, shape.heads, shape.M);
    return data + offset_of(rows, part.batch(), part.start() + token, part.head);
  }

  // G_t and ds_t for tokens to - 1 down to `from`. `parks`: the chunk does not fit in shared memory, so the
  // global array of dz temporarily holds ds.
  __device__ void read(ExactMatrix<Sizes>& G, int64_t from, int64_t to, bool parks) {
#pragma unroll 1
    for (int64_t t = to - 1; t >= from; --t) {
      if ((t + 1) % kChunk == 0 || t + 1 == part.length()) {
        G.scale(left), left = 1.f;
        const int64_t piece = first_piece(shape.grid.tokens, part.of.sequence, kChunk) + t / kChunk;
        publish(p.gradients[part.memory], G, shape, part.memory, piece, part.head);
      }
      const int at = window.place(t) * Sizes::Tile;
      for (int member = 0; member < group; ++member) {
        G.add(left, l + member * run * Sizes::Tile + at, w + member * run * Sizes::Tile + at), left = 1.f;
      }
      left = decay[window.place(t)];
      G.multiply(x + at, ds + at);
    }
    __syncthreads();
    if (!parks) return;
    const ExactRow<Sizes> row{shape.M};
    for (int64_t t = from + warp_index(); t < to; t += Sizes::kWarps) {
      float* const to = row_of(p.dz[part.memory], t);
      const float* const own = ds + window.place(t) * Sizes::Tile;
      row.each([&](int first) { row.store(to, first, row.load(own, first)); });
    }
  }

  // dz, da, dgamma and z.dz of tokens; a warp has a row at a time.
  __device__ void bend(int64_t from, int64_t to) {
    const ExactRow<Sizes> row{shape.M};
    with_map<true>(shape.phi, shape.M, [&](const auto& phi) {
#pragma unroll 1
      for (int64_t t = from + warp_index(); t < to; t += Sizes::kWarps) {
        const int place = window.place(t);
        float* const own = ds + place * Sizes::Tile;
        const float* const at = z + place * Sizes::Tile;
        float *const to_dz = row_of(p.dz[part.memory], t), *const to_da = row_of(p.da[part.memory], t);
        float dgamma = 0.f, started = 0.f;
        const float* const targets = a + place * Sizes::Tile;
        const auto finish = [&](int first, const Two& u, const Two& dz, Two da) {
          const Two of = row.load(own, first), before = row.load(at, first);
          row.two(first, [&](int m, int i) {
            const bool exists = m < shape.M;
            dgamma -= exists ? u.at[0][i] * of.at[0][i] : 0.f;
            started += exists ? before.at[0][i] * dz.at[0][i] : 0.f;
            own[m] = exists ? dz.at[0][i] : 0.f;
            da.at[0][i] = -da.at[0][i];
          });
          row.store(to_dz, first, dz), row.store(to_da, first, da);
        };
        if (p.weight == nullptr) {
          row.gradients(phi, at, targets, own, -gamma[place], finish);
        } else {
          float* const to_dw = row_of(p.dweight, t);
          row.gradients(phi, at, targets, p.weight + part.head * trellis_exact_packed(shape.M), own,
                        -gamma[place],
                        [&](int first, const Two& u, const Two& dz, const Two& da, const Two& dw) {
                          finish(first, u, dz, da);
                          row.store(to_dw, first, dw);
                        });
        }
        dgamma = over_warp(dgamma), started = over_warp(started);
        if (lane() == 0) {
          const int64_t number = number_place(shape.grid.tokens, shape.heads, part.memory, part.batch(),
                                              part.start() + t, part.head);
          p.dgamma[number] = dgamma, p.started[number] = started;
        }
      }
    });
    __syncthreads();
  }

  // Processes the tokens of a chunk, and leaves G of the token before the chunk. `apart`: A' is not an A of
  // this call.
  __device__ void run_chunk(ExactMatrix<Sizes>& G, int64_t from, int64_t to, bool apart) {
    const int64_t tiles = divide_up(to - from, run);
    const auto end_of = [&](int64_t t) { return t + run < to ? t + run : to; };
    for (int64_t t = from + (tiles - 1) * run; t >= from; t -= run) {
      hold(t, end_of(t));
      read(G, t, end_of(t), tiles > 1);
    }
    if (apart) {
      G.scale(left);
      store_state(p.dinitial[part.memory], G, shape, part.memory, part.index(), part.head);
      G.clear(), left = 1.f;
    }
    for (int64_t t = from; t < to; t += run) {
      if (hold(t, end_of(t))) {
        bring<Sizes>(ds, packed_rows(p.dz[part.memory], shape.grid.tokens, shape.heads, shape.M),
                     part.batch(), part.start() + t, static_cast<int>(end_of(t) - t), part.head, shape.M);
        __syncthreads();
      }
      bend(t, end_of(t));
#pragma unroll 1
      for (int64_t now = t; now < end_of(t); ++now) {
        const int at = window.place(now) * Sizes::Tile;
        G.add(left, ds + at, x + at), left = 1.f;
      }
    }
  }
};

template <class Sizes>
__global__ void __launch_bounds__(Sizes::kThreads, Sizes::kBlocks)
    trellis_exact_reverse_kernel(const __grid_constant__ TrellisExactReverse p, const int run) {
  extern __shared__ __align__(16) float shared[];
  const TrellisExactShape& shape = p.shape;
  const ExactPart part(shape, blockIdx.x);
  const int memory = part.memory, head = part.head;
  const int64_t n = part.index(), chunks = part.of.chunks;
  ExactMatrix<Sizes> G(shared);
  Reverse<Sizes> reverse(p, part, run, shared + Sizes::kShared);
  load_state(G, p.dlast[memory], shape, memory, n, head);
  // The final A' is A if the last chunk is complete, else A' of the last chunk.
  const bool whole = chunks > 0 && chunk_of(shape.grid, part.of, chunks - 1).complete;
  if (chunks == 0 ? !part.resumed : whole) add_state(G, p.dlast_first[memory], shape, memory, n, head);

  const int group = max(run / shape.grid.size, 1);
  for (int64_t i = chunks - 1; i >= 0; --i) {
    const Chunk chunk = chunk_of(shape.grid, part.of, i);
    const int64_t from = chunk.start - part.start(), to = from + chunk.length;
    if (i == chunks - 1 || (i + 1) % group == 0) {
      const int64_t first = chunk_of(shape.grid, part.of, i / group * group).start - part.start();
      if (to - first <= run) reverse.hold(first, to);
    }
    const bool apart = part.resumed && i == 0;
    reverse.run_chunk(G, from, to, apart);
    if (i == chunks - 1 && !whole) add_state(G, p.dlast_first[memory], shape, memory, n, head);
    if (apart) store_state(p.dfirst[memory], G, shape, memory, n, head);
  }
  if (chunks > 0 && part.resumed) return;
  store_state(p.dinitial[memory], G, shape, memory, n, head);
  if (!part.resumed) return;
  load_state(G, p.dlast_first[memory], shape, memory, n, head);
  store_state(p.dfirst[memory], G, shape, memory, n, head);
}

}  // namespace
}  // namespace trellis

cudaError_t trellis_exact_reverse(const TrellisExactReverse& p, cudaStream_t stream) {
  using namespace trellis;
  const int64_t blocks = p.shape.memories * p.shape.grid.tokens.sequences * p.shape.heads;
  return by_exact_size(p.shape, [&](auto sizes) {
    using Sizes = decltype(sizes);
    return launch_exact<trellis_exact_reverse_kernel<Sizes>, Sizes>(p, blocks, reverse_arrays(p.shape),
                                                                    stream);
  });
}

}  // namespace girih::kernels
