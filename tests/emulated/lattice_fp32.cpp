// The fp32 kernels of lattice on the emulator, for test_emulated_lattice_fp32.py, which fills an Fp32Call.
#include "call.h"
#include "lattice/lattice.h"

using namespace girih::kernels;

struct Fp32Call {
  int64_t batch, tokens, sequences;
  const void* cu_seqlens;
  const int64_t* position;
  int64_t chunk, heads, query_heads, D, M, objective, normalize;
  double shrinkage;
  Array q, k, v, gamma, g, memory, step, decay;
  Array last, last_step, last_decay, o, dout, dlast, dlast_step, dlast_decay;
  Array dq, dk, dv, dgamma, dg, dmemory, dstep, ddecay;
  int64_t* last_position;
};

extern "C" void run_fp32(const Fp32Call* call) {
  const Fp32Call& c = *call;
  LatticeFp32Inputs inputs{};
  LatticeFp32Shape& shape = inputs.shape;
  shape.tokens = {c.batch, c.tokens, c.sequences, c.cu_seqlens, true, false};
  shape.position = c.position, shape.chunk = static_cast<int>(c.chunk);
  shape.heads = static_cast<int>(c.heads), shape.query_heads = static_cast<int>(c.query_heads);
  shape.D = static_cast<int>(c.D), shape.M = static_cast<int>(c.M);
  shape.objective = static_cast<LatticeObjective>(c.objective);
  shape.normalize = c.normalize != 0, shape.shrinkage = static_cast<float>(c.shrinkage);
  inputs.q = as_input<4>(c.q), inputs.k = as_input<4>(c.k), inputs.v = as_input<4>(c.v);
  inputs.gamma = as_input<3>(c.gamma), inputs.g = as_input<3>(c.g);
  inputs.start = {as_input<4>(c.memory), as_input<4>(c.step), as_input<2>(c.decay)};
  bool fits = false;
  check_launch(lattice_fp32_fits(shape, fits));
  if (!fits) emulated::fail("the kernels need more shared memory than the device has");

  Buffers buffers;
  LatticeFp32Forward forward{};
  forward.inputs = inputs;
  forward.end = {as_output<4>(c.last), as_output<4>(c.last_step), as_output<2>(c.last_decay)};
  forward.last_position = c.last_position, forward.o = as_output<4>(c.o);
  // First a call without backward. The second call overwrites its results.
  check_launch(lattice_fp32_forward(forward, nullptr));
  const int64_t columns = lattice_stored_columns(shape), segments = chunk_count(lattice_segment_grid(shape));
  forward.memories = buffers.array<float>(segments * c.heads * c.D * columns);
  check_launch(lattice_fp32_forward(forward, nullptr));

  LatticeFp32Backward p{};
  p.inputs = inputs, p.memories = forward.memories, p.dout = as_input<4>(c.dout);
  p.dlast = as_input<4>(c.dlast), p.dlast_step = as_input<4>(c.dlast_step),
  p.dlast_decay = as_input<2>(c.dlast_decay);
  p.dq = as_output<4>(c.dq), p.dk = as_output<4>(c.dk), p.dv = as_output<4>(c.dv),
  p.dgamma = as_output<3>(c.dgamma), p.dg = as_output<3>(c.dg);
  p.dmemory = as_output<4>(c.dmemory), p.dstep = as_output<4>(c.dstep), p.ddecay = as_output<2>(c.ddecay);
  check_launch(lattice_fp32_backward(p, buffers, nullptr));
}
