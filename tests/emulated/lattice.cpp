// Lattice's kernels on the emulator, for test_emulated_lattice.py, which fills a Call.
#include "call.h"
#include "lattice/read.cuh"
#include "lattice/scan_short.cuh"

using namespace girih::kernels;
using Element = __nv_bfloat16;

struct Call {
  int64_t shared;  // bytes that a block may have
  int64_t card;    // its multiprocessors: what decides how many blocks have a sequence and head
  int64_t batch, tokens, sequences;
  const void* cu_seqlens;
  int64_t chunk;
  const int64_t* position;
  int64_t heads, query_heads, D, M, objective;
  Array q, k, v, gamma, g, memory, step, decay;
  Array last, last_step, last_decay;
  int64_t* last_position;
  void* memories;
  float* ends;
  Array o, dout, dq, dk, dv, dgamma, ddecay_at_floor;
  void* gradients;
  Array dstep, ddecay, dlast, dlast_step, dlast_decay, dmemory, dend_decay, dg;
};

// lattice_backward.cpp
bool is_short_in_reverse(const LatticeShape& shape);

namespace {

LatticeShape shape_of(const Call& c) {
  LatticeShape shape{};
  shape.grid = {
      {c.batch, c.tokens, c.sequences, c.cu_seqlens, true, false}, static_cast<int>(c.chunk), c.position};
  shape.heads = static_cast<int>(c.heads), shape.query_heads = static_cast<int>(c.query_heads);
  shape.D = static_cast<int>(c.D), shape.M = static_cast<int>(c.M);
  shape.dtype = DType::bf16;
  shape.objective = static_cast<LatticeObjective>(c.objective);
  return shape;
}

template <class Problem>
Problem of(const Call& c) {
  Problem problem{};
  problem.shape = shape_of(c);
  problem.k = in<4>(c.k), problem.v = in<4>(c.v), problem.gamma = in<3>(c.gamma), problem.g = in<3>(c.g);
  return problem;
}

}  // namespace

extern "C" int64_t chunks(const Call* c) { return chunk_count(shape_of(*c).grid); }
extern "C" void run(const Call* call) {
  const Call& c = *call;
  emulated::shared_bytes = static_cast<int>(c.shared);
  emulated::processors = static_cast<int>(c.card);
  const LatticeStart start{in<4>(c.memory), in<4>(c.step), in<2>(c.decay)};

  auto scan = of<LatticeScan>(c);
  scan.start = start;
  scan.end = {out<4>(c.last), out<4>(c.last_step), out<2>(c.last_decay)};
  scan.last_position = c.last_position, scan.memories = c.memories, scan.ends = c.ends;
  auto read = of<LatticeRead>(c);
  read.q = in<4>(c.q), read.start = start, read.memories = c.memories, read.o = out<4>(c.o);
  must(lattice::launch_forward<Element>(scan, read, nullptr));
  bool is_short = false;
  must(lattice::uses_short_scan(scan.shape, is_short));
  const bool takes_short = c.shared == emulated::kSharedBytes && c.chunk <= 16 && c.D <= 64 && c.M <= 64;
  if (is_short != takes_short || is_short_in_reverse(scan.shape) != takes_short)
    emulated::fail("the kernels of short chunks take another call, or not this one");
  if (is_short) {
    // Once more, as without backward: what is handed out is looked at after this.
    auto alone = scan;
    alone.memories = nullptr, alone.ends = nullptr;
    must(lattice::launch_forward<Element>(alone, read, nullptr));
  }

  auto reads = of<LatticeReadBackward>(c);
  reads.q = in<4>(c.q), reads.start = start, reads.memories = c.memories, reads.dout = in<4>(c.dout);
  reads.dq = out<4>(c.dq), reads.dk = out<4>(c.dk), reads.dv = out<4>(c.dv);
  reads.dgamma = out<3>(c.dgamma), reads.ddecay_at_floor = out<3>(c.ddecay_at_floor),
  reads.gradients = c.gradients;
  reads.dstep = out<4>(c.dstep), reads.ddecay = out<2>(c.ddecay);
  must(lattice::launch_read_backward<Element>(reads, nullptr));

  auto reverse = of<LatticeReverse>(c);
  reverse.start = start, reverse.memories = c.memories, reverse.ends = c.ends;
  reverse.last = in<4>(c.last), reverse.last_step = in<4>(c.last_step);
  reverse.dlast = in<4>(c.dlast), reverse.dlast_step = in<4>(c.dlast_step);
  reverse.dlast_decay = in<2>(c.dlast_decay), reverse.gradients = c.gradients;
  reverse.dmemory = out<4>(c.dmemory), reverse.dstep = out<4>(c.dstep);
  reverse.ddecay = out<2>(c.ddecay), reverse.dend_decay = out<2>(c.dend_decay);

  auto columns = of<LatticeDkv>(c);
  columns.memories = c.memories, columns.gradients = c.gradients, columns.ends = c.ends;
  columns.ddecay_at_floor = in<3>(c.ddecay_at_floor), columns.dend_decay = in<2>(c.dend_decay);
  columns.dk = out<4>(c.dk), columns.dv = out<4>(c.dv);
  columns.dgamma = out<3>(c.dgamma), columns.dg = out<3>(c.dg);
  must(lattice::launch_reverse<Element>(reverse, columns, nullptr));
  emulated::shared_bytes = emulated::kSharedBytes;
}
