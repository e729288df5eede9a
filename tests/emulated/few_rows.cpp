// The products of few rows on the emulator, for test_emulated_few_rows.py, which fills a FewRows.
#include "few_rows/few_rows.h"

#include "call.h"

extern "C" void run_few_rows(const girih::kernels::FewRows* call) {
  must(girih::kernels::few_rows(*call, nullptr));
}
