// The kernels of a call on the tensor cores, in order, and the tensors between them.
#include "trellis/kernels.h"

namespace girih::kernels {
namespace {

int64_t count_tokens_of_heads(const TrellisShape& shape) {
  return shape.grid.tokens.batch * shape.grid.tokens.tokens * shape.heads;
}
// [B, T, H, M]
OutputTensor<4> allocate_rows(const TrellisShape& shape, Workspace& workspace) {
  return workspace.tensor(shape.dtype, shape.grid.tokens.batch, shape.grid.tokens.tokens, shape.heads,
                          shape.M);
}
// A before every chunk.
void* allocate_memories(const TrellisShape& shape, Workspace& workspace) {
  const int64_t tile = trellis_tile_width(shape);
  return workspace.bytes(chunk_count(shape.grid) * shape.heads * tile * tile * dtype_size(shape.dtype));
}

cudaError_t compute_gates(const TrellisArguments& problem, Workspace& workspace, const TokenGate*& gates,
                          cudaStream_t stream) {
  TokenGate* const tokens = workspace.array<TokenGate>(count_tokens_of_heads(problem.shape));
  gates = tokens;
  return trellis_gates({problem.shape, problem.gamma, problem.g, tokens}, stream);
}

TrellisScan make_scan(const TrellisForward& problem) {
  TrellisScan scan{};
  scan.shape = problem.shape;
  scan.a = problem.a, scan.weight = problem.weight, scan.q = problem.q;
  scan.last_position = problem.last_position;
  for (int m = 0; m < problem.shape.memories; ++m) {
    scan.x[m] = problem.x[m];
    scan.chunk_start[m] = problem.chunk_start[m], scan.initial[m] = problem.initial[m];
    scan.last_chunk_start[m] = problem.last_chunk_start[m], scan.last[m] = problem.last[m];
    scan.u[m] = problem.u[m], scan.memories[m] = problem.memories[m];
    scan.z[m] = problem.z[m], scan.row_stats[m] = problem.row_stats[m];
  }
  return scan;
}

// o from u and the memories that the scan has stored.
cudaError_t compute_output(const TrellisForward& problem, const TrellisScan& scan, cudaStream_t stream) {
  TrellisOutput output{};
  output.shape = problem.shape, output.gates = scan.gates;
  output.q = problem.q, output.o = problem.o;
  for (int m = 0; m < problem.shape.memories; ++m) {
    output.x[m] = problem.x[m], output.u[m] = as_input(scan.u[m]), output.memories[m] = scan.memories[m];
  }
  return trellis_output(output, stream);
}

// r, dy and dq. `reads` become the tensors l of both memories (TrellisDq).
cudaError_t compute_dq(const TrellisBackward& problem, const TokenGate* gates, Workspace& workspace,
                       InputTensor<4> (&reads)[2], cudaStream_t stream) {
  TrellisDq dq{};
  dq.shape = problem.shape, dq.gates = gates;
  dq.q = problem.q, dq.dout = problem.dout, dq.dq = problem.dq;
  for (int m = 0; m < problem.shape.memories; ++m) {
    dq.x[m] = problem.x[m], dq.u[m] = problem.u[m], dq.memories[m] = problem.memories[m];
    dq.l[m] = allocate_rows(problem.shape, workspace);
    reads[m] = as_input(dq.l[m]);
  }
  return trellis_dq(dq, stream);
}

TrellisReverse make_reverse(const TrellisBackward& problem, const TokenGate* gates,
                            const InputTensor<4> (&reads)[2]) {
  TrellisReverse reverse{};
  reverse.shape = problem.shape, reverse.gates = gates;
  reverse.a = problem.a, reverse.weight = problem.weight, reverse.dweight = problem.dweight;
  reverse.w[kKeyMemory] = problem.q, reverse.w[kValueMemory] = problem.dout;
  for (int m = 0; m < problem.shape.memories; ++m) {
    reverse.x[m] = problem.x[m], reverse.l[m] = reads[m];
    reverse.u[m] = problem.u[m], reverse.z[m] = problem.z[m], reverse.row_stats[m] = problem.row_stats[m];
    reverse.chunk_start[m] = problem.chunk_start[m], reverse.memories[m] = problem.memories[m];
    reverse.dlast_chunk_start[m] = problem.dlast_chunk_start[m], reverse.dlast[m] = problem.dlast[m];
    reverse.dchunk_start[m] = problem.dchunk_start[m], reverse.dinitial[m] = problem.dinitial[m];
    reverse.da[m] = problem.da[m], reverse.dx[m] = problem.dx[m];
  }
  return reverse;
}

}  // namespace

cudaError_t trellis_forward(const TrellisForward& problem, Workspace& workspace, cudaStream_t stream) {
  bool scan_has_output = false;
  GIRIH_TRY(trellis_scan_has_output(problem.shape, scan_has_output));
  TrellisScan scan = make_scan(problem);
  GIRIH_TRY(compute_gates(problem, workspace, scan.gates, stream));
  if (scan_has_output) {
    scan.o = problem.o;
    return trellis_scan(scan, stream);
  }
  for (int m = 0; m < problem.shape.memories; ++m) {
    if (scan.u[m].data == nullptr) scan.u[m] = allocate_rows(problem.shape, workspace);
    if (scan.memories[m] == nullptr) scan.memories[m] = allocate_memories(problem.shape, workspace);
  }
  GIRIH_TRY(trellis_scan(scan, stream));
  return compute_output(problem, scan, stream);
}

cudaError_t trellis_backward(const TrellisBackward& problem, Workspace& workspace, cudaStream_t stream) {
  const TrellisShape& shape = problem.shape;
  const TokenGate* gates = nullptr;
  GIRIH_TRY(compute_gates(problem, workspace, gates, stream));
  InputTensor<4> reads[2];
  GIRIH_TRY(compute_dq(problem, gates, workspace, reads, stream));

  TrellisReverse reverse = make_reverse(problem, gates, reads);
  const int64_t dgammas = shape.memories * count_tokens_of_heads(shape), tiles = (shape.grid.size + 15) / 16;
  reverse.dgammas = workspace.array<float>(dgammas);
  if (problem.g.data != nullptr) reverse.dL = workspace.array<float>(dgammas * tiles);
  GIRIH_TRY(trellis_reverse(reverse, stream));
  return trellis_gate_gradients({shape, reverse.dgammas, reverse.dL, problem.dgamma, problem.dg}, stream);
}

}  // namespace girih::kernels
