// The fp32 kernels of trellis and ttt.
#pragma once

#include "arguments.h"

namespace girih::trellis {

// The part of the shape that determines the shared memory.
inline kernels::TrellisFp32Shape fp32_shape(const Call& call) {
  kernels::TrellisFp32Shape shape{};
  shape.heads = static_cast<int>(call.x[0].size(2)), shape.query_heads = static_cast<int>(call.q.size(2));
  shape.memories = call.memory_count();
  shape.D = static_cast<int>(call.width(0)), shape.V = static_cast<int>(call.width(1));
  shape.M = static_cast<int>(call.a.size(3));
  return shape;
}

// One call of the fp32 kernels: inputs of the reads have rows aligned to 16 bytes, other tensors are passed
// without padding.
class Fp32Call {
 public:
  explicit Fp32Call(const Call& call)
      : call_(call),
        q_(align_rows(call.q)),
        padded_slots_(kernels::trellis_fp32_padded_width(static_cast<int>(call.a.size(3)))),
        memory_count_(call.memory_count()),
        phi_weight_(pad_weight(call, call.x[0].size(2))),
        shape_(fp32_shape(call)) {
    for (int m = 0; m < memory_count_; ++m) x_[m] = align_rows(call.x[m]);
    cu_seqlens_ = contiguous_or_undefined(call.cu_seqlens);
    position_ = contiguous_or_undefined(call.position_in_chunk());
    shape_.grid = make_chunk_grid(q_, cu_seqlens_, position_, call.chunk);
    shape_.phi = parse_activation(call.phi), shape_.f = parse_activation(call.f);
    // The reads expect one gate per slot; a gate per head is expanded.
    slot_gates_ = is_defined(call.g)
                      ? call.g->to(at::kFloat).unsqueeze(3).expand({-1, -1, -1, padded_slots_}).contiguous()
                      : at::zeros({padded_slots_}, in_fp32()).expand({q_.size(0), q_.size(1), heads(), -1});
  }

  Outputs forward(bool save) const {
    // With one memory the kernels write o as r, in fp32.
    const bool has_values = memory_count_ == 2;
    const auto o = has_values ? new_rows(q_.size(2), x_[1].size(3), q_.scalar_type())
                              : new_rows(q_.size(2), padded_slots_, at::kFloat);
    Outputs outputs;
    outputs.position = at::empty({sequences()}, q_.options().dtype(at::kLong));
    outputs.saved.u = save ? new_token_rows() : new_empty();  // saved as u: s = -gamma u
    outputs.saved.z = save ? new_token_rows() : new_empty();
    outputs.saved.map_stats = new_empty();
    kernels::TrellisFp32Forward p{};
    fill(p);
    p.last_position = outputs.position.mutable_data_ptr<int64_t>();
    p.o = output<4>(o);
    for (int m = 0; m < memory_count_; ++m) {
      outputs.chunk_start[m] = new_state(m), outputs.memory[m] = new_state(m);
      outputs.saved.chunk_memories[m] = save ? new_chunk_memories(m) : new_empty();
      p.initial[m] = input<4>(call_.memory[m]);
      p.last_chunk_start[m] = output<4>(outputs.chunk_start[m]), p.last[m] = output<4>(outputs.memory[m]);
      if (!save) continue;
      p.z[m] = mutable_memory_data(outputs.saved.z, m), p.s[m] = mutable_memory_data(outputs.saved.u, m);
      p.states[m] = outputs.saved.chunk_memories[m].mutable_data_ptr<float>();
    }
    GIRIH_RUN(trellis_fp32_forward, p, q_);
    outputs.o = crop_width(has_values ? o : zero_outside(o).to(q_.scalar_type()), call_.output_width());
    return outputs;
  }

  InputGradients backward(const OutputGradients& grads, const SavedTensors& saved) const {
    const auto dout = prepare_output_gradient(call_, grads.o);
    const auto dq = new_rows(q_.size(2), q_.size(3), q_.scalar_type());
    const auto da = new_results({padded_slots_}), dgamma = new_results({});
    const auto dg = is_defined(call_.g) ? new_results({}) : Tensor();
    const auto dweight = phi_weight_.defined() ? new_results({padded_slots_}) : Tensor();
    const bool is_resumed = position_.defined();
    Tensor dr, dinitial[2], dchunk_start[2], dx[2];
    kernels::TrellisFp32Backward p{};
    fill(p);
    if (memory_count_ == 2) {
      p.dout = input<4>(dout);
    } else {
      dr = dout.to(in_fp32(), /*non_blocking=*/false, /*copy=*/true).contiguous();  // the kernels replace dr
      p.dr = dr.mutable_data_ptr<float>();
    }
    p.dq = output<4>(dq), p.dgamma = dgamma.mutable_data_ptr<float>();
    if (dg.defined()) p.dg = dg.mutable_data_ptr<float>();
    if (dweight.defined()) p.dweight = dweight.mutable_data_ptr<float>();
    for (int m = 0; m < memory_count_; ++m) {
      dinitial[m] = new_state(m), dx[m] = new_rows(heads(), x_[m].size(3), at::kFloat);
      if (is_resumed) dchunk_start[m] = new_state(m);
      p.z[m] = memory_data(saved.z, m), p.s[m] = memory_data(saved.u, m);
      p.states[m] = saved.chunk_memories[m].const_data_ptr<float>();
      p.dlast_chunk_start[m] = input<4>(grads.chunk_start[m]), p.dlast[m] = input<4>(grads.memory[m]);
      p.dchunk_start[m] = output<4>(dchunk_start[m]), p.dinitial[m] = output<4>(dinitial[m]);
      p.da[m] = mutable_memory_data(da, m), p.dx[m] = dx[m].mutable_data_ptr<float>();
    }
    GIRIH_RUN(trellis_fp32_backward, p, q_);

    InputGradients input_gradients;
    input_gradients.q = crop_width(dq, call_.q.size(3));
    input_gradients.a = crop_width(da.sum(0), call_.a.size(3)).to(call_.a.scalar_type());
    input_gradients.gamma = dgamma.sum(0).to(call_.gamma.scalar_type());
    input_gradients.g = if_defined(call_.g, [&] { return dg.sum(0).to(call_.g->scalar_type()); });
    input_gradients.phi_weight = if_defined(call_.phi_weight, [&] {
      const auto& weight = *call_.phi_weight;
      return crop_width(dweight.sum({0, 1, 2}), weight.size(1)).to(weight.scalar_type());
    });
    for (int m = 0; m < memory_count_; ++m) {
      const auto& x = call_.x[m];
      input_gradients.x[m] = crop_width(dx[m], x.size(3)).to(x.scalar_type());
      input_gradients.memory[m] = dinitial[m];
      input_gradients.chunk_start[m] = if_defined(call_.chunk_start[m], [&] {
        return is_resumed ? dchunk_start[m]
                          : at::zeros(call_.chunk_start[m]->sizes(), call_.chunk_start[m]->options());
      });
    }
    return input_gradients;
  }

 private:
  int64_t heads() const { return x_[0].size(2); }
  int64_t sequences() const { return shape_.grid.tokens.sequences; }
  at::TensorOptions in_fp32() const { return q_.options().dtype(at::kFloat); }
  Tensor new_empty() const { return at::empty({0}, in_fp32()); }
  Tensor new_rows(int64_t heads, int64_t width, at::ScalarType type) const {
    return girih::new_rows(q_, q_.size(1), cu_seqlens_, heads, width, type);
  }
  // Allocates [memories, B, T, H, size...], which PyTorch sums; zeroed with cu_seqlens, since tokens outside
  // of the sequences are not written.
  Tensor new_results(at::IntArrayRef size) const {
    std::vector<int64_t> sizes{memory_count_, q_.size(0), q_.size(1), heads()};
    sizes.insert(sizes.end(), size.begin(), size.end());
    return cu_seqlens_.defined() ? at::zeros(sizes, in_fp32()) : at::empty(sizes, in_fp32());
  }
  // Allocates [memories, B, T, H, M].
  Tensor new_token_rows() const {
    return at::empty({memory_count_, q_.size(0), q_.size(1), heads(), padded_slots_}, in_fp32());
  }
  static float* mutable_memory_data(const Tensor& tensors, int m) {
    return tensors.select(0, m).mutable_data_ptr<float>();
  }
  static const float* memory_data(const Tensor& tensors, int m) {
    return tensors.select(0, m).const_data_ptr<float>();
  }
  Tensor new_chunk_memories(int m) const {
    return at::empty({kernels::token_range_count(shape_.grid.tokens, kernels::kChunk), heads(), x_[m].size(3),
                      padded_slots_},
                     in_fp32());
  }
  Tensor new_state(int m) const {
    return at::empty({sequences(), heads(), call_.a.size(3), call_.width(m)}, in_fp32());
  }

  void fill(kernels::TrellisFp32Arguments& p) const {
    p.shape = shape_;
    p.q = input<4>(q_), p.a = input<4>(call_.a);
    p.gamma = input<3>(call_.gamma), p.g = input<3>(call_.g), p.slot_gates = input<4>(slot_gates_);
    p.weight = data_or_null(phi_weight_);
    for (int m = 0; m < memory_count_; ++m) {
      p.x[m] = input<4>(x_[m]);
      if (position_.defined()) p.chunk_start[m] = input<4>(call_.chunk_start[m]);
    }
  }

  // r [B, T, HQ, M] with zeros at tokens outside of the sequences. Their y is 0, and softmax(0) is not 0.
  Tensor zero_outside(const Tensor& r) const {
    if (!cu_seqlens_.defined() || shape_.f.norm != kernels::Norm::softmax) return r;
    const auto ends = cu_seqlens_.dim() == 2 ? cu_seqlens_ : cu_seqlens_.unsqueeze(0);
    const auto t = at::arange(r.size(1), ends.options());
    const auto outside = t.lt(ends.narrow(1, 0, 1)).logical_or(t.ge(ends.narrow(1, ends.size(1) - 1, 1)));
    return r.masked_fill(outside.unsqueeze(2).unsqueeze(3), 0);
  }

  const Call& call_;
  Tensor q_, x_[2], cu_seqlens_, position_, slot_gates_;
  int64_t padded_slots_;  // M rounded up as the kernels need it
  int memory_count_;
  Tensor phi_weight_;
  kernels::TrellisFp32Shape shape_;
};

}  // namespace girih::trellis
