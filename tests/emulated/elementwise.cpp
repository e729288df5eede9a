// The kernels of elementwise on the emulator, for test_emulated_elementwise.py, which fills their structs.
#include "elementwise/elementwise.h"

#include "call.h"

using namespace girih::kernels;

extern "C" {
void run_norm(const ResidualNorm* call) { check_launch(residual_norm(*call, nullptr)); }
void run_norm_backward(const ResidualNormBackward* call) {
  Buffers buffers;
  check_launch(residual_norm_backward(*call, buffers, nullptr));
}
void run_product(const SiluProduct* call) { check_launch(silu_product(*call, nullptr)); }
void run_product_backward(const SiluProductBackward* call) {
  check_launch(silu_product_backward(*call, nullptr));
}
void run_rotary(const Rotary* call) { check_launch(rotary(*call, nullptr)); }
void run_rotary_backward(const RotaryBackward* call) { check_launch(rotary_backward(*call, nullptr)); }
void run_cross_entropy(const CrossEntropy* call) { check_launch(cross_entropy(*call, nullptr)); }
}
