// Which instance a call takes.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cat_attention/header_list.h"
#include "cat_attention/launch.h"

namespace girih::kernels {
namespace {

// f(columns of a tile): the fewest that hold them.
template <class F>
auto with_tile(int widest, const F& f) {
  if (widest <= 64) return f(std::integral_constant<int, 64>());
  if (widest <= 128) return f(std::integral_constant<int, 128>());
  return f(std::integral_constant<int, 256>());
}

template <class Launch>
cudaError_t by_instance(const CatShape& shape, const Launch& launch) {
  const int widest = std::max(shape.D, shape.V);
  if (widest > kCatWidest) return cudaErrorInvalidValue;
  return with_tile(widest, [&](auto tile) {
    if (shape.dtype == DType::bf16) return launch(__nv_bfloat16(), tile);
    if (shape.dtype == DType::f16) return launch(__half(), tile);
    return cudaErrorInvalidValue;
  });
}

// Of the largest kernel: two stages of queries, or of keys and values, and a tile that stays.
template <int Tile>
constexpr int largest() {
  const int queries = 2 * 64 * Tile * 2, stages = 4 * kCatQueries<Tile> * Tile * 2;
  return queries + stages + 2 * kCatQueries<Tile> * static_cast<int>(sizeof(CatQuery));
}

}  // namespace

#define GIRIH_CAT(Problem, name)                                                       \
  cudaError_t name(const Problem& problem, cudaStream_t stream) {                      \
    return by_instance(problem.shape, [&](auto element, auto tile) {                   \
      return launch_##name<decltype(element), decltype(tile)::value>(problem, stream); \
    });                                                                                \
  }
GIRIH_CAT(CatForward, cat_forward)
GIRIH_CAT(CatQueryGradients, cat_query_gradients)
GIRIH_CAT(CatHeaderGradients, cat_header_gradients)
GIRIH_CAT(CatOwnGradients, cat_own_gradients)
#undef GIRIH_CAT

int64_t cat_partials(const CatShape& shape) {
  return with_tile(std::max(shape.D, shape.V), [&](auto tile) -> int64_t {
    return header_list<decltype(tile)::value>(shape).places() * kCatPlace<decltype(tile)::value>;
  });
}

cudaError_t cat_fits(int D, int V, bool& fits) {
  int limit = 0;
  const cudaError_t error = shared_limit(limit);
  fits = limit >= with_tile(std::max(D, V), [](auto tile) { return largest<decltype(tile)::value>(); });
  return error;
}

}  // namespace girih::kernels
