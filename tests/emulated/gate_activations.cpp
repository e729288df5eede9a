// The gates of rows on the emulator, for test_emulated_gate_activations.py, which fills their structs.
#include "gate_activations/gate_activations.h"

#include "call.h"

using namespace girih::kernels;

extern "C" {
void run_gates(const GateActivations* call) { must(gate_activations(*call, nullptr)); }
int64_t gates_partials(const GateActivations* call) { return gate_activations_partials(*call); }
void run_gates_backward(const GateActivationsBackward* call) {
  must(gate_activations_backward(*call, nullptr));
}
}
