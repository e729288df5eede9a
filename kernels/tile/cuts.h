// Constants of performance that the tests on a CPU replace, so that short sequences reach every path: the
// twin of this file is tests/emulated/tile/cuts.h.
#pragma once

#include <cstdint>

namespace girih::kernels {

// Multiprocessors of an H100 or H200. A constant, so that the choice of kernels and segments depends on the
// sizes of a call only, not on the device.
constexpr int64_t kMultiprocessors = 132;

// The least number of chunks in a segment of a scan.
constexpr int64_t kMinSegmentChunks = 16;

// The number of stages of a ring that has `stages` on a GPU.
constexpr int ring_stages(int stages) { return stages; }

}  // namespace girih::kernels
