// Trellis (Karami et al., eq. 8 to 12) in chunk form. A memory A [M, X] compresses vectors x_t onto targets
// a_t:
//   z_t = A' x_t        u_t = J_phi(z_t)^T (phi(z_t) - a_t)        A_t = e^{g_t} A_{t-1} - gamma_t u_t x_t^T
// with A' the memory at the start of the chunk. One memory holds keys and one values:
//   r_t = f(A1_t q_t)      o_t = A2_t^T r_t
#include "../decay.h"
#include "../defining.h"
#include "../dispatch.h"
#include "aten.h"
#include "phi.h"
#include "problem.h"

namespace girih::trellis {
namespace {

Tensor widen(const Tensor& x, int64_t width) {
  return x.size(-1) == width ? x : at::constant_pad_nd(x, {0, width - x.size(-1)}, 0);
}

// Two memories as one of the larger width: no pass's update reads the other, so both take the same step at
// once, and columns of zeros stay zero. [..., H, ., D] and [..., H, ., V] -> [..., 2, H, ., max(D, V)], the
// new dimension at `dim`.
Tensor both(const Tensor& keys, const Tensor& values, int64_t dim) {
  const auto width = std::max(keys.size(-1), values.size(-1));
  return at::stack({widen(keys, width), widen(values, width)}, dim);
}

// States: A [B, 2, H, M, X] where all chunks are whole, else (A', A).
class Passes : public Block {
 public:
  // inputs: q [B, n, HQ, C, D], k [B, n, H, C, D], v [B, n, H, C, V], a [B, n, H, C, M], gamma, g [B, n, H,
  // C]
  Passes(const Tensors& inputs, const Tensor& complete, const Phi& phi, const Phi& f)
      : phi_(phi), f_(f), k_(inputs[1]), v_(inputs[2]) {
    const auto& q = inputs[0];
    const auto& gamma = inputs[4];
    const auto& g = inputs[5];
    const auto H = k_.size(2);
    q_ = q.unflatten(2, {H, q.size(2) / H});
    weight_ = gamma.unsqueeze(-2).expand({-1, -1, -1, gamma.size(3), -1});
    auto step = gamma.neg();
    if (g.defined()) {
      weight_ = weight_ * decay_matrix(g);
      from_start_ = g.cumsum(-1).exp().unsqueeze(3).unsqueeze(-1);
      keep_ = per_chunk(g.sum(-1).exp().unsqueeze(2).unsqueeze(-1).unsqueeze(-1));
      step = step * sum_after(g, -1).exp();
    } else {
      weight_ = weight_.tril();
    }
    weight_ = weight_.unsqueeze(3);
    const auto x = both(k_, v_, 2);
    x_ = per_chunk(x);
    written_ = per_chunk(x * step.unsqueeze(2).unsqueeze(-1));
    target_ = per_chunk(phi.target(inputs[3]).unsqueeze(2));
    if (complete.defined()) complete_ = per_chunk(complete);
  }

  Chunks::States step(int64_t c, const Chunks::States& states) override {
    const auto &first = states.front(), &A = states.back();
    // Z = X A'^T, U = J_phi(Z)^T (phi(Z) - a)
    const auto U = phi_.residual(x_[c].matmul(first.transpose(-1, -2)), target_[c]);
    // A <- e^{L_C} A - (U * gamma e^{L_C - L})^T X
    const auto update = U.transpose(-1, -2).matmul(written_[c]);
    const auto next = keep_.empty() ? A + update : at::addcmul(update, keep_[c], A);
    U_.push_back(U);
    if (complete_.empty()) return {next};
    return {where_row(complete_[c], next, first), next};
  }

  Tensor read(const Tensors& starts) override {
    const auto A = starts.back().unbind(2), U = at::stack(U_, 1).unsqueeze(4).unbind(2);
    const auto A1 = A[0].narrow(-1, 0, k_.size(-1)).unsqueeze(3),
               A2 = A[1].narrow(-1, 0, v_.size(-1)).unsqueeze(3);
    // Y = e^{L} (Q A^T) - tril((Q X^T) * e^{L_t - L_i} gamma_i) U
    const auto y = decayed(q_.matmul(A1.transpose(-1, -2))) -
                   (q_.matmul(k_.unsqueeze(3).transpose(-1, -2)) * weight_).matmul(U[0]);
    const auto r = f_(y);
    // O = e^{L} (R A) - tril((R U^T) * e^{L_t - L_i} gamma_i) X
    const auto o =
        decayed(r.matmul(A2)) - (r.matmul(U[1].transpose(-1, -2)) * weight_).matmul(v_.unsqueeze(3));
    return o.flatten(2, 3);
  }

 private:
  Tensor decayed(const Tensor& y) const { return from_start_.defined() ? y * from_start_ : y; }

  Phi phi_, f_;
  Tensor q_, k_, v_;              // q [B, n, H, HQ / H, C, D]
  Tensor weight_, from_start_;    // tril(e^{L_t - L_i} gamma_i) [B, n, H, 1, C, C], e^{L} [B, n, H, 1, C, 1]
  Tensors x_, written_, target_;  // X, -gamma e^{L_C - L} X [B, 2, H, C, X], a [B, 1, H, C, M]
  Tensors keep_, complete_;       // e^{L_C} [B, 1, H, 1, 1], [B]
  Tensors U_;                     // [B, 2, H, C, M]
};

}  // namespace

Results forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& gamma,
                const OptionalTensor& g, const OptionalTensor& state_first_k, const OptionalTensor& state_k,
                const OptionalTensor& state_first_v, const OptionalTensor& state_v,
                const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t chunk,
                std::string_view phi, std::string_view f, bool save) {
  const auto problem = Problem::check(q, k, v, a, gamma, g, state_first_k, state_k, state_first_v, state_v,
                                      state_position, cu_seqlens, chunk, phi, f);
  const auto B = q.size(0), T = q.size(1), D = k.size(3), V = v.size(3);
  const DefiningChunks chunks(q, B, T, chunk, cu_seqlens, state_position);
  const auto A = both(*state_k, *state_v, 1);
  Chunks::States initial{A};
  // Where the tokens begin a chunk, A' is A.
  const bool within = given(within_chunk(state_position, chunk));
  if (!chunks.whole()) initial = {within ? both(*state_first_k, *state_first_v, 1) : A, A};

  const Phi phi_(phi), f_(f);  // the strings may be gone when backward runs a block again
  const auto run = chunks.run(
      {q, k, v, a, gamma, g.value_or(Tensor())}, initial,
      [phi_, f_](const Tensors& inputs, const Tensor& complete) {
        return std::make_unique<Passes>(inputs, complete, phi_, f_);
      },
      q.scalar_type());
  // Tensors of their own: a step writes each in place.
  const auto part = [](const Tensor& memories, int64_t pass, int64_t width) {
    return memories.select(1, pass).narrow(-1, 0, width).clone(at::MemoryFormat::Contiguous);
  };
  const auto &first = run.finals.front(), &last = run.finals.back();
  const auto kept = problem.saved(q, state_position, cu_seqlens, chunk, save);
  const auto room = [&](const std::vector<c10::SymInt>& sizes, const at::TensorOptions& options) {
    return at::empty(C10_AS_INTARRAYREF_SLOW_ALLOC(sizes), options);
  };
  return {run.o.defined() ? run.o : at::zeros({B, T, q.size(2), V}, q.options()),
          part(first, 0, D),
          part(last, 0, D),
          part(first, 1, V),
          part(last, 1, V),
          chunks.next_position(),
          room(kept.memories[0], q.options().dtype(kept.type)),
          room(kept.memories[1], q.options().dtype(kept.type)),
          room(kept.tokens, q.options().dtype(kept.type)),
          room(kept.tokens, q.options().dtype(kept.type)),
          room(kept.fit, A.options())};
}

TORCH_LIBRARY_IMPL(girih, CPU, m) { m.impl("trellis_forward", &forward); }
#ifndef GIRIH_WITH_CUDA  // with it, cuda.cpp serves CUDA tensors
TORCH_LIBRARY_IMPL(girih, CUDA, m) { m.impl("trellis_forward", TORCH_FN(InFullPrecision<&forward>::call)); }
#endif

}  // namespace girih::trellis
