// Applies the map f to every row y, one warp a row (fp32_kernels.h).
#include "trellis/fp32_maps.cuh"

namespace girih::kernels {
namespace trellis {
namespace {

constexpr int kRowWarps = 8;

template <class Sizes>
__global__ void __launch_bounds__(32 * kRowWarps)
    trellis_fp32_read_map_kernel(const __grid_constant__ TrellisFp32ReadMap p) {
  const Fp32Row<Sizes> row{p.M};
  const int64_t pitch = trellis_fp32_padded_width(p.M);
  dispatch_map<true>(p.f, p.M, [&](const auto& f) {
#pragma unroll 1
    for (int64_t i = blockIdx.x * int64_t{kRowWarps} + warp_index(); i < p.rows;
         i += gridDim.x * int64_t{kRowWarps}) {
      float* const y = p.y + i * pitch;
      float* const dr = p.dr == nullptr ? nullptr : p.dr + i * pitch;
      float y_dot_dy = 0.f, r_dot_dr = 0.f;
      row.map_with_gradient(f, y, dr, [&](int first, const SlotPair& r, const SlotPair& dy) {
        if (dr != nullptr) {
          const SlotPair before = row.load(y, first), given = row.load(dr, first);
          row.for_pair(first, [&](int m, int i) {
            y_dot_dy += m < p.M ? before.at[0][i] * dy.at[0][i] : 0.f;
            r_dot_dr += m < p.M ? r.at[0][i] * given.at[0][i] : 0.f;
          });
          row.store(dr, first, dy);
        }
        row.store(y, first, r);
      });
      if (dr == nullptr) continue;
      y_dot_dy = sum_over_warp(y_dot_dy), r_dot_dr = sum_over_warp(r_dot_dr);
      if (lane() > 0) continue;
      p.read_dots[0][i] = y_dot_dy;
      if (p.read_dots[1] != nullptr) p.read_dots[1][i] = r_dot_dr;
    }
  });
}

}  // namespace
}  // namespace trellis

cudaError_t trellis_fp32_read_map(const TrellisFp32ReadMap& p, cudaStream_t stream) {
  using namespace trellis;
  if (p.rows == 0) return cudaSuccess;
  TrellisFp32Shape shape{};
  shape.M = p.M;
  return dispatch_fp32_size(shape, [&](auto sizes) {
    const unsigned blocks = clamp_grid_blocks(divide_up(p.rows, kRowWarps));
    return launch_grid<trellis_fp32_read_map_kernel<decltype(sizes)>>(blocks, 32 * kRowWarps, 0, stream, p);
  });
}

}  // namespace girih::kernels
