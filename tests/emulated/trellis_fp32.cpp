// Calls of trellis in fp32 on the emulator, for test_emulated_trellis_fp32.py, which fills an Fp32Call.
#include "call.h"
#include "trellis/trellis.h"

using namespace girih::kernels;

struct Fp32Call {
  int64_t batch, tokens, sequences;
  const void* cu_seqlens;
  const int64_t* position;
  int64_t memory_count, chunk, heads, query_heads, D, V, M, silu, norm, f_silu, f_norm;
  Array q, x[2], a, weight, gamma, g, first[2], initial[2];  // weight: fp32, M padded
  Array o, last_first[2], last[2], dout, dlast_first[2], dlast[2];
  // dx and da have padded rows. dgamma and dg are [memory_count, B, T, H]. With one memory, o and dout have
  // padded rows of width M.
  Array dq, dx[2], da[2], dweight, dgamma, dg, dfirst[2], dinitial[2];
  int64_t* last_position;
};

namespace {

TrellisFp32Shape make_shape(const Fp32Call& c) {
  TrellisFp32Shape shape{};
  shape.grid = {
      {c.batch, c.tokens, c.sequences, c.cu_seqlens, true, false}, static_cast<int>(c.chunk), c.position};
  shape.heads = static_cast<int>(c.heads), shape.query_heads = static_cast<int>(c.query_heads);
  shape.memories = static_cast<int>(c.memory_count);
  shape.D = static_cast<int>(c.D), shape.V = static_cast<int>(c.V), shape.M = static_cast<int>(c.M);
  shape.phi = {c.silu != 0, static_cast<Norm>(c.norm)};
  shape.f = {c.f_silu != 0, static_cast<Norm>(c.f_norm)};
  return shape;
}

// The tensors of a call that csrc computes: g of every slot, the saved tensors, and with one memory the
// gradient of the output, which the kernels replace.
struct CallTensors {
  Buffers buffers;
  InputTensor<4> slot_gates;
  float *z[2] = {}, *s[2] = {}, *states[2] = {}, *dr = nullptr;

  explicit CallTensors(const Fp32Call& c) {
    const TrellisFp32Shape shape = make_shape(c);
    const int64_t M = trellis_fp32_padded_width(shape.M), tokens = c.batch * c.tokens,
                  rows = tokens * c.heads;
    for (int m = 0; m < c.memory_count; ++m) {
      z[m] = buffers.array<float>(rows * M), s[m] = buffers.array<float>(rows * M);
      states[m] = buffers.array<float>(token_range_count(shape.grid.tokens, kChunk) * c.heads *
                                       trellis_fp32_padded_width(shape.width(m)) * M);
    }
    auto* const gates = buffers.array<float>(rows * M);
    const auto* const g = static_cast<const float*>(c.g.data);
    for (int64_t i = 0; i < rows * M; ++i) gates[i] = g == nullptr ? 0.f : g[i / M];
    slot_gates = {gates, DType::f32, {c.tokens * c.heads * M, c.heads * M, M, 1}};
    if (c.memory_count == 2) return;
    const int64_t output_size = tokens * c.query_heads * M;
    const auto* const dout = static_cast<const float*>(c.dout.data);
    dr = buffers.array<float>(output_size);
    std::copy(dout, dout + output_size, dr);
  }
};

void fill(TrellisFp32Arguments& p, const Fp32Call& c, const CallTensors& tensors) {
  p.shape = make_shape(c);
  p.q = as_input<4>(c.q), p.a = as_input<4>(c.a);
  p.gamma = as_input<3>(c.gamma), p.g = as_input<3>(c.g), p.slot_gates = tensors.slot_gates;
  p.weight = static_cast<const float*>(c.weight.data);
  for (int m = 0; m < c.memory_count; ++m) {
    p.x[m] = as_input<4>(c.x[m]), p.chunk_start[m] = as_input<4>(c.first[m]);
  }
}

void run_forward(const Fp32Call& c, const CallTensors& tensors, bool saves) {
  TrellisFp32Forward p{};
  fill(p, c, tensors);
  p.last_position = c.last_position, p.o = as_output<4>(c.o);
  for (int m = 0; m < c.memory_count; ++m) {
    p.initial[m] = as_input<4>(c.initial[m]);
    p.last_chunk_start[m] = as_output<4>(c.last_first[m]), p.last[m] = as_output<4>(c.last[m]);
    if (saves) p.z[m] = tensors.z[m], p.s[m] = tensors.s[m], p.states[m] = tensors.states[m];
  }
  Buffers workspace;
  check_launch(trellis_fp32_forward(p, workspace, nullptr));
}

void run_backward(const Fp32Call& c, const CallTensors& tensors) {
  TrellisFp32Backward p{};
  fill(p, c, tensors);
  if (c.memory_count == 2) p.dout = as_input<4>(c.dout);
  p.dr = tensors.dr;
  p.dq = as_output<4>(c.dq), p.dweight = static_cast<float*>(c.dweight.data);
  p.dgamma = static_cast<float*>(c.dgamma.data), p.dg = static_cast<float*>(c.dg.data);
  for (int m = 0; m < c.memory_count; ++m) {
    p.z[m] = tensors.z[m], p.s[m] = tensors.s[m], p.states[m] = tensors.states[m];
    p.dlast_chunk_start[m] = as_input<4>(c.dlast_first[m]), p.dlast[m] = as_input<4>(c.dlast[m]);
    p.dchunk_start[m] = as_output<4>(c.dfirst[m]), p.dinitial[m] = as_output<4>(c.dinitial[m]);
    p.dx[m] = static_cast<float*>(c.dx[m].data), p.da[m] = static_cast<float*>(c.da[m].data);
  }
  Buffers workspace;
  check_launch(trellis_fp32_backward(p, workspace, nullptr));
}

}  // namespace

// A forward call without backward. run_fp32() overwrites its results.
extern "C" void run_fp32_forward(const Fp32Call* c) { run_forward(*c, CallTensors(*c), false); }

extern "C" void run_fp32(const Fp32Call* c) {
  bool fits = false;
  check_launch(trellis_fp32_fits(make_shape(*c), fits));
  if (!fits) emulated::fail("the kernels need more shared memory than the device has");
  const CallTensors tensors(*c);
  run_forward(*c, tensors, true);
  run_backward(*c, tensors);
}
