// The exact kernels of trellis on the emulator, for test_emulated_trellis_fp32.py, which fills an Fp32Call.
#include "call.h"
#include "fp32/fp32.h"
#include "trellis/fp32.h"

using namespace girih::kernels;

struct Fp32Call {
  int64_t batch, tokens, sequences;
  const void* cu_seqlens;
  const int64_t* position;
  int64_t passes, chunk, heads, query_heads, D, V, M, silu, norm, f_silu, f_norm;
  Array q, x[2], a, weight, gamma, g, first[2], initial[2];  // weight: fp32 in packs
  Array o, last_first[2], last[2], dout, dlast_first[2], dlast[2];
  Array dq, dx[2], da[2], dweight, dgamma, dg, dfirst[2],
      dinitial[2];  // dx, da in packs; dgamma, dg [passes, B, T, H]; of one pass o, dout in packs
  int64_t* last_position;
};

namespace {

// What both directions hand from kernel to kernel.
struct Workspace {
  const Fp32Call& c;
  TrellisFp32Shape shape{};
  Rooms rooms;
  int M;
  float *z[2] = {}, *s[2] = {}, *states[2] = {}, *gates;

  explicit Workspace(const Fp32Call& c) : c(c) {
    shape.grid = {
        {c.batch, c.tokens, c.sequences, c.cu_seqlens, true, false}, static_cast<int>(c.chunk), c.position};
    shape.heads = static_cast<int>(c.heads), shape.query_heads = static_cast<int>(c.query_heads);
    shape.memories = static_cast<int>(c.passes);
    shape.D = static_cast<int>(c.D), shape.V = static_cast<int>(c.V), shape.M = static_cast<int>(c.M);
    shape.phi = {c.silu != 0, static_cast<Norm>(c.norm)};
    shape.f = {c.f_silu != 0, static_cast<Norm>(c.f_norm)};
    M = trellis_fp32_padded_width(shape.M);
    for (int m = 0; m < c.passes; ++m) {
      z[m] = rows(c.heads), s[m] = rows(c.heads), states[m] = pieces(m);
    }
    gates = rows(c.heads);
    const auto* const g = static_cast<const float*>(c.g.data);
    const int64_t all = c.batch * c.tokens * c.heads;
    for (int64_t i = 0; i < all * M; ++i) gates[i] = g == nullptr ? 0.f : g[i / M];
  }
  float* floats(int64_t count) { return static_cast<float*>(rooms.bytes(4 * count)); }
  float* rows(int64_t heads) { return floats(c.batch * c.tokens * heads * M); }
  float* pieces(int m) {
    return floats(token_range_count(shape.grid.tokens, kChunk) * c.heads *
                  trellis_fp32_padded_width(shape.width(m)) * M);
  }
  // [B, T, heads, M] in packs
  OutputTensor<4> array(float* data, int64_t heads) const {
    return {data, DType::f32, {c.tokens * heads * M, heads * M, M, 1}};
  }
  InputTensor<4> input(float* data, int64_t heads) const { return written(array(data, heads)); }
  Fp32ReadShape reads(int m) const {
    Fp32ReadShape of{};
    of.tokens = shape.grid.tokens, of.heads = shape.heads, of.query_heads = shape.query_heads, of.M = M;
    of.g = input(gates, c.heads);
    of.states = states[m], of.rows = trellis_fp32_padded_width(shape.width(m));
    return of;
  }
  void value_read(const Array& x, int m, float* to) const {
    ValueRead p{};
    p.shape = reads(m), p.out = array(to, c.query_heads);
    p.term[0] = {in<4>(x), in<4>(c.x[m]), input(s[m], c.heads), 0, p.shape.rows};
    must(fp32_value_read(p, nullptr));
  }
  void key_read(float* of, int m, const Array& to) const {
    KeyRead p{};
    p.shape = reads(m), p.p = input(of, c.query_heads), p.s = input(s[m], c.heads), p.y = in<4>(c.x[m]);
    p.first_row = 0, p.width = p.shape.rows, p.out = out<4>(to);
    must(fp32_key_read(p, nullptr));
  }
  TrellisFp32ReadMap map(float* y) const {
    TrellisFp32ReadMap p{};
    p.rows = c.batch * c.tokens * c.query_heads, p.M = shape.M, p.f = shape.f, p.y = y;
    return p;
  }
  template <class Problem>
  void fill(Problem& p) const {
    p.shape = shape, p.gamma = in<3>(c.gamma), p.g = in<3>(c.g);
    for (int m = 0; m < c.passes; ++m) p.x[m] = in<4>(c.x[m]);
  }
};

}  // namespace

extern "C" void run_fp32(const Fp32Call* call) {
  const Fp32Call& c = *call;
  Workspace workspace(c);
  bool fits = false;
  must(trellis_fp32_fits(workspace.shape, fits));
  if (!fits) emulated::fail("the card is too small");

  TrellisFp32Scan scan{};
  workspace.fill(scan);
  scan.weight = static_cast<const float*>(c.weight.data);
  scan.a = in<4>(c.a), scan.last_position = c.last_position;
  for (int m = 0; m < c.passes; ++m) {
    scan.chunk_start[m] = in<4>(c.first[m]), scan.initial[m] = in<4>(c.initial[m]);
    scan.last_chunk_start[m] = out<4>(c.last_first[m]), scan.last[m] = out<4>(c.last[m]);
    scan.s[m] = workspace.s[m], scan.states[m] = workspace.states[m];
  }
  must(trellis_fp32_scan(scan, nullptr));  // without backward; what is handed out is looked at after the next
  for (int m = 0; m < c.passes; ++m) scan.z[m] = workspace.z[m];
  must(trellis_fp32_scan(scan, nullptr));
  float* const y = workspace.rows(c.query_heads);
  workspace.value_read(c.q, 0, y);
  must(trellis_fp32_read_map(workspace.map(y), nullptr));
  const int64_t queries = c.batch * c.tokens * c.query_heads;
  if (c.passes == 2) {
    workspace.key_read(y, 1, c.o);
  } else {
    std::copy(y, y + queries * workspace.M, static_cast<float*>(c.o.data));
  }

  float* const dr = workspace.rows(c.query_heads);
  const int64_t numbers = c.batch * c.tokens * c.heads;
  float* const of_reads = workspace.floats(c.passes * queries);
  workspace.value_read(c.q, 0, y);
  if (c.passes == 2) {
    workspace.value_read(c.dout, 1, dr);
  } else {
    const auto* const dout = static_cast<const float*>(c.dout.data);
    std::copy(dout, dout + queries * workspace.M, dr);
  }
  auto rows = workspace.map(y);
  rows.dr = dr, rows.read_dots[0] = of_reads,
  rows.read_dots[1] = c.passes == 2 ? of_reads + queries : nullptr;
  must(trellis_fp32_read_map(rows, nullptr));
  workspace.key_read(dr, 0, c.dq);

  TrellisFp32Reverse reverse{};
  TrellisFp32Dkv columns{};
  workspace.fill(reverse), workspace.fill(columns);
  reverse.a = in<4>(c.a);
  reverse.weight = scan.weight, reverse.dweight = static_cast<float*>(c.dweight.data);
  reverse.dgamma = static_cast<float*>(c.dgamma.data),
  reverse.dz_dot_z = workspace.floats(c.passes * numbers);
  columns.read_dots = of_reads, columns.dgamma = reverse.dgamma, columns.dz_dot_z = reverse.dz_dot_z;
  columns.dg = static_cast<float*>(c.dg.data);
  for (int m = 0; m < c.passes; ++m) {
    reverse.l[m] = columns.l[m] = workspace.input(m == 0 ? dr : y, c.query_heads);
    reverse.w[m] = columns.w[m] = in<4>(m == 0 ? c.q : c.dout);
    reverse.z[m] = workspace.z[m];
    reverse.dlast_chunk_start[m] = in<4>(c.dlast_first[m]), reverse.dlast[m] = in<4>(c.dlast[m]);
    reverse.dchunk_start[m] = out<4>(c.dfirst[m]), reverse.dinitial[m] = out<4>(c.dinitial[m]);
    reverse.dz[m] = workspace.rows(c.heads), reverse.da[m] = static_cast<float*>(c.da[m].data);
    reverse.gradients[m] = workspace.pieces(m);
    columns.chunk_start[m] = in<4>(c.first[m]), columns.dlast_chunk_start[m] = in<4>(c.dlast_first[m]);
    columns.s[m] = workspace.s[m], columns.dz[m] = reverse.dz[m];
    columns.states[m] = workspace.states[m], columns.gradients[m] = reverse.gradients[m];
    columns.dx[m] = static_cast<float*>(c.dx[m].data);
  }
  must(trellis_fp32_reverse(reverse, nullptr));
  must(trellis_fp32_dkv(columns, nullptr));
}
