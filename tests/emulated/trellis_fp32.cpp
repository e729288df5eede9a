// The fp32 kernels of trellis on the emulator, for test_emulated_trellis_fp32.py, which fills an Fp32Call.
#include "call.h"
#include "fp32/fp32.h"
#include "trellis/fp32.h"

using namespace girih::kernels;

struct Fp32Call {
  int64_t batch, tokens, sequences;
  const void* cu_seqlens;
  const int64_t* position;
  int64_t memory_count, chunk, heads, query_heads, D, V, M, silu, norm, f_silu, f_norm;
  Array q, x[2], a, weight, gamma, g, first[2], initial[2];  // weight: fp32, M padded
  Array o, last_first[2], last[2], dout, dlast_first[2], dlast[2];
  // dx and da have padded rows. dgamma and dg are [memory_count, B, T, H]. With one memory, o and dout have
  // padded rows of width M.
  Array dq, dx[2], da[2], dweight, dgamma, dg, dfirst[2], dinitial[2];
  int64_t* last_position;
};

namespace {

// Buffers that the forward and backward kernels share. M is padded.
struct Workspace {
  const Fp32Call& c;
  TrellisFp32Shape shape{};
  Buffers buffers;
  int M;
  float *z[2] = {}, *s[2] = {}, *states[2] = {}, *gates;

  explicit Workspace(const Fp32Call& c) : c(c) {
    shape.grid = {
        {c.batch, c.tokens, c.sequences, c.cu_seqlens, true, false}, static_cast<int>(c.chunk), c.position};
    shape.heads = static_cast<int>(c.heads), shape.query_heads = static_cast<int>(c.query_heads);
    shape.memories = static_cast<int>(c.memory_count);
    shape.D = static_cast<int>(c.D), shape.V = static_cast<int>(c.V), shape.M = static_cast<int>(c.M);
    shape.phi = {c.silu != 0, static_cast<Norm>(c.norm)};
    shape.f = {c.f_silu != 0, static_cast<Norm>(c.f_norm)};
    M = trellis_fp32_padded_width(shape.M);
    for (int m = 0; m < c.memory_count; ++m) {
      z[m] = allocate_rows(c.heads), s[m] = allocate_rows(c.heads), states[m] = allocate_states(m);
    }
    gates = allocate_rows(c.heads);
    const auto* const g = static_cast<const float*>(c.g.data);
    const int64_t rows = c.batch * c.tokens * c.heads;
    for (int64_t i = 0; i < rows * M; ++i) gates[i] = g == nullptr ? 0.f : g[i / M];
  }
  float* allocate_floats(int64_t count) { return static_cast<float*>(buffers.bytes(4 * count)); }
  float* allocate_rows(int64_t heads) { return allocate_floats(c.batch * c.tokens * heads * M); }
  float* allocate_states(int m) {
    return allocate_floats(token_range_count(shape.grid.tokens, kChunk) * c.heads *
                           trellis_fp32_padded_width(shape.width(m)) * M);
  }
  // [B, T, heads, M], contiguous
  OutputTensor<4> make_output(float* data, int64_t heads) const {
    return {data, DType::f32, {c.tokens * heads * M, heads * M, M, 1}};
  }
  InputTensor<4> make_input(float* data, int64_t heads) const { return as_input(make_output(data, heads)); }
  Fp32ReadShape make_read_shape(int m) const {
    Fp32ReadShape read{};
    read.tokens = shape.grid.tokens, read.heads = shape.heads, read.query_heads = shape.query_heads,
    read.M = M;
    read.g = make_input(gates, c.heads);
    read.states = states[m], read.rows = trellis_fp32_padded_width(shape.width(m));
    return read;
  }
  void read_values(const Array& x, int m, float* output) const {
    ValueRead p{};
    p.shape = make_read_shape(m), p.out = make_output(output, c.query_heads);
    p.term[0] = {as_input<4>(x), as_input<4>(c.x[m]), make_input(s[m], c.heads), 0, p.shape.rows};
    check_launch(fp32_value_read(p, nullptr));
  }
  void read_keys(float* queries, int m, const Array& output) const {
    KeyRead p{};
    p.shape = make_read_shape(m), p.p = make_input(queries, c.query_heads);
    p.s = make_input(s[m], c.heads), p.y = as_input<4>(c.x[m]);
    p.first_row = 0, p.width = p.shape.rows, p.out = as_output<4>(output);
    check_launch(fp32_key_read(p, nullptr));
  }
  TrellisFp32ReadMap make_read_map(float* y) const {
    TrellisFp32ReadMap p{};
    p.rows = c.batch * c.tokens * c.query_heads, p.M = shape.M, p.f = shape.f, p.y = y;
    return p;
  }
  template <class Problem>
  void fill(Problem& p) const {
    p.shape = shape, p.gamma = as_input<3>(c.gamma), p.g = as_input<3>(c.g);
    for (int m = 0; m < c.memory_count; ++m) p.x[m] = as_input<4>(c.x[m]);
  }
};

}  // namespace

extern "C" void run_fp32(const Fp32Call* call) {
  const Fp32Call& c = *call;
  Workspace workspace(c);
  bool fits = false;
  check_launch(trellis_fp32_fits(workspace.shape, fits));
  if (!fits) emulated::fail("the kernels need more shared memory than the device has");

  TrellisFp32Scan scan{};
  workspace.fill(scan);
  scan.weight = static_cast<const float*>(c.weight.data);
  scan.a = as_input<4>(c.a), scan.last_position = c.last_position;
  for (int m = 0; m < c.memory_count; ++m) {
    scan.chunk_start[m] = as_input<4>(c.first[m]), scan.initial[m] = as_input<4>(c.initial[m]);
    scan.last_chunk_start[m] = as_output<4>(c.last_first[m]), scan.last[m] = as_output<4>(c.last[m]);
    scan.s[m] = workspace.s[m], scan.states[m] = workspace.states[m];
  }
  // First the scan of a call without backward. The second scan overwrites its results.
  check_launch(trellis_fp32_scan(scan, nullptr));
  for (int m = 0; m < c.memory_count; ++m) scan.z[m] = workspace.z[m];
  check_launch(trellis_fp32_scan(scan, nullptr));
  float* const y = workspace.allocate_rows(c.query_heads);
  workspace.read_values(c.q, 0, y);
  check_launch(trellis_fp32_read_map(workspace.make_read_map(y), nullptr));
  const int64_t query_rows = c.batch * c.tokens * c.query_heads;
  if (c.memory_count == 2) {
    workspace.read_keys(y, 1, c.o);
  } else {
    std::copy(y, y + query_rows * workspace.M, static_cast<float*>(c.o.data));
  }

  float* const dr = workspace.allocate_rows(c.query_heads);
  const int64_t rows = c.batch * c.tokens * c.heads;
  float* const read_dots = workspace.allocate_floats(c.memory_count * query_rows);
  workspace.read_values(c.q, 0, y);
  if (c.memory_count == 2) {
    workspace.read_values(c.dout, 1, dr);
  } else {
    const auto* const dout = static_cast<const float*>(c.dout.data);
    std::copy(dout, dout + query_rows * workspace.M, dr);
  }
  auto read_map = workspace.make_read_map(y);
  read_map.dr = dr, read_map.read_dots[0] = read_dots;
  read_map.read_dots[1] = c.memory_count == 2 ? read_dots + query_rows : nullptr;
  check_launch(trellis_fp32_read_map(read_map, nullptr));
  workspace.read_keys(dr, 0, c.dq);

  TrellisFp32Reverse reverse{};
  TrellisFp32Dkv dkv{};
  workspace.fill(reverse), workspace.fill(dkv);
  reverse.a = as_input<4>(c.a);
  reverse.weight = scan.weight, reverse.dweight = static_cast<float*>(c.dweight.data);
  reverse.dgamma = static_cast<float*>(c.dgamma.data),
  reverse.dz_dot_z = workspace.allocate_floats(c.memory_count * rows);
  dkv.read_dots = read_dots, dkv.dgamma = reverse.dgamma, dkv.dz_dot_z = reverse.dz_dot_z;
  dkv.dg = static_cast<float*>(c.dg.data);
  for (int m = 0; m < c.memory_count; ++m) {
    reverse.l[m] = dkv.l[m] = workspace.make_input(m == 0 ? dr : y, c.query_heads);
    reverse.w[m] = dkv.w[m] = as_input<4>(m == 0 ? c.q : c.dout);
    reverse.z[m] = workspace.z[m];
    reverse.dlast_chunk_start[m] = as_input<4>(c.dlast_first[m]), reverse.dlast[m] = as_input<4>(c.dlast[m]);
    reverse.dchunk_start[m] = as_output<4>(c.dfirst[m]), reverse.dinitial[m] = as_output<4>(c.dinitial[m]);
    reverse.dz[m] = workspace.allocate_rows(c.heads), reverse.da[m] = static_cast<float*>(c.da[m].data);
    reverse.gradients[m] = workspace.allocate_states(m);
    dkv.chunk_start[m] = as_input<4>(c.first[m]), dkv.dlast_chunk_start[m] = as_input<4>(c.dlast_first[m]);
    dkv.s[m] = workspace.s[m], dkv.dz[m] = reverse.dz[m];
    dkv.states[m] = workspace.states[m], dkv.gradients[m] = reverse.gradients[m];
    dkv.dx[m] = static_cast<float*>(c.dx[m].data);
  }
  check_launch(trellis_fp32_reverse(reverse, nullptr));
  check_launch(trellis_fp32_dkv(dkv, nullptr));
}
