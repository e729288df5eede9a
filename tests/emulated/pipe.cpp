// Kernels that use the rings of kernels/pipe and nothing else, for test_emulated_pipe.py.
#include "call.h"
#include "pipe/clusters.h"
#include "pipe/ring.h"
#include "pipe/row_source.h"
#include "tile/launch.h"

using namespace girih::kernels;

namespace {

constexpr int kMaxStages = 4, kRows = 16, kCols = 64;
using T = __nv_bfloat16;
using Tile = SharedTile<T, kRows, kCols>;

struct RingCall {
  InputTensor<4> x;  // [1, rows, 1, kCols]
  T* sums;           // [rows, kCols]: twice x
  float* totals;     // [2]: for each consumer warp, the sum of its tiles
  int rows, stages;
  int omit;  // the wait that the kernel omits: 0 none, 1 empty, 2 full, 3 doubled_full, 4 output_full
};

struct RingStorage {
  unsigned char* base;

  struct Barriers {
    FullBarriers<kMaxStages> full, doubled_full;  // copied; multiplied by two
    FullBarriers<kMaxStages> output_full;         // added up, so the tile may be stored
    EmptyBarriers<kMaxStages> empty;
  };
  static constexpr int kBytes = kMaxStages * Tile::kBytes + static_cast<int>(sizeof(Barriers));

  __device__ Tile tile(int stage) const { return {reinterpret_cast<T*>(base + stage * Tile::kBytes)}; }
  __device__ Barriers& barriers() const {
    return *reinterpret_cast<Barriers*>(base + kMaxStages * Tile::kBytes);
  }
};

// Five roles of one warp or two: load, double, add up (two warps, tiles in turn), store.
__global__ void ring_kernel(const __grid_constant__ RingCall p) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  const RingStorage storage{shared};
  auto& barriers = storage.barriers();
  barriers.full.init(32, p.stages);
  barriers.doubled_full.init(arrival_count(1), p.stages);
  barriers.output_full.init(arrival_count(2), p.stages);
  barriers.empty.init(arrival_count(1), p.stages);
  __syncthreads();
  const int tiles = (p.rows + kRows - 1) / kRows, warp = warp_index();
  const auto row = [](int i) { return i / kCols; };
  PipelineState pipe;
  float total = 0.f;
  for (int n = 0; n < tiles; ++n, pipe.next(p.stages)) {
    const Tile tile = storage.tile(pipe.stage);
    const int rows = min(kRows, p.rows - n * kRows);
    if (warp == 0) {
      if (p.omit != 1) barriers.empty.wait(pipe);
      row_source<T>(p.x, 0, 0, kCols, 0).load(tile, n * kRows, rows);
      barriers.full.arrive_after_copies(pipe.stage);
    } else if (warp == 1) {
      if (p.omit != 2) barriers.full.wait(pipe);
      for (int i = lane(); i < kRows * kCols; i += 32) {
        T& x = tile.at(row(i), i % kCols);
        x = __float2bfloat16(2.f * __bfloat162float(x));
      }
      barriers.doubled_full.arrive_warp(pipe.stage);
    } else if (warp == 4) {
      if (p.omit != 4) barriers.output_full.wait(pipe);
      for (int i = lane(); i < rows * kCols; i += 32)
        p.sums[n * kRows * kCols + i] = tile.at(row(i), i % kCols);
      barriers.empty.arrive_warp(pipe.stage);
    } else {
      // Both warps wait for every tile and release it; each adds up every second tile.
      if (p.omit != 3) barriers.doubled_full.wait(pipe);
      // The rows of the tail are zero.
      for (int i = lane(); i < kRows * kCols && warp == 2 + n % 2; i += 32)
        total += __bfloat162float(tile.at(row(i), i % kCols));
      barriers.output_full.arrive_warp(pipe.stage);
    }
  }
  if (warp == 2 || warp == 3) {
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffff, total, step);
    if (lane() == 0) p.totals[warp - 2] = total;
  }
}

struct ClusterCall {
  float* sums;  // [tiles, 32]
  int tiles, stages;
  int omit;  // the wait that the kernel omits: 0 none, 1 empty, 2 full
};
struct ClusterStorage {
  float tiles[kMaxStages][32];
  FullBarriers<kMaxStages> full;
  EmptyBarriers<kMaxStages> empty;
};

// Block 0 writes tile n and copies it to block 1, which stores it and releases the stage of block 0.
__global__ void cluster_kernel(const __grid_constant__ ClusterCall p) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  auto& storage = *reinterpret_cast<ClusterStorage*>(shared);
  storage.full.init(1, p.stages);
  storage.empty.init(1, p.stages);
  fence_barrier_init();
  cluster_sync();
  PipelineState pipe;
  for (int n = 0; n < p.tiles; ++n, pipe.next(p.stages)) {
    float* const tile = storage.tiles[pipe.stage];
    if (cluster_rank() == 0) {
      if (p.omit != 1) storage.empty.wait(pipe);
      tile[lane()] = 32.f * n + lane();
      __syncwarp();
      if (lane() == 0) copy_to_remote(tile, 32 * sizeof(float), storage.full.at(pipe.stage), 1);
      __syncwarp();
    } else {
      if (p.omit != 2) storage.full.wait(pipe);
      p.sums[32 * n + lane()] = tile[lane()];
      storage.empty.arrive_remote(pipe.stage, 0);
    }
  }
  cluster_sync();
}

}  // namespace

extern "C" {

// The number of wrong results.
int64_t run_ring(int64_t rows, int64_t stages, int64_t omit) {
  const int64_t tiles = (rows + kRows - 1) / kRows;
  std::vector<T> x(rows * kCols), doubled(x.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = __float2bfloat16(static_cast<float>(1 + i % 127));
  float totals[2] = {}, expected[2] = {};
  RingCall p{};
  p.x = {x.data(), DType::bf16, {rows * kCols, kCols, kCols, 1}};
  p.sums = doubled.data(), p.totals = totals;
  p.rows = static_cast<int>(rows), p.stages = static_cast<int>(stages), p.omit = static_cast<int>(omit);
  check_launch(launch_kernel<ring_kernel>(p, 1, 5 * 32, RingStorage::kBytes, nullptr));
  int64_t wrong = 0;
  for (int64_t n = 0; n < tiles; ++n) {
    for (int64_t i = n * kRows * kCols; i < std::min<int64_t>((n + 1) * kRows * kCols, x.size()); ++i) {
      const float y = 2.f * __bfloat162float(x[i]);
      expected[n % 2] += y;
      wrong += __bfloat162float(doubled[i]) != y;
    }
  }
  return wrong + (totals[0] != expected[0]) + (totals[1] != expected[1]);
}

int64_t run_cluster(int64_t tiles, int64_t stages, int64_t omit) {
  std::vector<float> sums(32 * tiles);
  const ClusterCall p{sums.data(), static_cast<int>(tiles), static_cast<int>(stages), static_cast<int>(omit)};
  check_launch(launch_clusters<cluster_kernel>(p, 2, 2, 32, sizeof(ClusterStorage), nullptr));
  int64_t wrong = 0;
  for (int64_t i = 0; i < 32 * tiles; ++i) wrong += sums[i] != static_cast<float>(i);
  return wrong;
}

}  // extern "C"
