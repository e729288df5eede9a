// The kernels of trellis on the emulator, for test_emulated_trellis.py, which fills a Call.
#include "call.h"
#include "trellis/dq.cuh"
#include "trellis/gates.cu"
#include "trellis/output.cuh"
#include "trellis/weighted_reverse.cuh"
#include "trellis/weighted_scan.cuh"

using namespace girih::kernels;
using Element = __nv_bfloat16;

struct Call {
  int64_t batch, tokens, sequences;
  const void* cu_seqlens;
  int64_t chunk;
  const int64_t* position;
  int64_t heads, D, V, M, slots, silu, norm, f_silu, f_norm;
  int64_t memory_count;
  int64_t has_output_kernel;                                 // a separate kernel computes o
  Array q, x[2], a, weight, gamma, g, first[2], initial[2];  // weight: fp32 [H, M]
  Array last_first[2], last[2];
  int64_t* last_position;
  void* memories[2];
  Array u[2], z[2], row_stats[2], o;
  Array dout, dq, l[2], dlast_first[2], dlast[2], dfirst[2], dinitial[2], da[2], dx[2], dweight, dgamma, dg;
  TokenGate* gates;
  float *dgammas, *dL;
};

namespace {

TrellisShape make_shape(const Call& c) {
  TrellisShape shape{};
  shape.grid = {
      {c.batch, c.tokens, c.sequences, c.cu_seqlens, true, false}, static_cast<int>(c.chunk), c.position};
  shape.heads = static_cast<int>(c.heads), shape.memories = static_cast<int>(c.memory_count);
  shape.D = static_cast<int>(c.D), shape.V = static_cast<int>(c.V);
  shape.M = static_cast<int>(c.M), shape.slots = static_cast<int>(c.slots);
  shape.dtype = DType::bf16;
  shape.phi = {c.silu != 0, static_cast<Norm>(c.norm)};
  shape.f = {c.f_silu != 0, static_cast<Norm>(c.f_norm)};
  return shape;
}

template <int Tile>
void forward(const Call& c) {
  TrellisScan scan{};
  TrellisOutput output{};
  scan.shape = output.shape = make_shape(c);
  TrellisGates gates{scan.shape, as_input<3>(c.gamma), as_input<3>(c.g), c.gates};
  check_launch(trellis_gates(gates, nullptr));
  scan.gates = output.gates = c.gates;
  scan.a = as_input<4>(c.a), scan.last_position = c.last_position;
  output.q = scan.q = as_input<4>(c.q), output.o = as_output<4>(c.o);
  if (!c.has_output_kernel) scan.o = output.o;
  for (int m = 0; m < c.memory_count; ++m) {
    scan.x[m] = output.x[m] = as_input<4>(c.x[m]);
    scan.chunk_start[m] = as_input<4>(c.first[m]), scan.initial[m] = as_input<4>(c.initial[m]);
    scan.last_chunk_start[m] = as_output<4>(c.last_first[m]), scan.last[m] = as_output<4>(c.last[m]);
    scan.memories[m] = c.memories[m], output.memories[m] = c.memories[m];
    scan.u[m] = as_output<4>(c.u[m]), scan.z[m] = as_output<4>(c.z[m]),
    scan.row_stats[m] = as_output<4>(c.row_stats[m]);
    output.u[m] = as_input<4>(c.u[m]);
  }
  scan.weight = static_cast<const float*>(c.weight.data);
  check_launch(scan.weight == nullptr ? launch_trellis_scan<Element, Tile>(scan, nullptr)
                                      : launch_weighted_scan<Element, Tile>(scan, nullptr));
  if (c.has_output_kernel) check_launch(launch_trellis_output<Element, Tile>(output, nullptr));
}

template <int Tile>
void backward(const Call& c) {
  TrellisDq dq{};
  TrellisReverse reverse{};
  dq.shape = reverse.shape = make_shape(c);
  dq.gates = reverse.gates = c.gates;
  dq.q = as_input<4>(c.q), dq.dout = as_input<4>(c.dout), dq.dq = as_output<4>(c.dq);
  reverse.a = as_input<4>(c.a), reverse.dgammas = c.dgammas,
  reverse.dL = c.g.data == nullptr ? nullptr : c.dL;
  for (int m = 0; m < c.memory_count; ++m) {
    dq.x[m] = reverse.x[m] = as_input<4>(c.x[m]);
    dq.u[m] = reverse.u[m] = as_input<4>(c.u[m]);
    dq.memories[m] = reverse.memories[m] = c.memories[m];
    dq.l[m] = as_output<4>(c.l[m]);
    reverse.w[m] = as_input<4>(m == 0 ? c.q : c.dout);
    reverse.l[m] = as_input<4>(c.l[m]);
    reverse.z[m] = as_input<4>(c.z[m]), reverse.row_stats[m] = as_input<4>(c.row_stats[m]),
    reverse.chunk_start[m] = as_input<4>(c.first[m]);
    reverse.dlast_chunk_start[m] = as_input<4>(c.dlast_first[m]), reverse.dlast[m] = as_input<4>(c.dlast[m]);
    reverse.dchunk_start[m] = as_output<4>(c.dfirst[m]), reverse.dinitial[m] = as_output<4>(c.dinitial[m]);
    reverse.da[m] = as_output<4>(c.da[m]), reverse.dx[m] = as_output<4>(c.dx[m]);
  }
  check_launch(launch_trellis_dq<Element, Tile>(dq, nullptr));
  reverse.weight = static_cast<const float*>(c.weight.data);
  reverse.dweight = static_cast<float*>(c.dweight.data);
  check_launch(reverse.weight == nullptr ? launch_trellis_reverse<Element, Tile>(reverse, nullptr)
                                         : launch_weighted_reverse<Element, Tile>(reverse, nullptr));
  TrellisGateGradients gate_gradients{dq.shape, c.dgammas, c.dL, as_output<3>(c.dgamma), as_output<3>(c.dg)};
  check_launch(trellis_gate_gradients(gate_gradients, nullptr));
}

}  // namespace

extern "C" int64_t chunks(const Call* c) { return chunk_count(make_shape(*c).grid); }
extern "C" void run(const Call* c) {
  if (std::max({c->D, c->V, c->M}) <= 64) {
    forward<64>(*c), backward<64>(*c);
  } else {
    forward<128>(*c), backward<128>(*c);
  }
}
