// The kernels of gate_activations on the emulator, for test_emulated_gate_activations.py, which fills their
// structs.
#include "gate_activations/gate_activations.h"

#include "call.h"

using namespace girih::kernels;

extern "C" {
void run_gates(const GateActivations* call) { check_launch(gate_activations(*call, nullptr)); }
void run_gates_backward(const GateActivationsBackward* call) {
  Buffers buffers;
  check_launch(gate_activations_backward(*call, buffers, nullptr));
}
}
