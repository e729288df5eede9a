// A step of lattice on the emulator, for test_emulated_steps.py, which fills a StepCall.
#include "call.h"
#include "lattice/lattice.h"

using namespace girih::kernels;

struct StepCall {
  int64_t shared;  // maximum shared memory of a block, in bytes
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
  p.q = as_input<3>(c.q), p.k = as_input<3>(c.k), p.v = as_input<3>(c.v), p.gamma = as_input<2>(c.gamma),
  p.g = as_input<2>(c.g);
  p.memory = as_output<4>(c.memory), p.step = as_output<4>(c.step), p.decay = as_output<2>(c.decay),
  p.o = as_output<3>(c.o);
  p.position = c.position, p.next_position = c.next_position;
  check_launch(lattice_step(p, nullptr));
  emulated::shared_bytes = emulated::kSharedBytes;
}
