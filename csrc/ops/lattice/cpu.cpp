// Lattice (Karami and Mirrokni, eq. 10, 11 and 15) in chunk form. The columns s_i of a memory S [D, M] take
// steps in their tangent spaces. The objective selects (h, c), with e = S k - v or e = S^T v - k:
//   decode      h = e,  c = k          encode  h = v, c = e          similarity  h = -v, c = k
//   d_{t,i} = -gamma_t c_{t,i} (h_t - s_i (s_i.h_t))
//   X_t = e^{g_t} X_{t-1} + d_t          o_t = unit(X_t) q_t
// A chunk reads S at its start, X_0 = S. The next chunk starts from unit(X) of the last token.
#include "../chunks/chunk_defining.h"
#include "../chunks/decay.h"
#include "aten.h"

namespace girih::lattice {
namespace {

// e^L with L >= -30, so that its square does not underflow: a memory keeps its direction when all gates are
// closed.
Tensor floored_decay(const Tensor& L) { return L.clamp_min(-30).exp(); }

// Normalises the columns of X. A zero column has no direction; the column of S replaces it.
Tensor normalise_columns(const Tensor& X, const Tensor& S) {
  const auto length = at::linalg_vector_norm(X, 2, -2, true), zero = length == 0;
  return at::where(zero, S, X / length.masked_fill(zero, 1));
}

// Returns S; the gradient of its columns is projected to their tangent spaces.
Tensor project_gradient(const Tensor& S) {
  const auto s = S.detach(), d = S - s;
  return s + (d - s * (s * d).sum(-2, true));
}

enum class Objective { decode, encode, similarity };

Objective parse_objective(std::string_view name) {
  return name == "decode" ? Objective::decode : name == "encode" ? Objective::encode : Objective::similarity;
}

// h and W = -gamma c of C tokens against one memory S [B, H, D, M]. The terms that do not depend on S are
// computed once for all chunks.
class ObjectiveTerms {
 public:
  ObjectiveTerms(Objective objective, const Tensor& k, const Tensor& v, const Tensor& gamma)
      : objective_(objective) {
    const auto step = -gamma.unsqueeze(-1);
    v_ = unbind_chunks(objective == Objective::similarity ? -v : v);
    if (objective == Objective::encode) {
      k_ = unbind_chunks(k);
      step_ = unbind_chunks(step);
    } else {
      if (objective == Objective::decode) k_ = unbind_chunks(k);
      W_ = unbind_chunks(step * k);
    }
  }

  struct Pair {
    Tensor H, W, a;  // [B, H, C, D], [B, H, C, M], a = H S [B, H, C, M]
  };
  Pair compute(int64_t c, const Tensor& S) const {
    if (objective_ == Objective::decode) {
      const auto E = k_[c].matmul(S.transpose(-1, -2)) - v_[c];
      return {E, W_[c], E.matmul(S)};
    }
    const auto a = v_[c].matmul(S);
    return {v_[c], objective_ == Objective::encode ? (a - k_[c]) * step_[c] : W_[c], a};
  }

 private:
  Objective objective_;
  Tensors k_, v_, step_, W_;
};

// Groups the heads of q by the memory that they read: [B, n, HQ, C, M] -> [B, n, H, HQ / H, C, M].
Tensor group_heads(const Tensor& q, int64_t H) { return q.unflatten(2, {H, q.size(2) / H}); }

// States: S [B, H, D, M]. If a state may be inside a chunk, also Delta [B, H, D, M], the sum of the steps of
// the chunk so far, and with gates L [B, H], the sum of its gates so far.
class TangentSteps : public ChunkBlock {
 public:
  // inputs: q [B, n, HQ, C, M], k [B, n, H, C, M], v [B, n, H, C, D], gamma, g [B, n, H, C]
  TangentSteps(const Tensors& inputs, const Tensor& has_chunk_end, Objective objective)
      : q_(group_heads(inputs[0], inputs[1].size(2))),
        g_(inputs[4]),
        terms_(objective, inputs[1], inputs[2], inputs[3]) {
    if (g_.defined()) {
      L_ = g_.cumsum(-1);
      const auto sum = g_.sum(-1);
      sum_ = unbind_chunks(sum);
      decay_ = unbind_chunks(sum.exp().unsqueeze(-1).unsqueeze(-1));
      floored_decay_ = unbind_chunks(floored_decay(sum).unsqueeze(-1).unsqueeze(-1));
      to_end_ = unbind_chunks(exclusive_suffix_sum(g_, -1).exp().unsqueeze(-1));
    }
    if (has_chunk_end.defined()) has_chunk_end_ = unbind_chunks(has_chunk_end);
  }

  Chunks::States step(int64_t c, const Chunks::States& states) override {
    const auto& S = states[0];
    const auto pair = terms_.compute(c, S);
    H_.push_back(pair.H);
    W_.push_back(pair.W);
    a_.push_back(pair.a);
    // sigma_C = sum_j E_Cj W_j a_j, and sum_j E_Cj h_j W_j^T
    const auto W = g_.defined() ? pair.W * to_end_[c] : pair.W;
    const auto sigma = (W * pair.a).sum(-2, true), steps = pair.H.transpose(-1, -2).matmul(W);
    if (states.size() == 1) {
      // x_i = (m_C - sigma_C) s_i + steps, S <- x_i / |x_i|
      return {
          normalise_columns(at::addcmul(steps, S, g_.defined() ? floored_decay_[c] - sigma : 1 - sigma), S)};
    }
    const auto& has_end = has_chunk_end_[c];
    const auto Delta = (g_.defined() ? decay_[c] * states[1] : states[1]) + steps - S * sigma;
    if (!g_.defined()) {
      return {select_rows(has_end, normalise_columns(S + Delta, S), S),
              select_rows(has_end, at::zeros_like(Delta), Delta)};
    }
    const auto L = states[2] + sum_[c];
    return {select_rows(has_end,
                        normalise_columns(S * floored_decay(L).unsqueeze(-1).unsqueeze(-1) + Delta, S), S),
            select_rows(has_end, at::zeros_like(Delta), Delta), select_rows(has_end, at::zeros_like(L), L)};
  }

  Tensor read(const Tensors& starts) override {
    const auto S = starts[0], H = at::stack(H_, 1), W = at::stack(W_, 1), a = at::stack(a_, 1);
    const bool gated = g_.defined(), is_resumed = starts.size() > 1;
    const auto E = gated ? decay_matrix(g_) : Tensor();
    const auto Wa = W * a;
    // G = H H^T, sigma = tril(E) (W * a), N = (tril(G, -1) * E) W
    const auto G = H.matmul(H.transpose(-1, -2)).tril(-1);
    const auto sigma = gated ? E.matmul(Wa) : Wa.cumsum(-2);
    auto N = (gated ? G * E : G).matmul(W);
    const auto from_start = gated ? L_.exp().unsqueeze(-1) : Tensor();
    const auto decayed = [&](const Tensor& x) { return gated ? x * from_start : x; };
    // In the middle of a chunk: the earlier steps, Delta, contribute to N, n and the read.
    if (is_resumed) N = N + decayed(H.matmul(starts[1]));
    // r = tril(E * E) [W^2 G_jj]
    // n = r + tril(E * E) [2 W (N - a (sigma - W a)) - W^2 a^2] = |accumulated step|^2
    const auto summed = [&](const Tensor& x) { return gated ? E.square().matmul(x) : x.cumsum(-2); };
    const auto own_square = W.square() * H.square().sum(-1, true);
    auto r = summed(own_square.detach()),
         n = summed(own_square - Wa.square() + 2 * W * (N - a * (sigma - Wa)));
    if (is_resumed) {
      const auto square = starts[1].square().sum(-2, true),
                 before = gated ? from_start.square() * square : square;
      r = r + before.detach();
      n = n + before;
    }
    // n has an error of about eps r. If tokens repeat and the gates have reduced m, a read would divide by
    // this error. n >= (kappa eps)^2 r keeps the length of the columns close to 1.
    const double least = 256 * (r.scalar_type() == at::kDouble ? 0x1p-53 : 0x1p-24);
    const auto floor = r * (least * least);
    n = at::where(n < floor, floor, n);
    // q~ = Q / sqrt(m^2 + n), O = (q~ * (m - sigma)) S^T + (tril(q~ W^T) * E) H + (q~ e^{L}) Delta^T
    Tensor m;
    if (gated)
      m = floored_decay(is_resumed && starts.size() > 2 ? L_ + starts[2].unsqueeze(-1) : L_).unsqueeze(-1);
    const auto inverse = (gated ? n + m.square() : n + 1).rsqrt();
    const auto q = q_ * inverse.unsqueeze(3);
    const auto s_coefficient = gated ? m - sigma : 1 - sigma;
    const auto scores = q.matmul(W.unsqueeze(3).transpose(-1, -2));
    auto o = (q * s_coefficient.unsqueeze(3)).matmul(S.unsqueeze(3).transpose(-1, -2)) +
             (gated ? scores * E.unsqueeze(3) : scores.tril()).matmul(H.unsqueeze(3));
    if (is_resumed) {
      o = o + (gated ? q * from_start.unsqueeze(3) : q).matmul(starts[1].unsqueeze(3).transpose(-1, -2));
    }
    return o.flatten(2, 3);
  }

 private:
  Tensor q_, g_, L_;
  ObjectiveTerms terms_;
  Tensors sum_, decay_, floored_decay_,
      to_end_;             // L_C [B, H], e^{L_C} and m_C [B, H, 1, 1], e^{L_C - L} [B, H, C, 1]
  Tensors has_chunk_end_;  // [B]
  Tensors H_, W_, a_;
};

// Chunks of one token: the recurrence itself; a token reads the memory after its update. Only this form has
// normalize=False (eq. 10) and shrinkage (eq. 17). With phi_i = s_i / |s_i|, and P the division by the norm
// (the identity for normalize=False):
//   d_i = -gamma c_i (h - phi_i (phi_i.h)) / |s_i|, e reads phi(S)        s <- P(e^{g} s + d)
//   with shrinkage: s <- P(soft(e^{g} s + d, gamma lambda)); a zero column keeps its old value
// States: S [B, H, D, M].
class TokenSteps : public ChunkBlock {
 public:
  TokenSteps(const Tensors& inputs, const Tensor& has_chunk_end, Objective objective, bool normalize,
             double shrinkage)
      : q_(group_heads(inputs[0], inputs[1].size(2))),
        terms_(objective, inputs[1], inputs[2], inputs[3]),
        normalize_(normalize),
        has_shrinkage_(shrinkage > 0) {
    if (inputs[4].defined()) decay_ = unbind_chunks(floored_decay(inputs[4]).unsqueeze(-1));
    if (has_shrinkage_) threshold_ = unbind_chunks((inputs[3] * shrinkage).unsqueeze(-1));
    if (has_chunk_end.defined()) has_chunk_end_ = unbind_chunks(has_chunk_end);
  }

  Chunks::States step(int64_t c, const Chunks::States& states) override {
    const auto& S = states[0];
    const auto length = normalize_ ? Tensor() : at::linalg_vector_norm(S, 2, -2, true);
    const auto phi = normalize_ ? S : S / length;
    const auto pair = terms_.compute(c, phi);
    const auto W = normalize_ ? pair.W : pair.W / length;
    auto X = (decay_.empty() ? S : S * decay_[c]) + pair.H.transpose(-1, -2).matmul(W) - phi * (W * pair.a);
    if (has_shrinkage_) X = X.sign() * (X.abs() - threshold_[c]).clamp_min(0);
    X = normalize_ ? normalise_columns(X, S) : at::where((X == 0).all(-2, true), S, X);
    X_.push_back(has_chunk_end_.empty() ? X : select_rows(has_chunk_end_[c], X, S));
    return {X_.back()};
  }

  Tensor read(const Tensors&) override {
    return q_.matmul(at::stack(X_, 1).unsqueeze(3).transpose(-1, -2)).flatten(2, 3);
  }

 private:
  Tensor q_;
  ObjectiveTerms terms_;
  bool normalize_, has_shrinkage_;
  Tensors decay_, threshold_, has_chunk_end_;  // e^{g}, gamma lambda [B, H, 1, 1], [B]
  Tensors X_;
};

}  // namespace

Results forward(const Call& call, bool save) {
  const auto problem = Problem::check(call);
  const auto B = call.q.size(0), T = call.q.size(1), H = call.k.size(2), D = call.v.size(3);
  const ChunkDefiningScan chunks(call.q, B, T, call.chunk, call.cu_seqlens, call.state_position);
  const auto S = call.normalize ? project_gradient(*call.state_first) : *call.state_first;
  const auto zeros = at::zeros_like(S), no_decay = at::zeros({S.size(0), H}, S.options());
  // Whether a state may be inside a chunk.
  const bool has_partial_chunks = call.chunk > 1 && !chunks.has_whole_chunks();
  Chunks::States initial{S};
  if (has_partial_chunks) {
    const bool is_resumed = is_defined(call.state_position);
    initial.push_back(is_resumed ? *call.state_step : zeros);
    if (is_defined(call.g))
      initial.push_back(is_resumed && is_defined(call.state_decay) ? *call.state_decay : no_decay);
  }

  const auto kind = parse_objective(call.objective);
  // Copies for the lambda, which backward calls after the call has ended.
  const auto chunk = call.chunk;
  const auto normalize = call.normalize;
  const auto shrinkage = call.shrinkage;
  const auto run = chunks.run(
      {call.q, call.k, call.v, call.gamma, call.g.value_or(Tensor())}, initial,
      [=](const Tensors& inputs, const Tensor& has_chunk_end) -> std::unique_ptr<ChunkBlock> {
        if (chunk > 1) return std::make_unique<TangentSteps>(inputs, has_chunk_end, kind);
        return std::make_unique<TokenSteps>(inputs, has_chunk_end, kind, normalize, shrinkage);
      },
      call.q.scalar_type());
  const auto& finals = run.finals;
  OptionalTensor decay;
  if (is_defined(call.g)) decay = has_partial_chunks ? finals[2] : no_decay;
  const auto shapes = problem.saved(call, save);
  return {run.o.defined() ? run.o : at::zeros({B, T, call.q.size(2), D}, call.q.options()),
          finals[0],
          has_partial_chunks ? finals[1] : zeros,
          decay,
          chunks.next_position(),
          new_saved(shapes.memories, call.q.options().dtype(shapes.memories_type)),
          new_saved(shapes.ends, S.options()),
          new_saved(shapes.last, S.options()),
          new_saved(shapes.last, S.options())};
}

GIRIH_IMPL_ATEN(m) { register_forward<&WithoutTF32<&forward>::call>(m); }

}  // namespace girih::lattice
