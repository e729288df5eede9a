// The fp32 kernels of trellis and ttt.
#pragma once

#include "call.h"
#include "exact/exact.h"
#include "trellis/exact.h"

namespace girih::trellis {

// The part of the shape that determines the shared memory.
inline kernels::TrellisExactShape exact_shape(const Call& call) {
  kernels::TrellisExactShape shape{};
  shape.heads = static_cast<int>(call.x[0].size(2)), shape.query_heads = static_cast<int>(call.q.size(2));
  shape.memories = call.memories();
  shape.D = static_cast<int>(call.width(0)), shape.V = static_cast<int>(call.width(1));
  shape.M = static_cast<int>(call.a.size(3));
  return shape;
}

// One call of the fp32 kernels: inputs of the reads have rows aligned to 16 bytes, other tensors are passed
// without padding.
class ExactCall {
 public:
  explicit ExactCall(const Call& call)
      : call_(call),
        q_(in_packs(call.q)),
        M_(kernels::trellis_exact_packed(static_cast<int>(call.a.size(3)))),
        memories_(call.memories()),
        weight_(packed_weight(call, call.x[0].size(2))),
        shape_(exact_shape(call)) {
    for (int m = 0; m < memories_; ++m) x_[m] = in_packs(call.x[m]);
    if (given(call.cu_seqlens)) cu_seqlens_ = call.cu_seqlens->contiguous();
    if (const auto within = within_chunk(call.position, call.chunk); given(within)) {
      position_ = within->contiguous();
    }
    shape_.grid = {kernel_tokens(q_, cu_seqlens_), static_cast<int>(call.chunk),
                   position_.defined() ? position_.const_data_ptr<int64_t>() : nullptr};
    shape_.phi = map_of(call.phi), shape_.f = map_of(call.f);
    // The reads expect one gate per slot; a gate per head is expanded.
    gates_ = given(call.g) ? call.g->to(at::kFloat).unsqueeze(3).expand({-1, -1, -1, M_}).contiguous()
                           : at::zeros({M_}, in_fp32());
  }

  Outputs forward(bool save) const {
    const auto s = of_tokens(), z = save ? of_tokens() : Tensor();
    Outputs made;
    made.position = at::empty({shape_.grid.tokens.sequences}, q_.options().dtype(at::kLong));
    Tensor memories[2];
    kernels::TrellisExactScan p{};
    fill(p);
    p.a = input<4>(call_.a), p.weight = data_of(weight_);
    p.last_position = made.position.mutable_data_ptr<int64_t>();
    for (int m = 0; m < memories_; ++m) {
      memories[m] = pieces(m), made.last_first[m] = states(m), made.last[m] = states(m);
      p.first[m] = first(m), p.initial[m] = input<4>(call_.state[m]);
      p.last_first[m] = output<4>(made.last_first[m]), p.last[m] = output<4>(made.last[m]);
      p.z[m] = save ? part(z, m) : nullptr, p.s[m] = part(s, m);
      p.states[m] = memories[m].mutable_data_ptr<float>();
    }
    check_launch("trellis_exact_scan", kernels::trellis_exact_scan(p, stream()));
    const auto r = value_read(q_, 0, s, memories[0]);
    map(r, {}, {});
    const auto o = memories_ == 2 ? key_read(r, 1, s, memories[1]) : of_sequences(r).to(q_.scalar_type());
    made.o = without_packs(o, call_.output_width());
    const auto kept = [&](const Tensor& x) { return save ? x : at::empty({0}, in_fp32()); };
    for (int m = 0; m < memories_; ++m) made.saved.memories[m] = kept(memories[m]);
    made.saved.z = kept(z), made.saved.u = kept(s), made.saved.fit = at::empty({0}, in_fp32());
    return made;
  }

  InputGradients backward(const OutputGradients& gradients, const Saved& saved) const {
    const auto &z = saved.z, &s = saved.u;
    const auto dout = output_gradient(call_, gradients.o);
    // y and dr; map() replaces them by r and dy.
    const auto r = value_read(q_, 0, s, saved.memories[0]);
    const auto dy = memories_ == 2 ? value_read(dout, 1, s, saved.memories[1])
                                   : dout.to(in_fp32(), /*non_blocking=*/false, /*copy=*/true).contiguous();
    const auto reads = numbers(q_.size(2));
    map(r, dy, reads);
    const auto dq = key_read(dy, 0, s, saved.memories[0]);

    const auto dz = of_tokens(), da = of_tokens(), dgamma = numbers(heads()), started = numbers(heads());
    const auto dg = given(call_.g) ? numbers(heads()) : Tensor();
    const bool resumed = position_.defined();
    Tensor pieces_[2], dinitial[2], dfirst[2], dx[2];
    kernels::TrellisExactReverse reverse{};
    kernels::TrellisExactColumns columns{};
    fill(reverse), fill(columns);
    reverse.a = input<4>(call_.a), reverse.weight = data_of(weight_);
    const auto dweight = weight_.defined() ? of_tokens() : Tensor();
    if (weight_.defined()) reverse.dweight = dweight.mutable_data_ptr<float>();
    reverse.dgamma = dgamma.mutable_data_ptr<float>(), reverse.started = started.mutable_data_ptr<float>();
    columns.reads = reads.const_data_ptr<float>();
    columns.dgamma = reverse.dgamma, columns.started = reverse.started;
    columns.dg = dg.defined() ? dg.mutable_data_ptr<float>() : nullptr;
    for (int m = 0; m < memories_; ++m) {
      pieces_[m] = pieces(m), dinitial[m] = states(m), dx[m] = rows(heads(), x_[m].size(3), at::kFloat);
      if (resumed) dfirst[m] = states(m);
      reverse.l[m] = columns.l[m] = input<4>(m == 0 ? dy : r);
      reverse.w[m] = columns.w[m] = input<4>(m == 0 ? q_ : dout);
      reverse.z[m] = given_part(z, m), columns.s[m] = given_part(s, m);
      reverse.dlast_first[m] = columns.dlast_first[m] = input<4>(gradients.first[m]);
      reverse.dlast[m] = input<4>(gradients.last[m]);
      reverse.dfirst[m] = output<4>(dfirst[m]), reverse.dinitial[m] = output<4>(dinitial[m]);
      columns.dz[m] = reverse.dz[m] = part(dz, m), reverse.da[m] = part(da, m);
      columns.gradients[m] = reverse.gradients[m] = pieces_[m].mutable_data_ptr<float>();
      columns.first[m] = first(m);
      columns.states[m] = saved.memories[m].const_data_ptr<float>();
      columns.dx[m] = dx[m].mutable_data_ptr<float>();
    }
    check_launch("trellis_exact_reverse", kernels::trellis_exact_reverse(reverse, stream()));
    check_launch("trellis_exact_columns", kernels::trellis_exact_columns(columns, stream()));

    InputGradients found;
    found.q = without_packs(dq, call_.q.size(3));
    found.a = without_packs(da.sum(0), call_.a.size(3)).to(call_.a.scalar_type());
    found.gamma = dgamma.sum(0).to(call_.gamma.scalar_type());
    found.g = if_given(call_.g, [&] { return dg.sum(0).to(call_.g->scalar_type()); });
    found.phi_weight = if_given(call_.phi_weight, [&] {
      const auto& weight = *call_.phi_weight;
      return without_packs(dweight.sum({0, 1, 2}), weight.size(1)).to(weight.scalar_type());
    });
    for (int m = 0; m < memories_; ++m) {
      const auto& x = call_.x[m];
      found.x[m] = without_packs(dx[m], x.size(3)).to(x.scalar_type());
      found.initial[m] = dinitial[m];
      found.first[m] = if_given(call_.first[m], [&] {
        return resumed ? dfirst[m] : at::zeros(call_.first[m]->sizes(), call_.first[m]->options());
      });
    }
    return found;
  }

 private:
  static cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream(); }
  int64_t heads() const { return x_[0].size(2); }
  at::TensorOptions in_fp32() const { return q_.options().dtype(at::kFloat); }
  Tensor rows(int64_t heads, int64_t width, at::ScalarType type) const {
    return rows_for(q_, q_.size(1), cu_seqlens_, heads, width, type);
  }
  // Allocates an output per token or per chunk; zeroed with cu_seqlens, since tokens and chunks outside of
  // the sequences are not written.
  Tensor room(at::IntArrayRef sizes) const {
    return cu_seqlens_.defined() ? at::zeros(sizes, in_fp32()) : at::empty(sizes, in_fp32());
  }
  // [memories, B, T, H, M] for all memories.
  Tensor of_tokens() const { return room({memories_, q_.size(0), q_.size(1), heads(), M_}); }
  Tensor numbers(int64_t heads) const { return room({memories_, q_.size(0), q_.size(1), heads}); }
  static float* part(const Tensor& both, int m) { return both.select(0, m).mutable_data_ptr<float>(); }
  static const float* given_part(const Tensor& both, int m) {
    return both.select(0, m).const_data_ptr<float>();
  }
  Tensor pieces(int m) const {
    return room({kernels::piece_count(shape_.grid.tokens, kernels::kChunk), heads(), x_[m].size(3), M_});
  }
  Tensor states(int m) const {
    return at::empty({shape_.grid.tokens.sequences, heads(), call_.a.size(3), call_.width(m)}, in_fp32());
  }
  kernels::In<4> first(int m) const { return input<4>(position_.defined() ? call_.first[m] : std::nullopt); }

  template <class Problem>
  void fill(Problem& p) const {
    p.shape = shape_;
    p.gamma = input<3>(call_.gamma), p.g = input<3>(call_.g);
    for (int m = 0; m < memories_; ++m) p.x[m] = input<4>(x_[m]);
  }

  // The reads of the fp32 kernels of gsa.
  kernels::ExactShape read_shape(int m, const Tensor& memories) const {
    kernels::ExactShape shape{};
    shape.tokens = shape_.grid.tokens;
    shape.heads = shape_.heads, shape.query_heads = shape_.query_heads;
    shape.M = static_cast<int>(M_);
    if (given(call_.g)) {
      shape.g = input<4>(gates_);
    } else {
      shape.g.data = gates_.const_data_ptr(),
      shape.g.stride[3] = 1;  // strides of 0: one row of zeros for all tokens
    }
    shape.states = memories.const_data_ptr<float>(), shape.rows = static_cast<int>(x_[m].size(3));
    return shape;
  }
  Tensor value_read(const Tensor& of, int m, const Tensor& s, const Tensor& memories) const {
    const auto out = rows(q_.size(2), M_, at::kFloat);
    kernels::ValueRead p{};
    p.shape = read_shape(m, memories);
    p.term[0] = {input<4>(of), input<4>(x_[m]), input<4>(s.select(0, m)), 0, p.shape.rows};
    p.out = output<4>(out);
    check_launch("exact_value_read", kernels::exact_value_read(p, stream()));
    return out;
  }
  Tensor key_read(const Tensor& of, int m, const Tensor& s, const Tensor& memories) const {
    const auto out = rows(q_.size(2), x_[m].size(3), q_.scalar_type());
    kernels::KeyRead p{};
    p.shape = read_shape(m, memories);
    p.p = input<4>(of), p.s = input<4>(s.select(0, m)), p.y = input<4>(x_[m]);
    p.first_row = 0, p.width = p.shape.rows;
    p.out = output<4>(out);
    check_launch("exact_key_read", kernels::exact_key_read(p, stream()));
    return out;
  }
  // r [B, T, HQ, M] with zeros at tokens outside of the sequences. Their y is 0, and softmax(0) is not 0.
  Tensor of_sequences(const Tensor& r) const {
    if (!cu_seqlens_.defined() || shape_.f.norm != kernels::Norm::softmax) return r;
    const auto ends = cu_seqlens_.dim() == 2 ? cu_seqlens_ : cu_seqlens_.unsqueeze(0);
    const auto t = at::arange(r.size(1), ends.options());
    const auto outside = t.lt(ends.narrow(1, 0, 1)).logical_or(t.ge(ends.narrow(1, ends.size(1) - 1, 1)));
    return r.masked_fill(outside.unsqueeze(2).unsqueeze(3), 0);
  }
  // y <- f(y); if dr is defined, dr <- J_f^T dr.
  void map(const Tensor& y, const Tensor& dr, const Tensor& reads) const {
    kernels::TrellisExactRows p{};
    p.rows = y.size(0) * y.size(1) * y.size(2), p.M = shape_.M, p.f = shape_.f;
    p.y = y.mutable_data_ptr<float>();
    if (dr.defined()) {
      p.dr = dr.mutable_data_ptr<float>();
      p.reads[0] = part(reads, 0), p.reads[1] = memories_ == 2 ? part(reads, 1) : nullptr;
    }
    check_launch("trellis_exact_rows", kernels::trellis_exact_rows(p, stream()));
  }

  const Call& call_;
  Tensor q_, x_[2], cu_seqlens_, position_, gates_;
  int64_t M_;  // rounded up as the kernels need it
  int memories_;
  Tensor weight_;
  kernels::TrellisExactShape shape_;
};

}  // namespace girih::trellis
