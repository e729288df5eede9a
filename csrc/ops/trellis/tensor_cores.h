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
    bool scan_computes_output = false;
    GIRIH_QUERY(trellis_scan_has_output, shape_, scan_computes_output);
    const auto new_empty = [&] { return at::empty({0}, q_.options()); };
    const auto o = new_rows(shape_.output_width()), gates = compute_token_gates();
    const bool stores_chunk_memories = save || !scan_computes_output;
    const auto u = stores_chunk_memories ? new_token_rows(shape_.M, q_.scalar_type()) : new_empty();
    Outputs outputs;
    outputs.position = at::empty({sequences()}, q_.options().dtype(at::kLong));
    outputs.saved.u = save ? u : new_empty();
    outputs.saved.z = save ? new_token_rows(shape_.M, q_.scalar_type()) : new_empty();
    outputs.saved.map_stats = save ? new_token_rows(phi_weight_.defined() ? 8 : 4, at::kFloat)
                                   : at::empty({0}, initial_[0].options());
    Tensor chunk_memories[2], last_chunk_start[2], last[2];
    kernels::TrellisScan scan;
    fill(scan, gates);
    scan.weight = data_or_null(phi_weight_);
    scan.last_position = outputs.position.mutable_data_ptr<int64_t>();
    if (scan_computes_output) scan.o = output<4>(o);
    for (int m = 0; m < memory_count_; ++m) {
      last_chunk_start[m] = new_state(m), last[m] = new_state(m);
      chunk_memories[m] = stores_chunk_memories ? new_chunk_memories() : new_empty();
      scan.chunk_start[m] = input<4>(chunk_start_[m]), scan.initial[m] = input<4>(initial_[m]);
      scan.last_chunk_start[m] = output<4>(last_chunk_start[m]), scan.last[m] = output<4>(last[m]);
      if (stores_chunk_memories) scan.u[m] = output<4>(u[m]);
      if (save)
        scan.z[m] = output<4>(outputs.saved.z[m]), scan.row_stats[m] = output<4>(outputs.saved.map_stats[m]);
      scan.memories[m] = stores_chunk_memories ? chunk_memories[m].mutable_data_ptr() : nullptr;
    }
    GIRIH_LAUNCH(trellis_scan, scan);
    if (!scan_computes_output) {
      kernels::TrellisOutput output_;
      fill(output_, gates);
      for (int m = 0; m < memory_count_; ++m) {
        output_.u[m] = input<4>(u[m]), output_.memories[m] = chunk_memories[m].const_data_ptr();
      }
      output_.o = output<4>(o);
      GIRIH_LAUNCH(trellis_output, output_);
    }
    outputs.o = crop_width(o, call_.output_width());
    for (int m = 0; m < memory_count_; ++m) {
      outputs.chunk_start[m] = select_first_of_group(last_chunk_start[m], m),
      outputs.memory[m] = select_first_of_group(last[m], m);
      outputs.saved.chunk_memories[m] = save ? chunk_memories[m] : new_empty();
    }
    return outputs;
  }

  InputGradients backward(const OutputGradients& grads, const SavedTensors& saved) const {
    const auto dout = prepare_output_gradient(call_, grads.o), gates = compute_token_gates(),
               dq = new_rows(shape_.D);
    // A read of memory A is read_left^T A read_right: (dy, q) for keys, (r, dout) for values.
    const Tensor read_right[] = {q_, dout};
    Tensor read_left[2];
    kernels::TrellisDq dq_arguments;
    fill(dq_arguments, gates);
    dq_arguments.dout = input<4>(dout), dq_arguments.dq = output<4>(dq);
    for (int m = 0; m < memory_count_; ++m) {
      read_left[m] = at::empty({q_.size(0), q_.size(1), shape_.heads, shape_.M}, q_.options());
      dq_arguments.u[m] = input<4>(saved.u[m]);
      dq_arguments.memories[m] = saved.chunk_memories[m].const_data_ptr();
      dq_arguments.l[m] = output<4>(read_left[m]);
    }
    GIRIH_LAUNCH(trellis_dq, dq_arguments);

    Tensor da[2], dx[2], dinitial[2], dchunk_start[2], dlast_chunk_start[2], dlast[2];
    const auto tiles = (call_.chunk + 15) / 16;  // tiles of 16 tokens of a chunk
    const auto dgammas = new_token_partials(memory_count_),
               dlog_decay = g_.defined() ? new_token_partials(memory_count_ * tiles) : Tensor();
    kernels::TrellisReverse reverse;
    fill(reverse, gates);
    const auto dweight =
        phi_weight_.defined() ? at::empty({sequences(), shape_.heads, shape_.M}, in_fp32()) : Tensor();
    reverse.weight = data_or_null(phi_weight_);
    if (phi_weight_.defined()) reverse.dweight = dweight.mutable_data_ptr<float>();
    reverse.dgammas = dgammas.mutable_data_ptr<float>();
    reverse.dL = dlog_decay.defined() ? dlog_decay.mutable_data_ptr<float>() : nullptr;
    for (int m = 0; m < memory_count_; ++m) {
      da[m] = new_rows(shape_.M), dx[m] = new_rows(shape_.width(m)), dinitial[m] = new_state(m);
      if (position_.defined()) dchunk_start[m] = new_state(m);
      // The gradient of a state goes to the first head of each group; the other heads get zeros.
      const auto expand_to_heads = [&](const OptionalTensor& gradient) {
        if (!is_defined(gradient)) return Tensor();
        const auto padded = pad_state(*gradient, false, slots_, shape_.width(m));
        const auto group = shape_.heads / H_;
        if (group == 1) return padded;
        return at::constant_pad_nd(padded.unsqueeze(2), {0, 0, 0, 0, 0, group - 1}).flatten(1, 2);
      };
      dlast_chunk_start[m] = expand_to_heads(grads.chunk_start[m]),
      dlast[m] = expand_to_heads(grads.memory[m]);
      reverse.chunk_start[m] = input<4>(chunk_start_[m]),
      reverse.memories[m] = saved.chunk_memories[m].const_data_ptr();
      reverse.w[m] = input<4>(read_right[m]), reverse.l[m] = input<4>(read_left[m]),
      reverse.u[m] = input<4>(saved.u[m]);
      reverse.z[m] = input<4>(saved.z[m]), reverse.row_stats[m] = input<4>(saved.map_stats[m]);
      reverse.dlast_chunk_start[m] = input<4>(dlast_chunk_start[m]), reverse.dlast[m] = input<4>(dlast[m]);
      reverse.dchunk_start[m] = output<4>(dchunk_start[m]), reverse.dinitial[m] = output<4>(dinitial[m]);
      reverse.da[m] = output<4>(da[m]), reverse.dx[m] = output<4>(dx[m]);
    }
    GIRIH_LAUNCH(trellis_reverse, reverse);

    const auto dgamma = new_token_scalars(), dg = g_.defined() ? new_token_scalars() : Tensor();
    const kernels::TrellisGateGradients sums{shape_, dgammas.const_data_ptr<float>(), reverse.dL,
                                             output<3>(dgamma), output<3>(dg)};
    GIRIH_LAUNCH(trellis_gate_gradients, sums);

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
  // Allocates `count` scalars per token and head.
  Tensor new_token_partials(int64_t count) const {
    return at::empty({count, q_.size(0), q_.size(1), shape_.heads}, in_fp32());
  }
  // Computes kernels::TokenGate of every token.
  Tensor compute_token_gates() const {
    const auto gates = at::empty(
        {q_.size(0), q_.size(1), shape_.heads, sizeof(kernels::TokenGate) / sizeof(float)}, in_fp32());
    const kernels::TrellisGates p{shape_, input<3>(gamma_), input<3>(g_),
                                  static_cast<kernels::TokenGate*>(gates.mutable_data_ptr())};
    GIRIH_LAUNCH(trellis_gates, p);
    return gates;
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

  template <class KernelArguments>
  void fill(KernelArguments& p, const Tensor& token_gates) const {
    p.shape = shape_;
    p.gates = static_cast<const kernels::TokenGate*>(token_gates.const_data_ptr());
    if constexpr (requires { p.a; }) p.a = input<4>(a_);
    if constexpr (requires { p.q; }) p.q = input<4>(q_);
    for (int m = 0; m < memory_count_; ++m) p.x[m] = input<4>(x_[m]);
  }

  const Call& call_;
  Tensor q_, x_[2], a_, gamma_, g_, phi_weight_, cu_seqlens_, position_, chunk_start_[2], initial_[2];
  kernels::TrellisShape shape_;
  int64_t H_, slots_;  // heads of the memory; slots without padding
  int memory_count_;
};

}  // namespace girih::trellis
