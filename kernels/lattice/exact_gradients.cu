// Backward from the last token of a sequence to the first (exact.h). For each segment: recomputes forward,
// then goes back over its tokens.
#include <algorithm>

#include "lattice/exact_token.cuh"
#include "pipe/card.h"

namespace girih::kernels {
namespace lattice {
namespace {

// A block's workspace: S before a segment and y of its tokens in the layout of threads, and vectors of
// tokens.
template <class Sizes>
struct Workspace {
  static constexpr int64_t kMemories = int64_t{kLatticeSegment + 1} * Sizes::kMemory;
  static constexpr int64_t kFloats = kMemories + kLatticeSegment * GradientRow<Sizes>::kVectors;
  float* floats;

  __device__ float* memory(int i) const { return floats + int64_t{i} * Sizes::kMemory; }
  __device__ float* vectors(int token) const {
    return floats + kMemories + token * GradientRow<Sizes>::kVectors;
  }
};

// Shared memory in floats: three memories; scalars of a segment's tokens; two buffers for the inputs and
// results of a tile of tokens.
template <class Sizes>
struct GradientRoom {
  static constexpr int kFixed = 3 * Sizes::kMemory + kLatticeSegment * (1 + 3 * Sizes::kWarps);
  GradientRow<Sizes> row;
  int tile;

  __host__ __device__ GradientRoom(const LatticeExactShape& shape, int tile)
      : row(shape.query_heads / shape.heads), tile(tile) {}

  __host__ __device__ int floats() const { return kFixed + 2 * tile * (row.in + row.out); }
  __device__ float* slot(float* shared, int i) const { return shared + i * Sizes::kMemory; }
  __device__ float* inputs(float* shared, int turn) const { return shared + kFixed + turn * tile * row.in; }
  __device__ float* outputs(float* shared, int turn) const {
    return inputs(shared, 2) + turn * tile * row.out;
  }
};

template <class Sizes>
struct Backward {
  const LatticeExactGradients& p;
  const LatticeExactShape& shape;
  const GradientRoom<Sizes> room;
  float* const shared;
  const Workspace<Sizes> work;
  const ExactPlace place;
  const bool helps;
  const int helper;

  __device__ Backward(const LatticeExactGradients& p, int tile, float* shared)
      : p(p),
        shape(p.of.shape),
        room(shape, tile),
        shared(shared),
        work{p.workspace + blockIdx.x * Workspace<Sizes>::kFloats},
        helps(place.thread >= Sizes::kThreads),
        helper(place.thread - Sizes::kThreads) {}

  __device__ bool gated() const { return p.of.g.data != nullptr; }
  __device__ float* slot(int i) const { return room.slot(shared, i); }
  __device__ TokenNumbers<Sizes> numbers() const { return {slot(3)}; }
  __device__ ExactTile<Sizes> at(const ExactSequence& here, const Segment& segment, int i) const {
    return {here.batch(), segment.start + i * room.tile, min(room.tile, segment.length - i * room.tile),
            here.head, helper};
  }
  __device__ int tiles(const Segment& segment) const { return (segment.length + room.tile - 1) / room.tile; }

  // Gates of the chunk before this call.
  __device__ float start_gates(const ExactSequence& here) const {
    const In<2>& decay = p.of.start.decay;
    return here.resumed && decay.data != nullptr ? load_any(decay, here.index(), here.head) : 0.f;
  }

  // Recomputes y, h, a and 1 / |x| of a segment's tokens, and the sums of its gates.
  __device__ void forward(const ExactSequence& here, const Segment& segment) const {
    const auto bring = [&](int i) {
      ExactToken<Sizes>::bring(room.inputs(shared, i % 2), room.row.in, p.of, at(here, segment, i));
    };
    ExactState<Sizes> state;
    if (helps) {
      bring(0);
    } else {
      const bool resumed = segment.first && here.resumed;
      each_row<Sizes>([&](int j, int e) { state.S.at[j][e] = zeros<4>(); });
      each_kept<Sizes>(shape, segment.number, here.head,
                       [&](int j, int e, int64_t at) { state.S.at[j][e] = load<4>(p.memories + at); });
      load_memory(state.Delta, resumed ? p.of.start.step : In<4>(), here.index(), here.head, shape);
      state.L = resumed ? start_gates(here) : 0.f;
      store_own(work.memory(0), state.S);
    }
    __syncthreads();
    int position = segment.begun;
    for (int i = 0; i < tiles(segment); ++i) {
      if (helps && i + 1 < tiles(segment)) bring(i + 1);
      if (helps) count_barriers<Sizes>(shape, at(here, segment, i).count);
      for (int u = 0; !helps && u < at(here, segment, i).count; ++u) {
        const int token = i * room.tile + u;
        const ExactToken<Sizes> row(room.inputs(shared, i % 2) + u * room.row.in);
        auto made = exact_step<Sizes>(state, shape, row, room.outputs(shared, 0), u % 2);
        GradientRow<Sizes>::keep(work.vectors(token), made);
        if (place.thread == 0) *numbers().gates(token) = state.L;
        if (++position == shape.chunk) {
          end_chunk(state, made, shape);
          position = 0;
        }
        float* const y = work.memory(token + 1);
        each_row<Sizes>([&](int j, int e) {
          Pack<4> read;
          each_col([&](int c) { read.at[c] = read_of(state, made, shape, j, e, c); });
          store<4>(own<Sizes>(y, j, e), read);
        });
      }
      __syncthreads();
    }
  }

  // Called by helper warps while the other warps process a tile: loads the next tile, and stores the results
  // of the previous one.
  __device__ void bring(float* to, const ExactSequence& here, const Segment& segment, int i) const {
    using Row = GradientRow<Sizes>;
    const auto tile = at(here, segment, i);
    const int in = room.row.in, group = room.row.group;
    tile.template bring<Sizes::M>(to, in, p.of.k, here.head, shape.M);
    for (int member = 0; member < group; ++member) {
      const int head = here.head * group + member;
      tile.template bring<Sizes::M>(to + room.row.q(member), in, p.of.q, head, shape.M);
      tile.template bring<Sizes::D>(to + room.row.dout(member), in, p.dout, head, shape.D);
    }
    tile.template each<Row::kVectors / 4>(Row::kVectors / 4, [&](int u, int pack) {
      store<4>(to + u * in + Row::kH + 4 * pack, load<4>(work.vectors(i * room.tile + u) + 4 * pack));
    });
    tile.bring(to + Row::kGamma, in, p.of.gamma);
    tile.bring(to + Row::kGamma + 1, in, p.of.g);
  }
  __device__ void write(const float* from, const ExactSequence& here, const Segment& segment, int i) const {
    const auto tile = at(here, segment, i);
    const int stride = room.row.out, group = room.row.group;
    const float sign = shape.objective == LatticeObjective::decode ? -1.f : 1.f;
    tile.template each<Sizes::M>(shape.M, [&](int u, int m) {
      const float* const row = from + u * stride + m;
      for (int i = 0; i < group; ++i)
        store_any(p.dq, row[room.row.dq(i)], tile.batch, tile.first + u, here.head * group + i, m);
      store_any(p.dk, row[room.row.dk()], tile.batch, tile.first + u, here.head, m);
    });
    tile.template each<Sizes::D>(shape.D, [&](int u, int d) {
      const float* const dh = from + u * stride + room.row.dh() + d;
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < Sizes::kWarps; ++w) sum += dh[w * Sizes::D];
      store_any(p.dv, sign * sum, tile.batch, tile.first + u, here.head, d);
    });
  }

  // Processes a segment's tokens from the last to the first. dS and dDelta are in buffers 0 and 1 before and
  // after.
  __device__ void reverse(const ExactSequence& here, const Segment& segment) const {
    const int tiles = this->tiles(segment);
    ExactMemory<Sizes> dS, dDelta;
    StartCross cross;
    const float L_start = start_gates(here);
    int y = 0, s = 1, next = 2;
    // For the current token y and S are in shared memory. For the previous token one copy is in flight: y,
    // or, if that token is the last of the previous chunk, whose y is the current S, the S of that chunk.
    const auto copy = [&](int to, int memory) {
      each_row<Sizes>([&](int j, int e) {
        copy_async(shared_address(own<Sizes>(slot(to), j, e)), own<Sizes>(work.memory(memory), j, e), true);
      });
    };
    int position = (segment.begun + segment.length - 1) % shape.chunk;
    if (helps) {
      bring(room.inputs(shared, (tiles - 1) % 2), here, segment, tiles - 1);
    } else {
      load_own(dS, slot(0)), load_own(dDelta, slot(1));
      copy(y, segment.length), copy(s, max(segment.length - 1 - position, 0));
      commit_copies();
    }
    __syncthreads();
    for (int i = tiles - 1; i >= 0; --i) {
      if (helps) {
        if (i + 1 < tiles) write(room.outputs(shared, (i + 1) % 2), here, segment, i + 1);
        if (i > 0) bring(room.inputs(shared, (i - 1) % 2), here, segment, i - 1);
        count_barriers<Sizes>(shape, at(here, segment, i).count);
      }
      for (int u = at(here, segment, i).count - 1; !helps && u >= 0; --u) {
        const int token = i * room.tile + u;
        const bool begins = position == 0 || token == 0;
        wait_copies<0>();
        if (token > 0) copy(next, begins ? max(token - shape.chunk, 0) : token);
        commit_copies();
        const bool ends = position == shape.chunk - 1;
        const bool resumed = segment.first && here.resumed && token < shape.chunk - segment.begun;
        TokenBack<Sizes> back{shape,
                              room.row,
                              room.inputs(shared, i % 2) + u * room.row.in,
                              slot(y),
                              slot(s),
                              room.outputs(shared, i % 2) + u * room.row.out,
                              numbers(),
                              token,
                              ends,
                              resumed ? &cross : nullptr,
                              L_start,
                              dS,
                              dDelta};
        back.back(gated() && !ends && token + 1 < segment.length);
        const int last = y;
        if (begins) {
          y = s, s = next, next = last;
          if (gated() && place.lane == 0) *numbers().before(token, place.warp) = 0.f;
        } else {
          y = next, next = last;
        }
        position = position == 0 ? shape.chunk - 1 : position - 1;
      }
      __syncthreads();
    }
    if (helps) {
      write(room.outputs(shared, 0), here, segment, 0);
    } else {
      wait_copies<0>();
      if (segment.first && here.resumed) start(dS, dDelta, cross.sum, here);
      store_own(slot(0), dS), store_own(slot(1), dDelta);
    }
    __syncthreads();
  }
  // Gradient of the gate of token 0 through the steps Delta_0 before the call; corrects dS and dDelta by
  // StartCross.
  __device__ void start(ExactMemory<Sizes>& dS, ExactMemory<Sizes>& dDelta, const Pack<4>& cross,
                        const ExactSequence& here) const {
    ExactMemory<Sizes> x;
    load_memory(x, p.of.start.step, here.index(), here.head, shape);
    float sum = 0.f;
    each_entry<Sizes>([&](int j, int e, int c) {
      sum = fmaf(dDelta.at[j][e].at[c], x.at[j][e].at[c], sum);
      dS.at[j][e].at[c] = fmaf(cross.at[c], x.at[j][e].at[c], dS.at[j][e].at[c]);
    });
    sum = sum_lanes(sum);
    if (gated() && place.lane == 0) *numbers().before(0, place.warp) = sum;
    load_memory(x, p.of.start.memory, here.index(), here.head, shape);
    each_entry<Sizes>([&](int j, int e, int c) {
      dDelta.at[j][e].at[c] = fmaf(cross.at[c], x.at[j][e].at[c], dDelta.at[j][e].at[c]);
    });
  }

  // Stores dgamma and dg of a segment; called by one warp. dL is used by lane 0.
  __device__ void write_numbers(const ExactSequence& here, const Segment& segment, float& dL) const {
    const auto of = numbers();
    for (int token = place.lane; token < segment.length; token += 32) {
      store_any(p.dgamma, of.sum(of.dgamma(token, 0)), here.batch(), segment.start + token, here.head);
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
      store_any(p.dg, dL + *of.before(token, 0), here.batch(), segment.start + token, here.head);
      position = position == 0 ? shape.chunk - 1 : position - 1;
    }
  }

  __device__ void run(int64_t item) const {
    const ExactSequence here(p.of, item);
    const int64_t length = here.length();
    const bool whole = length > 0 && (here.begun + length) % shape.chunk == 0;  // the last chunk is complete
    float dL = 0.f;
    if (helps) {
      if (!whole && p.dlast_decay.data != nullptr) dL = load_any(p.dlast_decay, here.index(), here.head);
    } else {
      ExactMemory<Sizes> x;
      load_memory(x, p.dlast, here.index(), here.head, shape);
      store_own(slot(0), x);
      load_memory(x, whole ? In<4>() : p.dlast_step, here.index(), here.head, shape);
      store_own(slot(1), x);
    }
    const bool counts = helps && helper < 32;
    for (int64_t i = here.of.chunks - 1; i >= 0; --i) {
      const Segment segment(shape, here, i);
      forward(here, segment);
      reverse(here, segment);
      if (counts) write_numbers(here, segment, dL);
    }
    if (helps) {
      if (helper == 0 && p.ddecay.data != nullptr) store_any(p.ddecay, dL, here.index(), here.head);
      return;
    }
    ExactMemory<Sizes> x, S;
    load_own(x, slot(0));
    if (shape.normalize) {
      load_memory(S, p.of.start.memory, here.index(), here.head, shape);
      Pack<4> along = zeros<4>();
      each_entry<Sizes>(
          [&](int j, int e, int c) { along.at[c] = fmaf(S.at[j][e].at[c], x.at[j][e].at[c], along.at[c]); });
      sum_rows(along);
      each_entry<Sizes>([&](int j, int e, int c) {
        x.at[j][e].at[c] = fmaf(-S.at[j][e].at[c], along.at[c], x.at[j][e].at[c]);
      });
    }
    store_memory(p.dmemory, x, here.index(), here.head, shape);
    if (p.dstep.data == nullptr) return;
    load_own(x, slot(1));
    store_memory(p.dstep, x, here.index(), here.head, shape);
  }
};

template <class Sizes>
__global__ void __launch_bounds__(Sizes::kAll, 1)
    exact_gradients(const __grid_constant__ LatticeExactGradients p, const int tile) {
  extern __shared__ __align__(16) float shared[];
  const Backward<Sizes> backward(p, tile, shared);
  const int64_t items = p.of.shape.tokens.sequences * p.of.shape.heads;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    backward.run(item);
    __syncthreads();
  }
}

template <class Sizes>
int gradient_tile(const LatticeExactShape& shape, int limit) {
  const GradientRoom<Sizes> one(shape, 1);
  return limit / 4 < one.kFixed ? 0 : tile_of(limit / 4 - one.kFixed, one.row.in + one.row.out);
}

// One block for each multiprocessor; blocks take sequences and heads round-robin, because a block needs more
// than a megabyte of workspace.
cudaError_t block_count(const LatticeExactShape& shape, int64_t& blocks) {
  int card = 0;
  if (const cudaError_t error = processor_count(card); error != cudaSuccess) return error;
  blocks = std::min<int64_t>(shape.tokens.sequences * shape.heads, card);
  return cudaSuccess;
}

}  // namespace

cudaError_t exact_gradients_fit(const LatticeExactShape& shape, int limit, bool& fit) {
  return by_exact_size(shape, [&](auto sizes) {
    fit = gradient_tile<decltype(sizes)>(shape, limit) > 0;
    return cudaSuccess;
  });
}

}  // namespace lattice

cudaError_t lattice_exact_workspace(const LatticeExactShape& shape, int64_t& floats) {
  int64_t blocks = 0;
  if (const cudaError_t error = lattice::block_count(shape, blocks); error != cudaSuccess) return error;
  return lattice::by_exact_size(shape, [&](auto sizes) {
    floats = blocks * lattice::Workspace<decltype(sizes)>::kFloats;
    return cudaSuccess;
  });
}

cudaError_t lattice_exact_gradients(const LatticeExactGradients& p, cudaStream_t stream) {
  const LatticeExactShape& shape = p.of.shape;
  int64_t blocks = 0;
  int limit = 0;
  if (const cudaError_t error = lattice::block_count(shape, blocks); error != cudaSuccess) return error;
  if (blocks == 0) return cudaSuccess;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  return lattice::by_exact_size(shape, [&](auto sizes) {
    using namespace lattice;
    using Sizes = decltype(sizes);
    const int tile = gradient_tile<Sizes>(shape, limit);
    if (tile == 0) return cudaErrorInvalidValue;
    const int bytes = GradientRoom<Sizes>(shape, tile).floats() * 4;
    if (const cudaError_t error = allow_shared<exact_gradients<Sizes>>(limit); error != cudaSuccess)
      return error;
    return launch_grid<exact_gradients<Sizes>>(blocks, Sizes::kAll, bytes, stream, p, tile);
  });
}

cudaError_t lattice_exact_fits(const LatticeExactShape& shape, bool& fits) {
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  bool forward = false, backward = false;
  if (const cudaError_t error = lattice::exact_scan_fits(shape, limit, forward); error != cudaSuccess)
    return error;
  const cudaError_t error = lattice::exact_gradients_fit(shape, limit, backward);
  fits = forward && backward;
  return error;
}

}  // namespace girih::kernels
