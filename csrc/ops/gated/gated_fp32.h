// The fp32 kernels of gsa and gla.
#pragma once

#include "fp32/fp32.h"
#include "gated_kernels.h"

namespace girih {

// The reads of one call through the states before its chunks, or, in reversed time, after its chunks.
class Fp32Reads {
 public:
  Fp32Reads(const GatedArguments& arguments, const Tensor& states, bool reverse)
      : a_(arguments),
        shape_{a_.shape.tokens, a_.shape.heads, a_.shape.query_heads,           a_.shape.M,
               reverse,         input<4>(a_.g), states.const_data_ptr<float>(), a_.shape.D + a_.shape.V} {}

  // One memory; its rows of the states begin at `first_row`.
  struct Term {
    const Tensor &x, &y, &s;
    int first_row;
  };
  // The sum over the terms, [B, T, readers, M] in fp32.
  Tensor value(std::initializer_list<Term> terms) const {
    const auto out = a_.new_rows(read_heads(), shape_.M, at::kFloat);
    kernels::ValueRead p;
    p.shape = shape_;
    auto* to = p.term;
    for (const auto& [x, y, s, first_row] : terms) {
      *to++ = {input<4>(x), input<4>(y), input<4>(s), first_row, static_cast<int>(x.size(3))};
    }
    p.out = output<4>(out);
    GIRIH_LAUNCH(fp32_value_read, p);
    return out;
  }

  // [B, T, readers, width of y] in the dtype of q.
  Tensor key(const Tensor& p_, const Tensor& s, const Tensor& y, int first_row) const {
    const auto out = a_.new_rows(read_heads(), y.size(3), a_.q.scalar_type());
    kernels::KeyRead p;
    p.shape = shape_;
    p.p = input<4>(p_), p.s = input<4>(s), p.y = input<4>(y);
    p.first_row = first_row;
    p.width = static_cast<int>(y.size(3));
    p.out = output<4>(out);
    GIRIH_LAUNCH(fp32_key_read, p);
    return out;
  }

 private:
  int64_t read_heads() const { return shape_.reverse ? shape_.heads : shape_.query_heads; }

  const GatedArguments& a_;
  kernels::Fp32ReadShape shape_;
};

// The gradient of the gates, [B, T, H, M] in fp32. w: the reads times their gradients; s, ds: the writes and
// their gradients. `states` and `gradients` are from the two scans; `last` are the final states, `dinitial`
// the gradients of the initial states.
inline Tensor fp32_gate_gradient(const GatedArguments& a, const Tensor& w, const Tensor& s, const Tensor& ds,
                                 bool has_derived_s, const Tensor& states, const Tensor& gradients,
                                 const ScanEnd& last, const ScanEnd& dinitial) {
  const auto dg = a.new_rows(a.shape.heads, a.shape.M, at::kFloat);
  kernels::Fp32GateGradient p;
  p.tokens = a.shape.tokens;
  p.heads = a.shape.heads, p.query_heads = a.shape.query_heads, p.M = a.shape.M;
  p.w = input<4>(w), p.s = input<4>(s), p.ds = input<4>(ds);
  if (has_derived_s) p.g = input<4>(a.g);
  p.states = states.const_data_ptr<float>(), p.gradients = gradients.const_data_ptr<float>();
  p.width[0] = a.shape.D, p.width[1] = a.shape.V;
  p.final_state[0] = input<4>(last.k), p.final_state[1] = input<4>(last.v);
  p.initial_gradient[0] = input<4>(dinitial.k), p.initial_gradient[1] = input<4>(dinitial.v);
  p.dg = output<4>(dg);
  GIRIH_LAUNCH(fp32_gate_gradient, p);
  return dg;
}

}  // namespace girih
