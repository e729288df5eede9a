// Updates the memory token by token and computes o (fp32.h).
#include <algorithm>

#include "lattice/fp32_memory.cuh"

namespace girih::kernels {
namespace lattice {
namespace {

// Shared memory in floats: sums that warps exchange for a token; two buffers for the inputs of a tile of
// tokens and for its reads, one for each warp.
template <class Sizes>
struct ScanLayout {
  static constexpr int kParts = 2 * Sizes::kWarps * Sizes::D;
  int group, in, out, tile;  // group: query heads of a head; in, out: floats of a token

  __host__ __device__ ScanLayout(const LatticeFp32Shape& shape, int tile)
      : group(shape.query_heads / shape.heads),
        in(TokenInputs<Sizes>::kFloats + group * Sizes::M),
        out(group * Sizes::kWarps * Sizes::D),
        tile(tile) {}

  __host__ __device__ int floats() const { return kParts + 2 * tile * (in + out); }
  __device__ float* inputs(float* shared, int buffer_index) const {
    return shared + kParts + buffer_index * tile * in;
  }
  __device__ float* outputs(float* shared, int buffer_index) const {
    return inputs(shared, 2) + buffer_index * tile * out;
  }
};

// Called by helper warps while the other warps process a tile: loads the next tile, and stores the reads of
// the previous one.
template <class Sizes>
__device__ void load_rows(float* to, const LatticeFp32Inputs& of, const ScanLayout<Sizes>& layout,
                          const TokenTile<Sizes>& tile) {
  TokenInputs<Sizes>::load_rows(to, layout.in, of, tile);
  for (int i = 0; i < layout.group; ++i) {
    tile.template load_rows<Sizes::M>(to + TokenInputs<Sizes>::kFloats + i * Sizes::M, layout.in, of.q,
                                      tile.head * layout.group + i, of.shape.M);
  }
}
template <class Sizes>
__device__ void store_tile_results(const float* from, const LatticeFp32Forward& p,
                                   const ScanLayout<Sizes>& layout, const TokenTile<Sizes>& tile) {
  for (int i = 0; i < layout.group; ++i) {
    tile.template each<Sizes::D>(p.inputs.shape.D, [&](int u, int d) {
      const float* const parts = from + u * layout.out + i * Sizes::kWarps * Sizes::D + d;
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < Sizes::kWarps; ++w) sum += parts[w * Sizes::D];
      store_element(p.o, sum, tile.batch, tile.first + u, tile.head * layout.group + i, d);
    });
  }
}

template <class Sizes>
__global__ void __launch_bounds__(Sizes::kAll, Sizes::D* Sizes::M == 64 * 64 ? 2 : 1)
    fp32_scan_kernel(const __grid_constant__ LatticeFp32Forward p, const int tile) {
  GIRIH_DYNAMIC_SHARED(float, shared, 16);
  const LatticeFp32Shape& shape = p.inputs.shape;
  const ScanLayout<Sizes> layout(shape, tile);
  const Fp32SequenceCoord coord(p.inputs, blockIdx.x);
  const ThreadTile place;
  const bool is_helper = place.thread >= Sizes::kThreads;
  const int64_t length = coord.length(), tiles = (length + tile - 1) / tile;
  const auto at = [&](int64_t i) {
    const int64_t left = length - i * tile;
    return TokenTile<Sizes>{coord.batch(), coord.of.sequence.start + i * tile,
                            static_cast<int>(left < tile ? left : tile), coord.head,
                            place.thread - Sizes::kThreads};
  };

  ChunkState<Sizes> state;
  if (is_helper) {
    if (tiles > 0) load_rows(layout.inputs(shared, 0), p.inputs, layout, at(0));
  } else {
    const LatticeStart& start = p.inputs.start;
    load_memory(state.S, start.memory, coord.index(), coord.head, shape);
    load_memory(state.Delta, coord.resumed ? start.step : InputTensor<4>(), coord.index(), coord.head, shape);
    state.L = coord.resumed && start.decay.data != nullptr
                  ? load_element(start.decay, coord.index(), coord.head)
                  : 0.f;
  }
  __syncthreads();

  int position = coord.begun, in_segment = coord.of.prior_tokens;
  int64_t segment = coord.of.first;
  for (int64_t i = 0; i < tiles; ++i) {
    const int buffer_index = i % 2;
    if (is_helper) {
      if (i > 0) store_tile_results(layout.outputs(shared, 1 - buffer_index), p, layout, at(i - 1));
      if (i + 1 < tiles) load_rows(layout.inputs(shared, 1 - buffer_index), p.inputs, layout, at(i + 1));
      match_barriers<Sizes>(shape, at(i).count);
    }
    for (int u = 0; !is_helper && u < at(i).count; ++u) {
      if (p.memories != nullptr && ((i == 0 && u == 0) || in_segment == 0)) {
        for_each_stored_pack<Sizes>(shape, segment, coord.head, [&](int j, int e, int64_t at) {
          store<4>(p.memories + at, state.S.at[j][e]);
        });
      }
      const float* const row = layout.inputs(shared, buffer_index) + u * layout.in;
      auto results = apply_token<Sizes>(state, shape, TokenInputs<Sizes>(row), shared, u % 2);
      if (++position == shape.chunk) {
        end_chunk(state, results, shape);
        position = 0;
      }
      // o = y q, over the warp's columns
      for (int member = 0; member < layout.group; ++member) {
        const Pack<4> q = load<4>(row + TokenInputs<Sizes>::kFloats + member * Sizes::M + place.col);
        RowPacks<Sizes> o;
        each_row<Sizes>([&](int j, int e) {
          float sum = 0.f;
          each_col([&](int c) { sum = fmaf(element_of_y(state, results, shape, j, e, c), q.at[c], sum); });
          o.at[j].at[e] = sum;
        });
        float* const to = layout.outputs(shared, buffer_index) + u * layout.out;
        store_row_sums<Sizes>(o, to + (member * Sizes::kWarps + place.warp) * Sizes::D);
      }
      if (++in_segment == lattice_segment_tokens(shape.chunk)) in_segment = 0, ++segment;
    }
    __syncthreads();
  }

  if (is_helper) {
    if (tiles > 0) store_tile_results(layout.outputs(shared, (tiles - 1) % 2), p, layout, at(tiles - 1));
    return;
  }
  const LatticeEnd& end = p.end;
  store_memory(end.memory, state.S, coord.index(), coord.head, shape);
  if (end.step.data != nullptr) {
    store_memory(end.step, state.Delta, coord.index(), coord.head, shape);
  }
  if (place.thread == 0) {
    if (end.decay.data != nullptr) store_element(end.decay, state.L, coord.index(), coord.head);
    if (coord.head == 0) p.last_position[coord.index()] = position;
  }
}

template <class Sizes>
int scan_tile(const LatticeFp32Shape& shape, int limit) {
  const ScanLayout<Sizes> one(shape, 1);
  return tile_tokens(limit / 4 - one.kParts, one.in + one.out);
}

}  // namespace

cudaError_t fp32_scan_fits(const LatticeFp32Shape& shape, int limit, bool& fits) {
  return dispatch_fp32_size(shape, [&](auto sizes) {
    fits = scan_tile<decltype(sizes)>(shape, limit) > 0;
    return cudaSuccess;
  });
}

}  // namespace lattice

cudaError_t lattice_fp32_forward(const LatticeFp32Forward& p, cudaStream_t stream) {
  const LatticeFp32Shape& shape = p.inputs.shape;
  const int64_t blocks = shape.tokens.sequences * shape.heads;
  if (blocks == 0) return cudaSuccess;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  return lattice::dispatch_fp32_size(shape, [&](auto sizes) {
    using namespace lattice;
    using Sizes = decltype(sizes);
    const int tile = scan_tile<Sizes>(shape, limit);
    if (tile == 0) return cudaErrorInvalidValue;
    const int bytes = ScanLayout<Sizes>(shape, tile).floats() * 4;
    if (const cudaError_t error = allow_shared<fp32_scan_kernel<Sizes>>(limit); error != cudaSuccess)
      return error;
    return launch_grid<fp32_scan_kernel<Sizes>>(blocks, Sizes::kAll, bytes, stream, p, tile);
  });
}

}  // namespace girih::kernels
