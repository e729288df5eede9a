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
  int64_t groups;  // by warpgroups, as far as these take it
  Array q, k, v, o, lse, dout, dq, dk, dv;
  void* queries;
  float* partials;
};

namespace {

CatShape shape_of(const Call& c) {
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
  p.shape = shape_of(c);
  p.q = in<4>(c.q), p.k = in<4>(c.k), p.v = in<4>(c.v);
}

template <typename Element, int Tile>
constexpr bool kHasGroups = sizeof(Element) == 2 && Tile <= kCatSm90MaxWidth;

template <typename Element, int Tile>
void run(const Call& c) {
  CatForward forward{};
  fill(forward, c);
  forward.o = out<4>(c.o), forward.lse = out<3>(c.lse);
  bool taken = false;
  if constexpr (kHasGroups<Element, Tile>) {
    if (c.groups) must(try_cat_forward_sm90<Element, Tile>(forward, nullptr, taken));
  }
  if (taken != (c.groups && cat_fills_sm90_tiles(forward.shape)))
    emulated::fail("the kernels of warpgroups take another call, or not this one");
  if (!taken) must(launch_cat_forward<Element, Tile>(forward, nullptr));

  CatQueryGradients of_queries{};
  fill(of_queries, c);
  of_queries.o = in<4>(c.o), of_queries.lse = in<3>(c.lse), of_queries.dout = in<4>(c.dout);
  of_queries.dq = out<4>(c.dq), of_queries.queries = static_cast<CatQueryRecord*>(c.queries);
  of_queries.dk = out<4>(c.dk), of_queries.dv = out<4>(c.dv), of_queries.partials = c.partials;
  taken = false;
  if constexpr (kHasGroups<Element, Tile>) {
    if (c.groups) must(try_cat_query_gradients_sm90<Element, Tile>(of_queries, nullptr, taken));
  }
  if (!taken) must(launch_cat_query_gradients<Element, Tile>(of_queries, nullptr));

  CatHeaderGradients of_headers{};
  fill(of_headers, c);
  of_headers.dout = in<4>(c.dout), of_headers.queries = of_queries.queries;
  of_headers.partials = c.partials;
  if constexpr (kHasGroups<Element, Tile>) {
    if (c.groups) must(launch_cat_header_gradients_sm90<Element, Tile>(of_headers, nullptr));
  }
  if (!c.groups) must(launch_cat_header_gradients<Element, Tile>(of_headers, nullptr));

  CatOwnGradients own{};
  fill(own, c);
  own.dout = in<4>(c.dout), own.queries = of_queries.queries, own.partials = c.partials;
  own.is_sm90 = c.groups;
  own.dk = out<4>(c.dk), own.dv = out<4>(c.dv);
  if constexpr (kHasGroups<Element, Tile>) {
    if (c.groups && cat_has_fused_own_gradients(own.shape)) {
      must(launch_cat_sum_headers<Element, Tile>(own, nullptr));
      return;
    }
  }
  must(launch_cat_own_gradients<Element, Tile>(own, nullptr));
}

template <int Tile>
int64_t partials_of(const Call& c) {
  const CatShape shape = shape_of(c);
  if (c.groups)
    return CatHeaderList(shape, Tile, sm90_header_list_sizes<Tile>()).float_count() +
           cat_shares_size<Tile>(shape);
  const bool wide = shape.dtype == DType::f32;
  return CatHeaderList(shape, Tile,
                       wide ? header_list_sizes<float, Tile>() : header_list_sizes<__half, Tile>())
      .float_count();
}

template <class F>
auto with_tile(const Call& c, const F& f) {
  const int64_t widest = std::max(c.D, c.V);
  if (widest <= 64) return f(std::integral_constant<int, 64>());
  if (widest <= 128) return f(std::integral_constant<int, 128>());
  return f(std::integral_constant<int, 256>());
}

}  // namespace

extern "C" int64_t partials(const Call* c) {
  return with_tile(*c, [&](auto tile) { return partials_of<decltype(tile)::value>(*c); });
}
extern "C" void run(const Call* c) {
  with_tile(*c, [&](auto tile) {
    constexpr int kTile = decltype(tile)::value;
    if (c->q.dtype == static_cast<int>(DType::bf16)) {
      run<__nv_bfloat16, kTile>(*c);
      return;
    }
    if constexpr (kTile <= kCatMaxWidthFp32) {
      if (c->q.dtype == static_cast<int>(DType::f32)) return run<float, kTile>(*c);
    }
    if constexpr (kTile == 64) {  // to compile more takes longer than all that is run
      run<__half, kTile>(*c);
    } else {
      emulated::fail("fp16 is compiled for 64 columns alone");
    }
  });
}
