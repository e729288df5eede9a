// Trellis (Karami et al., eq. 8 to 12) in chunk form. A memory A [M, X] learns to map vectors x_t to targets
// a_t. A' is the memory at the start of the chunk.
//   z_t = A' x_t        u_t = J_phi(z_t)^T (phi(z_t) - a_t)        A_t = e^{g_t} A_{t-1} - gamma_t u_t x_t^T
// Trellis has a memory A1 of keys and a memory A2 of values:
//   r_t = f(A1_t q_t)      o_t = A2_t^T r_t
// TTT has a memory of keys only, o_t = r_t.
#pragma once

#include "../chunks/chunk_defining.h"
#include "../chunks/decay.h"
#include "phi.h"

namespace girih::trellis {

inline Tensor pad_columns(const Tensor& x, int64_t width) {
  return x.size(-1) == width ? x : at::constant_pad_nd(x, {0, width - x.size(-1)}, 0);
}

// Stacks both memories, zero-padded to the larger width: neither update reads the other memory, so one step
// updates both, and zero columns stay zero. [..., H, ., D] and [..., H, ., V] -> [..., 2, H, ., max(D, V)],
// with the new dimension at `dim`. If `values` is undefined (one memory), the new dimension has size 1.
inline Tensor stack_memories(const Tensor& keys, const Tensor& values, int64_t dim) {
  if (!values.defined()) return keys.unsqueeze(dim);
  const auto width = std::max(keys.size(-1), values.size(-1));
  return at::stack({pad_columns(keys, width), pad_columns(values, width)}, dim);
}

// States: A [B, memories, H, M, X]; (A', A) if a state may be inside a chunk.
class MemoryBlock : public ChunkBlock {
 public:
  // inputs: q [B, n, HQ, C, D], k [B, n, H, C, D], v [B, n, H, C, V], a [B, n, H, C, M], gamma and g [B, n,
  // H, C], phi_weight like a. v is undefined with one memory; g and phi_weight may be undefined.
  MemoryBlock(const Tensors& inputs, const Tensor& has_chunk_end, const Phi& phi, const Phi& f)
      : phi_(phi), f_(f), k_(inputs[1]), v_(inputs[2]) {
    const auto& q = inputs[0];
    const auto& gamma = inputs[4];
    const auto& g = inputs[5];
    const auto H = k_.size(2);
    q_ = q.unflatten(2, {H, q.size(2) / H});
    decayed_gamma_ = gamma.unsqueeze(-2).expand({-1, -1, -1, gamma.size(3), -1});
    auto step = gamma.neg();
    if (g.defined()) {
      decayed_gamma_ = decayed_gamma_ * decay_matrix(g);
      from_start_ = g.cumsum(-1).exp().unsqueeze(3).unsqueeze(-1);
      chunk_decay_ = unbind_chunks(g.sum(-1).exp().unsqueeze(2).unsqueeze(-1).unsqueeze(-1));
      step = step * exclusive_suffix_sum(g, -1).exp();
    } else {
      decayed_gamma_ = decayed_gamma_.tril();
    }
    decayed_gamma_ = decayed_gamma_.unsqueeze(3);
    const auto x = stack_memories(k_, v_, 2);
    x_ = unbind_chunks(x);
    scaled_x_ = unbind_chunks(x * step.unsqueeze(2).unsqueeze(-1));
    const auto& phi_weight = inputs[6];
    if (phi_weight.defined()) phi_weight_ = unbind_chunks(phi_weight.unsqueeze(2));
    target_ = unbind_chunks((phi_weight.defined() ? inputs[3] : phi.project_target(inputs[3])).unsqueeze(2));
    if (has_chunk_end.defined()) has_chunk_end_ = unbind_chunks(has_chunk_end);
  }

  Chunks::States step(int64_t c, const Chunks::States& states) override {
    const auto &chunk_start = states.front(), &A = states.back();
    // Z = X A'^T, U = J_phi(Z)^T (phi(Z) - a)
    const auto z = x_[c].matmul(chunk_start.transpose(-1, -2));
    const auto U =
        phi_weight_.empty() ? phi_.residual(z, target_[c]) : phi_.residual(z, target_[c], phi_weight_[c]);
    // A <- e^{L_C} A - (U * gamma e^{L_C - L})^T X
    const auto update = U.transpose(-1, -2).matmul(scaled_x_[c]);
    const auto next = chunk_decay_.empty() ? A + update : at::addcmul(update, chunk_decay_[c], A);
    U_.push_back(U);
    if (has_chunk_end_.empty()) return {next};
    return {select_rows(has_chunk_end_[c], next, chunk_start), next};
  }

  Tensor read(const Tensors& starts) override {
    const auto A = starts.back().unbind(2), U = at::stack(U_, 1).unsqueeze(4).unbind(2);
    const auto A1 = A[0].narrow(-1, 0, k_.size(-1)).unsqueeze(3);
    // Y = e^{L} (Q A^T) - tril((Q X^T) * e^{L_t - L_i} gamma_i) U
    const auto y = decay_from_start(q_.matmul(A1.transpose(-1, -2))) -
                   (q_.matmul(k_.unsqueeze(3).transpose(-1, -2)) * decayed_gamma_).matmul(U[0]);
    const auto r = f_(y);
    if (!v_.defined()) return r.flatten(2, 3);
    const auto A2 = A[1].narrow(-1, 0, v_.size(-1)).unsqueeze(3);
    // O = e^{L} (R A) - tril((R U^T) * e^{L_t - L_i} gamma_i) X
    const auto o = decay_from_start(r.matmul(A2)) -
                   (r.matmul(U[1].transpose(-1, -2)) * decayed_gamma_).matmul(v_.unsqueeze(3));
    return o.flatten(2, 3);
  }

 private:
  Tensor decay_from_start(const Tensor& y) const { return from_start_.defined() ? y * from_start_ : y; }

  Phi phi_, f_;
  Tensor q_, k_, v_;             // q [B, n, H, HQ / H, C, D]
  Tensor decayed_gamma_;         // tril(e^{L_t - L_i} gamma_i) [B, n, H, 1, C, C]
  Tensor from_start_;            // e^{L} [B, n, H, 1, C, 1]
  Tensors x_, scaled_x_;         // X, -gamma e^{L_C - L} X [B, memories, H, C, X]
  Tensors target_, phi_weight_;  // a and phi_weight [B, 1, H, C, M]
  Tensors chunk_decay_;          // e^{L_C} [B, 1, H, 1, 1]
  Tensors has_chunk_end_;        // [B]
  Tensors U_;                    // [B, memories, H, C, M]
};

}  // namespace girih::trellis
