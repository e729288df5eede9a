// Applies the map f to every row y, one warp a row (exact.h).
#include "trellis/exact_maps.cuh"

namespace girih::kernels {
namespace trellis {
namespace {

constexpr int kRowWarps = 8;

template <class Sizes>
__global__ void __launch_bounds__(32 * kRowWarps)
    trellis_exact_rows_kernel(const __grid_constant__ TrellisExactRows p) {
  const ExactRow<Sizes> row{p.M};
  const int64_t pitch = trellis_exact_packed(p.M);
  with_map<true>(p.f, p.M, [&](const auto& f) {
#pragma unroll 1
    for (int64_t i = blockIdx.x * int64_t{kRowWarps} + warp_index(); i < p.rows;
         i += gridDim.x * int64_t{kRowWarps}) {
      float* const y = p.y + i * pitch;
      float* const dr = p.dr == nullptr ? nullptr : p.dr + i * pitch;
      float of_keys = 0.f, of_values = 0.f;
      row.image(f, y, dr, [&](int first, const Two& r, const Two& dy) {
        if (dr != nullptr) {
          const Two before = row.load(y, first), given = row.load(dr, first);
          row.two(first, [&](int m, int i) {
            of_keys += m < p.M ? before.at[0][i] * dy.at[0][i] : 0.f;
            of_values += m < p.M ? r.at[0][i] * given.at[0][i] : 0.f;
          });
          row.store(dr, first, dy);
        }
        row.store(y, first, r);
      });
      if (dr == nullptr) continue;
      of_keys = over_warp(of_keys), of_values = over_warp(of_values);
      if (lane() > 0) continue;
      p.reads[0][i] = of_keys;
      if (p.reads[1] != nullptr) p.reads[1][i] = of_values;
    }
  });
}

}  // namespace
}  // namespace trellis

cudaError_t trellis_exact_rows(const TrellisExactRows& p, cudaStream_t stream) {
  using namespace trellis;
  if (p.rows == 0) return cudaSuccess;
  TrellisExactShape shape{};
  shape.M = p.M;
  return by_exact_size(shape, [&](auto sizes) {
    const unsigned blocks = blocks_for(divide_up(p.rows, kRowWarps));
    return launch_grid<trellis_exact_rows_kernel<decltype(sizes)>>(blocks, 32 * kRowWarps, 0, stream, p);
  });
}

}  // namespace girih::kernels
