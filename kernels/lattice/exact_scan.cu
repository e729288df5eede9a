// Updates the memory token by token and computes o (exact.h).
#include <algorithm>

#include "lattice/exact.cuh"

namespace girih::kernels {
namespace lattice {
namespace {

// Shared memory in floats: sums that warps exchange for a token; two buffers for the inputs of a tile of
// tokens and for its reads, one for each warp.
template <class Sizes>
struct ScanRoom {
  static constexpr int kParts = 2 * Sizes::kWarps * Sizes::D;
  int group, in, out, tile;  // group: query heads of a head; in, out: floats of a token

  __host__ __device__ ScanRoom(const LatticeExactShape& shape, int tile)
      : group(shape.query_heads / shape.heads),
        in(ExactToken<Sizes>::kFloats + group * Sizes::M),
        out(group * Sizes::kWarps * Sizes::D),
        tile(tile) {}

  __host__ __device__ int floats() const { return kParts + 2 * tile * (in + out); }
  __device__ float* inputs(float* shared, int turn) const { return shared + kParts + turn * tile * in; }
  __device__ float* outputs(float* shared, int turn) const { return inputs(shared, 2) + turn * tile * out; }
};

// Called by helper warps while the other warps process a tile: loads the next tile, and stores the reads of
// the previous one.
template <class Sizes>
__device__ void bring(float* to, const LatticeExactInputs& of, const ScanRoom<Sizes>& room,
                      const ExactTile<Sizes>& tile) {
  ExactToken<Sizes>::bring(to, room.in, of, tile);
  for (int i = 0; i < room.group; ++i) {
    tile.template bring<Sizes::M>(to + ExactToken<Sizes>::kFloats + i * Sizes::M, room.in, of.q,
                                  tile.head * room.group + i, of.shape.M);
  }
}
template <class Sizes>
__device__ void write(const float* from, const LatticeExactScan& p, const ScanRoom<Sizes>& room,
                      const ExactTile<Sizes>& tile) {
  for (int i = 0; i < room.group; ++i) {
    tile.template each<Sizes::D>(p.of.shape.D, [&](int u, int d) {
      const float* const parts = from + u * room.out + i * Sizes::kWarps * Sizes::D + d;
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < Sizes::kWarps; ++w) sum += parts[w * Sizes::D];
      store_any(p.o, sum, tile.batch, tile.first + u, tile.head * room.group + i, d);
    });
  }
}

template <class Sizes>
__global__ void __launch_bounds__(Sizes::kAll, Sizes::D* Sizes::M == 64 * 64 ? 2 : 1)
    exact_scan(const __grid_constant__ LatticeExactScan p, const int tile) {
  extern __shared__ __align__(16) float shared[];
  const LatticeExactShape& shape = p.of.shape;
  const ScanRoom<Sizes> room(shape, tile);
  const ExactSequence here(p.of, blockIdx.x);
  const ExactPlace place;
  const bool helps = place.thread >= Sizes::kThreads;
  const int64_t length = here.length(), tiles = (length + tile - 1) / tile;
  const auto at = [&](int64_t i) {
    const int64_t left = length - i * tile;
    return ExactTile<Sizes>{here.batch(), here.of.sequence.start + i * tile,
                            static_cast<int>(left < tile ? left : tile), here.head,
                            place.thread - Sizes::kThreads};
  };

  ExactState<Sizes> state;
  if (helps) {
    if (tiles > 0) bring(room.inputs(shared, 0), p.of, room, at(0));
  } else {
    const LatticeStart& start = p.of.start;
    load_memory(state.S, start.memory, here.index(), here.head, shape);
    load_memory(state.Delta, here.resumed ? start.step : In<4>(), here.index(), here.head, shape);
    state.L =
        here.resumed && start.decay.data != nullptr ? load_any(start.decay, here.index(), here.head) : 0.f;
  }
  __syncthreads();

  int position = here.begun, in_segment = here.of.begun;
  int64_t segment = here.of.first;
  for (int64_t i = 0; i < tiles; ++i) {
    const int turn = i % 2;
    if (helps) {
      if (i > 0) write(room.outputs(shared, 1 - turn), p, room, at(i - 1));
      if (i + 1 < tiles) bring(room.inputs(shared, 1 - turn), p.of, room, at(i + 1));
      count_barriers<Sizes>(shape, at(i).count);
    }
    for (int u = 0; !helps && u < at(i).count; ++u) {
      if (p.memories != nullptr && ((i == 0 && u == 0) || in_segment == 0)) {
        each_kept<Sizes>(shape, segment, here.head,
                         [&](int j, int e, int64_t at) { store<4>(p.memories + at, state.S.at[j][e]); });
      }
      const float* const row = room.inputs(shared, turn) + u * room.in;
      auto made = exact_step<Sizes>(state, shape, ExactToken<Sizes>(row), shared, u % 2);
      if (++position == shape.chunk) {
        end_chunk(state, made, shape);
        position = 0;
      }
      // o = y q, over the warp's columns
      for (int member = 0; member < room.group; ++member) {
        const Pack<4> q = load<4>(row + ExactToken<Sizes>::kFloats + member * Sizes::M + place.col);
        ExactRows<Sizes> o;
        each_row<Sizes>([&](int j, int e) {
          float sum = 0.f;
          each_col([&](int c) { sum = fmaf(read_of(state, made, shape, j, e, c), q.at[c], sum); });
          o.at[j].at[e] = sum;
        });
        float* const to = room.outputs(shared, turn) + u * room.out;
        store_row_sums<Sizes>(o, to + (member * Sizes::kWarps + place.warp) * Sizes::D);
      }
      if (++in_segment == lattice_segment(shape.chunk)) in_segment = 0, ++segment;
    }
    __syncthreads();
  }

  if (helps) {
    if (tiles > 0) write(room.outputs(shared, (tiles - 1) % 2), p, room, at(tiles - 1));
    return;
  }
  const LatticeEnd& end = p.end;
  store_memory(end.memory, state.S, here.index(), here.head, shape);
  if (end.step.data != nullptr) {
    store_memory(end.step, state.Delta, here.index(), here.head, shape);
  }
  if (place.thread == 0) {
    if (end.decay.data != nullptr) store_any(end.decay, state.L, here.index(), here.head);
    if (here.head == 0) p.last_position[here.index()] = position;
  }
}

template <class Sizes>
int scan_tile(const LatticeExactShape& shape, int limit) {
  const ScanRoom<Sizes> one(shape, 1);
  return tile_of(limit / 4 - one.kParts, one.in + one.out);
}

}  // namespace

cudaError_t exact_scan_fits(const LatticeExactShape& shape, int limit, bool& fits) {
  return by_exact_size(shape, [&](auto sizes) {
    fits = scan_tile<decltype(sizes)>(shape, limit) > 0;
    return cudaSuccess;
  });
}

}  // namespace lattice

cudaError_t lattice_exact_scan(const LatticeExactScan& p, cudaStream_t stream) {
  const LatticeExactShape& shape = p.of.shape;
  const int64_t blocks = shape.tokens.sequences * shape.heads;
  if (blocks == 0) return cudaSuccess;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  return lattice::by_exact_size(shape, [&](auto sizes) {
    using namespace lattice;
    using Sizes = decltype(sizes);
    const int tile = scan_tile<Sizes>(shape, limit);
    if (tile == 0) return cudaErrorInvalidValue;
    const int bytes = ScanRoom<Sizes>(shape, tile).floats() * 4;
    if (const cudaError_t error = allow_shared<exact_scan<Sizes>>(limit); error != cudaSuccess) return error;
    return launch_grid<exact_scan<Sizes>>(blocks, Sizes::kAll, bytes, stream, p, tile);
  });
}

}  // namespace girih::kernels
