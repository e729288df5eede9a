// The kernels of skinny_gemm on the emulator, for test_emulated_skinny_gemm.py, which fills a SkinnyGemm.
#include "skinny_gemm/skinny_gemm.h"

#include "call.h"

extern "C" void run_skinny_gemm(const girih::kernels::SkinnyGemm* call) {
  check_launch(girih::kernels::skinny_gemm(*call, nullptr));
}
