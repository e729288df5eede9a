// The launches of a call, and the tensors between them.
#include "lattice/kernels.h"
#include "tile/instance.h"

namespace girih::kernels {
namespace {

template <class Arguments>
Arguments fill_arguments(const LatticeInputs& inputs) {
  Arguments p{};
  p.shape = inputs.shape;
  p.k = inputs.k, p.v = inputs.v, p.gamma = inputs.gamma, p.g = inputs.g;
  return p;
}

// The tensors between the launches of backward (kernels.h).
struct BackwardTensors {
  void* gradients;
  OutputTensor<3> ddecay_at_floor;
  float* cancelling_sums = nullptr;
  OutputTensor<2> dend_decay;
};

BackwardTensors allocate_backward(const LatticeInputs& inputs, bool is_short, Workspace& workspace) {
  const LatticeShape& shape = inputs.shape;
  const SequenceLayout& tokens = shape.grid.tokens;
  const int64_t vectors = chunk_count(shape.grid) * shape.heads * shape.M;
  BackwardTensors between{};
  between.gradients = workspace.bytes(vectors * shape.D * dtype_size(shape.dtype));
  if (inputs.g.data == nullptr) return between;
  between.ddecay_at_floor = workspace.tensor(DType::f32, tokens.batch, tokens.tokens, shape.heads);
  if (is_short) return between;
  between.cancelling_sums = workspace.array<float>(2 * vectors);
  between.dend_decay = workspace.tensor(DType::f32, tokens.sequences, shape.heads);
  return between;
}

LatticeReadBackward read_backward_of(const LatticeBackward& call, const BackwardTensors& between) {
  auto p = fill_arguments<LatticeReadBackward>(call.inputs);
  p.q = call.inputs.q, p.start = call.inputs.start, p.memories = call.memories;
  p.dout = call.dout, p.dq = call.dq, p.dk = call.dk, p.dv = call.dv, p.dgamma = call.dgamma;
  p.ddecay_at_floor = between.ddecay_at_floor, p.gradients = between.gradients;
  p.dstep = call.dstep, p.ddecay = call.ddecay;
  return p;
}

LatticeReverse reverse_of(const LatticeBackward& call, const BackwardTensors& between) {
  auto p = fill_arguments<LatticeReverse>(call.inputs);
  p.start = call.inputs.start, p.memories = call.memories, p.ends = call.ends;
  p.last = call.last, p.last_step = call.last_step;
  p.dlast = call.dlast, p.dlast_step = call.dlast_step, p.dlast_decay = call.dlast_decay;
  p.gradients = between.gradients;
  p.dmemory = call.dmemory, p.dstep = call.dstep, p.ddecay = call.ddecay;
  p.cancelling_sums = between.cancelling_sums, p.dend_decay = between.dend_decay;
  return p;
}

LatticeDkv dkv_of(const LatticeBackward& call, const BackwardTensors& between) {
  auto p = fill_arguments<LatticeDkv>(call.inputs);
  p.memories = call.memories, p.gradients = between.gradients;
  p.ddecay_at_floor = as_input(between.ddecay_at_floor);
  p.cancelling_sums = between.cancelling_sums, p.dend_decay = as_input(between.dend_decay);
  p.dk = call.dk, p.dv = call.dv, p.dgamma = call.dgamma, p.dg = call.dg;
  return p;
}

}  // namespace

cudaError_t lattice_forward(const LatticeForward& call, Workspace& workspace, cudaStream_t stream) {
  const LatticeShape& shape = call.inputs.shape;
  bool is_short = false;
  GIRIH_TRY(lattice::uses_short_scan(shape, is_short));
  auto scan = fill_arguments<LatticeScan>(call.inputs);
  scan.start = call.inputs.start, scan.end = call.end, scan.last_position = call.last_position;
  scan.memories = call.memories, scan.ends = call.ends;
  if (!is_short && call.memories == nullptr) {  // the read needs the memories
    const int64_t vectors = chunk_count(shape.grid) * shape.heads * shape.M;
    scan.memories = workspace.bytes(vectors * shape.D * dtype_size(shape.dtype));
    scan.ends = workspace.array<float>(2 * vectors);
  }
  auto read = fill_arguments<LatticeRead>(call.inputs);
  read.q = call.inputs.q, read.start = call.inputs.start, read.memories = scan.memories, read.o = call.o;
  return dispatch_16bit(shape.dtype, [&](auto element) {
    using T = decltype(element);
    if (is_short) return lattice::launch_short_scan<T>(scan, read, stream);
    GIRIH_TRY(lattice::launch_scan<T>(scan, stream));
    return lattice::launch_read<T>(read, stream);
  });
}

cudaError_t lattice_backward(const LatticeBackward& call, Workspace& workspace, cudaStream_t stream) {
  const LatticeShape& shape = call.inputs.shape;
  bool is_short = false;
  GIRIH_TRY(lattice::uses_short_reverse(shape, is_short));
  const BackwardTensors between = allocate_backward(call.inputs, is_short, workspace);
  return dispatch_16bit(shape.dtype, [&](auto element) {
    using T = decltype(element);
    GIRIH_TRY(lattice::launch_read_backward<T>(read_backward_of(call, between), stream));
    const LatticeReverse reverse = reverse_of(call, between);
    const LatticeDkv dkv = dkv_of(call, between);
    if (is_short) return lattice::launch_short_reverse<T>(reverse, dkv, stream);
    GIRIH_TRY(lattice::launch_reverse<T>(reverse, stream));
    return lattice::launch_dkv<T>(dkv, stream);
  });
}

}  // namespace girih::kernels
