// The twin of kernels/tile/cuts.h.
#pragma once

#include <cstdint>

namespace girih::kernels {

constexpr int kH100Multiprocessors = 132;
inline int64_t kMultiprocessors = kH100Multiprocessors;  // a test sets this number

constexpr int64_t kMinSegmentChunks = 2;

// Two stages are soon full: a warp that does not wait for a stage, or releases one too early, is detected.
constexpr int ring_stages(int) { return 2; }

}  // namespace girih::kernels
