// The rows of a block of the scan, its shared memory (the state and rings of stages), and its loads.
#pragma once

#include "gsa/kernels.h"
#include "gsa/range.cuh"
#include "tile/matrix.h"
#include "tile/pack.h"
#include "tile/shared.h"

namespace girih::kernels::gsa {

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupWarps = kWarpgroupThreads / 32;
constexpr int kMaxWarpgroups = 3;

// The arguments of one launch.
struct ScanParams {
  GatedScan problem;
  Segmentation segmentation;
  bool shared_s;  // both memories have the same s, so a block may have rows of both
  int warpgroups, stages_per_warpgroup;
};

__host__ __device__ inline int count_slabs(int width) { return (width + kSlab - 1) / kSlab; }

// Number of row tiles that cover the rows of the state. A row tile has `slabs` slabs and belongs to one
// block. The slabs of a row tile belong to one memory, or with shared_s to either memory.
__host__ __device__ inline int count_row_tiles(const ScanParams& params, int slabs) {
  const int slabs0 = count_slabs(params.problem.memory[0].width),
            slabs1 = count_slabs(params.problem.memory[1].width);
  return params.shared_s ? (slabs0 + slabs1 + slabs - 1) / slabs
                         : (slabs0 + slabs - 1) / slabs + (slabs1 + slabs - 1) / slabs;
}

// Up to 64 rows of the state of one memory. A row of the state is a column of x.
struct Slab {
  int memory;
  int first_row;  // in the memory
  int rows;       // 0: past the end
};

// The i-th slab of a row tile.
__device__ inline Slab slab_at(const ScanParams& params, int slabs, int row_tile, int i) {
  const int slabs0 = count_slabs(params.problem.memory[0].width);
  int slab = row_tile * slabs + i, memory = 0;
  if (params.shared_s) {
    memory = slab >= slabs0;
    slab -= memory * slabs0;
  } else if (const int row_tiles0 = (slabs0 + slabs - 1) / slabs; row_tile >= row_tiles0) {
    memory = 1;
    slab -= row_tiles0 * slabs;
  }
  const int rows = params.problem.memory[memory].width - slab * kSlab;
  return {memory, slab * kSlab, rows < 0 ? 0 : rows > kSlab ? kSlab : rows};
}

// The inputs of a chunk and query head.
template <typename T, int Slabs, int Slots>
struct Stage {
  using XTile = SharedTile<T, kChunk, kSlab>;
  using WeightTile = SharedTile<T, kChunk, Slots>;
  using StateTile = SharedTile<T, kSlab, Slots>;
  using GateTile = SharedTile<float, kChunk, Slots>;
  static constexpr int kBytes = Slabs * XTile::kBytes + WeightTile::kBytes + GateTile::kBytes;

  char* data;

  __device__ XTile x(int slab) const { return {reinterpret_cast<T*>(data + slab * XTile::kBytes)}; }
  // A slab of the rounded state before its store to global memory, in place of x.
  __device__ StateTile state_tile(int slab) const {
    return {reinterpret_cast<T*>(data + slab * XTile::kBytes)};
  }
  __device__ WeightTile s() const { return {reinterpret_cast<T*>(data + Slabs * XTile::kBytes)}; }
  __device__ GateTile g() const {
    return {reinterpret_cast<float*>(data + Slabs * XTile::kBytes + WeightTile::kBytes)};
  }
};

// The shared memory before the stages. A phase of state_full[w][i] completes when warp i of the previous
// warpgroup has updated S with the chunk before the next chunk of warpgroup w.
template <int Slabs, int Slots>
struct SharedState {
  float state[Slabs * kSlab * Slots];      // in the order of ScanBlock::state()
  float gate_sums[kMaxWarpgroups][Slots];  // over the chunks of a warpgroup, for a local scan
  alignas(128) uint64_t state_full[kMaxWarpgroups][kWarpgroupWarps];
};
template <int Slabs, int Slots>
constexpr int kSharedStateBytes = (sizeof(SharedState<Slabs, Slots>) + 127) / 128 * 128;

// Selects one of two tensors member by member. p.memory[index] would be a load from constant memory whose
// address depends on the block index, and would delay the first copy.
__device__ inline InputTensor<4> select_tensor(bool is_first, const InputTensor<4>& first,
                                               const InputTensor<4>& second) {
  InputTensor<4> selected;
  selected.data = is_first ? first.data : second.data;
#pragma unroll
  for (int i = 0; i < 4; ++i) selected.stride[i] = is_first ? first.stride[i] : second.stride[i];
  return selected;
}

// The loads of a warpgroup. Stages follow each other in the order of the warpgroup's chunks, and within a
// chunk in the order of the `group` query heads of the memory head.
template <typename T, int Slabs, int Slots, bool Reverse>
class ScanLoads {
  using Stage = gsa::Stage<T, Slabs, Slots>;
  using XCopier = TileCopier<kWarpgroupThreads, typename Stage::XTile>;

  const ScanParams& params_;
  const ChunkRange<Reverse>& range_;
  const Slab (&slab_)[Slabs];
  const bool has_s_;
  // The copiers of g, s, and x of the first and the last slab.
  const TileCopier<kWarpgroupThreads, typename Stage::GateTile> g_;
  const TileCopier<kWarpgroupThreads, typename Stage::WeightTile> s_;
  const XCopier x_[2];
  int next_step_, query_index_ = 0;

  __device__ static InputTensor<4> select_x(const GatedScan& p, const Slab& slab) {
    return select_tensor(slab.memory == 0, p.memory[0].x, p.memory[1].x);
  }
  __device__ static InputTensor<4> select_s(const GatedScan& p, const Slab& slab) {
    return select_tensor(slab.memory == 0, p.memory[0].s, p.memory[1].s);
  }
  __device__ static XCopier make_copier(const GatedScan& p, const ChunkRange<Reverse>& range, int64_t head,
                                        const Slab& slab, int thread) {
    const InputTensor<4> in = select_x(p, slab);
    return XCopier(at<T>(in, range.sequence.batch, range.start, head, slab.first_row), in.stride[1],
                   slab.rows, thread);
  }

 public:
  __device__ ScanLoads(const ScanParams& params, const ChunkRange<Reverse>& range, const Slab (&slab)[Slabs],
                       int head, int first_col, int cols, int warpgroup, int thread)
      : params_(params),
        range_(range),
        slab_(slab),
        has_s_(select_s(params.problem, slab[0]).data != nullptr),
        g_(at<float>(params.problem.g, range.sequence.batch, range.start, head, first_col),
           params.problem.g.stride[1], cols, thread),
        s_(at<T>(select_s(params.problem, slab[0]), range.sequence.batch, range.start,
                 static_cast<int64_t>(head) * params.problem.group, first_col),
           select_s(params.problem, slab[0]).stride[1], cols, thread),
        x_{make_copier(params.problem, range, static_cast<int64_t>(head) * params.problem.group, slab[0],
                       thread),
           make_copier(params.problem, range, static_cast<int64_t>(head) * params.problem.group,
                       slab[Slabs - 1], thread)},
        next_step_(warpgroup) {}

  __device__ bool has_s() const { return has_s_; }
  __device__ void start(const Stage& stage) {
    const GatedScan& p = params_.problem;
    if (next_step_ < range_.chunks) {
      const int token = range_.first_token(next_step_), rows = range_.count_rows(token);
      int64_t s_offset = 0, x_offset[Slabs] = {};
      if (query_index_ > 0) {
        s_offset = query_index_ * p.memory[slab_[0].memory].s.stride[2];
#pragma unroll
        for (int i = 0; i < Slabs; ++i) x_offset[i] = query_index_ * p.memory[slab_[i].memory].x.stride[2];
      }
      g_.start(stage.g(), token, rows);
      if (has_s_) s_.start(stage.s(), token, rows, s_offset);
#pragma unroll
      for (int i = 0; i < Slabs; ++i) x_[i].start(stage.x(i), token, rows, x_offset[i]);
      if (++query_index_ == p.group) {
        query_index_ = 0;
        next_step_ += params_.warpgroups;
      }
    }
    commit_copies();
  }
};

}  // namespace girih::kernels::gsa
