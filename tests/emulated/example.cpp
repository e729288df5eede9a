// The kernel of docs/writing-a-kernel.md, for test_emulated_example.py, which writes the code of the page to
// example_kernel.h.
#include "call.h"
#include "example_kernel.h"

using namespace girih::kernels;

struct Call {
  int64_t batch, tokens, sequences;
  const void* cu_seqlens;
  int64_t heads, D, V;
  double scale;
  Array q, k, v, initial, final, o;
};

extern "C" void run(const Call* c) {
  LinearScan p{};
  p.tokens = {c->batch, c->tokens, c->sequences, c->cu_seqlens, true, false};
  p.heads = static_cast<int>(c->heads), p.D = static_cast<int>(c->D), p.V = static_cast<int>(c->V);
  p.scale = static_cast<float>(c->scale);
  p.q = as_input<4>(c->q), p.k = as_input<4>(c->k), p.v = as_input<4>(c->v);
  p.initial = as_input<4>(c->initial), p.final = as_output<4>(c->final), p.o = as_output<4>(c->o);
  check_launch(linear_scan(p, nullptr));
}
