// The number of stages of a ring that fit in shared memory.
#pragma once

namespace girih::kernels {

// The largest number of stages, at most `max_stages`, for which bytes(stages) is at most `limit`; 0 if none
// fits. `bytes` increases with the number of stages.
template <class Bytes>
constexpr int fit_stages(int limit, int max_stages, const Bytes& bytes) {
  int stages = max_stages;
  while (stages > 0 && bytes(stages) > limit) --stages;
  return stages;
}

}  // namespace girih::kernels
