// The fp32 kernels of lattice.
#pragma once

#include "../arguments/kernel_arguments.h"
#include "aten.h"
#include "lattice/fp32.h"
#include "problem.h"

namespace girih::lattice {

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor,
                             OptionalTensor, OptionalTensor, OptionalTensor>;

inline kernels::LatticeObjective parse_objective(std::string_view name) {
  using kernels::LatticeObjective;
  return name == "decode"   ? LatticeObjective::decode
         : name == "encode" ? LatticeObjective::encode
                            : LatticeObjective::similarity;
}

// A zero gradient of a state tensor that the call does not read.
inline OptionalTensor zero_gradient(const OptionalTensor& state) {
  return if_defined(state, [&] { return at::zeros(state->sizes(), state->options()); });
}

// The part of the shape that determines the shared memory.
inline kernels::LatticeFp32Shape fp32_shape(const Tensor& q, const Tensor& k, const Tensor& v,
                                            int64_t chunk) {
  kernels::LatticeFp32Shape shape{};
  shape.chunk = static_cast<int>(chunk);
  shape.heads = static_cast<int>(k.size(2)), shape.query_heads = static_cast<int>(q.size(2));
  shape.D = static_cast<int>(v.size(3)), shape.M = static_cast<int>(k.size(3));
  return shape;
}

// One call of the fp32 kernels, which read the tensors without padding.
class Fp32Call {
 public:
  Fp32Call(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gamma, const OptionalTensor& g,
           const OptionalTensor& first, const OptionalTensor& step, const OptionalTensor& decay,
           const OptionalTensor& position, const OptionalTensor& cu, int64_t chunk,
           std::string_view objective, bool normalize, double shrinkage)
      : q_(q), k_(k), v_(v), gamma_(gamma), g_(g), step_(step), decay_(decay) {
    if (is_defined(cu)) cu_seqlens_ = cu->contiguous();
    // The kernels clamp positions to the length of a segment, which is longer than a chunk.
    if (is_defined(position)) position_ = position->clamp(0, chunk - 1).contiguous();
    auto& shape = inputs_.shape;
    shape = fp32_shape(q, k, v, chunk);
    shape.tokens = kernel_tokens(q, cu_seqlens_);
    shape.position = position_.defined() ? position_.const_data_ptr<int64_t>() : nullptr;
    shape.objective = parse_objective(objective);
    shape.normalize = normalize, shape.shrinkage = static_cast<float>(shrinkage);
    inputs_.q = input<4>(q), inputs_.k = input<4>(k), inputs_.v = input<4>(v);
    inputs_.gamma = input<3>(gamma), inputs_.g = input<3>(g);
    inputs_.start = {input<4>(first), input<4>(step), input<2>(decay)};
  }

  Results forward(const Problem::SavedShapes& saved_shapes, bool save) const {
    const auto last = states(), step = states(), decay = gated() ? sequence_scalars() : Tensor();
    const auto position = at::empty({last.size(0)}, q_.options().dtype(at::kLong));
    const auto memories = new_saved(saved_shapes.memories);
    const auto empty_fp32 = [&] { return at::empty({0}, in_fp32()); };
    const auto o = new_rows(q_, q_.size(1), cu_seqlens_, q_.size(2), v_.size(3), q_.scalar_type());
    kernels::LatticeFp32Scan p{};
    p.of = inputs_;
    p.end = {output<4>(last), output<4>(step), output<2>(decay)};
    p.last_position = position.mutable_data_ptr<int64_t>();
    if (save) {
      const auto segments = kernels::chunk_count(kernels::lattice_segment_grid(inputs_.shape));
      TORCH_INTERNAL_ASSERT(memories.size(0) == segments);  // as computed by Problem::saved
      p.memories = memories.mutable_data_ptr<float>();
    }
    p.o = output<4>(o);
    check_launch("lattice_exact_scan", kernels::lattice_fp32_scan(p, c10::cuda::getCurrentCUDAStream()));
    return {o,           last,     step,         gated() ? OptionalTensor(decay) : std::nullopt,
            position,    memories, empty_fp32(), empty_fp32(),
            empty_fp32()};
  }

  Gradients backward(const OptionalTensor& grad_o, const OptionalTensor& grad_first,
                     const OptionalTensor& grad_step, const OptionalTensor& grad_decay,
                     const Tensor& memories) const {
    const auto like = [&](const Tensor& x) {
      return cu_seqlens_.defined() ? at::zeros(x.sizes(), x.options()) : at::empty(x.sizes(), x.options());
    };
    const bool is_resumed = position_.defined() && inputs_.shape.chunk > 1;
    const auto dq = like(q_), dk = like(k_), dv = like(v_), dgamma = like(gamma_);
    const auto dg = gated() ? like(*g_) : Tensor(), dfirst = states();
    const auto dstep = is_resumed ? states() : Tensor(),
               ddecay = is_resumed && gated() ? sequence_scalars() : Tensor();
    int64_t floats = 0;
    check_launch("lattice_exact_workspace", kernels::lattice_fp32_workspace(inputs_.shape, floats));
    const auto workspace = at::empty({floats}, in_fp32());
    kernels::LatticeFp32Backward p;
    p.of = inputs_;
    p.memories = memories.const_data_ptr<float>();
    p.dout = input<4>(grad_o);
    p.dlast = input<4>(grad_first), p.dlast_step = input<4>(grad_step), p.dlast_decay = input<2>(grad_decay);
    p.dq = output<4>(dq), p.dk = output<4>(dk), p.dv = output<4>(dv);
    p.dgamma = output<3>(dgamma), p.dg = output<3>(dg);
    p.dmemory = output<4>(dfirst), p.dstep = output<4>(dstep), p.ddecay = output<2>(ddecay);
    p.workspace = workspace.mutable_data_ptr<float>();
    check_launch("lattice_exact_gradients",
                 kernels::lattice_fp32_backward(p, c10::cuda::getCurrentCUDAStream()));
    return {dq,
            dk,
            dv,
            dgamma,
            if_defined(g_, [&] { return dg; }),
            dfirst,
            is_resumed ? OptionalTensor(dstep) : zero_gradient(step_),
            is_resumed && gated() ? OptionalTensor(ddecay) : zero_gradient(decay_),
            std::nullopt,
            std::nullopt};
  }

 private:
  bool gated() const { return is_defined(g_); }
  at::TensorOptions in_fp32() const { return q_.options().dtype(at::kFloat); }
  Tensor new_saved(const std::vector<c10::SymInt>& sizes) const {
    return at::empty(C10_AS_INTARRAYREF_SLOW_ALLOC(sizes), in_fp32());
  }
  Tensor states() const {
    return at::empty({inputs_.shape.tokens.sequences, k_.size(2), v_.size(3), k_.size(3)}, in_fp32());
  }
  Tensor sequence_scalars() const {
    return at::empty({inputs_.shape.tokens.sequences, k_.size(2)}, in_fp32());
  }

  Tensor q_, k_, v_, gamma_, cu_seqlens_, position_;
  OptionalTensor g_, step_, decay_;
  kernels::LatticeFp32Inputs inputs_;
};

}  // namespace girih::lattice
