// The exact kernels of lattice on the emulator, for test_emulated_lattice_fp32.py, which fills an Fp32Call.
#include "call.h"
#include "lattice/fp32.h"

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
  LatticeFp32Inputs of{};
  LatticeFp32Shape& shape = of.shape;
  shape.tokens = {c.batch, c.tokens, c.sequences, c.cu_seqlens, true, false};
  shape.position = c.position, shape.chunk = static_cast<int>(c.chunk);
  shape.heads = static_cast<int>(c.heads), shape.query_heads = static_cast<int>(c.query_heads);
  shape.D = static_cast<int>(c.D), shape.M = static_cast<int>(c.M);
  shape.objective = static_cast<LatticeObjective>(c.objective);
  shape.normalize = c.normalize != 0, shape.shrinkage = static_cast<float>(c.shrinkage);
  of.q = in<4>(c.q), of.k = in<4>(c.k), of.v = in<4>(c.v), of.gamma = in<3>(c.gamma), of.g = in<3>(c.g);
  of.start = {in<4>(c.memory), in<4>(c.step), in<2>(c.decay)};
  bool fits = false;
  must(lattice_fp32_fits(shape, fits));
  if (!fits) emulated::fail("the card is too small");

  Rooms rooms;
  LatticeFp32Scan scan{};
  scan.of = of;
  scan.end = {out<4>(c.last), out<4>(c.last_step), out<2>(c.last_decay)};
  scan.last_position = c.last_position, scan.o = out<4>(c.o);
  must(lattice_fp32_scan(scan, nullptr));  // without backward; what is handed out is looked at after the next
  const int64_t columns = lattice_stored_columns(shape), segments = chunk_count(lattice_segment_grid(shape));
  scan.memories = static_cast<float*>(rooms.bytes(4 * segments * c.heads * c.D * columns));
  must(lattice_fp32_scan(scan, nullptr));

  int64_t floats = 0;
  must(lattice_fp32_workspace(shape, floats));
  LatticeFp32Backward p{};
  p.of = of, p.memories = scan.memories, p.dout = in<4>(c.dout);
  p.dlast = in<4>(c.dlast), p.dlast_step = in<4>(c.dlast_step), p.dlast_decay = in<2>(c.dlast_decay);
  p.dq = out<4>(c.dq), p.dk = out<4>(c.dk), p.dv = out<4>(c.dv), p.dgamma = out<3>(c.dgamma),
  p.dg = out<3>(c.dg);
  p.dmemory = out<4>(c.dmemory), p.dstep = out<4>(c.dstep), p.ddecay = out<2>(c.ddecay);
  p.workspace = static_cast<float*>(rooms.bytes(4 * floats));
  must(lattice_fp32_backward(p, nullptr));
}
