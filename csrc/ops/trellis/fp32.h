// The fp32 kernels of trellis and ttt.
#pragma once

#include "arguments.h"
#include "fp32/fp32.h"
#include "trellis/fp32.h"

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
    gates_ = is_defined(call.g)
                 ? call.g->to(at::kFloat).unsqueeze(3).expand({-1, -1, -1, padded_slots_}).contiguous()
                 : at::zeros({padded_slots_}, in_fp32());
  }

  Outputs forward(bool save) const {
    const auto s = new_token_rows(), z = save ? new_token_rows() : Tensor();
    Outputs outputs;
    outputs.position = at::empty({shape_.grid.tokens.sequences}, q_.options().dtype(at::kLong));
    Tensor chunk_memories[2];
    kernels::TrellisFp32Scan p{};
    fill(p);
    p.a = input<4>(call_.a), p.weight = data_or_null(phi_weight_);
    p.last_position = outputs.position.mutable_data_ptr<int64_t>();
    for (int m = 0; m < memory_count_; ++m) {
      chunk_memories[m] = new_chunk_memories(m);
      outputs.chunk_start[m] = new_state(m), outputs.memory[m] = new_state(m);
      p.chunk_start[m] = chunk_start(m), p.initial[m] = input<4>(call_.memory[m]);
      p.last_chunk_start[m] = output<4>(outputs.chunk_start[m]), p.last[m] = output<4>(outputs.memory[m]);
      p.z[m] = save ? mutable_memory_data(z, m) : nullptr, p.s[m] = mutable_memory_data(s, m);
      p.states[m] = chunk_memories[m].mutable_data_ptr<float>();
    }
    GIRIH_LAUNCH(trellis_fp32_scan, p);
    const auto r = value_read(q_, 0, s, chunk_memories[0]);
    apply_f(r, {}, {});
    const auto o =
        memory_count_ == 2 ? key_read(r, 1, s, chunk_memories[1]) : zero_outside(r).to(q_.scalar_type());
    outputs.o = crop_width(o, call_.output_width());
    const auto if_saved = [&](const Tensor& x) { return save ? x : at::empty({0}, in_fp32()); };
    for (int m = 0; m < memory_count_; ++m) outputs.saved.chunk_memories[m] = if_saved(chunk_memories[m]);
    outputs.saved.z = if_saved(z), outputs.saved.u = if_saved(s);  // saved as u: s = -gamma u
    outputs.saved.map_stats = at::empty({0}, in_fp32());
    return outputs;
  }

  InputGradients backward(const OutputGradients& grads, const SavedTensors& saved) const {
    const auto &z = saved.z, &s = saved.u;  // s = -gamma u
    const auto dout = prepare_output_gradient(call_, grads.o);
    // r holds y, and dy holds dr, until apply_f.
    const auto r = value_read(q_, 0, s, saved.chunk_memories[0]);
    const auto dy = memory_count_ == 2
                        ? value_read(dout, 1, s, saved.chunk_memories[1])
                        : dout.to(in_fp32(), /*non_blocking=*/false, /*copy=*/true).contiguous();
    const auto read_dots = new_token_scalars(q_.size(2));
    apply_f(r, dy, read_dots);
    const auto dq = key_read(dy, 0, s, saved.chunk_memories[0]);

    const auto dz = new_token_rows(), da = new_token_rows(), dgamma = new_token_scalars(heads()),
               dz_dot_z = new_token_scalars(heads());
    const auto dg = is_defined(call_.g) ? new_token_scalars(heads()) : Tensor();
    const bool is_resumed = position_.defined();
    Tensor chunk_gradients[2], dinitial[2], dchunk_start[2], dx[2];
    kernels::TrellisFp32Reverse reverse{};
    kernels::TrellisFp32Dkv dkv{};
    fill(reverse), fill(dkv);
    reverse.a = input<4>(call_.a), reverse.weight = data_or_null(phi_weight_);
    const auto dweight = phi_weight_.defined() ? new_token_rows() : Tensor();
    if (phi_weight_.defined()) reverse.dweight = dweight.mutable_data_ptr<float>();
    reverse.dgamma = dgamma.mutable_data_ptr<float>(), reverse.dz_dot_z = dz_dot_z.mutable_data_ptr<float>();
    dkv.read_dots = read_dots.const_data_ptr<float>();
    dkv.dgamma = reverse.dgamma, dkv.dz_dot_z = reverse.dz_dot_z;
    dkv.dg = dg.defined() ? dg.mutable_data_ptr<float>() : nullptr;
    for (int m = 0; m < memory_count_; ++m) {
      chunk_gradients[m] = new_chunk_memories(m), dinitial[m] = new_state(m),
      dx[m] = new_rows(heads(), x_[m].size(3), at::kFloat);
      if (is_resumed) dchunk_start[m] = new_state(m);
      reverse.l[m] = dkv.l[m] = input<4>(m == 0 ? dy : r);
      reverse.w[m] = dkv.w[m] = input<4>(m == 0 ? q_ : dout);
      reverse.z[m] = memory_data(z, m), dkv.s[m] = memory_data(s, m);
      reverse.dlast_chunk_start[m] = dkv.dlast_chunk_start[m] = input<4>(grads.chunk_start[m]);
      reverse.dlast[m] = input<4>(grads.memory[m]);
      reverse.dchunk_start[m] = output<4>(dchunk_start[m]), reverse.dinitial[m] = output<4>(dinitial[m]);
      dkv.dz[m] = reverse.dz[m] = mutable_memory_data(dz, m), reverse.da[m] = mutable_memory_data(da, m);
      dkv.gradients[m] = reverse.gradients[m] = chunk_gradients[m].mutable_data_ptr<float>();
      dkv.chunk_start[m] = chunk_start(m);
      dkv.states[m] = saved.chunk_memories[m].const_data_ptr<float>();
      dkv.dx[m] = dx[m].mutable_data_ptr<float>();
    }
    GIRIH_LAUNCH(trellis_fp32_reverse, reverse);
    GIRIH_LAUNCH(trellis_fp32_dkv, dkv);

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
  at::TensorOptions in_fp32() const { return q_.options().dtype(at::kFloat); }
  Tensor new_rows(int64_t heads, int64_t width, at::ScalarType type) const {
    return girih::new_rows(q_, q_.size(1), cu_seqlens_, heads, width, type);
  }
  // Allocates an output per token or per chunk; zeroed with cu_seqlens, since tokens and chunks outside of
  // the sequences are not written.
  Tensor new_output(at::IntArrayRef sizes) const {
    return cu_seqlens_.defined() ? at::zeros(sizes, in_fp32()) : at::empty(sizes, in_fp32());
  }
  // [memories, B, T, H, M] for all memories.
  Tensor new_token_rows() const {
    return new_output({memory_count_, q_.size(0), q_.size(1), heads(), padded_slots_});
  }
  Tensor new_token_scalars(int64_t heads) const {
    return new_output({memory_count_, q_.size(0), q_.size(1), heads});
  }
  static float* mutable_memory_data(const Tensor& tensors, int m) {
    return tensors.select(0, m).mutable_data_ptr<float>();
  }
  static const float* memory_data(const Tensor& tensors, int m) {
    return tensors.select(0, m).const_data_ptr<float>();
  }
  Tensor new_chunk_memories(int m) const {
    return new_output({kernels::token_range_count(shape_.grid.tokens, kernels::kChunk), heads(),
                       x_[m].size(3), padded_slots_});
  }
  Tensor new_state(int m) const {
    return at::empty({shape_.grid.tokens.sequences, heads(), call_.a.size(3), call_.width(m)}, in_fp32());
  }
  kernels::InputTensor<4> chunk_start(int m) const {
    return input<4>(position_.defined() ? call_.chunk_start[m] : std::nullopt);
  }

  template <class KernelArguments>
  void fill(KernelArguments& p) const {
    p.shape = shape_;
    p.gamma = input<3>(call_.gamma), p.g = input<3>(call_.g);
    for (int m = 0; m < memory_count_; ++m) p.x[m] = input<4>(x_[m]);
  }

  // The reads of the fp32 kernels of gsa.
  kernels::Fp32ReadShape read_shape(int m, const Tensor& chunk_memories) const {
    kernels::Fp32ReadShape shape{};
    shape.tokens = shape_.grid.tokens;
    shape.heads = shape_.heads, shape.query_heads = shape_.query_heads;
    shape.M = static_cast<int>(padded_slots_);
    if (is_defined(call_.g)) {
      shape.g = input<4>(gates_);
    } else {
      shape.g.data = gates_.const_data_ptr(),
      shape.g.stride[3] = 1;  // strides of 0: one row of zeros for all tokens
    }
    shape.states = chunk_memories.const_data_ptr<float>(), shape.rows = static_cast<int>(x_[m].size(3));
    return shape;
  }
  Tensor value_read(const Tensor& x, int m, const Tensor& s, const Tensor& chunk_memories) const {
    const auto out = new_rows(q_.size(2), padded_slots_, at::kFloat);
    kernels::ValueRead p{};
    p.shape = read_shape(m, chunk_memories);
    p.term[0] = {input<4>(x), input<4>(x_[m]), input<4>(s.select(0, m)), 0, p.shape.rows};
    p.out = output<4>(out);
    GIRIH_LAUNCH(fp32_value_read, p);
    return out;
  }
  Tensor key_read(const Tensor& p_, int m, const Tensor& s, const Tensor& chunk_memories) const {
    const auto out = new_rows(q_.size(2), x_[m].size(3), q_.scalar_type());
    kernels::KeyRead p{};
    p.shape = read_shape(m, chunk_memories);
    p.p = input<4>(p_), p.s = input<4>(s.select(0, m)), p.y = input<4>(x_[m]);
    p.first_row = 0, p.width = p.shape.rows;
    p.out = output<4>(out);
    GIRIH_LAUNCH(fp32_key_read, p);
    return out;
  }
  // r [B, T, HQ, M] with zeros at tokens outside of the sequences. Their y is 0, and softmax(0) is not 0.
  Tensor zero_outside(const Tensor& r) const {
    if (!cu_seqlens_.defined() || shape_.f.norm != kernels::Norm::softmax) return r;
    const auto ends = cu_seqlens_.dim() == 2 ? cu_seqlens_ : cu_seqlens_.unsqueeze(0);
    const auto t = at::arange(r.size(1), ends.options());
    const auto outside = t.lt(ends.narrow(1, 0, 1)).logical_or(t.ge(ends.narrow(1, ends.size(1) - 1, 1)));
    return r.masked_fill(outside.unsqueeze(2).unsqueeze(3), 0);
  }
  // y <- f(y); if dr is defined, dr <- J_f^T dr.
  void apply_f(const Tensor& y, const Tensor& dr, const Tensor& read_dots) const {
    kernels::TrellisFp32ReadMap p{};
    p.rows = y.size(0) * y.size(1) * y.size(2), p.M = shape_.M, p.f = shape_.f;
    p.y = y.mutable_data_ptr<float>();
    if (dr.defined()) {
      p.dr = dr.mutable_data_ptr<float>();
      p.read_dots[0] = mutable_memory_data(read_dots, 0),
      p.read_dots[1] = memory_count_ == 2 ? mutable_memory_data(read_dots, 1) : nullptr;
    }
    GIRIH_LAUNCH(trellis_fp32_read_map, p);
  }

  const Call& call_;
  Tensor q_, x_[2], cu_seqlens_, position_, gates_;
  int64_t padded_slots_;  // M rounded up as the kernels need it
  int memory_count_;
  Tensor phi_weight_;
  kernels::TrellisFp32Shape shape_;
};

}  // namespace girih::trellis
