// The kernels of delta_product on the emulator, for test_emulated_delta_product.py, which fills a Call.
#include "delta_product/delta_product.cu"

#include "call.h"
#include "delta_product/channel_beta.h"
#include "delta_product/join.cu"
#include "delta_product/prepare.cuh"
#include "delta_product/step.cu"

using namespace girih::kernels;

struct Call {
  int64_t batch, tokens, sequences;
  const void* cu_seqlens;
  int64_t rows;  // cu_seqlens is [batch, 2]: begin and end of the sequence of every batch row
  int64_t heads, output_heads, key_share, query_share, D, V, n, unit, gated;
  double scale;
  int64_t processors;  // multiprocessors; determines the segments and the kernel of a scan
  Array q, k, v, beta, g, initial, last, o, last_inference, o_inference;
  Array dout, dlast, dinitial, dz, dq, dk, dv, dbeta, dg;
  Array b, w, db;  // for per-channel beta
  void *prepared, *states, *gradients, *scan_workspace, *reverse_workspace;
  float *factors, *transitions;
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

DeltaScan make_scan(const Call& c) {
  DeltaScan p{};
  p.shape = make_shape(c);
  p.q = as_input<4>(c.q), p.k = as_input<4>(c.k), p.v = as_input<4>(c.v);
  p.gated = c.gated != 0, p.prepared = c.prepared;
  p.initial = as_input<4>(c.initial), p.final = as_output<4>(c.last), p.o = as_output<4>(c.o);
  p.states = c.states, p.workspace = c.scan_workspace;
  p.transitions = delta_saved_segments(p.shape) > 0 ? c.transitions : nullptr;
  return p;
}

DeltaReverse make_reverse(const Call& c) {
  DeltaReverse p{};
  p.shape = make_shape(c);
  p.q = as_input<4>(c.q), p.k = as_input<4>(c.k), p.dout = as_input<4>(c.dout);
  p.gated = c.gated != 0, p.prepared = c.prepared, p.factors = c.factors;
  p.transitions = c.transitions;
  p.initial = as_input<4>(c.dlast), p.final = as_output<4>(c.dinitial), p.dz = as_output<4>(c.dz);
  p.in_place = c.dz.data == c.dv.data, p.gradients = c.gradients, p.workspace = c.reverse_workspace;
  return p;
}

}  // namespace

extern "C" int64_t chunks(const Call* c) {
  const DeltaShape shape = make_shape(*c);
  return token_range_count(shape.tokens, delta_chunk_tokens(shape.n));
}
extern "C" int64_t segments(const Call* c) { return delta_saved_segments(make_shape(*c)); }
extern "C" int64_t prepared_bytes() { return kDeltaPreparedBytes; }
extern "C" int64_t scan_bytes(const Call* c) { return delta_scan_workspace(make_scan(*c)); }
extern "C" int64_t reverse_bytes(const Call* c) { return delta_reverse_workspace(make_reverse(*c)); }

extern "C" void run(const Call* call) {
  const Call& c = *call;
  const DeltaPrepare prepare{make_shape(c),       as_input<4>(c.k), {},
                             as_input<3>(c.beta), as_input<3>(c.g), c.prepared};
  check_launch(delta_prepare(prepare, nullptr));
  DeltaScan scan = make_scan(c);
  // First the scan of a call without backward.
  scan.states = nullptr, scan.transitions = nullptr;
  scan.final = as_output<4>(c.last_inference), scan.o = as_output<4>(c.o_inference);
  check_launch(delta_scan(scan, nullptr));
  check_launch(delta_scan(make_scan(c), nullptr));
  const DeltaReverse reverse = make_reverse(c);
  check_launch(delta_reverse(reverse, nullptr));

  DeltaGradients p{};
  p.shape = reverse.shape;
  p.q = reverse.q, p.k = reverse.k, p.v = as_input<4>(c.v), p.dout = reverse.dout, p.dz = as_input<4>(c.dz);
  p.in_place = reverse.in_place, p.gated = reverse.gated;
  p.prepared = c.prepared, p.factors = c.factors, p.states = c.states, p.gradients = c.gradients;
  p.initial = as_input<4>(c.initial), p.end = as_input<4>(c.dlast);
  p.dq = as_output<4>(c.dq), p.dk = as_output<4>(c.dk), p.dv = as_output<4>(c.dv);
  p.dbeta = as_output<3>(c.dbeta), p.dg = as_output<3>(c.dg);
  check_launch(delta_gradients(p, nullptr));
}

// run() with a per-channel beta.
extern "C" void run_channel_beta(const Call* call) {
  const Call& c = *call;
  const DeltaShape shape = make_shape(c);
  check_launch(delta_channel_beta_rows(
      {shape, as_input<4>(c.k), as_input<4>(c.v), as_input<4>(c.beta), as_output<4>(c.b), as_output<4>(c.w)},
      nullptr));
  check_launch(delta_prepare({shape, as_input<4>(c.k), as_input<4>(c.b), {}, {}, c.prepared}, nullptr));
  DeltaScan scan = make_scan(c);
  scan.v = as_input<4>(c.w), scan.b = as_input<4>(c.b);
  check_launch(delta_scan(scan, nullptr));
  scan.states = nullptr, scan.transitions = nullptr;
  scan.final = as_output<4>(c.last_inference), scan.o = as_output<4>(c.o_inference);
  check_launch(delta_scan(scan, nullptr));
  DeltaReverse reverse = make_reverse(c);
  reverse.b = as_input<4>(c.b);
  check_launch(delta_reverse(reverse, nullptr));
  check_launch(delta_channel_beta_gradients(
      {shape, as_input<4>(c.q), as_input<4>(c.k), as_input<4>(c.b), as_input<4>(c.w), as_input<4>(c.dout),
       as_input<4>(c.dz), c.prepared, c.states, c.gradients, as_output<4>(c.dq), as_output<4>(c.dk),
       as_output<4>(c.db)},
      nullptr));
  check_launch(delta_channel_beta_row_gradients(
      {shape, as_input<4>(c.k), as_input<4>(c.v), as_input<4>(c.beta), as_input<4>(c.db), as_input<4>(c.dz),
       as_output<4>(c.dk), as_output<4>(c.dv), as_output<4>(c.dbeta)},
      nullptr));
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
