// The tensor-core kernels of trellis and ttt.
#pragma once

#include "../arguments/shared_heads.h"
#include "arguments.h"

namespace girih::trellis {

// One call of the tensor-core kernels: rows aligned to 16 bytes, and one memory per query head.
class TensorCoreCall {
 public:
  explicit TensorCoreCall(const Call& call)
      : call_(call),
        q_(align_rows(call.q)),
        H_(call.x[0].size(2)),
        slots_(call.a.size(3)),
        memory_count_(call.memory_count()) {
    const auto HQ = q_.size(2);
    const auto rows = [&](const Tensor& x) { return align_rows(repeat_heads(x, HQ)); };
    a_ = rows(call.a), gamma_ = repeat_heads(call.gamma, HQ), phi_weight_ = pad_weight(call, HQ);
    if (is_defined(call.g)) g_ = repeat_heads(*call.g, HQ);
    cu_seqlens_ = contiguous_or_undefined(call.cu_seqlens);
    position_ = contiguous_or_undefined(call.position_in_chunk());
    for (int m = 0; m < memory_count_; ++m) {
      x_[m] = rows(call.x[m]);
      const auto pad_and_repeat = [&](const OptionalTensor& s) {
        return pad_state(H_ == HQ ? *s : s->repeat_interleave(HQ / H_, 1), false, slots_, x_[m].size(3));
      };
      initial_[m] = pad_and_repeat(call.memory[m]);
      if (position_.defined()) chunk_start_[m] = pad_and_repeat(call.chunk_start[m]);
    }
    shape_.grid = make_chunk_grid(q_, cu_seqlens_, position_, call.chunk);
    shape_.heads = static_cast<int>(HQ), shape_.memories = memory_count_;
    shape_.D = static_cast<int>(q_.size(3)),
    shape_.V = memory_count_ == 2 ? static_cast<int>(x_[1].size(3)) : 0;
    shape_.M = static_cast<int>(a_.size(3)), shape_.slots = static_cast<int>(slots_);
    shape_.dtype = kernel_dtype(q_);
    shape_.phi = parse_activation(call.phi), shape_.f = parse_activation(call.f);
  }

  Outputs forward(bool save) const {
    const auto type = q_.scalar_type();
    const auto new_saved = [&](int64_t width, at::ScalarType dtype) {
      return save ? new_token_rows(width, dtype) : at::empty({0}, q_.options().dtype(dtype));
    };
    const auto o = new_rows(shape_.output_width());
    Outputs outputs;
    outputs.position = at::empty({sequences()}, q_.options().dtype(at::kLong));
    outputs.saved.u = new_saved(shape_.M, type), outputs.saved.z = new_saved(shape_.M, type);
    outputs.saved.map_stats = new_saved(kernels::trellis_row_stats_width(phi_weight_.defined()), at::kFloat);
    Tensor last_chunk_start[2], last[2];
    kernels::TrellisForward p{};
    fill(p);
    p.last_position = outputs.position.mutable_data_ptr<int64_t>();
    p.o = output<4>(o);
    for (int m = 0; m < memory_count_; ++m) {
      last_chunk_start[m] = new_state(m), last[m] = new_state(m);
      outputs.saved.chunk_memories[m] = save ? new_chunk_memories() : at::empty({0}, q_.options());
      p.initial[m] = input<4>(initial_[m]);
      p.last_chunk_start[m] = output<4>(last_chunk_start[m]), p.last[m] = output<4>(last[m]);
      if (!save) continue;
      p.u[m] = output<4>(outputs.saved.u[m]), p.z[m] = output<4>(outputs.saved.z[m]);
      p.row_stats[m] = output<4>(outputs.saved.map_stats[m]);
      p.memories[m] = outputs.saved.chunk_memories[m].mutable_data_ptr();
    }
    GIRIH_RUN(trellis_forward, p, q_);
    outputs.o = crop_width(o, call_.output_width());
    for (int m = 0; m < memory_count_; ++m) {
      outputs.chunk_start[m] = select_first_of_group(last_chunk_start[m], m),
      outputs.memory[m] = select_first_of_group(last[m], m);
    }
    return outputs;
  }

  InputGradients backward(const OutputGradients& grads, const SavedTensors& saved) const {
    const auto dout = prepare_output_gradient(call_, grads.o), dq = new_rows(shape_.D);
    const auto dgamma = new_token_scalars(), dg = g_.defined() ? new_token_scalars() : Tensor();
    const auto dweight =
        phi_weight_.defined() ? at::empty({sequences(), shape_.heads, shape_.M}, in_fp32()) : Tensor();
    Tensor da[2], dx[2], dinitial[2], dchunk_start[2], dlast_chunk_start[2], dlast[2];
    kernels::TrellisBackward p{};
    fill(p);
    p.dout = input<4>(dout), p.dq = output<4>(dq);
    p.dgamma = output<3>(dgamma), p.dg = output<3>(dg);
    if (phi_weight_.defined()) p.dweight = dweight.mutable_data_ptr<float>();
    for (int m = 0; m < memory_count_; ++m) {
      da[m] = new_rows(shape_.M), dx[m] = new_rows(shape_.width(m)), dinitial[m] = new_state(m);
      if (position_.defined()) dchunk_start[m] = new_state(m);
      dlast_chunk_start[m] = expand_to_heads(grads.chunk_start[m], m),
      dlast[m] = expand_to_heads(grads.memory[m], m);
      p.u[m] = input<4>(saved.u[m]), p.z[m] = input<4>(saved.z[m]);
      p.row_stats[m] = input<4>(saved.map_stats[m]);
      p.memories[m] = saved.chunk_memories[m].const_data_ptr();
      p.dlast_chunk_start[m] = input<4>(dlast_chunk_start[m]), p.dlast[m] = input<4>(dlast[m]);
      p.dchunk_start[m] = output<4>(dchunk_start[m]), p.dinitial[m] = output<4>(dinitial[m]);
      p.da[m] = output<4>(da[m]), p.dx[m] = output<4>(dx[m]);
    }
    GIRIH_RUN(trellis_backward, p, q_);

    InputGradients input_gradients;
    input_gradients.q = crop_width(dq, call_.q.size(3));
    input_gradients.a = sum_copies(memory_count_ == 2 ? da[0].add(da[1]) : da[0], call_.a);
    input_gradients.gamma = sum_copies(dgamma, call_.gamma);
    input_gradients.g = if_defined(call_.g, [&] { return sum_copies(dg, *call_.g); });
    input_gradients.phi_weight = if_defined(call_.phi_weight, [&] {
      const auto& weight = *call_.phi_weight;
      const auto sum = dweight.sum(0).narrow(1, 0, slots_).unflatten(0, {H_, shape_.heads / H_}).sum(1);
      return sum.to(weight.scalar_type());
    });
    for (int m = 0; m < memory_count_; ++m) {
      input_gradients.x[m] = sum_copies(dx[m], call_.x[m]);
      input_gradients.memory[m] = sum_over_group(dinitial[m], m);
      input_gradients.chunk_start[m] = if_defined(call_.chunk_start[m], [&] {
        const auto& x = *call_.chunk_start[m];
        return dchunk_start[m].defined() ? sum_over_group(dchunk_start[m], m)
                                         : at::zeros(x.sizes(), x.options());
      });
    }
    return input_gradients;
  }

 private:
  at::TensorOptions in_fp32() const { return q_.options().dtype(at::kFloat); }
  int64_t sequences() const { return shape_.grid.tokens.sequences; }
  // Allocates [B, T, heads, width] for the kernels to write.
  Tensor new_rows(int64_t width) const {
    return girih::new_rows(q_, q_.size(1), cu_seqlens_, shape_.heads, width, q_.scalar_type());
  }
  // Allocates [memories, B, T, heads, width].
  Tensor new_token_rows(int64_t width, at::ScalarType type) const {
    return at::empty({memory_count_, q_.size(0), q_.size(1), shape_.heads, width}, q_.options().dtype(type));
  }
  Tensor new_token_scalars() const {
    return girih::new_rows(q_, q_.size(1), cu_seqlens_, shape_.heads, 1, at::kFloat).squeeze(3);
  }
  // Allocates the memories before every chunk, [chunks, heads, tile, tile].
  Tensor new_chunk_memories() const {
    const int64_t tile = kernels::trellis_tile_width(shape_);
    return at::empty({kernels::chunk_count(shape_.grid), shape_.heads, tile, tile}, q_.options());
  }
  // Allocates a state [N, heads, M, X] with padded X.
  Tensor new_state(int memory) const {
    return at::empty({sequences(), shape_.heads, slots_, shape_.width(memory)}, in_fp32());
  }
  // The state of one head per group, without padding: all heads of a group have the same state.
  Tensor select_first_of_group(const Tensor& state, int memory) const {
    const auto group = shape_.heads / H_;
    const auto own = group == 1 ? state : state.unflatten(1, {H_, group}).select(2, 0);
    return own.narrow(-1, 0, call_.width(memory)).contiguous();
  }
  // The gradient of a final state for every head: the first head of each group has the gradient, the other
  // heads have zeros.
  Tensor expand_to_heads(const OptionalTensor& gradient, int memory) const {
    if (!is_defined(gradient)) return Tensor();
    const auto padded = pad_state(*gradient, false, slots_, shape_.width(memory));
    const auto group = shape_.heads / H_;
    if (group == 1) return padded;
    return at::constant_pad_nd(padded.unsqueeze(2), {0, 0, 0, 0, 0, group - 1}).flatten(1, 2);
  }
  // The gradient of a state: the sum over the heads of a group, without padding.
  Tensor sum_over_group(const Tensor& state, int memory) const {
    const auto group = shape_.heads / H_;
    const auto all = group == 1 ? state : state.unflatten(1, {H_, group}).sum(2);
    return all.narrow(-1, 0, call_.width(memory)).contiguous();
  }
  // The gradient of x [B, T, H, ...]: the sum of those of its copies.
  Tensor sum_copies(const Tensor& gradient, const Tensor& x) const {
    if (gradient.dim() == 3) return sum_shared_heads(gradient, x).to(x.scalar_type());
    return sum_head_groups(gradient, H_, x.size(3), x);
  }

  void fill(kernels::TrellisArguments& p) const {
    p.shape = shape_;
    p.q = input<4>(q_), p.a = input<4>(a_);
    p.gamma = input<3>(gamma_), p.g = input<3>(g_), p.weight = data_or_null(phi_weight_);
    for (int m = 0; m < memory_count_; ++m) {
      p.x[m] = input<4>(x_[m]), p.chunk_start[m] = input<4>(chunk_start_[m]);
    }
  }

  const Call& call_;
  Tensor q_, x_[2], a_, gamma_, g_, phi_weight_, cu_seqlens_, position_, chunk_start_[2], initial_[2];
  kernels::TrellisShape shape_;
  int64_t H_, slots_;  // heads of the memory; slots without padding
  int memory_count_;
};

}  // namespace girih::trellis
