// Backward from the last token of a sequence to the first (fp32.h). For each segment: recomputes forward,
// then goes back over its tokens.
#include <algorithm>

#include "lattice/fp32_token_backward.cuh"
#include "pipe/device.h"

namespace girih::kernels {
namespace lattice {
namespace {

// The memory of a block in the workspace: S before a segment and y of its tokens in the layout of threads,
// and vectors of tokens.
template <class Sizes>
struct BlockWorkspace {
  static constexpr int64_t kMemories = int64_t{kLatticeSegment + 1} * Sizes::kMemory;
  static constexpr int64_t kFloats = kMemories + kLatticeSegment * TokenRowLayout<Sizes>::kVectors;
  float* floats;

  __device__ float* memory(int i) const { return floats + int64_t{i} * Sizes::kMemory; }
  __device__ float* vectors(int token) const {
    return floats + kMemories + token * TokenRowLayout<Sizes>::kVectors;
  }
};

// Shared memory in floats: three memories; scalars of a segment's tokens; two buffers for the inputs and
// results of a tile of tokens.
template <class Sizes>
struct BackwardLayout {
  static constexpr int kFixed = 3 * Sizes::kMemory + kLatticeSegment * (1 + 3 * Sizes::kWarps);
  TokenRowLayout<Sizes> row;
  int tile;

  __host__ __device__ BackwardLayout(const LatticeFp32Shape& shape, int tile)
      : row(shape.query_heads / shape.heads), tile(tile) {}

  __host__ __device__ int floats() const { return kFixed + 2 * tile * (row.in + row.out); }
  __device__ float* buffer(float* shared, int i) const { return shared + i * Sizes::kMemory; }
  __device__ float* inputs(float* shared, int buffer_index) const {
    return shared + kFixed + buffer_index * tile * row.in;
  }
  __device__ float* outputs(float* shared, int buffer_index) const {
    return inputs(shared, 2) + buffer_index * tile * row.out;
  }
};

template <class Sizes>
struct Backward {
  const LatticeFp32Backward& p;
  const LatticeFp32Shape& shape;
  const BackwardLayout<Sizes> layout;
  float* const shared;
  const BlockWorkspace<Sizes> work;
  const ThreadTile place;
  const bool is_helper;
  const int helper;

  __device__ Backward(const LatticeFp32Backward& p, int tile, float* workspace, float* shared)
      : p(p),
        shape(p.inputs.shape),
        layout(shape, tile),
        shared(shared),
        work{workspace + blockIdx.x * BlockWorkspace<Sizes>::kFloats},
        is_helper(place.thread >= Sizes::kThreads),
        helper(place.thread - Sizes::kThreads) {}

  __device__ bool gated() const { return p.inputs.g.data != nullptr; }
  __device__ float* buffer(int i) const { return layout.buffer(shared, i); }
  __device__ TokenScalars<Sizes> scalars() const { return {buffer(3)}; }
  __device__ TokenTile<Sizes> at(const Fp32SequenceCoord& coord, const Segment& segment, int i) const {
    return {coord.batch(), segment.start + i * layout.tile,
            min(layout.tile, segment.length - i * layout.tile), coord.head, helper};
  }
  __device__ int tiles(const Segment& segment) const {
    return (segment.length + layout.tile - 1) / layout.tile;
  }

  // Gates of the chunk before this call.
  __device__ float start_gates(const Fp32SequenceCoord& coord) const {
    const InputTensor<2>& decay = p.inputs.start.decay;
    return coord.resumed && decay.data != nullptr ? load_element(decay, coord.index(), coord.head) : 0.f;
  }

  // Recomputes y, h, a and 1 / |x| of a segment's tokens, and the sums of its gates.
  __device__ void forward(const Fp32SequenceCoord& coord, const Segment& segment) const {
    const auto load_rows = [&](int i) {
      TokenInputs<Sizes>::load_rows(layout.inputs(shared, i % 2), layout.row.in, p.inputs,
                                    at(coord, segment, i));
    };
    ChunkState<Sizes> state;
    if (is_helper) {
      load_rows(0);
    } else {
      const bool resumed = segment.first && coord.resumed;
      each_row<Sizes>([&](int j, int e) { state.S.at[j][e] = zeros<4>(); });
      for_each_stored_pack<Sizes>(shape, segment.number, coord.head, [&](int j, int e, int64_t at) {
        state.S.at[j][e] = load<4>(p.memories + at);
      });
      load_memory(state.Delta, resumed ? p.inputs.start.step : InputTensor<4>(), coord.index(), coord.head,
                  shape);
      state.L = resumed ? start_gates(coord) : 0.f;
      store_packs(work.memory(0), state.S);
    }
    __syncthreads();
    int position = segment.begun;
    for (int i = 0; i < tiles(segment); ++i) {
      if (is_helper && i + 1 < tiles(segment)) load_rows(i + 1);
      if (is_helper) match_barriers<Sizes>(shape, at(coord, segment, i).count);
      for (int u = 0; !is_helper && u < at(coord, segment, i).count; ++u) {
        const int token = i * layout.tile + u;
        const TokenInputs<Sizes> row(layout.inputs(shared, i % 2) + u * layout.row.in);
        auto results = apply_token<Sizes>(state, shape, row, layout.outputs(shared, 0), u % 2);
        TokenRowLayout<Sizes>::store_results(work.vectors(token), results);
        if (place.thread == 0) *scalars().gates(token) = state.L;
        if (++position == shape.chunk) {
          end_chunk(state, results, shape);
          position = 0;
        }
        float* const y = work.memory(token + 1);
        each_row<Sizes>([&](int j, int e) {
          Pack<4> read;
          each_col([&](int c) { read.at[c] = element_of_y(state, results, shape, j, e, c); });
          store<4>(thread_pack<Sizes>(y, j, e), read);
        });
      }
      __syncthreads();
    }
  }

  // Called by helper warps while the other warps process a tile: loads the next tile, and stores the results
  // of the previous one.
  __device__ void load_rows(float* to, const Fp32SequenceCoord& coord, const Segment& segment, int i) const {
    using Row = TokenRowLayout<Sizes>;
    const auto tile = at(coord, segment, i);
    const int in = layout.row.in, group = layout.row.group;
    tile.template load_rows<Sizes::M>(to, in, p.inputs.k, coord.head, shape.M);
    for (int member = 0; member < group; ++member) {
      const int head = coord.head * group + member;
      tile.template load_rows<Sizes::M>(to + layout.row.q(member), in, p.inputs.q, head, shape.M);
      tile.template load_rows<Sizes::D>(to + layout.row.dout(member), in, p.dout, head, shape.D);
    }
    tile.template each<Row::kVectors / 4>(Row::kVectors / 4, [&](int u, int pack) {
      store<4>(to + u * in + Row::kH + 4 * pack, load<4>(work.vectors(i * layout.tile + u) + 4 * pack));
    });
    tile.load_rows(to + Row::kGamma, in, p.inputs.gamma);
    tile.load_rows(to + Row::kGamma + 1, in, p.inputs.g);
  }
  __device__ void store_tile_results(const float* from, const Fp32SequenceCoord& coord,
                                     const Segment& segment, int i) const {
    const auto tile = at(coord, segment, i);
    const int stride = layout.row.out, group = layout.row.group;
    const float sign = shape.objective == LatticeObjective::decode ? -1.f : 1.f;
    tile.template each<Sizes::M>(shape.M, [&](int u, int m) {
      const float* const row = from + u * stride + m;
      for (int i = 0; i < group; ++i)
        store_element(p.dq, row[layout.row.dq(i)], tile.batch, tile.first + u, coord.head * group + i, m);
      store_element(p.dk, row[layout.row.dk()], tile.batch, tile.first + u, coord.head, m);
    });
    tile.template each<Sizes::D>(shape.D, [&](int u, int d) {
      const float* const dh = from + u * stride + layout.row.dh() + d;
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < Sizes::kWarps; ++w) sum += dh[w * Sizes::D];
      store_element(p.dv, sign * sum, tile.batch, tile.first + u, coord.head, d);
    });
  }

  // Processes a segment's tokens from the last to the first. dS and dDelta are in buffers 0 and 1 before and
  // after.
  __device__ void reverse(const Fp32SequenceCoord& coord, const Segment& segment) const {
    const int tiles = this->tiles(segment);
    RegisterMemory<Sizes> dS, dDelta;
    ResumeCorrection correction;
    const float L_start = start_gates(coord);
    int y = 0, s = 1, next = 2;
    // For the current token y and S are in shared memory. For the previous token one copy is in flight: y,
    // or, if that token is the last of the previous chunk, whose y is the current S, the S of that chunk.
    const auto copy = [&](int to, int memory) {
      each_row<Sizes>([&](int j, int e) {
        copy_async(shared_address(thread_pack<Sizes>(buffer(to), j, e)),
                   thread_pack<Sizes>(work.memory(memory), j, e), true);
      });
    };
    int position = (segment.begun + segment.length - 1) % shape.chunk;
    if (is_helper) {
      load_rows(layout.inputs(shared, (tiles - 1) % 2), coord, segment, tiles - 1);
    } else {
      load_packs(dS, buffer(0)), load_packs(dDelta, buffer(1));
      copy(y, segment.length), copy(s, max(segment.length - 1 - position, 0));
      commit_copies();
    }
    __syncthreads();
    for (int i = tiles - 1; i >= 0; --i) {
      if (is_helper) {
        if (i + 1 < tiles) store_tile_results(layout.outputs(shared, (i + 1) % 2), coord, segment, i + 1);
        if (i > 0) load_rows(layout.inputs(shared, (i - 1) % 2), coord, segment, i - 1);
        match_barriers<Sizes>(shape, at(coord, segment, i).count);
      }
      for (int u = at(coord, segment, i).count - 1; !is_helper && u >= 0; --u) {
        const int token = i * layout.tile + u;
        const bool starts_chunk = position == 0 || token == 0;
        wait_copies<0>();
        if (token > 0) copy(next, starts_chunk ? max(token - shape.chunk, 0) : token);
        commit_copies();
        const bool ends_chunk = position == shape.chunk - 1;
        const bool resumed = segment.first && coord.resumed && token < shape.chunk - segment.begun;
        TokenBackward<Sizes> back{shape,
                                  layout.row,
                                  layout.inputs(shared, i % 2) + u * layout.row.in,
                                  buffer(y),
                                  buffer(s),
                                  layout.outputs(shared, i % 2) + u * layout.row.out,
                                  scalars(),
                                  token,
                                  ends_chunk,
                                  resumed ? &correction : nullptr,
                                  L_start,
                                  dS,
                                  dDelta};
        back.back(gated() && !ends_chunk && token + 1 < segment.length);
        const int last = y;
        if (starts_chunk) {
          y = s, s = next, next = last;
          if (gated() && place.lane == 0) *scalars().before(token, place.warp) = 0.f;
        } else {
          y = next, next = last;
        }
        position = position == 0 ? shape.chunk - 1 : position - 1;
      }
      __syncthreads();
    }
    if (is_helper) {
      store_tile_results(layout.outputs(shared, 0), coord, segment, 0);
    } else {
      wait_copies<0>();
      if (segment.first && coord.resumed) start(dS, dDelta, correction.sum, coord);
      store_packs(buffer(0), dS), store_packs(buffer(1), dDelta);
    }
    __syncthreads();
  }
  // Gradient of the gate of token 0 through the steps Delta_0 before the call; corrects dS and dDelta by
  // ResumeCorrection.
  __device__ void start(RegisterMemory<Sizes>& dS, RegisterMemory<Sizes>& dDelta, const Pack<4>& correction,
                        const Fp32SequenceCoord& coord) const {
    RegisterMemory<Sizes> x;
    load_memory(x, p.inputs.start.step, coord.index(), coord.head, shape);
    float sum = 0.f;
    each_entry<Sizes>([&](int j, int e, int c) {
      sum = fmaf(dDelta.at[j][e].at[c], x.at[j][e].at[c], sum);
      dS.at[j][e].at[c] = fmaf(correction.at[c], x.at[j][e].at[c], dS.at[j][e].at[c]);
    });
    sum = sum_lanes(sum);
    if (gated() && place.lane == 0) *scalars().before(0, place.warp) = sum;
    load_memory(x, p.inputs.start.memory, coord.index(), coord.head, shape);
    each_entry<Sizes>([&](int j, int e, int c) {
      dDelta.at[j][e].at[c] = fmaf(correction.at[c], x.at[j][e].at[c], dDelta.at[j][e].at[c]);
    });
  }

  // Stores dgamma and dg of a segment; called by one warp. dL is used by lane 0.
  __device__ void store_token_scalars(const Fp32SequenceCoord& coord, const Segment& segment,
                                      float& dL) const {
    const auto of = scalars();
    for (int token = place.lane; token < segment.length; token += 32) {
      store_element(p.dgamma, of.sum(of.dgamma(token, 0)), coord.batch(), segment.start + token, coord.head);
      if (!gated()) continue;
      const float L = *of.gates(token);
      // the gradient of L through m = e^{max(L, -30)}, which replaces L
      *of.gates(token) = L >= -30.f ? expf(L) * of.sum(of.along(token, 0)) : 0.f;
      *of.before(token, 0) = of.sum(of.before(token, 0));
    }
    __syncwarp();
    if (place.lane != 0 || !gated()) return;
    int position = (segment.begun + segment.length - 1) % shape.chunk;
    for (int token = segment.length - 1; token >= 0; --token) {
      if (position == shape.chunk - 1) dL = 0.f;
      dL += *of.gates(token);
      store_element(p.dg, dL + *of.before(token, 0), coord.batch(), segment.start + token, coord.head);
      position = position == 0 ? shape.chunk - 1 : position - 1;
    }
  }

  __device__ void run(int64_t item) const {
    const Fp32SequenceCoord coord(p.inputs, item);
    const int64_t length = coord.length();
    const bool is_complete =
        length > 0 && (coord.begun + length) % shape.chunk == 0;  // the last chunk is complete
    float dL = 0.f;
    if (is_helper) {
      if (!is_complete && p.dlast_decay.data != nullptr)
        dL = load_element(p.dlast_decay, coord.index(), coord.head);
    } else {
      RegisterMemory<Sizes> x;
      load_memory(x, p.dlast, coord.index(), coord.head, shape);
      store_packs(buffer(0), x);
      load_memory(x, is_complete ? InputTensor<4>() : p.dlast_step, coord.index(), coord.head, shape);
      store_packs(buffer(1), x);
    }
    const bool counts = is_helper && helper < 32;
    for (int64_t i = coord.of.chunks - 1; i >= 0; --i) {
      const Segment segment(shape, coord, i);
      forward(coord, segment);
      reverse(coord, segment);
      if (counts) store_token_scalars(coord, segment, dL);
    }
    if (is_helper) {
      if (helper == 0 && p.ddecay.data != nullptr) store_element(p.ddecay, dL, coord.index(), coord.head);
      return;
    }
    RegisterMemory<Sizes> x, S;
    load_packs(x, buffer(0));
    if (shape.normalize) {
      load_memory(S, p.inputs.start.memory, coord.index(), coord.head, shape);
      Pack<4> along = zeros<4>();
      each_entry<Sizes>(
          [&](int j, int e, int c) { along.at[c] = fmaf(S.at[j][e].at[c], x.at[j][e].at[c], along.at[c]); });
      sum_rows(along);
      each_entry<Sizes>([&](int j, int e, int c) {
        x.at[j][e].at[c] = fmaf(-S.at[j][e].at[c], along.at[c], x.at[j][e].at[c]);
      });
    }
    store_memory(p.dmemory, x, coord.index(), coord.head, shape);
    if (p.dstep.data == nullptr) return;
    load_packs(x, buffer(1));
    store_memory(p.dstep, x, coord.index(), coord.head, shape);
  }
};

template <class Sizes>
__global__ void __launch_bounds__(Sizes::kAll, 1)
    fp32_backward_kernel(const __grid_constant__ LatticeFp32Backward p, const int tile,
                         float* const workspace) {
  GIRIH_DYNAMIC_SHARED(float, shared, 16);
  const Backward<Sizes> backward(p, tile, workspace, shared);
  const int64_t items = p.inputs.shape.tokens.sequences * p.inputs.shape.heads;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    backward.run(item);
    __syncthreads();
  }
}

template <class Sizes>
int gradient_tile(const LatticeFp32Shape& shape, int limit) {
  const BackwardLayout<Sizes> one(shape, 1);
  return limit / 4 < one.kFixed ? 0 : tile_tokens(limit / 4 - one.kFixed, one.row.in + one.row.out);
}

// One block for each multiprocessor; blocks take sequences and heads round-robin, because a block needs more
// than a megabyte of workspace.
cudaError_t block_count(const LatticeFp32Shape& shape, int64_t& blocks) {
  int card = 0;
  if (const cudaError_t error = processor_count(card); error != cudaSuccess) return error;
  blocks = std::min<int64_t>(shape.tokens.sequences * shape.heads, card);
  return cudaSuccess;
}

}  // namespace

cudaError_t fp32_backward_fits(const LatticeFp32Shape& shape, int limit, bool& fit) {
  return dispatch_fp32_size(shape, [&](auto sizes) {
    fit = gradient_tile<decltype(sizes)>(shape, limit) > 0;
    return cudaSuccess;
  });
}

}  // namespace lattice

cudaError_t lattice_fp32_backward(const LatticeFp32Backward& p, Workspace& workspace, cudaStream_t stream) {
  const LatticeFp32Shape& shape = p.inputs.shape;
  int64_t blocks = 0;
  int limit = 0;
  GIRIH_TRY(lattice::block_count(shape, blocks));
  if (blocks == 0) return cudaSuccess;
  GIRIH_TRY(shared_limit(limit));
  return lattice::dispatch_fp32_size(shape, [&](auto sizes) {
    using namespace lattice;
    using Sizes = decltype(sizes);
    const int tile = gradient_tile<Sizes>(shape, limit);
    if (tile == 0) return cudaErrorInvalidValue;
    const int bytes = BackwardLayout<Sizes>(shape, tile).floats() * 4;
    GIRIH_TRY(allow_shared<fp32_backward_kernel<Sizes>>(limit));
    return launch_grid<fp32_backward_kernel<Sizes>>(
        blocks, Sizes::kAll, bytes, stream, p, tile,
        workspace.array<float>(blocks * BlockWorkspace<Sizes>::kFloats));
  });
}

cudaError_t lattice_fp32_fits(const LatticeFp32Shape& shape, bool& fits) {
  int limit = 0;
  GIRIH_TRY(shared_limit(limit));
  bool forward = false, backward = false;
  GIRIH_TRY(lattice::fp32_scan_fits(shape, limit, forward));
  GIRIH_TRY(lattice::fp32_backward_fits(shape, limit, backward));
  fits = forward && backward;
  return cudaSuccess;
}

}  // namespace girih::kernels
