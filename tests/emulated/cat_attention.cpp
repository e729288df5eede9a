// The kernels of cat_attention on the emulator, for test_emulated_cat_attention.py, which fills a Call.
#include "call.h"
#include "cat_attention/forward.cuh"
#include "cat_attention/header_gradients.cuh"
#include "cat_attention/own_gradients.cuh"
#include "cat_attention/query_gradients.cuh"
#include "cat_attention/sm90/forward.cuh"
#include "cat_attention/sm90/header_gradients.cuh"
#include "cat_attention/sm90/query_gradients.cuh"
#include "cat_attention/sm90/sum_headers.cuh"

using namespace girih::kernels;

struct Call {
  int64_t batch, tokens, chunk, sequences;
  const void* cu_chunks;
  int64_t heads, query_heads, D, V;
  double scale;
  int64_t use_warpgroups;  // run the sm_90 kernels where they support the call
  Array q, k, v, o, lse, dout, dq, dk, dv;
  void* queries;
  float* partials;
};

namespace {

CatShape make_shape(const Call& c) {
  CatShape shape{};
  shape.chunks = {c.batch, (c.tokens + c.chunk - 1) / c.chunk, c.sequences, c.cu_chunks, true, false};
  shape.rows = static_cast<int>(c.tokens), shape.size = static_cast<int>(c.chunk);
  shape.heads = static_cast<int>(c.heads), shape.query_heads = static_cast<int>(c.query_heads);
  shape.D = static_cast<int>(c.D), shape.V = static_cast<int>(c.V);
  shape.scale = static_cast<float>(c.scale);
  shape.dtype = static_cast<DType>(c.q.dtype);
  return shape;
}

template <class Problem>
void fill(Problem& p, const Call& c) {
  p.shape = make_shape(c);
  p.q = as_input<4>(c.q), p.k = as_input<4>(c.k), p.v = as_input<4>(c.v);
}

template <typename Element, int Tile>
constexpr bool kHasWarpgroups = sizeof(Element) == 2 && Tile <= kCatSm90MaxWidth;

template <typename Element, int Tile>
void run(const Call& c) {
  CatForward forward{};
  fill(forward, c);
  forward.o = as_output<4>(c.o), forward.lse = as_output<3>(c.lse);
  bool is_launched = false;
  if constexpr (kHasWarpgroups<Element, Tile>) {
    if (c.use_warpgroups) check_launch(try_cat_forward_sm90<Element, Tile>(forward, nullptr, is_launched));
  }
  if (is_launched != (c.use_warpgroups && cat_fills_sm90_tiles(forward.shape)))
    emulated::fail("cat_fills_sm90_tiles() disagrees with try_cat_forward_sm90()");
  if (!is_launched) check_launch(launch_cat_forward<Element, Tile>(forward, nullptr));

  CatQueryGradients query_gradients{};
  fill(query_gradients, c);
  query_gradients.o = as_input<4>(c.o), query_gradients.lse = as_input<3>(c.lse),
  query_gradients.dout = as_input<4>(c.dout);
  query_gradients.dq = as_output<4>(c.dq), query_gradients.queries = static_cast<CatQueryRecord*>(c.queries);
  query_gradients.dk = as_output<4>(c.dk), query_gradients.dv = as_output<4>(c.dv),
  query_gradients.partials = c.partials;
  is_launched = false;
  if constexpr (kHasWarpgroups<Element, Tile>) {
    if (c.use_warpgroups)
      check_launch(try_cat_query_gradients_sm90<Element, Tile>(query_gradients, nullptr, is_launched));
  }
  if (!is_launched) check_launch(launch_cat_query_gradients<Element, Tile>(query_gradients, nullptr));

  CatHeaderGradients header_gradients{};
  fill(header_gradients, c);
  header_gradients.dout = as_input<4>(c.dout), header_gradients.queries = query_gradients.queries;
  header_gradients.partials = c.partials;
  if constexpr (kHasWarpgroups<Element, Tile>) {
    if (c.use_warpgroups)
      check_launch(launch_cat_header_gradients_sm90<Element, Tile>(header_gradients, nullptr));
  }
  if (!c.use_warpgroups) check_launch(launch_cat_header_gradients<Element, Tile>(header_gradients, nullptr));

  CatOwnGradients own_gradients{};
  fill(own_gradients, c);
  own_gradients.dout = as_input<4>(c.dout), own_gradients.queries = query_gradients.queries,
  own_gradients.partials = c.partials;
  own_gradients.is_sm90 = c.use_warpgroups;
  own_gradients.dk = as_output<4>(c.dk), own_gradients.dv = as_output<4>(c.dv);
  if constexpr (kHasWarpgroups<Element, Tile>) {
    if (c.use_warpgroups && cat_has_fused_own_gradients(own_gradients.shape)) {
      check_launch(launch_cat_sum_headers<Element, Tile>(own_gradients, nullptr));
      return;
    }
  }
  check_launch(launch_cat_own_gradients<Element, Tile>(own_gradients, nullptr));
}

template <int Tile>
int64_t count_partials(const Call& c) {
  const CatShape shape = make_shape(c);
  if (c.use_warpgroups)
    return CatHeaderList(shape, Tile, sm90_header_list_sizes<Tile>()).float_count() +
           cat_shares_size<Tile>(shape);
  const bool is_fp32 = shape.dtype == DType::f32;
  return CatHeaderList(shape, Tile,
                       is_fp32 ? header_list_sizes<float, Tile>() : header_list_sizes<__half, Tile>())
      .float_count();
}

template <class F>
auto dispatch_tile(const Call& c, const F& f) {
  const int64_t width = std::max(c.D, c.V);
  if (width <= 64) return f(std::integral_constant<int, 64>());
  if (width <= 128) return f(std::integral_constant<int, 128>());
  return f(std::integral_constant<int, 256>());
}

}  // namespace

extern "C" int64_t partials(const Call* c) {
  return dispatch_tile(*c, [&](auto tile) { return count_partials<decltype(tile)::value>(*c); });
}
extern "C" void run(const Call* c) {
  dispatch_tile(*c, [&](auto tile) {
    constexpr int kTile = decltype(tile)::value;
    if (c->q.dtype == static_cast<int>(DType::bf16)) {
      run<__nv_bfloat16, kTile>(*c);
      return;
    }
    if constexpr (kTile <= kCatMaxWidthFp32) {
      if (c->q.dtype == static_cast<int>(DType::f32)) return run<float, kTile>(*c);
    }
    if constexpr (kTile == 64) {  // compiling the other widths takes longer than all tests
      run<__half, kTile>(*c);
    } else {
      emulated::fail("fp16 is compiled for 64 columns only");
    }
  });
}
