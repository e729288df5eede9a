// The kernels of linear_path on the emulator, for test_emulated_linear_path.py, which fills their structs.
#include "linear_path/linear_path.h"

#include "call.h"

using namespace girih::kernels;

extern "C" {
void run_virtual_rows(const VirtualRows* call) { check_launch(virtual_rows(*call, nullptr)); }
void run_virtual_rows_backward(const VirtualRowsBackward* call) {
  check_launch(virtual_rows_backward(*call, nullptr));
}
void run_running_sum(const RunningSum* call) { check_launch(running_sum(*call, nullptr)); }
void run_pooled_gate(const PooledGate* call) { check_launch(pooled_gate(*call, nullptr)); }
void run_pooled_gate_backward(const PooledGateBackward* call) {
  check_launch(pooled_gate_backward(*call, nullptr));
}
void run_channel_gate(const ChannelGate* call) { check_launch(channel_gate(*call, nullptr)); }
void run_channel_gate_backward(const ChannelGateBackward* call) {
  check_launch(channel_gate_backward(*call, nullptr));
}
}
