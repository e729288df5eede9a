// Launches of the kernels of cat_attention: choice of the instance and of the kernel.
#include <algorithm>

#include "cat_attention/header_list.h"
#include "cat_attention/launch.h"
#include "cat_attention/sm90/launch.h"
#include "tile/instance.h"

namespace girih::kernels {
namespace {

// Calls launch(tile) with the smallest tile of columns that holds D and V.
template <class Launch>
cudaError_t dispatch_tile(int D, int V, const Launch& launch) {
  return dispatch_width<64, 128, kCatMaxWidth>(std::max(D, V), launch);
}

template <class Launch>
cudaError_t dispatch_instance(const CatShape& shape, const Launch& launch) {
  return dispatch_tile(shape.D, shape.V, [&](auto tile) {
    const auto with_tile = [&](auto element) { return launch(element, tile); };
    if constexpr (tile() <= kCatMaxWidthFp32) return dispatch_dtype(shape.dtype, with_tile);
    return dispatch_16bit(shape.dtype, with_tile);
  });
}

// Shared memory of the kernel that needs most of it: two stages of queries, or of keys and values, and a tile
// that stays. The records of queries are at most this much in every kernel.
template <typename T, int Tile>
constexpr int max_shared_bytes() {
  const int row = kCatRowBytes<T, Tile>, queries = 2 * 64 * row, stages = 4 * kCatQueries<T, Tile> * row;
  return queries + stages + 2 * 64 * static_cast<int>(sizeof(CatQueryRecord));
}

}  // namespace

cudaError_t cat_forward(const CatForward& problem, cudaStream_t stream) {
  return dispatch_instance(problem.shape, [&](auto element, auto tile) {
    using T = decltype(element);
    constexpr int kTile = decltype(tile)::value;
    if constexpr (kHasCatSm90<T, kTile>) {
      bool is_launched = false;
      const cudaError_t error = try_cat_forward_sm90<T, kTile>(problem, stream, is_launched);
      if (is_launched || error != cudaSuccess) return error;
    }
    return launch_cat_forward<T, kTile>(problem, stream);
  });
}

cudaError_t cat_query_gradients(const CatQueryGradients& problem, cudaStream_t stream) {
  return dispatch_instance(problem.shape, [&](auto element, auto tile) {
    using T = decltype(element);
    constexpr int kTile = decltype(tile)::value;
    if constexpr (kHasCatSm90<T, kTile>) {
      bool is_launched = false;
      const cudaError_t error = try_cat_query_gradients_sm90<T, kTile>(problem, stream, is_launched);
      if (is_launched || error != cudaSuccess) return error;
    }
    return launch_cat_query_gradients<T, kTile>(problem, stream);
  });
}

cudaError_t cat_header_gradients(const CatHeaderGradients& problem, cudaStream_t stream) {
  return dispatch_instance(problem.shape, [&](auto element, auto tile) {
    using T = decltype(element);
    constexpr int kTile = decltype(tile)::value;
    if constexpr (kHasCatSm90<T, kTile>) {
      bool has = false;
      if (const cudaError_t error = has_cat_header_gradients_sm90<T, kTile>(has); error != cudaSuccess)
        return error;
      if (has) return launch_cat_header_gradients_sm90<T, kTile>(problem, stream);
    }
    return launch_cat_header_gradients<T, kTile>(problem, stream);
  });
}

cudaError_t cat_own_gradients(const CatOwnGradients& problem, cudaStream_t stream) {
  CatOwnGradients own = problem;
  return dispatch_instance(problem.shape, [&](auto element, auto tile) {
    using T = decltype(element);
    constexpr int kTile = decltype(tile)::value;
    if constexpr (kHasCatSm90<T, kTile>) {
      if (const cudaError_t error = has_cat_header_gradients_sm90<T, kTile>(own.is_sm90);
          error != cudaSuccess)
        return error;
      if (own.is_sm90 && cat_has_fused_own_gradients(own.shape))
        return launch_cat_sum_headers<T, kTile>(own, stream);
    }
    return launch_cat_own_gradients<T, kTile>(own, stream);
  });
}

// The maximum over the kernels that may compute the partials.
int64_t cat_partials_size(const CatShape& shape) {
  int64_t float_count = 0;
  dispatch_tile(shape.D, shape.V, [&](auto tile) {
    constexpr int kTile = decltype(tile)::value;
    const bool is_float = shape.dtype == DType::f32;
    const CatHeaderListSizes tiles =
        is_float ? header_list_sizes<float, kTile>() : header_list_sizes<__half, kTile>();
    float_count = CatHeaderList(shape, kTile, tiles).float_count();
    if (!is_float && kTile <= kCatSm90MaxWidth) {
      const CatHeaderList of_groups(shape, kTile, sm90_header_list_sizes<kTile>());
      float_count = std::max(float_count, of_groups.float_count() + cat_shares_size<kTile>(shape));
    }
    return cudaSuccess;
  });
  return float_count;
}

cudaError_t cat_fits(int D, int V, DType dtype, bool& fits) {
  fits = false;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  return dispatch_tile(D, V, [&](auto tile) {
    constexpr int kTile = decltype(tile)::value;
    fits =
        limit >= (dtype == DType::f32 ? max_shared_bytes<float, kTile>() : max_shared_bytes<__half, kTile>());
    return cudaSuccess;
  });
}

}  // namespace girih::kernels
