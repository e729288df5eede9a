// The exact kernels of delta_product on the emulator, for test_emulated_delta_product_fp32.py, which fills
// an Fp32Call.
#include "call.h"
#include "delta_product/fp32.h"

using namespace girih::kernels;

struct Fp32Call {
  int64_t batch, tokens, sequences;
  const void* cu_seqlens;
  const int64_t* position;
  int64_t heads, query_heads, D, V, n, unit, vector, chunk, between, shared;
  double scale;
  Array q, k, v, beta, g, initial, last, o, dout, dlast, dinitial, dq, dk, dv, dbeta;
  int64_t* last_position;
  float* dg;  // [slabs of 64 of D, B, T, H]
};

namespace {

DeltaFp32Shape shape_of(const Fp32Call& c) {
  const SequenceLayout tokens{c.batch, c.tokens, c.sequences, c.cu_seqlens, true, false};
  DeltaFp32Shape shape{};
  shape.segments =
      delta_segments(tokens, static_cast<int>(c.n), static_cast<Between>(c.between), c.chunk, c.position);
  shape.heads = static_cast<int>(c.heads), shape.query_heads = static_cast<int>(c.query_heads);
  shape.D = static_cast<int>(c.D), shape.V = static_cast<int>(c.V), shape.n = static_cast<int>(c.n);
  shape.scale = static_cast<float>(c.scale);
  return shape;
}

}  // namespace

extern "C" void run_fp32(const Fp32Call* call) {
  const Fp32Call& c = *call;
  const DeltaFp32Shape shape = shape_of(c);
  emulated::shared_bytes = static_cast<int>(c.shared);
  Rooms rooms;
  const auto rows = [&](int64_t count, int64_t heads, int64_t width) {
    return rooms(DType::f32, c.batch, count, heads, round_up_to_4(width));
  };
  const auto of_queries = [&](int64_t width) { return rows(c.tokens, c.query_heads, width); };
  const auto of_steps = [&](int64_t width) { return rows(c.tokens * c.n, c.heads, width); };

  DeltaFp32Rows made{};
  made.shape = shape, made.unit = c.unit != 0;
  made.q = in<4>(c.q), made.k = in<4>(c.k), made.v = in<4>(c.v), made.beta = in<4>(c.beta);
  made.unit_q = of_queries(c.D), made.unit_k = of_steps(c.D);
  made.b = of_steps(c.D), made.w = of_steps(c.V);
  must(delta_fp32_rows(made, nullptr));

  const int64_t floats = segment_count(shape.segments) * c.heads * c.V * round_up_to_4(c.D);
  auto* const states = static_cast<float*>(rooms.bytes(4 * floats));
  auto* const gradients = static_cast<float*>(rooms.bytes(4 * floats));
  DeltaFp32Scan scan{};
  scan.shape = shape;
  scan.q = written(made.unit_q), scan.k = written(made.unit_k), scan.b = written(made.b);
  scan.value = written(made.w), scan.g = in<3>(c.g);
  scan.initial = in<4>(c.initial), scan.final = out<4>(c.last), scan.o = out<4>(c.o);
  scan.position = c.last_position;
  must(delta_fp32_scan(scan, nullptr));  // without backward; what is handed out is looked at after the next
  scan.u = of_steps(c.V), scan.saved_states = states;
  must(delta_fp32_scan(scan, nullptr));

  DeltaFp32Scan reverse = scan;
  reverse.reverse = true, reverse.value = in<4>(c.dout), reverse.o = {}, reverse.position = nullptr;
  reverse.initial = in<4>(c.dlast), reverse.final = out<4>(c.dinitial);
  reverse.u = of_steps(c.V), reverse.states = states, reverse.saved_states = gradients;
  must(delta_fp32_scan(reverse, nullptr));

  DeltaFp32Gradients p{};
  p.shape = shape;
  p.q = scan.q, p.k = scan.k, p.b = scan.b, p.dout = in<4>(c.dout);
  p.u = written(scan.u), p.du = written(reverse.u), p.g = in<3>(c.g);
  p.states = states, p.gradients = gradients;
  p.dq = of_queries(c.D), p.dk = of_steps(c.D), p.db = of_steps(c.D), p.dg = c.dg;
  must(delta_fp32_gradients(p, nullptr));

  DeltaFp32RowGradients r{};
  r.shape = shape, r.unit = made.unit;
  r.q = made.q, r.k = made.k, r.v = made.v, r.beta = made.beta;
  r.dunit_q = written(p.dq), r.dunit_k = written(p.dk), r.db = written(p.db), r.dw = p.du;
  r.dq = out<4>(c.dq), r.dk = out<4>(c.dk), r.dv = out<4>(c.dv);
  r.has_channel_beta = c.vector != 0, r.dbeta = out<4>(c.dbeta);
  must(delta_fp32_row_gradients(r, nullptr));
  emulated::shared_bytes = emulated::kSharedBytes;
}
