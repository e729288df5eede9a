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
  int64_t rows;  // cu_seqlens has a beginning and an end of every row
  int64_t heads, output_heads, key_share, query_share, D, V, n, unit, gated;
  double scale;
  int64_t card;  // its multiprocessors: what decides how a scan is cut, and by which kernels it runs
  Array q, k, v, beta, g, initial, last, o, last_alone, o_alone;
  Array dout, dlast, dinitial, dz, dq, dk, dv, dbeta, dg;
  Array b, w, db;  // with a beta for every channel
  void *prepared, *states, *gradients, *scan_workspace, *reverse_workspace;
  float *factors, *transitions;
};

namespace girih::kernels::delta_product {

// What is not compiled here.
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

DeltaShape shape_of(const Call& c) {
  DeltaShape shape{};
  shape.tokens = {c.batch, c.tokens, c.sequences, c.cu_seqlens, true, c.rows != 0};
  shape.heads = static_cast<int>(c.heads), shape.output_heads = static_cast<int>(c.output_heads);
  shape.key_share = static_cast<int>(c.key_share), shape.query_share = static_cast<int>(c.query_share);
  shape.D = static_cast<int>(c.D), shape.V = static_cast<int>(c.V), shape.n = static_cast<int>(c.n);
  shape.unit = c.unit != 0;
  shape.dtype = static_cast<DType>(c.q.dtype);
  shape.scale = static_cast<float>(c.scale);
  kMultiprocessors = c.card;
  emulated::processors = 2;  // so few that warps of prepare have one chunk after another
  return shape;
}

DeltaScan scan_of(const Call& c) {
  DeltaScan p{};
  p.shape = shape_of(c);
  p.q = in<4>(c.q), p.k = in<4>(c.k), p.v = in<4>(c.v);
  p.gated = c.gated != 0, p.prepared = c.prepared;
  p.initial = in<4>(c.initial), p.final = out<4>(c.last), p.o = out<4>(c.o);
  p.states = c.states, p.workspace = c.scan_workspace;
  p.transitions = delta_saved_segments(p.shape) > 0 ? c.transitions : nullptr;
  return p;
}

DeltaReverse reverse_of(const Call& c) {
  DeltaReverse p{};
  p.shape = shape_of(c);
  p.q = in<4>(c.q), p.k = in<4>(c.k), p.dout = in<4>(c.dout);
  p.gated = c.gated != 0, p.prepared = c.prepared, p.factors = c.factors;
  p.transitions = c.transitions;
  p.initial = in<4>(c.dlast), p.final = out<4>(c.dinitial), p.dz = out<4>(c.dz);
  p.in_place = c.dz.data == c.dv.data, p.gradients = c.gradients, p.workspace = c.reverse_workspace;
  return p;
}

}  // namespace

extern "C" int64_t chunks(const Call* c) {
  const DeltaShape shape = shape_of(*c);
  return token_range_count(shape.tokens, delta_chunk_tokens(shape.n));
}
extern "C" int64_t segments(const Call* c) { return delta_saved_segments(shape_of(*c)); }
extern "C" int64_t prepared_bytes() { return kDeltaPreparedBytes; }
extern "C" int64_t scan_bytes(const Call* c) { return delta_scan_workspace(scan_of(*c)); }
extern "C" int64_t reverse_bytes(const Call* c) { return delta_reverse_workspace(reverse_of(*c)); }

extern "C" void run(const Call* call) {
  const Call& c = *call;
  const DeltaPrepare prepare{shape_of(c), in<4>(c.k), {}, in<3>(c.beta), in<3>(c.g), c.prepared};
  must(delta_prepare(prepare, nullptr));
  DeltaScan scan = scan_of(c);
  // As without backward, too.
  scan.states = nullptr, scan.transitions = nullptr;
  scan.final = out<4>(c.last_alone), scan.o = out<4>(c.o_alone);
  must(delta_scan(scan, nullptr));
  must(delta_scan(scan_of(c), nullptr));
  const DeltaReverse reverse = reverse_of(c);
  must(delta_reverse(reverse, nullptr));

  DeltaGradients p{};
  p.shape = reverse.shape;
  p.q = reverse.q, p.k = reverse.k, p.v = in<4>(c.v), p.dout = reverse.dout, p.dz = in<4>(c.dz);
  p.in_place = reverse.in_place, p.gated = reverse.gated;
  p.prepared = c.prepared, p.factors = c.factors, p.states = c.states, p.gradients = c.gradients;
  p.initial = in<4>(c.initial), p.end = in<4>(c.dlast);
  p.dq = out<4>(c.dq), p.dk = out<4>(c.dk), p.dv = out<4>(c.dv);
  p.dbeta = out<3>(c.dbeta), p.dg = out<3>(c.dg);
  must(delta_gradients(p, nullptr));
}

// The same with a beta for every channel.
extern "C" void run_vector(const Call* call) {
  const Call& c = *call;
  const DeltaShape shape = shape_of(c);
  must(delta_channel_beta_rows({shape, in<4>(c.k), in<4>(c.v), in<4>(c.beta), out<4>(c.b), out<4>(c.w)},
                               nullptr));
  must(delta_prepare({shape, in<4>(c.k), in<4>(c.b), {}, {}, c.prepared}, nullptr));
  DeltaScan scan = scan_of(c);
  scan.v = in<4>(c.w), scan.b = in<4>(c.b);
  must(delta_scan(scan, nullptr));
  scan.states = nullptr, scan.transitions = nullptr;
  scan.final = out<4>(c.last_alone), scan.o = out<4>(c.o_alone);
  must(delta_scan(scan, nullptr));
  DeltaReverse reverse = reverse_of(c);
  reverse.b = in<4>(c.b);
  must(delta_reverse(reverse, nullptr));
  must(delta_channel_beta_gradients(
      {shape, in<4>(c.q), in<4>(c.k), in<4>(c.b), in<4>(c.w), in<4>(c.dout), in<4>(c.dz), c.prepared,
       c.states, c.gradients, out<4>(c.dq), out<4>(c.dk), out<4>(c.db)},
      nullptr));
  must(delta_channel_beta_row_gradients({shape, in<4>(c.k), in<4>(c.v), in<4>(c.beta), in<4>(c.db),
                                         in<4>(c.dz), out<4>(c.dk), out<4>(c.dv), out<4>(c.dbeta)},
                                        nullptr));
}

// One token: of the tensors of a call those of a sequence, without that dimension; the state is `last`.
extern "C" void step(const Call* call) {
  const Call& c = *call;
  DeltaStep p{};
  p.sequences = c.sequences;
  p.heads = static_cast<int>(c.heads), p.output_heads = static_cast<int>(c.output_heads);
  p.key_share = static_cast<int>(c.key_share), p.query_share = static_cast<int>(c.query_share);
  p.D = static_cast<int>(c.D), p.V = static_cast<int>(c.V), p.n = static_cast<int>(c.n);
  p.unit = c.unit != 0, p.scale = static_cast<float>(c.scale);
  p.q = in<3>(c.q), p.k = in<4>(c.k), p.v = in<4>(c.v), p.beta = in<4>(c.beta), p.g = in<2>(c.g);
  p.state = out<4>(c.last), p.o = out<3>(c.o);
  must(delta_step(p, nullptr));
}
