// Rings of stages in shared memory. Producer warps fill a stage, consumer warps read it and release it. Two
// mbarriers belong to a stage: `full` completes a phase when all producers have arrived, `empty` when all
// consumers have.
//
//   producer   empty.wait(pipe);  write the stage;  full.arrive(pipe.stage);   pipe.next(stages);
//   consumer   full.wait(pipe);   read the stage;   empty.arrive(pipe.stage);  pipe.next(stages);
//
// A wait sees only the parity of a phase. A warp therefore waits for a stage in every pass, and arrives
// before the stage is refilled. Warps that process stages in turn (`skip`) wait in order for stages that the
// producers fill in order, and are at most one pass behind the producers.
#pragma once

#include "tile/cluster.h"
#include "tile/shared.h"

namespace girih::kernels {

// The position in a ring: the index of the stage, and the parity of the passes through the ring.
struct PipelineState {
  int stage = 0;
  unsigned phase = 0;

  __device__ void next(int stages) {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
  __device__ void skip(int count, int stages) {  // count <= stages
    stage += count;
    if (stage >= stages) stage -= stages, phase ^= 1;
  }
  __device__ PipelineState previous(int stages) const {
    return stage == 0 ? PipelineState{stages - 1, phase ^ 1} : PipelineState{stage - 1, phase};
  }
};

// One mbarrier for each of at most `Stages` stages.
template <int Stages>
class RingBarriers {
 public:
  // `arrivals` arrivals complete a phase. Threads 0 .. stages - 1 of the block initialise one mbarrier each;
  // a barrier of the block follows before the first use.
  __device__ void init(int arrivals, int stages = Stages) {
    if (threadIdx.x < static_cast<unsigned>(stages)) init_barrier(&barriers_[threadIdx.x], arrivals);
  }

  // One arrival of the thread, of the warp (arrival_count), of the thread after its cp.async copies, or of
  // the warp at the same mbarrier of block `rank` of the cluster.
  __device__ void arrive(int stage) { girih::kernels::arrive(&barriers_[stage]); }
  __device__ void arrive_warp(int stage) { girih::kernels::arrive_warp(&barriers_[stage]); }
  __device__ void arrive_after_copies(int stage) { girih::kernels::arrive_after_copies(&barriers_[stage]); }
  __device__ void arrive_remote(int stage, int rank) {
    girih::kernels::arrive_remote(&barriers_[stage], rank);
  }
  // The mbarrier of a stage, for copies that complete it (tma.h, copy_to_remote).
  __device__ uint64_t* at(int stage) { return &barriers_[stage]; }

 protected:
  uint64_t barriers_[Stages];
};

template <int Stages>
class FullBarriers : public RingBarriers<Stages> {
 public:
  // Waits until the producers have filled the stage in this pass through the ring.
  __device__ void wait(const PipelineState& pipe) {
    girih::kernels::wait(&this->barriers_[pipe.stage], pipe.phase);
  }
  // The same for the previous pass; returns at once in the first pass.
  __device__ void wait_for_previous(const PipelineState& pipe) {
    girih::kernels::wait(&this->barriers_[pipe.stage], pipe.phase ^ 1);
  }
};

template <int Stages>
class EmptyBarriers : public RingBarriers<Stages> {
 public:
  // Waits until the consumers have released the stage in the previous pass; returns at once in the first
  // pass.
  __device__ void wait(const PipelineState& pipe) {
    girih::kernels::wait(&this->barriers_[pipe.stage], pipe.phase ^ 1);
  }
  // Waits until the consumers have released the stage in this pass.
  __device__ void wait_for_release(const PipelineState& pipe) {
    girih::kernels::wait(&this->barriers_[pipe.stage], pipe.phase);
  }
};

}  // namespace girih::kernels
