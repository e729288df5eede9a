// The tensor-core kernels of trellis and ttt.
#pragma once

#include "../arguments/shared_heads.h"
#include "call.h"

namespace girih::trellis {

// One call of the tensor-core kernels: rows aligned to 16 bytes, and one memory per query head.
class TensorCoreCall {
 public:
  explicit TensorCoreCall(const Call& call)
      : call_(call),
        q_(in_packs(call.q)),
        H_(call.x[0].size(2)),
        M_(call.a.size(3)),
        memories_(call.memories()) {
    const auto HQ = q_.size(2);
    const auto rows = [&](const Tensor& x) { return in_packs(for_each_head(x, HQ)); };
    a_ = rows(call.a), gamma_ = for_each_head(call.gamma, HQ), weight_ = packed_weight(call, HQ);
    if (given(call.g)) g_ = for_each_head(*call.g, HQ);
    if (given(call.cu_seqlens)) cu_seqlens_ = call.cu_seqlens->contiguous();
    if (const auto within = within_chunk(call.position, call.chunk); given(within)) {
      position_ = within->contiguous();
    }
    for (int m = 0; m < memories_; ++m) {
      x_[m] = rows(call.x[m]);
      const auto state = [&](const OptionalTensor& s) {
        return padded_state(H_ == HQ ? *s : s->repeat_interleave(HQ / H_, 1), false, M_, x_[m].size(3));
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
    shape_.phi = map_of(call.phi), shape_.f = map_of(call.f);
  }

  Outputs forward(bool save) const {
    bool reads = false;
    check_launch("trellis_scan_reads", kernels::trellis_scan_reads(shape_, reads));
    const auto nothing = [&] { return at::empty({0}, q_.options()); };
    const auto o = rows(shape_.output_width()), gates = token_gates();
    const bool keeps = save || !reads;
    const auto u = keeps ? of_tokens(shape_.M, q_.scalar_type()) : nothing();
    Outputs made;
    made.position = at::empty({sequences()}, q_.options().dtype(at::kLong));
    made.saved.u = save ? u : nothing();
    made.saved.z = save ? of_tokens(shape_.M, q_.scalar_type()) : nothing();
    made.saved.fit =
        save ? of_tokens(weight_.defined() ? 8 : 4, at::kFloat) : at::empty({0}, initial_[0].options());
    Tensor memories[2], last_first[2], last[2];
    kernels::TrellisScan scan;
    fill(scan, gates);
    scan.weight = data_of(weight_);
    scan.last_position = made.position.mutable_data_ptr<int64_t>();
    if (reads) scan.o = output<4>(o);
    for (int m = 0; m < memories_; ++m) {
      last_first[m] = states(m), last[m] = states(m);
      memories[m] = keeps ? kept_memories() : nothing();
      scan.first[m] = input<4>(first_[m]), scan.initial[m] = input<4>(initial_[m]);
      scan.last_first[m] = output<4>(last_first[m]), scan.last[m] = output<4>(last[m]);
      if (keeps) scan.u[m] = output<4>(u[m]);
      if (save) scan.z[m] = output<4>(made.saved.z[m]), scan.fit[m] = output<4>(made.saved.fit[m]);
      scan.memories[m] = keeps ? memories[m].mutable_data_ptr() : nullptr;
    }
    check_launch("trellis_scan", kernels::trellis_scan(scan, stream()));
    if (!reads) {
      kernels::TrellisOutput output_;
      fill(output_, gates);
      for (int m = 0; m < memories_; ++m) {
        output_.u[m] = input<4>(u[m]), output_.memories[m] = memories[m].const_data_ptr();
      }
      output_.o = output<4>(o);
      check_launch("trellis_output", kernels::trellis_output(output_, stream()));
    }
    made.o = without_packs(o, call_.output_width());
    for (int m = 0; m < memories_; ++m) {
      made.last_first[m] = one_of(last_first[m], m), made.last[m] = one_of(last[m], m);
      made.saved.memories[m] = save ? memories[m] : nothing();
    }
    return made;
  }

  InputGradients backward(const OutputGradients& gradients, const Saved& saved) const {
    const auto dout = output_gradient(call_, gradients.o), gates = token_gates(), dq = rows(shape_.D);
    const Tensor w[] = {q_, dout};
    Tensor l[2];
    kernels::TrellisRows rows_of_chunks;
    fill(rows_of_chunks, gates);
    rows_of_chunks.dout = input<4>(dout), rows_of_chunks.dq = output<4>(dq);
    for (int m = 0; m < memories_; ++m) {
      l[m] = at::empty({q_.size(0), q_.size(1), shape_.heads, shape_.M}, q_.options());
      rows_of_chunks.u[m] = input<4>(saved.u[m]);
      rows_of_chunks.memories[m] = saved.memories[m].const_data_ptr();
      rows_of_chunks.l[m] = output<4>(l[m]);
    }
    check_launch("trellis_rows", kernels::trellis_rows(rows_of_chunks, stream()));

    Tensor da[2], dx[2], dinitial[2], dfirst[2], dlast_first[2], dlast[2];
    const auto tiles = (call_.chunk + 15) / 16;
    const auto dgammas = parts(memories_), dL = g_.defined() ? parts(memories_ * tiles) : Tensor();
    kernels::TrellisReverse reverse;
    fill(reverse, gates);
    const auto dweight =
        weight_.defined() ? at::empty({sequences(), shape_.heads, shape_.M}, in_fp32()) : Tensor();
    reverse.weight = data_of(weight_);
    if (weight_.defined()) reverse.dweight = dweight.mutable_data_ptr<float>();
    reverse.dgammas = dgammas.mutable_data_ptr<float>();
    reverse.dL = dL.defined() ? dL.mutable_data_ptr<float>() : nullptr;
    for (int m = 0; m < memories_; ++m) {
      da[m] = rows(shape_.M), dx[m] = rows(shape_.width(m)), dinitial[m] = states(m);
      if (position_.defined()) dfirst[m] = states(m);
      // The gradient of a state goes to the first head of each group; the other heads get zeros.
      const auto of_heads = [&](const OptionalTensor& gradient) {
        if (!given(gradient)) return Tensor();
        const auto padded = padded_state(*gradient, false, M_, shape_.width(m));
        const auto group = shape_.heads / H_;
        if (group == 1) return padded;
        return at::constant_pad_nd(padded.unsqueeze(2), {0, 0, 0, 0, 0, group - 1}).flatten(1, 2);
      };
      dlast_first[m] = of_heads(gradients.first[m]), dlast[m] = of_heads(gradients.last[m]);
      reverse.first[m] = input<4>(first_[m]), reverse.memories[m] = saved.memories[m].const_data_ptr();
      reverse.w[m] = input<4>(w[m]), reverse.l[m] = input<4>(l[m]), reverse.u[m] = input<4>(saved.u[m]);
      reverse.z[m] = input<4>(saved.z[m]), reverse.fit[m] = input<4>(saved.fit[m]);
      reverse.dlast_first[m] = input<4>(dlast_first[m]), reverse.dlast[m] = input<4>(dlast[m]);
      reverse.dfirst[m] = output<4>(dfirst[m]), reverse.dinitial[m] = output<4>(dinitial[m]);
      reverse.da[m] = output<4>(da[m]), reverse.dx[m] = output<4>(dx[m]);
    }
    check_launch("trellis_reverse", kernels::trellis_reverse(reverse, stream()));

    const auto dgamma = numbers(), dg = g_.defined() ? numbers() : Tensor();
    const kernels::TrellisGateGradients sums{shape_, dgammas.const_data_ptr<float>(), reverse.dL,
                                             output<3>(dgamma), output<3>(dg)};
    check_launch("trellis_gate_gradients", kernels::trellis_gate_gradients(sums, stream()));

    InputGradients found;
    found.q = without_packs(dq, call_.q.size(3));
    found.a = gathered(memories_ == 2 ? da[0].add(da[1]) : da[0], call_.a);
    found.gamma = gathered(dgamma, call_.gamma);
    found.g = if_given(call_.g, [&] { return gathered(dg, *call_.g); });
    found.phi_weight = if_given(call_.phi_weight, [&] {
      const auto& weight = *call_.phi_weight;
      const auto of_heads = dweight.sum(0).narrow(1, 0, M_).unflatten(0, {H_, shape_.heads / H_}).sum(1);
      return of_heads.to(weight.scalar_type());
    });
    for (int m = 0; m < memories_; ++m) {
      found.x[m] = gathered(dx[m], call_.x[m]);
      found.initial[m] = sum_of(dinitial[m], m);
      found.first[m] = if_given(call_.first[m], [&] {
        const auto& first = *call_.first[m];
        return dfirst[m].defined() ? sum_of(dfirst[m], m) : at::zeros(first.sizes(), first.options());
      });
    }
    return found;
  }

 private:
  static cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream(); }

  at::TensorOptions in_fp32() const { return q_.options().dtype(at::kFloat); }
  int64_t sequences() const { return shape_.grid.tokens.sequences; }
  // Allocates [B, T, heads, width] for the kernels to write.
  Tensor rows(int64_t width) const {
    return rows_for(q_, q_.size(1), cu_seqlens_, shape_.heads, width, q_.scalar_type());
  }
  // Allocates [memories, B, T, heads, width].
  Tensor of_tokens(int64_t width, at::ScalarType type) const {
    return at::empty({memories_, q_.size(0), q_.size(1), shape_.heads, width}, q_.options().dtype(type));
  }
  Tensor numbers() const {
    return rows_for(q_, q_.size(1), cu_seqlens_, shape_.heads, 1, at::kFloat).squeeze(3);
  }
  // Allocates the memories before every chunk, [chunks, heads, tile, tile].
  Tensor kept_memories() const {
    const int64_t tile = kernels::trellis_tile(shape_);
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
  Tensor one_of(const Tensor& state, int memory) const {
    const auto group = shape_.heads / H_;
    const auto own = group == 1 ? state : state.unflatten(1, {H_, group}).select(2, 0);
    return own.narrow(-1, 0, call_.width(memory)).contiguous();
  }
  // The gradient of a state: the sum over the heads of a group, without padding.
  Tensor sum_of(const Tensor& state, int memory) const {
    const auto group = shape_.heads / H_;
    const auto all = group == 1 ? state : state.unflatten(1, {H_, group}).sum(2);
    return all.narrow(-1, 0, call_.width(memory)).contiguous();
  }
  Tensor gathered(const Tensor& parts, const Tensor& like) const {
    if (parts.dim() == 3) return summed_heads(parts, like).to(like.scalar_type());
    return girih::gathered(parts, H_, like.size(3), like);
  }

  template <class Problem>
  void fill(Problem& p, const Tensor& token_gates) const {
    p.shape = shape_;
    p.gates = static_cast<const kernels::TokenGate*>(token_gates.const_data_ptr());
    if constexpr (requires { p.a; }) p.a = input<4>(a_);
    if constexpr (requires { p.q; }) p.q = input<4>(q_);
    for (int m = 0; m < memories_; ++m) p.x[m] = input<4>(x_[m]);
  }

  const Call& call_;
  Tensor q_, x_[2], a_, gamma_, g_, weight_, cu_seqlens_, position_, first_[2], initial_[2];
  kernels::TrellisShape shape_;
  int64_t H_, M_;  // heads of the memory and slots, without padding
  int memories_;
};

}  // namespace girih::trellis
