// DeltaProduct (Siems et al. 2025) in chunk form.
//   S <- e^{g_t} S                                    once per token, before its first step
//   for j < n:  S <- S + k_{t,j} (w_{t,j} - S^T b_{t,j})^T        b = beta k, w = beta v
//   o_t = scale * S_t^T q_t                           after the last step
// A chunk of C tokens has R = C n rows, one per step. L_r is the sum of the gates from the start of the chunk
// through row r.
#include "../arguments/shared_heads.h"
#include "../chunks/chunks.h"
#include "../chunks/decay.h"
#include "../registration/dispatch.h"
#include "aten.h"
#include "problem.h"

namespace girih::delta_product {
namespace {

// The chunk length without between_chunks, which does not change the result. 64 rows are fastest at D = 128,
// close to the fastest at D = 32, and save half of the states of 32 rows.
int64_t exact_chunk(int64_t T, int64_t n) { return std::max<int64_t>(1, std::min<int64_t>(T, 64 / n)); }

// x / |x| with eps inside the root, so that a zero row stays zero and has a gradient. Computed in float64:
// the error of |k| is the same in every step that repeats a key, and with beta = 2 the steps are reflections
// and the error grows with T.
Tensor unit(const Tensor& x) {
  const auto y = x.to(at::kDouble);
  return (y * (y.square().sum(-1, true) + 1e-6).rsqrt()).to(x.scalar_type());
}

// One gate per token -> one gate per row: the gate of the first step of the token, 0 for its other steps.
Tensor gate_rows(const Tensor& g, int64_t n) {
  return at::constant_pad_nd(g.unsqueeze(-1), {0, n - 1}, 0).flatten(-2);
}

// The last of every n rows, at which the token is read.
Tensor read_rows(const Tensor& x, int64_t n) {
  return x.unflatten(-2, {x.size(-2) / n, n}).select(-2, n - 1);
}

// [B, count, H, ...] -> one [B * H, ...] per chunk
std::vector<Tensor> by_chunk(const Tensor& x) { return x.transpose(0, 1).flatten(1, 2).unbind(0); }

}  // namespace

Results forward(const Tensor& queries, const Tensor& keys, const Tensor& v_, const Tensor& beta_,
                const OptionalTensor& g_, const OptionalTensor& state_s, const OptionalTensor& state_position,
                const OptionalTensor& cu_seqlens, int64_t n, std::optional<double> scale, bool l2norm_qk,
                std::optional<int64_t> chunk, std::optional<std::string_view> between_chunks, bool save) {
  const auto p = Problem::check(queries, keys, v_, beta_, g_, state_s, state_position, cu_seqlens, n, scale,
                                l2norm_qk, chunk, between_chunks);
  const auto H = v_.size(2);
  const auto q_ = for_each_head(queries, H), k_ = for_each_head(keys, H);
  const auto B = q_.size(0), T = q_.size(1), HQ = q_.size(2), D = q_.size(3), V = v_.size(3);
  const auto type = accumulate_type(q_);
  const auto kept = p.saved(q_, beta_, g_, cu_seqlens, n, l2norm_qk, chunk, between_chunks, save);
  const auto new_kept = [&](const std::vector<c10::SymInt>& sizes, at::ScalarType of) {
    return at::empty(C10_AS_INTARRAYREF_SLOW_ALLOC(sizes), q_.options().dtype(of));
  };
  const auto states = new_kept(kept.states, kept.states_type),
             prepared = new_kept(kept.prepared, kept.prepared_type),
             transitions = new_kept(kept.transitions, at::kFloat);
  // With T = 1 a chunk is one row: the position of the token determines whether it completes the chunk of the
  // model.
  const bool single = between_chunks && T == 1 && !given(cu_seqlens);
  const Chunks chunks(q_, B, T, single ? 1 : chunk.value_or(exact_chunk(T, n)), cu_seqlens,
                      single ? std::nullopt : state_position,
                      between_chunks ? Chunks::Cut::at_start : Chunks::Cut::anywhere);
  const auto count = chunks.count(), C = chunks.length(), R = C * n;
  const auto S0 =
      given(state_s) ? *state_s : at::zeros({chunks.sequences(), H, D, V}, q_.options().dtype(type));
  Tensor complete;  // [B, count]
  OptionalTensor position;
  if (single) {
    const auto read = given(state_position) ? state_position->clamp(0, *chunk - 1) + 1
                                            : at::ones({B}, q_.options().dtype(at::kLong));
    complete = (read == *chunk).unsqueeze(1);
    position = read.remainder(*chunk);
  } else if (between_chunks) {
    complete = chunks.complete();
    position = chunks.next_position();
  }
  if (count == 0)
    return {at::zeros({B, T, HQ, V}, q_.options()), S0.clone(), position, states, prepared, transitions};

  auto q = chunks.split(q_, type), k = chunks.split(k_, type, n);
  if (l2norm_qk) {
    q = unit(q);
    k = unit(k);
  }
  q = q.view({B, count, H, HQ / H, C, D}) * scale.value_or(1 / std::sqrt(double(D)));
  auto beta = chunks.split(beta_, type, n);
  if (beta.dim() == 4) beta = beta.unsqueeze(-1);
  const auto b = beta * k, w = beta * chunks.split(v_, type, n);

  // Decays:
  //   decay       e^{L_r - L_r'} for r' <= r
  //   b_in, q_in  with the factor e^{L_r}
  //   k_out       with the factor e^{L_C - L_r}
  Tensor decay = at::ones({R, R}, q.options()).tril(), b_in = b, q_in = q, k_out = k;
  std::vector<Tensor> keep;
  if (given(g_)) {
    const auto g = gate_rows(chunks.split(*g_, type), n);
    const auto in = g.cumsum(-1).exp().unsqueeze(-1);
    decay = decay_matrix(g);
    b_in = b * in;
    q_in = q * read_rows(in, n).unsqueeze(3);
    k_out = k * sum_after(g, -1).exp().unsqueeze(-1);
    keep = by_chunk(in.narrow(-2, R - 1, 1));
  }

  // T = I + tril((B K^T) * e^{L_r - L_r'}, -1)
  // solved = T^-1 [W, e^{L} B]; the solver assumes a diagonal of ones
  const auto k_t = k.transpose(-1, -2);
  const auto solved = at::linalg_solve_triangular(b.matmul(k_t) * decay, at::cat({w, b_in}, -1),
                                                  /*upper=*/false, /*left=*/true,
                                                  /*unitriangular=*/true);
  const auto w_solved = by_chunk(solved.narrow(-1, 0, V)), b_solved = by_chunk(solved.narrow(-1, V, D));

  // U = T^-1 (W - e^{L} B S)
  // S <- e^{L_C} S + (K * e^{L_C - L})^T U
  // S <- phi(S) if the chunk is complete
  const auto k_rows = by_chunk(k_out.transpose(-1, -2));
  const auto closes = between_chunks ? complete.view({B, count, 1, 1, 1}).unbind(1) : std::vector<Tensor>();
  std::vector<Tensor> U;
  const auto scan = chunks.scan({S0}, [&](int64_t c, const Chunks::States& state) -> Chunks::States {
    const auto S = state[0].flatten(0, 1);
    U.push_back(at::baddbmm(w_solved[c], b_solved[c], S, 1, -1));
    const auto next = at::baddbmm(keep.empty() ? S : keep[c] * S, k_rows[c], U[c]).view({B, H, D, V});
    if (!between_chunks) return {next};
    return {at::where(closes[c], *between_chunks == "gelu" ? at::gelu(next) : next.tanh(), next)};
  });

  // O = e^{L} (Q S) + ((Q K^T) * e^{L_t - L_r'}, rows of tokens <= t) U
  const auto scores =
      q.flatten(3, 4).matmul(k_t).view({B, count, H, HQ / H, C, R}) * read_rows(decay, n).unsqueeze(-3);
  const auto o = q_in.flatten(3, 4).matmul(chunks.starts(scan, 0)) +
                 scores.flatten(3, 4).matmul(at::stack(U, 0).view({count, B, H, R, V}).transpose(0, 1));
  return {chunks.join(o.view({B, count, HQ, C, V}), q_.scalar_type()),
          scan.finals[0],
          position,
          states,
          prepared,
          transitions};
}

TORCH_LIBRARY_IMPL(girih, CPU, m) {
  m.impl("delta_product_forward", TORCH_FN(InFullPrecision<&forward>::call));
}
#ifndef GIRIH_WITH_CUDA  // with it, cuda.cpp serves CUDA tensors
TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  m.impl("delta_product_forward", TORCH_FN(InFullPrecision<&forward>::call));
}
#endif

}  // namespace girih::delta_product
