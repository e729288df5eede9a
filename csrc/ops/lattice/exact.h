// The fp32 kernels of lattice.
#pragma once

#include "../arguments/kernel_arguments.h"
#include "aten.h"
#include "lattice/exact.h"
#include "problem.h"

namespace girih::lattice {

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor,
                             OptionalTensor, OptionalTensor, OptionalTensor>;

inline kernels::LatticeObjective objective_of(std::string_view name) {
  using kernels::LatticeObjective;
  return name == "decode"   ? LatticeObjective::decode
         : name == "encode" ? LatticeObjective::encode
                            : LatticeObjective::similarity;
}

// A zero gradient of a state tensor that the call does not read.
inline OptionalTensor no_gradient(const OptionalTensor& state) {
  return if_given(state, [&] { return at::zeros(state->sizes(), state->options()); });
}

// The part of the shape that determines the shared memory.
inline kernels::LatticeExactShape exact_shape(const Tensor& q, const Tensor& k, const Tensor& v,
                                              int64_t chunk) {
  kernels::LatticeExactShape shape{};
  shape.chunk = static_cast<int>(chunk);
  shape.heads = static_cast<int>(k.size(2)), shape.query_heads = static_cast<int>(q.size(2));
  shape.D = static_cast<int>(v.size(3)), shape.M = static_cast<int>(k.size(3));
  return shape;
}

// One call of the fp32 kernels, which read the tensors without padding.
class ExactCall {
 public:
  ExactCall(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gamma, const OptionalTensor& g,
            const OptionalTensor& first, const OptionalTensor& step, const OptionalTensor& decay,
            const OptionalTensor& position, const OptionalTensor& cu, int64_t chunk,
            std::string_view objective, bool normalize, double shrinkage)
      : q_(q), k_(k), v_(v), gamma_(gamma), g_(g), step_(step), decay_(decay) {
    if (given(cu)) cu_seqlens_ = cu->contiguous();
    // The kernels clamp positions to the length of a segment, which is longer than a chunk.
    if (given(position)) position_ = position->clamp(0, chunk - 1).contiguous();
    auto& shape = of_.shape;
    shape = exact_shape(q, k, v, chunk);
    shape.tokens = kernel_tokens(q, cu_seqlens_);
    shape.position = position_.defined() ? position_.const_data_ptr<int64_t>() : nullptr;
    shape.objective = objective_of(objective);
    shape.normalize = normalize, shape.shrinkage = static_cast<float>(shrinkage);
    of_.q = input<4>(q), of_.k = input<4>(k), of_.v = input<4>(v);
    of_.gamma = input<3>(gamma), of_.g = input<3>(g);
    of_.start = {input<4>(first), input<4>(step), input<2>(decay)};
  }

  Results forward(const Problem::Kept& kept, bool save) const {
    const auto last = states(), step = states(), decay = gated() ? numbers() : Tensor();
    const auto position = at::empty({last.size(0)}, q_.options().dtype(at::kLong));
    const auto memories = room(kept.memories);
    const auto none = [&] { return at::empty({0}, in_fp32()); };
    const auto o = rows_for(q_, q_.size(1), cu_seqlens_, q_.size(2), v_.size(3), q_.scalar_type());
    kernels::LatticeExactScan p{};
    p.of = of_;
    p.end = {output<4>(last), output<4>(step), output<2>(decay)};
    p.last_position = position.mutable_data_ptr<int64_t>();
    if (save) {
      const auto segments = kernels::chunk_count(kernels::lattice_segments(of_.shape));
      TORCH_INTERNAL_ASSERT(memories.size(0) == segments);  // as computed by Problem::saved
      p.memories = memories.mutable_data_ptr<float>();
    }
    p.o = output<4>(o);
    check_launch("lattice_exact_scan", kernels::lattice_exact_scan(p, c10::cuda::getCurrentCUDAStream()));
    return {o,      last,   step,  gated() ? OptionalTensor(decay) : std::nullopt, position, memories,
            none(), none(), none()};
  }

  Gradients backward(const OptionalTensor& grad_o, const OptionalTensor& grad_first,
                     const OptionalTensor& grad_step, const OptionalTensor& grad_decay,
                     const Tensor& memories) const {
    const auto like = [&](const Tensor& x) {
      return cu_seqlens_.defined() ? at::zeros(x.sizes(), x.options()) : at::empty(x.sizes(), x.options());
    };
    const bool resumed = position_.defined() && of_.shape.chunk > 1;
    const auto dq = like(q_), dk = like(k_), dv = like(v_), dgamma = like(gamma_);
    const auto dg = gated() ? like(*g_) : Tensor(), dfirst = states();
    const auto dstep = resumed ? states() : Tensor(), ddecay = resumed && gated() ? numbers() : Tensor();
    int64_t floats = 0;
    check_launch("lattice_exact_workspace", kernels::lattice_exact_workspace(of_.shape, floats));
    const auto workspace = at::empty({floats}, in_fp32());
    kernels::LatticeExactGradients p;
    p.of = of_;
    p.memories = memories.const_data_ptr<float>();
    p.dout = input<4>(grad_o);
    p.dlast = input<4>(grad_first), p.dlast_step = input<4>(grad_step), p.dlast_decay = input<2>(grad_decay);
    p.dq = output<4>(dq), p.dk = output<4>(dk), p.dv = output<4>(dv);
    p.dgamma = output<3>(dgamma), p.dg = output<3>(dg);
    p.dmemory = output<4>(dfirst), p.dstep = output<4>(dstep), p.ddecay = output<2>(ddecay);
    p.workspace = workspace.mutable_data_ptr<float>();
    check_launch("lattice_exact_gradients",
                 kernels::lattice_exact_gradients(p, c10::cuda::getCurrentCUDAStream()));
    return {dq,
            dk,
            dv,
            dgamma,
            if_given(g_, [&] { return dg; }),
            dfirst,
            resumed ? OptionalTensor(dstep) : no_gradient(step_),
            resumed && gated() ? OptionalTensor(ddecay) : no_gradient(decay_),
            std::nullopt,
            std::nullopt};
  }

 private:
  bool gated() const { return given(g_); }
  at::TensorOptions in_fp32() const { return q_.options().dtype(at::kFloat); }
  Tensor room(const std::vector<c10::SymInt>& sizes) const {
    return at::empty(C10_AS_INTARRAYREF_SLOW_ALLOC(sizes), in_fp32());
  }
  Tensor states() const {
    return at::empty({of_.shape.tokens.sequences, k_.size(2), v_.size(3), k_.size(3)}, in_fp32());
  }
  Tensor numbers() const { return at::empty({of_.shape.tokens.sequences, k_.size(2)}, in_fp32()); }

  Tensor q_, k_, v_, gamma_, cu_seqlens_, position_;
  OptionalTensor g_, step_, decay_;
  kernels::LatticeExactInputs of_;
};

}  // namespace girih::lattice
