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
cudaError_t by_tile(int D, int V, const Launch& launch) {
  return by_width<64, 128, kCatWidest>(std::max(D, V), launch);
}

template <class Launch>
cudaError_t by_instance(const CatShape& shape, const Launch& launch) {
  return by_tile(shape.D, shape.V, [&](auto tile) {
    const auto with_tile = [&](auto element) { return launch(element, tile); };
    if constexpr (tile() <= kCatWidestFloat) return by_element(shape.dtype, with_tile);
    return by_short_element(shape.dtype, with_tile);
  });
}

// Shared memory of the kernel that needs most of it: two stages of queries, or of keys and values, and a tile
// that stays. The records of queries are at most this much in every kernel.
template <typename T, int Tile>
constexpr int largest() {
  const int row = kCatRowBytes<T, Tile>, queries = 2 * 64 * row, stages = 4 * kCatQueries<T, Tile> * row;
  return queries + stages + 2 * 64 * static_cast<int>(sizeof(CatQuery));
}

}  // namespace

cudaError_t cat_forward(const CatForward& problem, cudaStream_t stream) {
  return by_instance(problem.shape, [&](auto element, auto tile) {
    using T = decltype(element);
    constexpr int kTile = decltype(tile)::value;
    if constexpr (kCatHasGroups<T, kTile>) {
      bool taken = false;
      const cudaError_t error = try_cat_group_forward<T, kTile>(problem, stream, taken);
      if (taken || error != cudaSuccess) return error;
    }
    return launch_cat_forward<T, kTile>(problem, stream);
  });
}

cudaError_t cat_query_gradients(const CatQueryGradients& problem, cudaStream_t stream) {
  return by_instance(problem.shape, [&](auto element, auto tile) {
    using T = decltype(element);
    constexpr int kTile = decltype(tile)::value;
    if constexpr (kCatHasGroups<T, kTile>) {
      bool taken = false;
      const cudaError_t error = try_cat_group_query_gradients<T, kTile>(problem, stream, taken);
      if (taken || error != cudaSuccess) return error;
    }
    return launch_cat_query_gradients<T, kTile>(problem, stream);
  });
}

cudaError_t cat_header_gradients(const CatHeaderGradients& problem, cudaStream_t stream) {
  return by_instance(problem.shape, [&](auto element, auto tile) {
    using T = decltype(element);
    constexpr int kTile = decltype(tile)::value;
    if constexpr (kCatHasGroups<T, kTile>) {
      bool has = false;
      if (const cudaError_t error = has_cat_group_headers<T, kTile>(has); error != cudaSuccess) return error;
      if (has) return launch_cat_group_header_gradients<T, kTile>(problem, stream);
    }
    return launch_cat_header_gradients<T, kTile>(problem, stream);
  });
}

cudaError_t cat_own_gradients(const CatOwnGradients& problem, cudaStream_t stream) {
  CatOwnGradients own = problem;
  return by_instance(problem.shape, [&](auto element, auto tile) {
    using T = decltype(element);
    constexpr int kTile = decltype(tile)::value;
    if constexpr (kCatHasGroups<T, kTile>) {
      if (const cudaError_t error = has_cat_group_headers<T, kTile>(own.groups); error != cudaSuccess)
        return error;
      if (own.groups && cat_joins(own.shape)) return launch_cat_join<T, kTile>(own, stream);
    }
    return launch_cat_own_gradients<T, kTile>(own, stream);
  });
}

// The maximum over the kernels that may compute the partials.
int64_t cat_partials(const CatShape& shape) {
  int64_t numbers = 0;
  by_tile(shape.D, shape.V, [&](auto tile) {
    constexpr int kTile = decltype(tile)::value;
    const bool is_float = shape.dtype == DType::f32;
    const CatHeaderTiles tiles = is_float ? header_tiles<float, kTile>() : header_tiles<__half, kTile>();
    numbers = CatHeaderList(shape, kTile, tiles).numbers();
    if (!is_float && kTile <= kCatGroupWidest) {
      const CatHeaderList of_groups(shape, kTile, group_header_tiles<kTile>());
      numbers = std::max(numbers, of_groups.numbers() + cat_shares<kTile>(shape));
    }
    return cudaSuccess;
  });
  return numbers;
}

cudaError_t cat_fits(int D, int V, DType dtype, bool& fits) {
  fits = false;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  return by_tile(D, V, [&](auto tile) {
    constexpr int kTile = decltype(tile)::value;
    fits = limit >= (dtype == DType::f32 ? largest<float, kTile>() : largest<__half, kTile>());
    return cudaSuccess;
  });
}

}  // namespace girih::kernels
