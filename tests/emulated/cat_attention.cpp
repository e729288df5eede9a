// The kernels of cat_attention on the emulator, for test_emulated_cat_attention.py, which fills a Call.
#include "cat_attention/cat_attention.h"

#include "call.h"

using namespace girih::kernels;

struct Call {
  int64_t batch, tokens, chunk, sequences;
  const void* cu_chunks;
  int64_t heads, query_heads, D, V;
  double scale;
  int64_t use_warpgroups;  // the device has the sm_90 kernels
  Array q, k, v, o, lse, dout, dq, dk, dv;
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

}  // namespace

extern "C" void run(const Call* call) {
  const Call& c = *call;
  emulated::architecture = c.use_warpgroups ? 90 : 80;
  bool fits = false;
  check_launch(cat_fits(static_cast<int>(c.D), static_cast<int>(c.V), static_cast<DType>(c.q.dtype), fits));
  if (!fits) emulated::fail("the kernels need more shared memory than the device has");

  CatForward forward{};
  fill(forward, c);
  forward.o = as_output<4>(c.o), forward.lse = as_output<3>(c.lse);
  check_launch(cat_forward(forward, nullptr));

  CatBackward backward{};
  fill(backward, c);
  backward.o = as_input<4>(c.o), backward.dout = as_input<4>(c.dout), backward.lse = as_input<3>(c.lse);
  backward.dq = as_output<4>(c.dq), backward.dk = as_output<4>(c.dk), backward.dv = as_output<4>(c.dv);
  Buffers buffers;
  check_launch(cat_backward(backward, buffers, nullptr));
  emulated::architecture = 90;
}
