// The fp32 kernels of delta_product on the emulator, for test_emulated_delta_product_fp32.py, which fills
// an Fp32Call.
#include "call.h"
#include "delta_product/fp32.h"

using namespace girih::kernels;

struct Fp32Call {
  int64_t batch, tokens, sequences;
  const void* cu_seqlens;
  const int64_t* position;
  int64_t heads, query_heads, D, V, n, unit, has_channel_beta, chunk, between, shared;
  double scale;
  Array q, k, v, beta, g, initial, last, o, dout, dlast, dinitial, dq, dk, dv, dbeta;
  int64_t* last_position;
  float* dg;  // [ceil(D / 64), B, T, H]
};

namespace {

DeltaFp32Shape make_shape(const Fp32Call& c) {
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
  const DeltaFp32Shape shape = make_shape(c);
  emulated::shared_bytes = static_cast<int>(c.shared);
  Buffers buffers;
  const auto make_rows = [&](int64_t count, int64_t heads, int64_t width) {
    return buffers.tensor(DType::f32, c.batch, count, heads, round_up_to_4(width));
  };
  const auto query_rows = [&](int64_t width) { return make_rows(c.tokens, c.query_heads, width); };
  const auto step_rows = [&](int64_t width) { return make_rows(c.tokens * c.n, c.heads, width); };

  DeltaFp32Rows rows{};
  rows.shape = shape, rows.unit = c.unit != 0;
  rows.q = as_input<4>(c.q), rows.k = as_input<4>(c.k), rows.v = as_input<4>(c.v),
  rows.beta = as_input<4>(c.beta);
  rows.unit_q = query_rows(c.D), rows.unit_k = step_rows(c.D);
  rows.b = step_rows(c.D), rows.w = step_rows(c.V);
  check_launch(delta_fp32_rows(rows, nullptr));

  const int64_t floats = segment_count(shape.segments) * c.heads * c.V * round_up_to_4(c.D);
  auto* const states = static_cast<float*>(buffers.bytes(4 * floats));
  auto* const gradients = static_cast<float*>(buffers.bytes(4 * floats));
  DeltaFp32Scan scan{};
  scan.shape = shape;
  scan.q = as_input(rows.unit_q), scan.k = as_input(rows.unit_k), scan.b = as_input(rows.b);
  scan.value = as_input(rows.w), scan.g = as_input<3>(c.g);
  scan.initial = as_input<4>(c.initial), scan.final = as_output<4>(c.last), scan.o = as_output<4>(c.o);
  scan.position = c.last_position;
  // First the scan of a call without backward. The second scan overwrites its results.
  check_launch(delta_fp32_scan(scan, nullptr));
  scan.u = step_rows(c.V), scan.saved_states = states;
  check_launch(delta_fp32_scan(scan, nullptr));

  DeltaFp32Scan reverse = scan;
  reverse.reverse = true, reverse.value = as_input<4>(c.dout), reverse.o = {}, reverse.position = nullptr;
  reverse.initial = as_input<4>(c.dlast), reverse.final = as_output<4>(c.dinitial);
  reverse.u = step_rows(c.V), reverse.states = states, reverse.saved_states = gradients;
  check_launch(delta_fp32_scan(reverse, nullptr));

  DeltaFp32Gradients p{};
  p.shape = shape;
  p.q = scan.q, p.k = scan.k, p.b = scan.b, p.dout = as_input<4>(c.dout);
  p.u = as_input(scan.u), p.du = as_input(reverse.u), p.g = as_input<3>(c.g);
  p.states = states, p.gradients = gradients;
  p.dq = query_rows(c.D), p.dk = step_rows(c.D), p.db = step_rows(c.D), p.dg = c.dg;
  check_launch(delta_fp32_gradients(p, nullptr));

  DeltaFp32RowGradients r{};
  r.shape = shape, r.unit = rows.unit;
  r.q = rows.q, r.k = rows.k, r.v = rows.v, r.beta = rows.beta;
  r.dunit_q = as_input(p.dq), r.dunit_k = as_input(p.dk), r.db = as_input(p.db), r.dw = p.du;
  r.dq = as_output<4>(c.dq), r.dk = as_output<4>(c.dk), r.dv = as_output<4>(c.dv);
  r.has_channel_beta = c.has_channel_beta != 0, r.dbeta = as_output<4>(c.dbeta);
  check_launch(delta_fp32_row_gradients(r, nullptr));
  emulated::shared_bytes = emulated::kSharedBytes;
}
