// A step of trellis on the emulator, for test_emulated_steps.py, which fills a StepCall.
#include "call.h"
#include "trellis/trellis.h"

using namespace girih::kernels;

struct StepCall {
  int64_t memory_count, sequences, heads, query_heads, D, V, M, chunk, silu, norm, f_silu, f_norm;
  Array q, k, v, a, weight, gamma, g, first[2], memory[2], o;
  int64_t* position;
};

extern "C" void run_step(const StepCall* call) {
  const StepCall& c = *call;
  TrellisStep p{};
  p.sequences = c.sequences, p.heads = static_cast<int>(c.heads);
  p.query_heads = static_cast<int>(c.query_heads), p.memories = static_cast<int>(c.memory_count);
  p.D = static_cast<int>(c.D), p.V = static_cast<int>(c.V), p.M = static_cast<int>(c.M);
  p.chunk = static_cast<int>(c.chunk);
  p.phi = {c.silu != 0, static_cast<Norm>(c.norm)}, p.f = {c.f_silu != 0, static_cast<Norm>(c.f_norm)};
  p.q = as_input<3>(c.q), p.k = as_input<3>(c.k), p.v = as_input<3>(c.v), p.a = as_input<3>(c.a);
  p.weight = as_input<2>(c.weight);
  p.gamma = as_input<2>(c.gamma), p.g = as_input<2>(c.g);
  for (int m = 0; m < c.memory_count; ++m)
    p.chunk_start[m] = as_output<4>(c.first[m]), p.memory[m] = as_output<4>(c.memory[m]);
  p.position = c.position, p.o = as_output<3>(c.o);
  check_launch(trellis_step(p, nullptr));
}
