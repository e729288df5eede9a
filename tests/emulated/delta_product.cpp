// The kernels of delta_product on the emulator, for test_emulated_delta_product.py, which fills a Call.
#include "delta_product/delta_product.cu"

#include "call.h"
#include "delta_product/join.cu"
#include "delta_product/prepare.cuh"
#include "delta_product/step.cu"

using namespace girih::kernels;

struct Call {
  int64_t batch, tokens, sequences;
  const void* cu_seqlens;
  int64_t rows;  // cu_seqlens is [batch, 2]: begin and end of the sequence of every batch row
  int64_t heads, output_heads, key_share, query_share, D, V, n, unit, has_channel_beta;
  double scale;
  int64_t processors;  // multiprocessors; determines the segments and the kernel of a scan
  Array q, k, v, beta, g, initial, last, o, last_inference, o_inference;
  Array dout, dlast, dinitial, dq, dk, dv, dbeta, dg;
  void *states, *prepared;
  float* transitions;
};

namespace girih::kernels::delta_product {

// These widths of fp16 are not compiled here.
#define ABSENT(T, D)                                                        \
  template <>                                                               \
  cudaError_t launch_scan<T, D>(const ScanParams&, cudaStream_t) {          \
    return cudaErrorInvalidValue;                                           \
  }                                                                         \
  template <>                                                               \
  cudaError_t launch_reverse<T, D>(const ReverseParams&, cudaStream_t) {    \
    return cudaErrorInvalidValue;                                           \
  }                                                                         \
  template <>                                                               \
  cudaError_t launch_gradients<T, D>(const DeltaGradients&, cudaStream_t) { \
    return cudaErrorInvalidValue;                                           \
  }
ABSENT(__half, 128)
ABSENT(__half, 256)
#undef ABSENT

}  // namespace girih::kernels::delta_product

namespace {

DeltaShape make_shape(const Call& c) {
  DeltaShape shape{};
  shape.tokens = {c.batch, c.tokens, c.sequences, c.cu_seqlens, true, c.rows != 0};
  shape.heads = static_cast<int>(c.heads), shape.output_heads = static_cast<int>(c.output_heads);
  shape.key_share = static_cast<int>(c.key_share), shape.query_share = static_cast<int>(c.query_share);
  shape.D = static_cast<int>(c.D), shape.V = static_cast<int>(c.V), shape.n = static_cast<int>(c.n);
  shape.unit = c.unit != 0;
  shape.dtype = static_cast<DType>(c.q.dtype);
  shape.scale = static_cast<float>(c.scale);
  kMultiprocessors = c.processors;
  emulated::processors = 2;  // few, so that a warp of prepare processes several chunks
  return shape;
}

// The fields that forward and backward have in common.
template <class Problem>
Problem make_problem(const Call& c) {
  Problem p{};
  p.shape = make_shape(c);
  p.has_channel_beta = c.has_channel_beta != 0;
  p.q = as_input<4>(c.q), p.k = as_input<4>(c.k), p.v = as_input<4>(c.v), p.beta = as_input<4>(c.beta);
  p.initial = as_input<4>(c.initial);
  return p;
}

void run_forward(const DeltaForward& problem) {
  Buffers buffers;
  check_launch(delta_forward(problem, buffers, nullptr));
}

}  // namespace

extern "C" int64_t chunks(const Call* c) {
  const DeltaShape shape = make_shape(*c);
  return token_range_count(shape.tokens, delta_chunk_tokens(shape.n));
}
extern "C" int64_t saved_segments(const Call* c) { return delta_saved_segments(make_shape(*c)); }
// The segments of the scan of forward, which do not change its results.
extern "C" int64_t forward_segments(const Call* c) {
  return delta_product::segment_count(make_shape(*c), false);
}
extern "C" int64_t prepared_bytes() { return kDeltaPreparedBytes; }

extern "C" void run(const Call* call) {
  const Call& c = *call;
  DeltaForward forward = make_problem<DeltaForward>(c);
  forward.g = as_input<3>(c.g);
  // First a call without backward.
  forward.final = as_output<4>(c.last_inference), forward.o = as_output<4>(c.o_inference);
  run_forward(forward);
  forward.final = as_output<4>(c.last), forward.o = as_output<4>(c.o);
  forward.states = c.states, forward.prepared = c.prepared, forward.transitions = c.transitions;
  run_forward(forward);

  DeltaBackward backward = make_problem<DeltaBackward>(c);
  backward.dout = as_input<4>(c.dout), backward.dfinal = as_input<4>(c.dlast);
  backward.states = c.states, backward.prepared = c.prepared, backward.transitions = c.transitions;
  backward.dinitial = as_output<4>(c.dinitial);
  backward.dq = as_output<4>(c.dq), backward.dk = as_output<4>(c.dk), backward.dv = as_output<4>(c.dv);
  backward.dbeta = as_output<4>(c.dbeta), backward.dg = as_output<3>(c.dg);
  Buffers buffers;
  check_launch(delta_backward(backward, buffers, nullptr));
}

// One step. The tensors have no dimension of tokens. `last` is the state, updated in place.
extern "C" void step(const Call* call) {
  const Call& c = *call;
  DeltaStep p{};
  p.sequences = c.sequences;
  p.heads = static_cast<int>(c.heads), p.output_heads = static_cast<int>(c.output_heads);
  p.key_share = static_cast<int>(c.key_share), p.query_share = static_cast<int>(c.query_share);
  p.D = static_cast<int>(c.D), p.V = static_cast<int>(c.V), p.n = static_cast<int>(c.n);
  p.unit = c.unit != 0, p.scale = static_cast<float>(c.scale);
  p.q = as_input<3>(c.q), p.k = as_input<4>(c.k), p.v = as_input<4>(c.v), p.beta = as_input<4>(c.beta),
  p.g = as_input<2>(c.g);
  p.state = as_output<4>(c.last), p.o = as_output<3>(c.o);
  check_launch(delta_step(p, nullptr));
}
