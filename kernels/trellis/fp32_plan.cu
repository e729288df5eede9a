// The kernels of a call in fp32, in order, and the tensors between them.
#include "fp32/fp32.h"
#include "trellis/fp32_kernels.h"

namespace girih::kernels {
namespace {

int64_t count_tokens(const TrellisFp32Shape& shape) {
  return shape.grid.tokens.batch * shape.grid.tokens.tokens;
}
// [B, T, heads, M] padded
float* allocate_rows(const TrellisFp32Shape& shape, int heads, Workspace& workspace) {
  return workspace.array<float>(count_tokens(shape) * heads * trellis_fp32_padded_width(shape.M));
}
// A^T, or its gradient, before every segment.
float* allocate_states(const TrellisFp32Shape& shape, int memory, Workspace& workspace) {
  return workspace.array<float>(token_range_count(shape.grid.tokens, kChunk) * shape.heads *
                                trellis_fp32_padded_width(shape.width(memory)) *
                                int64_t{trellis_fp32_padded_width(shape.M)});
}
InputTensor<4> rows_of(const TrellisFp32Shape& shape, const float* data, int heads) {
  return padded_rows(data, shape.grid.tokens, heads, shape.M);
}
OutputTensor<4> output_rows_of(const TrellisFp32Shape& shape, float* data, int heads) {
  const InputTensor<4> rows = rows_of(shape, data, heads);
  return {data, rows.dtype, {rows.stride[0], rows.stride[1], rows.stride[2], rows.stride[3]}};
}

// Launches the reads of memory A, which is stored as s and as the states before the segments.
struct MemoryReads {
  const TrellisFp32Arguments& problem;
  int memory;
  const float *s, *states;

  Fp32ReadShape make_shape() const {
    const TrellisFp32Shape& all = problem.shape;
    Fp32ReadShape read{};
    read.tokens = all.grid.tokens, read.heads = all.heads, read.query_heads = all.query_heads;
    read.M = trellis_fp32_padded_width(all.M), read.g = problem.slot_gates;
    read.states = states, read.rows = trellis_fp32_padded_width(all.width(memory));
    return read;
  }
  // out = A w [B, T, HQ, M] padded
  cudaError_t read_value(const InputTensor<4>& w, float* out, cudaStream_t stream) const {
    ValueRead p{};
    p.shape = make_shape();
    p.term[0] = {w, problem.x[memory], rows_of(problem.shape, s, problem.shape.heads), 0, p.shape.rows};
    p.out = output_rows_of(problem.shape, out, problem.shape.query_heads);
    return fp32_value_read(p, stream);
  }
  // out = A^T l
  cudaError_t read_key(const float* l, const OutputTensor<4>& out, cudaStream_t stream) const {
    KeyRead p{};
    p.shape = make_shape();
    p.p = rows_of(problem.shape, l, problem.shape.query_heads);
    p.s = rows_of(problem.shape, s, problem.shape.heads), p.y = problem.x[memory];
    p.first_row = 0, p.width = p.shape.rows, p.out = out;
    return fp32_key_read(p, stream);
  }
};

// Replaces y by r = f(y).
TrellisFp32ReadMap make_read_map(const TrellisFp32Shape& shape, float* y) {
  TrellisFp32ReadMap p{};
  p.rows = count_tokens(shape) * shape.query_heads, p.M = shape.M, p.f = shape.f, p.y = y;
  return p;
}

cudaError_t run_scan(const TrellisFp32Forward& problem, float* const (&s)[2], float* const (&states)[2],
                     cudaStream_t stream) {
  TrellisFp32Scan p{};
  p.shape = problem.shape;
  p.a = problem.a, p.weight = problem.weight, p.gamma = problem.gamma, p.g = problem.g;
  p.last_position = problem.last_position;
  for (int m = 0; m < problem.shape.memories; ++m) {
    p.x[m] = problem.x[m];
    p.chunk_start[m] = problem.chunk_start[m], p.initial[m] = problem.initial[m];
    p.last_chunk_start[m] = problem.last_chunk_start[m], p.last[m] = problem.last[m];
    p.z[m] = problem.z[m], p.s[m] = s[m], p.states[m] = states[m];
  }
  return trellis_fp32_scan(p, stream);
}

// r and dy [B, T, HQ, M] padded, and the products read_dots of TrellisFp32ReadMap.
struct ReadGradients {
  float *r, *dy, *read_dots;
};
cudaError_t compute_read_gradients(const TrellisFp32Backward& problem, Workspace& workspace,
                                   ReadGradients& result, cudaStream_t stream) {
  const TrellisFp32Shape& shape = problem.shape;
  const bool has_values = shape.memories == 2;
  float* const y = allocate_rows(shape, shape.query_heads, workspace);
  float* const dr = has_values ? allocate_rows(shape, shape.query_heads, workspace) : problem.dr;
  const MemoryReads keys{problem, kKeyMemory, problem.s[kKeyMemory], problem.states[kKeyMemory]},
      values{problem, kValueMemory, problem.s[kValueMemory], problem.states[kValueMemory]};
  GIRIH_TRY(keys.read_value(problem.q, y, stream));
  if (has_values) GIRIH_TRY(values.read_value(problem.dout, dr, stream));

  TrellisFp32ReadMap map = make_read_map(shape, y);
  float* const read_dots = workspace.array<float>(shape.memories * map.rows);
  map.dr = dr, map.read_dots[0] = read_dots, map.read_dots[1] = has_values ? read_dots + map.rows : nullptr;
  GIRIH_TRY(trellis_fp32_read_map(map, stream));
  result = {y, dr, read_dots};
  return keys.read_key(dr, problem.dq, stream);
}

// The tensors that the reverse scan stores for dkv.
struct ReverseResults {
  float *dz[2] = {}, *gradients[2] = {}, *dz_dot_z = nullptr;
};
InputTensor<4> left_of_read(const TrellisFp32Shape& shape, const ReadGradients& reads, int memory) {
  return rows_of(shape, memory == kKeyMemory ? reads.dy : reads.r, shape.query_heads);
}

cudaError_t run_reverse_scan(const TrellisFp32Backward& problem, const ReadGradients& reads,
                             const ReverseResults& results, cudaStream_t stream) {
  TrellisFp32Reverse p{};
  p.shape = problem.shape;
  p.a = problem.a, p.weight = problem.weight, p.gamma = problem.gamma, p.g = problem.g;
  p.dweight = problem.dweight, p.dgamma = problem.dgamma, p.dz_dot_z = results.dz_dot_z;
  p.w[kKeyMemory] = problem.q, p.w[kValueMemory] = problem.dout;
  for (int m = 0; m < problem.shape.memories; ++m) {
    p.x[m] = problem.x[m], p.z[m] = problem.z[m], p.l[m] = left_of_read(problem.shape, reads, m);
    p.dlast_chunk_start[m] = problem.dlast_chunk_start[m], p.dlast[m] = problem.dlast[m];
    p.dchunk_start[m] = problem.dchunk_start[m], p.dinitial[m] = problem.dinitial[m];
    p.dz[m] = results.dz[m], p.da[m] = problem.da[m], p.gradients[m] = results.gradients[m];
  }
  return trellis_fp32_reverse(p, stream);
}

cudaError_t compute_dkv(const TrellisFp32Backward& problem, const ReadGradients& reads,
                        const ReverseResults& results, cudaStream_t stream) {
  TrellisFp32Dkv p{};
  p.shape = problem.shape, p.gamma = problem.gamma, p.g = problem.g;
  p.read_dots = reads.read_dots, p.dgamma = problem.dgamma, p.dz_dot_z = results.dz_dot_z;
  p.dg = problem.dg;
  p.w[kKeyMemory] = problem.q, p.w[kValueMemory] = problem.dout;
  for (int m = 0; m < problem.shape.memories; ++m) {
    p.x[m] = problem.x[m], p.l[m] = left_of_read(problem.shape, reads, m);
    p.chunk_start[m] = problem.chunk_start[m], p.dlast_chunk_start[m] = problem.dlast_chunk_start[m];
    p.s[m] = problem.s[m], p.states[m] = problem.states[m];
    p.dz[m] = results.dz[m], p.gradients[m] = results.gradients[m], p.dx[m] = problem.dx[m];
  }
  return trellis_fp32_dkv(p, stream);
}

}  // namespace

cudaError_t trellis_fp32_forward(const TrellisFp32Forward& problem, Workspace& workspace,
                                 cudaStream_t stream) {
  const TrellisFp32Shape& shape = problem.shape;
  float *s[2] = {}, *states[2] = {};
  for (int m = 0; m < shape.memories; ++m) {
    s[m] = problem.s[m] != nullptr ? problem.s[m] : allocate_rows(shape, shape.heads, workspace);
    states[m] = problem.states[m] != nullptr ? problem.states[m] : allocate_states(shape, m, workspace);
  }
  GIRIH_TRY(run_scan(problem, s, states, stream));

  const bool has_values = shape.memories == 2;
  float* const r =
      has_values ? allocate_rows(shape, shape.query_heads, workspace) : static_cast<float*>(problem.o.data);
  const MemoryReads keys{problem, kKeyMemory, s[kKeyMemory], states[kKeyMemory]},
      values{problem, kValueMemory, s[kValueMemory], states[kValueMemory]};
  GIRIH_TRY(keys.read_value(problem.q, r, stream));
  GIRIH_TRY(trellis_fp32_read_map(make_read_map(shape, r), stream));
  return has_values ? values.read_key(r, problem.o, stream) : cudaSuccess;
}

cudaError_t trellis_fp32_backward(const TrellisFp32Backward& problem, Workspace& workspace,
                                  cudaStream_t stream) {
  const TrellisFp32Shape& shape = problem.shape;
  ReadGradients reads{};
  GIRIH_TRY(compute_read_gradients(problem, workspace, reads, stream));

  ReverseResults results;
  for (int m = 0; m < shape.memories; ++m) {
    results.dz[m] = allocate_rows(shape, shape.heads, workspace);
    results.gradients[m] = allocate_states(shape, m, workspace);
  }
  results.dz_dot_z = workspace.array<float>(shape.memories * count_tokens(shape) * shape.heads);
  GIRIH_TRY(run_reverse_scan(problem, reads, results, stream));
  return compute_dkv(problem, reads, results, stream);
}

}  // namespace girih::kernels
