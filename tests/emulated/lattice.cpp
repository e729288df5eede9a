// Lattice's kernels on the emulator, for test_emulated_lattice.py, which fills a Call.
#include "call.h"
#include "lattice/kernels.h"

using namespace girih::kernels;

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
  Array o, dout, dq, dk, dv, dgamma;
  Array dstep, ddecay, dlast, dlast_step, dlast_decay, dmemory, dg;
};

// The plan refers to the kernels of both 16-bit types. The tests compile those of bf16 only, because
// compiling takes longer than running.
namespace girih::kernels::lattice {
template <>
cudaError_t launch_scan<__half>(const LatticeScan&, cudaStream_t) {
  emulated::fail("fp16 is not compiled");
}
template <>
cudaError_t launch_read<__half>(const LatticeRead&, cudaStream_t) {
  emulated::fail("fp16 is not compiled");
}
template <>
cudaError_t launch_short_scan<__half>(const LatticeScan&, const LatticeRead&, cudaStream_t) {
  emulated::fail("fp16 is not compiled");
}
template <>
cudaError_t launch_read_backward<__half>(const LatticeReadBackward&, cudaStream_t) {
  emulated::fail("fp16 is not compiled");
}
template <>
cudaError_t launch_reverse<__half>(const LatticeReverse&, cudaStream_t) {
  emulated::fail("fp16 is not compiled");
}
template <>
cudaError_t launch_dkv<__half>(const LatticeDkv&, cudaStream_t) {
  emulated::fail("fp16 is not compiled");
}
template <>
cudaError_t launch_short_reverse<__half>(const LatticeReverse&, const LatticeDkv&, cudaStream_t) {
  emulated::fail("fp16 is not compiled");
}
}  // namespace girih::kernels::lattice

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

LatticeInputs make_inputs(const Call& c) {
  LatticeInputs inputs{};
  inputs.shape = make_shape(c);
  inputs.q = as_input<4>(c.q), inputs.k = as_input<4>(c.k), inputs.v = as_input<4>(c.v);
  inputs.gamma = as_input<3>(c.gamma), inputs.g = as_input<3>(c.g);
  inputs.start = {as_input<4>(c.memory), as_input<4>(c.step), as_input<2>(c.decay)};
  return inputs;
}

LatticeForward make_forward(const Call& c) {
  LatticeForward forward{};
  forward.inputs = make_inputs(c);
  forward.end = {as_output<4>(c.last), as_output<4>(c.last_step), as_output<2>(c.last_decay)};
  forward.last_position = c.last_position, forward.o = as_output<4>(c.o);
  return forward;
}

LatticeBackward make_backward(const Call& c) {
  LatticeBackward backward{};
  backward.inputs = make_inputs(c);
  backward.memories = c.memories, backward.ends = c.ends;
  backward.last = as_input<4>(c.last), backward.last_step = as_input<4>(c.last_step);
  backward.dout = as_input<4>(c.dout), backward.dlast = as_input<4>(c.dlast);
  backward.dlast_step = as_input<4>(c.dlast_step), backward.dlast_decay = as_input<2>(c.dlast_decay);
  backward.dq = as_output<4>(c.dq), backward.dk = as_output<4>(c.dk), backward.dv = as_output<4>(c.dv);
  backward.dgamma = as_output<3>(c.dgamma), backward.dg = as_output<3>(c.dg);
  backward.dmemory = as_output<4>(c.dmemory), backward.dstep = as_output<4>(c.dstep);
  backward.ddecay = as_output<2>(c.ddecay);
  return backward;
}

// The results do not show which kernels ran.
void check_choice(const Call& c) {
  const LatticeShape shape = make_shape(c);
  bool fits = false, is_short_scan = false, is_short_reverse = false;
  check_launch(lattice_fits(shape, fits));
  check_launch(lattice::uses_short_scan(shape, is_short_scan));
  check_launch(lattice::uses_short_reverse(shape, is_short_reverse));
  const bool expects_short = c.shared == emulated::kSharedBytes && c.chunk <= 16 && c.D <= 64 && c.M <= 64;
  if (!fits) emulated::fail("the kernels need more shared memory than the device has");
  if (is_short_scan != expects_short || is_short_reverse != expects_short)
    emulated::fail("the choice of the kernels of short chunks is not the expected one");
}

}  // namespace

extern "C" int64_t chunks(const Call* c) { return chunk_count(make_shape(*c).grid); }
extern "C" void run(const Call* call) {
  const Call& c = *call;
  emulated::shared_bytes = static_cast<int>(c.shared);
  emulated::processors = static_cast<int>(c.processors);
  check_choice(c);
  Buffers buffers;
  auto forward = make_forward(c);
  // First a call without backward. The second call overwrites its results.
  check_launch(lattice_forward(forward, buffers, nullptr));
  forward.memories = c.memories, forward.ends = c.ends;
  check_launch(lattice_forward(forward, buffers, nullptr));
  check_launch(lattice_backward(make_backward(c), buffers, nullptr));
  emulated::shared_bytes = emulated::kSharedBytes;
}
