// The gates of rows on the emulator, for test_emulated_row_gates.py, which fills their structs.
#include "row_gates/row_gates.h"

#include "call.h"

using namespace girih::kernels;

extern "C" {
void run_gates(const RowGates* call) { must(row_gates(*call, nullptr)); }
int64_t gates_partials(const RowGates* call) { return row_gates_partials(*call); }
void run_gates_backward(const RowGatesBackward* call) { must(row_gates_backward(*call, nullptr)); }
}
