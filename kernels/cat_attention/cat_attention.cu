// The launches of a call: choice of the instance and of the kernels, and the tensors between them.
#include <algorithm>

#include "cat_attention/header_list.h"
#include "cat_attention/kernels.h"
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

// Whether the warpgroup kernels serve this type, tile and device.
template <typename T, int Tile>
cudaError_t uses_sm90(bool& uses) {
  uses = false;
  if constexpr (kHasCatSm90<T, Tile>) return has_cat_sm90<T, Tile>(uses);
  return cudaSuccess;
}

template <class Arguments>
Arguments fill_arguments(const CatBackward& call) {
  Arguments p{};
  p.shape = call.shape;
  p.q = call.q, p.k = call.k, p.v = call.v, p.dout = call.dout;
  return p;
}

template <typename T, int Tile>
cudaError_t launch_query_gradients(const CatQueryGradients& p, bool is_sm90, cudaStream_t stream) {
  if constexpr (kHasCatSm90<T, Tile>) {
    if (is_sm90 && cat_fills_sm90_tiles(p.shape)) return launch_cat_query_gradients_sm90<T, Tile>(p, stream);
  }
  return launch_cat_query_gradients<T, Tile>(p, stream);
}
template <typename T, int Tile>
cudaError_t launch_header_gradients(const CatHeaderGradients& p, bool is_sm90, cudaStream_t stream) {
  if constexpr (kHasCatSm90<T, Tile>) {
    if (is_sm90) return launch_cat_header_gradients_sm90<T, Tile>(p, stream);
  }
  return launch_cat_header_gradients<T, Tile>(p, stream);
}
template <typename T, int Tile>
cudaError_t launch_own_gradients(const CatOwnGradients& p, cudaStream_t stream) {
  if constexpr (kHasCatSm90<T, Tile>) {
    if (p.is_sm90 && cat_has_fused_own_gradients(p.shape)) return launch_cat_sum_headers<T, Tile>(p, stream);
  }
  return launch_cat_own_gradients<T, Tile>(p, stream);
}

// Number of floats in `partials`, which the three kernels of backward share.
template <typename T, int Tile>
int64_t count_partials(const CatShape& shape, bool is_sm90) {
  if (!is_sm90) return CatHeaderList(shape, Tile, header_list_sizes<T, Tile>()).float_count();
  return CatHeaderList(shape, Tile, sm90_header_list_sizes<Tile>()).float_count() +
         cat_shares_size<Tile>(shape);
}

template <typename T, int Tile>
cudaError_t launch_backward(const CatBackward& call, Workspace& workspace, cudaStream_t stream) {
  const CatShape& shape = call.shape;
  bool is_sm90 = false;
  GIRIH_TRY(uses_sm90<T, Tile>(is_sm90));
  auto* const records =
      workspace.array<CatQueryRecord>(shape.chunks.batch * shape.query_heads * int64_t{shape.rows});
  auto* const partials = workspace.array<float>(count_partials<T, Tile>(shape, is_sm90));

  auto queries = fill_arguments<CatQueryGradients>(call);
  queries.o = call.o, queries.lse = call.lse, queries.queries = records, queries.partials = partials;
  queries.dq = call.dq, queries.dk = call.dk, queries.dv = call.dv;
  GIRIH_TRY(launch_query_gradients<T, Tile>(queries, is_sm90, stream));

  auto headers = fill_arguments<CatHeaderGradients>(call);
  headers.queries = records, headers.partials = partials;
  GIRIH_TRY(launch_header_gradients<T, Tile>(headers, is_sm90, stream));

  auto own = fill_arguments<CatOwnGradients>(call);
  own.queries = records, own.partials = partials, own.is_sm90 = is_sm90;
  own.dk = call.dk, own.dv = call.dv;
  return launch_own_gradients<T, Tile>(own, stream);
}

}  // namespace

cudaError_t cat_forward(const CatForward& call, cudaStream_t stream) {
  return dispatch_instance(call.shape, [&](auto element, auto tile) {
    using T = decltype(element);
    constexpr int kTile = decltype(tile)::value;
    bool is_sm90 = false;
    GIRIH_TRY(uses_sm90<T, kTile>(is_sm90));
    if constexpr (kHasCatSm90<T, kTile>) {
      if (is_sm90 && cat_fills_sm90_tiles(call.shape)) return launch_cat_forward_sm90<T, kTile>(call, stream);
    }
    return launch_cat_forward<T, kTile>(call, stream);
  });
}

cudaError_t cat_backward(const CatBackward& call, Workspace& workspace, cudaStream_t stream) {
  return dispatch_instance(call.shape, [&](auto element, auto tile) {
    return launch_backward<decltype(element), decltype(tile)::value>(call, workspace, stream);
  });
}

cudaError_t cat_fits(int D, int V, DType dtype, bool& fits) {
  fits = false;
  int limit = 0;
  GIRIH_TRY(shared_limit(limit));
  return dispatch_tile(D, V, [&](auto tile) {
    constexpr int kTile = decltype(tile)::value;
    fits =
        limit >= (dtype == DType::f32 ? max_shared_bytes<float, kTile>() : max_shared_bytes<__half, kTile>());
    return cudaSuccess;
  });
}

}  // namespace girih::kernels
