// The fp32 kernels of delta_product on the emulator, for test_emulated_delta_product_fp32.py, which fills
// an Fp32Call.
#include "call.h"
#include "delta_product/delta_product.h"

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

// The fields that forward and backward have in common.
template <class Problem>
Problem make_problem(const Fp32Call& c) {
  Problem p{};
  p.shape = make_shape(c);
  p.unit = c.unit != 0;
  p.q = as_input<4>(c.q), p.k = as_input<4>(c.k), p.v = as_input<4>(c.v), p.beta = as_input<4>(c.beta);
  p.g = as_input<3>(c.g);
  return p;
}

void run_forward(const DeltaFp32Forward& problem) {
  Buffers buffers;
  check_launch(delta_fp32_forward(problem, buffers, nullptr));
}

}  // namespace

extern "C" void run_fp32(const Fp32Call* call) {
  const Fp32Call& c = *call;
  emulated::shared_bytes = static_cast<int>(c.shared);
  Buffers saved;
  DeltaFp32Forward forward = make_problem<DeltaFp32Forward>(c);
  forward.initial = as_input<4>(c.initial);
  forward.final = as_output<4>(c.last), forward.o = as_output<4>(c.o), forward.position = c.last_position;
  // First a call without backward. The second call overwrites its results.
  run_forward(forward);
  forward.states =
      saved.array<float>(segment_count(forward.shape.segments) * c.heads * c.V * round_up_to_4(c.D));
  forward.u = saved.tensor(DType::f32, c.batch, c.tokens * c.n, c.heads, round_up_to_4(c.V));
  run_forward(forward);

  DeltaFp32Backward backward = make_problem<DeltaFp32Backward>(c);
  backward.has_channel_beta = c.has_channel_beta != 0;
  backward.dout = as_input<4>(c.dout), backward.dfinal = as_input<4>(c.dlast);
  backward.states = forward.states, backward.u = as_input(forward.u);
  backward.dinitial = as_output<4>(c.dinitial);
  backward.dq = as_output<4>(c.dq), backward.dk = as_output<4>(c.dk), backward.dv = as_output<4>(c.dv);
  backward.dbeta = as_output<4>(c.dbeta), backward.dg = c.dg;
  Buffers buffers;
  check_launch(delta_fp32_backward(backward, buffers, nullptr));
  emulated::shared_bytes = emulated::kSharedBytes;
}
