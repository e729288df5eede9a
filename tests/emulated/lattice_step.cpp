// A step of lattice on the emulator, for test_emulated_steps.py, which fills a StepCall.
#include "call.h"
#include "lattice/lattice.h"

using namespace girih::kernels;

struct StepCall {
  int64_t shared;  // bytes that a block may have
  int64_t sequences, heads, query_heads, D, M, chunk, objective;
  Array q, k, v, gamma, g, memory, step, decay, o;
  const int64_t* position;
  int64_t* next_position;
};

extern "C" void run_step(const StepCall* call) {
  const StepCall& c = *call;
  emulated::shared_bytes = static_cast<int>(c.shared);
  LatticeStep p{};
  p.sequences = c.sequences, p.heads = static_cast<int>(c.heads);
  p.query_heads = static_cast<int>(c.query_heads);
  p.D = static_cast<int>(c.D), p.M = static_cast<int>(c.M), p.chunk = static_cast<int>(c.chunk);
  p.objective = static_cast<LatticeObjective>(c.objective);
  p.q = in<3>(c.q), p.k = in<3>(c.k), p.v = in<3>(c.v), p.gamma = in<2>(c.gamma), p.g = in<2>(c.g);
  p.memory = out<4>(c.memory), p.step = out<4>(c.step), p.decay = out<2>(c.decay), p.o = out<3>(c.o);
  p.position = c.position, p.next_position = c.next_position;
  must(lattice_step(p, nullptr));
  emulated::shared_bytes = emulated::kSharedBytes;
}
