// The tensor-core kernels of trellis and ttt.
#pragma once

#include "../arguments/shared_heads.h"
#include "arguments.h"

namespace girih::trellis {

// One call of the tensor-core kernels: rows aligned to 16 bytes, and one memory per query head.
class TensorCoreCall {
 public:
  explicit TensorCoreCall(const CallArguments& call)
      : call_(call),
        q_(align_rows(call.q)),
        H_(call.x[0].size(2)),
        M_(call.a.size(3)),
        memories_(call.memories()) {
    const auto HQ = q_.size(2);
    const auto rows = [&](const Tensor& x) { return align_rows(repeat_heads(x, HQ)); };
    a_ = rows(call.a), gamma_ = repeat_heads(call.gamma, HQ), weight_ = pad_weight(call, HQ);
    if (is_defined(call.g)) g_ = repeat_heads(*call.g, HQ);
    if (is_defined(call.cu_seqlens)) cu_seqlens_ = call.cu_seqlens->contiguous();
    if (const auto chunk_position = position_in_chunk(call.position, call.chunk);
        is_defined(chunk_position)) {
      position_ = chunk_position->contiguous();
    }
    for (int m = 0; m < memories_; ++m) {
      x_[m] = rows(call.x[m]);
      const auto state = [&](const OptionalTensor& s) {
        return pad_state(H_ == HQ ? *s : s->repeat_interleave(HQ / H_, 1), false, M_, x_[m].size(3));
      };
      initial_[m] = state(call.state[m]);
      if (position_.defined()) first_[m] = state(call.first[m]);
    }
    shape_.grid = {kernel_tokens(q_, cu_seqlens_), static_cast<int>(call.chunk),
                   position_.defined() ? position_.const_data_ptr<int64_t>() : nullptr};
    shape_.heads = static_cast<int>(HQ), shape_.memories = memories_;
    shape_.D = static_cast<int>(q_.size(3)), shape_.V = memories_ == 2 ? static_cast<int>(x_[1].size(3)) : 0;
    shape_.M = static_cast<int>(a_.size(3)), shape_.slots = static_cast<int>(M_);
    shape_.dtype = kernel_dtype(q_);
    shape_.phi = parse_map(call.phi), shape_.f = parse_map(call.f);
  }

  Outputs forward(bool save) const {
    bool scan_computes_output = false;
    check_launch("trellis_scan_reads", kernels::trellis_scan_has_output(shape_, scan_computes_output));
    const auto new_empty = [&] { return at::empty({0}, q_.options()); };
    const auto o = rows(shape_.output_width()), gates = token_gates();
    const bool stores_chunks = save || !scan_computes_output;
    const auto u = stores_chunks ? new_token_rows(shape_.M, q_.scalar_type()) : new_empty();
    Outputs outputs;
    outputs.position = at::empty({sequences()}, q_.options().dtype(at::kLong));
    outputs.saved.u = save ? u : new_empty();
    outputs.saved.z = save ? new_token_rows(shape_.M, q_.scalar_type()) : new_empty();
    outputs.saved.fit =
        save ? new_token_rows(weight_.defined() ? 8 : 4, at::kFloat) : at::empty({0}, initial_[0].options());
    Tensor memories[2], last_first[2], last[2];
    kernels::TrellisScan scan;
    fill(scan, gates);
    scan.weight = data_or_null(weight_);
    scan.last_position = outputs.position.mutable_data_ptr<int64_t>();
    if (scan_computes_output) scan.o = output<4>(o);
    for (int m = 0; m < memories_; ++m) {
      last_first[m] = states(m), last[m] = states(m);
      memories[m] = stores_chunks ? new_memories() : new_empty();
      scan.chunk_start[m] = input<4>(first_[m]), scan.initial[m] = input<4>(initial_[m]);
      scan.last_chunk_start[m] = output<4>(last_first[m]), scan.last[m] = output<4>(last[m]);
      if (stores_chunks) scan.u[m] = output<4>(u[m]);
      if (save)
        scan.z[m] = output<4>(outputs.saved.z[m]), scan.row_stats[m] = output<4>(outputs.saved.fit[m]);
      scan.memories[m] = stores_chunks ? memories[m].mutable_data_ptr() : nullptr;
    }
    check_launch("trellis_scan", kernels::trellis_scan(scan, stream()));
    if (!scan_computes_output) {
      kernels::TrellisOutput output_;
      fill(output_, gates);
      for (int m = 0; m < memories_; ++m) {
        output_.u[m] = input<4>(u[m]), output_.memories[m] = memories[m].const_data_ptr();
      }
      output_.o = output<4>(o);
      check_launch("trellis_output", kernels::trellis_output(output_, stream()));
    }
    outputs.o = crop_width(o, call_.output_width());
    for (int m = 0; m < memories_; ++m) {
      outputs.last_first[m] = select_group_head(last_first[m], m),
      outputs.last[m] = select_group_head(last[m], m);
      outputs.saved.memories[m] = save ? memories[m] : new_empty();
    }
    return outputs;
  }

  InputGradients backward(const OutputGradients& gradients, const SavedTensors& saved) const {
    const auto dout = output_gradient(call_, gradients.o), gates = token_gates(), dq = rows(shape_.D);
    const Tensor w[] = {q_, dout};
    Tensor l[2];
    kernels::TrellisDq rows_of_chunks;
    fill(rows_of_chunks, gates);
    rows_of_chunks.dout = input<4>(dout), rows_of_chunks.dq = output<4>(dq);
    for (int m = 0; m < memories_; ++m) {
      l[m] = at::empty({q_.size(0), q_.size(1), shape_.heads, shape_.M}, q_.options());
      rows_of_chunks.u[m] = input<4>(saved.u[m]);
      rows_of_chunks.memories[m] = saved.memories[m].const_data_ptr();
      rows_of_chunks.l[m] = output<4>(l[m]);
    }
    check_launch("trellis_rows", kernels::trellis_dq(rows_of_chunks, stream()));

    Tensor da[2], dx[2], dinitial[2], dfirst[2], dlast_first[2], dlast[2];
    const auto tiles = (call_.chunk + 15) / 16;
    const auto dgammas = parts(memories_), dL = g_.defined() ? parts(memories_ * tiles) : Tensor();
    kernels::TrellisReverse reverse;
    fill(reverse, gates);
    const auto dweight =
        weight_.defined() ? at::empty({sequences(), shape_.heads, shape_.M}, in_fp32()) : Tensor();
    reverse.weight = data_or_null(weight_);
    if (weight_.defined()) reverse.dweight = dweight.mutable_data_ptr<float>();
    reverse.dgammas = dgammas.mutable_data_ptr<float>();
    reverse.dL = dL.defined() ? dL.mutable_data_ptr<float>() : nullptr;
    for (int m = 0; m < memories_; ++m) {
      da[m] = rows(shape_.M), dx[m] = rows(shape_.width(m)), dinitial[m] = states(m);
      if (position_.defined()) dfirst[m] = states(m);
      // The gradient of a state goes to the first head of each group; the other heads get zeros.
      const auto of_heads = [&](const OptionalTensor& gradient) {
        if (!is_defined(gradient)) return Tensor();
        const auto padded = pad_state(*gradient, false, M_, shape_.width(m));
        const auto group = shape_.heads / H_;
        if (group == 1) return padded;
        return at::constant_pad_nd(padded.unsqueeze(2), {0, 0, 0, 0, 0, group - 1}).flatten(1, 2);
      };
      dlast_first[m] = of_heads(gradients.first[m]), dlast[m] = of_heads(gradients.last[m]);
      reverse.chunk_start[m] = input<4>(first_[m]), reverse.memories[m] = saved.memories[m].const_data_ptr();
      reverse.w[m] = input<4>(w[m]), reverse.l[m] = input<4>(l[m]), reverse.u[m] = input<4>(saved.u[m]);
      reverse.z[m] = input<4>(saved.z[m]), reverse.row_stats[m] = input<4>(saved.fit[m]);
      reverse.dlast_chunk_start[m] = input<4>(dlast_first[m]), reverse.dlast[m] = input<4>(dlast[m]);
      reverse.dchunk_start[m] = output<4>(dfirst[m]), reverse.dinitial[m] = output<4>(dinitial[m]);
      reverse.da[m] = output<4>(da[m]), reverse.dx[m] = output<4>(dx[m]);
    }
    check_launch("trellis_reverse", kernels::trellis_reverse(reverse, stream()));

    const auto dgamma = new_token_scalars(), dg = g_.defined() ? new_token_scalars() : Tensor();
    const kernels::TrellisGateGradients sums{shape_, dgammas.const_data_ptr<float>(), reverse.dL,
                                             output<3>(dgamma), output<3>(dg)};
    check_launch("trellis_gate_gradients", kernels::trellis_gate_gradients(sums, stream()));

    InputGradients input_gradients;
    input_gradients.q = crop_width(dq, call_.q.size(3));
    input_gradients.a = sum_head_groups(memories_ == 2 ? da[0].add(da[1]) : da[0], call_.a);
    input_gradients.gamma = sum_head_groups(dgamma, call_.gamma);
    input_gradients.g = if_defined(call_.g, [&] { return sum_head_groups(dg, *call_.g); });
    input_gradients.phi_weight = if_defined(call_.phi_weight, [&] {
      const auto& weight = *call_.phi_weight;
      const auto of_heads = dweight.sum(0).narrow(1, 0, M_).unflatten(0, {H_, shape_.heads / H_}).sum(1);
      return of_heads.to(weight.scalar_type());
    });
    for (int m = 0; m < memories_; ++m) {
      input_gradients.x[m] = sum_head_groups(dx[m], call_.x[m]);
      input_gradients.initial[m] = sum_group_heads(dinitial[m], m);
      input_gradients.first[m] = if_defined(call_.first[m], [&] {
        const auto& first = *call_.first[m];
        return dfirst[m].defined() ? sum_group_heads(dfirst[m], m)
                                   : at::zeros(first.sizes(), first.options());
      });
    }
    return input_gradients;
  }

 private:
  static cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream(); }

  at::TensorOptions in_fp32() const { return q_.options().dtype(at::kFloat); }
  int64_t sequences() const { return shape_.grid.tokens.sequences; }
  // Allocates [B, T, heads, width] for the kernels to write.
  Tensor rows(int64_t width) const {
    return new_rows(q_, q_.size(1), cu_seqlens_, shape_.heads, width, q_.scalar_type());
  }
  // Allocates [memories, B, T, heads, width].
  Tensor new_token_rows(int64_t width, at::ScalarType type) const {
    return at::empty({memories_, q_.size(0), q_.size(1), shape_.heads, width}, q_.options().dtype(type));
  }
  Tensor new_token_scalars() const {
    return new_rows(q_, q_.size(1), cu_seqlens_, shape_.heads, 1, at::kFloat).squeeze(3);
  }
  // Allocates the memories before every chunk, [chunks, heads, tile, tile].
  Tensor new_memories() const {
    const int64_t tile = kernels::trellis_tile_width(shape_);
    return at::empty({kernels::chunk_count(shape_.grid), shape_.heads, tile, tile}, q_.options());
  }
  // Allocates `count` scalars per token and head.
  Tensor parts(int64_t count) const {
    return at::empty({count, q_.size(0), q_.size(1), shape_.heads}, in_fp32());
  }
  // Computes kernels::TokenGate of every token.
  Tensor token_gates() const {
    const auto tokens = at::empty(
        {q_.size(0), q_.size(1), shape_.heads, sizeof(kernels::TokenGate) / sizeof(float)}, in_fp32());
    const kernels::TrellisGates p{shape_, input<3>(gamma_), input<3>(g_),
                                  static_cast<kernels::TokenGate*>(tokens.mutable_data_ptr())};
    check_launch("trellis_gates", kernels::trellis_gates(p, stream()));
    return tokens;
  }
  // Allocates a state [N, heads, M, X] with padded X.
  Tensor states(int memory) const {
    return at::empty({sequences(), shape_.heads, M_, shape_.width(memory)}, in_fp32());
  }
  // The state of one head per group, without padding: all heads of a group have the same state.
  Tensor select_group_head(const Tensor& state, int memory) const {
    const auto group = shape_.heads / H_;
    const auto own = group == 1 ? state : state.unflatten(1, {H_, group}).select(2, 0);
    return own.narrow(-1, 0, call_.width(memory)).contiguous();
  }
  // The gradient of a state: the sum over the heads of a group, without padding.
  Tensor sum_group_heads(const Tensor& state, int memory) const {
    const auto group = shape_.heads / H_;
    const auto all = group == 1 ? state : state.unflatten(1, {H_, group}).sum(2);
    return all.narrow(-1, 0, call_.width(memory)).contiguous();
  }
  Tensor sum_head_groups(const Tensor& parts, const Tensor& like) const {
    if (parts.dim() == 3) return sum_shared_heads(parts, like).to(like.scalar_type());
    return girih::sum_head_groups(parts, H_, like.size(3), like);
  }

  template <class Problem>
  void fill(Problem& p, const Tensor& token_gates) const {
    p.shape = shape_;
    p.gates = static_cast<const kernels::TokenGate*>(token_gates.const_data_ptr());
    if constexpr (requires { p.a; }) p.a = input<4>(a_);
    if constexpr (requires { p.q; }) p.q = input<4>(q_);
    for (int m = 0; m < memories_; ++m) p.x[m] = input<4>(x_[m]);
  }

  const CallArguments& call_;
  Tensor q_, x_[2], a_, gamma_, g_, weight_, cu_seqlens_, position_, first_[2], initial_[2];
  kernels::TrellisShape shape_;
  int64_t H_, M_;  // heads of the memory and slots, without padding
  int memories_;
};

}  // namespace girih::trellis
