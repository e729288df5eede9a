// The kernels of linear_path on the emulator, for test_emulated_linear_path.py, which fills their structs.
#include "linear_path/linear_path.h"

#include "call.h"

using namespace girih::kernels;

extern "C" {
void run_virtual_rows(const VirtualRows* call) { must(virtual_rows(*call, nullptr)); }
void run_virtual_rows_backward(const VirtualRowsBackward* call) {
  must(virtual_rows_backward(*call, nullptr));
}
void run_running_sum(const RunningSum* call) { must(running_sum(*call, nullptr)); }
void run_pooled_gate(const PooledGate* call) { must(pooled_gate(*call, nullptr)); }
void run_pooled_gate_backward(const PooledGateBackward* call) { must(pooled_gate_backward(*call, nullptr)); }
void run_channel_gate(const ChannelGate* call) { must(channel_gate(*call, nullptr)); }
void run_channel_gate_backward(const ChannelGateBackward* call) {
  must(channel_gate_backward(*call, nullptr));
}
}
