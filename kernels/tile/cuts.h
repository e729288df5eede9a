// Constants of performance. The tests on a CPU replace some of them, so that short sequences reach every
// path: the twin of this file is tests/emulated/tile/cuts.h.
#pragma once

#include <cstdint>

namespace girih::kernels {

// Multiprocessors of an H100 or H200. The number of partial sums uses this constant on every device, so that
// results do not depend on the device.
constexpr int kH100Multiprocessors = 132;
// The same for the choice of kernels and segments, which depends on the sizes of a call only.
constexpr int64_t kMultiprocessors = kH100Multiprocessors;

// The least number of chunks in a segment of a scan.
constexpr int64_t kMinSegmentChunks = 16;

// The number of stages of a ring that has `stages` on a GPU.
constexpr int ring_stages(int stages) { return stages; }

}  // namespace girih::kernels
