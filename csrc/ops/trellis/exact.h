// trellis by the exact kernels.
#pragma once

#include <array>

#include "../arguments/kernel_arguments.h"
#include "aten.h"
#include "exact/exact.h"
#include "problem.h"
#include "trellis/exact.h"

namespace girih::trellis {

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, OptionalTensor, OptionalTensor,
                             OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor>;

inline kernels::TrellisMap map_of(std::string_view name) {
  using kernels::Norm;
  if (name == "silu") return {true, Norm::none};
  if (name == "l2norm") return {false, Norm::l2};
  if (name == "layer_norm") return {false, Norm::layer};
  if (name == "l2_silu") return {true, Norm::l2};
  if (name == "ln_silu") return {true, Norm::layer};
  if (name == "softmax") return {false, Norm::softmax};
  return {false, Norm::none};
}

// What decides whether a card has room.
inline kernels::TrellisExactShape exact_shape(const Tensor& q, const Tensor& k, const Tensor& v,
                                              const Tensor& a) {
  kernels::TrellisExactShape shape{};
  shape.heads = static_cast<int>(k.size(2)), shape.query_heads = static_cast<int>(q.size(2));
  shape.D = static_cast<int>(k.size(3)), shape.V = static_cast<int>(v.size(3));
  shape.M = static_cast<int>(a.size(3));
  return shape;
}

// One call's tensors: rows that the reads take in packs of 16 bytes, the rest as it is.
class ExactCall {
 public:
  ExactCall(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& gamma,
            const OptionalTensor& g, const OptionalTensor& first_k, const OptionalTensor& state_k,
            const OptionalTensor& first_v, const OptionalTensor& state_v, const OptionalTensor& position,
            const OptionalTensor& cu, int64_t chunk, std::string_view phi, std::string_view f)
      : q_(in_packs(q)),
        x_{in_packs(k), in_packs(v)},
        own_{k, v},
        a_(a),
        gamma_(gamma),
        g_(g),
        initial_{state_k, state_v},
        first_{first_k, first_v},
        M_(kernels::trellis_exact_packed(static_cast<int>(a.size(3)))),
        shape_(exact_shape(q, k, v, a)) {
    if (given(cu)) cu_seqlens_ = cu->contiguous();
    if (const auto within = within_chunk(position, chunk); given(within)) position_ = within->contiguous();
    shape_.grid = {kernel_tokens(q_, cu_seqlens_), static_cast<int>(chunk),
                   position_.defined() ? position_.const_data_ptr<int64_t>() : nullptr};
    shape_.phi = map_of(phi), shape_.f = map_of(f);
    // A gate is a head's; the reads have one a slot.
    gates_ = given(g) ? g->to(at::kFloat).unsqueeze(3).expand({-1, -1, -1, M_}).contiguous()
                      : at::zeros({M_}, in_fp32());
  }

  Results forward(bool save) const {
    const auto s = of_tokens(), z = save ? of_tokens() : Tensor();
    const Tensor memories[] = {pieces(0), pieces(1)};
    const Tensor last_first[] = {states(0), states(1)}, last[] = {states(0), states(1)};
    const auto position = at::empty({shape_.grid.tokens.sequences}, q_.options().dtype(at::kLong));
    kernels::TrellisExactScan p{};
    fill(p);
    p.a = input<4>(a_);
    p.last_position = position.mutable_data_ptr<int64_t>();
    for (int m = 0; m < 2; ++m) {
      p.first[m] = first(m), p.initial[m] = input<4>(initial_[m]);
      p.last_first[m] = output<4>(last_first[m]), p.last[m] = output<4>(last[m]);
      p.z[m] = save ? part(z, m) : nullptr, p.s[m] = part(s, m);
      p.states[m] = memories[m].mutable_data_ptr<float>();
    }
    check_launch("trellis_exact_scan", kernels::trellis_exact_scan(p, stream()));
    const auto r = value_read(q_, 0, s, memories[0]);
    map(r, {}, {});
    const auto o = key_read(r, 1, s, memories[1]);
    const auto kept = [&](const Tensor& x) { return save ? x : at::empty({0}, in_fp32()); };
    return {without_packs(o, own_[1].size(3)),
            last_first[0],
            last[0],
            last_first[1],
            last[1],
            position,
            kept(memories[0]),
            kept(memories[1]),
            kept(z),
            kept(s),
            at::empty({0}, in_fp32())};
  }

  Gradients backward(const OptionalTensor& grad_o, const std::array<OptionalTensor, 2>& grad_first,
                     const std::array<OptionalTensor, 2>& grad, const std::array<Tensor, 2>& memories,
                     const Tensor& z, const Tensor& s) const {
    const auto dout = given(grad_o) ? in_packs(grad_o->to(q_.scalar_type()))
                                    : rows(q_.size(2), x_[1].size(3), q_.scalar_type()).zero_();
    // y and dr, which become r and dy
    const auto r = value_read(q_, 0, s, memories[0]), dy = value_read(dout, 1, s, memories[1]);
    const auto reads = numbers(q_.size(2));
    map(r, dy, reads);
    const auto dq = key_read(dy, 0, s, memories[0]);

    const auto dz = of_tokens(), da = of_tokens(), dgamma = numbers(heads()), started = numbers(heads());
    const auto dg = given(g_) ? numbers(heads()) : Tensor();
    const Tensor gradients[] = {pieces(0), pieces(1)}, dinitial[] = {states(0), states(1)};
    const Tensor dx[] = {rows(heads(), x_[0].size(3), at::kFloat), rows(heads(), x_[1].size(3), at::kFloat)};
    const bool resumed = position_.defined();
    Tensor dfirst[2];
    kernels::TrellisExactReverse reverse{};
    kernels::TrellisExactColumns columns{};
    fill(reverse), fill(columns);
    reverse.a = input<4>(a_);
    reverse.dgamma = dgamma.mutable_data_ptr<float>(), reverse.started = started.mutable_data_ptr<float>();
    columns.reads = reads.const_data_ptr<float>();
    columns.dgamma = reverse.dgamma, columns.started = reverse.started;
    columns.dg = dg.defined() ? dg.mutable_data_ptr<float>() : nullptr;
    for (int m = 0; m < 2; ++m) {
      if (resumed) dfirst[m] = states(m);
      reverse.l[m] = columns.l[m] = input<4>(m == 0 ? dy : r);
      reverse.w[m] = columns.w[m] = input<4>(m == 0 ? q_ : dout);
      reverse.z[m] = given_part(z, m), columns.s[m] = given_part(s, m);
      reverse.dlast_first[m] = columns.dlast_first[m] = input<4>(grad_first[m]);
      reverse.dlast[m] = input<4>(grad[m]);
      reverse.dfirst[m] = output<4>(dfirst[m]), reverse.dinitial[m] = output<4>(dinitial[m]);
      columns.dz[m] = reverse.dz[m] = part(dz, m), reverse.da[m] = part(da, m);
      columns.gradients[m] = reverse.gradients[m] = gradients[m].mutable_data_ptr<float>();
      columns.first[m] = first(m);
      columns.states[m] = memories[m].const_data_ptr<float>();
      columns.dx[m] = dx[m].mutable_data_ptr<float>();
    }
    check_launch("trellis_exact_reverse", kernels::trellis_exact_reverse(reverse, stream()));
    check_launch("trellis_exact_columns", kernels::trellis_exact_columns(columns, stream()));

    const auto of_x = [&](int m) { return without_packs(dx[m], own_[m].size(3)).to(own_[m].scalar_type()); };
    const auto of_first = [&](int m) {
      return if_given(first_[m], [&] {
        return resumed ? dfirst[m] : at::zeros(first_[m]->sizes(), first_[m]->options());
      });
    };
    return {without_packs(dq, own_[0].size(3)),
            of_x(0),
            of_x(1),
            without_packs(da.sum(0), a_.size(3)).to(a_.scalar_type()),
            dgamma.sum(0).to(gamma_.scalar_type()),
            if_given(g_, [&] { return dg.sum(0).to(g_->scalar_type()); }),
            of_first(0),
            dinitial[0],
            of_first(1),
            dinitial[1],
            std::nullopt,
            std::nullopt};
  }

 private:
  static cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream(); }
  int64_t heads() const { return x_[0].size(2); }
  at::TensorOptions in_fp32() const { return q_.options().dtype(at::kFloat); }
  Tensor rows(int64_t heads, int64_t width, at::ScalarType type) const {
    return rows_for(q_, q_.size(1), cu_seqlens_, heads, width, type);
  }
  // What the kernels write of sequences' tokens and pieces; zeros where some are nobody's.
  Tensor room(at::IntArrayRef sizes) const {
    return cu_seqlens_.defined() ? at::zeros(sizes, in_fp32()) : at::empty(sizes, in_fp32());
  }
  // Of both memories.
  Tensor of_tokens() const { return room({2, q_.size(0), q_.size(1), heads(), M_}); }
  Tensor numbers(int64_t heads) const { return room({2, q_.size(0), q_.size(1), heads}); }
  static float* part(const Tensor& both, int m) { return both.select(0, m).mutable_data_ptr<float>(); }
  static const float* given_part(const Tensor& both, int m) {
    return both.select(0, m).const_data_ptr<float>();
  }
  Tensor pieces(int m) const {
    return room({kernels::piece_count(shape_.grid.tokens, kernels::kChunk), heads(), x_[m].size(3), M_});
  }
  Tensor states(int m) const {
    return at::empty({shape_.grid.tokens.sequences, heads(), a_.size(3), own_[m].size(3)}, in_fp32());
  }
  kernels::In<4> first(int m) const { return input<4>(position_.defined() ? first_[m] : std::nullopt); }

  template <class Problem>
  void fill(Problem& p) const {
    p.shape = shape_;
    p.gamma = input<3>(gamma_), p.g = input<3>(g_);
    for (int m = 0; m < 2; ++m) p.x[m] = input<4>(x_[m]);
  }

  // The reads are those of gsa's exact kernels.
  kernels::ExactShape read_shape(int m, const Tensor& memories) const {
    kernels::ExactShape shape{};
    shape.tokens = shape_.grid.tokens;
    shape.heads = shape_.heads, shape.query_heads = shape_.query_heads;
    shape.M = static_cast<int>(M_);
    if (given(g_)) {
      shape.g = input<4>(gates_);
    } else {
      shape.g.data = gates_.const_data_ptr(), shape.g.stride[3] = 1;  // one row for all tokens
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
  // y becomes f(y), and dr, if it is there, J_f^T dr.
  void map(const Tensor& y, const Tensor& dr, const Tensor& reads) const {
    kernels::TrellisExactRows p{};
    p.rows = y.size(0) * y.size(1) * y.size(2), p.M = shape_.M, p.f = shape_.f;
    p.y = y.mutable_data_ptr<float>();
    if (dr.defined()) {
      p.dr = dr.mutable_data_ptr<float>();
      p.reads[0] = part(reads, 0), p.reads[1] = part(reads, 1);
    }
    check_launch("trellis_exact_rows", kernels::trellis_exact_rows(p, stream()));
  }

  Tensor q_, x_[2], own_[2], a_, gamma_, cu_seqlens_, position_, gates_;  // own_: k and v without packs
  OptionalTensor g_, initial_[2], first_[2];
  int64_t M_;  // in packs
  kernels::TrellisExactShape shape_;
};

}  // namespace girih::trellis
