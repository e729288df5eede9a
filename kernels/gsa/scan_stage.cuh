// The rows of a block of the scan, its shared memory (the state and rings of stages), and its loads.
#pragma once

#include "gsa/walk.cuh"
#include "tile/matrix.h"
#include "tile/pack.h"
#include "tile/shared.h"

namespace girih::kernels::gsa {

constexpr int kWarpgroup = 128;  // threads of a warpgroup
constexpr int kMaxWarpgroups = 3;

// The arguments of one launch.
struct ScanPass {
  GatedScan scan;
  Segments cut;
  bool shared_s;  // both memories have the same s, so a block may have rows of both
  int warpgroups, stages;
};

__host__ __device__ inline int slabs_of(int width) { return (width + kSlab - 1) / kSlab; }

// Number of groups of `slabs` slabs that cover the rows of the state; a block has one group.
__host__ __device__ inline int slab_groups(const ScanPass& pass, int slabs) {
  const int first = slabs_of(pass.scan.memory[0].width), second = slabs_of(pass.scan.memory[1].width);
  return pass.shared_s ? (first + second + slabs - 1) / slabs
                       : (first + slabs - 1) / slabs + (second + slabs - 1) / slabs;
}

struct Slab {
  int memory;
  int col;   // first column of x of this memory
  int cols;  // 0: past the end
};

// The i-th slab of a group.
__device__ inline Slab slab_at(const ScanPass& pass, int slabs, int group, int i) {
  const int first = slabs_of(pass.scan.memory[0].width);
  int slab = group * slabs + i, memory = 0;
  if (pass.shared_s) {
    memory = slab >= first;
    slab -= memory * first;
  } else if (const int groups = (first + slabs - 1) / slabs; group >= groups) {
    memory = 1;
    slab -= groups * slabs;
  }
  const int cols = pass.scan.memory[memory].width - slab * kSlab;
  return {memory, slab * kSlab, cols < 0 ? 0 : cols > kSlab ? kSlab : cols};
}

// The inputs of a chunk.
template <typename T, int Slabs, int Slots>
struct Stage {
  using X = SharedTile<T, kChunk, kSlab>;
  using S = SharedTile<T, kChunk, Slots>;
  using G = SharedTile<float, kChunk, Slots>;
  static constexpr int kBytes = Slabs * X::kBytes + S::kBytes + G::kBytes;

  char* data;

  __device__ X x(int slab) const { return {reinterpret_cast<T*>(data + slab * X::kBytes)}; }
  // Rows of the state on the way to global memory, in place of x.
  __device__ S states(int slab) const { return {reinterpret_cast<T*>(data + slab * X::kBytes)}; }
  __device__ S s() const { return {reinterpret_cast<T*>(data + Slabs * X::kBytes)}; }
  __device__ G g() const { return {reinterpret_cast<float*>(data + Slabs * X::kBytes + S::kBytes)}; }
};

constexpr int kWarps = kWarpgroup / 32;

// The shared memory before the stages: the state, the sums of gates of every warpgroup, and a barrier for
// each warp.
template <int Slabs, int Slots>
struct Carried {
  float state[Slabs * kSlab * Slots];
  float gates[kMaxWarpgroups][Slots];
  alignas(128) uint64_t turns[kMaxWarpgroups][kWarps];
};
template <int Slabs, int Slots>
constexpr int kCarriedBytes = (sizeof(Carried<Slabs, Slots>) + 127) / 128 * 128;

// Selects one of two arrays member by member: an index into the kernel's parameters would be a load, and
// would delay the first copy.
__device__ inline In<4> either(bool first, const In<4>& one, const In<4>& other) {
  In<4> in;
  in.data = first ? one.data : other.data;
#pragma unroll
  for (int i = 0; i < 4; ++i) in.stride[i] = first ? one.stride[i] : other.stride[i];
  return in;
}

// The loads of a warpgroup, one stage after the other: for every chunk of the warpgroup, the inputs of each
// of the p.group query heads.
template <typename T, int Slabs, int Slots, bool Reverse>
class ScanLoads {
  using Stage = gsa::Stage<T, Slabs, Slots>;
  using X = TileCopier<kWarpgroup, typename Stage::X>;

  const ScanPass& pass_;
  const Walk<Reverse>& walk_;
  const Slab (&slab_)[Slabs];
  const bool has_s_;
  const TileCopier<kWarpgroup, typename Stage::G> g_;
  const TileCopier<kWarpgroup, typename Stage::S> s_;
  const X x_[2];
  int next_, member_ = 0;

  __device__ static In<4> x_of(const GatedScan& p, const Slab& of) {
    return either(of.memory == 0, p.memory[0].x, p.memory[1].x);
  }
  __device__ static In<4> s_of(const GatedScan& p, const Slab& of) {
    return either(of.memory == 0, p.memory[0].s, p.memory[1].s);
  }
  __device__ static X copier(const GatedScan& p, const Walk<Reverse>& walk, int64_t head, const Slab& of,
                             int thread) {
    const In<4> in = x_of(p, of);
    return X(at<T>(in, walk.sequence.batch, walk.start, head, of.col), in.stride[1], of.cols, thread);
  }

 public:
  __device__ ScanLoads(const ScanPass& pass, const Walk<Reverse>& walk, const Slab (&slab)[Slabs], int head,
                       int col, int cols, int warpgroup, int thread)
      : pass_(pass),
        walk_(walk),
        slab_(slab),
        has_s_(s_of(pass.scan, slab[0]).data != nullptr),
        g_(at<float>(pass.scan.g, walk.sequence.batch, walk.start, head, col), pass.scan.g.stride[1], cols,
           thread),
        s_(at<T>(s_of(pass.scan, slab[0]), walk.sequence.batch, walk.start,
                 static_cast<int64_t>(head) * pass.scan.group, col),
           s_of(pass.scan, slab[0]).stride[1], cols, thread),
        x_{copier(pass.scan, walk, static_cast<int64_t>(head) * pass.scan.group, slab[0], thread),
           copier(pass.scan, walk, static_cast<int64_t>(head) * pass.scan.group, slab[Slabs - 1], thread)},
        next_(warpgroup) {}

  __device__ bool has_s() const { return has_s_; }
  __device__ void start(const Stage& stage) {
    const GatedScan& p = pass_.scan;
    if (next_ < walk_.chunks) {
      const int token = walk_.token_of(next_), rows = walk_.rows_from(token);
      int64_t member_of_s = 0, member_of_x[Slabs] = {};
      if (member_ > 0) {
        member_of_s = member_ * p.memory[slab_[0].memory].s.stride[2];
#pragma unroll
        for (int i = 0; i < Slabs; ++i) member_of_x[i] = member_ * p.memory[slab_[i].memory].x.stride[2];
      }
      g_.start(stage.g(), token, rows);
      if (has_s_) s_.start(stage.s(), token, rows, member_of_s);
#pragma unroll
      for (int i = 0; i < Slabs; ++i) x_[i].start(stage.x(i), token, rows, member_of_x[i]);
      if (++member_ == p.group) {
        member_ = 0;
        next_ += pass_.warpgroups;
      }
    }
    commit_copies();
  }
};

}  // namespace girih::kernels::gsa
