// The fp32 kernels of lattice.
#pragma once

#include "../arguments/kernel_arguments.h"
#include "aten.h"
#include "lattice/lattice.h"

namespace girih::lattice {

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
inline kernels::LatticeFp32Shape fp32_shape(const Call& call) {
  kernels::LatticeFp32Shape shape{};
  shape.chunk = static_cast<int>(call.chunk);
  shape.heads = static_cast<int>(call.k.size(2)), shape.query_heads = static_cast<int>(call.q.size(2));
  shape.D = static_cast<int>(call.v.size(3)), shape.M = static_cast<int>(call.k.size(3));
  return shape;
}

// One call of the fp32 kernels, which read the tensors without padding.
class Fp32Call {
 public:
  explicit Fp32Call(const Call& call) : call_(call), cu_seqlens_(contiguous_or_undefined(call.cu_seqlens)) {
    // The kernels clamp positions to the length of a segment, which is longer than a chunk.
    if (is_defined(call.state_position)) {
      position_ = call.state_position->clamp(0, call.chunk - 1).contiguous();
    }
    auto& shape = inputs_.shape;
    shape = fp32_shape(call);
    shape.tokens = sequence_layout(call.q, cu_seqlens_);
    shape.position = position_.defined() ? position_.const_data_ptr<int64_t>() : nullptr;
    shape.objective = parse_objective(call.objective);
    shape.normalize = call.normalize, shape.shrinkage = static_cast<float>(call.shrinkage);
    inputs_.q = input<4>(call.q), inputs_.k = input<4>(call.k), inputs_.v = input<4>(call.v);
    inputs_.gamma = input<3>(call.gamma), inputs_.g = input<3>(call.g);
    inputs_.start = {input<4>(call.state_first), input<4>(call.state_step), input<2>(call.state_decay)};
  }

  Results forward(const Problem::SavedShapes& saved_shapes, bool save) const {
    const auto last = new_state(), step = new_state(), decay = has_gates() ? sequence_scalars() : Tensor();
    const auto position = at::empty({last.size(0)}, call_.q.options().dtype(at::kLong));
    const auto memories = new_saved(saved_shapes.memories, in_fp32());
    const auto empty_fp32 = [&] { return at::empty({0}, in_fp32()); };
    const auto o = new_rows(call_.q, call_.q.size(1), cu_seqlens_, call_.q.size(2), call_.v.size(3),
                            call_.q.scalar_type());
    kernels::LatticeFp32Forward p{};
    p.inputs = inputs_;
    p.end = {output<4>(last), output<4>(step), output<2>(decay)};
    p.last_position = position.mutable_data_ptr<int64_t>();
    if (save) {
      const auto segments = kernels::chunk_count(kernels::lattice_segment_grid(inputs_.shape));
      TORCH_INTERNAL_ASSERT(memories.size(0) == segments);  // as computed by Problem::saved
      p.memories = memories.mutable_data_ptr<float>();
    }
    p.o = output<4>(o);
    GIRIH_LAUNCH(lattice_fp32_forward, p);
    return {o,           last,     step,         has_gates() ? OptionalTensor(decay) : std::nullopt,
            position,    memories, empty_fp32(), empty_fp32(),
            empty_fp32()};
  }

  Gradients backward(const OutputGradients& grads, const Tensor& memories) const {
    const auto new_gradient = [&](const Tensor& x) {
      return cu_seqlens_.defined() ? at::zeros(x.sizes(), x.options()) : at::empty(x.sizes(), x.options());
    };
    const bool is_resumed = position_.defined() && inputs_.shape.chunk > 1;
    const auto dq = new_gradient(call_.q), dk = new_gradient(call_.k), dv = new_gradient(call_.v),
               dgamma = new_gradient(call_.gamma);
    const auto dg = has_gates() ? new_gradient(*call_.g) : Tensor(), dmemory = new_state();
    const auto dstep = is_resumed ? new_state() : Tensor(),
               ddecay = is_resumed && has_gates() ? sequence_scalars() : Tensor();
    kernels::LatticeFp32Backward p{};
    p.inputs = inputs_;
    p.memories = memories.const_data_ptr<float>();
    p.dout = input<4>(grads.o);
    p.dlast = input<4>(grads.first), p.dlast_step = input<4>(grads.step),
    p.dlast_decay = input<2>(grads.decay);
    p.dq = output<4>(dq), p.dk = output<4>(dk), p.dv = output<4>(dv);
    p.dgamma = output<3>(dgamma), p.dg = output<3>(dg);
    p.dmemory = output<4>(dmemory), p.dstep = output<4>(dstep), p.ddecay = output<2>(ddecay);
    GIRIH_RUN(lattice_fp32_backward, p, call_.q);
    return {dq,
            dk,
            dv,
            dgamma,
            if_defined(call_.g, [&] { return dg; }),
            dmemory,
            is_resumed ? OptionalTensor(dstep) : zero_gradient(call_.state_step),
            is_resumed && has_gates() ? OptionalTensor(ddecay) : zero_gradient(call_.state_decay),
            std::nullopt,
            std::nullopt};
  }

 private:
  bool has_gates() const { return is_defined(call_.g); }
  at::TensorOptions in_fp32() const { return call_.q.options().dtype(at::kFloat); }
  Tensor new_state() const {
    return at::empty({inputs_.shape.tokens.sequences, call_.k.size(2), call_.v.size(3), call_.k.size(3)},
                     in_fp32());
  }
  Tensor sequence_scalars() const {
    return at::empty({inputs_.shape.tokens.sequences, call_.k.size(2)}, in_fp32());
  }

  const Call& call_;
  Tensor cu_seqlens_, position_;
  kernels::LatticeFp32Inputs inputs_;
};

}  // namespace girih::lattice
