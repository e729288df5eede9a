// Lattice's kernels on the emulator, for test_emulated_lattice.py, which fills a Call.
#include "call.h"
#include "lattice/read.cuh"
#include "lattice/scan_short.cuh"

using namespace girih::kernels;
using Element = __nv_bfloat16;

struct Call {
  int64_t shared;      // maximum shared memory of a block, in bytes
  int64_t processors;  // multiprocessors; determines the number of blocks per sequence and head
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

// Defined in lattice_backward.cpp.
bool uses_short_reverse(const LatticeShape& shape);

namespace {

LatticeShape make_shape(const Call& c) {
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
Problem make_problem(const Call& c) {
  Problem problem{};
  problem.shape = make_shape(c);
  problem.k = as_input<4>(c.k), problem.v = as_input<4>(c.v), problem.gamma = as_input<3>(c.gamma),
  problem.g = as_input<3>(c.g);
  return problem;
}

}  // namespace

extern "C" int64_t chunks(const Call* c) { return chunk_count(make_shape(*c).grid); }
extern "C" void run(const Call* call) {
  const Call& c = *call;
  emulated::shared_bytes = static_cast<int>(c.shared);
  emulated::processors = static_cast<int>(c.processors);
  const LatticeStart start{as_input<4>(c.memory), as_input<4>(c.step), as_input<2>(c.decay)};

  auto scan = make_problem<LatticeScan>(c);
  scan.start = start;
  scan.end = {as_output<4>(c.last), as_output<4>(c.last_step), as_output<2>(c.last_decay)};
  scan.last_position = c.last_position, scan.memories = c.memories, scan.ends = c.ends;
  auto read = make_problem<LatticeRead>(c);
  read.q = as_input<4>(c.q), read.start = start, read.memories = c.memories, read.o = as_output<4>(c.o);
  check_launch(lattice::launch_forward<Element>(scan, read, nullptr));
  bool is_short = false;
  check_launch(lattice::uses_short_scan(scan.shape, is_short));
  const bool expects_short = c.shared == emulated::kSharedBytes && c.chunk <= 16 && c.D <= 64 && c.M <= 64;
  if (is_short != expects_short || uses_short_reverse(scan.shape) != expects_short)
    emulated::fail("the choice of the kernels of short chunks is not the expected one");
  if (is_short) {
    // The scan of a call without backward. The test checks its results.
    auto inference_scan = scan;
    inference_scan.memories = nullptr, inference_scan.ends = nullptr;
    check_launch(lattice::launch_forward<Element>(inference_scan, read, nullptr));
  }

  auto read_backward = make_problem<LatticeReadBackward>(c);
  read_backward.q = as_input<4>(c.q), read_backward.start = start, read_backward.memories = c.memories,
  read_backward.dout = as_input<4>(c.dout);
  read_backward.dq = as_output<4>(c.dq), read_backward.dk = as_output<4>(c.dk),
  read_backward.dv = as_output<4>(c.dv);
  read_backward.dgamma = as_output<3>(c.dgamma),
  read_backward.ddecay_at_floor = as_output<3>(c.ddecay_at_floor), read_backward.gradients = c.gradients;
  read_backward.dstep = as_output<4>(c.dstep), read_backward.ddecay = as_output<2>(c.ddecay);
  check_launch(lattice::launch_read_backward<Element>(read_backward, nullptr));

  auto reverse = make_problem<LatticeReverse>(c);
  reverse.start = start, reverse.memories = c.memories, reverse.ends = c.ends;
  reverse.last = as_input<4>(c.last), reverse.last_step = as_input<4>(c.last_step);
  reverse.dlast = as_input<4>(c.dlast), reverse.dlast_step = as_input<4>(c.dlast_step);
  reverse.dlast_decay = as_input<2>(c.dlast_decay), reverse.gradients = c.gradients;
  reverse.dmemory = as_output<4>(c.dmemory), reverse.dstep = as_output<4>(c.dstep);
  reverse.ddecay = as_output<2>(c.ddecay), reverse.dend_decay = as_output<2>(c.dend_decay);

  auto dkv = make_problem<LatticeDkv>(c);
  dkv.memories = c.memories, dkv.gradients = c.gradients, dkv.ends = c.ends;
  dkv.ddecay_at_floor = as_input<3>(c.ddecay_at_floor), dkv.dend_decay = as_input<2>(c.dend_decay);
  dkv.dk = as_output<4>(c.dk), dkv.dv = as_output<4>(c.dv);
  dkv.dgamma = as_output<3>(c.dgamma), dkv.dg = as_output<3>(c.dg);
  check_launch(lattice::launch_reverse<Element>(reverse, dkv, nullptr));
  emulated::shared_bytes = emulated::kSharedBytes;
}
