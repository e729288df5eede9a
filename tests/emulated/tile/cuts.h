// The twin of kernels/tile/cuts.h.
#pragma once

#include <cstdint>

namespace girih::kernels {

inline int64_t kMultiprocessors = 132;  // a test sets this number

constexpr int64_t kMinSegmentChunks = 2;

// Two stages are soon full: a warp that does not wait for a stage, or releases one too early, is detected.
constexpr int ring_stages(int) { return 2; }

}  // namespace girih::kernels
