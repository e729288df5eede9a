// Calls of trellis on the tensor cores of the emulator, for test_emulated_trellis.py, which fills a Call.
#include "trellis/trellis.h"

#include "call.h"

using namespace girih::kernels;

struct Call {
  int64_t architecture;  // of the device; 80 has no clusters, so that a separate kernel computes o
  int64_t dtype, batch, tokens, sequences;
  const void* cu_seqlens;
  int64_t chunk;
  const int64_t* position;
  int64_t heads, D, V, M, slots, silu, norm, f_silu, f_norm;
  int64_t memory_count;
  Array q, x[2], a, weight, gamma, g, first[2], initial[2];  // weight: fp32 [H, M]
  Array last_first[2], last[2];
  int64_t* last_position;
  void* memories[2];  // a saved tensor, and so are u, z and row_stats
  Array u[2], z[2], row_stats[2], o;
  Array dout, dq, dlast_first[2], dlast[2], dfirst[2], dinitial[2], da[2], dx[2], dweight, dgamma, dg;
};

namespace {

TrellisShape make_shape(const Call& c) {
  TrellisShape shape{};
  shape.grid = {
      {c.batch, c.tokens, c.sequences, c.cu_seqlens, true, false}, static_cast<int>(c.chunk), c.position};
  shape.heads = static_cast<int>(c.heads), shape.memories = static_cast<int>(c.memory_count);
  shape.D = static_cast<int>(c.D), shape.V = static_cast<int>(c.V);
  shape.M = static_cast<int>(c.M), shape.slots = static_cast<int>(c.slots);
  shape.dtype = static_cast<DType>(c.dtype);
  shape.phi = {c.silu != 0, static_cast<Norm>(c.norm)};
  shape.f = {c.f_silu != 0, static_cast<Norm>(c.f_norm)};
  return shape;
}

void fill(TrellisArguments& p, const Call& c) {
  p.shape = make_shape(c);
  p.q = as_input<4>(c.q), p.a = as_input<4>(c.a);
  p.gamma = as_input<3>(c.gamma), p.g = as_input<3>(c.g);
  p.weight = static_cast<const float*>(c.weight.data);
  for (int m = 0; m < c.memory_count; ++m) {
    p.x[m] = as_input<4>(c.x[m]), p.chunk_start[m] = as_input<4>(c.first[m]);
  }
}

// Sets the architecture of the device until the end of a call.
struct Device {
  explicit Device(const Call& c) { emulated::architecture = static_cast<int>(c.architecture); }
  ~Device() { emulated::architecture = 90; }
};

}  // namespace

extern "C" int64_t chunks(const Call* c) { return chunk_count(make_shape(*c).grid); }

// Without `saves` there are no saved tensors.
extern "C" void run_forward(const Call* call, bool saves) {
  const Call& c = *call;
  const Device device(c);
  bool fits = false;
  check_launch(trellis_fits(fits));
  if (!fits) emulated::fail("the kernels need more shared memory than the device has");
  TrellisForward p{};
  fill(p, c);
  p.last_position = c.last_position, p.o = as_output<4>(c.o);
  for (int m = 0; m < c.memory_count; ++m) {
    p.initial[m] = as_input<4>(c.initial[m]);
    p.last_chunk_start[m] = as_output<4>(c.last_first[m]), p.last[m] = as_output<4>(c.last[m]);
    if (!saves) continue;
    p.u[m] = as_output<4>(c.u[m]), p.z[m] = as_output<4>(c.z[m]);
    p.row_stats[m] = as_output<4>(c.row_stats[m]), p.memories[m] = c.memories[m];
  }
  Buffers workspace;
  check_launch(trellis_forward(p, workspace, nullptr));
}

extern "C" void run_backward(const Call* call) {
  const Call& c = *call;
  const Device device(c);
  TrellisBackward p{};
  fill(p, c);
  p.dout = as_input<4>(c.dout), p.dq = as_output<4>(c.dq);
  p.dgamma = as_output<3>(c.dgamma), p.dg = as_output<3>(c.dg);
  p.dweight = static_cast<float*>(c.dweight.data);
  for (int m = 0; m < c.memory_count; ++m) {
    p.u[m] = as_input<4>(c.u[m]), p.z[m] = as_input<4>(c.z[m]);
    p.row_stats[m] = as_input<4>(c.row_stats[m]), p.memories[m] = c.memories[m];
    p.dlast_chunk_start[m] = as_input<4>(c.dlast_first[m]), p.dlast[m] = as_input<4>(c.dlast[m]);
    p.dchunk_start[m] = as_output<4>(c.dfirst[m]), p.dinitial[m] = as_output<4>(c.dinitial[m]);
    p.da[m] = as_output<4>(c.da[m]), p.dx[m] = as_output<4>(c.dx[m]);
  }
  Buffers workspace;
  check_launch(trellis_backward(p, workspace, nullptr));
}
